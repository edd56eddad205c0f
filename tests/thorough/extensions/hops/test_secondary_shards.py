"""Weights that a host's ranks keep in parts until they change: numbers as without, and they cross hosts once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import (
    Compression,
    HostOffload,
    ZeroPrecision,
    ZeroStrategy,
    estimate_memory,
    full_parameters,
    local_slices,
)
from lightning_zero.comm import Exchange, Groups, Streams, choose_collectives
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.extensions.monitors import memory_stats
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import WorldError, run_world
from tests.world.strategy.test_shard_within import Net, same, whole

pytestmark = pytest.mark.usefixtures("one_host")

TWO_HOSTS = {RANKS_PER_HOST: "2"}


class Sent(pl.Callback):
    """Gathers that crossed hosts, by step, of each unit."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._calls: Counter[str] = Counter()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        between = trainer.strategy.engine.collectives._between  # type: ignore[attr-defined]
        between.observers.append(lambda call: self._calls.update([call.what] if call.kind == "all_gather" else []))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(self._calls.copy())
        self._calls.clear()


def fit(module: Net, kept: bool, strategy: dict[str, Any] | None = None, **options: Any) -> Net:
    zero3 = ZeroStrategy(stage=3, units=["Sequential"], secondary_shards=kept, **(strategy or {}))
    batches = DataLoader(range(options.pop("batches", 4)), batch_size=None)
    with quiet():
        make_trainer(zero3, **options).fit(module, batches, batches if options.get("limit_val_batches") else None)
    return module


def compare(make: Callable[[], Net], **options: Any) -> None:
    """Four ranks on two hosts that keep weights, beside those that do not."""

    def run(rank: int) -> dict[str, Tensor]:
        kept, plain = (fit(make(), kept, **options) for kept in (True, False))
        assert kept.trainer.strategy.engine.plan.placement.keeping == 2  # type: ignore[attr-defined]
        assert same(whole(kept), whole(plain))
        assert kept.norms == plain.norms
        return whole(kept)

    for others in zip(*[run_world(4, run, timeout=120, environment=TWO_HOSTS)], strict=True):
        assert all(same(other, others[0], buffers=False) for other in others)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"plugins": ZeroPrecision("bf16-mixed")},
        {"strategy": {"prefetch": 2, "compression": Compression(weights="int8", gradients="int8")}},
        {"strategy": {"offload": HostOffload(optimizer=True, parameters=True)}},
    ],
    ids=["plain", "accumulated and clipped", "bf16", "rounded", "offloaded"],
)
def test_numbers_are_those_without(options: dict[str, Any]) -> None:
    compare(Net, **options)


class Writes(Net):
    """Changes weights wherever users do: between steps in slices and in whole, for a validation."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            with full_parameters(self), torch.no_grad():
                self.blocks[0][1].weight.mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        for part in local_slices(self.blocks[1], write=True):
            part.value.clamp_(-0.05, 0.05)
        for part in local_slices(self.head, write=True):
            part.value.mul_(1.25)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norms.append(float(self.training_step(batch, batch_idx)))

    def on_validation_end(self) -> None:
        with full_parameters(self):
            self.blocks[2][1].bias.data.fill_(float(len(self.norms)))


def test_what_users_write_is_gathered_anew() -> None:
    compare(Writes, limit_val_batches=2, num_sanity_val_steps=2, val_check_interval=2)
    compare(Writes, limit_val_batches=1, accumulate_grad_batches=2)


class Manual(Net):
    """Two optimizers, of which each step changes weights between two backwards of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        one = list(self.blocks[0].parameters())
        rest = [p for p in self.parameters() if not any(p is other for other in one)]
        return torch.optim.SGD(one, lr=0.1), torch.optim.AdamW(rest, lr=0.01)


def test_two_optimizers_in_one_step() -> None:
    compare(Manual)


def test_weights_cross_once_a_step_and_rest_in_parts() -> None:
    def run(rank: int) -> None:
        crossed = {}
        for kept in (False, True):
            counter = Sent()
            net = fit(Net(), kept, batches=8, accumulate_grad_batches=4, callbacks=[counter])
            crossed[kept] = sum(counter.steps[4:], Counter())  # the second step
            engine = net.trainer.strategy.engine  # type: ignore[attr-defined]
            units = {f"parameters of unit '{unit.name}'" for unit in engine.units}
            assert set(crossed[kept]) == units
            weights = sum(la.numel // 2 * la.compute_dtype.itemsize for la in engine.plan.layouts) if kept else 0
            assert memory_stats(engine).device["weights"] == weights
            assert engine.plan.expected_memory().weights == weights
            settings: dict[str, Any] = {"world_size": 4, "hosts": 2, "units": ["Sequential"]}
            estimate = estimate_memory(Net(), secondary_shards=kept, **settings)
            assert estimate.stages["zero3"].rest.weights == weights
            assert estimate.stages["zero3"].peak.weights == weights
            assert sum(part.untyped_storage().nbytes() for part in engine.collectives.kept) == weights
        assert set(crossed[True].values()) == {1}
        assert max(crossed[False].values()) > 4

    run_world(4, run, timeout=120, environment=TWO_HOSTS)


class Frozen(Net):
    """Of which a part never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def test_what_does_not_change_never_crosses_again() -> None:
    def run(rank: int) -> None:
        counter = Sent()
        fit(Frozen(), True, batches=4, callbacks=[counter])
        assert all("parameters of unit 'blocks.1'" not in step for step in counter.steps[1:])
        assert all(step["parameters of unit 'blocks.2'"] == 1 for step in counter.steps)

    run_world(4, run, timeout=120, environment=TWO_HOSTS)


def test_a_world_of_one_host_keeps_nothing() -> None:
    def run(rank: int) -> None:
        net = fit(Net(), True)
        assert net.trainer.strategy.engine.plan.placement.keeping is None  # type: ignore[attr-defined]

    run_world(2, run)


def test_hosts_of_different_sizes_keep_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> tuple[int | None, str]:
        net = fit(Net(), True)
        return net.trainer.strategy.engine.plan.placement.keeping, caplog.text  # type: ignore[attr-defined]

    found = run_world(3, run, environment=TWO_HOSTS)
    assert [kept for kept, _ in found] == [None] * 3
    assert "secondary_shards does nothing" in found[0][1]


def test_ranks_with_different_settings_are_told() -> None:
    def run(rank: int) -> None:
        fit(Net(), kept=rank == 2)

    with pytest.raises(WorldError, match="Rank 2 has another exchange between hosts than rank 0") as raised:
        run_world(4, run, timeout=60, environment=TWO_HOSTS)
    assert len(raised.value.failures) == 4


def test_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="secondary_shards is for stage 3"):
        ZeroStrategy(stage=2, secondary_shards=True)
    with pytest.raises(ValueError, match="leave secondary_shards out"):
        ZeroStrategy(stage=3, secondary_shards=True, shard_within=2)
    with pytest.raises(ValueError, match="secondary_shards must be True or False, got 'node'"):
        ZeroStrategy(stage=3, secondary_shards="node")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="secondary_shards is for CPU and CUDA ranks, and these compute on meta"):
        choose_collectives(Groups.create(), Streams(torch.device("cpu")), torch.device("meta"), Exchange(None, True))
