"""Jobs are done once, dropped or settled, and threads end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_zero.extensions.nvme.pipeline import Job, Workers
from tests.helpers.waiting import until

PATIENCE_SECONDS = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    assert until(condition, PATIENCE_SECONDS)


def test_a_job_that_never_reached_the_queue_is_settled() -> None:
    """An interrupt may come between noting a job and queueing it."""
    workers, moved = Workers(2, "test-workers"), []
    workers.submit([Job(lambda: None)])
    lost = Job(lambda: moved.append("lost"))
    workers._jobs.append(lost)
    workers.settle()
    assert moved == ["lost"]
    assert workers.end()


def test_errors_belong_to_their_job() -> None:
    workers = Workers(2, "test-workers")
    failing, fine = Job(lambda: [][0]), Job(lambda: None)
    workers.submit([failing, fine])
    workers.wait(lambda: failing.done and fine.done)
    assert isinstance(failing.error, IndexError)
    assert fine.error is None
    assert workers.end()


def test_a_thread_that_frees_the_owner_does_not_wait_for_itself() -> None:
    """As when the last reference to a store goes while a job is being done."""
    workers, ended = Workers(1, "test-workers"), []
    closing = Job(lambda: ended.append(workers.end()))
    workers.submit([closing])
    workers.wait(lambda: closing.done)
    assert closing.error is None
    assert ended == [True]
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("test-workers")])
