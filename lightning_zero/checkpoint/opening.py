"""Opening a checkpoint of any kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_zero.checkpoint.agreement import Control
from lightning_zero.checkpoint.kinds import Found, Kind, find_checkpoint, read_checkpoint
from lightning_zero.checkpoint.reader import Opened, load_together
from lightning_zero.checkpoint.verify import verify_together
from lightning_zero.errors import CheckpointError

__all__ = ["is_checkpoint_directory_at", "open_checkpoint", "require_lightning"]


def open_checkpoint(
    path: str | os.PathLike[str], control: Control, *, verify: bool = False, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read what a checkpoint says of itself; tensors stay on disk until they are asked for.

    Args:
        path: a directory of ours, of ``torch.distributed.checkpoint`` or of Hugging Face, a safetensors file, or a
            file of ``torch.save``; local or the URL of any file system that fsspec knows.
        control: the ranks.
        verify: check every checksum there is before anything is used, each rank a part of the files.
        weights_only: whether pickles of other programs are refused if they could run code, as for ``torch.load``;
            by default they are. Our own directories hold none that is needed.

    Returns:
        Lightning's checkpoint dictionary. Tensors are StoredTensors, or mapped from a torch file. What is only
        weights is under ``state_dict``.

    Raises:
        CheckpointError: on every rank, naming the file, if it is no whole checkpoint, if it could run code, or if the
            ranks see different ones.

    Collective: every rank.
    """
    found: list[Found] = []

    def load() -> Opened:
        found.append(find_checkpoint(path))
        return read_checkpoint(path, found[0], weights_only)

    checkpoint = load_together(path, control, load)
    if verify:
        verify_together(path, found[0], control)
    return checkpoint


def require_lightning(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Make sure that a run can go on from an opened checkpoint.

    Raises:
        CheckpointError: if Lightning did not write it, so that it has weights and no state of a Trainer.
    """
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"'{os.fspath(path)}' is no checkpoint of a Trainer and holds weights only: a run cannot go on from it. To "
            "begin one with these weights, use CheckpointPolicy(initial_weights=...) in place of `ckpt_path`."
        )


def is_checkpoint_directory_at(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory, local or behind a URL, that ``open_checkpoint`` reads. Looks at names only."""
    try:
        return find_checkpoint(path).kind in (Kind.OWN, Kind.FOREIGN, Kind.HUGGING_FACE)
    except CheckpointError:
        return False
