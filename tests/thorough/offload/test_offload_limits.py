"""A process that may not have as much memory as the optimizer's state takes trains with files, and only with files."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.helpers.script import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are those of Linux")

MIB = 2**20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What limited processes have found, by stage and kind of offload."""
    folder = tmp_path_factory.mktemp("limited")
    with pytest.MonkeyPatch.context() as patch:
        # What is freed goes back to the system, instead of staying with the C library for later: the limit and the peak
        # are then about what is in use. Otherwise the peak of one and the same run varies by 40 MB.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        patch.setenv("MALLOC_ARENA_MAX", "1")
        arguments = ["-m", "tests.thorough.offload.limited", str(folder), "2", "3"]
        return json.loads(run_script(arguments, cwd=folder, timeout=250).stdout.splitlines()[-1])


@pytest.fixture(params=["2", "3"], ids=["stage 2", "stage 3"])
def limited(request: pytest.FixtureRequest, runs: dict[str, Any]) -> dict[str, Any]:
    return runs[request.param]


def test_state_that_has_no_room_in_memory_is_trained_in_files(limited: dict[str, Any]) -> None:
    found = limited["files"]

    assert found["error"] is None
    # 32 layers of 1024 * 1024 + 1024, two tensors of fp32 each, are more than the whole run is allowed.
    assert found["states"] == 32 * 1025 * 1024 * 2 * 4
    assert found["states"] > found["allowed"]
    assert sum(found["disk"].values()) == found["states"] * 3 // 2  # and the masters; all whole pages
    # The plan's formula. It leaves activations out, and gradients on their way.
    assert 0.9 * found["expected"] < found["peak"] < found["expected"] + 12 * MIB
    assert found["losses"][0] > found["losses"][1]
    assert found["left"] == []


def test_the_same_training_without_files_has_no_room(limited: dict[str, Any]) -> None:
    found = limited["none"]

    assert found["losses"] is None
    assert "alloc" in found["error"], found["error"]
