"""A sharded directory under the names of ``FSDPStrategy``.

Lightning's two sharded strategies differ in one word: the weights are ``state_dict.<name>`` in the directories of
``ModelParallelStrategy``, as in ours, and ``model.<name>`` in those of ``FSDPStrategy``. That word stands in the index
alone, so only the index is written anew, and the other files are copied.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.consolidated import Export, warn_of_excluded
from lightning_zero.checkpoint.format.dcp import Index, to_metadata
from lightning_zero.checkpoint.format.record import META_FILE, METADATA_FILE, RECORD_FILE, TensorItem
from lightning_zero.checkpoint.load import Directory, ForeignDirectory, read_directory
from lightning_zero.checkpoint.save import new_file, progress_bar
from lightning_zero.checkpoint.storage.files import WRITTEN_NBYTES, is_folder, open_folder, read_bytes
from lightning_zero.checkpoint.storage.publish import Staging
from lightning_zero.errors import CheckpointError

__all__ = ["export_fsdp"]

_WEIGHTS, _THEIRS = "state_dict", "model"


def export_fsdp(settings: Export) -> list[Path]:
    """Make a directory that ``FSDPStrategy`` resumes from, of one of ours or of ``ModelParallelStrategy``.

    Nothing is unpickled but the index, which can call nothing. The directory is new or empty, and is published in one
    step. A ``CheckpointError`` about the source names what to do instead.
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
    if not is_folder(source):
        raise _unfit(source, "is no directory")
    files = open_folder(source)
    if not files.has(METADATA_FILE):
        raise _unfit(source, f"has no {METADATA_FILE}")
    own = Directory(files) if files.has(RECORD_FILE) else None
    directory = ForeignDirectory(files)
    index = to_metadata(_renamed(directory.index, _new_paths(source, directory)))
    meta = META_FILE if own is None else own.listed(META_FILE)
    if not files.has(meta):
        raise _unfit(source, f"has no {meta}, which Lightning's strategies write,")
    names = {**{place.file: place.file for _, place in directory.index.places()}, meta: META_FILE}
    if own is not None:
        _check_record(own, directory, names)
    sizes = {name: files.size(name) for name in names}
    staging = Staging(out)
    staging.begin()
    try:
        with progress_bar(out.name, sum(sizes.values()), progress) as bar:
            for name, new in names.items():
                with new_file(staging.path / new) as file:
                    crc32 = 0
                    for offset in range(0, sizes[name], WRITTEN_NBYTES):
                        part = read_bytes(files, name, offset, min(WRITTEN_NBYTES, sizes[name] - offset))
                        crc32 = zlib.crc32(part, crc32)
                        bar.update(file.write(part))
                if own is not None:
                    _check_content(own, name, crc32)
        with new_file(staging.path / METADATA_FILE) as file:
            file.write(index)
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


def _renamed(index: Index, paths: Mapping[str, tuple[Any, ...]]) -> Index:
    """The index with the new names of values."""
    new = {old: f"{_THEIRS}.{old.removeprefix(f'{_WEIGHTS}.')}" if paths[old][0] == _THEIRS else old for old in paths}
    return Index({new[old]: index.items[old] for old in paths}, {new[old]: path for old, path in paths.items()})


def _check_record(own: Directory, directory: ForeignDirectory, names: Iterable[str]) -> None:
    """Compare the index and the files it leads to with our record."""
    _check_content(own, METADATA_FILE, directory.digest)
    for name in names:
        if name not in own.record.files:
            raise CheckpointError(
                f"'{own.files.name}/{METADATA_FILE}' leads to '{name}', which {RECORD_FILE} does not list: it is of "
                "another save, or was changed."
            )
        own.check_size(name)
    for key, item in own.record.items.items():
        if isinstance(item, TensorItem) and key not in directory.index.items:
            raise CheckpointError(f"'{own.files.name}/{METADATA_FILE}' lacks '{key}': it is of another save.")


def _check_content(own: Directory, name: str, crc32: int) -> None:
    listed = own.record.files.get(name)  # behind a URL the index is not listed
    if listed is not None and listed.crc32 not in (None, crc32):
        raise CheckpointError(f"'{own.files.name}/{name}' does not match its checksum: it was damaged or changed.")
