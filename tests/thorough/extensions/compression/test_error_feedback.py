"""What rounding takes from gradients comes with the next ones: bits are those of a plain model of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import Compression, ZeroPrecision, ZeroStrategy, full_gradients, full_parameters
from lightning_zero.checkpoint.consolidated import consolidate_checkpoint
from lightning_zero.comm import Exchange, Groups, Streams, choose_collectives
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.extensions.compression.codes import compress, decompress, format_nbytes
from lightning_zero.extensions.monitors import memory_stats
from tests.helpers.training import make_trainer, quiet
from tests.helpers.wires import residuals_of
from tests.helpers.world import run_world
from tests.thorough.extensions.compression.test_compression import KINDS, Net, loss_of, make, rounded, state

CPU = torch.device("cpu")
TWO_HOSTS = {RANKS_PER_HOST: "2"}


def fed(kind: Any, **others: Any) -> Compression:
    return Compression(gradients=kind, error_feedback=True, **others)


class Account:
    """What one host sends of one gradient, and keeps: the oracle."""

    def __init__(self) -> None:
        self.kept: Tensor | float = 0.0

    def send(self, exact: Tensor, kind: str) -> Tensor:
        blocks = torch.cat([exact.reshape(-1), torch.zeros(-exact.numel() % 64)]).view(-1, 64)
        busy = (blocks != 0).any(1, keepdim=True).expand_as(blocks).reshape(-1)[: exact.numel()].view_as(exact)
        whole = torch.where(busy, exact + self.kept, exact)
        sent = rounded(whole, kind)
        self.kept = torch.where(busy & (whole - sent).isfinite(), whole - sent, self.kept)
        return sent


class Fixed(Net):
    """Weights do not move, so that gradients depend on nothing but the batch; it notes what is shown of them."""

    unused = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[Tensor | None]] = []
        self.rest = nn.Linear(5, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.global_rank, int(batch))

    def loss(self, rank: int, step: int) -> Tensor:
        loss = loss_of(self.layers, rank, step)
        if step != 1 or not self.unused:
            loss = loss + self.rest(torch.full((2, 5), 0.1 + step + rank)).sin().sum()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self):
            self.found.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    stage: Any, compression: Compression | None, net: Any = None, steps: int = 4, within: Any = None, **options: Any
) -> Any:
    net, path = net or Net(), options.pop("ckpt_path", None)
    batches = options.pop("batches", 40)
    strategy = ZeroStrategy(stage, units=["Block"], compression=compression, shard_within=within)
    with quiet():
        trainer = make_trainer(strategy, max_steps=steps, enable_checkpointing=False, **options)
        train, val = (DataLoader(range(numbers), batch_size=None) for numbers in (batches, 1))  # type: ignore[arg-type]
        trainer.fit(net, train, val, ckpt_path=path)
    return net


def wire_of(net: Any) -> Any:
    return net.trainer.strategy.engine.collectives


def expected(
    kind: str, steps: int, micro_steps: int = 1, summed: bool = False, net: Any = None
) -> list[list[Tensor | None]]:
    """Averages that two hosts of two ranks agree on. ``summed``: micro-steps are, before anything is sent."""
    net = net or Fixed()
    names = [name for name, _ in net.named_parameters()]
    accounts = {(host, name): Account() for host in (0, 1) for name in names}
    found = []
    for step in range(steps):
        total: dict[str, Any] = dict.fromkeys(names)
        batches = range(step * micro_steps, (step + 1) * micro_steps)
        for together in [batches] if summed else [[one] for one in batches]:
            rows: list[dict[str, Tensor]] = []
            for rank in range(4):
                twin = copy.deepcopy(net)
                for number in together:
                    (twin.loss(rank, number) / micro_steps).backward()
                rows.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
            for name in rows[0]:
                sent = [accounts[h, name].send(rows[2 * h][name] + rows[2 * h + 1][name], kind) for h in (0, 1)]
                average = (sent[0] + sent[1]) / 4
                total[name] = average if total[name] is None else total[name] + average
        found.append([total[name] for name in names])
    return found


def assert_same(found: Sequence[Sequence[Tensor | None]], oracle: Sequence[Sequence[Tensor | None]]) -> None:
    for step, (mine, theirs) in enumerate(zip(found, oracle, strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert (a is None) == (b is None), (step, index)
            assert a is None or b is None or torch.equal(a, b), (step, index)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_oracle(kind: Any) -> None:
    """To the bit; one layer is not used in the second step, and goes on from the first one in the third."""

    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            assert_same(fit(stage, fed(kind), Fixed()).found, expected(kind, 4))

    run_world(4, run, environment=TWO_HOSTS)


def test_each_exchange_is_fed_back() -> None:
    """Once a step in stage 1, with the sum of micro-steps, and in each micro-step in the others."""

    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            net = fit(stage, fed("int4"), Fixed(), steps=3, accumulate_grad_batches=2)
            assert_same(net.found, expected("int4", 3, 2, summed=stage == 1))

    run_world(4, run, environment=TWO_HOSTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_host", [1, 2])
def test_the_sum_of_all_steps_lacks_what_is_kept_and_no_more(kind: Any, per_host: int) -> None:
    numel, steps = 64 * 12, 40

    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.3

    def run(rank: int) -> tuple[Tensor, Tensor, int, Tensor]:
        groups = Groups.create("gloo")
        wires = [
            choose_collectives(groups, Streams(CPU), CPU, Exchange(compression))
            for compression in (fed(kind), Compression(gradients=kind))
        ]
        sums = []
        for wire in wires:
            total, shard = torch.zeros(numel // wire.world_size), torch.empty(numel // wire.world_size)
            for step in range(steps):
                wire.reduce_scatter(batch(rank, step), shard, "gradients", key=7).wait()
                total += shard * wire.world_size
            sums.append(total)
        assert not residuals_of(wires[1])
        assert residuals_of(wires[0])["sum 7"].numel() == numel // per_host
        return sums[0], sums[1], wires[0].rank, residuals_of(wires[0])["sum 7"]

    world = 2 * per_host
    rows = run_world(world, run, environment={RANKS_PER_HOST: str(per_host)})
    order = sorted(range(world), key=lambda rank: rows[rank][2])  # by the shard that each has
    with_feedback, without = (torch.cat([rows[rank][at] for rank in order]) for at in (0, 1))
    exact = sum((batch(rank, step).double() for rank in range(world) for step in range(steps)), torch.zeros(numel))
    kept = torch.zeros(numel)
    for rank, (*_, residual) in enumerate(rows):
        kept.view(per_host, -1)[rank % per_host] += residual
    assert torch.allclose(with_feedback + kept, exact.float(), rtol=0, atol=2e-3)
    one = kept.abs().max()
    assert (with_feedback - exact).abs().max() <= one + 2e-3
    assert (without - exact).abs().max() > 3 * one


class Plain(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def distances(exact: Any, others: Sequence[Any]) -> list[float]:
    """Squared, of the weights of the others from those of the first."""
    states = [state(net) for net in (exact, *others)]
    return [sum(float((a - b).norm() ** 2) for a, b in zip(states[0], found, strict=True)) for found in states[1:]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_has_no_gradient_or_overflows_keeps_what_it_had(kind: Any, dtype: torch.dtype) -> None:
    if kind == "bfloat16" and dtype is torch.bfloat16:
        pytest.skip("nothing is rounded")
    values, before = torch.randn(256).to(dtype), torch.randn(256) * 0.01
    values[64:128], values[130] = 0, float("inf")
    codes, residual = torch.empty(format_nbytes(kind, 256), dtype=torch.uint8), before.clone()
    compress(kind, values, codes, residual)
    decompress(kind, codes, arrived := torch.empty_like(values))
    assert torch.equal(arrived[64:128], values[64:128])
    assert not arrived[130].isfinite()
    assert torch.equal(residual[64:128], before[64:128])
    assert residual[130] == before[130]
    assert residual.isfinite().all()
    for part in (slice(0, 64), slice(192, 256)):
        assert torch.allclose(arrived[part] + residual[part], values[part] + before[part], rtol=0, atol=1e-6)
        assert not torch.equal(residual[part], before[part])


def test_a_step_that_overflows_leaves_nothing_behind() -> None:
    """Whoever skips it goes on with what was kept before."""

    class Overflows(Fixed):
        unused = False

        def loss(self, rank: int, step: int) -> Tensor:
            return super().loss(rank, step) * (float("inf") if step == 1 and rank == 3 else 1.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            if len(self.found) == 2:
                optimizer.zero_grad()

    def run(rank: int) -> None:
        for stage in (1, 3):
            net = fit(stage, fed("int8"), Overflows())
            assert all(residual.isfinite().all() for residual in residuals_of(wire_of(net)).values())
            oracle = expected("int8", 4, net=Overflows())
            assert_same(net.found[:1] + net.found[2:], oracle[:1] + oracle[2:])

    run_world(4, run, environment=TWO_HOSTS)


def test_between_groups_that_share_shards() -> None:
    """Of the sum of each group, and of the average: 20 steps of SGD end where exact ones do, but for two roundings."""

    def run(rank: int) -> list[tuple[list[float], list[int]]]:
        exact, found = fit(2, None, Plain(), 20, within=2), []
        for kind in ("int8", "int4"):
            nets = [fit(2, c, Plain(), 20, within=2) for c in (fed(kind), Compression(gradients=kind))]
            sizes = [row.numel() for name, row in sorted(residuals_of(wire_of(nets[0])).items()) if name.endswith(" 0")]
            found.append((distances(exact, nets), sizes))
        return found

    for found in run_world(4, run, environment=TWO_HOSTS):
        for (close, far), (average, total) in found:
            assert close < far / 10
            assert total == 2 * average


@pytest.mark.parametrize(("per_host", "within"), [(2, None), (1, None), (3, None), (2, 2)])
def test_memory_is_as_counted(per_host: int, within: int | None) -> None:
    """4/S bytes per parameter; 4 where hosts have different numbers of ranks."""

    def run(rank: int) -> None:
        for stage in (1, 2, 3):
            net = fit(stage, fed("int4"), within=within, steps=1)
            engine = net.trainer.strategy.engine
            kept = sum(row.nbytes for row in residuals_of(wire_of(net)).values())
            divisor = 2 if per_host == 2 else 1
            assert engine.plan.placement.feedback == divisor
            numel = sum(layout.numel for layout in engine.plan.trainable_layouts)
            if within is None:
                assert kept == 4 * numel // divisor
            told = engine.plan.expected_memory(rank=wire_of(net).rank).transport
            without = fit(stage, Compression(gradients="int4"), within=within, steps=1).trainer.strategy.engine
            assert told - without.plan.expected_memory(rank=wire_of(net).rank).transport == kept
            measured = memory_stats(engine).device["transport"] - memory_stats(without).device["transport"]
            assert measured == kept

    run_world(4, run, environment={RANKS_PER_HOST: str(per_host)}, timeout=200)


@pytest.mark.parametrize(("stage", "within"), [(1, None), (3, None), (2, 2)])
def test_runs_resume_to_the_bit(tmp_path: Path, stage: int, within: int | None) -> None:
    def run(rank: int) -> None:
        def two(epochs: int, net: Any = None, path: Any = None) -> Any:
            options = {"within": within, "batches": 2, "max_epochs": epochs, "ckpt_path": path}
            return fit(stage, fed("int4"), net, -1, **options)

        whole, half = two(2), two(1)
        half.trainer.save_checkpoint(tmp_path / "half.ckpt")
        kept = {name: row.clone() for name, row in residuals_of(wire_of(half)).items()}
        assert kept
        again = two(1, None, tmp_path / "half.ckpt")  # nothing is left to do
        found = residuals_of(wire_of(again))
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], row) for name, row in kept.items())
        again = two(2, None, tmp_path / "half.ckpt")
        assert all(map(torch.equal, state(whole), state(again)))
        again = two(2, half, tmp_path / "half.ckpt")  # where others are kept already
        assert all(map(torch.equal, state(whole), state(again)))

    run_world(4, run, environment=TWO_HOSTS, timeout=200)


def test_what_does_not_fit_begins_at_zero_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "half.ckpt"

    def save(rank: int) -> None:
        net = fit(2, fed("int4"), steps=2)
        net.trainer.save_checkpoint(path)
        fit(2, Compression(gradients="int4"), steps=2).trainer.save_checkpoint(tmp_path / "without.ckpt")

    trials = [
        (2, fed("int4"), "half.ckpt"),
        (3, fed("int4"), "half.ckpt"),
        (2, Compression(gradients="int4"), "half.ckpt"),
        (2, fed("int4"), "without.ckpt"),
        (2, Compression(gradients="int4"), "without.ckpt"),
    ]

    def run(rank: int, count: int) -> list[tuple[str, bool]]:
        found = []
        for stage, compression, name in trials[:count]:
            caplog.clear()
            with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
                net = fit(stage, compression, steps=2, ckpt_path=tmp_path / name)
            lines = [record.getMessage() for record in caplog.records]
            told = [line for line in lines if line.startswith("Error feedback takes nothing from the checkpoint")]
            found.append(("".join(told), bool(residuals_of(wire_of(net)))))
        return found

    run_world(4, save, environment=TWO_HOSTS)
    moved = "it is of other ranks, or of another layout"
    off, none = "nothing is fed back in this run", "it has nothing of that"
    for world, per_host, told in ((4, 2, ["", moved, off, none, ""]), (2, 1, [moved, moved, off]), (4, 1, [moved])):
        rows = run_world(world, run, len(told), environment={RANKS_PER_HOST: str(per_host)}, timeout=200)
        for (line, _), why in zip(rows[0], told, strict=True):
            assert (why in line) if why else line == ""
        for row in rows:
            assert [kept for _, kept in row] == [not told[0], False, False, False, False][: len(told)]
    consolidate_checkpoint(path, tmp_path / "whole.ckpt")
    assert "error_feedback" not in torch.load(tmp_path / "whole.ckpt", weights_only=True)["lightning_zero"]


def test_a_new_fit_begins_at_zero() -> None:
    def run(rank: int) -> None:
        first = fit(2, fed("int4"), Fixed(), steps=1)
        again = fit(2, fed("int4"), first, steps=1)
        assert_same(again.found[1:], again.found[:1])

    run_world(2, run, environment={RANKS_PER_HOST: "1"})


def test_one_host_keeps_nothing() -> None:
    def run(rank: int) -> None:
        exact, net = fit(2, None), fit(2, fed("int4"))
        assert all(map(torch.equal, state(exact), state(net)))
        assert not residuals_of(wire_of(net))
        assert net.trainer.strategy.engine.plan.placement.feedback is None

    run_world(2, run)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="error_feedback needs rounded gradients: set gradients"):
        Compression(weights="int8", error_feedback=True)
    with pytest.raises(ValueError, match="error_feedback must be true or false, got 'yes'"):
        Compression(gradients="int8", error_feedback="yes")  # type: ignore[arg-type]

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match="error_feedback does not go with a loss scale"):
            fit(2, fed("int8"), plugins=ZeroPrecision("16-mixed"))
        with pytest.raises(ValueError, match="nothing to keep of gradients in 16 bits"):
            fit(2, fed("bfloat16"), plugins=ZeroPrecision("bf16-true"))
        fit(2, fed("int8"), plugins=ZeroPrecision("bf16-true"))

    run_world(2, run, environment={RANKS_PER_HOST: "1"})


def test_in_fabric(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    from lightning_zero.trainer.fabric import ZeroFabricStrategy

    def train(steps: range, load: bool, save: bool) -> list[Tensor]:
        strategy = ZeroFabricStrategy(2, compression=fed("int4"))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        module = make()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01))
        if load:
            fabric.load(tmp_path / "two", {"model": model, "optimizer": optimizer})
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, fabric.global_rank, step))
            optimizer.step()
        if save:
            fabric.save(tmp_path / "two", {"model": model, "optimizer": optimizer})
        with full_parameters(module):
            return [parameter.detach().clone() for parameter in module.parameters()]

    def run(rank: int) -> None:
        whole = train(range(4), False, False)
        train(range(2), False, True)
        assert all(map(torch.equal, whole, train(range(2, 4), True, False)))

    run_world(2, run, environment={RANKS_PER_HOST: "1"})
