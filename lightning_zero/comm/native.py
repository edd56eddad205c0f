"""Collectives through a process group: the backend's own, and better ones on gloo.

``GlooCollectives`` does not use gloo's own reduce-scatter (emulated by a clone and an all-reduce: twice the bytes) nor
its all-gather (2.7 times slower than the same bytes sent point to point). Its reduce-scatter is an all-to-all followed
by a sum *in the order of a tree over the ranks*, so the bits of the result depend on nothing but the world size: not on
how gradients are cut into buckets or units. That is what makes the three stages bit-identical to one another at every
world size.

[Note: both ways at once]
Before a rank sends, gloo has the other one say that it can receive, on the connection that also carries what that one
sends. In gloo's all-to-all a rank sends first. So the one that comes later says so behind all that it sends, and a link
carries one direction after the other: 1.3 times DDP's step of 10M at 200 Mbit/s. Here receives begin before anything
is sent. What gloo does not tell of messages is that they have come, except to who waits: a thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import all_gather_single, reduce_scatter_single, untracked
from lightning_zero.comm.collectives import Collectives, Content, Pending
from lightning_zero.comm.control import ABOUT_GRADIENTS, naming_failures
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.relay import Relay
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.config import Placement

__all__ = ["GlooCollectives", "NativeCollectives", "PairwiseSum", "divide"]

Hop = tuple[dist.ProcessGroup | None, Callable[[], object]]
"""A group, and what returns when that has carried its part of a transfer."""

_REDUCTIONS = 1  # tag of their messages: averages between groups are gathered in the same process group
_CHUNK_NBYTES = 2**19  # summed at a time where that takes memory: few calls, and still in a core's cache


class NativeCollectives(Collectives):
    """The backend's own collectives (nccl), on side streams of ours, and so in an order of ours.

    They are calls that wait, ``async_op=False``: since torch 2.8 nccl's kernels then run on the stream that is current,
    and the host goes on. As calls that do not, they would run on a stream of the group's, with an event there and one
    back for each. Which groups carry them: see [Note: one order on a device].
    """

    def __init__(self, groups: Groups, streams: Streams, across: NativeCollectives | None = None) -> None:
        super().__init__(groups.shard.rank, groups.shard.world_size, streams.device, groups.abandoned)
        self.groups = groups
        self.streams = streams
        self.across = across
        """Between the ranks of one place in several shard groups, if there are any."""
        self.state = self.state if across is None else across.state
        self.grouped = across is not None

    def placed(self, placement: Placement) -> Placement:
        return placement if self.across is None else self.across.placed(placement)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return () if self.across is None else self.across.buffers

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        operation = dist.ReduceOp.SUM
        if largest:  # nccl's drops NaN; as integers, floats without a sign have the same order, and NaN is above all
            numbers, operation = numbers.view(torch.int64).bitwise_and_(2**63 - 1), dist.ReduceOp.MAX
        with naming_failures(ABOUT_GRADIENTS, self.groups.control.rank):
            dist.all_reduce(numbers, operation, group=self.groups.reduce, async_op=True).wait()
        return numbers.view(torch.float64)

    def average_across(
        self, shard: Tensor, what: str, reduction: Pending | None = None, key: Hashable = None
    ) -> tuple[Pending | None, Pending]:
        if self.across is None:
            return super().average_across(shard, what, reduction, key)
        self._observe("all_reduce", what, shard)
        wire, begin = self.across, bool if reduction is None else reduction.wait
        rest, whole = -shard.numel() % (wire.world_size * wire.block), shard

        def reduce() -> None:
            nonlocal whole
            whole = torch.cat([shard, shard.new_zeros(rest)]) if rest else shard
            wire.reduce_scatter(whole, wire.own_range(whole), what, key=key).wait()

        def gather() -> None:
            wire.all_gather(whole, what, content=(key, 0)).wait()  # which nobody keeps
            if rest:
                shard.copy_(whole[: shard.numel()])

        with self.streams.reducing():  # not among the gathers, where it would have a place of its own on every rank
            if reduction is not None and self.streams.beside:
                reduction.wait()
                reduction, begin = self._behind(what), bool
            hops = (self.groups.reduce, begin), (wire.groups.reduce, reduce), (wire.groups.gather, gather)
            return reduction, self.in_hops("averages", what, hops, (shard,))

    def in_hops(self, kind: str, what: str, hops: Sequence[Hop], keep: Sequence[Tensor]) -> Pending:
        """Take a transfer through hops while this rank goes on: here one after the other on the current stream.

        Collective, in one order for all of a ``kind``.
        """
        with untracked():
            for _, carry in hops:
                carry()
        return self._behind(what, keep)

    def _behind(self, what: str, keep: Sequence[Tensor] = ()) -> Pending:
        """A transfer that ends with what was issued so far on the current stream."""
        return Pending(what, self.groups.control.rank, event=self.streams.mark(), streams=self.streams, keep=keep)

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        with self.streams.gathering(after):
            own = self.own_range(buffer)
            if source is not None and source.dtype != own.dtype:
                own.copy_(source)
                source = None
            all_gather_single(buffer, own if source is None else source, group=self.groups.gather)
            return self._behind(what, (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        with self.streams.reducing():
            if bucket.dtype == torch.float16:
                divide(bucket, self.groups.divisor)
            reduce_scatter_single(shard, bucket, group=self.groups.reduce)
            if bucket.dtype != torch.float16:
                divide(shard, self.groups.divisor)
            return self._behind(what, (bucket, shard))

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        """``reduce_scatter`` with memory of the caller's for what the others send, if any is needed: like ``bucket``,
        and no part of ``shard``. Collective: the ranks of the shard group."""
        return self._reduce_scatter(bucket, shard, what, 0.0, key)

    def followed(self, transfer: Pending, finish: Callable[[], None], keep: Sequence[Tensor]) -> Pending:
        """Have arithmetic follow a transfer: on the current stream, which is that of the transfer, as far as there are
        any; else where somebody waits. Memory that both alone use then belongs to that stream."""
        if not self.streams.beside:
            transfer.then(finish)
            return transfer
        transfer.wait()
        finish()
        return self._behind(transfer.what, keep)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        """No splits: equal ones."""
        with untracked(), self.streams.reducing():
            dist.all_to_all_single(output, input, output_splits, input_splits, group=self.groups.reduce)
            return self._behind(what, (output, input))

    def broadcast(self, tensor: Tensor, source: int, what: str = "") -> Pending:
        if self.across is not None and self.rank == source:
            self.across.broadcast(tensor, 0, what).wait()
        return super().broadcast(tensor, source, what)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        with self.streams.gathering():
            dist.broadcast(tensor, group=self.groups.gather, group_src=source)
            return self._behind(what, (tensor,))


class GlooCollectives(NativeCollectives):
    """Collectives for CPU tensors over gloo: point-to-point gathers, and reductions summed in an order of ours."""

    receives = True

    def __init__(self, groups: Groups, streams: Streams, across: NativeCollectives | None = None) -> None:
        super().__init__(groups, streams, across)
        self._sum = PairwiseSum()
        self._received = _Received()

    @property
    def buffers(self) -> Sequence[Tensor]:
        return *self._received.memory.values(), *super().buffers

    def in_hops(self, kind: str, what: str, hops: Sequence[Hop], keep: Sequence[Tensor]) -> Pending:
        groups, carry = zip(*hops, strict=True)
        name, stop = f"the {kind} {self.groups.number}", self.groups.stop if len(hops) > 1 else bool
        relay: Relay = self.groups.resource(kind, lambda: Relay(name, groups, stop))
        return Pending(what, self.groups.control.rank, works=[relay.carry(what, carry)], keep=keep)

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        ranges = buffer.view(self.world_size, -1).unbind(0)
        if source is not None:
            ranges[self.rank].copy_(source)
        sent = [ranges[self.rank]] * self.world_size
        return self._sent("gathers", self.groups.gather, what, ranges, sent, (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        received, lent = self._received.room_for(bucket, patience)
        pending = self.reduce_through(received, bucket, shard, what, key)
        if lent:
            self._received.until = pending
        return pending

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        divisor = self.groups.divisor
        if bucket.dtype == torch.float16 and divisor > 1:
            bucket.div_(divisor)
            divisor = 1

        def add_up() -> None:
            self._sum.into(shard, received.view(self.world_size, -1).unbind(0), divisor, spare=True)

        sent = self._all_to_all(received, bucket, [], [], what)
        sent.then(add_up)
        return sent

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        received = output.split(output_splits or output.numel() // self.world_size)
        sent = input.split(input_splits or input.numel() // self.world_size)
        received[self.rank].copy_(sent[self.rank])
        return self._sent("reductions", self.groups.reduce, what, received, sent, (output, input))

    def _sent(
        self,
        kind: str,
        group: dist.ProcessGroup | None,
        what: str,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        keep: Sequence[Tensor],
    ) -> Pending:
        """Send one tensor to each rank and receive one from each: see [Note: both ways at once].

        Every rank starts with its neighbour, so that no rank is asked for everything at once.
        """
        tag, works = _REDUCTIONS * (kind == "reductions"), list[Any]()
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        with naming_failures(what, self.groups.control.rank):
            for at in reversed(others):
                if received[at].numel():
                    works.append(dist.irecv(received[at], group=group, group_src=at, tag=tag))
            for at in others:
                if sent[at].numel():
                    works.append(dist.isend(sent[at], group=group, group_dst=at, tag=tag))
        return self.in_hops(kind, what, [(group, partial(_wait_for, works))], keep)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        group = self.groups.gather
        work = dist.broadcast(tensor, group=group, async_op=True, group_src=source)
        return Pending(what, self.groups.control.rank, works=[work], keep=(tensor,), group=group)


def _wait_for(messages: Sequence[Any]) -> None:
    for message in messages:
        message.wait()


class _Received:
    """The one buffer that reductions over gloo arrive in, of each dtype."""

    def __init__(self) -> None:
        self.memory: dict[torch.dtype, Tensor] = {}
        self.until: Pending | None = None  # the reduction that has it
        self._late = False

    def room_for(self, bucket: Tensor, patience: float) -> tuple[Tensor, bool]:
        """The buffer, once the reduction before has left it, and True; fresh memory if that takes too long."""
        if self.until is not None:
            # Nobody waits a second time for one that is late.
            self._late = not self.until.ready_within(0.0 if self._late else patience)
            if self._late:
                return torch.empty_like(bucket), False
            self.until.wait()
        received = self.memory.get(bucket.dtype)
        if received is None or received.numel() < bucket.numel():
            with torch.inference_mode(False):
                received = self.memory[bucket.dtype] = torch.empty_like(bucket)
        return received.narrow(0, 0, bucket.numel()), True


def divide(total: Tensor, divisor: int) -> None:
    """Make a sum an average, in place."""
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor != 1:
        total.mul_(1 / divisor)  # exact for a power of two, hence the same bits, and faster


class PairwiseSum:
    """Averages one tensor per rank: neighbours first, then pairs of neighbours, and so on, each rounded to the dtype.

    ``(0 + 1) + (2 + 3)``; of other numbers than powers of two the last ones are fewer: ``(0 + 1) + 2``. So hosts with
    a power of two of ranks in a row may sum theirs first, and no bit changes.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Memory that is kept: of each dtype the largest chunk for each time that ranks can be halved, none for two."""
        return tuple(self._scratch.values())

    def into(self, result: Tensor, pieces: Sequence[Tensor], divisor: int, spare: bool = False) -> None:
        """Write the average of at least two 1-D tensors, in rank order; a divisor of 1 where they were divided before.

        ``result`` may be the memory of one of them. ``spare``: all of them may be written over, and no memory is kept.
        """
        if len(pieces) == 2:
            torch.add(*pieces, out=result)
            divide(result, divisor)
            return
        size = max(1, result.numel() if spare else _CHUNK_NBYTES // result.itemsize)
        for total, *parts in zip(result.split(size), *(piece.split(size) for piece in pieces), strict=True):
            self._add(parts, spare, 0, total)
            divide(total, divisor)

    def _add(self, parts: Sequence[Tensor], spare: bool, level: int, out: Tensor | None = None) -> Tensor:
        """The sum of some. Until the last addition nothing is written to ``out``, which may be one of them."""
        half = 1 << (len(parts) - 1).bit_length() - 1
        left = parts[0] if half == 1 else self._add(parts[:half], spare, level)
        right = parts[-1] if half == len(parts) - 1 else self._add(parts[half:], spare, level + 1)
        if out is None:
            out = left if spare else self._chunk(left.dtype, level, left.numel())
        return torch.add(left, right, out=out)

    def _chunk(self, dtype: torch.dtype, level: int, numel: int) -> Tensor:
        scratch = self._scratch.get((dtype, level))
        if scratch is None or scratch.numel() < numel:
            with torch.inference_mode(False):
                scratch = self._scratch[dtype, level] = torch.empty(numel, dtype=dtype)
        return scratch.narrow(0, 0, numel)
