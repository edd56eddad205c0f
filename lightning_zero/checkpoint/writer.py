"""Writing this rank's bytes through DCP, and noticing where in the file every tensor's elements lie."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo  # private: 2.11 to 2.13
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.items import Leaf
from lightning_zero.errors import CheckpointError

__all__ = ["LeafPlanner", "ShardWriter", "Written", "is_plain", "linear"]


class Written(NamedTuple):
    """One entry of this rank's data file.

    Attributes:
        key: the DCP name.
        offsets: the box's place in the tensor; ``None`` for a value.
        numel: the box's elements; 0 for a value.
        file: name of the file.
        offset: first byte of the entry.
        nbytes: of the entry.
        elements: byte in the file where the elements lie as raw memory; ``None`` if there are none.
        crc32: of the elements; ``None`` if unknown.
    """

    key: str
    offsets: tuple[int, ...] | None
    numel: int
    file: str
    offset: int
    nbytes: int
    elements: int | None
    crc32: int | None


class ShardWriter(FileSystemWriter):
    """DCP's writer for one directory, which also reports what it wrote.

    The files are what the stock writer makes with one thread. Its own loop is replaced because it keeps every tensor
    of a file alive until the file is complete (with CUDA tensors: the whole shard in host memory), and with several
    threads loses the exception of one, so that an incomplete checkpoint looks saved.

    Args:
        path: an existing, empty directory.

    Attributes:
        written: the entries of this rank's file, once ``write_data`` has returned.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.written: list[Written] = []

    def storage_meta(self) -> StorageMeta:
        """Without the path on this machine, which the stock writer would put into ``.metadata``."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably; none if there is nothing to write.

        A tensor on another device is copied to the host alone, and the copy is freed when it is written.

        Raises:
            OSError: if the file could not be written.
        """
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            done: dict[Any, Written] = {}
            with open(Path(self.path) / name, "x+b") as file:
                for item in plan.items:
                    entry = _write_item(file, name, item, planner.resolve_data(item), done)
                    info = _StorageInfo(name, entry.offset, entry.nbytes)
                    results.append(WriteResult(index=item.index, size_in_bytes=entry.nbytes, storage_data=info))
                    self.written.append(entry)
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, durably.

        Raises:
            CheckpointError: if the ranks did not write everything that was planned.
        """
        planned = sum(
            len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
            for entry in metadata.state_dict_metadata.values()
        )
        stored = sum(len(result) for result in results)
        if stored != planned:
            raise CheckpointError(f"{stored} entries were written where {planned} were planned.")
        super().finish(metadata, results)


class LeafPlanner(DefaultSavePlanner):
    """Saves exactly the leaves it is given: who owns a replicated value was decided before.

    Args:
        leaves: what this rank writes.
        named: the leaves whose paths this rank tells the coordinator, who merges those of all ranks.
    """

    def __init__(self, leaves: Mapping[str, Leaf], named: Mapping[str, Leaf]) -> None:
        super().__init__()
        self._leaves = leaves
        self._named = named

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take the leaves instead of the state dict."""
        self.state_dict = {key: _writable(leaf.value) for key, leaf in self._leaves.items()}
        self.mappings = {key: leaf.stored_path for key, leaf in self._named.items()}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One entry per box, tensor or value. A tensor of a class of its own is a value: its class would be lost."""
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            if isinstance(value, Tensor) and not isinstance(value, FlatShard) and not is_plain(value):
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
            else:
                items += create_default_local_save_plan({key: value}, self.is_coordinator).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of contiguous, ordinary elements, up to a copy."""
    return type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and (
        value.layout is torch.strided and not value.is_quantized
    )


def _writable(value: Any) -> Any:
    if isinstance(value, FlatShard):
        # A tensor without elements has no box on any rank, and DCP would not know of it.
        return value if value.numel() else torch.empty(value.shape, dtype=value.dtype)
    return value.detach() if is_plain(value) else value


def _write_item(file: BinaryIO, name: str, item: WriteItem, data: Any, done: dict[Any, Written]) -> Written:
    offsets = None if item.index.offset is None else tuple(item.index.offset)
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        offset = file.seek(0, os.SEEK_END)
        nbytes = file.write(data.getbuffer())
        return Written(key, offsets, 0, name, offset, nbytes, None, None)
    identity = _identity(data)
    if identity in done:  # a tied parameter: one copy on disk under two names
        return done[identity]._replace(key=key, offsets=offsets)
    tensor = _exact(data)
    offset = file.seek(0, os.SEEK_END)
    torch.save(tensor, file)
    elements, crc32 = _find_elements(file, key, tensor.nbytes)
    nbytes = file.seek(0, os.SEEK_END) - offset
    entry = Written(key, offsets, tensor.numel(), name, offset, nbytes, elements, crc32)
    if identity is not None:
        done[identity] = entry
    return entry


def _identity(tensor: Tensor) -> Any:
    """What two tensors share that are the same memory and would give the same archive."""
    if not tensor.numel() or not tensor.is_contiguous():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.is_conj(), tensor.is_neg()


def _exact(tensor: Tensor) -> Tensor:
    """The tensor on the host, contiguous, with a storage of exactly its bytes: ``torch.save`` writes whole storages."""
    exact = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return exact if exact.untyped_storage().nbytes() == exact.nbytes else exact.clone()


def _find_elements(file: BinaryIO, key: str, nbytes: int) -> tuple[int | None, int | None]:
    """Where in the archive that ends at the end of ``file`` the elements lie, and their checksum.

    Raises:
        CheckpointError: if the archive is not built as every torch so far builds it.
    """
    if nbytes == 0:
        return None, None
    with zipfile.ZipFile(
        file
    ) as archive:  # finds the last archive of the file, and corrects its offsets for what is before it
        entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    if len(entries) != 1 or entries[0].file_size != nbytes or entries[0].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"torch.save wrote '{key}' in an unknown way: {entries} instead of {nbytes} plain bytes.")
    file.seek(entries[0].header_offset)
    header = file.read(30)  # of which the last four bytes are the lengths of the name and of the padding
    start = (
        entries[0].header_offset
        + 30
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )
    return start, entries[0].CRC if torch.serialization.get_crc32_options() else None


def linear(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The place of an element in the flattened tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
