"""The wire as a seam: what the engine asks for. A single rank's way is here, the others are files of their own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.groups import raise_failure
from lightning_zero.comm.streams import Event, Streams

# How long a backward waits for memory that a reduction still uses before it takes fresh memory instead. Waiting for
# good could deadlock: a rank that did not use that unit only joins its reduction at the end of its own backward, which
# may need gathers from this rank.
PATIENCE_SECONDS = 2.0
_SHORTEST_PAUSE_SECONDS = 0.0001
_LONGEST_PAUSE_SECONDS = 0.002

__all__ = [
    "PATIENCE_SECONDS",
    "CollectiveCall",
    "Collectives",
    "LocalCollectives",
    "Pending",
]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as an observer sees it.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
        what: what it carried, for people.
        numel: elements of the whole (unsharded) buffer.
        nbytes: the same in bytes.
    """

    kind: str
    what: str
    numel: int
    nbytes: int


class Pending:
    """A collective under way: what to wait for, and the tensors it keeps alive until then.

    Args:
        what: what is carried, for error messages.
        rank: this rank, for error messages.
        works: host-side handles to wait on.
        event: device-side event after which the result may be used.
        keep: tensors the transport still reads or writes.
        finish: arithmetic on the result that has to follow the transport, run once by the first ``wait``.
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
    ) -> None:
        self._what = what
        self._rank = rank
        self._works = works
        self._event = event
        self._streams = streams
        self._keep = keep
        self._finish = finish
        self._done = False

    @property
    def done(self) -> bool:
        """Whether ``wait`` has returned before."""
        return self._done

    def ready_within(self, seconds: float) -> bool:
        """Whether ``wait`` would return now, or after waiting on the host for at most ``seconds``.

        Always true on a device, where ``wait`` never holds the host up.
        """
        if self._done or self._event is not None:
            return True
        deadline = time.monotonic() + seconds
        pause = _SHORTEST_PAUSE_SECONDS
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True

    def receive(self) -> None:
        """``wait`` for the result only: this rank's own part may still be read by others until ``wait``.

        Raises:
            CommunicationError: as ``wait`` does.
        """
        self.wait()

    def wait(self) -> None:
        """Order everything issued from now on behind this collective. On CUDA the host does not wait.

        Raises:
            CommunicationError: if a peer died or the process group's timeout passed.
        """
        if self._done:
            return
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise_failure(self._what, self._rank, error)
        if self._streams is not None:
            self._streams.wait(self._event)
        if self._finish is not None:
            with untracked():
                self._finish()
        self._done = True
        self._works, self._keep, self._finish = (), (), None


class Collectives(ABC):
    """What the engine asks of the wire. All tensors are 1-D and contiguous.

    Every method is collective over all ranks and has to be called in the same order on all of them, per kind of
    traffic: gathers among themselves, reductions among themselves.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.observers: list[Callable[[CollectiveCall], None]] = []
        self.patience = PATIENCE_SECONDS
        self.asks = False
        """Whether gathers take announced shards as they are when the gather begins, at the cost of a copy, and not as
        they are when another rank comes to read them. Set alike on every rank."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that the wire keeps for itself."""
        return ()

    def all_gather(self, buffer: Tensor, what: str, after: Event = None, source: Tensor | None = None) -> Pending:
        """Complete a flat buffer in place from all ranks' shards.

        Args:
            buffer: 1-D, a multiple of ``world_size`` elements; this rank's shard already stands in its own range,
                unless there is a ``source``. Written.
            what: what it carries, for people; the same on every rank.
            after: device-side event the transfer has to wait for; ``None``: everything issued so far.
            source: 1-D, this rank's shard, where it is not in the buffer yet; of any dtype. May not change before the
                wait has returned; if it was announced by ``share``, not before all ranks' waits have.

        Raises:
            ValueError: if the sizes do not match (on every rank alike).
        """
        numel = buffer.numel()
        if buffer.dim() != 1 or numel % self.world_size:
            self._refuse(buffer, what)
        if source is not None and source.numel() * self.world_size != numel:
            raise ValueError(
                f"{what}: this rank's shard must hold {buffer.numel() // self.world_size} elements, got "
                f"{source.numel()}."
            )
        if self.observers:
            self._observe("all_gather", what, buffer)
        return self._all_gather(buffer, what, after, source)

    def reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending:
        """Average a flat buffer over the ranks and keep this rank's range of the result.

        Args:
            bucket: 1-D, a multiple of ``world_size`` elements. Read, and possibly overwritten, until waited on.
            shard: 1-D, ``bucket.numel() // world_size`` elements of the same dtype. Written. May be this rank's own
                range of ``bucket``.
            what: what it carries, for people.

        Raises:
            ValueError: if the sizes do not match (on every rank alike).

        Source: ZeRO, section 5.2 (arXiv:1910.02054).
        """
        numel = bucket.numel()
        if bucket.dim() != 1 or numel % self.world_size:
            self._refuse(bucket, what)
        if shard.numel() * self.world_size != numel or shard.dtype != bucket.dtype:
            raise ValueError(
                f"reduce_scatter of {what}: the shard must hold {bucket.numel() // self.world_size} elements of "
                f"{bucket.dtype}, got {shard.numel()} of {shard.dtype}."
            )
        if self.observers:
            self._observe("reduce_scatter", what, bucket)
        return self._reduce_scatter(bucket, shard, what)

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
        """Overwrite ``tensor`` on every rank with the one of rank ``source``."""
        self._observe("broadcast", what, tensor)
        return self._broadcast(tensor, source, what)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what collectives read: 1-D, all zeros. Where it makes no difference, it is ordinary memory."""
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=device)

    def share(self, shards: Sequence[Tensor]) -> None:  # noqa: B027 - most need not know before
        """Announce shards that gathers will have as their source, and that are complete by now.

        They may only be written after an agreement of all ranks that comes behind the last gather, and before
        ``shards_changed``.

        Args:
            shards: 1-D, equally many and of equal sizes on every rank.

        Collective: every rank.
        """

    def shares(self, shard: Tensor) -> bool:
        """Whether ``shard`` was announced, and is read by the others without being sent."""
        return False

    def shards_changed(self, within: bool = False) -> None:  # noqa: B027
        """Note that announced shards may hold new values, which later gathers have to see.

        Also at the beginning of whatever gathers, because users write to their shards without a word.

        Args:
            within: whether that has begun before, and only goes on.

        Collective: every rank.
        """

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:  # noqa: B027 - most need nothing
        """Announce the largest bucket that will be reduced, so that nothing has to be allocated during a step."""

    def abandon(self, transfers: Sequence[Pending]) -> None:  # noqa: B027 - a single rank has none under way
        """Take over transfers that an error left under way: nobody else waits for them."""

    def settle(self) -> None:  # noqa: B027
        """Wait for abandoned transfers: they still write into memory that is about to be used again.

        Raises:
            CommunicationError: if the other ranks never joined them.
        """

    def own_range(self, buffer: Tensor) -> Tensor:
        """This rank's shard inside a flat buffer, as a view."""
        size = buffer.numel() // self.world_size
        return buffer.narrow(0, self.rank * size, size)

    def _refuse(self, buffer: Tensor, what: str) -> None:
        raise ValueError(
            f"{what}: a flat buffer must be 1-D and hold a multiple of {self.world_size} elements, got shape "
            f"{tuple(buffer.shape)}."
        )

    def _observe(self, kind: str, what: str, buffer: Tensor) -> None:
        if self.observers and self.world_size > 1:
            call = CollectiveCall(kind, what, buffer.numel(), buffer.numel() * buffer.element_size())
            for observer in self.observers:
                observer(call)

    @abstractmethod
    def _all_gather(self, buffer: Tensor, what: str, after: Event, source: Tensor | None) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending: ...

    @abstractmethod
    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending: ...


class LocalCollectives(Collectives):
    """One rank: nothing travels. What comes after a collective is ordered behind what came before it all the same.

    Args:
        streams: of the device; ``None`` on the CPU.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__(rank=0, world_size=1)
        self._streams = streams if streams is not None and streams.beside else None
        self._nothing = Pending("nothing", 0)  # the same for every call on the host: there is nothing to wait for
        self._nothing.wait()

    def own_range(self, buffer: Tensor) -> Tensor:
        return buffer

    def _all_gather(self, buffer: Tensor, what: str, after: Event, source: Tensor | None) -> Pending:
        if source is not None:
            buffer.copy_(source)
        return self._nothing if self._streams is None else self._done(what)

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending:
        if shard is not bucket and shard.data_ptr() != bucket.data_ptr():
            shard.copy_(bucket)
        return self._nothing if self._streams is None else self._done(what)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        output.copy_(input)
        return self._done(what)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._done(what)

    def _done(self, what: str) -> Pending:
        event = None if self._streams is None else self._streams.mark()
        return self._nothing if event is None else Pending(what, 0, event=event, streams=self._streams)
