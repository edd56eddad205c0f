"""Gradients that an optimizer is not to see for a while."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["HiddenGradients"]


class HiddenGradients:
    """Takes gradients off parameters, so that a step passes these over, and puts them back."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []

    def hide(self, gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Let these parameters show no gradient.

        Args:
            gradients: parameters, and what they show again afterwards.
        """
        self._hidden = list(gradients)
        for parameter, _ in self._hidden:
            parameter.grad = None

    def show(self) -> None:
        """Put back what was hidden last. May be called again."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
