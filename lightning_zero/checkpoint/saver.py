"""Saving now or in the background, and deleting old checkpoints in their turn.

[Note: In the background]

A save in the background is one thread, over a snapshot in host memory, that talks to the same thread of the other
ranks through a group that nobody else uses meanwhile. There is at most one. The thread is no daemon: Python waits for
it before the process exits, so that what was asked for is on disk then.

Deleting waits for its turn: a checkpoint that was replaced by a better one is deleted when the next save begins, by
which time the better one is known to be on disk. If that one failed, nothing is deleted.

    save(b)              writes b
    remove(a)            queued
    save(c)              waits for b; deletes a, or raises the failure of b and keeps a; writes c
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_zero.checkpoint.agreement import Control, collect, failure_text
from lightning_zero.checkpoint.remote import remove_at
from lightning_zero.checkpoint.save import no_garbage_collection
from lightning_zero.checkpoint.snapshot import Snapshots
from lightning_zero.errors import CheckpointError, CommunicationError

__all__ = ["Saver"]

_BEGIN_SECONDS = 5.0

Write = Callable[[Mapping[str, Any], Control], Sequence[str] | None]


class _Outcome:
    """What the thread leaves for the caller.

    Attributes:
        what: the last save in the background.
        failure: why it failed; ``None`` again once it was raised.
        kept: what could not be deleted, and why; and what else is worth a warning.
    """

    def __init__(self) -> None:
        self.what = ""
        self.failure: BaseException | None = None
        self.kept: list[str] = []


class Saver:
    """The saves and removals of one run, in order. See [Note: In the background].

    Args:
        control: the ranks, through a group of its own. While a save is in flight it belongs to its thread: ``wait``
            before using it for anything else.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._snapshots = Snapshots()
        self._in_flight = False
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        self._found: list[str] = []  # warnings of the save in flight: its thread's alone until that has been waited for
        self._removals: list[str | os.PathLike[str]] = []
        weakref.finalize(self, _report_unseen, self._outcome)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank, which nobody was told yet. Not collective."""
        return self._outcome.failure is not None

    def save(self, write: Write, checkpoint: Mapping[str, Any], *, what: str, asynchronous: bool) -> None:
        """Write a checkpoint, after the removals that were queued.

        Args:
            write: writes the checkpoint it is given, with the control group it is given. Collective. Called here, or in
                a thread; then the checkpoint is a snapshot. What it returns are warnings.
            checkpoint: not changed. In the background it may be changed as soon as this returns.
            what: the step, to follow "could not": "save the checkpoint '/runs/last.ckpt'".
            asynchronous: write in the background. What cannot be copied is written now, with a warning.

        Raises:
            CheckpointError: on every rank, if the save in the background before this one failed (this one is not begun
                then), or if this one did, unless it is in the background.

        Collective: every rank.
        """
        self._settle()
        snapshot = self._snapshot(checkpoint, what) if asynchronous else None
        removals, self._removals = self._removals, []
        if snapshot is None:
            self._outcome.kept += self._remove_all(removals)
            self._outcome.kept += write(checkpoint, self._control) or ()
        else:
            self._begin(write, snapshot, removals, what)
        self._warn_of_what_was_kept()  # last: a warning may be an error, and on this rank alone

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint when the next save begins, or in ``close``. Forgotten if the save in flight fails.

        What cannot be deleted then gives a warning on rank 0. Rank 0 alone touches the disk.
        """
        self._removals.append(path)

    def wait(self) -> None:
        """Wait until the save in flight, if any, is on disk.

        Raises:
            CheckpointError: on every rank and once, if it failed on any.
            CommunicationError: if the ranks could not agree on that.

        Collective: every rank.
        """
        self._settle()
        self._warn_of_what_was_kept()

    def close(self, *, collective: bool = True) -> None:
        """Wait for the save in flight, carry out the removals, and give the memory back. May be used again.

        Args:
            collective: ``False`` on a rank that is handling an exception, where the others may not come: nothing here
                waits for them then, but for the save in flight, which ends at the latest with its group's timeout.
                Its failure is a warning then.

        Raises:
            CheckpointError: on every rank and once, if the save in flight failed on any.

        Collective: every rank, unless told otherwise.
        """
        if collective:
            self._settle()
        else:
            self._join()
            self._in_flight = False
        failure = self._outcome.failure
        if failure is not None:
            self._forget()
            self._outcome.kept.append(f"Could not {self._outcome.what} in the background: {failure}")
        removals, self._removals = self._removals, []
        self._outcome.kept += self._remove_all(removals)
        self._snapshots = Snapshots()
        self._warn_of_what_was_kept()

    def _settle(self) -> None:
        """Wait for the save in flight, and raise its failure. Collective."""
        if not self._in_flight:
            return
        self._join()
        own = self._outcome.failure
        try:
            if isinstance(own, CommunicationError):
                raise own
            failures = self._failures(own)
        except CommunicationError:
            self._forget()
            raise
        self._in_flight = False
        if failures:
            what = f"{self._outcome.what} in the background"
            agreed = len(failures) == self._control.world_size and len(set(failures.values())) == 1
            self._forget()
            raise CheckpointError(
                (next(iter(failures.values())) if agreed else failure_text(what, failures))
                + f"\nThis was the attempt to {what}. Training went on meanwhile; checkpoints that were saved before "
                "are intact, and none was deleted for it."
            ) from own

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._outcome.kept += self._found
        self._found = []

    def _failures(self, own: BaseException | None) -> dict[int, str]:
        """Why the save in flight failed, by rank. Collective."""
        reason = None if own is None else str(own) if isinstance(own, CheckpointError) else repr(own)
        reasons = enumerate(self._control.gather_objects(reason))
        return {rank: text for rank, text in reasons if text is not None}

    def _snapshot(self, checkpoint: Mapping[str, Any], what: str) -> dict[str, Any] | None:
        """A copy, or ``None`` on every rank if any rank could make none. Collective."""
        taken: list[dict[str, Any]] = []

        def take() -> str | None:
            try:
                with no_garbage_collection():
                    taken.append(self._snapshots.take(checkpoint))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return None

        reasons = {rank: reason for rank, reason in enumerate(collect(self._control, what, take)) if reason is not None}
        if not reasons:
            return taken[0]
        if self._control.rank == 0:
            rank, reason = next(iter(reasons.items()))
            self._outcome.kept.append(
                f"The attempt to {what} was made without delay and not in the background: rank {rank} could not copy "
                f"it ({reason}). Keep values of that kind out of the checkpoint, or free memory on the host."
            )
        return None

    def _begin(self, write: Write, snapshot: dict[str, Any], removals: list[str | os.PathLike[str]], what: str) -> None:
        begun = threading.Event()

        def run() -> None:
            begun.set()
            try:
                self._found += self._remove_all(removals)
                self._found += write(snapshot, self._control) or ()
            except BaseException as error:
                self._outcome.failure = error

        self._outcome.what, self._in_flight = what, True
        self._thread = threading.Thread(target=run, name=f"lightning_zero: {what}", daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads here; the other ranks have begun
            self._thread = None
            run()
        except BaseException:  # an interrupt, perhaps of waiting for the thread to begin
            if not begun.wait(_BEGIN_SECONDS):
                self._in_flight, self._thread = False, None
            raise

    def _remove_all(self, paths: list[str | os.PathLike[str]]) -> list[str]:
        """Delete checkpoints, on rank 0. Returns what could not be, and why."""
        kept = []
        for path in paths if self._control.rank == 0 else ():
            try:
                remove_at(path)
            except Exception as error:
                kept.append(f"The checkpoint '{os.fspath(path)}' was not deleted: {type(error).__name__}: {error}")
        return kept

    def _forget(self) -> None:
        """A save failed, and that is being told: what its success would have made superfluous stays."""
        self._outcome.failure = None
        self._in_flight = False
        self._removals.clear()

    def _warn_of_what_was_kept(self) -> None:
        kept, self._outcome.kept = self._outcome.kept, []
        for text in kept:
            warnings.warn(text, stacklevel=3)


def _report_unseen(outcome: _Outcome) -> None:
    """A failure that nobody waited for: the process ends, or the saver is gone."""
    if outcome.failure is not None:
        sys.stderr.write(f"Could not {outcome.what} in the background: {outcome.failure}\n")
