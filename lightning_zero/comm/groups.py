"""Process groups and the agreement between ranks.

Four groups of the same ranks, because collectives pair up by order within a group: gathers of parameters, reductions
of gradients, the control plane and checkpoints (written by a thread of their own, or asked for at any moment by a
signal) each keep an order that never depends on how the others interleave.
"""

from __future__ import annotations

import atexit
import itertools
import os
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from lightning_zero._torch import new_group
from lightning_zero.comm.rendezvous import attend
from lightning_zero.errors import CommunicationError, DivergenceError, OffloadError

if TYPE_CHECKING:
    from lightning_zero.comm.collectives import Pending
    from lightning_zero.comm.shared_memory.transport import Transport

__all__ = ["ControlGroup", "Groups", "destroy_default_group_at_exit", "naming_failures"]

_SAME_PROGRAM = (
    "Every rank must build the same model with the same strategy settings; look for code that depends on the "
    "rank, on a file only some ranks see, or on a random choice made before the seed was set."
)


def destroy_default_group_at_exit() -> None:
    """End the default group while Python still runs; see [Note: groups end before the interpreter does]."""
    owner = os.getpid()

    def destroy() -> None:
        if dist.is_initialized() and os.getpid() == owner:
            dist.destroy_process_group()

    atexit.register(destroy)


@contextmanager
def naming_failures(what: str, rank: int) -> Iterator[None]:
    """Turn a transport's error (a dead peer, a timeout) into one that says what was being done and what to do next."""
    try:
        yield
    except RuntimeError as error:
        raise_failure(what, rank, error)


def raise_failure(what: str, rank: int, error: RuntimeError) -> NoReturn:
    """Raise what ``naming_failures`` makes of an error."""
    if isinstance(error, DivergenceError | CommunicationError):
        raise error
    raise CommunicationError(
        f"Rank {rank}: {what} did not complete: {error}\n"
        "Another rank has died, raised an error, or did not arrive within the process group's timeout. Look at the "
        "log of the rank that stopped first. Checkpoints that were saved before are intact."
    ) from error


class ControlGroup:
    """Small agreements between the hosts of all ranks, never through the accelerator.

    Args:
        process_group: a gloo group over all ranks, or ``None`` when there is one rank only.
        rank: this process in that group.
        world_size: ranks in that group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int = 0, world_size: int = 1) -> None:
        self.process_group = process_group
        self.rank = rank
        self.world_size = world_size
        self.transport: Transport | None = None
        """What carries numbers faster where all ranks are on one host, and lets them serve each other meanwhile."""
        self._rows: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Give every rank's integers to every rank.

        Args:
            values: 64-bit integers, equally many on every rank.

        Returns:
            One list per rank, in rank order.

        Collective: every rank.
        """
        if self.world_size == 1:
            return [list(values)]
        packed = self._exchange_bytes(struct.pack(f"<{len(values)}q", *values), "the agreement with the other ranks")
        if packed is not None:
            return [list(struct.unpack(f"<{len(values)}q", row)) for row in packed]
        if len(values) not in self._rows:
            with torch.inference_mode(False):
                row = torch.zeros(len(values), dtype=torch.int64)
                self._rows[len(values)] = (row, [torch.zeros_like(row) for _ in range(self.world_size)])
        row, rows = self._rows[len(values)]
        row.copy_(torch.tensor(values, dtype=torch.int64))
        with naming_failures("the agreement with the other ranks", self.rank):
            dist.all_gather(rows, row, group=self.process_group)
        return [r.tolist() for r in rows]

    def sum_float64(self, values: Sequence[float]) -> list[float]:
        """Sum float64 numbers over the ranks, in rank order on every rank, so that all get the same bits.

        Collective: every rank.
        """
        if self.world_size == 1:
            return list(values)
        packed = self._exchange_bytes(struct.pack(f"<{len(values)}d", *values), "the sum of a gradient norm")
        if packed is not None:
            ranks = [struct.unpack(f"<{len(values)}d", row) for row in packed]
            return [float(sum(column[1:], column[0])) for column in zip(*ranks, strict=True)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.zeros_like(mine) for _ in range(self.world_size)]
        with naming_failures("the sum of a gradient norm", self.rank):
            dist.all_gather(rows, mine, group=self.process_group)
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        return [float(v) for v in total.tolist()]

    def _exchange_bytes(self, row: bytes, what: str) -> list[bytes] | None:
        if self.transport is None:
            return None
        with naming_failures(what, self.rank):
            return self.transport.exchange(row, what)

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Which of many flags is set on at least one rank.

        Args:
            flags: 1-D uint8 on the CPU, equally long on every rank. Overwritten with the answer.

        Collective: every rank.
        """
        if self.world_size > 1:
            with naming_failures("the agreement on used parameters", self.rank):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        return flags

    def agree_any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank. Collective: every rank."""
        return any(row[0] for row in self.exchange([int(flag)]))

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank's (picklable, small) object to every rank. Collective: every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with naming_failures("the agreement with the other ranks", self.rank):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_together(self, failure: BaseException | None, what: str, advice: str = "") -> None:
        """Raise on every rank if something went wrong on one.

        Args:
            failure: what went wrong here, if something did.
            what: what was tried, in words that follow "could not".
            advice: what to do now.

        Raises:
            OffloadError: naming the first rank and its reason.

        Collective: every rank.
        """
        if not self.agree_any(failure is not None):
            return
        reason = None
        if failure is not None:
            reason = str(failure) if isinstance(failure, OffloadError) else f"{type(failure).__name__}: {failure}"
        reasons = self.gather_objects(reason)
        rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
        message = f"Rank {rank} could not {what}: {reasons[rank]}"
        raise OffloadError(f"{message}\n{advice}" if advice else message) from failure

    def barrier(self) -> None:
        """Wait until every rank is here. Collective: every rank."""
        self.exchange([0])

    def agree_equal(self, what: str, lines: Sequence[str], fingerprint: str, advice: str = _SAME_PROGRAM) -> None:
        """Raise on every rank unless all ranks hold the same lines.

        Args:
            what: what the lines describe, for the message.
            lines: the description, compared line by line only when the fingerprints differ.
            fingerprint: hex digest over the lines.
            advice: what to do if they differ.

        Raises:
            DivergenceError: on every rank, naming the first rank that differs from rank 0 and the first lines that do.

        Collective: every rank.
        """
        prints = self.gather_objects(fingerprint)
        other = next((rank for rank, value in enumerate(prints) if value != prints[0]), None)
        if other is None:
            return
        texts = self.gather_objects(list(lines))
        pairs = list(zip_longest(texts[0], texts[other], fillvalue="(nothing more)"))
        different = [f"  rank 0: {a}\n  rank {other}: {b}\n" for a, b in pairs if a != b]
        raise DivergenceError(
            f"Rank {other} has another {what} than rank 0. First differences:\n{''.join(different[:3])}{advice}"
        )


@dataclass(eq=False)
class Groups:
    """The process groups of one engine: the same ranks four times, each with its own order of calls.

    Args:
        gather: carries parameters.
        reduce: carries gradients.
        control: carries agreements between hosts.
        checkpoint: carries what hosts agree on while they save.
        abandoned: transfers that an error left under way. They belong to the groups and not to an engine: the ranks
            never fail at the same moment, and gloo's thread spins for ever, and serves nobody, when a peer sends into
            a receive that was let go of.
        timeout: how long any of their calls may take; ``None``: torch's default.

    [Note: groups end before the interpreter does]
    A gloo group has threads, and a thread that lets go of the last tensor of a transfer needs the interpreter for it.
    If that happens while the interpreter is shutting down, the process aborts, after a training that went well. So the
    groups are given back, and their threads joined, while Python still runs. That takes no other rank: with a dead one
    transfers under way fail at once, with a silent one after the group's timeout at the latest.
    """

    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    control: ControlGroup
    checkpoint: ControlGroup
    abandoned: list[Pending] = field(default_factory=list)
    timeout: timedelta | None = None

    @classmethod
    def create(cls, backend: str | None = None, timeout: timedelta | None = None) -> Groups:
        """The four groups over all ranks of the default group; none for a single process.

        Made once per default group, backend and timeout: a process that runs many Trainers, one after the other, must
        not pile up threads and sockets.

        Collective: every rank of the default group.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None, None, ControlGroup(None), ControlGroup(None))
        key = (backend, timeout)
        existing = _CREATED.setdefault(_default_group(), {}).get(key)
        if existing is not None and existing.control.process_group is not None:
            return existing
        for groups in [groups for groups in _LIVE if groups._default() is not _default_group()]:
            groups.destroy()  # their default group has ended, and nobody told them
        rank, world_size = dist.get_rank(), dist.get_world_size()
        gather = new_group(backend, timeout)
        reduce = new_group(backend, timeout)
        control = new_group("gloo", timeout)
        checkpoint = new_group("gloo", timeout)
        groups = cls(
            gather,
            reduce,
            ControlGroup(control, rank, world_size),
            ControlGroup(checkpoint, rank, world_size),
            timeout=timeout,
        )
        groups._owner = os.getpid()
        groups._default = weakref.ref(_default_group())
        atexit.register(groups._at_exit)
        _CREATED[_default_group()][key] = groups
        _LIVE.append(groups)
        return groups

    def __post_init__(self) -> None:
        self.transport: Transport | None = None
        """What the ranks read each other's memory through, once they are connected."""
        self.problem = ""
        """Why they could not be connected."""
        self.told = ""
        """What the log says about it."""
        self._owner: int | None = None
        self._default: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._meetings: Counter[str] = Counter()
        self._number = next(_NUMBERS)  # the store outlives the groups, so that its keys must not begin anew

    def attend(self, occasion: str, note: str, seconds: float) -> dict[int, str]:
        """Which ranks come to their next call for this occasion within ``seconds``. See ``attendance.attend``.

        Not collective: a rank that does not come is what it finds out.
        """
        self._meetings[occasion] += 1
        key = f"lightning_zero/{self._number}/{occasion}/{self._meetings[occasion]}"
        return attend(key, note, self.control.rank, self.control.world_size, seconds)

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
            self.transport = self.control.transport = None
        self.gather = self.reduce = self.control.process_group = self.checkpoint.process_group = None
        while groups:
            group = groups.pop()  # a group's threads end with the last reference to it
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # gone already, with the default group
                    dist.destroy_process_group(group)

    def _at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked process has the group but none of its threads
            self.destroy()


_NUMBERS = itertools.count()  # alike on all ranks, because groups are created together

_LIVE: list[Groups] = []  # not destroyed yet

# Weak: groups end with the default group they were made from.
_CREATED: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str | None, timedelta | None], Groups]] = (
    weakref.WeakKeyDictionary()
)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no default process group; the Trainer makes one in setup_environment.")
    return group
