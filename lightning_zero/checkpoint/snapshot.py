"""What a checkpoint holds at one moment, in host memory that every save uses again."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.writer import is_plain
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.host import host_memory

__all__ = ["Snapshots"]

_ALIGNMENT = 64  # bytes; of what is copied, so that every dtype may start where it started in its own storage
_GAP_NBYTES = 1 << 16  # what lies between two slices of a storage is copied along if it is less: one copy, not two
_MAX_DEPTH = 64
_WASTE = 2  # how many times the memory that is needed may be held before it is given back and taken anew


class Snapshots:
    """Copies of checkpoints, one at a time, in host memory that is taken once and kept.

    Taking memory is what makes a first copy slow (the pages are made while they are written). One save after another
    writes into the same memory; more is taken only when a checkpoint is larger than all before. It is given back with
    this object. For tensors on an accelerator it is page-locked.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # 1-D, bytes

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(block.numel() for block in self._blocks)

    def take(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint. The snapshot before is no longer valid.

        Slices that lie in one buffer, as those of the engine do, are copied together.

        Args:
            checkpoint: tensors of any kind, on any device or in a file. Not changed.

        Returns:
            The same structure. FlatShards and plain tensors lie in this object's memory, on the host, and what was the
            same memory is so in the copy; the rest is a deep copy.

        Raises:
            Exception: whatever copying a value raises, for example ``TypeError`` for a lock or an open file, or
                ``OffloadError`` for what rests in a file that cannot be read.
        """
        with untracked():
            sources = dict(_sources(checkpoint))
            runs = _runs(sources)
            places = self._copy(runs)
            copied: dict[int, Any] = {}
            for run, place in zip(runs, places, strict=True):
                for identity, offset in run.members:
                    tensor, source = sources[identity]
                    copied[identity] = _rebuilt(tensor, source, place, offset)
            for identity, (tensor, source) in sources.items():
                if identity not in copied:  # no elements
                    copied[identity] = _rebuilt(tensor, source, None, 0)
            snapshot: dict[str, Any] = copy.deepcopy(dict(checkpoint), copied)
        return snapshot

    def _copy(self, runs: list[_Run]) -> list[Tensor]:
        """Where each run's bytes are on the host now."""
        places = self._reserve(runs)
        devices = {run.source.device for run in runs if run.source.device.type != "cpu"}
        for run, place in zip(runs, places, strict=True):
            if isinstance(run.source, FileTensor):
                run.source.read_into(place.view(run.source.dtype))
            else:
                place.copy_(run.source, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return places

    def _reserve(self, runs: list[_Run]) -> list[Tensor]:
        """Host memory for each run: in the blocks held, in the first that has room, or else in a new one."""
        locked = any(run.source.device.type != "cpu" for run in runs)
        needed = sum(run.room for run in runs)
        used = [0] * len(self._blocks)
        found: list[tuple[int, int] | None] = []
        for run in runs:
            block = next((i for i, b in enumerate(self._blocks) if used[i] + run.room <= b.numel()), None)
            found.append(None if block is None else (block, used[block]))
            if block is not None:
                used[block] += run.room
        missing = sum(run.room for run, place in zip(runs, found, strict=True) if place is None)
        if missing and self.nbytes + missing > _WASTE * needed:
            self._blocks.clear()
            return self._reserve(runs)
        if missing:
            self._blocks.append(host_memory(missing, locked))
        end, places = 0, []
        for run, place in zip(runs, found, strict=True):
            if place is None:
                place, end = (len(self._blocks) - 1, end), end + run.room
            begin = place[1] + run.start % _ALIGNMENT
            places.append(self._blocks[place[0]][begin : begin + run.source.nbytes])
        return places


class _Run(NamedTuple):
    """A range of one storage that is copied at once.

    Attributes:
        source: 1-D: bytes, or elements that rest in a file.
        start: of the range in its storage, in bytes; 0 in a file.
        members: the tensors in it, by identity, and the byte of the range where each begins.
    """

    source: Tensor
    start: int
    members: list[tuple[int, int]]

    @property
    def room(self) -> int:
        """Bytes to set aside for it; a multiple of the alignment."""
        return -(-(self.start % _ALIGNMENT + self.source.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _sources(checkpoint: Mapping[str, Any]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Every tensor that is copied as bytes, by identity, and the contiguous tensor that holds its elements."""
    pending: list[tuple[Any, int]] = [(checkpoint, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, FlatShard):
            yield id(value), (value, value.local)
        elif isinstance(value, Tensor):
            if is_plain(value) and not value.is_meta:
                yield id(value), (value, value.detach().resolve_conj().resolve_neg().contiguous())
        elif isinstance(value, (Mapping, list, tuple)) and depth < _MAX_DEPTH:
            items = value.values() if isinstance(value, Mapping) else value
            pending += [(item, depth + 1) for item in items]


def _runs(sources: Mapping[int, tuple[Tensor, Tensor]]) -> list[_Run]:
    """The ranges to copy, in the order of their storages."""
    storages: dict[tuple[torch.device, int], tuple[Tensor, list[tuple[int, int, int]]]] = {}
    resting: dict[Hashable, _Run] = {}
    for identity, (_, source) in sources.items():
        if isinstance(source, FileTensor) and source.numel():
            resting.setdefault(source.identity, _Run(source, 0, [])).members.append((identity, 0))
        elif source.numel():
            key = (source.device, source.untyped_storage().data_ptr())
            start = int(source.storage_offset()) * source.dtype.itemsize
            storages.setdefault(key, (source, []))[1].append((start, start + source.nbytes, identity))
    runs = []
    for source, ranges in storages.values():
        ranges.sort()
        group, end = [ranges[0]], ranges[0][1]
        for item in ranges[1:]:
            if item[0] > end + _GAP_NBYTES:
                runs.append(_run(source, group, end))
                group, end = [], item[1]
            group.append(item)
            end = max(end, item[1])
        runs.append(_run(source, group, end))
    return [*runs, *resting.values()]


def _run(source: Tensor, ranges: list[tuple[int, int, int]], end: int) -> _Run:
    start = ranges[0][0]
    memory = torch.empty(0, dtype=torch.uint8, device=source.device)
    memory.set_(source.untyped_storage(), start, (end - start,), (1,))
    return _Run(memory, start, [(identity, begin - start) for begin, _, identity in ranges])


def _rebuilt(tensor: Tensor, source: Tensor, place: Tensor | None, offset: int) -> Tensor:
    """The copy of ``tensor``, with a storage of exactly its bytes: ``torch.save`` writes whole storages."""
    flat = torch.empty(0, dtype=source.dtype)
    if place is not None:
        begin = int(place.storage_offset()) + offset
        flat.set_(place.untyped_storage()[begin : begin + source.nbytes], 0, (source.numel(),), (1,))
    if isinstance(tensor, FlatShard):
        return FlatShard(flat, tensor.shape, tensor.start)
    shaped = flat.view(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(shaped, requires_grad=tensor.requires_grad)
    return shaped if type(tensor) is Tensor else torch.nn.Buffer(shaped)
