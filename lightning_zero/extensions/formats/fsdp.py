"""A sharded directory under the names of ``FSDPStrategy``, which shares the data files with the one it is made from.

Lightning's two sharded strategies differ in one word: the weights are ``state_dict.<name>`` in the directories of
``ModelParallelStrategy``, as in ours, and ``model.<name>`` in those of ``FSDPStrategy``. That word stands in the index
alone, so only the index is written anew.

[Note: Shared files]

A data file with two names (a hard link) stays whole when either is deleted, but changes under both when it is written
to in place. We never do that. Lightning's strategies do: they save over a checkpoint of the same path, file by file.
Therefore

    the files get names that DCP never writes, so that saving over the new directory leaves them alone
    ``meta.pt``, which has to keep its name, is copied
    the files of a directory that Lightning wrote are copied: the next save there would change them
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.consolidated import Export, warn_of_excluded
from lightning_zero.checkpoint.format.dcp import BoxItem, Index, StoredBox, StoredBytes, to_metadata
from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE, TensorItem
from lightning_zero.checkpoint.load import Directory, ForeignDirectory, read_directory
from lightning_zero.checkpoint.save import new_file, progress_bar
from lightning_zero.checkpoint.storage.files import PIECE_NBYTES, Files, is_remote, local_path, open_folder, read_bytes
from lightning_zero.checkpoint.storage.publish import Staging
from lightning_zero.errors import CheckpointError

__all__ = ["export_fsdp"]

_WEIGHTS, _THEIRS = "state_dict", "model"
_PREFIX = "shared"  # of the data files' names; see the note


def export_fsdp(settings: Export) -> list[Path]:
    """Make a directory that ``FSDPStrategy`` resumes from, of one of ours or of ``ModelParallelStrategy``.

    Neither reads a tensor nor unpickles anything but the index, which can call nothing. Our own data files are hard
    links where the file system allows it, and copied otherwise. See [Note: Shared files]. The directory is new or
    empty, and is published in one step. A ``CheckpointError`` about the source names what to do instead.
    """
    if settings.dtype is not None or settings.weights_only or settings.prefix is not None:
        raise ValueError("format='fsdp' takes over what is saved: dtype, weights_only and prefix do not go with it.")
    source, out = settings.source, settings.target
    if os.path.lexists(out) and not (out.is_dir() and not os.listdir(out)):
        raise ValueError(f"'{out}' exists: write to another place, or delete it.")
    if settings.own is not None:
        warn_of_excluded(read_directory(settings.own.files).checkpoint, source)
    return [_write(source, out, settings.progress)]


def _write(source: str, out: Path, progress: bool) -> Path:
    folder = None if is_remote(source) else local_path(source)
    if folder is not None and not folder.is_dir():
        raise _unfit(source, "is no directory")
    before = None if folder is None else os.stat(folder)
    files = open_folder(source)
    if not files.has(METADATA_FILE):
        raise _unfit(source, f"has no {METADATA_FILE}")
    own = Directory(files) if files.has(RECORD_FILE) else None
    directory = ForeignDirectory(files)
    paths = _new_paths(source, directory)
    meta = _meta_file(files, own)
    data = {place.file: f"{_PREFIX}{place.file}" for _, place in directory.index.places()}
    sizes = {name: files.size(name) for name in data}
    if own is not None:
        _check_record(own, directory, sizes)
    index = to_metadata(_renamed(directory.index, paths, data))
    staging = Staging(out)
    staging.begin()
    try:
        targets = {name: staging.path / new for name, new in data.items()}
        copied = targets if own is None or folder is None else _not_linked(folder, targets)
        _copy(files, copied, sizes, out.name, progress)
        for name, path in targets.items():
            if path.stat().st_size != sizes[name]:
                raise CheckpointError(f"'{files.name}/{name}' was replaced while it was read: repeat this.")
        if folder is not None and before is not None and not os.path.samestat(before, os.stat(folder)):
            raise CheckpointError(f"'{source}' was replaced while it was read: repeat this.")
        for name, content in ((META_FILE, meta), (METADATA_FILE, index)):
            with new_file(staging.path / name) as file:
                file.write(content)
        staging.publish()
    finally:
        staging.discard()
    return out


def _unfit(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{source}' {why}: the format 'fsdp' is made of a sharded directory of this strategy or of "
        "ModelParallelStrategy only. FSDPStrategy also loads ordinary files: write one with "
        f"`lightning-zero consolidate {source} OUT.ckpt`."
    )


def _new_paths(source: str, directory: ForeignDirectory) -> dict[str, tuple[Any, ...]]:
    """The path in FSDPStrategy's dictionary by old name, in the order of the old one."""
    paths = directory.paths
    tops = {path[0] for path in paths.values() if len(path) > 1}
    if _THEIRS in tops and _WEIGHTS not in tops:
        raise CheckpointError(f"'{source}' has the names of FSDPStrategy already: give it to that strategy as it is.")
    if _WEIGHTS not in tops:
        raise _unfit(source, f"has no weights under `{_WEIGHTS}`")
    if any(path[0] == _THEIRS for path in paths.values()):
        raise _unfit(source, f"holds `{_THEIRS}` besides `{_WEIGHTS}`, which would be mixed up")
    for name, path in paths.items():
        if path[0] == _WEIGHTS and (len(path) == 1 or not name.startswith(f"{_WEIGHTS}.")):
            raise directory.unusable(ValueError(f"'{name}' is said to be at {path}"))
    return {name: (_THEIRS, *path[1:]) if path[0] == _WEIGHTS else path for name, path in paths.items()}


def _renamed(index: Index, paths: Mapping[str, tuple[Any, ...]], data: Mapping[str, str]) -> Index:
    """The index with the new names of values and files."""
    items: dict[str, BoxItem | StoredBytes] = {}
    new_paths: dict[str, tuple[Any, ...]] = {}
    for old, path in paths.items():
        name = f"{_THEIRS}.{old.removeprefix(f'{_WEIGHTS}.')}" if path[0] == _THEIRS else old
        new_paths[name], item = path, index.items[old]
        if isinstance(item, StoredBytes):
            items[name] = item._replace(file=data[item.file])
        else:
            boxes = [StoredBox(box, archive._replace(file=data[archive.file])) for box, archive in item.boxes]
            items[name] = replace(item, boxes=tuple(boxes))
    return Index(items, new_paths)


def _meta_file(files: Files, own: Directory | None) -> bytes:
    """The content of ``meta.pt``."""
    name = META_FILE if own is None else own.listed(META_FILE)
    if not files.has(name):
        raise _unfit(files.name, f"has no {name}, which Lightning's strategies write,")
    content = read_bytes(files, name)
    if own is not None:
        _check_content(own, name, content)
    return content


def _check_record(own: Directory, directory: ForeignDirectory, sizes: Mapping[str, int]) -> None:
    """Compare the index and the files it leads to with our record."""
    _check_content(own, METADATA_FILE, read_bytes(own.files, METADATA_FILE))
    for name in sizes:
        if name not in own.record.files:
            raise CheckpointError(
                f"'{own.files.name}/{METADATA_FILE}' leads to '{name}', which {RECORD_FILE} does not list: it is of "
                "another save, or was changed."
            )
        own.check_size(name)
    for key, item in own.record.items.items():
        if isinstance(item, TensorItem) and key not in directory.index.items:
            raise CheckpointError(f"'{own.files.name}/{METADATA_FILE}' lacks '{key}': it is of another save.")


def _check_content(own: Directory, name: str, content: bytes) -> None:
    if (listed := own.record.files.get(name)) is None:  # behind a URL the index is not listed
        return
    own.check_size(name)
    if listed.crc32 is not None and zlib.crc32(content) != listed.crc32:
        raise CheckpointError(f"'{own.files.name}/{name}' does not match its checksum: it was damaged or changed.")


def _not_linked(folder: Path, targets: Mapping[str, Path]) -> dict[str, Path]:
    """Give files second names. Returns those that have none: other file systems, and some settings, allow none."""
    left = {}
    for name, path in targets.items():
        try:
            os.link(folder / name, path, follow_symlinks=False)
        except OSError:
            left[name] = path  # copying says what is wrong, if it is not only that
    return left


def _copy(files: Files, targets: Mapping[str, Path], sizes: Mapping[str, int], title: str, progress: bool) -> None:
    with progress_bar(title, sum(sizes[name] for name in targets), progress and bool(targets)) as bar:
        for name, path in targets.items():
            with new_file(path) as file:
                for offset in range(0, sizes[name], PIECE_NBYTES):
                    bar.update(file.write(read_bytes(files, name, offset, min(PIECE_NBYTES, sizes[name] - offset))))
