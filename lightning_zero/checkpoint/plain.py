"""Checkpoints that are one torch file: Lightning's ``.ckpt``, or a state dict that was saved."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import IO, Any

import fsspec
import torch
from torch import Tensor

from lightning_zero.checkpoint.commit import local_path
from lightning_zero.checkpoint.files import is_remote
from lightning_zero.checkpoint.reader import Opened
from lightning_zero.errors import CheckpointError

__all__ = ["ADVICE", "load_torch", "read_torch_file"]

ADVICE = (
    "allow its classes with `torch.serialization.add_safe_globals` (the Trainer does not hand `weights_only=False` on "
    "to strategies that load after set-up, as this one does; `load_from_checkpoint` does)"
)

_ARCHIVE = b"PK\x03\x04"


def read_torch_file(path: str | os.PathLike[str], weights_only: bool | None, copied: str | None = None) -> Opened:
    """What is in a torch file. A local one is mapped into memory: elements are read from disk when they are used.

    While its tensors are in use, a mapped file must not be cut off or written to in place: the operating system ends
    a process that reads what is no longer there (SIGBUS). Replacing it by another file of the name, or deleting it, is
    fine: the mapping keeps the old one.

    Args:
        path: of the file, or its URL.
        weights_only: as for ``torch.load``.
        copied: the path of a local copy that is read in its place.

    Returns:
        Lightning's checkpoint dictionary with ordinary tensors, which must not be written to; a bare state dict is
        put under ``state_dict``.

    Raises:
        CheckpointError: if it is no such file, or could run code.
    """
    where = f"'{os.fspath(path)}'"
    try:
        if copied is None and is_remote(path):
            with fsspec.open(os.fspath(path), "rb") as file:
                loaded = load_torch(file, where, weights_only, ADVICE)
                return Opened(_as_checkpoint(loaded, where))
        local = local_path(path if copied is None else copied)
        with open(local, "rb") as file:
            is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
            nbytes = os.fstat(file.fileno()).st_size
            # What torch wrote until version 1.6 is no archive and cannot be mapped.
            loaded = load_torch(str(local), where, weights_only, ADVICE, mapped=is_archive)
            if os.fstat(file.fileno()).st_size != nbytes:  # before anything that is mapped is touched
                raise CheckpointError(f"{where} was changed while it was opened: it had {nbytes} bytes. Repeat this.")
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}.") from error
    return Opened(_as_checkpoint(loaded, where))


def load_torch(
    file: str | IO[bytes], where: str, weights_only: bool | None, advice: str, *, mapped: bool = False
) -> Any:
    """``torch.load`` into host memory.

    Args:
        file: a path, or an open file.
        where: it lies, for messages.
        weights_only: refuse what could run code; ``None`` does so unless torch's environment variable forbids it.
        advice: what to do about a refusal, to follow "if you trust the file".
        mapped: map the file into memory instead of reading it.

    Raises:
        CheckpointError: if it cannot be loaded.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise CheckpointError(f"{where} is damaged or no torch file: {error}") from error
        raise CheckpointError(
            f"{where} was not loaded: it is damaged, or loading it could run code. If you trust the file, {advice}. "
            f"The reason: {error}"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged or no torch file: {type(error).__name__}: {error}") from error


def _as_checkpoint(loaded: Any, where: str) -> dict[str, Any]:
    """Lightning's layout for what a torch file held.

    Raises:
        CheckpointError: if it is neither a checkpoint nor a state dict.
    """
    if isinstance(loaded, Mapping) and all(isinstance(key, str) for key in loaded):
        if isinstance(loaded.get("state_dict"), Mapping):
            return dict(loaded)
        if any(isinstance(value, Tensor) for value in loaded.values()):
            return {"state_dict": dict(loaded)}
    raise CheckpointError(
        f"{where} holds a {type(loaded).__name__} which is neither a Lightning checkpoint (with a `state_dict`) nor a "
        "state dict of tensors by name."
    )
