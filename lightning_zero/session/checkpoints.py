"""A run's checkpoints: when they may be taken, who writes them, and what happens when a rank fails alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.background import Saver
from lightning_zero.checkpoint.consolidated import FEEDBACK_KEY, RANDOM_KEY, SUMMARY_KEY, save_consolidated_file
from lightning_zero.checkpoint.storage.files import is_remote, local_path
from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.config import CheckpointPolicy
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import CheckpointError, CommunicationError, some
from lightning_zero.registry import extension, installed

__all__ = ["Checkpoints", "require_lightning"]

# One for all that share a group of ranks: a save in flight has the group to itself.
_SAVERS: WeakKeyDictionary[Groups, Saver] = WeakKeyDictionary()

# How long a rank that is handling an exception waits for the others to save with it. They come at once if they failed
# in the same way, and never if they are waiting for this rank inside a step.
_ATTENDANCE_SECONDS = 15.0


class Checkpoints:
    """Saving, loading and removing for one strategy."""

    def __init__(self, policy: CheckpointPolicy, groups: Groups) -> None:
        self._policy = policy
        self._groups = groups
        self._control = groups.checkpoint
        if groups not in _SAVERS:
            _SAVERS[groups] = Saver(self._control)
        self._saver = _SAVERS[groups]
        self._random: Any = extension("random_state").RandomState(groups) if installed("random_state") else None
        self._told: set[str] = set()  # what cannot be kept, and was named
        self._training = False
        self._removing = False  # whether something was to be deleted in this run
        self._underway: str | None = None  # what was saved last in the background, in this run
        self._handled: BaseException | None = None
        self._unattended: BaseException | None = None  # what the other ranks did not come to save for
        self._missing: list[int] = []

    def begin(self, training: bool) -> None:
        """Begin a run, which lasts until ``finish``. Only in training are saves in the background: it goes on."""
        if self._random is not None:
            self._random.forget()
        self._handled = sys.exc_info()[1]  # of a caller that tries again in an ``except`` block
        self._training = training

    def is_underway(self, path: Any) -> bool:
        """Whether a name is that of a checkpoint that is being written, and has no name on disk yet."""
        return _absolute(path) == self._underway

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        engine: ZeroEngine,
        precision: str,
        storage_options: Any = None,
    ) -> None:
        """Write Lightning's dictionary, with this rank's slices of ``engine``'s weights, whole or not at all.

        ``CheckpointError`` on every rank that takes part, if it could not be written, if the save before failed in the
        background, or if the ranks are not all between the same two steps. Collective: every rank.
        """
        policy = self._policy.for_one_save(storage_options)
        path = _absolute(path)
        what = f"save the checkpoint '{path}'"
        place = f"step {checkpoint.get('global_step')}"
        if engine.updating:
            place = "the middle of an optimizer step, where weights are half updated"
        if self._in_trouble():
            self._attend(what, place)
            try:
                self._saver.wait()
            except CheckpointError as error:  # what is saved now matters more than what was not saved before
                rank_zero_warn(str(error))
        self._saver.wait()
        self._agree(what, place, engine, path)
        if (tensor := self._groups.shard.tensor) > 1:
            extension("tensor_parallel").look_at_buffers(engine.module, self._control, tensor)
        summary = _summary(engine, precision)
        if policy.format == "sharded" and "optimizer_states" in checkpoint:  # a run can go on from it
            own = dict(checkpoint.get(SUMMARY_KEY, {}))
            if self._random is not None:
                own[RANDOM_KEY] = self._random.save(engine.device)
            state = engine.collectives.state
            if state is not None and (carried := state.save(self._layout(engine))):
                own[FEEDBACK_KEY] = carried
            checkpoint = {**checkpoint, SUMMARY_KEY: own}

        def write(content: Mapping[str, Any], control: ControlGroup) -> list[str]:
            if policy.format == "consolidated":
                save_consolidated_file(content, path, control, plan_summary=summary)
                return []
            return self._news(save_checkpoint_directory(content, path, control, plan_summary=summary))

        # SLURM ends the job when Lightning's checkpoint for the next one returns.
        asynchronous = policy.async_save and self._training and not Path(path).name.startswith("hpc_ckpt")
        self._saver.save(write, checkpoint, what=what, asynchronous=asynchronous)
        if asynchronous:
            self._underway = path

    def _news(self, lost: list[str]) -> list[str]:
        """The warning about what a checkpoint cannot give back, on rank 0 and once."""
        lost = [text for text in lost if text not in self._told]
        if not lost or self._control.rank != 0:
            return []
        self._told.update(lost)
        return [
            f"A run that resumes will not have all that was saved: {', '.join(lost)}. Objects of such classes are not "
            "kept, because loading them could run code. Save plain values (of a dataclass, `dataclasses.asdict`)."
        ]

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Open a checkpoint of any kind; tensors are read when they are needed. Collective: every rank."""
        self._saver.wait()
        return open_checkpoint(path, self._control, verify=self._policy.verify or "sample", weights_only=weights_only)

    def load_random_state(self, checkpoint: Mapping[str, Any], device: torch.device) -> None:
        """Read the random states that a checkpoint holds, for ``restore_random_state``: ``ExtensionError`` if this copy
        cannot restore them. Collective: every rank."""
        saved = checkpoint.get(SUMMARY_KEY, {}).get(RANDOM_KEY)
        if saved is not None:
            if self._random is None:
                extension("random_state", "begin a run with its weights: CheckpointPolicy(initial_weights=...)")
            self._random.load(saved, checkpoint["global_step"], device)

    def restore_random_state(self, trainer: Any = None) -> None:
        """Restore what ``load_random_state`` read: when all is set up, just before training."""
        if self._random is not None:
            self._random.restore(trainer)

    def _layout(self, engine: ZeroEngine) -> str:
        """What the state of a wire belongs to."""
        return f"hosts {self._groups.hosts}, plan {engine.plan.fingerprint()}"

    def load_wire_state(self, checkpoint: Mapping[str, Any], engine: ZeroEngine) -> None:
        """Read what the wire carried from step to step, if it fits; else it begins anew, and the log says so.

        Collective: every rank; ``CheckpointError`` on all, if one could not read its part.
        """
        saved = checkpoint.get(SUMMARY_KEY, {}).get(FEEDBACK_KEY, {})
        why, state = "nothing is fed back in this run" if saved else "", engine.collectives.state
        if state is not None:
            why = state.load(saved, self._layout(engine))
        if why:
            rank_zero_info(f"Error feedback takes nothing from the checkpoint: {why}.")

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint at the next save, or at the end of the run: never before its successor is durable."""
        path = _absolute(path)
        if path == self._underway:
            self._underway = None
        self._removing = True
        self._saver.remove(path)

    def wait(self) -> None:
        """Return when everything saved so far is durable; ``CheckpointError`` if a background save failed.

        Collective: every rank.
        """
        self._saver.wait()

    def finish(self) -> None:
        """Wait until everything is durable and removals are done: ``CheckpointError`` on every rank, if a background
        save failed. Collective: every rank, but for one that is handling an exception."""
        self._training = False
        self._underway = self._unattended = None
        together = not self._in_trouble()
        self._saver.close(collective=together)
        if together and self._removing:
            # No rank shall look for `last` while rank 0 still deletes. Not a collective: a rank that ended early,
            # because its data did, must not wait here for one that waits for it in a step.
            self._groups.rendezvous("finish", "", _ATTENDANCE_SECONDS)
        self._removing = False

    def _in_trouble(self) -> bool:
        """Whether an exception of this run is being handled, where the other ranks may not come."""
        return sys.exc_info()[1] not in (None, self._handled)

    def _attend(self, what: str, place: str) -> None:
        """Make sure that all ranks are here, while an exception is being handled: ``CheckpointError``."""
        handled = sys.exc_info()[1]
        if handled is not self._unattended:  # another callback may have tried to save for the same
            notes = self._groups.rendezvous("save", place, _ATTENDANCE_SECONDS)
            self._missing = sorted(set(range(self._control.world_size)) - set(notes))
        if self._missing:
            self._unattended = handled
            raise CheckpointError(
                f"Rank {self._control.rank} could not {what}, which it was asked to after "
                f"{type(handled).__name__}: rank {some(self._missing)} did not come to save with it. Every rank holds "
                "a part of the weights, so all must save together. Checkpoints that were saved before are intact."
            )

    def _agree(self, what: str, place: str, engine: ZeroEngine, path: str | os.PathLike[str]) -> None:
        """Make sure that all ranks save the same moment, that masters are up to date, and that there is a folder.

        ``ModelCheckpoint`` links ``last.ckpt`` to the new checkpoint as soon as this returns, also in the background.
        """

        def check() -> tuple[str, int]:
            if engine.updating:
                raise CheckpointError(
                    f"this rank is in {place}. Save from a hook outside of it; the last checkpoint is intact"
                )
            engine.take_over_shown()
            if self._control.rank == 0 and not is_remote(path):
                local_path(path).parent.mkdir(parents=True, exist_ok=True)
            return place, engine.access.writes.digest

        try:
            found = self._control.together(what, check)
        except CommunicationError as error:
            raise CommunicationError(
                f"Could not {what}: not every rank came to do so. Every rank holds a part of the weights, so "
                f"`save_checkpoint` must be called on all of them, not on rank 0 alone. {error}"
            ) from error
        places = [at for at, _ in found]
        if len(set(places)) > 1:
            other = next(rank for rank, at in enumerate(places) if at != places[0])
            raise CheckpointError(
                f"Could not {what}: rank 0 is at {places[0]}, rank {other} at {places[other]}. Let all ranks save at "
                "the same step."
            )
        engine.access.writes.compare([digest for _, digest in found], engine.control)


def require_lightning(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Make sure that Lightning wrote a checkpoint, so that a run can go on from it: ``CheckpointError``."""
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"'{os.fspath(path)}' was not saved by a Trainer and holds weights only: a run cannot resume from it. To "
            "start a run with these weights, use CheckpointPolicy(initial_weights=...) in place of `ckpt_path`."
        )


def _absolute(path: str | os.PathLike[str]) -> str:
    """The same place after a ``chdir``."""
    return os.fspath(path) if is_remote(path) else str(local_path(path))


def _summary(engine: ZeroEngine, precision: str) -> dict[str, Any]:
    """How the run is partitioned, for people."""
    plan, placed = engine.plan, engine.plan.placement.words
    return {"world_size": plan.world_size, **placed, "fingerprint": plan.fingerprint(), "precision": precision}
