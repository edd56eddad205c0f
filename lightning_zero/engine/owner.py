"""What a binding of one of the user's parameters asks of the engine that looks after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lightning_zero.engine.binding import Binding

__all__ = ["Owner"]


class Owner(Protocol):
    """See the file."""

    def bring(self, binding: Binding) -> bool:
        """Let an absent parameter show its values, if this rank can do so alone."""

    def assigned(self, binding: Binding, value: Tensor | None) -> bool:
        """Note that the parameter is about to be ``value``, or a tensor that is yet to be filled.

        Returns:
            Whether it has to stay where it is, so that the values have to be copied.

        Raises:
            ParameterAccessError: if it cannot be taken over.
        """

    def handed_out(self, binding: Binding) -> None:
        """Note that an alias of the parameter's memory left, through which it may be written to unseen."""

    def read_gradient(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        """What ``.grad`` is. ``local``: what autograd holds there."""

    def write_gradient(self, binding: Binding, value: Tensor | None) -> None:
        """``.grad = value``."""

    def assigned_slice(self, binding: Binding, value: Tensor) -> bool:
        """Take over a value of which this rank has a slice. Returns whether it is one.

        Raises:
            ParameterAccessError: if it cannot be taken over.
        """

    def sliced(self, binding: Binding) -> Tensor | None:
        """What stands for the values of an absent parameter where elements are enough; ``None`` if nothing does."""
