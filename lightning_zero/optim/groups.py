"""What is in an optimizer's param groups at the moment: the user may move parameters, take them out, or add some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim.owned import OwnedParameter

__all__ = ["ParamGroups"]


class ParamGroups:
    """Finds the engine's parameters in the param groups of one optimizer.

    Args:
        optimizer: whose.
        label: how to name it in messages.
        owned: the engine's parameters by the user's.
    """

    def __init__(self, optimizer: Optimizer, label: str, owned: Mapping[nn.Parameter, OwnedParameter]) -> None:
        self._optimizer = optimizer
        self._label = label
        self._owned = owned
        self._known: dict[nn.Parameter, OwnedParameter] = {}

    def know(self, members: Iterable[tuple[nn.Parameter, OwnedParameter]]) -> None:
        """Note what stands in the groups in place of the user's parameters."""
        self._known.update(members)

    def fresh(self) -> list[dict[nn.Parameter, OwnedParameter]]:
        """Of each group the parameters that are still the user's own.

        Raises:
            ValueError: if one is not the model's.
        """
        return [
            {p: self._lookup(index, p) for p in group["params"] if p not in self._known}
            for index, group in enumerate(self._optimizer.param_groups)
        ]

    def current(self) -> list[list[OwnedParameter]]:
        """The parameters of each group.

        Raises:
            ValueError: if one is not the model's, or is in a group already.
        """
        places: dict[int, int] = {}
        found: list[list[OwnedParameter]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            found.append([])
            for parameter in group["params"]:
                entry = self._known.get(parameter) or self._lookup(index, parameter)
                if id(entry) in places:
                    raise ValueError(
                        f"{self._label} holds '{entry.shard.spec.name}' twice, in param groups {places[id(entry)]} and "
                        f"{index}. Take a parameter out of one group before it is put into another."
                    )
                places[id(entry)] = index
                found[-1].append(entry)
        return found

    def _lookup(self, group: int, parameter: nn.Parameter) -> OwnedParameter:
        owned = self._owned.get(parameter)
        if owned is None:
            raise ValueError(
                f"{self._label}, param group {group}, holds a parameter of shape {tuple(parameter.shape)} that is not "
                "one of the model's. Build the optimizer in configure_optimizers from self.parameters(); a parameter "
                "that was replaced or created after the module was set up is not trained."
            )
        return owned
