"""The example with a loop of its own: started by Fabric, gone on with by other processes, and what it learns."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.script import ROOT, run_forked, run_script

EXAMPLE = str(ROOT / "examples" / "fabric_loop.py")


def test_fabric_starts_it_and_others_go_on(tmp_path: Path) -> None:
    begun = run_script([EXAMPLE, "--steps=3", "--checkpoint=run.ckpt"], cwd=tmp_path)
    assert "after 3 steps" in begun.stdout
    assert (tmp_path / "run.ckpt" / "zero.json").exists()
    assert "Warning" not in begun.stderr, begun.stderr

    again = ["--checkpoint=run.ckpt", "--precision=bf16-mixed"]
    one = run_forked([EXAMPLE, *again, "--steps=5", "--strategy=zero2_offload", "--devices=1"], cwd=tmp_path)
    assert "goes on after 3 steps" in one.stdout
    three = run_forked([EXAMPLE, *again, "--steps=6", "--strategy=zero1", "--devices=3"], cwd=tmp_path, ranks=3)
    assert three.stdout.count("goes on after 5 steps") == three.stdout.count("after 6 steps") == 1


def test_it_learns(tmp_path: Path) -> None:
    learnt = run_forked([EXAMPLE, "--steps=200", "--devices=1"], cwd=tmp_path)
    (share,) = re.findall(r"after 200 steps (\d+\.\d)% of new points are told right", learnt.stdout)
    assert float(share) > 95


def test_help(tmp_path: Path) -> None:
    assert "--accumulate" in run_forked([EXAMPLE, "--help"], cwd=tmp_path).stdout
