"""Buffers under DDP and under every stage: what each rank computes with, logs and saves, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import CommunicationMonitor, ZeroStrategy, load_full_state_dict
from lightning_zero.engine import BufferBroadcast
from lightning_zero.plan.buckets import PIECE_NBYTES
from lightning_zero.plan.plan import CollectiveTraffic
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.cases import Block as Plain
from tests.helpers.runs import (
    STAGES,
    Memory,
    Net,
    again,
    assert_same,
    batches,
    each_strategy,
    fit,
    made,
    name_of,
    quiet,
    raised,
    zero,
)
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Block(Plain):
    """Keeps running statistics of what passes it."""

    def __init__(self, width: int = WIDTH, hidden: int = 28) -> None:
        super().__init__(width, hidden)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class Kept(Net):
    """Notes the buffers that every step computes with, and what validation finds."""

    def __init__(self, build: Callable[[], nn.Module] = lambda: Stack(Block(), Block())) -> None:
        super().__init__(build)
        self.seen: list[dict[str, Tensor]] = []
        self.found: list[Tensor] = []

    def note(self) -> None:
        self.seen.append(own_buffers(self))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note()
        x, y = self.data(batch_idx, epoch=77)
        loss = F.mse_loss(self(x), y)
        self.found.append(loss.detach().clone())
        self.log("val_loss", loss, sync_dist=True)


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's; of a large one the ends."""
    named = {name: buffer.detach() for name, buffer in module.named_buffers()}
    return {
        name: buffer.clone() if buffer.numel() < 10**6 else torch.cat([buffer[:3], buffer[-3:]])
        for name, buffer in named.items()
    }


def everything(module: Kept, trainer: pl.Trainer) -> dict[str, Any]:
    found = made(module, trainer)
    buffers = {name for name, _ in module.named_buffers()}
    found["weights"] = {name: value for name, value in found["weights"].items() if name not in buffers}
    logged = [row for logger in trainer.loggers for row in getattr(logger, "rows", ())]
    noted = {"seen": list(module.seen), "found": list(module.found)}
    return {**found, **noted, "own": own_buffers(module), "logged": logged}


# ---------------------------------------------------------------------------------------------------------------------
# What users keep in buffers


class Queue(Kept):
    """As MoCo does: negatives of earlier batches, in a queue with a pointer, read in the training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        x, y = self.data(batch_idx)
        keys = F.normalize(self(x), dim=1)
        loss = F.mse_loss(self(x), y) + (keys @ self.queue.clone()).logsumexp(dim=1).mean()
        start = int(self.pointer)
        self.queue[:, start : start + 3] = keys.detach().T
        self.pointer[0] = (start + 3) % 12
        self.losses.append(loss.detach().clone())
        return loss


class Assigned(Kept):
    """Buffers that are replaced by assignment, one of them for evaluation only, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.ema)
        self.ema = 0.9 * self.ema + 0.1 * loss.detach()
        self.flags = self.flags.logical_not() if self.global_rank else self.flags
        self.phase = torch.polar(torch.ones(3), self.ema * torch.arange(3.0))
        return loss


class Grows(Kept):
    """A memory that becomes longer in every step, and a buffer that is there in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, WIDTH))
        self.register_buffer("last", None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        x, y = self.data(batch_idx)
        out = self(x)
        loss = F.mse_loss(out, y) + (out @ self.memory.T).square().sum() / 100
        self.memory = torch.cat([self.memory, out.detach()])
        self.last = out.detach().mean(dim=0) if batch_idx % 2 else None
        self.losses.append(loss.detach().clone())
        return loss


class Mixed(Kept):
    """Whatever else there is: transposed, shared, empty, 0-dim, with a gradient; and one that DDP is told to leave."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["own"]
        self.register_buffer("own", torch.zeros(2))
        self.register_buffer("turned", torch.randn(4, 3).T)
        self.register_buffer("first", torch.zeros(6))
        self.register_buffer("same", self.first)
        self.register_buffer("part", self.first[2:4])
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("large", torch.zeros(PIECE_NBYTES // 4 + 1))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("learned", torch.zeros(3, requires_grad=True))
        self.first_object = self.first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for buffer in self.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer += self.global_rank + 1
        assert self.first_object is self.first
        assert self.same is self.first
        return loss + self.first.sum() * 0


class Resized(Kept):
    """A buffer of another size from the third step of an epoch on, made between two steps, and others on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.scales = self.scales * (1.5 + self.global_rank)
        return loss * self.scales.mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.scales = torch.linspace(1, 2 + self.global_rank, 2 * len(self.scales))


KINDS: dict[str, Callable[[], Kept]] = {
    "batch norm": Kept,
    "queue": Queue,
    "assigned": Assigned,
    "grows": Grows,
    "resized": Resized,
    "mixed": Mixed,
}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_rank_computes_with_what_it_has_under_ddp(accumulate: int) -> None:
    """With a sanity check, validation in the middle of an epoch and at its end, and steps of several micro-steps."""

    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for kind, make in KINDS.items():
            module = make()
            options = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": accumulate}
            inference = kind != "assigned"  # under DDP a buffer made in inference mode is an error in the next step
            options |= {"logger": Memory(), "log_every_n_steps": 1, "inference_mode": inference}
            trainer = fit(again(strategy), module, 5, 2, **options)
            found[kind] = everything(module, trainer)
        return found

    results = each_strategy(play)
    exact = [name for name in STAGES if accumulate == 1 or name == "stage 1"]
    assert_same(results, names=exact)
    assert_same(results, bound=1e-3)  # sharded gradients are averaged after every micro-step, and then added
    for found in results[0].values():
        for kind in KINDS:
            assert len(found[kind]["found"]) == 2 * (1 + 2), kind
    # Not trivially equal: each step leaves the ranks with other values, of which the next one sees rank 0's, unless it
    # is a later micro-step.
    first, second = (result["ddp"]["batch norm"] for result in results)
    name = "model.layers.0.batch_norm.running_mean"
    assert not torch.equal(first["own"][name], second["own"][name])
    equal = [torch.equal(a[name], b[name]) for a, b in zip(first["seen"], second["seen"], strict=True)]
    assert all(equal) == (accumulate == 1)


def test_three_ranks() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Queue()
        return everything(module, fit(strategy, module, 4, 2, max_epochs=2))

    results = each_strategy(play, world_size=3)
    assert_same(results, bound=1e-4)  # gloo's all-reduce of three ranks sums in another order
    zeroth, *others = (found["stage 3"]["seen"] for found in results)
    for seen in others:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(zeroth, seen, strict=True) for name in a)


def test_off_for_who_asks() -> None:
    """Not even at set-up, as under DDP: every rank has its own from the beginning."""

    class Own(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mine", torch.full((2 + dist.get_rank(),), float(dist.get_rank())))

    def play(strategy: Strategy) -> dict[str, Any]:
        name = name_of(strategy)
        settings = {"broadcast_buffers": False}
        own = zero(STAGES[name], **settings) if name in STAGES else DDPStrategy(find_unused_parameters=True, **settings)
        module = Own()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*deprecated.*")
            trainer = fit(own, module, 4, 2, max_epochs=2)
        found = everything(module, trainer)
        if name in STAGES:
            assert not own.engine.plan.buffers
            assert not own.engine.plan.expected_traffic().broadcast.calls
        return found

    results = each_strategy(play)
    assert_same(results)
    assert [found["stage 1"]["own"]["mine"].tolist() for found in results] == [[0.0] * 2, [1.0] * 3]


class ByHand(Kept):
    """Optimizes by hand, and on request with a second backward between the steps of the loop."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.between = between

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.note()
        x, y = self.data(batch_idx)
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.between and args[-1] % 2:
            self.manual_backward(F.mse_loss(self(self.data(args[-1])[0]), torch.zeros(3, WIDTH)))
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_manual_optimization() -> None:
    """Lightning has DDP send them before the first forward only, or after a backward outside of a step."""

    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for name, between, val in (("plain", False, 0), ("validated", False, 2), ("between", True, 0)):
            module = ByHand(between)
            found[name] = everything(module, fit(again(strategy), module, 5, val, max_epochs=2))
        return found

    assert_same(each_strategy(play))


def test_the_epoch_that_is_chosen_is_the_one_that_is_saved(tmp_path: Path) -> None:
    """EarlyStopping and top-k choose what they choose under DDP, and the saved model has the logged loss."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module, folder = Kept(), tmp_path / name_of(strategy)
        best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{epoch}")
        stop = EarlyStopping("val_loss", patience=1)
        options = {"callbacks": [best, stop], "enable_checkpointing": True, "max_epochs": 8, "num_sanity_val_steps": 0}
        trainer = fit(strategy, module, 4, 2, **options)
        chosen = Path(best.best_model_path)
        evaluated = Kept()
        states = {
            path.name: load_full_state_dict(path) if path.is_dir() else torch.load(path)["state_dict"]
            for path in sorted(map(Path, best.best_k_models))
        }
        evaluated.load_state_dict(states[chosen.name])
        with quiet():
            again_trainer = make_trainer(again(strategy))
            again_trainer.validate(evaluated, batches(2), verbose=False)
        return {
            "chosen": chosen.name,
            "kept": sorted(Path(path).name for path in best.best_k_models),
            "scores": [float(score) for score in best.best_k_models.values()],
            "stopped": stop.stopped_epoch,
            "score": float(best.best_model_score),
            "evaluated": float(again_trainer.callback_metrics["val_loss"]),
            "states": {name: dict(state) for name, state in states.items()},
            **everything(module, trainer),
        }

    results = each_strategy(play)
    assert_same(results)
    for found in results[0].values():
        assert found["evaluated"] == found["score"]


def test_evaluation_begins_with_rank_0_s(tmp_path: Path) -> None:
    """Also of a module that was fitted before, in the same Trainer and in another one."""

    class Marked(Kept):
        def on_fit_start(self) -> None:
            self.note()

        def on_validation_start(self) -> None:
            self.note()

    def play(strategy: Strategy) -> dict[str, Any]:
        module, found = Marked(), {}
        trainer = fit(strategy, module, 3, 2)
        with quiet():
            trainer.validate(module, batches(2), verbose=False)
            found["after"] = everything(module, trainer)
            module.seen.clear()
            for buffer in module.buffers():
                buffer += dist.get_rank()
            other = make_trainer(again(strategy))
            other.validate(module, batches(2), verbose=False)
            found["alone"] = everything(module, other)
            for buffer in module.buffers():
                buffer += dist.get_rank()
            third = fit(again(strategy), module, 3, 2)
            found["again"] = everything(module, third)
        return found

    results = each_strategy(play)
    assert_same(results)
    first, second = (result["stage 3"]["alone"]["seen"] for result in results)
    assert first
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


def test_what_ddp_stumbles_over() -> None:
    """Conjugates that are views, which DDP sends unconjugated, and tensors made in inference mode, which it refuses."""

    class Odd(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turned", torch.zeros(3, dtype=torch.complex64))
            self.register_buffer("made_in_validation", torch.zeros(2))
            self.register_buffer("large", torch.zeros(PIECE_NBYTES // 8, dtype=torch.complex64))

        def change(self, by: int) -> None:
            self.turned = torch.full((3,), complex(by, by + self.global_rank)).conj()
            self.made_in_validation = torch.full((2,), float(by + self.global_rank))
            self.large = torch.full_like(self.large, complex(by, by + self.global_rank)).conj()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx != 2:  # what validation made stays until a step has been sent it
                self.change(batch_idx + 1)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.change(batch_idx + 10)

    def run(rank: int) -> list[list[dict[str, Tensor]]]:
        found = []
        for stage in STAGES.values():
            module = Odd()
            with quiet():
                fit(zero(stage), module, 6, 1, val_check_interval=2, num_sanity_val_steps=0)
            found.append(module.seen)
        return found

    first, second = run_world(2, run)
    for ours, theirs in zip(first, second, strict=True):
        # Steps 1 and 2, validation, step 3 with what validation left, step 4, validation, ...
        equal = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(ours, theirs, strict=True)]
        assert equal == [True, True, True, False, True, True, False, True, True]
        values = [step["made_in_validation"][0].item() for step in ours]
        assert values == [0, 1, 2, 10, 10, 4, 10, 5, 6]


def test_mixed_precision() -> None:
    """Buffers stay float32 and are rank 0's. Sums of bf16 differ from DDP's by rounding."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Kept()
        return everything(module, fit(strategy, module, 4, 2, max_epochs=2, precision="bf16-mixed"))

    results = each_strategy(play)
    assert_same(results, expected="stage 1")
    for found in results:
        for step, ours in enumerate(found["stage 1"]["seen"]):
            for name, buffer in found["ddp"]["seen"][step].items():
                assert ours[name].dtype == buffer.dtype
                torch.testing.assert_close(ours[name], buffer, rtol=0.05, atol=0.02)
    ranks = [found["stage 3"]["seen"][3] for found in results]  # a step behind one that was averaged
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_a_graph_of_an_earlier_step_sees_the_new_values_or_fails_as_under_ddp() -> None:
    """Since torch 2.13 DDP hides from autograd what it writes to buffers; before, the second step is an error."""

    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))
            self.extra = nn.Parameter(torch.ones(WIDTH))
            self.kept: Tensor | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.kept is not None:
                loss = loss + self.kept
            self.kept = (self.extra * self.scale).sum()
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.scale.data.add_(1 + dist.get_rank())

    def play(strategy: Strategy) -> dict[str, Any]:
        if name_of(strategy) not in ("ddp", "stage 1", "stage 2"):
            return {}
        module, told = Late(), []
        with raised(told):
            return made(module, fit(strategy, module, 4))
        assert "modified by an inplace operation" in told[0]
        return {"losses": module.losses}

    assert_same(each_strategy(play), names=["stage 1", "stage 2"])


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def other_shape(module: pl.LightningModule) -> None:
    module.first = torch.zeros(5, 3)


def other_dtype(module: pl.LightningModule) -> None:
    module.first = torch.zeros(4, 3, dtype=torch.float64)


def one_more(module: pl.LightningModule) -> None:
    module.register_buffer("zzz", torch.zeros(4))


def one_less(module: pl.LightningModule) -> None:
    module.first = None


PLACES = ("setup", "step", "hook", "validation")
CHANGES = {
    "shape": (other_shape, ("buffer 'first': float32 of shape (4, 3)", "buffer 'first': float32 of shape (5, 3)")),
    "dtype": (other_dtype, ("buffer 'first': float32 of shape (4, 3)", "buffer 'first': float64 of shape (4, 3)")),
    "more": (one_more, ("buffer 'zzz': float32 of shape (4,)", "(nothing more)")),
    "less": (one_less, ("buffer 'first': float32 of shape (4, 3)", "buffer 'second': int64 of shape (2,)")),
}


class Changes(Net):
    """Changes a buffer on one rank only, in a hook or in a step, or before the fit begins."""

    def __init__(self, rank: int, when: str, change: Callable[[pl.LightningModule], None]) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(4, 3))
        self.register_buffer("second", torch.zeros(2, dtype=torch.long))
        self.rank, self.when, self.change = rank, when, change
        self.now("setup")

    def now(self, when: str) -> None:
        if when == self.when and dist.get_rank() == self.rank:
            self.change(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.now("step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.now("hook")

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.now("validation")


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_change_on_one_rank_is_an_error_on_all(shared_memory: str) -> None:
    """In any place, on either rank: in stage 1 on one of them, and in stage 3 on the other."""
    rows = [(when, rank, name) for when in PLACES for rank in (0, 1) for name in CHANGES]

    def run(own: int) -> list[list[str]]:
        told: list[list[str]] = []
        for when, rank, name in rows:
            told.append([])
            with quiet(), raised(told[-1]):
                fit(zero(1 if rank == int(shared_memory) else 3), Changes(rank, when, CHANGES[name][0]), 3, 1)
        return told

    environment = {"LIGHTNING_ZERO_SHARED_MEMORY": shared_memory}
    for told in run_world(2, run, timeout=240, environment=environment):
        for row, messages in zip(rows, told, strict=True):
            _, rank, name = row
            assert len(messages) == 1, row
            before, after = CHANGES[name][1] if name != "more" else CHANGES[name][1][::-1]
            lines = [before, after] if rank else [after, before]
            assert messages[0].startswith("DivergenceError: Rank 1 has another set of buffers than rank 0"), row
            for words in (f"rank 0: {lines[0]}\n", f"rank 1: {lines[1]}\n", "broadcast_buffers=False"):
                assert words in messages[0], (row, messages[0])


def test_settings_that_differ_are_an_error_on_all() -> None:
    def run(rank: int) -> list[str]:
        told: list[str] = []
        with quiet(), raised(told):
            fit(zero(1, broadcast_buffers=rank == 0), Kept(), 2)
        return told

    for (message,) in run_world(2, run):
        assert message.startswith("DivergenceError: Rank 1 has another set of buffers")
        assert "rank 0: broadcast_buffers=True" in message
        assert "rank 1: broadcast_buffers=False" in message


def test_only_true_and_false_are_settings() -> None:
    with pytest.raises(ValueError, match="broadcast_buffers must be True or False, got 'no'"):
        ZeroStrategy(broadcast_buffers="no")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


class Counted(pl.Callback):
    """Broadcasts by step: of steps that are trained, and of validations."""

    def __init__(self) -> None:
        self.steps: list[CollectiveTraffic] = []
        self.validations: list[CollectiveTraffic] = []
        self._now = self.steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def note(call: Any) -> None:
            if call.kind == "broadcast":
                self._now[-1] += CollectiveTraffic(1, call.numel, call.nbytes)

        trainer.strategy.engine.collectives.observers.append(note)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._now = self.steps
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.steps.append(CollectiveTraffic())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._now = self.validations
        self.validations.append(CollectiveTraffic())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_plan_knows_what_is_sent_and_so_does_the_monitor(accumulate: int) -> None:
    def run(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stage, make in ((1, Kept), (2, Mixed), (3, Kept), (1, Net)):
            counted, memory = Counted(), Memory()
            callbacks = [counted, CommunicationMonitor(every_n_steps=1)]
            options = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "callbacks": callbacks}
            with quiet():  # a step that differs from the plan is warned of
                warnings.filterwarnings("error", ".*CommunicationMonitor.*")
                options |= {"num_sanity_val_steps": 0, "logger": memory}
                trainer = fit(zero(stage), make(), 4 * accumulate, 2, **options)
            expected = trainer.strategy.engine.plan.expected_traffic(micro_steps=accumulate)
            rows = [row for _, row in memory.rows if "zero/traffic/all_gather/calls" in row]
            found[f"stage {stage}, {make.__name__}"] = (
                expected.broadcast,
                counted.steps,
                counted.validations,
                [row.get("zero/traffic/broadcast/ratio") for row in rows],
            )
        return found

    for result in run_world(2, run, timeout=200):
        for name, (expected, steps, validations, ratios) in result.items():
            none = CollectiveTraffic()
            if name.endswith("Net"):
                assert {expected, *steps} == {none}, name
                assert set(ratios) == {None}, name
                continue
            assert expected.nbytes > 0, name
            assert expected.calls == (2 if name.endswith("Mixed") else 1), name
            # In the second epoch the first step begins with what the validation was sent.
            assert steps == [*[expected] * 4, none, *[expected] * 3], name
            assert validations == [expected] * 2, name
            assert ratios == [1.0] * 2 + [0.0] + [1.0] * 3, name  # from the third step on


def test_a_model_without_buffers_and_a_rank_alone_pay_nothing() -> None:
    def run(rank: int) -> int:
        module, counted = Net(), Counted()
        with quiet():
            trainer = fit(zero(1), module, 4, callbacks=[counted])
        control = trainer.strategy.engine.control
        buffers = trainer.strategy.session._buffers
        assert isinstance(buffers, BufferBroadcast)
        before = control.shortcut.__self__.exchanges if control.shortcut is not None else 0
        for _ in range(3):
            buffers.before_forward("training_step", training=True)
            buffers.after_forward(averaged=True)
        return (control.shortcut.__self__.exchanges if control.shortcut is not None else 0) - before

    for world_size in (1, 2):
        assert run_world(world_size, run) == [0] * world_size
