"""Failures that say nothing: each one is a real bug of some sharded trainer, and a number to check here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy, full_parameters, grad_norm
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import original_kind, set_data
from tests.helpers.cases import WIDTH, Block, Stack
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
TIMEOUT = 90.0


def fit(module: pl.LightningModule, stage: int, *, batches: int = 3, precision: Any = None, **strategy: Any) -> Any:
    plugin = ZeroPrecision(precision) if isinstance(precision, str) else precision
    with quiet():
        trainer = make_trainer(
            ZeroStrategy(stage=stage, precision_plugin=plugin, **{"units": ["Block"], **strategy})  # type: ignore[arg-type]
        )
        trainer.fit(module, DataLoader(range(batches), batch_size=None))
    return trainer


def whole(module: nn.Module) -> dict[str, Tensor]:
    with full_parameters(module):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Stack() if model is None else model

    def inputs(self, batch_idx: int) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(self.inputs(batch_idx)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


# --------------------------------------------------------------------------------------------------------- tied weights


class Tied(nn.Module):
    """37 rows of 20: nothing divides by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("stage", STAGES)
def test_every_row_of_a_tied_weight_is_updated(stage: int) -> None:
    class Language(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = torch.arange(37)
            return F.cross_entropy(self.model(ids), ids.roll(1))

    def run(rank: int) -> tuple[Tensor, Tensor]:
        module = Language(Tied())
        before = module.model.head.weight.detach().clone()
        fit(module, stage)
        after = whole(module)
        assert "model.head.weight" not in after
        assert module.model.head.weight is module.model.embedding.weight
        return before, after["model.embedding.weight"]

    for before, after in run_world(3, run, timeout=TIMEOUT):
        unchanged = (before == after).all(dim=1).nonzero().flatten().tolist()
        assert not unchanged, f"rows {unchanged} were never updated"


# ------------------------------------------------------------------------------------------------------- initialisation


def initialise(module: nn.Module) -> None:
    """What users write: by class, by name, by shape, with draws."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=0.02 / (1 + name.count("layers")))
            nn.init.constant_(child.bias, 0.125)
    for name, parameter in module.named_parameters():
        if name.endswith("down.weight"):
            nn.init.orthogonal_(parameter, gain=0.5)


class Custom(Module):
    """Built in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__(model=nn.Identity())
        self.way = way
        if way == "normal":
            self.build()

    def build(self) -> None:
        torch.manual_seed(11)
        self.model = Stack()
        initialise(self.model)

    def configure_model(self) -> None:
        if isinstance(self.model, Stack):
            return
        self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.0 * super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("way", ["normal", "configure_model"])
def test_custom_initialisation_is_that_of_an_unsharded_build(way: str) -> None:
    reference = Custom("normal")
    expected = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    assert bool((expected["model.head.bias"] == 0.125).all())

    def run(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for stage in STAGES:
            module = Custom(way)
            fit(module, stage, batches=1)
            ends.append(whole(module))
        return ends

    for ends in run_world(2, run, timeout=TIMEOUT):
        for stage, end in zip(STAGES, ends, strict=True):
            assert end.keys() == expected.keys()
            wrong = [name for name, value in expected.items() if not torch.equal(end[name], value)]
            assert not wrong, f"stage {stage}: {wrong}"


# ------------------------------------------------------------------------------------------------------- frozen weights


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_are_in_the_checkpoint(stage: int, tmp_path: Any) -> None:
    class Frozen(Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.model = Stack()
            self.model.layers[1].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def run(rank: int) -> None:
        first = Frozen(1)
        saved_by = fit(first, stage, batches=2)
        saved_by.save_checkpoint(tmp_path / "checkpoint")
        expected = whole(first)
        second = Frozen(2)
        with quiet():
            trainer = make_trainer(ZeroStrategy(stage=stage, units=["Block"]), max_epochs=1)  # type: ignore[arg-type]
            trainer.fit(second, DataLoader(range(2), batch_size=None), ckpt_path=tmp_path / "checkpoint")
        for name, value in whole(second).items():
            assert torch.equal(value, expected[name]), name

    run_world(2, run, timeout=TIMEOUT)


# --------------------------------------------------------------------------------------------- placeholders and shapes


def test_a_placeholder_is_never_a_scalar_that_broadcasts() -> None:
    """Between steps a sharded parameter shows its shape; no placeholder is ever computed with."""

    def run(rank: int) -> None:
        module = Module()
        shapes = {name: p.shape for name, p in module.named_parameters()}
        fit(module, 3)
        for name, parameter in module.named_parameters():
            assert parameter.shape == shapes[name]
            with torch.no_grad():
                for use in (lambda p: p + 1, lambda p: p.prod(), lambda p: torch.ones(p.shape) * p):
                    with pytest.raises(ParameterAccessError, match=name):
                        use(parameter)
                with pytest.raises(ParameterAccessError, match=name):
                    parameter.copy_(torch.tensor(2.0))

    run_world(2, run, timeout=TIMEOUT)


@pytest.mark.parametrize("stage", STAGES)
def test_groups_by_ndim_are_what_the_model_says(stage: int) -> None:
    """Muon takes matrices only and refuses anything else; weight decay goes to matrices."""

    class ByShape(Module):
        def configure_optimizers(self) -> Any:
            matrices = [p for p in self.parameters() if p.ndim == 2]
            rest = [p for p in self.parameters() if p.ndim < 2]
            self.counts = (len(matrices), len(rest))
            return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1, weight_decay=0.0)]

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def run(rank: int) -> list[str]:
        module = ByShape()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        fit(module, stage)
        assert module.counts == (8, 14)  # stem, head, 3 x (up, down); their biases and 3 x (norm weight, norm bias)
        return [name for name, value in whole(module).items() if torch.equal(value, before[name])]

    assert run_world(2, run, timeout=TIMEOUT) == [[], []]


class Clipped(Module):
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


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_steps_on_what_user_code_has_written_between_steps(stage: int) -> None:
    def run(rank: int) -> list[str]:
        plain, module = Clipped(), Clipped()
        with quiet():
            make_trainer("auto").fit(plain, DataLoader(range(5), batch_size=None))
        fit(module, stage, batches=5)
        found = whole(module)
        return [name for name, parameter in plain.named_parameters() if not torch.equal(found[name], parameter)]

    assert run_world(1, run, timeout=TIMEOUT) == [[]]


# ------------------------------------------------------------------------------------------------------------ precision


class Buffers(Module):
    """A rotary table and a metric: numbers that 16 bit would ruin."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("inverse_frequency", 1.0 / 10000 ** (torch.arange(0, 20, 2) / 20))
        self.metric = torchmetrics.MeanMetric()
        self.reference = self.model.inverse_frequency.clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(torch.tensor(1.001))
        assert self.model.inverse_frequency.dtype is torch.float32
        self.log("metric", self.metric)
        return loss


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_buffers_and_metric_states_stay_in_fp32(precision: str) -> None:
    """In mixed precision, and in 16 bit where the user wants them kept: by default everything is cast, as under DDP."""

    def run(rank: int) -> None:
        for stage in STAGES:
            module = Buffers()
            buffers: Any = "keep" if precision == "bf16-true" else "cast"
            fit(module, stage, precision=ZeroPrecision(precision, buffers=buffers))  # type: ignore[arg-type]
            assert torch.equal(module.model.inverse_frequency, module.reference)
            assert module.metric.mean_value.dtype is torch.float32
            assert module.metric.weight.dtype is torch.float32

    run_world(2, run, timeout=TIMEOUT)


def test_mixed_precision_initialises_and_keeps_fp32_masters() -> None:
    def run(rank: int) -> None:
        for stage in STAGES:
            built = Custom("configure_model")
            trainer = fit(built, stage, batches=1, precision="bf16-mixed")
            reference = dict(Custom("normal").named_parameters())
            for name, shard in trainer.strategy.engine.shards.items():
                assert shard.data.dtype is torch.float32
                piece = reference[name].detach().reshape(-1)[shard.start : shard.start + shard.data.numel()]
                assert torch.equal(shard.data, piece), f"stage {stage}: {name} was rounded"

    run_world(2, run, timeout=TIMEOUT)


def test_a_skipped_fp16_step_does_not_step_the_scheduler() -> None:
    """The first gradient overflows on rank 1 only; all ranks skip it, and the schedule waits with them."""

    class Overflows(Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 0 and self.global_rank == 1 else loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def run(rank: int) -> None:
        module = Overflows()
        trainer = fit(module, 3, batches=4, precision="16-mixed")
        assert module.rates == [1.0, 1.0, 0.5, 0.25]
        assert trainer.precision_plugin.scaler.get_scale() == 32768.0  # 65536 * 0.5, on both ranks
        assert all(bool(value.isfinite().all()) for value in whole(module).values())

    run_world(2, run, timeout=TIMEOUT)


# ----------------------------------------------------------------------------------------------------- norms and sizes


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_norm_is_global(stage: int) -> None:
    class Norms(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = grad_norm(self)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def run(rank: int) -> tuple[float, float]:
        module = Norms()
        reference = Module()
        both = torch.cat([torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(r)) for r in (0, 1)])
        reference.model(both).square().mean().backward()
        expected = torch.stack([p.grad.double().norm() for p in reference.parameters()]).norm()
        fit(module, stage, batches=1)
        return float(module.norm), float(expected)

    (first, expected), (second, _) = run_world(2, run, timeout=TIMEOUT)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5)
    assert first > 0


@pytest.mark.parametrize("stage", STAGES)
def test_bucket_size_never_changes_the_numbers(stage: int) -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for bucket_mib in (25.0, 0.01, 0.001):
            module = Module()
            trainer = fit(module, stage, bucket_mib=bucket_mib)
            ends.append((len(trainer.strategy.engine.plan.units), whole(module)))
        return ends

    for (units, expected), *others in run_world(2, run, timeout=TIMEOUT):
        for other_units, end in others:
            assert stage == 3 or other_units > units  # the setting had an effect
            for name, value in expected.items():
                assert torch.equal(end[name], value), name


@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_knows_that_it_is_distributed(stage: int) -> None:
    class Logs(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("mean", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
            self.log("sum", 1.0 + self.global_rank, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
            return super().training_step(batch[0], batch_idx)

    def run(rank: int) -> None:
        module = Logs()
        with quiet():
            trainer = make_trainer(ZeroStrategy(stage=stage), use_distributed_sampler=True)  # type: ignore[arg-type]
            trainer.fit(module, DataLoader(range(8), batch_size=2))
        assert trainer.strategy.is_distributed
        assert isinstance(trainer.train_dataloader.sampler, torch.utils.data.DistributedSampler)
        assert trainer.global_step == 2  # 8 samples, 2 ranks, batches of 2
        assert trainer.callback_metrics["mean"] == 0.5
        assert trainer.callback_metrics["sum"] == 2 * (1 + 2)  # 2 batches on each of 2 ranks

    run_world(2, run, timeout=TIMEOUT)


# ---------------------------------------------------------------------------- the user sees the model that was written


class Seen(Module):
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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_user_sees_the_model_that_was_written(stage: int, precision: str) -> None:
    def run(rank: int) -> None:
        module = Seen()
        fit(module, stage, precision=precision)
        module.check("after fit")
        assert set(HOOKS) | {"configure_optimizers"} <= set(module.places)
        fixed = [name for name, *_ in module.first]
        assert list(module.state_dict(keep_vars=True)) == fixed

    run_world(2, run, timeout=TIMEOUT)


# --------------------------------------------------------------------------------------------- weights that torch moves


class Recurrent(Module):
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
        loss = self.model(self.inputs(batch_idx)[:, None].expand(-1, 4, -1))[0].square().mean()
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("computed", [False, True])
def test_weights_that_recurrent_layers_move_are_trained(
    computed: bool, stage: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        module = Recurrent(computed)
        with monkeypatch.context() as patch:
            let_cudnn_move_weights(patch)
            if not computed:  # else what is computed shares memory with then, which is warned of
                before = [weight.data_ptr() for weight in module.model.parameters()]
                module.model.flatten_parameters()
                assert [weight.data_ptr() for weight in module.model.parameters()] != before
            fit(module, stage, units=[type(module.model).__name__])
        there = Recurrent(computed)
        fit(there, stage, units=[type(there.model).__name__])
        return [*module.seen, *whole(module).values()], [*there.seen, *whole(there).values()]

    for moved, expected in run_world(world_size, run, timeout=TIMEOUT):
        assert all(map(torch.equal, moved, expected))
