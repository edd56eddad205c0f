"""Opening a checkpoint of any kind, which is found out by looking."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NamedTuple

from lightning_zero.checkpoint.directories import read_directory, read_foreign_directory
from lightning_zero.checkpoint.format.record import METADATA_FILE, RECORD_FILE, Opened
from lightning_zero.checkpoint.format.safetensors import read_safetensors
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.torch_file import read_torch_file
from lightning_zero.checkpoint.storage.files import (
    Files,
    is_folder,
    open_folder,
    open_parent,
    samples,
)
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, ExtensionError, shortened, some
from lightning_zero.registry import extension, installed

__all__ = [
    "Found",
    "Kind",
    "Reader",
    "find_checkpoint",
    "is_checkpoint_directory_at",
    "open_checkpoint",
    "with_samples",
]


def open_checkpoint(
    path: str | os.PathLike[str],
    control: ControlGroup,
    *,
    verify: bool | Literal["sample"] = False,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read what a checkpoint says of itself; tensors stay on disk until they are asked for.

    Args:
        path: a directory of ours, of Lightning's sharded strategies, of ``dcp.save`` or of DeepSpeed; a torch file; a
            safetensors file or directory; a local path or a URL.
        control: the ranks.
        verify: read everything that has a checksum and compare it, the files shared out among the ranks. A warning on
            rank 0 names what has none. ``"sample"`` compares a part of each file of our own format only, if the
            extension ``inspection`` is there; see [Note: The sample] in it.
        weights_only: for torch files and the ``meta.pt`` of other programs, as for ``torch.load``. ``False`` lets them
            run code, which by default they must not. Our own directories hold none that is needed.

    Returns:
        Lightning's checkpoint dictionary. Tensors are StoredTensors, or mapped from a torch file. What is only
        weights is under ``state_dict``. What could run code is left out with a warning on rank 0, or refused.

    Raises:
        CheckpointError: on every rank, naming the file, if it is not whole, could run code, or differs between ranks.
        ExtensionError: if it has a layout of the extension ``formats``, which was deleted.

    Collective: every rank.
    """
    what = f"load the checkpoint '{os.fspath(path)}'"
    read: list[tuple[Found, Opened]] = []

    def look() -> Any:
        found = find_checkpoint(path)
        read.append((found, read_checkpoint(path, found, weights_only)))
        return read[0][1].digest

    try:
        digests = control.together(what, look)
    except CheckpointError as error:
        if isinstance(error.__cause__, ExtensionError):  # it was deleted from this copy of the package
            raise error.__cause__ from None
        raise
    found, (checkpoint, _, missing, notes) = read[0]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"Could not {what}: rank {rank} sees another checkpoint there than rank 0, or was given another name. "
                "Use a shared file system, and one name."
            )
    for note in notes if control.rank == 0 else ():
        warnings.warn(f"Of the checkpoint '{os.fspath(path)}' {note}.", stacklevel=2)
    if missing and control.rank == 0:
        names = shortened(", ".join(missing))
        warnings.warn(
            f"Left out of the checkpoint '{os.fspath(path)}', because loading it could run code: {names}. "
            f"If it is needed and you trust the file, allow its class with `torch.serialization.add_safe_globals`.",
            stacklevel=2,
        )
    if verify is True or (verify and installed("inspection")):
        extension("inspection").verify_together(path, found, control, sampled=verify == "sample")
    return checkpoint


def is_checkpoint_directory_at(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory, local or behind a URL, that ``open_checkpoint`` reads. Looks at names only."""
    try:
        return is_folder(path) and _in_folder(path) is not None
    except (CheckpointError, ExtensionError):  # it cannot be read
        return False


_END_NBYTES = 1 << 20  # of a torch file: the directory of the archive, with a CRC-32 of every tensor


class Kind(Enum):
    """What a checkpoint is, for people, by what it is told from."""

    OWN = "sharded directory of lightning_zero"  # with our record
    FOREIGN = "sharded directory of torch.distributed.checkpoint"  # with DCP's index
    SAFETENSORS = "safetensors file"  # by its ending
    TORCH = "torch file"  # any other file
    # Of the extension `formats`:
    HUGGING_FACE = "directory of safetensors"  # of the usual names
    DEEPSPEED = "sharded directory of DeepSpeed"  # with `latest`, or the folder of one save in it


class Found(NamedTuple):
    """What is at a path: a checkpoint of a kind, the folder that it is or lies in, and there its name; empty for a
    folder.
    """

    kind: Kind
    files: Files
    name: str = ""


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Look what is at a path; ``CheckpointError`` if it is nothing that can be a checkpoint."""
    if not is_folder(path):
        files, name = open_parent(path)
        if not files.has(name):
            raise CheckpointError(f"There is no checkpoint at '{os.fspath(path)}': no such file or directory.")
        return Found(Kind.SAFETENSORS if name.lower().endswith(".safetensors") else Kind.TORCH, files, name)
    found = _in_folder(path)
    if found is None:
        there = extension("inspection").checkpoints_in(path) if installed("inspection") else []
        in_it = f" In it are checkpoints, of which one is needed: {some(map(repr, there))}." if there else ""
        raise CheckpointError(
            f"The directory '{os.fspath(path)}' is no checkpoint: it has neither {RECORD_FILE} nor {METADATA_FILE}, "
            "model.safetensors, model.safetensors.index.json or DeepSpeed's `latest`."
            f"{in_it or ' If it was being written, use the one before.'}"
        )
    return found


def _in_folder(path: str | os.PathLike[str]) -> Found | None:
    files = open_folder(path)
    if files.has(RECORD_FILE):
        return Found(Kind.OWN, files)
    if files.has(METADATA_FILE):
        return Found(Kind.FOREIGN, files)
    why = f"'{os.fspath(path)}' has neither {RECORD_FILE} nor {METADATA_FILE}."
    found: Found | None = extension("formats", "name another checkpoint", why=why).find(path)
    return found


def read_checkpoint(path: str | os.PathLike[str], found: Found, weights_only: bool | None) -> Opened:
    """What a checkpoint of any kind says of itself; ``open_checkpoint`` on this rank alone."""
    read: Reader = _READERS.get(found.kind) or extension("formats").READERS[found.kind]
    return read(path, found, weights_only)


def _read_torch(path: str | os.PathLike[str], found: Found, weights_only: bool | None) -> Opened:
    digest = samples(found.files, found.name, _END_NBYTES)  # first of all asks for the size: a pipe would never end
    return read_torch_file(path, weights_only)._replace(digest=digest)


Reader = Callable[[str | os.PathLike[str], Found, bool | None], Opened]

_READERS: dict[Kind, Reader] = {
    Kind.OWN: lambda path, at, weights_only: read_directory(at.files),
    Kind.FOREIGN: lambda path, at, weights_only: read_foreign_directory(at.files, weights_only),
    Kind.SAFETENSORS: lambda path, at, weights_only: with_samples(read_safetensors(at.files, at.name), at.files),
    Kind.TORCH: _read_torch,
}


def with_samples(opened: Opened, files: Files) -> Opened:
    """Headers of safetensors are the same for all weights of a model: the digest is of some elements too."""
    stored = [value for value in opened.checkpoint["state_dict"].values() if isinstance(value, StoredTensor)]
    names = sorted({chunk.file for value in stored for chunk in value._item.chunks})
    return opened._replace(digest=(opened.digest, *(samples(files, name) for name in names)))
