from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_zero.plan.units import UnitSpec
from tests.helpers.plan_models import Block, Gpt, find_units, on_meta


def by_name(units: tuple[UnitSpec, ...]) -> dict[str, list[str]]:
    return {unit.name: [spec.name for spec in unit.parameters] for unit in units}


def check_units(module: nn.Module, units: tuple[UnitSpec, ...]) -> None:
    """Every parameter has one owner, the root comes first, the order is registration order."""
    owned = [spec.name for unit in units for spec in unit.parameters]
    expected = [name for name, _ in module.named_parameters()]
    assert sorted(owned) == sorted(expected)
    assert units[0].name == ""
    assert all(unit.parameters for unit in units[1:])
    order = [name for name, _ in module.named_modules()]
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=order.index)


def test_named_classes() -> None:
    model = on_meta(Gpt, blocks=2)
    units = find_units(model, ["Block", "Embedding"])
    check_units(model, units)
    assert [unit.name for unit in units] == ["", "embedding", "blocks.0", "blocks.1"]
    assert by_name(units)[""] == ["norm.weight", "norm.bias", "head.weight"]


def test_nested_units_own_what_is_innermost() -> None:
    model = on_meta(Gpt, blocks=1)
    units = find_units(model, ["Block", "Linear"])
    check_units(model, units)
    found = {unit.name: unit for unit in units}
    assert list(found) == ["", "blocks.0", "blocks.0.mlp.0", "blocks.0.mlp.2", "head"]
    assert by_name(units)["blocks.0.mlp.2"] == ["blocks.0.mlp.2.weight", "blocks.0.mlp.2.bias"]
    assert [unit.depth for unit in units] == [0, 1, 2, 2, 1]
    assert found["blocks.0.mlp.0"].ancestors == ("", "blocks.0")


def test_a_tied_parameter_belongs_to_the_common_ancestor() -> None:
    model = on_meta(Gpt, tied=True, blocks=1)
    units = find_units(model, ["Block", "Embedding"])
    check_units(model, units)
    assert [unit.name for unit in units] == ["", "blocks.0"]
    (embedding,) = [spec for spec in units[0].parameters if spec.name == "embedding.weight"]
    assert embedding.aliases == ("head.weight",)


def test_a_parameter_tied_inside_a_unit_stays_there() -> None:
    model = nn.Sequential(on_meta(Block, width=8), on_meta(Block, width=8))
    model[0].mlp[2].weight = nn.Parameter(model[0].mlp[0].weight.detach())
    model[0].tied = model[0].mlp[2].weight
    units = find_units(model, ["Block"])
    assert [unit.name for unit in units] == ["", "0", "1"]
    (tied,) = [spec for spec in units[1].parameters if spec.aliases]
    assert (tied.name, tied.aliases) == ("0.tied", ("0.mlp.2.weight",))


def test_a_shared_module_is_one_unit() -> None:
    block = on_meta(Block, width=8)
    model = nn.ModuleDict({"encoder": nn.ModuleList([block] * 3), "other": nn.ModuleList([block])})
    units = find_units(model, ["Block"])
    assert [unit.name for unit in units] == ["", "encoder.0"]
    assert units[1].parameters[0].name == "encoder.0.norm1.weight"
    assert units[1].parameters[0].aliases == (
        "encoder.1.norm1.weight",
        "encoder.2.norm1.weight",
        "other.0.norm1.weight",
    )


def test_a_module_shared_by_two_units_lies_deeper_than_both() -> None:
    class Wrapper(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Embedding(10, 8, device="meta"), shared

        def forward(self) -> None: ...

    block = on_meta(Block, width=8)
    units = find_units(nn.ModuleList([Wrapper(block), Wrapper(block)]), ["Wrapper", "Block"])
    assert [unit.name for unit in units] == ["", "0", "0.shared", "1"]
    assert units[2].depth == 2
    assert units[2].ancestors == ("", "0", "1")
    assert len(units[1].parameters) == len(units[3].parameters) == 1


def test_a_module_that_holds_itself_is_read_once() -> None:
    model = on_meta(Gpt, blocks=1)
    model.blocks[0].whole_model = model
    check_units(model, find_units(model, ["Block"]))


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (["Block", "Missing"], r"\['Missing'\].* Its classes are: .*Block, Embedding"),
        (["ModuleList"], "never called"),
        (["NonDynamicallyQuantizableLinear"], "'blocks.0.attention.out_proj' is the out_proj"),
        ([], "at least one class"),
        (["a-b"], "class names"),
    ],
)
def test_rules_that_cannot_work(rules: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_units(on_meta(Gpt), rules)


def test_multihead_attention_itself_may_be_named() -> None:
    model = on_meta(Gpt, blocks=1)
    units = find_units(model, ["MultiheadAttention"])
    check_units(model, units)
    assert by_name(units)["blocks.0.attention"] == [
        f"blocks.0.attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    ]


def test_a_parametrized_module_keeps_its_class_name() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Embedding(4, 8))
    units = find_units(model, ["Linear"])
    assert by_name(units) == {
        "": ["1.weight"],
        "0": ["0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"],
    }


def test_a_compiled_module_is_gathered_by_its_wrapper() -> None:
    model = nn.Sequential(*(torch.compile(on_meta(Block, width=64), backend="eager") for _ in range(2)))
    for rules in (["Block"], None):
        assert [unit.name for unit in find_units(model, rules)] == ["", "0", "1"]


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet"):
        find_units(nn.Sequential(nn.LazyLinear(4)), None)
