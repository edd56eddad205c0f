"""Reading the other ranks' memory at the right moment: who has filled what, and who has taken it.

[Note: exchanges of memory]
Every collective is the same game. Each rank says where its bytes are (FILLED), reads the others' once they have said
so, and says that it is through (TAKEN); its own memory may be written again when all have. Nothing happens in between
by itself, for there is no thread: a rank reads when it waits for anything here, or begins anything, *whatever* is due,
so that two ranks that wait for different things never wait for each other. That is also why the agreements of the
control group come this way (``exchange``): a rank that waits in one goes on serving those that are not there yet.

[Note: versions]
Memory that only changes at agreed moments (shards of weights, in the optimizer step) is read without asking. Whoever
gathers it says of which version it is by then, once for each version, and a rank reads another's memory when that one
has come to the same version or a later one. That the owner does not write while others still read follows from the
agreement of all ranks that comes before every change. Where the memory is, the ranks tell when they allocate it.

Every engine has numbers of its own (``session``), because several of them may use one transport in turns.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from enum import IntEnum

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Pending
from lightning_zero.comm.control import LOOK_SECONDS, doing, naming_failures, verdict
from lightning_zero.extensions.shared_memory.heap import Heap, PeerHeap
from lightning_zero.extensions.shared_memory.links import LARGEST_PAYLOAD, Links, Message

__all__ = ["Channel", "Transfer", "Transport"]


class Channel(IntEnum):
    """Kinds of traffic, each with an order of its own."""

    GATHER = 0
    REDUCE = 1
    SPREAD = 2


class _Kind(IntEnum):
    FILLED = 1
    TAKEN = 2
    EXCHANGE = 3
    VERSION = 4
    GIVEN_UP = 5
    PLACE = 6


class Reading:
    """The state of one collective on this rank.

    ``owes`` says for each rank that reads from this one where, and how many bytes; ``needs`` how many bytes are read
    from which rank. ``run`` reads them, given where they are, and is called once, by any method of the transport.
    ``keep`` is what the others read, which stays as it is until they have.
    """

    def __init__(
        self,
        what: str,
        owes: Mapping[int, tuple[int, int]],
        needs: Mapping[int, int],
        run: Callable[[Mapping[int, int]], None],
        keep: Tensor,
    ) -> None:
        self.key = (0, 0)  # its channel, and its number there
        self.check = zlib.crc32(what.encode())
        self.needs, self.owes = needs, owes
        self.due = set(needs)  # ranks that have not said yet where their bytes are
        self.owed = set(owes)  # ranks that have not taken this rank's bytes yet
        self.offsets: dict[int, int] = {}
        self.run: Callable[[Mapping[int, int]], None] | None = run
        self.keep: Tensor | None = keep
        self.received = False  # whether the result is here
        self.failure = ""


class Transfer(Pending):
    """A reading that is under way from ``Transport.begin`` on.

    If it is ``whole``, waiting for it includes that the others have read what they need.
    """

    def __init__(self, transport: Transport, what: str, reading: Reading, whole: bool) -> None:
        super().__init__(what)
        self._transport = transport
        self._whole = whole
        self.reading = reading

    def ready_within(self, seconds: float) -> bool:
        return self.done or self._wait(self._whole, seconds)

    def receive(self) -> None:
        if not self.reading.received:
            self._wait(False)

    def _arrive(self) -> None:
        self._wait(self._whole)

    def _wait(self, whole: bool, seconds: float | None = None) -> bool:
        with naming_failures(self.what, self._transport.rank):
            return self._transport.wait(self.reading, whole, seconds)


class _Session:
    """What is known of one engine's memory, on this rank and the ``peers`` of its shard group."""

    def __init__(self) -> None:
        self.peers: Set[int] = frozenset()
        self.version = 0  # of this rank's
        self.told = 0  # places of this rank's so far
        self.versions: Counter[int] = Counter()  # by rank; from 1
        self.places: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # by number and rank


class _Traffic:
    """Collectives under way, by channel and number."""

    def __init__(self) -> None:
        self.readings: dict[tuple[int, int], Reading] = {}
        self.early: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)  # for those not begun here yet
        self.ready: list[Reading] = []


class Transport:
    """What a rank reads of the others, and when. Every engine of the process uses it.

    There is one for all ranks of a world; or, for those of one host of several, one for each thread that takes their
    transfers through a hop. Such a thread may wait with the lock held: nobody else comes to its transport.
    """

    def __init__(self, heap: Heap, peers: Mapping[int, PeerHeap], links: Links, rank: int) -> None:
        self.heap = heap
        self.rank = rank
        self.members = sorted([rank, *peers])
        """The ranks of this host, or as many of them as are connected, this one among them."""
        # The next one first, so that they are not all read from at once.
        after = self.members.index(rank) + 1
        self.peers = self.members[after:] + self.members[: after - 1]
        self.moved = 0  # bytes read from other ranks' memory so far
        self.turns = 0  # how often something was heard
        self.over = False
        """Whether waits are to end, of whatever thread. Set by another one."""
        self._heaps = peers
        self._links = links
        self._lock = threading.RLock()
        self._numbers: Counter[object] = Counter()  # given out so far: of each channel, of sessions, of agreements
        self._traffic = _Traffic()
        self._rows: defaultdict[int, dict[int, tuple[int, bytes]]] = defaultdict(dict)  # of agreements: check and bytes
        self._sessions: defaultdict[int, _Session] = defaultdict(_Session)
        self._given_up: set[int] = set()  # ranks whose own wait has failed: they do nothing more

    @property
    def exchanges(self) -> int:
        """Agreements that came this way so far."""
        return self._numbers[_Kind.EXCHANGE]

    def read(self, peer: int, offset: int, target: Tensor, dtype: torch.dtype) -> None:
        """Copy elements of ``dtype`` out of a rank's memory, cast to the target's."""
        target.copy_(self.view(peer, offset, target.numel(), dtype))

    def view(self, peer: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A rank's memory, to be read once."""
        self.moved += numel * dtype.itemsize
        return self._heaps[peer].view(offset, numel, dtype)

    def begin(self, channel: Channel, transfer: Transfer) -> None:
        """Offer memory to other ranks, and read theirs as soon as they offer it. Collective: every rank."""
        reading = transfer.reading
        with self._lock:
            key = reading.key = (int(channel), self._numbers[channel])
            self._numbers[channel] += 1
            self._traffic.readings[key] = reading
            for peer, (offset, nbytes) in reading.owes.items():
                self._links.send(peer, _Kind.FILLED, *key, offset, nbytes, reading.check)
            for message in self._traffic.early.pop(key, ()):
                self._filled(reading, message)
            if not reading.needs:
                self._traffic.ready.append(reading)
            self.progress()

    def wait(self, reading: Reading, whole: bool, seconds: float | None = None) -> bool:
        """Wait until a transfer's result is here, if ``whole`` also until nobody reads this rank's memory.

        Whether it is; a ``RuntimeError`` if it will never be: a rank is gone, is somewhere else in the program, or has
        not come within the timeout. Running out of ``seconds``, where they are given, is no error.
        """
        with self._lock:
            owed: Set[int] = reading.owed if whole else set()
            return self._until(lambda: reading.due, owed, reading, seconds)

    def exchange(self, row: bytes, what: str = "") -> list[bytes] | None:
        """Every rank's bytes in rank order; ``None`` if they are too many to come this way. Collective: every rank.

        ``row`` is as long, and ``what`` it is the same on every rank; if not, and if one is gone, this is a
        ``RuntimeError``.
        """
        if len(row) > LARGEST_PAYLOAD:
            return None
        with self._lock:
            number = self.exchanges
            self._numbers[_Kind.EXCHANGE] += 1
            rows = self._rows[number]
            check = zlib.crc32(what.encode())
            for peer in self.peers:
                self._links.send(peer, _Kind.EXCHANGE, 0, number, check=check, payload=row)
            self._until(lambda: self._heaps.keys() - rows.keys())
            if self._given_up:  # a rank that has not waited for this one's row acts as if it had not agreed
                raise RuntimeError(self._lost(self._given_up))
            del self._rows[number]
            rows[self.rank] = (check, row)
            if any(known != check or len(other) != len(row) for known, other in rows.values()):
                lengths = [len(rows[rank][1]) for rank in self.members]
                raise RuntimeError(
                    f"the ranks are in different places of the program: they agree on different things, in {lengths} "
                    "bytes"
                )
            return [rows[rank][1] for rank in self.members]

    def session(self, owner: object, peers: Set[int]) -> int:
        """A new number, equal on all ranks, for as long as ``owner`` lives, which shares memory with ``peers``.
        Collective: every rank.

        Never waits: a thread may still be in a transfer that an error has stopped.
        """
        session, sessions = self._numbers[_Session], self._sessions
        self._numbers[_Session] += 1
        sessions[session].peers = peers  # some of their messages may have come before
        weakref.finalize(owner, sessions.pop, session, None).atexit = False
        return session

    def tell_place(self, session: int, offset: int, nbytes: int) -> int:
        """Tell the others where some memory of this rank begins; 0 if they cannot read it there. Returns its number."""
        with self._lock:
            known = self._sessions[session]
            number, known.told = known.told, known.told + 1
            for peer in known.peers:
                self._links.send(peer, _Kind.PLACE, number=number, offset=offset, nbytes=nbytes, check=session)
        return number

    def places(self, session: int, number: int, nbytes: int) -> dict[int, int] | None:
        """Where the others have their memory of a number; ``None``, on every rank, if one of them has it elsewhere."""
        with self._lock:
            known = self._sessions[session]
            told = known.places[number]
            self._until(lambda: known.peers - told.keys())
        if any(size != nbytes for _, size in told.values()):
            raise RuntimeError("the ranks are in different places of the program: their shards differ in size")
        places = {peer: offset for peer, (offset, _) in told.items()}
        return None if 0 in places.values() else places

    def reach(self, session: int, version: int) -> None:
        """Say that this rank's memory is of a version (1 or more), and wait until that of all others is.

        Collective: every rank.
        """
        known = self._sessions[session]
        if known.version == version:
            return
        with self._lock:
            for peer in known.peers:
                self._links.send(peer, _Kind.VERSION, number=version, check=session)
            self._until(lambda: {peer for peer in known.peers if known.versions[peer] < version})
        known.version = version

    def close(self) -> None:
        """Leave the others. Memory that was handed out stays valid. May be called again."""
        with self._lock:
            self.heap.close()  # before the transfers let go of what a slower rank is still to read
            self._links.close()
            self._traffic = _Traffic()

    def progress(self, seconds: float = 0.0) -> None:
        """Take in messages, waiting for the first at most ``seconds``, and read what may be read. Under the lock."""
        ready = self._traffic.ready
        messages = self._links.receive(0.0 if ready else seconds)
        while messages or ready:
            self.turns += 1
            try:
                for message in messages:
                    self._take_in(message)
                if ready:
                    self._run(ready.pop(0))
            except BaseException:  # what was not taken in or read is lost: nobody may wait for good for what follows
                self._give_up()
                raise
            messages = self._links.receive()

    def _until(
        self,
        missing: Callable[[], Set[int]],
        owed: Set[int] = frozenset(),
        reading: Reading | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Serve the other ranks until none is ``missing`` or ``owed``, and a transfer's result is here.

        Ranks that are missing have to do something first, those owed have only to serve. Running out of ``seconds``
        gives False, running out of the timeout is an error.
        """
        with doing("", "", 0, (), lambda: self.turns):
            limit = self._links.timeout if seconds is None else seconds
            deadline = time.monotonic() + limit
            self.progress()
            while (absent := missing()) or owed or (reading is not None and not reading.received):
                # A rank in the agreement that is this rank's next one does nothing else before this rank comes there.
                stuck = absent & self._rows[self.exchanges].keys()
                left = deadline - time.monotonic()
                reason = "" if reading is None else reading.failure
                if gone := (absent | owed) & (self._links.gone | self._given_up):
                    reason = reason or self._lost(gone)
                if not reason and seconds is not None and (stuck or left <= 0):
                    return False
                if stuck:
                    reason = reason or f"rank {min(stuck)} takes no part in it: it waits for this rank somewhere else"
                reason = verdict() or reason
                if self.over:
                    reason = reason or "the process group has ended"
                if left <= 0:
                    names = ", ".join(map(str, sorted(absent | owed)))
                    reason = reason or f"rank {names} did not come within the timeout of {limit:.0f} s"
                if reason:
                    self._give_up()
                    raise RuntimeError(reason)
                self.progress(min(left, LOOK_SECONDS))
            return True

    def _give_up(self) -> None:
        for peer in self.peers:
            self._links.send(peer, _Kind.GIVEN_UP)

    def _lost(self, ranks: Set[int]) -> str:
        rank = min(ranks)
        if rank in self._given_up:
            return f"rank {rank} has given up waiting for another rank"
        return f"rank {rank} is gone: its process ended, or it left the process group"

    def _take_in(self, message: Message) -> None:
        key = (message.channel, message.number)
        reading = self._traffic.readings.get(key)
        match message.kind:
            case _Kind.FILLED if reading is None:
                self._traffic.early[key].append(message)
            case _Kind.FILLED if reading is not None:
                self._filled(reading, message)
            case _Kind.TAKEN if reading is not None:
                reading.owed.discard(message.peer)
                self._forget_if_over(reading)
            case _Kind.EXCHANGE:
                self._rows[message.number][message.peer] = (message.check, message.payload)
            case _Kind.VERSION:
                self._sessions[message.check].versions[message.peer] = message.number
            case _Kind.PLACE:
                places = self._sessions[message.check].places[message.number]
                places[message.peer] = message.offset, message.nbytes
            case _Kind.GIVEN_UP:
                self._given_up.add(message.peer)

    def _filled(self, reading: Reading, message: Message) -> None:
        expected = reading.needs.get(message.peer)
        if message.check != reading.check or message.nbytes != expected:
            reading.failure = (
                f"rank {message.peer} is at another place in the program: it sends {message.nbytes} bytes for another "
                f"call or of another size, where this rank expects {expected}"
            )
            return
        reading.offsets[message.peer] = message.offset
        reading.due.discard(message.peer)
        if not reading.due:
            self._traffic.ready.append(reading)

    def _run(self, reading: Reading) -> None:
        run, reading.run = reading.run, None  # it holds memory
        try:
            if run is not None:
                with untracked():
                    run(reading.offsets)
        except BaseException as error:  # raised out of whatever was waited for: the others must not wait for good
            reading.failure = f"reading the other ranks' memory failed: {error!r}"
            raise
        reading.received = True
        for peer in reading.needs:
            self._links.send(peer, _Kind.TAKEN, *reading.key)
        self._forget_if_over(reading)

    def _forget_if_over(self, reading: Reading) -> None:
        if reading.received and not reading.owed:
            reading.keep = None
            self._traffic.readings.pop(reading.key, None)
