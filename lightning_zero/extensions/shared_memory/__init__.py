"""Ranks of one host exchange by reading one another's memory."""

from lightning_zero.extensions.shared_memory.collectives import HostCollectives, SharedMemoryCollectives
from lightning_zero.extensions.shared_memory.links import connect
from lightning_zero.extensions.shared_memory.transport import Transport

__all__ = ["HostCollectives", "SharedMemoryCollectives", "Transport", "connect"]
