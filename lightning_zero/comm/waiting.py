"""What this process waits for, noted where it waits, for the errors of those that wait for it.

The extension ``watch`` reads the notes. Without it they cost a microsecond, and waits end at the timeout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_zero.registry import extension, installed

__all__ = ["ANY_AGREEMENT", "LOOK_SECONDS", "NOTES", "Note", "current_watch", "doing", "notes_of"]
__all__ += ["passed_on", "verdict", "watch_ranks"]

ANY_AGREEMENT = "the agreement with the other ranks"
"""What is waited for, where nobody knows more."""
LOOK_SECONDS = 1.0
"""How long a wait lasts before it asks for the ``verdict`` again."""

passed_on: dict[str, int] = {}
"""How many transfers of a kind this rank has left to threads that need all other ranks', by the kind's name."""

_by_thread: dict[int, list[Note]] = {}


class Note(NamedTuple):
    """What a thread does with the other ranks: see ``NOTES``."""

    what: str
    """For people."""
    group: dist.ProcessGroup | str | None = None
    """What carries it; a name where that is no process group. ``None``: this note is text only."""
    place: int = -1
    """Which transfer of the group it is; -1 for the one that began last."""
    members: Sequence[int] = ()
    """The ranks that have to come, if they are not those of the group."""
    moment: Callable[[], int] = int
    """A number that changes while something is heard of others."""


class _Notes(threading.local):
    """The notes of each thread, the newest last."""

    def __init__(self) -> None:
        self.here = _by_thread[threading.get_ident()] = list[Note]()


NOTES = _Notes()
"""``NOTES.here`` are those of this thread: who waits appends one, and takes it away afterwards."""


@contextmanager
def doing(what: str, *more: Any) -> Iterator[None]:
    """Have ``Note(what, *more)`` among this thread's. Hot code appends and pops by itself: that is two calls less."""
    notes = NOTES.here
    notes.append(Note(what, *more))
    try:
        yield
    finally:
        notes.pop()


def notes_of(thread: int) -> list[Note]:
    """The notes of a thread, the newest last."""
    return list(_by_thread.get(thread, ()))


def watch_ranks() -> Any:
    """Watch the ranks of the default group from this thread's process on, if the extension is there. Not collective."""
    return extension("watch").watch_ranks() if installed("watch") else None


def current_watch() -> Any:
    """What watches the ranks of this process; ``None`` if nothing does."""
    return extension("watch").current_watch() if installed("watch") else None


def verdict() -> str:
    """Why nobody can go on; empty while somebody may."""
    watch = current_watch()
    return "" if watch is None else watch.verdict


def _after_fork() -> None:
    NOTES.here.clear()  # of the thread that forked; others do not come along


os.register_at_fork(after_in_child=_after_fork)
