"""One process turns a checkpoint of any kind into ordinary files, a piece of a tensor at a time."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_zero.checkpoint.consolidated import FEEDBACK_KEY, RANDOM_KEY, SUMMARY_KEY, by_parameter_index
from lightning_zero.checkpoint.directories import Directory, read_directory
from lightning_zero.checkpoint.format.record import RECORD_FILE
from lightning_zero.checkpoint.format.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFile
from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.format.typed_json import Decoder, is_plain
from lightning_zero.checkpoint.fsdp import write_fsdp_directory
from lightning_zero.checkpoint.load import open_checkpoint
from lightning_zero.checkpoint.pretrained import refuse_wrapped_names, write_pretrained
from lightning_zero.checkpoint.storage.files import is_remote, local_output, local_path, open_folder
from lightning_zero.checkpoint.storage.publish import StagedFile, is_checkpoint_directory
from lightning_zero.checkpoint.writing import Pieces, progress_bar, write_bytes
from lightning_zero.comm import ControlGroup
from lightning_zero.config import parse_size
from lightning_zero.errors import CheckpointError

__all__ = ["FileFormat", "consolidate_checkpoint"]

FileFormat = Literal["ckpt", "safetensors", "fsdp", "huggingface", "peft"]

_TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# What Lightning leaves out of a checkpoint that is saved with `weights_only=True`.
_TRAINING_STATE = ("optimizer_states", "lr_schedulers", "callbacks", "ZeroPrecision", "MixedPrecision")


def consolidate_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: FileFormat | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    weights_only: bool = False,
    prefix: str | None = None,
    base: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> list[Path]:
    """Write an ordinary checkpoint file, or safetensors files, from a checkpoint of any kind.

    Runs in one process and needs memory for a piece of one tensor, for ``"huggingface"`` for the whole model. Checksums
    that the source has are verified.

    Args:
        source: a sharded directory of this package, of Lightning's strategies, ``torch.distributed.checkpoint`` or
            DeepSpeed (ZeRO stages 1 to 3), a ``.ckpt`` file, or safetensors.
        out: ``*.ckpt`` (or ``.pt``, ``.pth``, ``.bin``): one file as ``Trainer.save_checkpoint`` writes it on one
            device, which ``load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)`` read without this package.
            ``*.safetensors``: one file of weights. Anything without a suffix is a directory of safetensors files as
            Hugging Face has it, with an index if there are several.
        format: what to write, where the name of ``out`` does not say it. ``"fsdp"``, which no name says, is a sharded
            directory for Lightning's ``FSDPStrategy``, of one of this package or of ``ModelParallelStrategy``. It
            shares the data files with the source where the file system can; no checksum of tensors is verified then.
            ``"huggingface"`` and ``"peft"`` are folders for ``from_pretrained``, with configurations: the model, with
            adapters merged into it, or the adapters alone. transformers and peft write them, which have to be
            installed, from a checkpoint of this package.
        dtype: cast floating-point weights to it, as ``"bfloat16"`` or ``"bf16"``. Optimizer states keep theirs.
        max_shard_size: of a file in a directory of safetensors, as ``"5GB"`` or ``"2GiB"``, or a number of bytes. A
            larger tensor goes alone.
        weights_only: leave the state of optimizers, schedulers and callbacks out of a ``.ckpt``.
        prefix: cut this module's name off the weights' names: with ``"model"``, ``model.weight`` becomes ``weight``.
        base: for ``"huggingface"``: the pretrained model that a checkpoint without frozen parameters was trained on.
        overwrite: replace a file, or weights in a directory, that are there; never the source or a sharded directory.
        progress: show a progress bar on a terminal.

    Returns:
        The files that were written, or the directory for ``"fsdp"``.

    Raises:
        ValueError: for settings that are wrong or contradict each other, and for a target that exists.
        CheckpointError: if the source is damaged or no checkpoint, or a file could not be written, naming it. A file
            that is replaced is replaced whole or not at all.
    """
    target = local_output(out)
    kind = _kind(target, format)
    limit, cast = parse_size(max_shard_size), _floating(dtype)
    _check_options(kind, dtype, weights_only, prefix, base)
    _check_target(source, target, kind, overwrite)
    own = Directory(open_folder(source)) if _is_own(source) else None
    try:
        if kind == "fsdp":
            if own is not None:
                _warn_of_excluded(read_directory(own.files).checkpoint, source)
            return [write_fsdp_directory(source, target, progress=progress)]
        checkpoint = _opened(source, own)
        if kind in ("huggingface", "peft"):
            settings: dict[str, Any] = {"prefix": prefix, "base": base, "dtype": cast, "max_shard_size": limit}
            written = write_pretrained(checkpoint, source, target, kind, **settings)
            _delete_old_weights(target, {path.name for path in written})
            return written
        _warn_of_excluded(checkpoint, source)
        weights = _renamed(checkpoint["state_dict"], prefix)
        if kind == "safetensors" and prefix is not None:
            refuse_wrapped_names(weights, prefix)
        if kind == "ckpt":
            return [_write_torch(checkpoint, weights, target, cast, weights_only, progress)]
        return _write_safetensors(weights, target, cast, limit, progress)
    except OSError as error:
        raise CheckpointError(f"Could not write '{target}': {error}.") from error


def _kind(target: Path, given: str | None) -> FileFormat:
    by_suffix = {**dict.fromkeys(_TORCH_SUFFIXES, "ckpt"), ".safetensors": "safetensors"}.get(target.suffix.lower())
    if given not in (None, *get_args(FileFormat)):
        raise ValueError(f"format must be one of {', '.join(map(repr, get_args(FileFormat)))}, got {given!r}.")
    if given == "fsdp" and by_suffix != "safetensors":  # Lightning's directories are called `*.ckpt`
        return "fsdp"
    if by_suffix is None and given == "huggingface":
        return "huggingface"
    if by_suffix is None and given == "peft":
        return "peft"
    if given is not None and by_suffix not in (None, given):
        raise ValueError(f"format='{given}' contradicts the name '{target.name}'.")
    kind = given or by_suffix
    if kind is None and target.suffix and not target.is_dir():
        raise ValueError(f"'{target.name}' does not say what to write: give format='ckpt' or 'safetensors'.")
    return "ckpt" if kind == "ckpt" else "safetensors"


def _check_options(
    kind: FileFormat, dtype: str | torch.dtype | None, weights_only: bool, prefix: str | None, base: Any
) -> None:
    if base is not None and kind not in ("huggingface", "peft"):
        raise ValueError("base goes with format='huggingface' and format='peft' only.")
    if prefix is not None and kind == "ckpt" and not weights_only:
        raise ValueError("prefix renames weights, with which a checkpoint to resume from would not fit its own model.")
    if kind == "fsdp" and (dtype is not None or weights_only or prefix is not None):
        raise ValueError("format='fsdp' takes over what is saved: dtype, weights_only and prefix do not go with it.")


def _floating(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return None
    name = str(given).lower().removeprefix("torch.")
    dtype = _SHORT.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"dtype must be a floating-point dtype: bfloat16 (bf16), float16 (fp16) or float32 (fp32), got {given!r}."
        )
    return dtype


def _check_target(source: str | os.PathLike[str], target: Path, kind: FileFormat, overwrite: bool) -> None:
    if not is_remote(source):
        _refuse_overlap(local_path(source), target)
    exists, is_folder = os.path.lexists(target), target.is_dir()
    if kind == "fsdp" and exists and not (is_folder and not os.listdir(target)):
        raise ValueError(f"'{target}' exists: write to another place, or delete it.")
    if is_folder and (kind == "ckpt" or _is_single(target)):
        raise ValueError(f"'{target}' is a directory: give the name of a file, or delete it.")
    if is_folder and os.listdir(target) and is_checkpoint_directory(target):
        raise ValueError(f"'{target}' is a sharded checkpoint: write to another directory.")
    if kind != "ckpt" and not _is_single(target) and exists and not is_folder:
        raise ValueError(
            f"'{target}' is a file, and without a suffix OUT is a directory of safetensors: give another name, "
            "one with a suffix such as '.ckpt' or '.safetensors' for a file, or delete it."
        )
    there = sorted(name for name in os.listdir(target) if _is_weights(name)) if is_folder else [target.name]
    if not overwrite and exists and there:
        path = target / there[0] if is_folder else target
        raise ValueError(f"'{path}' exists: write to another place, or replace it with overwrite=True (--overwrite).")


def _is_weights(name: str) -> bool:
    """Whether a file in a directory is one of those that hold weights, or say where they are."""
    return name == INDEX_FILE or _WEIGHTS.fullmatch(name) is not None


def _refuse_overlap(source: Path, out: Path) -> None:
    """Make sure that no file of a checkpoint is replaced by what is made of it, whatever links lead there.

    Raises:
        ValueError: if one would be, or ``out`` would lie within the checkpoint.
    """
    real, target = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if target == real or (target.exists() and real.exists() and target.samefile(real)):
        raise ValueError(f"'{out}' is the source itself: write to another place.")
    names = _names_of(out)
    if real.is_dir() and any(name.is_relative_to(real) for name in names):
        raise ValueError(f"'{out}' is within the source: write to another place.")
    parts = [real / name for name in os.listdir(real)] if real.is_dir() else [source]
    for part in (name for given in parts for name in _names_of(given)):
        if part in names or (part.parent == target and _is_weights(part.name)):
            raise ValueError(f"'{part}' of the source would be replaced or deleted: write to another place.")


def _names_of(path: Path) -> set[Path]:
    """Of a path, and of what it leads to if it is a link; without links before the last part."""
    return {Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name)}


def _is_single(target: Path) -> bool:
    """Whether safetensors are one file of that name, and no directory."""
    return target.suffix.lower() == ".safetensors"


def _is_own(source: str | os.PathLike[str]) -> bool:
    with suppress(CheckpointError):  # a local file, for example; what is wrong shows when it is opened
        return open_folder(source).has(RECORD_FILE)
    return False


def _opened(source: str | os.PathLike[str], own: Directory | None) -> dict[str, Any]:
    """The checkpoint, with its partition if it is one of ours."""
    checkpoint = open_checkpoint(source, ControlGroup(None))
    if own is not None and isinstance(checkpoint.get(SUMMARY_KEY, {}), dict):
        told, of_ranks = checkpoint.get(SUMMARY_KEY, {}), (FEEDBACK_KEY, RANDOM_KEY)
        summary = {key: value for key, value in told.items() if key not in of_ranks}
        checkpoint[SUMMARY_KEY] = {**summary, "plan": Decoder().decode(own.record.plan)}
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"'{os.fspath(source)}' holds no weights: there is no `state_dict` in it.")
    return checkpoint


def _renamed(state: Mapping[str, Any], prefix: str | None) -> dict[str, Any]:
    """The weights with their names to be."""
    if not prefix:
        return dict(state)
    prefix = prefix.removesuffix(".") + "."  # it names a module
    renamed = {name.removeprefix(prefix): value for name, value in state.items()}
    if not any(name.startswith(prefix) for name in state):
        raise ValueError(f"prefix={prefix!r}: no weight's name begins so; the first are {list(state)[:3]}.")
    if len(renamed) != len(state):
        raise ValueError(f"prefix={prefix!r}: without it, two weights would have the same name.")
    return renamed


def _warn_of_excluded(checkpoint: Mapping[str, Any], source: str | os.PathLike[str]) -> None:
    own = checkpoint.get(SUMMARY_KEY)
    excluded = own.get("excluded_frozen") if isinstance(own, Mapping) else None
    if excluded:
        warnings.warn(
            f"'{os.fspath(source)}' was saved without its {len(excluded)} frozen parameters ({excluded[0]}, ...), so "
            "they are not in what is written either.",
            stacklevel=3,
        )


def _warn_of_overflow(holes: Mapping[str, Any], pieces: Pieces) -> None:
    names = [name for name, hole in holes.items() if isinstance(hole, Hole) and hole.key in pieces.overflowed]
    if names:
        warnings.warn(
            f"{len(names)} weights have values that are too large for the dtype and became infinite, for example "
            f"'{names[0]}'. `bfloat16` has the range of `float32`.",
            stacklevel=4,
        )


def _write_torch(
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Any],
    target: Path,
    cast: torch.dtype | None,
    weights_only: bool,
    progress: bool,
) -> Path:
    pieces = Pieces()
    dropped = _TRAINING_STATE if weights_only else ()
    content = {key: _with_holes(value, pieces, None) for key, value in checkpoint.items() if key not in dropped}
    content["state_dict"] = {
        name: _with_holes(value, pieces, cast if isinstance(value, Tensor) else None) for name, value in weights.items()
    }
    if isinstance(content.get("optimizer_states"), list):
        content["optimizer_states"] = [by_parameter_index(state) for state in content["optimizer_states"]]
    layout = TorchFile(content)
    staged = StagedFile(target, layout.nbytes)
    try:
        with progress_bar(target.name, layout.nbytes, progress) as bar, open(staged.path, "r+b", buffering=0) as file:
            descriptor = file.fileno()
            crcs = [
                pieces.write(place.key if place.tensor is None else place.tensor, descriptor, place.offset, bar.update)
                for place in layout.places
            ]
            for offset, part in layout.frame(crcs):
                write_bytes(descriptor, offset, part)
                bar.update(len(part))
        staged.publish()
    finally:
        staged.discard()
    _warn_of_overflow(content["state_dict"], pieces)
    return target


def _with_holes(value: Any, pieces: Pieces, cast: torch.dtype | None) -> Any:
    """A structure with a hole for every tensor that is on disk or to be cast."""
    if isinstance(value, StoredTensor) or (cast is not None and is_plain(value)):
        dtype = cast if cast is not None and value.dtype.is_floating_point else value.dtype
        return Hole(pieces.add(value, dtype), dtype, value.shape)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_holes(item, pieces, cast)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_holes(item, pieces, cast) for item in value)
    return value


def _write_safetensors(
    weights: Mapping[str, Any], target: Path, cast: torch.dtype | None, limit: int, progress: bool
) -> list[Path]:
    pieces = Pieces()
    holes = {name: _with_holes(value, pieces, cast or value.dtype) for name, value in _only_tensors(weights).items()}
    kept: dict[Any, str] = {}
    for name, hole in holes.items():
        kept.setdefault((hole.key, hole.shape), name)
    aliases = {name: kept[hole.key, hole.shape] for name, hole in holes.items() if kept[hole.key, hole.shape] != name}
    single = _is_single(target)
    folder = target.parent if single else target
    shards = _shards({name: hole for name, hole in holes.items() if name not in aliases}, None if single else limit)
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        names = [target.name if single else SINGLE_FILE]
    layouts = []
    for shard in shards:
        metadata = {"format": "pt", **{alias: name for alias, name in aliases.items() if name in shard}}
        layouts.append(SafetensorsFile(shard, metadata))
    staged: list[StagedFile] = []
    try:
        with progress_bar(target.name, sum(layout.nbytes for layout in layouts), progress) as bar:
            for name, layout in zip(names, layouts, strict=True):
                staged.append(StagedFile(folder / name, layout.nbytes))
                with open(staged[-1].path, "r+b", buffering=0) as file:
                    write_bytes(file.fileno(), 0, layout.head)
                    bar.update(len(layout.head))
                    for tensor, offset in layout.offsets.items():
                        pieces.write(holes[tensor].key, file.fileno(), offset, bar.update)
        if single:
            staged[0].publish()
        else:
            _publish(folder, staged, shards)
    finally:
        for file_ in staged:
            file_.discard()
    _warn_of_overflow(holes, pieces)
    written = [folder / name for name in names]
    return written if single or len(written) == 1 else [*written, folder / INDEX_FILE]


def _publish(folder: Path, staged: Sequence[StagedFile], shards: Sequence[Mapping[str, Hole]]) -> None:
    """Give the files their names. While they are of two exports, there is no index that leads to them."""
    index = folder / INDEX_FILE
    if len(staged) > 1:
        index.unlink(missing_ok=True)
    for file in staged:
        file.publish()
    if len(staged) > 1:
        total = sum(hole.nbytes for shard in shards for hole in shard.values())
        places = {name: file.final.name for file, shard in zip(staged, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"
        written = StagedFile(index, len(text))
        try:
            written.path.write_bytes(text)
            written.publish()
        finally:
            written.discard()
    else:
        index.unlink(missing_ok=True)
    _delete_old_weights(folder, {INDEX_FILE, *(file.final.name for file in staged)})


def _delete_old_weights(folder: Path, current: Collection[str]) -> None:
    """Delete the files of an earlier export in other pieces."""
    for path in folder.iterdir():
        if _is_weights(path.name) and path.name not in current:
            path.unlink()


def _only_tensors(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in weights.items() if isinstance(value, StoredTensor) or is_plain(value)}
    left_out = [name for name in weights if name not in tensors]
    if left_out:
        warnings.warn(f"Left out, because safetensors hold plain tensors only: {', '.join(left_out)}.", stacklevel=4)
    return tensors


def _shards(holes: Mapping[str, Hole], limit: int | None) -> list[dict[str, Hole]]:
    """The tensors in files of at most ``limit`` bytes of elements, in their order; at least one file."""
    shards: list[dict[str, Hole]] = [{}]
    filled = 0
    for name, hole in holes.items():
        if limit is not None and filled and filled + hole.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = hole
        filled += hole.nbytes
    return shards
