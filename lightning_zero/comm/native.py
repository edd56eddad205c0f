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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import all_gather_single, reduce_scatter_single, untracked
from lightning_zero.comm.collectives import Collectives, Content, Pending
from lightning_zero.comm.control import ABOUT_GRADIENTS, naming_failures
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.comm.sums import PairwiseSum, divide

__all__ = ["GlooCollectives", "NativeCollectives"]

_REDUCTIONS = 1  # tag of their messages: averages between groups are gathered in the same process group


class NativeCollectives(Collectives):
    """The backend's own collectives (nccl), on side streams of ours, and so in an order of ours.

    They are calls that wait, ``async_op=False``: since torch 2.8 nccl's kernels then run on the stream that is current,
    and the host goes on. As calls that do not, they would run on a stream of the group's, with an event there and one
    back for each. Which groups carry them: see [Note: one order on a device].
    """

    def __init__(self, groups: Groups, streams: Streams) -> None:
        super().__init__(groups.shard.rank, groups.shard.world_size, groups.abandoned)
        self.groups = groups
        self.streams, self.device = streams, streams.device
        self._told = groups.control.rank  # the rank as errors name it

    @property
    def buffers(self) -> Sequence[Tensor]:
        return tuple(self.residuals.values())

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        operation = dist.ReduceOp.SUM
        if largest:  # nccl's drops NaN; as integers, floats without a sign have the same order, and NaN is above all
            numbers, operation = numbers.view(torch.int64).bitwise_and_(2**63 - 1), dist.ReduceOp.MAX
        with naming_failures(ABOUT_GRADIENTS, self._told):
            dist.all_reduce(numbers, operation, group=self.groups.reduce, async_op=True).wait()
        return numbers.view(torch.float64)

    def average_across(
        self, shard: Tensor, what: str, reduction: Pending | None = None, key: Hashable = None
    ) -> tuple[Pending | None, Pending]:
        if self.across is None:
            return super().average_across(shard, what, reduction, key)
        self._observe("all_reduce", what, shard)
        return self._averaged_behind(reduction, shard, what, _averaging(self.across, shard, what, key))

    def _averaged_behind(
        self, reduction: Pending | None, shard: Tensor, what: str, hops: Sequence[Callable[[], None]]
    ) -> tuple[Pending | None, Pending]:
        # Not among the gathers, where it would have a place of its own on every rank.
        with untracked(), self.streams.reducing():
            if reduction is not None:
                reduction.wait()
                reduction = Pending(what, self._told, event=self.streams.mark(), streams=self.streams)
            for hop in hops:
                hop()
            event = self.streams.mark()
        return reduction, Pending(what, self._told, event=event, streams=self.streams, keep=(shard,))

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        with self.streams.gathering(after):
            own = self.own_range(buffer)
            if source is not None and source.dtype != own.dtype:
                own.copy_(source)
                source = None
            all_gather_single(buffer, own if source is None else source, group=self.groups.gather)
            event = self.streams.mark()
        return Pending(what, self._told, event=event, streams=self.streams, keep=(buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        with self.streams.reducing():
            if bucket.dtype == torch.float16:
                divide(bucket, self.groups.divisor)
            reduce_scatter_single(shard, bucket, group=self.groups.reduce)
            if bucket.dtype != torch.float16:
                divide(shard, self.groups.divisor)
            event = self.streams.mark()
        return Pending(what, self._told, event=event, streams=self.streams, keep=(bucket, shard))

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        """``reduce_scatter`` with memory of the caller's for what the others send, if any is needed: like ``bucket``,
        and no part of ``shard``. Collective: the ranks of the shard group."""
        return self._reduce_scatter(bucket, shard, what, 0.0, key)

    def _followed(self, transfer: Pending, finish: Callable[[], None], keep: Sequence[Tensor]) -> Pending:
        """Have arithmetic follow a transfer: on the current stream, which is that of the transfer, as far as there are
        any; else where somebody waits. Memory that both alone use then belongs to that stream."""
        if not self.streams.beside:
            transfer.then(finish)
            return transfer
        transfer.wait()
        finish()
        return Pending(transfer.what, self._told, event=self.streams.mark(), streams=self.streams, keep=keep)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        with self.streams.reducing():
            dist.all_to_all_single(output, input, output_splits, input_splits, group=self.groups.reduce)
            event = self.streams.mark()
        return Pending(what, self._told, event=event, streams=self.streams, keep=(output, input))

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        with self.streams.gathering():
            dist.broadcast(tensor, group=self.groups.gather, group_src=source)
            event = self.streams.mark()
        return Pending(what, self._told, event=event, streams=self.streams, keep=(tensor,))


class GlooCollectives(NativeCollectives):
    """Collectives for CPU tensors over gloo: point-to-point gathers, and reductions summed in an order of ours."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        super().__init__(groups, streams)
        self._order: Sequence[int] = range(self.world_size)  # of the ranks, by shard
        self._sum = PairwiseSum()
        self._received: dict[torch.dtype, Tensor] = {}
        self._receiving: Pending | None = None  # the reduction that holds the receive buffer
        self._late = False
        self.receives = True

    @property
    def buffers(self) -> Sequence[Tensor]:
        across = () if self.across is None else self.across.buffers
        return *self._received.values(), *self.residuals.values(), *across

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        size, mine = buffer.numel() // self.world_size, self.own_range(buffer)
        if source is not None:
            mine.copy_(source)
        works: list[Any] = []
        group = self.groups.gather
        # Every rank starts with its neighbour, so that no rank is asked for everything at once.
        with naming_failures(what, self._told):
            for step in range(1, self.world_size):
                peer = (self.rank - step) % self.world_size
                works.append(dist.irecv(buffer.narrow(0, peer * size, size), group=group, group_src=peer))
            for step in range(1, self.world_size):
                works.append(dist.isend(mine, group=group, group_dst=(self.rank + step) % self.world_size))
        return self._arriving("gathers", what, works, (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        received, lent = self._receive_buffer(bucket, patience)
        pending = self.reduce_through(received, bucket, shard, what, key)
        if lent:
            self._receiving = pending
        return pending

    def _averaged_behind(
        self, reduction: Pending | None, shard: Tensor, what: str, hops: Sequence[Callable[[], None]]
    ) -> tuple[Pending | None, Pending]:
        there = (lambda: None) if reduction is None else reduction.wait
        passage = self.groups.relay("averages").carry(what, (there, *hops))
        return reduction, Pending(what, self._told, works=[passage], keep=(shard,))

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        if bucket.dtype == torch.float16 and self.groups.divisor > 1:
            bucket.div_(self.groups.divisor)

        def add_up() -> None:
            pieces = received.view(self.world_size, -1).unbind(0)
            self._sum.into(shard, pieces, 1 if bucket.dtype == torch.float16 else self.groups.divisor, spare=True)

        sent = self._all_to_all(received, bucket, [], [], what)
        sent.then(add_up)
        return sent

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        group, works = self.groups.reduce, list[Any]()
        received = output.split(output_splits or output.numel() // self.world_size)
        sent = input.split(input_splits or input.numel() // self.world_size)
        received[self.rank].copy_(sent[self.rank])
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        with naming_failures(what, self._told):
            for at in reversed(others):
                if received[at].numel():
                    works.append(dist.irecv(received[at], group=group, group_src=self._order[at], tag=_REDUCTIONS))
            for at in others:
                if sent[at].numel():
                    works.append(dist.isend(sent[at], group=group, group_dst=self._order[at], tag=_REDUCTIONS))
        return self._arriving("reductions", what, works, (output, input))

    def _arriving(self, kind: str, what: str, messages: Sequence[Any], keep: Sequence[Tensor]) -> Pending:
        """A transfer that is over with its messages, of which gloo tells nobody but who waits: a thread does."""

        def arrive() -> None:
            for message in messages:
                message.wait()

        return Pending(what, self._told, works=[self.groups.relay(kind).carry(what, [arrive])], keep=keep)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        work = dist.broadcast(tensor, group=self.groups.gather, async_op=True, group_src=source)
        return Pending(what, self._told, works=[work], keep=(tensor,), group=self.groups.gather)

    def _receive_buffer(self, bucket: Tensor, patience: float) -> tuple[Tensor, bool]:
        """The one receive buffer, once the reduction before has left it; fresh memory if that takes too long."""
        if self._receiving is not None:
            if not self._receiving.ready_within(0.0 if self._late else patience):
                self._late = True  # nobody waits a second time for one that is this late
                return torch.empty_like(bucket), False
            self._receiving.wait()
            self._late = False
        received = self._received.get(bucket.dtype)
        if received is None or received.numel() < bucket.numel():
            with torch.inference_mode(False):
                received = self._received[bucket.dtype] = torch.empty_like(bucket)
        return received.narrow(0, 0, bucket.numel()), True


def _averaging(
    wire: Collectives, shard: Tensor, what: str, key: Hashable
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two hops of an average over a wire between shard groups, each of which returns when it has ended."""
    rest = -shard.numel() % (wire.world_size * wire.block)
    whole = shard

    def reduce() -> None:
        nonlocal whole
        whole = torch.cat([shard, shard.new_zeros(rest)]) if rest else shard
        wire.reduce_scatter(whole, wire.own_range(whole), what, key=key).wait()

    def gather() -> None:
        wire.all_gather(whole, what, content=(key, 0)).wait()  # which nobody keeps
        if rest:
            shard.copy_(whole[: shard.numel()])

    return reduce, gather
