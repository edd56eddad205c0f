"""Checkpoints that are one torch file: reading one, and the bytes around tensors that are not there yet.

[Note: A torch file without its tensors]

``torch.save`` writes an uncompressed zip: the pickle of the object, in which every storage is a number, then one
record per storage. All sizes are known before any element is, so that the place of every element is too: the pickle is
made with a ``Hole`` wherever a tensor will be, and whoever has a range of its elements writes it to its place in the
file, in any order. The rest of the zip (headers, checksums, directory) comes last; without it the file is no zip, and
no reader takes it for a checkpoint.

Records lie exactly where ``torch.save`` would have put them: names, alignment, descriptors and 64-bit extensions are
those of the zip writer in torch, because ``torch.load`` can be told to compute offsets instead of looking them up
(``torch.utils.serialization.config.load.calculate_storage_offsets``).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.format.record import Opened
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.storage.files import Files, LocalFiles, open_range, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = [
    "START_NBYTES",
    "ZIP",
    "Hole",
    "Place",
    "TorchFile",
    "archive_entries",
    "describe_tensor",
    "load_torch",
    "read_torch_file",
    "refuse_other_kinds",
    "start_of",
]

_ARCHIVE = "archive"  # torch takes the name of the file, readers take any
_ALIGNMENT = 64
_PROTOCOL = 2  # of torch.save
_TORCH_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_NO_DATE = 0x21  # the first day a zip can name

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_MAX_16 = 0xFFFF
_MAX_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Hole:
    """Stands for a contiguous tensor in host memory. Holes with the same key share elements, as tied weights do."""

    key: Hashable
    dtype: torch.dtype
    shape: Sequence[int]
    tensor: Tensor | None = field(default=None, compare=False)  # which has the elements, in this dtype or another

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where in the file the elements of one storage belong, in bytes."""

    key: Hashable  # the holes' key, or one of a tensor that was given as such
    tensor: Tensor | None  # if it is known, that of a hole too
    dtype: torch.dtype
    offset: int
    nbytes: int


class _Record(NamedTuple):
    """An entry of the zip."""

    name: bytes
    header: int  # offset of the local header
    extra: bytes  # of the local header
    offset: int
    nbytes: int
    content: bytes | None  # None: a storage

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.nbytes + len(self.descriptor(0))

    @property
    def _start(self) -> tuple[int, int]:
        """The version that a reader needs, and the flags: names are UTF-8; size and checksum follow the data."""
        is_large = self.header >= _MAX_32 or self.nbytes >= _MAX_32
        return 45 if is_large else 20, 0x808 if self.nbytes else 0x800

    def local(self) -> bytes:
        """The header before the elements."""
        fields = (*self._start, 0, 0, _NO_DATE, 0, 0, 0, len(self.name), len(self.extra))
        return _LOCAL.pack(b"PK\x03\x04", *fields) + self.name + self.extra

    def descriptor(self, crc32: int) -> bytes:
        """What follows the elements; nothing if there are none."""
        if not self.nbytes:
            return b""
        form = "<4sIQQ" if self._start[0] == 45 else "<4sIII"
        return struct.pack(form, b"PK\x07\x08", crc32, self.nbytes, self.nbytes)

    def central(self, crc32: int) -> bytes:
        """The entry in the directory."""
        version, flags = self._start
        nbytes, header = min(self.nbytes, _MAX_32), min(self.header, _MAX_32)
        extra = _large_extra(self.nbytes, self.header)
        dates = (version, version, flags, 0, 0, _NO_DATE)
        fields = (*dates, crc32, nbytes, nbytes, len(self.name), len(extra), 0, 0, 0, 0, header)
        return _CENTRAL.pack(b"PK\x01\x02", *fields) + self.name + extra


class TorchFile:
    """The layout of a file that ``torch.load`` reads. See [Note: A torch file without its tensors].

    Args:
        content: what ``torch.load`` will give, with a ``Hole`` for every tensor whose elements are elsewhere. Ordinary
            tensors in it are written with exactly their elements, also if their memory is part of something larger,
            and as tensors on the CPU. What pickling a value raises passes through.

    Attributes:
        places: of all storages, in the order of the file.
        nbytes: size of the whole file.
    """

    def __init__(self, content: Any) -> None:
        pickler = _Pickler(content)
        self._records: list[_Record] = []
        self._add("data.pkl", pickler.pickled)
        self._add(".format_version", b"1")
        self._add(".storage_alignment", str(_ALIGNMENT).encode())
        self._add("byteorder", sys.byteorder.encode())
        self.places: list[Place] = []
        for number, (key, tensor, dtype, nbytes) in enumerate(pickler.storages):
            record = self._add(f"data/{number}", None, nbytes)
            self.places.append(Place(key, tensor, dtype, record.offset, nbytes))
        self._add("version", b"3\n")
        directory = sum(len(record.central(0)) for record in self._records)
        self.nbytes = self._records[-1].end + directory + _END_64.size + _LOCATOR_64.size + _END.size

    def frame(self, checksums: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Everything but the elements: pairs of an offset and the bytes that belong there, in the order of the file.

        ``checksums`` are the CRC-32 of every place, in their order, each taken once what is before the place was given;
        0 for one that is not known, which torch does not notice and other readers of zip files report.
        """
        given = iter(checksums)
        crcs: list[int] = []
        pending, start = b"", 0
        for record in self._records:
            pending += record.local()
            if record.content is None:
                yield start, pending
                crcs.append(next(given))
                pending, start = b"", record.offset + record.nbytes
            else:
                crcs.append(zlib.crc32(record.content))
                pending += record.content
            pending += record.descriptor(crcs[-1])
        directory = b"".join(record.central(crc) for record, crc in zip(self._records, crcs, strict=True))
        yield start, pending + directory + _end(len(self._records), self._records[-1].end, len(directory))

    def _add(self, name: str, content: bytes | None, nbytes: int = 0) -> _Record:
        nbytes = nbytes if content is None else len(content)
        header = self._records[-1].end if self._records else 0
        encoded = f"{_ARCHIVE}/{name}".encode()
        large = _large_extra(nbytes, header)
        start = header + _LOCAL.size + len(encoded) + len(large) + 4
        padding = -start % _ALIGNMENT
        extra = large + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self._records.append(_Record(encoded, header, extra, start + padding, nbytes, content))
        return self._records[-1]


def _large_extra(nbytes: int, header: int) -> bytes:
    """The 64-bit extension of a header, if it needs one."""
    values = [nbytes, nbytes] if nbytes >= _MAX_32 else []
    values += [header] if header >= _MAX_32 else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _end(count: int, offset: int, nbytes: int) -> bytes:
    """The end of the directory, in the 64-bit form that torch always writes, and its pointer from the old one."""
    end = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, offset)
    locator = _LOCATOR_64.pack(b"PK\x06\x07", 0, offset + nbytes, 1)
    short = min(count, _MAX_16)
    return end + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(nbytes, _MAX_32), min(offset, _MAX_32), 0)


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The pickle in the archive that ``torch.save`` makes of a contiguous tensor in host memory."""
    return _Pickler(Hole(0, dtype, shape)).pickled


def start_of(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where in an archive the bytes of an entry begin."""
    file.seek(entry.header_offset)
    header = file.read(30)  # of which the last four bytes are the lengths of the name and of the padding
    name, padding = struct.unpack_from("<HH", header, 26)
    return entry.header_offset + 30 + int(name) + int(padding)


class _Storage(NamedTuple):
    """Stands for a storage in the pickle."""

    number: int
    kind: Any
    numel: int

    @property
    def persistent_id(self) -> tuple[Any, ...]:
        """What the pickle has in its place."""
        return "storage", self.kind, str(self.number), "cpu", self.numel


class _Pickler(pickle.Pickler):
    """``torch.save``'s pickle of a structure, with the storages' numbers instead of their contents."""

    def __init__(self, content: Any) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer, protocol=_PROTOCOL)
        self._known: dict[Hashable, _Storage] = {}
        self.storages: list[tuple[Hashable, Tensor | None, torch.dtype, int]] = []  # as of a place
        self.dump(content)
        self.pickled = buffer.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return obj.persistent_id
        if not isinstance(obj, _TORCH_STORAGES):
            return None
        # Of a tensor that describes itself: sparse, quantized, of a class of its own.
        untyped, dtype = obj, torch.uint8
        if isinstance(obj, torch.storage.TypedStorage):
            untyped, dtype = obj._untyped_storage, obj.dtype  # private: 2.11 to 2.15
        memory = torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
        identity = ("storage", untyped.device, untyped.data_ptr(), dtype) if memory.nbytes else object()
        return self._storage(identity, _storage_class(obj), dtype, memory.nbytes, memory).persistent_id

    def reducer_override(self, obj: Any) -> Any:
        tensor, identity = None, object()
        if type(obj) is Hole:
            tensor, identity = obj.tensor, ("hole", obj.key)
        elif type(obj) is Tensor and is_plain(obj) and not obj.is_meta and not vars(obj):
            tensor = flat = obj.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            if flat.numel():
                identity = ("memory", flat.device, flat.data_ptr(), flat.dtype, flat.numel())
        else:
            return NotImplemented
        # As torch itself pickles a contiguous tensor, with another storage in it.
        rebuild, kind, more = _form(obj.dtype)
        key = obj.key if type(obj) is Hole else None
        storage = self._storage(identity, kind, obj.dtype, obj.nbytes, tensor, key)
        strides = tuple(math.prod(max(size, 1) for size in obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        needs_gradient = type(obj) is Tensor and obj.requires_grad
        return rebuild, (storage, 0, tuple(obj.shape), strides, needs_gradient, OrderedDict(), *more)

    def _storage(
        self, identity: Any, kind: Any, dtype: torch.dtype, nbytes: int, tensor: Tensor | None, key: Hashable = None
    ) -> _Storage:
        if identity not in self._known:
            number = len(self.storages)
            numel = nbytes if kind is torch.UntypedStorage else nbytes // dtype.itemsize
            self._known[identity] = _Storage(number, kind, numel)
            if key is None and tensor is not None:
                key, dtype = ("tensor", number), tensor.dtype
            self.storages.append((key, tensor, dtype, nbytes))
        return self._known[identity]


@cache
def _form(dtype: torch.dtype) -> tuple[Any, Any, tuple[Any, ...]]:
    """How torch pickles a tensor of a dtype: function, class of storage, arguments of what is younger than classes."""
    rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(_PROTOCOL)
    return rebuild, _storage_class(arguments[0]), arguments[6:]


def _storage_class(storage: Any) -> Any:
    if isinstance(storage, torch.UntypedStorage):
        return torch.UntypedStorage
    return getattr(torch, storage._pickle_storage_type())  # private: 2.11 to 2.15


# ------------------------------------------------------------------------------------------------------------- reading

ZIP = b"PK\x03\x04"  # what an archive begins with
START_NBYTES = 256  # that tell kinds of files apart


def refuse_other_kinds(start: bytes, where: str) -> None:
    """``CheckpointError`` for a file that is no checkpoint at all, by its first ``START_NBYTES``: empty, or a text."""
    lines = start.decode("utf-8", "ignore").split("\n")
    if not start:
        kind = "the file is empty"
    elif lines[0].startswith("version https://git-lfs"):
        kind = "it is a pointer of Git LFS, which stands for the file. Get the file with `git lfs pull`"
    elif b"\0" not in start and all(line.replace("\t", " ").rstrip("\r").isprintable() for line in lines):
        kind = f"it is a text file, which begins with {lines[0][:40]!r}"
    else:
        return
    raise CheckpointError(f"{where} is no checkpoint: {kind}.")


def archive_entries(file: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """The entries of an archive of ``torch.save``, by name without the archive's own.

    ``ValueError`` if entries are compressed or have the same name, which torch does not do.
    """
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    entries = {entry.filename.partition("/")[2]: entry for entry in listed}
    if len(entries) != len(listed):
        raise ValueError("two of its entries have the same name")
    for entry in listed:
        if entry.compress_type or entry.flag_bits & 1:
            raise ValueError(f"its entry '{entry.filename}' is compressed or encrypted, which torch.save does not do")
    return entries


def read_torch_file(files: Files, name: str, weights_only: bool | None) -> Opened:
    """What is in a torch file. A local one is mapped into memory: elements are read from disk when they are used.

    While its tensors are in use, a mapped file must not be cut off or written to in place: the operating system ends
    a process that reads what is no longer there (SIGBUS). Replacing it by another file of the name, or deleting it, is
    fine: the mapping keeps the old one.

    The tensors are ordinary ones, which must not be written to; a bare state dict is put under ``state_dict``.
    ``CheckpointError`` if it is no such file, or could run code.
    """
    where, nbytes, local = f"'{files.name}/{name}'", files.size(name), isinstance(files, LocalFiles)
    start = read_bytes(files, name, 0, min(nbytes, START_NBYTES))
    refuse_other_kinds(start, where)
    # What torch wrote until version 1.6 is no archive and cannot be mapped.
    mapped = local and start.startswith(ZIP)
    file = f"{files.name}/{name}" if local else open_range(files, name, 0, nbytes)
    loaded = load_torch(file, where, weights_only, mapped=mapped)
    if files.size(name) != nbytes:  # before anything that is mapped is touched
        raise CheckpointError(f"{where} was changed while it was opened: it had {nbytes} bytes. Repeat this.")
    return Opened(_as_checkpoint(loaded, where))


def load_torch(file: str | IO[bytes], where: str, weights_only: bool | None, *, mapped: bool = False) -> Any:
    """``torch.load`` into host memory, of a path or an open file. A path may be mapped instead of read.

    ``weights_only`` refuses what could run code; ``None`` does so unless torch's environment variable forbids it.
    ``CheckpointError``, if it cannot be loaded, says ``where`` it lies.
    """
    try:
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as opened:
            if (start := opened.read(len(ZIP))) == ZIP:
                archive_entries(opened)  # of a compressed one torch would map something else
            elif start[:1] != b"\x80":  # of a pickle, which torch wrote until version 1.6
                raise ValueError(f"no file of torch begins with {start!r}")
            opened.seek(0)
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise CheckpointError(f"{where} is damaged or no torch file: {error}") from error
        raise CheckpointError(
            f"{where} was not loaded: it is damaged, or loading it could run code. If you trust the file, allow its "
            "classes with `torch.serialization.add_safe_globals` (the Trainer does not hand `weights_only=False` on to "
            "strategies that load after set-up, as this one does; `load_from_checkpoint` does). The reason: "
            f"{error}"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged or no torch file: {type(error).__name__}: {error}") from error


def _as_checkpoint(loaded: Any, where: str) -> dict[str, Any]:
    """Lightning's layout for what a torch file held."""
    if isinstance(loaded, Mapping) and all(isinstance(key, str) for key in loaded):
        # Fabric's users choose names. Of what is in a bare state dict, only an extra state may hold tensors.
        named = [part for key, part in loaded.items() if isinstance(part, Mapping) and not key.endswith("_extra_state")]
        tensors = any(isinstance(value, Tensor) for part in named for value in part.values())
        if tensors or isinstance(loaded.get("state_dict"), Mapping):
            return dict(loaded)
        if any(isinstance(value, Tensor) for value in loaded.values()):
            return {"state_dict": dict(loaded)}
    raise CheckpointError(
        f"{where} holds a {type(loaded).__name__} which is neither a Lightning checkpoint (with a `state_dict`) nor a "
        "state dict of tensors by name."
    )
