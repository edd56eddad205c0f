"""What is in an optimizer's param groups: the user's parameters between steps, this rank's parts of them in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.shards.slice import Slice

__all__ = ["ParamGroups", "restore_options"]


class ParamGroups:
    """Finds the engine's parameters (``owned``, by the user's) in the param groups of one optimizer, which hold the
    user's between steps. What was found stays as long as groups hold the same objects."""

    def __init__(self, optimizer: Optimizer, label: str, owned: Mapping[nn.Parameter, Slice]) -> None:
        self._optimizer = optimizer
        self._label = label
        self.owned = owned
        self._seen: list[list[nn.Parameter]] = []
        self._names: list[list[str]] | None = None
        self.known: list[list[Slice]] | None = None
        """What ``current`` gave, as of the last look."""

    def names(self) -> list[list[str]]:
        """Of each group the names of its parameters: the same object as long as they are the same. Never raises."""
        self._look()
        if self._names is None:
            self._names = [
                [
                    entry.name if (entry := self.owned.get(p)) else f"(not the model's, of shape {tuple(p.shape)})"
                    for p in group
                ]
                for group in self._seen
            ]
        return self._names

    def current(self) -> list[list[Slice]]:
        """The parameters of each group: the same object as long as they are the same. Raises ``ValueError`` if one is
        not the model's, or is in a group already."""
        self._look()
        if self.known is None:
            places: dict[Slice, int] = {}
            for index, group in enumerate(self._seen):
                for parameter in group:
                    entry = self.owned.get(parameter)
                    if entry is None:
                        raise ValueError(
                            f"{self._label}, param group {index}, holds a parameter of shape {tuple(parameter.shape)} "
                            "that is not one of the model's. Build the optimizer in configure_optimizers from "
                            "self.parameters(); a parameter that was replaced or created after the module was set up "
                            "is not trained."
                        )
                    if entry in places:
                        raise ValueError(
                            f"{self._label} holds '{entry.name}' twice, in param groups {places[entry]} and {index}. "
                            "Take a parameter out of one group before it is put into another."
                        )
                    places[entry] = index
            self.known = [[self.owned[parameter] for parameter in group] for group in self._seen]
        return self.known

    def _look(self) -> None:
        groups = self._optimizer.param_groups
        same = len(groups) == len(self._seen)
        for group, seen in zip(groups, self._seen, strict=False):
            same = same and len(group["params"]) == len(seen) and all(map(is_, group["params"], seen))
        if not same:
            self._seen, self._names, self.known = [list(group["params"]) for group in groups], None, None


def restore_options(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], own: Collection[str]) -> None:
    """Give each param group the options that a checkpoint holds, as torch does: others that user code put there go.

    Those of ``own`` stay as they are, and so do all of a group of which nothing was saved.
    """
    stay = {"params", "param_names", *own, *optimizer.defaults}
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key in [key for key in group if options and key not in options and key not in stay]:
            del group[key]
        group.update({key: value for key, value in options.items() if key not in own})
