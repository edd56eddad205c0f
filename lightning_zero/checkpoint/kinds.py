"""The kinds of checkpoints that can be read, found out by looking."""

from __future__ import annotations

import os
import zlib
from contextlib import nullcontext
from enum import Enum, auto
from typing import NamedTuple

from lightning_zero.checkpoint.files import Files, HttpFiles, is_folder, open_folder, open_parent, read_bytes
from lightning_zero.checkpoint.foreign import read_foreign_directory
from lightning_zero.checkpoint.http import is_http
from lightning_zero.checkpoint.plain import read_torch_file
from lightning_zero.checkpoint.reader import Opened, read_directory
from lightning_zero.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, read_safetensors, read_safetensors_directory
from lightning_zero.checkpoint.schema import METADATA_FILE, RECORD_FILE
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.errors import CheckpointError

__all__ = ["Found", "Kind", "find_checkpoint", "read_checkpoint"]


_SAMPLE_NBYTES = 1 << 14
_END_NBYTES = 1 << 20  # of a torch file: the directory of the archive, with a CRC-32 of every tensor


class Kind(Enum):
    """What a checkpoint is, by what it is told from."""

    OWN = auto()  # a directory with our record
    FOREIGN = auto()  # a directory with DCP's index
    HUGGING_FACE = auto()  # a directory with safetensors of the usual names
    SAFETENSORS = auto()  # a file of that ending
    TORCH = auto()  # any other file


class Found(NamedTuple):
    """What is at a path.

    Attributes:
        kind: what it is.
        files: the folder that is the checkpoint, or that it lies in.
        name: of the file in it; empty for a folder.
    """

    kind: Kind
    files: Files
    name: str = ""


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Look what is at a path.

    Raises:
        CheckpointError: if it is nothing that can be a checkpoint.
    """
    if not (_is_folder_of_a_server(path) if is_http(path) else is_folder(path)):
        files, name = open_parent(path)
        if not files.has(name):
            or_hidden = ", or the server does not let us read it" if is_http(path) else ""
            raise CheckpointError(
                f"There is no checkpoint at '{os.fspath(path)}': no such file or directory{or_hidden}."
            )
        ending = name.partition("?")[0].lower() if is_http(path) else name.lower()
        return Found(Kind.SAFETENSORS if ending.endswith(".safetensors") else Kind.TORCH, files, name)
    files = open_folder(path)
    if files.has(RECORD_FILE):
        return Found(Kind.OWN, files)
    if files.has(METADATA_FILE):
        return Found(Kind.FOREIGN, files)
    files = open_folder(path, follow_links=True)
    if files.has(INDEX_FILE) or files.has(SINGLE_FILE):
        return Found(Kind.HUGGING_FACE, files)
    raise CheckpointError(
        f"The directory '{os.fspath(path)}' is no checkpoint: it has neither {RECORD_FILE} nor {METADATA_FILE}, "
        f"{SINGLE_FILE} or {INDEX_FILE}. If it was being written, use the one before."
    )


def read_checkpoint(path: str | os.PathLike[str], found: Found, weights_only: bool | None) -> Opened:
    """What a checkpoint of any kind says of itself.

    Args:
        path: of the checkpoint.
        found: what is there.
        weights_only: as for ``open_checkpoint``.

    Raises:
        CheckpointError: as ``open_checkpoint`` does, on this rank.
    """
    kind, files, name = found
    if kind is Kind.OWN:
        return read_directory(files)
    if kind is Kind.FOREIGN:
        return read_foreign_directory(files, weights_only)
    if kind is Kind.HUGGING_FACE:
        return _with_samples(read_safetensors_directory(files), files)
    if kind is Kind.SAFETENSORS:
        return _with_samples(read_safetensors(files, name), files)
    with files.copied(name) if isinstance(files, HttpFiles) else nullcontext() as copied:
        digest = _samples(files, name, _END_NBYTES)  # first of all asks for the size: a pipe would never end
        return read_torch_file(path, weights_only, copied)._replace(digest=digest)


def _is_folder_of_a_server(url: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint directory lies at an address, by what such directories hold. A signed address has a file."""
    files = open_folder(url)
    return "?" not in os.fspath(url) and any(
        files.has(name) for name in (RECORD_FILE, METADATA_FILE, INDEX_FILE, SINGLE_FILE)
    )


def _with_samples(opened: Opened, files: Files) -> Opened:
    """Headers of safetensors are the same for all weights of a model: the digest is of some elements too."""
    stored = [value for value in opened.checkpoint["state_dict"].values() if isinstance(value, StoredTensor)]
    names = sorted({chunk.file for value in stored for chunk in value._item.chunks})
    return opened._replace(digest=(opened.digest, *(_samples(files, name) for name in names)))


def _samples(files: Files, name: str, end_nbytes: int = _SAMPLE_NBYTES) -> tuple[int, ...]:
    """The size of a file, and checksums of its beginning, middle and end that tell it from another of that size."""
    size = files.size(name)
    parts = [(0, _SAMPLE_NBYTES), (size // 2, _SAMPLE_NBYTES), (max(0, size - end_nbytes), end_nbytes)]
    return size, *(zlib.crc32(read_bytes(files, name, start, min(nbytes, size - start))) for start, nbytes in parts)
