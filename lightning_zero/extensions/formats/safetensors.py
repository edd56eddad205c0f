"""Weights in safetensors: in one file, or in a directory as Hugging Face has it.

[Note: The safetensors format]

    8 bytes    length of the header, little-endian
    header     JSON: name -> {"dtype", "shape", "data_offsets": [first, end]}, and "__metadata__" with strings
    data       the elements of every tensor, little-endian, without gaps or overlaps; offsets count from here

A directory has ``model.safetensors``, or several files with an index.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_zero.checkpoint.consolidated import with_holes
from lightning_zero.checkpoint.format.record import Chunk, Opened, TensorItem
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import Hole, Place
from lightning_zero.checkpoint.format.typed_json import dtype_name, is_plain, strict_json
from lightning_zero.checkpoint.storage.files import Files, read_bytes, read_index
from lightning_zero.checkpoint.storage.publish import is_checkpoint_directory
from lightning_zero.errors import CheckpointError

__all__ = [
    "INDEX_FILE",
    "SAFETENSORS_DTYPES",
    "SINGLE_FILE",
    "SafetensorsFile",
    "layouts",
    "read_safetensors",
    "read_safetensors_directory",
    "weights_in",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_DAMAGES = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a forged file raises

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
}
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


# -------------------------------------------------------------------------------------------------------------- reading


def read_safetensors(files: Files, name: str) -> Opened:
    """What is in one file, with a StoredTensor by name; ``CheckpointError`` if it is no whole file of the format.

    See [Note: The safetensors format].
    """
    header, items = _open(files, name)
    source = Source(files)
    state = {key: StoredTensor(source, key, item) for key, item in items.items()}
    return Opened({"state_dict": state}, zlib.crc32(header))


def _open(files: Files, name: str) -> tuple[bytes, dict[str, TensorItem]]:
    """A file's header, and the tensors it describes."""
    nbytes = files.size(name)
    items: dict[str, TensorItem] = {}
    try:
        if sys.byteorder != "little":
            raise ValueError("its elements are little-endian, this machine is not")
        length = int.from_bytes(read_bytes(files, name, 0, 8), "little") if nbytes >= 8 else nbytes
        if length > min(nbytes - 8, 100_000_000):  # as the reference implementation
            raise ValueError(f"its header should have {length} bytes, the whole file has {nbytes}")
        header = read_bytes(files, name, 8, length)
        entries = strict_json(header)
        entries.pop("__metadata__", None)
        end = 8 + length
        for key, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            dtype, shape = SAFETENSORS_DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            if dtype is None:
                raise ValueError(f"'{key}' has the dtype {entry['dtype']!r}, which is not known here")
            chunk = Chunk(0, (last - first) // dtype.itemsize, name, first, None)
            items[key] = TensorItem((), dtype, shape, (chunk,) if chunk.numel else ())
            if first != end or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"'{key}' lies at bytes {first} to {last}, and what is before it ends at {end}")
            end = last
        if end != nbytes:
            raise ValueError(f"its tensors end at byte {end}, the file has {nbytes}")
    except _DAMAGES as error:
        raise CheckpointError(
            f"'{files.name}/{name}' is cut off, damaged or no safetensors file: {type(error).__name__}: {error}."
        ) from error
    return header, {key: items[key] for key in entries}


def read_safetensors_directory(files: Files) -> Opened:
    """What is in such a directory: the files that its index names, or its only one.

    ``CheckpointError`` names the file if it is not whole.
    """
    if not files.has(INDEX_FILE):
        return read_safetensors(files, SINGLE_FILE)
    where = f"'{files.name}/{INDEX_FILE}'"
    index = read_index(files, INDEX_FILE)
    try:
        places: dict[str, str] = strict_json(index)["weight_map"]
        for key, name in places.items():
            if type(name) is not str or name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
                raise ValueError(f"'{key}' lies in the file {name!r}, which is not a plain file name")
    except _DAMAGES as error:
        raise CheckpointError(f"{where} cannot be used: {type(error).__name__}: {error}.") from error
    opened = {name: _open(files, name) for name in sorted(set(places.values()))}
    source, state = Source(files), {}
    for key, name in places.items():
        if key not in opened[name][1]:
            raise CheckpointError(f"{where} says that '{key}' is in '{name}', which does not hold it.")
        state[key] = StoredTensor(source, key, opened[name][1][key])
    return Opened({"state_dict": state}, zlib.crc32(b"".join([index, *(header for header, _ in opened.values())])))


# -------------------------------------------------------------------------------------------------------------- writing


def weights_in(folder: Path) -> list[Path]:
    """Weights in a folder that may get others; ``ValueError`` if it is no folder, or a checkpoint of ours."""
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir():
        raise ValueError(
            f"'{folder}' is a file, and without a suffix OUT is a directory of safetensors: give another name, "
            "one with a suffix such as '.ckpt' or '.safetensors' for a file, or delete it."
        )
    if (names := os.listdir(folder)) and is_checkpoint_directory(names):
        raise ValueError(f"'{folder}' is a sharded checkpoint: write to another directory.")
    return [folder / name for name in sorted(filter(_WEIGHTS.fullmatch, names))]


def layouts(
    weights: Mapping[str, Any], target: Path, limit: int | None, cast: torch.dtype | None, prefix: str | None
) -> tuple[dict[Path, Any], dict[str, Hole]]:
    """The layouts of safetensors by path: of one file, or with a ``limit`` of its bytes of those of a folder, the index
    last. Also a hole for every weight that is in them."""
    holes, aliases = _holes_of(weights, cast, prefix)
    shards, paths = [holes], [target]
    if limit is not None:
        shards = _shards(holes, limit)
        names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
        paths = [target / name for name in (names if len(shards) > 1 else [SINGLE_FILE])]
    files: dict[Path, Any] = {}
    for path, shard in zip(paths, shards, strict=True):
        metadata = {"format": "pt", **{alias: name for alias, name in aliases.items() if name in shard}}
        files[path] = SafetensorsFile(shard, metadata)
    if len(files) > 1:
        total = sum(hole.nbytes for hole in holes.values())
        places = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"
        files[target / INDEX_FILE] = SimpleNamespace(nbytes=len(text), places=[], frame=lambda _: [(0, text)])
    return files, holes


def _holes_of(
    weights: Mapping[str, Any], cast: torch.dtype | None, prefix: str | None
) -> tuple[dict[str, Hole], dict[str, str]]:
    """A hole for every weight that safetensors can hold, once if it is tied, and the other names of tied ones."""
    wrapped = [name for name in weights if not {"base_layer", "original_module"}.isdisjoint(name.split("."))]
    if wrapped and "base_model" in (prefix or "").split("."):
        raise ValueError(
            f"prefix={prefix!r} leaves names that peft has changed, such as '{wrapped[0]}': `from_pretrained` "
            "would initialise those layers anew. `load_from_checkpoint` gives a module, whose model can save its "
            "adapters (`save_pretrained`), or itself with them in it (`merge_and_unload` first)."
        )
    tensors = {name: value for name, value in weights.items() if isinstance(value, StoredTensor) or is_plain(value)}
    if left_out := [name for name in weights if name not in tensors]:
        warnings.warn(f"Left out, because safetensors hold plain tensors only: {', '.join(left_out)}.", stacklevel=4)
    holes = {name: with_holes(value, cast or value.dtype) for name, value in tensors.items()}
    first: dict[Any, str] = {}
    for name, hole in holes.items():
        first.setdefault((hole.key, hole.shape), name)
    kept = {name: first[hole.key, hole.shape] for name, hole in holes.items()}
    return {name: holes[name] for name in first.values()}, {name: one for name, one in kept.items() if one != name}


class SafetensorsFile:
    """Where everything lies in a file of these tensors.

    Args:
        tensors: by name. Those of wide dtypes come first in the file, so that every element is aligned; otherwise the
            order is kept.
        metadata: text by name, for readers.

    Raises:
        ValueError: if a dtype has no name in this format, naming the tensor.

    Attributes:
        head: the first bytes of the file.
        places: of every tensor, in the order of the file.
        nbytes: size of the whole file.
    """

    def __init__(self, tensors: Mapping[str, Hole], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        begins: list[tuple[Hole, int]] = []
        for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _NAMES:
                raise ValueError(f"'{name}' is of {dtype_name(spec.dtype)}, which a safetensors file cannot hold")
            begins.append((spec, end))
            offsets = [end, end := end + spec.nbytes]
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        data = len(self.head)
        self.places = [Place(hole.key, hole.tensor, hole.dtype, data + begin, hole.nbytes) for hole, begin in begins]
        self.nbytes = len(self.head) + end

    def frame(self, _: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Everything but the elements, as of ``TorchFile``; this format has no checksums."""
        yield 0, self.head
        yield from ((at.offset + at.nbytes, b"") for at in self.places)


def _shards(holes: Mapping[str, Hole], limit: int) -> list[dict[str, Hole]]:
    """The tensors in files of at most ``limit`` bytes of elements, in their order; at least one file."""
    shards: list[dict[str, Hole]] = [{}]
    filled = 0
    for name, hole in holes.items():
        if filled and filled + hole.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = hole
        filled += hole.nbytes
    return shards
