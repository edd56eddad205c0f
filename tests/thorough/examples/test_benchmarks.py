"""How the benchmarks put together what they measured. That they run is what ``test_docs.py`` shows."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.script import ROOT


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark(monkeypatch, "results")


@pytest.fixture
def step_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark(monkeypatch, "step_time")


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark(monkeypatch, "worlds")


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where it defines its ZeroRedundancyOptimizer
        return importlib.import_module(name)


def test_a_program_begins_anew_unless_libc_has_its_variables(
    worlds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: begun.append(arguments))
    monkeypatch.setattr(sys, "argv", ["program.py", "--option"])
    monkeypatch.setenv("MALLOC_OF_A_TEST", "2")
    worlds.restart_with({"MALLOC_OF_A_TEST": "1"})
    assert not begun
    worlds.restart_with({"MALLOC_OF_A_TEST": "1", "ANOTHER_OF_A_TEST": "3"})
    expected = {**os.environ, "MALLOC_OF_A_TEST": "1", "ANOTHER_OF_A_TEST": "3"}
    assert begun == [(sys.executable, [sys.executable, "program.py", "--option"], expected)]


def test_rows_of_earlier_runs_stay_with_the_run_they_are_from(tmp_path: Path, results: ModuleType) -> None:
    path = tmp_path / "found.json"
    for run, rows in (("a", {"ddp": 1, "zero1": 2}), ("b", {"ddp": 3, "zero2": 4}), ("c", {"zero3": 5})):
        engines = {name: {"ms": ms} for name, ms in rows.items()}
        results.save(path, [{"numel": 50, "run": run, "engines": engines}], ("numel",))

    (case,) = json.loads(path.read_text())["cases"]
    assert case["run"] == "c"
    assert case["engines"] == {
        "zero1": {"ms": 2, "run": "a"},
        "ddp": {"ms": 3, "run": "b"},
        "zero2": {"ms": 4, "run": "b"},
        "zero3": {"ms": 5},
    }


def test_worlds_that_wait_fit_into_memory_beside_ddp(step_time: ModuleType) -> None:
    # Two ranks of 100 million parameters wait with, in GB: DDP 2 * (0.1 + 1.7) = 3.6, FSDP2 2 * (0.1 + 0.8) = 1.8,
    # zero3 2 * (0.1 + 1.4) = 3.0; and one trains, FSDP2 with 2 * (2.2 - 0.8) = 2.8 more, zero3 with 1.0.
    names = ["fsdp2", "zero3", "fsdp2-whole"]

    assert step_time.groups(names, 10**8, 2, 13.1e9) == [names]
    assert step_time.groups(names, 10**8, 2, 11.3e9) == [["fsdp2", "zero3"], ["fsdp2-whole"]]
    assert step_time.groups(names, 10**8, 2, 11.1e9) == [["fsdp2"], ["zero3"], ["fsdp2-whole"]]
    assert step_time.groups(names, 10**8, 2, 7.7e9) == [["zero3"]]
    assert step_time.groups([], 10**8, 2, 1e9) == [[]]
