"""Collectives through a process group: the backend's own, and better ones on gloo. And which wire a world takes.

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

[Note: two hops and one order]
A transfer may take several hops (``extensions/hops``, ``shard_within``). The second hop begins when the first one has
ended, while the rank computes, or waits for something else: if it had to come back for that, ranks could wait for one
another. So each hop of each kind has a thread, which carries transfers one after the other, in the order in which the
rank has issued them, which is the same on all ranks. One may be in its second hop while the next one is in its first.
After one that failed none is sent any more: another rank would take it for the one that did not come.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero._torch import (
    all_gather_single,
    outside_of_transforms,
    reduce_scatter_single,
    tensor_allocator,
    untracked,
)
from lightning_zero.comm.collectives import Collectives, Content, LocalCollectives, Pending
from lightning_zero.comm.control import ABOUT_GRADIENTS, LOOK_SECONDS, naming_failures, passed_on, verdict
from lightning_zero.comm.groups import Groups, connections, places_by_host
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Compression, Placement
from lightning_zero.registry import extension, installed

__all__ = ["SWITCH", "Exchange", "GlooCollectives", "NativeCollectives", "Passage", "average", "choose_collectives"]
__all__ += ["divide"]

SWITCH = "LIGHTNING_ZERO_SHARED_MEMORY"
"""Environment variable: ``0`` on any rank keeps all of them from reading one another's memory; with ``1`` it is
an error if this copy of the package has no such extension."""

Hop = tuple[dist.ProcessGroup | None, Callable[[], object]]
"""A group, and what returns when that has carried its part of a transfer."""

_log = logging.getLogger(__name__)

_REDUCTIONS = 1  # tag of their messages: averages between groups are gathered in the same process group
_CHUNK_NBYTES = 2**19  # summed at a time where that takes memory: few calls, and still in a core's cache
_GRACE_SECONDS = 1.0  # for transfers under way, before their connections are shut
_CUT_OFF_SECONDS = 3.0  # then, before a thread is left behind: gloo tells nobody of a message that was cut off


class NativeCollectives(Collectives):
    """The backend's own collectives (nccl), on side streams of ours, and so in an order of ours.

    They are calls that wait, ``async_op=False``: since torch 2.8 nccl's kernels then run on the stream that is current,
    with its priority, and the host goes on. As calls that do not, they would run on a stream of the group's, with the
    priority of its options (``is_high_priority_stream``), an event there and one back for each. Which groups carry
    them: see [Note: one order on a device].
    """

    registered = False
    """Whether all that is gathered and reduced lies in memory that the process groups allocate and register."""

    def __init__(self, groups: Groups, streams: Streams, across: NativeCollectives | None = None) -> None:
        super().__init__(groups.shard.rank, groups.shard.world_size, streams.device, groups.abandoned)
        self.groups = groups
        self.streams = streams
        self.across = across
        self.state = self.state if across is None else across.state

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
            dist.all_reduce(numbers, operation, group=self.groups.counting or self.groups.reduce, async_op=True).wait()
        return numbers.view(torch.float64)

    def average_across(
        self, shard: Tensor, what: str, reduction: Pending | None = None, key: Hashable = None
    ) -> tuple[Pending | None, Pending]:
        if self.across is None:
            return super().average_across(shard, what, reduction, key)
        self._observe("all_reduce", what, shard)
        wire, begin, after = self.across, bool if reduction is None else reduction.wait, None
        if reduction is not None and self.streams.beside:
            with self.streams.reducing():
                reduction.wait()
                after, begin = self.streams.mark(), bool
            reduction = Pending(what, after, self.streams)
        with wire.streams.reducing(after):
            hops = (self.groups.reduce, begin), *wire.averaging(shard, what, key)
            return reduction, self.in_hops("averages", what, hops, (shard,))

    def averaging(self, shard: Tensor, what: str, key: Hashable) -> list[Hop]:
        """What averages a 1-D tensor of all ranks in place, hop by hop. ``key`` is as in ``reduce_scatter``."""
        rest, whole = -shard.numel() % (self.world_size * self.block), shard

        def at_once() -> None:
            early = shard.dtype == torch.float16  # as its sum may be infinite
            divide(shard, self.groups.divisor if early else 1)
            dist.all_reduce(shard, group=self.groups.reduce)
            divide(shard, 1 if early else self.groups.divisor)

        def reduce() -> None:
            nonlocal whole
            whole = torch.cat([shard, shard.new_zeros(rest)]) if rest else shard
            self.reduce_scatter(whole, self.own_range(whole), what, key=key).wait()

        def gather() -> None:
            self.all_gather(whole, what, content=(key, 0)).wait()  # which nobody keeps
            if rest:
                shard.copy_(whole[: shard.numel()])

        if type(self) is NativeCollectives:  # the others have an order of their own for sums, or round what they send
            return [(self.groups.reduce, at_once)]
        return [(self.groups.reduce, reduce), (self.groups.gather, gather)]

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
        return Pending(what, self.streams.mark(), self.streams, keep)

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        if not self.registered:
            return None
        allocator = tensor_allocator(self.groups.gather if gathered else self.groups.reduce, self.device)
        return cast(Tensor, allocator.allocate_tensor(nbytes, dtype=torch.uint8, device=self.device))

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        with self.streams.gathering():
            if source is None or source.dtype != buffer.dtype or self.registered:
                own = self.own_range(buffer)
                source = own if source is None else own.copy_(source)
            all_gather_single(buffer, source, group=self.groups.gather)
            return self._behind(what, (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        with self.streams.reducing():
            if bucket.dtype == torch.float16:
                divide(bucket, self.groups.divisor)
            own = self.own_range(bucket) if self.registered else shard
            reduce_scatter_single(own, bucket, group=self.groups.reduce)
            if own is not shard:
                shard.copy_(own)
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
        with self.streams.gathering(), naming_failures(what, self.groups.control.rank, self.groups.gather):
            dist.broadcast(tensor, group=self.groups.gather, group_src=source)
            return self._behind(what, (tensor,))


class GlooCollectives(NativeCollectives):
    """Collectives for CPU tensors over gloo: point-to-point gathers, and reductions summed in an order of ours."""

    receives = True

    def __init__(self, groups: Groups, streams: Streams, across: NativeCollectives | None = None) -> None:
        super().__init__(groups, streams, across)
        self._received: dict[torch.dtype, Tensor] = {}  # the one buffer of each dtype that reductions arrive in
        self._until: Pending | None = None  # the reduction that has it
        self._late = False  # nobody waits a second time for one that is

    @property
    def buffers(self) -> Sequence[Tensor]:
        return *self._received.values(), *super().buffers

    def in_hops(self, kind: str, what: str, hops: Sequence[Hop], keep: Sequence[Tensor]) -> Pending:
        groups, carry = zip(*hops, strict=True)
        name, stop = f"the {kind} {self.groups.number}", self.groups.stop if len(hops) > 1 else bool
        relay: Relay = self.groups.resource(kind, lambda: Relay(name, groups, stop))
        return relay.carry(what, carry, keep)

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        ranges = buffer.view(self.world_size, -1).unbind(0)
        if source is not None:
            ranges[self.rank].copy_(source)
        sent = [ranges[self.rank]] * self.world_size
        return self._sent("gathers", self.groups.gather, what, ranges, sent, (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        if self._until is not None:
            self._late = not self._until.ready_within(0.0 if self._late else patience)
            if self._late:
                return self.reduce_through(torch.empty_like(bucket), bucket, shard, what, key)
            self._until.wait()
        received = self._received.get(bucket.dtype)
        if received is None or received.numel() < bucket.numel():
            with torch.inference_mode(False):
                received = self._received[bucket.dtype] = torch.empty_like(bucket)
        self._until = self.reduce_through(received[: bucket.numel()], bucket, shard, what, key)
        return self._until

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        divisor = self.groups.divisor
        if bucket.dtype == torch.float16 and divisor > 1:
            bucket.div_(divisor)
            divisor = 1
        sent = self._all_to_all(received, bucket, [], [], what)
        sent.then(lambda: average(shard, received.view(self.world_size, -1).unbind(0), divisor, spare=True))
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
        return self.in_hops(kind, what, [(group, lambda: [work.wait() for work in works])], keep)


class Relay:
    """Takes transfers of one kind through hops: see [Note: two hops and one order].

    Args:
        name: of all transfers of the kind, alike on all ranks.
        groups: which carry the hops. A transfer of one hop waits for the ranks of its group, any other one for all.
        stop: ends waits of hops that no group carries.
    """

    def __init__(self, name: str, groups: Sequence[dist.ProcessGroup | None], stop: Callable[[], object]) -> None:
        self._name, self._stop = name, stop
        alone = groups[0] if len(groups) == 1 else None
        self._members = tuple(range(dist.get_world_size()) if alone is None else dist.get_process_group_ranks(alone))
        connections[name] = [place for group in groups if group is not None for place in connections[group.group_name]]
        passed_on[name] = 0
        self._failure: BaseException | None = None
        self._hops: list[tuple[SimpleQueue[Any], threading.Thread]] = []
        for hop in range(1, len(groups) + 1):
            jobs: SimpleQueue[Any] = SimpleQueue()
            label = f"lightning_zero: {name}, hop {hop}"
            self._hops.append((jobs, threading.Thread(target=_do, args=(jobs,), name=label, daemon=True)))
            self._hops[-1][1].start()

    def carry(self, what: str, hops: Sequence[Callable[[], object]], keep: Sequence[Tensor]) -> Passage:
        """Run one after the other, each in the thread of its hop, which keeps no reference to it when it has ended:
        who waits may count who else has the memory."""
        passed_on[self._name] += 1
        passage = Passage(what, keep, self._name, passed_on[self._name], self._members)
        self._hops[0][0].put(partial(self._take, passage, list(hops), 0))
        return passage

    def end(self) -> None:
        """End the threads, when transfers under way have ended, or have had some seconds for it."""
        for jobs, thread in self._hops:
            jobs.put(None)
            thread.join(_GRACE_SECONDS)
            if thread.is_alive():
                connections.shut(self._name)
                self._stop()
                thread.join(_CUT_OFF_SECONDS)
        connections.pop(self._name, None)
        passed_on.pop(self._name, None)

    def _take(self, passage: Passage, left: list[Callable[[], object]], hop: int) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            with untracked():
                left[0]()
            del left[0]
        except BaseException as error:
            self._failure = error.with_traceback(None)
            passage.end(self._failure)
        else:
            if left:
                self._hops[hop + 1][0].put(partial(self._take, passage, left, hop + 1))
            else:
                passage.end()


def _do(jobs: SimpleQueue[Any]) -> None:
    """What a hop's thread does: one job after the other, until ``None``."""
    while (job := jobs.get()) is not None:
        job()
        del job  # and the tensors with it


class Passage(Pending):
    """A transfer that threads carry."""

    def __init__(self, what: str, keep: Sequence[Tensor], kind: str, number: int, members: tuple[int, ...]) -> None:
        super().__init__(what, keep=keep)
        self.kind = kind
        self._note = kind, number, members
        self._under_way = threading.Lock()  # and no event: the watch knows a wait by the innermost call, which is here
        self._under_way.acquire()
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> None:
        """It has ended, or has failed. Once."""
        self._failure = failure
        self._under_way.release()

    def ready_within(self, seconds: float) -> bool:
        came = self._under_way.acquire(timeout=seconds)
        if came:
            self._under_way.release()
        return came

    def _arrive(self) -> None:
        with naming_failures(self.what, dist.get_rank(), *self._note):
            while not self._under_way.acquire(timeout=LOOK_SECONDS):
                if reason := verdict():
                    raise RuntimeError(reason)
            self._under_way.release()
            if self._failure is not None:
                raise self._failure


def divide(total: Tensor, divisor: int) -> None:
    """Make a sum an average, in place."""
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor != 1:
        total.mul_(_scalar(1 / divisor))  # exact for a power of two, hence the same bits, and faster


@cache
def _scalar(value: float) -> Tensor:
    """A number as torch has it: it makes a tensor of every other one, and casts that, which takes longer than to
    multiply by it."""
    with torch.inference_mode(False), outside_of_transforms():
        return torch.tensor(value, device="cpu")


def average(result: Tensor, pieces: Sequence[Tensor], divisor: int, spare: bool = False) -> None:
    """Write the average of one 1-D tensor per rank, in rank order: neighbours first, then pairs of neighbours, and so
    on, each rounded to the dtype. At least two; a divisor of 1 where they were divided before.

    ``(0 + 1) + (2 + 3)``; of other numbers than powers of two the last ones are fewer: ``(0 + 1) + 2``. So hosts with
    a power of two of ranks in a row may sum theirs first, and no bit changes.

    ``result`` may be the memory of one of them. ``spare``: all of them may be written over. Else three or more take
    memory: a chunk for each time that they can be halved.
    """
    if len(pieces) == 2:
        torch.add(*pieces, out=result)
        divide(result, divisor)
        return
    scratch: list[Tensor] = []
    size = max(1, result.numel() if spare else _CHUNK_NBYTES // result.itemsize)
    for total, *parts in zip(result.split(size), *(piece.split(size) for piece in pieces), strict=True):
        _add(parts, None if spare else scratch, 0, total)
        divide(total, divisor)


def _add(parts: Sequence[Tensor], scratch: list[Tensor] | None, level: int, out: Tensor | None = None) -> Tensor:
    """The sum of some. Until the last addition nothing is written to ``out``, which may be one of them."""
    half = 1 << (len(parts) - 1).bit_length() - 1
    left = parts[0] if half == 1 else _add(parts[:half], scratch, level)
    right = parts[-1] if half == len(parts) - 1 else _add(parts[half:], scratch, level + 1)
    if out is None and scratch is None:
        out = left
    elif out is None and scratch is not None:
        if level == len(scratch):
            scratch.append(torch.empty_like(left))
        out = scratch[level][: left.numel()]
    return torch.add(left, right, out=out)


class Exchange(NamedTuple):
    """What is asked of the exchange between hosts."""

    compression: Compression | None = None
    secondary_shards: bool = False
    """Whether a host keeps what comes from others to be computed with: see ``extensions/hops``."""
    allocate_memory_from_process_group: bool = False


_AS_IT_IS = Exchange()


def choose_collectives(
    groups: Groups, streams: Streams, device: torch.device, exchange: Exchange = _AS_IT_IS
) -> Collectives:
    """The collectives for ranks that compute on ``device``, of the same type on every rank. Collective: every rank.

    Raises, on every rank, ValueError where there is no such ``exchange``, DivergenceError if ranks want others, and
    ExtensionError for what was deleted from this copy of the package.
    """
    asked = exchange._asdict()
    lines = [f"{name}={value}" for name, value in asked.items()]
    lines += [f"extension {name}: {installed(name)}" for name in ("compression", "hops", "shared_memory")]
    groups.control.alike("exchange between hosts", lines)
    for name, value in asked.items():
        if value and device.type != "cpu" and not streams.beside:
            raise ValueError(f"{name} is for CPU and CUDA ranks, and these compute on {device.type}: leave it out.")
    wire: Any = LocalCollectives(streams) if groups.shard.world_size == 1 else _chosen(groups, streams, exchange)
    wire.asked = exchange
    if exchange.allocate_memory_from_process_group and wire.world_size > 1:
        able = type(wire) is NativeCollectives and tensor_allocator(groups.gather, device) is not None
        if groups.control.agree_any(not able):
            raise ValueError(
                "allocate_memory_from_process_group needs process groups with memory of their own: nccl's on GPUs with "
                "NVLink SHARP, and neither compression nor secondary_shards between nodes. Leave it out."
            )
        wire.registered = True
        wire.lend(1), wire.lend(1, gathered=True)  # connects the groups, which takes all ranks at once
    return cast(Collectives, wire)


def _chosen(groups: Groups, streams: Streams, exchange: Exchange) -> Any:
    on_cpu = streams.device.type == "cpu" and not streams.beside
    direct = GlooCollectives if on_cpu else NativeCollectives
    asked = exchange if any(exchange[:2]) and len(groups.find_hosts()) > 1 else _AS_IT_IS

    def between_hosts(wire: NativeCollectives, averages: bool = False) -> Any:
        """A wire as it is, or what makes fewer bytes of it."""
        if asked.compression is None:
            return wire
        return extension("compression").compressed(wire, asked.compression, averages)

    control, off = groups.control, f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else ""
    shares = installed("shared_memory") or (on_cpu and control.agree_any(os.environ.get(SWITCH) == "1"))
    elsewhere = shares and (groups.across is not None or not on_cpu)  # tensors go, but agreements of one host need not
    if elsewhere and len(groups.find_hosts()) == 1 and not control.agree_any(bool(off)):
        members, make = range(control.world_size), extension("shared_memory").SharedMemory
        groups.resource("shared_memory", lambda: make(groups, members, threads=1))
    if groups.across is not None:
        return direct(groups, streams, between_hosts(direct(groups.across, streams.apart()), True))
    control.counted = groups.checkpoint.counted = range(control.world_size)
    places = places_by_host(groups.find_hosts()) if groups.shard.tensor == 1 and (on_cpu or any(asked)) else None
    hops = shared = None
    if places is not None and (any(asked) or installed("hops")):
        hops = extension("hops").split(groups, places, "gloo" if on_cpu else dist.get_backend(groups.gather))
    if on_cpu and shares:
        shared = extension("shared_memory").connected(groups, hops is not None, off)
    if hops is None:
        if asked.secondary_shards and control.rank == 0:
            needs = "hosts with equally many ranks, two or more, and no tensor parallelism"
            _log.warning("secondary_shards does nothing: that takes %s.", needs)
        return between_hosts(direct(groups, streams)) if shared is None else shared.wire(groups)
    within = direct(hops.within, streams) if shared is None else shared.wire(hops.within)
    between = between_hosts(direct(hops.between, streams))
    return extension("hops").HierarchicalCollectives(
        hops, direct(groups, streams), within, between, asked.secondary_shards
    )
