"""Which modules a policy recomputes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.plan.units import find_recomputed
from tests.helpers.cases import WIDTH, Block, Stack


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.norm(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, WIDTH)
        self.layers = nn.ModuleList([Nested(), Nested()])
        self.head = nn.Linear(WIDTH, 10_000)


def test_units_are_the_blocks_that_stage_3_gathers() -> None:
    assert find_recomputed(Stack(), "units", None) == ("layers.0", "layers.1", "layers.2")
    with torch.device("meta"):
        assert find_recomputed(Stack(), "units", ["Block"]) == ("layers.0", "layers.1", "layers.2")


def test_single_layers_and_units_inside_of_units_are_left_out() -> None:
    rules = ["Nested", "Block", "Embedding", "Linear"]
    assert find_recomputed(Tower(), "units", rules) == ("layers.0", "layers.1")


def test_compiled_blocks_are_taken_from_outside() -> None:
    stack = Stack()
    stack.layers[1] = torch.compile(stack.layers[1], backend="eager")
    for policy in ("units", ["Block"]):
        assert find_recomputed(stack, policy, ["Block"]) == ("layers.0", "layers.1", "layers.2")


def test_named_classes_are_all_taken() -> None:
    assert find_recomputed(Tower(), ["Nested", "Embedding"], None) == ("embedding", "layers.0", "layers.1")
    nested = find_recomputed(Tower(), ["Block", "Nested"], None)
    assert nested[:3] == ("layers.0", "layers.0.blocks.0", "layers.0.blocks.1")
    assert find_recomputed(Stack(), ["Stack"], None) == ("",)


def test_a_shared_module_is_taken_once() -> None:
    block = Block()
    assert find_recomputed(Stack(block, block, Block()), ["Block"], None) == ("layers.0", "layers.2")


@pytest.mark.parametrize(
    ("module", "policy", "message"),
    [
        (Stack, ["Blok"], r"names \['Blok'\].*no module of that class.*Block, LayerNorm, Linear, ModuleList, Stack"),
        (Stack, ["Block", "GPT"], r"names \['GPT'\]"),
        (Stack, ["ModuleList"], r"'ModuleList', but a ModuleList \('layers'\) is never called"),
        (lambda: nn.Linear(3, 3), "units", "finds nothing worth recomputing: the model has no units"),
        (lambda: nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), "units", r"single layers \(0, \.\.\.\)"),
    ],
)
def test_what_is_not_there_is_named(module: Any, policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_recomputed(module(), policy, None)
