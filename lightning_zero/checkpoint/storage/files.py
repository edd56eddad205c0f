"""The files of one folder, read in parts: on a local disk, or in any store that fsspec knows."""

from __future__ import annotations

import io
import os
import stat
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_zero.errors import CheckpointError

__all__ = [
    "MAX_INDEX_NBYTES",
    "PIECE_NBYTES",
    "WRITTEN_NBYTES",
    "Files",
    "LocalFiles",
    "RemoteFiles",
    "entries_of",
    "is_folder",
    "is_remote",
    "local_path",
    "memory_nbytes",
    "open_folder",
    "open_parent",
    "open_range",
    "open_store",
    "read_bytes",
    "read_index",
    "samples",
]

PIECE_NBYTES = 1 << 24  # what is read and checked at a time
WRITTEN_NBYTES = 1 << 22  # what is cast and written at a time: beside it there are copies of its size
MAX_INDEX_NBYTES = 1 << 29  # of a file that says what is in others; of a model with a million tensors, a quarter
_SAMPLE_NBYTES = 1 << 14
_SMALL_NBYTES = 1 << 20
_OPEN_FILES = 16
_BLOCK_NBYTES = 1 << 20  # a request takes as long as the transfer of this much, roughly
_BLOCKS = 32


class LocalFiles:
    """A folder on a local or mounted file system. Names are plain: without a slash.

    It holds the folder itself and not its name, so that a checkpoint which is replaced meanwhile gives an error and
    never a mixture of two. ``CheckpointError`` if it is no folder that can be read.

    Files that are deleted take space until ``close``, or until nothing refers to this.

    With ``follow_links`` an entry may be a symbolic link. The cache of the Hugging Face hub consists of them; in a
    checkpoint one could only lead to what is not part of it.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.name = str(path)
        self._follow_links = follow_links
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"'{path}' is not a checkpoint directory: {error.strerror}.") from error
        self._opened: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _close, self._descriptor, self._opened)

    def has(self, name: str) -> bool:
        """Whether there is such an entry."""
        with suppress(OSError):
            self._stat(name)
            return True
        return False

    def size(self, name: str) -> int:
        """Bytes of a file; ``CheckpointError`` if it is missing, or not a regular file."""
        try:
            found = self._stat(name)
        except OSError as error:
            raise CheckpointError(f"'{self.name}' is not whole: '{name}' is missing ({error.strerror}).") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"'{self.name}/{name}' is not a regular file.")
        return found.st_size

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from a byte of a file on; ``CheckpointError`` if it cannot be read, or ends before."""
        with self._lock:  # another thread may close the descriptor to open a file of its own
            descriptor = self._opened.get(name) or self._open(name)
            done = 0
            while done < len(memory):
                try:
                    count = os.preadv(descriptor, [memory[done:]], offset + done)
                except OSError as error:
                    raise CheckpointError(
                        f"'{self.name}/{name}' cannot be read at byte {offset + done}: {error.strerror}."
                    ) from error
                if count == 0:
                    raise CheckpointError(f"'{self.name}/{name}' ends at byte {offset + done}: it was cut off.")
                done += count

    def _open(self, name: str) -> int:
        """A descriptor, of which a few are kept open."""
        if len(self._opened) >= _OPEN_FILES:
            os.close(self._opened.popitem(last=False)[1])
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
        try:
            descriptor = os.open(name, flags if self._follow_links else flags | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            raise CheckpointError(
                f"'{self.name}/{name}' cannot be read: {error.strerror}. The checkpoint was removed or replaced."
            ) from error
        self._opened[name] = descriptor
        return descriptor

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=self._follow_links)


def _close(descriptor: int, opened: OrderedDict[str, int]) -> None:
    for other in (*opened.values(), descriptor):
        os.close(other)


class RemoteFiles:
    """A folder behind a URL, with the methods of ``LocalFiles``. It is listed once, when it is opened.

    Small parts are cut out of blocks, of which some are kept: what lies side by side is mostly read in that order.
    ``CheckpointError`` if it cannot be listed.
    """

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        self._block = lru_cache(_BLOCKS)(self._read_block)
        try:
            self._store, self._root = open_store(url)
            entries = entries_of(self._store, self._root)
        except CheckpointError:
            raise
        except Exception as error:  # every store has its own
            raise CheckpointError(
                f"'{self.name}' is not a checkpoint directory: {type(error).__name__}: {error}."
            ) from error
        self._sizes = {name: entry.get("size") for name, entry in entries.items() if entry.get("type") == "file"}

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise CheckpointError(f"'{self.name}' is not whole: '{name}' is missing.")
        size = self._sizes[name]
        if size is None:  # some stores do not say
            size = self._sizes[name] = int(self._store.size(f"{self._root}/{name}"))
        return int(size)

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        if len(memory) >= _BLOCK_NBYTES:
            memory[:] = self._fetch(name, offset, len(memory))
            return
        done = 0
        while done < len(memory):
            number, inside = divmod(offset + done, _BLOCK_NBYTES)
            part = self._block(name, number)[inside : inside + len(memory) - done]
            if not part:
                raise CheckpointError(f"'{self.name}/{name}' ends before byte {offset + done}: it was cut off.")
            memory[done : done + len(part)] = part
            done += len(part)

    def _read_block(self, name: str, number: int) -> bytes:
        start = number * _BLOCK_NBYTES
        return self._fetch(name, start, max(0, min(_BLOCK_NBYTES, self.size(name) - start)))

    def _fetch(self, name: str, offset: int, nbytes: int) -> bytes:
        data = b""
        try:
            if nbytes:
                data = self._store.cat_file(f"{self._root}/{name}", start=offset, end=offset + nbytes)
        except Exception as error:
            raise CheckpointError(
                f"'{self.name}/{name}' cannot be read at byte {offset}: {type(error).__name__}: {error}. Was the "
                "checkpoint removed or replaced?"
            ) from error
        if len(data) != nbytes:
            raise CheckpointError(f"'{self.name}/{name}' ends at byte {offset + len(data)}: it was cut off.")
        return data


Files = LocalFiles | RemoteFiles


def entries_of(store: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What is in a folder of a store of fsspec now, by name; raises what the store does if there is none."""
    store.invalidate_cache(root)  # a listing from before another process saved
    paths = {str(entry["name"]).strip("/"): entry for entry in store.ls(root, detail=True)}
    paths.pop(root.strip("/"), None)  # some stores list an empty object for the folder itself
    return {os.path.basename(path): entry for path, entry in paths.items()}


class _Range(io.RawIOBase):
    """A range of a file as a file; see ``open_range``."""

    def __init__(self, files: Files, name: str, offset: int, nbytes: int, progress: Callable[[int], Any]) -> None:
        self._files, self._name, self._offset, self._nbytes, self._progress = files, name, offset, nbytes, progress
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer)
        memory = memory[: max(0, min(len(memory), self._nbytes - self._position))]
        self._files.read_into(self._name, self._offset + self._position, memory)
        self._progress(len(memory))
        self._position += len(memory)
        return len(memory)


def read_bytes(files: Files, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
    """A range of a file, to its end by default; ``CheckpointError`` if it cannot be read."""
    buffer = bytearray(files.size(name) - offset if nbytes is None else nbytes)
    files.read_into(name, offset, memoryview(buffer))
    return bytes(buffer)


def open_range(
    files: Files,
    name: str,
    offset: int,
    nbytes: int,
    *,
    buffer_nbytes: int = _SMALL_NBYTES,
    progress: Callable[[int], Any] = lambda nbytes: None,
) -> io.BufferedReader:
    """A range of a file as a file, read in pieces of a size. ``progress`` is told the bytes of each."""
    return io.BufferedReader(_Range(files, name, offset, nbytes, progress), max(1, min(buffer_nbytes, nbytes)))


def read_index(files: Files, name: str) -> bytes:
    """A whole file that says what is in others; ``CheckpointError`` if it is larger than any such file."""
    nbytes = files.size(name)
    if nbytes > MAX_INDEX_NBYTES:
        raise CheckpointError(
            f"'{files.name}/{name}' has {nbytes} bytes, which is too large for an index (at most {MAX_INDEX_NBYTES}): "
            "it is damaged or forged."
        )
    return read_bytes(files, name)


def memory_nbytes() -> int:
    """Of this machine: what is larger cannot be held."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def samples(files: Files, name: str, end_nbytes: int = _SAMPLE_NBYTES) -> tuple[int, ...]:
    """The size of a file, and checksums of its beginning, middle and end that tell it from another of that size."""
    size = files.size(name)
    parts = [(0, _SAMPLE_NBYTES), (size // 2, _SAMPLE_NBYTES), (max(0, size - end_nbytes), end_nbytes)]
    return size, *(zlib.crc32(read_bytes(files, name, start, min(nbytes, size - start))) for start, nbytes in parts)


# ---------------------------------------------------------------------------------------------------------------- paths


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL of anything but the local file system."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def open_store(url: str) -> tuple[Any, str]:
    """Fsspec's file system of a URL, and the path in it without slashes at its end.

    ``CheckpointError`` for a web server, which neither lists folders nor says whether a file was replaced meanwhile.
    """
    if url.startswith(("http://", "https://")):
        raise CheckpointError(
            f"'{url}' is on a web server, from which checkpoints are not read. Copy it first, with "
            "`fsspec.filesystem('https').get(url, folder)`, or name a store that fsspec reads in parts (s3://, gs://, "
            "hf://)."
        )
    scheme, _, rest = url.partition("://")  # the slashes of a scheme are the root of its file system
    store, root = url_to_fs(f"{scheme}://{rest.rstrip('/')}")
    return store, str(root).rstrip("/")


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder; ``CheckpointError`` if a URL cannot be asked."""
    if not is_remote(path):
        return os.path.isdir(local_path(path))
    try:
        system, root = open_store(os.fspath(path))
        system.invalidate_cache()
        return bool(system.isdir(root))
    except CheckpointError:
        raise
    except Exception as error:  # every store has its own
        raise CheckpointError(f"'{os.fspath(path)}' cannot be reached: {type(error).__name__}: {error}.") from error


def open_folder(path: str | os.PathLike[str], *, follow_links: bool = False) -> Files:
    """The files of a folder, wherever it is; ``CheckpointError`` if there is none."""
    if not is_remote(path):
        return LocalFiles(local_path(path), follow_links=follow_links)
    return RemoteFiles(os.fspath(path))


def open_parent(path: str | os.PathLike[str]) -> tuple[Files, str]:
    """The folder a file lies in, and the file's name there; ``CheckpointError`` if there is no such folder."""
    if not is_remote(path):
        local = local_path(path)
        return LocalFiles(local.parent, follow_links=True), local.name
    scheme, _, rest = os.fspath(path).partition("://")
    folder, _, name = rest.rstrip("/").rpartition("/")
    return RemoteFiles(f"{scheme}://{folder}"), name


def local_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path in the local (or a mounted) file system, also of a ``file://`` URL; else ``ValueError``."""
    text = os.fspath(path)
    if is_remote(text):
        raise ValueError(f"'{text}' is not in a local or mounted file system. Use one, and copy what is finished.")
    return Path(os.path.abspath(os.path.expanduser(text.removeprefix("file://"))))
