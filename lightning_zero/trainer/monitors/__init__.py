"""Lightning callbacks that show what a sharded run holds and sends, next to what its plan says."""

from lightning_zero.trainer.monitors.communication import CommunicationMonitor
from lightning_zero.trainer.monitors.memory import MemoryMonitor

__all__ = ["CommunicationMonitor", "MemoryMonitor"]
