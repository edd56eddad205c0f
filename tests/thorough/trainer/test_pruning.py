"""``ModelPruning`` in every stage, against DDP's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.utils import prune

from tests.helpers.runs import STAGES, Net, assert_same, batches, each_strategy, fit, made, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

LOTTERY = {"use_lottery_ticket_hypothesis": False}
PRUNINGS: dict[str, Any] = {
    "local": lambda: ModelPruning("l1_unstructured", amount=0.3, **LOTTERY),
    "rows": lambda: ModelPruning(
        "ln_structured", use_global_unstructured=False, amount=0.3, pruning_dim=0, pruning_norm=2, **LOTTERY
    ),
    "global, kept as masks": lambda: ModelPruning(
        prune.L1Unstructured, amount=0.2, use_global_unstructured=True, make_pruning_permanent=False, **LOTTERY
    ),
    "after validation": lambda: ModelPruning("l1_unstructured", amount=0.3, prune_on_train_epoch_end=False, **LOTTERY),
}


@pytest.mark.parametrize("name", PRUNINGS)
def test_pruned_models_are_those_of_ddp(name: str) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        # Not biases and scales, of which some are all zero.
        callback = PRUNINGS[name]()
        callback._parameter_names = ["weight"]
        callback.filter_parameters_to_prune = lambda found: [pair for pair in found if pair[0].weight.ndim > 1]
        with quiet():
            trainer = fit(strategy, module, 3, val=1, max_epochs=3, callbacks=[callback])
        weights = [value for value in made(module, trainer)["weights"].values() if value.ndim > 1]
        assert any(bool((value == 0).any()) for value in weights)
        return made(module, trainer)

    assert_same(each_strategy(play))


def test_checkpoints_of_a_pruned_run_hold_pruned_weights(tmp_path: Path) -> None:
    class Save(Callback):
        def __init__(self, name: str) -> None:
            self.path = tmp_path / name

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(self.path)

    def play(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        makers: dict[str, Any] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True)}
        makers |= {name: lambda stage=stage: zero(stage) for name, stage in STAGES.items()}
        with quiet():
            for name, make in makers.items():
                callback = PRUNINGS["local"]()
                fit(make(), Net(), 3, max_epochs=2, callbacks=[callback, Save(name)])
                module = Net()
                trainer = make_trainer(make(), max_epochs=3)
                trainer.fit(module, batches(3), ckpt_path=str(tmp_path / name))
                results[name] = made(module, trainer)
        return results

    assert_same(run_world(2, play))
