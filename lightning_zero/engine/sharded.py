"""A unit whose full parameters exist only while it computes: its buffer, states, and parameters bound to views."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_zero._torch import called_functionally, untracked
from lightning_zero.comm import Collectives, Pending, Streams
from lightning_zero.comm.streams import Event
from lightning_zero.engine.events import Span
from lightning_zero.engine.pool import Buffer, BufferPool, carve
from lightning_zero.engine.unit import Unit
from lightning_zero.errors import OffloadError, ParameterAccessError
from lightning_zero.offload.transfers import Fetcher
from lightning_zero.plan import UnitPlan, pack
from lightning_zero.shards.binding import Bound, hide, show
from lightning_zero.shards.slice import FlatParameters

__all__ = ["SavedPlace", "ShardedUnit", "UnitState"]

SavedPlace = tuple[Any, torch.Size, tuple[int, ...], torch.dtype]
"""What of a buffer a tensor shows: first element, shape, strides, and dtype."""

_NOTHING = nullcontext()


class UnitState(Enum):
    """What of a unit's full parameters is in memory. The verbs of ``ShardedUnit`` go through them in this order."""

    SHARDED = "nothing but this rank's shard"
    GATHERING = "a buffer that a gather fills"
    UNSHARDED = "a buffer, full and valid, parameters show placeholders"
    BOUND = "a buffer, full and valid, parameters are views of it"


class ShardedUnit(Unit):
    """A unit whose full parameters exist only while it computes, in a buffer of ``pool``."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters], pool: BufferPool) -> None:
        super().__init__(plan, flats)
        self._pool = pool
        self.place: Hashable = ("parameters", plan.slot)
        """What it takes a buffer for."""
        self.nbytes = sum(flat.layout.numel * flat.layout.compute_dtype.itemsize for flat in flats)
        self.in_backward = False  # acquired for its running backward
        self.span: Span | None = None  # of that, if somebody listens
        self.holders: list[tuple[dict[str, Any], str, str, nn.Parameter]] = []
        """Where each parameter is an attribute: the module's ``vars``, the name there, and the full one."""
        self.state = UnitState.SHARDED
        self.storage: Buffer | None = None  # where the full parameters are
        self.pins = 0
        self.content = 0
        """A number for the values of its weights, alike on all ranks, of which each comes once."""
        self.kin = frozenset((self.index, *plan.ancestors))
        """Units that stay while this one is in backward: itself, and those around it."""
        self.pending: list[Pending] = []
        """Transfers that still write into the storage."""
        self.sources = [flat.master if flat.weights is None else flat.weights for flat in flats]
        """What the full parameters are gathered from, of each layout: 1-D, wherever it rests."""
        self._what = f"parameters of unit '{self.name}'"
        self._views: list[Bound] = []
        self.filled_at = -1  # version of the weights in storage

    @property
    def resident(self) -> bool:
        """Whether the full, current weights are here or on their way."""
        return self.state is not UnitState.SHARDED and self.filled_at == self.version

    def launch(
        self,
        collectives: Collectives,
        streams: Streams,
        masters: Event,
        fetcher: Fetcher | None,
        version: int | None = None,
    ) -> OffloadError | None:
        """Start gathering the full parameters.

        Args:
            collectives: the wire.
            streams: where device work is ordered.
            masters: event after which the shards hold the current weights.
            fetcher: brings shards from where they rest; ``None``: all rest on the device.
            version: of the shards; ``None`` if they may change before all ranks have gathered them.

        Returns why this rank's part could not be fetched: it is NaN then, and the other ranks have to be told.
        Collective: every rank, in the agreed order of units.
        """
        failure: OffloadError | None = None
        pending: list[Pending] = []
        if not self.pins and self.state is not UnitState.SHARDED:
            self.release()
        self.altered = collectives.alters
        target = self._pool.take(self.place)
        target.unit = self
        buffers, views = target.made.get(self.index) or target.keep(self.index, self._bound_in)
        with untracked(), streams.gathering(target.free) if streams.beside else _NOTHING:
            if streams.beside:
                streams.wait(masters)
            for number, (flat, source, buffer) in enumerate(zip(self.flats, self.sources, buffers, strict=True)):
                content = (self.index, number), self.content
                if fetcher is None or not flat.rest.offloaded:
                    pending.append(collectives.all_gather(buffer, self._what, None, source, version, content))
                else:  # this rank's part of the gather must come, whatever happens
                    failure = _fetch(fetcher, source, collectives.own_range(buffer)) or failure
                    pending.append(collectives.all_gather(buffer, self._what, content=content))
        if self.pins:  # this rank only takes part: it has the weights in use already
            for handle in pending:
                handle.wait()
            self._pool.drop(target)
        else:
            self.storage, self._views, self.filled_at, self.pending = target, views, self.version, pending
            self.state = UnitState.GATHERING
        return failure

    def wait(self) -> None:
        """Order everything from now on behind the gather."""
        if self.state is UnitState.GATHERING:
            for handle in self.pending:
                handle.wait()
            self.pending = []
            self.state = UnitState.UNSHARDED

    def bind(self) -> None:
        """Let the user's parameters be views of the full values, and pin these."""
        if self.state is UnitState.GATHERING:
            self.wait()
        if self.state is UnitState.SHARDED or self.storage is None:
            self._refuse("be bound")
        self.pins += 1
        if self.state is not UnitState.BOUND:
            self.state = UnitState.BOUND
            if not self.held:
                show(self._views)

    def check_holders(self) -> None:
        """Raise ParameterAccessError if user code has put another parameter in the place of one of these."""
        for owner, key, name, parameter in self.holders:
            shown = owner["_parameters"].get(key)  # another tensor, for a moment, in `torch.func.functional_call`
            if shown is parameter:
                continue
            own = isinstance(shown, Tensor) and not isinstance(shown, nn.Parameter)
            if not own and not _holds(owner, parameter) and not called_functionally():
                raise ParameterAccessError(
                    f"Parameter '{name}' of unit '{self.name}' was replaced by another object after set-up "
                    "(load_state_dict(assign=True), a re-assigned attribute, or a re-tied weight). Change its values "
                    "inside `with lightning_zero.full_parameters(module):` instead."
                )

    def unbind(self, streams: Streams) -> bool:
        """Take back one ``bind``. After the last one parameters show placeholders, and the buffer keeps the values.

        Returns whether another unit may have the memory. Raises ``ParameterAccessError`` if user code wrote there.
        """
        self.pins -= 1
        if self.pins > 0:
            return False
        try:
            if not self.held and self.written:
                self.refuse_written()
        finally:
            if self.state is UnitState.BOUND:
                self.state = UnitState.UNSHARDED
                if not self.held:
                    hide(self._absent)
                if streams.beside and self.storage is not None:
                    self.storage.free = streams.mark()
        return True

    def release(self) -> None:
        """Give the buffer back: only this rank's shard stays. Raises ``RuntimeError`` if somebody computes with it."""
        if self.state is UnitState.SHARDED:
            return
        if self.pins or self.state is UnitState.BOUND:
            self._refuse(f"give its buffer back ({self.pins} pins)")
        if self.state is UnitState.GATHERING:
            self.wait()
        if self.storage is not None:
            self._pool.give(self.storage)
        self.storage, self._views, self.state = None, [], UnitState.SHARDED

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step; values are gathered anew when next needed."""
        if not self.held:
            self.show_placeholders()
        self.storage, self.pending, self._views, self.state = None, [], [], UnitState.SHARDED
        self.pins, self.outstanding, self.in_backward = 0, 0, False
        self.content += 1  # ranks have come to different places

    def view_at(self, place: SavedPlace) -> Tensor:
        """What autograd has saved as ``place``, where the full parameters are now."""
        if self.storage is None:
            self._refuse("be read")
        found: Tensor | None = self.storage.made.get(place)
        if found is not None:
            return found
        offset, shape, stride, dtype = place

        def make(memory: Tensor) -> tuple[Tensor, int]:
            with untracked():  # not ``as_strided``, whose result holds what it is a view of
                view = torch.empty(0, dtype=dtype, device=memory.device)
                return view.set_(memory.untyped_storage(), offset, shape, stride), 1

        return self.storage.keep(place, make)

    def name_at(self, offset: int) -> str:
        """The name of the parameter at a byte of its buffer."""
        layouts = [flat.layout for flat in self.flats]
        starts, _ = pack((layout.numel, layout.compute_dtype) for layout in layouts)
        found = self.name
        for start, layout in zip(starts, layouts, strict=True):
            for spec, first in zip(layout.parameters, layout.offsets, strict=True):
                if spec.numel and start + first * layout.compute_dtype.itemsize <= offset:
                    found = spec.name
        return found

    def _bound_in(self, memory: Tensor) -> tuple[tuple[list[Tensor], list[Bound]], int]:
        """The flat buffers of all layouts in a buffer's memory, and what parameters show then."""
        layouts = [flat.layout for flat in self.flats]
        buffers = carve(memory, layouts, [layout.compute_dtype for layout in layouts])
        bound = self._bindings(buffers)
        return (buffers, bound), len(buffers) + len(bound)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"Unit '{self.name}' is {self.state.name} and cannot {what}. This is an error in lightning_zero itself; "
            "please report it with the model that shows it."
        )


def _holds(owner: dict[str, Any], parameter: nn.Parameter) -> bool:
    """Whether a module, by its ``vars``, still has the parameter under another name: ``torch.nn.utils.prune`` and
    ``register_parametrization`` put it there, and take it back."""
    inside = (part for child in owner["_modules"].values() if child is not None for part in child.parameters())
    return any(part is parameter for part in (*owner["_parameters"].values(), *inside))


def _fetch(fetcher: Fetcher, source: Tensor, own: Tensor) -> OffloadError | None:
    """Bring a shard from where it rests. Returns why that was not possible: it is NaN then."""
    try:
        if source.dtype == own.dtype:
            fetcher.fetch(source, own)
        else:
            own.copy_(source)
    except OffloadError as error:
        own.fill_(float("nan") if own.dtype.is_floating_point else 0)
        return error
    return None
