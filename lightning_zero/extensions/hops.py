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
from dataclasses import replace

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Collectives, Content, Pending
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.native import NativeCollectives, divide
from lightning_zero.config import Placement

__all__ = ["HierarchicalCollectives", "Hops", "split"]


class Hops:
    """The process groups of two hops. Collective: every rank.

    Args:
        groups: of all ranks.
        places: the ranks in one place of every host, by place.
        backend: of the process groups.
    """

    def __init__(self, groups: Groups, places: Sequence[Sequence[int]], backend: str | None) -> None:
        self.order = [rank for ranks in places for rank in ranks]
        """Which rank has the first shard of a flat buffer, the second one, and so on."""
        self.within = groups.among(groups.hosts, "parameters within a host", backend)
        self.between = groups.among(places, "parameters between hosts", backend)

    def end(self) -> None:
        self.within.end()
        self.between.end()


def split(groups: Groups, places: Sequence[Sequence[int]], backend: str | None) -> Hops:
    """The two hops of some groups, made once. Called when a run chooses its wire. Collective: every rank."""
    hops: Hops = groups.resource("hops", lambda: Hops(groups, places, backend))
    for hop in (hops.within, hops.between):
        hop.part(apart=not groups.one_order)
    groups.control.counted = groups.checkpoint.counted = hops.order
    return hops


class HierarchicalCollectives(Collectives):
    """Collectives within hosts and then between them: see [Note: shards by host].

    All-to-alls and broadcasts, of which no more leaves a host, take the direct way.

    Args:
        hops: the groups of both hops.
        direct: what carries tensors between all ranks.
        within: what carries the hop within hosts.
        between: what carries the other one.
        keeps: see [Note: what a host keeps].
    """

    def __init__(
        self, hops: Hops, direct: NativeCollectives, within: Collectives, between: NativeCollectives, keeps: bool
    ) -> None:
        super().__init__(hops.order.index(direct.rank), direct.world_size, direct.device, direct.abandoned)
        self.groups = direct.groups
        self._hops = hops
        self._direct, self._within, self._between = direct, within, between
        self.state, self.alters, self.receives = between.state, between.alters, within.receives
        # By name of the content, with its state; ``None``: nothing is kept.
        self._kept: dict[Hashable, tuple[int, Tensor]] | None = {} if keeps else None

    def placed(self, placement: Placement) -> Placement:
        placement = self._between.placed(placement)
        return placement if self._kept is None else replace(placement, keeping=self._within.world_size)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return *self._within.buffers, *self._between.buffers

    @property
    def kept(self) -> Sequence[Tensor]:
        return [part for _, part in (self._kept or {}).values()]

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return self._direct.total(numbers, largest)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._within.allocate(numel, dtype, device)

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        return self._within.lend(nbytes, gathered)

    def freeze(self, memory: Sequence[Tensor]) -> None:
        self._within.freeze(memory)

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        part = self._within.own_range(buffer)
        with untracked(), self._direct.streams.gathering():
            if source is not None:
                self.own_range(buffer).copy_(source)
            keep, known = (part, False) if content is None else self._place_for(part, *content)

            def between() -> None:
                if known:
                    part.copy_(keep)
                    return
                self._between.all_gather(part, what, content=content).wait()
                if keep is not part:
                    keep.copy_(part)

            def within() -> None:
                self._within.all_gather(buffer, what).wait()

            return self._carried("gathers", what, between, within, (buffer,))

    def _place_for(self, part: Tensor, name: Hashable, state: int) -> tuple[Tensor, bool]:
        """Where a part of some content is kept, and whether it is there in this state; the part itself if none is."""
        if self._kept is None:
            return part, False
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

        with self._direct.streams.reducing():
            return self._carried("reductions", what, within, between, (bucket, shard))

    def _carried(
        self, kind: str, what: str, first: Callable[[], None], second: Callable[[], None], keep: Sequence[Tensor]
    ) -> Pending:
        groups = [hop.gather if kind == "gathers" else hop.reduce for hop in (self._hops.within, self._hops.between)]
        hops = [*zip(groups, (first, second), strict=True)]
        return self._direct.in_hops(f"{kind} in two hops", what, hops, keep)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], what: str
    ) -> Pending:
        """Pieces are in the order of the shards; they travel in that of the ranks."""
        places = sorted(range(self.world_size), key=self._hops.order.__getitem__)  # of the ranks, in their order
        with untracked(), self._direct.streams.reducing():
            received, given = output.split(output_splits), input.split(input_splits)
            sent, taken = torch.cat([given[at] for at in places]), torch.empty_like(output)
            output_splits, input_splits = ([sizes[at] for at in places] for sizes in (output_splits, input_splits))

            def put() -> None:
                for at, part in zip(places, taken.split(output_splits), strict=True):
                    received[at].copy_(part)

            carried = self._direct.all_to_all(taken, sent, output_splits, input_splits, what)
            return self._direct.followed(carried, put, (output, input, sent, taken))

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        return self._direct.broadcast(tensor, self._hops.order[source], what)
