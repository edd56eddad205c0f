"""How many ranks share what is sharded."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.comm.groups import shard_span


@pytest.mark.parametrize(
    ("within", "on_node", "world_size", "span"),
    [(None, 4, 8, None), ("node", 4, 8, 4), ("node", 8, 8, None), (2, 4, 8, 2), (2, 4, 1, None), (8, 4, 8, None)],
)
def test_ranks_that_share(within: Any, on_node: int, world_size: int, span: int | None) -> None:
    assert shard_span(within, on_node, world_size) == span


@pytest.mark.parametrize(("within", "world_size"), [(1, 4), (3, 4), (5, 4)])
def test_ranks_that_cannot_be_split_so(within: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks cannot be split into groups of {within}"):
        shard_span(within, 2, world_size)
