"""What is inside a checkpoint, for people; no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from lightning_zero.checkpoint.consolidated import RANDOM_KEY, SUMMARY_KEY
from lightning_zero.checkpoint.directories import Directory
from lightning_zero.checkpoint.format.record import RECORD_FILE
from lightning_zero.checkpoint.format.typed_json import Decoder, Inexpressible, dtype_name
from lightning_zero.checkpoint.load import Found, Kind, find_checkpoint, open_checkpoint
from lightning_zero.checkpoint.pieces import stored_identity
from lightning_zero.checkpoint.storage.files import is_remote, local_path
from lightning_zero.comm import ControlGroup
from lightning_zero.config import Placement, Stage
from lightning_zero.errors import CheckpointError, some

__all__ = ["Inspection", "TensorGroup", "inspect_checkpoint", "readable_size"]

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
_MOMENT = {"epoch": "epoch", "global_step": "global step"}
_KINDS = {
    Kind.OWN: "sharded directory of lightning_zero",
    Kind.FOREIGN: "sharded directory of torch.distributed.checkpoint",
    Kind.HUGGING_FACE: "directory of safetensors",
    Kind.SAFETENSORS: "safetensors file",
    Kind.TORCH: "torch file",
}


@dataclass
class TensorGroup:
    """Tensors counted together; those that share their elements once.

    Attributes:
        tensors: how many.
        numel: their elements.
        nbytes: their size.
        dtypes: the elements by short dtype name.
        shared: how many more names there are for the same elements.
    """

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    shared: int = 0
    _known: set[Hashable] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        """Count one."""
        identity = stored_identity(tensor)
        if identity in self._known:
            self.shared += 1
            return
        self._known.add(identity)
        self.tensors += 1
        self.numel += tensor.numel()
        self.nbytes += tensor.numel() * tensor.dtype.itemsize
        name = dtype_name(tensor.dtype)
        self.dtypes[name] = self.dtypes.get(name, 0) + tensor.numel()

    def __str__(self) -> str:
        """``1,234 elements in 5 tensors, 4.9 kB (float32)``."""
        dtypes = ", ".join(
            name if len(self.dtypes) == 1 else f"{name}: {numel:,}" for name, numel in self.dtypes.items()
        )
        count = "1 tensor" if self.tensors == 1 else f"{self.tensors:,} tensors"
        shared = f", {self.shared} tied to others" if self.shared else ""
        return f"{self.numel:,} elements in {count}, {readable_size(self.nbytes)} ({dtypes}){shared}"


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What ``inspect_checkpoint`` found.

    Attributes:
        path: of the checkpoint.
        kind: what it is.
        checkpoint: Lightning's dictionary, tensors on disk.
        facts: other information, by what it says.
        files: sizes by name.
        has_checksums: whether there are checksums to verify.
    """

    path: str
    kind: str
    checkpoint: Mapping[str, Any]
    facts: Mapping[str, str]
    files: Mapping[str, int]
    has_checksums: bool

    @property
    def weights(self) -> TensorGroup:
        """All tensors of the module's state dict."""
        return _counted(self._state.values())

    @property
    def _state(self) -> Mapping[str, Any]:
        state = self.checkpoint.get("state_dict")
        return state if isinstance(state, Mapping) else {}

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """The optimizers' state dicts."""
        found = self.checkpoint.get("optimizer_states")
        return [state for state in found if isinstance(state, Mapping)] if isinstance(found, list) else []

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    def describe(self, *, tensors: bool = False) -> str:
        """The text that ``lightning-zero inspect`` prints.

        Args:
            tensors: also list every weight.
        """
        facts = {"format": self.kind, **self.facts, "weights": str(self.weights)}
        rest = _counted(
            value
            for key, part in self.checkpoint.items()
            if key not in ("state_dict", "optimizer_states", SUMMARY_KEY)
            for value in _tensors(part)
        )
        if rest.tensors:
            facts["other tensors"] = str(rest)
        if self.files:
            count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
            facts["size"] = f"{readable_size(self.nbytes)} in {count}"
        lines = [f"Checkpoint {self.path}", *_columns([[f"  {name}", text] for name, text in facts.items()])]
        for number, optimizer in enumerate(self.optimizers):
            lines += ["", f"Optimizer {number}", *_optimizer_lines(optimizer)]
        if tensors:
            lines += ["", "Weights", *_columns(_tensor_rows(self._state), right=(3,))]
        if self.files:
            rows = [[f"  {name}", readable_size(nbytes)] for name, nbytes in self.files.items()]
            lines += ["", "Files", *_columns(rows, right=(1,))]
        return "\n".join(map(_printable, lines))


def inspect_checkpoint(path: str | os.PathLike[str]) -> Inspection:
    """Look into a checkpoint of any kind.

    Raises:
        CheckpointError: if it is none, or not whole.
    """
    found = find_checkpoint(path)
    checkpoint = open_checkpoint(path, ControlGroup(None))
    facts: dict[str, str] = {}
    writer: dict[str, str] = {}
    plan = None
    if found.kind is Kind.OWN:
        record = Directory(found.files).record
        files = {RECORD_FILE: found.files.size(RECORD_FILE)} | {n: entry.nbytes for n, entry in record.files.items()}
        writer = dict(record.writer)
        try:
            plan = Decoder().decode(record.plan)
        except (ValueError, Inexpressible) as error:
            raise CheckpointError(f"'{os.fspath(path)}/{RECORD_FILE}' cannot be used: {error}.") from error
        facts["world size"] = str(record.world_size)
    else:
        files = _files(found, path)
    if isinstance(version := checkpoint.get("pytorch-lightning_version"), str):
        writer["lightning"] = version
    own = checkpoint.get(SUMMARY_KEY)
    own = own if isinstance(own, Mapping) else {}
    plan = own.get("plan") if plan is None else plan
    head = {"written by": ", ".join(f"{name} {version}" for name, version in writer.items())}
    moment = [f"{name} {checkpoint[key]}" for key, name in _MOMENT.items() if key in checkpoint]
    head["saved at"] = ", ".join(moment)
    facts = {**head, **_plan_facts(plan), **facts}
    if isinstance(excluded := own.get("excluded_frozen"), list) and excluded:
        facts["left out"] = f"{len(excluded)} frozen parameters: {_some(excluded)}"
    if isinstance(random := own.get(RANDOM_KEY), Tensor) and random.dim():
        facts["random state"] = f"of {random.shape[0]} ranks"
    for key, name in (("callbacks", "callbacks"), ("hyper_parameters", "hyperparameters")):
        if isinstance(checkpoint.get(key), Mapping) and checkpoint[key]:
            facts[name] = _some(list(checkpoint[key]))
    return Inspection(
        path=os.fspath(path),
        kind=_KINDS[found.kind],
        checkpoint=checkpoint,
        facts={name: value for name, value in facts.items() if value},
        files=files,
        has_checksums=found.kind not in (Kind.HUGGING_FACE, Kind.SAFETENSORS),
    )


def readable_size(nbytes: int) -> str:
    """``1.5 GB`` for 1,500,000,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size, unit = nbytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}"


def _files(found: Found, path: str | os.PathLike[str]) -> dict[str, int]:
    """Sizes by name; nothing for a folder in an object store, which may hold anything."""
    if found.name:
        return {found.name: found.files.size(found.name)}
    if is_remote(path):
        return {}
    entries = sorted(local_path(path).iterdir())
    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _plan_facts(plan: Any) -> dict[str, str]:
    """How the run was partitioned, from what the strategy noted."""
    if not isinstance(plan, Mapping):
        return {}
    placed = {key: plan[key] for key in ("parameters", "gradients", "optimizer") if key in plan}
    stages = [f"stage {stage}" for stage in get_args(Stage) if placed == _residences(Placement.from_stage(stage))]
    return {
        "world size": str(plan.get("world_size", "")),
        "placement": ", ".join([*stages, *(f"{key} {value}" for key, value in placed.items())]),
        "precision": str(plan.get("precision", "")),
    }


def _residences(placement: Placement) -> dict[str, str]:
    return {key: getattr(placement, key).value for key in ("parameters", "gradients", "optimizer")}


def _optimizer_lines(optimizer: Mapping[str, Any]) -> list[str]:
    by_key: dict[str, TensorGroup] = {}
    states, groups = optimizer.get("state"), optimizer.get("param_groups")
    for state in states.values() if isinstance(states, Mapping) else ():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Tensor):
                by_key.setdefault(str(key), TensorGroup()).add(value)
    rows = [[f"  state {key}", str(group)] for key, group in by_key.items()]
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            rows.append([f"  group {number}", "not a group of parameters"])
            continue
        options = [f"{key} {_short(group[key])}" for key in _OPTIONS if key in group]
        rows.append([f"  group {number}", ", ".join([f"{len(group['params'])} parameters", *options])])
    return _columns(rows)


def _tensor_rows(state: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            nbytes = value.numel() * value.dtype.itemsize
            rows.append([f"  {name}", dtype_name(value.dtype), str(tuple(value.shape)), readable_size(nbytes)])
        else:
            rows.append([f"  {name}", type(value).__name__, "", ""])
    return rows


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping) and depth < 64:
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 64:
        for item in value:
            yield from _tensors(item, depth + 1)


def _counted(values: Iterable[Any]) -> TensorGroup:
    group = TensorGroup()
    for value in values:
        if isinstance(value, Tensor):
            group.add(value)
    return group


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
