"""What the watch asks of the one store, counted: of all ranks of large worlds, each on a host with seven others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.extensions import watch
from lightning_zero.extensions.watch import Wait, Watch

HOST = 8
MOST = 200  # requests in any second


class Counting:
    """A store in memory: how many requests it has served, and how many bytes of values came in and went out."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = self.nbytes = self.largest = 0
        self.now = lambda: 0.0
        self.in_second = Counter[int]()

    def clone(self) -> Counting:
        return self

    def set(self, key: str, value: str) -> None:
        self._count(value.encode())
        self.values[key] = value.encode()
        self.largest = max(self.largest, len(value))

    def add(self, key: str, number: int) -> int:
        self._count()
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        self._count()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self.values[key] for key in keys]
        self._count(*found)
        return found

    def _count(self, *values: bytes) -> None:
        self.requests += 1
        self.in_second[int(self.now())] += 1
        self.nbytes += sum(map(len, values))


class Cluster:
    """The watches of all ranks, each of which takes its looks in turn, at a time of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, world_size: int) -> None:
        self.store, self.now, self.rank, self.dead = Counting(), 0.0, 0, set[int]()
        self.waits: list[Wait | None] = [None] * world_size
        self.files: dict[int, bytes] = {}
        stand_ins: dict[str, Any] = {
            "default_store": lambda: self.store,
            "_torch": SimpleNamespace(prefix_store=lambda _, store: store),
            "clients_of": lambda _: [],
            "this_host": lambda: f"the boot of host {self.rank // HOST:036} pid:[4026531836] user:[4026531837]",
            "process_of": lambda rank: [] if rank in self.dead else [stand_ins["this_host"](), rank, "1234567"],
            "entered_collectives": lambda: {str(number): 1_000_000 for number in range(5)},
            "groups_made": lambda: 5,
            "time": SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None),
            "tempfile": SimpleNamespace(TemporaryFile=lambda: SimpleNamespace(fileno=lambda: self.rank)),
            "os": SimpleNamespace(getpid=lambda: self.rank, stat=self._stat, pwrite=self._pwrite),
            "Path": lambda path: SimpleNamespace(read_bytes=lambda: self.files[_rank_of(path)]),
            "_Stacks": lambda _: SimpleNamespace(wait=lambda: self.waits[self.rank]),
            "threading": SimpleNamespace(
                Event=lambda: SimpleNamespace(wait=bool), Lock=lambda: nullcontext(),
                Thread=lambda **_: SimpleNamespace(start=bool), get_ident=int,
            ),
            "atexit": SimpleNamespace(register=bool),
        }  # fmt: skip
        for name, stand_in in stand_ins.items():
            patch.setattr(watch, name, stand_in)
        patch.setattr(dist, "get_world_size", lambda: world_size)
        patch.setattr(dist, "get_rank", lambda: self.rank)
        self.watches = []
        for self.rank in range(world_size):
            self.watches.append(Watch(lambda: True))  # type: ignore[arg-type]
        for _ in range(17):
            for one in self.each():
                one._others.find()
        last = {"wait": None, "since": 0.0, "turn": 0, "told": None, "looks": 0, "alone": False}
        self._last = [SimpleNamespace(**last) for _ in self.watches]

    def _stat(self, path: str) -> Any:
        return SimpleNamespace(st_size=len(self.files.get(_rank_of(path), b"")))

    def _pwrite(self, file: int, content: bytes, _: int) -> None:
        self.files[file] = content

    def each(self, ranks: Sequence[int] | None = None) -> Iterator[Watch]:
        """The watch of one rank after the other, or of some, in whose process we are meanwhile."""
        for rank in range(len(self.watches)) if ranks is None else ranks:
            self.rank = rank
            if rank not in self.dead:
                yield self.watches[rank]

    def all_look(self, seconds: float) -> None:
        """Let so many seconds pass, in each of which the store serves no more requests than ``MOST``."""
        tick = watch._TICK_SECONDS
        self.store.now, self.store.in_second = lambda: self.now, Counter()
        for _ in range(round(seconds / tick)):
            begin = self.now
            for one in self.each():
                self.now = begin + tick * self.rank / len(self.watches)
                one._look(self._last[self.rank])
            self.now = begin + tick
        assert max(self.store.in_second.values(), default=0) <= MOST

    def told(self) -> list[bool]:
        """Whether each rank knows of a verdict."""
        return [bool(one.verdict) for one in self.watches]


def _rank_of(path: str) -> int:
    return int(path.rpartition("/")[2])


def in_group(name: str, world_size: int) -> Wait:
    where = f"in exchange of the group '{name}' (forward of 'LlamaDecoderLayer') at {'folder/' * 20}train.py:88, main"
    return Wait((140012345678, 4), name, "exchange", 1_000_001, watch._ranges(range(world_size)), where)


def test_one_store_serves_thousands_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world_size = 4096
    cluster = Cluster(monkeypatch, world_size)
    store = cluster.store
    assert store.requests <= 12 * world_size
    assert store.nbytes <= 2048 * world_size

    cluster.waits = [in_group("a", world_size)] * (world_size - 1) + [None]
    cluster.all_look(15)
    assert store.largest < 1024
    assert not any(cluster.told())
    cluster.waits = [None] * world_size
    cluster.all_look(5)

    for one in cluster.each(range(world_size - 64, world_size)):
        one.failed(ValueError("boom"))
    before, others = store.nbytes, range(64)
    for one in cluster.each(others):
        first = range(world_size - 64, world_size - 60)
        assert one.explain() == "".join(f"Rank {rank} has failed with ValueError: boom.\n" for rank in first)
    assert store.nbytes - before < 1024 * len(others)


def test_a_host_hears_of_a_verdict_without_its_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world_size = 512
    cluster = Cluster(monkeypatch, world_size)
    first = range(0, world_size, HOST)
    for one in cluster.each(first):
        one.failed(ValueError("boom"))
    cluster.dead.update(first)
    cluster.waits = [in_group("ab"[rank % 3 == 2], world_size) for rank in range(world_size)]
    cluster.all_look(25)
    assert cluster.told() == [rank not in first for rank in range(world_size)]
    lines = json.loads(cluster.store.values["verdict"]).splitlines()
    told = [(line.partition(" has ")[0], line.rpartition(" (and ")[2]) for line in lines[1:-1]]
    assert told == [("  rank 0", "63 more)"), ("  rank 2", "148 more)"), ("  rank 1", "298 more)")]
