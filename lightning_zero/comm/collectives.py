"""The wire as a seam: what the engine asks for. A single rank's way is here, the others are files of their own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.config import Placement

# How long a backward waits for memory that a reduction still uses before it takes fresh memory. To wait for good could
# deadlock: a rank that did not use that unit joins only at the end of its backward, which may need gathers from here.
PATIENCE_SECONDS = 2.0

Content = tuple[Hashable, int] | None
"""What is gathered to be computed with: its name, and a number for its state, of which each comes once."""

__all__ = ["PATIENCE_SECONDS", "CollectiveCall", "Collectives", "Content", "LocalCollectives", "Pending", "Totals"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as an observer sees it."""

    kind: str  # ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, or ``all_reduce`` of shards
    what: str  # it carried, for people
    numel: int  # of the whole (unsharded) buffer
    nbytes: int  # the same in bytes


class Pending:
    """A collective under way: what to wait for, and the tensors it keeps alive until then.

    A wire for whose transfers the host has to wait overrides ``ready_within`` and ``_arrive``.

    Args:
        what: what is carried, for error messages.
        event: device-side event after which the result may be used.
        keep: tensors the transport still reads or writes.
    """

    def __init__(
        self, what: str, event: Event = None, streams: Streams | None = None, keep: Sequence[Tensor] = ()
    ) -> None:
        self.what = what
        self._event = event
        self._streams = streams
        self._keep = keep
        self._finishing: list[Callable[[], None]] = []
        self.done = False  # whether ``wait`` has returned before
        self._waiting = threading.RLock()  # a handler of signals may wait amid a wait

    def ready_within(self, seconds: float) -> bool:
        """Whether ``wait`` would return after ``seconds`` at most; always on a device, where the host never waits."""
        return True

    def receive(self) -> None:
        """``wait`` for the result only: this rank's own part may still be read by others until ``wait``."""
        self.wait()

    def then(self, more: Callable[[], None]) -> None:
        """Have arithmetic on the result follow, in the first ``wait``. Before that has begun."""
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
            self._arrive()
            if self._event is not None and self._streams is not None:
                self._streams.wait(self._event)
            if self._finishing:
                with untracked():
                    for finish in self._finishing:
                        finish()
            self.done = True
            self._keep, self._finishing = (), []

    def _arrive(self) -> None:
        """Have the host wait until the transfer has ended."""


class Collectives(ABC):
    """A wire, as the engine uses it: verbs, memory for them, and what the wire adds to a plan and to a checkpoint.

    ``choose_collectives`` picks one at set-up. Nobody else asks which one it is.

    All tensors are 1-D, contiguous, and a multiple of ``world_size`` elements where they are whole. Every verb is
    collective over the shard group and has to be called in the same order on all its ranks, per kind of traffic:
    gathers among themselves, reductions among themselves.

    Args:
        rank: this process in the shard group.
        world_size: ranks of the shard group.
        device: where the tensors are.
        abandoned: where transfers are kept that an error left under way.
    """

    block = 1
    """Each rank's range of a buffer should be a multiple of so many elements."""
    alters = ""
    """Why gathered weights differ from their owners' where they are computed with, in words; empty: they do not."""
    gathers_at_once = False
    """Whether a gather is over when it has begun, so that prefetching gains nothing. Alike on all ranks."""
    across: Any = None
    """The wire between the ranks of one place in several shard groups: ``average_across`` has to follow reductions."""
    receives = False
    """Whether reductions need memory of the wire's own, as large as the largest bucket."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        abandoned: list[Pending] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.observers: list[Callable[[CollectiveCall], None]] = []
        self.abandoned = [] if abandoned is None else abandoned
        self.state: Any = None  # what the wire carries from step to step, if anything; checkpoints keep it
        self.asked: object = None  # the settings it was chosen by: a later run with the same ones may keep it

    # ------------------------------------------------------------- what differs between wires, besides speed

    def placed(self, placement: Placement) -> Placement:
        """The placement of a plan, with the memory that this wire needs. Called before a module is laid out."""
        return placement

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that the wire keeps for itself."""
        return ()

    @property
    def kept(self) -> Sequence[Tensor]:
        """Parts of gathered weights that the wire keeps for the next gather."""
        return ()

    # ------------------------------------------------------------- verbs

    def all_gather(
        self,
        buffer: Tensor,
        what: str,
        source: Tensor | None = None,
        version: int | None = None,
        content: Content = None,
    ) -> Pending:
        """Complete a flat buffer in place from all ranks' shards.

        Args:
            buffer: this rank's shard already stands in its own range, unless there is a ``source``. Written.
            what: what it carries, for people; the same on every rank.
            source: this rank's shard, where it is not in the buffer yet; of any dtype. May not change before the wait
                has returned.
            version: of the source; alike on all ranks, and never less than before. With one, the source may not change
                before an agreement of all ranks behind the wait: the others may read it where it lies, once its owner
                has come to a gather of this version, or a later one, itself.
            content: what it is, alike on all ranks; ``None``: it may be kept. Else it is computed with only: a wire may
                round it, and keep a part of it until there is another state of the same.
        """
        if self.observers:
            self._observe("all_gather", what, buffer)
        return self._all_gather(buffer, what, source, version, content)

    def reduce_scatter(
        self, bucket: Tensor, shard: Tensor, what: str, patience: float = PATIENCE_SECONDS, key: Hashable = None
    ) -> Pending:
        """Average a flat buffer over the ranks and keep this rank's range of the result.

        Args:
            bucket: read, and possibly overwritten, until waited on.
            shard: of the same dtype. Written. May be this rank's own range of ``bucket``.
            what: what it carries, for people.
            patience: how many seconds to wait, at most, for memory that an earlier reduction still uses.
            key: whose gradients these are, alike on all ranks, where a wire may add what it lost of these before.

        Source: ZeRO, section 5.2 (arXiv:1910.02054).
        """
        if self.observers:
            self._observe("reduce_scatter", what, bucket)
        return self._reduce_scatter(bucket, shard, what, patience, key)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], what: str = ""
    ) -> Pending:
        """Send a piece of ``input``, in rank order of the receivers, to every rank, and receive one from each into
        ``output``, in rank order of the senders. The splits are elements of each rank."""
        self._observe("all_to_all", what, input)
        return self._all_to_all(output, input, list(output_splits), list(input_splits), what)

    def broadcast(self, tensor: Tensor, source: int, what: str = "") -> Pending:
        """Overwrite ``tensor`` on every rank, of all shard groups, with the one of rank ``source`` of the first."""
        self._observe("broadcast", what, tensor)
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

    # ------------------------------------------------------------- memory

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what collectives read: 1-D, all zeros. Where it makes no difference, it is ordinary memory."""
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=device)

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        """Bytes that others can read where they are: what is reduced, or what is ``gathered``. ``None`` where that
        makes no difference. Local."""
        return None

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

    def _observe(self, kind: str, what: str, buffer: Tensor) -> None:
        if self.observers and self.world_size > 1:
            call = CollectiveCall(kind, what, buffer.numel(), buffer.numel() * buffer.element_size())
            for observer in self.observers:
                observer(call)

    @abstractmethod
    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """As ``ControlGroup.total``, on the device that the wire is for; the host does not wait. Collective: every
        rank."""

    # The same verbs, as a wire carries them.
    _all_gather: Callable[..., Pending]
    _reduce_scatter: Callable[..., Pending]
    _all_to_all: Callable[..., Pending]
    _broadcast: Callable[..., Pending]


Totals = ControlGroup | Collectives
"""What puts numbers of all ranks together, on the ``device`` that they are on."""


class LocalCollectives(Collectives):
    """One rank: nothing travels. What comes after a collective is ordered behind what came before it all the same."""

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__(rank=0, world_size=1, device=None if streams is None else streams.device)
        self._streams = streams if streams is not None and streams.beside else None
        self._nothing = Pending("nothing")  # the same for every call on the host: there is nothing to wait for
        self._nothing.wait()
        self.gathers_at_once = self._streams is None

    def own_range(self, buffer: Tensor) -> Tensor:
        return buffer

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return numbers

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
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
        return Pending(what, self._streams.mark(), self._streams)
