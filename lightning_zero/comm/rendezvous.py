"""Finding out which ranks are at the same place, without a collective that the others would have to join."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from lightning_zero._torch import default_store

__all__ = ["attend"]

_SHORTEST_WAIT = timedelta(milliseconds=1)


def attend(key: str, note: str, rank: int, world_size: int, seconds: float) -> dict[int, str]:
    """Say that this rank is here, and see who else comes.

    A rank that failed alone can not start a collective: the others are in the middle of another one, and would wait in
    it for this rank. The store of the default group has no order.

    Args:
        key: the place, the same on every rank and never used before.
        note: what this rank has to say about it.
        rank: this process in the default group.
        world_size: ranks of the default group.
        seconds: how long to wait for the others, all together.

    Returns:
        The notes of the ranks that came in time, by rank; this rank's own among them. If they are not complete, this
        rank counts as not here for those who look later.
    """
    notes = {rank: note}
    if world_size == 1:
        return notes
    store = default_store()
    deadline = time.monotonic() + seconds
    try:
        store.set(f"{key}/{rank}", note)
    except RuntimeError:  # the process that serves the store is gone
        return notes
    for other in range(world_size):
        if other == rank:
            continue
        left = max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT)
        try:
            store.wait([f"{key}/{other}"], left)
            notes[other] = store.get(f"{key}/{other}").decode()
        except RuntimeError:  # not there, or no store any more
            continue
    if len(notes) < world_size:
        with suppress(RuntimeError):
            store.delete_key(f"{key}/{rank}")  # who comes later must not take this rank for one that waits
    return notes
