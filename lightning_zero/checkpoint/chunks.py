"""Elements of a tensor from where they lie as raw memory in a file."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.schema import Chunk, TensorItem

__all__ = ["PIECE_NBYTES", "ChunkSource", "memory_of", "read_chunk"]

PIECE_NBYTES = 1 << 24  # read, checked and cast at a time


class ChunkSource:
    """Tensors whose chunks are known. Reads the bytes that are asked for, once.

    Args:
        files: where they lie.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """See ``Source``."""
        end = start + destination.numel()
        with untracked():
            for chunk in item.chunks:
                first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
                if first < last:
                    part = destination[first - start : last - start]
                    read_chunk(self._files, key, chunk, item.dtype, first, part)


def read_chunk(files: Files, key: str, chunk: Chunk, dtype: torch.dtype, first: int, destination: Tensor) -> None:
    """Read elements of one chunk, in pieces.

    Args:
        files: where it lies.
        key: the tensor's name, for messages.
        chunk: where its elements lie.
        dtype: of what is stored.
        first: the element of the flattened tensor, inside the chunk, that ``destination[0]`` gets.
        destination: 1-D, not beyond the chunk, on any device, of any dtype. Written.

    Checksums are not looked at: with them the same bytes took half as long again. ``verify`` is there for that.

    Raises:
        ValueError: if the range is not inside the chunk.
        CheckpointError: if the file ends before.
    """
    if first < chunk.start or first + destination.numel() > chunk.start + chunk.numel:
        raise ValueError(
            f"Elements {first} to {first + destination.numel()} of '{key}' are not in the part of '{chunk.file}' with "
            f"{chunk.start} to {chunk.start + chunk.numel}."
        )
    direct = destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()
    direct = direct and type(destination) is Tensor
    step = max(1, PIECE_NBYTES // dtype.itemsize)
    buffer = None if direct else torch.empty(min(step, destination.numel()), dtype=dtype)
    for begin in range(0, destination.numel(), step):
        part = destination[begin : begin + step]
        target = part if buffer is None else buffer[: part.numel()]
        memory = memory_of(target)
        files.read_into(chunk.file, chunk.offset + (first - chunk.start + begin) * dtype.itemsize, memory)
        if buffer is not None:
            part.copy_(target)


def memory_of(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, to be written to. The tensor must outlive it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
