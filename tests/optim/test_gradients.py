"""The norm of gradients in shards: accumulated in float64, the same number for every cut and on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.optim.gradients import clip_by_norm, clip_by_value, gradient_norm
from tests.helpers.world import run_world

ALONE = ControlGroup(None)
NORMS = (1.0, 2.0, 3.0, float("inf"))


def whole(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, generator=generator) * 10.0**power).to(dtype) for size, power in ((67, 0), (1, 2), (130, -3))
    ]


def exact(gradients: list[Tensor], norm_type: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([g.double() for g in gradients]), norm_type))


@pytest.mark.parametrize("norm_type", NORMS)
def test_the_norm_is_that_in_float64_rounded_once(norm_type: float) -> None:
    norm = gradient_norm(whole(), ALONE, norm_type)
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    assert float(norm) == float(torch.tensor(exact(whole(), norm_type)))


def test_a_float32_sum_would_be_another_number() -> None:
    """16,777,216 + 1 is not a float32: squares of 4096 and 300 ones."""
    gradients = [torch.tensor([4096.0]), *(torch.ones(1) for _ in range(300))]
    assert float(gradient_norm(gradients, ALONE)) == float(torch.tensor(math.sqrt(2**24 + 300)))
    assert float(torch.tensor(math.sqrt(2**24 + 300))) != 4096.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    norm = gradient_norm(whole(dtype), ALONE)
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(exact(whole(dtype), 2.0), rel=1e-15 if dtype is torch.float64 else 1e-7)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients(dtype: torch.dtype, norm_type: float) -> None:
    gradients = [torch.view_as_complex(torch.arange(2.0 * n).view(n, 2)).to(dtype) for n in (3, 5)]
    expected = torch.linalg.vector_norm(torch.cat(gradients).to(torch.complex128), norm_type)
    norm = gradient_norm(gradients, ALONE, norm_type)
    assert norm.dtype is (torch.float64 if dtype is torch.complex128 else torch.float32)
    assert float(norm) == pytest.approx(float(expected), rel=1e-15 if dtype is torch.complex128 else 1e-7)
    clip_by_norm(gradients, 0.5, norm)
    assert float(gradient_norm(gradients, ALONE, norm_type)) == pytest.approx(0.5, rel=1e-5)


def test_fp16_does_not_overflow() -> None:
    assert float(gradient_norm([torch.full((4,), 60000.0, dtype=torch.float16)], ALONE)) == 120000.0


@pytest.mark.parametrize("norm_type", NORMS)
def test_nothing_has_norm_zero(norm_type: float) -> None:
    assert float(gradient_norm([], ALONE, norm_type)) == 0.0
    assert float(gradient_norm([torch.zeros(0)], ALONE, norm_type)) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm_type", NORMS)
def test_what_is_not_finite_shows(norm_type: float, bad: float) -> None:
    norm = float(gradient_norm([torch.ones(3), torch.tensor([1.0, bad])], ALONE, norm_type))
    assert math.isnan(norm) if math.isnan(bad) else norm == float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_shows_on_all(bad: float) -> None:
    def run(rank: int) -> list[float]:
        control = Groups.create().control
        mine = torch.tensor([1.0, bad if rank == 1 else 1.0])
        return [float(gradient_norm([mine], control, norm_type)) for norm_type in NORMS]

    for norms in run_world(3, run):
        assert all(math.isnan(norm) if math.isnan(bad) else norm == float("inf") for norm in norms)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_cut_gives_the_same_norm_on_every_rank(world_size: int) -> None:
    """Also where a rank holds nothing, or a piece in float64 that the others do not have."""
    flat = torch.cat(whole())

    def cuts(rank: int) -> list[list[Tensor]]:
        even = list(flat.tensor_split(world_size))[rank]
        return [[even], list(even.split(7)), [flat] if rank == 0 else [], [flat] if rank == world_size - 1 else []]

    def run(rank: int) -> tuple[list[list[float]], torch.dtype]:
        control = Groups.create().control
        norms = [[float(gradient_norm(cut, control, norm_type)) for cut in cuts(rank)] for norm_type in NORMS]
        mixed = gradient_norm([torch.ones(2, dtype=torch.float64 if rank else torch.float32)], control)
        return norms, mixed.dtype

    for norms, dtype in run_world(world_size, run):
        for norm_type, found in zip(NORMS, norms, strict=True):
            assert found == [float(torch.tensor(exact(whole(), norm_type)))] * 4
        assert dtype is torch.float64


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_by_norm_is_torch_s_formula(max_norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in whole()]
    for parameter, gradient in zip(parameters, whole(), strict=True):
        parameter.grad = gradient
    gradients = whole()
    norm = gradient_norm(gradients, ALONE)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)
    clip_by_norm(gradients, max_norm, norm)
    for parameter, clipped, original in zip(parameters, gradients, whole(), strict=True):
        assert torch.equal(parameter.grad, clipped)
        assert torch.equal(clipped, original) == (max_norm == 1e6)


def test_clipping_keeps_dtypes() -> None:
    gradients = [torch.full((3,), 2.0, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)]
    norm = gradient_norm(gradients, ALONE)
    assert float(norm) == pytest.approx(6.0, rel=1e-15)
    clip_by_norm(gradients, 3.0, norm)
    for gradient, dtype in zip(gradients, (torch.float16, torch.float32, torch.float64), strict=True):
        assert gradient.dtype is dtype
        assert torch.allclose(gradient, torch.ones(3, dtype=dtype), rtol=1e-3)


def test_clipping_by_value() -> None:
    gradients = [torch.tensor([-3.0, -0.5, 0.5, 3.0]), torch.zeros(0)]
    clip_by_value(gradients, 1.0)
    assert gradients[0].tolist() == [-1.0, -0.5, 0.5, 1.0]
