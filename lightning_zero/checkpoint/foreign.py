"""Directories of stock ``torch.distributed.checkpoint``, as Lightning's own sharded strategies write them.

What is in them is put into Lightning's checkpoint dictionary, under the names of [Note: The directory]:

    ModelParallelStrategy    state_dict.<name>, optimizer_0.state.<name>.<key>, optimizer_0.param_groups.0.<k>, meta.pt
    FSDPStrategy             the same with model.<name>
    dcp.save(state_dict)     <name>
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping
from typing import Any

from lightning_zero.checkpoint.boxes import BoxItem, BoxSource
from lightning_zero.checkpoint.files import Files, read_bytes
from lightning_zero.checkpoint.items import put_together
from lightning_zero.checkpoint.metadata import StoredBytes, StoredShape, parse_metadata
from lightning_zero.checkpoint.plain import ADVICE, load_torch
from lightning_zero.checkpoint.reader import Opened
from lightning_zero.checkpoint.schema import META_FILE, METADATA_FILE, Index
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.errors import CheckpointError

__all__ = ["ForeignDirectory", "read_foreign_directory"]

_OPTIMIZER = re.compile(r"optimizer_(\d+)")


class ForeignDirectory:
    """An open directory whose files are as long as its index says.

    Args:
        files: of the directory.

    Attributes:
        index: the content of ``.metadata``.
        tensors: what is a tensor there.
        source: reads them.
        digest: of the bytes of ``.metadata``.

    Raises:
        CheckpointError: if it is no whole checkpoint, naming the file.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.source = BoxSource(files)
        data = read_bytes(files, METADATA_FILE)
        self.digest = zlib.crc32(data)
        try:
            self.index = parse_metadata(data)
            self.tensors = {
                name: _item(name, item) for name, item in self.index.items.items() if isinstance(item, StoredShape)
            }
        except ValueError as error:
            raise CheckpointError(f"'{files.name}/{METADATA_FILE}' cannot be used: {error}.") from error
        ends: dict[str, int] = {}
        for item in self.index.items.values():
            for place in [item] if isinstance(item, StoredBytes) else [stored.archive for stored in item.boxes]:
                ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)
        for name, end in ends.items():
            nbytes = files.size(name)
            if nbytes < end:
                raise CheckpointError(
                    f"'{files.name}/{name}' has {nbytes} bytes where at least {end} were saved: it was cut off."
                )

    def value(self, name: str) -> Any:
        """What is stored under a name.

        Raises:
            CheckpointError: if it is no tensor and could run code.
        """
        if name in self.tensors:
            return StoredTensor(self.source, name, self.tensors[name])
        place = self.index.items[name]
        if not isinstance(place, StoredBytes):
            raise TypeError(f"'{name}' is a tensor")
        data = read_bytes(self.files, place.file, place.offset, place.nbytes)
        where = f"'{name}' in '{self.files.name}/{place.file}'"
        return load_torch(io.BytesIO(data), where, True, "allow its class with `torch.serialization.add_safe_globals`")


def read_foreign_directory(files: Files, weights_only: bool | None) -> Opened:
    """What is in a stock directory.

    Args:
        files: of the directory.
        weights_only: for ``meta.pt``, as for ``torch.load``. Nothing else is ever unpickled without restriction.

    Raises:
        CheckpointError: if it is no whole checkpoint or could run code, naming the file.
    """
    directory = ForeignDirectory(files)
    names = [*(name for name in directory.index.paths if name in directory.index.items), *directory.index.items]
    paths = {name: directory.index.paths.get(name, (name,)) for name in names}  # in the order of the dictionary
    layout = _layout(paths)
    pairs = [(layout(path), directory.value(name)) for name, path in paths.items()]
    pairs.sort(key=lambda pair: [part if isinstance(part, Index) else 0 for part in pair[0]])  # lists in their order
    try:
        checkpoint = put_together(pairs)
    except ValueError as error:
        raise CheckpointError(f"'{files.name}/{METADATA_FILE}' cannot be used: {error}.") from error
    for state in checkpoint.get("optimizer_states", ()):
        if isinstance(state, dict):  # of empty containers nothing is stored
            state.setdefault("state", {})
            state.setdefault("param_groups", [])
    rest, digest = _read_meta_file(files, weights_only)
    return Opened({**rest, **checkpoint}, (directory.digest, digest))


def _read_meta_file(files: Files, weights_only: bool | None) -> tuple[Mapping[str, Any], int]:
    """What Lightning puts beside the tensors, and a digest of it."""
    if not files.has(META_FILE):
        return {}, 0
    data = read_bytes(files, META_FILE)
    where = f"'{files.name}/{META_FILE}'"
    loaded = load_torch(io.BytesIO(data), where, weights_only, ADVICE)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__} instead of a dictionary.")
    return loaded, zlib.crc32(data)


def _item(name: str, stored: StoredShape) -> BoxItem:
    try:
        return BoxItem((), stored.dtype, stored.shape, (), stored.boxes)
    except ValueError as error:
        raise ValueError(f"of '{name}', {error}") from error


def _layout(paths: Mapping[str, tuple[Any, ...]]) -> Any:
    """A function from the path in the saved dictionary to the path in Lightning's."""
    tops = {path[0] for path in paths.values() if len(path) > 1}
    weights = next((top for top in ("state_dict", "model") if top in tops), None)
    numbers = sorted(int(found[1]) for top in tops if type(top) is str and (found := _OPTIMIZER.fullmatch(top)))

    def place(path: tuple[Any, ...]) -> tuple[Any, ...]:
        inner = tuple(Index(part) if type(part) is int else part for part in path[1:])
        if weights is None and not numbers:
            return "state_dict", path[0], *inner
        found = _OPTIMIZER.fullmatch(str(path[0]))
        if found is not None and inner:
            return "optimizer_states", Index(numbers.index(int(found[1]))), *inner
        return "state_dict" if path[0] == weights else path[0], *inner

    return place
