"""The parts of an opened checkpoint that loading asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.migration.utils import migrate_checkpoint, pl_legacy_patch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError

__all__ = ["left_out_of", "open_here", "weights_of"]


def open_here(path: str | os.PathLike[str], *, verify: bool, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint, seen by this process alone, in today's layout."""
    with pl_legacy_patch():
        checkpoint = open_checkpoint(path, ControlGroup(None), verify=verify, weights_only=weights_only)
    if "pytorch-lightning_version" in checkpoint:
        migrate_checkpoint(checkpoint)
    return checkpoint


def weights_of(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Its weights by name."""
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"'{os.fspath(path)}' holds no weights: it has no 'state_dict'.")
    weights: Mapping[str, Any] = checkpoint["state_dict"]
    return weights


def left_out_of(checkpoint: Mapping[str, Any]) -> list[str]:
    """The frozen parameters that were not saved."""
    return list(checkpoint.get("lightning_zero", {}).get("excluded_frozen", ()))
