"""Saving one ordinary checkpoint file from all ranks, without gathering the model anywhere.

Rank 0 lays the file out (see [Note: A torch file without its tensors]) and makes it under a temporary name; every rank
writes the slices that it holds to their places in it; rank 0 completes and publishes it. A slice of a flattened
parameter is one range of the file, so that no rank needs more memory than for a piece of its own.

The file is what ``Trainer.save_checkpoint`` writes on a single device: full shapes, names, and optimizer states by
parameter index, and loads without this package.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_zero.checkpoint.format.flat_shard import FlatShard, memory_identity
from lightning_zero.checkpoint.format.items import Leaf, put_together
from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.save import SUMMARY_KEY, Divided, divide
from lightning_zero.checkpoint.storage.files import local_output
from lightning_zero.checkpoint.storage.publish import StagedFile
from lightning_zero.checkpoint.writing import Pieces, combine, write_bytes
from lightning_zero.comm import ControlGroup
from lightning_zero.comm.control import collect

__all__ = ["FEEDBACK_KEY", "RANDOM_KEY", "SUMMARY_KEY", "by_parameter_index", "save_consolidated_file"]

RANDOM_KEY = "random_state"
"""Under it: the state of every rank's random number generators, in sharded directories only."""

FEEDBACK_KEY = "error_feedback"
"""Under it: what every rank keeps of gradients that were rounded, likewise."""


class _Part(NamedTuple):
    """A range of a storage that a rank wrote, in bytes."""

    key: str
    start: int
    nbytes: int
    crc32: int


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
    divided = divide(checkpoint, control, what, _tied)
    export = _Export(divided, control.rank)
    others = [pair for pairs in collect(control, what, export.only_here) for pair in pairs]
    try:
        told = collect(control, what, lambda: export.lay_out(others, path, plan_summary))[0]
        parts = collect(control, what, lambda: export.write(*told))  # type: ignore[misc]
        collect(control, what, lambda: export.complete(parts))
    finally:
        if export.file is not None:
            export.file.discard()


class _Export:
    """One save, on one rank: its steps, none of which communicates."""

    def __init__(self, divided: Divided, rank: int) -> None:
        self._leaves, self._rest, self._own, tied = divided
        self._rank = rank
        self._layout: TorchFile | None = None  # on rank 0
        self.file: StagedFile | None = None  # on rank 0
        # The name of a tied tensor -> the name its elements are stored under.
        self._shared: dict[str, str] = {key: keys[0] for groups in tied for keys in groups for key in keys[1:]}

    def only_here(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Path and value, or hole, of what this rank owns in place of rank 0."""
        return [self._outline(self._leaves[key]) for key in self._leaves if key in self._own and self._rank != 0]

    def _outline(self, leaf: Leaf) -> tuple[tuple[Any, ...], Any]:
        value = leaf.value
        if leaf.is_container:
            return leaf.path, {}
        if isinstance(value, FlatShard) or (is_plain(value) and self._rank != 0):
            return leaf.path, Hole(self._shared.get(leaf.key, leaf.key), value.dtype, value.shape)
        return leaf.path, value

    def lay_out(
        self,
        others: list[tuple[tuple[Any, ...], Any]],
        path: str | os.PathLike[str],
        plan_summary: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, int]] | None:
        """Rank 0: make the file. Returns its temporary name, and where each hole begins."""
        if self._rank != 0:
            return None
        content = {**self._rest, **put_together([self._outline(leaf) for leaf in self._leaves.values()] + others)}
        if isinstance(content.get("optimizer_states"), list):
            content["optimizer_states"] = [by_parameter_index(state) for state in content["optimizer_states"]]
        if plan_summary is not None:
            content[SUMMARY_KEY] = {**content.get(SUMMARY_KEY, {}), "plan": dict(plan_summary)}
        self._layout = TorchFile(content)
        self.file = StagedFile(local_output(path), self._layout.nbytes)
        return str(self.file.path), {str(p.key): p.offset for p in self._layout.places if p.tensor is None}

    def write(self, file: str, offsets: Mapping[str, int]) -> tuple[list[_Part], list[int]]:
        """Write what this rank holds. Returns the parts of holes, and the checksums of rank 0's ordinary tensors."""
        try:
            # Not to be read: a client of a network file system that may read could write back whole pages, with its
            # neighbours' bytes as they were.
            descriptor = os.open(file, os.O_WRONLY)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"'{Path(file).parent.parent}' is not the folder that rank 0 sees: use a shared file system"
            ) from None
        try:
            write = Pieces().write
            parts = [
                _Part(key, start, flat.nbytes, write(flat, descriptor, offsets[key] + start))
                for key, start, flat in self._mine(offsets)
            ]
            places = self._layout.places if self._layout is not None else []
            crcs = [write(p.tensor, descriptor, p.offset) for p in places if p.tensor is not None]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return parts, crcs

    def _mine(self, offsets: Mapping[str, int]) -> list[tuple[str, int, Tensor]]:
        """Key, first byte and elements of everything this rank writes into holes."""
        found = []
        for key, leaf in self._leaves.items():
            value, stored = leaf.value, self._shared.get(key, key)
            if isinstance(value, FlatShard):
                twin = self._leaves.get(stored)
                if twin is None or _identity(value) != _identity(twin.value):
                    raise ValueError(f"'{key}' and '{stored}' are the same memory on other ranks, but not here")
                if stored == key and value.local.numel():
                    found.append((key, value.start * value.dtype.itemsize, value.local))
            elif key in self._own and key in offsets and value.numel():
                found.append((key, 0, value.detach().contiguous().view(-1)))
        return found

    def complete(self, written: Sequence[tuple[list[_Part], list[int]]]) -> None:
        """Rank 0: check that all elements were written, write the rest of the file, publish."""
        if self._layout is None or self.file is None:
            return
        by_key: dict[Hashable, list[_Part]] = {}
        for parts, _ in written:
            for part in parts:
                by_key.setdefault(part.key, []).append(part)
        plain = iter(written[0][1])
        crcs = [
            _checked(str(place.key), place.nbytes, sorted(by_key.get(place.key, [])))
            if place.tensor is None
            else next(plain)
            for place in self._layout.places
        ]
        descriptor = os.open(self.file.path, os.O_WRONLY)
        try:
            for offset, content in self._layout.frame(crcs):
                write_bytes(descriptor, offset, content)
        finally:
            os.close(descriptor)
        self.file.publish()


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


def _tied(leaves: Mapping[str, Leaf]) -> list[list[str]]:
    """Groups of names whose shards are the same memory. A rank that holds nothing of them cannot see it."""
    groups: dict[Any, list[str]] = {}
    for key, leaf in leaves.items():
        if isinstance(leaf.value, FlatShard) and leaf.value.local.numel():
            groups.setdefault(_identity(leaf.value), []).append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


def _identity(shard: FlatShard) -> Any:
    local = shard.local
    if not local.numel():
        return shard.dtype, shard.shape
    return memory_identity(local), shard.shape, shard.start


def _checked(key: str, nbytes: int, parts: Sequence[_Part]) -> int:
    """The checksum of parts, which must be the whole, without holes or overlaps."""
    end = crc32 = 0
    for part in parts:
        if part.start > end:
            raise ValueError(f"of '{key}', bytes {end} to {part.start} are held by no rank")
        if part.start < end:
            raise ValueError(f"of '{key}', bytes {part.start} to {end} are held by several ranks")
        end += part.nbytes
        crc32 = combine(crc32, part.crc32, part.nbytes) if crc32 else part.crc32
    if end != nbytes:
        raise ValueError(f"of '{key}', {end} of {nbytes} bytes are held by the ranks")
    return crc32
