"""The life cycle of a unit's parameters, verb by verb."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import HostOffload, build_plan
from lightning_zero.comm import LocalCollectives, Streams
from lightning_zero.engine.build import UnitBuilder
from lightning_zero.engine.unit import ShardedUnit
from lightning_zero.meta import MetaValues
from tests.helpers.wires import make_means

CPU = torch.device("cpu")


class UnitState(Enum):
    """What of a sharded unit's full parameters is in memory. Its verbs go through these in this order."""

    SHARDED = "nothing but this rank's shard"
    GATHERING = "a buffer that a gather fills"
    UNSHARDED = "a buffer, full and valid, parameters show placeholders"
    BOUND = "a buffer, full and valid, parameters are views of it"


def state_of(unit: ShardedUnit) -> UnitState:
    if unit.storage is None:
        return UnitState.SHARDED
    if unit.pins:
        return UnitState.BOUND
    return UnitState.GATHERING if unit.pending else UnitState.UNSHARDED


SHARDED, GATHERING, UNSHARDED, BOUND = UnitState.SHARDED, UnitState.GATHERING, UnitState.UNSHARDED, UnitState.BOUND
WIRE = LocalCollectives()

VERBS: dict[str, Callable[[ShardedUnit], Any]] = {
    "wait": lambda unit: unit.wait(),
    "bind": lambda unit: unit.bind(),
    "unbind": lambda unit: unit.unbind(Streams(CPU)),
    "release": lambda unit: unit.release(),
}
ROADS = {
    SHARDED: [],
    GATHERING: ["launch"],
    UNSHARDED: ["launch", "wait"],
    BOUND: ["launch", "wait", "bind"],
}
# What a verb makes of each state; None: it is refused.
MOVES: dict[str, dict[UnitState, UnitState | None]] = {
    "launch": {SHARDED: GATHERING, GATHERING: GATHERING, UNSHARDED: GATHERING, BOUND: BOUND},
    "wait": {SHARDED: SHARDED, GATHERING: UNSHARDED, UNSHARDED: UNSHARDED, BOUND: BOUND},
    "bind": {SHARDED: None, GATHERING: BOUND, UNSHARDED: BOUND, BOUND: BOUND},
    "release": {SHARDED: SHARDED, GATHERING: SHARDED, UNSHARDED: SHARDED, BOUND: None},
}


def unit_in(state: UnitState) -> ShardedUnit:
    module = nn.ModuleDict({"block": nn.Linear(4, 4)})
    offload = HostOffload(optimizer=False, parameters=True)  # without it one rank would keep whole parameters
    plan = build_plan(module, stage=3, world_size=1, units=["Linear"], offload=offload)
    means = make_means(plan, WIRE)
    builder = UnitBuilder(module, plan, means, MetaValues.by_unit(module, plan))
    VERBS["launch"] = lambda unit: unit.launch(means, None)
    unit = next(unit for unit in builder.build() if unit.name == "block")
    assert isinstance(unit, ShardedUnit)
    for verb in ROADS[state]:
        VERBS[verb](unit)
    assert state_of(unit) is state
    return unit


@pytest.mark.parametrize("start", UnitState)
@pytest.mark.parametrize("verb", MOVES)
def test_every_verb_in_every_state(verb: str, start: UnitState) -> None:
    unit, target = unit_in(start), MOVES[verb][start]
    if target is not None:
        VERBS[verb](unit)
        assert state_of(unit) is target
        return
    with pytest.raises(RuntimeError, match="Unit 'block' cannot"):
        VERBS[verb](unit)
    assert state_of(unit) is start, "a refused verb changed the state"


def test_the_last_unbind_lets_the_memory_go() -> None:
    unit = unit_in(BOUND)
    unit.bind()
    assert not VERBS["unbind"](unit)
    assert state_of(unit) is BOUND
    assert VERBS["unbind"](unit)
    assert state_of(unit) is UNSHARDED
