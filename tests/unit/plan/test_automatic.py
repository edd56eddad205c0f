from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.helpers.plan_models import Block, Gpt, Llama70B, find_units


def unit_names(module: nn.Module) -> list[str]:
    """Of all units but the root."""
    return [unit.name for unit in find_units(module, None)[1:]]


class Stage(nn.Module):
    """Blocks behind a layer of its own, as in hierarchical vision models."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.downsample = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self) -> None: ...


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self) -> None: ...


class Holder(nn.Module):
    """One child under a name."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self.add_module(name, child)

    def forward(self) -> None: ...


@pytest.fixture(autouse=True)
def _meta() -> object:
    with torch.device("meta"):
        yield


def test_a_language_model() -> None:
    # Embedding and head have 2,000 x 64 = 128,000 elements, above the floor for leaves.
    assert unit_names(Gpt()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def test_a_tied_head_leaves_the_embedding_to_the_root() -> None:
    assert unit_names(Gpt(tied=True)) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_a_tied_head_with_a_small_bias_of_its_own_is_no_unit() -> None:
    model = Gpt(tied=True)
    model.head.bias = nn.Parameter(torch.zeros(2_000))
    assert "head" not in unit_names(model)


def test_toy_models_stay_whole() -> None:
    assert unit_names(nn.Linear(32, 2)) == []
    assert unit_names(nn.Sequential(nn.Linear(28, 16), nn.ReLU(), nn.Linear(16, 2))) == []
    assert unit_names(nn.ModuleList(nn.LayerNorm(100) for _ in range(50))) == []


def test_large_leaves_outside_of_containers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(256, 256)
            self.small = nn.Linear(254, 256)
            self.convolution = nn.Conv2d(128, 128, 3)
            self.recurrent = nn.LSTM(128, 128, num_layers=2)
            self.attention = nn.MultiheadAttention(256, 2)
            self.normed = weight_norm(nn.Linear(512, 512))
            self.derived = type("Derived", (nn.Linear,), {})(512, 512)
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(512, 5_000, [1_000])

    # 256 x 256 = 65,536 reaches the floor; subclasses and parametrized layers may be used without being called.
    assert unit_names(Net()) == ["large", "convolution", "recurrent", "attention"]


def test_a_block_used_many_times_is_one_unit() -> None:
    block = Block(64)
    assert unit_names(nn.ModuleList([block] * 12)) == ["0"]


def test_experts_are_gathered_with_their_block() -> None:
    model = nn.ModuleList(Mixture(256, 8) for _ in range(2))
    assert unit_names(model) == ["0", "1"]
    assert unit_names(Mixture(256, 8)) == []


def test_large_stages_are_split_into_their_blocks() -> None:
    model = nn.ModuleList([Stage(64, 2), Stage(64, 6)])
    units = find_units(model, None)
    inner = [f"0.blocks.{i}" for i in range(2)] + [f"1.blocks.{i}" for i in range(6)]
    # What is left of a stage, its 64 x 64 + 64 elements, is still worth a unit.
    assert [unit.name for unit in units] == ["", "0", *inner[:2], "1", *inner[2:]]
    assert {unit.name: unit.depth for unit in units}["1.blocks.5"] == 2


def test_a_stage_with_little_of_its_own_is_no_unit() -> None:
    # 16 x 16 + 16 = 272 elements are less than 1,024 and stay with the root.
    model = nn.ModuleList([Stage(16, 2), Stage(16, 2)])
    assert unit_names(model) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]
    assert [spec.name for spec in find_units(model, None)[0].parameters] == [
        f"{i}.downsample.{name}" for i in range(2) for name in ("weight", "bias")
    ]


def test_a_block_far_above_the_others_is_split() -> None:
    # The median block has 128 x 128 elements, the large one 8 x 1024 x 1024.
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self) -> None: ...

    model = nn.ModuleList([Wide(64) for _ in range(9)] + [Wide(1024)])
    # The biases are owned with the layers, so that nothing is left of block 9 itself.
    assert unit_names(model) == [*map(str, range(9)), "9.up", "9.down"]


@pytest.mark.parametrize("name", ["experts", "local_experts", "parametrizations"])
def test_closed_names(name: str) -> None:
    assert unit_names(Holder(name, nn.ModuleList(nn.Linear(512, 512) for _ in range(4)))) == []


def test_the_root_of_a_large_model_stays_small() -> None:
    units = find_units(Llama70B(), None)
    assert len(units) == 83
    assert sum(spec.numel for spec in units[0].parameters) == 8_192
