"""Tensor parallelism on more meshes: six ranks, groups of one, and two models."""

from __future__ import annotations

import pytest

from tests.helpers.world import run_world
from tests.world.extensions.test_tensor_parallel import MODELS, meshes


@pytest.mark.parametrize(("ranks", "tensor"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
def test_numbers_are_those_of_one_process(ranks: int, tensor: int) -> None:
    run_world(ranks, meshes, tensor, list(MODELS), timeout=200.0)
