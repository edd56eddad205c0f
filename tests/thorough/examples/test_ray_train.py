"""The example for Ray Train, on a cluster of this machine: what it learns, and what it reports."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from tests.helpers.script import ROOT, run_forked, run_script

EXAMPLE = str(ROOT / "examples" / "ray_train.py")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
@pytest.mark.timeout(500)
def test_two_workers_train_and_report(tmp_path: Path) -> None:
    done = run_script([EXAMPLE, "--epochs=2", "--storage=runs"], cwd=tmp_path, timeout=250.0)
    ((loss, path),) = re.findall(r"loss (\S+) after 64 steps: (.+)$", done.stdout, re.MULTILINE)
    assert float(loss) < 0.5  # guesses have 2.3
    saved = open_checkpoint(Path(path, "checkpoint.ckpt"), ControlGroup(None))
    assert saved["global_step"] == 64


def test_help(tmp_path: Path) -> None:
    assert "--workers" in run_forked([EXAMPLE, "--help"], cwd=tmp_path).stdout


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="the extra `ray` is installed")
def test_without_ray_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    stderr = run_forked([EXAMPLE], cwd=tmp_path, code=1).stderr
    assert stderr == "ray_train.py: error: Ray Train is not installed: pip install 'lightning-zero[ray]'\n"
