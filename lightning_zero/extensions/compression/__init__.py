"""Quantised communication between hosts: ``ZeroStrategy(compression=Compression(...))``."""

from __future__ import annotations

from typing import Any

from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.config import Compression
from lightning_zero.extensions.compression.collectives import CompressedCollectives, CompressedOverGloo, Rounded

__all__ = ["check", "compressed"]


def compressed(wire: NativeCollectives, asked: Compression, averages: bool = False) -> NativeCollectives:
    """The same wire in fewer bytes. ``averages``: it carries those between shard groups, in two steps, and no weights.

    Called when a run chooses its wire, for what goes between hosts.
    """
    kind = CompressedOverGloo if isinstance(wire, GlooCollectives) else CompressedCollectives
    fed = () if not asked.error_feedback else ("sum", "average") if averages else ("sum",)
    gathers = asked.gradients if averages else asked.weights
    return kind(wire.groups, wire.streams, Rounded(gathers, asked.gradients, fed))


def check(asked: Compression, plan: Any, scales_loss: bool) -> None:
    """Raise ValueError where this does not go with how a module is laid out, or with a loss scale."""
    if asked.error_feedback:
        _check_feedback(asked, plan, scales_loss)
    mixed = any(layout.compute_dtype != layout.dtype for layout in plan.layouts)
    if asked.weights is not None and plan.trainable_layouts and not (mixed or plan.placement.shards_parameters):
        raise ValueError(
            f"Compression.weights={asked.weights!r} is for stage 3, and for mixed precision. Here ranks keep the "
            "weights that they are sent, so these would stay rounded: leave weights out, and compress gradients."
        )


def _check_feedback(asked: Compression, plan: Any, scales_loss: bool) -> None:
    what = "Compression.error_feedback"
    if scales_loss:
        raise ValueError(
            f"{what} does not go with a loss scale: what is kept of one step would be added to gradients of another "
            "scale. Use 'bf16-mixed' or full precision in place of '16-mixed', or leave it out."
        )
    across = plan.group_size != plan.world_size
    sent = [layout.dtype if across else layout.reduce_dtype for layout in plan.trainable_layouts]
    if asked.gradients == "bfloat16" and any(dtype.itemsize == 2 for dtype in sent):
        raise ValueError(f"{what} has nothing to keep of gradients in 16 bits: leave it out, or give gradients='int8'.")
