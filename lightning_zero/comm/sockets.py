"""The sockets of this process, by what they are for: to end what waits for one of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["Connections", "clients_of", "connections", "shut", "sockets"]


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
