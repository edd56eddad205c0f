"""What is in an optimizer's param groups at the moment: the user may move parameters, take them out, or add some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim.owned import OwnedParameter

__all__ = ["ParamGroups", "restore_options"]


class ParamGroups:
    """Finds the engine's parameters in the param groups of one optimizer, which hold the user's between steps.

    Args:
        optimizer: whose.
        label: how to name it in messages.
        owned: the engine's parameters by the user's.
    """

    def __init__(self, optimizer: Optimizer, label: str, owned: Mapping[nn.Parameter, OwnedParameter]) -> None:
        self._optimizer = optimizer
        self._label = label
        self._owned = owned
        # As long as groups hold the same objects, which are kept alive here, they are not looked through again.
        self._seen: list[list[nn.Parameter]] = []
        self._current: list[list[OwnedParameter]] | None = None
        self._named: tuple[list[list[nn.Parameter]], list[list[str]]] | None = None
        self._asked: tuple[list[list[OwnedParameter]] | None, list[int]] = (None, [])

    def names(self) -> list[list[str]]:
        """Of each group the names of its parameters: the same object as long as they are the same. Never raises."""
        if self._named is None or not self._holds(self._named[0]):
            held = [list(group["params"]) for group in self._optimizer.param_groups]
            self._named = held, [[self._name(p) for p in group] for group in held]
        return self._named[1]

    def current(self) -> list[list[OwnedParameter]]:
        """The parameters of each group: the same object as long as they are the same.

        Raises:
            ValueError: if one is not the model's, or is in a group already.
        """
        if self._current is not None and self._holds(self._seen):
            return self._current
        places: dict[int, int] = {}
        found: list[list[OwnedParameter]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            found.append([])
            for parameter in group["params"]:
                entry = self._lookup(index, parameter)
                if id(entry) in places:
                    raise ValueError(
                        f"{self._label} holds '{entry.shard.spec.name}' twice, in param groups {places[id(entry)]} and "
                        f"{index}. Take a parameter out of one group before it is put into another."
                    )
                places[id(entry)] = index
                found[-1].append(entry)
        self._seen = [list(group["params"]) for group in self._optimizer.param_groups]
        self._current = found
        return found

    def units_of(self, groups: list[list[OwnedParameter]]) -> list[int]:
        """Units with trainable parameters in ``groups``, ascending. The same object means the same parameters."""
        if groups is not self._asked[0]:
            units = {entry.unit for group in groups for entry in group if entry.shard.parameter is not None}
            self._asked = (groups, sorted(units))
        return self._asked[1]

    def _name(self, parameter: nn.Parameter) -> str:
        entry = self._owned.get(parameter)
        shape = tuple(parameter.shape)
        return f"(not the model's, of shape {shape})" if entry is None else entry.shard.spec.name

    def _holds(self, members: list[list[nn.Parameter]]) -> bool:
        groups = self._optimizer.param_groups
        return len(groups) == len(members) and all(
            len(group["params"]) == len(seen) and all(map(is_, group["params"], seen))
            for group, seen in zip(groups, members, strict=True)
        )

    def _lookup(self, group: int, parameter: nn.Parameter) -> OwnedParameter:
        owned = self._owned.get(parameter)
        if owned is None:
            raise ValueError(
                f"{self._label}, param group {group}, holds a parameter of shape {tuple(parameter.shape)} that is not "
                "one of the model's. Build the optimizer in configure_optimizers from self.parameters(); a parameter "
                "that was replaced or created after the module was set up is not trained."
            )
        return owned


def restore_options(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], own: Collection[str]) -> None:
    """Give each param group the options that a checkpoint holds, as torch does: others that user code put there go.

    Args:
        optimizer: whose groups.
        saved: options of each group; empty for one that the checkpoint does not know.
        own: options that stay as they are.
    """
    stay = {"params", "param_names", *own, *optimizer.defaults}
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key in [key for key in group if options and key not in options and key not in stay]:
            del group[key]
        group.update({key: value for key, value in options.items() if key not in own})
