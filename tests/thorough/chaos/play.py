"""Play a case: a run that a fault disturbs, what it leaves behind, and the run that goes on from its checkpoint."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_zero.comm.native import SWITCH
from tests.helpers.waiting import until
from tests.helpers.world import WorldError, run_world
from tests.thorough.chaos.faults import FAULTS
from tests.thorough.chaos.processes import Orphans
from tests.thorough.chaos.run import LOADING, Scene, as_a_program

__all__ = ["Case", "Verdict", "play", "undisturbed"]

DEADLINE = 90.0  # of a run
BOUND = 30.0  # from the fault until all others have ended; most take a second, on a machine that does nothing else


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault of a kind at one place of one rank, in a run with these settings."""

    fault: str
    place: str
    step: int = 3
    victim: int = 1
    ranks: int = 2
    stage: int = 3
    shared_memory: bool = True
    asynchronous: bool = False
    offload: str = ""
    point: int = 0

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks it happens to."""
        return tuple(range(self.ranks)) if FAULTS[self.fault].everywhere else (self.victim,)

    def __str__(self) -> str:
        wire = "memory" if self.shared_memory else "gloo"
        save = "async" if self.asynchronous else "sync"
        parts = [self.fault, self.place, f"zero{self.stage}", f"{self.victim}of{self.ranks}", wire, save, self.offload]
        return "-".join(filter(None, parts)).replace(" ", "_") + (f"-{self.point}" if self.point else "")


@dataclass
class Verdict:
    """What became of a case; ``wrong`` is what should not have been."""

    case: Case
    ended: bool = False  # with an error on every other rank; else the run went on
    named: bool = False  # the victim, by the others
    seconds: float = 0.0  # from the fault until the last of the others had ended
    message: str = ""
    left: list[str] = field(default_factory=list)
    resumed_from: int = -1
    same: bool = False
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


Reports = dict[int, dict[str, Any]]


def play(case: Case) -> Verdict:
    """Play a case. Whatever it starts has ended when it returns."""
    verdict, fault = Verdict(case), FAULTS[case.fault]
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    saved = folder / "saved"
    try:
        saved.mkdir()
        (folder / "files").mkdir()
        with Orphans() as orphans, _disk(saved) if fault.disk else nullcontext():
            calm = Scene(folder, case.stage, case.offload, case.asynchronous, workers=fault.workers)
            if case.place in LOADING:
                _world(case, replace(calm, stop=4))
                shutil.copytree(saved, folder / "kept", symlinks=True)
            scene = replace(
                calm, act=fault.act, place=case.place, step=case.step, victims=case.victims, point=case.point,
                older=str(saved / "epoch=0-step=2.ckpt") if fault.older else None, timeout=fault.timeout,
            )  # fmt: skip
            if fault.damage is not None:
                fault.damage(saved / "last.ckpt")
            began = time.monotonic()
            reports, failures = _world(case, scene)
            _judge(verdict, scene, reports, failures, began)
            if not until(lambda: not orphans.living() and not _shared(folder), 12):
                verdict.left += [*orphans.living(), *_shared(folder)]
            (saved / "filler").unlink(missing_ok=True)
            if fault.damage is not None:
                shutil.rmtree(saved)
                (folder / "kept").rename(saved)
            _go_on(verdict, calm)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdict.wrong += [f"left behind: {name}" for name in verdict.left]
    return verdict


def _world(case: Case, scene: Scene) -> tuple[Reports, dict[int, str]]:
    """What the ranks of one run reported; and those that did not return, with why."""
    environment = {} if case.shared_memory else {SWITCH: "0"}
    failures = {}
    for path in (*scene.folder.glob("report.*"), *scene.folder.glob("struck.*")):
        path.unlink()
    (scene.folder / "names").write_text(json.dumps(os.listdir("/dev/shm")))
    try:
        options: Any = {"init_group": False, "environment": environment, "grace": DEADLINE / 2}
        run_world(case.ranks, as_a_program, scene, timeout=DEADLINE, **options)
    except WorldError as error:
        failures = {rank: f"{why.type} {why.message} {why.traceback}" for rank, why in error.failures.items()}
    reports = {int(path.suffix[1:]): json.loads(path.read_text()) for path in scene.folder.glob("report.*")}
    return reports, failures


def _judge(verdict: Verdict, scene: Scene, reports: Reports, failures: dict[int, str], began: float) -> None:
    case, fault = verdict.case, FAULTS[verdict.case.fault]
    struck = scene.folder / f"struck.{case.victim}"
    if struck.exists():
        began = float(struck.read_text())
    elif fault.act is not None:
        verdict.wrong.append(f"no fault happened: {reports} {failures}")
        return
    expected = undisturbed(case.ranks, case.stage, case.shared_memory)
    others = [rank for rank in range(case.ranks) if rank not in case.victims or fault.damage is not None]
    for rank in range(case.ranks):
        if rank in failures and not (rank in case.victims and fault.dies):
            verdict.wrong.append(f"rank {rank} did not end by itself: {failures[rank]}")
        elif rank in reports and "ended" not in reports[rank]:
            verdict.wrong.append(f"rank {rank} did not end in good order")
    moments = [reports[rank].get("ended", began) for rank in others if rank in reports]
    verdict.seconds = round(max(moments, default=began) - began, 2)
    if fault.told and verdict.seconds > BOUND:
        verdict.wrong.append(f"it took {verdict.seconds} s")
    errors = [reports[rank]["error"] for rank in others if rank in reports]
    verdict.message, verdict.ended = "\n".join(dict.fromkeys(errors))[:2000], all(errors)
    verdict.named = all(re.search(rf"\brank {case.victim}\b", error, re.IGNORECASE) for error in errors)
    ends = bool(fault.told) and not (fault.harmless and not any(errors))
    for rank, report in reports.items():
        losses = report["losses"]
        while report["error"] and losses and losses[-1] != losses[-1]:
            losses = losses[:-1]  # of a step that could not be computed, as everybody sees
        first = 4 if case.place in LOADING else 0
        if losses != expected[rank]["losses"][first : first + len(losses)]:
            verdict.wrong.append(f"rank {rank} computed other losses")
        if not ends and (report["error"] or report["weights"] != expected[rank]["weights"]):
            verdict.wrong.append(f"rank {rank} did not go on: {report['error']}")
        if ends and rank in others and not re.search(fault.told, report["error"]):
            verdict.wrong.append(f"rank {rank} says {report['error']!r}")


def _go_on(verdict: Verdict, calm: Scene) -> None:
    """The same program again, with ``ckpt_path="last"``: it ends as if nothing had been, and leaves nothing."""
    case = verdict.case
    reports, failures = _world(case, calm)
    verdict.wrong += [f"the resumed run failed: {report['error']}" for report in reports.values() if report["error"]]
    verdict.wrong += [f"the resumed run failed: {failure}" for failure in failures.values()]
    if not verdict.wrong:
        expected = undisturbed(case.ranks, case.stage, case.shared_memory)
        verdict.resumed_from = len(expected[0]["losses"]) - len(reports[0]["losses"])
        verdict.same = all(
            report["losses"] == expected[rank]["losses"][verdict.resumed_from :]
            and report["weights"] == expected[rank]["weights"]
            for rank, report in reports.items()
        )
        verdict.wrong += [] if verdict.same else ["the resumed run computed something else"]
    verdict.left += [f"saved/{path.name}" for path in (calm.folder / "saved").iterdir() if path.name[0] == "."]
    verdict.left += [f"files/{path.name}" for path in (calm.folder / "files").iterdir()]


@functools.cache
def undisturbed(ranks: int, stage: int, shared_memory: bool) -> Reports:
    """What the ranks report of a run in which nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        case = Case(fault="none", place="", ranks=ranks, stage=stage, shared_memory=shared_memory)
        reports, failures = _world(case, Scene(Path(name), stage))
    assert not failures, failures
    assert not any(report["error"] for report in reports.values()), reports
    return reports


# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """A small disk; it takes the right to mount one."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _shared(folder: Path) -> list[str]:
    """Names of shared memory that were not there before, but those that torch gives to a loader's workers."""
    new = {*os.listdir("/dev/shm")} - {*json.loads((folder / "names").read_text())}
    return sorted(name for name in new if not name.startswith("torch_"))
