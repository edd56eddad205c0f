"""What error feedback keeps of gradients, in checkpoints: for each reduction a row of every rank.

It belongs to the ranks of a host and to parts of a layout. Where one of these is another, it begins at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero.checkpoint import FlatShard
from lightning_zero.comm import Groups
from lightning_zero.comm.control import collect
from lightning_zero.engine import ZeroEngine
from lightning_zero.session.module_state import read_slice

__all__ = ["load_residuals", "save_residuals"]

_LAYOUT = "layout"


def save_residuals(engine: ZeroEngine, groups: Groups) -> dict[str, Any]:
    """This rank's rows, each a FlatShard of shape (ranks, elements), and what they fit. No communication."""
    rank, ranks = groups.control.rank, groups.control.world_size
    kept = engine.collectives.residuals.items()
    rows = {name: FlatShard(row, (ranks, row.numel()), rank * row.numel()) for name, row in kept}
    return {_LAYOUT: _layout(engine, groups), **rows} if rows else {}


def load_residuals(saved: Mapping[str, Any] | None, engine: ZeroEngine, groups: Groups) -> None:
    """Read what ``save_residuals`` returned, if it fits; else begin at zero and say so.

    Collective: every rank; ``CheckpointError`` on all, if one could not read its rows.
    """
    wire, rank, found = engine.collectives, groups.control.rank, saved or {}
    wire.residuals.clear()

    def read() -> None:
        for name, rows in found.items():
            if name != _LAYOUT:
                wire.residuals[name] = row = torch.empty(rows.shape[1], dtype=torch.float32)
                read_slice(rows, rank * row.numel(), row)

    if wire.feeding is None and not found:
        return
    if wire.feeding is None:
        why = "nothing is fed back in this run"
    elif not found:
        why = "it has nothing of that"
    elif found.get(_LAYOUT) != _layout(engine, groups):
        why = "it is of other ranks, or of another layout"
    else:
        collect(groups.control, "load what error feedback keeps", read)
        return
    rank_zero_info(f"Error feedback takes nothing from the checkpoint: {why}.")


def _layout(engine: ZeroEngine, groups: Groups) -> str:
    """What rows belong to."""
    return f"hosts {groups.hosts}, plan {engine.plan.fingerprint()}"
