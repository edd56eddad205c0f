"""Other users of the host, while ranks find one another's memory: they reach nothing, and hold nothing up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_zero.comm import Groups, Streams, choose_collectives
from lightning_zero.extensions.shared_memory.collectives import SharedMemoryCollectives
from tests.helpers.world import run_world
from tests.thorough.extensions.shared_memory.test_shared_memory import CPU, SIZE, connected, filled

pytestmark = pytest.mark.usefixtures("one_host")

NOBODY = 65534
REACHED, TRIED = b"!", b"."


def sockets() -> set[str]:
    """What this process could be reached by, but for its memory and its pipes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


def unix_names() -> set[str]:
    """Of sockets that any user of the host can connect to."""
    rows = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return {row.split(maxsplit=7)[7] for row in rows if len(row.split(maxsplit=7)) == 8}


def test_connecting_opens_no_socket_that_anybody_could_connect_to() -> None:
    def run(rank: int) -> None:
        groups = Groups.create("gloo")
        groups.control.gather_objects(b"")  # gloo has made its connections
        before, names = sockets(), unix_names()
        assert isinstance(choose_collectives(groups, Streams(CPU), CPU), SharedMemoryCollectives)
        groups.control.gather_objects(b"")
        assert sockets() == before
        assert not {name for name in unix_names() - names if "lightning" in name}

    run_world(2, run)


def ranks_of(parent: int) -> list[int]:
    """Processes that a test has forked, but for these strangers."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{name}/status").read_text() if name.isdigit() else ""
            if f"PPid:\t{parent}\n" in status and f"Uid:\t{NOBODY}\t" not in status:
                found.append(int(name))
    return found


def open_everything(parent: int, report: Callable[[bytes], object]) -> None:
    """As ranks do it to one another: their memory, and their pipes."""
    for process in ranks_of(parent):
        report(TRIED)
        for number in range(3, 80):
            for flags in (os.O_RDONLY, os.O_RDWR):
                with contextlib.suppress(OSError):
                    os.close(os.open(f"/proc/{process}/fd/{number}", flags | os.O_NONBLOCK))
                    report(REACHED)
        for name in ("mem", "maps", "environ"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as file:
                report(REACHED if file.read(1) else TRIED)  # of a process that has ended anybody reads nothing


def talk_to_sockets(parent: int, report: Callable[[bytes], object]) -> None:
    """Connect to every abstract socket that looks like one of ours, and send garbage, half a message, or nothing."""
    for turn, name in enumerate(sorted(name for name in unix_names() if name.startswith("@") and "zero" in name)):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(0.2)
            stranger.connect("\0" + name[1:])
            stranger.sendall((b"\xff" * 4096, b"\x01", b"")[turn % 3])
            report(REACHED)
    report(TRIED)


@contextlib.contextmanager
def strangers(count: int) -> Iterator[Callable[[], bytes]]:
    """Processes of another user that do both, again and again; gives what they have reported so far."""
    parent, (reading, writing) = os.getpid(), os.pipe()
    os.set_blocking(reading, False)
    processes: list[int] = []
    for _ in range(count):
        if process := os.fork():
            processes.append(process)
            continue
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.set_blocking(writing, False)
            while os.getppid() == parent:
                for deed in (open_everything, talk_to_sockets):
                    with contextlib.suppress(BlockingIOError):
                        deed(parent, lambda news: os.write(writing, news))
        finally:
            os._exit(0)
    found = bytearray()

    def reported() -> bytes:
        with contextlib.suppress(BlockingIOError):
            while news := os.read(reading, 65536):
                found.extend(news)
        return bytes(found)

    try:
        yield reported
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.timing
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_other_users_reach_nothing_and_hold_nothing_up() -> None:
    """Before the ranks connect, while they do, and while they exchange."""

    def run(rank: int, reported: Callable[[], bytes] | None) -> float:
        began = time.monotonic()
        comm = connected()
        for turn in range(100):
            full = torch.zeros(2 * SIZE)
            comm.all_gather(full, "unit", source=filled(comm, turn)).wait()
            assert full.eq(turn).all()
        seconds = time.monotonic() - began
        time.sleep(0.5)  # as long as a step may take
        comm.groups.control.barrier()
        return seconds

    alone = max(run_world(2, run, None))
    with strangers(2) as reported:
        beside = max(run_world(2, run, reported, timeout=60))
        news = reported()
    assert news.count(TRIED) > 10
    assert REACHED not in news
    assert beside < alone + 10  # they take processors, and that is all
