"""Ranks of one host exchange by reading one another's memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

from lightning_zero.comm.collectives import Collectives
from lightning_zero.comm.groups import Groups
from lightning_zero.extensions.shared_memory.collectives import HostCollectives, SharedMemoryCollectives
from lightning_zero.extensions.shared_memory.links import connect
from lightning_zero.extensions.shared_memory.transport import Transport
from lightning_zero.registry import installed

__all__ = ["SharedMemory", "connected"]

_TIMEOUT = timedelta(minutes=30)  # what torch gives a process group that nobody gave one
_LOGGED: WeakKeyDictionary[Groups, str] = WeakKeyDictionary()  # so that each way is logged once
_log = logging.getLogger("lightning_zero.comm.native")


class SharedMemory:
    """The connections of this rank to the memory of its host's other ranks. Collective: every rank, of all hosts.

    Args:
        groups: of all ranks.
        members: the ranks of this host.
        threads: how many take transfers through: one for all, or, of several hosts, one for gathers and one for
            reductions.
    """

    def __init__(self, groups: Groups, members: Sequence[int], threads: int) -> None:
        self._control = groups.control
        self.transports: list[Transport] = []
        self.problem = ""
        """Why they could not be connected, if so; the same on every rank."""
        found = connect(groups.control, members, (groups.timeout or _TIMEOUT).total_seconds(), threads)
        if isinstance(found, str):
            self.problem = found
            return
        self.transports += [Transport(found.heap, found.peers, links, groups.control.rank) for links in found.links]
        if threads == 1:
            groups.control.shortcut = self.transports[0].exchange

    def wire(self, groups: Groups) -> Collectives:
        """What carries tensors between the ranks of ``groups``: all ranks, or some of this host."""
        if len(self.transports) == 1:
            return SharedMemoryCollectives(groups, self.transports[0])
        return HostCollectives(groups, *self.transports)

    def stop(self) -> None:
        for transport in self.transports:
            transport.over = True

    def end(self) -> None:
        while self.transports:
            self.transports.pop().close()
        self._control.shortcut = None


def connected(groups: Groups, in_hops: bool, off: str) -> SharedMemory | None:
    """What connects the ranks of each host, made once; ``None``: nothing does, and the log says why.

    Called when a run chooses its wire, which takes two hops or one. ``off``: why this rank does without, if so.
    Collective: every rank.
    """
    off = off or ("" if sys.platform == "linux" else f"{sys.platform} is not Linux")
    refused = [(why, rank) for rank, why in enumerate(groups.control.gather_objects(off or None)) if why]
    rank, several, found = groups.control.rank, len(groups.find_hosts()) > 1, None
    if several and groups.shard.tensor > 1:
        problem = "with tensor parallelism"
    elif several and not in_hops:
        problem = "with one rank on each, or not equally many" if installed("hops") else "without the extension 'hops'"
    elif refused:
        problem = "{} on rank {}".format(*refused[0])
    else:
        members = next(ranks for ranks in groups.hosts if rank in ranks)
        found = groups.resource("shared_memory", lambda: SharedMemory(groups, members, threads=1 + in_hops))
        problem = found.problem
    text = [f"they are on {len(groups.hosts)} hosts"] if several else []
    if in_hops:
        text.append("and go within each of them first" if problem else "and read one another's memory on each")
    told = ", ".join([*text, problem] if problem else text)
    if told and rank == 0 and told != _LOGGED.get(groups):
        _log.info("Ranks exchange weights and gradients over gloo: %s.", told)
        _LOGGED[groups] = told
    return None if problem else found
