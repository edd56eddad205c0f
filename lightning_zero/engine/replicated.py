"""A gradient bucket of replicated parameters at run time: its full buffers, and the user's parameters as views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.binding import binding_of, get_data, set_data
from lightning_zero.engine.flat import FlatParameters
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
        self._views = self._bindings(buffers)
        # Another compute dtype must not be seen from outside a step: there the parameter shows its own dtype (and NaN).
        self.always_bound = all(flat.layout.dtype == flat.layout.compute_dtype for flat in flats)
        for flat in self.flats:
            if self.always_bound and flat.rest.offloaded:
                flat.shown = flat.weights

    def bind(self) -> None:
        """Let the user's parameters be the full values."""
        if self.held:
            return
        for parameter, view, kind in self._views:
            parameter.__class__ = kind
            set_data(parameter, view)

    @property
    def memory(self) -> Sequence[Tensor]:
        return self.buffers

    def held_views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        yield from ((parameter, view) for parameter, view, _ in self._views)

    def bring_home(self) -> None:
        """Take values over from tensors that user code made parameters of (``set_``, ``parameter.data = ...``).

        Raises:
            ValueError: if one has another shape or dtype.
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
                    binding.handed.part()
                with untracked():
                    view.copy_(value)
                set_data(parameter, view)
                self.void(parameter)

    def unbind(self) -> None:
        """Let the user's parameters show placeholders, unless they can always show the truth."""
        if not self.always_bound and not self.held:
            self.show_placeholders()

    def publish(self, collectives: Collectives) -> list[Pending]:
        """Bring every rank's weights, which are up to date, into the full buffers. Collective: every rank."""
        with untracked():
            return [collectives.all_gather(buffer, f"parameters of '{self.name}'") for buffer in self.buffers]
