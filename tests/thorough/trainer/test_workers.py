"""Workers of a DataLoader whose functions refer to the module: forked ones and spawned ones."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from multiprocessing import popen_spawn_posix
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import full_parameters
from lightning_zero.errors import CommunicationError, ParameterAccessError
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, assert_same, batches, made, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Reading(Net):
    """Its loader's workers read a weight, and so does what they are given."""

    def __init__(self, read: Callable[[Reading], Tensor], workers: int = 2) -> None:
        super().__init__()
        self.read, self.workers, self.seen = read, workers, []

    def collate(self, items: list[int]) -> Tensor:
        return self.read(self).detach().reshape(1)

    def train_dataloader(self) -> Any:
        context = "fork" if self.workers else None
        return DataLoader(range(12), num_workers=self.workers, collate_fn=self.collate, multiprocessing_context=context)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.item())
        return super().training_step(batch, batch_idx)


READS: dict[str, Callable[[Reading], Tensor]] = {
    "a weight": lambda module: module.model.head.weight.double().sum(),
    "its data": lambda module: module.model.head.weight.data.double().sum(),
    "the module": lambda module: module(torch.ones(2, WIDTH)).double().sum(),
    "a state": lambda module: module.state_dict()["model.head.weight"].double().sum(),
}


def test_forked_workers_see_the_weights_of_the_fork() -> None:
    """As under DDP, where the system copies what the rank writes to; here ranks share the memory of weights."""

    def read(module: Reading) -> Tensor:
        with full_parameters(module):
            return torch.stack([read(module) for read in READS.values()]).sum()

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Reading(read)
        trainer = make_trainer(strategy, max_epochs=2)
        trainer.fit(module)
        assert len(set(module.seen[:12])) == len(set(module.seen[12:])) == 1 < len(set(module.seen))
        return {"seen": torch.tensor(module.seen), **made(module, trainer)}

    def world(rank: int) -> dict[str, Any]:
        with quiet():
            results = {"ddp": play(DDPStrategy())}
            results |= {f"stage {stage}": play(zero(stage)) for stage in (1, 2)}
        return results

    assert_same(run_world(2, world), ["stage 1", "stage 2"])


class Refused(Reading):
    """Its workers try everything, and return what they are told."""

    def collate(self, items: list[int]) -> list[str]:
        errors = []
        for read in READS.values():
            with pytest.raises(ParameterAccessError) as caught:
                read(self)
            errors.append(str(caught.value))
        return errors

    def training_step(self, batch: list[str], batch_idx: int) -> Tensor:
        self.seen += batch
        return Net.training_step(self, batch, batch_idx)


def test_a_forked_worker_that_reads_what_is_absent_says_so() -> None:
    """And the ranks go on: nothing was sent."""

    @quiet()
    def world(rank: int) -> list[str]:
        texts = []
        for stage, precision in ((3, "32-true"), (1, "bf16-mixed")):
            module, other = Refused(READS["a weight"]), Net()
            make_trainer(zero(stage), precision=precision, max_epochs=2).fit(module)
            make_trainer(zero(stage), precision=precision, max_epochs=2).fit(other, batches(12))
            with full_parameters(module), full_parameters(other):
                same = [torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)]
            assert all(same)
            assert len(module.seen) == 2 * 12 * len(READS)
            texts += module.seen
        return texts

    for text in {text for texts in run_world(2, world) for text in texts}:
        assert "The values of parameter 'model." in text
        assert "it is a worker that a rank has started" in text
        assert "is gone" not in text


def test_a_forked_process_does_not_use_the_connections_of_its_rank() -> None:
    class Forks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                return
            strategy, texts = trainer.strategy, []
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                calls = (
                    lambda: strategy.barrier("ours"),
                    lambda: strategy.broadcast(1),
                    lambda: strategy.reduce(torch.ones(1)),
                    lambda: strategy.engine.control.exchange([1]),
                    lambda: trainer.save_checkpoint("nowhere"),
                )
                for call in calls:
                    try:
                        call()
                    except CommunicationError as error:
                        texts.append(str(error))
                os.write(writer, "\n".join(texts).encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as told:
                pl_module.texts = [
                    line for line in told if f"in a process that rank {dist.get_rank()} has forked" in line
                ]
            os.waitpid(child, 0)

    def world(rank: int) -> dict[str, Any]:
        results = {}
        with quiet():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork of a process that has threads
            for name, strategy in (("ddp", DDPStrategy()), ("stage 3", zero(3))):
                module = Net()
                trainer = make_trainer(strategy, callbacks=[Forks()] if name != "ddp" else [])
                trainer.fit(module, batches(3))
                results[name] = made(module, trainer)
            assert len(module.texts) == 5, module.texts
        return results

    assert_same(run_world(2, world), ["stage 3"])


class OfGradients(Reading):
    """Where gradients are there, its workers read one, and clear them, compute with the module and read again."""

    def __init__(self, computes: bool) -> None:
        super().__init__(READS["a weight"], workers=0)
        self.computes = computes

    def in_worker(self, items: list[int]) -> str:
        weight, texts = self.model.head.weight, []
        for _ in range(1 + self.computes):
            try:
                texts.append("None" if weight.grad is None else f"{weight.grad.double().sum().item():.6f}")
            except ParameterAccessError as error:
                texts.append(str(error))
            if self.computes:
                self.zero_grad()
                self(torch.ones(2, WIDTH)).sum().backward()
        return " | ".join(texts)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Net.training_step(self, batch, batch_idx)

    def collate(self, items: list[int]) -> int:
        return 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step == 1:
            loader = DataLoader(range(1), num_workers=1, collate_fn=self.in_worker, multiprocessing_context="fork")
            self.seen += list(loader)


def test_a_forked_worker_does_not_take_a_gradient_that_stays_behind_for_none() -> None:
    def world(rank: int) -> dict[str, list[str]]:
        found = {}
        ways = {"ddp": DDPStrategy, "stage 1": lambda: zero(1), "stage 2": lambda: zero(2), "stage 3": lambda: zero(3)}
        with quiet():
            for name, make in ways.items():
                module = OfGradients(computes=name != "stage 3")
                make_trainer(make(), max_epochs=1).fit(module)
                (found[name],) = module.seen
        return found

    for found in run_world(2, world):
        assert "gradient that 'model.head.weight' has in its rank is not in this process" in found["stage 3"]
        for name in ("stage 1", "stage 2"):
            refused, computed = found[name].split(" | ")
            assert refused == found["stage 3"]
            assert computed == found["ddp"].split(" | ")[1]


class Spawning:
    """What ``multiprocessing`` asks while it pickles for a process that it is about to spawn."""

    def __enter__(self) -> None:
        self.before = get_spawning_popen()
        set_spawning_popen(self)

    def __exit__(self, *_: Any) -> None:
        set_spawning_popen(self.before)

    DupFd = popen_spawn_posix._DupFd

    @staticmethod
    def duplicate_for_child(file: int) -> int:
        return os.dup(file)


class Collating(Net):
    """What a loader's workers call belongs to it. It has a tied, a frozen and a marked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([3.0]))
        self.model.other = self.model.head
        self.model.head.weight.mark = "marked"
        self.model.head.bias.requires_grad_(False)

    def collate(self, items: list[int]) -> tuple[float, int]:
        return self.scale.item(), len(items)


@pytest.mark.parametrize(("stage", "precision"), [(3, "32-true"), (1, "bf16-mixed"), (2, "32-true")])
def test_a_module_travels_to_a_spawned_worker_without_what_is_absent(stage: int, precision: Any) -> None:
    absent = stage == 3 or precision != "32-true"

    class Sends(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                if absent:
                    with pytest.raises(ParameterAccessError, match="A pickle of"):
                        torch.save(pl_module, io.BytesIO())
                with Spawning():
                    data = ForkingPickler.dumps(pl_module.collate)
                self.collate = ForkingPickler.loads(data)

    @quiet()
    def world(rank: int) -> None:
        module, sends = Collating(), Sends()
        trainer = make_trainer(zero(stage), callbacks=[sends], precision=precision)
        trainer.fit(module, batches(3))
        assert sends.collate([1, 2]) == (3.0, 2)
        sent, head = sends.collate.__self__, module.model.head
        weight, bias = sent.model.head.weight, sent.model.head.bias
        assert sent.model.other is sent.model.head
        assert (weight.shape, weight.dtype, weight.mark) == (head.weight.shape, torch.float32, "marked")
        assert (weight.requires_grad, bias.requires_grad) == (True, False)
        if absent:
            with pytest.raises(ParameterAccessError, match=r"'model\.head\.weight'.* it is a worker"):
                weight.sum()
            with pytest.raises(ParameterAccessError, match=r"'model\.\S+'.* it is a worker"):
                sent(torch.ones(2, WIDTH))
            with torch.no_grad(), pytest.raises(ParameterAccessError, match="it is a worker"):
                weight.fill_(0.5)
        else:
            assert torch.isfinite(sent(torch.ones(2, WIDTH))).all()

    run_world(2, world)
