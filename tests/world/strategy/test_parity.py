"""Stages 1, 2 and 3 train as DDP does.

Two ranks: bit for bit, because a sum of two numbers has one order. Three and more: the sum of gradients depends on the
order of the ranks, and DDP's ring starts each chunk of a bucket at another rank, so that DDP with another bucket size
is not identical to DDP either. There the stages are compared with DDP within a bound, and with each other bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.helpers.cases import Case
from tests.helpers.models import CHANNELS_LAST, ZOO
from tests.helpers.training import Recipe, Record, differences, train_ddp, train_zero
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
# Rounding differences of 1e-7 in a gradient, carried through a few steps of AdamW.
ROUNDING = 1e-5
# One for every way in which real models differ from a stack of layers; the rest of the zoo is thorough.
CHOSEN = (
    "gpt_tied",
    "conv_batchnorm",
    "transformer",
    "attention",
    "lstm",
    "called_twice_interleaved",
    "unet_skips",
    "nested_units",
    "shared_across_units",
    "order_changes",
    "sometimes_unused_parameter",
    "sometimes_unused_unit",
    "ranks_use_other_units_at_times",
    "frozen_mix",
    "mixed_dtypes",
    "checkpoint_reentrant_around_three_units",
)
OTHERS = [name for name in ZOO if name not in CHOSEN]
Runs = dict[str, Callable[[], Record]]


def _runs(case: Case, recipe: Recipe, **strategy: Any) -> Runs:
    """Trainings under ``"ddp"`` and under each stage."""
    runs: Runs = {"ddp": lambda: train_ddp(case, recipe)}
    for stage in STAGES:
        runs[f"stage {stage}"] = lambda stage=stage: train_zero(case, recipe, stage=stage, **strategy)
    return runs


def _play(world_size: int, rows: dict[str, Runs], timeout: float = 280) -> Iterator[tuple[str, dict[str, Record]]]:
    """The records of every row on every rank: all rows in one world, none leaves anything behind for the next."""

    def run(rank: int) -> dict[str, dict[str, Record]]:
        return {row: {name: train() for name, train in runs.items()} for row, runs in rows.items()}

    for rank, played in enumerate(run_world(world_size, run, timeout=timeout)):
        for row, records in played.items():
            yield f"{row}, rank {rank}", records


def _assert_same(row: str, records: dict[str, Record], *names: str, bound: float = 0.0) -> None:
    """Each of ``names`` is as the first of them."""
    expected, *actual = names or records
    for name in actual:
        found = differences(records[expected], records[name], bound)
        assert not found, f"{row}: {name} against {expected}, {len(found)} differences:\n" + "\n".join(found[:10])


@pytest.mark.parametrize(
    "names", [CHOSEN, *(pytest.param(OTHERS[part::8], marks=pytest.mark.thorough) for part in range(8))], ids=len
)
def test_zoo_trains_bit_for_bit_like_ddp(names: Sequence[str]) -> None:
    for row, records in _play(2, {name: _runs(ZOO[name], Recipe()) for name in names}):
        _assert_same(row, records)


@pytest.mark.filterwarnings("ignore:.*is in channels-last format, and is laid out contiguously")
def test_settings_that_change_no_bit() -> None:
    """Clipping (a norm is that of whole gradients in float64), fused optimizers, sizes of buckets, prefetching."""
    tied, by_norm = ZOO["gpt_tied"], Recipe(clip="norm", clip_at=0.05, steps=3)
    rows = {
        "clipped by value": _runs(ZOO["mixed_dtypes"], Recipe(clip="value", clip_at=0.01, steps=3)),
        "clipped by norm": _runs(tied, by_norm),
        "clipped by norm, some unused": _runs(ZOO["sometimes_unused_parameter"], by_norm),
        "clipped by norm, odd sizes": _runs(ZOO["odd_sizes"], by_norm),
        "fused": _runs(tied, Recipe(fused=True, steps=4)),  # slices are aligned, so that vector lanes fall alike
        "small buckets": _runs(tied, Recipe(steps=3), bucket_mib=1e-4),
        "larger buckets": _runs(tied, Recipe(steps=3), bucket_mib=0.01),
    }
    case = ZOO["order_changes"]
    rows["prefetch"] = {"ddp": lambda: train_ddp(case, Recipe(steps=5))}
    for ahead in (0, 2):
        rows["prefetch"][f"{ahead} ahead"] = lambda ahead=ahead: train_zero(
            case, Recipe(steps=5), stage=3, prefetch=ahead
        )
    for row, records in _play(2, rows):
        if row.startswith("clipped by norm"):
            assert min(records["ddp"].norms) > 0.05, f"{row}: the recipe does not clip"
        _assert_same(row, records)


@pytest.mark.filterwarnings("ignore:.*is in channels-last format, and is laid out contiguously")
def test_settings_that_round_in_another_order() -> None:
    """Stage 1 keeps whole local gradients and reduces their sum, as DDP's ``no_sync`` does: identical. Stages 2 and 3
    reduce every micro-step and sum shards, (a1+b1)+(a2+b2) instead of (a1+a2)+(b1+b2): rounding apart."""
    accumulated = ("gpt_tied", "sometimes_unused_unit", "order_changes")
    rows = {name: _runs(ZOO[name], Recipe(accumulate=3, steps=3)) for name in accumulated}
    rows["torch's own norm"] = _runs(ZOO["gpt"], Recipe(clip="norm", double_norm=False, steps=3))
    rows["channels last"] = _runs(CHANNELS_LAST, Recipe())
    for row, records in _play(2, rows):
        bound = 10 * ROUNDING if row.startswith("channels") else ROUNDING
        if row.startswith(accumulated):
            _assert_same(row, records, "ddp", "stage 1")
            _assert_same(row, records, "stage 2", "stage 3")
        else:
            _assert_same(row, records, "stage 1", "stage 2", "stage 3")
        _assert_same(row, records, bound=bound)


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_other_numbers_of_ranks(world_size: int) -> None:
    """One rank is plain training. More than two agree with each other, and nearly with DDP."""
    names = ["gpt_tied_automatic_units", "odd_sizes", *(["frozen_mix", "nested_units"] if world_size == 3 else [])]
    for row, records in _play(world_size, {name: _runs(ZOO[name], Recipe(steps=3, clip="norm")) for name in names}):
        _assert_same(row, records, "stage 1", "stage 2", "stage 3")
        _assert_same(row, records, bound=0.0 if world_size == 1 else ROUNDING)


def test_records_notice_a_difference() -> None:
    """The comparison itself: one bit, a NaN and a missing gradient are found."""
    base = Record([torch.ones(())], [{"a": torch.ones(3), "b": None}], [torch.ones(())], {"a": torch.zeros(2)})
    assert differences(base, base) == []
    one_bit = Record(base.losses, [{"a": torch.ones(3) * (1 + 2**-23), "b": None}], base.norms, base.parameters)
    assert len(differences(base, one_bit)) == 1
    assert differences(base, one_bit, bound=1e-6) == []
    nan = Record([torch.tensor(float("nan"))], base.gradients, base.norms, base.parameters)
    assert len(differences(base, nan, bound=1.0)) == len(differences(nan, nan)) == 1
    missing = Record(base.losses, [{"a": None, "b": None}], base.norms, base.parameters)
    assert len(differences(base, missing)) == 1
