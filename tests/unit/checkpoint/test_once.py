"""Groups of ranks that hold the same shards (``shard_within``): each shard is written by one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_zero.checkpoint.format.record import FlatShard, Leaf
from lightning_zero.checkpoint.save import _once


def written(leaves: Any, rank: int, world_size: int, size: int) -> set[str]:
    control: Any = SimpleNamespace(rank=rank, world_size=world_size, counted=range(size))
    return {key for key, leaf in _once(leaves, control) if leaf.value.local.numel()}


def test_each_shard_is_written_by_one_group_and_tied_names_by_the_same() -> None:
    tensors = {f"layer{index}.weight": torch.zeros(4) for index in range(20)}
    tensors["head.weight"] = tensors["layer0.weight"]
    leaves: Any = {
        name: Leaf(path=("state_dict", name), value=FlatShard(value, (8,), 0)) for name, value in tensors.items()
    }
    for world_size, size in ((4, 2), (6, 2), (6, 3), (4, 4)):
        by_group = [
            [written(leaves, rank, world_size, size) for rank in range(first, first + size)]
            for first in range(0, world_size, size)
        ]
        for ranks in by_group:
            assert all(names == ranks[0] for names in ranks), "ranks of a group write their shards of the same names"
            assert ("layer0.weight" in ranks[0]) == ("head.weight" in ranks[0]), "one memory"
        found = [name for ranks in by_group for name in ranks[0]]
        assert sorted(found) == sorted(tensors), (world_size, size)
        assert all(ranks[0] for ranks in by_group), "every group has something to write"
