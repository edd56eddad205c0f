"""Files behind ``http://`` and ``https://``, read with the standard library alone.

fsspec would need aiohttp, and servers that list their folders; Lightning loads such a file with neither. A server that
can send parts of a file is asked for parts. From one that cannot, a file is copied once, to the folder for temporary
files (``TMPDIR``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException, HTTPResponse
from typing import IO, Final
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from lightning_zero.errors import CheckpointError

__all__ = ["HttpFolder", "is_http"]

_TIMEOUT_SECONDS: Final = 60.0  # without a byte
_ABSENT: Final = (403, 404, 410)  # object stores say 403 to those who may not list
_PART, _NO_SUCH_RANGE = 206, 416


def is_http(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of a web server."""
    return os.fspath(path).startswith(("http://", "https://"))


class HttpFolder:
    """The files under a URL, by their names: a server is not asked what there is.

    Args:
        url: of the folder.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._sizes: dict[str, int | None] = {}
        self._versions: dict[str, str | None] = {}
        self._copies: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        """Bytes of a file; ``None`` if there is none.

        Raises:
            CheckpointError: if the server cannot be asked.
        """
        if name not in self._sizes:
            self._sizes[name] = self._ask_for_size(name)
        return self._sizes[name]

    def fetch(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of a file, shorter if that ends before.

        Raises:
            CheckpointError: if it cannot be read, or is not the file whose size was asked for.
        """
        with self._lock:
            copy = self._copies.get(name)
        if copy is None:
            with self._request(name, f"bytes={offset}-{offset + nbytes - 1}") as response:
                if response.status == _PART:
                    with self._transfer(name):
                        return response.read()
                copy = self._receive(name, response)
            with self._lock:
                copy = self._copies.setdefault(name, copy)
        return os.pread(copy.fileno(), nbytes, offset)

    @contextmanager
    def copied(self, name: str) -> Iterator[str]:
        """The path of a copy of a file, which is deleted afterwards.

        Raises:
            CheckpointError: if it cannot be read, or written to the folder for temporary files.
        """
        with self._lock:
            kept = self._copies.pop(name, None)
        if kept is None:
            with self._request(name) as response:
                kept = self._receive(name, response)
        with self._lock:
            self._copies[name] = kept
        try:
            yield kept.name
        finally:
            with kept, self._lock:
                del self._copies[name]

    def _ask_for_size(self, name: str) -> int | None:
        try:
            response = self._open(name, "bytes=0-0")
        except HTTPError as error:
            error.close()
            if error.code in _ABSENT:
                return None
            if error.code == _NO_SUCH_RANGE:
                return 0
            raise CheckpointError(f"{self._where(name)} cannot be read: the server says {error}.") from error
        with response:
            self._versions[name] = response.headers.get("ETag")
            total = response.headers.get("Content-Length")
            if response.status == _PART:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total is not None and total.isdecimal():
                return int(total)
        with self._request(name) as response:  # the server does not know before it has sent everything
            self._copies[name] = self._receive(name, response)
        return os.path.getsize(self._copies[name].name)

    def _request(self, name: str, part: str | None = None) -> HTTPResponse:
        try:
            response = self._open(name, part)
        except HTTPError as error:
            error.close()
            raise CheckpointError(
                f"{self._where(name)} cannot be read: the server says {error}. Was the checkpoint removed or replaced?"
            ) from error
        version = response.headers.get("ETag")
        if self._versions.setdefault(name, version) != version:
            response.close()
            raise CheckpointError(f"{self._where(name)} was replaced while it was read. Repeat this.")
        return response

    def _open(self, name: str, part: str | None) -> HTTPResponse:
        """Ask the server."""
        url = quote(f"{self._url}/{name}", safe=":/?#[]@!$&'()*+,;=%~")
        headers = {"Accept-Encoding": "identity"} | ({"Range": part} if part else {})
        try:
            response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=_TIMEOUT_SECONDS)
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            raise CheckpointError(f"{self._where(name)} cannot be reached: {error}.") from error
        return response

    def _receive(self, name: str, response: HTTPResponse) -> IO[bytes]:
        """A copy of a whole file."""
        expected = response.headers.get("Content-Length")
        with ExitStack() as stack, self._transfer(name):
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="lightning-zero-"))
            shutil.copyfileobj(response, file, 1 << 20)
            file.flush()
            nbytes = os.path.getsize(file.name)
            if expected is not None and nbytes != int(expected):
                raise CheckpointError(
                    f"{self._where(name)} ended at byte {nbytes} of {expected}: the connection broke off."
                )
            stack.pop_all()
        return file

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
        return f"'{self._url}/{name.partition('?')[0]}'"
