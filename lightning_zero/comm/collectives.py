"""The wire as a seam: what the engine asks for. A single rank's way is here, the others are files of their own."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import place_in, untracked
from lightning_zero.comm.control import raise_failure
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.comm.waiting import NOTES, Note

# How long a backward waits for memory that a reduction still uses before it takes fresh memory. To wait for good could
# deadlock: a rank that did not use that unit joins only at the end of its backward, which may need gathers from here.
PATIENCE_SECONDS = 2.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0001, 0.002

Content = tuple[Hashable, int] | None
"""What is gathered to be computed with: its name, and a number for its state, of which each comes once."""

__all__ = [
    "PATIENCE_SECONDS",
    "CollectiveCall",
    "Collectives",
    "Content",
    "LocalCollectives",
    "Pending",
    "WrappedCollectives",
]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as an observer sees it."""

    kind: str  # ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, or ``all_reduce`` of shards
    what: str  # it carried, for people
    numel: int  # of the whole (unsharded) buffer
    nbytes: int  # the same in bytes


class Pending:
    """A collective under way: what to wait for, and the tensors it keeps alive until then.

    Args:
        what: what is carried, for error messages.
        rank: this rank, for error messages.
        works: host-side handles to wait on.
        event: device-side event after which the result may be used.
        keep: tensors the transport still reads or writes.
        finish: arithmetic on the result that has to follow the transport, run once by the first ``wait``.
        group: what carries it, if ``works`` are of a process group.
    """

    def __init__(
        self,
        what: str,
        rank: int,
        works: Sequence[Any] = (),
        event: Event = None,
        streams: Streams | None = None,
        keep: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.what = what
        self.group = group
        self.place = place_in(group) if group is not None else 0  # which one it is of the group's
        self._rank = rank
        self._works = works
        self._event = event
        self._streams = streams
        self._keep = keep
        self._finishing = [] if finish is None else [finish]
        self.done = False
        """Whether ``wait`` has returned before."""
        self._waiting = threading.Lock()

    def ready_within(self, seconds: float) -> bool:
        """Whether ``wait`` would return after ``seconds`` at most; always on a device, where the host never waits."""
        if self.done or self._event is not None:
            return True
        deadline = time.monotonic() + seconds
        pause = _SHORTEST_PAUSE_SECONDS
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return now: a collective may be part of another one."""
        return self.ready_within(0.0)

    def receive(self) -> None:
        """``wait`` for the result only: this rank's own part may still be read by others until ``wait``."""
        self.wait()

    def then(self, more: Callable[[], None]) -> None:
        """Have more arithmetic on the result follow, in the first ``wait``. Before that has begun."""
        self._finishing.append(more)

    def wait(self) -> None:
        """Order everything issued from now on behind this collective. On CUDA the host does not wait.

        Any thread may wait, also several at a time.

        Raises:
            CommunicationError: if a peer died or the process group's timeout passed.
        """
        with self._waiting:
            if self.done:
                return
            try:
                while self._works:  # gloo tells once that a message has come: who asks again waits until the timeout
                    NOTES.here.append(Note(self.what, self.group, self.place))
                    try:
                        self._works[0].wait()
                    finally:
                        NOTES.here.pop()
                    self._works = self._works[1:]
            except RuntimeError as error:
                raise_failure(self.what, self._rank, error)
            if self._streams is not None:
                self._streams.wait(self._event)
            if self._finishing:
                with untracked():
                    for finish in self._finishing:
                        finish()
            self.done = True
            self._works, self._keep, self._finishing = (), (), []


class Collectives(ABC):
    """What the engine asks of the wire: four verbs, and memory for them. All tensors are 1-D and contiguous.

    Every verb is collective over the shard group and has to be called in the same order on all its ranks, per kind of
    traffic: gathers among themselves, reductions among themselves.

    Args:
        rank: this process in the shard group.
        world_size: ranks of the shard group.
        abandoned: where transfers are kept that an error left under way.
    """

    block = 1
    """Elements of which a whole number is sent to each rank where they are rounded."""

    def __init__(self, rank: int, world_size: int, abandoned: list[Pending] | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.observers: list[Callable[[CollectiveCall], None]] = []
        self.abandoned = [] if abandoned is None else abandoned
        self.device = torch.device("cpu")
        self.across: Collectives | None = None  # between the ranks of one place in several shard groups
        self.asked: object = None  # how it was chosen
        self.rounds_weights = False  # where they may be rounded
        self.receives = False  # whether reductions arrive in memory of the wire's own, as large as the largest bucket
        self.shares_slots = False  # whether others read what is gathered where it is completed: memory of ``allocate``
        self.keeping: int | None = None  # ranks, this one among them, that keep what they gather to compute with
        self.feeding: int | None = None  # ranks that what is rounded of a reduction is divided by, if that is fed back
        self.residuals: dict[str, Tensor] = {}
        """By reduction, 1-D in float32: what rounding has taken from it so far, of what this rank rounds."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that the wire keeps for itself."""
        return ()

    @property
    def kept(self) -> Sequence[Tensor]:
        """This rank's part of what was gathered to be computed with, where ranks are ``keeping`` it."""
        return ()

    @property
    def gathers_at_once(self) -> bool:
        """Whether a gather is over when it has begun, so that nothing is won where it begins early. On all ranks."""
        return False

    def all_gather(
        self,
        buffer: Tensor,
        what: str,
        after: Event = None,
        source: Tensor | None = None,
        version: int | None = None,
        content: Content = None,
    ) -> Pending:
        """Complete a flat buffer in place from all ranks' shards.

        Args:
            buffer: 1-D, a multiple of ``world_size`` elements; this rank's shard already stands in its own range,
                unless there is a ``source``. Written.
            what: what it carries, for people; the same on every rank.
            after: device-side event the transfer has to wait for; ``None``: everything issued so far.
            source: 1-D, this rank's shard, where it is not in the buffer yet; of any dtype. May not change before the
                wait has returned.
            version: of the source; alike on all ranks, and never less than before. With one, the source may not change
                before an agreement of all ranks behind the wait: the others may read it where it lies, once its owner
                has come to a gather of this version, or a later one, itself.
            content: what it is, alike on all ranks; ``None``: it may be kept. Else it is computed with only: a wire may
                round it, and keep a part of it until there is another state of the same.

        Raises:
            ValueError: if the sizes do not match (on every rank alike).
        """
        numel = self._checked_numel(buffer, what)
        if source is not None and source.numel() != numel:
            raise ValueError(f"{what}: this rank's shard must hold {numel} elements, got {source.numel()}.")
        if self.observers:
            self._observe("all_gather", what, buffer)
        return self._all_gather(buffer, what, after, source, version, content)

    def reduce_scatter(
        self, bucket: Tensor, shard: Tensor, what: str, patience: float = PATIENCE_SECONDS, key: Hashable = None
    ) -> Pending:
        """Average a flat buffer over the ranks and keep this rank's range of the result.

        Args:
            bucket: 1-D, a multiple of ``world_size`` elements. Read, and possibly overwritten, until waited on.
            shard: 1-D, ``bucket.numel() // world_size`` elements of the same dtype. Written. May be this rank's own
                range of ``bucket``.
            what: what it carries, for people.
            patience: how many seconds to wait, at most, for memory that an earlier reduction still uses.
            key: whose gradients these are, alike on all ranks, where a wire may add what it lost of these before.

        Raises:
            ValueError: if the sizes do not match (on every rank alike).

        Source: ZeRO, section 5.2 (arXiv:1910.02054).
        """
        numel = self._checked_numel(bucket, what)
        if shard.numel() != numel or shard.dtype != bucket.dtype:
            raise ValueError(
                f"reduce_scatter of {what}: the shard must hold {numel} elements of {bucket.dtype}, got "
                f"{shard.numel()} of {shard.dtype}."
            )
        if self.observers:
            self._observe("reduce_scatter", what, bucket)
        return self._reduce_scatter(bucket, shard, what, patience, key)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], what: str = ""
    ) -> Pending:
        """Send a piece of ``input`` to every rank and receive one from each.

        Args:
            output: 1-D, ``sum(output_splits)`` elements. Written, in rank order of the senders.
            input: 1-D, ``sum(input_splits)`` elements, in rank order of the receivers.
            output_splits: elements received from each rank.
            input_splits: elements sent to each rank.
            what: what it carries, for people.
        """
        self._observe("all_to_all", what, input)
        return self._all_to_all(output, input, list(output_splits), list(input_splits), what)

    def broadcast(self, tensor: Tensor, source: int, what: str = "") -> Pending:
        """Overwrite ``tensor`` on every rank, of all shard groups, with the one of rank ``source`` of the first."""
        self._observe("broadcast", what, tensor)
        if self.across is not None and self.rank == source:
            self.across.broadcast(tensor, 0, what).wait()
        return self._broadcast(tensor, source, what)

    def average_across(
        self, shard: Tensor, what: str, reduction: Pending | None = None, key: Hashable = None
    ) -> tuple[Pending | None, Pending]:
        """Average a 1-D shard in place with those of the other shard groups, while this rank goes on.

        ``reduction``, on which nobody may have waited, brings into the shard what is averaged; ``None``: it is there.
        ``key`` is as in ``reduce_scatter``. Returns what to wait on instead of ``reduction``, and for the average,
        until which the shard is written. Collective: all ranks, in one order, which is also that of the reductions.
        """
        raise RuntimeError("There is one shard group only, of which no two ranks hold the same.")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what collectives read: 1-D, all zeros. Where it makes no difference, it is ordinary memory."""
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=device)

    def lend(self, nbytes: int) -> Tensor | None:
        """Bytes that others read where they are, on one rank alone. ``None`` where it makes no difference."""
        return None

    def vacate(self, memory: Tensor) -> None:
        """Give the pages of a tensor back, which has its memory to itself. It keeps its shape, and nothing may be read
        or written there before ``occupy``."""
        if memory.untyped_storage().resizable():  # not where `numpy` has seen it
            memory.untyped_storage().resize_(0)

    def occupy(self, memory: Tensor) -> None:
        """Have pages again for a tensor that was vacated. What is there is arbitrary."""
        if memory.untyped_storage().resizable():
            memory.untyped_storage().resize_(memory.nbytes)

    def freeze(self, memory: Sequence[Tensor]) -> None:  # noqa: B027
        """Have processes that are forked from now on see what memory of ``allocate`` holds now, whatever is written to
        it later. Ordinary memory is so by itself. Empty: nobody is forked soon, so that copies can be given back."""

    def abandon(self, transfers: Sequence[Pending]) -> None:
        """Take over transfers that an error left under way: nobody else waits for them."""
        self.abandoned += [transfer for transfer in transfers if not transfer.done]

    def settle(self) -> None:
        """Wait for abandoned transfers: they still write into memory that is about to be used again."""
        while self.abandoned:
            self.abandoned.pop(0).wait()

    def own_range(self, buffer: Tensor) -> Tensor:
        """This rank's shard inside a flat buffer, as a view."""
        size = buffer.numel() // self.world_size
        return buffer.narrow(0, self.rank * size, size)

    def _checked_numel(self, buffer: Tensor, what: str) -> int:
        """Elements of one rank's range of a flat buffer."""
        numel, rest = divmod(buffer.numel(), self.world_size)
        if buffer.dim() != 1 or rest:
            raise ValueError(
                f"{what}: a flat buffer must be 1-D and hold a multiple of {self.world_size} elements, got shape "
                f"{tuple(buffer.shape)}."
            )
        return numel

    def _observe(self, kind: str, what: str, buffer: Tensor) -> None:
        if self.observers and self.world_size > 1:
            call = CollectiveCall(kind, what, buffer.numel(), buffer.numel() * buffer.element_size())
            for observer in self.observers:
                observer(call)

    @abstractmethod
    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """As ``Totals`` has it, on the device that the wire is for; the host does not wait. Collective: every rank."""

    @abstractmethod
    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending: ...

    @abstractmethod
    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending: ...


class LocalCollectives(Collectives):
    """One rank: nothing travels. What comes after a collective is ordered behind what came before it all the same."""

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__(rank=0, world_size=1)
        self.device = self.device if streams is None else streams.device
        self._streams = streams if streams is not None and streams.beside else None
        self._nothing = Pending("nothing", 0)  # the same for every call on the host: there is nothing to wait for
        self._nothing.wait()

    @property
    def gathers_at_once(self) -> bool:
        return self._streams is None

    def own_range(self, buffer: Tensor) -> Tensor:
        return buffer

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return numbers

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        if source is not None:
            buffer.copy_(source)
        return self._over(what)

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        if shard is not bucket and shard.data_ptr() != bucket.data_ptr():
            shard.copy_(bucket)
        return self._over(what)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        output.copy_(input)
        return self._over(what)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._over(what)

    def _over(self, what: str) -> Pending:
        if self._streams is None:
            return self._nothing
        return Pending(what, 0, event=self._streams.mark(), streams=self._streams)


class WrappedCollectives(Collectives):
    """Another wire's collectives as they are: whoever changes one verb of a wire overrides its method here.

    The signatures are those of ``Collectives``. Observers are told what the inner wire carries.

    Args:
        inner: what carries everything.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.rank, inner.world_size, inner.abandoned)
        self.inner = inner
        self.observers, self.device, self.across = inner.observers, inner.device, inner.across
        self.asked, self.rounds_weights, self.keeping = inner.asked, inner.rounds_weights, inner.keeping
        self.feeding, self.residuals = inner.feeding, inner.residuals
        self.receives, self.shares_slots = inner.receives, inner.shares_slots

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self.inner.buffers

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.inner.kept

    @property
    def gathers_at_once(self) -> bool:
        return self.inner.gathers_at_once

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return self.inner.total(numbers, largest)

    def lend(self, nbytes: int) -> Tensor | None:
        return self.inner.lend(nbytes)

    def vacate(self, memory: Tensor) -> None:
        self.inner.vacate(memory)

    def occupy(self, memory: Tensor) -> None:
        self.inner.occupy(memory)

    def freeze(self, memory: Sequence[Tensor]) -> None:
        self.inner.freeze(memory)

    def _observe(self, kind: str, what: str, buffer: Tensor) -> None:
        """The inner wire does."""

    def _all_gather(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.all_gather(*arguments, **named)

    def _reduce_scatter(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.reduce_scatter(*arguments, **named)

    def _all_to_all(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.all_to_all(*arguments, **named)

    def average_across(self, *arguments: Any, **named: Any) -> tuple[Pending | None, Pending]:
        return self.inner.average_across(*arguments, **named)

    def _broadcast(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.broadcast(*arguments, **named)
