"""A wire around another one, for tests that change one verb; and what a unit needs to be tested alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import Collectives, ControlGroup, Pending
from lightning_zero.config import Placement
from lightning_zero.engine.agreement import Agreement, Means
from lightning_zero.engine.events import Spans
from lightning_zero.engine.pool import BufferPool
from lightning_zero.offload import MemoryTiers
from lightning_zero.plan.plan import Plan


def make_means(plan: Plan, wire: Collectives) -> Means:
    """What the parts of an engine of one rank work with."""
    control, tiers = ControlGroup(None), MemoryTiers(torch.device("cpu"))
    pool = BufferPool(wire, tiers.device, tiers.streams, plan)
    return Means(wire, control, Agreement(control, 5, 4), tiers, pool, Spans())


class WrappedCollectives(Collectives):
    """Another wire's collectives as they are: whoever changes one verb of a wire overrides its method here.

    The signatures are those of ``Collectives``. Observers are told what the inner wire carries.

    Args:
        inner: what carries everything.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.rank, inner.world_size, inner.device, inner.abandoned)
        self.inner = inner
        self.observers, self.state, self.asked = inner.observers, inner.state, inner.asked

    def placed(self, placement: Placement) -> Placement:
        return self.inner.placed(placement)

    @property
    def across(self) -> Any:
        return self.inner.across

    @property
    def receives(self) -> bool:
        return self.inner.receives

    @property
    def alters(self) -> str:
        return self.inner.alters

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self.inner.buffers

    @property
    def kept(self) -> Sequence[Tensor]:
        return self.inner.kept

    @property
    def gathers_at_once(self) -> bool:
        return self.inner.gathers_at_once

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        return self.inner.total(numbers, largest)

    def lend(self, nbytes: int, gathered: bool = False) -> Tensor | None:
        return self.inner.lend(nbytes, gathered)

    def freeze(self, memory: Sequence[Tensor]) -> None:
        self.inner.freeze(memory)

    def _observe(self, kind: str, what: str, buffer: Tensor) -> None:
        """The inner wire does."""

    def _all_gather(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.all_gather(*arguments, **named)

    def _reduce_scatter(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.reduce_scatter(*arguments, **named)

    def _all_to_all(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.all_to_all(*arguments, **named)

    def average_across(self, *arguments: Any, **named: Any) -> tuple[Pending | None, Pending]:
        return self.inner.average_across(*arguments, **named)

    def _broadcast(self, *arguments: Any, **named: Any) -> Pending:
        return self.inner.broadcast(*arguments, **named)


def residuals_of(wire: Any) -> dict[str, Tensor]:
    """What a wire keeps of what rounding took, by reduction."""
    return getattr(wire.state, "residuals", {})
