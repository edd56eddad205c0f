"""Convergence of optimizers: bits per byte of the README's language model on held-out files, and bytes of their state.

    python benchmarks/optimizers.py                  # four optimizers, three seeds: an hour and more on two cores
    python benchmarks/optimizers.py --optimizers adamw adamw8bit --seeds 1

Each run is ``examples/language_model.py fit --config configs/zero3.yaml`` with another optimizer and seed. All have its
learning rate, weight decay and warm-up. ``muon`` has ``adjust_lr_fn="match_rms_adamw"`` so that AdamW's rate suits it;
embedding, head and norms are AdamW's. ``schedulefree`` (``pip install schedulefree``) has no cosine. A row is written
when its run ends, and a run that was written is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import results
import torch
from lightning.pytorch import Callback, Trainer
from offload_training import quiet
from torch import Tensor, nn

from lightning_zero import AdamW8bit, full_optimizer_state, full_parameters

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from language_model import ByteGPT, LanguageModelCLI, SourceText  # noqa: E402

BETAS = (0.9, 0.95)
KEY = ("optimizer", "seed", "steps")


def schedule(model: ByteGPT) -> tuple[list[dict[str, Any]], Callable[[int], float]]:
    """The groups of the example's optimizer, and the factor of its learning rate by step."""
    example = ByteGPT.configure_optimizers(model)
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in example["optimizer"].param_groups]
    return groups, example["lr_scheduler"]["scheduler"].lr_lambdas[0]


class EightBitGPT(ByteGPT):
    """With both of AdamW's moments in 8 bits."""

    def configure_optimizers(self) -> dict[str, Any]:
        """As the example's."""
        groups, factor = schedule(self)
        optimizer = AdamW8bit(groups, lr=self.learning_rate, betas=BETAS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MuonGPT(ByteGPT):
    """With Muon for the blocks' matrices and AdamW for the rest: two optimizers, so the steps are its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        """Both follow the example's schedule."""
        groups, factor = schedule(self)
        muon = [p for p in self.blocks.parameters() if p.ndim == 2]
        chosen = set(map(id, muon))
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
        optimizers = [
            torch.optim.Muon(
                muon, lr=self.learning_rate, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(groups, lr=self.learning_rate, betas=BETAS),
        ]
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(one, factor) for one in optimizers]

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Forward, backward, clipping, and both steps."""
        loss = super().training_step(windows, batch_idx)
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        for one in chain(optimizers, schedulers):
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss


class ScheduleFreeGPT(ByteGPT):
    """With schedule-free AdamW, which validates with an average of the weights.

    Its own ``train()`` and ``eval()`` read state that another rank may hold, which is an error; here is what they do.
    """

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The example's rate and warm-up; no scheduler."""
        import schedulefree

        groups, _ = schedule(self)
        return schedulefree.AdamWScheduleFree(
            groups, lr=self.learning_rate, betas=BETAS, warmup_steps=self.warmup_steps
        )

    def on_train_start(self) -> None:
        """As ``optimizer.train()``."""
        self._move(1 - BETAS[0], training=True)

    on_validation_end = on_train_start

    def on_validation_start(self) -> None:
        """As ``optimizer.eval()``."""
        self._move(1 - 1 / BETAS[0], training=False)

    def _move(self, weight: float, *, training: bool) -> None:
        """Collective: every rank."""
        groups = self.optimizers().param_groups
        if groups[0]["train_mode"] is not training and self.trainer.global_step:
            with full_parameters(self), torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.lerp_(full_optimizer_state(self, name, "z"), weight)
        for group in groups:
            group["train_mode"] = training


MODELS: dict[str, type[ByteGPT]] = {
    "adamw": ByteGPT,
    "adamw8bit": EightBitGPT,
    "muon": MuonGPT,
    "schedulefree": ScheduleFreeGPT,
}


class StateBytes(Callback):
    """Counts what the optimizers of all ranks hold when the training ends."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Collective: every rank."""
        states = [state for one in trainer.optimizers for state in trainer.strategy.adapter(one).state.values()]
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for state in states
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        }
        held = torch.tensor(float(sum(storages.values())), dtype=torch.float64)
        self.nbytes = float(trainer.strategy.reduce(held, reduce_op="sum"))


def train(name: str, seed: int, steps: int, out: Path, more: list[str]) -> None:
    """One training, in this process and the one that its Trainer starts."""
    quiet()
    state = StateBytes()
    arguments = [
        *("fit", "--config", str(ROOT / "configs/zero3.yaml"), f"--seed_everything={seed}", "--report.length=0"),
        *("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.callbacks=null"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    ]
    # Not --trainer.max_steps: with two optimizers Lightning counts the steps of both.
    arguments += ["--trainer.max_steps=-1", "--trainer.max_epochs=1", f"--trainer.limit_train_batches={steps}"]
    if name == "muon":  # its training_step clips
        arguments += ["--trainer.gradient_clip_val=null"]
    cli = LanguageModelCLI(
        MODELS[name],
        SourceText,
        seed_everything_default=1234,
        auto_configure_optimizers=False,
        args=[*arguments, *more],
        trainer_defaults={"callbacks": [state]},
        save_config_callback=None,
    )
    if cli.trainer.is_global_zero:
        numel = sum(p.numel() for p in cli.model.parameters())
        case = {
            "optimizer": name,
            "seed": seed,
            "bits_per_byte": round(float(cli.trainer.callback_metrics["val/bits_per_byte"]), 4),
            "state_bytes_per_parameter": round(state.nbytes / numel, 3),
            "steps": steps,
            "run": {**results.circumstances(), "command": f"python optimizers.py --optimizers {name} --seeds {seed}"},
        }
        results.save(out, [case], KEY)


def done(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that have ended."""
    return results.load(options.out) if options.out.exists() else []


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: a row for each optimizer."""
    seeds = list(dict.fromkeys(case["seed"] for case in cases))
    lines = [
        "| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | state |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for name in MODELS:
        found = {case["seed"]: case for case in cases if case["optimizer"] == name}
        if found:
            bits = [f"{found[seed]['bits_per_byte']:.3f}" if seed in found else "" for seed in seeds]
            mean = statistics.mean(case["bits_per_byte"] for case in found.values())
            state = next(iter(found.values()))["state_bytes_per_parameter"]
            lines.append(f"| {name} | {' | '.join(bits)} | {mean:.3f} | {state:.2f} |")
    return lines


def main() -> None:
    """Run what was not run before, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=results.FOLDER / "optimizers.json")
    parser.add_argument("--train", action="store_true", help="one run, in this process")
    parser.add_argument("more", nargs="*", help="after --, options of the example, such as --model.dim=32")
    options = parser.parse_args()
    if options.train:
        train(options.optimizers[0], options.seeds[0], options.steps, options.out, options.more)
        return
    for seed in options.seeds:
        for name in options.optimizers:
            if (name, seed, options.steps) not in {tuple(case[part] for part in KEY) for case in done(options)}:
                print(f"{name}, seed {seed}", flush=True)
                arguments = ["--train", f"--optimizers={name}", f"--seeds={seed}", f"--steps={options.steps}"]
                arguments += [f"--out={options.out}", "--", *options.more]
                subprocess.run([sys.executable, __file__, *arguments], check=True)
    print("\n".join(table([case for case in done(options) if case["steps"] == options.steps])))


if __name__ == "__main__":
    main()
