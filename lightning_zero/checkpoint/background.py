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

import copy
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.flat_shard import FlatShard, memory_identity
from lightning_zero.checkpoint.format.items import tensors_in
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.save import no_garbage_collection
from lightning_zero.checkpoint.storage.publish import remove
from lightning_zero.comm import ControlGroup
from lightning_zero.comm.control import collect, failure_text
from lightning_zero.errors import CheckpointError, CommunicationError
from lightning_zero.offload.host import OffloadedTensor, host_memory

__all__ = ["Saver", "Snapshots"]

_BEGIN_SECONDS = 5.0

Write = Callable[[Mapping[str, Any], ControlGroup], Sequence[str] | None]


class _Outcome:
    """What the last save in the background was, and why it failed until that is raised. It outlives the saver."""

    def __init__(self) -> None:
        self.what = ""
        self.failure: BaseException | None = None

    def report(self) -> None:
        """A failure that nobody waited for: the process ends, or the saver is gone."""
        if self.failure is not None:
            sys.stderr.write(f"Could not {self.what} in the background: {self.failure}\n")


class Saver:
    """The saves and removals of one run, in order. See [Note: In the background].

    Args:
        control: the ranks, through a group of its own. While a save is in flight it belongs to its thread: ``wait``
            before using it for anything else.
    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._snapshots = Snapshots()
        self._in_flight = False
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        self._warnings: list[str] = []
        self._found: list[str] = []  # warnings of the save in flight: its thread's alone until that has been waited for
        self._removals: list[str | os.PathLike[str]] = []
        weakref.finalize(self, _Outcome.report, self._outcome)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank, which nobody was told yet. Not collective."""
        return self._outcome.failure is not None

    def save(self, write: Write, checkpoint: Mapping[str, Any], *, what: str, asynchronous: bool) -> None:
        """Write a checkpoint, after the removals that were queued. Collective: every rank.

        Args:
            write: writes the checkpoint it is given, with the control group it is given. Collective. Called here, or in
                a thread; then the checkpoint is a snapshot. What it returns are warnings.
            checkpoint: not changed. In the background it may be changed as soon as this returns.
            what: the step, to follow "could not": "save the checkpoint '/runs/last.ckpt'".
            asynchronous: write in the background. What cannot be copied is written now, with a warning.

        Raises:
            CheckpointError: on every rank, if the save in the background before this one failed (this one is not begun
                then), or if this one did, unless it is in the background.
        """
        self._settle()
        snapshot = self._snapshot(checkpoint, what) if asynchronous else None
        removals, self._removals = self._removals, []
        if snapshot is None:
            self._warnings += self._remove_all(removals)
            self._warnings += write(checkpoint, self._control) or ()
        else:
            self._begin(write, snapshot, removals, what)
        self._warn()  # last: a warning may be an error, and on this rank alone

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint when the next save begins, or in ``close``. Forgotten if the save in flight fails.

        What cannot be deleted then gives a warning on rank 0. Rank 0 alone touches the disk.
        """
        self._removals.append(path)

    def wait(self) -> None:
        """Wait until the save in flight, if any, is on disk; ``CheckpointError`` on every rank and once, if it failed.

        Collective: every rank.
        """
        self._settle()
        self._warn()

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
            self._warnings.append(f"Could not {self._outcome.what} in the background: {failure}")
        removals, self._removals = self._removals, []
        self._warnings += self._remove_all(removals)
        self._snapshots = Snapshots()
        self._warn()

    def _settle(self) -> None:
        """Wait for the save in flight, and raise its failure. Collective."""
        if not self._in_flight:
            return
        self._join()
        own = self._outcome.failure
        try:
            if isinstance(own, CommunicationError):
                raise own
            reason = None if own is None else str(own) if isinstance(own, CheckpointError) else repr(own)
            reasons = self._control.gather_objects(reason)
        except CommunicationError:
            self._forget()
            raise
        self._in_flight = False
        failures = {rank: text for rank, text in enumerate(reasons) if text is not None}
        if failures:
            what = f"{self._outcome.what} in the background"
            agreed = len(failures) == self._control.world_size and len(set(failures.values())) == 1
            self._forget()
            raise CheckpointError(
                (failures[0] if agreed else failure_text(what, failures))
                + f"\nThis was the attempt to {what}. Training went on meanwhile; checkpoints that were saved before "
                "are intact, and none was deleted for it."
            ) from own

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._warnings += self._found
        self._found = []

    def _forget(self) -> None:
        """A save failed, and that is being told: what its success would have made superfluous stays."""
        self._outcome.failure = None
        self._in_flight = False
        self._removals.clear()

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
            self._warnings.append(
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
                remove(path)
            except Exception as error:
                kept.append(f"The checkpoint '{os.fspath(path)}' was not deleted: {type(error).__name__}: {error}")
        return kept

    def _warn(self) -> None:
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(text, stacklevel=3)


_ALIGNMENT = 64  # bytes; of what is copied, so that every dtype may start where it started in its own storage
_GAP_NBYTES = 1 << 16  # what lies between two slices of a storage is copied along if it is less: one copy, not two


class Snapshots:
    """Copies of checkpoints, one at a time, in host memory that is taken once and kept.

    Taking memory is what makes a first copy slow (the pages are made while they are written). One save after another
    writes into the same memory; it is taken anew only when it is too small. It is given back with this object. For
    tensors on an accelerator it is page-locked.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self._memory.numel()

    def take(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint of tensors on any device or in a file. The snapshot before is no longer valid.

        FlatShards and plain tensors lie in this object's memory, on the host, and what was the same memory is so in the
        copy; slices of one buffer, as those of the engine are, are copied together. The rest is a deep copy, which may
        raise whatever copying raises, for example ``TypeError`` for a lock.
        """
        with untracked():
            sources = dict(_sources(checkpoint))
            runs = _runs(sources)
            copied: dict[int, Any] = {}
            for run, place in zip(runs, self._copy(runs), strict=True):
                for identity, offset in run.members:
                    copied[identity] = _rebuilt(*sources[identity], place, offset)
            for identity, (tensor, source) in sources.items():
                if identity not in copied:  # no elements
                    copied[identity] = _rebuilt(tensor, source, None, 0)
            snapshot: dict[str, Any] = copy.deepcopy(dict(checkpoint), copied)
        return snapshot

    def _copy(self, runs: list[_Run]) -> list[Tensor]:
        """Where each run's bytes are on the host now."""
        devices = {run.source.device for run in runs if run.source.device.type != "cpu"}
        needed = sum(run.room for run in runs)
        if needed > self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self._memory = host_memory(needed, bool(devices))
        places, begin = [], 0
        for run in runs:
            first = begin + run.start % _ALIGNMENT
            place = self._memory[first : first + run.source.nbytes]
            place.view(run.source.dtype).copy_(run.source, non_blocking=True)
            places.append(place)
            begin += run.room
        for device in devices:
            torch.accelerator.synchronize(device)
        return places


class _Run(NamedTuple):
    """A range of one storage that is copied at once: 1-D bytes, or elements that rest in a file.

    ``start`` is the byte where it begins in its storage; 0 in a file. ``members`` are the tensors in it, by identity,
    and the byte of the range where each begins.
    """

    source: Tensor
    start: int
    members: list[tuple[int, int]]

    @property
    def room(self) -> int:
        """Bytes to set aside for it; a multiple of the alignment."""
        return -(-(self.start % _ALIGNMENT + self.source.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _sources(checkpoint: Mapping[str, Any]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Every tensor that is copied as bytes, by identity, and the contiguous tensor that holds its elements."""
    for tensor in tensors_in(checkpoint):
        if isinstance(tensor, FlatShard):
            yield id(tensor), (tensor, tensor.local)
        elif is_plain(tensor) and not tensor.is_meta:
            yield id(tensor), (tensor, tensor.detach().resolve_conj().resolve_neg().contiguous())


def _runs(sources: Mapping[int, tuple[Tensor, Tensor]]) -> list[_Run]:
    """The ranges to copy, in the order of their storages."""
    storages: dict[Hashable, tuple[Tensor, list[tuple[int, int, int]]]] = {}
    for identity, (_, source) in sources.items():
        if source.numel():
            start, key = 0, memory_identity(source)
            if not isinstance(source, OffloadedTensor):
                start = int(source.storage_offset()) * source.dtype.itemsize
                key = source.device, source.untyped_storage().data_ptr()
            storages.setdefault(key, (source, []))[1].append((start, start + source.nbytes, identity))
    runs = []
    for source, ranges in storages.values():
        ranges.sort()
        group, end = [ranges[0]], ranges[0][1]
        for item in ranges[1:]:
            if item[0] > end + _GAP_NBYTES:
                runs.append(_run(source, group, end))
                group, end = [], item[1]
            group.append(item)
            end = max(end, item[1])
        runs.append(_run(source, group, end))
    return runs


def _run(source: Tensor, ranges: list[tuple[int, int, int]], end: int) -> _Run:
    start, memory = ranges[0][0], source
    if not isinstance(source, OffloadedTensor):
        memory = torch.empty(0, dtype=torch.uint8, device=source.device)
        memory.set_(source.untyped_storage(), start, (end - start,), (1,))
    return _Run(memory, start, [(identity, begin - start) for begin, _, identity in ranges])


def _rebuilt(tensor: Tensor, source: Tensor, place: Tensor | None, offset: int) -> Tensor:
    """The copy of ``tensor``, with a storage of exactly its bytes: ``torch.save`` writes whole storages."""
    flat = torch.empty(0, dtype=source.dtype)
    if place is not None:
        begin = int(place.storage_offset()) + offset
        flat.set_(place.untyped_storage()[begin : begin + source.nbytes], 0, (source.numel(),), (1,))
    if isinstance(tensor, FlatShard):
        return FlatShard(flat, tensor.shape, tensor.start)
    shaped = flat.view(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(shaped, requires_grad=tensor.requires_grad)
    return shaped if type(tensor) is Tensor else torch.nn.Buffer(shaped)
