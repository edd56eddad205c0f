"""The detector itself, on traces that are written down here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import Streams
from lightning_zero.offload.host import host_memory
from tests.thorough.races.simulated import simulated_device
from tests.thorough.races.trace import Free, Item, Mark, Race, Use, Wait, Work, find_races

CPU = torch.device("cpu")


def work(actor: str, *, reads: range | None = None, writes: range | None = None, issuer: str = "host") -> Work:
    uses = [Use(1, found.start, found.stop, found is writes) for found in (reads, writes) if found is not None]
    return Work(actor, issuer, "work", "here", uses)


WRITE, READ, ELSEWHERE = work("a", writes=range(0, 8)), work("b", reads=range(4, 12)), work("b", reads=range(8, 12))
ORDER = [Mark("a", "host", 1, "mark"), Wait("b", 1, "wait")]


@pytest.mark.parametrize(
    ("trace", "races"),
    [
        ([WRITE, READ], 1),
        ([READ, WRITE], 1),
        ([WRITE, ELSEWHERE], 0),
        ([work("a", reads=range(8)), READ], 0),
        ([WRITE, work("a", reads=range(8))], 0),
        ([WRITE, *ORDER, READ], 0),
        ([*ORDER, WRITE, READ], 1),
        ([WRITE, Wait("b", 2), READ], 1),  # an event that was never recorded
        ([WRITE, *ORDER, Mark("b", "host", 2), Wait("c", 2), work("c", writes=range(8))], 0),
        ([WRITE, Mark("a", "host", 1), Wait("host", 1), READ], 0),  # issued when the host has waited
        ([WRITE, Mark("a", "host", 1), Wait("thread", 1), READ], 1),
        ([WRITE, *ORDER, work("b", writes=range(8)), work("c", reads=range(8))], 1),  # with the last writer alone
    ],
)
def test_who_is_behind_whom(trace: list[Item], races: int) -> None:
    assert len(find_races(trace)) == races


@pytest.mark.parametrize(
    ("trace", "races"),
    [
        ([WRITE, Free(1, "a", "host")], 0),
        ([WRITE, Free(1, "b", "host")], 1),
        ([WRITE, *ORDER, Free(1, "b", "host")], 0),
        ([WRITE, Mark("a", "host", 1), Wait("host", 1), Free(1, "b", "host")], 0),
        ([WRITE, Free(1, "host", "host")], 1),
        ([work("thread", writes=range(8), issuer="thread"), Free(1, "host", "host")], 0),
    ],
)
def test_memory_is_given_up_behind_its_uses(trace: list[Item], races: int) -> None:
    assert len(find_races(trace)) == races


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded


def races_of(*, waits: bool, lives: bool = True, quick: bool = False) -> list[Race]:
    """A copy to the host on a stream, and what overwrites its source."""
    with simulated_device(quick) as recorder:
        streams = Streams(CPU)
        source, memory = torch.ones(64), host_memory(256, False)
        with streams.transferring():
            memory.view(torch.float32)[:64].copy_(source, non_blocking=True)
            event = streams.mark()
        if waits and quick:
            assert event.query()
        elif waits:
            streams.wait(event)
            assert not event.query()
        if lives:
            source.zero_()
        del source
        torch.ones(2).add_(1)
        event.synchronize()
    return find_races(recorder.trace)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("lives", [False, True])
def test_operators_streams_and_memory_are_recorded(lives: bool, quick: bool) -> None:
    assert not races_of(waits=True, lives=lives, quick=quick)
    assert len(races_of(waits=False, lives=lives, quick=quick)) == 1


def test_a_stream_that_writes_to_fresh_memory_waits_for_whoever_took_it() -> None:
    """It may have been another tensor's a moment ago, which is still computed with."""

    def races(after: bool) -> list[Race]:
        with simulated_device() as recorder:
            streams = Streams(CPU)
            fresh: Tensor = torch.empty(4)
            with streams.gathering(None if after else streams.nothing()):
                fresh.fill_(1.0)
            recorder.synchronize()
        return find_races(recorder.trace)

    assert not races(after=True)
    assert len(races(after=False)) == 1
