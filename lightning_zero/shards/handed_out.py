"""Aliases of a parameter's memory that user code was given."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from lightning_zero._torch import untracked

__all__ = ["HandedOut"]


class HandedOut:
    """Aliases of one parameter's memory, as long as anybody holds them."""

    def __init__(self) -> None:
        self.known: list[ref[Tensor]] = []

    def note(self, alias: Tensor) -> Tensor:
        """Remember a tensor. Returns it."""
        self.known = [*(known for known in self.known if known() is not None), ref(alias)]
        return alias

    def part(self) -> None:
        """Let them keep the values that are there now: the memory is about to get others."""
        known, self.known = self.known, []
        with untracked():
            for alias in [found for weak in known if (found := weak()) is not None]:
                if (let_go := getattr(alias, "let_go", None)) is not None:  # a tensor of which this rank has a slice
                    let_go()
                else:
                    alias.data = alias.clone()
