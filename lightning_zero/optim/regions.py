"""Where optimizer state rests in files: a region for each layout, state key and dtype, as long as the master shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from lightning_zero.config import Tier
from lightning_zero.optim.owned import Flat, OwnedParameter
from lightning_zero.optim.probe import probe_state
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.host import padded_nbytes
from lightning_zero.storage.nvme import NvmeStore

__all__ = ["Kind", "StateRegions"]

# Regions that an optimizer of an earlier fit has left in files which are still there.
_FREE: weakref.WeakKeyDictionary[NvmeStore, list[FileTensor]] = weakref.WeakKeyDictionary()


class Kind(NamedTuple):
    """What a region holds of each parameter of a layout."""

    key: str
    dtype: torch.dtype


class StateRegions:
    """The regions of one optimizer.

    Args:
        optimizer: the user's.
        label: how to name it in messages.
        store: where they are allocated.
        check_room: sees whether so many bytes more have room, on every rank.
    """

    def __init__(self, optimizer: Optimizer, label: str, store: NvmeStore, check_room: Callable[[int], None]) -> None:
        self._optimizer = optimizer
        self._label = label
        self._store = store
        self._check_room = check_room
        self._regions: dict[tuple[int, Kind], FileTensor] = {}
        self._flats: dict[int, Flat] = {}  # kept alive, because regions are found by their ``id``
        self._expected: dict[tuple[int, torch.dtype], list[Kind]] = {}
        # An optimizer that nobody holds any more has no use for its regions, whether anybody has said so or not.
        weakref.finalize(optimizer, _give_back, weakref.ref(store), self._regions).atexit = False

    def expected(self, flat: Flat, group: int) -> list[Kind]:
        """What the optimizer will make for a parameter of a param group when it first steps on it."""
        place = (group, flat.layout.dtype)
        if place not in self._expected:
            found = probe_state(self._optimizer, group, flat.layout.dtype)
            self._expected[place] = [Kind(key, dtype) for key, dtype in found.items()]
        return self._expected[place]

    def reserve(self, groups: Sequence[Sequence[OwnedParameter]]) -> None:
        """Allocate what the optimizer will need, so that a full disk is noticed before training begins.

        Args:
            groups: of each param group the parameters that are new.

        Raises:
            OffloadError: on every rank, if a disk has no room, with the bytes needed and found.

        Collective: every rank.
        """
        wanted: dict[tuple[int, Kind], Flat] = {}
        for index, group in enumerate(groups):
            for entry in group:
                if entry.shard.parameter is not None and entry.flat.rest.state is Tier.DISK and entry.slice.numel:
                    for kind in self.expected(entry.flat, index):
                        wanted[id(entry.flat), kind] = entry.flat
        missing = {place: flat for place, flat in wanted.items() if place not in self._regions}
        free = [(region.numel(), region.dtype) for region in _FREE.get(self._store, [])]
        nbytes = 0
        for (_, kind), flat in missing.items():
            size = (flat.layout.shard_numel, kind.dtype)
            if size in free:
                free.remove(size)
            else:
                nbytes += padded_nbytes(size[0] * size[1].itemsize)
        self._check_room(nbytes)
        for (_, kind), flat in missing.items():
            self.of(flat, kind)

    def release(self) -> None:
        """Let another optimizer of the same run have the regions. State that is still in them must not be used."""
        _give_back(weakref.ref(self._store), self._regions)
        self._flats.clear()

    def of(self, flat: Flat, kind: Kind) -> FileTensor:
        """1-D, as many elements as the shard; any content where nothing was written.

        Raises:
            OffloadError: if there is no space for it.
        """
        place = (id(flat), kind)
        if place not in self._regions:
            self._regions[place] = self._take(flat, kind)
            self._flats[id(flat)] = flat
        return self._regions[place]

    def _take(self, flat: Flat, kind: Kind) -> FileTensor:
        numel, free = flat.layout.shard_numel, _FREE.get(self._store, [])
        for index, region in enumerate(free):
            if region.numel() == numel and region.dtype == kind.dtype:
                return free.pop(index)
        what = f"'{kind.key}' of {self._label} for '{flat.layout.parameters[0].name}' and what lies with it"
        return self._store.allocate(numel, kind.dtype, what)

    def part(self, entry: OwnedParameter, kind: Kind) -> FileTensor:
        """1-D: the elements that belong to one parameter."""
        return self.of(entry.flat, kind).part(entry.slice.shard_start, entry.slice.numel)


def _give_back(weak_store: weakref.ref[NvmeStore], regions: dict[tuple[int, Kind], FileTensor]) -> None:
    store = weak_store()
    if store is not None and regions:
        _FREE.setdefault(store, []).extend(regions.values())
    regions.clear()
