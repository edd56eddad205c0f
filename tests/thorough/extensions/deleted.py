"""The package without one of its extensions: ``python deleted.py FOLDER NAME...``.

For each name: a copy of the package, the extension deleted from it, and a process that imports this copy, trains, saves
and resumes at two ranks, and asks for what is missing. ``FOLDER/NAME.json`` has what came of it. Torch and Lightning
are imported once, the package in each of the processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

STEPS = 2


class Small(pl.LightningModule):
    """What is trained."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=2)


def fit(strategy: Any, steps: int = STEPS, ckpt_path: str | None = None, **others: Any) -> tuple[Any, Small]:
    """Train the model for so many steps on two ranks."""
    module = Small(**others.pop("model", {}))
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, enable_checkpointing=False, **silent, **others
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def trains(folder: Path) -> str:
    """Train, save and resume in two stages."""
    for stage in (1, 3):
        path = str(folder / f"stage{stage}.ckpt")
        trainer, _ = fit(f"zero{stage}")
        trainer.save_checkpoint(path)
        trainer, _ = fit(f"zero{stage}", 2 * STEPS, path)
        if trainer.global_step != 2 * STEPS:
            raise RuntimeError(f"zero{stage} ended at step {trainer.global_step}")
    return "trained"


def nvme(folder: Path) -> None:
    from lightning_zero import NvmeOffload, ZeroStrategy

    fit(ZeroStrategy(3, offload=NvmeOffload(str(folder))))


def compression(folder: Path) -> None:
    from lightning_zero import Compression, ZeroStrategy

    fit(ZeroStrategy(3, compression=Compression(weights="int8")))


def tensor_parallel(folder: Path) -> None:
    from lightning_zero import ZeroStrategy

    fit(ZeroStrategy(3, tensor_parallel_size=2))


def partitioned_activations(folder: Path) -> None:
    from lightning_zero import ActivationPolicy, ZeroStrategy

    fit(ZeroStrategy(3, activations=ActivationPolicy("units", partition=True)))


def shared_memory(folder: Path) -> None:
    os.environ["LIGHTNING_ZERO_SHARED_MEMORY"] = "1"
    fit("zero3")


def hops(folder: Path) -> None:
    from lightning_zero import ZeroStrategy

    fit(ZeroStrategy(3, secondary_shards=True))


def planner(folder: Path) -> None:
    from lightning_zero.cli import main

    main(["plan", "--help"])


def doctor(folder: Path) -> None:
    from lightning_zero.cli import main

    main(["doctor", "--help"])


def tune(folder: Path) -> None:
    from lightning_zero.cli import main

    main(["tune", "--help"])


def monitors(folder: Path) -> None:
    from lightning_zero import MemoryMonitor

    MemoryMonitor()


def formats(folder: Path) -> None:
    """Checkpoint files are made of our own checkpoints without it; what other programs lay out asks for it."""
    from lightning_zero import CheckpointPolicy, ZeroStrategy, consolidate_checkpoint, load_full_state_dict
    from lightning_zero.errors import ExtensionError

    own, here = folder / "stage3.ckpt", folder / f"rank{os.environ['LOCAL_RANK']}"
    (file,) = consolidate_checkpoint(own, here / "out.ckpt")
    if load_full_state_dict(file).keys() != load_full_state_dict(own).keys():
        raise RuntimeError(f"{file} is not whole")
    (folder / "deepspeed").mkdir(exist_ok=True)
    (folder / "deepspeed" / "latest").write_text("step1")
    for word, ask in (
        ("DeepSpeed", lambda: load_full_state_dict(folder / "deepspeed")),
        ("safetensors", lambda: consolidate_checkpoint(own, here / "out.safetensors")),
    ):
        try:
            ask()
        except ExtensionError as error:
            if word not in str(error):
                raise RuntimeError(f"'{word}' is not in: {error}") from error
        else:
            raise RuntimeError(f"{word} works")
    (folder / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"net.0.weight": "a.safetensors"}}'
    )
    fit(ZeroStrategy(3, checkpoint=CheckpointPolicy(initial_weights=str(folder))))


def random_state(folder: Path) -> None:
    from lightning_zero import ZeroStrategy

    fit(ZeroStrategy(1), 3 * STEPS, str(folder.parent / "stage1.ckpt"))


def closures(folder: Path) -> None:
    fit("zero1", model={"optimizer": torch.optim.LBFGS})


def eight_bit(folder: Path) -> None:
    from lightning_zero import AdamW8bit

    fit("zero1", model={"optimizer": AdamW8bit})


def ray(folder: Path) -> None:
    from lightning_zero.ray import RayZeroStrategy

    RayZeroStrategy(stage=3)


def watch(folder: Path) -> None:
    from lightning_zero.comm.control import raise_failure

    raise_failure("a collective", 0, RuntimeError("connection reset"))


def inspection(folder: Path) -> None:
    from lightning_zero import verify_checkpoint

    verify_checkpoint(str(folder))


def asked(name: str, folder: Path) -> str:
    """What asking for a missing extension raises."""
    try:
        globals()[name](folder)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without(name: str, folder: Path) -> dict[str, Any]:
    """Import the package without an extension, and use it."""
    from tests.helpers.world import run_world

    def both(rank: int) -> tuple[str, str]:
        return trains(folder), asked(name, folder)

    first, second = run_world(2, both, init_group=False, timeout=90.0)
    return {"trained": first[0], "asked": [first[1], second[1]]}


def main(folder: Path, names: list[str]) -> None:
    """One process for each of the names, one after the other, and one before them for the whole package."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pid = os.fork()
    if pid == 0:
        sys.path.append(str(ROOT))
        from tests.helpers.world import run_world

        run_world(2, lambda rank: trains(folder), init_group=False, timeout=90.0)
        os._exit(0)
    os.waitpid(pid, 0)
    for name in names:
        copy = folder / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "lightning_zero", copy / "lightning_zero", ignore=ignored)
        gone = copy / "lightning_zero" / "extensions" / name
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.with_suffix(".py").unlink()
        pid = os.fork()
        if pid == 0:
            try:
                sys.path.insert(0, str(copy))
                sys.path.append(str(ROOT))
                result = without(name, copy)
                import lightning_zero

                result["from"] = lightning_zero.__file__
            except BaseException:
                result = {"error": traceback.format_exc()}
            (folder / f"{name}.json").write_text(json.dumps(result))
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
