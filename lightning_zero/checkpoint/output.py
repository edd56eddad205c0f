"""One file written in pieces, by any number of processes, and published in one step."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint import commit
from lightning_zero.checkpoint.commit import Exchange, Staging, fsync_directory, local_path, sweep
from lightning_zero.checkpoint.files import is_remote
from lightning_zero.checkpoint.typed_json import raw_memory

__all__ = ["PIECE_NBYTES", "StagedFile", "local_output", "refuse_overlap", "write_bytes", "write_tensor"]

PIECE_NBYTES = 1 << 22  # copied to the host, checked and written at a time


class StagedFile:
    """A file being written, on the one process that makes and publishes it. See [Note: Publishing].

    It lies in a temporary directory beside its final name, because that is what later saves know how to sweep when the
    process is killed.

    Args:
        final: the name to publish under. Its parents are made.
        nbytes: size of the file.
        exchange: as for ``Staging``: needed only where a directory has the name.

    Raises:
        IsADirectoryError: if ``final`` is a directory that is no checkpoint: publishing would delete it.
        OSError: if the file cannot be made.

    Attributes:
        path: where the file is until it is published.
    """

    def __init__(self, final: Path, nbytes: int, exchange: Exchange | None = None) -> None:
        self.final = final
        self._exchange = exchange or commit._exchange
        self._staging = Staging(final)
        self.path = self._staging.path / "file"
        try:
            with open(self.path, "xb") as file:
                os.truncate(file.fileno(), nbytes)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the file its final name, durably, then delete what had it.

        Raises:
            OSError: if it could not. The final name then still leads to what it led to before, or, if only making the
                name durable failed, to the whole new file.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self.final.is_dir() and not self.final.is_symlink():
            self._replace_directory()
        else:
            os.replace(self.path, self.final)
        fsync_directory(self.final.parent)
        self.discard()
        sweep(self.final.parent)  # the data of a directory that was published through a link

    def discard(self) -> None:
        """Delete the file if it was not published. Never raises: the next save sweeps what is left."""
        self._staging.discard()

    def _replace_directory(self) -> None:
        """The directory then has the temporary name, and is deleted with it."""
        try:
            self._exchange(self.path, self.final)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            raise IsADirectoryError(
                f"'{self.final}' is a checkpoint directory, which this file system cannot replace by a file in one "
                "step. Delete it, or choose another name."
            ) from error


def local_output(path: str | os.PathLike[str]) -> Path:
    """An absolute path in the local (or a mounted) file system.

    Raises:
        ValueError: for a URL: single files are written in pieces at many places, which object stores cannot.
    """
    if is_remote(path):
        raise ValueError(
            f"Single files are written to local or mounted file systems, not to '{os.fspath(path)}': their pieces are "
            "written at many places at once, which object stores cannot. Write to a local path and copy the finished "
            "file."
        )
    return local_path(path)


def refuse_overlap(source: str | os.PathLike[str], out: Path, replaced: Callable[[str], bool]) -> None:
    """Make sure that no file of a checkpoint is replaced by what is made of it, whatever links lead there.

    Args:
        source: path or URL of the checkpoint.
        out: the file or the directory to write.
        replaced: whether a file of that name in ``out`` would be replaced or deleted.

    Raises:
        ValueError: if one would be, or ``out`` would lie within the checkpoint.
    """
    if is_remote(source):
        return
    local = local_path(source)
    real, target = Path(os.path.realpath(local)), Path(os.path.realpath(out))
    if target == real or (target.exists() and real.exists() and target.samefile(real)):
        raise ValueError(f"'{out}' is the source itself: write to another place.")
    names = _names_of(out)
    if real.is_dir() and any(name.is_relative_to(real) for name in names):
        raise ValueError(f"'{out}' is within the source: write to another place.")
    parts = [real / name for name in os.listdir(real)] if real.is_dir() else [local]
    for part in (name for given in parts for name in _names_of(given)):
        if part in names or (part.parent == target and replaced(part.name)):
            raise ValueError(f"'{part}' of the source would be replaced or deleted: write to another place.")


def _names_of(path: Path) -> set[Path]:
    """Of a path, and of what it leads to if it is a link; without links before the last part."""
    return {Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name)}


def write_bytes(descriptor: int, offset: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at an offset of a file.

    Raises:
        OSError: if it could not be written.
    """
    memory = memoryview(content)
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)


def write_tensor(descriptor: int, offset: int, flat: Tensor) -> int:
    """Write the elements of a 1-D tensor at an offset of a file, a piece at a time.

    Returns:
        Their CRC-32; 0 if torch is set to compute none.

    Raises:
        OSError: if they could not be written.
    """
    crc32, wanted = 0, torch.serialization.get_crc32_options()
    step = max(1, PIECE_NBYTES // flat.dtype.itemsize)
    for begin in range(0, flat.numel(), step):
        memory = raw_memory(flat[begin : begin + step])
        write_bytes(descriptor, offset + begin * flat.dtype.itemsize, memory)
        if wanted:
            crc32 = zlib.crc32(memory, crc32)
    return crc32
