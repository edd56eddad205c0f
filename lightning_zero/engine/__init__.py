"""The life of units and buckets during training."""

from lightning_zero.engine.buffers import BufferBroadcast
from lightning_zero.engine.engine import ZeroEngine, engine_of
from lightning_zero.shards.slice import Slice

__all__ = ["BufferBroadcast", "Slice", "ZeroEngine", "engine_of"]
