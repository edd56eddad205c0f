"""Callbacks that log what a run holds and sends, next to its plan, and say where a training goes wrong."""

from lightning_zero.extensions.monitors.instability import InstabilityMonitor
from lightning_zero.extensions.monitors.usage import CommunicationMonitor, MemoryMonitor, MemoryStats, memory_stats

__all__ = ["CommunicationMonitor", "InstabilityMonitor", "MemoryMonitor", "MemoryStats", "memory_stats"]
