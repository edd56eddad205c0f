"""The engines that the benchmarks compare: the same model, data, optimizer and clipping under each of them.

An engine is a function that trains until its turns are over. DDP and what stands on torch alone run the loop that their
documentation shows; what belongs to Lightning runs in a ``Trainer``, whose own cost it then bears.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from offload_training import GPT, VOCABULARY
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from worlds import Turns

from lightning_zero import InstabilityMonitor, ZeroStrategy

# Clipping does all of its work, and multiplies by exactly 1: engines that sum the norm in another order stay comparable
# bit for bit.
CLIP_AT = 1000.0
BUCKET = 25 * 2**20 // 4  # elements of float32 in 25 MiB
SIZES = {
    "narrow": (64, 100),
    "giant": (256, 4),
    "untied": (256, 2),
    "1m": (64, 8),
    "10m": (320, 6),
    "50m": (640, 9),
    "125m": (896, 12),
}


# Of models that are mostly embedding.
OPTIONS = {"giant": {"vocabulary": 49_152}, "untied": {"vocabulary": 24_576, "tied": False}}


@dataclass(frozen=True)
class Task:
    """What every engine trains."""

    width: int
    layers: int
    precision: str
    tokens: tuple[int, int]  # sequences in a batch of one rank, and the tokens of each
    options: dict[str, Any] = field(default_factory=dict)  # of the model

    def model(self) -> nn.Module:
        """The same weights every time; its ``blocks`` are what is gathered and reduced together."""
        torch.manual_seed(0)
        return GPT(self.width, self.layers, **self.options)

    def batch(self, index: int, group: int = 1) -> Tensor:
        """The tokens of one step on this rank: the same ones under every engine.

        Args:
            index: of the step.
            group: so many neighbouring ranks get the tokens of them all.
        """
        sequences, length = self.tokens
        first = dist.get_rank() // group * group
        batches = []
        for rank in range(first, first + group):
            generator = torch.Generator().manual_seed(index * dist.get_world_size() + rank)
            batches.append(torch.randint(0, VOCABULARY, (sequences, length + 1), generator=generator))
        return torch.cat(batches)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward of engines that do not cast by themselves."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The one for all."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


# ---------------------------------------------------------------------------------------------------------------------
# Plain loops


def loop(task: Task, turns: Turns, model: nn.Module, optimizer: torch.optim.Optimizer, *, cast: bool = True) -> None:
    """Train as one would by hand."""
    while turns.more():
        with task.autocast() if cast else contextlib.nullcontext():
            loss = model(task.batch(turns.index))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        optimizer.zero_grad()
        turns.note(loss)


def ddp(task: Task, turns: Turns) -> None:
    """DDP, whose gradients are views of its buckets."""
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    loop(task, turns, model, make_optimizer(model.parameters()))


def no_exchange(task: Task, turns: Turns) -> None:
    """Each rank a model of its own, which is not DDP's training: the time that no way to share it can be below, but for
    the part of the optimizer's step that the ranks then divide among them."""
    model = task.model()
    loop(task, turns, model, make_optimizer(model.parameters()))


def zero_redundancy(task: Task, turns: Turns) -> None:
    """DDP with torch's own stage 1 optimizer."""
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    loop(task, turns, model, optimizer)


def fsdp2(task: Task, turns: Turns, *, reshard: bool = True, mesh: DeviceMesh | None = None) -> None:
    """``fully_shard`` of each block and of the rest; with a ``mesh`` of two dimensions, within its second one."""
    model = task.model()
    policy = MixedPrecisionPolicy()
    if task.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    loop(task, turns, model, make_optimizer(model.parameters()), cast=False)


def deepspeed(task: Task, turns: Turns, *, stage: int, **options: Any) -> None:
    """DeepSpeed with the same optimizer, and buckets of the size of ours: its own are larger than these models."""
    import deepspeed  # takes seconds, and logs

    config = {
        "train_micro_batch_size_per_gpu": task.tokens[0],
        "gradient_clipping": CLIP_AT,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            **options,
        },
        "bf16": {"enabled": task.precision == "bf16"},
        "steps_per_print": 10**9,
    }
    model = task.model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    while turns.more():
        loss = engine(task.batch(turns.index))
        engine.backward(loss)
        engine.step()
        turns.note(loss)


# ---------------------------------------------------------------------------------------------------------------------
# Lightning


class Batches(IterableDataset[Tensor]):
    """A batch for each step of a turn. Has a length, or Lightning would fetch one batch ahead of its step."""

    def __init__(self, batch: Callable[[int], Tensor], turns: Turns) -> None:
        self._batch, self._turns = batch, turns

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Tensor]:
        while self._turns.more():
            yield self._batch(self._turns.index)


class Module(pl.LightningModule):
    """The model as a user of Lightning would wrap it.

    Args:
        task: what is trained.
        turns: told each loss.
    """

    def __init__(self, task: Task, turns: Turns) -> None:
        super().__init__()
        self.model = task.model()
        self._turns, self._parallel = turns, False

    def configure_model(self) -> None:
        """Tensor parallelism is asked for here, and Lightning's FSDP2 strategy wants its units named."""
        if self.device_mesh is not None and not self._parallel:
            self._parallel = True
            if self.device_mesh["tensor_parallel"].size() > 1:
                parallelize(self.model, self.device_mesh["tensor_parallel"])
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for module in (
                *self.model.blocks,
                self.model,
            ):  # not itself: its forward, where FSDP2 gathers, is not called
                fully_shard(module, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss."""
        loss = self.model(batch)
        self._turns.note(loss)
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """As Lightning does, but for its ``bf16-mixed``, which refuses a fused optimizer because of fp16's scaler."""
        if type(self.trainer.precision_plugin) is MixedPrecision and gradient_clip_val:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Clear gradients where a plain loop does; a Trainer would before the next backward."""
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The one for all."""
        return make_optimizer(self.parameters())


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Split a ``GPT`` over the ranks of a tensor-parallel group, and the activations between its layers too."""
    pieces = Shard(1)  # of the sequence
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=pieces),
            "blocks.*.first": SequenceParallel(),
            "blocks.*.attention": ColwiseParallel(input_layouts=pieces),
            "blocks.*.mix": RowwiseParallel(output_layouts=pieces),
            "blocks.*.second": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=pieces),
            "blocks.*.down": RowwiseParallel(output_layouts=pieces),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=pieces, output_layouts=Replicate()),
        },
    )
    model.head.weight = model.embedding.weight  # each layer has got a tensor of its own


def lightning(
    task: Task,
    turns: Turns,
    *,
    strategy: Callable[[], Any],
    clip_at: float | None = CLIP_AT,
    group: int = 1,
    callbacks: Callable[[], list[pl.Callback]] = list,
) -> None:
    """A Trainer that does nothing but train."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(),
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
        max_epochs=1,
        gradient_clip_val=clip_at,
        callbacks=callbacks(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    turns.trainer = trainer
    batch = task.batch if group == 1 else partial(task.batch, group=group)  # not every task knows groups
    trainer.fit(Module(task, turns), DataLoader(Batches(batch, turns), batch_size=None))


def trainer_ddp() -> Any:
    """Lightning's DDP."""
    return DDPStrategy(gradient_as_bucket_view=True)


def model_parallel(tensor: int = 1) -> Any:
    """Lightning's FSDP2; with tensor parallelism if so many ranks compute a layer together."""
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size() // tensor, tensor_parallel_size=tensor)


@dataclass(frozen=True)
class Engine:
    """One row of a table.

    Args:
        label: in the table.
        stage: what is sharded, as ZeRO counts; peers are compared with ours of the same stage.
        train: until the turns are over.
        rest: bytes of a parameter between turns, to know how many worlds fit into memory.
        peak: the same while it trains.
        ours: made here.
        package: what must be installed.
        process: bytes of a rank beside its model.
        environment: variables of its processes.
        group: so many neighbouring ranks train on the tokens of them all, and have one loss.
    """

    label: str
    stage: int
    train: Callable[[Task, Turns], None]
    rest: float = 0.0
    peak: float = 0.0
    ours: bool = False
    package: str = "torch"
    process: int = 100 * 10**6
    environment: tuple[tuple[str, str], ...] = ()
    group: int = 1

    @property
    def is_peer(self) -> bool:
        """Whether stages are compared with it: it is not made here, and has no tensor groups."""
        return not self.ours and self.group == 1

    @property
    def installed(self) -> bool:
        """Whether it can run here."""
        return importlib.util.find_spec(self.package) is not None


def earlier_strategy(folder: str, stage: int) -> Any:
    """The strategy as a checkout of an earlier commit has it: this forked rank imports the package anew, from there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_zero"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    for name, entry in list(StrategyRegistry.items()):
        if entry["strategy"].__module__.startswith("lightning_zero"):
            StrategyRegistry.remove(name)
    package = importlib.import_module("lightning_zero")
    if not str(package.__file__).startswith(folder):
        raise RuntimeError(f"lightning_zero came from {package.__file__}, not from {folder}")
    return package.ZeroStrategy(stage, units=["Block"])


_GLOO = (("LIGHTNING_ZERO_SHARED_MEMORY", "0"),)


def _zero(stage: int, label: str, environment: tuple[tuple[str, str], ...] = ()) -> Engine:
    train = partial(lightning, strategy=partial(ZeroStrategy, stage, units=["Block"]))
    return Engine(label, stage, train, 14.0, 19.0, ours=True, environment=environment)


def _monitored(stage: int) -> Engine:
    train = partial(
        lightning, strategy=partial(ZeroStrategy, stage, units=["Block"]), callbacks=lambda: [InstabilityMonitor()]
    )
    return Engine(f"zero{stage}, InstabilityMonitor", stage, train, 14.0, 19.0, ours=True)


def _tensor_parallel(stage: int) -> Engine:
    strategy = partial(ZeroStrategy, stage, units=["Block"], tensor_parallel_size=2)
    train = partial(lightning, strategy=strategy, group=2)
    return Engine(f"zero{stage}, tensor-parallel", stage, train, 7.0, 12.0, ours=True, group=2)


def earlier(stage: int, folder: Path) -> Engine:
    """One of ours as a checkout of another commit has it, for what changed between them."""
    now = ENGINES[f"zero{stage}"]
    strategy = partial(earlier_strategy, str(folder.resolve()), stage)
    return replace(now, label=f"zero{stage}, {folder.name}", train=partial(lightning, strategy=strategy))


def _deepspeed(stage: int) -> Engine:
    train = partial(deepspeed, stage=stage)
    rest, peak = (16.0, 30.0) if stage == 3 else (12.0, 24.0)
    return Engine(f"DeepSpeed {stage}", stage, train, rest, peak, package="deepspeed", process=300 * 10**6)


ENGINES = {
    "ddp": Engine("DDP", 0, ddp, 17.0, 20.0),
    "no-exchange": Engine("no exchange", 0, no_exchange, 13.0, 16.0),
    "lightning-ddp": Engine("DDP in a Trainer", 0, partial(lightning, strategy=trainer_ddp), 17.0, 20.0),
    "zero-redundancy": Engine("ZeroRedundancyOptimizer", 1, zero_redundancy, 13.0, 16.0),
    "deepspeed1": _deepspeed(1),
    "zero1": _zero(1, "zero1"),
    "zero1-monitored": _monitored(1),
    "zero1-gloo": _zero(1, "zero1, over gloo", _GLOO),
    "fsdp2-whole": Engine("FSDP2 without reshard", 2, partial(fsdp2, reshard=False), 8.0, 22.0),
    "deepspeed2": _deepspeed(2),
    "zero2": _zero(2, "zero2"),
    "zero2-gloo": _zero(2, "zero2, over gloo", _GLOO),
    "fsdp2": Engine("FSDP2", 3, fsdp2, 8.0, 22.0),
    "lightning-fsdp2": Engine("Lightning FSDP2", 3, partial(lightning, strategy=model_parallel), 8.0, 22.0),
    "deepspeed3": _deepspeed(3),
    "zero3": _zero(3, "zero3"),
    "zero3-monitored": _monitored(3),
    "zero3-gloo": _zero(3, "zero3, over gloo", _GLOO),
    "fsdp2-tp": Engine(
        "FSDP2, tensor-parallel",
        3,
        partial(lightning, strategy=partial(model_parallel, 2), group=2),
        5.0,
        12.0,
        group=2,
    ),
    "zero1-tp": _tensor_parallel(1),
    "zero2-tp": _tensor_parallel(2),
    "zero3-tp": _tensor_parallel(3),
}
VARIANTS = (
    *("zero1-monitored", "zero3-monitored", "zero1-gloo", "zero2-gloo", "zero3-gloo"),
    *("lightning-ddp", "lightning-fsdp2", "fsdp2-tp", "zero1-tp", "zero2-tp", "zero3-tp"),
)
"""They answer a question of their own: in tables, and not in pictures."""
