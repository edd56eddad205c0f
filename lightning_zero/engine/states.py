"""States of a unit's parameters, and the one place where they may change.

Members say what is in memory; an illegal move raises and names the unit, where it was and where it was to go. A checked
move costs about 0.2 microseconds, so the check is always on.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["UnitState", "UnitStateMachine"]


class UnitState(Enum):
    """What of a unit's full parameters is in memory."""

    COLD = "nothing but this rank's shard"
    INFLIGHT = "its slot, being filled by a gather"
    WARM = "its slot, full and valid, parameters show placeholders"
    BOUND = "its slot, full and valid, parameters are views of it"


# Tuples: they compare by identity first, while an enum's hash is computed in Python.
_LEGAL = {
    "COLD": (UnitState.INFLIGHT,),
    "INFLIGHT": (UnitState.WARM,),
    "WARM": (UnitState.BOUND, UnitState.COLD),
    "BOUND": (UnitState.WARM,),
}


class UnitStateMachine:
    """Holds one unit's state and refuses moves the life cycle does not know.

    Args:
        name: the unit, for messages.
    """

    __slots__ = ("_name", "state")

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = UnitState.COLD

    def move(self, target: UnitState) -> None:
        """Change the state.

        Raises:
            RuntimeError: if the life cycle has no such move.
        """
        if target not in _LEGAL[self.state._name_]:
            legal = ", ".join(sorted(state.name for state in _LEGAL[self.state._name_]))
            raise RuntimeError(
                f"Unit '{self._name}' cannot go from {self.state.name} to {target.name}; legal from here: {legal}. "
                "This is an error in lightning_zero itself; please report it with the model that shows it."
            )
        self.state = target
