"""What takes a process of its own to see: how it ends, and how much memory it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.samples import load_and_verify
from tests.helpers.world import subprocess_env

SCRIPT = """
import os, sys, threading
import torch
from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.background import Saver
from tests.helpers.samples import checkpoint, control, end_to_end
from tests.world.checkpoint.test_async import to

folder = sys.argv[1]

def measure():
    flat = torch.ones(40_000_000)  # 153 MiB
    slices = [flat[i * 1_000_000 : (i + 1) * 1_000_000] for i in range(40)]
    content = {"state_dict": {f"p{i}": FlatShard(local, (1000, 1000), 0) for i, local in enumerate(slices)}}

    def extra(asynchronous):
        open("/proc/self/clear_refs", "w").write("5")  # resets the peak
        before = status("VmRSS")
        saver.save(to(f"{folder}/measured"), content, what="save", asynchronous=asynchronous)
        saver.wait()
        return status("VmHWM") - before

    def status(name):
        return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) // 1024

    saver = Saver(control())
    print(extra(False), extra(True), extra(True), flush=True)

def leave(how):
    def before():
        threading.main_thread().join()  # the script has ended
        if how == "fail":
            raise OSError("no space left")

    saver = Saver(control())
    content = checkpoint(1, end_to_end, control())
    saver.save(to(f"{folder}/{how}", before), content, what=f"save '{how}'", asynchronous=True)
    if how == "raise":
        raise SystemExit(3)

for how in ("measure", "return", "raise", "fail"):
    pid = os.fork()
    if pid == 0:
        output = os.open(f"{folder}/{how}.output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        measure() if how == "measure" else leave(how)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes left that saved and ended."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    ended = subprocess.run(command, env=subprocess_env(), capture_output=True, text=True, timeout=100)
    outputs = {path.stem: path.read_text() for path in folder.glob("*.output")}
    assert ended.stdout.split() == ["measure", "0", "return", "0", "raise", "3", "fail", "0"], (ended, outputs)
    return folder


@pytest.mark.parametrize("how", ["return", "raise"])
def test_the_process_ends_when_the_save_is_on_disk(processes: Path, how: str) -> None:
    load_and_verify(processes / how, 1)


def test_a_failure_that_nobody_waited_for_is_printed_when_the_process_ends(processes: Path) -> None:
    assert "Could not save 'fail' in the background: no space left" in (processes / "fail.output").read_text()
    assert not (processes / "fail").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_save_needs_no_memory_but_the_snapshot(processes: Path) -> None:
    now, first, second = map(int, (processes / "measure.output").read_text().split())  # MiB; the state is 153
    assert now < 20
    assert 153 <= first < 153 + 20
    assert second < 20
