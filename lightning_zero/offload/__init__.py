"""Offload: host memory for what does not stay on the device, and the copies between them."""

from lightning_zero.offload.host import HostMemory, OffloadedTensor, host_memory, in_memory
from lightning_zero.offload.transfers import MemoryTiers

__all__ = ["HostMemory", "MemoryTiers", "OffloadedTensor", "host_memory", "in_memory"]
