"""Which ranks are on which host."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence

from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.watch import this_host

__all__ = ["RANKS_PER_HOST", "find_hosts", "places_by_host"]

RANKS_PER_HOST = "LIGHTNING_ZERO_RANKS_PER_HOST"
"""Environment variable: take so many ranks of a host, one after the other, for those of a host of their own."""


def find_hosts(control: ControlGroup) -> list[list[int]]:
    """The ranks of each host, which can see one another's processes. Collective: every rank.

    Raises ``ValueError`` on every rank if the environment of one asks for a strange number.
    """
    told = control.gather_objects((socket.gethostname(), this_host(), os.environ.get(RANKS_PER_HOST, "")))
    found: dict[tuple[str, str, int], list[int]] = {}
    met: Counter[tuple[str, str]] = Counter()
    for rank, (name, system, asked) in enumerate(told):
        if asked and not (asked.isdecimal() and int(asked)):
            raise ValueError(f"{RANKS_PER_HOST} must be a number of ranks, got {asked!r} on rank {rank}.")
        part = met[name, system] // int(asked) if asked else 0
        met[name, system] += 1
        found.setdefault((name, system, part), []).append(rank)
    return list(found.values())


def places_by_host(hosts: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The ranks in one place of every host, by place; ``None`` if there is nothing to win by two hops, or they cannot
    be: of one host, one rank on each, not as many on each, or in another order in one place than in another."""
    if len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1 or len(hosts[0]) == 1:
        return None
    places = [list(ranks) for ranks in zip(*hosts, strict=True)]
    return places if all(ranks == sorted(ranks) for ranks in places) else None
