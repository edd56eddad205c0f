"""What cannot be laid out is refused by name, in every stage alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zero import build_plan
from lightning_zero.plan.tree import check_memory
from tests.helpers.cases import Stack

CPU = torch.device("cpu")
STAGES = (1, 2, 3)


class Tagged(Tensor):
    """A tensor with ordinary memory, of a class of its own."""


class Named(nn.Parameter):
    """An ordinary parameter, of a class of its own."""


STRANGE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "tagged": (lambda: torch.ones(4).as_subclass(Tagged), "a Tagged"),
    "two": (lambda: TwoTensor(torch.ones(4), torch.ones(4)), "a TwoTensor"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
    "rows": (lambda: torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "a quantized tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", ["Parameter", "Buffer"])
def test_only_plain_tensors(name: str, kind: str) -> None:
    make, what = STRANGE[name]
    model = Stack()
    if kind == "Parameter":
        model.head.codes = nn.Parameter(make(), requires_grad=False)
    else:
        model.head.register_buffer("codes", make())
    for stage in STAGES:
        if kind == "Buffer" and name in ("sparse", "rows"):
            build_plan(model, stage=stage, world_size=2)  # every rank keeps its own
            continue
        with pytest.raises(ValueError, match=rf"{kind} 'head\.codes' is a .*plain") as caught:
            build_plan(model, stage=stage, world_size=2)
        assert what in str(caught.value)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_class_of_parameters_is_none_of_tensors(trainable: bool) -> None:
    model = Stack()
    model.head.weight = Named(model.head.weight.data, requires_grad=trainable)
    model.head.register_buffer("position", nn.Parameter(torch.zeros(3), requires_grad=False))
    for stage in STAGES:
        assert "head.weight" in {spec.name for spec in build_plan(model, stage=stage, world_size=2).parameters}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_torchscript_without_parameters_is_like_any_module() -> None:
    model = Stack()
    model.layers[1] = torch.jit.script(nn.GELU())
    for stage in STAGES:
        build_plan(model, stage=stage, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_class_that_is_not_there(stage: int) -> None:
    """A typing error is one in every stage, also where units are not used."""
    with pytest.raises(ValueError, match=r"units names \['Nope'\].*Its classes are: Block, "):
        build_plan(Stack(), stage=stage, world_size=2, units=["Block", "Nope"])
    with pytest.raises(ValueError, match=r"a ModuleList .* is never called"):
        build_plan(Stack(), stage=stage, world_size=2, units=["ModuleList"])
    build_plan(Stack(), stage=stage, world_size=2, units=["Block"])


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _same(model: Any) -> None:
    model.head.weight.data = model.stem.weight.data


def _rows(model: Any) -> None:
    both = torch.zeros(30, 20)
    model.stem.weight, model.head.weight = nn.Parameter(both[:20]), nn.Parameter(both[10:])


def _transposed(model: Any) -> None:
    model.head.weight = nn.Parameter(model.stem.weight.data.t())


def _crossing(model: Any) -> None:
    both = torch.zeros(20, 40)
    model.stem.weight, model.head.weight = nn.Parameter(both[:, :20]), nn.Parameter(both[:, 19:39])


def _half_frozen(model: Any) -> None:
    model.head.weight = nn.Parameter(model.stem.weight.data, requires_grad=False)


def _other_dtype(model: Any) -> None:
    model.head.weight = nn.Parameter(model.stem.weight.data.view(torch.int32), requires_grad=False)


@pytest.mark.parametrize("change", [_same, _rows, _transposed, _crossing, _half_frozen, _other_dtype])
def test_two_parameters_in_the_same_memory(change: Callable[[Any], None]) -> None:
    model = Stack()
    change(model)
    with pytest.raises(ValueError, match=r"'stem\.weight' and 'head\.weight' are two tensors in the same memory"):
        check_memory(model, CPU)


def test_a_buffer_in_the_memory_of_a_parameter() -> None:
    model = Stack()
    model.register_buffer("shown", model.head.weight.data)
    with pytest.raises(ValueError, match=r"'head\.weight' and 'shown'"):
        check_memory(model, CPU)


@pytest.mark.filterwarnings("ignore:Tensors outside")
def test_memory_that_only_looks_shared() -> None:
    model = Stack()
    both = torch.zeros(20, 40)
    model.stem.weight, model.head.weight = nn.Parameter(both[:, :20]), nn.Parameter(both[:, 20:])  # columns
    model.layers[0].up.weight = model.layers[1].up.weight  # one object
    frozen = torch.zeros(3)
    model.a, model.b = (nn.Parameter(frozen, requires_grad=False) for _ in range(2))
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: compressed rows are in beta
        model.register_buffer("rows", torch.eye(3).to_sparse_csr())
    model.empty, model.none = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2, 0))
    check_memory(model, CPU)
    flat = torch.zeros(100 * 7)
    check_memory(nn.ParameterList(part for part in flat.view(100, 7)), CPU)
    tied = Stack()
    _same(tied)
    check_memory(tied, torch.device("cuda"))  # on its way there each gets memory of its own, as under DDP


def test_memory_that_something_outside_of_the_module_keeps() -> None:
    model = Stack()
    tied = nn.ModuleList([model, nn.Linear(20, 20)])
    tied[1].weight = model.stem.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(tied, CPU)
        model.register_buffer("frozen", torch.ones(3))
        kept = model.frozen.view(-1)  # nobody trains it
        nn.utils.spectral_norm(model.layers[0].up)  # has a view of its own
        check_memory(tied, CPU)
    kept = [model.layers[0].up.weight_orig.detach(), model.layers[1].up.weight.detach()]
    with pytest.warns(UserWarning, match=r"the memory of '0\.layers\.0\.up\.weight_orig', '0\.layers\.1\.up\.weight'"):
        check_memory(tied, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(tied, torch.device("cuda"))
        del kept
        check_memory(tied, CPU)
    state = tied.state_dict()
    with pytest.warns(UserWarning, match=r"and \d+ more"):
        check_memory(tied, CPU)
    assert state
