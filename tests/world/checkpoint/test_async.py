"""What is saved in the background is the state at the call, and no failure and no process exit loses it."""

from __future__ import annotations

import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.checkpoint import FlatShard, save_checkpoint_directory
from lightning_zero.checkpoint.background import Saver
from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.errors import CheckpointError
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify
from tests.helpers.waiting import until
from tests.helpers.world import run_world

Write = Callable[[Mapping[str, Any], ControlGroup], None]


def to(path: Path, before: Callable[[], object] = lambda: None) -> Write:
    def write(content: Mapping[str, Any], ranks: ControlGroup) -> None:
        before()
        save_checkpoint_directory(content, path, ranks, plan_summary={})

    return write


def start(saver: Saver, path: Path, version: int, before: Callable[[], object] = lambda: None) -> None:
    content = checkpoint(version, end_to_end, control())
    saver.save(to(path, before), content, what=f"save '{path}'", asynchronous=True)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Full:
    """A disk that is full for this process: files end at 1000 bytes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        if control().rank == self._rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_training_goes_on_during_the_save_and_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        saver = Saver(control())
        for version in (1, 2):  # the second in memory that is used again
            content = checkpoint(version, end_to_end, control())
            trained = threading.Event()
            saver.save(to(tmp_path / "c", trained.wait), content, what="save", asynchronous=True)
            for shard in content["state_dict"].values():
                if isinstance(shard, FlatShard):
                    shard.local.fill_(-1)
            for state in content["optimizer_states"][0]["state"].values():
                state["exp_avg"].local.fill_(-1)
                state["step"].fill_(-1)
            content["state_dict"]["norm.running_mean"].fill_(-1)
            content["state_dict"]["_extra_state"]["v"] = -1
            content["optimizer_states"][0]["param_groups"][0]["lr"] = -1
            content["lr_schedulers"][0]["_last_lr"].append(-1)
            content["callbacks"]["History"]["values"].fill_(-1)
            content.clear()
            trained.set()
            saver.wait()
            load_and_verify(tmp_path / "c", version)
        saver.close()

    run_world(2, rank, timeout=30)


def test_a_rank_that_can_start_no_thread_saves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def rank(number: int) -> None:
        saver = Saver(control())
        if number == 1:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        start(saver, tmp_path / "c", 1)
        saver.wait()
        load_and_verify(tmp_path / "c", 1)

    run_world(2, rank, timeout=30)


def test_one_save_is_in_flight_and_saves_are_in_order(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        events: list[str] = []
        saver = Saver(control())
        blocked = threading.Event()

        def save(name: str, before: Callable[[], object]) -> None:
            def write(content: Mapping[str, Any], ranks: ControlGroup) -> None:
                events.append(f"begin {name}")
                before()
                save_checkpoint_directory(content, tmp_path / name, ranks, plan_summary={})
                events.append(f"end {name}")

            content = checkpoint(len(events), end_to_end, control())
            saver.save(write, content, what="save", asynchronous=name != "d")

        save("a", blocked.wait)
        blocked.set()
        for name in ("b", "c", "d"):
            save(name, lambda: None)
        saver.close()
        return events

    expected = [f"{what} {name}" for name in "abcd" for what in ("begin", "end")]
    assert run_world(2, rank, timeout=30) == [expected, expected]


def by_saving(saver: Saver, path: Path) -> None:
    start(saver, path, 9)


def by_waiting(saver: Saver, path: Path) -> None:
    saver.wait()


def by_closing(saver: Saver, path: Path) -> None:
    saver.close()


def test_a_failure_in_the_background_is_raised_once_on_every_rank(tmp_path: Path) -> None:
    def rank(number: int) -> list[str]:
        messages = []
        for surface in (by_saving, by_waiting, by_closing):
            saver = Saver(control())
            start(saver, tmp_path / "c", 1)
            saver.remove(tmp_path / "nothing")
            saver.wait()
            with Full(1):
                start(saver, tmp_path / "c", 2)
                with pytest.raises(CheckpointError) as caught:
                    surface(saver, tmp_path / "other")
            saver.wait()
            control().barrier()
            load_and_verify(tmp_path / "c", 1)
            start(saver, tmp_path / "c", 3)
            saver.close()
            control().barrier()
            load_and_verify(tmp_path / "c", 3)
            control().barrier()
            messages.append(str(caught.value))
        return messages

    first, second = run_world(2, rank, timeout=60)
    assert first == second
    for message in first:
        assert "failed on rank 1" in message
        assert "File too large" in message
        assert f"save '{tmp_path / 'c'}' in the background" in message
    assert names(tmp_path) == {"c"}


def test_a_failure_is_raised_where_nothing_can_be_written_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> None:
            raise ValueError("I/O operation on closed file")

    def fail(*_: object) -> None:
        raise CheckpointError("no space left")

    noted = list[object]()
    monkeypatch.setattr(threading, "excepthook", lambda told: noted.append(told.exc_value))
    saver = Saver(ControlGroup(None))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", Closed())
        saver.save(fail, {}, what="save 'c'", asynchronous=True)
        underway = saver._underway
        assert underway is not None
        assert str(underway[1].exception(20)) == "no space left"
        assert until(lambda: noted, 20)
    with pytest.raises(CheckpointError, match="no space left"):
        saver.wait()


def test_a_removal_waits_until_the_next_save_and_is_dropped_with_a_failed_one(tmp_path: Path) -> None:
    def rank(number: int) -> list[set[str]]:
        seen: list[set[str]] = []

        def look() -> None:
            control().barrier()
            seen.append(names(tmp_path))
            control().barrier()

        saver = Saver(control())
        start(saver, tmp_path / "a", 1)
        start(saver, tmp_path / "b", 2)
        saver.remove(tmp_path / "a")
        saver.wait()
        look()  # b is there, but only the next save knows
        start(saver, tmp_path / "c", 3)
        saver.remove(tmp_path / "b")
        saver.wait()
        look()
        with Full(1):
            start(saver, tmp_path / "d", 4)
            saver.remove(tmp_path / "c")
            with pytest.raises(CheckpointError):
                saver.wait()
        start(saver, tmp_path / "e", 5)
        saver.wait()
        look()
        saver.remove(tmp_path / "c")
        saver.close()
        look()
        return seen

    expected = [{"a", "b"}, {"b", "c"}, {"c", "e"}, {"e"}]
    assert run_world(2, rank, timeout=30) == [expected, expected]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_name_that_is_removed_and_saved_again_is_there(tmp_path: Path, asynchronous: bool) -> None:
    saver = Saver(control())
    for version in (1, 2):
        content = checkpoint(version, end_to_end, control())
        saver.save(to(tmp_path / "c"), content, what="save", asynchronous=asynchronous)
        if version == 1:
            saver.remove(tmp_path / "c")
    saver.close()
    load_and_verify(tmp_path / "c", 2)


def test_what_cannot_be_deleted_is_a_warning_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").touch()
    for asynchronous in (True, False):
        saver = Saver(control())
        saver.remove(tmp_path / "results")
        content = checkpoint(1, end_to_end, control())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.save(to(tmp_path / "c"), content, what="save", asynchronous=asynchronous)
            saver.close()
        said = [str(warning.message) for warning in caught if warning.category is not ResourceWarning]
        assert len(said) == 1, said
        assert "results' was not deleted: IsADirectoryError" in said[0]
        load_and_verify(tmp_path / "c", 1)
    assert (tmp_path / "results" / "thesis.tex").exists()


def wait_alone(saver: Saver) -> None:
    if saver._underway is not None:
        saver._underway[1].exception()
    saver._underway = None


class Uncopyable:
    """Can be written but not copied."""

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise TypeError("no copy of this")


def test_what_one_rank_cannot_copy_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def rank(number: int) -> str:
        saver = Saver(control())
        start(saver, tmp_path / "a", 1)
        saver.remove(tmp_path / "a")
        content = checkpoint(2, end_to_end, control())
        if number == 1:
            content["odd"] = Uncopyable()
        with pytest.raises(CheckpointError) as caught:
            saver.save(to(tmp_path / "c"), content, what="save 'c'", asynchronous=True)
        control().barrier()
        assert names(tmp_path) == {"a"}
        control().barrier()
        saver.save(to(tmp_path / "c"), content, what="save 'c'", asynchronous=False)
        saver.close()
        control().barrier()
        load_and_verify(tmp_path / "c", 2)
        return str(caught.value)

    first, second = run_world(2, rank, timeout=30)
    assert first == second
    assert "Could not copy what is needed to save 'c': failed on rank 1." in first
    assert "TypeError on host" in first
    assert "no copy of this" in first
    assert "CheckpointPolicy(async_save=False)" in first


def test_closing_alone_needs_no_other_rank_and_says_what_failed(tmp_path: Path) -> None:
    def rank(number: int) -> list[str]:
        saver = Saver(control())
        start(saver, tmp_path / "a", 1)
        start(saver, tmp_path / "b", 2)
        saver.remove(tmp_path / "a")
        if number == 0:
            saver.close(collective=False)
            assert names(tmp_path) == {"b"}
        wait_alone(saver)  # as an interrupted rank: it has not told anybody
        control().barrier()
        saver = Saver(control())
        with Full(0):
            start(saver, tmp_path / "c", 3)
            saver.remove(tmp_path / "b")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                saver.close(collective=False)
        saver.close()
        return [str(warning.message) for warning in caught]

    for messages in run_world(2, rank, timeout=30):
        assert len(messages) == 1
        assert messages[0].startswith("Could not save")
        assert "in the background" in messages[0]
        assert "failed on rank 0" in messages[0]
    assert names(tmp_path) == {"b"}


def test_training_uses_its_own_groups_during_the_save(tmp_path: Path) -> None:
    def rank(number: int) -> int:
        groups = Groups.create("gloo")
        saver = Saver(groups.checkpoint)
        steps = 0
        for version in (1, 2, 3):
            start(saver, tmp_path / "c", version)
            while groups.control.agree_any(not saver._underway[1].done()):
                steps += 1
                assert groups.control.exchange([number, steps]) == [[0, steps], [1, steps]]
        saver.close()
        load_and_verify(tmp_path / "c", 3)
        return steps

    first, second = run_world(2, rank, timeout=30)
    assert first == second > 0


def test_an_interrupt_while_waiting_loses_neither_the_save_nor_the_removals(tmp_path: Path) -> None:
    """A single process; with others, it is one of many ways for a rank to handle an exception alone."""
    saver = Saver(control())
    start(saver, tmp_path / "a", 1)
    interrupted = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait()

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (it may come at once, or while waiting)
        start(saver, tmp_path / "b", 2, interrupt)
        saver.remove(tmp_path / "a")
        saver.wait()
    interrupted.set()
    saver.remove(tmp_path / "a")
    saver.close(collective=False)
    load_and_verify(tmp_path / "b", 2)
    assert names(tmp_path) == {"b"}
