"""The wire: process groups, agreement between ranks, collectives, streams."""

from lightning_zero.comm.collectives import (
    PATIENCE_SECONDS,
    Collectives,
    Content,
    LocalCollectives,
    Pending,
    Totals,
)
from lightning_zero.comm.control import ControlGroup, raising
from lightning_zero.comm.groups import Groups, ShardGroup
from lightning_zero.comm.native import Exchange, GlooCollectives, NativeCollectives, choose_collectives
from lightning_zero.comm.streams import Streams

__all__ = [
    "PATIENCE_SECONDS",
    "Collectives",
    "Content",
    "ControlGroup",
    "Exchange",
    "GlooCollectives",
    "Groups",
    "LocalCollectives",
    "NativeCollectives",
    "Pending",
    "ShardGroup",
    "Streams",
    "Totals",
    "choose_collectives",
    "raising",
]
