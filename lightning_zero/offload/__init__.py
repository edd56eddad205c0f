"""What does not rest on the device: host memory, files, and what moves between them and the device."""

from lightning_zero.storage.file_tensor import FileTensor, fill_from
from lightning_zero.storage.host import HostMemory, host_memory
from lightning_zero.storage.pipeline import Pipeline, Request
from lightning_zero.storage.tiers import NvmeStore

__all__ = ["HostMemory", "NvmeStore", "Pipeline", "Request", "FileTensor", "fill_from", "host_memory"]
