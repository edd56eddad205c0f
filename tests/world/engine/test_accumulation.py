"""Backwards with and without a reduction, and gradients cleared in between, in any order: the sums are DDP's."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, ZeroStrategy, full_gradient, full_gradients, grad_norm
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

WAYS: list[dict[str, Any]] = [
    *({"stage": stage, "precision": precision} for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")),
    *({"stage": stage, "precision": "32-true", "offload": HostOffload()} for stage in (1, 3)),
]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(shape)) for shape in ((7,), (3, 5), (11,)))

    def forward(self, x: Tensor, factors: dict[str, float]) -> Tensor:
        return x + sum((getattr(self, name) * factor).sum() for name, factor in factors.items())


class Accumulates(pl.LightningModule):
    """Gradients are small integers, so that sums and averages of two ranks are exact."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second, self.seed = Unit(), Unit(), seed
        self.expected: dict[str, float] = {}
        self.wrong: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        chance, world = random.Random(self.seed * 100 + batch_idx), self.trainer.world_size
        optimizer: Any = self.optimizers()
        engine: Any = self.trainer.strategy.engine  # type: ignore[attr-defined]
        parameters = dict(self.named_parameters())
        if chance.random() < 0.6:
            optimizer.zero_grad()
            self.expected.clear()
        count = chance.randint(1, 4)
        for turn in range(count):
            given = [
                {name: float(2 ** chance.randint(0, 4)) for name in parameters if chance.random() < 0.7}
                for _ in range(world)
            ]
            given[0] = given[0] or dict.fromkeys(parameters, 1.0)
            x = torch.zeros((), requires_grad=True)
            for owner in ("first", "second"):
                own = {n.rpartition(".")[2]: f for n, f in given[self.global_rank].items() if n.startswith(owner)}
                x = getattr(self, owner)(x, own)
            engine.reduce_gradients = last = turn == count - 1 or chance.random() < 0.4
            self.manual_backward(x)
            engine.reduce_gradients = True
            for name in {name for row in given for name in row}:
                self.expected[name] = self.expected.get(name, 0.0) + sum(row.get(name, 0.0) for row in given) / world
            if last and turn < count - 1 and chance.random() < 0.3:
                name = chance.choice([*parameters])
                parameters[name].grad = None
                self.expected.pop(name, None)
        with full_gradients(self):
            for name, parameter in parameters.items():
                wanted, found = self.expected.get(name), parameter.grad
                if (found is None) != (wanted is None) or (found is not None and bool((found != wanted).any())):
                    self.wrong.append(f"step {batch_idx}: {name} is {found}, not {wanted}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_are_those_of_ddp(world_size: int) -> None:
    def fit(rank: int) -> list[str]:
        wrong = []
        for way in WAYS:
            settings, module = dict(way), Accumulates(seed=len(wrong) + way["stage"])
            with quiet():
                trainer = make_trainer(
                    precision=settings.pop("precision"), strategy=ZeroStrategy(units=["Unit"], **settings)
                )
                trainer.fit(module, DataLoader(range(8), batch_size=None))  # type: ignore[arg-type]
            wrong += [f"{way}: {what}" for what in module.wrong]
        return wrong

    assert run_world(world_size, fit, timeout=120) == [[]] * world_size


class Keeps(pl.LightningModule):
    """Never clears gradients, and asks for them after every micro-step."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.layer, self.ask, self.answers = nn.Linear(4, 4), ask, list[str]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(torch.full((1, 4), float(batch_idx + self.global_rank))).sum()
        return loss

    def on_after_backward(self) -> None:
        try:
            self.ask(self)
            self.answers.append("")
        except Exception as error:
            self.answers.append(str(error))

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_is_an_average_and_a_sum_beside_it_cannot_be_seen() -> None:
    """With two micro-steps in ``zero1``. Before the first step there is a sum of this rank's, as under DDP."""
    asks: dict[str, Any] = {
        "norm": lambda module: module.layer.weight.grad.norm(),
        "edit": lambda module: module.layer.weight.grad.mul_(0.5),
        "copy": lambda module: module.layer.weight.grad.clone(),
        "full_gradient": lambda module: full_gradient(module, "layer.weight"),
        "grad_norm": grad_norm,
        "is there": lambda module: module.layer.weight.grad is not None,
    }

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for name, ask in asks.items():
            module = Keeps(ask)
            with quiet():
                trainer = make_trainer(ZeroStrategy(stage=1), max_steps=2, accumulate_grad_batches=2)
                trainer.fit(module, DataLoader(range(4), batch_size=1))  # type: ignore[arg-type]
            found[name] = module.answers
        return found

    for found in run_world(2, run):
        for name, (first, second, third, last) in found.items():
            assert not second, name
            assert not last, name
            if name in ("full_gradient", "grad_norm"):
                assert "no averages yet" in first, name
                assert "no averages yet" in third, name
            else:
                assert not first, name
                assert ("to which this rank has added since" in third) == (name != "is there"), name
