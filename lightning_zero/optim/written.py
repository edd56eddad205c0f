"""Weights that the user writes where optimizers know them: in ``optimizer.param_groups``.

[Note: weights written through param groups]
Without offload a shard parameter, its master and this rank's part of what the module computes with are one memory, of
which other ranks of a replicated module have copies. With a master in host memory they are not one: a hook that clamps
``group["params"]`` writes to the master, one that clamps a replicated module's parameters to what that computes with.
Both count. Every shard parameter has a version counter of its own, which
only the user and the optimizer's arithmetic move; the engine writes to the same memory through other tensors. Where it
has moved since the last step, the master of this parameter holds, everywhere else what the module shows.

What was written to masters is brought to the weights before anything computes with them: after the last post-hook of
the step whose hooks wrote, or at the beginning of the next training step. That is collective and agreed upon as a step
is, so that ranks of which only some have written raise, and none waits for another.

No counter sees a write through ``parameter.data`` of a shard parameter. In stages 1 and 2 it is lost, if what the
module computes with is shown in the masters' dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_zero._torch import untracked
from lightning_zero.config import Tier
from lightning_zero.optim.owned import OwnedParameter

__all__ = ["WrittenMasters"]


class WrittenMasters:
    """Notices what the user writes to shard parameters in memory."""

    def __init__(self) -> None:
        self._units: dict[int, list[OwnedParameter]] = {}
        self._parameters: dict[int, list[nn.Parameter]] = {}  # of each unit
        self._versions: dict[int, list[int]] = {}
        self._watched: set[nn.Parameter] = set()

    def watch(self, entries: Iterable[OwnedParameter]) -> None:
        """Look after these parameters too. What was written to them before does not count.

        Args:
            entries: any of the engine's; those that are trained with masters in memory matter.
        """
        for entry in entries:
            parameter = entry.shard.parameter
            if parameter is None or entry.flat.rest.master is Tier.DISK or parameter in self._watched:
                continue
            _count_alone(parameter)
            self._watched.add(parameter)
            self._units.setdefault(entry.unit, []).append(entry)
            self._parameters.setdefault(entry.unit, []).append(parameter)
            self._versions.setdefault(entry.unit, []).append(parameter._version)

    def pending(self, units: Iterable[int]) -> bool:
        """Whether a parameter of these units was written to since ``note``."""
        return any(
            [parameter._version for parameter in self._parameters[unit]] != self._versions[unit]
            for unit in units
            if unit in self._parameters
        )

    def note(self, units: Iterable[int]) -> None:
        """All weights of these units are what their masters are."""
        for unit in units:
            if unit in self._parameters:
                self._versions[unit] = [parameter._version for parameter in self._parameters[unit]]

    def take_over(self, units: Iterable[int]) -> None:
        """Make masters in memory, and what the module shows of them, what the user wrote to either. Local."""
        with untracked():
            for unit in units:
                entries = self._units.get(unit, ())
                for entry, version in zip(entries, self._versions.get(unit, ()), strict=True):
                    shown, piece = entry.flat.shown, entry.slice
                    parameter = entry.shard.parameter
                    written = parameter is not None and parameter._version != version
                    if shown is not None and piece.numel and written:
                        shown.narrow(0, piece.shard_start, piece.numel).copy_(entry.shard.data)
                for flat in {id(entry.flat): entry.flat for entry in entries}.values():
                    if flat.shown is not None:
                        flat.master.copy_(flat.shown)


def _count_alone(parameter: nn.Parameter) -> None:
    """Let a parameter, which stays the same object on the same memory, share its version counter with nobody."""
    with torch.inference_mode(False):
        alone = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        alone.grad = parameter.grad
        vars(alone).update(vars(parameter))
        torch.utils.swap_tensors(parameter, alone)
