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
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.record import FlatShard, memory_identity, tensors_in
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.save import no_garbage_collection
from lightning_zero.checkpoint.storage.publish import remove
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError
from lightning_zero.offload.host import host_memory

__all__ = ["Saver", "Snapshots"]

Write = Callable[[Mapping[str, Any], ControlGroup], Sequence[str] | None]


class Saver:
    """The saves and removals of one run, in order. See [Note: In the background].

    Args:
        control: the ranks, through a group of its own. While a save is in flight it belongs to its thread: ``wait``
            before using it for anything else.
    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._snapshots = Snapshots()
        self._underway: tuple[str, Future[list[str]]] | None = None  # what it is, and its end, with warnings
        self._warnings: list[str] = []
        self._removals: list[str | os.PathLike[str]] = []

    def save(self, write: Write, checkpoint: Mapping[str, Any], *, what: str, asynchronous: bool) -> None:
        """Write a checkpoint, after the removals that were queued. Collective: every rank.

        Args:
            write: writes the checkpoint it is given, with the control group it is given, or raises ``CheckpointError``
                on every rank. Collective. Called here, or in a thread; then the checkpoint is a snapshot. What it
                returns are warnings.
            checkpoint: not changed. In the background it may be changed as soon as this returns.
            what: the step, to follow "could not": "save the checkpoint '/runs/last.ckpt'".
            asynchronous: write in the background.

        Raises:
            CheckpointError: on every rank, if the save in the background before this one failed (this one is not begun
                then), or if this one did, unless it is in the background; also if it cannot be copied for that.
        """
        self._settle()
        if asynchronous:
            checkpoint = self._snapshot(checkpoint, what)
        removals, self._removals = self._removals, []

        def run() -> list[str]:
            return [*self._remove_all(removals), *(write(checkpoint, self._control) or ())]

        if asynchronous:
            self._begin(what, run)
        else:
            self._warnings += run()
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
            collective: ``False`` on a rank that is handling an exception: a failure of the save in flight, which ends
                at the latest with its group's timeout, is a warning then.

        Raises:
            CheckpointError: on every rank and once, if the save in flight failed on any.
        """
        try:
            self._settle()
        except Exception as error:
            if collective:
                raise
            self._warnings.append(str(error))
        removals, self._removals = self._removals, []
        self._warnings += self._remove_all(removals)
        self._snapshots = Snapshots()
        self._warn()

    def _settle(self) -> None:
        """Wait for the save in flight, and raise its failure: what its success would make superfluous stays."""
        if self._underway is None:
            return
        what, done = self._underway
        failure = done.exception()
        self._underway = None
        if failure is None:
            self._warnings += done.result()
            return
        self._removals.clear()
        if not isinstance(failure, CheckpointError):
            raise failure
        raise CheckpointError(
            f"{failure}\nThis was the attempt to {what} in the background. Training went on meanwhile; checkpoints "
            "that were saved before are intact, and none was deleted for it."
        ) from failure

    def _snapshot(self, checkpoint: Mapping[str, Any], what: str) -> dict[str, Any]:
        """A copy; ``CheckpointError`` on every rank if any rank could make none. Collective."""
        taken: list[dict[str, Any]] = []

        def take() -> None:
            with no_garbage_collection():
                taken.append(self._snapshots.take(checkpoint))

        advice = (
            "A save in the background first copies the checkpoint to host memory. Leave out of it what cannot "
            "be copied, free memory on the host, or use CheckpointPolicy(async_save=False)."
        )
        self._control.together(f"copy what is needed to {what}", take, advice=advice)
        return taken[0]

    def _begin(self, what: str, run: Callable[[], list[str]]) -> None:
        done: Future[list[str]] = Future()

        def run_here() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(run())
                except BaseException as error:
                    done.set_exception(error)
                    sys.stderr.write(f"Could not {what} in the background: {error}\n")  # perhaps nobody waits for it

        self._underway = what, done
        try:
            threading.Thread(target=run_here, name=f"lightning_zero: {what}", daemon=False).start()
        except RuntimeError:  # no more threads here; the other ranks have begun
            run_here()
        except BaseException:  # an interrupt, perhaps of waiting for the thread to begin
            if done.cancel():
                self._underway = None
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


_ALIGNMENT = 64  # bytes


class Snapshots:
    """Copies of checkpoints, one at a time, in host memory that is taken once and kept: taking it is what is slow.

    It is taken anew only when it is too small, and given back with this object. For tensors on an accelerator it is
    page-locked.
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
        copy. The rest is a deep copy, which may raise whatever copying raises, for example ``TypeError`` for a lock.
        """
        with untracked():
            # Every tensor that is copied as bytes, and the contiguous tensor that holds its elements.
            sources: dict[int, tuple[Tensor, Tensor]] = {}
            for tensor in tensors_in(checkpoint):
                if isinstance(tensor, FlatShard):
                    sources[id(tensor)] = tensor, tensor.local
                elif is_plain(tensor) and not tensor.is_meta:
                    sources[id(tensor)] = tensor, tensor.detach().resolve_conj().resolve_neg().contiguous()
            places: dict[Hashable, int] = {}
            end = 0
            for _, elements in sources.values():
                if (memory := memory_identity(elements)) not in places:
                    places[memory] = end
                    end += -(-elements.nbytes // _ALIGNMENT) * _ALIGNMENT
            devices = {elements.device for _, elements in sources.values()} - {torch.device("cpu")}
            if end > self.nbytes:
                self._memory = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
                self._memory = host_memory(end, bool(devices))
            copied: dict[int, Any] = {}
            for key, (tensor, elements) in sources.items():
                flat = torch.empty(0, dtype=elements.dtype)
                if elements.numel():  # with a storage of exactly its bytes: ``torch.save`` writes whole storages
                    begin = places[memory_identity(elements)]
                    storage = self._memory.untyped_storage()[begin : begin + elements.nbytes]
                    flat.set_(storage, 0, (elements.numel(),), (1,))
                    flat.copy_(elements.view(-1), non_blocking=True)
                if isinstance(tensor, FlatShard):
                    copied[key] = tensor.with_elements(flat)
                elif isinstance(tensor, torch.nn.Parameter):
                    copied[key] = torch.nn.Parameter(flat.view(tensor.shape), requires_grad=tensor.requires_grad)
                else:
                    shaped = flat.view(tensor.shape)
                    copied[key] = shaped if type(tensor) is Tensor else torch.nn.Buffer(shaped)
            for device in devices:
                torch.accelerator.synchronize(device)
            return copy.deepcopy(dict(checkpoint), copied)
