"""Forward calls of units, and finding the moment their backward begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_zero._torch import hook_gradient, sequence_number
from lightning_zero.engine.events import Span
from lightning_zero.engine.sharded import ShardedUnit

__all__ = ["ForwardCall", "hook_outputs", "refuse_double_backward"]


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One forward of a unit.

    Args:
        unit: whose forward.
        version: the weights it computes with.
        first_node: autograd's next sequence number when it began: nodes from here on are its own.
        guarded: whether the saved-tensor guard was pushed for it.
        implicit: whether it opened a scope of its own, being called outside of any.
        recomputed: whether it runs inside a backward (activation checkpointing).
        counted: whether its backward is still to come and its unit waits for it.
        span: what listeners were told of it.
    """

    unit: ShardedUnit
    version: int
    first_node: int
    guarded: bool
    implicit: bool
    recomputed: bool
    counted: bool = False
    span: Span | None = None


def hook_outputs(output: Any, call: ForwardCall, before_backward: Callable[[ForwardCall], None]) -> bool:
    """Arrange that ``before_backward(call)`` runs before the first backward node of this forward.

    A tensor hook on each output, and a prehook on the node behind an output that is a view: autograd drops the tensor
    hooks of a view that is changed in place later (``y = block(x); y += x``), but the node stays.

    Returns:
        Whether anything could be hooked.
    """

    def hook(*_: Any) -> None:
        before_backward(call)

    hooked = False
    for tensor in (output,) if type(output) is Tensor else tree_leaves(output):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is None:
            continue
        if sequence_number(node) >= call.first_node:
            if not hook_gradient(tensor, hook):
                tensor.register_hook(hook)
            hooked = True
        base = tensor._base
        if base is not None and base.grad_fn is not None and sequence_number(base.grad_fn) >= call.first_node:
            base.grad_fn.register_prehook(hook)
            hooked = True
    return hooked


def refuse_double_backward() -> None:
    """Raise in the hooks of a backward that makes a graph of its own; only there gradients are enabled.

    Raises:
        RuntimeError: saying what to do instead.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True) is not supported: the second backward would need weights that are gone by "
            "then. Compute the penalty from a finite difference, or keep that part of the model in plain DDP."
        )
