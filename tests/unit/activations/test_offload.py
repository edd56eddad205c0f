"""Saved tensors on the host: the same bits, the same errors, and nothing left at the end."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_zero._torch import WeakStorage, top_saved_tensor_hooks
from lightning_zero.activations import SavedOnHost

CPU = torch.device("cpu")
WIDTH = 64  # a row is 256 bytes
ROWS = 32


class OnHost(SavedOnHost):
    """Counts the copies to the host."""

    def __init__(self, min_nbytes: int = 0) -> None:
        super().__init__(CPU, min_nbytes)
        self.copied = 0

    def pack(self, tensor: Tensor) -> Any:
        packed = super().pack(tensor)
        self.copied += packed[0] is not tensor
        return packed


class Kept(torch.autograd.Function):
    """Doubles. Its backward notes what it gets back of what it saved."""

    seen: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, *extra: Tensor) -> Tensor:
        ctx.save_for_backward(*extra)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Kept.seen = list(ctx.saved_tensors)
        return gradient * 2, *(None for _ in Kept.seen)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers)


def gradients(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Tensor]:
    module = network()
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with context():
        loss = module(x).square().mean()
    loss.backward()
    return [tensor.grad for tensor in (x, *module.parameters())]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_same_gradients_with_real_copies() -> None:
    saved = OnHost()
    assert equal(gradients(saved.saving), gradients(contextlib.nullcontext))
    # Each block saves its input, the norm's output, GELU's input, dropout's mask and two statistics of the norm.
    assert saved.copied >= 4 * 4


VIEWS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.randn(ROWS, WIDTH),
    "transposed": lambda: torch.randn(ROWS, WIDTH).t(),
    "permuted": lambda: torch.randn(4, 8, WIDTH).permute(2, 0, 1),
    "third of a projection": lambda: torch.randn(ROWS, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
    "every second row": lambda: torch.randn(ROWS, WIDTH)[1::2],
    "half precision": lambda: torch.randn(ROWS, WIDTH).bfloat16()[3:],
    "complex": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64)[5:],
    "booleans": lambda: torch.randn(ROWS, WIDTH) > 0,
    "a number": lambda: torch.tensor(3.5, dtype=torch.float64),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    tensor = VIEWS[name]()
    expected, stride = tensor.clone(), tensor.stride()
    x = torch.ones((), requires_grad=True)
    with OnHost().saving():
        y = Kept.apply(x, tensor)
    memory = WeakStorage(tensor)
    del tensor
    assert memory.lock() is None, "nothing but autograd held it, and autograd does not any more"
    y.backward()
    (back,) = Kept.seen
    assert torch.equal(back, expected)
    assert (back.stride(), back.dtype) == (stride, expected.dtype)


def test_several_backwards_and_the_gradient_of_a_gradient() -> None:
    results = []
    for context in (contextlib.nullcontext, OnHost().saving):
        x = torch.linspace(-1, 1, ROWS * WIDTH, requires_grad=True)
        with context():
            y = (x.exp() * x).sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            z = first.square().sum()
        z.backward(retain_graph=True)
        z.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def _sparse() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(WIDTH).to_sparse()


STAYS: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)),
    "a view of a parameter": lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)).t(),
    "nothing": lambda: torch.randn(0, WIDTH),
    "less than the least": lambda: torch.randn(15, WIDTH),
    "expanded from little": lambda: torch.randn(16, 1).expand(16, 1000),
    "a column": lambda: torch.randn(1000, WIDTH)[:, 3],
    "sparse": _sparse,
    "conjugated": lambda: torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_is_the_very_memory(name: str) -> None:
    saved = OnHost(min_nbytes=16 * WIDTH * 4)
    tensor = STAYS[name]()
    x = torch.ones((), requires_grad=True)
    with saved.saving():
        y = Kept.apply(x, tensor)
    y.backward()
    (back,) = Kept.seen
    assert saved.copied == 0
    assert back.layout is not torch.strided or back.data_ptr() == tensor.data_ptr()
    assert torch.equal(*(t.to_dense() if t.layout is torch.sparse_coo else t for t in (back, tensor)))


def _input_changed(x: Tensor) -> Tensor:
    hidden = x * 1
    y = hidden.sin()
    hidden.mul_(2)
    return y


def _output_changed(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(2)
    return y.sum() + x.exp().sum()


def _view_changed(x: Tensor) -> Tensor:
    hidden = x * 1
    y = hidden.t().sin()
    hidden[0].zero_()
    return y


def _small_and_changed(x: Tensor) -> Tensor:
    hidden = x[0, 0] * 1
    y = hidden.sin()
    hidden.mul_(2)
    return x.sum() * y


@pytest.mark.parametrize("change", [_input_changed, _output_changed, _view_changed, _small_and_changed])
def test_a_change_is_refused_as_torch_refuses_it(change: Callable[[Tensor], Tensor]) -> None:
    for context in (contextlib.nullcontext, OnHost(min_nbytes=8).saving):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with context():
            y = change(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_of_the_user_win_inside_and_only_there() -> None:
    saved = OnHost()
    packed: list[int] = []
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with saved.saving():
        with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t, lambda t: t):
            y = x.sin()
        with save_on_cpu():
            y = y.sin()
        assert (len(packed), saved.copied) == (1, 0)
        y = y.sin()
        assert saved.copied == 1
    assert top_saved_tensor_hooks() is None
    y.sum().backward()


def test_a_checkpoint_inside_saves_its_inputs_here() -> None:
    results = []
    for saved in (None, OnHost()):
        module = network()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.manual_seed(1)
        with contextlib.nullcontext() if saved is None else saved.saving():
            y = checkpoint(module[0], x * 1, use_reentrant=False)
            if saved is not None:
                assert saved.copied == 1, "the block's input and nothing of its inside"
        y.square().sum().backward()
        results.append([x.grad, *(p.grad for p in module[0].parameters())])
    assert equal(*results)
