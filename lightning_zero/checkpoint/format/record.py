"""A checkpoint as named values: how Lightning's dictionary is taken apart, and the record of where each value lies.

The record, ``zero.json``, makes a directory a checkpoint and is the only file that our own loading interprets. Names
are those of stock DCP directories, as Lightning's own sharded strategies write them: ``state_dict.<name>``,
``optimizer_0.state.<name>.<key>``, ``optimizer_0.param_groups.0.lr``.

[Note: The directory]

    zero.json           this record, written last
    .metadata           torch.distributed.checkpoint's own index, for other readers
    meta.pt             Lightning's file: what of the checkpoint is not sharded, for other readers
    meta.bin            tensors of ``meta.pt`` too large for JSON, as raw bytes; only if there are any
    __{rank}_0.distcp   one ``torch.save`` archive per box or value that the rank owns

Behind a URL, and where a checkpoint replaced another, names carry the id of the save (``__0_0-<id>.distcp``,
``meta-<id>.pt``), and neither ``.metadata`` nor ``meta.pt`` is listed; see [Note: Publishing] in
``storage/publish.py``.

``zero.json`` is ``{"format", "version", "sha256", "content"}``. The digest is over the compact JSON text of the
content:

    byteorder, world_size, writer, plan      where it comes from; nothing but ``byteorder`` matters to loading
    files    name -> [size in bytes, crc32 or null]; zero.json itself excluded
    items    DCP name -> what is stored under it, one of
               {"path", "dtype", "shape", "chunks": [[start, numel, file, offset, crc32 or null], ...]}
               {"path", "dtype", "shape", "split": [dim, parts], "parts": chunks}
               {"path", "value": typed JSON}
               {"path", "type", "blob": [file, offset, nbytes]}     a torch.save archive of anything else
    meta     typed JSON of the rest of the checkpoint dictionary

A chunk is a range of the flattened tensor (elements) that lies uncompressed at a byte offset of a file: every box of
a flat slice is one. A tensor that was split by tensor parallelism lies part after part: the chunks of the first part of
dimension ``dim``, flattened, then those of the second. ``file`` counts in the order of ``files``. A path is the way
from the checkpoint dictionary to the value: strings are keys, numbers are places in a list, ``{"key": typed JSON}`` are
other keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import make_wrapper_subclass
from lightning_zero.checkpoint.format.typed_json import (
    DTYPES,
    Decoder,
    Encoder,
    check_stored,
    dtype_name,
    strict_json,
    type_name,
)
from lightning_zero.offload.host import OffloadedTensor

__all__ = [
    "RECORD_FILE",
    "BlobItem",
    "Box",
    "Chunk",
    "FileEntry",
    "FlatShard",
    "Index",
    "Item",
    "Leaf",
    "Opened",
    "Record",
    "Split",
    "StoredBox",
    "StoredBytes",
    "TensorItem",
    "ValueItem",
    "changed",
    "describe",
    "memory_identity",
    "put_together",
    "split",
    "stored_path",
    "tensors_in",
]

RECORD_FILE = "zero.json"
METADATA_FILE = ".metadata"
META_FILE = "meta.pt"
META_TENSORS_FILE = "meta.bin"

_FORMAT = "lightning_zero"
_VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


class Index(int):
    """A place in a list, on a path; an ordinary ``int`` there is the key of a dictionary."""


class Chunk(NamedTuple):
    """Elements ``start`` to ``start + numel`` of a flattened tensor, at byte ``offset`` of a file."""

    start: int
    numel: int
    file: str
    offset: int
    crc32: int | None


class Box(NamedTuple):
    """A rectangular part of a tensor: its first element and its extent, per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredBytes(NamedTuple):
    """A range of a file."""

    file: str
    offset: int
    nbytes: int


class StoredBox(NamedTuple):
    """A box of a tensor and the ``torch.save`` archive it lies in."""

    box: Box
    archive: StoredBytes


class Split(NamedTuple):
    """How the elements of a tensor are stored: in equal parts of a dimension, flattened part after part."""

    dim: int
    parts: int


class FileEntry(NamedTuple):
    """Size in bytes and checksum; ``None`` where it was not computed."""

    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class TensorItem:
    """A tensor; its chunks are sorted and tile the flattened elements exactly, or a ``ValueError``.

    For other readers it is in boxes. In a stock directory there are no chunks, and the boxes have all elements.
    With ``split``, places count in the order of the parts, and a chunk is of one part.
    """

    path: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    boxes: tuple[StoredBox, ...] = ()
    split: Split | None = None

    def __post_init__(self) -> None:
        check_stored(self.dtype, self.shape)
        numel = math.prod(self.shape)
        if self.split is not None:
            dim, parts = self.split
            if not (dim < len(self.shape) and parts and self.shape[dim] % parts == 0):
                raise ValueError(f"shape {self.shape} has no {parts} equal parts in dimension {dim}")
            size = max(numel // parts, 1)
            if any(chunk.start // size != (chunk.start + chunk.numel - 1) // size for chunk in self.chunks):
                raise ValueError(f"a chunk is of two of the {parts} parts")
        end = 0 if self.chunks else sum(math.prod(stored.box.sizes) for stored in self.boxes)
        for chunk in self.chunks:
            if chunk.start != end or chunk.numel <= 0:
                raise ValueError(f"elements {end} to {chunk.start} are stored nowhere or twice")
            end += chunk.numel
        if end != numel:
            raise ValueError(f"{end} of the {numel} elements of shape {self.shape} are stored")


@dataclass(frozen=True)
class ValueItem:
    """A value as typed JSON."""

    path: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class BlobItem:
    """A value that typed JSON cannot express, as a ``torch.save`` archive."""

    path: tuple[Any, ...]
    type: str
    file: str
    offset: int
    nbytes: int


Item = TensorItem | ValueItem | BlobItem


@dataclass(frozen=True)
class Record:
    """The content of ``zero.json``. See [Note: The directory].

    Making one raises ``ValueError`` if a chunk or a blob lies outside the files that the record lists, tensors claim
    more than these hold, or a file name is none.
    """

    files: Mapping[str, FileEntry]
    items: Mapping[str, Item]
    meta: Any
    plan: Any = None
    world_size: int = 1
    writer: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name in (".", "..", RECORD_FILE):
                raise ValueError(f"it lists the file {name!r}, which is not a plain file name")
        for key, item in self.items.items():
            ranges = [(item.file, item.offset, item.nbytes)] if isinstance(item, BlobItem) else []
            if isinstance(item, TensorItem):
                ranges = [(chunk.file, chunk.offset, chunk.numel * item.dtype.itemsize) for chunk in item.chunks]
            for file, offset, nbytes in ranges:
                held = self.files[file].nbytes if file in self.files else 0
                if not 0 <= offset <= offset + nbytes <= held:
                    raise ValueError(
                        f"'{key}' lies at bytes {offset} to {offset + nbytes} of '{file}', which has {held}"
                    )
        # The same elements may have several names, but not be read as more than there are.
        tensors = {(one.dtype, one.shape, one.chunks) for one in self.items.values() if isinstance(one, TensorItem)}
        claimed = sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in tensors)
        if claimed > (held := sum(entry.nbytes for entry in self.files.values())):
            raise ValueError(f"its tensors claim {claimed} bytes, its files have {held}")

    def to_bytes(self) -> bytes:
        """The file's content."""
        numbers = {name: number for number, name in enumerate(self.files)}
        content = {
            "byteorder": sys.byteorder,
            "world_size": self.world_size,
            "writer": dict(self.writer),
            "plan": self.plan,
            "files": {name: list(entry) for name, entry in self.files.items()},
        }
        # An item at a time: between them other threads get their turn.
        items = ",".join(
            f"{_compact(key)}:{_compact(_item_to_json(item, numbers))}" for key, item in self.items.items()
        )
        text = f'{_compact(content)[:-1]},"items":{{{items}}},"meta":{_compact(self.meta)}}}'
        digest = hashlib.sha256(text.encode()).hexdigest()
        head = _compact({"format": _FORMAT, "version": _VERSION, "sha256": digest})
        return f'{head[:-1]},\n"content":{text}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Read and check a file; ``ValueError`` if it is damaged, of another version or byte order, or not ours."""
        content = _checked_content(data)
        try:
            files = {name: FileEntry(*_numbers(entry)) for name, entry in content["files"].items()}
            items = {key: _item_from_json(item, [*files]) for key, item in content["items"].items()}
            return cls(files, items, *(content[key] for key in ("meta", "plan", "world_size", "writer")))
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"its content is not what this version writes: {error!r}") from error


def _checked_content(data: bytes) -> dict[str, Any]:
    try:
        whole = strict_json(data)
    except ValueError as error:
        raise ValueError(f"it is damaged or cut off: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
        raise ValueError("it was not written by lightning_zero")
    content = whole.get("content")
    if whole.get("version") != _VERSION:
        writer = content.get("writer") if isinstance(content, dict) else None
        raise ValueError(
            f"it has format version {whole.get('version')!r} (written by {writer}), this lightning_zero reads version "
            f"{_VERSION}: load it with the version that wrote it, or a newer one"
        )
    if not isinstance(content, dict) or hashlib.sha256(_compact(content).encode()).hexdigest() != whole.get("sha256"):
        raise ValueError("its content does not match its checksum: the file was damaged or edited")
    if content.get("byteorder") != sys.byteorder:
        raise ValueError(
            f"it was written on a {content.get('byteorder')}-endian machine, this one is {sys.byteorder}-endian"
        )
    return content


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _item_to_json(item: Item, numbers: Mapping[str, int]) -> dict[str, Any]:
    path = [
        int(part) if type(part) is Index else part if type(part) is str else {"key": Encoder(strict=True).encode(part)}
        for part in item.path
    ]
    if isinstance(item, ValueItem):
        return {"path": path, "value": item.value}
    if isinstance(item, BlobItem):
        return {"path": path, "type": item.type, "blob": [numbers[item.file], item.offset, item.nbytes]}
    chunks = [[c.start, c.numel, numbers[c.file], c.offset, c.crc32] for c in item.chunks]
    described = {"path": path, "dtype": dtype_name(item.dtype), "shape": list(item.shape)}
    if item.split is not None:  # under another name: readers that know of no parts must not take it for a whole
        return {**described, "split": list(item.split), "parts": chunks}
    return {**described, "chunks": chunks}


def _item_from_json(item: Mapping[str, Any], names: list[str]) -> Item:
    if type(item["path"]) is not list:
        raise ValueError(f"an entry has the path {reprlib.repr(item['path'])}")
    path = tuple(
        part if type(part) is str else Index(part) if type(part) is int else Decoder().decode(part["key"])
        for part in item["path"]
    )
    hash(path)  # of keys of dictionaries; otherwise a TypeError
    if "value" in item:
        return ValueItem(path, item["value"])
    if "blob" in item:
        number, offset, nbytes = _numbers(item["blob"])
        return BlobItem(path, str(item["type"]), names[number], offset, nbytes)
    try:
        chunks = [
            Chunk(start, numel, names[number], offset, crc32)
            for start, numel, number, offset, crc32 in map(_numbers, item["parts" if "split" in item else "chunks"])
        ]
        split = Split(*_numbers(item["split"])) if "split" in item else None
        return TensorItem(path, DTYPES[item["dtype"]], tuple(item["shape"]), tuple(chunks), split=split)
    except ValueError as error:
        raise ValueError(f"of the tensor at {reprlib.repr(path)}, {error}") from error


def _numbers(values: list[Any]) -> list[Any]:
    """Numbers of elements, bytes and files, and checksums, which can be ``None``; ``ValueError`` otherwise."""
    for value in values:
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"it holds {reprlib.repr(values)}, and {reprlib.repr(value)} is no number there")
    return values


# ----------------------------------------------------------------------------------------- a checkpoint, taken apart


class FlatShard(Tensor):
    """A parameter of full shape of which this process holds one contiguous range of the flattened elements.

    It occupies no memory of its own. User code which looks at names, shapes and dtypes of a checkpoint works; a shard
    can be renamed, dropped, cloned and cast; computing with it raises, because the result could only be wrong.

    Args:
        local: 1-D and contiguous: this rank's elements, possibly none, kept by reference. They may be in a file.
        shape: the full shape.
        start: the place of ``local[0]`` in the flattened parameter. Meaningless, but in bounds, if ``local`` is empty.
        cut: into parts of which this is in one: ``start`` then counts in their order.

    Raises:
        ValueError: if ``local`` is not such a range.
    """

    local: Tensor
    start: int
    cut: Split | None

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], start: int, cut: Split | None = None) -> FlatShard:
        end = start + local.numel()
        if local.dim() != 1 or not local.is_contiguous() or start < 0 or end > math.prod(shape):
            raise ValueError(
                f"A flat shard needs a contiguous 1-D tensor: of shape {tuple(local.shape)}, elements {start} to {end} "
                f"of a tensor of shape {tuple(shape)}, is none."
            )
        shard: FlatShard = make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        shard.local, shard.start, shard.cut = local.detach(), int(start), cut
        return shard

    def with_elements(self, local: Tensor) -> FlatShard:
        """The same range of another tensor: as many elements, or none."""
        return FlatShard(local, self.shape, self.start if local.numel() else 0, self.cut)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detach, clone and cast work on the slice; everything else would need elements of other ranks."""
        aten, shard = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.alias.default):
            return shard.with_elements(shard.local)
        if func in (aten.clone.default, aten._to_copy.default):
            options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
            return shard.with_elements(func(shard.local, **options))
        raise RuntimeError(  # not TypeError, of which Python's operators make a message of their own
            f"{func} needs whole parameters, but a checkpoint holds only this rank's part of each. Compute with "
            "`lightning_zero.full_parameters` around the module, or with the saved checkpoint."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        memo[id(self)] = copied = self.with_elements(self.local.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickle would hold one rank's elements under the name of the whole."""
        raise TypeError(
            "A FlatShard cannot be pickled: it holds one rank's part of a parameter only. In a checkpoint it may be in "
            "dictionaries and lists, not in other objects such as dataclasses; elsewhere, take whole parameters with "
            "`lightning_zero.full_parameters` around the module."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.local.numel()
        return f"FlatShard({tuple(self.shape)}, {self.dtype}, elements {self.start} to {end} here)"


def memory_identity(tensor: Tensor) -> Hashable:
    """Equal for tensors that show the same elements in the same shape, while they exist."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.identity
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)


_ALWAYS_ROUTED = ("state_dict", "optimizer_states")


class Leaf(NamedTuple):
    """One value of the sharded part of a checkpoint."""

    path: tuple[Any, ...]  # from the checkpoint dictionary to the value; ``Index`` in lists, keys in dictionaries
    value: Any  # a FlatShard, a tensor, an empty dictionary, or any other value, such as a Counter

    @property
    def key(self) -> str:
        """The DCP name."""
        return ".".join(map(str, stored_path(self.path)))

    @property
    def is_container(self) -> bool:
        """Whether it is an empty dictionary: of it DCP knows nothing, only our own record does."""
        return isinstance(self.value, Mapping) and not _is_whole(self.value)


def stored_path(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    """In the DCP directory, where ``optimizer_states[i]`` is called ``optimizer_{i}``."""
    if path[0] == "optimizer_states" and len(path) > 1 and type(path[1]) is Index:
        path = (sys.intern(f"optimizer_{path[1]}"), *path[2:])  # one object, which a pickle holds once
    return tuple(int(part) if type(part) is Index else str(part) for part in path)


class Opened(NamedTuple):
    """What one rank found when it opened a checkpoint."""

    checkpoint: dict[str, Any]  # Lightning's
    digest: Any = None  # equal on ranks that see the same checkpoint
    missing: Sequence[str] = ()  # what was left out of it because it could run code
    notes: Sequence[str] = ()  # what else is not read, in sentences about "the checkpoint"


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """Separate what goes to DCP from what stays one file.

    Weights and optimizer states go to DCP, and so does any other top-level key that holds a FlatShard somewhere:
    callbacks move weights to keys of their own (Lightning's ``WeightAveraging`` does).

    Returns:
        The leaves of the former by DCP name, in the order of the checkpoint, and the rest of the dictionary.

    Raises:
        ValueError: if two values would get the same name, or a tuple holds FlatShards.
    """
    leaves: dict[str, Leaf] = {}
    rest: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key not in _ALWAYS_ROUTED and not _holds(value, FlatShard):
            rest[key] = value
            continue
        states = value if key == "optimizer_states" and isinstance(value, list) else []
        found = [leaf for number, state in enumerate(states) for leaf in _leaves((key, Index(number)), state)]
        for leaf in found or _leaves((key,), value):
            name = leaf.key
            if leaves.setdefault(name, leaf) is not leaf:
                raise ValueError(
                    f"two values of the checkpoint are both called '{name}': {leaves[name].path}, {leaf.path}"
                )
    return leaves, rest


def _leaves(path: tuple[Any, ...], value: Any) -> Iterator[Leaf]:
    parts = list(_inside(value))
    for part, item in parts:
        yield from _leaves((*path, part), item)
    if not parts:
        leaf = Leaf(path, value)
        if not isinstance(value, FlatShard) and _holds(value, FlatShard):
            raise ValueError(f"'{leaf.key}' holds sharded parameters in a tuple: use a list or a dictionary")
        yield leaf


def changed(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Path and class of every dictionary that ``split`` takes apart and that comes back as an ordinary one."""
    if path and isinstance(value, Mapping) and type(value) not in (dict, OrderedDict) and not _is_whole(value):
        yield path, f"{type_name(value)}, which comes back as a dict"
    for part, item in _inside(value):
        if path or part in _ALWAYS_ROUTED or _holds(item, FlatShard):
            yield from changed(item, (*path, part))


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of what is taken apart, each with its place on a path; nothing of what is one value."""
    if isinstance(value, Mapping) and not _is_whole(value):
        yield from value.items()
    elif isinstance(value, list) and not _is_terminal(value):
        yield from ((Index(number), item) for number, item in enumerate(value))


def _is_whole(value: Mapping[Any, Any]) -> bool:
    """Whether a dictionary is one value: its class matters, and no tensor is in it that DCP should store."""
    return type(value) in (Counter, defaultdict) and not _holds(value, Tensor)


def _is_terminal(values: list[Any]) -> bool:
    """Whether DCP keeps a list as one value: it does unless a dictionary or a tensor is in it or in a list in it."""
    return not any(
        isinstance(value, (Mapping, Tensor)) or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def _holds(value: Any, kind: type[Tensor]) -> bool:
    return any(True for _ in tensors_in(value, kind))


def tensors_in(value: Any, kind: Any = Tensor) -> Iterator[Any]:
    """The tensors, or what is of another kind, in a structure, in order. What is in it twice is looked through once."""
    ahead, seen = [value], set()
    while ahead:
        value = ahead.pop()
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            ahead += reversed(list(value.values() if isinstance(value, Mapping) else value))


def describe(leaves: Mapping[str, Leaf]) -> dict[str, tuple[Any, ...]]:
    """What the ranks must agree on for each name: its kind, dtype and shape.

    ``ValueError`` if a value has no elements here, or is sharded in a way of its own.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for key, leaf in leaves.items():
        value = leaf.value
        if not isinstance(value, Tensor):
            found[key] = ("value", type_name(value))
            continue
        sharded = isinstance(value, FlatShard)
        if value.is_meta and not sharded:
            raise ValueError(f"'{key}' is on the meta device: it has no values to save")
        if hasattr(value, "__create_write_items__") and not sharded:
            raise ValueError(f"'{key}' is a {type_name(value)}, sharded by something else than this strategy")
        found[key] = ("shard" if sharded else "tensor", str(value.dtype), tuple(value.shape))
        if isinstance(value, FlatShard) and value.cut is not None:
            found[key] += (f"in {value.cut.parts} parts of dimension {value.cut.dim}",)
    return found


def put_together(values: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    """The checkpoint dictionary that has ``value`` at ``path`` for every pair; pairs in the order of ``split``.

    ``ValueError`` if the paths contradict each other.
    """
    root: list[Any] = [{}]
    for path, value in values:
        if not path or not isinstance(path[0], str):
            raise ValueError(f"a path {path} does not start with a name")
        parent: Any = root
        for number, step in enumerate((Index(0), *path)):
            new = value if number == len(path) else [] if isinstance(path[number], Index) else {}
            if isinstance(step, Index) and type(parent) is list and 0 <= step <= len(parent):
                parent += [new] * (step == len(parent))
            elif not isinstance(step, Index) and type(parent) is dict:
                parent.setdefault(step, new)
            else:
                raise ValueError(
                    f"the path {path} leads through {type(parent).__name__}, where {step!r} is not possible"
                )
            parent = parent[step]
        if parent is not value:
            raise ValueError(f"two values are at the path {path}")
    whole: dict[str, Any] = root[0]
    return whole
