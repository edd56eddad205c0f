"""The harness itself: results, failures, hangs, deaths, Trainer inside, nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.helpers.world import WorldError, free_port, run_world, subprocess_env


def test_results_come_back_by_value_in_rank_order() -> None:
    offset = 10

    def rank_sum(rank: int, factor: int) -> dict[str, torch.Tensor]:
        total = torch.tensor([float(rank)], requires_grad=True) * factor + offset
        with torch.no_grad():
            dist.all_reduce(total)
        return {"total": total, "pid": os.getpid()}

    results = run_world(3, rank_sum, 2)
    assert [result["total"].item() for result in results] == [2 * (0 + 1 + 2) + 3 * offset] * 3
    assert len({result["pid"] for result in results} | {os.getpid()}) == 4


def test_an_exception_names_its_rank_and_stops_the_waiting_ranks() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            print("last words")
            raise KeyError("seven")
        dist.barrier()

    with pytest.raises(WorldError, match="KeyError: 'seven'") as caught:
        run_world(2, fail)
    assert next(iter(caught.value.failures)) == 1  # the culprit first, its victims after it
    assert "in fail" in caught.value.failures[1].traceback
    assert "last words" in caught.value.failures[1].traceback
    failures = run_world(2, fail, expect_failure=True)
    assert failures[1].type == "KeyError"


@pytest.mark.timing
def test_a_hang_is_killed_at_the_deadline_with_stacks() -> None:
    def hang(rank: int) -> None:
        if rank == 0:
            dist.barrier()
        else:
            time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(2, hang, timeout=2)
    assert time.monotonic() - start < 10
    assert {failure.type for failure in caught.value.failures.values()} == {"Timeout"}
    assert "in hang" in caught.value.failures[0].traceback
    assert "in barrier" in caught.value.failures[0].traceback


def test_a_death_by_signal_is_reported() -> None:
    def die(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    failures = run_world(2, die, init_group=False, expect_failure=True)
    assert failures[0].type == "SIGKILL"
    assert 1 not in failures


def test_expected_failure_that_does_not_come_is_an_error() -> None:
    with pytest.raises(AssertionError, match="all 1 ranks returned"):
        run_world(1, lambda rank: None, init_group=False, expect_failure=True)


def test_skip_in_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_world(1, lambda rank: pytest.skip("not today"), init_group=False)


@pytest.mark.parametrize("init_group", [False, True])
def test_a_trainer_joins_the_world(init_group: bool) -> None:
    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            self.seen = (self.global_rank, self.trainer.world_size, dist.get_backend())
            return super().training_step(batch, batch_idx)

    def fit(rank: int) -> tuple[object, ...]:
        pl.seed_everything(1)
        model = Model()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=2,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            barebones=False,
        )
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model)
        return *model.seen, torch.cat([parameter.flatten() for parameter in model.parameters()])

    results = run_world(2, fit, init_group=init_group)
    assert [result[:3] for result in results] == [(0, 2, "gloo"), (1, 2, "gloo")]
    assert torch.equal(results[0][3], results[1][3])


def test_subprocess_environment_has_no_trace_of_a_world() -> None:
    def variables(rank: int) -> dict[str, str]:
        return subprocess_env(EXTRA="1")

    (environment,) = run_world(1, variables)
    assert environment["EXTRA"] == "1"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST"} & environment.keys()


def test_free_port_is_a_port() -> None:
    assert 1024 <= free_port() < 65536
