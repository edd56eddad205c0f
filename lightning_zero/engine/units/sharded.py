"""A unit whose full parameters exist only while it computes: its slot, its states, and parameters bound to views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_zero._torch import called_functionally, storage_key, untracked, users_of, version_of
from lightning_zero.comm import Collectives, Pending, Streams
from lightning_zero.comm.streams import Event
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.events import Span
from lightning_zero.engine.units.unit import Unit
from lightning_zero.errors import OffloadError, ParameterAccessError
from lightning_zero.offload.transfers import Fetcher
from lightning_zero.plan import FlatLayout, UnitPlan, pack
from lightning_zero.shards.binding import Bound, hide, show
from lightning_zero.shards.slice import FlatParameters

__all__ = ["ShardedUnit", "Slot", "UnitState", "carve"]

_NOTHING = nullcontext()
_detach = Tensor.detach  # of any class


class UnitState(Enum):
    """What of a unit's full parameters is in memory. The verbs of ``ShardedUnit`` go through them in this order."""

    SHARDED = "nothing but this rank's shard"
    GATHERING = "its slot, being filled by a gather"
    UNSHARDED = "its slot, full and valid, parameters show placeholders"
    BOUND = "its slot, full and valid, parameters are views of it"


def carve(buffer: Tensor, layouts: Sequence[FlatLayout], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Flat buffers of several layouts, each of its dtype, one after the other in a 1-D byte buffer."""
    parts = [(layout.numel, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
    starts, _ = pack(parts)
    with untracked():
        return [
            buffer.narrow(0, start, numel * dtype.itemsize).view(dtype)
            for start, (numel, dtype) in zip(starts, parts, strict=True)
        ]


@dataclass(eq=False)
class Slot:
    """A byte buffer that holds one unit at a time, and is kept for the life of the engine.

    Args:
        buffer: 1-D uint8.
        owner: what is in it now (a unit, or the index of one), or ``None``.
        pins: how many users forbid that another unit takes it.
        free: device-side event after which the memory may be overwritten.
        vacant: whether its pages were given back, between steps.
    """

    buffer: Tensor
    owner: Any = None
    pins: int = 0
    free: Event = None
    vacant: bool = False
    last: Any = None  # the unit that was gathered here last
    views: dict[Any, Tensor] = field(default_factory=dict)  # what autograd has saved of it, each kind once
    key: int = field(init=False)
    users: int = field(init=False)  # tensors that are the engine's own
    alone: int = field(init=False)  # those of them that were there first

    def __post_init__(self) -> None:
        self.key = storage_key(self.buffer)
        self.users = self.alone = users_of(self.key)

    @property
    def shared(self) -> bool:
        """Whether tensors of the user's lie in this memory. Only while no parameter shows it."""
        return users_of(self.key) > self.users

    def save(self, key: Any, tensor: Tensor) -> Tensor:
        """The view to keep for autograd of a tensor of this ``key`` in this memory."""
        view = self.views[key] = _detach(tensor)
        self.users += 1
        return view

    def vacate(self, wire: Collectives) -> None:
        """Give the pages back, if nobody needs what is there."""
        if not (self.vacant or self.pins or self.owner is not None or self.shared):
            wire.vacate(self.buffer)
            self.vacant = True

    def occupy(self, wire: Collectives) -> None:
        """Have pages again, before anything is written there."""
        if self.vacant:
            wire.occupy(self.buffer)
            self.vacant = False

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> Slot:
        """A slot with fresh memory."""
        with untracked():
            return cls(torch.empty(nbytes, dtype=torch.uint8, device=device))


class ShardedUnit(Unit):
    """A unit whose full parameters exist only while it computes, always in the same ``slot`` if that is free."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters], slot: Slot) -> None:
        super().__init__(plan, flats)
        self.nbytes = sum(flat.layout.numel * flat.layout.compute_dtype.itemsize for flat in flats)
        self.in_backward = False  # acquired for its running backward
        self.span: Span | None = None  # of that, if somebody listens
        self.holders: list[tuple[dict[str, Any], str, str, nn.Parameter]] = []
        """Where each parameter is an attribute: the module's ``vars``, the name there, and the full one."""
        self.state = UnitState.SHARDED
        self.storage: Slot | None = None  # where the full parameters are: home, or memory for this once
        self.pins = 0
        self.kept = False
        """Whether it holds on to its storage until the phase ends, because user code wrote there."""
        self.content = 0
        """A number for the values of its weights, alike on all ranks, of which each comes once."""
        self.kin = frozenset((self.index, *plan.ancestors))
        """Units that stay while this one is in backward: itself, and those around it."""
        self.pending: list[Pending] = []
        """Transfers that still write into the storage."""
        self.sources = [flat.master if flat.weights is None else flat.weights for flat in flats]
        """What the full parameters are gathered from, of each layout: 1-D, wherever it rests."""
        self._what = f"parameters of unit '{self.name}'"
        self._settle(slot)
        self._views = self.home_views
        self.filled_at = -1  # version of the weights in storage
        self._scratch: Slot | None = None

    @property
    def memory(self) -> Sequence[Tensor]:
        return () if self.storage is None else (self.storage.buffer,)

    def held_views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.resident:
            self.wait()
            yield from ((parameter, view) for parameter, view, _ in self._views)

    def rehouse(self, slot: Slot) -> None:
        """Be gathered into another slot from now on. Gives up what is in the one before."""
        if self.storage is self.home:
            self.release()
        self.home.users -= self._home_users
        self._settle(slot)
        if self.storage is None:
            self._views = self.home_views

    def home_tensors(self) -> list[Tensor]:
        """What this unit itself has in its slot."""
        return [*self._home_buffers, *(view for _, view, _ in self.home_views)]

    def _settle(self, slot: Slot) -> None:
        before = users_of(slot.key)
        self.home = slot
        self._home_buffers = self._carve(slot)
        self.home_views = self._bindings(self._home_buffers)
        self._home_users = users_of(slot.key) - before
        slot.users += self._home_users

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
        """Start gathering the full parameters, into the slot unless somebody still computes there.

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
        home, pending = self.home, []
        if not self.pins and self.state is not UnitState.SHARDED:
            self.release()
        self.altered = collectives.alters
        if not self.pins and not home.pins:
            if home.owner is not None:
                home.owner.release()
            home.occupy(collectives)
            target, buffers = home, self._home_buffers
        else:
            target = Slot.allocate(home.buffer.numel(), home.buffer.device)
            buffers = self._carve(target)
            if self.pins:
                self._scratch = target
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
        if target is self._scratch:  # this rank only takes part: it has the weights in use already, or never needs them
            for handle in pending:
                handle.wait()
            self._scratch = None
        else:
            self._fill(target, self.home_views if target is home else self._bindings(buffers), pending)
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
        self.storage.pins += 1
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

    def unbind(self, streams: Streams, writes: ExternalWrites) -> bool:
        """Take back one ``bind``. After the last one parameters show placeholders, and the slot keeps the values.

        If user code wrote to them, ``writes`` is told, and the unit holds on to its storage until ``write_back``.

        Returns whether another unit may have the memory. Raises ``ParameterAccessError`` if what was written cannot be
        taken over.
        """
        self.pins -= 1
        if self.storage is not None:
            self.storage.pins -= 1
        if self.pins > self.kept:
            return False
        written = self._handed or list(map(version_of, self.parameters)) != self._versions
        if written and not self.held and self.note_written(writes) and not self.kept:
            self.kept = True
            self.pins += 1
            if self.storage is not None:
                self.storage.pins += 1
        if self.state is UnitState.BOUND:
            self.state = UnitState.UNSHARDED
            if not self.held:
                hide(self._absent)
            if streams.beside and self.storage is not None:
                self.storage.free = streams.mark()
        return not self.kept

    def write_back(self, collectives: Collectives) -> None:
        """Take this rank's slice of what was written over, when no rank gathers from the masters any more.

        Raises ``OffloadError`` if a disk failed.
        """
        self.kept = False
        self.pins -= 1
        if self.storage is None:
            return
        self.storage.pins -= 1
        with untracked():
            for flat, buffer in zip(self.flats, self._carve(self.storage), strict=True):
                if flat.layout.compute_dtype == flat.layout.dtype:
                    flat.master.copy_(collectives.own_range(buffer))
                    flat.refresh()
        if self.storage is not self.home and not self.pins:
            self.release()

    def release(self) -> None:
        """Give the slot up: only this rank's shard stays. Raises ``RuntimeError`` if somebody computes with it."""
        if self.state is UnitState.SHARDED:
            return
        if self.pins or self.state is UnitState.BOUND:
            self._refuse(f"give its slot up ({self.pins} pins)")
        if self.state is UnitState.GATHERING:
            self.wait()
        if self.storage is not None and self.storage.owner is self:
            self.storage.owner = None
        self.storage = None
        self._views = self.home_views
        self.state = UnitState.SHARDED

    def poison(self, streams: Streams) -> None:
        """Fill the memory with NaN and give it up, so that whoever kept a stale view computes NaN, not nonsense."""
        if self.state is not UnitState.UNSHARDED or self.pins or self.storage is None:
            return
        with untracked():
            for flat, buffer in zip(self.flats, self._carve(self.storage), strict=True):
                if flat.layout.compute_dtype.is_floating_point:
                    buffer.fill_(float("nan"))
        self.storage.free = streams.mark()
        self.release()

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step; values are gathered anew when next needed."""
        if not self.held:
            self.show_placeholders()
        if self.storage is not None:
            self.storage.pins = 0
            self.storage.owner = None
        self.storage, self.pending, self._views, self.state = None, [], self.home_views, UnitState.SHARDED
        self.pins, self.outstanding, self.in_backward, self.kept = 0, 0, False, False
        self.content += 1  # ranks have come to different places

    def _carve(self, slot: Slot) -> list[Tensor]:
        layouts = [flat.layout for flat in self.flats]
        return carve(slot.buffer, layouts, [layout.compute_dtype for layout in layouts])

    def _fill(self, storage: Slot, views: list[Bound], pending: list[Pending]) -> None:
        """Note where the current weights are, or will be when what is ``pending`` has come."""
        if self.state is not UnitState.SHARDED:
            self._refuse("be gathered")
        self.storage, self._views, self.filled_at, self.pending = storage, views, self.version, pending
        storage.owner = storage.last = self
        self.state = UnitState.GATHERING

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
