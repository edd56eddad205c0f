"""What the ranks tell rank 0 alone: who gets how much, in simulated worlds of any size."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.comm import ControlGroup
from lightning_zero.comm import control as module


class World:
    """Messages go to lower ranks only, so that the ranks can act one after the other, the last first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
        size, self.received, self.messages = len(values), [0] * len(values), dict[tuple[int, int], torch.Tensor]()
        self.peers: list[set[int]] = [set() for _ in values]
        told = [[len(pickle.dumps(value)) if rank else 0, 0] for rank, value in enumerate(values)]
        monkeypatch.setattr(module, "dist", SimpleNamespace(irecv=self.irecv, send=self.send))
        self.results: list[list[Any]] = []
        for self.rank in reversed(range(size)):
            control = ControlGroup(None, self.rank, size)
            monkeypatch.setattr(control, "exchange", lambda row, place: told)
            self.results.insert(0, control._at_first(values[self.rank], "telling rank 0"))

    def irecv(self, span: torch.Tensor, group: Any, group_src: int) -> Any:
        message = self.messages.pop((group_src, self.rank))
        assert len(message) == len(span)
        self.received[self.rank] += len(span.copy_(message))
        self.peers[self.rank].add(group_src)
        return SimpleNamespace(wait=lambda: None)

    def send(self, span: torch.Tensor, group: Any, group_dst: int) -> None:
        self.messages[self.rank, group_dst] = span.clone()
        self.peers[self.rank].add(group_dst)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 64, 512])
def test_rank_0_has_everything_and_the_others_pass_on_what_they_must(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [bytes([rank % 256]) * (rank % 7) for rank in range(size)]
    sizes = [0, *(len(pickle.dumps(value)) for value in values[1:])]
    world = World(monkeypatch, values)
    assert world.results == [values, *[[] for _ in values[1:]]]
    assert not world.messages
    assert world.received[0] == sum(sizes)
    # A rank of an odd number gets nothing, one of an even number what the ranks up to the next power of two have.
    assert world.received[1:] == [sum(sizes[rank + 1 : rank + (rank & -rank)]) for rank in range(1, size)]
    assert max(map(len, world.peers)) <= size.bit_length()
