"""Checkpoints that appear, are replaced and disappear in one step: on a disk, or in a store that cannot rename.

[Note: Publishing]

A checkpoint is written under a temporary name beside its final one and published by one system call:

    nothing under the final name     renameat2(NOREPLACE)
    something under it               renameat2(EXCHANGE): the old checkpoint then has the temporary name, and is deleted
    a file system without renameat2  the final name is a symbolic link to the data, and is replaced by another link

Whenever the process dies, the final name leads to the old checkpoint or to the new one, each of them whole. (Two
plain renames would leave a moment with neither.) Deleting renames first, so that a half-deleted directory never has a
valid name.

The next save in the same folder removes what a killed process left. A directory in use is told from a stale one by a
lock (``flock``) on the directory itself, which the kernel drops with the process.

Temporary names are random and never derived from the final one: Lightning finds checkpoints to resume from by
searching folders for names that contain ``last`` or ``ckpt_``, and reads numbers out of them.

[Note: Publishing without rename]

One object appears in one step and that is all a store promises. So the record is the commit, and every name it lists
is new with every save:

    1.  __{rank}_0-<id>.distcp, meta-<id>.pt, meta-<id>.bin     every rank its own
    2.  zero.json                                               rank 0: from here on this is the new checkpoint
    3.  .metadata, meta.pt                                      for other readers, who know these names only
    4.  the objects of the save before are deleted              and what killed saves left

Until step 2 the old checkpoint is whole, after it the new one is. (Other readers see the old one until step 3.) The
record does not list what step 3 replaces. Deleting a checkpoint deletes ``zero.json``, ``.metadata`` and ``meta.pt``
first.

Files are written to the local folder for temporary files (``TMPDIR``) first, which needs room for what a rank holds,
and then uploaded: DCP's format is written to files, and stores want to know sizes, and whole files to repeat.

One run at a time may save to one URL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE, Record
from lightning_zero.checkpoint.storage.files import entries_of, is_remote, local_path, open_store

__all__ = ["RemoteStaging", "StagedFile", "Staging", "is_checkpoint_directory", "remove", "sweep"]

_TEMPORARY = ".ztmp-"  # being written, or a replaced checkpoint about to be deleted
_DELETED = ".zdel-"  # being deleted
_DATA = ".zdata-"  # what a final name links to, where directories cannot be exchanged
_OURS = re.compile(r"\.z(?:tmp|del|data)-[0-9a-f]{32}")

_MARKS = (RECORD_FILE, METADATA_FILE, META_FILE)  # what makes a folder a checkpoint, the most important first
_OF_A_SAVE = re.compile(r"(?:__\d+_\d+|meta)-([0-9a-f]{32})\.(?:distcp|pt|bin)")  # in a store
_COPIED = re.compile(r".+\.distcp|meta\.bin")  # of a checkpoint that was written elsewhere, or by another program

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Staging:
    """A directory that every rank writes files to and that rank 0 makes and publishes. See [Note: Publishing].

    Making one does nothing yet. ``path`` is the folder to write to, from ``begin`` or ``enter`` on, and ``suffix`` goes
    into the names of files, before their extension, where they must be new with every save.
    """

    suffix = ""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = Path()
        self._folder = Path()
        self._lock: int | None = None  # while the folder is this process's to publish or to discard

    def named(self, name: str) -> str:
        """What a file of a known name is called here."""
        stem, extension = os.path.splitext(name)
        return f"{stem}{self.suffix}{extension}"

    def begin(self) -> str:
        """Rank 0: make the folder, and the parents of its final name. Returns what the others need to enter.

        Raises:
            IsADirectoryError: if ``final``, or what it links to, is a directory that is no checkpoint, or if it is one
                with directories in it, which publishing would delete.
            FileExistsError: if ``final`` would lie in a checkpoint, with which it would be deleted.
            OSError: if the directory cannot be made.
        """
        parent = self.final.parent
        if self.final.is_dir():
            _check_deletable(self.final, "it is not replaced. Choose another name")
        _refuse_within(lambda name: (parent / name).is_file(), str(self.final))
        _make_folder(parent)
        sweep(parent)
        self._folder, self._lock = _make_locked(parent)
        self.path = self._folder
        return str(self.path)

    def enter(self, token: str) -> None:
        """Every rank, with what rank 0's ``begin`` returned."""
        self.path = Path(token)
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
        """Rank 0: give the directory its final name, then delete what had it, once everything is in it.

        After an ``OSError`` the final name still leads to what it led to before, or, if only making the name durable
        failed, to the whole new directory.
        """
        _fsync(self.path)
        try:
            replaced = _exchange(self.path, self.final)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if self.final.is_dir() and not self.final.is_symlink():  # of another program or file system
                _remove_empty(self.final)
            replaced = self._replace()
        self._unlock()  # from here on the data is not ours to discard
        _fsync(self.final.parent)
        if replaced is not None:
            _retire(replaced)

    def discard(self) -> None:
        """Every rank, at the end: delete what was not published. Never raises: the next save sweeps what is left."""
        if self._lock is not None:
            _retire(self._beside(_TEMPORARY))
            _retire(self._folder)
            self._unlock()

    def _beside(self, prefix: str) -> Path:
        """A temporary name with the token of this directory's own."""
        return self.final.parent / f"{prefix}{self._folder.name[-32:]}"

    def _replace(self) -> Path | None:
        """Take the final name where nothing can be exchanged and no directory has it. Returns what is to be deleted."""
        data, link = self._beside(_DATA), self._beside(_TEMPORARY)
        os.rename(self._folder, data)
        self._folder = data
        os.symlink(data.name, link)
        replaced = _linked_data(self.final)
        os.replace(link, self.final)
        return replaced

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StagedFile(Staging):
    """A file of ``nbytes`` being written, on the one process that makes and publishes it. See [Note: Publishing].

    It lies in a temporary directory beside its final name, because that is what later saves know how to sweep when the
    process is killed. It is at ``path`` until it is published. Errors are those of ``Staging.begin``.
    """

    def __init__(self, final: Path, nbytes: int) -> None:
        super().__init__(final)
        self.begin()
        self.path = self._folder / "file"
        try:
            with open(self.path, "xb") as file:
                os.truncate(file.fileno(), nbytes)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the file its final name, durably, then delete what had it. Errors: see ``Staging.publish``."""
        super().publish()
        _retire(self._folder)
        sweep(self.final.parent)  # the data of a directory that was published through a link

    def _replace(self) -> None:
        os.replace(self.path, self.final)


class RemoteStaging(Staging):
    """The same for a folder behind a URL of any protocol of fsspec. See [Note: Publishing without rename].

    Every rank has a local folder of its own, whose files it delivers.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Path(tempfile.gettempdir()) / uuid.uuid4().hex)
        self._url = url.rstrip("/")
        self._discards = False  # whether what was delivered is to be deleted: on rank 0, if it cannot be published

    @cached_property
    def _at(self) -> tuple[Any, str]:
        return open_store(self._url)

    def begin(self) -> str:
        store, root = self._at
        if store.isfile(root):
            raise FileExistsError(f"'{self._url}' is a file. Delete it, or choose another name")
        _check_is_checkpoint(self._url, _folders(_names(store, root)), "it is not replaced. Choose another name")
        if parent := root.rpartition("/")[0]:
            _refuse_within(lambda name: bool(store.isfile(f"{parent}/{name}")), self._url)
        store.makedirs(root, exist_ok=True)
        self._discards = True
        return uuid.uuid4().hex

    def enter(self, token: str) -> None:
        self.suffix = f"-{token}"
        super().begin()

    def deliver(self, names: Sequence[str]) -> None:
        for name in names:
            self._put(name, name)

    def sizes(self) -> Mapping[str, int]:
        return {name: int(entry["size"] or 0) for name, entry in _names(*self._at).items()}

    def publish(self) -> None:
        store, root = self._at
        # If the store says nothing definite about ``zero.json``, nothing is deleted.
        before = _listed(self._read_record())
        record = (self.path / RECORD_FILE).read_bytes()
        self._discards = False
        try:
            store.pipe_file(f"{root}/{RECORD_FILE}", record)
        except BaseException:
            # An answer that was lost says nothing about the request.
            self._discards = self._read_record() not in (record, None)
            raise
        self._put(METADATA_FILE, METADATA_FILE)
        self._put(self.named(META_FILE), META_FILE)
        with contextlib.suppress(Exception):  # what is left is deleted by the next save
            self._delete(lambda name, save: name in before or save not in (None, self.suffix[1:]))

    def discard(self) -> None:
        super().discard()
        if self._discards:
            with contextlib.suppress(Exception):
                self._delete(lambda name, save: save == self.suffix[1:])

    def _put(self, name: str, target: str) -> None:
        store, root = self._at
        store.put_file(str(self.path / name), f"{root}/{target}")

    def _delete(self, chosen: Callable[[str, str | None], bool]) -> None:
        """Delete objects, chosen by their names and by the save that made them."""
        store, root = self._at
        for name in _names(store, root):
            ours = _OF_A_SAVE.fullmatch(name)
            if chosen(name, ours and ours[1]):
                store.rm_file(f"{root}/{name}")

    def _read_record(self) -> bytes | None:
        """What ``zero.json`` holds now: empty if there is none, ``None`` if that cannot be found out."""
        store, root = self._at
        try:
            content: bytes = store.cat_file(f"{root}/{RECORD_FILE}")
        except FileNotFoundError:
            return b""
        except Exception:
            return None
        return content


# --------------------------------------------------------------------------------------------- what may be deleted


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: a directory, a file, or a link with the data behind it. Nothing there is fine.

    Behind a URL, files that are not of the checkpoint stay. ``IsADirectoryError`` if it is a directory that is no
    checkpoint, or one with directories in it; ``OSError`` if the name could not be removed.
    """
    if is_remote(path):
        return _remove_from_store(os.fspath(path))
    path = local_path(path)
    if not os.path.lexists(path):
        return
    if path.is_dir() and (not path.is_symlink() or _linked_data(path) is not None):
        _check_deletable(path, "it is not deleted. Delete it yourself")
    _delete(path)


def _remove_from_store(url: str) -> None:
    store, root = open_store(url)
    store.invalidate_cache()
    if store.isfile(root):
        store.rm_file(root)
        return
    names = _names(store, root)
    _check_is_checkpoint(url, _folders(names), "it is not deleted. Delete it yourself")
    listed = _listed(store.cat_file(f"{root}/{RECORD_FILE}") if RECORD_FILE in names else None)
    others = [name for name in names if name in listed or _OF_A_SAVE.fullmatch(name) or _COPIED.fullmatch(name)]
    for name in (*(mark for mark in _MARKS if mark in names), *others):
        store.rm_file(f"{root}/{name}")
    if not _names(store, root):
        with contextlib.suppress(Exception):  # where folders are nothing but parts of names
            store.rmdir(root)


def _listed(record: bytes | None) -> set[str]:
    """The names that a record lists, but for those that have the same name in every checkpoint."""
    try:
        return set(Record.from_bytes(record or b"").files).difference(_MARKS)
    except ValueError:  # there is none, or it is damaged or of another version
        return set()


def _names(store: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What is in a folder, by name; nothing if there is none."""
    try:
        return entries_of(store, root)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _folders(names: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    return {name: entry.get("type") == "directory" for name, entry in names.items()}


def is_checkpoint_directory(path: Path) -> bool:
    """Whether a directory is one of ours, one of Lightning's, or empty."""
    names = os.listdir(path)
    return not names or not set(_MARKS).isdisjoint(names)


def _check_deletable(path: Path, otherwise: str) -> None:
    goes = not path.is_symlink() or _linked_data(path) is not None  # of somebody's link only the link goes
    _check_is_checkpoint(
        str(path), {at.name: goes and at.is_dir(follow_symlinks=False) for at in os.scandir(path)}, otherwise
    )


def _check_is_checkpoint(place: str, names: Mapping[str, bool], otherwise: str) -> None:
    """Refuse what may hold more than one checkpoint: no writer of checkpoints makes directories in them.

    ``names`` are those in it, and whether each is a directory.
    """
    if names and not any(name in _MARKS or _OF_A_SAVE.fullmatch(name) for name in names):
        raise IsADirectoryError(f"'{place}' is a directory that is not a checkpoint; {otherwise}")
    if inside := sorted(name for name, is_directory in names.items() if is_directory):
        raise IsADirectoryError(
            f"'{place}' is a checkpoint with directories in it ({', '.join(inside[:3])}), which would be deleted; "
            f"{otherwise}, or move them away"
        )


def _refuse_within(is_beside: Callable[[str], bool], final: str) -> None:
    """Refuse a name in a checkpoint, with which it would be deleted."""
    if is_beside(RECORD_FILE) or is_beside(METADATA_FILE):
        raise FileExistsError(
            f"'{os.path.dirname(final)}' is a checkpoint, and '{os.path.basename(final)}' in it would be deleted with "
            "it. Choose another folder"
        )


def sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder. Never raises, and leaves what a living process holds."""
    with contextlib.suppress(OSError):
        for entry in [entry for entry in os.scandir(folder) if _OURS.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                _sweep_one(Path(entry.path))


def _sweep_one(path: Path) -> None:
    lock = None
    if not path.name.startswith(_DELETED):
        held = path.parent / os.readlink(path) if path.is_symlink() else path  # a link between two steps of _replace
        lock = _try_lock(held)
        if lock is None and held.exists():
            return
    try:
        # Only now: it may just have been published.
        names = [entry for entry in os.scandir(path.parent) if entry.is_symlink() and not _OURS.fullmatch(entry.name)]
        if path.name not in [os.readlink(entry.path) for entry in names]:
            _delete(path)
    finally:
        if lock is not None:
            os.close(lock)


def _delete(path: Path) -> None:
    """Delete a file, a directory, or a link with the data behind it; ``OSError`` if the name could not be removed."""
    data, doomed = _linked_data(path), path.with_name(f"{_DELETED}{uuid.uuid4().hex}")
    os.rename(path, doomed)
    _fsync(path.parent)
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(doomed).st_mode):
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            doomed.unlink()
    if data is not None:
        _retire(data)


def _retire(path: Path) -> None:
    """Delete what no longer has a final name, if it is there. Never raises: the next save sweeps what is left."""
    with contextlib.suppress(OSError):
        _delete(path)


# -------------------------------------------------------------------------------------------------- the file system


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        raise IsADirectoryError(
            f"'{path}' is a directory, which this file system cannot replace in one step. Move it away, or choose "
            "another name"
        ) from error


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
        if error.errno not in _UNSUPPORTED or not path.is_dir():  # some network file systems have none of directories
            raise
    finally:
        os.close(descriptor)


def _make_locked(parent: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    while True:
        path = parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # swept by another process before it was locked
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return path, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # being swept, or swept already
        except OSError:
            return path, descriptor  # a file system without flock: there nobody can sweep it either
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory, or ``None`` if somebody else does or it cannot be locked."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.pop_all()
        return descriptor
    return None


def _exchange(source: Path, final: Path) -> Path | None:
    """Move ``source`` to ``final`` in one step. Returns where that which was there lies now.

    ``OSError`` with ``ENOSYS`` or alike where that is not possible.
    """
    try:
        _renameat2(source, final, _RENAME_NOREPLACE)
    except FileExistsError:
        _renameat2(source, final, _RENAME_EXCHANGE)
        return source
    return None


def _renameat2(source: Path, destination: Path, flags: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:  # not Linux, or a C library older than 2018
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    here = ctypes.c_int(_AT_FDCWD)
    names = [ctypes.c_char_p(os.fsencode(path)) for path in (source, destination)]
    if function(here, names[0], here, names[1], ctypes.c_uint(flags)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(destination))


def _linked_data(path: Path) -> Path | None:
    """The data directory beside ``path`` that it was published through, if it is such a link."""
    if not path.is_symlink():
        return None
    target = os.readlink(path)
    return path.parent / target if target.startswith(_DATA) and _OURS.fullmatch(target) else None
