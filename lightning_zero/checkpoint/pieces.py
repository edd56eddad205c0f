"""Copying tensors of a checkpoint into a file a piece at a time, checked and cast on the way."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.format.checksums import combine
from lightning_zero.checkpoint.format.record import Chunk
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.typed_json import raw_memory
from lightning_zero.checkpoint.storage.files import WRITTEN_NBYTES
from lightning_zero.errors import CheckpointError

__all__ = ["Pieces", "progress_bar", "stored_identity", "write_bytes"]


class Pieces:
    """Tensors to be written, each known by a key that tied ones share.

    Attributes:
        overflowed: keys of tensors with finite elements that a cast made infinite, NaN or the largest of their dtype.
    """

    def __init__(self) -> None:
        self.overflowed: set[Hashable] = set()
        self._tensors: dict[Hashable, tuple[Tensor, torch.dtype]] = {}

    def add(self, tensor: Tensor, dtype: torch.dtype) -> Hashable:
        """Take a tensor in, to be written in a dtype. Returns its key."""
        key = (stored_identity(tensor), dtype)
        self._tensors.setdefault(key, (tensor, dtype))
        return key

    def write(
        self, what: Hashable | Tensor, descriptor: int, offset: int, advance: Callable[[int], Any] = lambda _: None
    ) -> int:
        """Write the elements of a tensor, or of the one added under a key, at an offset of a file.

        ``advance`` is told the bytes of every piece when it is written. Returns the CRC-32 of what was written; 0 if
        torch is set to compute none. ``CheckpointError`` if what is read does not match its checksum.
        """
        tensor, dtype = (what, what.dtype) if isinstance(what, Tensor) else self._tensors[what]
        crc32, wanted = 0, torch.serialization.get_crc32_options()
        for elements, known in _pieces(tensor):
            cast = elements.to(dtype)
            if dtype != tensor.dtype and _overflows(elements, cast):
                self.overflowed.add(what)
            memory = raw_memory(cast)
            write_bytes(descriptor, offset, memory)
            if wanted and known is not None and dtype == tensor.dtype:
                crc32 = combine(crc32, known, len(memory)) if crc32 else known
            elif wanted:
                crc32 = zlib.crc32(memory, crc32)
            offset += len(memory)
            advance(len(memory))
        return crc32


def _overflows(elements: Tensor, cast: Tensor) -> bool:
    """Whether finite elements have no finite value like theirs in another dtype."""
    finite = _wide(elements).isfinite()
    lost = ~_wide(cast).isfinite()
    if cast.is_floating_point() and cast.itemsize == 1 and elements.is_floating_point():  # some become the largest
        lost |= _wide(elements).abs() > torch.finfo(cast.dtype).max
    return bool((finite & lost).any())


def _wide(elements: Tensor) -> Tensor:
    """For questions that torch does not answer for eight bits."""
    return elements.float() if elements.is_floating_point() and elements.itemsize == 1 else elements


def _pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int | None]]:
    """Elements in order, and the CRC-32 of each piece if it is known. The memory of one piece is that of the next."""
    step = max(1, WRITTEN_NBYTES // tensor.dtype.itemsize)
    if isinstance(tensor, StoredTensor) and tensor.memory is not None:
        tensor = tensor.memory
    if not isinstance(tensor, StoredTensor):
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        yield from ((flat[begin : begin + step], None) for begin in range(0, flat.numel(), step))
        return
    with untracked():
        buffer = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
    # Pieces that do not cross the border of a chunk, because a checksum is that of a chunk.
    whole = Chunk(0, tensor.numel(), "", 0, None)
    for chunk in tensor._item.chunks or ([whole] if tensor.numel() else []):
        crc32, end = 0, chunk.start + chunk.numel
        for begin in range(chunk.start, end, step):
            elements = buffer[: min(step, end - begin)]
            tensor.read_into(elements, begin)
            known = zlib.crc32(raw_memory(elements))
            crc32 = combine(crc32, known, elements.nbytes) if crc32 else known
            yield elements, known
        if chunk.crc32 is not None and chunk.crc32 != crc32:
            raise CheckpointError(
                f"'{chunk.file}' is damaged: the elements of '{tensor.key}' at byte {chunk.offset} do not match their "
                "checksum. Use another checkpoint."
            )


def stored_identity(tensor: Tensor) -> Hashable:
    """Equal for tensors whose elements are the same bytes in a file or in memory; unique if there are none."""
    if not tensor.numel():
        return id(tensor), "empty"
    if isinstance(tensor, StoredTensor) and tensor.memory is not None:
        tensor = tensor.memory
    if isinstance(tensor, StoredTensor):
        return id(tensor._source), replace(tensor._item, path=())
    if tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor), "no memory of its own"
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def write_bytes(descriptor: int, offset: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at an offset of a file."""
    memory = memoryview(content)
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)


def progress_bar(name: str, nbytes: int, shown: bool) -> tqdm[Any]:
    """A progress bar over bytes, on a terminal."""
    return tqdm(total=nbytes, desc=name, unit="B", unit_scale=True, disable=None if shown else True)
