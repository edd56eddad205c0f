"""The wire as a seam: what the engine asks for, and three ways to do it.

``GlooCollectives`` does not use gloo's own reduce-scatter (emulated by a clone and an all-reduce: twice the bytes) nor
its all-gather (2.7 times slower than the same bytes sent point to point). Its reduce-scatter is an all-to-all followed
by a sum *in rank order*, so the bits of the result depend on nothing but the world size: not on how gradients are cut
into buckets or units. That is what makes the three stages bit-identical to one another at every world size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import all_gather_single, reduce_scatter_single
from lightning_zero.comm.groups import Groups, naming_failures
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
    "GlooCollectives",
    "LocalCollectives",
    "NativeCollectives",
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

    def wait(self) -> None:
        """Order everything issued from now on behind this collective. On CUDA the host does not wait.

        Raises:
            CommunicationError: if a peer died or the process group's timeout passed.
        """
        if self._done:
            return
        with naming_failures(self._what, self._rank):
            for work in self._works:
                work.wait()
        if self._streams is not None:
            self._streams.wait(self._event)
        if self._finish is not None:
            with torch.inference_mode(False), torch.no_grad():
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

    def all_gather(self, buffer: Tensor, what: str, after: Event = None) -> Pending:
        """Complete a flat buffer in place from all ranks' shards.

        Args:
            buffer: 1-D, a multiple of ``world_size`` elements; this rank's shard already stands in its own range.
                Written.
            what: what it carries, for people.
            after: device-side event the transfer has to wait for; ``None``: everything issued so far.

        Raises:
            ValueError: if ``buffer`` cannot be cut evenly (on every rank alike).
        """
        self._check(buffer, what)
        self._observe("all_gather", what, buffer)
        return self._all_gather(buffer, what, after)

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
        self._check(bucket, what)
        if shard.numel() * self.world_size != bucket.numel() or shard.dtype != bucket.dtype:
            raise ValueError(
                f"reduce_scatter of {what}: the shard must hold {bucket.numel() // self.world_size} elements of "
                f"{bucket.dtype}, got {shard.numel()} of {shard.dtype}."
            )
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

    def _check(self, buffer: Tensor, what: str) -> None:
        if buffer.dim() != 1 or buffer.numel() % self.world_size:
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
    def _all_gather(self, buffer: Tensor, what: str, after: Event) -> Pending: ...

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
        self._streams = streams

    def _all_gather(self, buffer: Tensor, what: str, after: Event) -> Pending:
        return self._done(what)

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending:
        if shard.data_ptr() != bucket.data_ptr():
            shard.copy_(bucket)
        return self._done(what)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        output.copy_(input)
        return self._done(what)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._done(what)

    def _done(self, what: str) -> Pending:
        event = None if self._streams is None else self._streams.mark()
        return Pending(what, 0, event=event, streams=self._streams)


class NativeCollectives(Collectives):
    """The backend's own collectives (nccl), issued on side streams so that their order is ours.

    Args:
        groups: the engine's process groups.
        streams: side streams of the device.
    """

    def __init__(self, groups: Groups, streams: Streams) -> None:
        super().__init__(groups.control.rank, groups.control.world_size)
        self.groups = groups
        self.streams = streams

    def abandon(self, transfers: Sequence[Pending]) -> None:
        self.groups.abandoned += [transfer for transfer in transfers if not transfer.done]

    def settle(self) -> None:
        while self.groups.abandoned:
            self.groups.abandoned.pop(0).wait()

    def _all_gather(self, buffer: Tensor, what: str, after: Event) -> Pending:
        with self.streams.gathering(after):
            work = all_gather_single(buffer, self.own_range(buffer), self.groups.gather, async_op=True)
            work.wait()
            event = self.streams.mark()
        return Pending(what, self.rank, event=event, streams=self.streams, keep=(buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending:
        with self.streams.reducing():
            if bucket.dtype == torch.float16:
                bucket.div_(self.world_size)
            work = reduce_scatter_single(shard, bucket, self.groups.reduce, async_op=True)
            work.wait()
            if bucket.dtype != torch.float16:
                shard.div_(self.world_size)
            event = self.streams.mark()
        return Pending(what, self.rank, event=event, streams=self.streams, keep=(bucket, shard))

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        work = dist.all_to_all_single(
            output, input, output_splits, input_splits, group=self.groups.reduce, async_op=True
        )
        return Pending(what, self.rank, works=[work], keep=(output, input))

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        work = dist.broadcast(tensor, source, group=self.groups.gather, async_op=True)
        return Pending(what, self.rank, works=[work], keep=(tensor,))


class GlooCollectives(NativeCollectives):
    """Collectives for CPU tensors over gloo: point-to-point gathers, and reductions summed in rank order."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        super().__init__(groups, streams)
        self._received: dict[torch.dtype, Tensor] = {}
        self._receiving: Pending | None = None  # the reduction that holds the receive buffer

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        received = self._received.get(dtype)
        if received is None or received.numel() < numel:
            with torch.inference_mode(False):
                self._received[dtype] = torch.empty(numel, dtype=dtype, device=device)

    def _all_gather(self, buffer: Tensor, what: str, after: Event) -> Pending:
        size = buffer.numel() // self.world_size
        mine = self.own_range(buffer)
        works: list[Any] = []
        # Every rank starts with its neighbour, so that no rank is asked for everything at once.
        with naming_failures(what, self.rank):
            for step in range(1, self.world_size):
                source = (self.rank - step) % self.world_size
                works.append(dist.irecv(buffer.narrow(0, source * size, size), source, group=self.groups.gather))
            for step in range(1, self.world_size):
                works.append(dist.isend(mine, (self.rank + step) % self.world_size, group=self.groups.gather))
        return Pending(what, self.rank, works=works, keep=(buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str) -> Pending:
        received, lent = self._receive_buffer(bucket)
        if bucket.dtype == torch.float16:
            bucket.div_(self.world_size)
        with naming_failures(what, self.rank):
            work = dist.all_to_all_single(received, bucket, group=self.groups.reduce, async_op=True)

        def sum_in_rank_order() -> None:
            pieces = received.view(self.world_size, -1).unbind(0)
            torch.add(pieces[0], pieces[1], out=shard)
            for piece in pieces[2:]:
                shard.add_(piece)
            if bucket.dtype != torch.float16:
                shard.div_(self.world_size)

        pending = Pending(what, self.rank, works=[work], keep=(bucket, shard), finish=sum_in_rank_order)
        if lent:
            self._receiving = pending
        return pending

    def _receive_buffer(self, bucket: Tensor) -> tuple[Tensor, bool]:
        """The one receive buffer, once the reduction before has left it; fresh memory if that takes too long."""
        if self._receiving is not None:
            if not self._receiving.ready_within(self.patience):
                self.patience = 0.0
                return torch.empty_like(bucket), False
            self._receiving.wait()
        self.reserve(bucket.numel(), bucket.dtype, bucket.device)
        return self._received[bucket.dtype].narrow(0, 0, bucket.numel()), True
