"""Tensors in the user's hands that share a parameter's memory: what ``parameter.data`` gave, or was given.

[Note: weights that are put aside by reference]
``kept = parameter.data``, another tensor for ``parameter.data``, and ``parameter.data = kept`` later: so averaged
weights are evaluated. Under plain torch ``kept`` has its memory for itself meanwhile. Here the other tensor is copied
to where the parameter is at home, so what was handed out gets memory of its own right before.
"""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from lightning_zero._torch import untracked

__all__ = ["HandedOut"]


class HandedOut:
    """Those of one parameter, as long as anybody holds them."""

    def __init__(self) -> None:
        self._known: list[ref[Tensor]] = []

    def note(self, alias: Tensor) -> Tensor:
        """Remember a tensor. Returns it."""
        self._known = [*(known for known in self._known if known() is not None), ref(alias)]
        return alias

    def part(self) -> None:
        """Let them keep the values that are there now: the memory is about to get others."""
        known, self._known = self._known, []
        with untracked():
            for alias in [found for weak in known if (found := weak()) is not None]:
                if (let_go := getattr(alias, "let_go", None)) is not None:  # a tensor of which this rank has a slice
                    let_go()
                else:
                    alias.data = alias.clone()
