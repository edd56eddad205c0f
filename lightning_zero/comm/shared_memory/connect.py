"""How the ranks of one host find one another: sockets for a moment, through which files and pipes are handed over."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from dataclasses import dataclass

from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.shared_memory.heap import Heap, PeerHeap
from lightning_zero.comm.shared_memory.links import Links, Pipe

__all__ = ["Connections", "connect"]

_SECONDS = 20.0  # for a rank that is there to answer
_LABEL_NBYTES = 32
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_HELLO = struct.Struct(f"<I{_LABEL_NBYTES}s")


@dataclass(frozen=True)
class _Introduction:
    """What a rank tells the others about itself, through the control group.

    Attributes:
        host: alike for ranks that can reach one another.
        address: its socket in the abstract namespace, which no folder shows.
        label: what its memory begins with, known to nobody else.
        user: whom its process belongs to.
        problem: why it can not take part; empty if it can.
    """

    host: str
    address: str
    label: bytes
    user: int
    problem: str


@dataclass(frozen=True)
class Connections:
    """A rank that is connected to all others.

    Attributes:
        heap: its own memory.
        peers: the other ranks' memory.
        links: messages between them.
    """

    heap: Heap
    peers: dict[int, PeerHeap]
    links: Links


def connect(control: ControlGroup, timeout: float) -> Connections | str:
    """Connect every rank to every other one, if all of them run on this host and may.

    Args:
        control: the ranks.
        timeout: seconds that messages may take, later on.

    Returns:
        The connections; on every rank alike, or on none: then why not.

    Collective: every rank.
    """
    attempt = _Attempt(control.rank, control.world_size, timeout)
    with contextlib.closing(attempt):
        for stage in (attempt.prepare, attempt.call, attempt.answer):
            problem = ""
            try:
                stage()
            except (OSError, ValueError, AttributeError, MemoryError, EOFError) as error:
                problem = f"rank {control.rank}: {type(error).__name__}: {error}"
            told = control.gather_objects(attempt.introduce(problem))
            problem = next((other.problem for other in told if other.problem), "")
            if not problem and len({other.host for other in told}) > 1:
                problem = "the ranks do not all run on one host, or not in one container"
            if problem:
                return problem
            attempt.told = told
        return attempt.finish()


class _Attempt:
    """One rank's side of the introduction. What is not handed on is closed."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.told: list[_Introduction] = []
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._label = secrets.token_bytes(_LABEL_NBYTES)
        self._address = f"lightning_zero-{secrets.token_hex(16)}"
        self._heap: Heap | None = None
        self._listener: socket.socket | None = None
        self._calls: dict[int, socket.socket] = {}
        self._peers: dict[int, PeerHeap] = {}
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}

    def introduce(self, problem: str) -> _Introduction:
        return _Introduction(_host(), self._address, self._label, os.getuid(), problem)

    def prepare(self) -> None:
        """Take memory, and be there to be called."""
        self._heap = Heap(self._world_size, self._label)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(_SECONDS)
        self._listener.bind(f"\0{self._address}")
        self._listener.listen(self._world_size)

    def call(self) -> None:
        """Call the ranks below. They need not listen yet: the system keeps the calls for them."""
        for peer in range(self._rank):
            call = self._calls[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            call.settimeout(_SECONDS)
            call.connect(f"\0{self.told[peer].address}")
            self._check_user(call, peer)
            self._hand_over(call, peer)

    def answer(self) -> None:
        """Take the calls of the ranks above, and what those below have answered."""
        if self._listener is None:
            raise ValueError("there is no socket to be called at")
        while len(self._calls) < self._world_size - 1:
            call, _ = self._listener.accept()
            call.settimeout(_SECONDS)
            peer = self._take_over(call, None)
            self._hand_over(call, peer)
            self._calls[peer] = call
        for peer in range(self._rank):
            self._take_over(self._calls[peer], peer)

    def finish(self) -> Connections:
        """Give away what is connected."""
        if self._heap is None:
            raise ValueError("there is no memory to share")
        connections = Connections(self._heap, self._peers, Links(self._readers, self._writers, self._timeout))
        self._heap, self._readers, self._writers = None, {}, {}
        return connections

    def close(self) -> None:
        for call in (*self._calls.values(), self._listener):
            if call is not None:
                call.close()
        for file in (*self._readers.values(), *self._writers.values()):
            os.close(file)
        if self._heap is not None:
            self._heap.close()

    def _hand_over(self, call: socket.socket, peer: int) -> None:
        if self._heap is None:
            raise ValueError("there is no memory to share")
        pipe = Pipe.create()
        self._writers[peer] = pipe.writer
        try:
            hello = _HELLO.pack(self._rank, self.told[peer].label)
            socket.send_fds(call, [hello], [self._heap.file, pipe.reader])
        finally:
            os.close(pipe.reader)

    def _take_over(self, call: socket.socket, expected: int | None) -> int:
        data, files, _, _ = socket.recv_fds(call, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
        try:
            if len(data) < _HELLO.size or len(files) < 2:
                raise EOFError("a rank ended, or the system does not hand files over")
            rank, label = int(_HELLO.unpack(data)[0]), _HELLO.unpack(data)[1]
            known = 0 <= rank < self._world_size and rank not in self._readers and rank != self._rank
            if label != self._label or not known or (expected is not None and rank != expected):
                raise ValueError("something that is none of the ranks has called")
            self._check_user(call, rank)
            memory, self._readers[rank] = files
            files = []
            self._peers[rank] = PeerHeap(memory, self._nbytes, self.told[rank].label)
        finally:
            for file in files:
                os.close(file)
        return rank

    @property
    def _nbytes(self) -> int:
        return 0 if self._heap is None else self._heap.nbytes

    def _check_user(self, call: socket.socket, peer: int) -> None:
        raw = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.getuid():
            raise ValueError(f"rank {peer}'s socket belongs to another user")


def _host() -> str:
    """Alike for processes that see the same sockets: the running system and its network, process and user spaces."""
    parts = []
    for kind in ("net", "pid", "user"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    return " ".join(parts) or socket.gethostname()
