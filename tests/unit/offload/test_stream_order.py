"""What CUDA streams would order, simulated: each stream is the set of operations that it is known to run behind.

There is no GPU where these tests run. Nothing is copied asynchronously here; what is looked at is who waits for whom.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_zero.comm import LocalCollectives
from lightning_zero.offload.host import HostMemory
from lightning_zero.offload.transfers import Copy, MemoryTiers, Transfers

CPU = torch.device("cpu")


class SimulatedEvent:
    def __init__(self, behind: set[str]) -> None:
        self.behind = set(behind)
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True


class SimulatedStreams:
    """Stands in for ``Streams`` of a CUDA device."""

    beside = True
    device = CPU  # of the memory

    def __init__(self) -> None:
        self.behind: dict[str, set[str]] = {"compute": set(), "gather": set(), "transfer": set()}
        self.current = "compute"
        self.threads = {threading.get_ident()}  # whose device is the one of the streams

    def enter_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def issue(self, operation: str) -> None:
        self.behind[self.current].add(operation)

    @contextmanager
    def _on(self, stream: str, after: SimulatedEvent | None) -> Iterator[None]:
        assert threading.get_ident() in self.threads
        self.behind[stream] |= self.behind[self.current] if after is None else after.behind
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def transferring(self, after: SimulatedEvent | None = None) -> Any:
        return self._on("transfer", after)

    def gathering(self, after: SimulatedEvent | None = None) -> Any:
        return self._on("gather", after)

    def mark(self) -> SimulatedEvent:
        return SimulatedEvent(self.behind[self.current])

    def nothing(self) -> SimulatedEvent:
        return SimulatedEvent(set())

    def wait(self, event: SimulatedEvent | None) -> None:
        self.behind[self.current] |= set() if event is None else event.behind


@pytest.fixture
def streams() -> Any:
    return SimulatedStreams()


@pytest.fixture
def transfers(streams: Any) -> Iterator[Transfers]:
    made = Transfers(streams, HostMemory(CPU, None))
    made.reserve(2, 4096, 64)
    yield made
    made.close()


def test_gradients_leave_behind_their_reduction_and_not_behind_all_of_the_backward(
    streams: Any, transfers: Transfers
) -> None:
    """Also on a single rank, where the reduction itself does nothing."""
    wire = LocalCollectives(streams)
    full, host = torch.ones(64), torch.zeros(64)
    streams.issue("backward of this unit")
    pending = wire.reduce_scatter(full, wire.own_range(full), "gradients")
    streams.issue("backward of the next unit")
    transfer = transfers.out([Copy(full, host)], pending)
    transfer.wait()
    assert transfer._event.behind == {"backward of this unit"}
    assert transfer._event.waited_for
    streams.issue("more")
    transfer.order()
    assert "backward of this unit" in streams.behind["compute"]


def test_gradients_that_are_added_are_added_when_they_have_arrived(streams: Any, transfers: Transfers) -> None:
    host = torch.ones(64)
    for _ in range(5):  # more than there is staging for
        transfers.out(
            [Copy(torch.ones(64), host, True)], LocalCollectives(streams).reduce_scatter(*[torch.ones(64)] * 2, "")
        )
    transfers.settle()
    assert host.tolist() == [6.0] * 64


def test_a_unit_computes_behind_the_copy_of_its_weights(streams: Any) -> None:
    with streams.gathering(SimulatedEvent(set())):
        streams.issue("copy of the weights into the slot")
        pending = LocalCollectives(streams).all_gather(torch.zeros(64), "parameters")
    pending.wait()
    assert "copy of the weights into the slot" in streams.behind["compute"]


def test_masters_are_not_stepped_on_while_they_are_read(streams: Any, transfers: Transfers) -> None:
    """Ordering lets the device go on; only ``settle`` holds the host up."""
    streams.issue("forward")
    master, weights = torch.arange(64.0), torch.zeros(64, dtype=torch.bfloat16)
    transfer = transfers.back([Copy(master, weights)])
    transfer.order()
    event = transfers._latest
    assert event.behind == {"forward"}  # the weights are not overwritten before
    assert not event.waited_for
    transfers.settle()
    assert event.waited_for
    assert torch.equal(weights, master.bfloat16())  # cast piece by piece, through 64 bytes


def test_host_memory_that_is_fetched_is_not_written_meanwhile(streams: Any) -> None:
    fetcher = MemoryTiers(CPU, streams)
    source = torch.ones(16)
    fetcher.fetch(source, torch.zeros(16))
    event: Any = fetcher._fetched
    fetcher.settle()
    assert event.waited_for


def test_results_of_all_jobs_are_looked_at() -> None:
    """A transfer of several tensors fails if any of them does."""
    from lightning_zero.offload.transfers import Transfer

    good, bad = Future[Any](), Future[Any]()
    good.set_result(None)
    bad.set_exception(RuntimeError("one of them"))
    with pytest.raises(RuntimeError, match="one of them"):
        Transfer(SimulatedStreams(), [bad, good]).wait()  # type: ignore[arg-type]
