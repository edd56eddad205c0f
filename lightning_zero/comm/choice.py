"""Which wire the ranks of a world take: one line for each way, at set-up."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_zero.comm.collectives import Collectives, LocalCollectives
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.hosts import places_by_host
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Compression
from lightning_zero.registry import extension, installed

__all__ = ["SWITCH", "Exchange", "choose_collectives"]

SWITCH = "LIGHTNING_ZERO_SHARED_MEMORY"
"""Environment variable: ``0`` on any rank keeps all of them from reading one another's memory; with ``1`` it is
an error if this copy of the package has no such extension."""

_log = logging.getLogger(__name__)
_LOGGED: WeakKeyDictionary[Groups, str] = WeakKeyDictionary()  # so that each way is logged once


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
    lines += [f"extension {name}: {installed(name)}" for name in ("compression", "hops")]
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
    shared = _shared_memory(groups, hops) if on_cpu else None
    if shared is not None and hops is None:
        wire: Collectives = shared.wire(groups)
        return wire
    outer: Collectives = _between_hosts(direct(groups if hops is None else hops.between, streams), asked)
    if hops is None:
        if asked.secondary_shards and groups.control.rank == 0:
            _log.warning("secondary_shards does nothing: that takes hosts with equally many ranks, two or more.")
        return outer
    within = direct(hops.within, streams) if shared is None else shared.wire(hops.within)
    wire = extension("hops").HierarchicalCollectives(
        hops, direct(groups, streams), within, outer, asked.secondary_shards
    )
    return wire


def _between_hosts(wire: NativeCollectives, asked: Exchange, averages: bool = False) -> Any:
    """A wire as it is, or what makes fewer bytes of it."""
    compression = asked.compression
    return wire if compression is None else extension("compression").compressed(wire, compression, averages)


def _shared_memory(groups: Groups, hops: Any) -> Any:
    """What connects the ranks of each host through shared memory; ``None``: nothing does, and the log says why."""
    problem, shared = _refusal(groups, hops), None
    if not problem:
        members: Sequence[int] = range(groups.control.world_size)
        if hops is not None:
            members = next(ranks for ranks in groups.hosts if groups.control.rank in ranks)
        shared = extension("shared_memory").connected(groups, members, threads=1 if hops is None else 2)
        problem = shared.problem
    several, reads = len(groups.hosts) > 1, not problem
    if several or problem:
        text = [f"they are on {len(groups.hosts)} hosts"] if several else []
        if hops is not None:
            text.append("and read one another's memory on each" if reads else "and go within each of them first")
        told = ", ".join([*text, problem] if problem else text)
        if groups.control.rank == 0 and told != _LOGGED.get(groups):
            _log.info("Ranks exchange weights and gradients over gloo: %s.", told)
            _LOGGED[groups] = told
    return shared if reads else None


def _refusal(groups: Groups, hops: Any) -> str:
    """Why ranks do not read one another's memory, if so; the same on every rank. Collective: every rank."""
    told = os.environ.get(SWITCH, "")
    mine = told == "0", told == "1", sys.platform != "linux", not installed("shared_memory")
    flags = groups.control.exchange([int(flag) for flag in mine])
    if any(asked for _, asked, _, _ in flags):
        extension("shared_memory")
    if len(groups.hosts) > 1 and hops is None:
        return "with one rank on each, or not equally many" if installed("hops") else "without the extension 'hops'"
    for rank, (off, _, foreign, missing) in enumerate(flags):
        if off:
            return f"{SWITCH}=0 on rank {rank}"
        if foreign:
            return f"rank {rank} does not run on Linux"
        if missing:
            return f"rank {rank} has no extension 'shared_memory'"
    return ""
