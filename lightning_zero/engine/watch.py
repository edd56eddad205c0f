"""Misuse of partitioned parameters, told by name: replaced objects, and thawed parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.flat import FlatParameters
from lightning_zero.engine.sharded import ShardedUnit
from lightning_zero.errors import ParameterAccessError

__all__ = ["ParameterWatch"]


class ParameterWatch:
    """Checks that the user's parameters are used as the plan says.

    Args:
        module: the user's module.
        names: name of each parameter of the engine.
        flats: all of the engine.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        flats: Sequence[FlatParameters],
    ) -> None:
        self._module = module
        self._names = names
        self._frozen = [p for flat in flats if not flat.layout.trainable for p in flat.parameters]
        self._owners: dict[int, list[tuple[Mapping[str, Any], str, nn.Parameter]]] = {}

    def check_identity(self, unit: ShardedUnit) -> None:
        """Raise if a parameter object of a unit was replaced since set-up.

        Raises:
            ParameterAccessError: naming the parameter.
        """
        owners = self._owners.get(unit.index)
        if owners is None:
            owners = self._owners[unit.index] = self._find_owners(unit)
        for owner, key, parameter in owners:
            if owner["_parameters"].get(key) is not parameter:
                raise ParameterAccessError(
                    f"Parameter '{self._names.get(parameter, key)}' of unit '{unit.name}' was replaced by another "
                    "object after set-up (load_state_dict(assign=True), a re-assigned attribute, or a re-tied "
                    "weight). Change its values inside `with lightning_zero.full_parameters(module):` instead."
                )

    def check_trainable(self) -> None:
        """Raise if a parameter was thawed since set-up: its gradients would stay local and never be used.

        Raises:
            ParameterAccessError: naming the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():  # absent parameters would be asked one by one
            thawed = next((parameter for parameter in self._frozen if parameter.requires_grad), None)
        if thawed is not None:
            raise ParameterAccessError(
                f"Parameter '{self._names[thawed]}' was frozen at set-up and is trainable now. Gradient memory "
                "is laid out at set-up: leave it trainable from the start (keep it out of the optimizer, or set "
                "its learning rate to 0 until it is to move), or start a new fit after unfreezing."
            )

    def _find_owners(self, unit: ShardedUnit) -> list[tuple[Mapping[str, Any], str, nn.Parameter]]:
        owners: list[tuple[Mapping[str, Any], str, nn.Parameter]] = []
        for flat in unit.flats:
            for spec, parameter in zip(flat.layout.parameters, flat.parameters, strict=True):
                for name in (spec.name, *spec.aliases):
                    prefix, _, key = name.rpartition(".")
                    owners.append((vars(self._module.get_submodule(prefix)), key, parameter))
        return owners
