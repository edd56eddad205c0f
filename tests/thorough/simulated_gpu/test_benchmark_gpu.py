"""``benchmarks/gpu.py`` runs the same code on a CPU at a small size, and says so where there is no GPU."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.script import run_script
from tests.helpers.world import ROOT, die_with_parent, run_world, subprocess_env

BENCHMARKS = ROOT / "benchmarks"
WAYS = ["plain", "zero1", "zero3", "fsdp2"]


def printed_by(rank: int, script: str, *arguments: str) -> str:
    """What a benchmark prints. In a process of its own, which saves the imports of a script."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(BENCHMARKS))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    return printed.getvalue()


def numel_of(rank: int, width: int, layers: int) -> int:
    """Parameters of the benchmark's model."""
    sys.path.insert(0, str(BENCHMARKS))
    return int(importlib.import_module("offload_training").numel_of(width, layers))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    (printed,) = run_world(1, printed_by, "gpu.py", f"--output={tmp_path}", init_group=False)

    assert "no GPU here" in printed
    assert not list(tmp_path.iterdir())


def test_a_table_of_both_worlds_on_the_cpu(tmp_path: Path) -> None:
    size = ["--width=32", "--layers=2", "--tokens", "1", "8", "--rounds=1", "--steps=1", "--backend=eager"]
    arguments = [*size, "--device=cpu", f"--output={tmp_path}", "--ways", *WAYS, "--modes", "eager", "--peak-tflops=1"]
    (printed,) = run_world(1, printed_by, "gpu.py", *arguments, init_group=False, timeout=120)
    found = json.loads((tmp_path / "gpu.json").read_text())
    (numel,) = run_world(1, numel_of, 32, 2, init_group=False)
    rows = {(row["world_size"], row["way"]): row for row in found["rows"]}

    assert list(rows) == [(size, way) for size in (1, 8) for way in WAYS]
    assert len([line for line in printed.splitlines() if line.lstrip().startswith("eager")]) == len(rows)
    assert {"processor", "torch", "date", "command"} <= found["machine"].keys()
    assert (tmp_path / "gpu.svg").exists() == (find_spec("matplotlib") is not None)
    for (world_size, way), row in rows.items():
        assert row["kernels"] > row["moves"] > 0
        # 6 FLOPs for each parameter and token, and 12 x 2 layers x 32 x 8 tokens for the attention.
        per_token = 6 * numel + 12 * 2 * 32 * 8
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * per_token / 1e12)
        assert row["tokens_per_second"] == pytest.approx(8 / row["seconds"][0])
        assert (row["plan_nbytes"] is not None) == way.startswith("zero")
        if world_size == 1:  # the same training: bf16 rounds differently under autocast than in bf16 parameters
            assert row["loss_difference"] < 1e-3
    # One rank of eight holds an eighth of what is sharded.
    assert rows[8, "zero3"]["plan_nbytes"] < rows[1, "zero3"]["plan_nbytes"] / 2
    # A fused optimizer makes nothing in its step: at the peak there is the gradient of the weight that embedding and
    # head share, in bfloat16. Beside it, weights, masters, gradients and state are 18 bytes a parameter.
    assert rows[1, "zero1"]["plan_nbytes"] == pytest.approx(18 * numel + 2 * 8192 * 32, rel=0.01)


FIRST_LOOK = [str(BENCHMARKS / "gpu.py"), "--first-look", "--device=cpu", "--tiny"]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What was found so far. Each line is whole, whenever the program was killed."""
    written = folder / "first_look.jsonl"
    return [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []


@pytest.mark.timeout(900)
def test_the_first_look_finds_something_in_every_stage(tmp_path: Path) -> None:
    """It takes seventy seconds of processor time, mostly for imports."""
    run_script([*FIRST_LOOK, "--minutes=50", f"--output={tmp_path}"], cwd=tmp_path, timeout=850)
    found = lines_of(tmp_path)
    ended = [line["stage"] for line in found if line["what"] == "the stage"]
    assert ended == ["tests", "ways", "nccl", "trace", "offload", "compiled"]
    assert not [line for line in found if "failed" in line]
    by_stage = {stage: {line["what"]: line for line in found if line["stage"] == stage} for stage in ended}
    assert "passed" in {line.get("outcome") for line in by_stage["tests"].values()}
    for stage, worlds in (("ways", (8, 1)), ("compiled", (8,))):
        for world, way in ((world, way) for world in worlds for way in WAYS):
            line = by_stage[stage][f"tiny, world {world}, {way}"]
            assert line["issue_ms"].keys() == line["device_ms"].keys() == {"forward", "backward", "step"}
            assert (line["plan_nbytes"] is not None) == way.startswith("zero")
    for world in (1, 2):
        beside = by_stage["nccl"][f"world {world}, ddp"]
        assert max(beside["zero1_difference"], beside["zero3_difference"]) < 1e-6
        assert {by_stage["nccl"][f"world {world}, {name}"]["resumed_difference"] for name in ("zero1", "zero3")} == {0}
    assert all((tmp_path / f"trace-{way}.json.gz").stat().st_size > 1000 for way in WAYS)
    losses = {by_stage["offload"][name]["loss"] for name in ("no offload", "host", "host, parameters")}
    assert len(losses) == 1


def commands() -> list[str]:
    """Of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the stage goes on")
def test_a_first_look_that_is_killed_leaves_what_it_found_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, *FIRST_LOOK, "--minutes=50", f"--output={tmp_path}", "--stages", "trace"]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    program = subprocess.Popen(command, env=subprocess_env(), preexec_fn=die_with_parent, **options)
    end = time.monotonic() + 200
    while len(lines_of(tmp_path)) < 2 and time.monotonic() < end:  # the stage's first line, and a way's
        time.sleep(0.1)
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    assert [line["what"] for line in lines_of(tmp_path)][1:2] == ["plain"]
    while any(str(tmp_path) in command for command in commands()) and time.monotonic() < end:
        time.sleep(0.1)
    assert time.monotonic() < end


def stages_ended(rank: int, folder: Path) -> None:
    """A stage that ends, one that crashes, and one that hangs with a process that it started."""
    sys.path.insert(0, str(BENCHMARKS))
    first_look = importlib.import_module("first_look")

    class Played(first_look.Look):  # type: ignore[misc, name-defined]
        def command(self, *arguments: str) -> list[str]:
            waits = "import time; time.sleep(60)"
            hangs = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {waits!r}, {str(folder)!r}])"
            return [sys.executable, "-c", {"ways": "pass", "nccl": "raise SystemExit(3)", "trace": hangs}[self.stage]]

    look = Played("ways", "cpu", True, folder, 3.0)
    for stage in ("nccl", "trace", "ways"):
        first_look.run_stage(replace(look, stage=stage, seconds=60.0 if stage != "trace" else 3.0))


def test_a_stage_that_crashes_or_hangs_costs_no_other(tmp_path: Path) -> None:
    run_world(1, stages_ended, tmp_path, init_group=False)
    crashed, hung, well = lines_of(tmp_path)
    assert crashed["failed"] == "ended with 3"
    assert hung["failed"] == "not done after 3 seconds"
    assert well["ended"] == "well"
    assert not any(str(tmp_path) in command for command in commands())


def test_the_largest_model_is_between_one_that_trains_and_one_that_does_not(tmp_path: Path) -> None:
    size = [
        "--width=256",
        "--memory-mib=300",
        "--ways=none",
        "--tokens",
        "1",
        "8",
        "--precision=32-true",
        "--within=0.5",
    ]
    (printed,) = run_world(
        1, printed_by, "largest.py", "--device=cpu", *size, f"--output={tmp_path}", init_group=False, timeout=250
    )
    tries = json.loads((tmp_path / "largest.json").read_text())["tries"]

    trained = [tried for tried in tries if tried["trained"]]
    assert trained, printed
    assert len(trained) < len(tries), printed
    assert max(tried["plan_nbytes"] for tried in trained) < 300 * 2**20
    assert "parameters trained" in printed
