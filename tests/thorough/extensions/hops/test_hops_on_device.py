"""Two hops, and a rounded exchange, as they go on a device: bits are those of CPU ranks.

The device is simulated (``races/simulated.py``): all that nccl would carry is carried by gloo, on side streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import Compression, HostOffload, ZeroPrecision, ZeroStrategy
from lightning_zero.comm import (
    Exchange,
    GlooCollectives,
    Groups,
    NativeCollectives,
    Streams,
    choose_collectives,
)
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.config import Placement
from lightning_zero.extensions.compression import codes as codes_of
from lightning_zero.extensions.compression.codes import compress, decompress, format_nbytes
from lightning_zero.extensions.compression.collectives import CompressedCollectives
from lightning_zero.extensions.hops import HierarchicalCollectives
from lightning_zero.extensions.monitors import memory_stats
from tests.helpers.training import make_trainer, quiet
from tests.helpers.wires import residuals_of
from tests.helpers.world import run_world
from tests.thorough.races.simulated import simulated_device
from tests.world.strategy.test_shard_within import Net, near, same, whole

pytestmark = pytest.mark.usefixtures("one_host")

CPU = torch.device("cpu")
TWO_HOSTS = {RANKS_PER_HOST: "2"}
ZERO = ("compression", "secondary_shards", "shard_within", "offload")
BOTH = Compression(weights="int8", gradients="int4", error_feedback=True)


class Found(NamedTuple):
    """What a training ended with."""

    weights: dict[str, Tensor]
    norms: list[float]
    wire: Any
    residuals: dict[str, Tensor]


def fit(stage: Any, simulated: bool, **options: Any) -> Found:
    """Some steps; ``simulated``: on a device."""
    named = {name: options.pop(name) for name in ZERO if name in options}
    strategy, net = ZeroStrategy(stage, units=["Sequential"], **named), Net()
    plugin = ZeroPrecision(options.pop("precision", "32-true"))
    with quiet(), simulated_device(traced="offload" in named) if simulated else nullcontext():
        make_trainer(strategy, plugins=plugin, **options).fit(net, DataLoader(range(4), batch_size=None))  # type: ignore[arg-type]
        wire = strategy.engine.collectives
        return Found(
            whole(net), net.norms, wire, {name: row.clone() for name, row in sorted(residuals_of(wire).items())}
        )


INT4 = Compression(gradients="int4", error_feedback=True)
INT8 = Compression(gradients="int8")
BFLOAT16 = Compression(weights="bfloat16", gradients="bfloat16")
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {"compression": INT8}),
    "stage 1, bf16": (1, {"compression": BOTH, "precision": "bf16-mixed"}),
    "stage 2": (2, {"compression": INT4, "accumulate_grad_batches": 2}),
    "stage 3": (3, {"compression": BOTH, "gradient_clip_val": 0.05}),
    "stage 3, bfloat16": (3, {"compression": BFLOAT16}),
    "kept": (3, {"secondary_shards": True, "accumulate_grad_batches": 2}),
    "kept, rounded": (3, {"secondary_shards": True, "compression": BOTH}),
    "kept, rounded, 16": (3, {"secondary_shards": True, "compression": INT8, "precision": "16-mixed"}),
    "kept, offloaded": (3, {"secondary_shards": True, "offload": HostOffload(optimizer=True, parameters=True)}),
    "groups, stage 2": (2, {"shard_within": 2, "compression": INT4}),
    "groups, stage 3": (3, {"shard_within": 2, "compression": INT8, "accumulate_grad_batches": 2}),
}


def test_bits_are_those_of_cpu_ranks() -> None:
    def run(rank: int) -> None:
        for name, (stage, options) in SETTINGS.items():
            host, device = (fit(stage, simulated, **options) for simulated in (False, True))
            assert same(host.weights, device.weights), name
            assert repr(host.norms) == repr(device.norms), name  # NaN is equal to NaN
            assert same(host.residuals, device.residuals, buffers=False), name
            wires = [getattr(found.wire, "across", None) or found.wire for found in (host, device)]
            assert isinstance(wires[1], (CompressedCollectives, HierarchicalCollectives)), name
            direct = [getattr(wire, "_direct", wire) for wire in wires]
            assert [isinstance(wire, GlooCollectives) for wire in direct] == [True, False], name

    run_world(4, run, environment=TWO_HOSTS, timeout=300)


def close(first: dict[str, Tensor], second: dict[str, Tensor], exact: bool = False) -> bool:
    return same(first, second) if exact else near(first, second, 1e-5)


def test_without_hops_bits_are_those_of_cpu_ranks_too() -> None:
    """Hosts of two ranks and of one, which exchange directly."""

    def run(rank: int) -> None:
        for stage, options in ((2, {"compression": INT4}), (3, {"compression": BOTH}), (3, {"secondary_shards": True})):
            host, device = (fit(stage, simulated, **options) for simulated in (False, True))
            assert close(
                host.weights, device.weights, exact="compression" in options
            )  # else nccl sums, in its own order
            assert same(host.residuals, device.residuals, buffers=False)
            assert isinstance(device.wire, CompressedCollectives) == ("compression" in options)
            assert device.wire.placed(Placement.from_stage(3)).keeping is None

    run_world(3, run, environment=TWO_HOSTS, timeout=120)


@pytest.mark.parametrize("per_host", ["2", "4"])
def test_nothing_takes_hops_that_nobody_asked_for(per_host: str) -> None:
    """Within one host, or with nothing to round or to keep; and not behind one that has taken them."""

    def run(rank: int) -> None:
        asked = fit(3, True, compression=BOTH, secondary_shards=True)
        assert (type(asked.wire) is HierarchicalCollectives) == (per_host == "2")
        plain = fit(3, True)
        assert type(plain.wire) is NativeCollectives
        assert list(plain.wire.groups.control.counted) == [0, 1, 2, 3]
        assert close(plain.weights, fit(3, False).weights)

    run_world(4, run, environment={RANKS_PER_HOST: per_host, "LIGHTNING_ZERO_SHARED_MEMORY": "0"}, timeout=120)


def test_pieces_and_broadcasts_find_their_ranks() -> None:
    def run(rank: int) -> None:
        with simulated_device(traced=False):
            wire = choose_collectives(Groups.create("gloo"), Streams(CPU), CPU, Exchange(secondary_shards=True))
            order = [0, 2, 1, 3]
            assert wire.rank == order.index(rank)
            splits = [[0, 2, 1, 5], [3, 0, 0, 1], [1, 1, 4, 0], [0, 2, 0, 3]]  # from row to column
            mine = torch.arange(sum(splits[wire.rank])) + 10 * wire.rank
            received = torch.full((sum(row[wire.rank] for row in splits),), -1)
            wire.all_to_all(received, mine, [row[wire.rank] for row in splits], splits[wire.rank]).wait()
            rows = [(torch.arange(sum(row)) + 10 * at).split(row)[wire.rank] for at, row in enumerate(splits)]
            assert torch.equal(received, torch.cat(rows))
            for place, source in enumerate(order):
                value = torch.full((3,), float(rank))
                wire.broadcast(value, place).wait()
                assert value.tolist() == [source] * 3

    run_world(4, run, environment=TWO_HOSTS)


def test_runs_resume_to_the_bit(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        path = str(tmp_path / "half.ckpt")
        with quiet(), simulated_device(traced=False):

            def train(epochs: int, ckpt_path: str | None = None) -> tuple[Any, Net]:
                strategy, net = ZeroStrategy(2, units=["Sequential"], compression=INT4), Net()
                trainer = make_trainer(strategy, max_epochs=epochs)
                batches = DataLoader(range(2), batch_size=None)  # type: ignore[arg-type]
                trainer.fit(net, batches, ckpt_path=ckpt_path)
                return trainer, net

            whole_run = whole(train(2)[1])
            trainer, _ = train(1)
            trainer.save_checkpoint(path)
            kept = {name: row.clone() for name, row in residuals_of(trainer.strategy.engine.collectives).items()}
            assert kept
            trainer, _ = train(1, path)  # nothing is left to do
            assert same(kept, residuals_of(trainer.strategy.engine.collectives), buffers=False)
            stats = memory_stats(trainer.strategy.engine).device["transport"]
            assert stats == sum(row.nbytes for row in kept.values())
            assert same(whole_run, whole(train(2, path)[1]))

    run_world(4, run, environment=TWO_HOSTS, timeout=120)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_of_any_size_give_the_same(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values, before = (torch.randn(3, 64 * 700) * torch.logspace(-4, 2, 3)[:, None]).to(dtype), torch.randn(3 * 64 * 700)
    values[1, 64:128], values[2, 130] = 0, float("nan")
    found = []
    for numel in (2**15, 64, 64 * 700):
        monkeypatch.setitem(codes_of._CHUNK, True, numel)
        for residual in (None, before.clone()):
            codes = torch.full((3, format_nbytes(kind, 64 * 700)), 99, dtype=torch.uint8)
            compress(kind, values, codes, residual)
            decompress(kind, codes, arrived := torch.empty_like(values))
            found.append((codes, arrived.nan_to_num(7.0), before if residual is None else residual))
    for one, other in zip(found[:2] * 2, found[2:], strict=True):
        assert all(map(torch.equal, one, other))
