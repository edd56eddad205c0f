"""Stages 1, 2 and 3 train as DDP does.

Two ranks: bit for bit, because a sum of two numbers has one order. Three and more: the sum of gradients depends on the
order of the ranks, and DDP's ring starts each chunk of a bucket at another rank, so that DDP with another bucket size
is not identical to DDP either. There the stages are compared with DDP within a bound, and with each other bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.cases import Case
from tests.helpers.models import CHANNELS_LAST, ZOO
from tests.helpers.training import Recipe, Record, differences, train_ddp, train_zero
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
# Rounding differences of 1e-7 in a gradient, carried through a few steps of AdamW.
ROUNDING = 1e-5
PARTS = 12  # of the zoo, each in one world: none of its models leaves anything behind for the next


def _each(rank: int, runs: dict[str, Callable[[], Record]]) -> dict[str, Record]:
    return {name: run() for name, run in runs.items()}


def _runs(case: Case, recipe: Recipe) -> dict[str, Callable[[], Record]]:
    """Trainings under ``"ddp"`` and under each stage."""
    runs: dict[str, Callable[[], Record]] = {"ddp": lambda: train_ddp(case, recipe)}
    for stage in STAGES:
        runs[f"stage {stage}"] = lambda stage=stage: train_zero(case, recipe, stage=stage)
    return runs


def _train(world_size: int, case: Case, recipe: Recipe) -> list[dict[str, Record]]:
    """Records of every rank under ``"ddp"`` and under each stage."""
    return run_world(world_size, _each, _runs(case, recipe), timeout=120)


def _assert_same(records: dict[str, Record], expected: str, *actual: str, bound: float = 0.0, of: str = "") -> None:
    for name in actual:
        found = differences(records[expected], records[name], bound)
        assert not found, f"{of}{name} against {expected}, {len(found)} differences:\n" + "\n".join(found[:10])


@pytest.mark.parametrize("part", range(PARTS))
def test_zoo_trains_bit_for_bit_like_ddp(part: int) -> None:
    cases = list(ZOO.values())[part::PARTS]

    def train(rank: int) -> list[dict[str, Record]]:
        return [_each(rank, _runs(case, Recipe())) for case in cases]

    for trained in run_world(2, train, timeout=280):
        for case, records in zip(cases, trained, strict=True):
            _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3", of=f"{case}: ")


@pytest.mark.filterwarnings("ignore:.*is in channels-last format, and is laid out contiguously")
def test_channels_last_weights_are_rounding_apart() -> None:
    for records in _train(2, CHANNELS_LAST, Recipe()):
        _assert_same(records, "stage 1", "stage 2", "stage 3")
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3", bound=10 * ROUNDING)


@pytest.mark.parametrize("name", ["gpt_tied", "order_changes", "checkpoint_reentrant_around_three_units"])
def test_prefetch_changes_no_bit(name: str) -> None:
    runs: dict[str, Callable[[], Record]] = {"ddp": lambda: train_ddp(ZOO[name], Recipe(steps=5))}
    for ahead in ("0", "1", "2"):
        runs[ahead] = lambda ahead=ahead: train_zero(ZOO[name], Recipe(steps=5), stage=3, prefetch=int(ahead))
    for records in run_world(2, _each, runs):
        _assert_same(records, "ddp", "0", "1", "2")


@pytest.mark.parametrize("name", ["gpt_tied", "mixed_dtypes", "sometimes_unused_parameter"])
def test_clipping_by_value_changes_no_bit(name: str) -> None:
    for records in _train(2, ZOO[name], Recipe(clip="value", clip_at=0.01, steps=5)):
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3")


@pytest.mark.parametrize("name", ["gpt_tied", "odd_sizes", "sometimes_unused_parameter", "frozen_mix"])
def test_clipping_by_norm_is_a_float64_norm_in_every_stage(name: str) -> None:
    """The reference computes the norm of whole gradients in float64 and rounds it once."""
    all_records = _train(2, ZOO[name], Recipe(clip="norm", clip_at=0.05, steps=5))
    for records in all_records:
        assert min(records["ddp"].norms) > 0.05, "the recipe does not clip"
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3")
    assert all_records[0]["stage 3"].norms == all_records[1]["stage 3"].norms


def test_clipping_by_norm_is_close_to_torch_own_float32_norm() -> None:
    for records in _train(2, ZOO["gpt"], Recipe(clip="norm", double_norm=False, steps=6)):
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3", bound=ROUNDING)


@pytest.mark.parametrize("name", ["gpt_tied", "sometimes_unused_unit", "mixed_dtypes", "order_changes"])
def test_accumulation(name: str) -> None:
    """Stage 1 keeps whole local gradients and reduces their sum, as DDP's ``no_sync`` does: identical. Stages 2 and 3
    reduce every micro-step and sum shards, (a1+b1)+(a2+b2) instead of (a1+a2)+(b1+b2): rounding apart."""
    for records in _train(2, ZOO[name], Recipe(accumulate=3, steps=4)):
        _assert_same(records, "ddp", "stage 1")
        _assert_same(records, "stage 2", "stage 3")
        _assert_same(records, "ddp", "stage 2", "stage 3", bound=ROUNDING)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 3) for name in ("gpt", "frozen_mix", "sometimes_unused_parameter", "nested_units")),
        *((name, size) for name in ("gpt_tied_automatic_units", "odd_sizes") for size in (3, 4)),
    ],
)
def test_more_ranks_agree_with_each_other_and_nearly_with_ddp(name: str, world_size: int) -> None:
    for records in _train(world_size, ZOO[name], Recipe(steps=5, clip="norm")):
        _assert_same(records, "stage 1", "stage 2", "stage 3")
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3", bound=ROUNDING)


def test_one_rank_is_plain_training() -> None:
    for records in _train(1, ZOO["gpt_tied"], Recipe(clip="norm", steps=5)):
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3")


def test_fused_optimizer_changes_no_bit() -> None:
    """Every slice starts and ends at a multiple of 64 elements of its buffer, so that vector lanes fall alike."""
    for records in _train(2, ZOO["gpt_tied"], Recipe(fused=True, steps=8)):
        _assert_same(records, "ddp", "stage 1", "stage 2", "stage 3")


def test_bucket_size_changes_no_bit() -> None:
    case, recipe = ZOO["gpt_tied"], Recipe(steps=6)
    runs: dict[str, Callable[[], Record]] = {"ddp": lambda: train_ddp(case, recipe)}
    for stage in (1, 2):
        for size in (1e-4, 0.01):
            runs[f"stage {stage}, {size}"] = lambda stage=stage, size=size: train_zero(
                case, recipe, stage=stage, bucket_mib=size
            )
    for records in run_world(2, _each, runs):
        _assert_same(records, *runs)


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
