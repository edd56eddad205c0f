"""Directories of safetensors as Hugging Face has them: ``model.safetensors``, or several files with an index."""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.consolidated import Export, with_holes, write_export
from lightning_zero.checkpoint.format.record import Opened
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import Hole, Place
from lightning_zero.checkpoint.format.typed_json import dtype_name, is_plain, strict_json
from lightning_zero.checkpoint.save import new_file
from lightning_zero.checkpoint.storage.files import Files, read_index
from lightning_zero.checkpoint.storage.publish import StagedFile, is_checkpoint_directory
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.formats.safetensors import (
    DAMAGES,
    SAFETENSORS_DTYPES,
    open_safetensors,
    read_safetensors,
)

__all__ = ["INDEX_FILE", "SINGLE_FILE", "SafetensorsFile", "export", "read_safetensors_directory"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


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
    except DAMAGES as error:
        raise CheckpointError(f"{where} cannot be used: {type(error).__name__}: {error}.") from error
    opened = {name: open_safetensors(files, name) for name in sorted(set(places.values()))}
    source, state = Source(files), {}
    for key, name in places.items():
        if key not in opened[name][1]:
            raise CheckpointError(f"{where} says that '{key}' is in '{name}', which does not hold it.")
        state[key] = StoredTensor(source, key, opened[name][1][key])
    return Opened({"state_dict": state}, zlib.crc32(b"".join([index, *(header for header, _ in opened.values())])))


def export(settings: Export) -> list[Path]:
    """Write a folder of safetensors, or one file; ``consolidate_checkpoint`` describes arguments and errors."""
    target = settings.target
    if not settings.is_one_file:
        _check_folder(settings)
    holes, aliases = _holes_of(settings)
    shards, paths = [holes], [target]
    if not settings.is_one_file:
        shards = _shards(holes, settings.limit)
        names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
        paths = [target / name for name in (names if len(shards) > 1 else [SINGLE_FILE])]
    files = {}
    for path, shard in zip(paths, shards, strict=True):
        metadata = {"format": "pt", **{alias: name for alias, name in aliases.items() if name in shard}}
        files[path] = SafetensorsFile(shard, metadata)
    write_export(settings, files, holes)
    if len(files) == 1:
        return [*files]
    total = sum(hole.nbytes for hole in holes.values())
    places = {name: path.name for path, shard in zip(files, shards, strict=True) for name in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"
    with StagedFile(target / INDEX_FILE) as index:
        with new_file(index.path) as file:
            file.write(text)
        index.publish()
    return [*files, target / INDEX_FILE]


def _check_folder(settings: Export) -> None:
    target = settings.target
    is_folder = target.is_dir()
    if is_folder and (names := os.listdir(target)) and is_checkpoint_directory(names):
        raise ValueError(f"'{target}' is a sharded checkpoint: write to another directory.")
    if os.path.lexists(target) and not is_folder:
        raise ValueError(
            f"'{target}' is a file, and without a suffix OUT is a directory of safetensors: give another name, "
            "one with a suffix such as '.ckpt' or '.safetensors' for a file, or delete it."
        )
    if there := sorted(filter(_WEIGHTS.fullmatch, os.listdir(target) if is_folder else ())):
        raise settings.exists(target / there[0])


def _holes_of(settings: Export) -> tuple[dict[str, Hole], dict[str, str]]:
    """A hole for every weight that safetensors can hold, once if it is tied, and the other names of tied ones."""
    weights = settings.weights()
    wrapped = [name for name in weights if not {"base_layer", "original_module"}.isdisjoint(name.split("."))]
    if wrapped and "base_model" in (settings.prefix or "").split("."):
        raise ValueError(
            f"prefix={settings.prefix!r} leaves names that peft has changed, such as '{wrapped[0]}': `from_pretrained` "
            "would initialise those layers anew. `load_from_checkpoint` gives a module, whose model can save its "
            "adapters (`save_pretrained`), or itself with them in it (`merge_and_unload` first)."
        )
    tensors = {name: value for name, value in weights.items() if isinstance(value, StoredTensor) or is_plain(value)}
    if left_out := [name for name in weights if name not in tensors]:
        warnings.warn(f"Left out, because safetensors hold plain tensors only: {', '.join(left_out)}.", stacklevel=4)
    holes = {name: with_holes(value, settings.dtype or value.dtype) for name, value in tensors.items()}
    first: dict[Any, str] = {}
    for name, hole in holes.items():
        first.setdefault((hole.key, hole.shape), name)
    kept = {name: first[hole.key, hole.shape] for name, hole in holes.items()}
    return {name: holes[name] for name in first.values()}, {name: one for name, one in kept.items() if one != name}


_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


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
