from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from lightning_zero.plan.layout import ALIGNMENT, FlatLayout, ParameterSpec

WORLDS = range(1, 10)
SHAPES = {
    "one": [(1,)],
    "scalar": [()],
    "empty": [(0,)],
    "only empty": [(0,), (3, 0)],
    "empty between": [(5,), (0, 7), (), (0,), (64,)],
    "aligned": [(64,), (128,), (8, 8)],
    "primes": [(2,), (3,), (61,), (67,), (127,), (1009,)],
    "larger than a shard": [(3,), (100_003,), (7,)],
    "matrices": [(17, 31), (31,), (5, 3, 2), ()],
}


def layout_of(
    shapes: list[tuple[int, ...]], world_size: int, *, dtype: torch.dtype = torch.float32, trainable: bool = True
) -> FlatLayout:
    specs = [ParameterSpec(f"p{i}", (), shape, dtype, trainable) for i, shape in enumerate(shapes)]
    return FlatLayout.build(specs, world_size, compute_dtype=dtype, reduce_dtype=dtype)


def check_layout(layout: FlatLayout) -> None:
    """Every property that the engine relies on."""
    # Parameters and gaps tile the buffer.
    pieces = [(o, o + s.numel) for s, o in zip(layout.parameters, layout.offsets, strict=True) if s.numel]
    tiles = sorted(pieces + list(layout.gaps()))
    assert tiles[0][0] == 0
    assert tiles[-1][1] == layout.numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(tiles))
    assert all(start < end for start, end in tiles)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert layout.shard_numel % ALIGNMENT == 0

    # The slices of all ranks, one rank after the other, cover each parameter once and in order.
    reached = [0] * len(layout.parameters)
    for rank in range(layout.world_size):
        start = rank * layout.shard_numel
        slices = layout.slices(rank)
        shard_end = 0
        for number, part in enumerate(slices):
            assert 0 <= part.shard_start <= part.shard_start + part.numel <= layout.shard_numel
            assert 0 <= part.parameter_start <= layout.parameters[number].numel
            assert part.shard_start >= shard_end
            shard_end = part.shard_start + part.numel
            if part.numel:
                assert part.parameter_start == reached[number]
                assert start + part.shard_start == layout.offsets[number] + part.parameter_start
                reached[number] += part.numel
    assert reached == [spec.numel for spec in layout.parameters]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_slices_cover_every_element_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    check_layout(layout_of(shapes, world_size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_random_layouts(world_size: int) -> None:
    choose = random.Random(world_size)
    for _ in range(50):
        sizes = [choose.choice([0, 1, 7, 63, 64, 65, choose.randrange(5_000)]) for _ in range(choose.randrange(1, 12))]
        check_layout(layout_of([(size,) for size in sizes], world_size))


def test_the_drawn_example() -> None:
    layout = layout_of([(100,), (30,), (200,)], 2)
    assert layout.offsets == (0, 128, 192)
    assert layout.numel == 512
    assert layout.gaps() == ((100, 128), (158, 192), (392, 512))
    assert [part.numel for part in layout.slices(0)] == [100, 30, 64]
    assert [part.numel for part in layout.slices(1)] == [0, 0, 136]
    assert layout.parameter_numel == 330


def test_cost_does_not_grow_with_elements() -> None:
    layout = layout_of([(10**12,), (10**12, 3)], 4096)
    assert sum(part.numel for rank in range(4096) for part in layout.slices(rank)) == 4 * 10**12


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"offsets": (0, 65)}, "'p1' at element 65"),
        ({"offsets": (0, 64)}, "'p1' at element 64 .* the one before up to 100"),
        ({"offsets": (128, 0)}, "'p1' at element 0"),
        ({"offsets": (0, 384)}, "'p1' at element 384 of 384"),
        ({"offsets": (0,)}, "2 parameters with 1 offsets"),
        ({"parameters": (), "offsets": ()}, "0 parameters"),
        ({"numel": 0}, "no positive multiple"),
        ({"numel": 320}, "no positive multiple of 2"),
        ({"world_size": 0}, "no positive multiple"),
        ({"dtype": torch.bfloat16}, "'p0', which is torch.float32"),
        ({"trainable": False}, "'p0', which is torch.float32, trainable=True"),
    ],
)
def test_a_layout_proves_itself(change: dict[str, object], error: str) -> None:
    layout = layout_of([(100,), (30,)], 2)
    assert (layout.offsets, layout.numel) == ((0, 128), 256)
    if "384" in error:
        change = {**change, "numel": 384}
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(layout, **change)


def test_a_frozen_layout_is_not_reduced() -> None:
    frozen = layout_of([(100,)], 2, trainable=False)
    with pytest.raises(ValueError, match="never reduced"):
        dataclasses.replace(frozen, reduce_dtype=torch.float64)
