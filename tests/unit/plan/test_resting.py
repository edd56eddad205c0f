"""Where the bytes of a layout rest: the table of ``rest_of``, line by line."""

from __future__ import annotations

import pytest
import torch

from lightning_zero import build_plan
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement, Tier
from lightning_zero.plan.layout import FlatLayout, ParameterSpec, Rest, rest_of
from tests.helpers.plan_models import Block, on_meta

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
BOTH, OPTIMIZER, PARAMETERS = (
    {"optimizer": True, "parameters": True},
    {"optimizer": True, "parameters": False},
    {"optimizer": False, "parameters": True},
)


def layout_of(*, trainable: bool, computed_in: torch.dtype) -> FlatLayout:
    spec = ParameterSpec("weight", (), (8,), torch.float32, trainable)
    return FlatLayout.build([spec], 2, compute_dtype=computed_in, reduce_dtype=computed_in)


def on(tier: Tier, **settings: bool) -> Offload:
    return HostOffload(**settings) if tier is HOST else NvmeOffload(path="/never/looked/at", **settings)


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("same", [True, False], ids=["one dtype", "mixed"])
@pytest.mark.parametrize("stage", [1, 2])
def test_replicated_parameters(stage: int, same: bool, tier: Tier) -> None:
    placement = Placement.from_stage(stage)
    dtype = torch.float32 if same else torch.bfloat16
    trained = rest_of(layout_of(trainable=True, computed_in=dtype), placement, on(tier))
    assert trained == Rest(master=tier, weights=None, gradients=HOST, state=tier)
    frozen = rest_of(layout_of(trainable=False, computed_in=dtype), placement, on(tier))
    assert (frozen.master, frozen.weights) == (DEVICE if same else tier, None)


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize(
    ("settings", "trainable", "same", "master", "weights"),
    [
        # "there": where the policy offloads to.
        (OPTIMIZER, True, True, "there", DEVICE),
        (OPTIMIZER, True, False, "there", DEVICE),
        (BOTH, True, True, "there", None),
        (BOTH, True, False, "there", "there"),
        (PARAMETERS, True, True, DEVICE, None),
        (PARAMETERS, True, False, DEVICE, None),
        (OPTIMIZER, False, True, DEVICE, None),
        (OPTIMIZER, False, False, "there", DEVICE),
        (BOTH, False, True, "there", None),
        (BOTH, False, False, "there", "there"),
        (PARAMETERS, False, True, "there", None),
        (PARAMETERS, False, False, "there", "there"),
    ],
)
def test_sharded_parameters(
    settings: dict[str, bool],
    trainable: bool,
    same: bool,
    master: Tier | str,
    weights: Tier | str | None,
    tier: Tier,
) -> None:
    layout = layout_of(trainable=trainable, computed_in=torch.float32 if same else torch.bfloat16)
    rest = rest_of(layout, Placement.from_stage(3), on(tier, **settings))
    assert rest.master is (tier if master == "there" else master)
    assert rest.weights is (tier if weights == "there" else weights)
    assert rest.offloaded == (rest.master is not DEVICE)
    if rest.offloaded:
        assert (rest.gradients, rest.state) == (HOST, tier)
    else:
        assert (rest.gradients, rest.state) == (DEVICE, DEVICE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_offloaded_unless_asked_for(stage: int) -> None:
    plan = build_plan(on_meta(Block, width=64), stage=stage, world_size=2, param_dtype=torch.bfloat16)
    rests = {plan.rest_of(layout) for unit in plan.units for layout in unit.layouts}
    assert rests == {Rest(master=DEVICE, weights=None, gradients=DEVICE, state=DEVICE)}


def test_a_plan_says_where_its_layouts_rest() -> None:
    plan = build_plan(on_meta(Block, width=64), world_size=2, offload=HostOffload(parameters=True))
    rests = {plan.rest_of(layout) for unit in plan.units for layout in unit.layouts}
    assert rests == {Rest(master=HOST, weights=None, gradients=HOST, state=HOST)}
