"""Which rank owns which whole parameter, for optimizers that are not elementwise."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["deal_out"]


def deal_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """The owner of each size: the largest first, each to the rank with the least so far; ties: first, lowest."""
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + sizes[index], rank))
    return owners
