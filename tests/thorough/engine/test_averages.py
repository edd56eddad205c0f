"""Lightning's callbacks that average weights, in every stage and precision, against DDP's numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_zero import AdamW8bit, HostOffload, NvmeOffload
from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import WIDTH, Block
from tests.helpers.runs import (
    STAGES,
    Net,
    again,
    assert_same,
    batches,
    each_strategy,
    fit,
    made,
    quiet,
    values_of,
    zero,
)
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Normed(nn.Module):
    """Running statistics, a tied weight, a frozen layer, an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.block = Block()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.block(self.norm(self.first(x)))))


class EveryOther(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


class InEightBits(Net):
    def configure_optimizers(self) -> Any:
        return AdamW8bit(super().configure_optimizers().param_groups, lr=0.01, min_8bit_size=65)


MADE: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "ema without buffers": lambda: EMAWeightAveraging(decay=0.9, use_buffers=False, update_starting_at_step=2),
    "plain": WeightAveraging,
    "foreach": lambda: EveryOther(multi_avg_fn=get_ema_multi_avg_fn(0.8)),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1),
    "swa of two epochs": lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2),
}
OPTIONS: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2, "num_sanity_val_steps": 1}


PRECISIONS = ("bf16-true", "64-true")


def test_averages_are_those_of_ddp() -> None:
    """Losses, what was validated with (the average), and what is left in the module; also in a second fit.

    An average keeps the dtype in which Lightning copied the module before the precision cast it: a small decay would be
    lost in bfloat16.
    """

    def play(strategy: Strategy) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, make in MADE.items():
            module = Net(Normed)
            found[name] = made(module, fit(again(strategy), module, 4, val=1, callbacks=[make()], **OPTIONS))
        found["second fit"] = made(module, fit(again(strategy), module, 3, val=1, callbacks=[MADE["ema"]()]))
        for precision in PRECISIONS:
            module, average = Net(Normed), EMAWeightAveraging(decay=0.99)
            found[precision] = made(module, fit(again(strategy), module, 4, callbacks=[average], precision=precision))
        eight = InEightBits(Normed)
        found["8 bits"] = made(eight, fit(again(strategy), eight, 4, val=1, callbacks=[MADE["ema"]()], **OPTIONS))
        return found

    assert_same(each_strategy(play))


class Expected(Callback):
    """The average of ``EMAWeightAveraging``, of whole parameters in float32."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.function: Any = get_ema_avg_fn(0.9)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in parameters_of(pl_module).items():
            if trainer.global_step == 1:
                self.average[name] = value
            else:
                self.average[name] = self.function(self.average[name], value, torch.tensor(1)).to(value.dtype)


def test_averages_are_of_the_masters_in_mixed_precision() -> None:
    def play(rank: int) -> list[tuple[str, str, bool]]:
        found = []
        for stage in STAGES.values():
            expected, module = Expected(), Net(Normed)
            with quiet():
                options = {"precision": "bf16-mixed", "val_check_interval": 2}
                fit(zero(stage), module, 4, val=1, callbacks=[expected, MADE["ema"]()], **options)
            for name, value in parameters_of(module).items():
                found.append((f"stage {stage}", name, torch.equal(value, expected.average[name])))
        return found

    for rows in run_world(2, play):
        assert all(same for *_, same in rows), rows


@pytest.mark.parametrize("name", ["ema", "swa", "swa of two epochs"])
def test_a_run_with_an_average_resumes_in_any_stage(name: str, tmp_path: Path) -> None:
    """Saved after two epochs of three under DDP and each stage, and resumed in another stage: the same numbers."""

    def play(rank: int) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        saves = {"ddp": DDPStrategy(find_unused_parameters=True), **{n: zero(s) for n, s in STAGES.items()}}
        with quiet():
            for saved, strategy in saves.items():
                module = Net(Normed)
                trainer = make_trainer(strategy, callbacks=[MADE[name](), Save(tmp_path / saved)], **OPTIONS)
                trainer.fit(module, batches(4), batches(1))
                results[saved] = made(module, trainer)
            for saved, loaded in (("stage 3", 1), ("stage 1", 3), ("stage 2", 2), ("stage 3", 3), ("ddp", 3)):
                module = Net(Normed)
                trainer = make_trainer(zero(loaded), callbacks=[MADE[name]()], **OPTIONS)
                trainer.fit(module, batches(4), batches(1), ckpt_path=str(tmp_path / saved))
                results[f"{saved} in {loaded}"] = made(module, trainer)
        for result in results.values():
            result["losses"] = result["losses"][-4:]
        return results

    results = run_world(2, play, timeout=300)
    names = [key for key in results[0] if key != "ddp"]
    assert_same(results, names)


class Save(Callback):
    """Saves where the second epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_averages_with_offload(kind: str, tmp_path: Path) -> None:
    def play(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        with quiet():
            for name in ("none", kind):
                offload = {"none": None, "host": HostOffload(), "nvme": NvmeOffload(path=tmp_path)}[name]
                module = Net(Normed)
                trainer = fit(zero(3, offload=offload), module, 4, val=1, callbacks=[MADE["ema"]()], **OPTIONS)
                results[name] = made(module, trainer)
        return results

    assert_same(run_world(2, play), [kind], expected="none")


def own(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return torch.lerp(average, current, 0.1)


def test_an_averaging_function_of_one_s_own_is_refused_where_it_would_get_slices() -> None:
    swa = partial(StochasticWeightAveraging, swa_lrs=0.01, avg_fn=own)
    foreach = partial(EveryOther, multi_avg_fn=lambda averages, values, count: None)

    def play(rank: int) -> None:
        for make in (partial(EveryOther, avg_fn=own), foreach, swa):
            for strategy, options in ((zero(3), {}), (zero(1), {"precision": "bf16-mixed"})):
                with (
                    quiet(),
                    pytest.raises(ParameterAccessError, match=r"averaging function of .*lightning_zero\.local_slices"),
                ):
                    fit(strategy, Net(Normed), 3, callbacks=[make()], **options)
        with quiet():
            fit(zero(1), Net(Normed), 3, callbacks=[EveryOther(use_buffers=False, avg_fn=own)])

    run_world(2, play)


def test_an_average_takes_a_share_of_memory() -> None:
    def play(rank: int) -> tuple[int, int]:
        callback = MADE["ema"]()
        module = Net(Normed)
        with quiet():
            fit(zero(3), module, 2, callbacks=[callback])
        held = sum(p.numel() for p in callback._average_model.parameters())
        return held, sum(p.numel() for p in module.parameters())

    for held, whole in run_world(2, play):
        assert held <= whole / 2 + 64 * 8  # alignment


def parameters_of(module: LightningModule) -> dict[str, Tensor]:
    """Whole masters. Collective."""
    names = dict(module.named_parameters())
    return {name: value for name, value in values_of(module).items() if name in names}
