"""Gradients of weights that several layers share: their parts are added up where the first one lies.

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

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lightning_zero._torch import (
    compiler_of_frames,
    current_graph_task,
    in_function_transform,
    is_compiled_module,
    is_tracing,
    will_accumulate,
)
from lightning_zero.plan.tree import kind_of, sums_in_place

__all__ = ["TiedLayer", "tied_layers", "use"]

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
        return self._first()  # type: ignore[no-any-return]


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


use: Any = _Use.apply
_look_up: Any = _LookUp.apply


class TiedLayer:
    """The forward of one layer of a weight that others have too, in the place of its own while a step runs.

    Args:
        layer: an embedding or a linear layer.
        weight: of the layer.
        parts: of the weight's gradient, one for all of its layers.
    """

    def __init__(self, layer: nn.Module, weight: nn.Parameter, parts: _Sum) -> None:
        self.layer: Any = layer
        self.weight = weight
        self.parts = parts

    def __call__(self, input: Tensor) -> Any:
        layer, weight, device = self.layer, self.weight, self.weight.device.type
        watched = compiler_of_frames() is not None or is_tracing() or in_function_transform()
        # The user's autocast casts a weight once for all of its uses, and what is no parameter once for each.
        cached = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
        # A tensor-parallel layer makes aliases where it reads its weight.
        replaced = layer._parameters.get("weight") is not weight or kind_of(layer) is not type(layer)
        if watched or cached or replaced or not (torch.is_grad_enabled() and weight.requires_grad):
            return type(layer).forward(layer, input)
        if type(layer) is nn.Linear:
            return F.linear(input, use(weight, self.parts), layer.bias)
        if device == "cpu":  # elsewhere the host would wait for the rows
            return _look_up(input, weight, layer.padding_idx, self.parts)
        return F.embedding(input, use(weight, self.parts), layer.padding_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer has its own forward."""
        return MethodType(type(self.layer).forward, memo.get(id(self.layer), self.layer))


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
