"""One ordinary checkpoint file: saved by all ranks of a run, or made of a checkpoint of any kind by one process.

The file is laid out first (see [Note: A torch file without its tensors]) and made under a temporary name: its tensors
are written in their order, a piece at a time, so that nobody needs memory for more; then it is published. When a run
saves, every rank writes what it holds as for a sharded directory, to a temporary one, of which rank 0 makes the file.

The file is what ``Trainer.save_checkpoint`` writes on a single device: full shapes, names, and optimizer states by
parameter index, and loads without this package.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_zero.checkpoint.format.record import Item, TensorItem, ValueItem, put_together
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile, load_torch
from lightning_zero.checkpoint.format.typed_json import Decoder, is_plain
from lightning_zero.checkpoint.load import Kind, find_checkpoint, open_checkpoint
from lightning_zero.checkpoint.save import (
    SUMMARY_KEY,
    ChecksummedFile,
    Part,
    items_of,
    new_file,
    stored_identity,
    write_together,
)
from lightning_zero.checkpoint.storage.files import LocalFiles, local_path, open_range
from lightning_zero.checkpoint.storage.publish import StagedFile, Staging
from lightning_zero.comm import ControlGroup
from lightning_zero.config import parse_size
from lightning_zero.errors import CheckpointError, changed
from lightning_zero.registry import extension

__all__ = [
    "FEEDBACK_KEY",
    "RANDOM_KEY",
    "SUMMARY_KEY",
    "FileFormat",
    "by_parameter_index",
    "consolidate_checkpoint",
    "save_consolidated_file",
    "with_holes",
]

RANDOM_KEY = "random_state"
"""Under it: the state of every rank's random number generators, in sharded directories only."""

FEEDBACK_KEY = "error_feedback"
"""Under it: what every rank keeps of gradients that were rounded, likewise."""

FileFormat = Literal["ckpt", "safetensors"]

_SUFFIXES: dict[str, FileFormat] = {".ckpt": "ckpt", ".pt": "ckpt", ".pth": "ckpt", ".bin": "ckpt"}
_SUFFIXES |= {".safetensors": "safetensors"}
_GONE = {
    "fsdp": "FSDPStrategy loads the file of format='ckpt'.",
    **dict.fromkeys(
        ("huggingface", "peft"),
        "in Python, `load_from_checkpoint(MyModule, path)` gives a module, whose model has `save_pretrained(folder)`. "
        "It takes `initial_weights=base` for a checkpoint without frozen parameters, and "
        "`model.merge_and_unload()` merges adapters.",
    ),
}
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# What Lightning leaves out of a checkpoint that is saved with `weights_only=True`.
_TRAINING_STATE = ("optimizer_states", "lr_schedulers", "callbacks", "ZeroPrecision", "MixedPrecision")


# ------------------------------------------------------------------------------------------------- saved by all ranks


def save_consolidated_file(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    control: ControlGroup,
    *,
    plan_summary: Mapping[str, Any] | None = None,
) -> None:
    """Write one checkpoint file from what every rank holds, and publish it in one step.

    ``path`` is on a file system that all ranks share; a checkpoint directory of that name is replaced too. For the
    other arguments see ``save_checkpoint_directory``.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why. What was at ``path`` is unchanged then.

    Collective: every rank.
    """
    what = f"save the checkpoint file '{os.fspath(path)}'"
    try:
        target = local_path(path)
    except ValueError as error:
        raise CheckpointError(f"Could not {what}: {error}") from error
    staging = Staging(target)

    def publish(parts: Sequence[Part], names: Sequence[str], rest: dict[str, Any]) -> list[str]:
        files = LocalFiles(staging.path)
        source = Source(files)

        def value_of(key: str, item: Item) -> Any:
            if isinstance(item, TensorItem):
                return StoredTensor(source, key, item)
            if isinstance(item, ValueItem):
                return Decoder().decode(item.value)
            # What this run has just written may be an object of any class.
            return load_torch(open_range(files, item.file, item.offset, item.nbytes), f"'{key}'", False)

        items, _ = items_of(parts, names)
        values = put_together([(item.path, value_of(key, item)) for key, item in items.items()])
        content = {**rest, **with_holes(values, None)}
        if plan_summary is not None:
            content[SUMMARY_KEY] = {**content.get(SUMMARY_KEY, {}), "plan": dict(plan_summary)}
        with closing(files), StagedFile(target) as file:  # an error keeps this frame, but not the space of its files
            _write(file, TorchFile(_with_indices(content)))
            file.publish()
        return []

    write_together(checkpoint, staging, control, what, publish)


def _with_indices(content: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with its optimizers' states by parameter index."""
    if isinstance(content.get("optimizer_states"), list):
        content["optimizer_states"] = [by_parameter_index(state) for state in content["optimizer_states"]]
    return content


def by_parameter_index(optimizer: Any) -> Any:
    """An optimizer's state dict with indices in place of names, counted through its groups, as torch has it.

    One that has indices already is returned as it is. State of a name that is in no group keeps its name, which torch
    passes through.
    """
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        return optimizer
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        return optimizer
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: optimizer["state"][name] for name in names if name in optimizer["state"]}
    state |= {name: value for name, value in optimizer["state"].items() if name not in numbers}
    groups = [
        {key: [numbers[name] for name in value] if key == "params" else value for key, value in group.items()}
        for group in optimizer["param_groups"]
    ]
    return {**optimizer, "state": state, "param_groups": groups}


# -------------------------------------------------------------------------------------- made of another by one process


@changed("Nothing is replaced any more: write to another name, or delete what is there before.")
def consolidate_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: FileFormat | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    weights_only: bool = False,
    prefix: str | None = None,
    progress: bool = True,
) -> list[Path]:
    """Convert a checkpoint of any kind to an ordinary checkpoint file or to safetensors files.

    Runs in one process, with memory for a piece of one tensor. Verifies the checksums of the source, if it has any.

    Args:
        source: a sharded directory of this package, of Lightning's strategies, ``torch.distributed.checkpoint`` or
            DeepSpeed (ZeRO stages 1 to 3), a ``.ckpt`` file, or safetensors.
        out: ``*.ckpt`` (or ``.pt``, ``.pth``, ``.bin``): one file as ``Trainer.save_checkpoint`` writes it on one
            device, which ``load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)`` read without this package.
            ``*.safetensors``: one file of weights. Any name without a suffix: a directory of safetensors files in
            Hugging Face's layout, with an index if there are several.
        format: the format, if the name of ``out`` does not imply it.
        dtype: cast floating-point weights to it, as ``"bfloat16"`` or ``"bf16"``. Optimizer states keep theirs.
        max_shard_size: largest file in a directory of safetensors, as ``"5GB"`` or ``"2GiB"``, or a number of bytes. A
            larger tensor gets a file of its own.
        weights_only: leave the state of optimizers, schedulers and callbacks out of a ``.ckpt``.
        prefix: remove this module's name from weight names: with ``"model"``, ``model.weight`` becomes ``weight``.
        progress: show a progress bar on a terminal.

    Returns:
        The files that were written.

    Raises:
        ValueError: for settings that are wrong or contradict each other, and for a target that exists.
        CheckpointError: if the source is damaged or no checkpoint, or a file could not be written, naming it.
        ExtensionError: for safetensors, if the extension ``formats`` was deleted.
    """
    target, limit, cast = local_path(out), parse_size(max_shard_size), _floating(dtype)
    kind = _kind(target, format)
    if prefix is not None and kind == "ckpt" and not weights_only:
        raise ValueError("prefix renames weights, with which a checkpoint to resume from would not fit its own model.")
    is_folder = kind == "safetensors" and target.suffix.lower() != ".safetensors"
    why = f"'{target}' is to be of safetensors."
    formats: Any = extension("formats", why=why) if kind == "safetensors" else None
    overflowed: set[Hashable] = set()
    try:
        there = formats.weights_in(target) if is_folder else [target][: os.path.lexists(target)]
        if there:
            raise ValueError(f"'{there[0]}' exists: write to another place, or delete it first.")
        checkpoint = _opened(os.fspath(source))
        weights = _without(prefix, checkpoint["state_dict"])
        if formats is not None:
            files, holes = formats.layouts(weights, target, limit if is_folder else None, cast, prefix)
        else:
            dropped = _TRAINING_STATE if weights_only else ()
            content = {key: with_holes(value, None) for key, value in checkpoint.items() if key not in dropped}
            holes = {n: with_holes(value, cast if isinstance(value, Tensor) else None) for n, value in weights.items()}
            files = {target: TorchFile(_with_indices({**content, "state_dict": holes}))}
        nbytes = sum(layout.nbytes for layout in files.values())
        hidden = None if progress else True  # None: where there is no terminal
        bar = tqdm(total=nbytes, desc=target.name, unit="B", unit_scale=True, disable=hidden)
        with bar, ExitStack() as stack:
            staged = {path: stack.enter_context(StagedFile(path)) for path in files}
            for path, file in staged.items():
                overflowed |= _write(file, files[path], bar.update)
            for file in staged.values():
                file.publish()
    except OSError as error:
        raise CheckpointError(f"Could not write '{target}': {error}.") from error
    if names := [name for name, hole in holes.items() if isinstance(hole, Hole) and hole.key in overflowed]:
        warnings.warn(
            f"{len(names)} weights have values that are too large for the dtype and became infinite, for example "
            f"'{names[0]}'. `bfloat16` has the range of `float32`.",
            stacklevel=2,
        )
    return [*files]


def _opened(source: str) -> dict[str, Any]:
    """A checkpoint with weights, and its partition if it is one of ours. Warns of weights that were not saved."""
    checkpoint = open_checkpoint(source, ControlGroup(None))
    found = find_checkpoint(source)
    summary = checkpoint.get(SUMMARY_KEY, {})
    if found.kind is Kind.OWN and isinstance(summary, dict):
        summary = {**summary, "plan": Decoder().decode(found.directory.record.plan)}
        of_ranks = (FEEDBACK_KEY, RANDOM_KEY)
        checkpoint[SUMMARY_KEY] = {key: value for key, value in summary.items() if key not in of_ranks}
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"'{source}' holds no weights: there is no `state_dict` in it.")
    if excluded := summary.get("excluded_frozen") if isinstance(summary, Mapping) else None:
        warnings.warn(
            f"'{source}' was saved without its {len(excluded)} frozen parameters ({excluded[0]}, ...), so they are not "
            "in what is written either.",
            stacklevel=3,
        )
    return checkpoint


def _without(prefix: str | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by name, without the name of a module."""
    if not prefix:
        return dict(state)
    prefix = prefix.removesuffix(".") + "."
    renamed = {name.removeprefix(prefix): value for name, value in state.items()}
    if not any(name.startswith(prefix) for name in state):
        raise ValueError(f"prefix={prefix!r}: no weight's name begins so; the first are {list(state)[:3]}.")
    if len(renamed) != len(state):
        raise ValueError(f"prefix={prefix!r}: without it, two weights would have the same name.")
    return renamed


def _kind(target: Path, given: str | None) -> FileFormat:
    by_suffix = _SUFFIXES.get(target.suffix.lower())
    for kind in get_args(FileFormat):
        if kind == given and by_suffix in (None, kind):
            return kind  # type: ignore[no-any-return]
    if given in _GONE:
        raise ValueError(f"format='{given}' is not written any more: {_GONE[given]}")
    if given is not None and given not in get_args(FileFormat):
        raise ValueError(f"format must be one of {', '.join(map(repr, get_args(FileFormat)))}, got {given!r}.")
    if given is not None:
        raise ValueError(f"format='{given}' contradicts the name '{target.name}'.")
    if by_suffix is None and target.suffix and not target.is_dir():
        raise ValueError(f"'{target.name}' does not say what to write: give format='ckpt' or 'safetensors'.")
    return by_suffix or "safetensors"


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


def _write(file: StagedFile, layout: Any, advance: Callable[[int], Any] = lambda nbytes: None) -> set[Hashable]:
    """Write what a layout says, durably. Returns the keys of places where a cast made elements infinite."""
    with new_file(file.path) as opened:
        written = ChecksummedFile(opened, torch.serialization.get_crc32_options(), advance)
        written.write_archive(layout)
    return written.overflowed


def with_holes(value: Any, cast: torch.dtype | None) -> Any:
    """A structure with a hole for every tensor that is on disk or to be cast."""
    if isinstance(value, StoredTensor) or (cast is not None and is_plain(value)):
        dtype = cast if cast is not None and value.dtype.is_floating_point else value.dtype
        return Hole((stored_identity(value), dtype), dtype, value.shape, value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, with_holes(item, cast)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(with_holes(item, cast) for item in value)
    return value
