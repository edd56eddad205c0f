"""Process groups: who agrees, who shares a flat buffer, and what an average is divided by.

Four groups of the same ranks, because collectives pair up by order within a group: gathers of parameters, reductions
of gradients, the control plane and checkpoints (written by a thread of their own, or asked for at any moment by a
signal) each keep an order that never depends on how the others interleave.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_zero._torch import default_store, new_group
from lightning_zero.comm.collectives import Pending
from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.sockets import connections
from lightning_zero.comm.watch import watch_ranks

if TYPE_CHECKING:
    from lightning_zero.comm.shared_memory.transport import Transport

__all__ = ["Groups", "ShardGroup", "destroy_default_group_at_exit"]

_SHORTEST_WAIT = timedelta(milliseconds=1)
_NUMBERS = itertools.count()  # alike on all ranks, because groups are created together


def destroy_default_group_at_exit() -> None:
    """End the default group while Python still runs; see [Note: groups end before the interpreter does]."""
    owner = os.getpid()

    def destroy() -> None:
        if dist.is_initialized() and os.getpid() == owner:
            dist.destroy_process_group()

    atexit.register(destroy)


@dataclass(frozen=True)
class ShardGroup:
    """The ranks whose shards together make a flat buffer whole: this process's place among them, and how many."""

    rank: int
    world_size: int


@dataclass(eq=False)
class Groups:
    """The process groups of one engine, each with its own order of calls.

    Who agrees (``control``), who shares a flat buffer (``shard``) and how many gradients an average is made of
    (``divisor``) are three things, although today all of them are all ranks.

    [Note: groups end before the interpreter does]
    A gloo group has threads, and a thread that lets go of the last tensor of a transfer needs the interpreter for it.
    If that happens while the interpreter is shutting down, the process aborts, after a training that went well. So the
    groups are given back, and their threads joined, while Python still runs. That takes no other rank: with a dead one
    transfers under way fail at once, with a silent one after the group's timeout at the latest.
    """

    gather: dist.ProcessGroup | None  # carries parameters
    reduce: dist.ProcessGroup | None  # carries gradients
    control: ControlGroup  # carries agreements between hosts; all ranks
    checkpoint: ControlGroup  # carries what hosts agree on while they save; all ranks
    shard: ShardGroup  # who takes part in a gather or a reduction
    divisor: int  # of a sum of gradients
    # Transfers that an error left under way. They belong to the groups and not to an engine: the ranks never fail at
    # the same moment, and gloo's thread spins for ever, and serves nobody, when a peer sends into a receive that was
    # let go of.
    abandoned: list[Pending] = field(default_factory=list)
    timeout: timedelta | None = None  # of any of their calls; ``None``: torch's default

    @classmethod
    def create(cls, backend: str | None = None, timeout: timedelta | None = None) -> Groups:
        """The four groups over all ranks of the default group; none for a single process.

        Made once per default group, backend and timeout: a process that runs many Trainers, one after the other, must
        not pile up threads and sockets.

        Collective: every rank of the default group.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None, None, ControlGroup(None), ControlGroup(None), ShardGroup(0, 1), divisor=1)
        default = dist.group.WORLD
        if default is None:
            raise RuntimeError("There is no default process group; the Trainer makes one in setup_environment.")
        for groups in list(_LIVE):
            if groups._default() is not default:
                groups.destroy()  # their default group has ended, and nobody told them
            elif groups._asked == (backend, timeout):
                return groups
        rank, world_size = dist.get_rank(), dist.get_world_size()
        watch_ranks()
        gather = _made(backend, timeout, "parameters")
        reduce = _made(backend, timeout, "gradients")
        control = ControlGroup(_made("gloo", timeout, "agreements"), rank, world_size)
        checkpoint = ControlGroup(_made("gloo", timeout, "checkpoints"), rank, world_size)
        groups = cls(gather, reduce, control, checkpoint, ShardGroup(rank, world_size), world_size, timeout=timeout)
        groups._default, groups._asked = weakref.ref(default), (backend, timeout)
        atexit.register(groups._at_exit)
        _LIVE.append(groups)
        return groups

    def __post_init__(self) -> None:
        self.transport: Transport | None = None  # to each other's memory, once the ranks are connected
        self.problem = ""  # why they could not be connected
        self.told = ""  # what the log says about it
        self._owner = os.getpid()
        self._default: Callable[[], dist.ProcessGroup | None] = lambda: None  # weak: it ends without them
        self._asked: tuple[str | None, timedelta | None] | None = None
        self._meetings: Counter[str] = Counter()
        self._number = next(_NUMBERS)  # the store outlives the groups, so that its keys must not begin anew

    def rendezvous(self, occasion: str, note: str, seconds: float) -> dict[int, str]:
        """Say that this rank is here, and see who else comes to their next call for this occasion.

        Not collective: a rank that failed alone cannot start a collective, because the others are in the middle of
        another one, and would wait in it for this rank. The store of the default group has no order.

        Returns:
            The notes of the ranks that came within so many seconds, by rank; this rank's own among them. If they are
            not complete, this rank counts as not here for those who look later.
        """
        self._meetings[occasion] += 1
        key = f"lightning_zero/{self._number}/{occasion}/{self._meetings[occasion]}"
        rank, world_size = self.control.rank, self.control.world_size
        notes = {rank: note}
        if world_size == 1:
            return notes
        store, deadline = default_store(), time.monotonic() + seconds
        with suppress(RuntimeError):  # the process that serves the store is gone
            store.set(f"{key}/{rank}", note)
            for other in range(world_size):
                left = max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT)
                with suppress(RuntimeError):  # not there
                    store.wait([f"{key}/{other}"], left)
                    notes[other] = store.get(f"{key}/{other}").decode()
            if len(notes) < world_size:
                store.delete_key(f"{key}/{rank}")  # who comes later must not take this rank for one that waits
        return notes

    def destroy(self) -> None:
        """Give the groups back and join their threads. May be called again.

        Collective: every rank.
        """
        atexit.unregister(self._at_exit)
        if self in _LIVE:
            _LIVE.remove(self)
        groups = [self.gather, self.reduce, self.control.process_group, self.checkpoint.process_group]
        self.abandoned.clear()
        if self.transport is not None:
            self.transport.close()
            self.transport = self.control.shortcut = None
        self.gather = self.reduce = self.control.process_group = self.checkpoint.process_group = None
        while groups:
            group = groups.pop()  # a group's threads end with the last reference to it
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # gone already, with the default group
                    dist.destroy_process_group(group)

    def _at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked process has the group but none of its threads
            self.destroy()


def _made(backend: str | None, timeout: timedelta | None, description: str) -> dist.ProcessGroup:
    """A group of all ranks, whose connections are known. Collective: every rank."""
    with connections.opened() as opened:
        group = new_group(backend, timeout, description)
    connections[group.group_name] = opened
    return group


_LIVE: list[Groups] = []  # not destroyed yet
