"""Writing this rank's bytes through DCP, and noticing where in the file every tensor's elements lie."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo  # private: 2.11 to 2.15
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_zero.checkpoint.format.flat_shard import FlatShard, memory_identity
from lightning_zero.checkpoint.format.items import Leaf
from lightning_zero.checkpoint.format.record import FileEntry
from lightning_zero.checkpoint.format.torch_file import start_of
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.errors import CheckpointError
from lightning_zero.storage.file_tensor import FileTensor

__all__ = ["ChecksummedFile", "LeafPlanner", "ShardWriter", "Written", "combine", "linear", "save_archive"]

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, bits reversed
_LARGE_NBYTES = 1 << 18  # from here on ``combine`` (0.05 ms) is faster than computing
_BUFFER_NBYTES = 1 << 20


class ChecksummedFile:
    """Appends to a file and knows the checksum of all that was written.

    ``torch.save`` computes the CRC-32 of a tensor for its archive. A large write is therefore left open until
    ``settle`` is told its checksum; if nobody does, it is read back.

    Args:
        file: new, empty, readable, and written through this object only.
        wanted: whether to know the checksum at all.

    Attributes:
        failure: the first error of a write.
    """

    def __init__(self, file: IO[bytes], wanted: bool = True) -> None:
        self._file = file
        self._wanted = wanted
        self._buffer = bytearray()
        self._nbytes = 0  # without the buffer
        self._crc32 = 0  # of what is before the open write
        self._open: tuple[int, int] | None = None  # first and last byte of the open write
        self._after = bytearray()  # what was written after it
        self.failure: OSError | None = None

    def tell(self) -> int:
        """Bytes written."""
        return self._nbytes + len(self._buffer)

    def write(self, data: bytes | memoryview) -> int:
        """Append. Takes one-dimensional bytes. Raises ``OSError`` as a file does, possibly later."""
        if len(data) < _LARGE_NBYTES:
            self._buffer += data
            if len(self._buffer) >= _BUFFER_NBYTES:
                self.write_out()
            return len(data)
        self.write_out()
        if self._wanted:
            self._settle_by_reading()
            self._open = (self._nbytes, self._nbytes + len(data))
        self._write(data)
        return len(data)

    def unwritten(self, begin: int) -> bytes | None:
        """What was written from a place to the end, if all of that is still in memory."""
        return bytes(self._buffer[begin - self._nbytes :]) if begin >= self._nbytes else None

    def flush(self) -> None:
        """Nothing: ``torch.save`` asks for it after every archive, of which there may be very many."""

    def write_out(self) -> None:
        """Hand everything to the operating system."""
        if self._buffer:
            if not self._wanted:
                pass
            elif self._open is None:
                self._crc32 = zlib.crc32(self._buffer, self._crc32)
            else:
                self._after += self._buffer
            self._write(self._buffer)
            self._buffer.clear()

    def settle(self, begin: int, end: int, crc32: int) -> None:
        """Say the checksum of a range. Used if it is the large write that is open, otherwise known already."""
        if self._open == (begin, end):
            self._crc32 = zlib.crc32(self._after, combine(self._crc32, crc32, end - begin))
            self._open = None
            self._after.clear()

    def checksum(self) -> int | None:
        """The CRC-32 of all that was written; ``None`` if it was not wanted."""
        self.write_out()
        if not self._wanted:
            return None
        self._settle_by_reading()
        return self._crc32

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._nbytes += len(data)

    def _settle_by_reading(self) -> None:
        if self._open is None:
            return
        begin, end = self._open
        self._file.seek(begin)
        crc32, left = 0, end - begin
        while left:
            piece = self._file.read(min(left, _LARGE_NBYTES))
            if not piece:
                raise OSError(f"the file ends {left} bytes before what was written to it")
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
        self._file.seek(0, 2)
        self.settle(begin, end, crc32)


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two texts in sequence.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        nbytes: length of the second.

    Source: ``crc32_combine`` of zlib 1.2.12: multiplication by x to the power ``8 * nbytes`` modulo the polynomial.
    """
    power, position = 1 << 31, 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_SQUARES[position % 32], power)
        nbytes, position = nbytes >> 1, position + 1
    return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, bits reversed, modulo the polynomial of the checksum."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _squares() -> list[int]:
    """The polynomials x to the power of 1, 2, 4, 8, ..."""
    found = [1 << 30]
    while len(found) < 32:
        found.append(_multiply(found[-1], found[-1]))
    return found


_SQUARES = _squares()


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
        suffix: what the name of this rank's file ends in, before its extension.

    Attributes:
        written: the entries of this rank's file, once ``write_data`` has returned.
        files: that file, by name; none if there was nothing to write.
    """

    def __init__(self, path: Path, suffix: str = "") -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self._suffix = suffix
        self.written: list[Written] = []
        self.files: dict[str, FileEntry] = {}

    def storage_meta(self) -> StorageMeta:
        """Without the path on this machine, which the stock writer would put into ``.metadata``."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably; none if there is nothing to write.

        A tensor on another device, or in a file, is copied to the host alone, and the copy is freed when it is written.

        Raises:
            OSError: if the file could not be written.
        """
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0{self._suffix}.distcp"
            done: dict[Any, Written] = {}
            with open(Path(self.path) / name, "x+b") as file:
                wanted = torch.serialization.get_crc32_options()
                output = _Output(name, file, ChecksummedFile(file, wanted))
                for item in plan.items:
                    entry = _write_item(output, item, planner.resolve_data(item), done)
                    info = _StorageInfo(name, entry.offset, entry.nbytes)
                    results.append(WriteResult(index=item.index, size_in_bytes=entry.nbytes, storage_data=info))
                    self.written.append(entry)
                self.files[name] = FileEntry(output.checksummed.tell(), output.checksummed.checksum())
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


def _writable(value: Any) -> Any:
    if isinstance(value, FlatShard):
        # A tensor without elements has no box on any rank, and DCP would not know of it.
        return value if value.numel() else torch.empty(value.shape, dtype=value.dtype)
    return value.detach() if is_plain(value) else value


class _Output(NamedTuple):
    """A data file: its name, itself (to read what was written), and what is written to."""

    name: str
    file: BinaryIO
    checksummed: ChecksummedFile


def _write_item(output: _Output, item: WriteItem, data: Any, done: dict[Any, Written]) -> Written:
    offsets = None if item.index.offset is None else tuple(item.index.offset)
    key, file = item.index.fqn, output.checksummed
    offset = file.tell()
    if item.type == WriteItemType.BYTE_IO:
        return Written(key, offsets, 0, output.name, offset, file.write(data.getbuffer()), None, None)
    identity = _identity(data)
    if identity in done:  # a tied parameter: one copy on disk under two names
        return done[identity]._replace(key=key, offsets=offsets)
    tensor = _exact(data)
    save_archive(tensor, file)
    place = _find_in_memory(file.unwritten(offset), tensor.nbytes) if tensor.nbytes else None
    if place is not None:
        place = (offset + place[0], place[1])
    elif tensor.nbytes:
        file.write_out()
        place = _find_in_file(output.file, key, tensor.nbytes)
        output.file.seek(0, os.SEEK_END)
        file.settle(place[0], place[0] + tensor.nbytes, place[1])
    elements, crc32 = place or (None, None)
    if not torch.serialization.get_crc32_options():
        crc32 = None  # the archive holds zero
    entry = Written(key, offsets, tensor.numel(), output.name, offset, file.tell() - offset, elements, crc32)
    if identity is not None:
        done[identity] = entry
    return entry


def save_archive(value: Any, file: ChecksummedFile) -> None:
    """``torch.save``, which hides why a write failed behind an error of its own that follows from it.

    Raises:
        OSError: if the file could not be written.
    """
    try:
        torch.save(value, cast("IO[bytes]", file))
    except RuntimeError:
        if file.failure is None:
            raise
        raise file.failure from None


def _identity(tensor: Tensor) -> Any:
    """What two tensors share that are the same memory and would give the same archive."""
    if not tensor.numel() or not tensor.is_contiguous():
        return None
    return memory_identity(tensor), tensor.is_conj(), tensor.is_neg()


def _exact(tensor: Tensor) -> Tensor:
    """The tensor on the host, contiguous, with a storage of exactly its bytes: ``torch.save`` writes whole storages."""
    if isinstance(tensor, FileTensor):
        return tensor.read()
    exact = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return exact if exact.untyped_storage().nbytes() == exact.nbytes else exact.clone()


def _find_in_memory(archive: bytes | None, nbytes: int) -> tuple[int, int] | None:
    """Where in an archive the elements lie, and their checksum; ``None`` if that takes a closer look.

    For small tensors, of which there may be very many: ``zipfile`` takes as long as writing them.
    """
    if archive is None or archive[-22:-18] != b"PK\5\6":
        return None
    count, _, position = struct.unpack_from("<HII", archive, len(archive) - 12)
    for _ in range(count):
        if archive[position : position + 4] != b"PK\1\2":
            return None
        method, crc32, size, name, extra, comment = struct.unpack_from("<10xH4xI4xI3H", archive, position)
        if archive[position + 46 : position + 46 + name].endswith(b"/data/0"):
            (header,) = struct.unpack_from("<I", archive, position + 42)
            start = header + 30 + sum(struct.unpack_from("<HH", archive, header + 26))
            plain = method == zipfile.ZIP_STORED and size == nbytes and start + nbytes <= len(archive)
            return (start, crc32) if plain else None
        position += 46 + name + extra + comment
    return None


def _find_in_file(file: BinaryIO, key: str, nbytes: int) -> tuple[int, int]:
    """Where in the archive that ends at the end of ``file`` the elements lie, and their checksum.

    Raises:
        CheckpointError: if the archive is not built as every torch so far builds it.
    """
    with zipfile.ZipFile(file) as archive:  # finds the last archive of the file, and corrects for what is before it
        entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    if len(entries) != 1 or entries[0].file_size != nbytes or entries[0].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"torch.save wrote '{key}' in an unknown way: {entries} instead of {nbytes} plain bytes.")
    return start_of(file, entries[0]), entries[0].CRC


def linear(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The place of an element in the flattened tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
