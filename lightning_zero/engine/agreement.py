"""Rounds in which the ranks tell each other what they are doing.

All messages of an engine have one length, so that two ranks in different places of the program still understand each
other: the first number names the place, and a mismatch becomes an error on every rank instead of a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from lightning_zero.comm import ControlGroup
from lightning_zero.engine.events import Phase, Spans
from lightning_zero.errors import DivergenceError

__all__ = ["Agreement"]


class Agreement:
    """Fixed-length agreement rounds over the control group.

    Args:
        control: the control plane.
        width: numbers a message can hold besides its place.
        spans: told how long the others are waited for.
    """

    def __init__(self, control: ControlGroup, width: int, spans: Spans | None = None) -> None:
        self.control = control
        self.width = width
        self._spans = spans or Spans()

    @property
    def world_size(self) -> int:
        return self.control.world_size

    def round(self, place: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Exchange numbers with all ranks that must be at the same place.

        Args:
            place: what this rank is doing, in words that mean the same on every rank.
            values: at most ``width`` 64-bit integers; missing ones count as 0.

        Returns:
            One list of ``width`` integers per rank.

        Raises:
            DivergenceError: on every rank, naming what each of them was doing, if the places differ.

        Collective: every rank.
        """
        message = [zlib.crc32(place.encode()), *values]
        message += [0] * (self.width + 1 - len(message))
        with self._spans.of(Phase.AGREE, place):
            rows = self.control.exchange(message)
        if any(row[0] != rows[0][0] for row in rows):
            places = self.control.gather_objects(place)
            doing = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(places))
            raise DivergenceError(
                f"The ranks are in different places of the training program:\n{doing}\n"
                "Every rank must run the same number of batches, backward passes and optimizer steps. Usual causes: a "
                "training_step that returned None on some ranks, dataloaders of different length, or a branch that "
                "depends on the rank's data and calls backward or the model another number of times."
            )
        return [row[1:] for row in rows]
