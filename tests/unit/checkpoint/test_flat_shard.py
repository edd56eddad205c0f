"""Boxes and slices."""

from __future__ import annotations

import copy
import io
import math
import random

import pytest
import torch

from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.dcp import boxes


def test_boxes_are_the_slice_in_order() -> None:
    random.seed(1)
    for _ in range(3000):
        shape = tuple(random.randint(0 if random.random() < 0.05 else 1, 6) for _ in range(random.randint(0, 5)))
        numel = math.prod(shape)
        start, end = sorted((random.randint(0, numel), random.randint(0, numel)))
        found = boxes(shape, start, end)
        whole = torch.arange(numel).view(shape)
        parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in found]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        assert all(math.prod(box.sizes) > 0 for box in found)


def test_a_shard_has_the_full_shape_and_no_memory_of_its_own() -> None:
    local = torch.arange(5.0)
    shard = FlatShard(local, (4, 3), 2)
    assert shard.shape == (4, 3)
    assert shard.numel() == 12
    assert shard.local.data_ptr() == local.data_ptr()
    assert "elements 2 to 7 here" in repr(shard)


def test_clone_cast_and_deepcopy_work_on_the_slice() -> None:
    shard = FlatShard(torch.arange(4.0), (2, 5), 6)
    for copied in (shard.clone(), copy.deepcopy(shard), shard.to(torch.float64), shard.detach().clone()):
        assert isinstance(copied, FlatShard)
        assert copied.shape == (2, 5)
        assert copied.start == 6
        assert copied.local.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert shard.to(torch.float64).dtype == torch.float64


def test_computing_and_pickling_are_refused() -> None:
    shard = FlatShard(torch.arange(4.0), (2, 5), 6)
    with pytest.raises(RuntimeError, match="whole parameters"):
        shard + 1
    with pytest.raises(TypeError, match=r"cannot be pickled.*dictionaries and lists.*full_parameters"):
        torch.save({"w": shard}, io.BytesIO())


@pytest.mark.parametrize(
    ("local", "shape", "start"),
    [
        (torch.zeros(4), (3,), 0),
        (torch.zeros(2), (3,), 2),
        (torch.zeros(2), (3,), -1),
        (torch.zeros(2, 1), (3,), 0),
        (torch.zeros(4)[::2], (3,), 0),
        (torch.zeros(1), (0, 3), 0),
    ],
)
def test_what_is_no_slice_is_refused(local: torch.Tensor, shape: tuple[int, ...], start: int) -> None:
    with pytest.raises(ValueError):
        FlatShard(local, shape, start)
