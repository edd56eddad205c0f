"""Opening a checkpoint of any kind, which is found out by looking, and reading directories.

A directory of our own is read by its record. What is in a stock one of ``torch.distributed.checkpoint`` is put into
Lightning's checkpoint dictionary, under the names of [Note: The directory]:

    ModelParallelStrategy    state_dict.<name>, optimizer_0.state.<name>.<key>, optimizer_0.param_groups.0.<k>, meta.pt
    FSDPStrategy             the same with model.<name>
    dcp.save(state_dict)     <name>
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import IO, Any, Literal

from torch import Tensor

from lightning_zero.checkpoint.format.dcp import archives, parse_metadata
from lightning_zero.checkpoint.format.record import (
    META_FILE,
    METADATA_FILE,
    RECORD_FILE,
    BlobItem,
    Chunk,
    Index,
    Opened,
    Record,
    TensorItem,
    put_together,
)
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import load_torch, read_torch_file
from lightning_zero.checkpoint.format.typed_json import DTYPES, Decoder, raw_memory
from lightning_zero.checkpoint.storage.files import (
    Files,
    is_folder,
    open_folder,
    open_parent,
    open_range,
    read_index,
    samples,
)
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, ExtensionError, shortened, some
from lightning_zero.registry import extension, installed

__all__ = [
    "Directory",
    "Found",
    "Kind",
    "find_checkpoint",
    "foreign_items",
    "is_checkpoint_directory_at",
    "load_safely",
    "open_checkpoint",
    "read_checkpoint",
    "read_directory",
    "read_foreign_directory",
]


def open_checkpoint(
    path: str | os.PathLike[str],
    control: ControlGroup,
    *,
    verify: bool | Literal["sample"] = False,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read what a checkpoint says of itself; tensors stay on disk until they are asked for.

    Args:
        path: a directory of ours, of Lightning's sharded strategies, of ``dcp.save`` or of DeepSpeed; a torch file; a
            safetensors file or directory; a local path or a URL.
        control: the ranks.
        verify: read everything that has a checksum and compare it, the files shared out among the ranks. A warning on
            rank 0 names what has none. ``"sample"`` compares a part of each file of our own format only, if the
            extension ``inspection`` is there; see [Note: The sample] in it.
        weights_only: for torch files and the ``meta.pt`` of other programs, as for ``torch.load``. ``False`` lets them
            run code, which by default they must not. Our own directories hold none that is needed.

    Returns:
        Lightning's checkpoint dictionary. Tensors are StoredTensors, or mapped from a torch file. What is only
        weights is under ``state_dict``. What could run code is left out with a warning on rank 0, or refused.

    Raises:
        CheckpointError: on every rank, naming the file, if it is not whole, could run code, or differs between ranks.
        ExtensionError: if it has a layout of the extension ``formats``, which was deleted.

    Collective: every rank.
    """
    what = f"load the checkpoint '{os.fspath(path)}'"
    read: list[tuple[Found, Opened]] = []

    def look() -> Any:
        found = find_checkpoint(path)
        read.append((found, read_checkpoint(path, found, weights_only)))
        return read[0][1].digest

    try:
        digests = control.together(what, look)
    except CheckpointError as error:
        if isinstance(error.__cause__, ExtensionError):  # it was deleted from this copy of the package
            raise error.__cause__ from None
        raise
    found, (checkpoint, _, missing, notes) = read[0]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"Could not {what}: rank {rank} sees another checkpoint there than rank 0, or was given another name. "
                "Use a shared file system, and one name."
            )
    for note in notes if control.rank == 0 else ():
        warnings.warn(f"Of the checkpoint '{os.fspath(path)}' {note}.", stacklevel=2)
    if missing and control.rank == 0:
        names = shortened(", ".join(missing))
        warnings.warn(
            f"Left out of the checkpoint '{os.fspath(path)}', because loading it could run code: {names}. "
            f"If it is needed and you trust the file, allow its class with `torch.serialization.add_safe_globals`.",
            stacklevel=2,
        )
    if verify is True or (verify and installed("inspection")):
        extension("inspection").verify_together(path, found, control, sampled=verify == "sample")
    return checkpoint


def is_checkpoint_directory_at(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a directory, local or behind a URL, that ``open_checkpoint`` reads. Looks at names only."""
    try:
        return is_folder(path) and _in_folder(path) is not None
    except (CheckpointError, ExtensionError):  # it cannot be read
        return False


_END_NBYTES = 1 << 20  # of a torch file: the directory of the archive, with a CRC-32 of every tensor


# ------------------------------------------------------------------------------------------------------ what there is


class Kind(Enum):
    """What a checkpoint is, for people, by what it is told from."""

    OWN = "sharded directory of lightning_zero"  # with our record
    FOREIGN = "sharded directory of torch.distributed.checkpoint"  # with DCP's index
    TORCH = "torch file"  # any file but
    # Of the extension `formats`:
    SAFETENSORS = "safetensors file"  # by its ending
    HUGGING_FACE = "directory of safetensors"  # of the usual names
    DEEPSPEED = "sharded directory of DeepSpeed"  # with `latest`, or the folder of one save in it


@dataclass(frozen=True)
class Found:
    """What is at a path: a checkpoint of a kind, the folder that it is or lies in, and there its name; empty for a
    folder.
    """

    kind: Kind
    files: Files
    name: str = ""

    @cached_property
    def directory(self) -> Directory:
        """One of our own, whose record is read once; ``CheckpointError`` if it cannot be used."""
        return Directory(self.files)


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Look what is at a path; ``CheckpointError`` if it is nothing that can be a checkpoint."""
    if not is_folder(path):
        files, name = open_parent(path)
        if not files.has(name):
            raise CheckpointError(f"There is no checkpoint at '{os.fspath(path)}': no such file or directory.")
        return Found(Kind.SAFETENSORS if name.lower().endswith(".safetensors") else Kind.TORCH, files, name)
    found = _in_folder(path)
    if found is None:
        there = extension("inspection").checkpoints_in(path) if installed("inspection") else []
        in_it = f" In it are checkpoints, of which one is needed: {some(map(repr, there))}." if there else ""
        raise CheckpointError(
            f"The directory '{os.fspath(path)}' is no checkpoint: it has neither {RECORD_FILE} nor {METADATA_FILE}, "
            "model.safetensors, model.safetensors.index.json or DeepSpeed's `latest`."
            f"{in_it or ' If it was being written, use the one before.'}"
        )
    return found


def _in_folder(path: str | os.PathLike[str]) -> Found | None:
    files = open_folder(path)
    if files.has(RECORD_FILE):
        return Found(Kind.OWN, files)
    if files.has(METADATA_FILE):
        return Found(Kind.FOREIGN, files)
    why = f"'{os.fspath(path)}' has neither {RECORD_FILE} nor {METADATA_FILE}."
    found: Found | None = extension("formats", "name another checkpoint", why=why).find(path)
    return found


def read_checkpoint(path: str | os.PathLike[str], found: Found, weights_only: bool | None) -> Opened:
    """What a checkpoint of any kind says of itself; ``open_checkpoint`` on this rank alone."""
    if found.kind is Kind.OWN:
        return read_directory(found.directory)
    if found.kind is Kind.FOREIGN:
        return read_foreign_directory(found.files, weights_only)
    if found.kind is Kind.TORCH:
        digest = samples(found.files, found.name, _END_NBYTES)  # asks for the size first: a pipe would never end
        return read_torch_file(found.files, found.name, weights_only)._replace(digest=digest)
    opened: Opened = extension("formats", why=f"'{os.fspath(path)}' is a {found.kind.value}.").read(found)
    return opened


# --------------------------------------------------------------------------------------------------------- directories

Path = tuple[Any, ...]  # the way through a checkpoint dictionary


def _described(files: Files, name: str, parse: Callable[[bytes], Any]) -> tuple[Any, int]:
    """What a file says is in a directory, and its checksum; ``CheckpointError`` if it is missing or damaged."""
    data = read_index(files, name)
    try:
        return parse(data), zlib.crc32(data)
    except ValueError as error:
        raise _unusable(files, name, error) from error


def _unusable(files: Files, name: str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"'{files.name}/{name}' cannot be used: {error}.")


class Directory:
    """An open checkpoint directory of our own; ``record`` is the content of its ``zero.json``.

    ``source`` reads its tensors, and ``digest`` is for the ranks to compare.
    """

    def __init__(self, files: Files) -> None:
        self.files, self.source = files, Source(files)
        self.record: Record
        self.record, self.digest = _described(files, RECORD_FILE, Record.from_bytes)

    def check_size(self, name: str) -> None:
        """Compare the size of a file with the recorded one: ``CheckpointError``."""
        nbytes, expected = self.files.size(name), self.record.files[name].nbytes
        if nbytes != expected:
            raise CheckpointError(
                f"'{self.files.name}/{name}' has {nbytes} bytes where {expected} were saved: it was cut off or changed."
            )


def read_directory(directory: Directory) -> Opened:
    """What is in a whole checkpoint directory of our own; ``CheckpointError`` otherwise, naming the file."""
    for name in directory.record.files:
        directory.check_size(name)
    missing: list[tuple[str, str]] = []  # name and class of what is not in it
    pairs: list[tuple[Path, Any]] = []
    decoder = Decoder(lambda reference: _meta_tensor(directory, reference))
    try:
        for key, item in directory.record.items.items():
            if isinstance(item, TensorItem):
                pairs.append((item.path, StoredTensor(directory.source, key, item)))
                continue
            if isinstance(item, BlobItem):
                loaded = load_safely(open_range(directory.files, item.file, item.offset, item.nbytes))
                found, left_out = loaded or (None,), [item.type] if loaded is None else []
            else:
                one = Decoder()
                found = tuple(one.decode({"value": item.value}).values())
                left_out = [kind for _, kind in one.unsupported]
            if left_out:
                missing.append((key, left_out[0]))
            else:
                pairs.append((item.path, *found))
        rest = decoder.decode(directory.record.meta)
        if not isinstance(rest, dict):
            raise ValueError(f"its meta is a {type(rest).__name__}")
        if decoder.unsupported:
            missing += _add_from_meta_file(directory, rest, decoder.unsupported)
        checkpoint = {**rest, **put_together(pairs)}
    except ValueError as error:
        raise _unusable(directory.files, RECORD_FILE, error) from error
    return Opened(checkpoint, directory.digest, [f"'{name}' ({kind})" for name, kind in missing])


def load_safely(archive: IO[bytes]) -> tuple[Any] | None:
    """What a ``torch.save`` archive holds, if loading it can run no code."""
    # Any reason not to have it is the same reason to leave it out; but what torch warns of (sparse tensors) is none.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (load_torch(archive, "it", True),)
    return None


def _add_from_meta_file(
    directory: Directory, rest: Any, unsupported: Sequence[tuple[Path, str]]
) -> list[tuple[str, str]]:
    """Fill gaps from ``meta.pt``, if it loads without running code. Returns name and class of the gaps that stay."""
    loaded = None
    for name, entry in directory.record.files.items():
        if re.fullmatch(r"meta(-\w+)?\.pt", name):  # with every save a new name, where it cannot be renamed
            loaded = load_safely(open_range(directory.files, name, 0, entry.nbytes))
    missing = []
    for path, kind in unsupported:
        try:
            source, target = (loaded or ({},))[0], rest
            for part in path[:-1]:
                source, target = source[part], target[part]
            target[path[-1]] = source[path[-1]]
        except (KeyError, IndexError, TypeError):
            missing.append((".".join(map(str, path)), kind))
    return missing


def _meta_tensor(directory: Directory, reference: Any) -> Tensor:
    """A tensor of ``meta.bin``."""
    dtype, shape = DTYPES[reference["dtype"]], tuple(reference["shape"])
    name = reference["file"]
    chunk = Chunk(0, math.prod(shape), name, reference["offset"], reference["crc32"])
    item = TensorItem((), dtype, shape, (chunk,) if chunk.numel else ())
    Record(files=directory.record.files, items={name: item}, meta=None)  # proves that it lies in the file
    tensor = StoredTensor(directory.source, name, item).read()
    if chunk.crc32 is not None and zlib.crc32(raw_memory(tensor)) != chunk.crc32:
        raise CheckpointError(f"'{directory.files.name}/{name}' is damaged: a tensor does not match its checksum.")
    return tensor


_OPTIMIZER = re.compile(r"optimizer_(0|[1-9][0-9]{0,8})")


def foreign_items(files: Files) -> tuple[dict[str, TensorItem | BlobItem], int]:
    """What is in a directory of DCP, and a checksum; ``CheckpointError`` if a file is shorter than its index says."""
    items, digest = _described(files, METADATA_FILE, parse_metadata)
    ends: dict[str, int] = {}
    for _, place in archives(items):
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)
    for name, end in ends.items():
        if (nbytes := files.size(name)) < end:
            raise CheckpointError(
                f"'{files.name}/{name}' has {nbytes} bytes where at least {end} were saved: it was cut off."
            )
    return items, digest


def read_foreign_directory(files: Files, weights_only: bool | None) -> Opened:
    """What is in a whole stock directory; ``CheckpointError`` otherwise, or if it could run code, naming the file.

    ``weights_only`` is for ``meta.pt``, as for ``torch.load``. Nothing else is ever unpickled without restriction.
    """
    items, index_digest = foreign_items(files)
    layout, source = _layout([item.path for item in items.values()]), Source(files)
    pairs: list[tuple[Path, Any]] = []
    for name, item in items.items():
        if isinstance(item, TensorItem):
            pairs.append((layout(item.path), StoredTensor(source, name, item)))
            continue
        file = open_range(files, item.file, item.offset, item.nbytes)
        pairs.append((layout(item.path), load_torch(file, f"'{name}' in '{files.name}/{item.file}'", True)))
    pairs.sort(key=lambda pair: [part if isinstance(part, Index) else 0 for part in pair[0]])  # lists in their order
    try:
        checkpoint = put_together(pairs)
    except ValueError as error:
        raise _unusable(files, METADATA_FILE, error) from error
    for state in checkpoint.get("optimizer_states", ()):
        if isinstance(state, dict):  # of empty containers nothing is stored
            state.setdefault("state", {})
            state.setdefault("param_groups", [])
    if not files.has(META_FILE):  # what Lightning puts beside the tensors
        return Opened(checkpoint, (index_digest, 0))
    where = f"'{files.name}/{META_FILE}'"
    digest = samples(files, META_FILE)
    rest = load_torch(open_range(files, META_FILE, 0, digest[0]), where, weights_only)
    if not isinstance(rest, Mapping):
        raise CheckpointError(f"{where} holds a {type(rest).__name__} instead of a dictionary.")
    return Opened({**rest, **checkpoint}, (index_digest, digest))


def _layout(paths: Sequence[Path]) -> Callable[[Path], Path]:
    """A function from the path in the saved dictionary to the path in Lightning's."""
    tops = {path[0] for path in paths if len(path) > 1}
    weights = next((top for top in ("state_dict", "model") if top in tops), None)
    numbers = sorted(int(found[1]) for top in tops if type(top) is str and (found := _OPTIMIZER.fullmatch(top)))

    def place(path: Path) -> Path:
        inner = tuple(Index(part) if type(part) is int else part for part in path[1:])
        if weights is None and not numbers:
            return "state_dict", path[0], *inner
        found = _OPTIMIZER.fullmatch(str(path[0]))
        if found is not None and inner:
            return "optimizer_states", Index(numbers.index(int(found[1]))), *inner
        return "state_dict" if path[0] == weights else path[0], *inner

    return place
