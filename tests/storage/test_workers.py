"""Jobs are done once, dropped or settled, and threads end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lightning_zero.storage.pipeline import Job, Meter, Workers
from tests.helpers.waiting import until

PATIENCE_SECONDS = 10.0


def job(move: Callable[[], None], *, droppable: bool = False, meter: Meter | None = None) -> Job:
    return Job(move, 7, meter or Meter(), droppable)


def wait_until(condition: Callable[[], bool]) -> None:
    assert until(condition, PATIENCE_SECONDS)


def test_settling_drops_what_was_not_begun_and_finishes_the_rest() -> None:
    workers, moved = Workers(1, "test-workers"), []
    dropped = job(lambda: moved.append("dropped"), droppable=True)
    first = job(lambda: wait_until(lambda: dropped.done))  # under way until settling has dropped the second one
    kept = job(lambda: moved.append("kept"))
    workers.submit([first, dropped, kept])
    workers.settle()
    assert moved == ["kept"]
    assert first.error is None
    assert workers.close()


def test_a_job_that_never_reached_the_queue_is_settled() -> None:
    """An interrupt may come between noting a job and queueing it."""
    workers, moved = Workers(2, "test-workers"), []
    workers.submit([job(lambda: None)])
    lost = job(lambda: moved.append("lost"))
    workers._jobs.append(lost)
    workers.settle()
    assert moved == ["lost"]
    assert workers.close()


def test_errors_belong_to_their_job_and_are_not_counted() -> None:
    workers, meter = Workers(2, "test-workers"), Meter()
    failing, fine = job(lambda: [][0], meter=meter), job(lambda: None, meter=meter)
    workers.submit([failing, fine])
    workers.wait(lambda: failing.done and fine.done)
    assert isinstance(failing.error, IndexError)
    assert fine.error is None
    assert meter.nbytes == 7
    assert workers.close()


def test_a_meter_counts_overlapping_transfers_once() -> None:
    meter, barrier, workers = Meter(), threading.Barrier(3), Workers(3, "test-workers")
    began = time.perf_counter()
    jobs = [job(lambda: barrier.wait(PATIENCE_SECONDS) and None, meter=meter) for _ in range(3)]  # all three at once
    workers.submit(jobs)
    workers.wait(lambda: all(each.done for each in jobs))
    assert meter.nbytes == 21
    assert 0 < meter.seconds <= time.perf_counter() - began
    assert workers.close()


def test_a_pause_ends_the_threads_and_the_next_job_starts_others() -> None:
    workers, names = Workers(2, "test-workers"), []
    for _ in range(2):
        again = job(lambda: names.append(threading.current_thread().name))
        workers.submit([again])
        workers.wait(lambda again=again: again.done)  # type: ignore[misc]
        assert workers.pause()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-workers")]
    assert len(names) == 2
    assert workers.close()
    with pytest.raises(RuntimeError, match="have ended"):
        workers.submit([job(lambda: None)])


def test_a_thread_that_frees_the_owner_does_not_wait_for_itself() -> None:
    """As when the last reference to a store goes while a job is being done."""
    workers, ended = Workers(1, "test-workers"), []
    closing = job(lambda: ended.append(workers.close()))
    workers.submit([closing])
    workers.wait(lambda: closing.done)
    assert closing.error is None
    assert ended == [True]
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("test-workers")])
