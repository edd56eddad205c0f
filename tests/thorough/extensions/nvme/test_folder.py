"""Whose folder is it, and what is left of earlier runs."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import NvmeStore, Request
from lightning_zero.extensions.nvme import store as folders
from lightning_zero.extensions.nvme import store as stores
from lightning_zero.extensions.nvme.store import RunFolder, find_leftovers
from tests.helpers.stores import CPU, Disk, io_threads, store
from tests.helpers.world import run_world, subprocess_env

GIB = 1 << 30


def test_it_is_new_private_and_signed(tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        path = Path(opened.folder)
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "data").stat().st_mode & 0o777 == 0o600
        owner = json.loads((path / "owner.json").read_text())
        assert (owner["pid"], owner["rank"], owner["world_size"]) == (os.getpid(), 3, 4)
        assert sorted(os.listdir(path)) == ["data", "owner.json"]
    assert not os.listdir(tmp_path)


def test_a_folder_that_lives_is_no_leftover(tmp_path: Path) -> None:
    with store(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not find_leftovers(str(tmp_path))

        def other(rank: int) -> list[str]:
            with store(tmp_path) as opened:
                return [str(leftover) for leftover in opened.leftovers]

        assert run_world(2, other, init_group=False) == [[], []]


def leave(path: Path, nbytes: int = 1 << 20) -> Path:
    """A folder of a process that was killed, as it left it."""

    def killed(rank: int) -> None:
        opened = NvmeStore(
            str(path), rank=1, world_size=2, buffer_nbytes=1 << 20, io_threads=1, device=CPU, report=False
        )
        opened.allocate(nbytes, torch.uint8, "x").fill(1)
        os.kill(os.getpid(), signal.SIGKILL)

    before = set(path.iterdir())
    assert run_world(1, killed, init_group=False, expect_failure=True)[0].type == "SIGKILL"
    (left,) = set(path.iterdir()) - before
    return left


def test_what_a_killed_process_left_is_reported_and_kept(tmp_path: Path) -> None:
    left = leave(tmp_path)
    with pytest.warns(UserWarning, match="delete them yourself") as caught:
        opened = NvmeStore(str(tmp_path), rank=0, world_size=1, buffer_nbytes=1 << 20, io_threads=1, device=CPU)
    (found,) = opened.leftovers
    assert (found.path, found.dead) == (left, True)
    assert (found.nbytes or 0) >= 1 << 20
    opened.close()
    (message,) = (str(warning.message) for warning in caught)
    assert str(left) in message
    assert "1.0" in message  # MiB, and the owner's file
    assert time.strftime("%Y-%m-%d") in message
    assert sorted(os.listdir(left)) == ["data", "owner.json"]


def test_only_one_rank_reports(tmp_path: Path) -> None:
    left = leave(tmp_path)
    quiet = NvmeStore(
        str(tmp_path), rank=1, world_size=2, buffer_nbytes=1 << 20, io_threads=1, device=CPU, report=False
    )  # a warning would be an error
    assert [found.path for found in quiet.leftovers] == [left]
    quiet.close()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none."""

    class Refusing:
        LOCK_EX, LOCK_SH, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB

        @staticmethod
        def flock(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders, "fcntl", Refusing)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_process_decides(tmp_path: Path) -> None:
    left = leave(tmp_path)
    mine = RunFolder(str(tmp_path), 0, 1)
    assert [(found.path, found.dead) for found in find_leftovers(str(tmp_path))] == [(left, True)]
    owner = mine.path / "owner.json"
    facts = json.loads(owner.read_text())
    owner.write_text(json.dumps(facts | {"started": facts["started"] - 1}))  # the number was given to another process
    assert {found.path for found in find_leftovers(str(tmp_path))} == {left, mine.path}
    mine.remove()


@pytest.mark.usefixtures("without_locks")
def test_of_another_host_nothing_is_known(tmp_path: Path) -> None:
    mine = RunFolder(str(tmp_path), 0, 1)
    other = tmp_path / f"lightning_zero-elsewhere-{os.getpid()}-0123456789ab-rank5"
    other.mkdir()
    (other / "owner.json").write_text("{broken")
    (found,) = find_leftovers(str(tmp_path))
    assert (found.path, found.dead) == (other, False)
    assert "nothing is known" in str(found)
    mine.remove()


def test_a_folder_that_is_being_made_is_no_leftover(tmp_path: Path) -> None:
    young = tmp_path / "lightning_zero-elsewhere-1-0123456789ab-rank0"
    young.mkdir()
    assert not find_leftovers(str(tmp_path))
    long_ago = time.time() - 3600
    os.utime(young, (long_ago, long_ago))
    assert [found.path for found in find_leftovers(str(tmp_path))] == [young]


@pytest.mark.parametrize("name", ["lightning_zero-x", "lightning_zero-data.txt", "other", "lightning_zero-a-b-c-rank0"])
def test_what_only_looks_similar_is_not_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    os.utime(tmp_path / name, (0, 0))
    assert not find_leftovers(str(tmp_path))


def test_what_others_put_into_it_stays_and_is_said(tmp_path: Path) -> None:
    opened = NvmeStore(str(tmp_path), rank=3, world_size=4, buffer_nbytes=1 << 20, io_threads=1, device=CPU)
    (Path(opened.folder) / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"Rank 3: the offloaded files in .* were not removed: Directory not empty"):
        opened.close()
    assert os.listdir(opened.folder) == ["notes.txt"]


def test_a_path_that_cannot_be_used_is_an_error_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in [("missing", "does not exist"), ("file", "is not a directory")]:
        with pytest.raises(OffloadError, match=rf"Rank 3: the offload path '{tmp_path}/{path}' {reason}"):
            store(tmp_path / path).__enter__()


def test_a_path_that_is_not_writable(tmp_path: Path) -> None:
    def unprivileged(rank: int) -> str:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(OffloadError) as caught:
                store(Path("/usr")).__enter__()
        finally:
            os.seteuid(user)
        return str(caught.value)

    assert "'/usr' is not writable for this user" in run_world(1, unprivileged, init_group=False)[0]


@pytest.mark.parametrize("most", [0, 1])
def test_too_little_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    memories: list[int] = []

    def scarce(nbytes: int, **settings: bool) -> torch.Tensor:
        memories.append(nbytes)
        if len(memories) > most:
            raise MemoryError
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(stores, "host_memory", scarce)
    with pytest.raises(MemoryError):
        store(tmp_path).__enter__()
    assert not os.listdir(tmp_path)


def test_too_little_space_names_both_numbers(tmp_path: Path) -> None:
    with store(tmp_path, Disk(free=3 * GIB // 2)) as opened:
        opened.check_space(3 * GIB // 2)
        with pytest.raises(OffloadError, match=r"2.00 GiB \(2147483648 bytes\) are needed and 1.50 GiB \(1610612736 "):
            opened.check_space(2 * GIB)
    with store(tmp_path) as opened, pytest.raises(OffloadError, match="too little space"):
        opened.check_space(1 << 60)


def test_a_store_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    opened = NvmeStore(str(tmp_path), rank=0, world_size=1, buffer_nbytes=1 << 20, io_threads=2, device=CPU)
    resting = opened.allocate(10, torch.float32, "x")
    opened.pipeline().run([Request(10, [(resting, True, True)])], lambda request, buffers: None)
    assert len(io_threads()) == 2
    del opened
    gc.collect()
    assert not os.listdir(tmp_path)
    assert not io_threads()
    with pytest.raises(OffloadError, match="was closed"):
        resting.read()


def test_a_process_that_ends_removes_its_files(tmp_path: Path) -> None:
    """However it ends, short of being killed. Each end has a process of its own, forked from one that has imported."""
    script = f"""
import os, signal, sys, torch
from lightning_zero.extensions.nvme import NvmeStore, Request

ENDS = {{"return": lambda: None, "raise": lambda: 1 / 0, "exit": lambda: sys.exit(3),
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT)}}

def run(end, path):
    os.mkdir(path)
    store = NvmeStore(path, rank=0, world_size=1, buffer_nbytes=1 << 20, io_threads=2, device=torch.device("cpu"))
    x = store.allocate(100_000, torch.float32, "x")
    def work(request, buffers):
        if request.tag == 3:
            print(end, len(os.listdir(path)), flush=True)
            ENDS[end]()
    store.pipeline().run((Request(4096, [(x.part(4096 * i, 4096), True, True)], i) for i in range(20)), work)
    return store

for end in ENDS:
    pid = os.fork()
    if not pid:
        kept = run(end, {str(tmp_path)!r} + "/" + end)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(end, "ended with", code, "and left", os.listdir({str(tmp_path)!r} + "/" + end), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=subprocess_env(), capture_output=True, timeout=120, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = {"return": 0, "raise": 1, "exit": 3, "interrupt": -signal.SIGINT}
    assert done.stdout.splitlines() == [
        line for end, code in expected.items() for line in (f"{end} 1", f"{end} ended with {code} and left []")
    ], done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "KeyboardInterrupt" in done.stderr
