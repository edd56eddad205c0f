"""A save that fails on one rank fails on all, says where and why, leaves nothing behind, and the old one loads."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.checkpoint import FlatShard, open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.background import Saver
from lightning_zero.checkpoint.consolidated import save_consolidated_file
from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.errors import CheckpointError, CommunicationError, DivergenceError
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify, verify
from tests.helpers.world import run_world

NOBODY = 65534


@contextlib.contextmanager
def file_size_limit(_: Path) -> Iterator[None]:
    """As a full disk: a file ends at 1000 bytes. (Python ignores SIGXFSZ.)"""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def no_permission(_: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user for a while")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def another_disk(folder: Path) -> Iterator[None]:
    """The same path leads elsewhere on this rank: a local disk instead of a shared one."""
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere)
    try:
        yield
    finally:
        os.chdir(folder)


@contextlib.contextmanager
def too_many_open_files(_: Path) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


Obstacle = Callable[[Path], contextlib.AbstractContextManager[None]]

CASES: list[tuple[Obstacle, int, str]] = [
    (file_size_limit, 2, "File too large"),
    (no_permission, 0, "Permission denied"),
    (no_permission, 1, "Permission denied"),
    (another_disk, 1, "is not the folder that rank 0 sees: use a shared file system"),
    (too_many_open_files, 1, "Too many open files"),
]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "background"])
def test_a_failure_of_one_rank(tmp_path: Path, asynchronous: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    # Every rank has a working directory of its own, so that this path may lead elsewhere on one of them.
    path = Path("/proc/self/cwd/last.ckpt")

    def rank(number: int) -> list[str]:
        os.chdir(folder)
        saver = Saver(control())

        def save(version: int) -> None:
            content = checkpoint(version, end_to_end, control())
            saver.save(
                lambda content, ranks: save_checkpoint_directory(content, path, ranks, plan_summary={}),
                content,
                what="save",
                asynchronous=asynchronous,
            )
            saver.wait()

        messages = []
        for version, (obstacle, failing, _) in enumerate(CASES):
            save(3 * version)
            with obstacle(folder) if number == failing else contextlib.nullcontext():
                with pytest.raises(CheckpointError) as caught:
                    save(3 * version + 1)
                control().barrier()
            load_and_verify(path, 3 * version)
            control().barrier()
            save(3 * version + 2)
            load_and_verify(path, 3 * version + 2)
            messages.append(str(caught.value))
        return messages

    first, *others = run_world(3, rank, timeout=60)
    assert others == [first, first]
    for message, (_, failing, reason) in zip(first, CASES, strict=True):
        assert f"failed on rank {failing}." in message
        assert reason in message
        assert str(path) in message
    assert [entry.name for entry in folder.iterdir()] == ["last.ckpt"]
    assert list(tmp_path.glob("elsewhere/*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("needs permission to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "last.ckpt"

    def rank(number: int) -> str:
        def content(numel: int) -> dict[str, Any]:
            local = torch.full((numel if number == 1 else 10,), float(numel))
            shape = (10 + numel,)
            return {"state_dict": {"w": FlatShard(local, shape, 10 * number)}}

        def save(numel: int) -> None:
            save_checkpoint_directory(content(numel), path, control(), plan_summary={})

        save(300_000)  # 1.2 MB
        with pytest.raises(CheckpointError) as caught:
            save(600_000)
        control().barrier()
        loaded = open_checkpoint(path, control())["state_dict"]["w"].read()
        assert loaded.shape == (300_010,)
        assert loaded[10:].eq(300_000).all()
        control().barrier()
        save(310_000)
        return str(caught.value)

    for message in run_world(2, rank, timeout=30):
        assert re.search("rank 1: OSError.* No space left on device", message), message
    assert [entry.name for entry in small_disk.iterdir()] == ["last.ckpt"]


class Unwritable:
    """A value of the checkpoint that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


def test_a_value_that_cannot_be_written(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        messages = []
        save_checkpoint_directory(checkpoint(1, end_to_end, control()), tmp_path / "c", control(), plan_summary={})
        for key in ("state_dict", "callbacks"):
            content = checkpoint(2, end_to_end, control())
            content[key]["odd"] = Unwritable()
            with pytest.raises(CheckpointError, match="cannot be pickled") as caught:
                save_checkpoint_directory(content, tmp_path / "c", control(), plan_summary={})
            load_and_verify(tmp_path / "c", 1)
            messages.append(str(caught.value))
        return messages

    for messages in run_world(2, rank, timeout=30):
        assert all("failed on rank 0." in message for message in messages)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = "memory://left/c"
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), url, control(), plan_summary={})
    with file_size_limit(tmp_path), pytest.raises(CheckpointError, match="File too large"):
        save_checkpoint_directory(checkpoint(2, end_to_end, control()), url, control(), plan_summary={})
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_where_is_told_to_rank_0_alone(tmp_path: Path) -> None:
    """And in 56 bytes a piece."""

    def rank(number: int) -> list[int]:
        received, irecv = list[int](), dist.irecv

        def counted(tensor: torch.Tensor, **options: Any) -> Any:
            received.append(tensor.nbytes)
            return irecv(tensor, **options)

        dist.irecv = counted  # type: ignore[assignment]
        saved = []
        for count in (1, 101):
            local = torch.ones(2)
            shards = {str(layer): FlatShard(local + layer, (4,), 2 * number) for layer in range(count)}
            save_checkpoint_directory({"state_dict": shards}, tmp_path / str(count), control(), plan_summary={})
            saved.append(sum(received))
            received.clear()
        return saved

    (few, many), (fewer, as_few) = run_world(2, rank, timeout=30)
    assert 0 <= many - few - 100 * 56 < 20
    assert as_few <= fewer
    assert fewer < 1000


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "background"])
def test_a_rank_that_dies_before_it_has_told_what_it_wrote(tmp_path: Path, asynchronous: bool) -> None:
    """All others notice, the one that waits for it and those that come to publish."""

    def rank(number: int) -> str:
        saver = Saver(Groups.create("gloo").checkpoint)

        def save(version: int) -> None:
            content = checkpoint(version, end_to_end, control())
            saver.save(
                lambda content, ranks: save_checkpoint_directory(content, tmp_path / "c", ranks, plan_summary={}),
                content,
                what="save",
                asynchronous=asynchronous,
            )
            saver.wait()

        save(1)
        if number == 3:
            dist.send = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises((CommunicationError, DivergenceError)) as caught:
            save(2)
        if number == 0:
            verify(open_checkpoint(tmp_path / "c", ControlGroup(None)), 1, end_to_end, control())
        return str(caught.value)

    failures = run_world(4, rank, timeout=60, grace=50, expect_failure=True)
    assert {number: failure.type for number, failure in failures.items()} == {3: "SIGKILL"}


def test_names_that_not_all_ranks_have(tmp_path: Path) -> None:
    """As of optimizers without a state for what a rank owns nothing of: each is written once, and must be alike."""

    def rank(number: int) -> str:
        def content(odd: Any) -> dict[str, Any]:
            shards: dict[str, Any] = {"w": FlatShard(torch.full((2,), float(number)), (8,), 2 * number)}
            if number in (1, 3):
                shards["half"] = FlatShard(torch.full((2,), float(number)), (4,), number - 1)
                shards["v"] = torch.arange(3.0)
            return {"state_dict": {**shards, **({"x": {"y": number}} if number == 2 else {}), "odd": odd}}

        save_checkpoint_directory(content("alike"), tmp_path / "c", control(), plan_summary={})
        save_consolidated_file(content("alike"), tmp_path / "f", control(), plan_summary={})
        for name in ("c", "f"):
            loaded = open_checkpoint(tmp_path / name, control())["state_dict"]
            assert loaded["w"].clone().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
            assert loaded["half"].clone().tolist() == [1, 1, 3, 3]
            assert loaded["v"].clone().tolist() == [0, 1, 2]
            assert (loaded["x"], loaded["odd"]) == ({"y": 2}, "alike")
        odd = torch.zeros(3 if number == 3 else 2)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint_directory(content(odd), tmp_path / "c", control(), plan_summary={})
        return str(caught.value)

    messages = run_world(4, rank, timeout=30)
    assert len(set(messages)) == 1
    assert "'state_dict.odd' is ('tensor', 'torch.float32', (2,)) on one and" in messages[0]
    assert "(3,)) on rank 3." in messages[0]
