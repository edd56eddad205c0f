"""Which wire the ranks of a world take: one line for each way, at set-up."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.comm.collectives import Collectives, LocalCollectives
from lightning_zero.comm.groups import Groups, places_by_host
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Compression
from lightning_zero.registry import extension, installed

__all__ = ["SWITCH", "Exchange", "choose_collectives"]

SWITCH = "LIGHTNING_ZERO_SHARED_MEMORY"
"""Environment variable: ``0`` on any rank keeps all of them from reading one another's memory; with ``1`` it is
an error if this copy of the package has no such extension."""

_log = logging.getLogger(__name__)


class Exchange(NamedTuple):
    """What is asked of the exchange between hosts."""

    compression: Compression | None = None
    secondary_shards: bool = False
    """Whether a host keeps what comes from others to be computed with: see ``extensions/hops``."""


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
    wire = _chosen(groups, streams, device, exchange)
    wire.asked = exchange
    return wire


def _chosen(groups: Groups, streams: Streams, device: torch.device, exchange: Exchange) -> Collectives:
    if groups.shard.world_size == 1:
        return LocalCollectives(streams)
    on_cpu = device.type == "cpu" and not streams.beside
    direct: type[NativeCollectives] = GlooCollectives if on_cpu else NativeCollectives
    asked = exchange if any(exchange) and len(groups.find_hosts()) > 1 else _AS_IT_IS
    if groups.across is not None:
        return direct(groups, streams, _between_hosts(direct(groups.across, streams.in_reductions()), asked, True))
    groups.control.counted = groups.checkpoint.counted = range(groups.control.world_size)
    places = places_by_host(groups.find_hosts()) if on_cpu or any(asked) else None
    hops = None
    if places is not None and (any(asked) or installed("hops")):
        backend = "gloo" if on_cpu else dist.get_backend(groups.gather)
        hops = extension("hops").split(groups, places, backend)
    shared = None
    if on_cpu and (installed("shared_memory") or groups.control.agree_any(os.environ.get(SWITCH) == "1")):
        off = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else ""
        shared = extension("shared_memory").connected(groups, hops is not None, off)
    if hops is None:
        if asked.secondary_shards and groups.control.rank == 0:
            _log.warning("secondary_shards does nothing: that takes hosts with equally many ranks, two or more.")
        wire: Collectives = _between_hosts(direct(groups, streams), asked) if shared is None else shared.wire(groups)
        return wire
    within = direct(hops.within, streams) if shared is None else shared.wire(hops.within)
    between = _between_hosts(direct(hops.between, streams), asked)
    keeps = asked.secondary_shards
    wire = extension("hops").HierarchicalCollectives(hops, direct(groups, streams), within, between, keeps)
    return wire


def _between_hosts(wire: NativeCollectives, asked: Exchange, averages: bool = False) -> Any:
    """A wire as it is, or what makes fewer bytes of it."""
    compression = asked.compression
    return wire if compression is None else extension("compression").compressed(wire, compression, averages)
