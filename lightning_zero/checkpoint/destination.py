"""Where a checkpoint directory is written and how it appears there: on a disk, or in an object store without rename.

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
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE, Record
from lightning_zero.checkpoint.storage.files import entries_of, is_remote, local_path
from lightning_zero.checkpoint.storage.publish import Staging, remove

__all__ = ["Destination", "RemoteDestination", "remove_at"]

_MARKS = (RECORD_FILE, METADATA_FILE, META_FILE)  # what makes a folder a checkpoint, the most important first
_OURS = re.compile(r"(?:__\d+_\d+|meta)-([0-9a-f]{32})\.(?:distcp|pt|bin)")
_COPIED = re.compile(r".+\.distcp|meta\.bin")  # of a checkpoint that was written elsewhere, or by another program


class Destination:
    """One save of one directory, on one rank: on a file system that all ranks share. See [Note: Publishing]."""

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self._final = final
        self._staging: Staging | None = None  # on rank 0
        self.path = Path()  # the folder this rank writes its files to, once it was entered
        self.suffix = ""  # of file names, before their extension, where names must be new with every save

    def named(self, name: str) -> str:
        """What a file of a known name is called here."""
        stem, extension = os.path.splitext(name)
        return f"{stem}{self.suffix}{extension}"

    def begin(self) -> str:
        """Rank 0: get ready. Returns what the other ranks need to enter."""
        self._staging = Staging(local_path(self._final))
        return str(self._staging.path)

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

    def commit(self) -> None:
        """Rank 0: publish, in one step, once every file is delivered and the record is in ``path``."""
        if self._staging is not None:
            self._staging.publish()

    def discard(self) -> None:
        """Every rank, at the end: delete what was not published. Never raises."""
        if self._staging is not None:
            self._staging.discard()


class RemoteDestination(Destination):
    """A folder behind a URL of any protocol of fsspec. See [Note: Publishing without rename]."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._url = url.rstrip("/")
        self._store: Any = None
        self._root = ""
        self._is_first = False  # rank 0
        self._may_be_published = False

    def begin(self) -> str:
        self._connect()
        self._is_first = True
        if self._store.isfile(self._root):
            raise FileExistsError(f"'{self._url}' is a file. Delete it, or choose another name")
        _check_is_checkpoint(self._url, _names(self._store, self._root))
        parent = self._root.rpartition("/")[0]
        if parent and any(self._store.isfile(f"{parent}/{name}") for name in (RECORD_FILE, METADATA_FILE)):
            raise FileExistsError(f"the folder that '{self._url}' lies in is a checkpoint. Choose another folder")
        self._store.makedirs(self._root, exist_ok=True)
        return uuid.uuid4().hex

    def enter(self, token: str) -> None:
        if self._store is None:
            self._connect()
        self.suffix = f"-{token}"
        self._staging = Staging(Path(tempfile.gettempdir()) / uuid.uuid4().hex)
        self.path = self._staging.path

    def deliver(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.put_file(str(self.path / name), f"{self._root}/{name}")

    def sizes(self) -> Mapping[str, int]:
        return {name: int(entry["size"] or 0) for name, entry in _names(self._store, self._root).items()}

    def commit(self) -> None:
        # If the store says nothing definite about ``zero.json``, nothing is deleted.
        before = _listed(self._read_record())
        record = (self.path / RECORD_FILE).read_bytes()
        self._may_be_published = True
        try:
            self._store.pipe_file(f"{self._root}/{RECORD_FILE}", record)
        except BaseException:
            # An answer that was lost says nothing about the request.
            self._may_be_published = self._read_record() in (record, None)
            raise
        self._store.put_file(str(self.path / METADATA_FILE), f"{self._root}/{METADATA_FILE}")
        self._store.put_file(str(self.path / self.named(META_FILE)), f"{self._root}/{META_FILE}")
        with contextlib.suppress(Exception):  # what is left is deleted by the next save
            self._delete(lambda name, save: name in before or save not in (None, self.suffix[1:]))

    def discard(self) -> None:
        super().discard()
        if self._is_first and self.suffix and not self._may_be_published:
            with contextlib.suppress(Exception):
                self._delete(lambda name, save: save == self.suffix[1:])

    def _delete(self, chosen: Callable[[str, str | None], bool]) -> None:
        """Delete objects, chosen by their names and by the save that made them."""
        for name in _names(self._store, self._root):
            ours = _OURS.fullmatch(name)
            if chosen(name, ours and ours[1]):
                self._store.rm_file(f"{self._root}/{name}")

    def _connect(self) -> None:
        self._store, self._root = url_to_fs(self._url)
        self._root = self._root.rstrip("/")

    def _read_record(self) -> bytes | None:
        """What ``zero.json`` holds now: empty if there is none, ``None`` if that cannot be found out."""
        try:
            content: bytes = self._store.cat_file(f"{self._root}/{RECORD_FILE}")
        except FileNotFoundError:
            return b""
        except Exception:
            return None
        return content


def remove_at(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, a folder or a file, at a path or behind a URL. Nothing there is fine.

    Behind a URL, files that are not of the checkpoint stay. A folder that is no checkpoint, or has folders in it, is
    refused with an ``IsADirectoryError``.
    """
    if is_remote(path):
        _remove_remote(os.fspath(path))
    else:
        remove(local_path(path))


def _remove_remote(url: str) -> None:
    store, root = url_to_fs(url.rstrip("/"))
    store.invalidate_cache()
    if store.isfile(root):
        store.rm_file(root)
        return
    names = _names(store, root)
    _check_is_checkpoint(url, names)
    listed = _listed(store.cat_file(f"{root}/{RECORD_FILE}") if RECORD_FILE in names else None)
    others = [name for name in names if name in listed or _OURS.fullmatch(name) or _COPIED.fullmatch(name)]
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


def _check_is_checkpoint(url: str, names: Mapping[str, Any]) -> None:
    if names and not any(name in _MARKS or _OURS.fullmatch(name) for name in names):
        raise IsADirectoryError(f"'{url}' is a folder that is not a checkpoint (it holds {sorted(names)[:3]})")
    inside = sorted(name for name, entry in names.items() if entry.get("type") == "directory")
    if inside:
        raise IsADirectoryError(
            f"'{url}' is a checkpoint with folders in it ({', '.join(inside[:3])}). Move them away, or choose another "
            "name"
        )
