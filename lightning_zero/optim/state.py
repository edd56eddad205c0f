"""State of elementwise optimizers: what of it is this rank's slice, and where that rests: in memory or in a file."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import TorchDispatchMode, bare_step, untracked
from lightning_zero.config import Tier
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.plan import ALIGNMENT
from lightning_zero.shards.slice import FlatParameters
from lightning_zero.storage.file_tensor import FileTensor, fill_from
from lightning_zero.storage.host import padded_nbytes
from lightning_zero.storage.tiers import NvmeStore

__all__ = ["SCALARS", "ConstantState", "Kind", "StateHomes", "copied", "covers", "probe_state"]


SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""Scalar states of the elementwise optimizers; only matters for 0-d parameters, where shape cannot tell."""


def covers(value: Any, numel: int) -> bool:
    """Whether a state value is a slice of ``numel`` elements, rather than a scalar."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel


def _is_like(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether state of a whole parameter has an element for each of the parameter's."""
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and (value.dim() > 0 or key not in SCALARS)


def copied(value: Any) -> Any:
    """A scalar state that can be changed without changing ``value``."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Kind(NamedTuple):
    """What a region holds of each parameter of a layout."""

    key: str
    dtype: torch.dtype


Regions = dict[tuple[FlatParameters, Kind], FileTensor]

# Regions that an optimizer of an earlier fit has left in files which are still there.
_FREE: weakref.WeakKeyDictionary[NvmeStore, list[FileTensor]] = weakref.WeakKeyDictionary()


class StateHomes:
    """Where the state of one optimizer rests: in memory, or in files of ``store``, in one region for each layout and
    kind of state. The optimizer is not held; its regions are free for others when nobody holds it any more."""

    def __init__(self, optimizer: Optimizer, label: str, store: NvmeStore | None) -> None:
        self.store = store
        self._label = label
        self._regions: Regions = {}
        self._expected: dict[tuple[int, torch.dtype], list[Kind]] = {}
        if store is not None:
            weakref.finalize(optimizer, _give_back, weakref.ref(store), self._regions).atexit = False

    def slice_for(self, entry: OwnedParameter, key: str, dtype: torch.dtype) -> Tensor:
        """1-D, the elements of the parameter that are here: what to write its state to. Any content."""
        if self._is_in_file(entry):
            return self.part(entry, Kind(key, dtype))
        with untracked():
            return torch.empty(entry.slice.numel, dtype=dtype, device=entry.device)

    def put(self, entry: OwnedParameter, key: str, value: Tensor) -> Tensor:
        """A slice of state that was loaded, where it belongs; itself if it is there already."""
        if not self._is_in_file(entry):
            return value.read() if isinstance(value, FileTensor) else value
        place = self.part(entry, Kind(key, value.dtype))
        fill_from(place, value)
        return place

    def _is_in_file(self, entry: OwnedParameter) -> bool:
        return self.store is not None and entry.flat.rest.state is Tier.DISK and entry.slice.numel > 0

    def adopt(self, entry: OwnedParameter, state: MutableMapping[str, Any]) -> dict[str, Any]:
        """State that was made for a whole parameter, cut to this rank's slice and put in its place. ``state`` is
        emptied, so that nothing is kept twice."""
        adopted: dict[str, Any] = {}
        with untracked():
            for key in list(state):
                value = state.pop(key)
                if _is_like(key, value, entry.shard.spec.shape):
                    value = self._cut(entry, key, value)
                elif isinstance(value, Tensor) and entry.flat.rest.offloaded:
                    value = value.detach().to(entry.device)
                adopted[key] = value
        return adopted

    def _cut(self, entry: OwnedParameter, key: str, value: Tensor) -> Tensor:
        place, numel = self.slice_for(entry, key, value.dtype), entry.slice.numel
        if value.numel() <= 1 or any(value.stride()):
            fill_from(place, value.detach().reshape(-1).narrow(0, entry.shard.start if numel else 0, numel))
            return place
        constant = value[(0,) * value.dim()].item()  # one element stands for all
        if isinstance(place, FileTensor):
            place.fill(constant)
        else:
            place.fill_(constant)
        return place

    # ------------------------------------------------------------------- files

    def expected(self, optimizer: Optimizer, flat: FlatParameters, group: int) -> list[Kind]:
        """What the optimizer will make for a parameter of a param group when it first steps on it."""
        place = (group, flat.layout.dtype)
        if place not in self._expected:
            found = probe_state(optimizer, group, flat.layout.dtype)
            self._expected[place] = [Kind(key, dtype) for key, dtype in found.items()]
        return self._expected[place]

    def reserve(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[OwnedParameter]],
        check_room: Callable[[int], None],
    ) -> None:
        """Allocate what the optimizer will need for the parameters of each group that are new, so that a full disk is
        noticed before training begins: ``check_room`` raises on every rank if so many bytes more have no room.
        Collective: every rank."""
        if self.store is None:
            return
        wanted = {
            (entry.flat, kind): entry.flat.layout.shard_numel
            for index, group in enumerate(groups)
            for entry in group
            if entry.shard.parameter is not None and self._is_in_file(entry)
            for kind in self.expected(optimizer, entry.flat, index)
        }
        missing = {place: numel for place, numel in wanted.items() if place not in self._regions}
        free = [(region.numel(), region.dtype) for region in _FREE.get(self.store, [])]
        nbytes = 0
        for (_, kind), numel in missing.items():
            if (numel, kind.dtype) in free:
                free.remove((numel, kind.dtype))
            else:
                nbytes += padded_nbytes(numel * kind.dtype.itemsize)
        check_room(nbytes)
        for flat, kind in missing:
            self.region(flat, kind)

    def release(self) -> None:
        """Let another optimizer of the same run have the regions. State that is still in them must not be used."""
        if self.store is not None:
            _give_back(weakref.ref(self.store), self._regions)

    def region(self, flat: FlatParameters, kind: Kind) -> FileTensor:
        """1-D, as many elements as the shard; any content where nothing was written. Raises if there is no space for
        it."""
        if (flat, kind) not in self._regions:
            if self.store is None:
                raise RuntimeError("There are no files for state. This is an error in lightning_zero itself.")
            numel, free = flat.layout.shard_numel, _FREE.get(self.store, [])
            fitting = [place for place, r in enumerate(free) if r.numel() == numel and r.dtype == kind.dtype]
            what = f"'{kind.key}' of {self._label} for '{flat.layout.parameters[0].name}' and what lies with it"
            found = free.pop(fitting[0]) if fitting else self.store.allocate(numel, kind.dtype, what)
            self._regions[flat, kind] = found
        return self._regions[flat, kind]

    def part(self, entry: OwnedParameter, kind: Kind) -> FileTensor:
        """1-D: the elements of a region that belong to one parameter."""
        return self.region(entry.flat, kind).part(entry.slice.shard_start, entry.slice.numel)


def _give_back(weak_store: weakref.ref[NvmeStore], regions: Regions) -> None:
    store = weak_store()
    if store is not None and regions:
        _FREE.setdefault(store, []).extend(regions.values())
    regions.clear()


_aten = torch.ops.aten
_FILL = {_aten.zeros_like.default: 0.0, _aten.ones_like.default: 1.0, _aten.empty_like.default: 0.0}


class ConstantState(TorchDispatchMode):
    """For optimizers that make state in their constructor (Adagrad), which must not be made at full size.

    While active, ``zeros_like``, ``ones_like``, ``empty_like`` and ``full_like`` of a placeholder give one element,
    expanded to the placeholder's shape. Attaching the optimizer turns it into this rank's slice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        like = args[0] if args else None
        if isinstance(like, Tensor) and like.numel() > 1 and not any(like.stride()):
            fill = args[1] if func is _aten.full_like.default else _FILL.get(func)
            if fill is not None:
                dtype = options.get("dtype") or like.dtype
                device = options.get("device") or like.device
                return torch.full((), fill, dtype=dtype, device=device).expand(like.shape)
        return func(*args, **options)


def probe_state(optimizer: Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The state, of which every element of a parameter has one, that an elementwise optimizer will make for masters of
    ``dtype`` in a param group: key to dtype.

    A constructor that makes state for its parameters has told already. Otherwise a twin of the optimizer steps once on
    a tiny parameter of zeros with a gradient of zeros. It shares all but state and groups, so that nothing is copied,
    and what torch notes in it (which checks of a first step were made) is gone with it.
    """
    options = optimizer.param_groups[group]
    for parameter in options["params"]:
        if parameter.dtype == dtype and optimizer.state.get(parameter):
            state = optimizer.state[parameter].items()
            return {k: v.dtype for k, v in state if isinstance(v, Tensor) and _is_like(k, v, parameter.shape)}
    with untracked():
        tiny = nn.Parameter(torch.zeros(ALIGNMENT, dtype=dtype))
        tiny.grad = torch.zeros_like(tiny)
        on_host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
        twin: Optimizer = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[{**on_host, "params": [tiny]}])
        bare_step(twin)()
    return {key: value.dtype for key, value in twin.state.get(tiny, {}).items() if covers(value, ALIGNMENT)}
