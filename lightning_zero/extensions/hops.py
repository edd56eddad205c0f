"""Collectives between ranks of several hosts in two hops: within each host, and between those in one place of all.

[Note: shards by host]
With S ranks on each of H hosts, flat collectives send S times what has to leave a host. In two hops a host sends what
it has summed up, once: a reduction goes to the host's ranks first, each of which then sums its part with the ranks in
its place on the other hosts; a gather takes the way back. The flat buffer is cut for that by place and then by host:
rank ``r`` of host ``h`` has shard ``r * H + h``, so that both hops find their ranges side by side.

Sums are those of the tree over all ranks (``sums``) where S is a power of two and the hosts' ranks follow one another.

[Note: what a host keeps]
Backward needs the weights of forward, and a later micro-step or validation the same again. Where a host's ranks keep
what came from other hosts, each of them a part, it comes once after each change of weights, and the first hop is a copy
from then on. All ranks take part in all gathers, in one order, so that all know alike what is kept; and where an error
has stopped them in different places, each gives all of it up.
Source: ZeRO++ (arXiv:2306.10209), section 3.2, where it is hpZ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Collectives, Content, Pending
from lightning_zero.comm.groups import Groups, Hops
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.comm.sums import divide

__all__ = ["HierarchicalCollectives", "HierarchicalOverGloo"]


class HierarchicalCollectives(NativeCollectives):
    """Collectives within hosts and then between them: see [Note: shards by host].

    All-to-alls and broadcasts, of which no more leaves a host, take the direct way.

    Args:
        groups: all ranks.
        hops: the groups of both hops.
        streams: of the device.
        within: what carries the one within hosts.
        between: what carries the other one.
        keeps: see [Note: what a host keeps].
    """

    def __init__(
        self,
        groups: Groups,
        hops: Hops,
        streams: Streams,
        within: Collectives,
        between: NativeCollectives,
        keeps: bool = False,
    ) -> None:
        super().__init__(groups, streams)
        self.rank = hops.order.index(groups.control.rank)
        self._hops = hops
        self._order: Sequence[int] = hops.order  # for gloo
        self._within, self._between = within, between
        self.rounds_weights = between.rounds_weights
        self.keeping = self._within.world_size if keeps else None
        self.feeding = None if between.feeding is None else self._within.world_size
        self.residuals = between.residuals
        self.receives, self.shares_slots = within.receives, within.shares_slots
        self._kept: dict[Hashable, tuple[int, Tensor]] = {}  # by name of the content, with its state

    @property
    def buffers(self) -> Sequence[Tensor]:
        return *self._within.buffers, *self.residuals.values()

    @property
    def kept(self) -> Sequence[Tensor]:
        return [part for _, part in self._kept.values()]

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        part = self._within.own_range(buffer)

        def between() -> None:
            if keep is not None and known:
                part.copy_(keep)
                return
            self._between.all_gather(part, what, content=content).wait()
            if keep is not None:
                keep.copy_(part)

        def within() -> None:
            self._within.all_gather(buffer, what).wait()

        with untracked(), self.streams.gathering(after):
            if source is not None:
                self.own_range(buffer).copy_(source)
            keep, known = (None, False) if content is None or self.keeping is None else self._place_for(part, *content)
            return self._carried("gathers", what, (between, within), (buffer,))

    def _place_for(self, part: Tensor, name: Hashable, state: int) -> tuple[Tensor, bool]:
        """Where a part of some content is kept, and whether it is there in this state."""
        before, keep = self._kept.get(name, (None, None))
        if keep is None:
            with torch.inference_mode(False):
                keep = torch.empty_like(part)
        self._kept[name] = state, keep
        return keep, state == before

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        divisor, early = self.groups.divisor, bucket.dtype == torch.float16  # as its sum may be infinite
        part = self._within.own_range(bucket)
        free = bucket.narrow(0, 0 if self._within.rank else part.numel(), part.numel())  # once the host has its sum

        def within() -> None:
            if early:
                divide(bucket, divisor)
            self._within.reduce_scatter(bucket, part, what).wait()

        def between() -> None:
            self._between.reduce_through(free, part, shard, what, key).wait()
            divide(shard, 1 if early else divisor)

        with self.streams.reducing():
            return self._carried("reductions", what, (within, between), (bucket, shard))

    def _carried(self, kind: str, what: str, hops: Sequence[Callable[[], None]], keep: Sequence[Tensor]) -> Pending:
        """Take a transfer through its hops: one after the other on the current stream."""
        with untracked():
            for hop in hops:
                hop()
        return Pending(what, self._told, event=self.streams.mark(), streams=self.streams, keep=keep)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        places = sorted(range(self.world_size), key=self._hops.order.__getitem__)  # of the ranks, in their order
        received, given = output.split(output_splits), input.split(input_splits)
        with untracked(), self.streams.reducing():
            sent, taken = torch.cat([given[at] for at in places]), torch.empty_like(output)
            output_splits, input_splits = ([sizes[at] for at in places] for sizes in (output_splits, input_splits))

            def put() -> None:
                for at, part in zip(places, taken.split(output_splits), strict=True):
                    received[at].copy_(part)

            return self._followed(
                super()._all_to_all(taken, sent, output_splits, input_splits, what), put, (output, input)
            )

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return super()._broadcast(tensor, self._hops.order[source], what)


class HierarchicalOverGloo(HierarchicalCollectives, GlooCollectives):
    """The same for CPU tensors, where threads take transfers through: see [Note: two hops and one order].

    Between hosts over gloo, and within them too unless their ranks read one another's memory.
    """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._within.allocate(numel, dtype, device)

    def vacate(self, memory: Tensor) -> None:
        self._within.vacate(memory)

    def occupy(self, memory: Tensor) -> None:
        self._within.occupy(memory)

    def freeze(self, memory: Sequence[Tensor]) -> None:
        self._within.freeze(memory)

    def _carried(self, kind: str, what: str, hops: Sequence[Callable[[], None]], keep: Sequence[Tensor]) -> Pending:
        return Pending(what, self._told, works=[self._hops.relay(kind).carry(what, hops)], keep=keep)

    _all_to_all = GlooCollectives._all_to_all
