"""An exception in the middle of a step ends the run on every rank, and the same Trainer and module go on afterwards."""

from __future__ import annotations

import gc
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from tests.helpers.runs import Net, again, assert_same, batches, each_strategy, made, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Stop(Exception):
    pass


class Fragile(Net):
    """Raises once, at ``place``, in the third step."""

    def __init__(self, place: str, error: type[BaseException] = Stop) -> None:
        super().__init__()
        self.place, self.error, self.armed = place, error, True
        self.model.layers[1].down.register_forward_pre_hook(lambda *_: self.fail("forward"))
        self.model.layers[1].register_forward_hook(self.watch_backward)

    def fail(self, place: str, step: int = 2) -> None:
        if self.armed and place == self.place and self.global_step >= step and not self.trainer.sanity_checking:
            self.armed = False
            raise self.error(place)

    def watch_backward(self, module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.fail("backward"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("before step")

    def on_after_backward(self) -> None:
        self.fail("after backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.fail("zero_grad")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fail("training_step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.fail("validation")


PLACES = ("forward", "training_step", "backward", "after backward", "before step", "zero_grad", "validation")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_new_fit_after_an_exception_trains_as_under_ddp(accumulate: int) -> None:
    places = PLACES if accumulate == 1 else ("forward", "backward", "validation")
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "val_check_interval": 2}

    def broken(strategy: Strategy, place: str) -> dict[str, Any]:
        module = Fragile(place)
        trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, **options)
        with pytest.raises(Stop, match=place):
            trainer.fit(module, batches(6), batches(1))
        assert not trainer.training
        at_exception = made(module, trainer)
        trainer.validate(module, batches(1), verbose=False)
        _start_over(trainer)
        trainer.fit(module, batches(4), batches(1))
        return {"then": at_exception, "end": made(module, trainer)}

    results = each_strategy(lambda strategy: {place: broken(again(strategy), place) for place in places})
    assert_same(results, bound=0 if accumulate == 1 else 1e-5)
    assert_same(results, ["stage 1"])


def _start_over(trainer: pl.Trainer) -> None:
    """Loops from their beginning: whether they go on in mid-epoch is Lightning's business and not tested here."""
    fresh = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit_loop.load_state_dict(fresh.fit_loop.state_dict())


def test_an_interrupt_in_a_unit_and_a_callback_that_looks_at_an_exception() -> None:
    """``on_exception`` of a callback runs before the strategy's; generation and saving states still work there."""

    class Looking(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            pl_module.looked = made(pl_module, trainer)["weights"]
            with torch.no_grad():
                pl_module.sample = pl_module(torch.ones(1, 20))

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Fragile("forward", KeyboardInterrupt)
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[Looking()])
        with pytest.raises(SystemExit):
            trainer.fit(module, batches(4))
        assert trainer.interrupted
        _start_over(trainer)
        trainer.fit(module, batches(4))
        return {"weights": module.looked, "sample": module.sample, **made(module, trainer)}

    assert_same(each_strategy(play))


def test_the_next_model_trains_although_a_rank_was_late_when_the_run_before_failed() -> None:
    """The others had asked for a unit that the late rank sent only after they had failed and dropped the engine."""

    class Late(Fragile):
        def __init__(self) -> None:
            super().__init__("forward")
            self.model.layers[0].down.register_forward_hook(self.wait)

        def wait(self, *_: Any) -> None:
            if self.armed and self.global_step == 2 and dist.get_rank() == 1:
                time.sleep(0.5)

    @quiet()
    def run(rank: int) -> int:
        trainer = make_trainer(zero(3), max_epochs=1)
        with pytest.raises(Stop):
            trainer.fit(Late(), batches(4), batches(1))
        del trainer
        gc.collect()
        trainer, module = make_trainer(zero(3), max_epochs=1), Net()
        trainer.fit(module, batches(4), batches(1))
        return trainer.global_step

    assert run_world(2, run, timeout=30) == [4, 4]
