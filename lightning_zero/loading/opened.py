"""The parts of an opened checkpoint that loading asks for."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.utilities.migration.utils import migrate_checkpoint, pl_legacy_patch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup

__all__ = ["open_here"]


def open_here(path: str | os.PathLike[str], *, verify: bool, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint, seen by this process alone, in today's layout."""
    with pl_legacy_patch():
        checkpoint = open_checkpoint(path, ControlGroup(None), verify=verify, weights_only=weights_only)
    if "pytorch-lightning_version" in checkpoint:
        migrate_checkpoint(checkpoint)
    return checkpoint
