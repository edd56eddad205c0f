"""The order of sums: one tree for all ranks, wherever they are, and no rank's tensor is written over but its own."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.comm.native import average
from tests.helpers.probe import pairwise_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 77, 2**18 + 5])
def test_sums_in_place_are_those_apart(dtype: torch.dtype, numel: int) -> None:
    for world_size in range(2, 9):
        pieces = [(torch.randn(numel) * 3**rank).to(dtype) for rank in range(world_size)]
        expected = pairwise_sum(pieces) / world_size
        for rank in range(world_size):
            mine = [piece.clone() for piece in pieces]
            average(mine[rank], mine, world_size)
            assert torch.equal(mine[rank], expected)
            assert all(torch.equal(mine[other], pieces[other]) for other in range(world_size) if other != rank)
        apart = torch.empty(numel, dtype=dtype)
        average(apart, pieces, world_size)
        assert torch.equal(apart, expected)
        average(apart.zero_(), [piece.clone() for piece in pieces], world_size, spare=True)
        assert torch.equal(apart, expected)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_hosts_may_sum_theirs_first(ranks: int, hosts: int) -> None:
    pieces = [torch.randn(1000) * 3**rank for rank in range(ranks * hosts)]
    of_hosts = [pairwise_sum(pieces[first : first + ranks]) for first in range(0, len(pieces), ranks)]
    assert torch.equal(pairwise_sum(of_hosts), pairwise_sum(pieces))
    assert not torch.equal(pairwise_sum(pieces), sum(pieces[1:], pieces[0])), "the order matters here"
