"""Which wire the ranks of a world take."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.comm.collectives import Collectives, LocalCollectives
from lightning_zero.comm.groups import Groups, Hops
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Compression
from lightning_zero.registry import extension

__all__ = ["SWITCH", "Exchange", "choose_collectives"]

SWITCH = "LIGHTNING_ZERO_SHARED_MEMORY"
"""Environment variable: ``0`` on any rank keeps all of them from reading one another's memory."""

_TIMEOUT = timedelta(minutes=30)  # what torch gives a process group that nobody gave one
_log = logging.getLogger(__name__)


class Exchange(NamedTuple):
    """What is asked of the exchange between hosts."""

    compression: Compression | None = None
    secondary_shards: bool = False
    """Whether a host keeps what comes from others to be computed with. See [Note: what a host keeps]."""


class _Kinds(NamedTuple):
    """What carries tensors of one kind of device: directly, rounded, and in two hops."""

    direct: type[NativeCollectives]
    compressed: str
    hierarchical: str


_AS_IT_IS = Exchange()
_ON_DEVICE = _Kinds(NativeCollectives, "CompressedCollectives", "HierarchicalCollectives")
_OVER_GLOO = _Kinds(GlooCollectives, "CompressedOverGloo", "HierarchicalOverGloo")


def choose_collectives(
    groups: Groups, streams: Streams, device: torch.device, exchange: Exchange = _AS_IT_IS
) -> Collectives:
    """The collectives for ranks that compute on ``device``, of the same type on every rank. Collective: every rank.

    Raises, on every rank, ValueError where there is no such ``exchange``, and DivergenceError if ranks want others.
    """
    lines = [f"{name}={value}" for name, value in exchange._asdict().items()]
    groups.control.agree_equal("exchange between hosts", lines, " ".join(lines))
    for name, value in exchange._asdict().items():
        if value and device.type != "cpu" and not streams.beside:
            raise ValueError(f"{name} is for CPU and CUDA ranks, and these compute on {device.type}: leave it out.")
    collectives = _chosen(groups, streams, device, exchange)
    collectives.asked = exchange
    return collectives


def _chosen(groups: Groups, streams: Streams, device: torch.device, exchange: Exchange) -> Collectives:
    if groups.shard.world_size == 1:
        return LocalCollectives(streams)
    kinds = _OVER_GLOO if device.type == "cpu" and not streams.beside else _ON_DEVICE
    if groups.across is not None:
        within, among = kinds.direct(groups, streams), streams.in_reductions()
        within.across = kinds.direct(groups.across, among)
        if exchange.compression is not None and len(groups.find_hosts()) > 1:
            gradients = exchange.compression.gradients
            fed = ("sum", "average") if exchange.compression.error_feedback else ()
            compressed = getattr(extension("compression"), kinds.compressed)
            across = within.across = compressed(groups.across, among, gradients, gradients, fed)
            within.feeding, within.residuals = groups.shard.world_size if fed else None, across.residuals
        return within
    if kinds is _ON_DEVICE:  # nccl finds its way between hosts, unless something is asked for that it does not do
        asked = any(exchange) and len(groups.find_hosts()) > 1
        hops = groups.split_by_host(dist.get_backend(groups.gather) if asked else None)
        return _apart(groups, hops, streams, kinds, exchange if asked else _AS_IT_IS)
    hops = groups.split_by_host()
    problem = _without_shared_memory(groups)
    if len(groups.hosts) == 1 and groups.transports and not problem:
        found: Collectives = extension("shared_memory").SharedMemoryCollectives(groups, *groups.transports)
        return found
    several, reads = len(groups.hosts) > 1, hops is not None and not problem
    text = [f"they are on {len(groups.hosts)} hosts"] if several else []
    if hops is not None:
        text.append("and read one another's memory on each" if reads else "and go within each of them first")
    text += [problem] if problem else []
    if groups.control.rank == 0 and text != groups.told:
        _log.info("Ranks exchange weights and gradients over gloo: %s.", ", ".join(text))
        groups.told = text
    return _apart(groups, hops, streams, kinds, exchange if several else _AS_IT_IS, reads)


def _apart(
    groups: Groups, hops: Hops | None, streams: Streams, kinds: _Kinds, exchange: Exchange, reads: bool = False
) -> Collectives:
    """What carries tensors of ranks that do not all read one another's memory. ``reads``: those of a host do."""

    def outside(groups: Groups) -> NativeCollectives:
        if (asked := exchange.compression) is None:
            return kinds.direct(groups, streams)
        compressed: type[Any] = getattr(extension("compression"), kinds.compressed)
        fed = ("sum",) if asked.error_feedback else ()
        made: NativeCollectives = compressed(groups, streams, asked.weights, asked.gradients, fed)
        return made

    if hops is not None:
        if reads:
            within: Collectives = extension("shared_memory").HostCollectives(hops.within, *groups.transports)
        else:
            within = kinds.direct(hops.within, streams)
        hierarchical: type[Any] = getattr(extension("hops"), kinds.hierarchical)
        outer = outside(hops.between)
        taken: Collectives = hierarchical(groups, hops, streams, within, outer, exchange.secondary_shards)
        return taken
    if exchange.secondary_shards and groups.control.rank == 0:
        _log.warning("secondary_shards does nothing: that takes hosts with equally many ranks, two or more.")
    return outside(groups)


def _without_shared_memory(groups: Groups) -> str:
    """Connect the ranks of each host through shared memory, once per groups. Returns why that is not so, or nothing."""
    if len(groups.hosts) > 1 and groups.hops is None:
        return "with one rank on each, or not equally many"
    refusals = groups.control.exchange([int(os.environ.get(SWITCH, "1") == "0"), int(sys.platform != "linux")])
    for rank, (off, foreign) in enumerate(refusals):
        if off:
            return f"{SWITCH}=0 on rank {rank}"
        if foreign:
            return f"rank {rank} does not run on Linux"
    if not (groups.transports or groups.problem):
        shared = extension("shared_memory")
        timeout, rank = (groups.timeout or _TIMEOUT).total_seconds(), groups.control.rank
        members = range(groups.control.world_size) if groups.hops is None else groups.hops.members
        connected = shared.connect(groups.control, members, timeout, threads=1 if groups.hops is None else 2)
        if isinstance(connected, str):
            groups.problem = connected
            return connected
        heap, peers, links = connected
        groups.transports += [shared.Transport(heap, peers, messages, rank, timeout) for messages in links]
        if groups.hops is None:
            groups.control.shortcut = groups.transports[0].exchange
    return groups.problem
