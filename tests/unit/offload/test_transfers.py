"""Copies between device and host: in order, whole when they are waited for, and nothing left behind."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from lightning_zero.comm import Streams
from lightning_zero.offload.host import HostMemory
from lightning_zero.offload.transfers import Copy, Transfers

CPU = torch.device("cpu")


@pytest.fixture
def transfers() -> Transfers:
    made = Transfers(Streams(CPU), HostMemory(CPU, None))
    yield made
    made.close()


def test_copies_run_in_the_background_in_the_order_they_were_started(transfers: Transfers) -> None:
    held = threading.Event()

    class Held:
        """A source that is there at once; what holds the worker up is a job before."""

        def wait(self) -> None:
            pass

    blocker = transfers._submit(lambda: held.wait(20) and None)
    source, target = torch.ones(8), torch.zeros(8)
    first = transfers.out([Copy(source, target)], Held())
    second = transfers.out([Copy(source, target, True)])
    assert target.tolist() == [0.0] * 8  # nothing has happened: the caller was not held up
    assert not blocker.done()
    held.set()
    second.wait()
    assert target.tolist() == [2.0] * 8  # replaced, then added to
    first.wait()


def test_a_copy_begins_only_when_its_source_is_ready(transfers: Transfers) -> None:
    source, target = torch.zeros(4), torch.zeros(4)

    class Reduction:
        def wait(self) -> None:
            source.fill_(3.0)

    transfers.out([Copy(source, target)], Reduction()).wait()
    assert target.tolist() == [3.0] * 4


@pytest.mark.parametrize("direction", ["out", "back"])
def test_nothing_is_held_of_a_copy_that_was_waited_for(transfers: Transfers, direction: str) -> None:
    """Else who counts the users of memory, to give its pages back, would now and then find the thread among them."""
    began, over = threading.Event(), threading.Event()
    transfers._submit(lambda: began.wait(20) and None)
    source, target = torch.ones(4), torch.zeros(4)
    left = weakref.ref(source), weakref.ref(target)
    transfer = getattr(transfers, direction)([Copy(source, target)])
    transfers._last.add_done_callback(lambda job: over.wait(20) and None)  # the thread still has its job there
    began.set()
    transfer.wait()
    del source, target
    held = [tensor() is not None for tensor in left]
    over.set()
    assert held == [False, False]


def test_casts_and_adds_on_the_host(transfers: Transfers) -> None:
    source = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    target = torch.tensor([0.5, 0.25])
    transfers.out([Copy(source, target, True)]).wait()
    assert target.tolist() == [1.5, 2.25]
    weights = torch.zeros(2, dtype=torch.bfloat16)
    transfers.back([Copy(target, weights)]).order()
    assert weights.tolist() == [1.5, 2.25]


def test_whoever_waits_gets_the_error_and_others_do_not(transfers: Transfers) -> None:
    good, bad = torch.zeros(2), torch.zeros(3)
    wrong = transfers.out([Copy(torch.ones(2), bad)])
    right = transfers.out([Copy(torch.ones(2), good)])
    right.wait()
    assert good.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="size of tensor"):
        wrong.wait()
    transfers.settle()  # says nothing: the error was that of the transfer


def test_closing_ends_the_thread_and_a_later_copy_starts_one() -> None:
    before = threading.active_count()
    transfers = Transfers(Streams(CPU), HostMemory(CPU, None))
    assert threading.active_count() == before  # none until there is something to copy
    target = torch.zeros(2)
    transfers.out([Copy(torch.ones(2), target)])
    transfers.close()
    assert target.tolist() == [1.0, 1.0]
    assert threading.active_count() == before
    transfers.close()
    transfers.out([Copy(torch.full((2,), 5.0), target)]).wait()
    assert target.tolist() == [5.0, 5.0]
    transfers.close()
    assert threading.active_count() == before


def test_an_inference_tensor_never_comes_to_life(transfers: Transfers) -> None:
    """Memory that was first written under ``inference_mode`` could never be trained on."""
    with torch.inference_mode():
        target = HostMemory(CPU, None).allocate(4, torch.float32)
        transfers.out([Copy(torch.ones(4), target)]).wait()
    assert not target.is_inference()
