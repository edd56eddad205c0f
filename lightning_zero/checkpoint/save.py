"""Saving a checkpoint directory: who writes what, the record of what was written, and publishing it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_zero.checkpoint.agreement import Control, collect, failure_text
from lightning_zero.checkpoint.destination import Destination, LocalDestination
from lightning_zero.checkpoint.files import is_remote
from lightning_zero.checkpoint.flat_shard import FlatShard
from lightning_zero.checkpoint.items import Leaf, changed, check_savable, describe, digest, disagreement, split
from lightning_zero.checkpoint.record import Part, comes_back, outline, write_record
from lightning_zero.checkpoint.remote import RemoteDestination
from lightning_zero.checkpoint.writer import LeafPlanner, ShardWriter
from lightning_zero.comm.groups import naming_failures
from lightning_zero.errors import CheckpointError

__all__ = ["no_garbage_collection", "save_checkpoint_directory"]


def save_checkpoint_directory(
    checkpoint: Mapping[str, Any], path: str | os.PathLike[str], control: Control, *, plan_summary: Mapping[str, Any]
) -> list[str]:
    """Write a checkpoint directory and publish it in one step. See [Note: The directory] and [Note: Publishing].

    May run in a thread of its own, if nothing else uses ``control`` meanwhile and nobody changes the checkpoint.

    Args:
        checkpoint: Lightning's checkpoint dictionary. What is under ``state_dict`` and ``optimizer_states``, and
            under any key that holds a FlatShard, is written sharded; of the rest, rank 0's is written. Not changed.
            Its tensors are read until this returns.
        path: the directory to make or to replace: on a file system that all ranks share, or a URL of any store that
            fsspec knows; rank 0's counts.
        control: the ranks.
        plan_summary: how the run is partitioned: information for people, not used in loading.

    Returns:
        What will not be there when it is loaded, or will be of another class: path and class of each. The same on every
        rank.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why. What was at ``path`` is unchanged then.

    Collective: every rank.
    """
    destination: Destination = RemoteDestination(os.fspath(path)) if is_remote(path) else LocalDestination(path)
    with no_garbage_collection():
        return _Save(control, destination, f"save the checkpoint '{os.fspath(path)}'").run(checkpoint, plan_summary)


class _Save:
    """One save: its steps, each of which succeeds on all ranks or raises on all."""

    def __init__(self, control: Control, destination: Destination, what: str) -> None:
        self._control = control
        self._destination = destination
        self._what = what

    def run(self, checkpoint: Mapping[str, Any], plan_summary: Mapping[str, Any]) -> list[str]:
        try:
            leaves, rest, token = self._prepare(checkpoint)
            mine, named = self._divide(leaves, token)
            writer = self._write_shards(mine, named)

            def deliver() -> Part:
                self._destination.deliver(list(writer.files))
                outlines = {key: outline(leaf) for key, leaf in named.items()}
                lost = [
                    f"'{key}' ({found.type})" for key, found in outlines.items() if not comes_back(named[key], found)
                ]
                return Part(writer.written, writer.files, outlines, lost)

            parts = collect(self._control, self._what, deliver)

            def commit() -> list[str]:
                if self._control.rank != 0:
                    return []
                lost = [f"'{'.'.join(map(str, path))}' ({kind})" for path, kind in changed(checkpoint)]
                lost += write_record(self._destination, parts, rest, plan_summary)
                self._destination.commit()
                return lost

            return collect(self._control, self._what, commit)[0]
        finally:
            self._destination.discard()

    def _prepare(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any], str]:
        """Take the checkpoint apart; rank 0 prepares the destination."""
        leaves: dict[str, Leaf] = {}
        rest: dict[str, Any] = {}

        def prepare() -> str:
            found, others = split(checkpoint)
            for leaf in found.values():
                check_savable(leaf)
            leaves.update(found)
            rest.update(others)
            return self._destination.begin() if self._control.rank == 0 else ""

        token = collect(self._control, self._what, prepare)[0]
        return leaves, rest, token

    def _divide(self, leaves: dict[str, Leaf], token: str) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
        """Decide who writes what.

        A shard is written by every rank that holds some of it; everything else, and what has no elements, by the
        lowest rank that has it. That is rank 0, unless an optimizer has no state for a parameter of which rank 0 owns
        nothing.

        Returns:
            What this rank writes, and what this rank is the lowest to have.
        """

        def look() -> str:
            self._destination.enter(token)
            return digest(leaves)

        known: set[str] = set(leaves) if self._control.rank > 0 else set()
        if len(set(collect(self._control, self._what, look))) > 1:
            descriptions = self._control.gather_objects(describe(leaves))
            conflict = disagreement(descriptions)
            if conflict is not None:
                raise CheckpointError(f"Could not {self._what}: the ranks hold different checkpoints: {conflict}.")
            known = {key for description in descriptions[: self._control.rank] for key in description}
        named = {key: leaf for key, leaf in leaves.items() if key not in known}
        mine = {
            key: leaf
            for key, leaf in leaves.items()
            if not leaf.is_container
            and (key in named or (isinstance(leaf.value, FlatShard) and leaf.value.numel() > 0))
        }
        return mine, named

    def _write_shards(self, mine: dict[str, Leaf], named: dict[str, Leaf]) -> ShardWriter:
        writer = ShardWriter(self._destination.path, self._destination.suffix)
        planner = LeafPlanner(mine, {key: leaf for key, leaf in named.items() if not leaf.is_container})
        group = self._control.process_group
        if group is None:
            collect(self._control, self._what, lambda: _save_alone(writer, planner))
            return writer
        try:
            with naming_failures(f"the attempt to {self._what}", self._control.rank):
                save({}, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            reasons = {rank: f"{type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()}
            raise CheckpointError(failure_text(self._what, reasons)) from None
        return writer


def _save_alone(writer: ShardWriter, planner: LeafPlanner) -> None:
    """What DCP's ``save`` does, for one process, without its warning that there is only one."""
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).value()])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Copying and planning make very many small objects that live: collecting meanwhile was 60 % of the time.

    Not in the background: it would keep the garbage of the training, and a process forked meanwhile would never
    collect.
    """
    paused = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
