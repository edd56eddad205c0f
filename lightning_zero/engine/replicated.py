"""A gradient bucket of replicated parameters at run time: its full buffers, and the user's parameters as views."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.flat import FlatParameters, views_of
from lightning_zero.engine.unit import Unit
from lightning_zero.plan import UnitPlan

__all__ = ["ReplicatedUnit"]


class ReplicatedUnit(Unit):
    """A bucket whose full parameters stay in memory.

    Args:
        plan: the bucket.
        flats: its flat parameters; masters are views of ``buffers`` where the dtypes agree.
        buffers: full flat buffer of each layout, in the compute dtype.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters], buffers: Sequence[Tensor]) -> None:
        super().__init__(plan, flats)
        self.buffers = tuple(buffers)
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self._views = [views_of(buffer, flat.layout) for buffer, flat in zip(buffers, flats, strict=True)]
        # Another compute dtype must not be seen from outside a step: there the parameter shows its own dtype (and NaN).
        self.always_bound = all(flat.layout.dtype == flat.layout.compute_dtype for flat in flats)
        for flat in self.flats:
            if self.always_bound and flat.rest.offloaded:
                flat.shown = flat.weights

    def bind(self) -> None:
        """Let the user's parameters be the full values."""
        if self.held:
            return
        for flat, views in zip(self.flats, self._views, strict=True):
            for parameter, view in zip(flat.parameters, views, strict=True):
                parameter.data = view

    def unbind(self) -> None:
        """Let the user's parameters show placeholders, unless they can always show the truth."""
        if not self.always_bound and not self.held:
            self.show_placeholders()

    def publish(self, collectives: Collectives) -> list[Pending]:
        """Bring every rank's weights, which are up to date, into the full buffers. Collective: every rank."""
        with untracked():
            return [collectives.all_gather(buffer, f"parameters of '{self.name}'") for buffer in self.buffers]
