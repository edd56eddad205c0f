"""Who is here, without a collective that the others would have to join."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from lightning_zero.comm import Groups
from tests.helpers.world import run_world


def test_all_ranks_that_come_are_seen() -> None:
    def run(rank: int) -> list[dict[int, str]]:
        groups = Groups.create()
        return [groups.rendezvous("meeting", f"{place} of {rank}", 20) for place in ("first", "second")]

    for found in run_world(3, run):
        assert found == [{other: f"{place} of {other}" for other in range(3)} for place in ("first", "second")]


@pytest.mark.timing
def test_a_rank_that_does_not_come_is_missed_in_time_and_disturbs_nobody() -> None:
    def run(rank: int) -> tuple[set[int], float, list[list[int]]]:
        groups = Groups.create()
        start = time.monotonic()
        came = set(groups.rendezvous("meeting", "here", 0.5)) if rank != 1 else set()
        seconds = time.monotonic() - start
        return came, seconds, groups.control.exchange([rank])

    for rank, (came, seconds, row) in enumerate(run_world(3, run)):
        assert came in ([set()] if rank == 1 else [{rank}, {0, 2}])  # who gives up first counts as gone
        assert seconds < 5
        assert row == [[0], [1], [2]]


def test_who_gave_up_is_not_waited_for() -> None:
    def run(rank: int) -> set[int]:
        groups = Groups.create()
        if rank == 1:
            groups.control.barrier()
        came = set(groups.rendezvous("meeting", "here", 0.3))
        if rank == 0:
            groups.control.barrier()
        return came

    assert run_world(2, run) == [{0}, {1}]


def test_a_single_process_is_complete() -> None:
    assert Groups.create().rendezvous("meeting", "here", 0.5) == {0: "here"}


def test_notes_of_groups_that_are_gone_are_not_read() -> None:
    """The store of the default group outlives them."""

    def run(rank: int) -> set[int]:
        Groups.create(timeout=timedelta(seconds=20)).rendezvous("meeting", "then", 20)
        later = Groups.create(timeout=timedelta(seconds=21))
        came = set(later.rendezvous("meeting", "now", 0.3)) if rank == 0 else set()
        later.control.barrier()
        return came

    assert run_world(2, run) == [{0}, set()]
