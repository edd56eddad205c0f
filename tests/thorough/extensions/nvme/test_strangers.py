"""Folders that others have put into the path: they stop nothing, are not followed, not read at length, not deleted."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import NvmeStore
from lightning_zero.extensions.nvme import store as folders
from lightning_zero.extensions.nvme.store import RunFolder, find_leftovers
from tests.helpers.stores import CPU, store
from tests.helpers.world import run_world
from tests.thorough.extensions.nvme.test_folder import leave

NAME = "lightning_zero-elsewhere-{pid}-0123456789ab-rank0"
LONG_AGO = time.time() - 3600
NOBODY = 65534


def folder(path: Path, pid: object = 99_999_999, content: bytes | None = None) -> Path:
    made = path / NAME.format(pid=pid)
    made.mkdir()
    if content is not None:
        (made / "owner.json").write_bytes(content)
    return made


def with_owner(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A folder whose ``owner.json`` is something that ``make`` makes."""

    def stranger(path: Path) -> None:
        make(folder(path) / "owner.json")

    return stranger


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        before = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        opened.bind(path.name)
        os.chdir(before)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def elsewhere(path: Path) -> Path:
    """A run's folder, as it looks, out of sight of the path."""
    target = path.parent / "elsewhere"
    target.mkdir()
    (target / "owner.json").write_text(json.dumps({"when": "of a secret"}))
    (target / "data").write_bytes(b"not to be deleted")
    return target


def named(name: bytes) -> Callable[[Path], None]:
    return lambda path: os.mkdir(os.fsencode(path) + b"/" + name)


def old(path: Path) -> None:
    os.utime(folder(path, content=b"{}"), (2**33, 2**33))


def owner_of(**facts: object) -> Callable[[Path], None]:
    return with_owner(lambda path: path.write_text(json.dumps(facts)))


STRANGERS: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: folder(path, content=b"[" * 65536),
    "a long number": lambda path: folder(path, content=b'{"pid":' + b"9" * 65000 + b"}"),
    "no text": lambda path: folder(path, content=bytes(range(256))),
    "no object": lambda path: folder(path, content=b'"started"'),
    "other types": owner_of(pid=[], started={}, when={"a": 1}, host=7),
    "control characters": owner_of(when="\x1b[2J\n\n  /home (deleted)\ud800"),
    "a pipe": with_owner(os.mkfifo),
    "a link": with_owner(lambda path: path.symlink_to(elsewhere(path.parent.parent) / "owner.json")),
    "a link to zeros": with_owner(lambda path: path.symlink_to("/dev/zero")),
    "a directory": with_owner(os.mkdir),
    "a link to itself": with_owner(lambda path: path.symlink_to(path)),
    "a socket": with_owner(listening),
    "a huge file": with_owner(sparse),
    "a number of 30 digits": lambda path: folder(path, pid="9" * 30),
    "another script's digits": lambda path: folder(path, pid="٣٣"),
    "a folder that is a link": lambda path: (path / NAME.format(pid=1)).symlink_to(elsewhere(path)),
    "a folder that is a file": lambda path: (path / NAME.format(pid=1)).write_text("x"),
    "a folder that is a pipe": lambda path: os.mkfifo(path / NAME.format(pid=1)),
    "a name that is no text": named(b"lightning_zero-else\xff\xfewhere-1-0123456789ab-rank0"),
    "a name of two lines": named(b"lightning_zero-else\nwhere-1-0123456789ab-rank0"),
    "another century": old,
}


def everything(path: Path) -> dict[bytes, tuple[int, ...]]:
    """What is there, and what of it would show that somebody wrote to it."""
    found = {}
    for place, inside, files in os.walk(os.fsencode(path)):
        for name in {*inside, *files} - {b"path"}:
            facts = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns)
    return found


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_stops_nothing_and_stays(tmp_path: Path, kind: str) -> None:
    """And hides nothing: what a run has left beside it is reported all the same."""
    path = tmp_path / "path"
    path.mkdir()
    STRANGERS[kind](path)
    for name in os.listdir(os.fsencode(path)):
        place = os.path.join(os.fsencode(path), name)
        if stat.S_ISDIR(os.lstat(place).st_mode) and kind != "another century":
            os.utime(place, (LONG_AGO, LONG_AGO))
    left = leave(path)
    before = everything(tmp_path)

    def run(rank: int) -> tuple[list[str], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with store(path) as opened:
                return [str(found.path) for found in opened.leftovers], [str(warning.message) for warning in caught]

    ((found, messages),) = run_world(1, run, init_group=False, timeout=20)
    assert everything(tmp_path) == before
    assert str(left) in found
    assert str(left) in messages[0]
    assert len(messages[0].splitlines()) == 1 + len(found)
    assert messages[0].isprintable() or {c for c in messages[0] if not c.isprintable()} == {"\n"}
    assert "secret" not in messages[0]
    assert "deleted)" not in messages[0]
    hidden = ("a folder", "a name", "a number", "another script")
    assert len(found) == (1 if kind.startswith(hidden) else 2), "what looks like a run's folder is reported, too"


def test_folders_of_another_user_that_nobody_may_read(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to be somebody else")
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | 0o711)
    path = tmp_path / "path"
    path.mkdir()
    path.chmod(0o1777)
    closed, unreadable = folder(path), folder(path, pid=99_999_998, content=b"{}")
    (unreadable / "data").touch()
    (unreadable / "owner.json").chmod(0)
    closed.chmod(0)
    os.utime(closed, (LONG_AGO, LONG_AGO))
    before = everything(path)

    def run(rank: int) -> list[str]:
        os.seteuid(NOBODY)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with store(path) as opened:
                    return [str(found) for found in opened.leftovers]
        finally:
            os.seteuid(0)

    ((one, other),) = run_world(1, run, init_group=False, timeout=20)
    assert "unknown size" in other
    assert "unknown size" not in one
    assert everything(path) == before


def test_folders_that_vanish_while_they_are_looked_at(tmp_path: Path) -> None:
    """And others that come: nothing is raised, and what stays is always found."""
    left, over = leave(tmp_path), threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            made = folder(tmp_path, content=b"{}")
            os.utime(made, (LONG_AGO, LONG_AGO))
            (made / "owner.json").unlink()
            made.rmdir()

    threads = [threading.Thread(target=come_and_go)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            assert left in {found.path for found in find_leftovers(str(tmp_path))}
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_folder_of_others_under_the_same_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have chosen it by chance."""
    monkeypatch.setattr(folders.secrets, "token_hex", lambda count: "0" * 2 * count)
    first = RunFolder(str(tmp_path), 0, 1)
    (first.path / "data").write_bytes(b"of somebody else")
    with pytest.raises(OffloadError, match="cannot be created: File exists"):
        RunFolder(str(tmp_path), 0, 1)
    assert sorted(os.listdir(first.path)) == ["data", "owner.json"]
    first.remove()
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing of others is deleted


@pytest.mark.parametrize("replaced", ["a link", "a folder"])
def test_what_was_put_in_place_of_the_folder_is_not_followed_and_stays(tmp_path: Path, replaced: str) -> None:
    path = tmp_path / "path"
    path.mkdir()
    opened = NvmeStore(str(path), rank=3, world_size=4, buffer_nbytes=1 << 20, io_threads=1, device=CPU)
    Path(opened.folder).rename(tmp_path / "away")
    target = elsewhere(path)
    if replaced == "a link":
        Path(opened.folder).symlink_to(target)
    else:
        target.rename(opened.folder)
    before = everything(tmp_path)
    with pytest.warns(
        UserWarning, match=r"Rank 3: the offloaded files in .* were not removed: another .* in its place"
    ):
        opened.close()
    assert everything(tmp_path) == before
