"""Which way of the wire a world takes."""

from __future__ import annotations

import torch

from lightning_zero.comm.collectives import Collectives, GlooCollectives, LocalCollectives, NativeCollectives
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.streams import Streams

__all__ = ["choose_collectives"]


def choose_collectives(groups: Groups, streams: Streams, device: torch.device) -> Collectives:
    """The collectives for ranks that compute on ``device``.

    Args:
        groups: the engine's process groups.
        streams: side streams of the device.
        device: where this rank computes; of the same type on every rank.
    """
    if groups.control.world_size == 1:
        return LocalCollectives(streams)
    kind = GlooCollectives if device.type == "cpu" else NativeCollectives
    return kind(groups, streams)
