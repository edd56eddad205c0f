"""Bytes on disk: checkpoints as directories that every rank writes and reads its own part of.

The format is a stock ``torch.distributed.checkpoint`` directory, so that others can read it, with a record of our
own, so that loading is fast and runs no code. See [Note: The directory] in ``format/record.py`` and [Note: Publishing]
in ``storage/publish.py``. What other programs write is read too; see ``load.py``.
"""

from __future__ import annotations

from lightning_zero.checkpoint.background import Saver
from lightning_zero.checkpoint.consolidated import consolidate_checkpoint, save_consolidated_file
from lightning_zero.checkpoint.format.record import FlatShard
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.load import is_checkpoint_directory_at, open_checkpoint
from lightning_zero.checkpoint.save import save_checkpoint_directory

__all__ = [
    "FlatShard",
    "Saver",
    "Source",
    "StoredTensor",
    "consolidate_checkpoint",
    "is_checkpoint_directory_at",
    "open_checkpoint",
    "save_checkpoint_directory",
    "save_consolidated_file",
]
