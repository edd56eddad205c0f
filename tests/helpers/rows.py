"""Many rows in one world, because a world takes longer to start than most rows to play.

A row is a generator: it yields what a rank does, is sent what every rank returned, in rank order, and checks that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from lightning.pytorch.strategies import Strategy

from tests.helpers.runs import under_ddp_and_stages
from tests.helpers.world import run_world

__all__ = ["Row", "compared", "in_one_world"]

Row = Generator[Callable[[int], Any], list[Any], None]


def in_one_world(world_size: int, *rows: Row, timeout: float = 280) -> None:
    """Play the rows one after the other in the same ranks; a failure says which row it is of."""
    acts = [next(row) for row in rows]

    def play(rank: int) -> list[Any]:
        results = []
        for index, act in enumerate(acts):
            with _named(index, rows[index]):
                results.append(act(rank))
        return results

    played = run_world(world_size, play, timeout=timeout)
    for index, row in enumerate(rows):
        with _named(index, row), contextlib.suppress(StopIteration):
            row.send([results[index] for results in played])
            raise AssertionError("a row yields once")


@contextlib.contextmanager
def _named(index: int, row: Row) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"in row {index}, {row.__name__}")
        raise


def compared(play: Callable[[Strategy], dict[str, Any]]) -> Callable[[int], dict[str, dict[str, Any]]]:
    """What a rank does to play under ``"ddp"`` and under each stage; its results are for ``assert_same``."""
    return lambda rank: under_ddp_and_stages(play)
