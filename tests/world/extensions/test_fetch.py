"""Shards are brought closer before they are asked for, and what has become void is not used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_zero import NvmeOffload
from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import FileTensor, FileTiers, NvmeStore
from tests.helpers.probe import Probe, fit
from tests.helpers.world import run_world
from tests.world.strategy.test_offload_order import CASE

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    made = NvmeStore(str(tmp_path), rank=0, buffer_nbytes=2**20, io_threads=2, device=CPU)
    yield made
    made.close()


@pytest.fixture
def fetcher(store: NvmeStore) -> Iterator[FileTiers]:
    made = FileTiers(store, CPU)
    made.reserve(2, 2 * 4096)
    yield made
    made.close()


def resting(store: NvmeStore, *values: float) -> FileTensor:
    made = store.allocate(len(values), torch.float32, "a shard")
    made.write(torch.tensor(values))
    return made


def fetched(fetcher: FileTiers, source: Tensor) -> list[float]:
    destination = torch.full((source.numel(),), float("nan"))
    fetcher.fetch(source, destination)
    return destination.tolist()


def test_what_was_fetched_ahead_is_not_read_again(store: NvmeStore, fetcher: FileTiers) -> None:
    first, second = resting(store, 1.0, 2.0, 3.0), resting(store, 4.0, 5.0)
    fetcher.ahead([first, second])
    fetcher._buffers[0].job.result()
    first.write(torch.zeros(3))  # nobody does this without `forget`; here it shows where the elements come from
    assert fetched(fetcher, first) == [1.0, 2.0, 3.0]
    assert fetched(fetcher, first) == [0.0, 0.0, 0.0]
    assert fetched(fetcher, second) == [4.0, 5.0]


def test_what_was_fetched_ahead_is_void_after_a_step(store: NvmeStore, fetcher: FileTiers) -> None:
    source = resting(store, 1.0, 2.0)
    fetcher.ahead([source])
    fetcher.forget()
    source.write(torch.tensor([7.0, 8.0]))
    assert fetched(fetcher, source) == [7.0, 8.0]


def test_few_units_are_fetched_ahead_and_their_buffers_are_used_again(store: NvmeStore, fetcher: FileTiers) -> None:
    sources = [resting(store, float(number), 1.0) for number in range(6)]
    for source in sources:
        fetcher.ahead([source])
    assert sum(len(buffer.places) for buffer in fetcher._buffers) == 2
    for number, source in enumerate(sources):
        fetcher.ahead([sources[(number + 1) % 6]])
        assert fetched(fetcher, source) == [float(number), 1.0]
    fetcher.forget()
    assert fetcher.memory.nbytes == fetcher.reserved_nbytes == 2 * 2 * 4096


def test_a_read_that_failed_is_raised_by_whoever_needs_it(store: NvmeStore, fetcher: FileTiers) -> None:
    source = resting(store, 1.0, 2.0)
    store.close()
    fetcher.ahead([source])
    with pytest.raises(OffloadError, match="was closed"):
        fetched(fetcher, source)


def test_closing_ends_the_thread_and_a_later_fetch_starts_one(store: NvmeStore) -> None:
    fetcher = FileTiers(store, CPU)
    fetcher.reserve(1, 4096)
    source = resting(store, 1.0, 2.0)
    before = threading.active_count()
    for _ in range(2):
        fetcher.ahead([source])
        assert fetched(fetcher, source) == [1.0, 2.0]
        fetcher.rest()
        fetcher.wake()
        assert threading.active_count() == before


def test_host_memory_is_close_enough_to_the_cpu(fetcher: FileTiers) -> None:
    source = torch.tensor([1.0, 2.0])
    fetcher.ahead([source])
    assert not fetcher._buffers
    assert fetched(fetcher, source) == [1.0, 2.0]


class Counting(FileTiers):
    """Counts what is asked for, and how much of it had been fetched ahead."""

    def fetch(self, source: Tensor, destination: Tensor) -> None:
        asked, ahead = self.__dict__.get("counts", (0, 0))
        self.__dict__["counts"] = (asked + 1, ahead + any(id(source) in buffer.places for buffer in self._buffers))
        super().fetch(source, destination)


class Count(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if index == 2:  # the orders of forward and backward are known by then
            self.fetcher = trainer.strategy.engine.tiers
            self.fetcher.__class__ = Counting


def test_once_the_order_is_known_shards_are_fetched_before_their_gather(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[int, int]:
        count = Count()
        offload = NvmeOffload(path=str(tmp_path), buffer_mib=1, parameters=True)
        fit(Probe(CASE), stage=3, micro_steps=6, callbacks=[count], offload=offload)
        return count.fetcher.__dict__["counts"]

    for asked, ahead in run_world(2, run, timeout=60):
        assert asked >= 4 * 4  # four steps, at least four units
        assert ahead >= 0.6 * asked  # the first of each phase cannot be
