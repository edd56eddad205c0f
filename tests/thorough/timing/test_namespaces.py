"""Bytes that leave a host, by the counters of its link: hosts are network namespaces here, which takes root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.script import ROOT, run_script


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux" or os.geteuid():
        return "takes Linux, and root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "takes `ip` and `tc`"
    name = f"lztest{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


def test_a_host_sends_what_it_has_summed_up(tmp_path: Path) -> None:
    """Four bytes per parameter in `zero1` and `zero2`, by two hosts of three ranks, and within 3 %, headers included.

    With two and four ranks the sockets are asked (``test_wire_bytes.py``).
    """
    if reason := missing():
        pytest.skip(reason)
    program = [str(ROOT / "benchmarks" / "network.py"), "--model", "1m", "--rates", "10gbit", "--rounds", "3"]
    engines = ["zero1", "zero2", "zero3"]
    printed = run_script([*program, "--ranks", "3", "--engines", *engines], cwd=tmp_path).stdout
    found = dict(re.findall(r"^(zero\d) +([\d.]+)", printed, re.MULTILINE))
    assert found.keys() == set(engines), printed
    assert all(float(found[name]) == pytest.approx(4.0, rel=0.03) for name in ("zero1", "zero2")), printed
    assert 4.0 < float(found["zero3"]) < 6.0 * 1.03


BOTH_WAYS = """
import sys, time
from functools import partial

sys.path.insert(0, {benchmarks!r})
import network, torch
from lightning_zero.comm import GlooCollectives, Groups, Streams
from worlds import World


def train(turns):
    wire = GlooCollectives(Groups.create("gloo"), Streams(torch.device("cpu")))
    full, shard, seconds = torch.ones(2**20), torch.empty(2**19), {{}}  # 2 MiB each way

    def least(transfer):
        found = []
        for _ in range(5):
            wire.groups.control.barrier()
            time.sleep(0.1 * wire.rank)
            begin = time.perf_counter()
            transfer().wait()
            found.append(time.perf_counter() - begin)
        return min(found)

    turns.at_end = lambda: seconds
    while turns.more():
        seconds["gather"] = least(lambda: wire.all_gather(full, "weights"))
        seconds["reduction"] = least(lambda: wire.reduce_scatter(full, shard, "gradients"))
        turns.note(torch.zeros(()))


with network.hosts(2, "50mbit"):
    world = World(2, train, enter=partial(network.enter, 1))
    try:
        late = world.turn(0)[1].extra
    finally:
        world.close()
print(late["reduction"] / late["gather"])
"""


@pytest.mark.timing
def test_a_late_rank_sends_and_receives_at_once(tmp_path: Path) -> None:
    """A reduction between two hosts takes as long as a gather of the same bytes, and not twice as long."""
    if reason := missing():
        pytest.skip(reason)
    program = tmp_path / "both_ways.py"
    program.write_text(BOTH_WAYS.format(benchmarks=str(ROOT / "benchmarks")))
    assert float(run_script([str(program)], cwd=tmp_path).stdout.split()[-1]) < 1.5
