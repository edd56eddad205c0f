"""Units: parameters that are gathered together, and what of them is in memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_zero._torch import forward_hooks, no_subclasses, untracked, version_of
from lightning_zero.comm import Pending, Streams
from lightning_zero.comm.streams import Event
from lightning_zero.config import Tier
from lightning_zero.engine.agreement import ExternalWrites, Means
from lightning_zero.engine.pool import Buffer
from lightning_zero.errors import OffloadError, ParameterAccessError
from lightning_zero.plan.plan import UnitPlan, pack
from lightning_zero.shards.binding import Faces, binding_of, get_data, set_data
from lightning_zero.shards.slice import FlatParameters, views_of

__all__ = ["REPORT", "ReplicatedUnit", "SavedPlace", "ShardedUnit", "Unit"]

SavedPlace = tuple[Any, torch.Size, tuple[int, ...], torch.dtype]
"""What of a buffer a tensor shows: first element, shape, strides, and dtype."""

REPORT = "This is an error in lightning_zero itself; please report it with the model that shows it."

_NOTHING = nullcontext()


class Unit:
    """What both kinds of units share: a plan, its flat parameters, and a version that counts changes of the weights."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.flats = tuple(flats)
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self.version = 0
        self.outstanding = 0
        """Forward calls of the running step whose backward has not started: their gradients are still to come."""
        self.held = False
        """Whether the user's parameters show full values of their own (``full_parameters``), and must go on to."""
        self._faces = Faces(self.parameters, [placeholder for flat in flats for placeholder in flat.placeholders])
        self._versions = list(map(version_of, self.parameters))

    @property
    def index(self) -> int:
        """Its place among the engine's units."""
        return self.plan.index

    @property
    def name(self) -> str:
        """For people: the path of its module."""
        return self.plan.name or "(root)"

    @property
    def written(self) -> bool:
        """Whether user code has written to parameters since ``forget_written``. Only while they show values."""
        with no_subclasses():  # as in ``show``
            return list(map(version_of, self.parameters)) != self._versions

    def forget_written(self) -> None:
        """Begin anew to look for writes to parameters."""
        self._versions = list(map(version_of, self.parameters))

    def count(self, parameter: nn.Parameter, writes: int) -> None:
        """Note that a parameter's version says ``writes`` more than user code has written to it."""
        self._versions[next(i for i, known in enumerate(self.parameters) if known is parameter)] += writes

    def written_names(self) -> list[str]:
        """The parameters that user code has written to."""
        names = [spec.name for flat in self.flats for spec in flat.layout.parameters]
        versions = zip(names, self.parameters, self._versions, strict=True)
        return [name for name, parameter, before in versions if parameter._version != before]

    def refuse_written(self) -> NoReturn:
        """Raise ParameterAccessError: user code wrote to values that are gathered, or rounded, for a while only."""
        name = self.written_names()[0]
        self.forget_written()
        raise ParameterAccessError(
            f"'{name}' was written to while its values were gathered for a forward or backward. They are let go "
            "afterwards, and the masters that the optimizer updates are other memory, so what was written would be "
            "lost. Write between steps, for example in `on_train_batch_end`: inside `with "
            "lightning_zero.full_parameters(module):`, through `lightning_zero.local_slices(module, write=True)`, or "
            "by `lightning_zero.ema_update(teacher, student, momentum)`, on every rank."
        )

    def parameters_changed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that some weights changed, so that a graph of the old ones is refused as plain torch refuses it."""
        self.version += 1
        torch.autograd.graph.increment_version(parameters)
        if len(parameters) == len(self._versions):  # all of them, as nearly always
            self._versions = list(map((1).__add__, self._versions))
        else:
            for parameter in parameters:
                self.count(parameter, 1)


class ReplicatedUnit(Unit):
    """A bucket whose full parameters stay in memory, in ``buffers`` of the compute dtype, one for each layout.

    Masters are views of these where the dtypes agree.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters], buffers: Sequence[Tensor]) -> None:
        super().__init__(plan, flats)
        self.buffers = tuple(buffers)
        pairs = zip(buffers, self.flats, strict=True)
        self._views = [view for buffer, flat in pairs for view in views_of(buffer, flat.layout)]
        # Another compute dtype must not be seen from outside a step: there the parameter shows its own dtype (and NaN).
        self.always_bound = all(flat.layout.dtype == flat.layout.compute_dtype for flat in flats)
        for flat in self.flats:
            if self.always_bound and flat.rest.offloaded:
                flat.shown = flat.weights

    @property
    def nbytes(self) -> int:
        """Of the full parameters."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def bind(self) -> None:
        """Let the user's parameters be the full values."""
        if not self.held:
            self._faces.show(self._views)

    def unbind(self) -> None:
        """Let the user's parameters show placeholders, unless they can always show the truth."""
        if not self.always_bound and not self.held:
            self._faces.hide()

    def views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Where the full values of each parameter are."""
        yield from zip(self.parameters, self._views, strict=True)

    def note_written(self, writes: ExternalWrites) -> None:
        """Tell ``writes`` what user code wrote, and begin anew."""
        slices = {one.spec.name: one for flat in self.flats for one in flat.shards}
        for name in self.written_names():
            writes.note(f"'{name}'", slices[name].checksum(get_data(slices[name].user)))
        self.forget_written()

    def bring_home(self) -> None:
        """Take values over from tensors that user code made parameters of (``set_``, ``parameter.data = ...``).

        Raises ``ValueError`` if one has another shape or dtype.
        """
        for parameter, view in self.views():
            data = get_data(parameter)
            if data.shape != view.shape or data.dtype != view.dtype:
                raise ValueError(
                    f"A parameter of '{self.name}' has shape {list(data.shape)} and {data.dtype} now, expected "
                    f"{list(view.shape)} and {view.dtype}. A sharded parameter cannot change its shape or dtype."
                )
            if data.numel() and (data.data_ptr() != view.data_ptr() or data.stride() != view.stride()):
                value = data.clone()  # it may be another view of the same memory
                if (binding := binding_of(parameter)) is not None:
                    binding.part()
                with untracked():
                    view.copy_(value)
                set_data(parameter, view)
                torch.autograd.graph.increment_version(parameter)  # a graph that has saved it shall notice
                self.count(parameter, 1)


class ShardedUnit(Unit):
    """A unit whose full parameters exist only while it computes, in a buffer of the pool."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        super().__init__(plan, flats)
        self.place: Hashable = ("parameters", plan.slot)
        """What it takes a buffer for."""
        self.holders: list[tuple[nn.Module, str, str, nn.Parameter]] = []
        """Where each parameter is an attribute: the module, the name there, and the full one."""
        self.storage: Buffer | None = None  # where the full parameters are
        self.places: dict[Any, SavedPlace] = {}
        """What of its buffer a parameter shows, by its id, and views that were saved, by themselves."""
        self.pending: list[Pending] = []  # transfers that still write there
        self.pins = 0  # who computes with them
        self.content = 0
        """A number for the values of its weights, alike on all ranks, of which each comes once."""

    @property
    def nbytes(self) -> int:
        """Of the full parameters."""
        return sum(flat.layout.numel * flat.layout.compute_dtype.itemsize for flat in self.flats)

    def launch(self, means: Means, masters: Event, version: int | None = None) -> OffloadError | None:
        """Start gathering the full parameters.

        ``masters``: event after which the shards hold the current weights. ``version``: of the shards; ``None`` if they
        may change before all ranks have gathered them.

        Returns why this rank's part could not be fetched: it is NaN then, and the other ranks have to be told.
        Collective: every rank, in the agreed order of units.
        """
        failure: OffloadError | None = None
        what = f"parameters of unit '{self.plan.name or '(root)'}'"
        pending: list[Pending] = []
        if self.storage is not None and not self.pins:
            self.release()
        collectives, streams, index = means.collectives, means.tiers.streams, self.plan.index
        target = means.pool.take(self.place, index)
        target.unit, target.version = self, self.version
        form = means.pool.forms[index]
        rooms, target.views = target.made.get(form) or target.keep(form, form)
        if not self.places:  # the same in every buffer
            pairs = zip(self.parameters, target.views, strict=True)
            self.places = {id(p): (v.storage_offset(), v.shape, v.stride(), v.dtype) for p, v in pairs}
        with untracked(), streams.gathering(target.free) if streams.beside else _NOTHING:
            if streams.beside:
                streams.wait(masters)
            for number, (flat, (buffer, _, _)) in enumerate(zip(self.flats, rooms, strict=True)):
                content, source = ((index, number), self.content), flat.source
                if flat.rest.master is not Tier.DEVICE:
                    own = collectives.own_range(buffer)
                    try:
                        if source.dtype == own.dtype:
                            means.tiers.fetch(source, own)
                        else:
                            own.copy_(source)
                    except OffloadError as error:  # this rank's part of the gather must come all the same
                        own.fill_(float("nan") if own.dtype.is_floating_point else 0)
                        failure = error
                    pending.append(collectives.all_gather(buffer, what, content=content))
                else:
                    pending.append(collectives.all_gather(buffer, what, source, version, content))
        if self.pins:  # this rank only takes part: it has the weights in use already
            for handle in pending:
                handle.wait()
            means.pool.drop(target)
        else:
            self.storage, self.pending = target, pending
        return failure

    def wait(self) -> None:
        """Order everything from now on behind the gather."""
        for handle in self.pending:
            handle.wait()
        self.pending = []

    def bind(self) -> None:
        """Let the user's parameters be views of the full values, and pin these."""
        for handle in self.pending:
            handle.wait()
        self.pending = []
        if self.storage is None:
            raise RuntimeError(f"Unit '{self.name}' cannot be bound. {REPORT}")
        self.pins += 1
        if self.pins == 1 and not self.held:
            self._faces.show(self.storage.views)

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
            if not self.held:
                self._faces.hide()
            if streams.beside and self.storage is not None:
                self.storage.free = streams.mark()
        return True

    def release(self) -> None:
        """Give the buffer back: only this rank's shard stays. Raises ``RuntimeError`` if somebody computes with it."""
        if self.storage is None:
            return
        if self.pins:
            raise RuntimeError(f"Unit '{self.name}' cannot give its buffer back ({self.pins} pins). {REPORT}")
        if self.pending:
            self.wait()
        self.storage.pool.give(self.storage)
        self.storage = None

    def abandon(self) -> None:
        """Forget every claim after an error in the middle of a step; values are gathered anew when next needed."""
        if not self.held:
            self._faces.hide()
        self.storage, self.pending, self.pins, self.outstanding = None, [], 0, 0
        self.content += 1  # ranks have come to different places

    @property
    def read_in_backward(self) -> bool:
        """Whether the backward of an embedding may read its weight. With no hooks but the engine's it does not."""
        (module, _, _, weight), *_ = self.holders
        of_module = *forward_hooks(module)[:2], module._backward_hooks, module._backward_pre_hooks
        of_weight = weight._backward_hooks, weight._post_accumulate_grad_hooks
        hooks = [len(table or ()) for table in (*of_module, *of_weight)]
        return hooks != [1, 1, 0, 0, 0, 1] or "forward" in vars(module)

    def view_at(self, place: SavedPlace) -> Tensor:
        """What autograd has saved as ``place``, where the full parameters are now."""
        if self.storage is None:
            raise RuntimeError(f"The weights of unit '{self.name}' cannot be read. {REPORT}")
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
