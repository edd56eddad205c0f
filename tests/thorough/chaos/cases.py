"""Which cases are played: every kind of fault in turn, at each of its places, in runs of every setting."""

from __future__ import annotations

import random

from tests.thorough.chaos.faults import FAULTS, Fault
from tests.thorough.chaos.play import Case
from tests.thorough.chaos.run import SETTING_UP

__all__ = ["cases"]


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many cases, always the same. The first of them are one of each kind."""
    dice = random.Random(seed)
    found = [_case(fault, turn, dice) for turn in range(1 + count // len(FAULTS)) for fault in FAULTS.values()]
    return found[:count]


def _case(fault: Fault, turn: int, dice: random.Random) -> Case:
    """The places come one after the other, all else is thrown."""
    place = fault.places[turn % len(fault.places)]
    ranks = dice.choice([2, 2, 3, 4])
    victim = dice.randrange(ranks) if fault.points == (0, 0) else dice.choice([0, 0, 0, ranks - 1])
    return Case(
        fault=fault.name,
        place=place,
        step=0 if place in SETTING_UP else dice.randint(1, 4),
        victim=victim,
        ranks=ranks,
        stage=dice.randint(1, 3),
        shared_memory=dice.random() < 0.5,
        asynchronous=dice.random() < 0.5,
        offload=fault.offload or dice.choice(["", "", "host", "files"]),
        point=1 + (7 * turn) % points if (points := fault.points[victim > 0]) else 0,
    )
