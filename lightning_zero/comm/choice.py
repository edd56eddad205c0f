"""Which wire the ranks of a world take."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

import torch

from lightning_zero.comm.collectives import Collectives, LocalCollectives
from lightning_zero.comm.compression import CompressedCollectives, Compression
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.hierarchical import HierarchicalCollectives
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Streams

__all__ = ["SWITCH", "choose_collectives"]

SWITCH = "LIGHTNING_ZERO_SHARED_MEMORY"
"""Environment variable: ``0`` on any rank keeps all of them from reading one another's memory."""

_TIMEOUT = timedelta(minutes=30)  # what torch gives a process group that nobody gave one
_log = logging.getLogger(__name__)


def choose_collectives(
    groups: Groups, streams: Streams, device: torch.device, compression: Compression | None = None
) -> Collectives:
    """The collectives for ranks that compute on ``device``, of the same type on every rank. Collective: every rank.

    Raises, on every rank, ValueError where there can be no ``compression``, and DivergenceError if ranks want others.
    """
    groups.control.agree_equal("compression", [repr(compression)], repr(compression))
    if compression is not None and device.type != "cpu":
        raise ValueError(f"compression is for CPU ranks so far, and these compute on {device.type}: leave it out.")
    collectives = _chosen(groups, streams, device, compression)
    collectives.compression = compression
    return collectives


def _chosen(groups: Groups, streams: Streams, device: torch.device, compression: Compression | None) -> Collectives:
    if groups.shard.world_size == 1:
        return LocalCollectives(streams)
    if groups.across is not None:
        kind = GlooCollectives if device.type == "cpu" else NativeCollectives
        within = kind(groups, streams)
        within.across = kind(groups.across, streams)
        return within
    if device.type != "cpu":
        return NativeCollectives(groups, streams)
    hops = groups.split_by_host()
    problem = _without_shared_memory(groups)
    if groups.transport is None or problem:
        if groups.control.rank == 0 and problem != groups.told:
            _log.info("Ranks exchange weights and gradients over gloo: %s.", problem)
            groups.told = problem
        apart = compression if len(groups.hosts) > 1 else None
        if hops is None:
            return _over_gloo(groups, streams, apart)
        return HierarchicalCollectives(groups, hops, streams, _over_gloo(hops.between, streams, apart))
    from lightning_zero.comm.shared_memory.collectives import SharedMemoryCollectives

    return SharedMemoryCollectives(groups, groups.transport)


def _over_gloo(groups: Groups, streams: Streams, compression: Compression | None) -> GlooCollectives:
    if compression is None:
        return GlooCollectives(groups, streams)
    return CompressedCollectives(groups, streams, compression)


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
