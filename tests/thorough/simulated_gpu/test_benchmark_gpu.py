"""``benchmarks/gpu.py`` runs the same code on a CPU at a small size, and says so where there is no GPU."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.helpers.world import ROOT, run_world

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
