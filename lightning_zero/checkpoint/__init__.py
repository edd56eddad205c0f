"""Bytes on disk: checkpoints as directories that every rank writes and reads its own part of.

The format is a stock ``torch.distributed.checkpoint`` directory, so that others can read it, with a record of our
own, so that loading is fast and runs no code. See [Note: The directory] in ``schema.py`` and [Note: Publishing] in
``commit.py``.
"""

from __future__ import annotations

import os

from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.commit import local_path, remove
from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.reader import StoredTensor, is_sharded_checkpoint, load_checkpoint_directory
from lightning_zero.checkpoint.save import save_checkpoint_directory

__all__ = [
    "Control",
    "FlatShard",
    "StoredTensor",
    "is_sharded_checkpoint",
    "load_checkpoint_directory",
    "remove_checkpoint_directory",
    "save_checkpoint_directory",
]


def remove_checkpoint_directory(path: str | os.PathLike[str], control: Control) -> None:
    """Delete a checkpoint, a directory or a single file. One that does not exist is fine.

    Raises:
        CheckpointError: on every rank, if rank 0 could not, or if it is a directory that is no checkpoint.

    Collective: every rank.
    """
    control.gather_objects(None)  # not before every rank has looked whether it is there
    collect(
        control,
        f"remove the checkpoint '{os.fspath(path)}'",
        lambda: remove(local_path(path)) if control.rank == 0 else None,
    )
