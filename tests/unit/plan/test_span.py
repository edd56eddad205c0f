"""Shard groups smaller than the world, in a plan's arithmetic: 8 ranks in groups of 4, by formulas written out.

``P`` parameters without padding in a group of ``g`` of ``w`` ranks. What is sharded is divided by ``g``, as in MiCS
(arXiv:2205.00119): not by ``w``. Of a collective over n elements a rank sends (g - 1) / g within its group, and of an
all-reduce across the ``r = w / g`` groups 2 (r - 1) / r.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ZeroPlan, build_plan
from lightning_zero.comm import LocalCollectives
from lightning_zero.config import HostOffload, Placement
from lightning_zero.engine.build import UnitBuilder
from lightning_zero.extensions.planner.costs import OptimizerCost
from lightning_zero.extensions.planner.estimate import on_links
from lightning_zero.meta import MetaValues
from lightning_zero.plan.buckets import deal_out
from lightning_zero.plan.plan import CollectiveTraffic
from tests.helpers.wires import make_means

LAYERS, WIDTH = 8, 512
P = LAYERS * WIDTH * WIDTH  # each layer's shards are whole multiples of 64 elements, in groups of 4 and of 8
WORLD, GROUP = 8, 4
GROUPS = WORLD // GROUP


def layers(width: int = WIDTH) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def spanned(stage: int, span: int | None = GROUP, *, world_size: int = WORLD, **settings: Any) -> ZeroPlan:
    placement = replace(Placement.from_stage(stage), span=span)
    return build_plan(layers(), placement=placement, world_size=world_size, **settings)


def sent_nbytes(plan: ZeroPlan, micro_steps: int = 1) -> int:
    """What a rank sends in a step, where all are on one host."""
    return on_links(plan.expected_traffic(micro_steps=micro_steps), 1, rings=False)[1]


def test_bytes_that_rest_are_divided_by_the_group() -> None:
    """Adam in float32: parameters, gradients and two states of 4 bytes each."""
    for stage, expected in (
        (1, {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P // GROUP}),
        (2, {"parameters": 4 * P, "gradients": 4 * P // GROUP, "optimizer": 8 * P // GROUP}),
        (3, {"masters": 4 * P // GROUP, "gradients": 4 * P // GROUP, "optimizer": 8 * P // GROUP}),
    ):
        found = dict(spanned(stage).expected_memory(receive_buffer=False).items())
        held = {name: found[name] for name in ("parameters", "masters", "gradients", "optimizer") if found[name]}
        assert held == expected, f"stage {stage}"


def test_mixed_precision_rests_like_the_paper_s_16_bytes() -> None:
    """Stage 3 in bfloat16 with float32 masters and 16-bit reduction: 12 P / g, and gradients accumulated in 4 P / g."""
    plan = spanned(3, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    memory = plan.expected_memory()
    assert memory.masters + memory.optimizer == 12 * P // GROUP
    assert memory.gradients == 4 * P // GROUP


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_sent(stage: int, micro_steps: int) -> None:
    """Within a group as if it were the world; across groups each gradient shard once, in whatever stage."""
    plan = spanned(stage)
    traffic = plan.expected_traffic(micro_steps=micro_steps)
    reduces = 1 if stage == 1 else micro_steps
    gathered = traffic.all_gather.nbytes
    if stage < 3:
        assert gathered == 4 * P
    else:  # forward and backward of each micro-step, less the two layers that are still in their slots
        kept = 2 * (2 * micro_steps - 1)
        assert gathered == 4 * (2 * micro_steps * LAYERS - kept) * P // LAYERS
    assert traffic.reduce_scatter.nbytes == reduces * 4 * P
    calls = len(plan.layouts)
    assert traffic.all_reduce == CollectiveTraffic(calls, P // GROUP, 4 * P // GROUP)

    within = (gathered + reduces * 4 * P) * (GROUP - 1) // GROUP
    across = 2 * (4 * P // GROUP) * (GROUPS - 1) // GROUPS
    assert sent_nbytes(plan, micro_steps) == within + across


def test_more_rests_and_less_is_sent_than_with_one_group() -> None:
    """The trade: twice the bytes; the links between groups carry 2 (r - 1) / r of a shard, not a model each time."""
    whole, parted = spanned(3, None), spanned(3)
    assert parted.expected_memory().masters == 2 * whole.expected_memory().masters
    # 14 gathers of a layer and 8 reductions: 22 / 8 of a model, of which 7/8 or 3/4 is sent.
    expected = [4 * P * 22 // 8 * 7 // 8, 4 * P * 22 // 8 * 3 // 4 + 4 * P // 4]
    assert [sent_nbytes(plan) for plan in (whole, parted)] == expected


def test_buffers_go_to_all_ranks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    placement = replace(Placement.from_stage(1), span=2)
    parted = build_plan(model, placement=placement, world_size=4)
    nbytes = 2 * 64 * 4 + 8  # mean, variance, and a count
    assert parted.expected_traffic().broadcast.nbytes == nbytes
    alone = build_plan(model, placement=replace(placement, span=1), world_size=4)
    traffic = alone.expected_traffic()
    assert not traffic.all_gather.calls
    assert not traffic.reduce_scatter.calls
    assert sent_nbytes(alone) == 2 * traffic.all_reduce.nbytes * 3 // 4 + nbytes * 3 // 4


def test_whole_parameters_have_an_owner_in_each_group() -> None:
    cost = OptimizerCost.of("Muon")
    plan = spanned(3)
    owners = deal_out([WIDTH * WIDTH] * LAYERS, GROUP)
    for rank in range(GROUP):
        owned = owners.count(rank) * WIDTH * WIDTH
        assert plan.expected_memory(rank=rank, optimizer=cost).optimizer == 2 * 4 * owned
    with pytest.raises(ValueError, match="no rank 4 in a shard group of 4"):
        plan.expected_memory(rank=GROUP)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_group_is_the_plan_as_before(stage: int) -> None:
    """Checkpoints and the ranks' agreement depend on the fingerprint."""
    default = build_plan(layers(), stage=stage, world_size=WORLD)
    named = spanned(stage, WORLD)
    assert named.fingerprint() == default.fingerprint() != spanned(stage).fingerprint()
    assert "groups" not in default.describe() + "\n".join(default.summary_lines())
    assert spanned(stage).summary_lines()[0] == default.summary_lines()[0] + ", shard groups of 4"
    assert "; shard groups of 4" in spanned(stage).describe()
    assert "all-reduce across groups" in spanned(stage).describe()


@pytest.mark.parametrize(
    ("span", "error"),
    [(3, "8 ranks cannot be split into shard groups of 3"), (0, "span"), (True, "span"), (2.0, "span")],
)
def test_a_span_divides_the_world(span: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        spanned(3, span)


def test_the_engine_refuses_what_it_cannot_run_yet() -> None:
    plan = spanned(3, 1, world_size=2)
    wire, module = LocalCollectives(), layers()
    values = MetaValues(module, ())
    with pytest.raises(ValueError, match=r"shard groups of 1 of 2 ranks \(Placement\.span\)"):
        UnitBuilder(module, plan, make_means(plan, wire), values)


@pytest.mark.parametrize("narrow", [False, True])
def test_sums_that_leave_an_accelerator_have_memory_of_their_own_in_another_dtype(narrow: bool) -> None:
    """Else that of the buffer whose reduction has ended. They are there until the end of the backward."""
    dtypes: dict[str, Any] = {"reduce_dtype": torch.bfloat16} if narrow else {}
    peaks = [
        spanned(2, span, offload=HostOffload(), **dtypes).expected_memory(accelerator=True, peak=True)
        for span in (GROUP, None)
    ]
    assert peaks[0].gradient_slots - peaks[1].gradient_slots == (4 * P // GROUP if narrow else 0)
