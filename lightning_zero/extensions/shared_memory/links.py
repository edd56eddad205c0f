"""How the ranks of one host find one another, and the pipes between them: small messages, and the news of an end.

[Note: why pipes]
What one rank writes to its memory before it sends a message, another one sees after it has read that message: the
kernel orders it, on any processor. A rank that waits sleeps in ``poll`` and leaves its core to the others. And a rank
that dies, of whatever, closes its ends: the others read the end of the file at once, after everything it had said.

[Note: forked processes]
A DataLoader's worker is a copy of its rank and would hold the rank's ends open beyond its death; so they are closed in
every forked process. What is started otherwise never has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.groups import this_host
from lightning_zero.extensions.shared_memory.heap import Heap, PeerHeap

__all__ = ["LARGEST_PAYLOAD", "Connected", "Links", "Message", "connect"]

LARGEST_PAYLOAD = 2**16 - 1
_HEADER = struct.Struct("<BBHIQQQ")
_READ_NBYTES = 2**16
_LONGEST_POLL = 2**30  # milliseconds that the system can count
# Room for about 8000 messages that a rank has not read, because it computes or waits for something else. A step has a
# few per unit. Unprivileged users get less when they have many pipes, which only makes ranks wait for one another.
_PIPE_NBYTES = 2**18
_LABEL_NBYTES = 32


class Message(NamedTuple):
    """What one rank tells another."""

    peer: int  # the rank it comes from
    kind: int
    channel: int  # the kind of traffic it belongs to
    number: int  # which one of that kind
    offset: int  # where in the sender's memory
    nbytes: int  # how much there
    check: int  # of what the sender is doing, to be compared
    payload: bytes


class Links:
    """One pipe to and one from every other rank of this host, closed with the links. Used by one thread at a time.

    ``timeout`` are the seconds to wait for a rank that does not read what it is told.
    """

    def __init__(self, readers: dict[int, int], writers: dict[int, int], timeout: float) -> None:
        self.timeout = timeout
        self._readers, self._writers = readers, writers
        self._ranks = {reader: rank for rank, reader in readers.items()}
        self._buffers = {rank: bytearray() for rank in readers}
        self.gone: set[int] = set()  # ranks that have ended or closed their side; all they said has been received
        self._arrived: list[Message] = []
        self._poll = select.poll()
        for file in readers.values():
            self._poll.register(file, select.POLLIN)
        _LINKS.add(self)

    def send(
        self,
        peer: int,
        kind: int,
        channel: int = 0,
        number: int = 0,
        offset: int = 0,
        nbytes: int = 0,
        check: int = 0,
        payload: bytes = b"",
    ) -> None:
        """Tell a rank something. A rank that is gone is told nothing; who waits for it finds out.

        Waits only while the pipe is full, and takes in meanwhile what the others have to say; not longer than the
        timeout.
        """
        deadline = time.monotonic() + self.timeout
        data = _HEADER.pack(kind, channel, len(payload), check, number, offset, nbytes) + payload
        while data and (writer := self._writers.get(peer)) is not None:
            try:
                data = data[_write(writer, data) :]
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(writer, select.POLLOUT)
                for reader in self._readers.values():
                    waiting.register(reader, select.POLLIN)
                waiting.poll(1000)
                self._read(0.0)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {peer} has not read a message for {self.timeout:.0f} s") from None
            except (BrokenPipeError, ConnectionResetError):
                os.close(self._writers.pop(peer))

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """What has arrived, in order for each sender; waits at most ``seconds`` for the first message."""
        if not self._arrived:
            self._read(seconds)
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Close this rank's ends, which the others notice. May be called again."""
        for file in (*self._readers.values(), *self._writers.values()):
            with contextlib.suppress(OSError):
                os.close(file)
        self._readers, self._writers, self._poll = {}, {}, select.poll()
        self.gone = set(self._buffers)
        _LINKS.discard(self)

    def _read(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._readers:
            gone = len(self.gone)
            ready = self._poll.poll(min(max(0.0, 1000 * (deadline - time.monotonic())), _LONGEST_POLL))
            for file, _ in ready:
                self._read_from(file)
            if not ready or self._arrived or len(self.gone) > gone:
                return

    def _read_from(self, file: int) -> None:
        peer = self._ranks[file]
        buffer = self._buffers[peer]
        try:
            data = os.read(file, _READ_NBYTES)
        except BlockingIOError:
            return
        if not data:
            self._poll.unregister(file)
            os.close(self._readers.pop(peer))
            self.gone.add(peer)
            return
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            kind, channel, length, check, number, offset, nbytes = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + _HEADER.size : end]) if length else b""
            self._arrived.append(Message(peer, kind, channel, number, offset, nbytes, check, payload))
            start = end
        del buffer[:start]


def _write(file: int, data: bytes) -> int:
    """``os.write``, which raises where nobody reads any more, and never ends a process that left SIGPIPE to do so."""
    if signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:
        return os.write(file, data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        return os.write(file, data)
    except BrokenPipeError:
        signal.sigtimedwait([signal.SIGPIPE], 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LINKS: WeakSet[Links] = WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Links.close, list(_LINKS))))


class Connected(NamedTuple):
    """What a rank has of the others."""

    heap: Heap  # this rank's memory
    peers: dict[int, PeerHeap]  # that of the others
    links: list[Links]  # messages between them, of each thread that has such its own


def connect(control: ControlGroup, members: Sequence[int], timeout: float, threads: int = 1) -> Connected | str:
    """Connect every rank to the other ``members`` of its host, if all may. Collective: every rank, of all hosts.

    Each rank makes its memory and, for each of so many ``threads``, one pipe to every other member. The others open
    them through ``/proc``, which the kernel allows for processes of one user only. Messages may take ``timeout``
    seconds, later on.

    Returns:
        What connects them; on every rank, of all hosts, or on none: then why not.
    """
    attempt = _Attempt(control.rank, members, threads)
    try:
        for stage in (attempt.offer, attempt.accept):
            problem = ""
            try:
                stage()
            except (OSError, ValueError, AttributeError, MemoryError) as error:
                problem = f"rank {control.rank}: {type(error).__name__}: {error}"
            attempt.told = control.gather_objects(attempt.offered(problem))
            problem = next((other.problem for other in attempt.told if other.problem), "")
            if problem:
                return problem
        links = [Links(*ends, timeout) for ends in zip(attempt.readers, attempt.writers, strict=True)]
        attempt.readers, attempt.writers = [], []
        return Connected(attempt.heaps[0], attempt.peers, links)
    finally:
        for ends in (*attempt.given, *attempt.readers, *attempt.writers):
            for file in ends.values():
                os.close(file)


class _Offer(NamedTuple):
    """What a rank tells the others about itself, through the control group."""

    host: str  # alike for ranks that can open one another's files
    process: int
    memory: int  # the number of its heap's file in that process
    label: bytes  # what its memory begins with, known to nobody else
    pipes: dict[int, list[int]]  # by rank, numbers of the files in that process where messages to its threads arrive
    problem: str  # why it can not take part; empty if it can


class _Attempt:
    """One rank's side of connecting, and the files that it has opened for it."""

    def __init__(self, rank: int, members: Sequence[int], threads: int) -> None:
        self.told: list[_Offer] = []
        self.heaps: list[Heap] = []  # this rank's own, once there is one
        self.peers: dict[int, PeerHeap] = {}
        self.readers: list[dict[int, int]] = [{} for _ in range(threads)]
        self.writers: list[dict[int, int]] = [{} for _ in range(threads)]
        self.given: list[dict[int, int]] = [{} for _ in range(threads)]
        """Where messages to the others arrive, until they have opened that themselves."""
        self._others = [peer for peer in members if peer != rank]
        self._rank = rank
        self._label = secrets.token_bytes(_LABEL_NBYTES)

    def offer(self) -> None:
        self.heaps.append(Heap(len(self._others) + 1, self._label))
        for peer in self._others:
            for given, writers in zip(self.given, self.writers, strict=True):
                given[peer], writers[peer] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(writers[peer], fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)

    def offered(self, problem: str) -> _Offer:
        memory = self.heaps[0].file if self.heaps else -1
        pipes = {peer: [given[peer] for given in self.given if peer in given] for peer in self._others}
        return _Offer(this_host() or os.uname().nodename, os.getpid(), memory, self._label, pipes, problem)

    def accept(self) -> None:
        if len({self.told[rank].host for rank in (self._rank, *self._others)}) > 1:
            raise ValueError("the ranks do not all run on one host, or not in one container")
        for peer in self._others:
            other = self.told[peer]
            memory = os.open(f"/proc/{other.process}/fd/{other.memory}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self.peers[peer] = PeerHeap(memory, self.heaps[0].nbytes, other.label)
            finally:
                os.close(memory)
            for readers, pipe in zip(self.readers, other.pipes[self._rank], strict=True):
                path = f"/proc/{other.process}/fd/{pipe}"
                readers[peer] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
