"""Bytes at rest: what is alive is what the plan's formula says, to the byte, and it stays where it is.

Storages are counted, not the process's size. Every storage that appeared since before the module was built, and that
Python can still see after a few steps, must belong to a category of the formula or to a short list of small things:

* a placeholder of one element for each dtype,
* one step counter of AdamW (4 bytes) for each parameter,
* the control plane's rows of a few integers,
* the module's own buffers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import HostOffload, NvmeOffload
from lightning_zero.comm import GlooCollectives, native
from lightning_zero.comm.native import SWITCH
from lightning_zero.config import Tier
from lightning_zero.extensions.nvme import FileTensor
from lightning_zero.shards.sharded import ShardedTensor
from tests.helpers.cases import WIDTH, Block, Case, Stack, case
from tests.helpers.models import MixedDtypes, OddSizes
from tests.helpers.probe import Probe, fit
from tests.helpers.waiting import until
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
AT_PEAK = ("raw_gradients", "temporaries", "activations")  # see ``test_peak_memory``
Storages = dict[int, int]  # the storage's identity (a placeholder's refuses to tell its address) -> bytes


class Everything(Stack):
    """Frozen and tied parameters, 0 and 1 elements, a batch norm with buffers, two dtypes if ``wide``."""

    def __init__(self, wide: bool) -> None:
        super().__init__(Block(), OddSizes(), Block(), Block(28, 45), *([MixedDtypes()] if wide else []))
        self.layers[0].requires_grad_(False)
        self.layers[2].up.bias.requires_grad_(False)
        self.layers[3] = nn.Sequential(nn.Linear(WIDTH, 28), Block(28, 45), nn.Linear(28, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head.weight = self.stem.weight

    def run(self, x: Tensor) -> Tensor:
        return self.norm(super().run(x).flatten(0, 1)).unflatten(0, x.shape[:2])


def everything(wide: bool) -> Case:
    units = ("Block", "OddSizes", "MixedDtypes") if wide else ("Block", "OddSizes")
    return case("everything", lambda: Everything(wide), units=units)


PRECISIONS = {
    "32-true": {},
    "bf16-mixed": {},
    "bf16-mixed, reduced in bfloat16": {"reduce_dtype": "bfloat16"},
}


def precision(name: str) -> Any:
    from lightning_zero import ZeroPrecision

    return ZeroPrecision(name.partition(",")[0], **PRECISIONS[name])


def storages(tensors: Iterable[Tensor | None]) -> Storages:
    found = {}
    for tensor in tensors:
        if tensor is None or isinstance(tensor, FileTensor):  # on disk
            continue
        with torch._C.DisableTorchFunctionSubclass():  # of absent parameters and gradients in slices, too
            if tensor.layout is torch.strided and not tensor.is_meta and not isinstance(tensor, ShardedTensor):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage._cdata] = storage.nbytes()
    return found


def forget_the_past() -> None:
    """Leave everything that exists now out of later sweeps, and numbers by which a process divides sums. For ranks,
    which end soon."""
    for divisor in (2, 4):
        native._scalar(1 / divisor)
    gc.collect()
    gc.freeze()


def alive() -> Storages:
    """Of every tensor made since ``forget_the_past`` that Python knows of, and of its gradient."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, ShardedTensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return storages([*plain, *(Tensor.grad.__get__(tensor) for tensor in plain if tensor.is_leaf)])  # type: ignore[attr-defined]


def alive_beside(known: Storages) -> Storages:
    """``alive``, once nothing but ``known`` is left or will not go: a gloo thread lets go of a small message's tensors
    a moment after the wait for them has returned."""
    until(lambda: alive().keys() <= known.keys(), seconds=2)
    return alive()


def keeps_receive_buffer(strategy: Any) -> bool:
    """Whether reductions arrive in memory of the transport's own, as large as the largest bucket."""
    return bool(strategy.engine.collectives.receives)


def categories(strategy: Any, training: bool = True) -> dict[str, Storages]:
    """What the engine, its collectives and the optimizers hold on the device, in the words of the plan's formula."""
    engine = strategy.engine
    flats = [flat for unit in engine.units for flat in unit.flats]
    parameters = storages(buffer for unit in engine.units for buffer in getattr(unit, "buffers", ()))
    masters = storages(flat.master for flat in flats if flat.rest.master is Tier.DEVICE)
    weights = storages(flat.weights for flat in flats if flat.rest.weights is Tier.DEVICE)
    slots = storages(buffer.memory for buffer in engine.means.pool if buffer.unit is not None)
    found = {
        "parameters": parameters,
        "weights": weights,
        "masters": {key: size for key, size in masters.items() if key not in parameters},
        "slots": slots,
    }
    if not training:
        return found
    reducer = engine._reducer
    moved = strategy.offload is not None and strategy.offload.optimizer
    states = [strategy.adapter(optimizer).state for optimizer in strategy.optimizers]
    state = [value for found in states for values in found.values() for value in values.values()]
    shards = [] if moved else [bucket.shard.there for bucket in reducer.buckets]
    return {
        **found,
        "gradients": storages([*shards, *(bucket.resident for bucket in reducer.buckets)]),
        "optimizer": {} if moved else storages(value for value in state if value.dim()),
        "gradient_slots": storages(buffer.memory for buffer in engine.means.pool if buffer.unit is None),
        "transport": storages(engine.collectives.buffers) if keeps_receive_buffer(strategy) else {},
    }


def on_host(strategy: Any) -> dict[str, Storages]:
    """What rests in host memory because it is offloaded. Blocks of host memory come in whole pages: see ``used``."""
    engine = strategy.engine
    flats = [flat for unit in engine.units for flat in unit.flats]
    states = [strategy.adapter(optimizer).state for optimizer in strategy.optimizers]
    state = [value for found in states for values in found.values() for value in values.values()]
    store = getattr(engine.tiers, "store", None)  # of files
    rested = [*(tensor for flat in flats for tensor in (flat.master, flat.weights)), *state]
    regions = {id(tensor.region): tensor.region for tensor in rested if isinstance(tensor, FileTensor)}
    buffers = {0: store._buffer_nbytes + engine.tiers.reserved_nbytes} if store is not None else {}
    return {
        "weights": storages(flat.weights for flat in flats if flat.rest.weights is Tier.HOST),
        "masters": storages(flat.master for flat in flats if flat.rest.master is Tier.HOST),
        "gradients": storages(bucket.shard.there for bucket in engine._reducer.buckets),
        "optimizer": storages(value for value in state if value.dim()),
        "buffers": buffers | storages(region.checksums._sums for region in regions.values()),
    }


def merged(found: dict[str, Storages]) -> Storages:
    return {key: size for part in found.values() for key, size in part.items()}


def lasting(found: dict[str, Storages]) -> Storages:
    """Without what comes and goes: gradients, in stages 2 and 3, and slots."""
    return merged({name: part for name, part in found.items() if name not in ("gradients", "slots", "gradient_slots")})


class Rest(pl.Callback):
    """What the engine holds between two steps."""

    def __init__(self) -> None:
        self.found: list[Storages] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.found.append(lasting(categories(trainer.strategy)))


def small_things(trainer: pl.Trainer, probe: Probe) -> dict[str, Storages]:
    """What the formula leaves out, and what belongs to the test: losses and data."""
    engine, optimizers = trainer.strategy.engine, trainer.strategy.optimizers
    states = [trainer.strategy.adapter(optimizer).state for optimizer in optimizers]
    state = [value for found in states for values in found.values() for value in values.values()]
    return {
        "step counters": storages(value for value in state if not value.dim()),
        "placeholders": storages(binding.placeholder for binding in engine.access.bindings.values()),
        "buffers": storages(probe.buffers()),
        "losses": storages(probe.losses),
        "data": storages(tensor for batch in trainer.train_dataloader.dataset for tensor in batch),
    }


def count(rank: int, precision_name: str, stage: int) -> dict[str, Any]:
    """Bytes by category, bytes by formula, and everything else that came into being."""
    forget_the_past()
    rest = Rest()
    probe = Probe(everything(wide=precision_name == "32-true"))
    options = {"plugins": precision(precision_name)}
    trainer = fit(probe, stage=stage, micro_steps=4, callbacks=[rest], options=options, bucket_mib=0.004)
    found, small = categories(trainer.strategy), small_things(trainer, probe)
    known = {**merged(found), **merged(small)}
    new = alive_beside(known)
    plan, received = trainer.strategy.engine.plan, keeps_receive_buffer(trainer.strategy)
    expected = plan.expected_memory(rank=rank, receive_buffer=received)
    return {
        "wire": type(trainer.strategy.engine.collectives),
        "expected": {category: nbytes for category, nbytes in expected.items() if category not in AT_PEAK},
        "counted": {category: sum(part.values()) for category, part in found.items()},
        "trainable": len([p for p in probe.parameters() if p.requires_grad]),
        "small": {category: sum(part.values()) for category, part in small.items()},
        "unseen": {key: size for key, size in merged(found).items() if new.get(key) != size},
        "others": {key: size for key, size in new.items() if key not in known},
        "moved": [part != lasting(found) for part in rest.found],
    }


@pytest.mark.parametrize(("world_size", "shared"), [(1, True), (2, True), (3, True), (3, False)])
@pytest.mark.usefixtures("one_host")
def test_memory_at_rest_is_the_plan_s_formula(world_size: int, shared: bool) -> None:
    """Both with ranks that read one another's memory and over gloo, which has a receive buffer."""

    def every(rank: int) -> dict[str, Any]:
        return {f"{name}, stage {stage}": count(rank, name, stage) for name in PRECISIONS for stage in STAGES}

    ranks = run_world(world_size, every, timeout=150, environment={} if shared else {SWITCH: "0"})
    for rank, runs in enumerate(ranks):
        for name, found in runs.items():
            where = f"rank {rank} of {world_size}, {name}"
            assert (found["wire"] is GlooCollectives) == (not shared), where
            assert found["counted"] == found["expected"], where
            assert not found["unseen"], f"{where}: the sweep misses storages that the engine holds"
            assert not found["others"], f"{where}: storages of nobody"
            assert found["moved"] == [False] * 3, f"{where}: memory moved between steps"
            small = found["small"]
            assert small["step counters"] == 4 * found["trainable"], where
            assert small["placeholders"] in (4, 4 + 8), where  # one float32, one float64


OFFLOADS = {
    "host": (HostOffload(), (1, 2, 3)),
    "host, parameters": (HostOffload(parameters=True), (3,)),
    "files": (NvmeOffload(path="files", buffer_mib=1), (1, 2, 3)),
    "files, parameters": (NvmeOffload(path="files", buffer_mib=1, parameters=True), (3,)),
}


def count_offloaded(
    rank: int, precision_name: str, stage: int, offload: HostOffload | NvmeOffload, **settings: Any
) -> dict[str, Any]:
    """Bytes by category and tier, counted after a run and by formula, and everything else that came into being.

    ``rank``: in the shard group.
    """
    forget_the_past()
    probe = Probe(everything(wide=precision_name == "32-true"))
    options = {"plugins": precision(precision_name)}
    trainer = fit(probe, stage=stage, micro_steps=4, options=options, bucket_mib=0.004, offload=offload, **settings)
    engine = trainer.strategy.engine
    found, host, small = categories(trainer.strategy), on_host(trainer.strategy), small_things(trainer, probe)
    store = getattr(engine.tiers, "store", None)  # of files
    if store is not None:
        small["memory that checkpoints pass through"] = storages([store._file.staging])  # the pool is gone by now
        adapters = [trainer.strategy.adapter(optimizer) for optimizer in trainer.strategy.optimizers]
        targets = [entry.target for adapter in adapters for entry in adapter.entries]
        stand_ins = [target for target in targets if not any(target.stride())]
        small["stand-ins"] = storages(stand_ins)
    known = {**merged(found), **merged(host), **merged(small)}
    new = alive_beside(known)
    return {
        "device": {category: sum(part.values()) for category, part in found.items()},
        "expected device": {
            category: nbytes
            for category, nbytes in engine.plan.expected_memory(
                rank=rank, receive_buffer=keeps_receive_buffer(trainer.strategy)
            ).items()
            if category not in AT_PEAK
        },
        "host": {category: sum(part.values()) for category, part in host.items()},
        "expected host": dict(engine.plan.expected_host_memory(rank=rank).items()),
        "disk": 0 if store is None else store.nbytes_on_disk,
        "expected disk": engine.plan.expected_disk(rank=rank).total,
        "others": {key: size for key, size in new.items() if key not in known},
    }


@pytest.mark.parametrize(
    ("world_size", "span", "names"),
    [(1, None, ["32-true", "bf16-mixed"]), (3, None, ["32-true", "bf16-mixed"]), (4, 2, ["bf16-mixed"])],
)
def test_offloaded_bytes_rest_where_the_plan_says(
    world_size: int, span: int | None, names: list[str], tmp_path: Path
) -> None:
    """Also where groups of ranks share what is sharded, which have receive buffers within and between them."""

    def every(rank: int) -> dict[str, Any]:
        os.chdir(tmp_path)
        return {
            f"{name}, {kind}, stage {stage}": count_offloaded(
                rank % (span or world_size), name, stage, offload, shard_within=span
            )
            for name in names
            for kind, (offload, stages) in OFFLOADS.items()
            for stage in stages
        }

    (tmp_path / "files").mkdir()
    for rank, runs in enumerate(run_world(world_size, every, timeout=150)):
        for name, found in runs.items():
            where = f"rank {rank} of {world_size}, {name}"
            assert found["device"] == found["expected device"], where
            assert found["host"] == found["expected host"], where
            assert found["disk"] == found["expected disk"], where
            assert not found["others"], f"{where}: storages of nobody"
    assert not list((tmp_path / "files").iterdir())


def test_the_sweep_sees_what_is_hidden_in_a_closure() -> None:
    def sweep(rank: int) -> tuple[Storages, Storages]:
        forget_the_past()
        before = alive()
        hidden = torch.zeros(1000)[3:5]

        def holder() -> Tensor:
            return hidden

        return before, alive() if holder().numel() else {}

    before, after = run_world(1, sweep)[0]
    assert before == {}
    assert list(after.values()) == [4000]


class Trouble(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("trouble in backward")


class Troubled(Stack):
    """In the third micro-step something raises inside of a unit."""

    def __init__(self, where: str) -> None:
        super().__init__(Block(), Block(), Block())
        self.where, self.calls = where, 0
        self.layers[1].register_forward_hook(self.strike)

    def strike(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 3:
            return output
        if self.where == "forward":
            raise ArithmeticError("trouble in forward")
        return Trouble.apply(output)


@pytest.mark.usefixtures("one_host")  # a reduction on its way over a wire keeps its memory until it has ended
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_no_memory_behind(stage: int) -> None:
    def run(rank: int, where: str) -> dict[str, Any]:
        forget_the_past()
        probe = Probe(case("troubled", lambda: Troubled(where)))
        rest = Rest()
        with pytest.raises(ArithmeticError, match=where):
            fit(probe, stage=stage, micro_steps=4, callbacks=[rest])
        trainer = probe.trainer
        trainer.strategy.engine.collectives.settle()  # what the error left under way has its memory until now
        found, small = categories(trainer.strategy), small_things(trainer, probe)
        new = alive_beside({**merged(found), **merged(small)})
        units, plan = trainer.strategy.engine.units, trainer.strategy.engine.plan
        # Buffers are given back before an optimizer step, but for small ones, and taken when they are needed.
        found, expected = (
            dict(found),
            plan.expected_memory(rank=rank, receive_buffer=keeps_receive_buffer(trainer.strategy)),
        )
        small["slots"] = found.pop("slots") | found.pop("gradient_slots")
        return {
            "expected": replace(expected, slots=0, gradient_slots=0).total - (expected.gradients if stage > 1 else 0),
            "counted": sum(sum(part.values()) for part in found.values()),
            "moved": [part != lasting(found) for part in rest.found],
            "others": {key: size for key, size in new.items() if key not in {**merged(found), **merged(small)}},
            "pins": sum(getattr(unit, "pins", 0) for unit in units),
            "gradients": sum(s.parameter.grad is not None for s in trainer.strategy.engine.shards.values()),
        }

    def both(rank: int) -> list[dict[str, Any]]:
        return [run(rank, where) for where in ("forward", "backward")]

    for runs in run_world(2, both):
        for found in runs:
            assert found["counted"] == found["expected"]
            assert found["moved"] == [False, False]
            assert found["others"] == {}
            assert (found["pins"], found["gradients"]) == (0, 0)
