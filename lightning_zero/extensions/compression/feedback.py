"""What error feedback keeps of gradients, in checkpoints: rows that belong to the ranks of a host and to a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.comm import Groups
from lightning_zero.comm.control import collect
from lightning_zero.engine import ZeroEngine

__all__ = ["load_residuals", "saved_residuals"]

_LAYOUT = "layout"  # beside the rows: what they belong to


def saved_residuals(engine: ZeroEngine, groups: Groups) -> dict[str, Any]:
    """For each reduction a row of every rank, a FlatShard of shape (ranks, elements). A save calls this."""
    rank, ranks = groups.checkpoint.rank, groups.checkpoint.world_size
    kept = engine.collectives.residuals.items()
    rows = {name: FlatShard(row, (ranks, row.numel()), rank * row.numel()) for name, row in kept}
    return {_LAYOUT: _layout(engine, groups), **rows}


def load_residuals(found: Mapping[str, Any], engine: ZeroEngine, groups: Groups) -> None:
    """Take over what was saved, if it is of these ranks and this layout; else begin at zero and say so.

    Collective: every rank; ``CheckpointError`` on all, if one could not read its rows.
    """
    wire, control = engine.collectives, groups.control
    wire.residuals.clear()
    if found.get(_LAYOUT) != _layout(engine, groups):
        why = "it is of other ranks, or of another layout" if found else "it has nothing of that"
        rank_zero_info(f"Error feedback takes nothing from the checkpoint: {why}.")
        return

    def read() -> None:
        for name, rows in found.items():
            if name != _LAYOUT:
                wire.residuals[name] = row = torch.empty(rows.shape[1], dtype=torch.float32, device=wire.device)
                read_slices([(rows, control.rank * row.numel(), row)])

    collect(control, "load what error feedback keeps", read)


def _layout(engine: ZeroEngine, groups: Groups) -> str:
    return f"hosts {groups.hosts}, plan {engine.plan.fingerprint()}"
