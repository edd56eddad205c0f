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

from lightning_zero.checkpoint.agreement import Control, collect
from lightning_zero.checkpoint.format.flat_shard import FlatShard, memory_identity
from lightning_zero.checkpoint.format.items import (
    Leaf,
    check_savable,
    describe,
    digest,
    disagreement,
    put_together,
    split,
)
from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.format.typed_json import is_plain
from lightning_zero.checkpoint.format.writer import combine
from lightning_zero.checkpoint.pieces import write_bytes, write_tensor
from lightning_zero.checkpoint.storage.files import local_output
from lightning_zero.checkpoint.storage.publish import StagedFile
from lightning_zero.errors import CheckpointError

__all__ = ["RANDOM_KEY", "SUMMARY_KEY", "by_parameter_index", "save_consolidated_file"]

SUMMARY_KEY = "lightning_zero"
"""Top-level key of what only this package wants to know of a checkpoint."""

RANDOM_KEY = "random_state"
"""Under it: the state of every rank's random number generators, in sharded directories only."""


class _Part(NamedTuple):
    """A range of a storage that a rank wrote, in bytes."""

    key: str
    start: int
    nbytes: int
    crc32: int


class _Start(NamedTuple):
    """What a rank tells the others before anything is written."""

    digest: str
    tied: list[list[str]]


def save_consolidated_file(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    control: Control,
    *,
    plan_summary: Mapping[str, Any] | None = None,
) -> None:
    """Write one checkpoint file from what every rank holds, and publish it in one step.

    Args:
        checkpoint: Lightning's checkpoint dictionary. Every FlatShard under any key becomes a full tensor; of the rest,
            rank 0's is written. Not changed. Its tensors are read until this returns.
        path: the file to make or to replace, on a file system that all ranks share; rank 0's counts. A checkpoint
            directory of that name is replaced too.
        control: the ranks.
        plan_summary: how the run is partitioned: information for people, not used in loading.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why. What was at ``path`` is unchanged then.

    Collective: every rank.
    """
    _Export(control, f"save the checkpoint file '{os.fspath(path)}'").run(checkpoint, path, plan_summary)


class _Export:
    """One save: its steps, each of which succeeds on all ranks or raises on all."""

    def __init__(self, control: Control, what: str) -> None:
        self._control = control
        self._what = what
        self._file: StagedFile | None = None  # on rank 0
        self._layout: TorchFile | None = None  # on rank 0
        self._leaves: dict[str, Leaf] = {}
        self._rest: dict[str, Any] = {}
        self._own: set[str] = set()  # the names of which this rank is the lowest to have them
        self._shared: dict[str, str] = {}  # the name of a tied tensor -> the name its elements are stored under

    def run(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], plan_summary: Mapping[str, Any] | None
    ) -> None:
        try:
            others = self._look(checkpoint)

            def lay_out() -> tuple[str, dict[str, int]] | None:
                if self._control.rank != 0:
                    return None
                self._layout = self._laid_out(others, plan_summary)
                self._file = StagedFile(local_output(path), self._layout.nbytes)
                return str(self._file.path), {
                    str(place.key): place.offset for place in self._layout.places if place.tensor is None
                }

            told = collect(self._control, self._what, lay_out)[0]
            parts = collect(self._control, self._what, lambda: self._write(*told))  # type: ignore[misc]
            collect(self._control, self._what, lambda: self._complete(parts))
        finally:
            if self._file is not None:
                self._file.discard()

    def _look(self, checkpoint: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
        """Take the checkpoint apart and compare with the other ranks.

        Returns:
            Path and value, or hole, of what other ranks have and rank 0 has not: an optimizer may have no state for a
            parameter of which rank 0 holds nothing. Of each, the lowest rank that has it counts and writes it.
        """

        def look() -> _Start:
            self._leaves, self._rest = split(checkpoint)
            for leaf in self._leaves.values():
                check_savable(leaf)
            return _Start(digest(self._leaves), _tied(self._leaves))

        starts = collect(self._control, self._what, look)
        self._shared = {key: keys[0] for start in starts for keys in start.tied for key in keys[1:]}
        if len({start.digest for start in starts}) == 1:
            self._own = set(self._leaves) if self._control.rank == 0 else set()
            return []
        descriptions = self._control.gather_objects(describe(self._leaves))
        conflict = disagreement(descriptions)
        if conflict is not None:
            raise CheckpointError(f"Could not {self._what}: the ranks hold different checkpoints: {conflict}.")
        known = {key for description in descriptions[: self._control.rank] for key in description}
        self._own = set(self._leaves) - known
        own = [leaf for key, leaf in self._leaves.items() if key in self._own and self._control.rank != 0]
        mine = [self._outline(leaf) for leaf in own]
        return [pair for pairs in collect(self._control, self._what, lambda: mine) for pair in pairs]

    def _outline(self, leaf: Leaf) -> tuple[tuple[Any, ...], Any]:
        value = leaf.value
        if leaf.is_container:
            return leaf.path, {}
        if isinstance(value, FlatShard) or (is_plain(value) and self._control.rank != 0):
            return leaf.path, Hole(self._shared.get(leaf.key, leaf.key), value.dtype, value.shape)
        return leaf.path, value

    def _laid_out(self, others: list[tuple[tuple[Any, ...], Any]], plan_summary: Mapping[str, Any] | None) -> TorchFile:
        pairs = [self._outline(leaf) for leaf in self._leaves.values()] + others
        content = {**self._rest, **put_together(pairs)}
        if isinstance(content.get("optimizer_states"), list):
            content["optimizer_states"] = [by_parameter_index(state) for state in content["optimizer_states"]]
        if plan_summary is not None:
            content[SUMMARY_KEY] = {**content.get(SUMMARY_KEY, {}), "plan": dict(plan_summary)}
        return TorchFile(content)

    def _write(self, file: str, offsets: Mapping[str, int]) -> tuple[list[_Part], list[int]]:
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
            parts = [
                _Part(key, start, flat.nbytes, write_tensor(descriptor, offsets[key] + start, flat))
                for key, start, flat in self._mine(offsets)
            ]
            places = self._layout.places if self._layout is not None else []
            crcs = [
                write_tensor(descriptor, place.offset, place.tensor) for place in places if place.tensor is not None
            ]
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

    def _complete(self, written: Sequence[tuple[list[_Part], list[int]]]) -> None:
        """Rank 0: check that all elements were written, write the rest of the file, publish."""
        if self._layout is None or self._file is None:
            return
        by_key: dict[Hashable, list[_Part]] = {}
        for parts, _ in written:
            for part in parts:
                by_key.setdefault(part.key, []).append(part)
        plain = iter(written[0][1])
        crcs = []
        for place in self._layout.places:
            if place.tensor is not None:
                crcs.append(next(plain))
            else:
                crcs.append(_checked(str(place.key), place.nbytes, sorted(by_key.get(place.key, []))))
        descriptor = os.open(self._file.path, os.O_WRONLY)
        try:
            for offset, content in self._layout.frame(crcs):
                write_bytes(descriptor, offset, content)
        finally:
            os.close(descriptor)
        self._file.publish()


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
    """The checksum of parts that must be the whole, without holes or overlaps.

    Raises:
        ValueError: if they are not.
    """
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
