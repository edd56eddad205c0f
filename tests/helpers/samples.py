"""A small training state with every kind of shape and dtype, cut for any world in two ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.checkpoint import FlatShard, StoredTensor, open_checkpoint
from lightning_zero.checkpoint.storage.publish import remove
from lightning_zero.comm import ControlGroup

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (13, 6),
    "scale": (),
    "empty": (0, 5),
    "conv.weight": (3, 2, 4, 5),
    "five": (2, 3, 2, 1, 3),
    "bias": (1,),
    "vector": (37,),
}
DTYPES = {"vector": torch.bfloat16, "bias": torch.float64, "five": torch.float16}

Cut = Callable[[str, int, int], tuple[int, int]]  # (name, rank, world size) -> first and last element


def parameters(version: int = 0) -> dict[str, Tensor]:
    """Full values, different for every version."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: (torch.randn(shape, generator=generator) * 100).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def end_to_end(name: str, rank: int, world_size: int) -> tuple[int, int]:
    """Parameters laid end to end, the whole cut evenly: what the flat buffer does."""
    before = 0
    for other, shape in SHAPES.items():
        if other == name:
            break
        before += math.prod(shape)
    numel, total = math.prod(SHAPES[name]), sum(map(math.prod, SHAPES.values()))
    per_rank = -(-total // world_size)
    start = min(max(rank * per_rank - before, 0), numel)
    end = min(max((rank + 1) * per_rank - before, 0), numel)
    return start, end


def one_by_one(name: str, rank: int, world_size: int) -> tuple[int, int]:
    """Every parameter cut evenly by itself, the last rank first."""
    numel = math.prod(SHAPES[name])
    per_rank = -(-numel // world_size)
    rank = world_size - 1 - rank
    return min(rank * per_rank, numel), min((rank + 1) * per_rank, numel)


def control() -> ControlGroup:
    """The ranks of the default group, or this process alone."""
    if not dist.is_initialized():
        return ControlGroup(None)
    return ControlGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def sharded(values: dict[str, Tensor], cut: Cut, ranks: ControlGroup) -> dict[str, FlatShard]:
    """This rank's shards, all slices of one flat buffer per dtype, as the engine has them."""
    ranges = {name: cut(name, ranks.rank, ranks.world_size) for name in values}
    shards = {}
    for dtype in {value.dtype for value in values.values()}:
        names = [name for name, value in values.items() if value.dtype == dtype]
        flat = torch.cat([values[name].reshape(-1)[slice(*ranges[name])] for name in names])
        position = 0
        for name in names:
            start, end = ranges[name]
            local = flat[position : position + end - start]
            shards[name] = FlatShard(local, values[name].shape, start)
            position += end - start
    return {name: shards[name] for name in values}


def checkpoint(version: int, cut: Cut, ranks: ControlGroup) -> dict[str, Any]:
    """Lightning's checkpoint dictionary as a sharded strategy fills it."""
    values = parameters(version)
    average = {name: value * 0.5 for name, value in values.items()}
    shards, averages = sharded(values, cut, ranks), sharded(average, cut, ranks)
    return {
        "epoch": version,
        "global_step": version * 10,
        "state_dict": {
            **shards,
            "norm.running_mean": torch.full((4, 3), float(version)).t(),
            "_extra_state": {"v": version},
        },
        "optimizer_states": [
            {
                "state": {
                    name: {"step": torch.tensor(float(version)), "exp_avg": averages[name], "count": version}
                    for name in values
                },
                "param_groups": [{"params": list(values), "lr": 0.1 * version, "betas": (0.9, 0.99), "fused": None}],
            },
            {"state": {}, "param_groups": [{"params": [], "lr": 1.0}]},
        ],
        "lr_schedulers": [{"last_epoch": version, "_last_lr": [0.1 * version]}],
        "callbacks": {"History": {"values": torch.full((9000,), float(version))}},
    }


def verify(loaded: dict[str, Any], version: int, cut: Cut, ranks: ControlGroup) -> None:
    """Every byte of this rank's part, and everything else, is what ``checkpoint(version, ...)`` was."""
    values = parameters(version)
    weights = {name: loaded["state_dict"][name] for name in values}
    moments = {name: loaded["optimizer_states"][0]["state"][name]["exp_avg"] for name in values}
    for name, value in values.items():
        _verify_slice(weights[name], value, cut(name, ranks.rank, ranks.world_size))
        _verify_slice(moments[name], value * 0.5, cut(name, ranks.rank, ranks.world_size))
        state = loaded["optimizer_states"][0]["state"][name]
        assert state["step"].read().item() == version
        assert state["count"] == version
    assert loaded["optimizer_states"][0]["param_groups"] == [
        {"params": list(values), "lr": 0.1 * version, "betas": (0.9, 0.99), "fused": None}
    ]
    assert loaded["optimizer_states"][1] == {"state": {}, "param_groups": [{"params": [], "lr": 1.0}]}
    assert torch.equal(loaded["state_dict"]["norm.running_mean"].read(), torch.full((3, 4), float(version)))
    assert loaded["state_dict"]["_extra_state"] == {"v": version}
    assert loaded["epoch"] == version
    assert loaded["lr_schedulers"] == [{"last_epoch": version, "_last_lr": [0.1 * version]}]
    assert torch.equal(loaded["callbacks"]["History"]["values"], torch.full((9000,), float(version)))


def _verify_slice(stored: StoredTensor, full: Tensor, bounds: tuple[int, int]) -> None:
    assert stored.shape == full.shape
    assert stored.dtype == full.dtype
    expected = full.reshape(-1)[slice(*bounds)]
    found = torch.zeros_like(expected)
    stored.read_into(found, bounds[0])
    assert torch.equal(found, expected)


def load_and_verify(path: Path, version: int, cut: Cut = end_to_end) -> None:
    """Load and compare on every rank."""
    ranks = control()
    verify(open_checkpoint(path, ranks), version, cut, ranks)


def remove_checkpoint_directory(path: Path, ranks: ControlGroup) -> None:
    """Delete a checkpoint as a saver does, but at once and on all ranks or none."""
    ranks.barrier()  # not before every rank has looked whether it is there
    ranks.together(f"remove the checkpoint '{path}'", lambda: remove(path) if ranks.rank == 0 else None)
