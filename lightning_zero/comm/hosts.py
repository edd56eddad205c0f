"""What the system tells of processes: on which host each is, which ranks share one, and this one's sockets."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "RANKS_PER_HOST",
    "Connections",
    "clients_of",
    "connections",
    "find_hosts",
    "is_gone",
    "places_by_host",
    "process_of",
    "shut",
    "sockets",
    "this_host",
]

RANKS_PER_HOST = "LIGHTNING_ZERO_RANKS_PER_HOST"
"""Environment variable: take so many ranks of a host, one after the other, for those of a host of their own."""


def process_of(pid: int) -> list[Any]:
    """Which process of which host that is, while it lives; empty when it does not, or the system does not tell."""
    with contextlib.suppress(OSError):
        state, *_, started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
        return [] if state in "ZX" or not this_host() else [this_host(), pid, started]
    return []


def is_gone(process: list[Any]) -> bool:
    """Whether what ``process_of`` has told of a process of this host is true no more."""
    return bool(process) and process[0] == this_host() and process_of(process[1]) != process


@functools.cache
def this_host() -> str:
    """What processes that can see one another have in common; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        spaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user"))
        return " ".join((Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces))
    return ""


def find_hosts(gather: Callable[[object], list[Any]]) -> list[list[int]]:
    """The ranks of each host, which can see one another's processes. ``gather`` gives what all ranks tell, by rank.
    Collective: every rank.

    Raises ``ValueError`` on every rank if the environment of one asks for a strange number.
    """
    told = gather((socket.gethostname(), this_host(), os.environ.get(RANKS_PER_HOST, "")))
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


class Connections(dict[str, list[tuple[int, str]]]):
    """Sockets by the name of their process group: the number of the file, and what the system calls it."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[tuple[int, str]]]:
        """Those that were opened inside, afterwards."""
        before, found = sockets(), list[tuple[int, str]]()
        yield found
        found += [(file, what) for file, what in sockets().items() if before.get(file) != what]

    def shut(self, name: str) -> None:
        """End whatever waits for them."""
        now = sockets()
        for file, what in self.get(name, ()):
            if now.get(file) == what:
                shut(file)


connections = Connections()


def shut(file: int) -> None:
    """End whatever waits for a connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        connection.getpeername()  # a listening one must not be shut: gloo ends the process
        connection.shutdown(socket.SHUT_RDWR)


def sockets() -> dict[int, str]:
    """This process's sockets, by the numbers of their files; none where the system does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (what := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found[int(name)] = what
    return found


def clients_of(store: Any) -> list[tuple[int, str]]:
    """The connections of this process to the server of a store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, found = getattr(store, "port", None), []
    for file, what in sockets().items() if port else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                found.append((file, what))
    return found
