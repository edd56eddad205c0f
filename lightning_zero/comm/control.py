"""Agreements between the hosts of all ranks, errors that say what was being done, and notes of what is waited for.

Where a thread waits for other ranks it notes for what (``doing``). The extension ``watch`` reads the notes, for the
errors of those that wait for this rank. Without it they cost a microsecond, and waits end at the timeout.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import socket
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate, pairwise, zip_longest
from operator import and_, or_
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_zero.errors import CheckpointError, CommunicationError, DivergenceError, some
from lightning_zero.registry import extension, installed

__all__ = ["ABOUT_GRADIENTS", "ANY_AGREEMENT", "LOOK_SECONDS", "ControlGroup", "Note", "current_watch", "doing"]
__all__ += ["naming_failures", "notes_of", "parent_rank", "passed_on", "raise_failure", "raising", "verdict"]
__all__ += ["watch_ranks"]

ABOUT_GRADIENTS = "the agreement on a norm or an overflow of gradients"
T = TypeVar("T")
_NAMED_RANKS = 4  # how many failing ranks a message spells out
_FEW_RANKS = 16  # of so many, each one's numbers are sent as they are
_WORD = 2**64 - 1

_SAME_PROGRAM = (
    "Every rank must build the same model with the same strategy settings; look for code that depends on the "
    "rank, on a file only some ranks see, or on a random choice made before the seed was set."
)

_ELSEWHERE = (
    "The ranks are in different places of the training program:\n{}\n"
    "Every rank must run the same number of batches, backward passes and optimizer steps. Usual causes: a "
    "training_step that returned None on some ranks, dataloaders of different length, a norm or sum of a gradient that "
    "only some ranks take, or a branch that depends on the rank's data and calls backward or the model another number "
    "of times."
)

_NO_WATCH = "What the other ranks did is not known, because this copy of lightning_zero has no extension 'watch'.\n"

ANY_AGREEMENT = "the agreement with the other ranks"
"""What is waited for, where nobody knows more."""
LOOK_SECONDS = 1.0
"""How long a wait lasts before it asks for the ``verdict`` again."""

passed_on: dict[str, int] = {}
"""How many transfers of a kind this rank has left to threads that need all other ranks', by the kind's name."""

_notes: defaultdict[int, list[Note]] = defaultdict(list)  # by thread, the newest last


class Note(NamedTuple):
    """What a thread does with the other ranks: see ``doing``."""

    what: str  # for people
    # What carries it; a name where that is no process group. ``None``: this note is text only.
    group: dist.ProcessGroup | str | None = None
    place: int = -1  # which transfer of the group it is; -1 for the one that began last
    members: Sequence[int] = ()  # the ranks that have to come, if they are not those of the group
    moment: Callable[[], int] = int  # a number that changes while something is heard of others


@contextmanager
def doing(what: str, *more: Any) -> Iterator[None]:
    """Have ``Note(what, *more)`` among this thread's."""
    notes = _notes[threading.get_ident()]
    notes.append(Note(what, *more))
    try:
        yield
    finally:
        notes.pop()


def notes_of(thread: int) -> list[Note]:
    """The notes of a thread, the newest last."""
    return list(_notes.get(thread, ()))


def watch_ranks() -> Any:
    """Watch the ranks of the default group from this thread's process on, if the extension is there. Not collective."""
    return extension("watch").watch_ranks() if installed("watch") else None


def current_watch() -> Any:
    """What watches the ranks of this process; ``None`` if nothing does."""
    return extension("watch").current_watch() if installed("watch") else None


def verdict() -> str:
    """Why no rank can ever go on; empty while one may."""
    watch = current_watch()
    return "" if watch is None else watch.verdict


_inherited: tuple[Any, int] | None = None  # in a process that a rank has forked: the default group, and the rank


def parent_rank() -> int | None:
    """The rank that this process was forked from, as a loader's worker is; ``None`` where it is a rank itself."""
    return _inherited[1] if _inherited is not None and _inherited[0] is dist.group.WORLD else None


def _after_fork() -> None:
    global _inherited
    _notes.clear()
    _inherited = (dist.group.WORLD, dist.get_rank()) if dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def naming_failures(what: str, rank: int, *more: Any) -> Iterator[None]:
    """Turn a transport's error (a dead peer, a timeout) into one that says what was being done and what to do next.

    Meanwhile ``Note(what, *more)`` is among this thread's. In a process that a rank has forked nothing is done: it
    would write into the rank's connections.
    """
    if _inherited is not None and (parent := parent_rank()) is not None:
        raise CommunicationError(
            f"{what} was called in a process that rank {parent} has forked (a worker of a DataLoader, say), which "
            "cannot reach the other ranks. Do it in the rank itself, in a step method or a hook, and let the worker "
            "return what it needs."
        )
    notes = _notes[threading.get_ident()]
    notes.append(Note(what, *more))
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


_DECIMAL = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?!\w|\.\w)")


class Met(NamedTuple):
    """What the ranks told each other: see ``ControlGroup.meet``."""

    rows: list[list[int]]  # every rank's values in rank order; only one row if all are alike
    marks: list[int]  # of each mark the bits that it has on any rank
    alike: list[bool]  # of each mark whether it is the same on every rank


class ControlGroup:
    """Small agreements between the hosts of all ranks, never through the accelerator.

    The process group is a gloo group, or ``None`` when there is one rank only.

    [Note: one form of message]
    Two ranks that meet here may have come from different places of the program. Over gloo a message of another length
    than the other rank expects ends the process. So every agreement begins with a message of ``width`` numbers, the
    first of which names the place: if the places differ, that is a ``DivergenceError`` on every rank.

    [Note: what many ranks send]
    Nearly always all say the same. So many ranks first learn only which bits are set on any of them, and which are not:
    that is as long for thousands as for two. What each rank has said is sent only if it is not the same.
    """

    device = torch.device("cpu")

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int = 0, world_size: int = 1) -> None:
        self.process_group = process_group
        self.rank = rank
        self.world_size = world_size
        self.width = 8
        """How long the first message of an agreement is. An engine may need more: it widens it on all ranks alike."""
        self.shortcut: Callable[[bytes], list[bytes] | None] | None = None
        """A faster way for few bytes, where all ranks are on one host; its answer is ``None`` where they are many."""
        self.before: Callable[[], object] | None = None
        """What was put off until the next agreement, and comes before it."""
        self.presumed: tuple[str, Sequence[str], str] = ("", (), "")
        """What ranks last presumed to be ``alike``. They compare it where one asks for that, and others do not."""
        self.counted: Sequence[int] = range(world_size)
        """The ranks whose parts make up a whole, in its order: where several groups have the same, this one's."""

    def connect(self) -> None:
        """Open the connections that agreements go through: those of ``_swap``. Collective: every rank."""
        transfers = 2 * (self.world_size - 1).bit_length()
        with naming_failures("the first agreement", self.rank, self.process_group, transfers):
            self._set_on_any(0, 1)

    # ------------------------------------------------------------- the one agreement, and what else is built on it

    def together(
        self,
        what: str,
        action: Callable[[], T],
        error: type[Exception] = CheckpointError,
        advice: str = "",
        *,
        to_first: bool = False,
    ) -> list[T]:
        """Run ``action`` here and give every rank's result to every rank, in rank order.

        If it raises on any rank, every rank raises an ``error`` that names the ranks that failed, and their reasons. An
        interrupt stays one on the rank that received it.

        Args:
            what: the step, to follow "could not": "write the data of /runs/last.ckpt". Alike on every rank.
            action: returns something small that can be pickled. With ``None`` on every rank this is one exchange.
            error: the class to raise.
            advice: what to do after a failure.
            to_first: give the results to rank 0 alone, where they may be larger: other ranks get an empty list.

        Collective: every rank.
        """
        failure, result = None, cast(Any, None)
        try:
            result = action()
        except BaseException as caught:
            failure, result = caught, _Failed(f"{type(caught).__name__} on host {socket.gethostname()}: {caught}")
        gather = self._at_first if to_first else self.gather_objects
        results = gather(result, what.partition("'")[0])  # a path may differ between ranks
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        failures = [(rank, found) for rank, found in enumerate(results) if isinstance(found, _Failed)]
        if failures:
            named = (f"  rank {rank}: {text}" for rank, text in failures[:_NAMED_RANKS])
            ranks = some((rank for rank, _ in failures), _NAMED_RANKS)
            first = f"Could not {what}: failed on {'rank' if len(failures) == 1 else 'ranks'} {ranks}."
            raise error("\n".join(filter(None, [first, *named, advice]))) from failure
        return results

    def alike(self, what: str, lines: Sequence[str], advice: str = _SAME_PROGRAM) -> None:
        """Raise a ``DivergenceError`` on every rank, with the first different lines, unless all have the same ones.

        Machines round a cosine differently: of decimal numbers nine digits are compared. The lines
        describe ``what``. ``advice`` is what to do if they differ. Collective: every rank.
        """
        lines = [_DECIMAL.sub(lambda number: f"{float(number[0]):.9g}", line) for line in lines]
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        if len(self.meet(what, [int.from_bytes(digest[:8], "big", signed=True)]).rows) == 1:
            return
        texts = self.gather_objects(lines, what)
        rank = next(rank for rank, others in enumerate(texts) if others != texts[0])
        pairs = zip_longest(texts[0], texts[rank], fillvalue="(nothing more)")
        different = [f"  rank 0: {a}\n  rank {rank}: {b}\n" for a, b in pairs if a != b]
        raise DivergenceError(
            f"Rank {rank} has another {what} than rank 0. First differences:\n{''.join(different[:3])}{advice}"
        )

    def meet(self, place: str, values: Sequence[int] = (), marks: Sequence[int] = ()) -> Met:
        """Tell each other a few 64-bit integers, equally many on each rank: fewer than ``width``.

        ``values`` are nearly always alike, ``marks`` (not negative) need not be. ``place`` is what the ranks do here,
        for people. Collective: every rank; raises ``DivergenceError`` on all if it is not the same: see
        [Note: one form of message].
        """
        if self.world_size == 1:
            return Met([[*values]], [*marks], [True] * len(marks))
        message = [*marks, *values]
        if len(message) >= self.width:
            raise ValueError(f"{place} is about {len(message)} numbers, of fewer than {self.width}.")
        rows, some, differing = self._first(place, message)
        if not differing:
            return Met([[*values]], [*marks], [True] * len(marks))
        words = [some >> 64 * index & _WORD for index in range(1, 1 + len(marks))]
        alike = [not differing >> 64 * index & _WORD for index in range(1, 1 + len(marks))]
        if not differing >> 64 * (1 + len(marks)):
            return Met([[*values]], words, alike)
        return Met([[*row[len(marks) :]] for row in self._told(place, message, rows)], words, alike)

    def exchange(self, values: Sequence[int], place: str = ANY_AGREEMENT) -> list[list[int]]:
        """Every rank's 64-bit integers in rank order, equally many on each.

        Collective: every rank; raises as ``meet`` does.
        """
        if self.world_size == 1:
            return [list(values)]
        rows, _, differing = self._first(place, values)
        if len(values) < self.width and not differing:
            return [[*values] for _ in range(self.world_size)]
        return [[*row] for row in self._told(place, values, rows if len(values) < self.width else None)]

    @staticmethod
    def _packed(place: str, values: Sequence[int]) -> bytes:
        return struct.pack(f"<{1 + len(values)}q", zlib.crc32(place.encode()) | len(values) << 32, *values)

    def _told(self, place: str, values: Sequence[int], rows: Sequence[Any] | None) -> Iterator[tuple[int, ...]]:
        """Every rank's values, of ``rows`` if all have them by now."""
        if rows is None:
            with doing(place):
                rows = self._rows(self._packed(place, values))
        return (struct.unpack_from(f"<{len(values)}q", row, 8) for row in rows)

    def _first(self, place: str, values: Sequence[int]) -> tuple[Sequence[Any] | None, int, int]:
        """The first message of an agreement. Returns every rank's, unless the ranks are many; and as numbers which of
        its bits are set on any rank, if any differ, and which are so on some ranks only."""
        self.settle()
        size, rows = 8 * self.width, None
        mine = self._packed(place, values)[:size].ljust(size, b"\0")
        with doing(place):
            if self.shortcut is not None or self.world_size <= _FEW_RANKS:
                rows = self._rows(mine)
                some = differing = 0
                if len(distinct := {*map(bytes, rows)}) > 1:
                    numbers = [int.from_bytes(row, "little") for row in distinct]
                    some = reduce(or_, numbers)
                    differing = some & ~reduce(and_, numbers)
            else:
                number, every = int.from_bytes(mine, "little"), (1 << 8 * size) - 1
                with naming_failures(ANY_AGREEMENT, self.rank, self.process_group):
                    both = self._set_on_any(number | (number ^ every) << 8 * size, 2 * size)
                some = both & every
                differing = some & both >> 8 * size
            if differing & _WORD:
                places = self.gather_objects(place, "places")
                if self.presumed[0] in places:
                    self.alike(*self.presumed)
                told = (f"  rank {rank}: {text}" for rank, text in enumerate(places))
                raise DivergenceError(_ELSEWHERE.format("\n".join(told)))
        return rows, some, differing

    def settle(self) -> None:
        """Do what was put off until the next agreement."""
        while self.before is not None:
            before, self.before = self.before, None
            before()

    def gather_objects(self, value: Any, place: str = ANY_AGREEMENT) -> list[Any]:
        """Give every rank's (picklable, small) object to every rank, in two exchanges; in one if all are ``None``.

        Collective: every rank.
        """
        if self.world_size == 1:
            return [value]
        packed = b"" if value is None else pickle.dumps(value)
        sizes = [size for (size,) in self.exchange([len(packed)], place)]
        if not any(sizes):
            return [None] * self.world_size
        with doing(place):
            rows = self._rows(packed, sizes)
        return [pickle.loads(row) if size else None for size, row in zip(sizes, rows, strict=True)]

    def _at_first(self, value: Any, place: str) -> list[Any]:
        """Every rank's object on rank 0, in rank order, nothing on others; what failed, if anything did, on all.

        A rank takes along what those after it have, unread, in as many steps as the number of ranks has binary digits:
        between ranks that exchange rows anyway, and rank 0 has few connections.
        """
        if self.world_size == 1:
            return [value]
        rank, group, failed = self.rank, self.process_group, isinstance(value, _Failed)
        packed = b"" if rank == 0 or failed else pickle.dumps(value)
        told = self.exchange([len(packed), int(failed)], place)
        if any(flag for _, flag in told):
            return self.gather_objects(value if failed else None, place)
        before = rank & -rank  # the rank that comes so many ranks before this one takes along what this one has
        ends = [0, *accumulate(nbytes for nbytes, _ in told[rank : rank + (before or self.world_size)])]
        memory, last = bytearray(packed.ljust(ends[-1] + 1)), len(ends) - 1
        rows = torch.frombuffer(memory, dtype=torch.uint8)
        with doing(place), naming_failures(ANY_AGREEMENT, rank, group):
            steps = [1 << digit for digit in range((last - 1).bit_length())]
            spans = [(rank + step, rows[ends[step] : ends[min(2 * step, last)]]) for step in steps]
            coming: list[Any] = [dist.irecv(span, group=group, group_src=peer) for peer, span in spans if len(span)]
            for transfer in coming:
                transfer.wait()
            if rank > 0 and ends[-1]:
                dist.send(rows[: ends[-1]], group=group, group_dst=rank - before)
        others = pairwise(ends[1:]) if rank == 0 else ()
        return [*([value] if rank == 0 else ()), *(pickle.loads(memory[start:end]) for start, end in others)]

    def agree_any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank. Collective: every rank."""
        return bool(self.meet(ANY_AGREEMENT, (), [int(flag)]).marks[0])

    def barrier(self) -> None:
        """Wait until every rank is here. Collective: every rank."""
        self.meet(ANY_AGREEMENT)

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Overwrite flags (1-D, uint8, on the CPU) with those set on at least one rank. Collective: every rank."""
        if self.world_size > 1:
            with naming_failures("the agreement on used parameters", self.rank, self.process_group):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        return flags

    def total(self, numbers: torch.Tensor, largest: bool = False) -> torch.Tensor:
        """Sum float64 numbers (1-D, may be overwritten) over the ranks, or take the ``largest`` of those that are not
        negative, NaN if one is: the same bits on every rank, in the order of the parts. Collective: every rank."""
        return self.put_together(self.exchange(numbers.view(torch.int64).tolist(), ABOUT_GRADIENTS), largest)

    def put_together(self, rows: Sequence[Sequence[int]], largest: bool = False) -> torch.Tensor:
        """Of float64 numbers from each rank, whose bits are in its row, the sums or the largest of those parts that
        make up a whole. Local."""
        values = torch.tensor([rows[rank] for rank in self.counted], dtype=torch.int64, device="cpu")
        numbers = values.view(torch.float64)
        return numbers.amax(0) if largest else sum(numbers[1:], numbers[0])

    def _rows(self, mine: bytes, sizes: Sequence[int] = ()) -> Sequence[Any]:
        """Every rank's bytes in rank order: equally many on each, or as many as ``sizes`` says, some of them.

        In as many exchanges as the number of ranks has binary digits, where gloo's own goes round a ring: each doubles
        the rows that a rank has. Source: Bruck et al., "Efficient algorithms for all-to-all communications in
        multiport message-passing systems" (1997), section 3.
        """
        rank, size = self.rank, self.world_size
        with naming_failures(ANY_AGREEMENT, rank, self.process_group):
            if self.shortcut and (quick := self.shortcut(mine.ljust(max(sizes, default=0), b"\0"))) is not None:
                return quick
            known = (*sizes[rank:], *sizes[:rank]) if sizes else (len(mine),) * size  # of this one, the next, and so on
            ends = [0, *accumulate(known)]
            memory = bytearray(mine.ljust(ends[size]))
            rows = torch.frombuffer(memory, dtype=torch.uint8)
            had = 1
            while had < size:
                count = min(had, size - had)
                self._swap(rows[: ends[count]], rows[ends[had] : ends[had + count]], had)
                had += count
        return [memory[ends[place] : ends[place + 1]] for place in (*range(size - rank, size), *range(size - rank))]

    def _set_on_any(self, bits: int, nbytes: int) -> int:
        """The bits that any rank has set, of so many bytes: in as many exchanges, of this size all of them."""
        mine, other = bytearray(nbytes), bytearray(nbytes)
        going, coming = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (mine, other))
        distance = 1
        while distance < self.world_size:  # each rank then knows of so many, itself and those behind it
            mine[:] = bits.to_bytes(nbytes, "little")
            self._swap(going, coming, distance)
            bits |= int.from_bytes(other, "little")
            distance *= 2
        return bits

    def _swap(self, mine: torch.Tensor, others: torch.Tensor, distance: int) -> None:
        """Send to the rank so far before this one, and receive from the one so far behind it, going round, if there is
        anything."""
        rank, size, group = self.rank, self.world_size, self.process_group
        moving: list[Any] = []
        if len(others):
            moving.append(dist.irecv(others, group=group, group_src=(rank + distance) % size))
        if len(mine):
            moving.append(dist.isend(mine, group=group, group_dst=(rank - distance) % size))
        for transfer in moving:
            transfer.wait()


class _Failed(str):
    """What a rank tells of an action that raised."""


def raising(failure: BaseException | None) -> Callable[[], None]:
    """An action for ``together``: it raises what went wrong on this rank before, if anything did."""

    def action() -> None:
        if failure is not None:
            raise failure

    return action
