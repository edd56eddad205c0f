"""A sliced gradient does to its slice what torch does to the whole tensor, bit for bit, or raises."""

from __future__ import annotations

import copy
import io
import itertools
import operator
import pickle
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.sliced_tensor import SlicedTensor

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES = [(), (1,), (7,), (4, 1, 6), (3, 0), (67, 31)]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40]


def values(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers, some of them special."""
    return drawn(tuple(shape), dtype, seed).clone()


@cache
def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
    if not dtype.is_complex:
        chosen = torch.randint(0, 40, shape, generator=generator)
        for index, special in enumerate(SPECIAL):
            tensor = torch.where(chosen == index, special, tensor)
    return tensor.to(dtype)


def mask(shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) < 0.4


def cuts(numel: int, world_size: int) -> list[tuple[int, int]]:
    """Ranges of all ranks: one even, one uneven with empty ones. Not at addresses that vector instructions like."""
    places = [random.Random(numel * 10 + world_size).randint(0, numel) for _ in range(world_size - 1)]
    ends = [0, *sorted(places), numel]
    return list(itertools.pairwise(ends))


def sliced(whole: Tensor, start: int, end: int, **options: Any) -> SlicedTensor:
    memory = torch.empty(end - start + 3, dtype=whole.dtype)[3:]
    memory.copy_(whole.reshape(-1)[start:end])
    return SlicedTensor(memory, start, whole.shape, "layer.weight", **options)


def slices(whole: Tensor, world_size: int, **options: Any) -> list[SlicedTensor]:
    return [sliced(whole, *cut, **options) for cut in cuts(whole.numel(), world_size)]


def same(expected: Tensor, actual: Tensor) -> bool:
    """Every bit, but for what kind of NaN it is."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, actual)
    if not torch.equal(expected.isnan(), actual.isnan()):
        return False
    left, right = (tensor[~tensor.isnan()].contiguous() for tensor in (expected, actual))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def together(parts: Sequence[SlicedTensor], shape: Sequence[int]) -> Tensor:
    """The tensor that all ranks hold together."""
    assert all(type(part) is SlicedTensor and part.shape == torch.Size(shape) for part in parts)
    assert all(part.own.numel() == 0 or part.own.dtype == part.dtype for part in parts)
    return torch.cat([part.own for part in parts]).view(shape)


Edit = Callable[[Tensor, Callable[[int], Tensor], Tensor], Any]
"""Of the gradient, with a tensor for each seed, and a mask."""

IN_PLACE: dict[str, Edit] = {
    "zero_": lambda g, t, m: g.zero_(),
    "fill_": lambda g, t, m: g.fill_(0.3),
    "fill_ by a tensor": lambda g, t, m: g.fill_(torch.tensor(0.3, dtype=torch.float64)),
    "mul_": lambda g, t, m: g.mul_(0.37),
    "mul_ by a number of another dtype": lambda g, t, m: g.mul_(torch.tensor(0.37, dtype=torch.float64)),
    "mul_ by a mask": lambda g, t, m: g.mul_(m),
    "*= a tensor": lambda g, t, m: operator.imul(g, t(1)),
    "/= a tensor": lambda g, t, m: operator.itruediv(g, t(1)),
    "+= a tensor": lambda g, t, m: operator.iadd(g, t(1)),
    "-= a tensor": lambda g, t, m: operator.isub(g, t(1)),
    "**= 2": lambda g, t, m: operator.ipow(g, 2),
    "pow_ 0.5": lambda g, t, m: g.pow_(0.5),
    "pow_ 3": lambda g, t, m: g.pow_(3),
    "pow_ -2": lambda g, t, m: g.pow_(-2),
    "add_ a number": lambda g, t, m: g.add_(0.3),
    "sub_ a number": lambda g, t, m: g.sub_(0.3),
    "div_ by a number": lambda g, t, m: g.div_(3),
    "neg_": lambda g, t, m: g.neg_(),
    "abs_": lambda g, t, m: g.abs_(),
    "sign_": lambda g, t, m: g.sign_(),
    "sqrt_": lambda g, t, m: g.sqrt_(),
    "square_": lambda g, t, m: g.square_(),
    "relu_": lambda g, t, m: g.relu_(),
    "reciprocal_": lambda g, t, m: g.reciprocal_(),
    "floor_": lambda g, t, m: g.floor_(),
    "ceil_": lambda g, t, m: g.ceil_(),
    "round_": lambda g, t, m: g.round_(),
    "trunc_": lambda g, t, m: g.trunc_(),
    "frac_": lambda g, t, m: g.frac_(),
    "clamp_": lambda g, t, m: g.clamp_(-0.5, 0.5),
    "clamp_ from below": lambda g, t, m: g.clamp_(min=0.0),
    "clip_": lambda g, t, m: g.clip_(max=0.1),
    "clamp_min_": lambda g, t, m: g.clamp_min_(-0.1),
    "clamp_max_": lambda g, t, m: g.clamp_max_(0.1),
    "copysign_": lambda g, t, m: g.copysign_(t(1)),
    "copy_": lambda g, t, m: g.copy_(t(1)),
    "copy_ of another dtype": lambda g, t, m: g.copy_(t(1).double() if not g.is_complex() else t(1)),
    "masked_fill_": lambda g, t, m: g.masked_fill_(m, 0.0),
    "masked_fill_ by a tensor": lambda g, t, m: g.masked_fill_(m, torch.tensor(0.5, dtype=g.dtype)),
    "masked_fill_ where it is small": lambda g, t, m: g.masked_fill_(g.abs() < 0.5, 0.0),
    "nan_to_num_": lambda g, t, m: g.nan_to_num_(0.0, 1e4, -1e4),
    "torch.nan_to_num_": lambda g, t, m: torch.nan_to_num_(g),
    "lerp_": lambda g, t, m: g.lerp_(t(1), 0.3),
    "lerp_ by a tensor": lambda g, t, m: g.lerp_(t(1), t(2)),
    "addcmul_": lambda g, t, m: g.addcmul_(t(1), t(2), value=0.3),
    "addcdiv_": lambda g, t, m: g.addcdiv_(t(1), t(2), value=-2),
    "chained": lambda g, t, m: g.mul_(2).add_(t(1)).clamp_(-1, 1),
    "by itself": lambda g, t, m: g.mul_(g),
    "by a copy": lambda g, t, m: g.sub_(g.clone().mul_(0.5)),
    ".data": lambda g, t, m: g.data.mul_(m),
    "foreach": lambda g, t, m: torch._foreach_mul_([t(1), g], [2.0, 0.3]),
    "foreach by tensors": lambda g, t, m: torch._foreach_sub_([g, t(1)], [t(2), t(3)]),
    "foreach clamp": lambda g, t, m: torch._foreach_clamp_max_([g], 0.2),
    "foreach zero": lambda g, t, m: torch._foreach_zero_([g, t(1)]),
    "setting .data": lambda g, t, m: setattr(g, "data", t(1)),
}
# With a scale of a dtype in which a sum is rounded once and not twice.
WIDE: dict[str, Edit] = {
    "add_ with alpha": lambda g, t, m: g.add_(t(1), alpha=0.3),
    "sub_ with alpha": lambda g, t, m: g.sub_(t(1), alpha=-2),
}
OUT_OF_PLACE: dict[str, Edit] = {
    "-g": lambda g, t, m: -g,
    "abs": lambda g, t, m: abs(g),
    "g + t": lambda g, t, m: g + t(1),
    "t - g": lambda g, t, m: t(1) - g,
    "1 - g": lambda g, t, m: 1 - g,
    "1 / g": lambda g, t, m: 1 / g,
    "g * m": lambda g, t, m: g * m,
    "m * g": lambda g, t, m: m * g,
    "np * g": lambda g, t, m: np.float64(0.3) * g,
    "g / 3": lambda g, t, m: g / 3,
    "g ** 2": lambda g, t, m: g**2,
    "g > 0": lambda g, t, m: g > 0,
    "g != t": lambda g, t, m: g != t(1),
    "~(g < 0)": lambda g, t, m: ~(g < 0),
    "(g > 0) & m": lambda g, t, m: (g > 0) & m,
    "(g > 0).float()": lambda g, t, m: (g > 0).float(),
    "clamp": lambda g, t, m: torch.clamp(g, -0.5, 0.5),
    "where": lambda g, t, m: torch.where(m, g, 0.0),
    "where by itself": lambda g, t, m: torch.where(g.abs() > 0.5, g, torch.zeros_like(g)),
    "sign": lambda g, t, m: g.sign(),
    "sqrt": lambda g, t, m: torch.sqrt(g),
    "square": lambda g, t, m: g.square(),
    "clone": lambda g, t, m: g.clone(),
    "deepcopy": lambda g, t, m: copy.deepcopy(g),
    "double": lambda g, t, m: g.double(),
    "to": lambda g, t, m: g.to(torch.float16),
    "bool": lambda g, t, m: g.bool(),
    "isnan": lambda g, t, m: torch.isnan(g),
    "isfinite": lambda g, t, m: torch.isfinite(g),
    "masked_fill": lambda g, t, m: g.masked_fill(m, 1.0),
    "promoted": lambda g, t, m: g * torch.tensor(0.3, dtype=torch.float64),
    "promoted by a tensor": lambda g, t, m: g + t(1).double(),
    "lerp": lambda g, t, m: torch.lerp(g, t(1), 0.3),
    "foreach": lambda g, t, m: torch._foreach_mul([g], 0.3)[0],
    "foreach of sums": lambda g, t, m: torch._foreach_add([t(1), g], [g, t(2)])[0],
}
COMPLEX_ONES = ["zero_", "fill_", "mul_", "mul_ by a mask", "+= a tensor", "-= a tensor", "div_ by a number", "copy_"]
COMPLEX_ONES += ["masked_fill_", "add_ a number", ".data", "foreach zero"]


def check(edit: Edit, shape: Sequence[int], dtype: torch.dtype, in_place: bool) -> None:
    whole = values(shape, dtype)
    expected = whole.clone()
    chosen = mask(shape)

    def other(seed: int) -> Tensor:
        return values(shape, dtype, seed)

    outcome = edit(expected, other, chosen)
    expected = expected if in_place else outcome
    for world_size in (1, 2, 4):
        parts = slices(whole, world_size)
        memories = [part.own for part in parts]
        results = [edit(part, other, chosen) for part in parts]
        if in_place:
            assert all(memory is part.own for memory, part in zip(memories, parts, strict=True))
            results = parts
        else:
            assert same(whole, together(parts, shape)), "written to"
        assert same(expected, together(results, shape)), f"{world_size} ranks"


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", [*IN_PLACE, *WIDE])
def test_edits_in_place(name: str, dtype: torch.dtype) -> None:
    if name in WIDE and dtype.itemsize == 2:
        pytest.skip("rounded twice or once")
    for shape in SHAPES:
        check({**IN_PLACE, **WIDE}[name], shape, dtype, in_place=True)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_functions_out_of_place(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check(OUT_OF_PLACE[name], shape, dtype, in_place=False)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("name", COMPLEX_ONES)
def test_complex_gradients(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check(IN_PLACE[name], shape, dtype, in_place=True)


@pytest.mark.parametrize("form", [(1,), (3,), (5, 1), (1, 3), (5, 3), (1, 1)])
def test_operands_of_a_smaller_shape(form: tuple[int, ...]) -> None:
    whole, other = values((5, 3), torch.float32), values(form, torch.float32, 1)
    for operand in (other, other.double(), other.expand(5, 3).t().contiguous().t()):
        expected = whole.clone().mul_(operand)
        for world_size in (1, 2, 3, 4):
            parts = slices(whole, world_size)
            for part in parts:
                part.mul_(operand)
            assert same(expected, together(parts, (5, 3)))


def test_an_operand_is_not_made_larger_than_the_slice() -> None:
    """An expanded one of a terabyte is cut before it is copied."""
    huge = (2**20, 2**20)
    part = SlicedTensor(torch.ones(5), 2**39 - 2, huge, "embedding")
    part.mul_(torch.arange(2.0**20))
    assert part.own.tolist() == [2.0**20 - 2, 2.0**20 - 1, 0.0, 1.0, 2.0]
    part[: 2**19] = 7.0
    part[2**19 :, 1] = 8.0
    part[torch.tensor([2**19, 1]), 0] = 9.0
    assert part.own.tolist() == [7.0, 7.0, 9.0, 8.0, 2.0]
    part[torch.tensor([2**19])] = 5.0
    assert part.own.tolist() == [7.0, 7.0, 5.0, 5.0, 5.0]


# ---------------------------------------------------------------------------------------------------------------------
# Indices

INDICES: dict[str, Any] = {
    "row": 2,
    "last row": -1,
    "rows": slice(1, 3),
    "no rows": slice(2, 2),
    "from a row on": slice(2, None),
    "every other row": slice(None, None, 2),
    "all": slice(None),
    "ellipsis": ...,
    "element": (1, 2),
    "columns": (slice(None), slice(1, 3)),
    "a column": (slice(None), 1),
    "last column": (..., -1),
    "a block": (slice(1, 4), slice(0, 2)),
    "new dimension": (None, slice(1, 3)),
    "new dimensions": (1, None, slice(None, None, 2), None),
    "a number of numpy": np.int64(1),
    "a tensor for a number": torch.tensor(1),
    "whole mask": mask((5, 4), 3),
    "mask of rows": torch.tensor([True, False, True, True, False]),
    "no mask": torch.zeros(5, dtype=torch.bool),
    "mask of columns": (slice(None), torch.tensor([True, False, True, False])),
    "numbers of rows": torch.tensor([3, 0, -1]),
    "a list": [0, 2],
    "an array": np.array([4, 1]),
    "list in a tuple": ([0, 2],),
    "pairs": (torch.tensor([0, 4, 2]), torch.tensor([1, 3, 0])),
    "row and columns": (2, torch.tensor([3, 0])),
    "columns by number": (slice(1, None), torch.tensor([3, 0])),
    "rows by number, a column": (torch.tensor([4, 1]), 2),
    "grid": (torch.tensor([[0], [3]]), torch.tensor([1, 2])),
    "ellipsis and numbers": (..., torch.tensor([1, 2])),
    "true": True,
    "false": False,
    "numbers of nothing": torch.zeros(0, dtype=torch.int64),
}
SHAPE = (5, 4)


def everywhere(edit: Callable[[Tensor], Any], shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float32) -> None:
    """What an edit does to the parts is what it does to the whole."""
    whole = values(shape, dtype)
    expected = whole.clone()
    edit(expected)
    for world_size in (1, 3, 7):
        parts = slices(whole, world_size)
        for part in parts:
            edit(part)
        assert same(expected, together(parts, shape)), f"{world_size} ranks"


def assign(index: Any, value: Any) -> Callable[[Tensor], None]:
    def edit(gradient: Tensor) -> None:
        gradient[index] = value

    return edit


@pytest.mark.parametrize("name", INDICES)
def test_assigning_to_an_index(name: str) -> None:
    index = INDICES[name]
    shape = values(SHAPE, torch.float32)[index].shape
    everywhere(assign(index, 0.0))
    everywhere(assign(index, 3))
    everywhere(assign(index, torch.tensor(0.3)))
    everywhere(assign(index, torch.tensor([0.3])))
    everywhere(assign(index, values(shape, torch.float32, 5)))
    everywhere(assign(index, values((1, 1, *shape), torch.float32, 5)))
    if len(shape) > 1:
        everywhere(assign(index, values(shape[1:], torch.float32, 5)))


@pytest.mark.parametrize("name", INDICES)
def test_edits_of_what_an_index_selects(name: str) -> None:
    """Some indices give views, and writing to these writes to the gradient; others give copies, and it does not."""
    index = INDICES[name]
    shape = values(SHAPE, torch.float32)[index].shape
    factor = values(shape, torch.float32, 6)

    def augmented(gradient: Tensor) -> None:
        gradient[index] *= 0.5
        gradient[index] += factor

    def negated(gradient: Tensor) -> None:
        gradient[index] = -gradient[index]

    everywhere(augmented)
    everywhere(negated)
    everywhere(lambda gradient: gradient[index].zero_())
    everywhere(lambda gradient: gradient[index].mul_(factor).add_(1))
    everywhere(lambda gradient: gradient[index].copy_(factor))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2, 4), (2, 0, 3), ()])
def test_indices_of_other_shapes(shape: tuple[int, ...]) -> None:
    everywhere(assign(..., 1.0), shape)
    everywhere(assign((), 1.0), shape)
    everywhere(assign(torch.rand(shape) < 0.5, 1.0), shape)
    if shape:
        everywhere(assign(slice(1, None), 2.0), shape)
        everywhere(assign(torch.arange(shape[0]) % 2 == 0, 3.0), shape)
        everywhere(assign((..., slice(None, None, 2)), 4.0), shape)
        everywhere(assign(torch.tensor([0]), 5.0), shape)


def test_a_view_of_a_view() -> None:
    def edit(gradient: Tensor) -> None:
        gradient[1:4][1][2:] = 1.0
        gradient[0][1] = 2.0
        gradient[3:][0].mul_(0.5)

    everywhere(edit)


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: operator.setitem(g, g < 0, 0.0),
        lambda g: operator.setitem(g, g.isnan(), 1.0),
        lambda g: operator.setitem(g, slice(None), g * 2),
        lambda g: operator.setitem(g, ..., g.clone().clamp_(-1, 1)),
        lambda g: operator.setitem(g, slice(1, 3), g[1:3] * 2),
    ],
)
def test_assigning_what_was_made_from_it(edit: Callable[[Tensor], Any]) -> None:
    everywhere(edit)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (5, IndexError),
        ((0, 9), IndexError),
        ((0, 0, 0), IndexError),
        (torch.tensor([5]), IndexError),
        (torch.ones(4, dtype=torch.bool), IndexError),
        (slice(None, None, -1), ValueError),
        (1.5, (TypeError, IndexError)),
        ("a", (TypeError, IndexError)),
        (torch.tensor([0.5]), IndexError),
    ],
)
def test_wrong_indices_raise_on_every_rank(index: Any, error: Any) -> None:
    whole = values(SHAPE, torch.float32)
    for tensor in [whole, *slices(whole, 3)]:
        with pytest.raises(error):
            tensor[index] = 0.0


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.ones(5)),
        (slice(0, 2), torch.ones(3, 4)),
        (torch.tensor([0, 1]), torch.ones(3, 4)),
        (0, [1.0, 2.0, 3.0, 4.0]),
        (0, np.ones(4)),
    ],
)
def test_wrong_values_raise_on_every_rank(index: Any, value: Any) -> None:
    whole = values(SHAPE, torch.float32)
    for tensor in [whole, *slices(whole, 3), sliced(whole, 0, 0)]:
        before = tensor.own.clone() if isinstance(tensor, SlicedTensor) else None
        with pytest.raises((RuntimeError, TypeError)):
            tensor[index] = value
        assert before is None or same(before, tensor.own)


# ---------------------------------------------------------------------------------------------------------------------
# What a tensor is asked about itself


def test_it_answers_what_a_tensor_is() -> None:
    whole = values((5, 3), torch.bfloat16)
    part = sliced(whole, 4, 9)
    assert isinstance(part, Tensor)
    assert torch.is_tensor(part)
    for question in (
        *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "itemsize", "nbytes", "is_cpu"),
        *("requires_grad", "grad_fn", "grad", "is_leaf"),
    ):
        assert getattr(part, question) == getattr(whole, question), question
    for method in (
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "is_contiguous", "__len__"),
        *("is_floating_point", "is_complex", "storage_offset", "type"),
    ):
        assert getattr(part, method)() == getattr(whole, method)(), method
    assert torch.numel(part) == 15
    assert part.size(0) == 5
    assert {part: 1}[part] == 1
    for text in (repr(part), str(part), f"{part}"):
        assert "'layer.weight', shape [5, 3], torch.bfloat16" in text
        assert "sliced over ranks" in text
    assert dir(part)
    assert (part == None) is False  # noqa: E711 - what old code does
    assert part.own.tolist() == whole.flatten()[4:9].tolist()
    assert (part.start, part.parameter_name) == (4, "layer.weight")


def test_what_changes_nothing_gives_the_same_object() -> None:
    part = sliced(values((5, 3), torch.float32), 4, 9)
    assert part.detach() is part
    assert part.detach_() is part
    assert part.data is part
    assert part.contiguous() is part
    assert part.requires_grad_(False) is part
    part.requires_grad = False
    for same_one in (part.float(), part.cpu(), part.to("cpu"), part.to(torch.float32), part.to(part.clone())):
        assert same_one is part
    assert part.mul_(2) is part
    assert part.to(torch.float32, copy=True) is not part


def test_ordinary_tensors_made_after_it() -> None:
    part = sliced(values((5, 3), torch.float16), 4, 9)
    for made in (torch.zeros_like(part), torch.ones_like(part), torch.empty_like(part), part.new_zeros((5, 3))):
        assert type(made) is Tensor
        assert (made.shape, made.dtype, made.is_contiguous()) == ((5, 3), torch.float16, True)
    assert torch.full_like(part, 3.0).unique().tolist() == [3.0]
    assert torch.zeros_like(part, dtype=torch.bool).dtype is torch.bool
    assert part.new_tensor([1.0]).dtype is torch.float16
    torch.manual_seed(0)
    noise = torch.randn_like(part)
    torch.manual_seed(0)
    assert torch.equal(noise, torch.randn_like(torch.zeros(5, 3, dtype=torch.float16)))
    assert torch.arange(15.0).view_as(part).shape == (5, 3)
    assert torch.arange(15.0).reshape_as(part).shape == (5, 3)
    assert torch.arange(3.0).expand_as(part).shape == (5, 3)
    assert torch.arange(3.0).type_as(part).dtype is torch.float16
    assert torch.arange(3.0).to(part).dtype is torch.float16


def test_a_device_of_its_own() -> None:
    """Offloaded gradients are edited on the host, and look as if they were where the parameter is."""
    part = SlicedTensor(torch.ones(5), 4, (5, 3), "w", device=torch.device("meta"))
    assert part.device.type == "meta"
    part.mul_(torch.full((5, 3), 2.0))  # on the host, which is taken as it is
    assert part.own.tolist() == [2.0] * 5
    assert torch.zeros_like(part).device.type == "meta"
    assert (part * 2).device.type == "meta"
    assert (part * 2).own.tolist() == [4.0] * 5


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "norm()": lambda g: g.norm(),
    "vector_norm": lambda g: torch.linalg.vector_norm(g),
    "sum()": lambda g: g.sum(),
    "mean()": lambda g: torch.mean(g),
    "max()": lambda g: g.max(),
    "any()": lambda g: torch.isnan(g).any(),
    "all()": lambda g: torch.isfinite(g).all(),
    "item()": lambda g: g.item(),
    "tolist()": lambda g: g.tolist(),
    "numpy()": lambda g: g.detach().cpu().numpy(),
    "__array__()": lambda g: np.asarray(g),
    "matmul()": lambda g: g @ torch.ones(4, 2),
    "mm()": lambda g: torch.mm(torch.ones(2, 5), g),
    "view()": lambda g: g.view(-1),
    "reshape()": lambda g: g.reshape(-1),
    "flatten()": lambda g: g.flatten(),
    ".T": lambda g: g.T,
    "t()": lambda g: g.t(),
    "unbind()": lambda g: list(g),
    "equal()": lambda g: torch.equal(g, g),
    "allclose()": lambda g: torch.allclose(g, torch.zeros(5, 4)),
    "__bool__()": lambda g: bool(g),
    "__float__()": lambda g: float(g),
    "__contains__()": lambda g: 1.0 in g,
    "data_ptr()": lambda g: g.data_ptr(),
    "untyped_storage()": lambda g: g.untyped_storage(),
    "__dlpack_device__()": lambda g: torch.from_dlpack(g),
    "__reduce_ex__()": lambda g: pickle.dumps(g),
    "__reduce_ex__() ": lambda g: torch.save(g, io.BytesIO()),
    "__reduce_ex__()  ": lambda g: copy.copy(g),
    "cat()": lambda g: torch.cat([g, g]),
    "stack()": lambda g: torch.stack([g]),
    "histc()": lambda g: torch.histc(g),
    "_foreach_norm()": lambda g: torch._foreach_norm([torch.ones(2), g]),
    "einsum()": lambda g: torch.einsum("ij->", g),
    "cumsum()": lambda g: g.cumsum(0),
    "softmax()": lambda g: torch.softmax(g, 0),
    "dropout()": lambda g: torch.nn.functional.dropout(g),
    "relu()": lambda g: torch.nn.functional.relu(g, inplace=True),
    "normal_()": lambda g: torch.nn.init.normal_(g),
    "tanh_()": lambda g: g.tanh_(),
    "exp()": lambda g: g.exp(),
    "pow() with these arguments": lambda g: g**1.5,
    "maximum()": lambda g: torch.maximum(g, torch.zeros(5, 4)),
    "clamp_() with these arguments": lambda g: g.clamp_(max=torch.ones(5, 4)),
    "add_() with these arguments": lambda g: g.add_(0.3, alpha=0.3),
    "div() with these arguments": lambda g: torch.div(g, 2, rounding_mode="floor"),
    "round() with these arguments": lambda g: torch.round(g, decimals=2),
    "nan_to_num(out=...)": lambda g: torch.nan_to_num(g, out=g),
    "add(out=...)": lambda g: torch.add(torch.ones(5, 4), 1, out=g),
    "add_() of a tensor that is not": lambda g: torch.zeros(5, 4).add_(g),
    "copy_() of a tensor that is not": lambda g: torch.zeros(5, 4).copy_(g),
    "__getitem__()": lambda g: torch.zeros(5, 4)[g],
    "__getitem__() ": lambda g: g[g > 0],
    "__setitem__()": lambda g: operator.setitem(torch.zeros(5, 4), 0, g),
    "requires_grad_()": lambda g: g.requires_grad_(),
    "its .requires_grad": lambda g: setattr(g, "requires_grad", True),
    "another shape or dtype for its .data": lambda g: setattr(g, "data", torch.ones(3)),
    "register_hook()": lambda g: g.register_hook(print),
    "backward()": lambda g: g.backward(),
    "share_memory_()": lambda g: g.share_memory_(),
    "mul() with a tensor of shape [2, 5, 4]": lambda g: g * torch.ones(2, 5, 4),
    "mul_() with a tensor of shape [3]": lambda g: g.mul_(torch.ones(3)),
    "mul() with a sparse tensor": lambda g: g * torch.ones(5, 4).to_sparse(),
    "a conversion to torch.int32": lambda g: g.to(torch.int32),
    "an index of what an index selected": lambda g: g[:, 1:3][0],
    "assigning what is cut at other places": lambda g: operator.setitem(g, slice(0, 2), g[2:4]),
    "assigning many values by a sliced mask": lambda g: operator.setitem(g, g > 0, torch.ones(20)),
    "aten.set_": lambda g: torch.ones(5, 4).set_(g),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_other_ranks_is_refused_on_every_rank(what: str) -> None:
    whole = values(SHAPE, torch.float32)
    for cut in [*cuts(20, 3), (0, 0), (0, 20)]:
        reports: list[int] = []
        part = sliced(whole, *cut, edited=reports.append)
        before = part.own.clone()
        with pytest.raises(ParameterAccessError) as caught:
            REFUSED[what](part)
        text = str(caught.value)
        assert what.strip() in text
        assert "'layer.weight' is sliced over the ranks" in text
        for way in ("full_gradient(module, name)", "full_gradients(module)", "clip_grad_norm_"):
            assert way in text
        assert same(before, part.own)
        assert reports == []


def test_gradients_of_two_parameters_do_not_go_together() -> None:
    """Not even on a rank where their slices happen to fit."""
    first = SlicedTensor(torch.ones(6), 0, (2, 3), "first")
    second = SlicedTensor(torch.ones(6), 0, (2, 3), "second")
    for edit in (lambda: first.add_(second), lambda: first * second, lambda: operator.setitem(first, ..., second)):
        with pytest.raises(ParameterAccessError):
            edit()
    assert torch.equal(first.own, torch.ones(6))


def test_errors_of_dtype_are_those_of_torch_on_every_rank() -> None:
    whole = torch.arange(6)
    for tensor in [whole, sliced(whole, 0, 0), sliced(whole, 0, 6)]:
        with pytest.raises(RuntimeError, match="can't be cast"):
            tensor.mul_(0.5)
        with pytest.raises(RuntimeError):
            tensor.masked_fill_(torch.ones(6), 0)


@pytest.mark.parametrize(
    ("own", "start", "shape"),
    [(torch.ones(2, 2), 0, (2, 2)), (torch.ones(4)[::2], 0, (4,)), (torch.ones(3), 2, (4,)), (torch.ones(3), -1, (4,))],
)
def test_what_is_no_slice(own: Tensor, start: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="slice of the averaged gradient of 'w'"):
        SlicedTensor(own, start, shape, "w")


# ---------------------------------------------------------------------------------------------------------------------
# Life and history


def test_a_gradient_that_was_cleared_is_refused_with_its_views_but_not_its_copies() -> None:
    alive = [True]
    part = sliced(values(SHAPE, torch.float32), 3, 11, alive=lambda: alive[0])
    row, copied = part[1], part.clone()
    alive[0] = False
    for use in (
        lambda: part.mul_(2),
        lambda: part + 1,
        lambda: part.clone(),
        lambda: operator.setitem(part, 0, 1.0),
        lambda: part[0],
        lambda: row.zero_(),
        lambda: copied.add_(part),
        lambda: part.norm(),
        lambda: torch._foreach_mul_([part], 2),
        lambda: part.double(),
    ):
        with pytest.raises(ParameterAccessError, match=r"'layer\.weight' that was cleared or replaced"):
            use()
    copied.mul_(2)
    assert part.shape == SHAPE
    assert repr(part)


EDITS: list[Callable[[Tensor], Any]] = [
    lambda g: g.mul_(2.0),
    lambda g: g.mul_(2.5),
    lambda g: g.div_(2.0),
    lambda g: g.zero_(),
    lambda g: g.mul_(torch.ones(5, 4)),
    lambda g: g.mul_(torch.ones(4)),
    lambda g: g.mul_(mask((5, 4))),
    lambda g: g.mul_(mask((5, 4), 1)),
    lambda g: g.clamp_(min=1.0),
    lambda g: g.clamp_(max=1.0),
    lambda g: operator.setitem(g, 0, 0.0),
    lambda g: operator.setitem(g, 1, 0.0),
    lambda g: operator.setitem(g, slice(1, 2), 0.0),
    lambda g: operator.setitem(g, torch.tensor([0, 1]), 0.0),
    lambda g: operator.setitem(g, torch.tensor([0, 2]), 0.0),
    lambda g: operator.setitem(g, g > 0, 0.0),
    lambda g: operator.setitem(g, g > 1, 0.0),
    lambda g: g[0].mul_(3.0),
    lambda g: g[:, 0].mul_(3.0),
    lambda g: g.copy_(g * 2),
    lambda g: g.copy_(g * 3),
    lambda g: g.data.mul_(7.0),
    lambda g: torch._foreach_mul_([g], 9.0),
    lambda g: setattr(g, "data", torch.ones(5, 4)),
]


def test_edits_are_told_by_a_number_that_ranks_have_in_common() -> None:
    whole = values(SHAPE, torch.float32)
    numbers = []
    for edit in EDITS:
        reports: list[list[int]] = [[], [], []]
        for (start, end), told in zip(cuts(20, 3), reports, strict=True):
            edit(sliced(whole, start, end, edited=told.append))
        assert reports[0] == reports[1] == reports[2]
        assert len(reports[0]) == 1
        assert 0 <= reports[0][0] < 2**63
        numbers.append(reports[0][0])
    assert len(set(numbers)) == len(numbers)


def test_the_history_of_a_copy_is_part_of_what_is_told() -> None:
    """A copy that ranks changed differently is found when it is written back."""
    told = []
    for factor in (1.0, 2.0):
        part = sliced(values(SHAPE, torch.float32), 3, 11, edited=told.append)
        copied = part.clone()
        copied[0] *= factor
        assert told == told[:1]
        part.copy_(copied)
        assert copied.history != part.history
    assert len(set(told)) == 2


def test_reading_is_not_told() -> None:
    told: list[int] = []
    part = sliced(values(SHAPE, torch.float32), 3, 11, edited=told.append)
    for use in (lambda: part * 2, lambda: part.clone().zero_(), lambda: part[0], lambda: torch.zeros_like(part)):
        use()
    assert told == []


# ---------------------------------------------------------------------------------------------------------------------
# As users write it


def test_what_users_do_to_gradients() -> None:
    """``torch.nn.utils`` and hand-written code, on parameters of which some have an ordinary gradient."""

    def edits(gradients: list[Tensor]) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(g.shape)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_value_(parameters, 0.9)
        torch.nn.utils.clip_grad_value_(parameters, 0.8, foreach=True)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(3.0))
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(3.0), foreach=True)
        for parameter in parameters:
            parameter.grad.data.mul_(0.7)
            parameter.grad.add_(torch.ones_like(parameter), alpha=0.01)
            parameter.grad[0] = 0
        torch.manual_seed(0)
        for parameter in parameters:
            parameter.grad.add_(torch.randn_like(parameter.grad) * 0.1)

    wholes = [values((5, 4), torch.float32), values((7,), torch.float32, 1)]
    expected = [whole.clone() for whole in wholes]
    edits(expected)
    for world_size in (1, 2, 3):
        ranks = [slices(wholes[0], world_size)[rank] for rank in range(world_size)]
        for part in ranks:
            ordinary = wholes[1].clone()
            edits([part, ordinary])
            assert same(expected[1], ordinary)
        assert same(expected[0], together(ranks, (5, 4)))


def test_modes_and_inference_leave_no_trace() -> None:
    part = sliced(values(SHAPE, torch.float32), 3, 11)
    with torch.inference_mode():
        derived = part * 2
        part.mul_(torch.ones(5, 4))
    assert not derived.own.is_inference()
    with torch.enable_grad():
        weight = torch.ones(5, 4, requires_grad=True)
        assert not (part * weight).own.requires_grad
        part.add_(weight)
    assert not part.own.requires_grad
    with torch.device("meta"):
        part.mul_(2)
        part[1:, 0] = 0
        part[torch.tensor([0, 1], device="cpu")] = 0
    assert part.own.device.type == "cpu"
