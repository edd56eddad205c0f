"""What does not rest on the device: host memory, files, and what moves between them and the device."""

from lightning_zero.offload.memory import HostMemory, host_memory
from lightning_zero.offload.nvme import NvmeStore
from lightning_zero.offload.pipeline import Pipeline, Request
from lightning_zero.offload.resting import RestingTensor, fill_from

__all__ = ["HostMemory", "NvmeStore", "Pipeline", "Request", "RestingTensor", "fill_from", "host_memory"]
