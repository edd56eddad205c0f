"""The rung of a test is found in its code, and a test of the lowest rung can do no more than it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.rungs import RUNGS, forbid_processes
from tests.helpers.waiting import until
from tests.helpers.world import run_world


def nothing(rank: int) -> None: ...


class Indirect:
    def there(self) -> None:
        run_world(1, nothing, init_group=False)


@pytest.fixture
def world() -> None:
    run_world(1, nothing, init_group=False)


def rung(request: pytest.FixtureRequest) -> str:
    (found,) = {mark.name for mark in request.node.iter_markers()} & set(RUNGS)
    return found


def test_most_are_pure(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "pure"


def test_who_forks_through_a_method_is_not(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "world"
    Indirect().there()


@pytest.mark.usefixtures("world")
def test_who_forks_in_a_fixture_is_not(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "world"


@pytest.mark.parametrize("deed", [Indirect])
def test_who_forks_by_a_parameter_is_not(deed: type[Indirect], request: pytest.FixtureRequest) -> None:
    assert rung(request) == "world"


def test_who_starts_a_program_is_a_script(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "script"
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_who_reads_the_clock_measures(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "timing"
    assert time.monotonic() > 0


def test_who_waits_does_not_measure(request: pytest.FixtureRequest) -> None:
    assert rung(request) == "pure"
    assert until(lambda: True, seconds=1)
    assert not until(lambda: False, seconds=0.01)


@pytest.mark.pure
def test_the_lowest_rung_is_guarded(tmp_path: Path) -> None:
    with forbid_processes():
        for deed in (
            lambda: os.fork(),
            lambda: subprocess.run([sys.executable, "-c", ""], check=True),
            lambda: run_world(1, nothing),
            lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
        ):
            with pytest.raises(AssertionError, match="`pure` starts a process"):
                deed()
