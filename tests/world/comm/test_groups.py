"""Agreements between ranks: every rank gets the same answer, or the same error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero import _torch
from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.comm import groups as module
from lightning_zero.comm.control import Met, naming_failures, raising
from lightning_zero.comm.groups import connections, shut, sockets
from lightning_zero.engine.agreement import Agreement
from lightning_zero.errors import CommunicationError, DivergenceError, OffloadError
from tests.helpers.world import run_world


def in_world(world_size: int, function: Callable[[ControlGroup], object]) -> list[object]:
    return run_world(world_size, lambda rank: function(Groups.create("gloo").control), timeout=30)


def test_a_control_group_has_the_connections_it_uses_and_no_more() -> None:
    """To both sides at distances 1, 2 and 4, the last of which is one rank, and one to listen: none for each rank."""

    def run(rank: int) -> tuple[list[int], bool, int]:
        before, environment = len(sockets()), dict(os.environ)
        groups = Groups.create("gloo")
        controls = (groups.control, groups.checkpoint)
        counts = [len(connections[str(control.process_group.group_name)]) for control in controls]  # type: ignore[union-attr]
        made = len(sockets())
        for control in controls:
            control.gather_objects("x" * rank)
            control.any_of(torch.zeros(5, dtype=torch.uint8))
        assert len(sockets()) == made > before
        left_alone, made = dict(os.environ) == environment, len(sockets())
        dist.new_group(backend="gloo")
        return counts, left_alone, len(sockets()) - made

    for counts, left_alone, of_another in run_world(8, run, timeout=60):
        assert counts == [6, 6]
        assert left_alone
        assert of_another == 8  # connected to all, as ever


@pytest.mark.parametrize("apart", [False, True])
def test_shard_groups_are_made_at_once(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for the shard groups, one for the replicas, and one more for reductions, whatever the ranks are."""
    calls, new_group = list[Any](), dist.new_group

    def counted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        calls.append(ranks)
        return new_group(ranks, *args, **kwargs)

    class Control(ControlGroup):
        def agree_any(self, flag: bool) -> bool:
            return flag

    dist.init_process_group("fake", rank=77, world_size=512, store=FakeStore())
    try:
        monkeypatch.setattr(dist, "new_group", counted)
        monkeypatch.setattr(module, "watch_ranks", lambda: None)
        monkeypatch.setattr(module, "_connect", lambda control, timeout, what: None)
        monkeypatch.setattr(module, "ControlGroup", Control)
        groups = Groups.create("fake", timedelta(seconds=30), apart, span=8)
        expected: list[list[int]] = [[*range(72, 80)], [*range(5, 512, 8)], [*range(72, 80)]][: 2 + apart]
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
            expected = [[1]] * (64 + 8 + 64 * apart)  # each rank calls for the groups of all
        assert len(calls) == len(expected)
        assert Groups.create("fake", timedelta(seconds=30), apart, span=8) is groups
        assert len(calls) == len(expected)
        assert groups.across is not None
        for group, ranks in ((groups.gather, range(72, 80)), (groups.reduce, range(72, 80))):
            assert dist.get_process_group_ranks(group) == [*ranks]
        assert dist.get_process_group_ranks(groups.across.gather) == [*range(5, 512, 8)]
        groups.destroy()
    finally:
        dist.destroy_process_group()


def float64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange(world_size: int) -> None:
    """Twice with one length and once with another: rows that are kept between calls do not leak into results."""

    def run(control: ControlGroup) -> list[list[list[int]]]:
        rank = control.rank
        first = control.exchange([rank, -(2**62)])
        second = control.exchange([10 + rank, 5])
        return [first, second, control.exchange([rank] * 3)]

    ranks = range(world_size)
    expected = [[[r, -(2**62)] for r in ranks], [[10 + r, 5] for r in ranks], [[r] * 3 for r in ranks]]
    assert in_world(world_size, run) == [expected] * world_size


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("world_size", [2, 5])
def test_what_each_rank_said_is_sent_where_it_is_not_alike(
    world_size: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks may differ; and of many ranks nobody's row is sent as long as the values are alike."""
    monkeypatch.setattr("lightning_zero.comm.control._FEW_RANKS", few)
    sent: list[int] = []

    def run(control: ControlGroup) -> None:
        rank, swap = control.rank, control._swap

        def counted(mine: torch.Tensor, others: torch.Tensor, distance: int) -> None:
            sent.append(mine.numel())
            swap(mine, others, distance)

        control._swap = counted  # type: ignore[method-assign]
        marks, values = [1 << 2 * rank, 3, int(rank == world_size - 1)], [-(2**63), 7]
        bits = sum(1 << 2 * other for other in range(world_size))
        assert control.meet("a", values, marks) == Met([values], [bits, 3, 1], [False, True, False])
        if not few:
            assert sent == [2 * 8 * control.width] * (world_size - 1).bit_length()
        rows = [[-(2**63), 2**62 + other] for other in range(world_size)]
        assert control.meet("b", rows[rank], marks) == Met(rows, [bits, 3, 1], [False, True, False])
        assert control.exchange(rows[rank] * 9, "c") == [row * 9 for row in rows]
        assert control.gather_objects("x" * rank if rank else None) == [None, *("x" * n for n in range(1, world_size))]
        assert control.gather_objects(None) == [None] * world_size
        with pytest.raises(DivergenceError, match="rank 0: here\n  rank 1: there\n"):
            control.meet("there" if rank % 2 else "here", values, marks)
        with pytest.raises(ValueError, match="here is about 8 numbers, of fewer than 8"):
            control.meet("here", [0] * 8)
        control.barrier()

    in_world(world_size, run)


def test_sums_are_in_rank_order() -> None:
    numbers = [1e16, 1.0, -1e16]  # (1e16 + 1) - 1e16 is 0, 1e16 - 1e16 + 1 would be 1
    assert in_world(3, lambda control: control.total(float64(numbers[control.rank])).tolist()) == [[0.0]] * 3


def test_flags() -> None:
    def run(control: ControlGroup) -> tuple[list[int], bool, bool]:
        flags = torch.tensor([control.rank == 0, control.rank == 1, False], dtype=torch.uint8)
        return control.any_of(flags).tolist(), control.agree_any(control.rank == 1), control.agree_any(False)

    assert in_world(2, run) == [([1, 1, 0], True, False)] * 2


LINES = {
    "equal": (["a", "b"], ["a", "b"], None),
    "second line": (["a", "b", "c"], ["a", "x", "y"], ("b", "x")),
    "longer": (["a"], ["a", "b"], ("(nothing more)", "b")),
    "shorter": (["a", "b"], ["a"], ("b", "(nothing more)")),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_that_differ_name_the_first_difference_on_every_rank(name: str) -> None:
    ours, theirs, difference = LINES[name]

    def run(control: ControlGroup) -> str:
        lines = theirs if control.rank == 2 else ours
        try:
            control.alike("plan", lines)
        except DivergenceError as error:
            return str(error)
        return ""

    for message in in_world(3, run):
        if difference is None:
            assert message == ""
        else:
            assert "Rank 2 has another plan than rank 0" in message
            assert f"rank 0: {difference[0]}\n  rank 2: {difference[1]}\n" in message


def test_rounds_tell_places_apart() -> None:
    def run(control: ControlGroup) -> tuple[list[list[int]], str]:
        agreement = Agreement(control, 3)
        rows = agreement.round("step 1", [control.rank]).rows
        with pytest.raises(DivergenceError) as caught:
            agreement.round("step 2" if control.rank == 0 else "backward 7", [1, 2, 3])
        return rows, str(caught.value)

    for rows, message in in_world(2, run):
        assert rows == [[0, 0, 0], [1, 0, 0]]
        assert "rank 0: step 2\n  rank 1: backward 7\n" in message


def test_one_rank_agrees_with_itself() -> None:
    control = ControlGroup(None)
    assert control.exchange([4, 5]) == [[4, 5]]
    assert control.total(float64(0.5)).tolist() == [0.5]
    assert control.gather_objects("x") == ["x"]
    assert control.agree_any(True)
    assert not control.agree_any(False)
    control.alike("plan", ["a"])
    control.barrier()


def test_failures_get_a_name_and_keep_their_cause() -> None:
    expected = "Rank 3: the sum did not complete: broken pipe"
    with pytest.raises(CommunicationError, match=expected) as caught, naming_failures("the sum", 3):
        raise RuntimeError("broken pipe")
    assert str(caught.value.__cause__) == "broken pipe"


@pytest.mark.parametrize("error", [DivergenceError("x"), CommunicationError("x"), ValueError("x")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_failures("the sum", 0):
        raise error
    assert caught.value is error


def test_one_rank_s_failure_is_raised_on_every_rank_with_its_reason() -> None:
    def run(control: ControlGroup) -> list[str]:
        assert control.together("do nothing", lambda: None) == [None] * 3
        assert control.together("count", lambda: control.rank) == [0, 1, 2]
        messages = []
        for failing in ([1], [1, 2], [0]):
            failure = OSError(f"disk of rank {control.rank}") if control.rank in failing else None
            with pytest.raises(OffloadError) as caught:
                control.together("read its masters", raising(failure), OffloadError, "Resume.")
            assert caught.value.__cause__ is failure
            messages.append(str(caught.value))
        return messages

    for messages in in_world(3, run):
        assert messages[0].startswith("Could not read its masters: failed on rank 1.\n  rank 1: OSError on host ")
        assert messages[0].endswith(": disk of rank 1\nResume.")
        assert messages[1].startswith("Could not read its masters: failed on ranks 1, 2.\n  rank 1: OSError on host ")
        assert "failed on rank 0." in messages[2]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("lr: 0.1234567890", "lr: 0.1234567891", True),  # a cosine on two machines, cut where their last bits differ
        ("lr: 1", "lr: 0.9999999999", True),
        ("betas: [0.9, 1e-05]", "betas: [0.9, 1.000000001e-05]", True),
        ("lr: 0.1", "lr: 0.1001", False),
        ("steps: 9000000001", "steps: 9000000002", False),
        ("parameter 1: 'a.1.weight'", "parameter 1: 'a.2.weight'", False),
        ("lr: 0.1", "decay: 0.1", False),
        ("lr: 0.1", "", False),
    ],
)
def test_lines_that_differ_in_last_digits_are_alike(left: str, right: str, same: bool) -> None:
    def rank(number: int) -> None:
        control = Groups.create().control
        lines = ["first", right if number else left]
        if same:
            control.alike("list", lines)
        else:
            with pytest.raises(DivergenceError, match="Rank 1 has another list than rank 0"):
                control.alike("list", lines)

    run_world(2, rank)


def test_waits_for_a_group_that_is_made_can_be_ended() -> None:
    """Its connections are known while it is made: another rank may fail before it has said what it would."""

    def rank(_: int) -> None:
        ControlGroup.connect, connect = waits, ControlGroup.connect  # type: ignore[method-assign]
        try:
            Groups.create()
        finally:
            ControlGroup.connect = connect  # type: ignore[method-assign]

    def waits(self: ControlGroup) -> None:
        """Rank 1 says nothing more, and rank 0 is told so by its watch, which ends what it waits for."""
        number = torch.zeros(1)
        if self.rank == 1:
            dist.recv(number, group=self.process_group, group_src=0)  # they are connected
            with pytest.raises(RuntimeError):
                dist.recv(number, group=self.process_group, group_src=0)
            raise ValueError("nothing more")
        dist.send(number, group=self.process_group, group_dst=1)
        timer = threading.Timer(0.5, connections.shut, ["another group"])
        timer.start()
        try:
            with pytest.raises(RuntimeError):
                dist.recv(number, group=self.process_group, group_src=1)
        finally:
            timer.join()
        raise ValueError("was told")

    failures = run_world(2, rank, expect_failure=True, timeout=20, grace=15)
    assert [failures[number].message for number in (0, 1)] == ["was told", "nothing more"]


def test_waits_for_a_rank_that_never_connects_end() -> None:
    """Once there is a verdict, or at the timeout: gloo alone would wait five times as long for the other's call. And
    groups that were never completed are given back when the next ones are made."""

    def rank(_: int) -> list[float]:
        store, seconds, connect, sizes = _torch.default_store(), list[float](), ControlGroup.connect, set[int]()

        def connect_alone(self: ControlGroup) -> None:
            assert connections._before is not None
            (place,) = map(shut, dict(sockets().items() - connections._before))  # it only listens by now
            assert place is not None
            port = place[1]
            store.set(f"{len(seconds)} {self.rank}", str(port))
            if port > int(store.get(f"{len(seconds)} {1 - self.rank}")):  # this one would call the other
                store.get(f"{len(seconds)} is over")
                raise CommunicationError("never came")
            timer = threading.Timer(0.5, connections.shut, ["another group"])
            timer.start() if told else None
            try:
                connect(self)
            finally:
                timer.cancel()
                store.set(f"{len(seconds)} is over", "")

        for told in (True, False):
            ControlGroup.connect, begin = connect_alone, time.monotonic()  # type: ignore[method-assign]
            with pytest.raises(CommunicationError):
                Groups.create(timeout=timedelta(seconds=30 if told else 3))
            ControlGroup.connect = connect  # type: ignore[method-assign]
            seconds.append(time.monotonic() - begin)
            groups = Groups.create(timeout=timedelta(seconds=20))
            groups.control.barrier()
            groups.destroy()
            sizes.add(len(dist.distributed_c10d._world.pg_map))
        assert sizes == {1}
        return seconds

    for at_once, at_timeout in run_world(2, rank, timeout=60):
        assert at_once < 10
        assert at_timeout < 12


@pytest.mark.parametrize("failing", [0, 1])
def test_waits_for_a_rank_that_never_connects_to_a_whole_mesh_end(failing: int) -> None:
    """A rank that fails while it makes a group has said where it listens, and connects to nobody. Of two ranks one
    waits for the other's connection, and which one gloo decides: so each fails in turn."""

    class Store(dist.Store):
        """The store, which ``failing`` cannot read."""

        def set(self, key: str, value: Any) -> None:
            store.set(key, value)

        def get(self, key: str) -> Any:
            return store.get(key)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            if dist.get_rank() == failing:
                raise ValueError("fails")
            store.wait(keys)

    def rank(_: int) -> list[float]:
        nonlocal store
        store, seconds = _torch.default_store(), list[float]()
        for _ in range(4):
            begin, timer = time.monotonic(), threading.Timer(0.5, connections.shut, ["another group"])
            with pytest.MonkeyPatch.context() as patch, suppress(ValueError, RuntimeError):
                patch.setitem(dist.distributed_c10d._world.pg_map, dist.group.WORLD, ("gloo", Store()))
                timer.start()
                module.make_group("gloo", timedelta(seconds=10), "parameters", ())
            timer.join()
            seconds.append(time.monotonic() - begin)
        return seconds

    store: Any = None
    assert max(map(max, run_world(2, rank, timeout=60))) < 5  # and not 50
