"""Checkpoints that are one torch file: reading one, and the bytes around tensors that are not there yet.

[Note: A torch file without its tensors]

``torch.save`` writes an uncompressed zip: the pickle of the object, in which every storage is a number, then one
record per storage. All sizes are known before any element is, so that the place of every element is too: the pickle is
made with a ``Hole`` wherever a tensor will be, whose elements are read and written when it is their turn. The directory
of the zip comes last; without it the file is no zip, and no reader takes it for a checkpoint. torch's own writer makes
the zip, so that records lie where ``torch.load`` may compute them to be.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import archive_writer, bytes_of, storage_class, untyped
from lightning_zero.checkpoint.format.record import Opened
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.storage.files import Files, LocalFiles, open_range, read_bytes
from lightning_zero.errors import CheckpointError

__all__ = [
    "ZIP",
    "Hole",
    "Place",
    "TorchFile",
    "archive_entries",
    "load_torch",
    "read_torch_file",
    "start_of",
]

_PROTOCOL = 2  # of torch.save


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
        gaps = _Gaps()
        writer = archive_writer(gaps)
        records = [("data.pkl", pickler.pickled), (".format_version", b"1"), (".storage_alignment", b"64")]
        records.append(("byteorder", sys.byteorder.encode()))
        for name, data in records:
            writer.write_record(name, data, len(data))
        self._before = len(records)
        self.places: list[Place] = []
        for number, place in enumerate(pickler.places):
            writer.write_record_metadata(f"data/{number}", place.nbytes)
            self.places.append(
                place._replace(offset=gaps.parts[-1][0] - place.nbytes if place.nbytes else gaps.position)
            )
        writer.write_end_of_file()
        self._parts, self.nbytes = gaps.parts, gaps.position

    def frame(self, checksums: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Everything but the elements: pairs of an offset and the bytes that belong there, in the order of the file.

        ``checksums`` are the CRC-32 of every place, in their order, each taken once what is before the place was given;
        0 for one that is not known, which torch does not notice and other readers of zip files report.
        """
        given, crcs = iter(checksums), []
        parts = ((start, bytearray(part)) for start, part in self._parts)
        start, part = next(parts)
        for place in self.places:
            yield start, bytes(part) if place.nbytes else b""
            crcs.append(next(given))
            if place.nbytes:
                start, part = next(parts)
                struct.pack_into("<I", part, 4, crcs[-1])  # after the elements
        (directory,) = struct.unpack_from("<Q", part, len(part) - 50)
        entry = directory - start
        for number in range(self._before + len(crcs)):
            if number >= self._before:
                struct.pack_into("<I", part, entry + 16, crcs[number - self._before])
            entry += 46 + sum(struct.unpack_from("<HHH", part, entry + 28))
        yield start, bytes(part)


class _Gaps:
    """What torch writes of an archive without elements, as a file: ``parts`` with their offsets, and gaps between."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.position = 0

    def write(self, data: Any) -> int:
        self.parts[-1][1].extend(data)
        self.position += len(data)
        return len(data)

    def seek(self, nbytes: int, _whence: int) -> None:
        self.position += nbytes
        self.parts.append((self.position, bytearray()))


class _Storage(NamedTuple):
    """Stands for a storage in the pickle."""

    persistent_id: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """``torch.save``'s pickle of a structure, with the storages' numbers instead of their contents."""

    def __init__(self, content: Any) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer, protocol=_PROTOCOL)
        self._known: dict[Hashable, _Storage] = {}
        self.places: list[Place] = []  # without offsets
        self.dump(content)
        self.pickled = buffer.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return obj.persistent_id
        if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            return None
        # Of a tensor that describes itself: sparse, quantized, of a class of its own.
        memory, dtype = bytes_of(untyped(obj)), getattr(obj, "dtype", torch.uint8)
        identity = ("storage", memory.device, memory.data_ptr(), dtype) if memory.nbytes else object()
        place = Place(("tensor", len(self.places)), memory, torch.uint8, 0, memory.nbytes)
        return self._storage(identity, storage_class(obj), dtype, place).persistent_id

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Hole:
            identity: Any = ("hole", obj.key)
            place = Place(obj.key, obj.tensor, obj.dtype, 0, obj.nbytes)
        elif type(obj) is Tensor and is_plain(obj) and not obj.is_meta and not vars(obj):
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            identity = (flat.device, flat.data_ptr(), flat.dtype, flat.numel()) if flat.numel() else object()
            place = Place(("tensor", len(self.places)), flat, flat.dtype, 0, flat.nbytes)
        else:
            return NotImplemented
        # As torch itself pickles a contiguous tensor, with another storage in it.
        rebuild, arguments = torch.empty(0, dtype=obj.dtype).__reduce_ex__(_PROTOCOL)
        storage = self._storage(identity, storage_class(arguments[0]), obj.dtype, place)
        strides = tuple(math.prod(max(size, 1) for size in obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        needs_gradient = type(obj) is Tensor and obj.requires_grad
        return rebuild, (storage, 0, tuple(obj.shape), strides, needs_gradient, OrderedDict(), *arguments[6:])

    def _storage(self, identity: Any, kind: Any, dtype: torch.dtype, place: Place) -> _Storage:
        if identity not in self._known:
            numel = place.nbytes if kind is torch.UntypedStorage else place.nbytes // dtype.itemsize
            self._known[identity] = _Storage(("storage", kind, str(len(self.places)), "cpu", numel))
            self.places.append(place)
        return self._known[identity]


# ------------------------------------------------------------------------------------------------------------- reading

ZIP = b"PK\x03\x04"  # what an archive begins with


def start_of(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where in an archive the bytes of an entry begin."""
    file.seek(entry.header_offset + 26)
    name, padding = struct.unpack("<HH", file.read(4))
    return entry.header_offset + 30 + int(name) + int(padding)


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
    # What torch wrote until version 1.6 is no archive and cannot be mapped.
    mapped = local and read_bytes(files, name, 0, min(nbytes, len(ZIP))) == ZIP
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
    except Exception as error:
        if weights_only is False or not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{where} is damaged or no torch file: {type(error).__name__}: {error}") from error
        raise CheckpointError(
            f"{where} was not loaded: it is damaged, or loading it could run code. If you trust the file, allow its "
            "classes with `torch.serialization.add_safe_globals` (the Trainer does not hand `weights_only=False` on to "
            "strategies that load after set-up, as this one does; `load_from_checkpoint` does). The reason: "
            f"{error}"
        ) from error


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
