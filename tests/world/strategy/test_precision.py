"""Precisions: the same bits in every stage, the bits of a hand-written reference, and one loss scale for all ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torchmetrics import MeanMetric

from lightning_zero import ZeroPrecision, ZeroStrategy, build_plan, full_parameters
from lightning_zero.optim.gradients import LossScaler
from lightning_zero.shards.binding import is_absent
from tests.helpers import runs
from tests.helpers.cases import WIDTH, Block, Case, Stack, case, features, mse
from tests.helpers.models import ZOO
from tests.helpers.probe import Probe, fit, masters, pairwise_mean
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Net
from tests.helpers.training import build
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
STEPS = 4
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
DTYPES = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}


def make_plugin(name: str, **options: Any) -> ZeroPrecision:
    scaler = LossScaler(init_scale=256.0) if name == "16-mixed" else None
    return ZeroPrecision(name, scaler=scaler, **options)


class Normed(Stack):
    """Layers, a tied weight, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))
        self.head.weight = self.stem.weight

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return self.norm(x.flatten(0, 1).float()).unflatten(0, x.shape[:2]).to(x.dtype)


NORMED = case("normed", Normed)
# A batch norm that is kept in float32 needs such an input; under true half precision the other models are in 16 bit.
PLAIN = case("plain", lambda: Stack(Block(), Block(), Block()))


class Dtypes(pl.Callback):
    """What units compute with inside of a step, and what parameters show outside of it."""

    def __init__(self) -> None:
        self.inside: set[torch.dtype] = set()
        self.outside: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        def note(block: nn.Module, args: Any) -> None:
            self.inside.add(block.up.weight.dtype)

        module.model.layers[0].register_forward_pre_hook(note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, parameter in module.named_parameters():
            shown = "nothing" if is_absent(parameter) else "values"
            self.outside.append(f"{name}: {parameter.dtype} {shown}")


def train(model: Case, stage: int, precision: Any, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    dtypes = Dtypes()
    probe = Probe(model)
    key = "precision" if isinstance(precision, str) else "plugins"
    trainer = fit(
        probe, stage=stage, micro_steps=steps, callbacks=[dtypes], options={key: precision, **options}, bucket_mib=0.004
    )
    return {
        "losses": probe.losses,
        "masters": masters(probe),
        "inside": dtypes.inside,
        "outside": set(dtypes.outside),
        "buffers": {name: buffer.detach().clone() for name, buffer in probe.named_buffers()},
        "optimizer": {
            value.dtype
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        },
    }


def same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Bit for bit, dtypes included; NaN is never equal."""
    for left, right in zip(expected["losses"], actual["losses"], strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    for kind in ("masters", "buffers"):
        assert expected[kind].keys() == actual[kind].keys()
        for name, left in expected[kind].items():
            assert left.dtype == actual[kind][name].dtype, name
            assert torch.equal(left, actual[kind][name]), name


# ---------------------------------------------------------------------------------------------------------------------
# All precisions


def test_stages_are_identical_in_every_precision() -> None:
    """And parameters show nothing outside of a step but where they are replicated in their own dtype."""

    def run(rank: int) -> dict[str, list[dict[str, Any]]]:
        return {name: [train(PLAIN, stage, make_plugin(name)) for stage in STAGES] for name in PRECISIONS}

    for results in run_world(3, run, timeout=120):
        losses = {name: float(stages[0]["losses"][-1]) for name, stages in results.items()}
        assert len(set(losses.values())) == len(PRECISIONS)
        for name, stages in results.items():
            # All in fp16, second moments are below its range, and AdamW's steps too long: as under DDP, see below.
            assert name == "16-true" or losses[name] == pytest.approx(losses["64-true"], rel=0.02), name
            compute = DTYPES[name.partition("-")[0]]
            mixed = name.endswith("mixed")
            master = torch.float32 if mixed else compute
            for stage, found in zip(STAGES, stages, strict=True):
                same(stages[0], found)
                assert found["inside"] == {compute}, name
                assert found["optimizer"] == {master}, name
                assert {value.dtype for value in found["masters"].values()} == {master}, name
                assert all(bool(value.isfinite().all()) for value in found["masters"].values()), name
                shown = f"{master} nothing" if mixed or stage == 3 else f"{master} values"
                assert found["outside"] == {f"{parameter}: {shown}" for parameter in found["masters"]}, name


def the_trainer_s_flag_is_the_plugin() -> Row:
    """Except ``16-mixed``, which Lightning itself turns into ``bf16-mixed`` on the CPU."""

    def run(rank: int) -> None:
        for name in PRECISIONS:
            if name != "16-mixed":
                same(train(PLAIN, 3, make_plugin(name), 2), train(PLAIN, 3, name, 2))

    (yield run)


def buffers_and_batch_norm_stay_in_float32() -> Row:
    """In mixed precision."""

    def run(rank: int) -> list[tuple[str, dict[str, torch.dtype], set[torch.dtype]]]:
        found = []
        for name in ("bf16-mixed", "16-mixed"):
            for stage in STAGES:
                inside: set[torch.dtype] = set()
                probe = Probe(NORMED)

                def note(module: nn.Module, args: Any, inside: set[torch.dtype] = inside) -> None:
                    inside.add(module.weight.dtype)

                probe.model.norm.register_forward_pre_hook(note)
                fit(probe, stage=stage, micro_steps=2, options={"plugins": make_plugin(name)})
                dtypes = {key: buffer.dtype for key, buffer in probe.named_buffers() if buffer.is_floating_point()}
                dtypes["norm"] = probe.model.norm.weight.dtype
                found.append((f"{name}, stage {stage}", dtypes, inside))
        return found

    for found in (yield run):
        for where, dtypes, inside in found:
            assert set(dtypes.values()) == {torch.float32}, where
            assert len(dtypes) == 4, where
            assert inside == {torch.float32}, where


class Rotary(nn.Module):
    """Frequencies that 16 bits cannot hold, statistics, and a metric that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.level = MeanMetric()
        self.register_buffer("inv_freq", torch.empty(WIDTH, dtype=torch.float32), persistent=False)
        self.register_buffer("made_here", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(1.0 / 100.0 ** (torch.arange(WIDTH).float() / WIDTH))
        self.made_here.copy_(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.inv_freq * torch.arange(1, len(x) + 1, device=x.device)[:, None]
        y = self.body((x * angles.cos() + self.made_here).to(x.dtype))  # the casts do nothing where all is in 16 bit
        y = self.norm(y.to(self.norm.weight.dtype)).to(x.dtype)
        self.level.update(y.detach().abs().mean())
        return y + 0.1 * self.level.compute().to(x.dtype)


class Configured(Net):
    """Made in ``configure_model``, under the dtype that Lightning makes modules in there."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            torch.manual_seed(2)
            self.model = Rotary()


class OnMeta(Configured):
    def configure_model(self) -> None:
        made = isinstance(self.model, Rotary)
        with torch.device("meta"):
            super().configure_model()
        if not made:
            self.model.level = MeanMetric()  # states of metrics are no tensors of the module


def half_run(strategy: Strategy, module: Net, precision: Any) -> dict[str, Any]:
    options = {"plugins": precision} if isinstance(precision, ZeroPrecision) else {"precision": precision}
    trainer = runs.fit(strategy, module, val=1, **options)
    found = runs.made(module, trainer)
    module.model.register_buffer("added", torch.ones(WIDTH))
    trainer = runs.fit(runs.again(strategy), module, count=2, **options)
    return {**found, "again": runs.made(module, trainer)}


def true_half_precision_is_ddp_s(make: Callable[[], Net], precision: str) -> Row:
    """Buffers, batch norm and metrics too, also in a second fit with a buffer more."""
    results = yield compared(lambda strategy: half_run(strategy, make(), precision))
    weights = results[0]["ddp"]["again"]["weights"]
    assert {value.dtype for value in weights.values()} == {DTYPES[precision.removesuffix("-true")], torch.int64}
    assert "model.added" in weights
    assert all(bool(loss.isfinite()) for loss in results[0]["ddp"]["losses"])
    runs.assert_same(results)


def buffers_of_a_module_on_meta() -> Row:
    """Made and cast as where the module is built on the CPU."""

    def play(rank: int) -> list[dict[str, Any]]:
        with runs.quiet():
            return [half_run(runs.zero(3), module, ZeroPrecision("bf16-true")) for module in (Configured(), OnMeta())]

    for built, on_meta in (yield play):
        for name in ("inv_freq", "made_here", "added", "norm.running_mean", "norm.weight"):
            assert built["again"]["weights"][f"model.{name}"].dtype is torch.bfloat16, name
            assert on_meta["again"]["weights"][f"model.{name}"].dtype is torch.bfloat16, name
        for name in ("inv_freq", "made_here"):  # the latter is computed in 16 bits, or cast to them
            assert torch.allclose(*(run["weights"][f"model.{name}"] for run in (built, on_meta)), rtol=1e-2), name
        for run in (built, on_meta):
            assert run["weights"]["model.body.stem.weight"].dtype is torch.bfloat16
            assert all(bool(loss.isfinite()) for loss in run["losses"])


# ---------------------------------------------------------------------------------------------------------------------
# bf16-mixed against a hand-written loop


def by_hand(model: Case, reduce_dtype: torch.dtype | None, steps: int, autocast: bool) -> dict[str, Tensor]:
    """fp32 masters and AdamW over them, a bf16 copy that computes, gradients averaged in rank order. Collective.

    Without autocast the inputs are cast, and nothing else.
    """
    module = build(model)
    half = copy.deepcopy(module)
    for child in half.modules():
        if not isinstance(child, nn.modules.batchnorm._BatchNorm):
            for parameter in child.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)
    for step in range(steps):
        batch = model.batch(dist.get_rank(), step)
        if not autocast:
            batch = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = model.loss(half, batch)
        half.zero_grad()
        loss.backward()
        for master, parameter in zip(module.parameters(), half.parameters(), strict=True):
            gradient = parameter.grad.to(reduce_dtype or torch.float32)
            master.grad = pairwise_mean(gradient).float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(module.parameters(), half.parameters(), strict=True):
                parameter.copy_(master)
    return {f"model.{name}": parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_bf16_mixed_is_the_hand_written_loop() -> None:
    def run(rank: int) -> None:
        ends = []
        for reduce_dtype, autocast in ((None, True), ("bfloat16", True), (None, False)):
            for model, stages in ((NORMED, STAGES), (ZOO["gpt_tied"], (3,))):
                expected = by_hand(model, getattr(torch, reduce_dtype) if reduce_dtype else None, 5, autocast)
                for stage in stages:
                    plugin = make_plugin("bf16-mixed", reduce_dtype=reduce_dtype, autocast=autocast)
                    actual = train_masters(model, stage, plugin, 5)
                    assert expected.keys() == actual.keys()
                    wrong = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
                    assert not wrong, f"stage {stage}, averaged in {reduce_dtype}, autocast {autocast}: {wrong}"
            ends.append(actual)
        for one, other in itertools.combinations(ends, 2):
            assert not equal(one, other), "a setting makes no difference"

    run_world(3, run, timeout=120)


def train_masters(model: Case, stage: int, plugin: ZeroPrecision, steps: int) -> dict[str, Tensor]:
    probe = Probe(model)
    fit(probe, stage=stage, micro_steps=steps, options={"plugins": plugin})
    return masters(probe)


def full_parameters_shows_masters_in_the_middle_of_training() -> Row:
    """16 bits of bf16 cannot hold them: the values have more."""

    class Look(pl.Callback):
        def __init__(self) -> None:
            self.exact: list[bool] = []

        def on_train_batch_end(
            self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            with full_parameters(module):
                engine = trainer.strategy.engine
                for name, parameter in module.named_parameters():
                    shard = engine.shards[name]
                    own = parameter.detach().flatten()[shard.start : shard.start + shard.data.numel()]
                    self.exact.append(parameter.dtype is torch.float32 and torch.equal(own, shard.data))
                weight = module.model.stem.weight
                self.exact.append(not torch.equal(weight, weight.bfloat16().float()))

    def run(rank: int) -> list[bool]:
        exact: list[bool] = []
        for stage in STAGES:
            look = Look()
            fit(
                Probe(case("plain", Stack, loss=mse)),
                stage=stage,
                micro_steps=2,
                callbacks=[look],
                options={"plugins": make_plugin("bf16-mixed")},
            )
            exact += look.exact
        return exact

    for exact in (yield run):
        assert exact
        assert all(exact)


def test_buffers_norms_and_modules_in_full_precision(tmp_path: Path) -> None:
    in_one_world(
        2,
        the_trainer_s_flag_is_the_plugin(),
        full_parameters_shows_masters_in_the_middle_of_training(),
        buffers_and_batch_norm_stay_in_float32(),
        true_half_precision_is_ddp_s(lambda: Net(Rotary), "bf16-true"),
        true_half_precision_is_ddp_s(Configured, "16-true"),
        buffers_of_a_module_on_meta(),
        *map(wide_inputs_of_narrow_norms, MIXED),
        a_module_may_compute_in_full_precision(),
        a_module_in_full_precision_has_the_bits_of_autocast(),
        all_computes_in_16_bits_without_autocast(tmp_path),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loss scale


def exploding(at: int, on: int) -> Case:
    """One micro-step whose gradients overflow fp16, on one rank."""
    plain = features(WIDTH)

    def batch(rank: int, step: int) -> tuple[Any, ...]:
        return (*plain(rank, step), torch.tensor(1e30 if (rank, step) == (on, at) else 1.0))

    def loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]) * batch[2]

    return case("exploding", Stack, batch=batch, loss=loss)


def scheduled(module: pl.LightningModule) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Scale(pl.Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.masters: list[dict[str, Tensor]] = []
        self.counts: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.masters.append(masters(module))

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.counts.append(max((float(state["step"]) for state in optimizer.state.values()), default=0.0))


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def one_rank_s_overflow_skips_the_step_of_all(on: int) -> Row:
    """Step 2 of 0 to 5 overflows. Two good steps make the scale grow."""

    def run(rank: int) -> list[Scale]:
        found = []
        for stage in STAGES:
            plugin = ZeroPrecision("16-mixed", scaler=LossScaler(init_scale=64.0, growth_interval=2))
            scale = Scale()
            fit(
                Probe(exploding(2, on), scheduled),
                stage=stage,
                micro_steps=6,
                callbacks=[scale],
                options={"plugins": plugin},
            )
            found.append(scale)
        return [(s.scales, s.rates, s.counts, s.masters) for s in found]

    for stages in (yield run):
        for scales, rates, counts, states in stages:
            # Good, good: doubled; overflow: halved; good, good: doubled; good.
            assert scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
            # As under DDP, the scheduler does not know of the step that was skipped.
            assert rates == pytest.approx([0.01 / step for step in range(1, 7)], rel=1e-12)
            assert counts == [0, 1, 2, 2, 3, 4]
            assert equal(states[1], states[2])
            assert [equal(a, b) for a, b in itertools.pairwise(states)] == [False, True, False, False, False]
            assert all(bool(value.isfinite().all()) for value in states[-1].values())
            assert equal(states[-1], stages[0][3][-1])


def test_one_rank_s_overflow_skips_the_step_of_all() -> None:
    in_one_world(2, *map(one_rank_s_overflow_skips_the_step_of_all, (0, 1)))


# ---------------------------------------------------------------------------------------------------------------------
# Lightning's own plugins


def test_stock_plugins_are_converted() -> None:
    assert ZeroPrecision.convert(Precision()).precision == "32-true"
    assert ZeroPrecision.convert(DoublePrecision()).precision == "64-true"
    assert ZeroPrecision.convert(HalfPrecision("bf16-true")).precision == "bf16-true"
    assert ZeroPrecision.convert(HalfPrecision("16-true")).precision == "16-true"
    assert ZeroPrecision.convert(MixedPrecision("bf16-mixed", "cpu")).precision == "bf16-mixed"
    own = ZeroPrecision("bf16-mixed")
    assert ZeroPrecision.convert(own) is own


def test_a_grad_scaler_s_settings_are_taken_over() -> None:
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7, enabled=True
    )
    converted = ZeroPrecision.convert(MixedPrecision("16-mixed", "cpu", scaler=scaler))
    assert converted.precision == "16-mixed"
    assert converted.scaler is not None
    assert converted.scaler.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


class ReadsTheScaler(Net):
    """Logs all of the loss scaler, also from the object that was given, and now and then makes a step with it."""

    def __init__(self, scaler: torch.amp.GradScaler, raw: bool) -> None:
        unit: Any = type("Block", (nn.Sequential,), {})  # without a norm, which autocast has in float32
        super().__init__(lambda: nn.Sequential(unit(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)))
        self.scaler, self.seen, self.automatic_optimization = scaler, [], False
        self.raw = raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx)
        loss = (self(x) * y).mean().half()  # times 65536 it is no float16
        self.losses.append(loss.detach().clone())
        scaler = self.trainer.precision_plugin.scaler
        assert scaler is self.scaler is self.trainer.scaler
        assert isinstance(scaler, torch.amp.GradScaler)
        optimizer: Any = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.raw:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        self.seen += [self.scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()]
        self.seen += [scaler.get_growth_interval(), scaler.is_enabled(), scaler.state_dict()]
        if batch_idx == 3:
            scaler.set_growth_interval(1)


def test_the_scaler_is_torch_s_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    """With DDP's numbers where a user steps with it, and in checkpoints where DDP looks for it."""

    def run(strategy: Strategy, raw: bool, path: Path | None, out: Path) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)  # the first steps overflow
        net, plugins = ReadsTheScaler(scaler, raw), MixedPrecision("16-mixed", "cpu", scaler=scaler)
        trainer = runs.make_trainer(strategy, plugins=plugins, max_epochs=2 if path else 1)
        trainer.fit(net, runs.batches(14), ckpt_path=path)
        trainer.save_checkpoint(out, storage_options={"format": "consolidated"} if "stage" in out.name else None)
        return {"seen": net.seen, **runs.made(net, trainer)}

    def play(strategy: Strategy) -> dict[str, Any]:
        found, name = {}, runs.name_of(strategy)
        for raw in (True, False):
            found[f"{raw}"] = run(strategy, raw, None, tmp_path / f"{name}-{raw}.ckpt")
            strategy = runs.again(strategy)
            resumed = run(strategy, raw, tmp_path / f"ddp-{raw}.ckpt", tmp_path / f"{name}-resumed.ckpt")
            strategy = runs.again(strategy)
            found[f"{raw}, resumed"] = resumed
        return found

    results = runs.each_strategy(play)
    runs.assert_same(results)
    assert results[0]["ddp"]["True"]["seen"][0] == 2.0**23
    for raw in (True, False):
        ours, theirs = (torch.load(tmp_path / f"{n}-{raw}.ckpt", weights_only=False) for n in ("stage 3", "ddp"))
        assert ours["MixedPrecision"] == theirs["MixedPrecision"]
        assert "ZeroPrecision" not in ours


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ZeroPrecision("16"), "precision='16'"),
    (lambda: ZeroPrecision("bf16-true", reduce_dtype="float32"), "only applies to bf16-mixed and 16-mixed"),
    (lambda: ZeroPrecision("bf16-mixed", reduce_dtype="int8"), "reduce_dtype='int8'"),
    (lambda: ZeroPrecision("bf16-mixed", scaler=LossScaler()), "scaler only applies to 16-mixed"),
    (lambda: ZeroPrecision("bf16-true", autocast=False), "autocast=False with precision='bf16-true'"),
]


def test_settings_that_do_not_fit() -> None:
    for make, error in SETTINGS:
        with pytest.raises(ValueError, match=error):
            make()


class Residual(nn.Module):
    """A sum that stays in ``float32``, before a norm whose weights are in 16 bits."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


MIXED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: Residual(lambda: nn.LayerNorm(WIDTH)),
    "group": lambda: Residual(lambda: nn.GroupNorm(2, WIDTH)),
    "instance": lambda: Residual(
        lambda: nn.Sequential(nn.Unflatten(1, (2, -1)), nn.InstanceNorm1d(2, affine=True), nn.Flatten())
    ),
    "no weights": lambda: Residual(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
}


def wide_inputs_of_narrow_norms(name: str) -> Row:
    """CPUs have no kernel for them, and autocast casts none there; nor does it reach attention's own for evaluation."""

    def run(rank: int) -> list[float]:
        losses = []
        for stage in (None, 1, 2, 3):
            strategy = ZeroStrategy(stage) if stage else DDPStrategy(find_unused_parameters=True)
            module, trainer = Net(MIXED[name]), runs.make_trainer(strategy, precision="bf16-mixed")
            with runs.quiet():
                trainer.fit(module, runs.batches(3))
                losses += [
                    float(module.losses[-1]),
                    trainer.validate(module, runs.batches(2), verbose=False)[0]["val_loss"],
                ]
            with full_parameters(module):
                assert all("lightning_zero" not in str(type(h)) for m in module.modules() for h in m._forward_pre_hooks)
        assert torch.backends.mha.get_fastpath_enabled()
        return losses

    for trained, seen, *losses in (yield run):
        assert losses == pytest.approx([trained, seen] * 3, rel=1e-2)


class Islands(nn.Module):
    """Computes a part in float32, where it has switched autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weights = self.router(x.float()).softmax(dim=-1)
        assert weights.dtype == torch.float32
        return self.experts(x) * weights


class Router(nn.Linear):
    pass


def a_module_may_compute_in_full_precision() -> Row:
    """Then it has the float32 weights, and their bits; without, an error says how."""

    def world(rank: int) -> tuple[list[list[Tensor]], list[str]]:
        losses, told = [], list[str]()
        for stage in (1, 2, 3):
            module = Net(Islands)
            plugin = ZeroPrecision("bf16-mixed", full_precision=["Router"])
            with runs.quiet():
                runs.fit(ZeroStrategy(stage), module, count=4, plugins=[plugin])
            losses.append(module.losses)
            with runs.quiet(), runs.raised(told):
                runs.fit(ZeroStrategy(stage), Net(Islands), count=4, precision="bf16-mixed")
        module = Net(Islands)
        with runs.quiet():
            runs.fit(DDPStrategy(), module, count=4, precision="bf16-mixed")
        losses.append(module.losses)
        return losses, told

    for losses, told in (yield world):
        first, *others, ddp = losses
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        assert torch.allclose(torch.stack(first), torch.stack(ddp), rtol=1e-2)
        assert len(told) == 3
        assert all("full_precision=['Router']" in message for message in told)


class Rounded(nn.Module):
    """What 16-bit copies of weights would change: a table, norms, weights of one's own, and layers that run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.mix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(x.abs().sum(-1).long() % 5)
        for _ in range(2):
            x = x + self.scale * self.inner(self.norm(x))
        return F.linear(x, self.table.weight) @ self.table.weight + x @ self.mix * torch.slogdet(self.mix)[1].exp()


def a_module_in_full_precision_has_the_bits_of_autocast() -> Row:
    def world(rank: int) -> tuple[list[list[Tensor]], list[str]]:
        losses, told = [], list[str]()
        for strategy in (DDPStrategy(), *map(ZeroStrategy, STAGES)):
            ours = isinstance(strategy, ZeroStrategy)
            precision = {"plugins": [ZeroPrecision("bf16-mixed", full_precision=["Net"])]}
            module = Net(Rounded)
            with runs.quiet():
                runs.fit(strategy, module, count=6, **(precision if ours else {"precision": "bf16-mixed"}))
            losses.append(module.losses)
        with runs.quiet(), runs.raised(told):
            runs.fit(ZeroStrategy(3), Net(Rounded), count=1, precision="bf16-mixed")
        return losses, told

    for (ddp, *ours), told in (yield world):
        assert len(ddp) == 6
        assert all(torch.equal(torch.stack(ddp), torch.stack(other)) for other in ours)
        assert "Low precision dtypes" in told[0]
        assert "full_precision=['Router']" in told[0]


class Without(nn.Module):
    """Adds a ``float32`` buffer to what it computes in 16 bits, and goes on with the sum or with its first dtype."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast, self.first, self.norm = cast, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.router, self.second = Router(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype)))
        self.seen |= {x.dtype, self.router(x.float()).dtype}
        return self.second((x + self.offset).to(x.dtype if self.cast else torch.float32)).float()


def all_computes_in_16_bits_without_autocast(folder: Path) -> Row:
    """Norms too, but for a class that is named; resuming goes on with the same bits; who forgets a cast is told."""

    def world(rank: int) -> tuple[list[list[Tensor]], list[set[torch.dtype]], list[str]]:
        losses, seen, told = [], [], list[str]()
        plugin = {"plugins": [ZeroPrecision("bf16-mixed", full_precision=["Router"], autocast=False)]}
        for stage in STAGES:
            module = Net(lambda: Without(cast=True))
            resumed, whole, path = Net(lambda: Without(cast=True)), Net(lambda: Without(cast=True)), folder / str(stage)
            with runs.quiet():
                runs.fit(ZeroStrategy(stage), module, count=2, **plugin).save_checkpoint(path)
                trainer = runs.make_trainer(ZeroStrategy(stage), max_epochs=2, **plugin)
                trainer.fit(resumed, runs.batches(2), ckpt_path=path)
                runs.fit(ZeroStrategy(stage), whole, count=2, max_epochs=2, **plugin)
            losses += [module.losses + resumed.losses, whole.losses]
            seen.append(whole.model.seen)
            with runs.quiet(), runs.raised(told):
                runs.fit(ZeroStrategy(stage), Net(lambda: Without(cast=False)), count=1, **plugin)
        return losses, seen, told

    for losses, seen, told in (yield world):
        assert len(losses[0]) == 4
        assert all(torch.equal(torch.stack(losses[0]), torch.stack(other)) for other in losses)
        assert seen == [{torch.bfloat16, torch.float32}] * 3
        assert len(told) == 3
        assert all("such as buffers" in message for message in told)


def test_a_class_in_full_precision_has_to_be_there() -> None:
    with pytest.raises(ValueError, match=r"full_precision names \['Nobody'\]"):
        build_plan(Islands(), world_size=2, param_dtype=torch.bfloat16, full_precision=["Nobody"])
    with pytest.raises(ValueError, match="full_precision only applies to"):
        ZeroPrecision("32-true", full_precision=["Router"])
    with pytest.raises(ValueError, match="a list of class names such as"):
        ZeroPrecision("bf16-mixed", full_precision=[nn.LayerNorm])
