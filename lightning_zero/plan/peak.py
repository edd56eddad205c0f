"""What one rank's device holds at the worst moment of a training step.

[Note: the worst moment]

What rests, rests all the time: slots, buckets, shards and state have their memory from set-up to the end. Two things
come and go beside it:

* In backward, autograd hands over each gradient in memory of its own, from which it is copied into its bucket at once:
  one parameter's at a time. A parameter that is used in several places (tied weights, a shared module) gets its
  gradient in parts, and autograd holds their sum until the last of them. It adds the last part out of place: a linear
  layer's part is a transposed view, and what it is a view of shares its memory. For a moment there are three.
* In a step, the optimizer computes with temporary tensors: see [Note: memory of a step].

Not counted: activations and other tensors of the module's own, what libraries hold for themselves (cuBLAS, nccl), and
what an allocator keeps in reserve. In a first step a unit that shares its gradient slot with another one may need
memory of its own for a moment, until the order of the backward is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_zero.config import Tier
from lightning_zero.plan.flat import FlatLayout, ParameterSpec
from lightning_zero.plan.memory import Memory, whole_nbytes
from lightning_zero.plan.optimizers import OptimizerCost
from lightning_zero.plan.owners import ROUND_NBYTES

if TYPE_CHECKING:
    from lightning_zero.plan.plan import ZeroPlan

SMALL_NUMEL = 4_096
"""Elements of the largest parameter that a step on a CPU puts together with others; see optim/bundles.py."""

BUNDLE_NUMEL = 65_536
"""Elements that are put together at most."""

__all__ = ["at_peak", "raw_gradient_nbytes"]


def at_peak(plan: ZeroPlan, rest: Memory, *, rank: int, optimizer: OptimizerCost, accelerator: bool) -> Memory:
    """What ``rank`` holds at the worst moment of a step. See [Note: the worst moment].

    Args:
        plan: the plan.
        rest: what rests, with training.
        rank: in the shard group.
        optimizer: what a step takes.
        accelerator: whether the device is one, for which torch chooses another way to step.
    """
    layouts = [layout for unit in plan.units for layout in unit.layouts if layout.trainable]
    backward = raw_gradient_nbytes(
        [(spec, layout.compute_dtype.itemsize) for layout in layouts for spec in layout.parameters]
    )
    step = _step_nbytes(
        plan, [layout for layout in layouts if plan.rest_of(layout).state is Tier.DEVICE], rank, optimizer, accelerator
    )
    if backward >= step:
        return replace(rest, raw_gradients=backward)
    return replace(rest, temporaries=step)


def raw_gradient_nbytes(parameters: Sequence[tuple[ParameterSpec, int]]) -> int:
    """Most bytes of gradients that autograd holds at once.

    Args:
        parameters: each with the bytes of an element of its gradient. Those that are reached under several names are
            taken for tied; a weight that is used twice under one name cannot be told from one that is used once.
    """
    sizes = [(spec.numel * itemsize, bool(spec.aliases)) for spec, itemsize in parameters]
    held = sum(nbytes for nbytes, tied in sizes if tied)
    return held + max((2 * nbytes if tied else nbytes for nbytes, tied in sizes), default=0)


def _step_nbytes(
    plan: ZeroPlan, layouts: Sequence[FlatLayout], rank: int, optimizer: OptimizerCost, accelerator: bool
) -> int:
    if optimizer.whole:  # whole gradients at their owner, and beside them what travels or what the optimizer makes
        sizes = [spec.numel * layout.dtype.itemsize for layout in layouts for spec in layout.parameters]
        whole = whole_nbytes(plan, layouts, rank)
        return whole + max(2 * min(whole, ROUND_NBYTES), optimizer.loop * max(sizes, default=0))
    parts = [(part.numel, layout.dtype.itemsize) for layout in layouts for part in layout.slices(rank)]
    small = [numel * itemsize for numel, itemsize in parts if 0 < numel <= SMALL_NUMEL]
    if accelerator or not small:
        bundled = 0
    else:  # copies of the parameters and the gradients, and what is made for them
        parts = [part for part in parts if not 0 < part[0] <= SMALL_NUMEL]
        most = BUNDLE_NUMEL * max(itemsize for _, itemsize in [*parts, (0, 4)])
        bundled = 2 * min(sum(small), most) + optimizer.step_nbytes([min(sum(small), most)], accelerator)
    sizes = [numel * itemsize for numel, itemsize in parts]
    # The user's order is that of registration as a rule, and buckets are in the opposite one.
    return max(bundled, optimizer.step_nbytes(sizes if plan.placement.shards_parameters else sizes[::-1], accelerator))
