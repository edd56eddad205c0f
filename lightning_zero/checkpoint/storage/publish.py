"""Checkpoints that appear, are replaced and disappear as a whole: on a disk, or in a store that cannot rename.

[Note: Publishing]

Files are written to a temporary folder first. A new name appears by one rename of that folder. Where a checkpoint
directory is there already, and in a store, one file appears in one step, and that is all that is needed: the record is
the commit, and every name it lists is new with every save.

    1.  __{rank}_0-<id>.distcp, meta-<id>.pt, meta-<id>.bin     in a store, every rank uploads its own
    2.  zero.json                                               rank 0: from here on this is the new checkpoint
    3.  .metadata, meta.pt                                      for other readers, who know these names only
    4.  the files of the save before are deleted                and what killed saves left

Until step 2 the old checkpoint is whole, after it the new one is. (Other readers see the old one until step 3.) Files
that belong to no checkpoint stay. The record does not list what step 3 replaces.

A file and a directory cannot take each other's name in one step: what is there is called ``NAME.old`` meanwhile, or
``NAME.old.old`` where somebody has that.

One run at a time may save to one name in a store. The next save in the same folder removes what a killed process left.
A temporary folder in use is told from a stale one by a lock (``flock``) on it, which the kernel drops with the process.
Its name is random and never derived from the final one: Lightning finds checkpoints to resume from by searching folders
for names that contain ``last`` or ``ckpt_``, and reads numbers out of them.

For a store the temporary folder is local (``TMPDIR``), with room for what a rank holds: DCP's format is written to
files, and stores want to know sizes, and whole files to repeat.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fsspec import filesystem

from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE
from lightning_zero.checkpoint.storage.files import entries_of, is_remote, local_path, open_store

__all__ = ["RemoteStaging", "StagedFile", "Staging", "is_checkpoint_directory", "remove", "sweep"]

_TEMPORARY = ".ztmp-"  # being written
_DELETED = ".zdel-"  # being deleted
_LEFT = re.compile(r"\.z(?:tmp|del)-[0-9a-f]{32}")
_LINKED = re.compile(r"\.zdata-[0-9a-f]{32}")  # version 0.2 let names link to it, where folders cannot be exchanged

_MARKS = (RECORD_FILE, METADATA_FILE, META_FILE)  # what makes a folder a checkpoint, the most important first
_DATA = re.compile(r".+\.distcp|meta(?:-[0-9a-f]{32})?\.(?:pt|bin)")  # the other files of one


class Staging:
    """A directory that every rank writes files to and that rank 0 makes and publishes. See [Note: Publishing].

    Making one does nothing yet. ``path`` is the folder to write to, from ``begin`` or ``enter`` on, and ``suffix`` goes
    into the names of files, before their extension, where they must be new with every save.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = self._folder = Path()
        self.suffix = ""
        self._lock: int | None = None  # on the temporary folder, if this process made it
        self._withdraw = False  # whether files under the final name are of this save and of no checkpoint

    def named(self, name: str) -> str:
        """What a file of a known name is called here."""
        stem, extension = os.path.splitext(name)
        return f"{stem}{self.suffix}{extension}"

    def begin(self) -> tuple[str, str]:
        """Rank 0: make the folder, and the parents of its final name. Returns what the others need to enter.

        Raises:
            IsADirectoryError: if ``final``, or what it links to, is a directory that is no checkpoint.
            FileExistsError: if ``final`` would lie in a checkpoint, with which it would be deleted.
            OSError: if the directory cannot be made.
        """
        parent = self.final.parent
        if self.final.is_dir():
            names = os.listdir(self.final)
            _check_is_checkpoint(self.final, names, "it is not replaced. Choose another name")
            if linked := _linked(self.final):
                self.final = linked
            if names and not self.final.is_symlink():  # of somebody's link only the link is replaced
                self.suffix = f"-{uuid.uuid4().hex}"
        if (parent / RECORD_FILE).is_file() or (parent / METADATA_FILE).is_file():
            raise FileExistsError(
                f"'{parent}' is a checkpoint, and '{self.final.name}' in it would be deleted with it. Choose another "
                "folder"
            )
        _make_folder(parent)
        self._make(parent)
        return str(self.path), self.suffix

    def enter(self, token: tuple[str, str]) -> None:
        """Every rank, with what rank 0's ``begin`` returned."""
        self.path, self.suffix = Path(token[0]), token[1]
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"'{self.path.parent}' is not the folder that rank 0 sees: use a shared file system"
            )

    def deliver(self, names: Sequence[str]) -> None:
        """Any rank: let everybody see files that are complete. They are no checkpoint yet."""

    def sizes(self) -> Mapping[str, int]:
        """Rank 0: what everybody sees: bytes by file name."""
        return {entry.name: entry.stat().st_size for entry in os.scandir(self.path)}

    def publish(self) -> None:
        """Rank 0: let the final name lead to what was written, then delete what was there, once everything is written.

        After an ``OSError`` the final name still leads to what it led to before, or, if only step 3 or making the name
        durable failed, to the whole new checkpoint.
        """
        if not self.suffix:
            _fsync(self.path)
            return _rename(self.path, self.final)
        lock = os.open(self.final, os.O_RDONLY)  # for runs that save to one name by mistake
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._withdraw = True
            self._replace([name for name in self.sizes() if self.suffix in name])
        finally:
            os.close(lock)

    def discard(self) -> None:
        """Every rank, at the end: delete what was not published. Never raises: the next save sweeps what is left."""
        if self._withdraw:
            with contextlib.suppress(Exception):
                self._delete_all(lambda name: self.suffix in name)
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _replace(self, names: Sequence[str]) -> None:
        """Steps 1 to 4, the first for files with these names."""
        others = self.path / META_FILE
        shutil.copyfile(self.path / self.named(META_FILE), others)
        _fsync(others)
        for name in names:
            self._put(name)
        self._sync()
        record = (self.path / RECORD_FILE).read_bytes()
        self._withdraw = False
        try:
            self._put(RECORD_FILE)
        except BaseException:  # an answer that was lost says nothing about the request
            with contextlib.suppress(Exception):
                store, root = self._at
                none = RECORD_FILE not in _entries(store, root)
                self._withdraw = none or store.cat_file(f"{root}/{RECORD_FILE}") != record
            raise
        self._sync()
        for name in (METADATA_FILE, META_FILE):
            self._put(name)
        with contextlib.suppress(Exception):  # what is left is deleted by the next save
            self._sync()
            self._delete_all(lambda name: name not in _MARKS and self.suffix not in name)

    def _make(self, parent: Path) -> None:
        """Make a locked temporary folder in another, and sweep there."""
        sweep(parent)
        while self._lock is None:  # another save's sweep may take the new folder before it is locked
            path = parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
            path.mkdir()
            self._lock = _lock(path)
        self.path = self._folder = path

    @cached_property
    def _at(self) -> tuple[Any, str]:
        """The file system of fsspec, and the final name in it."""
        return filesystem("file"), str(self.final)

    def _put(self, name: str) -> None:
        os.replace(self.path / name, self.final / name)

    def _sync(self) -> None:
        _fsync(self.final)

    def _delete_all(self, chosen: Callable[[str], bool]) -> None:
        store, root = self._at
        for name in _entries(store, root):
            if _DATA.fullmatch(name) and chosen(name):
                store.rm_file(f"{root}/{name}")


class StagedFile(Staging):
    """A file that one process writes to ``path``, durably, and publishes; a context. See [Note: Publishing].

    It lies in a temporary folder beside its final name, because that is what later saves know how to sweep when the
    process is killed. Errors are those of ``Staging.begin``.
    """

    def __enter__(self) -> StagedFile:
        final = self.final
        try:
            self.begin()
        except BaseException:
            self.discard()
            raise
        self.final, self.path = final, self._folder / "file"
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def publish(self) -> None:
        """Give the file its final name, durably, then delete what had it. Errors: see ``Staging.publish``."""
        _rename(self.path, self.final)


class RemoteStaging(Staging):
    """The same for a folder behind a URL of any store of fsspec. Every rank has a local folder, which it delivers."""

    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self._url = url.rstrip("/")

    @cached_property
    def _at(self) -> tuple[Any, str]:
        return open_store(self._url)

    def begin(self) -> tuple[str, str]:
        store, root = self._at
        if store.isfile(root):
            raise FileExistsError(f"'{self._url}' is a file. Delete it, or choose another name")
        _check_is_checkpoint(self._url, _entries(store, root), "it is not replaced. Choose another name")
        store.makedirs(root, exist_ok=True)
        self._withdraw = True
        return "", f"-{uuid.uuid4().hex}"

    def enter(self, token: tuple[str, str]) -> None:
        self.suffix = token[1]
        self._make(Path(tempfile.gettempdir()))

    def deliver(self, names: Sequence[str]) -> None:
        for name in names:
            self._put(name)

    def sizes(self) -> Mapping[str, int]:
        return {name: int(entry["size"] or 0) for name, entry in _entries(*self._at).items()}

    def publish(self) -> None:
        self._replace(())

    def _put(self, name: str) -> None:
        store, root = self._at
        store.put_file(str(self.path / name), f"{root}/{name}")

    def _sync(self) -> None:
        """A store keeps what it has accepted."""


# --------------------------------------------------------------------------------------------- what may be deleted


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: a directory, a file, or a link with the data behind it. Nothing there is fine.

    Behind a URL, files that are not of the checkpoint stay. ``IsADirectoryError`` if it is a directory that is no
    checkpoint, or a local one with directories in it; ``OSError`` if the name could not be removed.
    """
    otherwise = "it is not deleted. Delete it yourself"
    if is_remote(path):
        store, root = open_store(os.fspath(path))
        store.invalidate_cache()
        if store.isfile(root):
            return store.rm_file(root)  # type: ignore[no-any-return]
        names = _entries(store, root)
        _check_is_checkpoint(path, names, otherwise)
        files = [*(name for name in _MARKS if name in names), *(name for name in names if _DATA.fullmatch(name))]
        for name in dict.fromkeys(files):
            store.rm_file(f"{root}/{name}")
        if not _entries(store, root):
            with contextlib.suppress(Exception):  # where folders are nothing but parts of names
                store.rmdir(root)
        return None
    path = local_path(path)
    linked = _linked(path)
    if path.is_dir() and (linked or not path.is_symlink()):  # of somebody's link only the link goes
        _check_is_checkpoint(path, os.listdir(path), otherwise)
        if inside := sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)):
            raise IsADirectoryError(
                f"'{path}' is a checkpoint with directories in it ({', '.join(inside[:3])}), which would be deleted; "
                f"{otherwise}, or move them away"
            )
    if os.path.lexists(path):
        doomed = path.with_name(f"{_DELETED}{uuid.uuid4().hex}")  # half of it never has a valid name
        os.rename(path, doomed)
        _fsync(path.parent)
        _delete_now(doomed)
        if linked:
            _delete_now(linked)
    return None


def is_checkpoint_directory(names: Collection[str]) -> bool:
    """Whether a directory with these names in it is one of ours, or one of Lightning's; or is empty."""
    return not names or any(name in _MARKS or _DATA.fullmatch(name) for name in names)


def _check_is_checkpoint(place: str | os.PathLike[str], names: Collection[str], otherwise: str) -> None:
    if not is_checkpoint_directory(names):
        raise IsADirectoryError(f"'{os.fspath(place)}' is a directory that is not a checkpoint; {otherwise}")


def _entries(store: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What is in a folder of a store; nothing if there is none."""
    try:
        return entries_of(store, root)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _linked(path: Path) -> Path | None:
    """The folder beside ``path`` that version 0.2 let it link to."""
    target = os.readlink(path) if path.is_symlink() else ""
    return path.parent / target if _LINKED.fullmatch(target) else None


def sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder. Never raises, and leaves what a living process holds."""
    with contextlib.suppress(OSError):
        for name in filter(_LEFT.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                _sweep_one(folder / name)


def _sweep_one(path: Path) -> None:
    if path.name.startswith(_DELETED) or path.is_symlink():
        return _delete_now(path)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete_now(path)
    finally:
        os.close(lock)
    return None


def _lock(path: Path) -> int | None:
    """Lock a folder just made, against ``sweep``: an open file, or ``None`` if the folder was swept before."""
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        swept = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = not path.is_dir()
        except BlockingIOError:
            swept = True
        except OSError:
            pass  # a file system without flock: there nobody can sweep it either
        if not swept:
            return lock
        os.close(lock)
    return None


def _delete_now(path: Path) -> None:
    """Delete what has no final name. Never raises: the next save sweeps what is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# -------------------------------------------------------------------------------------------------- the file system


def _rename(source: Path, final: Path) -> None:
    """Give a file or a folder its final name, durably. What had it is replaced, or deleted if it is of the other kind.

    A folder is renamed only where there is none, or an empty one.
    """
    old, linked = final.with_name(f"{final.name}.old"), _linked(final)
    while os.path.lexists(old):  # somebody's
        old = old.with_name(f"{old.name}.old")
    moved = os.path.lexists(final) and not final.is_symlink() and final.is_dir() != source.is_dir()
    if moved:
        os.rename(final, old)
    elif final.is_symlink() and source.is_dir():
        final.unlink()
    try:
        os.replace(source, final)
    except BaseException:  # an interrupt too
        if moved:
            os.rename(old, final)
        raise
    _fsync(final.parent)
    if moved:
        with contextlib.suppress(OSError):
            remove(old)
    if linked:
        _delete_now(linked)


def _make_folder(path: Path) -> None:
    """Make a folder with its parents, each name durable in the folder above: also names that others have just made."""
    path.mkdir(parents=True, exist_ok=True)
    path = Path(os.path.abspath(path))
    while not os.path.ismount(path):
        path = path.parent
        with contextlib.suppress(PermissionError):  # of who else made it, long before
            _fsync(path)


def _fsync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have none of directories.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
