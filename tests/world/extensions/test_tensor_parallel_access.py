"""What a tensor-parallel run holds and sends, beside what the planner said of it; and averages of its weights."""

from __future__ import annotations

import copy
import gc
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchmetrics import SumMetric

from lightning_zero import (
    CommunicationMonitor,
    MemoryMonitor,
    ZeroFabricStrategy,
    ZeroPrecision,
    ema_update,
    estimate_memory,
    full_parameters,
)
from lightning_zero._torch import forget_meshes, groups_made
from lightning_zero.errors import ParameterAccessError
from lightning_zero.extensions.monitors import memory_stats
from lightning_zero.extensions.planner.estimate import MemoryEstimate
from lightning_zero.extensions.tensor_parallel import make_mesh
from tests.helpers import split
from tests.helpers.counting import LiveTensors
from tests.helpers.world import run_world


class Averaged(split.Split):
    """Keeps an average of its net in another one, which is frozen and split in the same way."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "teacher"):
            student, self.net = self.net, None
            super().configure_model()
            self.teacher, self.net = self.net.requires_grad_(False), student

    def on_train_batch_end(self, *args: Any) -> None:
        ema_update(self.teacher, self.net, 0.9)


def averaged(layout: split.Layout) -> dict[str, Tensor]:
    module = Averaged()
    split.fit(layout, module, 3)
    with full_parameters(module):
        return {name: value.detach().clone() for name, value in module.named_parameters()}


class Watched(split.Split):
    """Notes at its end what the engine holds, with the optimizer's state."""

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        adapters = [strategy.adapter(optimizer) for optimizer in strategy.optimizers]
        self.held = memory_stats(strategy.engine, [tensor for adapter in adapters for tensor in adapter.tensors()])
        self.plan, self.receives = strategy.engine.plan, strategy.engine.collectives.receives


def row_average(_: int) -> None:
    expected = averaged(split.Layout(3, 4))
    for layout in (split.Layout(1, 2, 2), split.Layout(3, 2, 2)):
        assert split.distance(expected, averaged(layout)) < 1e-12


WIDE = 128


class Wide(pl.LightningModule):
    """So wide that the activations of two tokens, which no plan counts, are next to nothing.

    Args:
        tied: whether embedding and head are one tensor.
        words: of the embedding; 1024 are enough for a unit of its own.
    """

    def __init__(self, tied: bool = False, words: int = 512) -> None:
        super().__init__()
        self.tied, self.words = tied, words

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        blocks = [split.Feed(WIDE, hidden) for hidden in (320, 384, 320, 384)]
        head = nn.Linear(WIDE, self.words, bias=False)
        self.net = nn.Sequential(nn.Embedding(self.words, WIDE, padding_idx=1), *blocks, nn.Linear(WIDE, WIDE), head)
        plan: dict[str, Any] = {"0": RowwiseParallel(input_layouts=Replicate())}
        plan["6"] = ColwiseParallel(use_local_output=False)
        plan |= {f"{index}.up": ColwiseParallel() for index in range(1, 5)}
        plan |= {f"{index}.down": RowwiseParallel() for index in range(1, 5)}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index]
        if self.tied:
            head.weight = self.net[0].weight  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = torch.arange(2) + 2 * batch_idx + self.device_mesh["data_parallel"].get_local_rank()  # type: ignore[index]
        return self.net(tokens).float().square().mean().full_tensor()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Held(LiveTensors):
    """What an engine and its optimizer hold, and what operators make: with memory that other ranks read, which none
    has made."""

    def __init__(self, strategy: Any) -> None:
        engine = self.engine = strategy.engine
        flats = [flat for unit in engine.units for flat in unit.flats]
        held = [buffer for unit in engine.units for buffer in getattr(unit, "buffers", ())]
        held += [tensor for flat in flats for tensor in (flat.master, flat.weights)]
        held += [tensor for bucket in engine._reducer.buckets for tensor in (bucket.resident, bucket.shard.there)]
        held += [*engine.collectives.buffers, *strategy.adapter(strategy.optimizers[0]).tensors()]
        super().__init__(tensor for tensor in held if tensor is not None)

    def total(self) -> int:
        lent = [buffer.memory for buffer in self.engine.means.pool if not self.knows(buffer.memory)]
        return super().total() + sum(memory.nbytes for memory in lent)


class Peak(pl.Callback):
    """Bytes at the beginning of the second step, and the most that there are in it."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            gc.collect()
            self.held = Held(trainer.strategy)
            self.rest = self.held.most
            self.held.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.held.__exit__(None, None, None)


FEED = ("Feed",)
CELLS: list[tuple[str, int, bool, int, Any]] = [
    (precision, stage, False, 512, FEED) for precision in ("32-true", "bf16-mixed") for stage in (1, 2, 3)
]
CELLS += [("32-true", 3, False, 1024, None), ("32-true", 2, True, 512, FEED), ("32-true", 3, True, 512, FEED)]


def planned(precision: str, tied: bool, words: int, units: Any, receives: bool) -> MemoryEstimate:
    dtypes: dict[str, Any] = {}
    if precision == "bf16-mixed":
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    settings: dict[str, Any] = {"units": units, "prefetch": 1, "receive_buffer": receives}
    return estimate_memory(Wide(tied, words), world_size=4, tensor_parallel_size=2, **settings, **dtypes)


def row_peak(estimates: dict[Any, MemoryEstimate]) -> None:
    """At rest, and at the worst moment, as the plan of the module says that was made before there were processes."""
    for precision, stage, tied, words, units in CELLS:
        module, peak = Wide(tied, words), Peak()
        strategy = split.Layout(stage, 2, 2).strategy(units=units, prefetch=1)
        engine = split.fit(strategy, module, 2, callbacks=[peak], plugins=ZeroPrecision(precision)).strategy.engine
        receives = engine.collectives.receives
        found = estimates[precision, tied, words, units, receives].stages[f"zero{stage}"]
        where = f"{precision}, stage {stage}, rank {dist.get_rank()}: {found.peak}"
        assert found == estimate_memory(engine.plan, receive_buffer=receives).stages[f"zero{stage}"], where
        assert peak.rest == pytest.approx(found.rest.total, rel=0.02), where
        assert peak.held.most == pytest.approx(found.peak.total, rel=0.02), where
        assert found.peak.raw_gradients <= 4 * words * WIDE // 2, where  # a rank's rows, and not all of them
        own = {"net.0", "net.6"} if units is None else set()  # embedding and head, as without tensor parallelism
        assert {unit.name for unit in engine.plan.units} & {"net.0", "net.6"} == own, where


class ByTorch(Wide):
    """Its embedding has the gradient that torch makes."""

    def on_fit_start(self) -> None:
        vars(self.net[0])["forward"] = partial(nn.Embedding.forward, self.net[0])  # type: ignore[arg-type]


def row_rows(_: int) -> None:
    """An embedding that is split by rows has the bits of torch's gradient, of tied weights too."""
    for tied, units in ((False, None), (True, FEED)):
        found = []
        for kind in (Wide, ByTorch):
            torch.manual_seed(0)
            module = kind(tied)
            split.fit(split.Layout(3, 2, 2).strategy(units=units), module, 3, plugins=ZeroPrecision("32-true"))
            with full_parameters(module):
                found.append([value.detach().clone() for value in module.parameters()])
        assert all(map(torch.equal, *found)), tied


def row_planned(_: int) -> None:
    for stage in (1, 2, 3):
        module, memory, sent = Watched(), MemoryMonitor(), CommunicationMonitor()
        split.fit(split.Layout(stage, 2, 2), module, 4, callbacks=[memory, sent])
        estimate = estimate_memory(module.plan, receive_buffer=module.receives)
        found = estimate.stages[f"zero{stage}"]
        assert module.held.total == pytest.approx(found.rest.total, rel=0.02)
        assert memory._logged["zero/memory/rest/total"] == module.held.total
        counted = {kind: getattr(found.traffic, kind) for kind in sent._sent}
        assert sent._sent == counted
        for kind, traffic in counted.items():
            assert sent._logged[f"zero/traffic/{kind}/expected_nbytes"] == traffic.nbytes
        assert estimate.numel == sum(one.numel() for one in split.Net().parameters())
        assert "4 ranks in tensor-parallel groups of 2" in estimate.describe()
        assert "of each tensor-parallel group of 2 one rank" in module.plan.describe()


class Counted(split.Split):
    """Counts its batches, by a metric that adds up the states of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()
        self.register_buffer("own", torch.full((3,), float(dist.get_rank())))
        self.register_buffer("made", torch.full((3,), float(dist.get_rank())), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count(1.0)
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("falling", -float(batch_idx))
        part = DTensor.from_local(torch.ones(()), self.device_mesh["tensor_parallel"], [Partial()])  # type: ignore[index]
        self.log("parts", part, reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("sum", 1.0, reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def row_counted(folder: Path) -> None:
    for layout in (split.Layout(1, 2, 2), split.Layout(3, 2, 2)):
        module, best = Counted(), ModelCheckpoint(folder, monitor="falling", every_n_train_steps=1)
        options = {"limit_train_batches": 3, "callbacks": [best], "enable_checkpointing": True}
        trainer = split.fit(layout, module, 3, **options)
        found = trainer.callback_metrics
        assert float(found["parts"]) == 12.0
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.save_checkpoint(folder / "buffers")
        texts = [str(one.message) for one in seen if str(one.message).startswith("The buffer")]
        assert [text.split("'")[1] for text in texts] == ["own"] * (dist.get_rank() == 0), texts
        assert best.best_model_score == -2.0  # of all ranks, each of which has been asked
        assert float(found["count"]) == float(found["sum"]) == 6.0  # by two ranks that have other data
        assert copy.deepcopy(module.count).dist_sync_fn is not None


def looped(stage: int, steps: int, path: Path) -> dict[str, Tensor]:
    """The weights after so many steps of a loop that goes on from what is there, and saves what it ends with."""
    fabric = Fabric(strategy=ZeroFabricStrategy(stage=stage, tensor_parallel_size=2), devices=4, accelerator="cpu")
    fabric.launch()
    net, mesh = split.Net(), fabric.strategy.device_mesh  # type: ignore[attr-defined]
    parallelize_module(net, mesh["tensor_parallel"], split.plan_of(net))
    optimizer: Any = split.adamw([one for one in net.parameters() if one.requires_grad])
    module, optimizer = fabric.setup(net, optimizer)
    state = {"module": module, "optimizer": optimizer, "step": 0}
    if path.exists():
        fabric.load(path, state)
    for step in range(state["step"], steps):
        fabric.backward(split.loss_of(module, step, mesh["data_parallel"].get_local_rank(), 2))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {**state, "step": steps})
    with full_parameters(module):
        return {f"net.{name}": value.detach().clone() for name, value in net.named_parameters()}


def row_fabric(folder: Path) -> None:
    for stage, steps in ((1, 2), (3, 4), (2, 5)):
        found = looped(stage, steps, folder / "fabric")
        expected = split.alone(steps)
        assert split.distance({name: expected[name] for name in found}, found) < 1e-12, stage


class Chosen(split.Split):
    """Chooses its param groups by the weights of layers."""

    def configure_optimizers(self) -> Any:
        weights = [layer.weight for layer in self.net.blocks.modules() if isinstance(layer, nn.Linear)]
        others = [one for one in self.parameters() if one.requires_grad and id(one) not in map(id, weights)]
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.9}, {"params": others}], lr=0.01, eps=1e-4)


def row_chosen(_: int) -> None:
    found = []
    for layout in (split.Layout(3, 4), split.Layout(1, 2, 2), split.Layout(3, 2, 2)):
        module = Chosen()
        split.fit(layout, module, 3)
        with full_parameters(module):
            found.append({name: value.detach().clone() for name, value in module.named_parameters()})
    assert split.distance(found[0], found[1]) < 1e-12
    assert split.distance(found[0], found[2]) < 1e-12


def row_mesh(_: int) -> None:
    """Fits of one process share a mesh, whose transfers wait as long as they say. One without has no use for parts."""
    found, groups = [], []
    for seconds in (70, 70, 80):
        module = split.Split()
        split.fit(split.Layout(1, 2, 2).strategy(timeout=seconds), module, 1)
        group = module.device_mesh["tensor_parallel"].get_group()  # type: ignore[index]
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=seconds)
        found.append(module.device_mesh)
        groups.append(groups_made())
    with pytest.raises(ValueError, match="was split over tensor groups of 2 ranks before"):
        split.fit(split.Layout(3, 4), module, 2)
    with pytest.raises(ParameterAccessError, match="would get different batches of DDPStrategy"):
        split.fit("ddp", module, 2)
    tokens, ordinary = torch.arange(8)[None], "is called inside `full_parameters`, or in a copy"
    with full_parameters(module), pytest.raises(ParameterAccessError, match=ordinary):
        module.net(tokens)
    with pytest.raises(ParameterAccessError, match=ordinary):
        copy.deepcopy(module.net)(tokens)
    module.net(tokens)
    assert found[0] is found[1]
    assert groups[0] == groups[1], groups


def rank(number: int, estimates: dict[Any, MemoryEstimate], folder: Path) -> None:
    row_mesh(number)
    row_counted(folder)
    row_chosen(number)
    row_fabric(folder)
    row_average(number)
    row_planned(number)
    row_peak(estimates)
    row_rows(number)


def test_a_run_holds_and_sends_what_was_planned(tmp_path: Path) -> None:
    asked = {(precision, *rest, receives) for precision, _, *rest in CELLS for receives in (False, True)}
    run_world(4, rank, {one: planned(*one) for one in asked}, tmp_path, timeout=200)


# ------------------------------------------------------------------------------------------------- plans of one process


def on_four(module: nn.Module, **settings: Any) -> MemoryEstimate:
    return estimate_memory(module, **{"world_size": 4, "tensor_parallel_size": 2, **settings})


def test_a_module_is_counted_as_a_rank_of_a_tensor_parallel_group_has_it() -> None:
    """Half of the weights that are split, and all of norms, biases of sums, and a scalar: 1,889 + 192 + 1 elements."""
    module, hook = split.Split(), sys.excepthook
    found = on_four(module)
    net, halved = split.Net(), ("embedding", "up.", "down.weight", "head")
    own = sum(p.numel() // (2 if any(part in name for part in halved) else 1) for name, p in net.named_parameters())
    assert found.stages["none"].rest.parameters == 8 * own
    assert found.numel == sum(parameter.numel() for parameter in net.parameters())
    assert (found.world_size, found.tensor_parallel_size) == (4, 2)
    assert "4 ranks in tensor-parallel groups of 2" in found.describe()
    # What was given, and the process, are as they were.
    assert module.net is None
    assert module.device_mesh is None
    assert not dist.is_initialized()
    assert sys.excepthook is hook


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of four ranks, of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()
    forget_meshes()


def test_a_parallelised_module_is_counted_by_its_local_parts(mesh: DeviceMesh) -> None:
    """And nothing of it, or of the process's groups, is changed."""
    module, default = split.Split(), dist.group.WORLD
    module._device_mesh = mesh
    module.configure_model()
    before = {name: (id(parameter), dict(vars(parameter))) for name, parameter in module.named_parameters()}
    found = on_four(module)
    assert {name: (id(parameter), vars(parameter)) for name, parameter in module.named_parameters()} == before
    assert dist.group.WORLD is default
    assert isinstance(module.net.head.weight, DTensor)
    with pytest.raises(ValueError, match="parallelised over 2 ranks: give tensor_parallel_size=2"):
        on_four(module, tensor_parallel_size=4)
    with pytest.raises(RuntimeError, match="before this process is of a group"):
        on_four(split.Split())
    dist.destroy_process_group()
    assert found == on_four(split.Split())
    dist.init_process_group("fake", rank=0, world_size=4)


@pytest.mark.parametrize("planned", [True, False])
def test_a_mesh_that_ended_is_forgotten(planned: bool) -> None:
    """Torch takes meshes of the same ranks for one: DTensors would be of the groups of a plan, or of an earlier run,
    and so would what is compiled."""

    def run(groups: int) -> None:
        dist.init_process_group("fake", rank=0, world_size=4)
        try:
            for _ in range(groups):
                dist.new_group([0, 1])  # so that names of groups differ
            own = make_mesh(torch.device("cpu"), 2, 2, None, timedelta(seconds=60))
            module = split.Split()
            module._device_mesh = own
            module.configure_model()
            for parameter in module.parameters():
                if isinstance(parameter, DTensor):
                    assert parameter.device_mesh.get_group().group_name == own["tensor_parallel"].get_group().group_name
            block = module.net.blocks[0]
            block.compile(backend="aot_eager")
            block(torch.randn(4, split.WIDTH, dtype=torch.float64)).sum().backward()
        finally:
            dist.destroy_process_group()

    on_four(split.Split()) if planned else run(0)
    run(1)
    forget_meshes()


class Unequal(split.Split):
    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 3))
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel()})  # type: ignore[index]


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (nn.Linear(2, 2), {}, "Linear has no parameter that is a DTensor: each of the 2 ranks"),
        (BoringModel(), {}, "BoringModel has no parameter that is a DTensor"),
        (Unequal(), {}, "'net.0.weight' has 3 rows in dimension 0, which 2 ranks cannot share equally"),
        (split.Split(), {"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the 4 ranks of a node"),
        (split.Split(), {"hosts": 4}, "tensor_parallel_size=2 does not divide the 1 ranks of a node"),
        (split.Split(), {"optimizer": "Muon"}, "Muon steps on whole parameters"),
    ],
)
def test_what_cannot_be_planned_with_tensor_parallelism(module: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        on_four(module, **settings)
    assert not dist.is_initialized()
