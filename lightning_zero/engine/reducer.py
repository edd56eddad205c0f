"""Gradients on their way: from parameters through a full buffer into this rank's shard, in one order on all ranks.

[Note: one order, and nothing left over]
Reductions pair up by order, so every rank launches buckets in the same one: a bucket that is ready waits for those
before it. At the end of the backward the ranks tell each other which buckets they touched, and every rank launches the
rest that *anybody* touched, with zeros for what did not arrive. A branch that only some ranks took, or a unit nobody
used, therefore neither hangs nor skews anything, and a parameter without a gradient on every rank is left alone by the
optimizer. The order starts as the plan's and becomes the one in which rank 0's buckets were ready in the first
backward.

[Note: copy mode]
Autograd hands each gradient over in a fresh tensor; the hook copies it into its place in the full buffer and drops it.
Preset ``.grad`` views would save nothing (they cost a zero pass and a read-modify-write) and lose the first gradients
whenever a parameter's gradient arrives before its unit was seen.

[Note: one backward may reduce a bucket more than once]
A parameter whose unit looked finished can still get a gradient (activation checkpointing runs a backward within the
backward). The bucket then starts another *round*; rounds of one backward add up.

[Note: averages between groups, of shards on the host]
What is averaged between shard groups is the sum of all micro-steps, which rests in the shard. A wire for CPU ranks
averages it there. That of an accelerator does not reach the host: so the sum is made on the device, of what the host
has and of what the group has just reduced, and leaves for the host when it is averaged. It has a part of the full
buffer that the reduction has read, if that is of its dtype.

[Note: parts of a gradient]
Autograd adds the parts of such a gradient up as they arrive, out of place: what a linear layer gives is a transposed
view, whose memory somebody else might hold. So there are three tensors of the weight's size for a moment: the sum so
far, the new part, and both together. Here each layer computes with an alias of the weight, which its part passes on the
way to the weight. The first one goes on to autograd, which keeps it until the others have come. Each of these is added
to it where it lies, in the order of autograd's own sum, and goes no further. Of an embedding's, only the rows are made
that were looked up. So there is one tensor of the weight's size, and every bit is the same.

Where the weight itself is used as well (``F.linear(x, self.embedding.weight)``), autograd adds that part, and has then
let go of the first one. A part that finds it gone becomes a first one itself.

Where memory for the whole gradient is there anyway and nobody else's, the first part is put there at once, and what
autograd keeps is an alias of it: there is none but that memory. Only if autograd does nothing with it but keep it for
the engine: a gradient that the user asked for, or has a hook on, is memory of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lightning_zero._torch import (
    WeakStorage,
    bytes_of,
    compiler_of_frames,
    current_graph_task,
    foreach_zero,
    in_function_transform,
    is_compiled_module,
    is_tracing,
    make_subclass,
    no_subclasses,
    untracked,
    will_accumulate,
)
from lightning_zero.comm import PATIENCE_SECONDS, Collectives, ControlGroup, Pending
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.engine.pool import Buffer, BufferPool, FlatBuffer, carve
from lightning_zero.engine.unit import Unit
from lightning_zero.offload.transfers import Copy, Transfer, Transfers
from lightning_zero.plan import sums_in_place
from lightning_zero.shards.binding import set_data
from lightning_zero.shards.slice import FlatParameters, cut

__all__ = ["GradientBucket", "GradientReducer", "TiedLayer", "put_gradient", "report_width", "tied_layers"]


_FEW = 64  # elements
_embedding_gradient: Any = torch.ops.aten.embedding_dense_backward


class _Sum:
    """The first part of a gradient that has come in the running backward.

    Args:
        hold: puts it where the gradient is to be, if that can be, and returns it.
    """

    def __init__(self, hold: Callable[[Tensor], Tensor]) -> None:
        self._hold = hold
        self._first: TensorWeakRef | None = None
        self._backward = -1

    def begin(self, part: Tensor, target: Any) -> Tensor:
        """Let the others be added to a part on its way to ``target``, as long as autograd has it. Returns it."""
        if will_accumulate(target):
            part = self._hold(part)
        self._first, self._backward = TensorWeakRef(part), current_graph_task()
        return part

    @property
    def first(self) -> Tensor | None:
        """What to add to."""
        if self._first is None or self._backward != current_graph_task():
            return None
        first: Tensor | None = self._first()
        return first


class _Use(torch.autograd.Function):
    """An alias of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, parts: _Sum) -> Tensor:
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None or torch.is_grad_enabled():  # there is none; or a graph is made of it
            return gradient, None
        first = ctx.parts.first
        if first is None:
            return ctx.parts.begin(gradient, ctx.next_functions[0][0]), None
        first.add_(gradient)
        return None, None


class _LookUp(torch.autograd.Function):
    """``F.embedding``."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, parts: _Sum) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.parts = len(weight), parts
        ctx.padding = -1 if padding is None else padding % len(weight)
        return F.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        first = None if torch.is_grad_enabled() else ctx.parts.first
        if first is None:
            whole = _embedding_gradient(gradient, indices, ctx.rows, ctx.padding, False)
            if not torch.is_grad_enabled():
                whole = ctx.parts.begin(whole, ctx.next_functions[1][0])
            return None, whole, None, None
        rows, places = torch.unique(indices, return_inverse=True)
        part = _embedding_gradient(gradient, places, len(rows), -1, False)
        part[rows == ctx.padding] = 0
        first.index_add_(0, rows, part)
        return None, None, None, None


_use: Any = _Use.apply
_look_up: Any = _LookUp.apply


class _Rows(Tensor):
    """What an embedding has in the place of its weight: it sees the look-up, and stands for an alias elsewhere."""

    _layer: TiedLayer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.embedding and isinstance(args[1], _Rows) and not isinstance(args[0], _Rows):
            layer = args[1]._layer
            return _look_up(args[0], layer.weight, named.get("padding_idx"), layer.parts)
        with no_subclasses():
            return func(*(arg._layer.alias() if isinstance(arg, _Rows) else arg for arg in args), **named)


class TiedLayer:
    """One layer of a weight that others have too.

    Args:
        layer: computes with an alias between ``begin`` and ``end``.
        weight: of the layer.
        parts: of the weight's gradient, one for all of its layers.
    """

    def __init__(self, layer: nn.Module, weight: nn.Parameter, parts: _Sum) -> None:
        self.layer = layer
        self.weight = weight
        self.parts = parts
        self._shown: Tensor | None = None  # in the weight's place

    def alias(self) -> Tensor:
        """The weight, its gradient passing by."""
        alias: Tensor = _use(self.weight, self.parts)
        return alias

    def begin(self, *called: Any) -> None:
        """Before a forward of the layer, behind everything else that happens then."""
        watched = compiler_of_frames() is not None or is_tracing() or in_function_transform()
        own: dict[str, Any] = self.layer._parameters
        device = self.weight.device.type
        if watched or not torch.is_grad_enabled() or own.get("weight") is not self.weight:
            return
        # The user's autocast casts a weight once for all of its uses, and what is no parameter once for each.
        cached = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
        if cached or not self.weight.requires_grad:
            return
        if type(self.layer) is nn.Embedding and device == "cpu":  # elsewhere the host would wait for the rows
            rows = self._shown = make_subclass(_Rows, self.weight.detach())
            rows._layer = self
        else:
            self._shown = self.alias()
        own["weight"] = self._shown

    def end(self, *called: Any) -> None:
        """After it, whatever became of it, before anything else happens then."""
        own: dict[str, Any] = self.layer._parameters
        if self._shown is not None and own.get("weight") is self._shown:
            own["weight"] = self.weight
        self._shown = None


def tied_layers(
    module: nn.Module, tied: Collection[nn.Parameter], hold: Callable[[nn.Parameter, Tensor], Tensor]
) -> Iterator[TiedLayer]:
    """Every layer below ``module`` with a ``tied`` weight whose parts of its gradient can be added to one another.

    ``hold`` puts a first part where the weight's gradient is to be, if that can be, and returns it. None where
    something is compiled: it would meet the aliases.
    """
    parts = {weight: _Sum(partial(hold, weight)) for weight in tied}
    if not tied or any(is_compiled_module(child) for child in module.modules()):
        return
    for child in module.modules():
        weight = child._parameters.get("weight")
        if weight is not None and weight in tied and sums_in_place(child):
            yield TiedLayer(child, weight, parts[weight])


def put_gradient(gradient: Tensor, view: Tensor) -> None:
    """Copy a gradient to its place. It may be there already, or wait at the end of it in a narrower dtype.

    What else lies there is some view of it that user code has made.
    """
    offset, start, numel = gradient.data_ptr() - view.data_ptr(), 0, view.numel()
    if not 0 <= offset < view.nbytes:
        view.copy_(gradient)
    elif gradient.dtype == view.dtype or not gradient.is_contiguous():
        if offset or gradient.stride() != view.stride():
            view.copy_(gradient.clone())
    else:
        source, target = gradient.view(-1), view.view(-1)
        while numel - start > _FEW:
            end = (start + numel) // 2  # what is written up to there is nothing that is still to be read
            target[start:end].copy_(source[start:end])
            start = end
        target[start:].copy_(source[start:].clone())


class GradientBucket:
    """Gradients of one trainable layout.

    Args:
        index: place among all buckets of the engine, the same on every rank.
        unit: the unit the layout belongs to.
        flat: its parameters and shard parameters.
        shard: 1-D, of the master dtype; what the optimizer's ``.grad`` are views of. ``None``: memory that is there
            from a reduction on until nobody has a gradient in it any more.
        resident: the full buffer, where full gradients stay between micro-steps; ``None``: one is claimed per backward.
        apart: whether the buffer that is claimed is no other unit's for all of the backward.
        collectives: the wire.
        transfers: what brings reduced gradients to ``shard`` where that is on the host; ``None`` where it is not.

    A shard parameter's ``.grad`` is the truth about accumulation: ``None`` (after ``zero_grad``) means the next
    gradient replaces, anything else means it is added, exactly as on an ordinary parameter.
    """

    _parts: Sequence[Tensor] = ()  # of a shard that lasts, one for each parameter
    _sum: Tensor | None = None  # what leaves for the host, where it is averaged between groups on the device

    def __init__(
        self,
        index: int,
        unit: Unit,
        flat: FlatParameters,
        shard: Tensor | None,
        resident: Tensor | None,
        collectives: Collectives,
        transfers: Transfers | None = None,
        apart: bool = False,
    ) -> None:
        self.index = index
        self.unit = unit
        self.flat = flat
        self._shard = shard  # if it comes and goes, only in a backward
        self._lasts = shard is not None
        self._left: WeakStorage | None = None  # its memory, as long as anybody has it
        self.resident = resident
        self.layout = layout = flat.layout
        self.nbytes = layout.numel * layout.reduce_dtype.itemsize
        exact = transfers is None and layout.reduce_dtype == layout.dtype
        self._shares = resident is not None and exact  # the shard is this rank's range of the resident buffer,
        self._in_place = False  # and gradients are collected there now
        self._collectives = collectives
        self.transfers = transfers
        self._leaving: Transfer | None = None  # brings the reduced gradients to the host, out of the full buffer
        count = len(flat.parameters)
        self.numbers = [0] * count
        """How many gradients each parameter has had: of one that was cleared nobody may go on to use the memory."""
        self.grouped = False
        """Whether the averages in the shard are those of one shard group of several."""
        self.apart = apart
        self._held: dict[int, TensorWeakRef] = {}  # what autograd keeps of gradients whose other parts are to come
        self.arrived = [False] * count  # in the running round
        self.local = [False] * count  # holds unreduced gradients of earlier micro-steps
        self._further = False  # there was an earlier round in this backward: the shard holds gradients of some rank
        self.used = [False] * count  # had a gradient in it
        self.full: Tensor | None = None
        self.launched = False  # a reduction was started in the running backward
        self.dirty = False  # gradients arrived that no reduction has taken yet
        self.views: list[Tensor] | None = None
        self._gaps: list[Tensor] = []
        self.plain = False  # in this round gradients only have to be copied: nothing is added to anything
        self.missing = count  # gradients of the running round, while it is plain
        self._shard_parameters = [shard.parameter for shard in flat.shards]
        self.pending: Pending | None = None  # the reduction under way
        self.averaging: Pending | None = None  # what makes the shard's averages those of all shard groups
        self._what = f"gradients of '{unit.name}'"
        self._direct = False  # what the reduction under way ends with is in the shard
        # Where nothing has to be added to the shard, a reduction's result can be the shard as it is: it lies elsewhere
        # than the full buffer, and no one has to convert it.
        self._is_apart = resident is None and exact
        self.is_alone = self._is_apart and collectives.world_size == 1
        # In place, new gradients overwrite the reduced ones of earlier backwards; those wait here to be added again.
        self._carry: Tensor | None = None
        self._carried = [False] * count
        # Memory that lasts: the resident buffer, or the shard where gradients are collected there.
        lasting = resident if resident is not None else shard if self.is_alone else None
        self._lasting = None if lasting is None else FlatBuffer.of(lasting, layout)
        self.give_buffer(self._lasting if resident is not None else None)

    @property
    def shard(self) -> Tensor | None:
        """This rank's averages, if there are any."""
        if self._shard is not None or self._left is None:
            return self._shard
        storage = self._left.lock()
        return None if storage is None else bytes_of(storage).view(self.layout.dtype)

    def _memory(self, whole: bool = False) -> Tensor:
        """The shard, whose memory is taken if there is none. ``whole``: it is about to be overwritten as a whole."""
        if self._shard is None:
            self._shard = self.shard
        if self._shard is None:
            make = torch.empty if whole else torch.zeros
            self._shard = make(self.layout.shard_numel, dtype=self.layout.dtype, device=self.flat.master.device)
            self._left = WeakStorage(self._shard)
        return self._shard

    def replace(self, position: int, own: Tensor) -> None:
        """Let this rank's slice of a parameter's averaged gradient be ``own``: 1-D. Read once. Not in a backward."""
        view = cut(self._memory(), self.flat.slices)[position]
        view.copy_(own)
        self.numbers[position] += 1
        parameter = self._shard_parameters[position]
        if parameter is not None:
            parameter.grad = view
        if not self._lasts:
            self._shard = None

    @property
    def touched(self) -> bool:
        """Whether any gradient arrived in the running backward or is left from earlier micro-steps."""
        return True in self.arrived or True in self.used or True in self.local

    @property
    def holds(self) -> bool:
        """Whether there is a part of a gradient that other parts are to come to."""
        return bool(self._held)

    def drainable(self, seconds: float) -> bool:
        """Whether ``drain`` would return within ``seconds``."""
        return self.pending is None or self.pending.ready_within(seconds)

    def has_gradient(self, position: int) -> bool:
        """Whether this rank had a gradient for a parameter since the gradients were last cleared and published."""
        return self.arrived[position] or self.used[position] or self.still_local(position)

    def give_buffer(self, room: FlatBuffer | None) -> None:
        """Collect in ``room``, of the reduce dtype, from now on."""
        if self._leaving is not None:
            self._leaving.order()
        self.full, self.views, self._gaps = room or (None, None, [])
        self.plain = False
        self._in_place = self._shares and self.full is self.resident

    def collect_in_shard(self) -> bool:
        """Collect where the averages are to be, if no other rank adds to them and nothing is there. Returns whether."""
        if not self.is_alone or self.launched or True in self._keeps():
            return False
        self.give_buffer(self._lasting)
        return True

    def add(self, position: int, gradient: Tensor) -> None:
        """Take over a parameter's gradient, of full shape and any floating dtype. Read once."""
        if self.views is None:
            raise RuntimeError(f"A gradient of unit '{self.unit.name}' arrived before memory for it was claimed.")
        if not self.dirty and self._in_place:
            self._save_reduced()
        again = self.arrived[position] or (self.local[position] and self._has_grad(position))
        if self._carry is not None and not (again or self._further or self._has_grad(position)):
            self._carried[position] = False
        with untracked():
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.views[position]
            if position in self._held:
                held = self._held.pop(position)()
                if held is not None and held.data_ptr() != gradient.data_ptr():  # a backward's around this one
                    set_data(held, held.clone())
            if again:
                view.add_(gradient)
            else:
                put_gradient(gradient, view)
        self.local[position] = self.local[position] and again
        self.arrived[position], self.dirty = True, True
        self.plain = not self._held and self._carry is None and True not in self.local and not torch.is_grad_enabled()
        self.missing = self.arrived.count(False)

    def hold(self, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, full shape. Returns it: itself, if it cannot be there.

        What is returned may be added to until it arrives.
        """
        had = self.has_gradient(position) or self.launched
        if self.views is None or had or position in self._held:
            return part
        view = self.views[position].view(-1)
        if part.dtype != view.dtype and part.dtype.itemsize >= view.dtype.itemsize:
            return part
        with untracked():
            held = view.view(part.dtype)[-part.numel() or None :].view(part.shape)  # at its end, so that it can widen
            held.copy_(part)
        self._held[position], self.plain = TensorWeakRef(held), False
        return held

    def start_round(self) -> None:
        """Make room for gradients that arrive after this backward's reduction was launched."""
        self.drain()
        if self._leaving is not None:
            self._leaving.order()
        if self.averaging is not None and self._in_place and self.full is not None:
            # There, and some rank may join it only at the end of its backward.
            self.give_buffer(FlatBuffer.of(torch.empty_like(self.full), self.layout))
        self.plain, self._further = False, True
        self.used = [a or b or c for a, b, c in zip(self.used, self.arrived, self.local, strict=True)]
        self.arrived = [False] * len(self.arrived)
        self.local = [False] * len(self.local)

    def launch(self, patience: float, last: bool = True) -> None:
        """Start averaging over the ranks. Everything that did not arrive here counts as zero.

        ``patience``: seconds to wait for memory of the wire. ``last``: over those of all shard groups, as a step
        follows. Collective: every rank, in the agreed order of buckets.
        """
        if self.averaging is not None:
            self.settle()
        full, views = self.full, self.views
        if full is None or views is None:
            raise RuntimeError(f"No gradient memory was claimed for unit '{self.unit.name}'.")
        if full is self._shard and self.plain and not self.missing:  # all is there, and nobody else's is to come
            self._direct, self.launched, self.dirty, self.plain = True, True, False, False
            return
        if not self.dirty and self._in_place and True not in self.local:
            self._save_reduced()
        # What was cleared by zero_grad since it was put aside does not come back.
        if self._carry is not None and not self._further:
            self._carried = [kept and self._has_grad(i) for i, kept in enumerate(self._carried)]
        with untracked():
            empty = self._gaps
            if False in self.arrived:
                missing = [i for i, a in enumerate(self.arrived) if not a and not self.still_local(i)]
                empty = [*(views[position] for position in missing), *empty]
            if empty:
                foreach_zero(empty)
            self._direct = full is self._shard or (self._is_apart and True not in self._keeps())
            target = self._memory(whole=True) if self._direct else self._collectives.own_range(full)
            self.pending = self._collectives.reduce_scatter(full, target, self._what, patience, self.index)
            self.grouped = self._collectives.grouped
            if self.grouped and last:
                self.average_across()
        self.launched, self.dirty, self.plain = True, False, False

    def drain(self) -> None:
        """Wait for the reduction and add its result to the shard.

        On the host it is added in the background, until ``publish``; the full buffer is in use as long.
        """
        if self.pending is None:
            return
        if self.transfers is not None and not self._direct:
            copies = self._additions() if self._sum is None else [Copy(self._sum, self._memory())]
            self._leaving = self.transfers.out(copies, self.pending)
            self.pending = None
            return
        self.pending.wait()
        self.pending = None
        if self._direct:
            return
        with untracked():
            self._bring(() if self._in_place else self._additions())

    def average_across(self) -> None:
        """Make averages of a shard group those of all ranks, behind the reduction under way, until ``settle``.

        Collective: every rank, in one order.
        """
        self.settle()  # an earlier round
        copies: list[Copy] = []
        if self.transfers is not None and self.transfers.beside:
            self._sum = self._room_beside()
            copies = [Copy(self._memory(), self._sum)] if self.pending is None or True in self._keeps() else []
        if self.pending is not None and not self._direct:
            # What is added to what is decided here, and not when some thread comes to it.
            copies += () if self._in_place else self._additions(self._sum)
            self.pending.then(partial(self._bring, copies))
        elif copies:
            with untracked():
                self._bring(copies)
        shard, on_host = self._sum, self._sum is not None
        shard = self._memory() if shard is None else shard
        reduced, averaging = self._collectives.average_across(shard, self._what, self.pending, self.index)
        self.pending, self.averaging = (averaging, None) if on_host else (reduced, averaging)
        self.grouped, self._direct = False, not on_host

    def settle(self) -> None:
        """Wait until the shard holds the averages of all ranks, if that has begun."""
        if self.averaging is not None:
            self.averaging.wait()
        self.averaging = None
        if self._leaving is not None:
            self._leaving.wait()

    def publish(self, used: Sequence[bool]) -> None:
        """Show the reduced gradients to the optimizer, and forget the backward.

        Parameters that no rank has ``used`` keep what ``.grad`` they had, so that the optimizer skips them.
        """
        self.settle()
        parts = self._parts or cut(self._memory() if self._shard is None else self._shard, self.flat.slices)
        self._parts = parts if self._lasts else ()
        for position, (parameter, view, had) in enumerate(zip(self._shard_parameters, parts, used, strict=True)):
            if not had or parameter is None:
                continue
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view
                self.numbers[position] += 1
        self.reset()

    def keep_local(self) -> None:
        """End a micro-step without a reduction: full gradients stay, the optimizer sees this rank's part."""
        if self.full is None:
            return
        self.plain = False
        with untracked():
            own = cut(self._collectives.own_range(self.full), self.flat.slices)
        views = cut(self._memory(), self.flat.slices)
        if self.transfers is not None:
            arrived = [Copy(part, view) for part, view, a in zip(own, views, self.arrived, strict=True) if a]
            self.transfers.out(arrived).wait()
        for position, (shard, view) in enumerate(zip(self.flat.shards, views, strict=True)):
            if self.arrived[position] and shard.parameter is not None:
                if not self._in_place and self.transfers is None:
                    with untracked():
                        view.copy_(own[position])
                shard.parameter.grad = view
                self.numbers[position] += 1
                self.local[position], self.arrived[position] = True, False

    def reset(self) -> None:
        """Forget the backward, not the gradients."""
        count = len(self.arrived)
        self.arrived, self.local, self.used = [False] * count, [False] * count, [False] * count
        self.launched, self.dirty, self.plain, self._further = False, False, False, False
        self.missing = count
        self._held.clear()
        self.pending, self.averaging, self._carry, self._leaving, self._sum = None, None, None, None, None
        if self.resident is not self.full and self.resident is not None:
            self.give_buffer(self._lasting)
        if not self._lasts:  # it is left to those who have a gradient in it
            self._shard = None
        if self.resident is None:
            self.full, self.views, self._gaps = None, None, []

    def _has_grad(self, position: int) -> bool:
        parameter = self._shard_parameters[position]
        return parameter is not None and parameter.grad is not None

    def still_local(self, position: int) -> bool:
        """Whether unreduced gradients of earlier micro-steps are there and were not cleared by ``zero_grad``."""
        return self.local[position] and self._has_grad(position)

    def _save_reduced(self) -> None:
        if self._carry is not None or any(self.local) or self.full is None:
            return
        kept = [self._further or self._has_grad(i) for i in range(len(self.arrived))]
        if any(kept):
            with untracked():
                self._carry, self._carried = self._collectives.own_range(self.full).clone(), kept

    def _bring(self, copies: Sequence[Copy]) -> None:
        """Let the shard hold what was reduced, and what that is added to."""
        if self._in_place:
            self._restore_reduced()
        for source, target, add in copies:
            if add:
                target.add_(source)
            else:
                target.copy_(source, non_blocking=True)  # where one is on the host, nobody writes to it meanwhile

    def _room_beside(self) -> Tensor:
        """Memory of the device for the shard: of the full buffer, what the other ranks have reduced."""
        numel, dtype = self.layout.shard_numel, self.layout.dtype
        if self.full is None or self.full.dtype != dtype:
            return torch.empty(numel, dtype=dtype, device=self._collectives.device)
        return self.full.narrow(0, 0 if self._collectives.rank else numel, numel)

    def _restore_reduced(self) -> None:
        if self._carry is None:
            return
        saved = cut(self._carry, self.flat.slices)
        for view, before, kept in zip(cut(self._memory(), self.flat.slices), saved, self._carried, strict=True):
            if kept:
                view.add_(before)
        self._carry = None

    def _keeps(self) -> list[bool]:
        """For each parameter, whether the shard holds something that a reduction's result is added to."""
        return [
            self._further or (parameter is not None and not local and parameter.grad is not None)
            for local, parameter in zip(self.local, self._shard_parameters, strict=True)
        ]

    def _additions(self, shard: Tensor | None = None) -> list[Copy]:
        """How a reduction's result gets into the shard: added to what is there, or instead of it."""
        if self.full is None:
            raise RuntimeError(f"Unit '{self.unit.name}' has no memory with reduced gradients.")
        keeps, result = self._keeps(), self._collectives.own_range(self.full)
        if all(keeps) or not any(keeps):
            return [Copy(result, self._memory(whole=True) if shard is None else shard, all(keeps))]
        pieces, views = cut(result, self.flat.slices), cut(self._memory() if shard is None else shard, self.flat.slices)
        return [Copy(piece, view, kept) for kept, view, piece in zip(keeps, views, pieces, strict=True)]


_BITS = 62
_NOTHING = nullcontext()


def report_width(buckets: int) -> int:
    """How many integers a report about ``buckets`` buckets takes."""
    return 3 * -(-buckets // _BITS) if buckets else 0


class GradientReducer:
    """Collects, reduces and publishes gradients.

    Args:
        buckets: all buckets, by index.
        pool: where memory for full gradients is taken that does not last.
        control: the control plane.
        spans: told of reductions, and of waiting for them.
        forwards: whether buckets are in the order of the forward. Until the order of the backward has been seen, the
            opposite one is taken for it: in a wrong one, full gradients of the whole model would pile up.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        pool: BufferPool,
        control: ControlGroup,
        spans: Spans,
        forwards: bool = False,
    ) -> None:
        self.buckets = tuple(buckets)
        self._spans = spans
        self._pool = pool
        self._control = control
        self._order: dict[str, tuple[int, ...]] = {}
        self._alone = [bucket for bucket in self.buckets if bucket.is_alone]
        self._plan_order = tuple(reversed(range(len(self.buckets))) if forwards else range(len(self.buckets)))
        self._phase = ""
        self._patience = PATIENCE_SECONDS
        self._unlike: set[str] = set()  # backwards in which ranks had gradients for different parameters the last time
        self._last = True
        self._queue = self._plan_order  # the order of the running backward
        self._next = 0
        self._ready: dict[int, None] = {}  # buckets that may be launched, in the order in which they were ready
        self._siblings: dict[int, list[GradientBucket]] = {}
        for bucket in self.buckets:
            self._siblings.setdefault(bucket.unit.index, []).append(bucket)
        self._taken: dict[Hashable, tuple[int, Buffer]] = {}  # by place: which unit collects there, and where
        self._further: list[Buffer] = []  # for units whose place was taken
        self._reducing: list[GradientBucket] = []  # launched, and to be brought to the host as soon as they are reduced
        self.holds_local = False
        """Whether there are gradients that were never reduced over all ranks, because more micro-steps are to come."""

    @property
    def units(self) -> list[int]:
        """Indices of the buckets' units in the order in which a backward ends with them: alike on all ranks."""
        return [self.buckets[index].unit.index for index in next(iter(self._order.values()), self._plan_order)]

    def open(self, name: str, uniform: bool = True, last: bool = True) -> None:
        """Begin a backward. Those of one ``name`` share an order of buckets.

        Averages are those of this rank's shard group until the ``last`` backward before a step.

        Unless all ranks used the same units in the forward (``uniform``), and had gradients for the same parameters in
        the last backward of this name, a rank may join a reduction only at the very end: nobody waits for one before.
        """
        self._patience = PATIENCE_SECONDS if uniform and name not in self._unlike else 0.0
        self._last = last
        self._phase = name
        self._queue = self._order.get(name, self._plan_order)
        self._next = 0
        self._ready.clear()
        self._reducing.clear()
        for bucket in self._alone:  # so that not even the first gradient needs more than to be copied
            busy = bucket.dirty or bucket.holds or True in bucket.local or bucket.pending or bucket.averaging
            bucket.plain = not busy and bucket.collect_in_shard()

    def arrive(self, bucket: GradientBucket, position: int, gradient: Tensor, reduce: bool) -> None:
        """Take over a gradient of full shape, and launch its bucket if this micro-step does and that was the last one.

        Read once.
        """
        again = bucket.launched and not bucket.dirty
        if again:
            bucket.start_round()
        if bucket.full is None or (again and bucket.resident is None):
            self._claim(bucket)
        bucket.add(position, gradient)
        if reduce and not bucket.missing and bucket.unit.outstanding == 0:
            self.finish([bucket])

    def hold(self, bucket: GradientBucket, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, if that memory is its unit's alone, and return it."""
        if not bucket.apart:
            return part
        if bucket.full is None:
            self._claim(bucket)
        return bucket.hold(position, part)

    def finish_unit(self, unit: int) -> None:
        """Note that a unit gets no more gradients in this backward, as far as can be told, and launch what may go."""
        waiting = [bucket for bucket in self._siblings.get(unit, ()) if bucket.dirty]
        if waiting or self._reducing:
            self.finish(waiting)

    def finish(self, buckets: Sequence[GradientBucket]) -> None:
        """Note that these get no more gradients in this backward, as far as can be told, and launch what may go."""
        for bucket in buckets:
            if bucket.dirty and not (bucket.launched or bucket.holds) and bucket.index not in self._ready:
                self._ready[bucket.index] = None
        order = self._queue
        # Not the last one: its shard takes memory, and at the end of the backward there is room. It is an embedding's,
        # often the largest of all, with nothing left to overlap with.
        while self._next < len(order) - 1 and order[self._next] in self._ready:
            bucket = self.buckets[order[self._next]]
            with self._span(Phase.REDUCE, bucket):
                bucket.launch(self._patience, self._last)
            self._next += 1
            if bucket.transfers is not None:
                self._reducing.append(bucket)
        for bucket in self._reducing[:]:
            if bucket.drainable(0.0):
                bucket.drain()
                self._reducing.remove(bucket)

    def report(self) -> list[int]:
        """What this rank has to tell at the end of a backward: touched, complete and late buckets, as bits."""
        touched = [bucket.touched for bucket in self.buckets]
        complete = [False not in b.arrived or all(map(b.has_gradient, range(len(b.arrived)))) for b in self.buckets]
        late = [bucket.launched and bucket.dirty for bucket in self.buckets]
        return [word for flags in (touched, complete, late) for word in _pack(flags)]

    def close(self, rows: Sequence[Sequence[int]]) -> None:
        """Reduce what is left, and publish. ``rows`` holds every rank's report.

        Collective: every rank.
        """
        words = report_width(len(self.buckets)) // 3
        merged = [0] * (3 * words)
        for row in rows:
            merged = [a | b for a, b in zip(merged, row, strict=True)]
        count = len(self.buckets)
        touched = _unpack(merged[:words], count)
        complete = _unpack(merged[words : 2 * words], count)
        if all(row[: 2 * words] == rows[0][: 2 * words] for row in rows):
            self._unlike.discard(self._phase)
        else:
            self._unlike.add(self._phase)
        late = _unpack(merged[2 * words :], count)
        order = self._queue
        for index in order[self._next :]:
            if touched[index]:
                self._launch_now(self.buckets[index])
        for index in order:
            if late[index]:
                bucket = self.buckets[index]
                if not bucket.dirty:
                    bucket.start_round()
                self._launch_now(bucket)
        for bucket in self.buckets:
            if bucket.grouped and self._last:  # in earlier micro-steps
                bucket.average_across()
        for bucket in self.buckets:
            if bucket.pending is not None:
                with self._span(Phase.WAIT_REDUCE, bucket):
                    bucket.drain()
        used = self._agree_used(touched, complete)
        self._remember_order(touched)
        for bucket in self.buckets:
            if bucket.averaging is not None:
                with self._span(Phase.WAIT_REDUCE, bucket):
                    bucket.settle()
            if touched[bucket.index]:
                bucket.publish(used[bucket.index])
            else:
                bucket.settle()  # what it had of earlier micro-steps may have been averaged now
                bucket.reset()
        if self._taken:
            self._give_back()
        self.holds_local = any(bucket.grouped for bucket in self.buckets)

    def keep_local(self) -> None:
        """End a backward without reducing; gradients stay where they are."""
        for bucket in self.buckets:
            if bucket.touched:
                bucket.keep_local()
                self.holds_local = True
            bucket.dirty = False

    def abandon(self) -> list[Pending]:
        """Drop the running backward and all accumulated gradients after an error.

        Returns reductions still under way; their memory must not be used again before they are done.
        """
        under_way = [pending for bucket in self.buckets for pending in (bucket.pending, bucket.averaging)]
        orphans = [pending for pending in under_way if pending is not None]
        for bucket in self.buckets:
            bucket.reset()
            bucket.grouped = False
            for shard in bucket.flat.shards:
                if shard.parameter is not None:
                    shard.parameter.grad = None
        self._reducing.clear()
        self._give_back()
        self.holds_local = False
        return orphans

    def _launch_now(self, bucket: GradientBucket) -> None:
        if bucket.full is None:
            self._claim(bucket)
        with self._span(Phase.REDUCE, bucket):
            bucket.launch(self._patience, self._last)

    def _span(self, phase: Phase, bucket: GradientBucket) -> AbstractContextManager[None]:
        return self._spans.of(phase, bucket.unit.name, bucket.nbytes) if self._spans.heard else _NOTHING

    def _claim(self, bucket: GradientBucket) -> None:
        """Give a unit's buckets memory: that of their place, or more of it while another unit still collects there."""
        if bucket.resident is not None or (bucket.is_alone and bucket.collect_in_shard()):
            return
        unit = bucket.unit
        group, place = self._siblings[unit.index], ("gradients", unit.plan.gradient_slot)
        holder, buffer = self._taken.get(place, (unit.index, None))
        if buffer is not None and holder != unit.index:
            holders = self._siblings[holder]
            busy = [holder for holder in holders if holder.dirty or not (holder.launched or not holder.touched)]
            if not busy and self._drainable(holders):
                for other in holders:
                    if other.pending is not None:
                        with self._span(Phase.WAIT_REDUCE, other):
                            other.drain()
                    other.give_buffer(None)
                self._pool.give(buffer)
                del self._taken[place]
                buffer = None
            else:
                buffer = self._pool.take(place, lent=True)
                self._further.append(buffer)
        if buffer is None:
            buffer = self._pool.take(place, lent=True)
            self._taken[place] = unit.index, buffer

        def rooms(memory: Tensor) -> tuple[list[FlatBuffer], int]:
            layouts = [member.layout for member in group]
            flats = carve(memory, layouts, [layout.reduce_dtype for layout in layouts])
            rooms = [FlatBuffer.of(flat, layout) for flat, layout in zip(flats, layouts, strict=True)]
            return rooms, sum(1 + len(room.views) + len(room.gaps) for room in rooms)

        found: list[FlatBuffer] = buffer.made.get(unit.index) or buffer.keep(unit.index, rooms)
        for member, room in zip(group, found, strict=True):
            if member.full is None or not member.dirty:
                if member.pending is not None:
                    member.drain()
                member.give_buffer(room)

    def _drainable(self, holders: Sequence[GradientBucket]) -> bool:
        """Whether reductions are done soon. If not, other ranks may be waiting for this one: then take other memory."""
        if False not in [holder.drainable(0.0) for holder in holders]:
            return True
        with self._spans.of(Phase.WAIT_REDUCE, holders[0].unit.name, sum(holder.nbytes for holder in holders)):
            if all(holder.drainable(self._patience) for holder in holders):
                return True
        self._patience = 0.0
        return False

    def _give_back(self) -> None:
        for buffer in (*(buffer for _, buffer in self._taken.values()), *self._further):
            self._pool.give(buffer)
        self._taken.clear()
        self._further.clear()

    def _agree_used(self, touched: list[bool], complete: list[bool]) -> list[list[bool]]:
        """For each bucket, which parameters had a gradient on some rank. A second round only if that is in doubt."""
        used = [[True] * len(bucket.arrived) for bucket in self.buckets]
        doubtful = [b for b in self.buckets if touched[b.index] and not complete[b.index]]
        if not doubtful:
            return used
        flags = [bucket.has_gradient(i) for bucket in doubtful for i in range(len(bucket.arrived))]
        answer = iter(self._control.any_of(torch.tensor(flags, dtype=torch.uint8, device="cpu")).tolist())
        for bucket in doubtful:
            used[bucket.index] = [bool(next(answer)) for _ in bucket.arrived]
        return used

    def _remember_order(self, touched: list[bool]) -> None:
        if self._phase in self._order:
            return
        seen: list[int] = self._control.gather_objects(list(self._ready))[0]
        order = [index for index in seen if touched[index]]
        order += [i for i in self._plan_order if touched[i] and i not in order]
        order += [i for i in self._plan_order if not touched[i]]
        self._order[self._phase] = tuple(order)


def _pack(flags: Sequence[bool]) -> list[int]:
    words = [0] * -(-len(flags) // _BITS)
    for index, flag in enumerate(flags):
        if flag:
            words[index // _BITS] |= 1 << (index % _BITS)
    return words


def _unpack(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[index // _BITS] >> (index % _BITS) & 1) for index in range(count)]
