"""Activation checkpointing, compiled blocks, and callbacks that reach for the parameters themselves."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import Block, Stack
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import (
    Net,
    assert_same,
    fit,
    made,
    name_of,
    quiet,
    zero,
)
from tests.helpers.training import order_changes


class Recomputed(Stack):
    """Recomputes every block in backward, with the random numbers of its forward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.dropout = nn.Dropout(0.3)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            block = functools.partial(self.block, layer)
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if torch.is_grad_enabled() else block(x)
        return x

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(layer(x))


def activation_checkpointing_with_dropout(use_reentrant: bool) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        # DDP cannot serve re-entrant checkpointing together with find_unused_parameters; the numbers are the same.
        module = Net(functools.partial(Recomputed, use_reentrant and name_of(strategy) != "ddp"))
        return made(
            module, fit(strategy, module, count=4, val=1, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        )

    assert_same((yield compared(play)))


def recomputed_blocks_share_one_slot_in_a_steady_order(use_reentrant: bool) -> Row:
    """With ``prefetch=0`` a block that is recomputed has to lie beside its slot while the one behind it computes."""

    def play(rank: int) -> list[str]:
        with order_changes() as found, quiet():
            fit(zero(3, prefetch=0), Net(functools.partial(Recomputed, use_reentrant)))
        return found

    assert (yield play) == [[], []]


class Teacher(Net):
    """A block computes while another one is recomputed; and the block that had its slot is left out later on."""

    def __init__(self) -> None:
        super().__init__(lambda: Stack(*[Block() for _ in range(9)]))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        layers = self.model.layers
        self.count += 1

        def region(x: Tensor) -> Tensor:
            student = layers[1](x)
            with torch.no_grad():
                teacher = layers[0](x)
            return student + teacher

        x = checkpoint(region, layers[3](self.model.stem(x)), use_reentrant=True)
        return self.model.head(layers[6](x) if self.count <= 3 else x)


def what_was_to_lie_beside_its_slot_and_finds_it_free_stays_until_it_has_computed() -> Row:
    def play(rank: int) -> list[list[Tensor]]:
        found = []
        for strategy in (zero(1), zero(3, prefetch=2)):
            module = Teacher()
            with quiet():
                fit(strategy, module, 7)
            found.append(list(module.losses))
        return found

    for first, third in (yield play):
        assert all(map(torch.equal, first, third))


class CompiledBlocks(Net):
    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self.compiles = compiles

    def configure_model(self) -> None:
        if self.compiles and not hasattr(self.model.layers[0], "_orig_mod"):
            for index, layer in enumerate(self.model.layers):
                self.model.layers[index] = torch.compile(layer, backend="aot_eager")


def blocks_compiled_in_configure_model_train_as_eager_ones() -> Row:
    """``aot_eager``: Dynamo and AOTAutograd for real, torch's own kernels, no compiler."""

    def play(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        with quiet():
            for name, compiles in (("eager", False), ("compiled", True)):
                for stage in (1, 3) if compiles else (1,):
                    module = CompiledBlocks(compiles)
                    trainer = fit(zero(stage), module, count=3, val=1)
                    result = made(module, trainer)
                    result["weights"] = {k.replace("_orig_mod.", ""): v for k, v in result["weights"].items()}
                    results[f"{name} {stage}"] = result
        return results

    results = yield play
    assert_same(results, [f"compiled {stage}" for stage in (1, 3)], expected="eager 1")


# ---------------------------------------------------------------------------------------------------------------------
# Callbacks


class Average(pl.Callback):
    """A moving average as many write it: reads parameters after every step."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            previous = self.values.get(name, torch.zeros_like(parameter))
            self.values[name] = previous * 0.5 + parameter * 0.5


def a_callback_reads_parameters_where_they_are_whole_and_is_told_where_they_are_not() -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        average = Average()
        if not isinstance(strategy, DDPStrategy) and strategy.placement.shards_parameters:  # type: ignore[attr-defined]
            with pytest.raises(ParameterAccessError, match=r"'model\..*full_parameters"):
                fit(strategy, Net(), callbacks=[average])
            return {}
        trainer = fit(strategy, Net(), callbacks=[average])
        assert trainer.global_step == 4
        return average.values

    assert_same((yield compared(play)), ["stage 1", "stage 2"])


def test_recomputation_and_callbacks() -> None:
    in_one_world(
        2,
        *map(activation_checkpointing_with_dropout, (True, False)),
        *map(recomputed_blocks_share_one_slot_in_a_steady_order, (True, False)),
        what_was_to_lie_beside_its_slot_and_finds_it_free_stays_until_it_has_computed(),
        a_callback_reads_parameters_where_they_are_whole_and_is_told_where_they_are_not(),
        blocks_compiled_in_configure_model_train_as_eager_ones(),
    )
