"""Collectives between CPU ranks of one host: each reads what it needs straight out of the others' memory.

They are all ranks, those with the same part of each weight (tensor parallelism), or those of one host of several
(``HostCollectives``).

Nothing is sent but the news of what may be read. The sums are those of ``GlooCollectives``, in the same order, so that
no bit of a result tells which of the two was used.

[Note: what is read where it lies]
Memory from ``allocate`` is read in place, and is in use until the wait for the collective has returned on all ranks.
Anything else is copied to such memory first and may be changed as soon as this rank's own result is there. Memory from
``allocate`` that is gathered with a version is read without any word, once its owner has come to that version.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Collectives, Content, Pending
from lightning_zero.comm.control import naming_failures
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.native import average
from lightning_zero.extensions.shared_memory.transport import Channel, Reading, Transfer, Transport

__all__ = ["HostCollectives", "SharedMemoryCollectives"]


class SharedMemoryCollectives(Collectives):
    """Collectives for CPU ranks that all run on this host: those of a shard group, of which there may be several."""

    gathers_at_once = True

    def __init__(self, groups: Groups, transport: Transport) -> None:
        super().__init__(groups.shard.rank, groups.shard.world_size, abandoned=groups.abandoned)
        self.groups = groups
        self.transport = transport
        self._members = dist.get_process_group_ranks(groups.gather)
        places = {member: place for place, member in enumerate(self._members)}
        # With their places in the shard group.
        self._peers = {peer: places[peer] for peer in transport.peers if peer in places}
        self._session = transport.session(self, self._peers.keys())
        self._allocated: dict[tuple[int, int], int] = {}  # numbers by address and elements
        self._places: dict[int, dict[int, int] | None] = {}

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return self.groups.control.total(numbers, largest)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            memory = self.transport.heap.allocate(numel, dtype)
        except MemoryError:  # of addresses, not of memory: what lies elsewhere is copied before it is read
            memory = super().allocate(numel, dtype, device)
        if numel:
            self._tell_place(memory)
        return memory

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        if gathered:
            return None
        try:
            return self.transport.heap.allocate(nbytes, torch.uint8)
        except MemoryError:  # of addresses: what lies elsewhere is copied before it is read
            return None

    def freeze(self, memory: Sequence[Tensor]) -> None:
        self.transport.heap.freeze(self, memory)

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        own, size = self.own_range(buffer), buffer.numel() // self.world_size
        ranges = {peer: buffer.narrow(0, place * size, size) for peer, place in self._peers.items()}
        if source is not None:
            own.copy_(source)
            places = None if version is None else self._places_of(source, version, what)
            if places is not None:
                for peer, target in ranges.items():
                    self.transport.read(peer, places[peer], target, source.dtype)
                return Pending(what)
        return self._transfer(Channel.GATHER, what, own, dict.fromkeys(ranges, (0, size)), ranges)

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        if bucket.dtype == torch.float16:
            bucket.div_(self.groups.divisor)
        divisor = 1 if bucket.dtype == torch.float16 else self.groups.divisor
        own, size = self.own_range(bucket), shard.numel()

        def add_up(offsets: Mapping[int, int]) -> None:
            views = {peer: self.transport.view(peer, offset, size, bucket.dtype) for peer, offset in offsets.items()}
            views[self.transport.rank] = own
            average(shard, [views[member] for member in self._members], divisor)

        given = {peer: (place * size, size) for peer, place in self._peers.items()}
        return self._transfer(Channel.REDUCE, what, bucket, given, dict.fromkeys(given, shard), add_up)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        starts = [sum(input_splits[:rank]) for rank in range(self.world_size)]
        received = output.split(output_splits)
        received[self.rank].copy_(input.narrow(0, starts[self.rank], input_splits[self.rank]))
        given = {peer: (starts[place], input_splits[place]) for peer, place in self._peers.items()}
        taken = {peer: received[place] for peer, place in self._peers.items()}
        return self._transfer(Channel.SPREAD, what, input, given, taken)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        flat, mine = tensor.view(-1), self.rank == source
        given = dict.fromkeys(self._peers, (0, flat.numel())) if mine else {}
        taken = {} if mine else {self._members[source]: flat}
        return self._transfer(Channel.SPREAD, what, flat, given, taken)

    def _tell_place(self, memory: Tensor) -> None:
        number = self.transport.tell_place(self._session, self.transport.heap.offset(memory), memory.nbytes)
        self._allocated[memory.data_ptr(), memory.numel()] = number

    def _places_of(self, source: Tensor, version: int, what: str) -> dict[int, int] | None:
        """Where the others have theirs, which are of this version by now; ``None`` if each has to be asked."""
        number = self._allocated.get((source.data_ptr(), source.numel()))
        if number is None:
            return None
        with naming_failures(what, self.transport.rank):
            if number not in self._places:
                self._places[number] = self.transport.places(self._session, number, source.nbytes)
            self.transport.reach(self._session, version)
        return self._places[number]

    def _transfer(
        self,
        channel: Channel,
        what: str,
        offered: Tensor,
        given: Mapping[int, tuple[int, int]],
        taken: Mapping[int, Tensor],
        run: Callable[[Mapping[int, int]], None] | None = None,
    ) -> Pending:
        """Offer elements of a 1-D tensor to the others, and read theirs.

        ``given`` says for each rank that reads from which element, and how many; ``taken`` is for each rank that is
        read from a tensor of as many elements. ``run`` reads them, given where they begin; ``None``: each into its
        tensor.
        """

        def collect(offsets: Mapping[int, int]) -> None:
            for peer, offset in offsets.items():
                self.transport.read(peer, offset, taken[peer], taken[peer].dtype)

        size, heap, staged = offered.itemsize, self.transport.heap, False
        if any(numel for _, numel in given.values()) and not heap.offset(offered):
            staged = True
            with untracked():
                offered = heap.allocate(offered.numel(), offered.dtype).copy_(offered)
        place = heap.offset(offered)
        owes = {rank: (place + start * size, numel * size) for rank, (start, numel) in given.items() if numel}
        needs = {rank: target.nbytes for rank, target in taken.items() if target.numel()}
        transfer = Transfer(self.transport, what, Reading(what, owes, needs, run or collect, offered), whole=not staged)
        with naming_failures(what, self.transport.rank):
            self.transport.begin(channel, transfer)
        return transfer


class HostCollectives(SharedMemoryCollectives):
    """Gathers and reductions of one host's ranks, as a hop of those of several hosts.

    Threads take them through, which wait as long as it takes: those of one kind in one, and each kind has a transport
    of its own, over the same memory.
    """

    def __init__(self, groups: Groups, gathers: Transport, reductions: Transport) -> None:
        super().__init__(groups, gathers)
        self._reductions = SharedMemoryCollectives(groups, reductions)

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        return super().lend(nbytes)  # both

    def _tell_place(self, memory: Tensor) -> None:
        """Nobody asks: gathers of a hop are of no version. And the transport is its thread's."""

    def _reduce_scatter(self, *arguments: Any) -> Pending:
        return self._reductions._reduce_scatter(*arguments)
