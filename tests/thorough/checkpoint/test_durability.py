"""What has a name after a power failure: the order in which a save writes, syncs and renames.

A file is durable when it was synced after its last write, a name when the folder that holds it was synced after the
name was given. The order is watched in the calls of a process, with ``strace`` where it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint import consolidate_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.storage.publish import Staging
from tests.helpers.samples import checkpoint, control, end_to_end
from tests.helpers.script import ROOT

FILES = {"__0_0.distcp", ".metadata", "meta.pt", "meta.bin", "zero.json"}


def save(path: Path) -> None:
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), path, control(), plan_summary={})


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced, in order."""
    paths: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


def test_new_folders_are_synced_in_those_above(tmp_path: Path, synced: list[str]) -> None:
    save(tmp_path / "a" / "b" / "c" / "last.ckpt")
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert str(folder) in synced
    staged = [Path(path) for path in synced if ".ztmp-" in path]
    assert {path.name for path in staged} - {staged[-1].name} == FILES
    assert staged[-1] == staged[0].parent  # the folder after its files, and before it gets its name
    assert synced[-1] == str(tmp_path / "a" / "b" / "c")


def test_folders_that_somebody_else_has_just_made_are_synced(tmp_path: Path, synced: list[str]) -> None:
    """As a logger does, which does not sync them."""
    (tmp_path / "version_0" / "checkpoints").mkdir(parents=True)
    save(tmp_path / "version_0" / "checkpoints" / "last.ckpt")
    assert str(tmp_path) in synced
    assert str(tmp_path / "version_0") in synced


def test_a_single_file_is_synced_with_its_folders(tmp_path: Path, synced: list[str]) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "x.ckpt")
    consolidate_checkpoint(tmp_path / "x.ckpt", tmp_path / "new" / "er" / "x.safetensors", progress=False)
    assert str(tmp_path) in synced
    assert str(tmp_path / "new") in synced
    assert synced[-1] == str(tmp_path / "new" / "er")
    assert any(path.endswith("/file") for path in synced)


def test_a_folder_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    staging = Staging(tmp_path / "a" / "c")
    staging.begin()
    staging.discard()


# --------------------------------------------------------------------------------------------------------------- strace


def events(trace: str) -> list[tuple[str, str]]:
    """``write``, ``sync``, ``make`` and ``name`` with the path, in order, of a trace with ``-y``."""
    patterns: dict[str, Callable[[re.Match[str]], list[tuple[str, str]]]] = {
        r"(?:write|pwrite64|writev|ftruncate)\(\d+<([^>]+)>": lambda found: [("write", found[1])],
        r"(?:fsync|fdatasync)\(\d+<([^>]+)>": lambda found: [("sync", found[1])],
        r'mkdir(?:at)?\((?:AT_FDCWD(?:<[^>]*>)?, )?"([^"]+)".*\) = 0': lambda found: [("make", found[1])],
        r'rename(?:at2?)?\((?:AT_FDCWD(?:<[^>]*>)?, )?"([^"]+)", (?:AT_FDCWD(?:<[^>]*>)?, )?"([^"]+)".*\) = 0': (
            lambda found: [("from", found[1]), ("name", found[2])]
        ),
    }
    seen = []
    for line in trace.splitlines():
        for pattern, meaning in patterns.items():
            if found := re.search(pattern, line):
                seen += meaning(found)
    return seen


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_system_is_told_in_this_order(tmp_path: Path) -> None:
    import subprocess

    program = (
        "from pathlib import Path; from tests.thorough.checkpoint.test_durability import save; "
        f"save(Path({str(tmp_path)!r}) / 'new' / 'er' / 'last.ckpt')"
    )
    calls = "trace=write,pwrite64,writev,ftruncate,fsync,fdatasync,mkdir,mkdirat,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "-s", "0", "-e", calls, "-e", "signal=none", "-o", str(tmp_path / "trace")]
    # With paths in full: -s cuts off what is written, not what is named.
    done = subprocess.run(
        [*command, sys.executable, "-c", program], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    seen = [
        (what, path)
        for what, path in events((tmp_path / "trace").read_text())
        if path.startswith(str(tmp_path / "new"))
    ]
    folder = str(tmp_path / "new" / "er")
    (published,) = [at for at, event in enumerate(seen) if event == ("name", f"{folder}/last.ckpt")]
    staged = seen[published - 1][1]
    for name in FILES:
        writes = [at for at, event in enumerate(seen) if event == ("write", f"{staged}/{name}")]
        syncs = [at for at, event in enumerate(seen) if event == ("sync", f"{staged}/{name}")]
        assert writes, name
        assert writes[-1] < syncs[-1] < published, name
    last_file = max(at for at, (_, path) in enumerate(seen) if path.startswith(f"{staged}/"))
    assert last_file < seen.index(("sync", staged)) < published  # the names in it
    assert ("sync", folder) in seen[published:]
    assert not [path for what, path in seen[published:] if what == "write"]
    all_events = events((tmp_path / "trace").read_text())
    for made in (str(tmp_path / "new"), folder):
        begin = all_events.index(("make", made))
        assert ("sync", str(Path(made).parent)) in all_events[begin:], made
