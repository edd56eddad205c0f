"""Failures that say nothing: each one is a real bug of some sharded trainer, and a number to check here."""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.shards.binding import original_kind, set_data
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, quiet, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

TIMEOUT = 90.0


def fit(module: Net, stage: int, batches: int = 3, **options: Any) -> pl.Trainer:
    with quiet():
        trainer = make_trainer(ZeroStrategy(stage, **{"units": ["Block"], **options}))  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(range(batches), batch_size=None))
    return trainer


class Clipped(Net):
    """Weights that user code clips between steps, where they are; each step on whole matrices and on slices."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.02, 0.02)


def test_one_rank_steps_on_what_user_code_has_written_between_steps() -> None:
    def run(rank: int) -> None:
        plain = Clipped()
        with quiet():
            make_trainer("auto").fit(plain, DataLoader(range(5), batch_size=None))
        for stage in (1, 2, 3):
            module = Clipped()
            fit(module, stage, batches=5)
            for name, value in values_of(module).items():
                assert torch.equal(value, plain.get_parameter(name)), f"stage {stage}: {name}"

    run_world(1, run, timeout=TIMEOUT)


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("mean", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        self.log("sum", 1.0 + self.global_rank, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_the_trainer_knows_that_it_is_distributed() -> None:
    def run(rank: int) -> None:
        with quiet():
            trainer = make_trainer(ZeroStrategy(stage=3), use_distributed_sampler=True)
            trainer.fit(Logs(), DataLoader(range(8), batch_size=2))
        assert trainer.strategy.is_distributed
        assert trainer.global_step == 2  # 8 samples, 2 ranks, batches of 2
        assert trainer.callback_metrics["mean"] == 0.5
        assert trainer.callback_metrics["sum"] == 2 * (1 + 2)  # 2 batches on each of 2 ranks

    run_world(2, run, timeout=TIMEOUT)


# ---------------------------------------------------------------------------- the user sees the model that was written


class Seen(Net):
    """Looks at its parameters from every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[1].norm.requires_grad_(False)
        self.model.second_head = self.model.head  # an alias
        self.first = self.look()
        self.places: list[str] = []

    def look(self) -> Any:
        return [
            (
                name,
                id(p),
                original_kind(p),
                tuple(p.shape),
                p.ndim,
                p.numel(),
                p.dtype,
                p.requires_grad,
                p.is_leaf,
                dict(vars(p)),
            )
            for name, p in self.named_parameters(remove_duplicate=False)
        ]

    def check(self, place: str) -> None:
        assert self.look() == self.first, place
        self.places.append(place)

    def configure_optimizers(self) -> Any:
        self.check("configure_optimizers")
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)


def _looking(hook: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.check(hook)


for _hook in HOOKS:
    setattr(Seen, _hook, _looking(_hook))


def test_the_user_sees_the_model_that_was_written() -> None:
    def run(rank: int) -> None:
        for stage, precision in ((1, "32-true"), (2, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")):
            module = Seen()
            fit(module, stage, precision_plugin=ZeroPrecision(precision))
            module.check("after fit")
            assert set(HOOKS) | {"configure_optimizers"} <= set(module.places)
            assert list(module.state_dict(keep_vars=True)) == [name for name, *_ in module.first]

    run_world(2, run, timeout=TIMEOUT)


# --------------------------------------------------------------------------------------------- weights that torch moves


class Recurrent(Net):
    """As people write it who once met the warning that asks for ``flatten_parameters``."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.model: Any = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        if computed:  # of one weight, and the other one is the engine's
            self.model = nn.RNN(WIDTH, WIDTH, bias=False, batch_first=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(self.model, "weight_hh_l0")
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.flatten_parameters()
        loss = self.model(self.data(batch_idx)[0][:, None].expand(-1, 4, -1))[0].square().mean()
        self.seen.append(loss.detach())
        return loss


def let_cudnn_move_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: ``module.to()`` and ``flatten_parameters()`` make the weights of a recurrent layer parts of one."""

    def moved(weights: list[Tensor], *layout: Any) -> Tensor:
        whole = torch.cat([weight.flatten() for weight in weights])
        for weight, part in zip(weights, whole.split([weight.numel() for weight in weights]), strict=True):
            set_data(weight, part.view_as(weight))  # and no counter of versions tells of it
        return whole

    asking = nn.RNNBase.flatten_parameters.__code__
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: sys._getframe(1).f_code is asking))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: 0)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", moved)


def trained(computed: bool, stage: int, monkeypatch: pytest.MonkeyPatch | None) -> list[Tensor]:
    """Losses and weights of a run whose weights are moved, or not."""
    module = Recurrent(computed)
    with monkeypatch.context() if monkeypatch else contextlib.nullcontext() as patch:
        if patch:
            let_cudnn_move_weights(patch)
        if patch and not computed:  # else what is computed shares memory with then, which is warned of
            before = [weight.data_ptr() for weight in module.model.parameters()]
            module.model.flatten_parameters()
            assert [weight.data_ptr() for weight in module.model.parameters()] != before
        fit(module, stage, units=[type(module.model).__name__])
    return [*module.seen, *values_of(module).values()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_recurrent_layers_move_are_trained(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> None:
        for computed, stage in itertools.product((False, True), (1, 3)):
            moved, expected = (trained(computed, stage, patch) for patch in (monkeypatch, None))
            assert all(map(torch.equal, moved, expected)), f"stage {stage}, computed: {computed}"

    run_world(world_size, run, timeout=TIMEOUT)
