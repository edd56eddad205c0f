"""What users switch on in the Trainer does under every stage what it does under DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelSummary, TQDMProgressBar
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import grad_norm
from tests.helpers.cases import WIDTH
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Memory, Net, assert_same, batches, each_strategy, fit, made, values_of
from tests.helpers.training import make_trainer

# Rounding differences of 1e-7 in a gradient, carried through a few steps of AdamW.
ROUNDING = 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation and clipping


def accumulation_steps_once_per_window_also_in_an_uneven_last_one() -> Row:
    """Stage 1 sums local gradients as DDP does; stages 2 and 3 sum reduced ones, which is rounding apart."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        return made(module, fit(strategy, module, count=5, accumulate_grad_batches=3, max_epochs=2))

    results = yield compared(play)
    assert results[0]["ddp"]["global_step"] == 2 * 2  # windows of 3 and 2 batches, two epochs
    assert_same(results, ["stage 1"])
    assert_same(results, ["stage 3"], expected="stage 2")
    assert_same(results, ["stage 2", "stage 3"], bound=ROUNDING)


def full_norm(module: Net) -> Tensor:
    """A float64 norm over full gradients, rounded once. Under DDP only."""
    gradients = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *gradients]).sum().sqrt().float()


def configure_gradient_clipping_may_clip_by_itself_and_log_the_norm() -> Row:
    """``grad_norm`` is the number that a float64 norm over DDP's full gradients is."""

    class Clipping(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            ddp = isinstance(self.trainer.strategy, pl.strategies.DDPStrategy)
            self.log("norm", full_norm(self) if ddp else grad_norm(self))
            self.log("head", full_norm(self.model.head) if ddp else grad_norm(self.model.head))

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(
                optimizer, gradient_clip_val=0.01 * (1 + self.global_step), gradient_clip_algorithm="value"
            )
            ddp = isinstance(self.trainer.strategy, pl.strategies.DDPStrategy)
            self.log("clipped", full_norm(self) if ddp else grad_norm(self))

    def play(strategy: Strategy) -> dict[str, Any]:
        module, memory = Clipping(), Memory()
        trainer = fit(strategy, module, logger=memory, log_every_n_steps=1)
        return {**made(module, trainer), "rows": memory.rows}

    results = yield compared(play)
    logged = [row for _, row in results[0]["ddp"]["rows"] if "norm" in row]
    assert len(logged) == 4
    assert all(0 < row["clipped"] < row["norm"] for row in logged)
    assert_same(results)


# ---------------------------------------------------------------------------------------------------------------------
# Schedulers


class Scheduled(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        config: dict[str, Any]
        if self.kind == "step":
            config = {"scheduler": schedulers.OneCycleLR(optimizer, 0.05, total_steps=20), "interval": "step"}
        elif self.kind == "epoch":
            config = {"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
        else:
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1.0)
            config = {"scheduler": plateau, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def schedulers_move_the_learning_rate_of_the_sharded_optimizer(kind: str) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module, memory = Scheduled(kind), Memory()
        trainer = fit(
            strategy,
            module,
            count=3,
            val=1,
            max_epochs=3,
            logger=memory,
            log_every_n_steps=1,
            callbacks=[LearningRateMonitor()],
        )
        rates = [{k: v for k, v in row.items() if k.startswith("lr-")} for _, row in memory.rows]
        groups = [group["lr"] for group in module.optimizers().param_groups]
        return {**made(module, trainer), "rates": [row for row in rates if row], "groups": groups}

    results = yield compared(play)
    ddp = results[0]["ddp"]
    assert len({tuple(row.items()) for row in ddp["rates"]}) == (9 if kind == "step" else 3)
    assert_same(results)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


class Measured(Net):
    """With a torchmetrics metric, validation counts, and a note of the mode that evaluation runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError()
        self.validations: list[tuple[int, bool]] = []  # step, and whether gradients were on

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx, epoch=77)
        y_hat = self(x)
        self.validations.append((self.global_step, torch.is_grad_enabled()))
        self.metric(y_hat, y)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("val_loss", F.mse_loss(y_hat, y), sync_dist=True)


def sanity_check_and_validation_in_mid_epoch_change_nothing(inference_mode: bool) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module, memory = Measured(), Memory()
        trainer = fit(
            strategy,
            module,
            count=4,
            val=2,
            max_epochs=2,
            val_check_interval=0.5,
            num_sanity_val_steps=2,
            inference_mode=inference_mode,
            logger=memory,
            log_every_n_steps=1,
        )
        return {**made(module, trainer), "validations": module.validations, "rows": memory.rows}

    results = yield compared(play)
    # Two batches each: the sanity check, and after every second step.
    assert results[0]["ddp"]["validations"] == [(step, False) for step in (0, 0, 2, 2, 4, 4, 6, 6, 8, 8)]
    assert_same(results)


def validate_test_and_predict_without_fit_and_after_it(inference_mode: bool) -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        trainer = make_trainer(strategy, inference_mode=inference_mode)

        def evaluate() -> list[Any]:
            return [
                trainer.validate(module, batches(2), verbose=False),
                trainer.test(module, batches(2), verbose=False),
                trainer.predict(module, batches(2)),
            ]

        before = evaluate()
        trainer.fit(module, batches(3), batches(1))
        after = evaluate()
        assert before[0] != after[0]
        return {**made(module, trainer), "before": before, "after": after}

    assert_same((yield compared(play)))


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


# ---------------------------------------------------------------------------------------------------------------------
# The Trainer's other switches


def early_stopping_stops_at_the_same_epoch() -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        stopper = EarlyStopping("val_loss", patience=1, min_delta=0.02)
        trainer = fit(strategy, module, count=3, val=2, max_epochs=20, callbacks=[stopper])
        return {**made(module, trainer), "stopped": stopper.stopped_epoch, "best": stopper.best_score}

    results = yield compared(play)
    assert 0 < results[0]["ddp"]["stopped"] < 19
    assert_same(results)


def fast_dev_run_and_detect_anomaly() -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Measured()
        trainer = fit(strategy, module, count=5, val=3, fast_dev_run=2, detect_anomaly=True)
        trainer.test(module, batches(3), verbose=False)
        return made(module, trainer)

    results = yield compared(play)
    assert results[0]["ddp"]["global_step"] == 2
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


def model_summary_and_progress_bar_see_the_whole_model() -> Row:
    class Summary(ModelSummary):
        seen: tuple[Any, ...] = ()

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_fit_start(trainer, pl_module)
            summary = self._summary(trainer, pl_module)
            self.seen = (
                summary.total_parameters,
                summary.trainable_parameters,
                dict(zip(summary.layer_names, summary.param_nums, strict=True)),
            )

    class Example(Net):
        def __init__(self) -> None:
            super().__init__()
            self.model.stem.requires_grad_(False)
            self.example_input_array = torch.ones(1, WIDTH)

    def play(strategy: Strategy) -> dict[str, Any]:
        module, summary = Example(), Summary(max_depth=-1)
        bar = TQDMProgressBar()
        trainer = fit(
            strategy,
            module,
            count=2,
            val=1,
            callbacks=[summary, bar],
            enable_progress_bar=True,
            enable_model_summary=True,
        )
        return {**made(module, trainer), "summary": summary.seen}

    results = yield compared(play)
    total = sum(p.numel() for p in Net().parameters())
    assert results[0]["ddp"]["summary"][:2] == (total, total - WIDTH * WIDTH - WIDTH)
    assert_same(results)


def fit_goes_on_in_the_same_trainer() -> Row:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        trainer = fit(strategy, module, count=2, val=1)
        first = values_of(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, batches(2), batches(1))
        return {**made(module, trainer), "first": first}

    results = yield compared(play)
    assert results[0]["ddp"]["epoch"] == 3
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


def test_what_users_switch_on_acts_as_under_ddp() -> None:
    in_one_world(
        2,
        accumulation_steps_once_per_window_also_in_an_uneven_last_one(),
        configure_gradient_clipping_may_clip_by_itself_and_log_the_norm(),
        *map(schedulers_move_the_learning_rate_of_the_sharded_optimizer, ("step", "epoch", "plateau")),
        sanity_check_and_validation_in_mid_epoch_change_nothing(inference_mode=True),
        validate_test_and_predict_without_fit_and_after_it(inference_mode=False),
        generation_in_validation_and_outside_any_step(),
        early_stopping_stops_at_the_same_epoch(),
        fast_dev_run_and_detect_anomaly(),
        the_distributed_sampler_gives_every_rank_its_own_part(),
        model_summary_and_progress_bar_see_the_whole_model(),
        fit_goes_on_in_the_same_trainer(),
        a_second_module_in_the_same_trainer(),
        detect_anomaly_names_a_nan_in_backward(),
    )
