"""What a partitioned parameter shows: true about everything but values, NaN when read, an error when written."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.shards.slice import Placeholders

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def shown(parameter: Tensor | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(5, 7)) if parameter is None else parameter
    parameter.data = Placeholders().like(parameter, CPU)
    return parameter


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 7), (2, 0, 3), (2, 3, 4)])
def test_shape_and_dtype_are_true_and_values_are_nan(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    original = torch.ones(shape, dtype=dtype)
    placeholder = Placeholders().like(original, CPU)
    assert (placeholder.shape, placeholder.dtype, placeholder.ndim) == (original.shape, dtype, original.ndim)
    assert placeholder.numel() == original.numel()
    assert bool(placeholder.isnan().all())
    assert placeholder.untyped_storage().nbytes() == dtype.itemsize


def test_all_of_one_dtype_share_one_element() -> None:
    placeholders = Placeholders()
    first, second = (placeholders.like(torch.ones(1).expand(size), CPU) for size in (3, 10**9))
    other = placeholders.like(torch.ones(3, dtype=torch.float64), CPU)
    keys = [tensor.untyped_storage()._cdata for tensor in (first, second, other)]
    assert keys[0] == keys[1] != keys[2]


READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "sum": lambda p: p.sum(),
    "matmul": lambda p: torch.ones(2, 5) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(2, 7), p),
    "clone": lambda p: p.detach().clone(),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "cast": lambda p: p.double(),
    "stack": lambda p: torch.stack([p, p]),
    "norm": lambda p: p.norm(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "into another": lambda p: torch.zeros(5, 7).copy_(p.detach()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_gives_nan(name: str) -> None:
    assert bool(READS[name](shown()).isnan().all())


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1),
    "copy_": lambda p: p.copy_(torch.ones(5, 7)),
    "mul_": lambda p: p.mul_(2),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "data": lambda p: p.data.add_(1),
    "through a view": lambda p: p.data[0].zero_(),
    "ones_": nn.init.ones_,
    "normal_": nn.init.normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "data_ptr": lambda p: p.data_ptr(),
    "numpy": lambda p: p.detach().numpy(),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save state": lambda p: torch.save({"weight": p.detach()}, io.BytesIO()),
    "out": lambda p: torch.add(torch.ones(5, 7), 1, out=p.data),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_raises_and_changes_nothing(name: str) -> None:
    parameter = shown()
    with torch.no_grad(), pytest.raises(RuntimeError):
        WRITES[name](parameter)
    assert bool(parameter.isnan().all())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_refuse_it(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    """A fused one would write 65,536 numbers through one element, and the heap would be gone."""
    parameter = shown(nn.Parameter(torch.ones(256, 256)))
    parameter.grad = torch.ones(256, 256)
    stepper = optimizer([parameter], lr=0.1, **options)
    with pytest.raises(RuntimeError):
        stepper.step()
    assert bool(parameter[0, 0].isnan())


def test_identity_gradients_and_hooks_survive_showing_it() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    arrived: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.clone()))
    version = parameter._version
    shown(parameter)
    assert parameter._version == version
    parameter.data = torch.full((2, 2), 3.0)
    parameter.square().sum().backward()
    assert [gradient.tolist() for gradient in arrived] == [[[6.0, 6.0], [6.0, 6.0]]]
