"""Pipes between the ranks of one host: small messages in order, and the news that a rank has ended.

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
import select
import signal
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakSet

__all__ = ["LARGEST_PAYLOAD", "Links", "Message", "Pipe"]

LARGEST_PAYLOAD = 2**16 - 1
_HEADER = struct.Struct("<BBHIQQQ")
_READ_NBYTES = 2**16
_LONGEST_POLL = 2**30  # milliseconds that the system can count
# Room for about 8000 messages that a rank has not read, because it computes or waits for something else. A step has a
# few per unit. Unprivileged users get less when they have many pipes, which only makes ranks wait for one another.
_PIPE_NBYTES = 2**18


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        peer: the rank it comes from.
        kind: what it says.
        channel: the kind of traffic it belongs to.
        number: which one of that kind.
        offset: where in the sender's memory.
        nbytes: how much there.
        check: of what the sender is doing, to be compared.
        payload: more bytes.
    """

    peer: int
    kind: int
    channel: int
    number: int
    offset: int
    nbytes: int
    check: int
    payload: bytes


class Pipe(NamedTuple):
    """Both ends of one direction."""

    reader: int
    writer: int

    @classmethod
    def create(cls) -> Pipe:
        """A pipe that processes started from here do not get."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        return cls(reader, writer)


class Links:
    """One pipe to and one from every other rank of this host. Used by one thread at a time.

    Args:
        readers: by rank, what its messages arrive at. Closed with the links.
        writers: by rank, where messages to it go. Closed with the links.
        timeout: seconds to wait for a rank that does not read what it is told.
    """

    def __init__(self, readers: Mapping[int, int], writers: Mapping[int, int], timeout: float) -> None:
        self._timeout = timeout
        self._readers = dict(readers)
        self._writers = dict(writers)
        self._ranks = {reader: rank for rank, reader in readers.items()}
        self._buffers = {rank: bytearray() for rank in readers}
        self.gone: set[int] = set()  # ranks that have ended or closed their side; all they said has been received
        self._arrived: list[Message] = []
        self._poll = select.poll()
        for file in readers.values():
            os.set_blocking(file, False)
            self._poll.register(file, select.POLLIN)
        for file in writers.values():
            os.set_blocking(file, False)
        _LINKS.add(self)

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return list(self._buffers)

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

        Waits only while the pipe is full, and takes in meanwhile what the others have to say.

        Raises:
            RuntimeError: if that takes longer than the timeout.
        """
        deadline = time.monotonic() + self._timeout
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
                    raise RuntimeError(f"rank {peer} has not read what it was told for {self._timeout:.0f} s") from None
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


def _close_in_child() -> None:
    for links in list(_LINKS):
        links.close()


os.register_at_fork(after_in_child=_close_in_child)
