"""Who waits for whom: a verdict only where no rank can ever go on, and then on all of them, in seconds."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import Groups
from lightning_zero.errors import DivergenceError
from lightning_zero.extensions.watch import _LINKS, _Line, _Stacks, _stuck, current_watch, watch_ranks
from tests.helpers.waiting import until
from tests.helpers.world import run_world

RUNS: dict[str, Any] = {"state": "runs", "entered": {}}
OVER: dict[str, Any] = {"state": "over", "entered": {"a": 3, "b": 3}}


def waits(group: str, place: int, operation: str = "barrier", **entered: int) -> dict[str, Any]:
    """The state of a rank that waits in one of three ranks' groups."""
    return {
        "state": "waits", "group": group, "place": place, "operation": operation, "members": [[0, 3, 1]],
        "entered": {"a": 3, "b": 3, group: place, **entered},
    }  # fmt: skip


MEMORY = waits("", 0)

STUCK: dict[str, list[dict[str, Any]]] = {
    "two groups": [waits("a", 4), waits("b", 4), waits("b", 4)],
    "memory and a group": [MEMORY, MEMORY, waits("a", 4)],
    "memory alone": [MEMORY, MEMORY, MEMORY],
    "two operations in one place": [waits("a", 4), waits("a", 4, "all_reduce"), waits("a", 4)],
    "a rank that failed": [waits("a", 4), OVER, waits("a", 4)],
    "all in different groups": [waits("a", 4), waits("b", 4), waits("c", 1)],
}
GOES_ON: dict[str, list[dict[str, Any]]] = {
    "a rank computes": [waits("a", 4), waits("b", 4), RUNS],
    "all are in one collective": [waits("a", 4), waits("a", 4), waits("a", 4)],
    "all but one wait for what has been entered": [waits("a", 3), waits("b", 4), waits("b", 4)],
    "one group has messages between two ranks": [waits("a", 7), waits("a", 5), waits("a", 5)],
    "a rank that failed had entered it": [waits("a", 3), OVER, waits("a", 3)],
    "a collective under way, and transfers ahead": [
        waits("a", 4, "transfer", a=5), waits("a", 4, "transfer"), waits("a", 4, "transfer")
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STUCK)
def test_nobody_can_go_on(name: str) -> None:
    assert _stuck(STUCK[name])


@pytest.mark.parametrize("name", GOES_ON)
def test_somebody_can_go_on(name: str) -> None:
    assert not _stuck(GOES_ON[name])


def _connect(rank: int, world_size: int = 2, seconds: float = 300) -> Groups:
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Groups.create(timeout=timeout)


def _agreement(groups: Groups) -> None:
    groups.control.exchange([1])


def _of_checkpoints(groups: Groups) -> None:
    groups.checkpoint.gather_objects("anything")


def _new_group(groups: Groups) -> None:
    dist.new_group()


def _groups_of_ours(groups: Groups) -> None:
    Groups.create(timeout=timedelta(seconds=60))


PAIRS: dict[str, tuple[Callable[[Groups], None], Callable[[Groups], None], str]] = {
    "two groups": (_agreement, _of_checkpoints, "exchange of the group 'agreements'"),
    "making a group": (_agreement, _new_group, "for a new process group"),
    "making groups of ours": (_groups_of_ours, _agreement, "through the group 'agreements' (the first agreement)"),
}


@pytest.mark.timing
@pytest.mark.parametrize("name", PAIRS)
def test_ranks_in_different_groups_are_told_in_seconds(name: str) -> None:
    """With two groups of gloo, which alone would wait for half an hour."""
    first, second, told = PAIRS[name]

    def world(rank: int) -> tuple[float, str]:
        groups = _connect(rank)
        begin = time.monotonic()
        try:
            (second if rank else first)(groups)
        except (DivergenceError, RuntimeError) as error:
            watch = current_watch()
            assert watch is not None
            return time.monotonic() - begin, str(error) + watch.explain()
        raise AssertionError("nobody else came")

    for seconds, message in run_world(2, world, init_group=False):
        assert seconds < 8
        assert "No rank can go on" in message
        assert "rank 0 has waited" in message
        assert told in message
        assert "test_watch.py" in message


@pytest.mark.timing
@pytest.mark.parametrize("while_making_groups", [False, True])
def test_a_rank_that_is_stopped_while_it_serves_the_store_is_not_waited_for(while_making_groups: bool) -> None:
    """The store's client waits without end: after a failure nobody asks for long, and a new group has its timeout."""

    def world(rank: int) -> tuple[float, str]:
        groups, watch = _connect(rank, seconds=10), current_watch()
        assert watch is not None
        process, _ = groups.control.gather_objects(os.getpid())
        if rank == 0:
            os.kill(process, signal.SIGSTOP)
            return 0.0, ""
        begin, state = time.monotonic(), Path(f"/proc/{process}/stat")
        assert until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 20)
        try:
            with pytest.raises(RuntimeError) as caught:
                dist.new_group() if while_making_groups else groups.control.barrier()
            if not while_making_groups:
                watch.failed(caught.value)
                assert groups.rendezvous("save", "", 1.0) == {1: ""}
            return time.monotonic() - begin, str(caught.value) + watch.verdict
        finally:
            os.kill(process, signal.SIGCONT)

    _, (seconds, message) = run_world(2, world, init_group=False, timeout=100)
    assert seconds < 60
    assert ("has lost the store" if while_making_groups else "rank 0's or torchrun's, does not answer") in message


@pytest.mark.timing
def test_a_slow_rank_is_waited_for() -> None:
    """It sleeps, computes, or has another thread that talks to the others."""

    def world(rank: int) -> bool:
        groups = _connect(rank)
        groups.control.barrier()
        if rank == 0:
            time.sleep(2.5)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                torch.ones(100).sum()
        groups.control.barrier()
        helper = threading.Thread(target=groups.checkpoint.barrier) if rank == 0 else None
        if helper is not None:
            helper.start()  # in another group than its rank, which waits for it only after the barrier
            groups.control.barrier()
            helper.join()
        else:
            time.sleep(3)
            groups.control.barrier()
            groups.checkpoint.barrier()
        watch = current_watch()
        assert watch is not None
        return not watch.verdict

    assert all(run_world(2, world, init_group=False))


@pytest.mark.parametrize("begun", [True, False])
def test_who_failed_in_an_earlier_run_may_come_late_to_the_next(begun: bool) -> None:
    def world(rank: int) -> str:
        groups, watch = _connect(rank), current_watch()
        assert watch is not None
        if begun:
            watch.begins_anew()
        watch.failed(ValueError("boom"))
        watch.run_ends()
        groups.control.barrier()
        for _ in range(2):
            if rank == 1:
                time.sleep(5)  # before it begins anew, and afterwards
            watch.begins_anew()
            groups.control.barrier()
        return watch.verdict

    assert run_world(2, world, init_group=False) == [""] * 2


def test_what_ended_an_earlier_run_is_told_as_that() -> None:
    def world(rank: int) -> str:
        groups, watch = _connect(rank), current_watch()
        assert watch is not None
        if rank == 0:  # the other has failed by itself, and nobody has told it
            watch.verdict = "No rank can go on."
            watch._store.set("verdict", json.dumps(watch.verdict))
        groups.control.barrier()
        for _ in range(2):
            watch.begins_anew()
        groups.control.barrier()
        return watch.explain()

    told = "An earlier run has closed the connections: restart all ranks. It ended with: No rank can go on."
    assert run_world(2, world, init_group=False) == [told] * 2


def test_one_watch_for_a_default_group_and_none_of_it_left() -> None:
    def world(rank: int) -> list[int]:
        def threads() -> int:
            return sum(thread.name == "lightning_zero: watch" for thread in threading.enumerate())

        groups = _connect(rank)
        counts = [threads()]
        assert watch_ranks() is current_watch()
        counts.append(threads())
        watch = current_watch()
        assert watch is not None
        groups.destroy()
        watch.end()
        counts.append(threads())
        return counts

    assert run_world(2, world, init_group=False) == [[1, 1, 0]] * 2


def test_other_sockets_of_the_process_do_not_matter() -> None:
    """Those of pipes between processes, event loops and MPI have no name, or one that is a path."""

    def world(rank: int) -> bool:
        ends = socket.socketpair()
        groups = _connect(rank)
        groups.control.barrier()
        ends[0].sendall(b"1")
        return ends[1].recv(1) == b"1"

    assert all(run_world(2, world, init_group=False))


@pytest.mark.timing
def test_looking_at_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No garbage collection begins meanwhile: see [Note: stacks of other threads] of the watch."""
    scope: dict[str, Any] = {}
    source = "def all_reduce(begun, over):\n    begun.set()\n    over.acquire()\n"
    exec(compile(source, dist.distributed_c10d.__file__, "exec"), scope)  # as if it waited in a collective
    begun, over = threading.Event(), threading.Lock()
    over.acquire()
    thread = threading.Thread(target=scope["all_reduce"], args=(begun, over))
    thread.start()
    begun.wait()
    assert thread.ident is not None
    stacks, looks, collected = _Stacks(thread.ident), [False], list[str]()
    frames, enable, before = sys._current_frames, gc.enable, gc.get_threshold()

    def looking() -> Any:
        looks[0] = True
        gc.set_threshold(1)
        return frames()

    def over_now() -> None:
        looks[0] = False
        enable()

    monkeypatch.setattr(sys, "_current_frames", looking)
    monkeypatch.setattr(gc, "enable", over_now)
    gc.callbacks.append(lambda phase, info: collected.append(phase) if looks[0] else None)
    try:
        lines = [line.file for line in stacks.written()[thread.ident] if line.function == "all_reduce"]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert stacks.wait() is None  # of no group
    over.release()
    thread.join()
    assert lines == [dist.distributed_c10d.__file__]
    assert not collected
    assert gc.isenabled()


@pytest.mark.timing
@pytest.mark.parametrize("runs", [False, True])
def test_a_thread_that_has_work_to_do_waits_for_nobody(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may stand where it has waited, after what it waited for has come."""
    computes = partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 10_000_000)  # without Python's lock
    thread = threading.Thread(target=computes if runs else partial(select.poll().poll, 2000), daemon=True)
    thread.start()
    assert thread.ident is not None
    stacks, here = _Stacks(thread.ident), {threading.get_ident(): list[_Line]()}
    monkeypatch.setattr(stacks, "written", lambda: {thread.ident: [_Line(_LINKS, 1, "receive")], **here})
    monkeypatch.setattr(stacks, "_noted", lambda lines: "a wait")
    found = []
    for _ in range(20):
        time.sleep(0.05)
        found.append(stacks.wait())
    assert found == [None if runs else "a wait"] * 20


@pytest.mark.timing
def test_looking_while_threads_of_c_come_and_go() -> None:
    """Python 3.11 lists a thread before it is complete: what looks at all threads without its lock dies within 5 s."""

    def world(rank: int) -> int:
        libc, over, come = ctypes.CDLL(None), threading.Event(), [0]

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def comes(_: Any) -> None:
            come[0] += 1

        def go() -> None:
            thread = ctypes.c_void_p()
            while not over.is_set():
                libc.pthread_create(ctypes.byref(thread), None, comes, None)
                libc.pthread_join(thread, None)

        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        stacks, end = _Stacks(threading.get_ident()), time.monotonic() + 8.0
        while time.monotonic() < end:
            assert threading.get_ident() in stacks.written()
        over.set()
        for thread in threads:
            thread.join()
        return come[0]

    assert run_world(1, world)[0] > 1000
