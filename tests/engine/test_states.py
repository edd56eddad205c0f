"""The life cycle of a unit's parameters, move by move."""

from __future__ import annotations

import itertools

import pytest

from lightning_zero.engine.sharded import UnitState, UnitStateMachine

SHARDED, GATHERING, UNSHARDED, BOUND = UnitState.SHARDED, UnitState.GATHERING, UnitState.UNSHARDED, UnitState.BOUND
LEGAL = {(SHARDED, GATHERING), (GATHERING, UNSHARDED), (UNSHARDED, BOUND), (UNSHARDED, SHARDED), (BOUND, UNSHARDED)}
ROADS = {SHARDED: (), GATHERING: (GATHERING,), UNSHARDED: (GATHERING, UNSHARDED), BOUND: (GATHERING, UNSHARDED, BOUND)}


def machine_in(state: UnitState) -> UnitStateMachine:
    machine = UnitStateMachine("layers.3")
    assert machine.state is SHARDED
    for step in ROADS[state]:
        machine.move(step)
    return machine


@pytest.mark.parametrize(("start", "target"), list(itertools.product(UnitState, UnitState)))
def test_every_move(start: UnitState, target: UnitState) -> None:
    machine = machine_in(start)
    if (start, target) in LEGAL:
        machine.move(target)
        assert machine.state is target
        return
    legal = ", ".join(sorted(to.name for at, to in LEGAL if at is start))
    with pytest.raises(RuntimeError) as caught:
        machine.move(target)
    assert f"'layers.3' cannot go from {start.name} to {target.name}; legal from here: {legal}." in str(caught.value)
    assert machine.state is start, "a refused move changed the state"
