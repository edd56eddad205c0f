"""Agreements between the hosts of all ranks, and errors that say what was being done."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightning_zero.comm.waiting import ANY_AGREEMENT, NOTES, Note, current_watch, doing
from lightning_zero.errors import CheckpointError, CommunicationError, DivergenceError, OffloadError
from lightning_zero.registry import installed

__all__ = [
    "ABOUT_GRADIENTS",
    "ControlGroup",
    "Totals",
    "collect",
    "failure_text",
    "naming_failures",
    "parent_rank",
    "raise_failure",
]

ABOUT_GRADIENTS = "the agreement on a norm or an overflow of gradients"
T = TypeVar("T")
_NAMED_RANKS = 4  # how many failing ranks a message spells out

_SAME_PROGRAM = (
    "Every rank must build the same model with the same strategy settings; look for code that depends on the "
    "rank, on a file only some ranks see, or on a random choice made before the seed was set."
)


_NO_WATCH = "What the other ranks did is not known, because this copy of lightning_zero has no extension 'watch'.\n"

_inherited: tuple[Any, int] | None = None  # in a process that a rank has forked: the default group, and the rank


def parent_rank() -> int | None:
    """The rank that this process was forked from, as a loader's worker is; ``None`` where it is a rank itself."""
    return _inherited[1] if _inherited is not None and _inherited[0] is dist.group.WORLD else None


def _after_fork() -> None:
    global _inherited
    _inherited = (dist.group.WORLD, dist.get_rank()) if dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def naming_failures(what: str, rank: int, group: Any = None) -> Iterator[None]:
    """Turn a transport's error (a dead peer, a timeout) into one that says what was being done and what to do next.

    What is done, and the ``group`` that carries it, is noted meanwhile, for the errors of other ranks. In a process
    that a rank has forked nothing is done: it would write into the rank's connections.
    """
    if _inherited is not None and (parent := parent_rank()) is not None:
        raise CommunicationError(
            f"{what} was asked for in a process that rank {parent} has forked (a worker of a DataLoader, say), which "
            "cannot reach the other ranks. Do it in the rank itself, in a step method or a hook, and let the worker "
            "return what it needs."
        )
    notes = NOTES.here
    notes.append(Note(what, group))
    try:
        yield
    except RuntimeError as error:
        raise_failure(what, rank, error)
    finally:
        notes.pop()


def raise_failure(what: str, rank: int, error: RuntimeError) -> NoReturn:
    """Raise what ``naming_failures`` makes of an error."""
    if isinstance(error, DivergenceError | CommunicationError):
        raise error
    watch = current_watch()
    known = watch.explain() if watch is not None else "" if installed("watch") else _NO_WATCH
    if watch is not None and watch.verdict:
        raise DivergenceError(f"Rank {rank}: {what} did not complete. {known}") from error
    raise CommunicationError(
        f"Rank {rank}: {what} did not complete: {error}\n{known}"
        "Another rank has died, raised an error, or did not arrive within the process group's timeout. Look at the "
        "log of the rank that stopped first. Checkpoints that were saved before are intact."
    ) from error


class Totals(Protocol):
    """Who puts numbers of all ranks together, on the device that they are on."""

    device: torch.device

    def total(self, numbers: torch.Tensor, largest: bool = False) -> torch.Tensor:
        """Sum float64 numbers over the ranks, or take the largest of those that are not negative, NaN if one is.

        Args:
            numbers: 1-D, on ``device``. May be overwritten.
            largest: instead of the sum.

        Returns:
            The same bits on every rank. Collective: every rank.
        """


class ControlGroup:
    """Small agreements between the hosts of all ranks, never through the accelerator.

    The process group is a gloo group, or ``None`` when there is one rank only.
    """

    device = torch.device("cpu")

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int = 0, world_size: int = 1) -> None:
        self.process_group = process_group
        self.rank = rank
        self.world_size = world_size
        self.shortcut: Callable[[bytes, str], list[bytes] | None] | None = None
        """A faster way for few bytes, where all ranks are on one host; its answer is ``None`` where they are many."""
        self.counted: Sequence[int] = range(world_size)
        """The ranks whose parts make up a whole, in its order: where several groups have the same, this one's."""

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's 64-bit integers in rank order, equally many on each. Collective: every rank."""
        return self._exchange("q", values, ANY_AGREEMENT)

    def total(self, numbers: torch.Tensor, largest: bool = False) -> torch.Tensor:
        """As ``Totals`` has it: summed in the order of the parts. Collective: every rank."""
        return self.put_together(self._exchange("d", numbers.tolist(), ABOUT_GRADIENTS), largest)

    def put_together(self, rows: Sequence[Sequence[float]], largest: bool = False) -> torch.Tensor:
        """Of a row of numbers from each rank, the sums or the largest of those parts that make up a whole. Local."""
        values = torch.tensor([rows[rank] for rank in self.counted], dtype=torch.float64, device="cpu")
        return values.amax(0) if largest else sum(values[1:], values[0])

    def _exchange(self, code: str, values: Sequence[Any], what: str) -> list[list[Any]]:
        """Every rank's numbers, of a type with 8 bytes: ``q`` for int64, ``d`` for float64."""
        if self.world_size == 1:
            return [list(values)]
        with naming_failures(what, self.rank, self.process_group):
            layout = f"={len(values)}{code}"
            if self.shortcut is not None and (packed := self.shortcut(struct.pack(layout, *values), what)) is not None:
                return [list(struct.unpack(layout, row)) for row in packed]
            mine = torch.tensor(values, dtype=torch.int64 if code == "q" else torch.float64, device="cpu")
            return self._all_rows(mine).tolist()

    def _all_rows(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's row, in rank order.

        In as many exchanges as the number of ranks has binary digits, where gloo's own goes round a ring: each doubles
        the rows that a rank has. Source: Bruck et al., "Efficient algorithms for all-to-all communications in
        multiport message-passing systems" (1997), section 3.
        """
        rank, size, group = self.rank, self.world_size, self.process_group
        rows = mine.new_empty(size, len(mine))  # of this rank, the next one, and so on round
        rows[0] = mine
        had = 1
        while had < size:
            count = min(had, size - had)
            coming: Any = dist.irecv(rows[had : had + count], group=group, group_src=(rank + had) % size)
            going: Any = dist.isend(rows[:count], group=group, group_dst=(rank - had) % size)
            coming.wait()
            going.wait()
            had += count
        return rows.roll(rank, 0)

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Overwrite flags (1-D, uint8, on the CPU) with those set on at least one rank. Collective: every rank."""
        if self.world_size > 1:
            with naming_failures("the agreement on used parameters", self.rank, self.process_group):
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
        with naming_failures(ANY_AGREEMENT, self.rank, self.process_group):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_together(self, failure: BaseException | None, what: str, advice: str = "") -> None:
        """Raise an ``OffloadError`` on every rank, with the first rank's reason, if something went wrong on one.

        ``what`` was tried, in words that follow "could not"; ``advice`` is what to do now. Collective: every rank.
        """
        with doing(what):
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
        """Raise a ``DivergenceError`` on every rank, with the first different lines, unless all hold the same ones.

        The lines describe ``what``, and are compared only where their fingerprints, hex digests, differ. ``advice`` is
        what to do then. Collective: every rank.
        """
        with doing(what):
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


def collect(control: ControlGroup, what: str, action: Callable[[], T]) -> list[T]:
    """Run ``action`` here and give every rank's result, which can be pickled, to every rank, in rank order.

    Args:
        control: the ranks.
        what: the step, to follow "could not": "write the data of /runs/last.ckpt".
        action: returns something small.

    Raises:
        CheckpointError: on every rank if ``action`` raised on any, naming the ranks and their reasons.

    Collective: every rank.
    """
    value: Any = None
    error: BaseException | None = None
    failure: str | None = None
    try:
        value = action()
    except BaseException as raised:
        error = raised
        failure = f"{type(error).__name__} on host {socket.gethostname()}: {error}"
    with doing(what):
        outcomes: list[tuple[Any, str | None]] = control.gather_objects((value, failure))
    if error is not None and not isinstance(error, Exception):
        raise error  # an interrupt stays one on the rank that received it
    failures = {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason is not None}
    if failures:
        raise CheckpointError(failure_text(what, failures)) from error
    return [found for found, _ in outcomes]


def failure_text(what: str, failures: Mapping[int, str]) -> str:
    """The message of a step that failed on some ranks."""
    named = [f"  rank {rank}: {text}" for rank, text in sorted(failures.items())[:_NAMED_RANKS]]
    if len(failures) > _NAMED_RANKS:
        named.append(f"  ... and {len(failures) - _NAMED_RANKS} more ranks.")
    ranks = "rank" if len(failures) == 1 else "ranks"
    numbers = ", ".join(map(str, sorted(failures)[:_NAMED_RANKS]))
    return "\n".join([f"Could not {what}: failed on {ranks} {numbers}.", *named])
