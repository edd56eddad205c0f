"""Ranks of one host exchange by reading one another's memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from lightning_zero.comm.collectives import Collectives
from lightning_zero.comm.groups import Groups, Resource
from lightning_zero.extensions.shared_memory.collectives import HostCollectives, SharedMemoryCollectives
from lightning_zero.extensions.shared_memory.links import connect
from lightning_zero.extensions.shared_memory.transport import Transport

__all__ = ["SharedMemory", "connected"]

_TIMEOUT = timedelta(minutes=30)  # what torch gives a process group that nobody gave one


class SharedMemory(Resource):
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
        """What carries tensors between the ranks of ``groups``: all ranks, or those of this host."""
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


def connected(groups: Groups, members: Sequence[int], threads: int) -> SharedMemory:
    """The connections of some groups, made once. Called when a run chooses its wire. Collective: every rank."""
    found: SharedMemory = groups.resource("shared_memory", lambda: SharedMemory(groups, members, threads))
    return found
