"""A fault of each kind in every run, and a thousand with ``pytest -m chaos``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.script import run_forked
from tests.helpers.waiting import until
from tests.helpers.world import ROOT, run_world
from tests.thorough.chaos.cases import cases
from tests.thorough.chaos.faults import FAULTS
from tests.thorough.chaos.play import DEADLINE, Case, play, undisturbed
from tests.thorough.chaos.processes import Orphans, run_program
from tests.thorough.chaos.run import Scene, attempt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
ALL = cases(1000)
QUICK = [replace(case, ranks=2, victim=min(case.victim, 1)) for case in ALL[: len(FAULTS)]]


def hold(case: Case) -> None:
    if case.fault in ("disk full", "no permission") and os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk or to be another user")
    try:
        verdict = play(case)
    except subprocess.CalledProcessError:
        pytest.skip("needs permission to mount")
    assert not verdict.wrong, "\n".join([*verdict.wrong, verdict.message])


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_fault_of_each_kind(case: Case) -> None:
    hold(case)


@pytest.mark.chaos
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_fault(case: Case) -> None:
    hold(case)


def test_the_page_has_a_line_for_each_kind() -> None:
    text = (Path(__file__).parent / "faults.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([^|]+) \| \d", text, re.MULTILINE) == list(FAULTS), (
        "python -m tests.thorough.chaos --page RECORD"
    )


def program(folder: Path, stage: int, victim: int) -> list[str]:
    return ["-m", "tests.thorough.chaos.program", str(folder), str(stage), str(victim)]


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]


def assert_went_on(folder: Path, stage: int) -> None:
    """From a checkpoint, with the numbers of a run that nothing disturbs."""
    for rank, report in enumerate(reports(folder)):
        expected = undisturbed(2, stage, True)[rank]
        assert not report["error"]
        assert report["losses"] == expected["losses"][4:]
        assert report["weights"] == expected["weights"]
    assert not [path for path in (folder / "saved").iterdir() if path.name[0] == "."]


def test_a_rank_that_is_killed_in_another_stage(tmp_path: Path) -> None:
    """What the launchers below start again in stage 3."""
    calm = Scene(tmp_path, stage=1)
    struck = replace(calm, act=lambda _: os.kill(os.getpid(), signal.SIGKILL), place="layer", step=5, victims=(1,))
    options: Any = {"init_group": False, "timeout": DEADLINE, "grace": DEADLINE / 2}
    failures = run_world(2, attempt, struck, expect_failure=True, **options)
    assert {rank: failure.type for rank, failure in failures.items()} == {1: "SIGKILL"}
    run_world(2, attempt, calm, **options)
    assert_went_on(tmp_path, 1)


def test_torchrun_starts_again_and_the_run_goes_on_by_itself(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    with Orphans() as orphans:
        code = run_program([*torchrun, *program(tmp_path, 3, victim=1)], tmp_path / "log")
        assert code == 0, (tmp_path / "log").read_text()
        assert not orphans.living()
    assert (tmp_path / "struck.1").exists()
    assert_went_on(tmp_path, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_the_own_launcher_is_killed(victim: int, tmp_path: Path) -> None:
    """The others end with it, also if it is the one that has started them. Started again, the run goes on.

    Lightning looks every five seconds whether a process that it started is gone, and kills the others then: a rank that
    has not ended with its error by that moment has none to report.
    """
    with Orphans() as orphans:
        code = run_program(program(tmp_path, 3, victim), tmp_path / "log")
        assert code in ((1, -signal.SIGKILL) if victim else (-signal.SIGKILL,)), (tmp_path / "log").read_text()
        assert until(lambda: not orphans.living(), 30), orphans.living()
        if code == 1 or not victim:
            report = json.loads((tmp_path / f"report.{1 - victim}").read_text())
            assert re.match(r"CommunicationError: Rank \d: .* did not complete", report["error"])
        run_forked(program(tmp_path, 3, victim), cwd=ROOT, ranks=2)  # the launcher has been seen above
    assert_went_on(tmp_path, 3)
