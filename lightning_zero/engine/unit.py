"""Units, what user code wrote to their parameters, and the updated weights of replicated ones on the way to all ranks.

[Note: who may wait late]
The gather of updated weights is issued at the end of an optimizer step. Where the module computes in a dtype of its own
(mixed precision), its parameters show placeholders between steps, so that nobody can see a half-gathered weight: there
each unit's gather is waited for when the first module that owns one of its parameters, under any name, is called. Until
then its parameters go on showing NaN.

Where the module computes with what the user sees (one dtype), weights may be read and written at any moment after the
step, and no hook would notice. A torn read is the worst that could happen, so there the step itself waits. Placeholders
would not do, although they ask for their values. An address that was taken before is not counted as an alias is, and
shows old values. What is written in C++ and gets the parameter without asking torch reads NaN, where it reads weights
now. And a forked process, a loader's worker, has no thread that a gather could arrive at. It would save as much as a
forward takes, at most: of 10M at 200 Mbit/s 0.84 s of a step of 2.1 s are waited for, and 0.80 s (``zero1``) or 0.77 s
(``zero2``) if only forwards wait; 0.75 s and 0.51 s of 2.8 s where a forward takes 0.3 s. Gathers that begin while the
next unit is stepped on would save less: all steps take 10 ms.

[Note: weights that are read where no module is called]
``F.linear(x, self.head.weight)`` in a training step reads a weight that no forward has brought. Its parameter is absent
then (``shards/binding.py``), asks for its values, and gets them. Dynamo cannot trace that, so where parts of the module
are compiled everything is waited for at the beginning of a scope.

[Note: who may write]
A rank has its result before the others have read its part. Until then nothing may be written to it. The engine waits
for them before it writes, at the next step. User code may not write to these copies at all: its masters are of another
dtype, so what is written is refused at the end of the scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero._torch import is_compiled_module, untracked, version_of
from lightning_zero.comm import Collectives, Content, Pending
from lightning_zero.config import Tier
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.errors import ParameterAccessError
from lightning_zero.offload.transfers import Copy, Transfer, Transfers
from lightning_zero.plan import UnitPlan
from lightning_zero.shards.binding import (
    Bound,
    absent_kind,
    binding_of,
    get_data,
    hide,
    original_kind,
    set_data,
    show,
    shown_kind,
)
from lightning_zero.shards.slice import FlatParameters, checksum, views_of

__all__ = ["PublishedWeights", "ReplicatedUnit", "Unit"]


class Unit:
    """What both kinds of units share: a plan, its flat parameters, and a version that counts changes of the weights."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.index = plan.index
        self.name = plan.name or "(root)"
        self.flats = tuple(flats)
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        placeholders = [placeholder for flat in flats for placeholder in flat.placeholders]
        self._absent: list[Bound] = [
            (parameter, placeholder, absent_kind(original_kind(parameter)))
            for parameter, placeholder in zip(self.parameters, placeholders, strict=True)
        ]
        self._positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        self._versions = [parameter._version for parameter in self.parameters]
        self.version = 0
        # Forward calls of the running step whose backward has not started: their gradients are still to come.
        self.outstanding = 0
        # The user's parameters show full values of their own (``full_parameters``) and must go on doing so.
        self.held = False
        self.altered = ""  # how the wire changes what it computes with, in words
        self._returning: Transfer | None = None

    def show_placeholders(self) -> None:
        """Let the user's parameters stand for values that are not there."""
        hide(self._absent)

    def _bindings(self, buffers: Sequence[Tensor]) -> list[Bound]:
        """Each of the user's parameters, the view of ``buffers`` that holds its full value, and its class then."""
        return [
            (parameter, view, shown_kind(original_kind(parameter)))
            for buffer, flat in zip(buffers, self.flats, strict=True)
            for parameter, view in zip(flat.parameters, views_of(buffer, flat.layout), strict=True)
        ]

    def void(self, parameter: nn.Parameter) -> None:
        """Let a graph that has saved the parameter notice that it was changed."""
        torch.autograd.graph.increment_version(parameter)
        self._versions[self._positions[id(parameter)]] += 1

    @property
    def written(self) -> bool:
        """Whether user code has written to parameters since ``forget_written``. Only while they show values."""
        return list(map(version_of, self.parameters)) != self._versions

    def note_assigned(self, parameter: nn.Parameter) -> None:
        """Note that a parameter is another tensor now, which its version does not tell."""
        self._versions[self._positions[id(parameter)]] -= 1

    def forget_written(self) -> None:
        """Begin anew to look for writes to parameters."""
        self._versions = [parameter._version for parameter in self.parameters]

    def _written_names(self) -> list[str]:
        names = [spec.name for flat in self.flats for spec in flat.layout.parameters]
        versions = zip(names, self.parameters, self._versions, strict=True)
        return [name for name, parameter, before in versions if parameter._version != before]

    def refuse_written(self) -> None:
        """Raise ParameterAccessError: user code wrote to values that are gathered, or rounded, for a while only."""
        name = self._written_names()[0]
        self.forget_written()
        raise ParameterAccessError(
            f"'{name}' was written to while its values were gathered for a forward or backward. They are let go "
            "afterwards, and the masters that the optimizer updates are other memory, so what was written would be "
            "lost. Write between steps, for example in `on_train_batch_end`: inside `with "
            "lightning_zero.full_parameters(module):`, through `lightning_zero.local_slices(module, write=True)`, or "
            "by `lightning_zero.ema_update(teacher, student, momentum)`, on every rank."
        )

    def send_back(self, transfers: Transfers) -> None:
        """Start to bring updated masters from the host to the weights; those on disk went there piece by piece."""
        copies = [
            Copy(flat.master, flat.weights)
            for flat in self.flats
            if flat.layout.trainable and flat.rest.master is Tier.HOST and flat.weights is not None
        ]
        if copies:
            self._returning = transfers.back(copies)

    def settle_weights(self) -> None:
        """Order everything from now on behind ``send_back``. The host may still be reading the masters."""
        if self._returning is not None:
            self._returning.order()
            self._returning = None

    def forget_step(self) -> None:
        """Forget, after an error, what was written, and what ``send_back`` started, which is over by now."""
        self._returning = None
        self.forget_written()

    def parameters_changed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that some weights changed, so that a graph of the old ones is refused as plain torch refuses it."""
        self.version += 1
        torch.autograd.graph.increment_version(parameters)
        if len(parameters) == len(self._versions):  # all of them, as nearly always
            self._versions = [version + 1 for version in self._versions]
            return
        for parameter in parameters:
            self._versions[self._positions[id(parameter)]] += 1


class ReplicatedUnit(Unit):
    """A bucket whose full parameters stay in memory, in ``buffers`` of the compute dtype, one for each layout.

    Masters are views of these where the dtypes agree.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters], buffers: Sequence[Tensor]) -> None:
        super().__init__(plan, flats)
        self.buffers = tuple(buffers)
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self._views = self._bindings(buffers)
        # Another compute dtype must not be seen from outside a step: there the parameter shows its own dtype (and NaN).
        self.always_bound = all(flat.layout.dtype == flat.layout.compute_dtype for flat in flats)
        for flat in self.flats:
            if self.always_bound and flat.rest.offloaded:
                flat.shown = flat.weights

    def content_of(self, number: int) -> Content:
        """What is gathered into a buffer; ``None`` where the user's parameters are that, and so have to be exact."""
        return None if self.always_bound else ((self.index, number), self.version)

    def bind(self) -> None:
        """Let the user's parameters be the full values."""
        if not self.held:
            show(self._views)

    def unbind(self) -> None:
        """Let the user's parameters show placeholders, unless they can always show the truth."""
        if not self.always_bound and not self.held:
            self.show_placeholders()

    def views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Where the full values of each parameter are."""
        yield from ((parameter, view) for parameter, view, _ in self._views)

    def note_written(self, writes: ExternalWrites) -> bool:
        """Tell ``writes`` what user code wrote, and begin anew. Returns whether it did."""
        parameters = {one.spec.name: one.user for flat in self.flats for one in flat.shards}
        names = self._written_names()
        for name in names:
            writes.note(f"'{name}'", checksum(get_data(parameters[name])))
        self.forget_written()
        return bool(names)

    def bring_home(self) -> None:
        """Take values over from tensors that user code made parameters of (``set_``, ``parameter.data = ...``).

        Raises ``ValueError`` if one has another shape or dtype.
        """
        for parameter, view, _ in self._views:
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
                self.void(parameter)


class PublishedWeights:
    """The weights of replicated units between an optimizer step and their next use.

    Args:
        units: those whose parameters show placeholders between scopes.
        collectives: the wire.
        spans: told what is waited for.
        writes: told what user code wrote.
        module: which they are of.
    """

    def __init__(
        self,
        units: Sequence[ReplicatedUnit],
        collectives: Collectives,
        spans: Spans,
        writes: ExternalWrites,
        module: nn.Module,
    ) -> None:
        self._scoped = tuple(units)
        self._collectives = collectives
        self._spans = spans
        self._writes = writes
        self._module = module
        self._arriving: dict[ReplicatedUnit, list[Pending]] = {}
        self._lent: list[Pending] = []  # arrived; other ranks may still be reading this rank's part
        self._open = False  # parameters show values
        self._compiled: dict[str, bool] = {}  # by scope

    def publish(self, unit: ReplicatedUnit) -> None:
        """Start to bring a unit's new weights to all ranks. Collective: every rank, in the same order."""
        self.settle([unit])
        with self._spans.of(Phase.PUBLISH, unit.name, unit.nbytes), untracked():
            what = f"parameters of '{unit.name}'"
            self._arriving[unit] = [
                self._collectives.all_gather(buffer, what, content=unit.content_of(number))
                for number, buffer in enumerate(unit.buffers)
            ]

    def after_step(self, inside: bool) -> None:
        """Wait for what cannot be waited for later. ``inside``: of a scope, where parameters are in use."""
        if inside or self._open or self._collectives.world_size == 1:
            self.settle()
        else:
            self.settle([unit for unit in self._arriving if unit.always_bound])

    def settle(self, units: Iterable[ReplicatedUnit] | None = None) -> None:
        """Wait until nothing is on its way any more, in either direction, of some units or of all.

        Raises ``CommunicationError`` if a peer died.
        """
        self._receive(list(self._arriving) if units is None else units)
        while self._lent:
            self._lent.pop(0).wait()

    def bind(self, scope: str | None = None) -> None:
        """Let parameters show their values.

        Of a ``scope`` that begins, what its modules bring themselves is left for them. ``None``: everything is needed.
        """
        if self._arriving and (scope is None or self._is_compiled(scope)):
            self._receive(list(self._arriving))
        self._open = True
        for unit in self._scoped:
            if unit not in self._arriving:
                unit.bind()

    def unbind(self) -> None:
        """Let parameters show placeholders again. Raises ``ParameterAccessError`` if user code wrote to one."""
        self._open = False
        try:
            for unit in self._scoped:
                if unit not in self._arriving and not unit.held and unit.written:
                    unit.refuse_written()
        finally:
            for unit in self._scoped:
                unit.unbind()

    def bring(self, units: Iterable[ReplicatedUnit]) -> None:
        """Parameters of these units are about to be computed with; not between scopes."""
        if self._arriving and self._open:
            self._receive(units)

    def abandon(self) -> None:
        """Leave what is under way to the wire, after an error."""
        under_way = [handle for handles in self._arriving.values() for handle in handles]
        self._collectives.abandon([*under_way, *self._lent])
        self._arriving.clear()
        self._lent.clear()

    def _is_compiled(self, scope: str) -> bool:
        if scope not in self._compiled:
            self._compiled[scope] = any(is_compiled_module(module) for module in self._module.modules())
        return self._compiled[scope]

    def _receive(self, units: Iterable[ReplicatedUnit]) -> None:
        for unit in units:
            if unit not in self._arriving:
                continue
            with self._spans.of(Phase.WAIT_PUBLISH, unit.name, unit.nbytes):
                for handle in self._arriving[unit]:
                    handle.receive()
            self._lent += self._arriving.pop(unit)
            if self._open:
                unit.bind()
