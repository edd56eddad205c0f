"""TorchScript modules in a model: compiled code reads parameters past everything that could bring them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from lightning_zero import HostOffload, full_parameters
from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.world import run_world
from tests.strategy.runs import Net, assert_same, each_strategy, fit, made, quiet, zero

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:.*used in a forward or backward while no module")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def compiled(module: nn.Module, trace: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.trace(module, torch.zeros(1, WIDTH)) if trace else torch.jit.script(module)


class TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = layers(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Methods(nn.Module):
    """Calls another method than ``forward``, a part, and ``forward`` without its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.compiled = Stack(), compiled(TwoMethods())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.compiled.encode(x) + self.compiled.last(x) + self.compiled.forward(x)


class Block(nn.Module):
    """A unit around a compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.compiled = nn.Linear(WIDTH, WIDTH), compiled(layers())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compiled(self.up(x))


class Past(nn.Module):
    """Calls a compiled module inside of a unit past that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.layers[1].compiled(x)


def traced_blocks() -> nn.Module:
    stack = Stack()
    for number in range(2):
        stack.layers[number] = compiled(stack.layers[number], trace=True)
    return stack


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(compiled(layers()), file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(Stack(), torch.jit.load(file))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a model": lambda: nn.Sequential(compiled(layers())),
    "traced blocks": traced_blocks,
    "from a file": loaded,
    "methods and parts": Methods,
    "inside of a unit": Past,
}


def _play(name: str, **options: Any) -> Callable[[Strategy], dict[str, Any]]:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net(MODELS[name])
        return made(module, fit(strategy, module, count=5, val=1, **options))

    return play


@pytest.mark.parametrize("name", MODELS)
def test_compiled_modules_are_trained_as_under_ddp(name: str) -> None:
    def both(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        units = {"units": ["Block"] if name in ("inside of a unit", "traced blocks", "methods and parts") else None}
        for label, strategy in {
            "ddp": DDPStrategy(find_unused_parameters=True),
            "stage 1": zero(1, units=None),
            "stage 2": zero(2, units=None),
            "stage 3": zero(3, **units),
            "offload": zero(3, **units, offload=HostOffload(parameters=True), prefetch=0),
        }.items():
            with quiet():
                results[label] = _play(name)(strategy)
        return results

    assert_same(run_world(2, both), ["stage 1", "stage 2", "stage 3", "offload"])


def test_compiled_modules_compute_with_16_bit_copies() -> None:
    """With what they were given, in every stage: under DDP autocast rounds at other places."""
    results = each_strategy(_play("traced blocks", precision="bf16-mixed"))
    assert_same(results, ["stage 2", "stage 3"], expected="stage 1")
    losses = [{name: {"losses": made["losses"]} for name, made in by_name.items()} for by_name in results]
    assert_same(losses, ["stage 1"], bound=0.01)


def test_a_compiled_module_is_copied_where_its_values_are() -> None:
    def world(rank: int) -> tuple[list[str], bool, Tensor, Tensor]:
        module = Net(Methods)
        with quiet():
            fit(zero(3), module, count=2)
        told: list[str] = []
        script = module.model.compiled
        copies: tuple[Callable[[], Any], ...] = (
            lambda: copy.deepcopy(script),
            lambda: torch.jit.save(script, io.BytesIO()),
            lambda: script.save("never"),
        )
        for make in copies:
            with pytest.raises(ParameterAccessError) as error:
                make()
            told.append(str(error.value))
        with full_parameters(module):
            x = torch.ones(2, WIDTH)
            expected, file = script(x), io.BytesIO()
            copied, other = copy.deepcopy(script), "alone" if rank else script(x)  # one rank alone calls it
            torch.jit.save(script, file)
        file.seek(0)
        assert isinstance(other, str) or torch.equal(other, expected)
        with quiet():
            fit(zero(3), module, count=2)  # what is in the way of the methods is put there anew
        return told, torch.equal(copied(x), expected), torch.jit.load(file)(x), expected

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run_world(2, world)
    for told, same, saved, expected in results:
        assert len(told) == 3
        assert all("full_parameters" in message for message in told)
        assert same
        assert torch.equal(saved, expected)


def test_a_compiled_module_called_between_steps_is_gathered() -> None:
    """Under DDP it is as ever; nothing is ever computed with what is not there."""

    class Calls(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                self.losses.append(self.model.compiled.encode(torch.ones(1, WIDTH)))

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Calls(Methods)
        return made(module, fit(strategy, module, count=3))

    assert_same(each_strategy(play))
