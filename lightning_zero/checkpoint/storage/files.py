"""The files of one folder, read in parts: on a local disk, behind any URL that fsspec knows, or on a web server."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Final
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from fsspec.core import url_to_fs

from lightning_zero.errors import CheckpointError

__all__ = [
    "PIECE_NBYTES",
    "WRITTEN_NBYTES",
    "Files",
    "HttpFiles",
    "LocalFiles",
    "RemoteFiles",
    "Window",
    "entries_of",
    "is_folder",
    "is_http",
    "is_remote",
    "local_output",
    "local_path",
    "open_folder",
    "open_parent",
    "read_bytes",
]

PIECE_NBYTES = 1 << 24  # what is read and checked at a time
WRITTEN_NBYTES = 1 << 22  # what is cast and written at a time: beside it there are copies of its size
_OPEN_FILES = 16
_BLOCK_NBYTES = 1 << 20  # a request takes as long as the transfer of this much, roughly
_BLOCKS = 32


class LocalFiles:
    """A folder on a local or mounted file system. Names are plain: without a slash.

    It holds the folder itself and not its name, so that a checkpoint which is replaced meanwhile gives an error and
    never a mixture of two. ``CheckpointError`` if it is no folder that can be read.

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
        weakref.finalize(self, _close, self._descriptor, self._opened)

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
            descriptor = self._file(name)
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

    def _file(self, name: str) -> int:
        """A descriptor, of which a few are kept open."""
        if name in self._opened:
            self._opened.move_to_end(name)
            return self._opened[name]
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
        self.name = _trimmed(url)
        self._blocks: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()
        self._sizes = self._list()

    def _list(self) -> dict[str, int | None]:
        """What is in the folder, with its size where the store says so."""
        try:
            self._system, self._root = url_to_fs(self.name)
            entries = entries_of(self._system, self._root)
        except Exception as error:  # every store has its own
            raise CheckpointError(
                f"'{self.name}' is not a checkpoint directory: {type(error).__name__}: {error}."
            ) from error
        return {name: entry.get("size") for name, entry in entries.items() if entry.get("type") == "file"}

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise CheckpointError(f"'{self.name}' is not whole: '{name}' is missing.")
        size = self._sizes[name]
        if size is None:  # some stores do not say
            size = self._sizes[name] = int(self._system.size(f"{self._root}/{name}"))
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

    def _block(self, name: str, number: int) -> bytes:
        with self._lock:
            block = self._blocks.pop((name, number), None)
        if block is None:
            start = number * _BLOCK_NBYTES
            block = self._fetch(name, start, max(0, min(_BLOCK_NBYTES, self.size(name) - start)))
        with self._lock:
            self._blocks[name, number] = block  # the last one used stays longest
            if len(self._blocks) > _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return block

    def _fetch(self, name: str, offset: int, nbytes: int) -> bytes:
        data = self._ask_for_range(name, offset, nbytes) if nbytes else b""
        if len(data) != nbytes:
            raise CheckpointError(f"'{self.name}/{name}' ends at byte {offset + len(data)}: it was cut off.")
        return data

    def _ask_for_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of a file, shorter if that ends before."""
        try:
            data: bytes = self._system.cat_file(f"{self._root}/{name}", start=offset, end=offset + nbytes)
        except Exception as error:
            raise CheckpointError(
                f"'{self.name}/{name}' cannot be read at byte {offset}: {type(error).__name__}: {error}. Was the "
                "checkpoint removed or replaced?"
            ) from error
        return data


_TIMEOUT_SECONDS: Final = 60.0  # without a byte
_ABSENT: Final = (403, 404, 410)  # object stores say 403 to those who may not list
_PART, _NO_SUCH_RANGE = 206, 416


class HttpFiles(RemoteFiles):
    """A folder behind ``http://`` or ``https://``, read with the standard library alone.

    fsspec would need aiohttp, and servers that list their folders: here the server is asked for every name. One that
    can send parts of a file is asked for parts. From one that cannot, a file is copied once, to the folder for
    temporary files (``TMPDIR``). ``CheckpointError`` if a server cannot be asked, or a file was replaced meanwhile.
    """

    def _list(self) -> dict[str, int | None]:
        self._versions: dict[str, str | None] = {}
        self._copies: dict[str, IO[bytes]] = {}
        return {}

    def has(self, name: str) -> bool:
        if name not in self._sizes:
            self._sizes[name] = self._ask_for_size(name)
        return self._sizes[name] is not None

    def size(self, name: str) -> int:
        size = self._sizes[name] if self.has(name) else None
        if size is None:
            raise CheckpointError(f"'{self.name}' is not whole: the server has no '{name}' for us.")
        return size

    @contextmanager
    def copied(self, name: str) -> Iterator[str]:
        """The path of a local copy of a file, which is deleted afterwards."""
        with self._copies.get(name) or self._receive(name, self._request(name)) as copy:
            try:
                yield copy.name
            finally:
                del self._copies[name]

    def _ask_for_range(self, name: str, offset: int, nbytes: int) -> bytes:
        copy = self._copies.get(name)
        if copy is None:
            response = self._request(name, f"bytes={offset}-{offset + nbytes - 1}")
            if response.status == _PART:
                with response, self._transfer(name):
                    data: bytes = response.read()
                    return data
            copy = self._receive(name, response)
        return os.pread(copy.fileno(), nbytes, offset)

    def _ask_for_size(self, name: str) -> int | None:
        """Bytes of a file; ``None`` if there is none."""
        with self._request(name, "bytes=0-0", expected=(*_ABSENT, _NO_SUCH_RANGE)) as response:
            if response.status in _ABSENT:
                return None
            if response.status == _NO_SUCH_RANGE:
                return 0
            total = response.headers.get("Content-Length")
            if response.status == _PART:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total is not None and total.isdecimal():
                return int(total)
        # The server does not know before it has sent everything.
        return os.path.getsize(self._receive(name, self._request(name)).name)

    def _request(self, name: str, part: str | None = None, expected: Collection[int] = ()) -> Any:
        """A file, or a part of it, always of one version; or an error that is ``expected``."""
        url = quote(f"{self.name}/{name}", safe=":/?#[]@!$&'()*+,;=%~")
        headers = {"Accept-Encoding": "identity"} | ({"Range": part} if part else {})
        try:
            response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=_TIMEOUT_SECONDS)
        except HTTPError as error:
            if error.code in expected:
                return error
            error.close()
            raise CheckpointError(
                f"{self._where(name)} cannot be read: the server says {error}. Was the checkpoint removed or replaced?"
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise CheckpointError(f"{self._where(name)} cannot be reached: {error}.") from error
        version = response.headers.get("ETag")
        if self._versions.setdefault(name, version) != version:
            response.close()
            raise CheckpointError(f"{self._where(name)} was replaced while it was read. Repeat this.")
        return response

    def _receive(self, name: str, response: HTTPResponse) -> IO[bytes]:
        """A copy of a whole file, which is kept."""
        expected = response.headers.get("Content-Length")
        with response, ExitStack() as stack, self._transfer(name):
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="lightning-zero-"))
            shutil.copyfileobj(response, file, 1 << 20)
            file.flush()
            nbytes = os.path.getsize(file.name)
            if expected is not None and nbytes != int(expected):
                raise CheckpointError(
                    f"{self._where(name)} ended at byte {nbytes} of {expected}: the connection broke off."
                )
            stack.pop_all()
        return self._copies.setdefault(name, file)  # another thread may have been faster

    @contextmanager
    def _transfer(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException) as error:
            raise CheckpointError(
                f"{self._where(name)} could not be copied into memory or to '{tempfile.gettempdir()}': "
                f"{type(error).__name__}: {error}."
            ) from error

    def _where(self, name: str) -> str:
        return f"'{self.name}/{name.partition('?')[0]}'"


Files = LocalFiles | RemoteFiles


def entries_of(store: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What is in a folder of a store of fsspec now, by name; raises what the store does if there is none."""
    store.invalidate_cache(root)  # a listing from before another process saved
    paths = {str(entry["name"]).strip("/"): entry for entry in store.ls(root, detail=True)}
    paths.pop(root.strip("/"), None)  # some stores list an empty object for the folder itself
    return {os.path.basename(path): entry for path, entry in paths.items()}


class Window(io.RawIOBase):
    """A range of a file as a file: ``read_into`` fills memory with what is at an offset of the range.

    Reading more than ``largest`` at once, which a forged length may ask for, is refused.
    """

    def __init__(self, read_into: Callable[[int, memoryview], Any], nbytes: int, largest: int | None = None) -> None:
        self._read_into, self._nbytes, self._largest = read_into, nbytes, largest
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
        if self._largest is not None and len(memory) > self._largest:
            raise ValueError(f"{len(memory)} bytes are too many to be read at once")
        memory = memory[: max(0, min(len(memory), self._nbytes - self._position))]
        self._read_into(self._position, memory)
        self._position += len(memory)
        return len(memory)


def read_bytes(files: Files, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
    """A range of a file, to its end by default; ``CheckpointError`` if it cannot be read."""
    buffer = bytearray(files.size(name) - offset if nbytes is None else nbytes)
    files.read_into(name, offset, memoryview(buffer))
    return bytes(buffer)


# ---------------------------------------------------------------------------------------------------------------- paths


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL of anything but the local file system."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def is_http(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of a web server."""
    return os.fspath(path).startswith(("http://", "https://"))


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder; ``CheckpointError`` if a URL cannot be asked."""
    if not is_remote(path):
        return os.path.isdir(local_path(path))
    try:
        system, root = url_to_fs(_trimmed(os.fspath(path)))
        system.invalidate_cache()
        return bool(system.isdir(root))
    except Exception as error:  # every store has its own
        raise CheckpointError(f"'{os.fspath(path)}' cannot be reached: {type(error).__name__}: {error}.") from error


def open_folder(path: str | os.PathLike[str], *, follow_links: bool = False) -> Files:
    """The files of a folder, wherever it is; ``CheckpointError`` if there is none."""
    if not is_remote(path):
        return LocalFiles(local_path(path), follow_links=follow_links)
    return (HttpFiles if is_http(path) else RemoteFiles)(os.fspath(path))


def open_parent(path: str | os.PathLike[str]) -> tuple[Files, str]:
    """The folder a file lies in, and the file's name there; ``CheckpointError`` if there is no such folder."""
    if not is_remote(path):
        local = local_path(path)
        return LocalFiles(local.parent, follow_links=True), local.name
    text, question, query = os.fspath(path).partition("?" if is_http(path) else "\0")
    scheme, _, rest = text.partition("://")
    folder, _, name = rest.rstrip("/").rpartition("/")
    return open_folder(f"{scheme}://{folder}"), name + question + query


def _trimmed(url: str) -> str:
    """A URL without slashes at its end, except for those of its scheme: they are the root of the file system."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path in the local (or a mounted) file system, also of a ``file://`` URL; else ``ValueError``."""
    text = os.fspath(path)
    if is_remote(text):
        raise ValueError(
            f"'{text}' is not in a local or mounted file system, and this works there only. Use such a path, and "
            "copy what is finished."
        )
    return Path(os.path.abspath(os.path.expanduser(text.removeprefix("file://"))))


def local_output(path: str | os.PathLike[str]) -> Path:
    """The same for a single file to write: ``ValueError`` for any other URL."""
    if is_remote(path):
        raise ValueError(
            f"Single files are written to local or mounted file systems, not to '{os.fspath(path)}': their pieces are "
            "written at many places at once, which object stores cannot. Write to a local path and copy the finished "
            "file."
        )
    return local_path(path)
