"""The file of a run, in a folder of the user's: nothing is left there, however the run ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import NvmeStore, Request
from lightning_zero.extensions.nvme import store as stores
from tests.helpers.stores import CPU, Disk, data_of, fail, io_threads, store
from tests.helpers.world import run_world, subprocess_env

GIB = 1 << 30


def test_it_has_no_name_and_is_for_this_user_only(tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        assert not os.listdir(tmp_path)
        assert data_of(opened).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, code: int) -> None:
    disk = Disk(before=fail("write", code))
    with pytest.raises(OffloadError, match=rf"Rank 3: .*'{tmp_path}'.*: {os.strerror(code)}"):
        store(tmp_path, disk).__enter__()
    assert not os.listdir(tmp_path)


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
        with pytest.raises(OffloadError, match=r"2.15 GB are needed and 1.61 GB are free"):
            opened.check_space(2 * GIB)
    with store(tmp_path) as opened, pytest.raises(OffloadError, match="too little space"):
        opened.check_space(1 << 60)


def test_a_store_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    opened = NvmeStore(str(tmp_path), rank=0, buffer_nbytes=1 << 20, io_threads=2, device=CPU)
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
    """However it ends. Each end has a process of its own, forked from one that has imported."""
    script = f"""
import os, signal, sys, torch
from lightning_zero.extensions.nvme import NvmeStore, Request

ENDS = {{"return": lambda: None, "raise": lambda: 1 / 0, "exit": lambda: sys.exit(3),
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}}

def run(end, path):
    os.mkdir(path)
    store = NvmeStore(path, rank=0, buffer_nbytes=1 << 20, io_threads=2, device=torch.device("cpu"))
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
    expected = {"return": 0, "raise": 1, "exit": 3, "interrupt": -signal.SIGINT, "kill": -signal.SIGKILL}
    assert done.stdout.splitlines() == [
        line for end, code in expected.items() for line in (f"{end} 0", f"{end} ended with {code} and left []")
    ], done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "KeyboardInterrupt" in done.stderr
