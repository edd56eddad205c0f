"""Shards within groups of ranks (``shard_within``): two groups of two, beside one of four and plain DDP."""

from __future__ import annotations

import copy
import socket
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import (
    CheckpointPolicy,
    ZeroPrecision,
    ZeroStrategy,
    full_gradients,
    full_parameters,
    grad_norm,
)
from lightning_zero.comm import Groups
from lightning_zero.comm.collectives import CollectiveCall
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import WorldError, run_world

WIDTH = 24
STEPS = 4
CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


class Net(pl.LightningModule):
    """Blocks, a tied weight, a batch norm; and a block that only the ranks of the second group use, if ``uneven``."""

    first = 2  # rank that uses all blocks

    def __init__(self, seed: int = 0, uneven: bool = False, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.uneven, self.kind = uneven, optimizer
        self.embedding = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * int(batch) + self.global_rank)
        tokens, targets = torch.randint(0, 37, (2, 8), generator=generator)
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if not (self.uneven and index == 1 and self.global_rank < self.first):
                x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)), targets)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            self.norms.append(float(grad_norm(self)))
        else:
            self.norms.append(
                float(torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]).norm())
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.01)
        if self.kind == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def whole(module: Net) -> dict[str, Tensor]:
    there = isinstance(module.trainer.strategy, ZeroStrategy)
    with full_parameters(module) if there else nullcontext():
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fit(stage: int, within: Any, module: Net, steps: int = STEPS, offload: Any = None, **options: Any) -> Net:
    if stage:
        # So that no stage has one bucket only.
        small: dict[str, Any] = {"units": ["Sequential"], "bucket_mib": 0.008, "offload": offload}
        strategy: Any = ZeroStrategy(stage=stage, shard_within=within, **small)  # type: ignore[arg-type]
    else:
        strategy = DDPStrategy(find_unused_parameters=True)
    with quiet():
        make_trainer(strategy, **options).fit(module, DataLoader(range(steps), batch_size=None))
    return module


def same(first: dict[str, Tensor], second: dict[str, Tensor], buffers: bool = True) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first if buffers or "norm" not in name)


def near(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 2e-6) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first)


@pytest.mark.parametrize(
    ("options", "uneven"),
    [({}, False), ({}, True), ({"accumulate_grad_batches": 2}, True), (CLIPPED, False), (CLIPPED, True)],
    ids=["plain", "uneven", "accumulated, uneven", "clipped", "clipped, uneven"],
)
def test_numbers_are_those_of_ddp(options: dict[str, Any], uneven: bool) -> None:
    """All ranks have one model, whatever their seeds; stages agree bit for bit, and with DDP but for rounding."""

    def run(rank: int) -> list[Any]:
        expected = fit(0, None, Net(uneven=uneven), **options)
        found = [fit(stage, 2, Net(seed=rank, uneven=uneven), **options) for stage in (1, 2, 3)]
        assert all(near(whole(module), whole(expected)) for module in found)
        assert same(whole(found[1]), whole(found[2]))
        if "accumulate_grad_batches" not in options:  # stage 1 adds micro-steps up before it averages
            assert same(whole(found[0]), whole(found[1]))
        for module in found:
            assert module.norms == pytest.approx(expected.norms, rel=1e-5)
        return [whole(module) for module in found]

    for others in zip(*run_world(4, run, timeout=180), strict=True):
        assert all(same(other, others[0], buffers=False) for other in others)


def test_other_precisions() -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        every = []
        for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
            flat, *found = (
                whole(fit(stage, within, Net(), plugins=ZeroPrecision(precision)))  # type: ignore[arg-type]
                for stage, within in ((3, None), (1, 2), (2, 2), (3, 2))
            )
            assert same(found[0], found[1]), precision
            assert same(found[1], found[2]), precision
            assert near(found[2], flat, 5e-2), precision
            every += found
        return every

    for others in zip(*run_world(4, run, timeout=120), strict=True):
        assert all(same(other, others[0], buffers=False) for other in others)


def test_an_optimizer_of_whole_parameters_and_writes() -> None:
    def run(rank: int) -> None:
        flat, grouped = (fit(3, within, Net(optimizer="adafactor")) for within in (None, 2))
        # Not biases: their gradients are 0 but for rounding, and an optimizer that divides by their size steps on that.
        expected = {name: value for name, value in whole(flat).items() if "blocks" in name and "bias" not in name}
        assert near(expected, whole(grouped), 1e-4)
        with full_parameters(grouped), torch.no_grad():
            for parameter in grouped.parameters():
                parameter.fill_(float(rank))  # rank 0's counts
        assert all(bool((value == 0).all()) for name, value in whole(grouped).items() if "norm" not in name)

    run_world(4, run, timeout=120)


class Looks(Net):
    """Has the whole gradients before a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self) if isinstance(self.trainer.strategy, ZeroStrategy) else nullcontext():
            self.seen = {name: p.grad.detach().clone() for name, p in self.named_parameters() if p.grad is not None}


def test_gradients_are_averages_of_all_ranks() -> None:
    def run(rank: int) -> None:
        expected = fit(0, None, Looks(), steps=2).seen
        for stage in (1, 2, 3):
            assert near(fit(stage, 2, Looks(), steps=2).seen, expected)

    run_world(4, run, timeout=120)


def test_checkpoints_go_in_and_out(tmp_path: Path) -> None:
    """A run that is resumed with other groups and another stage is the uninterrupted one."""

    def go_on(before: int, within: Any, after: int, then: Any) -> None:
        net = fit(before, within, Net(), steps=2)
        left, path = whole(net), tmp_path / f"{before} {within} {then}.ckpt"
        net.trainer.save_checkpoint(path)
        resumed = Net(seed=5)
        strategy = ZeroStrategy(stage=after, shard_within=then, units=["Sequential"])  # type: ignore[arg-type]
        with quiet():
            trainer = make_trainer(strategy, max_epochs=2)
            trainer.fit(resumed, DataLoader(range(2), batch_size=None), ckpt_path=path)
        unbroken = fit(before, within, Net(), steps=2, max_epochs=2)
        assert near(whole(resumed), whole(unbroken))
        loaded = Net(seed=6)
        policy = CheckpointPolicy(initial_weights=str(path))
        strategy = ZeroStrategy(stage=after, shard_within=then, units=["Sequential"], checkpoint=policy)  # type: ignore[arg-type]
        with quiet():
            make_trainer(strategy, max_steps=0).fit(loaded, DataLoader(range(1), batch_size=None))
        assert same({k: v for k, v in whole(loaded).items() if "norm" not in k}, left)

    def run(rank: int) -> None:
        for way in ((3, 2, 3, None), (3, None, 3, 2), (2, 2, 3, None), (1, None, 2, 2)):
            go_on(*way)

    run_world(4, run, timeout=180)


class Counts(pl.Callback):
    """Collectives of the last step, by kind: calls and bytes."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *called: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == STEPS - 2:
            trainer.strategy.engine.collectives.observers.append(self.count)  # type: ignore[attr-defined]

    def count(self, call: CollectiveCall) -> None:
        calls = self.found.setdefault(call.kind, [0, 0])
        calls[0] += 1
        calls[1] += call.nbytes


def test_shards_are_averaged_over_groups_once_in_a_step() -> None:
    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            counts = Counts()
            module = fit(stage, 2, Net(), callbacks=[counts], accumulate_grad_batches=2)
            expected = module.trainer.strategy.engine.plan.expected_traffic(micro_steps=2)  # type: ignore[attr-defined]
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                plan = getattr(expected, kind)
                assert counts.found[kind] == [plan.calls, plan.nbytes], (stage, kind)

    run_world(4, run, timeout=120)


class Waits(Net):
    """Its last block's gradient does not go on before the first average is over, in micro-steps before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[list[str]] = []
        self.averaged = Event()

    def on_train_start(self) -> None:
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
        engine.collectives.across.observers.append(self.note)
        self.buckets = len(engine.plan.trainable_layouts)
        self.blocks[0][0].weight.register_hook(self.wait)  # type: ignore[index]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append([])

    def note(self, call: CollectiveCall) -> None:
        if call.kind == "all_gather":
            self.events[-1].append("average")
            self.averaged.set()

    def wait(self, gradient: Tensor) -> None:
        if len(self.events) in (2, 4):
            assert self.averaged.wait(30), "no average while the backward runs"
        self.events[-1].append("gradient")
        self.averaged.clear()


def test_the_average_runs_beside_the_last_backward() -> None:
    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            module = Waits()
            fit(stage, 2, module, accumulate_grad_batches=2)
            for none, last in (module.events[:2], module.events[2:]):
                assert none == ["gradient"]
                assert last[0] == "average"
                assert sorted(last) == ["average"] * module.buckets + ["gradient"]

    run_world(4, run, timeout=120)


class Again(Net):
    """A block that gets gradients when it is averaged already; in ``uneven`` after one that only one group uses."""

    recomputes = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * int(batch) + self.global_rank)
        tokens, targets = torch.randint(0, 37, (2, 8), generator=generator)
        x = self.embedding(tokens)
        for index in (2, 0, 1, 2) if not self.uneven or self.global_rank >= 2 else (2, 0, 2):
            block = self.blocks[index]
            x = x + (checkpoint(block, x, use_reentrant=True) if self.recomputes and index == 2 else block(x))
        return F.cross_entropy(self.head(self.norm(x)), targets)


class Once(Again):
    recomputes = False


def test_gradients_after_the_average_of_their_block_are_averaged_too() -> None:
    def run(rank: int) -> None:
        for uneven in (False, True):
            expected = whole(fit(0, None, Once(uneven=uneven), accumulate_grad_batches=2))
            for stage in (1, 2, 3):
                found = fit(stage, 2, Again(uneven=uneven), accumulate_grad_batches=2)
                assert near(whole(found), expected), (stage, uneven)

    run_world(4, run, timeout=120)


class Steps(Net):
    """Steps by hand on gradients that were averaged in this rank's group only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """No norms: before the average, `grad_norm` is an error too."""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_before_groups_have_averaged_is_an_error(stage: int) -> None:
    with pytest.raises(WorldError, match="about to step between micro-steps"):
        run_world(4, lambda rank: fit(stage, 2, Steps(), steps=1), timeout=60)


class Fails(Net):
    """One rank of the second group fails, in the forward or, with averages under way, in the backward."""

    amid = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 3:
            if not self.amid:
                raise KeyError("mine")
            self.blocks[0][0].weight.register_hook(self.fail)  # type: ignore[index]
        return super().training_step(batch, batch_idx)

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("mine")


class FailsAmid(Fails):
    amid = True


@pytest.mark.parametrize(("stage", "net"), [(3, Fails), (1, FailsAmid), (3, FailsAmid)])
def test_an_error_of_one_rank_ends_all_of_all_groups(stage: int, net: type[Fails]) -> None:
    with pytest.raises(WorldError) as raised:
        run_world(4, lambda rank: fit(stage, 2, net()), timeout=60)
    failures = raised.value.failures
    assert failures.keys() == {0, 1, 2, 3}
    assert failures[3].type == "KeyError"
    assert all(failures[rank].message.startswith(f"Rank {rank}: ") for rank in range(3))


def test_what_cannot_be() -> None:
    for wrong in ("host", 0, 1, 2.5, True):
        with pytest.raises(ValueError, match="shard_within"):
            ZeroStrategy(shard_within=wrong)  # type: ignore[arg-type]
    with pytest.raises(WorldError, match="3 ranks cannot be split into groups of 2"):
        run_world(3, lambda rank: fit(3, 2, Net(), steps=1), timeout=60)

    def elsewhere(rank: int) -> None:
        socket.gethostname = lambda: f"node{rank % 2}"
        Groups.create(span=2).check_hosts()

    with pytest.raises(WorldError, match="ranks 0 to 1 are on the hosts node0, node1"):
        run_world(4, elsewhere, timeout=60)


def test_one_node_is_one_group() -> None:
    def run(rank: int) -> Any:
        module = fit(3, "node", Net())
        assert same(whole(module), whole(fit(3, None, copy.deepcopy(Net()))))
        return module.trainer.strategy.engine.collectives.across is not None  # type: ignore[attr-defined]

    assert run_world(2, run, timeout=60) == [False, False]
