"""Which wire the ranks of a world take."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import NamedTuple

import torch

from lightning_zero.comm.collectives import Collectives, LocalCollectives
from lightning_zero.comm.compression import CompressedCollectives, Compression
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.hierarchical import HierarchicalCollectives
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Streams

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


_AS_IT_IS = Exchange()


def choose_collectives(
    groups: Groups, streams: Streams, device: torch.device, exchange: Exchange = _AS_IT_IS
) -> Collectives:
    """The collectives for ranks that compute on ``device``, of the same type on every rank. Collective: every rank.

    Raises, on every rank, ValueError where there is no such ``exchange``, and DivergenceError if ranks want others.
    """
    lines = [f"{name}={value}" for name, value in exchange._asdict().items()]
    groups.control.agree_equal("exchange between hosts", lines, " ".join(lines))
    for name, value in exchange._asdict().items():
        if value and device.type != "cpu":
            raise ValueError(f"{name} is for CPU ranks so far, and these compute on {device.type}: leave it out.")
    collectives = _chosen(groups, streams, device, exchange)
    collectives.asked = exchange
    return collectives


def _chosen(groups: Groups, streams: Streams, device: torch.device, exchange: Exchange) -> Collectives:
    if groups.shard.world_size == 1:
        return LocalCollectives(streams)
    if groups.across is not None:
        kind = GlooCollectives if device.type == "cpu" else NativeCollectives
        within = kind(groups, streams)
        within.across = kind(groups.across, streams.in_reductions())
        if exchange.compression is not None and len(groups.find_hosts()) > 1:
            gradients = exchange.compression.gradients
            fed = ("sum", "average") if exchange.compression.error_feedback else ()
            within.across = CompressedCollectives(groups.across, streams, gradients, gradients, fed)
            within.feeding, within.residuals = groups.shard.world_size if fed else None, within.across.residuals
        return within
    if device.type != "cpu":
        return NativeCollectives(groups, streams)
    hops = groups.split_by_host()
    problem = _without_shared_memory(groups)
    if groups.transport is None or problem:
        if groups.control.rank == 0 and problem != groups.told:
            _log.info("Ranks exchange weights and gradients over gloo: %s.", problem)
            groups.told = problem
        apart = exchange.compression if len(groups.hosts) > 1 else None
        if hops is None:
            if exchange.secondary_shards and len(groups.hosts) > 1 and groups.control.rank == 0:
                _log.warning("secondary_shards does nothing: that takes hosts with equally many ranks, two or more.")
            return _over_gloo(groups, streams, apart)
        between = _over_gloo(hops.between, streams, apart)
        return HierarchicalCollectives(groups, hops, streams, between, exchange.secondary_shards)
    from lightning_zero.comm.shared_memory.collectives import SharedMemoryCollectives

    return SharedMemoryCollectives(groups, groups.transport)


def _over_gloo(groups: Groups, streams: Streams, compression: Compression | None) -> GlooCollectives:
    if compression is None:
        return GlooCollectives(groups, streams)
    fed = ("sum",) if compression.error_feedback else ()
    return CompressedCollectives(groups, streams, compression.weights, compression.gradients, fed)


def _without_shared_memory(groups: Groups) -> str:
    """Connect the ranks through shared memory, once per groups. Returns why that is not so; empty if it is."""
    if len(groups.hosts) > 1:
        return f"they are on {len(groups.hosts)} hosts" + (", and go within each of them first" if groups.hops else "")
    refusals = groups.control.exchange([int(os.environ.get(SWITCH, "1") == "0"), int(sys.platform != "linux")])
    for rank, (off, foreign) in enumerate(refusals):
        if off:
            return f"{SWITCH}=0 on rank {rank}"
        if foreign:
            return f"rank {rank} does not run on Linux"
    if groups.transport is None and not groups.problem:
        from lightning_zero.comm.shared_memory.links import connect
        from lightning_zero.comm.shared_memory.transport import Transport

        timeout = (groups.timeout or _TIMEOUT).total_seconds()
        connected = connect(groups.control, timeout)
        if isinstance(connected, str):
            groups.problem = connected
        else:
            groups.transport = Transport(*connected, groups.control.rank, timeout)
            groups.control.shortcut = groups.transport.exchange
    return groups.problem
