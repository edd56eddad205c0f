"""One rank of a world that is not there: everything but the wire, on the device at hand.

Torch's fake process group answers every collective at once, with this rank's own values. What a step costs beside its
compute and beside the wire, and what a rank of eight holds, can so be measured on one device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from offload_training import GPT, VOCABULARY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero import ZeroPlan, build_plan
from lightning_zero.comm import (
    Collectives,
    ControlGroup,
    Groups,
    LocalCollectives,
    NativeCollectives,
    ShardGroup,
    Streams,
)
from lightning_zero.engine import ZeroEngine
from lightning_zero.offload import MemoryTiers
from lightning_zero.optim.sharded import ShardedOptimizer

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")


@dataclass(frozen=True)
class Task:
    """What every way trains.

    Args:
        width: of the model.
        layers: of the model.
        tokens: sequences in a batch, and the tokens of each.
        precision: in Lightning's words.
        device: where.
        backend: what compiles the blocks; ``None``: nothing does.
        like: whether this package computes without autocast in ``bf16-mixed``, as FSDP2 and DeepSpeed do.
    """

    width: int
    layers: int
    tokens: tuple[int, int]
    precision: str
    device: torch.device
    backend: str | None = None
    like: bool = False

    def model(self) -> GPT:
        """The same weights every time, on the device."""
        torch.manual_seed(0)
        with self.device:  # where it takes no time
            model = GPT(self.width, self.layers)
        if self.precision == "bf16-true":
            model = model.bfloat16()
        if self.backend is not None:
            model.blocks = nn.Sequential(*(torch.compile(block, backend=self.backend) for block in model.blocks))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The one for all."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def batch(self, index: int) -> Tensor:
        """The tokens of one step."""
        generator = torch.Generator().manual_seed(index)
        sequences, length = self.tokens
        return torch.randint(0, VOCABULARY, (sequences, length + 1), generator=generator).to(self.device)

    def autocast(self, *, ours: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Around the forward of a mixed precision, ``ours`` or plain PyTorch's."""
        enabled = self.precision == "bf16-mixed" and not (ours and self.like)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A default group in which this process is rank 0 of ``size``."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Alone(ControlGroup):
    """Agreements of a rank with others that are always of its opinion."""

    def _rows(self, mine: bytes, sizes: Any = ()) -> list[bytes]:
        """Everybody's bytes are this rank's."""
        return [mine] * self.world_size

    def _set_on_any(self, bits: int, nbytes: int) -> int:
        """Likewise."""
        return bits

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Likewise."""
        return numbers if largest else numbers * self.world_size

    def any_of(self, flags: Tensor) -> Tensor:
        """Likewise."""
        return flags


class Way:
    """One way to train: ``step`` takes a batch and gives its loss, in three parts.

    Attributes:
        plan: of what this package shards; ``None`` elsewhere.
    """

    plan: ZeroPlan | None = None
    _model: nn.Module
    _optimizer: torch.optim.Optimizer

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self._model(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss."""
        loss.backward()

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self, batch: Tensor) -> Tensor:
        """One optimizer step."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss


class Plain(Way):
    """PyTorch as one would write it for one device."""

    def __init__(self, task: Task, world_size: int) -> None:
        self._task = task
        self._model = task.model()
        self._optimizer = task.optimizer(self._model)

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        with self._task.autocast():
            return super().forward(batch)


class Ddp(Plain):
    """DistributedDataParallel, with a hook for each bucket: it cannot read the results of torch's fake group."""

    def __init__(self, task: Task, world_size: int) -> None:
        super().__init__(task, world_size)
        model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        if dist.get_backend() == "fake":
            model.register_comm_hook(None, _at_once)
        self._model = model


def _at_once(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    answer: torch.futures.Future[Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


_at_once.__annotations__.clear()  # DDP compares them with classes, and they are strings in this file


class Fsdp2(Way):
    """``fully_shard`` of each block and of the rest.

    Args:
        task: what to train.
        world_size: of the default group.
        reshard: whether parameters are given up after the forward.
    """

    def __init__(self, task: Task, world_size: int, *, reshard: bool = True) -> None:
        mesh = init_device_mesh(task.device.type, (world_size,))
        policy = MixedPrecisionPolicy()
        if task.precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self._model = task.model()
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self._optimizer = task.optimizer(self._model)


class DeepSpeed(Way):
    """DeepSpeed's engine, with its own step.

    Args:
        task: what to train.
        world_size: of the default group.
        stage: what is sharded.
    """

    def __init__(self, task: Task, world_size: int, *, stage: int) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")  # which its launcher would set
        import deepspeed  # takes seconds, and logs

        model = task.model()
        config = {
            "train_micro_batch_size_per_gpu": task.tokens[0],
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": task.precision.startswith("bf16")},
            "steps_per_print": 10**9,
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=task.optimizer(model), config=config)

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self._engine(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss."""
        self._engine.backward(loss)

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        self._engine.step()


class Zero(Way):
    """This package's engine and optimizer, called as its strategy calls them.

    Args:
        task: what to train.
        world_size: of the world.
        stage: what is sharded.
    """

    def __init__(self, task: Task, world_size: int, *, stage: int) -> None:
        self._task = task
        self._model = task.model()
        mixed = task.precision == "bf16-mixed"
        self.plan = build_plan(
            self._model,
            stage=stage,
            world_size=world_size,
            units=["Block"],
            param_dtype=torch.bfloat16 if mixed else None,
            reduce_dtype=torch.float32 if mixed else None,
        )
        streams = Streams(task.device, one_order=not self.plan.placement.shards_parameters)
        control = Alone(None, 0, world_size)
        collectives: Collectives = LocalCollectives(streams)
        if world_size > 1:
            group = dist.group.WORLD
            groups = Groups(group, group, control, control, ShardGroup(0, world_size), divisor=world_size)
            collectives = NativeCollectives(groups, streams)
        self._engine = engine = ZeroEngine(
            self._model, self.plan, collectives, control, MemoryTiers(task.device, streams)
        )
        engine.prepare_training()
        self._optimizer = task.optimizer(self._model)
        owned = {one.user: one for one in engine.shards.values()}
        self._adapter = ShardedOptimizer(
            self._optimizer,
            "AdamW",
            owned,
            engine.collectives,
            engine.before_optimizer_step,
            engine.after_optimizer_step,
            engine.access.writes.note,
            writable=not self.plan.placement.shards_parameters and not mixed,
        )

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        self._adapter.adopt_new_groups()
        with self._task.autocast(ours=True), self._engine.step("training_step"):
            return super().forward(batch)

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss."""
        with self._engine.backward():
            loss.backward()


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        label: what it is called there.
        stage: what is sharded, as ZeRO counts.
        make: builds it.
    """

    label: str
    stage: int
    make: Callable[[Task, int], Way]


def rows() -> dict[str, Row]:
    """All ways by name that are installed."""
    found = {
        "plain": Row("plain PyTorch", 0, Plain),
        "ddp": Row("DDP", 0, Ddp),
        "zero1": Row("zero1", 1, partial(Zero, stage=1)),
        "zero2": Row("zero2", 2, partial(Zero, stage=2)),
        "fsdp2-whole": Row("FSDP2 without reshard", 2, partial(Fsdp2, reshard=False)),
        "zero3": Row("zero3", 3, partial(Zero, stage=3)),
        "fsdp2": Row("FSDP2", 3, Fsdp2),
    }
    if find_spec("deepspeed") is not None:
        found |= {
            f"deepspeed{stage}": Row(f"DeepSpeed {stage}", stage, partial(DeepSpeed, stage=stage))
            for stage in (1, 2, 3)
        }
    return found
