"""Killed at any moment, also while replacing: every name leads to one checkpoint, whole, and none is lost."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.background import Saver
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, CommunicationError
from tests.helpers.samples import checkpoint, control, end_to_end, verify
from tests.helpers.waiting import until

ENDED_BY_THE_DEATH_OF_ANOTHER = 7


class Progress:
    """The number of the last version that was saved, in memory that processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def version(self) -> int:
        return int(struct.unpack("q", self._memory[:])[0])

    @version.setter
    def version(self, value: int) -> None:
        self._memory[:] = struct.pack("q", value)


def save(saver: Saver, path: Path, version: int, asynchronous: bool) -> None:
    def write(content: Mapping[str, Any], ranks: ControlGroup) -> None:
        save_checkpoint_directory(content, path, ranks, plan_summary={})

    content = checkpoint(version, end_to_end, control())
    saver.save(write, content, what=f"save '{path}'", asynchronous=asynchronous)


def run_until_killed(rank: int, store: Path, folder: Path, first: int, progress: Progress, asynchronous: bool) -> None:
    """As ``ModelCheckpoint(save_top_k=1, save_last=True)``: a new name, the old one away, and the same name again."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    saver = Saver(control())
    for version in range(first, first + 10_000):
        save(saver, folder / f"step={version}.ckpt", version, asynchronous)
        for old in folder.glob("step=*.ckpt"):
            if old.name != f"step={version}.ckpt":
                saver.remove(old)
        save(saver, folder / "last.ckpt", version, asynchronous)
        if rank == 0:
            progress.version = version - asynchronous  # the save in flight may be lost


def fork(rank: int, *arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_until_killed(rank, *arguments)
        except (CommunicationError, CheckpointError):
            code = ENDED_BY_THE_DEATH_OF_ANOTHER
        finally:
            os._exit(code)
    return pid


def ends(pids: list[int], rank: int) -> bool:
    """Whether the rank has ended, which it must by itself."""
    pid, status = os.waitpid(pids[rank], os.WNOHANG)
    if pid:
        pids[rank] = 0
        assert os.waitstatus_to_exitcode(status) == ENDED_BY_THE_DEATH_OF_ANOTHER
    return pid != 0


def kill_in_the_middle(
    store: Path, folder: Path, first: int, progress: Progress, victims: set[int], later: bool
) -> None:
    """Start two ranks, let them save at least once, and kill some of them; the others must end by themselves."""
    pids = [fork(rank, store, folder, first, progress, later) for rank in range(2)]
    try:
        assert until(lambda: progress.version >= first, 20), "no save finished before the kill"
        time.sleep(random.random() * 0.1)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        for rank in {0, 1} - victims:
            assert until(lambda rank=rank: ends(pids, rank), 20), f"rank {rank} waits for the dead one"
    finally:
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def whole(path: Path) -> int:
    """The version of a checkpoint, all of whose parts are of that version."""
    ranks = control()
    loaded = open_checkpoint(path, ranks)
    verify(loaded, loaded["epoch"], end_to_end, ranks)
    return int(loaded["epoch"])


def test_killed_at_any_moment(tmp_path: Path) -> None:
    random.seed(40)
    folder = tmp_path / "run"
    folder.mkdir()
    version = 0
    for kill in range(40):
        progress = Progress()
        victims = random.choice([{0, 1}, {0, 1}, {0}, {1}])
        kill_in_the_middle(tmp_path / f"store{kill}", folder, version + 1, progress, victims, kill % 2 == 1)
        last = whole(folder / "last.ckpt")
        steps = {int(path.stem.removeprefix("step=")): path for path in folder.glob("step=*.ckpt")}
        for step, path in steps.items():
            assert whole(path) == step
        assert last >= progress.version, "a checkpoint that was saved is lost"
        assert max(steps) >= progress.version, "a checkpoint that was saved is lost"
        temporary = [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
        assert not [name for name in temporary if "ckpt" in name or "last" in name]
        version = max(last, *steps)
    saver = Saver(control())
    for path in steps.values():
        saver.remove(path)
    save(saver, folder / "last.ckpt", version + 1, asynchronous=False)
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"last.ckpt"}
    assert len(list((folder / "last.ckpt").iterdir())) == 6  # and no file of another save
    shutil.rmtree(folder)
