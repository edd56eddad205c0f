"""Other programs' layouts of checkpoints: DeepSpeed's directories, safetensors, and Hugging Face's models.

The core finds out that a file or directory has such a layout, or that one is to be written, and calls what is named
here.
"""

from __future__ import annotations

import os

from lightning_zero.checkpoint.format.record import Opened
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.load import Found, Kind
from lightning_zero.checkpoint.storage.files import open_folder, samples
from lightning_zero.extensions.formats.deepspeed import deepspeed_folder, read_deepspeed_directory
from lightning_zero.extensions.formats.names import adapters_in, under_names_of
from lightning_zero.extensions.formats.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    layouts,
    read_safetensors,
    read_safetensors_directory,
    weights_in,
)

__all__ = ["adapters_in", "find", "layouts", "read", "under_names_of", "weights_in"]


def find(path: str | os.PathLike[str]) -> Found | None:
    """What kind of checkpoint a folder is, by the files in it that other programs use; ``None`` if it is none.

    ``CheckpointError`` if it names a save of DeepSpeed that is gone.
    """
    files = open_folder(path, follow_links=True)
    if files.has(INDEX_FILE) or files.has(SINGLE_FILE):
        return Found(Kind.HUGGING_FACE, files)
    folder = deepspeed_folder(path)
    return None if folder is None else Found(Kind.DEEPSPEED, folder)


def read(found: Found) -> Opened:
    """What is in a checkpoint of one of these layouts; ``CheckpointError`` if it is not whole."""
    files = found.files
    if found.kind is Kind.DEEPSPEED:
        return read_deepspeed_directory(files)
    opened = read_safetensors(files, found.name) if found.name else read_safetensors_directory(files)
    # Headers of safetensors are the same for all weights of a model: the digest is of some elements too.
    stored = [value for value in opened.checkpoint["state_dict"].values() if isinstance(value, StoredTensor)]
    names = sorted({chunk.file for value in stored for chunk in value._item.chunks})
    return opened._replace(digest=(opened.digest, *(samples(files, name) for name in names)))
