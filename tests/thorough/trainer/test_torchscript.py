"""TorchScript modules in a model: compiled code reads parameters past everything that could bring them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn

from tests.helpers.cases import WIDTH, Stack
from tests.helpers.runs import Net, assert_same, fit, made, quiet, zero
from tests.helpers.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


def traced_blocks() -> nn.Module:
    stack = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        stack.layers[0] = torch.jit.script(stack.layers[0])
        stack.layers[1] = torch.jit.trace(stack.layers[1], torch.zeros(1, WIDTH))  # type: ignore[no-untyped-call]
    return stack


def test_compiled_modules_are_trained_as_under_ddp() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net(traced_blocks)
        return made(module, fit(strategy, module, count=5, val=1))

    def world(rank: int) -> dict[str, dict[str, Any]]:
        strategies = {"ddp": DDPStrategy(), "stage 1": zero(1, units=None), "stage 2": zero(2, units=None)}
        with quiet():
            return {name: play(strategy) for name, strategy in strategies.items()}

    assert_same(run_world(2, world), ["stage 1", "stage 2"])


@pytest.mark.parametrize(("stage", "precision"), [(3, "32-true"), (1, "bf16-mixed")])
def test_compiled_modules_are_refused_where_values_are_absent(stage: int, precision: str) -> None:
    def world(rank: int) -> str:
        with quiet(), pytest.raises(ValueError, match="TorchScript") as error:
            fit(zero(stage), Net(traced_blocks), count=2, precision=precision)
        return str(error.value)

    for told in run_world(2, world):
        assert "'model.layers.0' is a TorchScript module" in told
        assert "stage 1 or 2 in full precision" in told
