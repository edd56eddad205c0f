"""What users switch on in the Trainer does under every stage what it does under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.cases import WIDTH
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Net, assert_same, batches, each_strategy, fit, made, values_of
from tests.helpers.training import make_trainer
from tests.thorough.features import page
from tests.thorough.features.feature import Feature, _played

# Of the page of features, which `-m thorough` plays whole; what other files here prove is not among them.
CHOSEN = (
    "fit with validation, sanity check and `val_check_interval`",
    "`validate`, `test`, `predict`, before a fit and after it",
    "`fast_dev_run`",
    "`detect_anomaly`",
    "a second `fit` of a trainer",
    "`LightningDataModule`, its hooks and state, several loaders for validation",
    "`self.log`, `log_dict`, reductions, torchmetrics; `CSVLogger`",
    "`ModelCheckpoint`: the best, the last, their names",
    "`EarlyStopping`",
    "`LearningRateMonitor`",
    "`GradientAccumulationScheduler`",
    "`StochasticWeightAveraging`",
    "`EMAWeightAveraging`",
    "`BackboneFinetuning`",
    "`ModelSummary`",
    "`TQDMProgressBar`",
    '`ckpt_path="best"` and `"last"`',
    "`ReduceLROnPlateau`",
    "schedulers by step, with frequency",
    "`grad_norm`, `clip_grad_norm_`, edits of `.grad` in hooks, inside `full_gradients`",
    "`grad_norm`, `clip_grad_norm_` in hooks, without `full_gradients`",
    "`configure_gradient_clipping`",
    "`optimizer_step`, `backward`, `optimizer_zero_grad` overridden",
    "`accumulate_grad_batches`",
    "several optimizers, `toggle_optimizer`, `clip_gradients`, schedulers",
    "accumulation with `toggle_model(sync_grad=...)`",
)
FEATURES = {feature.name: feature for features in page.TABLES.values() for feature in features}
STAGES = {"stage 1": 1, "stage 3": 3}


def holds(feature: Feature, folder: Path) -> Row:
    folder.mkdir()
    results = yield lambda rank: _played(feature, folder, {"ddp": 0, **STAGES})
    for name, stage in STAGES.items():
        assert_same(results, [name], bound=feature.bounds.get(stage, 0.0))


def test_features_do_what_they_do_under_ddp(tmp_path: Path) -> None:
    chosen = [FEATURES[name] for name in CHOSEN]
    assert not any(feature.refused for feature in chosen)
    in_one_world(2, *(holds(feature, tmp_path / str(index)) for index, feature in enumerate(chosen)))


def test_a_model_called_directly_under_inference_mode_and_then_trained() -> None:
    """One rank: nobody else has to call. Inference tensors made there must not turn up in a later backward."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        trainer = fit(strategy, module, count=2)
        x = torch.ones(2, WIDTH)
        with torch.inference_mode():
            inferred = module(x)
        with torch.no_grad():
            ungraded = module(x)
        assert torch.equal(inferred, ungraded)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches(2))
        return {**made(module, trainer), "output": inferred.clone()}

    assert_same(each_strategy(play, world_size=1))


class Generating(Net):
    """Calls itself repeatedly where a user looks at samples: in validation and in hooks outside any step."""

    def __init__(self) -> None:
        super().__init__()
        self.generated: list[Tensor] = []

    @torch.inference_mode()  # by hand, because Lightning itself uses no_grad with gloo whatever it is asked for
    def generate(self, steps: int) -> None:
        x = torch.ones(1, WIDTH)
        for _ in range(steps):
            x = self(x).tanh()
        self.generated.append(x.clone())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.generate(2)

    def on_train_epoch_end(self) -> None:
        self.generate(3)
        self.generated.append(self.model.layers[1](torch.ones(1, WIDTH)).detach().clone())  # one block of it

    def on_train_start(self) -> None:
        self.generate(1)


def generation_in_validation_and_outside_any_step() -> Row:
    class Sampler(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.eval()
            pl_module.generate(4)
            pl_module.train()

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Generating()
        trainer = fit(strategy, module, count=3, val=2, max_epochs=2, callbacks=[Sampler()])
        return {**made(module, trainer), "generated": module.generated}

    results = yield compared(play)
    assert len(results[0]["ddp"]["generated"]) == 2 + 1 + 2 * (2 + 1 + 2)
    assert_same(results)


def detect_anomaly_names_a_nan_in_backward() -> Row:
    class Rooted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self(self.data(batch_idx)[0]) * 0).sqrt().sum()  # 0 times infinity in backward

    def play(strategy: Strategy) -> dict[str, Any]:
        with (
            pytest.raises(RuntimeError, match="returned nan values"),
            pytest.warns(UserWarning, match="Error detected"),
        ):
            fit(strategy, Rooted(), detect_anomaly=True)
        return {}

    yield compared(play)


def the_distributed_sampler_gives_every_rank_its_own_part() -> Row:
    class Supervised(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.losses.append(batch[0].detach().clone())
            return F.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def play(strategy: Strategy) -> dict[str, Any]:
        data = torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(*data), batch_size=3, shuffle=True)
        module = Supervised()
        trainer = make_trainer(strategy, use_distributed_sampler=True, max_epochs=2)
        trainer.fit(module, loader, DataLoader(TensorDataset(*data), batch_size=3))
        return made(module, trainer)

    results = yield compared(play)
    seen = torch.cat([torch.cat(result["stage 3"]["losses"][:4]) for result in results])
    assert len(seen.unique(dim=0)) == 24  # 2 ranks, 4 batches of 3 in the first epoch: every sample once
    assert_same(results)


def a_second_module_in_the_same_trainer() -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        first, second = Net(), Net(seed=2)
        trainer = fit(strategy, first, count=2)
        values = values_of(first)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(second, batches(2))
        return {**made(second, trainer), "first": values}

    assert_same((yield compared(play)))


def test_what_else_users_do_with_a_trainer() -> None:
    in_one_world(
        2,
        generation_in_validation_and_outside_any_step(),
        the_distributed_sampler_gives_every_rank_its_own_part(),
        a_second_module_in_the_same_trainer(),
        detect_anomaly_names_a_nan_in_backward(),
    )
