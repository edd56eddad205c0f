"""Graphs of gradients (``torch.autograd.grad(..., create_graph=True)``), as in penalties on a critic's slope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ActivationPolicy, HostOffload
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, again, assert_same, each_strategy, fit, made, name_of, zero


class Block(nn.Module):
    """A unit: convolution, norm, and a smooth activation, whose second derivative is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.norm(self.convolution(x)))


class Critic(nn.Module):
    """Its last layer is linear: of a penalty on slopes alone its bias gets no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x).view(-1, 2, WIDTH)).flatten(1))


def slope(critic: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the critic says of ``x``, and the gradient of that, with its graph."""
    x = x.clone().requires_grad_()
    said = critic(x)
    (gradient,) = torch.autograd.grad(said.sum(), x, create_graph=True)
    return said, gradient


def wasserstein(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The critic's loss of WGAN-GP (arXiv:1704.00028)."""
    _, gradient = slope(critic, real.lerp(fake, 0.3))
    return critic(fake).mean() - critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def slope_alone(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return slope(critic, real)[1].square().sum()


def third_derivative(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    x = real.clone().requires_grad_()
    (first,) = torch.autograd.grad(critic(x).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


def product_with_the_hessian(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    _, product = torch.autograd.functional.vhp(lambda x: critic(x).square().sum(), real, fake, create_graph=True)
    return product.square().mean() + critic(real).square().mean()


def gradients_of_weights(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    gradients = torch.autograd.grad(critic(real).square().sum(), list(critic.parameters()), create_graph=True)
    return sum((gradient.square().sum() for gradient in gradients), critic(fake).mean()) / 1000


def after_a_step(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The loss after a step of gradient descent, as in MAML (arXiv:1703.03400)."""
    weights = dict(critic.named_parameters())
    gradients = torch.autograd.grad(critic(real).square().mean(), list(weights.values()), create_graph=True)
    stepped = {name: weights[name] - 0.01 * gradient for name, gradient in zip(weights, gradients, strict=True)}
    return torch.func.functional_call(critic, stepped, (fake,)).square().mean()


LOSSES = [after_a_step, wasserstein, slope_alone, third_derivative, product_with_the_hessian, gradients_of_weights]


class Adversaries(Net):
    def __init__(self, loss: Any, two_backwards: bool = False) -> None:
        super().__init__(nn.Identity)
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator, self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Critic()
        self.loss, self.two_backwards = loss, two_backwards

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, real = self.data(batch_idx)
        of_generator, of_critic = self.optimizers()
        loss = self.loss(self.critic, real, self.generator(z).detach())
        of_critic.zero_grad()
        if self.two_backwards:  # the second one goes through the same forward again
            said, gradient = slope(self.critic, real)
            self.manual_backward(gradient.square().sum(), retain_graph=True)
            loss = loss + F.softplus(-said).mean()
        self.manual_backward(loss)
        of_critic.step()
        fooled = -self.critic(self.generator(z)).mean()
        of_generator.zero_grad()
        self.manual_backward(fooled)
        of_generator.step()
        self.losses += [loss.detach().clone(), fooled.detach().clone()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4) for net in (self.generator, self.critic)], []


OPTIONS: list[dict[str, Any]] = [
    {"units": ["Block", "Linear"]},
    {"prefetch": 0},
    {"offload": HostOffload(parameters=True)},
    {"activations": ActivationPolicy(checkpointing="units")},
    {"activations": ActivationPolicy(offload=True, min_kib=0.0)},
]


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # DDP's
@pytest.mark.filterwarnings("ignore:.*used in a forward or backward while no module")  # of weights as inputs
def test_penalties_are_bit_for_bit_those_of_ddp() -> None:
    """Also with what moves weights and activations; two backwards through one forward are rounding apart."""

    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for loss in LOSSES:
            module = Adversaries(loss)
            found[loss.__name__] = made(module, fit(again(strategy), module, count=3))
        if name_of(strategy) == "stage 3":
            for options in OPTIONS:
                module = Adversaries(wasserstein)
                same = made(module, fit(zero(3, **options), module, count=3))
                assert_same([{"with": same, "without": found["wasserstein"]}], ["with"], expected="without")
        return found

    def twice(strategy: Strategy) -> dict[str, Any]:
        module = Adversaries(wasserstein, two_backwards=True)
        return made(module, fit(strategy, module, count=3))

    assert_same(each_strategy(play))
    assert_same(each_strategy(twice), bound=1e-5)  # DDP averages the first one's gradients twice: rounding
