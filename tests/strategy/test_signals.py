"""A rank that gets a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tests.helpers.training import make_trainer
from tests.helpers.world import run_world
from tests.strategy.runs import Net, batches, fit, quiet, zero


class Terminated(Net):
    """Rank 1 is asked to end in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(r"ignore:.*\.fit\(ckpt_path=")  # a trainer with this callback looks for checkpoints
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_end_at_the_same_step_where_one_is_asked_to(stage: int, tmp_path: Path) -> None:
    """With a checkpoint of it, from which the run goes on as if nothing had been."""

    def world(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        module = Terminated()
        trainer = make_trainer(zero(stage), callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
        with quiet(), pytest.raises(SIGTERMException):
            trainer.fit(module, batches(6))
        steps = trainer.global_step
        dist.barrier()
        resumed, whole = Net(), Net()
        with quiet():
            make_trainer(zero(stage)).fit(resumed, batches(6), ckpt_path=tmp_path / "on_exception.ckpt")
            fit(zero(stage), whole, 6)
        return steps, [*module.losses, *resumed.losses], whole.losses

    for steps, losses, whole in run_world(2, world):
        assert steps == 3
        assert len(losses) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(losses, whole, strict=True))


def test_one_process_is_ended_as_ever() -> None:
    def world(rank: int) -> int:
        class Alone(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                if batch_idx == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().training_step(batch, batch_idx)

        trainer: pl.Trainer = make_trainer(zero(3))
        with quiet(), pytest.raises(SIGTERMException):
            trainer.fit(Alone(), batches(6))
        return trainer.global_step

    assert run_world(1, world) == [3]


class Requeued(Net):
    """Rank 1 is told in the middle of its third step, and rank 0 in a later one, or never."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == (2 if self.global_rank == 1 else self.late):
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss


@pytest.mark.parametrize("late", [2, 3, 99])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_slurm_has_saved_is_one_step_of_all_ranks(
    stage: int, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and the run goes on from it as if nothing had been."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "scontrol").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def world(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        monkeypatch.setenv("SLURM_JOB_ID", "123")
        for name, value in {"PROCID": rank, "LOCALID": rank, "NTASKS": 2, "NTASKS_PER_NODE": 2, "NODEID": 0}.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        module, resumed, whole = Requeued(late), Net(), Net()
        options = {"default_root_dir": tmp_path, "plugins": [SLURMEnvironment(requeue_signal=signal.SIGUSR1)]}
        with quiet():
            make_trainer(zero(stage), **options).fit(module, batches(6))
            dist.barrier()
            trainer = make_trainer(zero(stage), default_root_dir=tmp_path)
            trainer.fit(resumed, batches(6))
            fit(zero(stage), whole, 6)
        assert all(torch.equal(a, b) for a, b in zip(module.losses, whole.losses, strict=True))
        saved = 6 - len(resumed.losses)
        assert trainer.global_step == 6
        return saved, resumed.losses, whole.losses[saved:]

    for saved, losses, whole in run_world(2, world):
        assert saved == 3
        assert all(torch.equal(a, b) for a, b in zip(losses, whole, strict=True))
    assert (tmp_path / "asked").read_text() == "requeue 123\n"


def test_a_second_fit_is_not_ended_by_the_signal_of_the_first() -> None:
    def world(rank: int) -> int:
        strategy, module = zero(3), Terminated()
        trainer = make_trainer(strategy)
        with quiet():
            with pytest.raises(SIGTERMException):
                trainer.fit(module, batches(6))
            trainer.fit(Net(), batches(4))
        return trainer.global_step

    assert run_world(2, world) == [7, 7]


def test_who_is_asked_before_the_first_step_ends_with_the_others() -> None:
    class Early(Net):
        asked = False

        def on_validation_batch_end(self, *args: Any) -> None:
            if self.global_rank == 1 and not self.asked:
                self.asked = True
                os.kill(os.getpid(), signal.SIGTERM)

    def world(rank: int) -> int:
        trainer = make_trainer(zero(3), num_sanity_val_steps=2)
        with quiet(), pytest.raises(SIGTERMException):
            trainer.fit(Early(), batches(6), batches(2))
        return trainer.global_step

    assert run_world(2, world) == [1, 1]
