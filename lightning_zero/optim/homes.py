"""Where this rank's slices of optimizer state rest: beside the master, or in a file."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.config import Tier
from lightning_zero.optim.owned import OwnedParameter
from lightning_zero.optim.regions import Kind, StateRegions
from lightning_zero.optim.slices import constant_of, cut_out, has_slices
from lightning_zero.storage.file_tensor import FileTensor, fill_from

__all__ = ["StateHomes"]


class StateHomes:
    """Gives state of one optimizer its place.

    Args:
        regions: for state in files; ``None`` where there is none.
    """

    def __init__(self, regions: StateRegions | None) -> None:
        self._regions = regions

    def slice_for(self, entry: OwnedParameter, key: str, dtype: torch.dtype) -> Tensor:
        """1-D, the elements of the parameter that are here: what to write loaded state to. Any content."""
        place = self._region(entry, key, dtype)
        if place is not None:
            return place
        with untracked():
            return torch.empty(entry.slice.numel, dtype=dtype, device=entry.device)

    def _region(self, entry: OwnedParameter, key: str, dtype: torch.dtype) -> FileTensor | None:
        if self._regions is None or entry.flat.rest.state is not Tier.DISK or not entry.slice.numel:
            return None
        return self._regions.part(entry, Kind(key, dtype))

    def put(self, entry: OwnedParameter, key: str, value: Tensor) -> Tensor:
        """A slice of state that was loaded, where it belongs; itself if it is there already."""
        place = self._region(entry, key, value.dtype)
        if place is None:
            return value.read() if isinstance(value, FileTensor) else value
        fill_from(place, value)
        return place

    def adopt(self, entry: OwnedParameter, state: MutableMapping[str, Any]) -> dict[str, Any]:
        """State that a constructor made for a whole parameter, cut to this rank's slice and put in its place.

        Args:
            entry: the parameter.
            state: emptied, so that nothing is kept twice.
        """
        adopted: dict[str, Any] = {}
        with untracked():
            for key in list(state):
                value = state.pop(key)
                if has_slices(key, value, entry):
                    adopted[key] = self._slice(entry, key, value)
                elif isinstance(value, Tensor) and entry.flat.rest.offloaded:
                    adopted[key] = value.detach().to(entry.device)
                else:
                    adopted[key] = value
        return adopted

    def _slice(self, entry: OwnedParameter, key: str, value: Tensor) -> Tensor:
        if entry.flat.rest.offloaded:
            place = self.slice_for(entry, key, value.dtype)
        else:
            place = torch.empty(entry.slice.numel, dtype=value.dtype, device=entry.device)
        constant = constant_of(value)
        if constant is None:
            fill_from(place, cut_out(value, entry))
        elif isinstance(place, FileTensor):
            place.fill(constant)
        else:
            place.fill_(constant)
        return place
