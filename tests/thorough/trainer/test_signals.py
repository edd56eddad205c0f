"""A rank that gets a signal."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
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

from tests.helpers.runs import Net, batches, fit, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Asked(Net):
    """Rank 1 gets signals in steps, such as in `t2` of training and `v0` of validation, counted over the run."""

    def __init__(self, **asked: Sequence[int]) -> None:
        super().__init__()
        self.asked, self.counts, self.told = asked, Counter[str](), list[str]()

    def note(self, place: str) -> None:
        self.told.append(f"{place}{self.counts[place]}")
        self.counts[place] += 1
        for signum in self.asked.get(self.told[-1], ()) if self.global_rank == 1 else ():
            os.kill(os.getpid(), signum)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("t")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("v")
        super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings(r"ignore:.*\.fit\(ckpt_path=")  # a trainer with this callback looks for checkpoints
@pytest.mark.parametrize(("place", "accumulated", "ended"), [("t2", 1, 3), ("t3", 3, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_end_at_the_same_step_where_one_is_asked_to(
    stage: int, place: str, accumulated: int, ended: int, tmp_path: Path
) -> None:
    """With a checkpoint of it, from which the run goes on as if nothing had been. No accumulated gradient is lost."""

    def world(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        module, options = Asked(**{place: [signal.SIGTERM]}), {"accumulate_grad_batches": accumulated}
        end = OnExceptionCheckpoint(tmp_path)
        trainer = make_trainer(zero(stage), callbacks=[end], enable_checkpointing=True, **options)
        with quiet(), pytest.raises(SIGTERMException):
            trainer.fit(module, batches(9))
        steps = trainer.global_step
        dist.barrier()
        resumed, whole = Net(), Net()
        with quiet():
            make_trainer(zero(stage), **options).fit(resumed, batches(9), ckpt_path=tmp_path / "on_exception.ckpt")
            make_trainer(zero(stage), **options).fit(whole, batches(9))
        return steps, [*module.losses, *resumed.losses], whole.losses

    for steps, losses, whole in run_world(2, world):
        assert steps == ended
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


def slurm_trainer(rank: int, stage: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> pl.Trainer:
    """Under a Slurm that notes in a file what it is asked for."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    (commands / f"scontrol{rank}").write_text(f"#!/bin/sh\necho $* >> {folder}/asked\n")
    (commands / f"scontrol{rank}").chmod(0o755)
    (commands / f"scontrol{rank}").rename(commands / "scontrol")
    variables = {"JOB_ID": 123, "PROCID": rank, "LOCALID": rank, "NTASKS": 2, "NTASKS_PER_NODE": 2, "NODEID": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    plugins = [SLURMEnvironment(requeue_signal=signal.SIGUSR1)]
    return make_trainer(zero(stage), default_root_dir=folder, plugins=plugins, **options)


@pytest.mark.parametrize("late", [2, 3, 99])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_slurm_has_saved_is_one_step_of_all_ranks(
    stage: int, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and the run goes on from it as if nothing had been."""

    def world(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        module, resumed, whole = Requeued(late), Net(), Net()
        with quiet():
            slurm_trainer(rank, stage, tmp_path, monkeypatch).fit(module, batches(6))
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
        strategy, module = zero(3), Asked(t2=[signal.SIGTERM])
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


@pytest.mark.parametrize("counts", [(3, 3), (1, 3)])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_signal_is_heard_in_validation(stage: int, counts: tuple[int, int]) -> None:
    """Also by ranks whose own data have ended."""

    def world(rank: int) -> list[str]:
        module = Asked(v0=[signal.SIGTERM])
        with quiet(), pytest.raises(SIGTERMException):
            make_trainer(zero(stage), num_sanity_val_steps=0).fit(module, batches(2), batches(counts[rank]))
        return module.told

    for rank, told in enumerate(run_world(2, world)):
        assert told[: 2 + rank] == ["t0", "t1", "v0"][: 2 + rank]
        assert len(told) <= 4  # the one after was asked for before rank 1 was


@pytest.mark.parametrize("place", ["t1", "t5", "v2"])
@pytest.mark.parametrize("stage", [1, 3])
def test_slurm_saves_before_it_ends_a_run(
    stage: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both signals come at once; in the midst, in the last step, and in the last batch of all."""

    def world(rank: int) -> None:
        signals = [signal.SIGUSR1] if place == "v2" else [signal.SIGUSR1, signal.SIGTERM]
        module = Asked(**{place: signals})
        trainer = slurm_trainer(rank, stage, tmp_path, monkeypatch, num_sanity_val_steps=0)
        with quiet(), pytest.raises(SIGTERMException) if place == "t1" else suppress(SIGTERMException):
            trainer.fit(module, batches(6), batches(3))

    run_world(2, world)
    assert (tmp_path / "asked").read_text() == "requeue 123\n"
    assert list(tmp_path.glob("hpc_ckpt_1.ckpt"))
