"""What one rank does alone while the others go on: an error on every rank that says what each is doing, in seconds."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from lightning_zero.comm import PATIENCE_SECONDS
from lightning_zero.comm.control import current_watch
from lightning_zero.comm.groups import _LIVE, shut, sockets
from lightning_zero.errors import DivergenceError, with_notes
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, assert_same, batches, fit, made, quiet
from tests.helpers.world import run_world

SECONDS = 10  # of which three are for being sure


class Alone(Net):
    """Rank 0 does something alone, in the third step or behind it."""

    def __init__(self, deed: Callable[[Any], Any], behind: bool = False) -> None:
        super().__init__()
        self.deed, self.behind, self.began = deed, behind, 0.0

    def _do(self, batch_idx: int, behind: bool) -> None:
        if batch_idx == 2:
            self.began = time.monotonic()
            if self.global_rank == 0 and self.behind is behind:
                self.deed(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._do(batch_idx, behind=False)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._do(batch_idx, behind=True)


class Broken(Net):
    """Its layers cannot be made on rank 1."""

    began = 0.0

    def configure_model(self) -> None:
        self.began = time.monotonic()
        if self.global_rank == 1:
            raise ValueError("there is no such file here")


def _save(module: Alone) -> None:
    module.trainer.save_checkpoint("never.ckpt")


def _log(module: Alone) -> None:
    module.log("value", torch.tensor(1.0), sync_dist=True)


DEEDS: dict[str, tuple[Callable[[], Net], str]] = {
    "a barrier": (lambda: Alone(lambda module: module.trainer.strategy.barrier("mine")), "barrier of the default"),
    "a value that is logged": (lambda: Alone(_log), "barrier of the default group"),
    "a checkpoint": (lambda: Alone(_save), "save the checkpoint"),
    "a forward in a hook": (lambda: Alone(lambda m: m(torch.zeros(1, WIDTH)), behind=True), "(forward of 'Alone')"),
    "a collective of torch": (
        lambda: Alone(lambda module: dist.all_reduce(torch.ones(1))),
        "all_reduce of the default",
    ),
}


def play(rank: int, make: Callable[[], Net], stage: int) -> tuple[str, str, float]:
    module = make()
    trainer = pl.Trainer(
        strategy=ZeroStrategy(stage=stage), accelerator="cpu", devices=2, max_epochs=1, logger=False,  # type: ignore[arg-type]
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with quiet():
        try:
            trainer.fit(module, batches(8))
        except Exception as error:
            return type(error).__name__, with_notes(error), time.monotonic() - module.began  # type: ignore[operator]
    raise AssertionError("it did not fail")


@pytest.mark.timing
@pytest.mark.parametrize("deed", DEEDS)
def test_what_one_rank_does_alone_is_an_error_on_all(deed: str) -> None:
    make, told = DEEDS[deed]
    stage = 3 if deed in ("a forward in a hook", "a checkpoint") else 1
    results = run_world(2, play, make, stage, init_group=False)
    assert DivergenceError.__name__ in [kind for kind, _, _ in results]
    for rank, (_, message, seconds) in enumerate(results):
        assert message.startswith(f"Rank {rank}: ")
        assert "No rank can go on" in message
        assert told in message
        assert "test_waiting.py" in message
        assert re.search(r"\nSee \S+#(divergence|communication)error$", message)
        assert message.count("https://") == 1
        assert seconds < SECONDS


class Cut(Alone):
    """Rank 1 loses all its connections, and waits for rank 0, which is long in coming."""

    def __init__(self) -> None:
        super().__init__(lambda module: time.sleep(SECONDS))

    def _do(self, batch_idx: int, behind: bool) -> None:
        for file in sockets() if batch_idx == 2 and self.global_rank == 1 else ():
            shut(file)
        super()._do(batch_idx, behind)


@pytest.mark.timing
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux to find the connections")
@pytest.mark.usefixtures("one_host")  # over a wire the other rank, which ends first, may be noticed before
def test_a_rank_that_has_lost_the_store_does_not_wait_for_ever() -> None:
    """With nobody to tell, and nobody to judge."""
    results = run_world(2, play, Cut, 3, init_group=False)
    for _, message, seconds in results:
        assert message.startswith("Rank ")
        assert seconds < 2 * SECONDS
    assert "It has lost the store that the ranks share, and has waited for" in results[1][1]
    assert results[1][2] < SECONDS


class Experts(Net):
    """Each rank uses other layers, of which each is a bucket of its own, and others in every step."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        first = self.global_rank + len(self.losses)
        for number in (first % 6, (first + 2) % 6):
            x = x + self.model[number](x)
        return x


@pytest.mark.timing
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_use_other_layers_do_not_wait_for_memory_of_the_wire(stage: int) -> None:
    """The others give it up only when their backward ends, so that each step with such a wait takes seconds."""

    def train(strategy: Strategy) -> tuple[dict[str, Any], float]:
        module, begin = Experts(), time.monotonic()
        trainer = fit(strategy, module, count=8)
        seconds = time.monotonic() - begin
        return made(module, trainer), seconds

    def both(rank: int) -> tuple[dict[str, dict[str, Any]], float]:
        with quiet():
            expected, _ = train(DDPStrategy(find_unused_parameters=True))
            got, seconds = train(ZeroStrategy(stage=stage, bucket_mib=0.001))  # type: ignore[arg-type]
        return {"ddp": expected, "zero": got}, seconds

    results = run_world(2, both, environment={"LIGHTNING_ZERO_SHARED_MEMORY": "0"})
    assert_same([result for result, _ in results], ["zero"])
    assert max(seconds for _, seconds in results) < 3 * PATIENCE_SECONDS  # of seven steps in which it could be met


@pytest.mark.timing
def test_ranks_that_set_up_are_told_of_one_that_cannot() -> None:
    """They wait for it in the store, where nobody notices that it has ended."""
    results = run_world(2, play, Broken, 3, init_group=False)
    assert results[1][:2] == ("ValueError", "there is no such file here")
    _, message, seconds = results[0]
    assert "rank 1 has failed with ValueError: there is no such file here" in message
    assert "rank 0 has waited" in message
    assert seconds < SECONDS


@pytest.mark.timing
def test_an_error_of_one_rank_is_told_to_those_that_lose_it() -> None:
    def boom(module: Alone) -> None:
        raise ValueError("boom")

    def world(rank: int) -> tuple[str, str, float]:
        result = play(rank, lambda: Alone(boom), 1)
        watch = current_watch()
        assert watch is not None
        for groups in list(_LIVE):  # as at the end of the program
            groups.destroy()
        dist.destroy_process_group()
        watch.end()
        return result

    results = run_world(2, world, init_group=False)
    assert results[0][:2] == ("ValueError", "boom")
    assert results[1][0] == "CommunicationError"
    assert "Rank 0 has failed with ValueError: boom." in results[1][1]
    assert results[1][2] < SECONDS
