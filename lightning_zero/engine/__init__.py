"""The life of units and buckets during training."""

from lightning_zero.engine.buffers import BufferBroadcast
from lightning_zero.engine.deferred import InitRecord, InitRecorder, has_meta
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.flat import ParameterShard
from lightning_zero.engine.registry import engine_of

__all__ = ["BufferBroadcast", "InitRecord", "InitRecorder", "ParameterShard", "ZeroEngine", "engine_of", "has_meta"]
