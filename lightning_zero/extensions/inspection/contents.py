"""What is inside a checkpoint, for people; no tensor is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from lightning_zero.checkpoint import is_checkpoint_directory_at, open_checkpoint
from lightning_zero.checkpoint.consolidated import RANDOM_KEY, SUMMARY_KEY
from lightning_zero.checkpoint.format.record import RECORD_FILE, tensors_in
from lightning_zero.checkpoint.format.typed_json import Decoder, Inexpressible, dtype_name
from lightning_zero.checkpoint.load import Found, Kind, find_checkpoint
from lightning_zero.checkpoint.save import stored_identity
from lightning_zero.checkpoint.storage.files import is_remote, local_path
from lightning_zero.comm import ControlGroup
from lightning_zero.config import Placement, Stage
from lightning_zero.errors import CheckpointError, columns, readable_size, some

__all__ = ["checkpoints_in", "describe_checkpoint"]

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
_MOMENT = ("epoch", "global_step")
_RESIDENCES = ("parameters", "gradients", "optimizer")


def _counted(tensors: Iterable[Tensor]) -> str:
    """``1,234 elements in 5 tensors, 4.9 kB (float32), 1 tied to others``: those that share their elements once."""
    dtypes: Counter[str] = Counter()
    known: set[Hashable] = set()
    count = nbytes = 0
    for tensor in tensors:
        count += 1
        if (identity := stored_identity(tensor)) not in known:
            known.add(identity)
            nbytes += _nbytes(tensor)
            dtypes[dtype_name(tensor.dtype)] += tensor.numel()
    each = [name if len(dtypes) == 1 else f"{name}: {numel:,}" for name, numel in dtypes.items()]
    names = "1 tensor" if len(known) == 1 else f"{len(known):,} tensors"
    shared = f", {count - len(known)} tied to others" if count > len(known) else ""
    return f"{dtypes.total():,} elements in {names}, {readable_size(nbytes)} ({', '.join(each)}){shared}"


def checkpoints_in(path: str | os.PathLike[str]) -> list[str]:
    """The checkpoints in a local folder, and up to three folders down: directories, and files by their endings."""
    names: list[str] = []
    top = "" if is_remote(path) else os.fspath(local_path(path))
    for folder, folders, files in os.walk(top):
        inner = os.path.relpath(folder, top)
        open_ones = [name for name in folders if not name.startswith(".")]
        found = [name for name in open_ones if is_checkpoint_directory_at(os.path.join(folder, name))]
        found += [name for name in files if name.endswith((".ckpt", ".safetensors"))]
        names += [os.path.normpath(os.path.join(inner, name)) for name in found]
        folders[:] = [name for name in open_ones if name not in found] if inner.count(os.sep) < 2 else []
    return sorted(names)


def describe_checkpoint(path: str | os.PathLike[str], *, tensors: bool = False) -> str:
    """The text that ``lightning-zero inspect`` prints; with ``tensors``, every weight is listed.

    ``CheckpointError`` if it is no checkpoint, or not whole.
    """
    found = find_checkpoint(path)
    checkpoint = open_checkpoint(path, ControlGroup(None))
    own, state = _mapping(checkpoint.get(SUMMARY_KEY)), _mapping(checkpoint.get("state_dict"))
    writer: dict[str, str] = {}
    plan, world_size = own.get("plan"), ""
    if found.kind is Kind.OWN:
        record = found.directory.record
        files = {RECORD_FILE: found.files.size(RECORD_FILE)} | {n: entry.nbytes for n, entry in record.files.items()}
        writer = dict(record.writer)
        try:
            plan = Decoder().decode(record.plan)
        except (ValueError, Inexpressible) as error:
            raise CheckpointError(f"'{os.fspath(path)}/{RECORD_FILE}' cannot be used: {error}.") from error
        world_size = str(record.world_size)
    else:
        files = _files(found, path)
    if isinstance(version := checkpoint.get("pytorch-lightning_version"), str):
        writer["lightning"] = version
    facts = {
        "format": found.kind.value,
        "written by": ", ".join(f"{name} {version}" for name, version in writer.items()),
        "saved at": ", ".join(f"{key.replace('_', ' ')} {checkpoint[key]}" for key in _MOMENT if key in checkpoint),
        **_plan_facts(_mapping(plan), world_size),
    }
    if isinstance(excluded := own.get("excluded_frozen"), list) and excluded:
        facts["left out"] = f"{len(excluded)} frozen parameters: {_some(excluded)}"
    if isinstance(random := own.get(RANDOM_KEY), Tensor) and random.dim():
        facts["random state"] = f"of {random.shape[0]} ranks"
    for key, name in (("callbacks", "callbacks"), ("hyper_parameters", "hyperparameters")):
        facts[name] = _some(list(_mapping(checkpoint.get(key))))
    facts["weights"] = _counted(value for value in state.values() if isinstance(value, Tensor))
    known = ("state_dict", "optimizer_states", SUMMARY_KEY)
    if rest := [*tensors_in({key: part for key, part in checkpoint.items() if key not in known})]:
        facts["other tensors"] = _counted(rest)
    if files:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        facts["size"] = f"{readable_size(sum(files.values()))} in {count}"
    lines = [f"Checkpoint {os.fspath(path)}", *columns([[f"  {name}", text] for name, text in facts.items() if text])]
    optimizers = checkpoint.get("optimizer_states")
    for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else ()):
        lines += ["", f"Optimizer {number}", *_optimizer_lines(_mapping(optimizer))]
    if tensors:
        lines += ["", "Weights", *columns([_weight_row(*item) for item in state.items()], right=(3,))]
    if files:
        rows = [[f"  {name}", readable_size(nbytes)] for name, nbytes in files.items()]
        lines += ["", "Files", *columns(rows, right=(1,))]
    return "\n".join(map(_printable, lines))


def _files(found: Found, path: str | os.PathLike[str]) -> dict[str, int]:
    """Sizes by name; nothing for a folder in an object store, which may hold anything."""
    if found.name:
        return {found.name: found.files.size(found.name)}
    if is_remote(path):
        return {}
    folder = local_path(found.files.name)  # `path`, or a folder in it
    entries = sorted(folder.rglob("*") if found.kind is Kind.DEEPSPEED else folder.iterdir())
    return {str(entry.relative_to(folder)): entry.stat().st_size for entry in entries if entry.is_file()}


def _plan_facts(plan: Mapping[str, Any], world_size: str) -> dict[str, str]:
    """How the run was partitioned, from what the strategy noted."""
    placed = {key: plan[key] for key in _RESIDENCES if key in plan}
    stages = []
    for stage in get_args(Stage):
        placement = Placement.from_stage(stage)
        if placed == placement.words:
            stages.append(f"stage {stage}")
    return {
        "world size": world_size or str(plan.get("world_size", "")),
        "placement": ", ".join([*stages, *(f"{key} {value}" for key, value in placed.items())]),
        "precision": str(plan.get("precision", "")),
    }


def _optimizer_lines(optimizer: Mapping[str, Any]) -> list[str]:
    by_key: dict[str, list[Tensor]] = {}  # the tensors of its state by what they are called
    for state in _mapping(optimizer.get("state")).values():
        for key, value in _mapping(state).items():
            if isinstance(value, Tensor):
                by_key.setdefault(str(key), []).append(value)
    rows = [[f"  state {key}", _counted(tensors)] for key, tensors in by_key.items()]
    for number, group in enumerate(_groups(optimizer)):
        count = f"{group.pop('parameters')} parameters" if group else "not a group of parameters"
        rows.append(
            [f"  group {number}", ", ".join([count, *(f"{key} {_short(value)}" for key, value in group.items())])]
        )
    return columns(rows)


def _groups(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each group the number of parameters and the usual options; nothing of what is no group."""
    groups = optimizer.get("param_groups")
    return [
        {"parameters": len(group["params"]), **{key: group[key] for key in _OPTIONS if key in group}}
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
        else {}
        for group in (groups if isinstance(groups, list) else ())
    ]


def _weight_row(name: str, value: Any) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"  {name}", type(value).__name__, "", ""]
    return [f"  {name}", dtype_name(value.dtype), str(tuple(value.shape)), readable_size(_nbytes(value))]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _mapping(value: Any) -> Mapping[Any, Any]:
    """A dictionary of a file that may hold anything; an empty one if it is none."""
    return value if isinstance(value, Mapping) else {}


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "(a tensor)"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _some(names: Sequence[Any]) -> str:
    """The first few; of a callback's name, which may end with its settings, the class."""
    return some(str(name).partition("{")[0] for name in names)
