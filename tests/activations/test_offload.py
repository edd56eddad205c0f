"""Saved tensors on the host: the same bits, the same errors, less device memory, and nothing left at the end."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_zero._torch import WeakStorage, storage_key, top_saved_tensor_hooks
from lightning_zero.activations.offload import SavedOnHost
from lightning_zero.storage.host import HostBuffers

CPU = torch.device("cpu")
WIDTH = 64  # a row is 256 bytes
ROWS = 32


def on_host(min_nbytes: int = 0, stays: Callable[[int], bool] = lambda key: False, ahead: int = 0) -> SavedOnHost:
    return SavedOnHost(CPU, min_nbytes, stays, ahead)


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


def handed_back(saved: SavedOnHost, *tensors: Tensor) -> list[Tensor]:
    """What backward gets for ``tensors``."""
    x = torch.ones((), requires_grad=True)
    with saved.saving():
        y = Kept.apply(x, *tensors)
    y.backward()
    return Kept.seen


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers)


def gradients(context: Callable[[], contextlib.AbstractContextManager[Any]], step: int = 0) -> list[Tensor]:
    module = network()
    torch.manual_seed(step + 1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with context():
        loss = module(x).square().mean()
    loss.backward()
    return [tensor.grad for tensor in (x, *module.parameters())]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Exact


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_the_same_gradients_with_real_copies(ahead: int) -> None:
    saved = on_host(ahead=ahead)
    assert equal(gradients(saved.saving), gradients(contextlib.nullcontext))
    # Each block saves its input, the norm's output, GELU's input, dropout's mask and two statistics of the norm.
    assert saved.copied >= 4 * 4
    assert 3 * 4 <= saved.restored <= saved.copied
    assert saved.buffers.used_nbytes == 0


VIEWS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.randn(ROWS, WIDTH),
    "transposed": lambda: torch.randn(ROWS, WIDTH).t(),
    "permuted": lambda: torch.randn(4, 8, WIDTH).permute(2, 0, 1),
    "third of a projection": lambda: torch.randn(ROWS, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
    "an odd piece of a long vector": lambda: torch.randn(100_000)[1001:3000],
    "rows of a large table": lambda: torch.randn(1000, WIDTH)[601:640],
    "every second row": lambda: torch.randn(ROWS, WIDTH)[1::2],
    "half precision": lambda: torch.randn(ROWS, WIDTH).bfloat16()[3:],
    "bytes of another dtype": lambda: torch.randn(ROWS, WIDTH).view(torch.uint8)[1:, 1:],
    "complex": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64)[5:],
    "booleans": lambda: torch.randn(ROWS, WIDTH) > 0,
    "a number": lambda: torch.tensor(3.5, dtype=torch.float64),
    "partly expanded": lambda: torch.randn(ROWS, 1, WIDTH).expand(ROWS, 5, WIDTH),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back_as_it_was(name: str) -> None:
    saved = on_host()
    torch.manual_seed(0)
    tensor = VIEWS[name]()
    expected, stride, address = tensor.clone(), tensor.stride(), tensor.data_ptr()
    x = torch.ones((), requires_grad=True)
    with saved.saving():
        y = Kept.apply(x, tensor)
    memory = WeakStorage(tensor)
    del tensor
    assert memory.lock() is None, "nothing but autograd held it, and autograd does not any more"
    y.backward()
    (back,) = Kept.seen
    assert saved.restored == 1
    assert torch.equal(back, expected)
    assert (back.stride(), back.dtype) == (stride, expected.dtype)
    assert back.data_ptr() % 64 == address % 64, "kernels may compute otherwise at another alignment"


def test_a_piece_of_a_large_storage_does_not_bring_all_of_it() -> None:
    saved = on_host()
    table = torch.randn(1000, WIDTH)
    y = torch.ones((), requires_grad=True)
    with saved.saving():
        y = Kept.apply(y, table[600:632])
    # 32 rows, from the multiple of 512 bytes before row 600 (two rows are 512 bytes)
    assert saved.buffers.used_nbytes == ROWS * WIDTH * 4
    del y


def test_what_shows_the_same_memory_is_copied_once() -> None:
    saved = on_host()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, 3 * WIDTH)

    def forward() -> Tensor:
        q, k, v = (x @ weight).chunk(3, dim=-1)
        return ((q * k).tanh() * (k * v)).sum() + (q @ v.t()).sum()

    forward().backward()
    expected, x.grad = x.grad, None
    with saved.saving():
        loss = forward()
        # weight (x needs a gradient, weight does not); the projection, saved many times; the result of tanh; k * v
        assert saved.copied == 4
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_memory_that_is_used_again_within_a_step_is_another_tensor() -> None:
    saved = on_host()
    scales = [torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(20)]
    keys = set()
    with saved.saving():
        total = torch.zeros(())
        for index, scale in enumerate(scales):
            value = torch.full((ROWS, WIDTH), float(index))
            keys.add(storage_key(value))
            total = total + (value * scale).sum()
            del value
    assert len(keys) == 20, "memory may be used again, the identity of a storage not, as long as a copy refers to it"
    total.backward()
    for index, scale in enumerate(scales):
        assert torch.equal(scale.grad, torch.full((ROWS, WIDTH), float(index)))


def test_several_backwards_through_one_graph() -> None:
    saved = on_host(ahead=2)
    module = network()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    with saved.saving():
        loss = module(x).square().mean()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    used = saved.buffers.used_nbytes
    assert used > 0
    loss.backward()
    assert torch.equal(x.grad, first + first)
    assert saved.buffers.used_nbytes == 0


def test_gradient_of_a_gradient() -> None:
    results = []
    for context in (contextlib.nullcontext, on_host().saving):
        x = torch.linspace(-1, 1, ROWS * WIDTH, requires_grad=True)
        with context():
            y = (x.exp() * x).sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            z = first.square().sum()
        z.backward()
        results.append(x.grad)
    assert torch.equal(*results)


# ---------------------------------------------------------------------------------------------------------------------
# What stays


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
    "a column": lambda: torch.randn(100, WIDTH)[:, 3],
    "sparse": _sparse,
    "conjugated": lambda: torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_is_the_very_memory(name: str) -> None:
    saved = on_host(min_nbytes=16 * WIDTH * 4)
    tensor = STAYS[name]()
    (back,) = handed_back(saved, tensor)
    assert (saved.copied, saved.restored) == (0, 0)
    assert back.layout is not torch.strided or back.data_ptr() == tensor.data_ptr()
    assert torch.equal(*(t.to_dense() if t.layout is torch.sparse_coo else t for t in (back, tensor)))


def test_memory_that_is_there_anyway_is_not_copied() -> None:
    slot = torch.randn(2 * ROWS, WIDTH)
    saved = on_host(stays=lambda key: key == storage_key(slot))
    (back,) = handed_back(saved, slot[ROWS:])
    assert saved.copied == 0
    assert back.data_ptr() == slot[ROWS:].data_ptr()


def test_what_somebody_else_holds_is_used_where_it_is() -> None:
    saved = on_host()
    tensor = torch.randn(ROWS, WIDTH)
    (back,) = handed_back(saved, tensor)
    assert (saved.copied, saved.restored) == (1, 0)
    assert back.data_ptr() == tensor.data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Changes in place


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


def _changed_after_it_was_saved_twice(x: Tensor) -> Tensor:
    hidden = x * 1
    y = hidden.sin()
    hidden = hidden.add_(1)
    return y + hidden.cos()


def _small_and_changed(x: Tensor) -> Tensor:
    hidden = x[0, 0] * 1
    y = hidden.sin()
    hidden.mul_(2)
    return x.sum() * y


CHANGES = [_input_changed, _output_changed, _view_changed, _changed_after_it_was_saved_twice, _small_and_changed]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_as_torch_refuses_it(change: Callable[[Tensor], Tensor]) -> None:
    for context in (contextlib.nullcontext, on_host(min_nbytes=8).saving):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with context():
            y = change(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_was_changed_in_between_is_copied_again() -> None:
    saved = on_host()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    hidden = torch.ones(ROWS, WIDTH)
    with saved.saving():
        before = x * hidden  # backward never comes here: it would be refused
        hidden.add_(1)
        after = x * hidden
    del hidden
    after.sum().backward()
    assert (saved.copied, saved.restored) == (2, 1)
    assert torch.equal(x.grad, torch.full((ROWS, WIDTH), 2.0))
    del before


# ---------------------------------------------------------------------------------------------------------------------
# Next to other hooks


def test_hooks_of_the_user_win_inside_and_only_there() -> None:
    saved = on_host()
    packed: list[int] = []
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with saved.saving():
        with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t, lambda t: t):
            y = x.sin()
        assert (len(packed), saved.copied) == (1, 0)
        with save_on_cpu():
            y = y.sin()
        assert saved.copied == 0
        y = y.sin()
        assert saved.copied == 1
    y.sum().backward()


def test_a_checkpoint_inside_saves_its_inputs_here() -> None:
    results = []
    for saved in (None, on_host()):
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


def test_compiled_code_saves_here() -> None:
    saved = on_host()
    module = network().eval()
    module.compile(backend="aot_eager")
    x = torch.randn(ROWS, WIDTH)
    plain = module(x).square().mean()
    plain.backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    with saved.saving():
        loss = module(x).square().mean()
    assert saved.copied > 0
    loss.backward()
    assert equal([p.grad for p in module.parameters()], expected)


def test_an_exception_leaves_no_hooks_and_no_memory() -> None:
    saved = on_host()

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        with pytest.raises(KeyError), saved.saving():
            yield

    with failing():
        y = torch.randn(ROWS, WIDTH, requires_grad=True).exp().exp()
        assert saved.buffers.used_nbytes > 0
        raise KeyError
    assert top_saved_tensor_hooks() is None
    del y
    gc.collect()
    saved.abandon()
    assert saved.buffers.used_nbytes == 0


def test_a_graph_that_outlives_the_run_still_works_and_then_frees() -> None:
    saved = on_host()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with saved.saving():
        loss = (x * 1).sin().sum()
    saved.release()
    assert saved.buffers.nbytes == saved.buffers.used_nbytes > 0
    loss.backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert saved.buffers.nbytes == 0


# ---------------------------------------------------------------------------------------------------------------------
# Host memory


def test_steps_that_are_alike_allocate_nothing() -> None:
    saved = on_host()
    addresses: list[set[int]] = []
    take = saved.buffers.take
    held = []
    for step in range(3):
        taken: set[int] = set()
        saved.buffers.take = lambda nbytes, taken=taken: (b := take(nbytes), taken.add(b.memory.data_ptr()))[0]  # type: ignore[method-assign]
        gradients(saved.saving, step)
        addresses.append(taken)
        held.append(saved.buffers.nbytes)
    assert len(addresses[0]) > 10
    assert addresses[1] <= addresses[0]
    assert addresses[2] <= addresses[0]
    assert held[0] == held[1] == held[2]
    saved.release()
    assert saved.buffers.nbytes == 0


def test_idle_buffers_never_add_up() -> None:
    buffers = HostBuffers(CPU)
    most = 0
    for nbytes in range(100_000, 3_000_000, 170_000):
        taken = [buffers.take(nbytes) for _ in range(3)]
        assert all(buffer.memory.numel() >= nbytes and buffer.memory.data_ptr() % 4096 == 0 for buffer in taken)
        most = max(most, buffers.used_nbytes)
        assert buffers.used_nbytes <= 3 * (nbytes + nbytes / 8 + 4096)
        assert buffers.nbytes <= most
        for buffer in taken:
            buffers.give(buffer)
        assert buffers.nbytes <= most
    buffers.release()
    assert buffers.nbytes == 0


def test_buffers_in_use_are_never_shared() -> None:
    buffers = HostBuffers(CPU)
    first, second = buffers.take(5000), buffers.take(5000)
    first.memory.fill_(1)
    second.memory.fill_(2)
    assert bool((first.memory == 1).all())
    buffers.give(first)
    third = buffers.take(5000)
    assert third is first
    assert third is not second
