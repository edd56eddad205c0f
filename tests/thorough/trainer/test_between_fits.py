"""What user code does with a model outside of steps and after a fit: gradients, other Trainers, parts that go on."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_gradients, full_parameters
from lightning_zero.errors import ParameterAccessError
from tests.helpers.runs import values_of
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

STRATEGIES: list[Callable[[], Any]] = [
    lambda: "ddp",
    lambda: ZeroStrategy(stage=1),
    lambda: ZeroStrategy(stage=2),
    lambda: ZeroStrategy(stage=3),
    lambda: ZeroStrategy(stage=3, units=["Linear"]),
    lambda: ZeroStrategy(stage=3, units=["Sequential"]),  # the rest stays in the root
]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Sequential(nn.Linear(10, 10), nn.Tanh()), nn.Linear(10, 3)
        self.found: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(inputs))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(31 * int(batch) + self.global_rank)
        return self(torch.randn(5, 6)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def look(self) -> None:
        """What the input does to the output, as for saliency maps and adversarial examples."""
        inputs = torch.ones(2, 6, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self(inputs).square().sum(), inputs)
        self.found.append(gradient)


def fit(net: pl.LightningModule, strategy: Any, **options: Any) -> None:
    with quiet():
        make_trainer(strategy, **options).fit(net, DataLoader(range(3), batch_size=None))


def same_as_under_ddp(play: Callable[[Callable[[], Any]], Any]) -> None:
    """Whether what ``play`` returns is the same under every strategy, bit for bit, on every rank."""

    def run(rank: int) -> list[Any]:
        return [play(strategy) for strategy in STRATEGIES]

    for expected, *others in run_world(2, run, timeout=90):
        for found in others:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "hook",
    ["on_train_start", "on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_train_epoch_end"],
)
def test_gradients_of_inputs_outside_of_a_step(hook: str) -> None:
    def play(strategy: Callable[[], Any]) -> Any:
        net = Net()
        setattr(net, hook, lambda *args: net.look())
        fit(net, strategy(), max_epochs=2)
        net.look()
        return net.found, values_of(net)

    same_as_under_ddp(play)


def test_gradients_of_parameters_after_a_fit() -> None:
    def run(rank: int) -> None:
        expected = Net()
        fit(expected, "ddp")
        for parameter in expected.parameters():
            parameter.grad = None
        expected(torch.ones(2, 6)).square().sum().backward()
        for strategy in STRATEGIES[1:]:
            net = Net()
            fit(net, strategy())
            for parameter in net.parameters():
                parameter.grad = None
            net(torch.ones(2, 6)).square().sum().backward()
            with full_gradients(net):
                for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
                    assert torch.equal(ours.grad, theirs.grad)

    run_world(2, run, timeout=60)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_strategy_is_refused_after_a_fit(stage: int) -> None:
    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        net, plain = Net(), Net()
        fit(net, ZeroStrategy(stage=stage))
        with full_parameters(net):
            ordinary = copy.deepcopy(net)
        with pytest.raises(ParameterAccessError, match=r"copy\.deepcopy\(module\)"):
            fit(net, "ddp")
        fit(ordinary, "ddp")
        fit(plain, "ddp")
        fit(plain, "ddp")
        return values_of(ordinary), values_of(plain)

    for found, expected in run_world(2, run, timeout=60):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _replaced(net: Net) -> Net:
    torch.manual_seed(5)
    net.c = nn.Linear(10, 3)
    return net


def _replaced_by_another_shape(net: Net) -> Net:
    torch.manual_seed(5)
    net.b, net.c = nn.Sequential(nn.Linear(10, 7), nn.Tanh()), nn.Linear(7, 3)
    return net


def _moved(net: Net) -> Net:
    other = Net()
    other.a, other.b = net.a, net.b
    return other


def _part_of_a_part_moved(net: Net) -> Net:
    other = Net()
    other.b[0] = net.b[0]
    net.b[0] = Net().b[0]
    return other


def _taught(net: Net) -> Net:
    """Lightning tells a module that is a part of another one that the other's Trainer is its own."""
    other = Net()
    other.teacher = net.requires_grad_(False)
    return other


@pytest.mark.parametrize("change", [_replaced, _replaced_by_another_shape, _moved, _part_of_a_part_moved, _taught])
def test_layers_of_a_trained_model_go_on_in_another(change: Callable[[Net], Net]) -> None:
    def play(strategy: Callable[[], Any]) -> Any:
        first = Net()
        fit(first, strategy())
        second = change(first)
        fit(second, strategy())
        with full_parameters(second):  # which has what they share
            return values_of(second), values_of(first)

    same_as_under_ddp(play)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_of_what_is_being_trained_is_named(stage: int) -> None:
    """As who trains a small head on an encoder after each epoch, to see how good it is."""

    class Probed(Net):
        def __init__(self, strategy: Callable[[], Any], copied: bool) -> None:
            super().__init__()
            self.strategy, self.copied = strategy, copied

        def on_train_epoch_end(self) -> None:
            head = Net()
            head.a = self.a
            if self.copied:
                with full_parameters(self):
                    head.a = copy.deepcopy(self.a)
            fit(head, self.strategy())
            self.found += values_of(head).values()

    def run(rank: int) -> list[Any]:
        results: list[Any] = []
        for strategy in (lambda: "ddp", lambda: ZeroStrategy(stage=stage)):
            net = Probed(strategy, copied=True)
            fit(net, strategy(), max_epochs=2)
            results.append((net.found, values_of(net)))
        with pytest.raises(ParameterAccessError, match="'a' is a part of Probed, which another Trainer runs"):
            fit(Probed(strategy, copied=False), strategy(), max_epochs=2)
        return results

    for expected, copied in run_world(2, run, timeout=60):
        torch.testing.assert_close(copied, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_teacher_that_is_being_trained_is_named_whoever_has_run_it_since(stage: int) -> None:
    class Student(Net):
        def __init__(self, teacher: Net) -> None:
            super().__init__()
            self.teacher = teacher

        validation_step = Net.training_step

    class Looking(Net):
        def on_train_epoch_end(self) -> None:
            loader = DataLoader(range(1), batch_size=None)
            with quiet():
                make_trainer(ZeroStrategy(stage=stage)).predict(self, loader)
                with pytest.raises(ParameterAccessError, match="'teacher' is a part of Looking, which another Trainer"):
                    make_trainer(ZeroStrategy(stage=stage)).validate(Student(self), loader)

        predict_step = Net.training_step

    def run(rank: int) -> None:
        net, trainer = Looking(), make_trainer(ZeroStrategy(stage=stage))
        loader = DataLoader(range(1), batch_size=None)
        with quiet():
            trainer.fit(net, loader)
            trainer.validate(Student(net), loader)  # the same one, which runs another

    run_world(2, run, timeout=60)


def test_pruning_that_goes_back_to_the_beginning_is_refused() -> None:
    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        results = []
        for strategy in (lambda: "ddp", lambda: ZeroStrategy(stage=1)):
            net = Net()
            pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
            fit(net, strategy(), max_epochs=3, callbacks=[pruning])
            results.append(values_of(net))
        with pytest.raises(ValueError, match=r"ModelPruning\(use_lottery_ticket_hypothesis=True\), its default, makes"):
            fit(Net(), ZeroStrategy(stage=1), callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
        return results[0], results[1]

    for expected, found in run_world(2, run, timeout=60):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shards_that_went_with_their_module_are_named() -> None:
    def run(rank: int) -> None:
        net, other = Net(), Net()
        fit(net, ZeroStrategy(stage=3, units=["Sequential"]))
        other.b[0] = net.b[0]  # a part of a unit
        del net
        gc.collect()
        with pytest.raises(ParameterAccessError, match=r"'b\.0\.weight' was sharded in a module that does not"):
            fit(other, ZeroStrategy(stage=3))

    run_world(2, run)
