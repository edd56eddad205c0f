"""Offload with shards within groups of ranks (``shard_within``): the same bits as without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import (
    CheckpointPolicy,
    Compression,
    HostOffload,
    LoaderPolicy,
    NvmeOffload,
    ZeroPrecision,
    ZeroStrategy,
    full_parameters,
)
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.config import Offload
from lightning_zero.optim.gradients import LossScaler
from tests.helpers.training import make_trainer, quiet
from tests.helpers.wires import residuals_of
from tests.helpers.world import WorldError, run_world
from tests.thorough.offload.test_offload_liveness import Breaking
from tests.thorough.races.simulated import simulated_device
from tests.thorough.races.trace import find_races
from tests.world.strategy.test_shard_within import Again, Net, fit, near, same, whole

pytestmark = pytest.mark.usefixtures("one_host")

TWO_HOSTS = {RANKS_PER_HOST: "2"}
NARROW: Any = {"reduce_dtype": "bfloat16"}


def policies(path: Path | None, half: int | None = None) -> Iterator[tuple[int, Offload]]:
    """Each stage with what it can offload; without a ``path`` not to files.

    ``half``: one of two halves of these, each of which has every stage, host and files, and both in stage 3.
    """
    for stage in (1, 2, 3):
        for parameters in (False, True)[: 2 if stage == 3 else 1]:
            if half is None or (stage + parameters) % 2 == half:
                yield stage, HostOffload(parameters=parameters)
            if path is not None and (half is None or (stage + parameters) % 2 != half):
                yield stage, NvmeOffload(path=str(path), buffer_mib=1, parameters=parameters)


def same_as_without(
    path: Path | None, make: Callable[[], Net], precision: Any = None, half: int | None = None, **options: Any
) -> list[Any]:
    """Of each stage without offload, weights and norms; and that no offload changes any. Collective."""

    def train(stage: int, offload: Offload | None = None) -> tuple[dict[str, Tensor], list[float]]:
        plugins = {} if precision is None else {"plugins": precision()}
        module = fit(stage, 2, make(), offload=offload, **options, **plugins)
        return whole(module), [norm for norm in module.norms if norm == norm]

    expected = {stage: train(stage) for stage in (1, 2, 3)}
    for stage, offload in policies(path, half):
        weights, norms = train(stage, offload)
        assert same(weights, expected[stage][0]), f"stage {stage}, {offload}"
        assert norms == expected[stage][1], f"stage {stage}, {offload}"
    return [*expected.values()]


def folder_of(path: Path) -> Path:
    found = path / "files"
    found.mkdir(exist_ok=True)
    return found


CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "steps": 7}


@pytest.mark.parametrize(
    ("options", "uneven", "half", "environment"),
    [({}, False, 0, {}), (CLIPPED, False, 1, TWO_HOSTS), (CLIPPED, True, None, {})],
    ids=["plain", "accumulated and clipped, on two hosts", "accumulated and clipped, uneven"],
)
def test_no_bit_changes(
    options: dict[str, Any], uneven: bool, half: int | None, environment: dict[str, str], tmp_path: Path
) -> None:
    """Neither of weights nor of norms; and they are DDP's but for rounding."""
    files = folder_of(tmp_path)

    def run(rank: int) -> list[Any]:
        found = same_as_without(files, lambda: Net(uneven=uneven), half=half, **options)
        expected = whole(fit(0, None, Net(uneven=uneven), **options))
        assert all(near(weights, expected) for weights, _ in found)
        return found

    for others in zip(*run_world(4, run, timeout=180, environment=environment), strict=True):
        assert all(same(other, others[0][0], buffers=False) for other, _ in others)
    assert not list(files.iterdir())


def test_other_precisions(tmp_path: Path) -> None:
    """Of 16-mixed the other half is below, with steps that overflow."""
    files = folder_of(tmp_path)
    rows = [("bf16-mixed", {}, 0), ("16-mixed", {}, 0), ("bf16-true", {}, 1), ("bf16-mixed", NARROW, 1)]

    def run(rank: int) -> None:
        for name, more, half in rows:
            make = lambda name=name, more=more: ZeroPrecision(name, **more)  # noqa: E731
            same_as_without(files, lambda: Net(optimizer="adamw"), make, half, accumulate_grad_batches=2)

    run_world(4, run, timeout=240)


class Overflows(Net):
    """A gradient of one rank of the second group is infinite in the second step, so that no rank takes it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 3 else loss


def test_steps_whose_gradients_overflow_are_skipped(tmp_path: Path) -> None:
    files = folder_of(tmp_path)

    def run(rank: int) -> list[Any]:
        found = same_as_without(
            files, Overflows, lambda: ZeroPrecision("16-mixed", scaler=LossScaler(init_scale=64.0)), half=1
        )
        for weights, norms in found:
            assert all(bool(value.isfinite().all()) for name, value in weights.items() if "norm" not in name)
            assert len([norm for norm in norms if norm < float("inf")]) == 3
        return found

    for others in zip(*run_world(4, run, timeout=120), strict=True):
        assert all(same(other, others[0][0], buffers=False) for other, _ in others)


def test_gradients_after_the_average_of_their_block(tmp_path: Path) -> None:
    files = folder_of(tmp_path)

    def run(rank: int) -> None:
        same_as_without(files, Again, half=0, accumulate_grad_batches=2)
        same_as_without(files, lambda: Again(uneven=True), half=1, accumulate_grad_batches=2)

    run_world(4, run, timeout=240)


def test_whole_parameters_of_an_optimizer_and_loaders_that_end_earlier(tmp_path: Path) -> None:
    """And writes to parameters at the end, of which rank 0's count."""
    files = folder_of(tmp_path)

    def train(rank: int, stage: Any, offload: Offload | None) -> dict[str, Tensor]:
        module, policy = Net(optimizer="adamw"), LoaderPolicy(training="stop")
        strategy = ZeroStrategy(stage, units=["Sequential"], shard_within=2, offload=offload, loaders=policy)
        with quiet():
            make_trainer(strategy).fit(module, DataLoader(range(4 - rank // 2), batch_size=None))  # type: ignore[arg-type]
        return whole(module)

    def run(rank: int) -> None:
        expected = whole(fit(3, 2, Net(optimizer="adafactor")))
        for parameters in (False, True):
            found = fit(3, 2, Net(optimizer="adafactor"), offload=HostOffload(parameters=parameters))
            assert same(whole(found), expected)
            with full_parameters(found), torch.no_grad():
                for parameter in found.parameters():
                    parameter.fill_(float(rank))
            assert all(bool((value == 0).all()) for name, value in whole(found).items() if "norm" not in name)
        stopped = {stage: train(rank, stage, None) for stage in (1, 2, 3)}
        for stage, offload in policies(files, 1):
            assert same(train(rank, stage, offload), stopped[stage]), f"stage {stage}, {offload}"

    run_world(4, run, timeout=240)


LAYOUTS: list[tuple[int, Any, bool]] = [(1, 2, True), (3, 2, True), (2, 2, False), (3, None, True), (3, None, False)]
"""Of a run: the stage, ``shard_within``, and whether it offloads."""
GO_ON: dict[int, tuple[int, ...]] = {0: (0, 1, 2, 4), 1: (0, 1, 3), 2: (0,), 3: (1,), 4: (1,)}
"""By layout that has saved, those that go on from that: out of groups that offload to every other, and in from each."""


def test_checkpoints_go_in_and_out(tmp_path: Path) -> None:
    """From groups that offload to every layout, and from every layout to them; also as initial weights."""
    files, paths = folder_of(tmp_path), [tmp_path / f"{number}.ckpt" for number in range(len(LAYOUTS))]

    def strategy(layout: tuple[int, Any, bool], **settings: Any) -> ZeroStrategy:
        stage, within, offloads = layout
        offload = NvmeOffload(path=str(files), buffer_mib=1, parameters=stage == 3) if offloads else None
        return ZeroStrategy(stage, shard_within=within, offload=offload, units=["Sequential"], **settings)  # type: ignore[arg-type]

    def train(layout: tuple[int, Any, bool], epochs: int, ckpt_path: Path | None = None, seed: int = 0) -> Net:
        net = Net(seed=seed, optimizer="adamw")
        with quiet():
            trainer = make_trainer(strategy(layout), max_epochs=epochs)
            trainer.fit(net, DataLoader(range(2), batch_size=None), ckpt_path=ckpt_path)  # type: ignore[arg-type]
        return net

    def exact(net: Net) -> dict[str, Tensor]:
        """Not biases before a norm: their gradients are 0 but for rounding, which Adam makes a step of."""
        return {name: value for name, value in whole(net).items() if "norm" not in name and "bias" not in name}

    def load(layout: tuple[int, Any, bool], path: Path) -> dict[str, Tensor]:
        loaded, policy = Net(seed=7), CheckpointPolicy(initial_weights=str(path))
        with quiet():
            trainer = make_trainer(strategy(layout, checkpoint=policy), max_steps=0)
            trainer.fit(loaded, DataLoader(range(1), batch_size=None))  # type: ignore[arg-type]
        return exact(loaded)

    def run(rank: int) -> None:
        left = []
        for layout, path in zip(LAYOUTS, paths, strict=True):
            saved = train(layout, 1)
            saved.trainer.save_checkpoint(path)
            left.append(exact(saved))
        unbroken = [exact(train(layout, 2)) for layout in LAYOUTS[:2]]
        for before, path in enumerate(paths):
            for layout in GO_ON[before]:
                found = exact(train(LAYOUTS[layout], 2, path, seed=5))
                assert near(found, unbroken[before if before < 2 else layout], 1e-4), (before, layout)
        for layout, path, weights in zip(LAYOUTS[:2], paths, left, strict=False):
            assert same(load(layout, path), weights)

    def fewer(rank: int) -> list[dict[str, Tensor]]:
        """Two ranks, each with a half of the batches: other numbers, so only what was saved is compared."""
        found = [load((3, None, True), path) for path in paths[:2]]
        for path in paths[:2]:
            train((3, None, True), 2, path, seed=5)
        return found

    run_world(4, run, timeout=240)
    for first, second in zip(*run_world(2, fewer, timeout=60), strict=True):
        assert same(first, second)
    assert not list(files.iterdir())


def test_rounded_gradients(tmp_path: Path) -> None:
    """What is rounded is the same average, in the same place: no bit changes, and what feedback keeps is the same."""
    files = folder_of(tmp_path)

    def train(feedback: bool, stage: Any, offload: Offload | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module, compression = Net(), Compression(gradients="int8", error_feedback=feedback)
        settings: Any = {"units": ["Sequential"], "bucket_mib": 0.008, "compression": compression}
        with quiet():
            trainer = make_trainer(
                ZeroStrategy(stage, shard_within=2, offload=offload, **settings), accumulate_grad_batches=2
            )
            trainer.fit(module, DataLoader(range(4), batch_size=None))  # type: ignore[arg-type]
        return whole(module), residuals_of(trainer.strategy.engine.collectives)  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        exact = whole(fit(2, 2, Net(), accumulate_grad_batches=2))
        for half, feedback in enumerate((False, True)):
            expected = {stage: train(feedback, stage, None) for stage in (1, 2, 3)}
            for stage, offload in policies(files, half):
                (weights, kept), (found, also) = expected[stage], train(feedback, stage, offload)
                assert same(found, weights), f"stage {stage}, {offload}, {feedback}"
                assert same(also, kept)
                assert also.keys() == kept.keys()
                assert bool(kept) == feedback
                assert not same(exact, found)

    run_world(4, run, timeout=240, environment=TWO_HOSTS)


def test_a_disk_of_one_group_that_fails_in_a_step_is_an_error_of_all(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    def run(rank: int) -> None:
        offload = NvmeOffload(path=str(folder), buffer_mib=1)
        fit(2, 2, Net(), offload=offload, callbacks=[Breaking(3, "write", "on_before_optimizer_step")])

    with pytest.raises(WorldError) as raised:
        run_world(4, run, timeout=60)
    failures = raised.value.failures
    assert failures.keys() == {0, 1, 2, 3}
    for failure in failures.values():
        assert failure.type == "OffloadError"
        assert "Rank 3" in failure.message
        assert "No space left on device" in failure.message
    assert not list(folder.iterdir())


class Skips(Net):
    """Has no gradients of a block in every second micro-step, before a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.uneven, self.first = batch_idx % 2 == 1, 4  # all ranks: with gloo those of a simulated device wait
        return super().training_step(batch, batch_idx)


DEVICE: dict[str, tuple[Callable[[], Net], Any]] = {
    "skips": (Skips, None),
    "again": (Again, None),
    "narrow": (Net, lambda: ZeroPrecision("bf16-mixed", **NARROW)),
}


@pytest.mark.parametrize("name", DEVICE)
def test_no_bit_changes_on_a_device_with_memory_of_its_own(name: str) -> None:
    """A simulated one, to which the sums of micro-steps go from the host to be averaged between groups."""

    def run(rank: int) -> None:
        with simulated_device() as recorder:
            same_as_without(None, *DEVICE[name], accumulate_grad_batches=2)
        assert not [place for place in recorder.mixed if "gradients/" in place]  # else the user's, which is on no side
        assert not [race for race in find_races(recorder.trace) if not re.search("buffers.py|empty_like", str(race))]

    run_world(4, run, timeout=240, environment={"LIGHTNING_ZERO_SHARED_MEMORY": "0"})
