"""Rounded exchange between hosts: numbers are those of a plain model of it, and bytes those of a formula."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import (
    Compression,
    HostOffload,
    ZeroPrecision,
    ZeroStrategy,
    full_parameters,
    grad_norm,
    local_slices,
)
from lightning_zero.comm import Exchange, Groups, Streams, choose_collectives
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.config import Placement, SessionSettings
from lightning_zero.errors import DivergenceError, ParameterAccessError
from lightning_zero.extensions.compression.codes import compress, decompress, format_nbytes
from lightning_zero.session.session import ZeroSession
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

pytestmark = pytest.mark.usefixtures("one_host")

CPU = torch.device("cpu")
KINDS = ("bfloat16", "int8", "int4")
LARGEST = {"int8": 127, "int4": 7}


def rounded(values: Tensor, kind: str | None) -> Tensor:
    """What arrives of a tensor: the oracle, which knows blocks of 64 and nothing of bytes."""
    if kind is None:
        return values.clone()
    if kind == "bfloat16":
        return values.bfloat16().to(values.dtype)
    flat = torch.cat([values.float().reshape(-1), torch.zeros(-values.numel() % 64)]).view(-1, 64)
    scale = flat.abs().max(1, keepdim=True).values / LARGEST[kind]
    whole = torch.where(scale > 0, (flat / scale).round(), 0.0)
    return (whole * scale).view(-1)[: values.numel()].view_as(values).to(values.dtype)


def there_and_back(values: Tensor, kind: Any) -> Tensor:
    codes = torch.full((format_nbytes(kind, values.numel()),), 99, dtype=torch.uint8)
    compress(kind, values, codes)
    found = torch.full_like(values, 99.0)
    decompress(kind, codes, found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [1, 3, 2000])
def test_there_and_back(kind: str, dtype: torch.dtype, blocks: int) -> None:
    values = (torch.randn(blocks, 64) * torch.logspace(-5, 3, blocks)[:, None]).to(dtype).view(-1)
    values[:64:2] *= -1
    assert torch.equal(there_and_back(values, kind), rounded(values, kind))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_element_is_off_by_half_a_scale_at_most(kind: str) -> None:
    for size in (1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1e30, 1.6e38):
        values = torch.rand(640).sub_(0.5).mul_(2 * size)
        scale = values.view(-1, 64).abs().amax(1) / LARGEST[kind]
        wrong = (there_and_back(values, kind) - values).view(-1, 64).abs().amax(1)
        assert (wrong <= scale * 0.5001 + 1e-38).all(), size
    nothing = torch.zeros(128)
    assert torch.equal(there_and_back(nothing, kind), nothing)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 40, 63])
def test_what_is_not_finite_does_not_become_finite(kind: str, bad: float, place: int) -> None:
    values = torch.randn(192)
    values[64 + place] = bad
    found = there_and_back(values, kind)
    assert not found[64 + place].isfinite()
    if kind != "bfloat16":
        assert not found[64:128].isfinite().any()
    for part in (slice(0, 64), slice(128, 192)):
        assert torch.equal(found[part], rounded(values, kind)[part])


# ------------------------------------------------------------------------------------------------------- trainings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


def make() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), Block(), Block(), nn.Linear(16, 1))


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return module(x).square().mean()


def expected(hosts: Sequence[Sequence[int]], weights: str | None, gradients: str | None, steps: int) -> list[Tensor]:
    """Three lines of arithmetic on one process: what is computed with, what is summed, what steps."""
    module = make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    ranks = sum(map(len, hosts))
    for step in range(steps):
        sums: list[list[Tensor]] = []
        for host in hosts:
            found = []
            for rank in host:
                twin = copy.deepcopy(module)
                for parameter in twin.parameters():
                    parameter.data = rounded(parameter.data, weights)
                loss_of(twin, rank, step).backward()
                found.append([p.grad for p in twin.parameters()])
            sums.append([rounded(sum(parts[1:], parts[0]), gradients) for parts in zip(*found, strict=True)])
        for parameter, *parts in zip(module.parameters(), *sums, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / ranks
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def train(stage: int, compression: Compression | None, steps: int) -> list[Tensor]:
    module = make()
    settings = SessionSettings(placement=Placement.from_stage(stage), units=["Block"], compression=compression)  # type: ignore[arg-type]
    session = ZeroSession(settings, Groups.create("gloo"), CPU)
    session.checkpoints.begin(training=True)
    session.shard(module)
    session.begin(training=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    session.shard_optimizers([optimizer])
    for step in range(steps):
        optimizer.zero_grad()
        with session.step("training_step", training=True):
            loss = loss_of(module, session.groups.control.rank, step)
        with session.backward():
            loss.backward()
        optimizer.step()
    session.rest()
    with full_parameters(module):
        return [parameter.detach().clone() for parameter in module.parameters()]


SETTINGS = [
    (1, None, "int8"),
    (2, None, "int4"),
    (3, None, "int8"),
    (3, "int8", None),
    (3, "int8", "int4"),
    (3, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize("per_host", [1, 2])
def test_trainings_are_those_of_the_oracle(per_host: int) -> None:
    def run(rank: int) -> list[list[Tensor]]:
        return [train(s, Compression(weights=w, gradients=g), 4) for s, w, g in SETTINGS]  # type: ignore[arg-type]

    hosts = [range(per_host), range(per_host, 2 * per_host)]
    exact = expected(hosts, None, None, 4)
    for found in run_world(2 * per_host, run, environment={RANKS_PER_HOST: str(per_host)}):
        for (_, weights, gradients), parameters in zip(SETTINGS, found, strict=True):
            oracle = expected(hosts, weights, gradients, 4)
            for mine, theirs in zip(parameters, oracle, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-5, atol=2e-6), (weights, gradients)
            assert any(not torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(oracle, exact, strict=True))


BOTH = Compression(weights="int8", gradients="int8")
GRADIENTS = Compression(gradients="int4")


def test_nothing_is_rounded_within_a_host() -> None:
    def run(rank: int) -> list[list[Tensor]]:
        return [train(3, compression, 3) for compression in (None, BOTH)]

    for environment in ({}, {"LIGHTNING_ZERO_SHARED_MEMORY": "0"}):
        for exact, found in run_world(2, run, environment=environment):
            assert all(map(torch.equal, exact, found))


class Net(pl.LightningModule):
    """As people write one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make()
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.layers, self.global_rank, int(batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", loss_of(self.layers, 0, 99), sync_dist=True, batch_size=6)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


def fit(stage: Any, compression: Compression | None, epochs: int = 1, net: Net | None = None, **options: Any) -> Net:
    units, within = options.pop("units", ["Block"]), options.pop("shard_within", None)
    net, offload, path = net or Net(), options.pop("offload", None), options.pop("ckpt_path", None)
    strategy = ZeroStrategy(stage, units=units, compression=compression, offload=offload, shard_within=within)
    with quiet():
        trainer = make_trainer(strategy, max_epochs=epochs, enable_checkpointing=False, **options)
        loader = DataLoader(range(4), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(net, loader, DataLoader(range(1), batch_size=None), ckpt_path=path)  # type: ignore[arg-type]
    return net


def state(net: Net) -> list[Tensor]:
    with full_parameters(net):
        return [parameter.detach().clone() for parameter in net.parameters()]


def test_in_a_trainer(tmp_path: Path) -> None:
    """Clipping, accumulation, other precisions and offload change what they change; runs resume to the bit."""

    def run(rank: int) -> None:
        for stages, micro_steps in (((1, 2, 3), 1), ((2, 3), 2)):  # stage 1 rounds the sum of all micro-steps, once
            options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": micro_steps}
            first, *others = (fit(stage, GRADIENTS, **options) for stage in stages)
            for net in others:
                assert all(map(torch.equal, state(first), state(net)))
                assert net.norms == pytest.approx(first.norms, rel=1e-6)
        assert all(map(torch.equal, state(fit(3, BOTH)), state(fit(3, BOTH, offload=HostOffload()))))
        for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
            exact, close = (fit(3, c, plugins=ZeroPrecision(precision)) for c in (None, BOTH))
            for a, b in zip(state(exact), state(close), strict=True):
                assert torch.allclose(a, b, rtol=0.05, atol=0.05), precision
        whole = fit(3, BOTH, epochs=2)
        first = fit(3, BOTH)
        first.trainer.save_checkpoint(tmp_path / "half.ckpt")
        again = fit(3, BOTH, epochs=2, ckpt_path=tmp_path / "half.ckpt")
        assert all(map(torch.equal, state(whole), state(again)))

    run_world(4, run, environment={RANKS_PER_HOST: "2"}, timeout=200)


def test_what_is_not_finite_is_found() -> None:
    class Overflows(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def run(rank: int) -> None:
        net = fit(3, BOTH, net=Overflows(), plugins=ZeroPrecision("16-mixed"))
        scaler = net.trainer.precision_plugin.scaler
        assert scaler is not None
        assert scaler.get_scale() < 65536.0
        assert all(value.isfinite().all() for value in state(net))

    run_world(2, run, environment={RANKS_PER_HOST: "1"})


@pytest.mark.parametrize(
    ("make_it", "told"),
    [
        (lambda: Compression(), "Compression of nothing"),
        (lambda: Compression(weights="int4"), "weights must be one of bfloat16, int8, got 'int4'"),  # type: ignore[arg-type]
        (lambda: Compression(gradients="int2"), "gradients must be one of bfloat16, int8, int4"),  # type: ignore[arg-type]
        (lambda: ZeroStrategy(3, compression=BOTH, shard_within="node"), "leave weights out"),
        (lambda: ZeroStrategy(3, compression="int8"), "Write Compression\\("),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be(make_it: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_it()


@pytest.mark.parametrize("kind", KINDS)
def test_between_groups_that_share_shards(kind: Any) -> None:
    """The sum of each group is rounded, and then the average. One step of SGD shows it."""

    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def run(rank: int) -> None:
        start = [parameter.detach().clone() for parameter in make().parameters()]
        rows = []
        for other in range(4):
            twin = make()
            loss_of(twin, other, 0).backward()
            rows.append([parameter.grad for parameter in twin.parameters()])
        exact = [sum(parts[1:], parts[0]) / 4 for parts in zip(*rows, strict=True)]
        groups = [[(a + b) / 2 for a, b in zip(rows[at], rows[at + 1], strict=True)] for at in (0, 2)]
        sums = zip(*([rounded(part, kind) for part in group] for group in groups), strict=True)
        oracle = [rounded((a + b) / 2, kind) for a, b in sums]
        for stage in (1, 2, 3):
            net = fit(stage, Compression(gradients=kind), net=Plain(), shard_within=2, max_steps=1)
            steps = [before - after for before, after in zip(start, state(net), strict=True)]
            for found, close in zip(steps, oracle, strict=True):
                assert torch.allclose(found, close, rtol=1e-4, atol=1e-6)
            assert any(not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(steps, exact, strict=True))

    run_world(4, run, environment={RANKS_PER_HOST: "2"})


def test_groups_of_one_host_round_nothing() -> None:
    def run(rank: int) -> None:
        exact, found = (fit(2, one, shard_within=2) for one in (None, GRADIENTS))
        assert all(map(torch.equal, state(exact), state(found)))

    run_world(4, run)


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_that_ranks_keep_in_full_precision_stay_exact(stage: int) -> None:
    def run(rank: int) -> None:
        for options in ({}, {"plugins": ZeroPrecision("bf16-true")}):
            with pytest.raises(ValueError, match=r"weights='int8' is for stage 3, and for mixed precision"):
                fit(stage, BOTH, **options)

    run_world(2, run, environment={RANKS_PER_HOST: "1"})


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_stages_agree_in_mixed_precision(tmp_path: Path, precision: str) -> None:
    """To the bit, from the first batch on; runs resume so, and differ from those where only gradients are rounded."""

    def run(rank: int) -> None:
        def mixed(stage: int, compression: Compression = BOTH, **options: Any) -> Net:
            return fit(stage, compression, plugins=ZeroPrecision(precision), **options)

        for micro_steps in (1, 2):
            options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": micro_steps}
            first, *others = (mixed(stage, **options) for stage in ((1, 2, 3), (2, 3))[micro_steps - 1])
            for net in others:
                assert all(map(torch.equal, state(first), state(net)))
                assert net.trainer.callback_metrics["val"] == first.trainer.callback_metrics["val"]
            rest = mixed(2, Compression(gradients="int8"), **options)
            assert not all(map(torch.equal, state(first), state(rest)))
            assert all(
                torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(state(first), state(rest), strict=True)
            )
        whole, half = mixed(1, epochs=2), mixed(1)
        half.trainer.save_checkpoint(tmp_path / "half.ckpt")
        again = mixed(2, epochs=2, ckpt_path=tmp_path / "half.ckpt")
        assert all(map(torch.equal, state(whole), state(again)))
        assert all(map(torch.equal, state(mixed(2)), state(mixed(2, offload=HostOffload()))))

    run_world(4, run, environment={RANKS_PER_HOST: "2"}, timeout=200)


def test_only_on_devices_whose_streams_are_known() -> None:
    def run(rank: int) -> None:
        with pytest.raises(ValueError, match="compression is for CPU and CUDA ranks, and these compute on meta"):
            choose_collectives(Groups.create("gloo"), Streams(CPU), torch.device("meta"), Exchange(BOTH))

    run_world(2, run)


@pytest.mark.parametrize("other", [None, Compression(weights="int8", gradients="int4")])
def test_ranks_that_want_something_else_are_told(other: Compression | None) -> None:
    def run(rank: int) -> None:
        with pytest.raises(DivergenceError, match=r"Rank 1 has another exchange between hosts than rank 0"):
            fit(3, other if rank == 1 else BOTH)

    run_world(2, run, environment={RANKS_PER_HOST: "1"})


class Writes(Net):
    """Clamps a weight where it computes, in training or in validation, or between steps."""

    when = ""

    def _clamp(self, when: str) -> None:
        if when == self.when:
            with torch.no_grad():
                self.layers[1].one.bias.clamp_(-10, 10)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._clamp("training")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._clamp("validation")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when == "between":
            for part in local_slices(self.layers[1].one, write=True):
                part.value.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("per_host", ["1", "2"])
def test_what_is_written_to_gathered_weights_is_refused(per_host: str) -> None:
    """Also where nothing is rounded: they are let go after the forward."""
    message = r"^'layers\.1\.one\.bias' was written to while its values were gathered.*full_parameters.*local_slices"

    def run(rank: int) -> None:
        for units, when, compression in product((["Block"], None), ("training", "validation"), (None, GRADIENTS, BOTH)):
            net = Writes()
            net.when = when
            with pytest.raises(ParameterAccessError, match=message):
                fit(3, compression, net=net, units=units)

    run_world(2, run, environment={RANKS_PER_HOST: per_host})


def test_what_is_written_between_steps_counts() -> None:
    """As without compression, on one host, where nothing is rounded."""

    def run(rank: int) -> None:
        nets = [Writes(), Writes(), Writes()]
        for net, compression, when in zip(nets, (None, BOTH, None), ("between", "between", ""), strict=True):
            net.when = when
            fit(3, compression, net=net)
        exact, compressed, untouched = map(state, nets)
        assert all(map(torch.equal, exact, compressed))
        assert not all(map(torch.equal, exact, untouched))

    run_world(2, run)
