"""Process groups: who agrees, who shares a flat buffer, what an average is divided by, and which ranks share a host.

Four groups of the same ranks, because collectives pair up by order within a group: gathers of parameters, reductions
of gradients, the control plane and checkpoints (written by a thread of their own, or asked for at any moment by a
signal) each keep an order that never depends on how the others interleave.

[Note: one order on a device]
On a device, two groups are two communicators of nccl, whose kernels occupy the same processors until the other ranks
take part. NCCL promises that this never deadlocks only if every rank issues the collectives of all its communicators in
one order (NCCL's user guide, "Using multiple NCCL communicators concurrently"). So gathers and reductions share a
communicator and a stream wherever that order is provably the same:

* *Parameters are replicated between uses.* Then it is. A backward begins and ends with an agreement of all ranks, and
  sends reductions only; a step begins with one, and sends all-to-alls and gathers only, in the order of the units. (One
  thing can mix them: ``full_parameters`` in a hook of a backward. It needs ranks whose gradients arrive alike.)
* *Parameters are sharded.* Then it is not. How a backward mixes gathers and reductions is each rank's own: a gather
  comes with the use of a unit, a reduction with the last gradient of a bucket, or, on a rank that got none, at the end.
  In one communicator a gather would meet a reduction, and hang, or take gradients for weights. In two, each finds its
  own, so these stay apart.

Where transfers take two hops (``extensions/hops``), each hop has one communicator, or two, as the kinds have. Averages
between shard groups have one more, and a stream of their own: each follows the reduction of its bucket, so all ranks
issue both kinds in one order.

``NCCL_LAUNCH_ORDER_IMPLICIT=1`` has nccl begin kernels in the order in which the host has issued them, whichever
communicator they are of: those of the default group (``sync_dist``, SyncBatchNorm) stand beside ours in any case. With
CUDA 12.3 or newer, driver included, ranks with different orders go on as long as both kernels fit on the device; with
older ones they would hang.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import resource
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_zero._torch import default_store, new_group
from lightning_zero.comm.collectives import Pending
from lightning_zero.comm.control import ControlGroup, watch_ranks
from lightning_zero.config import ShardWithin
from lightning_zero.errors import CommunicationError

__all__ = ["ANSWER_SECONDS", "RANKS_PER_HOST", "STORE", "Groups", "ShardGroup", "allow_files", "connections", "joining"]
__all__ += ["make_group", "order_launches", "orders_differ", "places_by_host", "shard_span", "shut", "sockets"]
__all__ += ["this_host"]


def orders_differ(device: torch.device, sharded: bool) -> bool:
    """Whether gathers and reductions need groups of their own: see [Note: one order on a device]. On the CPU always.

    ``sharded``: parameters are, between uses.
    """
    return sharded or device.type == "cpu"


def shard_span(within: ShardWithin, on_node: int, world_size: int) -> int | None:
    """How many ranks share what is sharded; ``None``: all. ``on_node``: ranks of a node.

    Raises ``ValueError`` if the ranks cannot be split so.
    """
    span = on_node if within == "node" else within
    if span is None or world_size in (1, span):
        return None
    if span == 1 or world_size % span:
        raise ValueError(
            f"shard_within={within!r}: {world_size} ranks cannot be split into groups of {span} that share their "
            "shards. Take a number of ranks, 2 or more, that divides theirs, or leave it out."
        )
    return span


def order_launches(device: torch.device) -> None:
    """Have nccl begin its kernels in the host's order, unless the environment says otherwise. Before its first one."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


RANKS_PER_HOST = "LIGHTNING_ZERO_RANKS_PER_HOST"
"""Environment variable: take so many ranks of a host, one after the other, for those of a host of their own."""


@functools.cache
def this_host() -> str:
    """What processes that can see one another have in common; empty where the system does not say."""
    with suppress(OSError):
        spaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user"))
        return " ".join((Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces))
    return ""


def places_by_host(hosts: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The ranks in one place of every host, by place; ``None`` if there is nothing to win by two hops, or they cannot
    be: of one host, one rank on each, not as many on each, or in another order in one place than in another."""
    if len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1 or len(hosts[0]) == 1:
        return None
    places = [list(ranks) for ranks in zip(*hosts, strict=True)]
    return places if all(ranks == sorted(ranks) for ranks in places) else None


class Connections(dict[str, list[tuple[int, str]]]):
    """Sockets by the name of their process group: the number of the file, and what the system calls it.

    ``of_users`` and ``of_dtensors``: names of groups that user code calls, and that torch does for DTensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_users, self.of_dtensors = set[str](), set[str]()

    _before: set[tuple[int, str]] | None = None  # those that there were, while a group is made
    _awaited: Sequence[int] = ()  # the ranks that may connect to it

    @contextmanager
    def opened(self, awaited: Sequence[int] = ()) -> Iterator[list[tuple[int, str]]]:
        """Those that were opened inside, afterwards. Meanwhile ``shut`` ends waits for the store, for these, and for
        those that ``awaited`` ranks of the group have yet to open, whatever the name."""
        found = list[tuple[int, str]]()
        self._before, self._awaited = {*sockets().items()}, awaited
        try:
            yield found
            found += sockets().items() - self._before
        finally:
            self._before = None

    @contextmanager
    def shut_after(self, seconds: float, name: str) -> Iterator[None]:
        """Shut them if what is inside takes longer: where nothing else ends a wait for who is silent."""
        timer = threading.Timer(seconds, self.shut, [name])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def shut(self, name: str) -> None:
        """End whatever waits for them."""
        there = {*sockets().items()}
        known = there & {*self.get(name, ())}
        if (before := self._before) is not None:
            known |= there & {*self.get(STORE, ())} | there - before
        places = [shut(file) for file, _ in known]
        for place, rank in itertools.product(filter(None, places), () if before is None else self._awaited):
            # Gloo waits five times its timeout for a rank to connect: somebody connects in its place, and ends at once.
            with suppress(OSError), socket.create_connection(place, 1.0) as caller:
                caller.send(struct.pack("n", rank))


ANSWER_SECONDS = 15.0  # of the store after a failure: the process that serves it may be stopped
STORE = "(store)"
"""Stands for a group where processes make groups."""
connections = Connections()


def shut(file: int) -> tuple[str, int] | None:
    """End whatever waits for a connection. Of a socket that listens return the address: gloo ends the process if such a
    one is shut."""
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return cast(tuple[str, int], connection.getsockname()[:2])
        connection.getpeername()  # it is connected
        connection.shutdown(socket.SHUT_RDWR)
    return None


def sockets() -> dict[int, str]:
    """This process's sockets, by the numbers of their files; none where the system does not say."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if (what := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found[int(name)] = what
    return found


@contextmanager
def joining(world_size: int, backend: str) -> Iterator[None]:
    """Around what makes the default group; see [Note: groups end before the interpreter does]."""
    allow_files(world_size * (3 if "gloo" in backend else 2))  # two of rank 0's store: if it is full, all others wait
    with connections.opened() as opened:
        yield
    name: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
    connections[name], connections.of_users, connections.of_dtensors = opened, {name}, set()
    atexit.register(_end_all, os.getpid())  # Lightning does so for nccl only


def allow_files(more: int) -> None:
    """Raise the limit of open files, torchrun's too if it serves the store, where so many more come near it.

    To four times as many: wires of one host and workers open others. ``CommunicationError`` if the system forbids it.
    """
    with suppress(OSError):  # no Linux, or torchrun is another user's
        needed = len(os.listdir("/proc/self/fd")) + 32 + more  # agreements have few
        for process in (0, os.getppid()) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else (0,):
            soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
            if 0 <= hard < needed:
                raise CommunicationError(
                    f"The connections of a rank make {needed} open files, and it may have {hard}. Raise the hard limit "
                    "(ulimit -Hn): LimitNOFILE= of slurmd or kubelet, or docker run --ulimit nofile=."
                )
            if 0 <= soft < 4 * needed:
                resource.prlimit(process, resource.RLIMIT_NOFILE, (min(hard, 4 * needed), hard))


@dataclass(frozen=True)
class ShardGroup:
    """The ranks whose shards together make a flat buffer whole: this process's place among them, and how many.

    ``tensor``: ranks of a tensor-parallel group, which are neighbours, and each in another shard group.
    """

    rank: int
    world_size: int
    tensor: int = 1


class _Made(NamedTuple):
    """What groups are made of."""

    default: Callable[[], Any] = lambda: None  # the default group: weak, as it ends without them
    backend: str | None = None
    span: tuple[int | None, int] = None, 1  # ranks of a shard group, if not all; ranks of a tensor-parallel group
    sets: Sequence[Sequence[int]] = ()  # of ranks, of which each has process groups; none: all ranks


@dataclass(eq=False)
class Groups:
    """The process groups of one engine, each with its own order of calls.

    Who agrees (``control``), who shares a flat buffer (``shard``) and how many gradients an average is made of
    (``divisor``) are three things.

    [Note: groups end before the interpreter does]
    A gloo group has threads, and a thread that lets go of the last tensor of a transfer needs the interpreter for it.
    If that happens while the interpreter is shutting down, the process aborts, after a training that went well. So the
    groups are given back, and their threads joined, while Python still runs. That takes no other rank: with a dead one
    transfers under way fail at once, with a silent one after the group's timeout at the latest.
    """

    gather: dist.ProcessGroup | None  # carries parameters
    reduce: dist.ProcessGroup | None  # carries gradients; may be the same: see [Note: one order on a device]
    control: ControlGroup  # carries agreements between hosts; all ranks
    checkpoint: ControlGroup  # carries what hosts agree on while they save; all ranks
    shard: ShardGroup  # who takes part in a gather or a reduction
    divisor: int  # of a sum of gradients
    # Transfers that an error left under way. They belong to the groups and not to an engine: the ranks never fail at
    # the same moment, and gloo's thread spins for ever, and serves nobody, when a peer sends into a receive that was
    # let go of.
    abandoned: list[Pending] = field(default_factory=list)
    timeout: timedelta | None = None  # of any of their calls; ``None``: torch's default
    across: Groups | None = None
    """The ranks that hold the same shards as this one, where several groups of ranks hold all of them."""
    hosts: list[list[int]] = field(default_factory=list)  # the ranks of each, once they have been asked
    number: int = field(default_factory=itertools.count().__next__)
    """Alike on all ranks, as groups are created together. The store outlives them: its keys must not begin anew."""
    made: _Made = field(default_factory=lambda: _Made())
    counting: dist.ProcessGroup | None = None  # carries numbers about gradients, where not those who reduce them do
    _resources: dict[str, Any] = field(default_factory=dict)
    _meetings: Counter[str] = field(default_factory=Counter)

    @classmethod
    def create(
        cls,
        backend: str | None = None,
        timeout: timedelta | None = None,
        apart: bool = True,
        span: int | None = None,
        tensor: int = 1,
    ) -> Groups:
        """The groups over all ranks of the default group; none for a single process.

        Made once per default group, backend and timeout: a process that runs many Trainers, one after the other, must
        not pile up threads and sockets. ``apart``: gathers and reductions have groups of their own, if any rank says so
        or there are two by now. ``span``: so many ranks, one after the other, share what is sharded; ``None``: all.
        ``tensor``: so many neighbours are a tensor-parallel group; those of one place in each share what is sharded.

        Collective: every rank of the default group.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None, None, ControlGroup(None), ControlGroup(None), ShardGroup(0, 1), divisor=1)
        default: Any = dist.group.WORLD
        for groups in list(_LIVE):
            if groups.made.default() is not default:
                groups.destroy()  # their default group has ended, and nothing ended them; or they were never completed
            elif (*groups.made[1:3], groups.timeout) == (backend, (span, tensor), timeout):
                groups.part(apart)
                return groups
        rank, world_size = dist.get_rank(), dist.get_world_size()
        watch_ranks()
        size = span or world_size // tensor
        count, place = size * tensor, rank // tensor
        sets = [
            range(first + of, first + count, tensor) for first in range(0, world_size, count) for of in range(tensor)
        ]
        controls = ControlGroup(None, rank, world_size), ControlGroup(None, rank, world_size)
        groups = cls(None, None, *controls, ShardGroup(place % size, size, tensor), size, timeout=timeout)
        groups.made = _Made(backend=backend, span=(span, tensor), sets=sets)
        atexit.register(_end_all)
        _LIVE.append(groups)
        for control, what in zip(controls, ("agreements", "checkpoints"), strict=True):
            _connect(control, timeout, what)
        more = 2 * size if "gloo" in (backend or dist.get_backend()) else 0
        controls[0].together("connect the ranks", functools.partial(allow_files, more), CommunicationError)
        groups.gather = groups.reduce = make_group(backend, timeout, "parameters", sets)
        if tensor > 1:
            counted = [range(first, first + count) for first in range(0, world_size, count)]
            groups.counting = make_group(backend, timeout, "numbers about gradients", counted)
        if count < world_size:
            first = rank // count * count
            controls[0].counted = controls[1].counted = range(first, first + count)
            replicas = [range(of, world_size, count) for of in range(count)]
            groups.across = groups.among(replicas, "replicas", backend, world_size // count)
        groups.part(apart)
        groups.made = groups.made._replace(default=weakref.ref(default))  # last: they are complete
        return groups

    def among(self, sets: Sequence[Sequence[int]], what: str, backend: str | None, divisor: int = 1) -> Groups:
        """Groups of that set of ranks which this one is of, with the same agreements. Collective: every rank."""
        rank = self.control.rank
        ranks = next(ranks for ranks in sets if rank in ranks)
        gather = make_group(backend, self.timeout, what, sets)
        shard = ShardGroup(ranks.index(rank), len(ranks))
        made = Groups(gather, gather, self.control, self.checkpoint, shard, divisor, timeout=self.timeout)
        made.made = _Made(backend=backend, sets=sets)
        return made

    @property
    def span(self) -> int | None:
        """How many ranks share what is sharded; ``None``: all."""
        return None if self.across is None else self.shard.world_size

    @property
    def one_order(self) -> bool:
        """Whether gathers and reductions are of one group."""
        return self.gather is not None and self.reduce is self.gather

    def part(self, apart: bool) -> None:
        """Give reductions a group of their own, if they have none and any rank needs that. Collective: every rank."""
        if self.one_order and self.control.agree_any(apart):
            self.reduce = make_group(self.made.backend, self.timeout, "gradients", self.made.sets)

    def find_hosts(self) -> list[list[int]]:
        """The ranks of each host, which can see one another's processes. Collective: every rank.

        Raises ``ValueError`` on every rank if the environment of one asks for a strange number.
        """
        if not self.hosts:
            mine = socket.gethostname(), this_host(), os.environ.get(RANKS_PER_HOST, "")
            found: dict[tuple[str, str, int], list[int]] = {}
            met: Counter[tuple[str, str]] = Counter()
            for rank, (name, system, asked) in enumerate(self.control.gather_objects(mine)):
                if asked and not (asked.isdecimal() and int(asked)):
                    raise ValueError(f"{RANKS_PER_HOST} must be a number of ranks, got {asked!r} on rank {rank}.")
                part = met[name, system] // int(asked) if asked else 0
                met[name, system] += 1
                found.setdefault((name, system, part), []).append(rank)
            self.hosts = [*found.values()]
        return self.hosts

    def resource(self, name: str, make: Callable[[], Any]) -> Any:
        """What wires share under a name (threads, connections, more groups), made by whoever asks first. Its ``end``
        gives everything back; its ``stop``, if it has one, lets waits for other ranks in it end."""
        if name not in self._resources:
            self._resources[name] = make()
        return self._resources[name]

    def stop(self) -> None:
        """Let all waits in resources end. Called from any thread."""
        for shared in list(self._resources.values()):
            getattr(shared, "stop", bool)()

    def check_hosts(self) -> None:
        """Raise ValueError, on all ranks, if those of a shard group are not on one host. Collective: every rank."""
        hosts, size = self.control.gather_objects(socket.gethostname()), self.shard.world_size
        for first in range(0, len(hosts), size):
            if len(names := sorted(set(hosts[first : first + size]))) > 1:
                raise ValueError(
                    f"shard_within='node': ranks {first} to {first + size - 1} are on the hosts {', '.join(names)}. "
                    "Have the launcher number the ranks node by node (Slurm: --distribution=block), or give a number."
                )

    def rendezvous(self, occasion: str, note: str, seconds: float) -> dict[int, str]:
        """Say that this rank is here, and see who else comes to their next call for this occasion.

        Not collective: a rank that failed alone cannot start a collective, because the others are in the middle of
        another one, and would wait in it for this rank. The store of the default group has no order.

        Returns:
            The notes of the ranks that came before the first one had waited for so many seconds, by rank; this rank's
            own among them, and no other's if it came later. Complete on every rank or on none. In seven requests, and
            one more for each 62 ranks where not all come.
        """
        self._meetings[occasion] += 1
        rank, size = self.control.rank, self.control.world_size
        key = f"lightning_zero/{self.number}/{occasion}/{self._meetings[occasion]}"
        notes = {rank: note}
        if size > 1:
            store, end = default_store(), f"{key}/end"
            with connections.shut_after(seconds + ANSWER_SECONDS, STORE), suppress(RuntimeError):
                store.set(f"{key}/{rank}", note)
                store.add(f"{key}/here/{rank // _FLAGS}", 1 << rank % _FLAGS)
                here = [*range(size)]
                if store.add(f"{key}/count", 1) == size:
                    store.compare_set(end, "", _ALL)
                else:
                    with suppress(RuntimeError):  # not all have come
                        store.wait([end], timedelta(seconds=seconds))
                    if not store.check([end]):
                        flags = [store.add(f"{key}/here/{word}", 0) for word in range(-(-size // _FLAGS))]
                        here = [other for other in range(size) if flags[other // _FLAGS] >> other % _FLAGS & 1]
                        store.compare_set(end, "", " ".join(map(str, here)))
                if (told := store.get(end).decode()) != _ALL:
                    here = [*map(int, told.split())]
                if rank in here:  # else this rank came when another one had given up
                    keys = [f"{key}/{other}" for other in here]
                    notes |= {other: text.decode() for other, text in zip(here, store.multi_get(keys), strict=True)}
        return notes

    def destroy(self) -> None:
        """Give the groups back and join their threads. May be called again.

        Collective: every rank.
        """
        if self in _LIVE:
            _LIVE.remove(self)
        self.end()
        for control in (self.control, self.checkpoint):
            group, control.process_group = control.process_group, None
            _destroy(group)

    def end(self) -> None:
        """Give back what carries tensors, and what wires have made of it. Collective: every rank."""
        while self._resources:
            self._resources.popitem()[1].end()  # what was made last may need the others
        if self.across is not None:
            self.across.end()
        self.abandoned.clear()
        groups = [self.counting, self.gather, *([] if self.one_order else [self.reduce])]
        self.gather = self.reduce = self.across = self.counting = None
        while groups:
            _destroy(groups.pop())


def make_group(
    backend: str | None, timeout: timedelta | None, description: str, sets: Sequence[Sequence[int]]
) -> dist.ProcessGroup:
    """A group whose connections are known: of that one of ``sets`` which this rank is of. Collective: every rank."""
    with connections.opened(range(dist.get_world_size())) as opened:  # gloo numbers the ranks of a set from 0
        group = new_group(backend, timeout, description, sets)
    connections[group.group_name] = opened
    return group


def _connect(control: ControlGroup, timeout: timedelta | None, description: str) -> None:
    """Give agreements of all ranks a process group. All connections would be a file, and bytes in the store, for each
    rank of each: so it has those only that agreements use. Collective: every rank."""
    rank, size = control.rank, control.world_size
    steps = [1 << digit for digit in range((size - 1).bit_length())]
    with connections.opened([(rank + way * step) % size for step in steps for way in (1, -1)]) as opened:
        control.process_group = group = new_group("gloo", timeout, description, lazily=True)
        with connections.shut_after((timeout or default_pg_timeout).total_seconds(), group.group_name):
            control.connect()
    connections[group.group_name] = opened


def _destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy a process group, whose threads end with the last reference to it."""
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # gone already, with the default group
            dist.destroy_process_group(group)


def _end_all(owner: int = 0) -> None:
    while _LIVE:
        _LIVE[-1].destroy()
    if dist.is_initialized() and os.getpid() == owner:
        dist.destroy_process_group()


_ALL = "all"  # have come to a rendezvous
_FLAGS = 62  # in a number of the store's
_LIVE: list[Groups] = []  # not destroyed yet
os.register_at_fork(after_in_child=_LIVE.clear)  # a forked process has the groups but none of their threads
