"""The dynamic loss scale: the rule of ``torch.amp.GradScaler``, with one decision for all ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lightning_zero.comm import ControlGroup, GlooCollectives, Groups, Streams
from lightning_zero.optim.gradients import LossScaler
from tests.helpers.world import run_world

ALONE = ControlGroup(None)


class Adapted:
    """An optimizer as a run sees it, whose gradients are whole."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_it_follows_torch_s_grad_scaler(attached: bool, fused: bool) -> None:
    """All of its public interface, over a sequence with overflows at every distance."""
    overflows = [False, False, False, True, False, False, True, True, False, False, False, False, False, False, True]
    settings = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    ours, theirs = LossScaler(**settings), torch.amp.GradScaler("cpu", **settings)
    assert isinstance(ours, torch.amp.GradScaler)
    if attached:
        ours.attach(Adapted, ALONE)

    def play(scaler: torch.amp.GradScaler) -> list[Any]:
        seen: list[Any] = []
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        for index, overflow in enumerate(overflows):
            optimizer.zero_grad()
            first, second = scaler.scale([parameter.sum(), parameter.half().sum()])
            (first + second).backward()
            assert parameter.grad is not None
            if overflow:
                parameter.grad[0] = float("inf")
            if index % 2:
                scaler.unscale_(optimizer)
                seen.append(parameter.grad.tolist())
                with pytest.raises(RuntimeError, match="already been called on this optimizer"):
                    scaler.unscale_(optimizer)
            scaler.step(optimizer)
            with pytest.raises(RuntimeError, match="already been called since the last update"):
                scaler.step(optimizer)
            scaler.update()
            if index == 8:
                scaler.set_growth_factor(2.0)
                scaler.set_backoff_factor(0.5)
                scaler.set_growth_interval(2)
                scaler.update(256.0)
            seen += [parameter.tolist(), scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()]
            seen += [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        return seen

    assert play(ours) == play(theirs)
    assert pickle.loads(pickle.dumps(ours)).state_dict() == theirs.state_dict()
    assert {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")} <= set(dir(ours))


def test_a_grad_scaler_becomes_one() -> None:
    """The object that user code holds goes on counting; one that is switched off does nothing."""
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=5)
    theirs.scale(torch.ones(()))
    state = theirs.state_dict()
    ours = LossScaler.of(theirs)
    assert ours is theirs
    assert ours.state_dict() == state
    off = LossScaler.of(torch.amp.GradScaler("cpu", enabled=False))
    off.attach(Adapted, ALONE)
    parameter = torch.nn.Parameter(torch.ones(2))
    off.scale(parameter.sum()).backward()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    off.step(optimizer)
    off.update()
    assert (parameter.tolist(), off.get_scale(), off.state_dict()) == ([0.0, 0.0], 1.0, {})

    class Own(torch.amp.GradScaler):
        pass

    with pytest.raises(ValueError, match="Own is a custom GradScaler"):
        LossScaler.of(Own("cpu"))


def test_each_optimizer_has_its_own_overflow() -> None:
    """One that overflows leaves another, which was clipped before it, unscaled by the scale of their backward."""
    scaler = LossScaler(init_scale=8.0)
    scaler.attach(Adapted, ALONE)
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (first, second)]
    scaler.scale(first.sum() * float("inf") + second.sum()).backward()
    scaler.unscale_(optimizers[1])
    for optimizer in optimizers:
        scaler.unscale_once(optimizer)
        scaler.step(optimizer)
        scaler.stepped(optimizer)
    assert (first.tolist(), second.tolist(), scaler.get_scale()) == ([1.0, 1.0], [0.0, 0.0], 4.0)
    scaler.scale(first.sum()).backward()
    scaler.unscale_(optimizers[0])
    scaler.forget(optimizers[0])  # its step raised
    scaler.unscale_(optimizers[0])


@pytest.mark.parametrize("scale", [65536.0, 3.0, 1e-3, 2.0**-20, 1e30])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_unscaling_has_the_bits_of_a_multiplication(dtype: torch.dtype, scale: float) -> None:
    """And what it makes infinite is an overflow, as what was."""
    values = torch.tensor([-0.0, 1e-45, -1e-40, 6e-8, 65504.0, -1.5, 3.25e-3, 1 / 3] * 5).to(dtype)
    values = values * 1j - values if dtype.is_complex else values
    gradients = [*values.clone().split([3, 0, 20, 17]), torch.ones(3)]
    expected = values * (1.0 / float(torch.tensor(scale)))  # torch keeps it in float32
    overflow = not bool(torch.isfinite(expected).all())
    assert LossScaler(init_scale=scale).unscale(gradients, ALONE) == overflow
    assert overflow == (dtype is torch.float16 and scale < 1)
    found = torch.cat(gradients[:-1])
    real = [torch.view_as_real(t) if dtype.is_complex else t for t in (found, expected)]
    assert real[0].view(torch.uint8).tolist() == real[1].view(torch.uint8).tolist()
    assert torch.equal(gradients[-1], torch.ones(3) * (1.0 / float(torch.tensor(scale))))


def test_a_scale_that_backed_off_for_too_long_is_no_error() -> None:
    """Its inverse is no float32."""
    gradients = [torch.ones(3), torch.ones(3).half(), torch.ones(3, dtype=torch.complex64)]
    assert LossScaler(init_scale=1e-300).unscale(gradients, ALONE) is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("scale", [8.0, 0.5])
def test_an_overflow_shows_in_every_dtype(dtype: torch.dtype, bad: float, scale: float) -> None:
    last = torch.tensor([1.0, bad]).to(dtype)
    gradients = [torch.ones(3, dtype=dtype), torch.ones(2), last]
    assert LossScaler(init_scale=scale).unscale(gradients, ALONE) is True


def test_no_gradients_are_no_overflow() -> None:
    assert LossScaler().unscale([], ALONE) is False


def test_one_rank_s_overflow_is_everyone_s() -> None:
    def run(rank: int) -> list[list[Any]]:
        groups = Groups.create("gloo")
        found = []
        for totals in (groups.control, GlooCollectives(groups, Streams(torch.device("cpu")))):
            scaler = LossScaler(init_scale=16.0, growth_interval=2)
            found.append([])
            for where in [None, 0, 1, 2, None, None]:
                # A rank may hold no gradient at all.
                gradients = [torch.tensor([float("inf") if rank == where else 1.0])] if rank != 0 or where == 0 else []
                parameters = [torch.nn.Parameter(gradient) for gradient in gradients]
                optimizer = torch.optim.SGD([*parameters, torch.nn.Parameter(torch.ones(1))])
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                scaler.attach(Adapted, totals)
                scaler.unscale_(optimizer)
                scaler.stepped(optimizer)
                found[-1].append(scaler.get_scale())
        return found

    expected = [16.0, 8.0, 4.0, 2.0, 2.0, 4.0]
    for found in run_world(3, run):
        assert found == [expected] * 2


def test_the_state_goes_on_where_it_was() -> None:
    first = LossScaler(init_scale=8.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=3)
    state = {**first.state_dict(), "_growth_tracker": 2}
    second = LossScaler()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.unscale([torch.ones(1)], ALONE) is False
    second.attach(Adapted, ALONE)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    second.unscale_(optimizer)
    second.update()
    assert second.get_scale() == 24.0
