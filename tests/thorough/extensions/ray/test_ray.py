"""Ray Train: its workers train as with its own DDP strategy, and go on from our checkpoints when one of them has died.

What needs Ray runs as a program. The rest stands in for it: somebody else starts the processes, and counts them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment

from lightning_zero import ZeroStrategy
from lightning_zero.ray import RayZeroStrategy
from tests.helpers.script import run_script
from tests.helpers.training import quiet
from tests.helpers.world import run_world
from tests.thorough.extensions.ray import ray_program
from tests.thorough.extensions.ray.ray_program import EPOCHS, SAMPLES, Net, report, trainer_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
SECONDS = 250.0  # it takes 80, most of them until the workers have started


class Counted(LightningEnvironment):
    """As ``RayLightningEnvironment``: what a Trainer in one of the processes says of their number does not matter."""

    creates_processes_externally = True

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def teardown(self) -> None:
        pass


def trained(rank: int, strategy: Any, devices: int | str, environment: ClusterEnvironment) -> dict[str, Any]:
    trainer, module = trainer_of(strategy, environment, devices), Net()
    with quiet():
        trainer.fit(module)
    return report(trainer, module)


def check(ranks: list[dict[str, Any]]) -> None:
    """Both ranks took part, and each saw its half of the samples."""
    assert [(r["world_size"], r["rank"]) for r in ranks] == [(2, 0), (2, 1)]
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == sorted([*range(SAMPLES)] * EPOCHS)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "start_method": "spawn"}], ids=str)
def test_an_environment_that_counts_the_processes_itself(options: dict[str, Any]) -> None:
    oracle = run_world(2, trained, "ddp", 2, LightningEnvironment(), init_group=False)
    check(oracle)
    assert run_world(2, trained, ZeroStrategy(**options), "auto", Counted(), init_group=False) == oracle


def test_a_process_for_which_no_device_was_asked() -> None:
    """Two processes by hand, or in Ray without its environment, and a Trainer that knows of one."""
    failures = run_world(2, trained, "zero3", 1, LightningEnvironment(), init_group=False, expect_failure=True)
    assert "has local rank 1, but devices=1" in failures[1].message
    assert "RayZeroStrategy" in failures[1].message


def test_other_numbers_than_were_started() -> None:
    """Who asks for several devices says how many processes there have to be, whoever counts them."""
    failures = run_world(2, trained, "zero3", 4, Counted(), init_group=False, expect_failure=True)
    assert "has 2 ranks, but devices=4 and num_nodes=1 ask for 4" in failures[0].message


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="the extra `ray` is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-zero\[ray\]'"):
        RayZeroStrategy()


def ran(folder: Path, way: str) -> list[dict[str, Any]]:
    """What the two workers of Ray found."""
    run_script([ray_program.__file__, str(folder), way], cwd=folder, timeout=SECONDS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@needs_ray
@pytest.mark.timeout(2 * SECONDS)
def test_ray_has_the_weights_of_its_own_strategy(tmp_path: Path) -> None:
    found = ran(tmp_path, "parity")
    check([rank["ddp"] for rank in found])
    for rank in found:
        for way in ("zero1", "zero3", "plain"):
            assert rank[way] == rank["ddp"], way
        assert "RayTrainReportCallback reports" in rank["async"]
        assert "devices=1" in rank["no environment"]
        assert "lightning_zero.ray.RayZeroStrategy" in rank["no environment"]


@needs_ray
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("way", ["directory", "reported"])
def test_ray_goes_on_when_a_worker_has_died(way: str, tmp_path: Path) -> None:
    """From what ModelCheckpoint has saved in a shared folder, and from what Ray's callback has reported."""
    whole = run_world(2, trained, "zero3", 2, LightningEnvironment(), init_group=False)
    found = ran(tmp_path, way)
    assert (tmp_path / "killed").exists()
    for rank, other in zip(found, whole, strict=True):
        assert rank.pop("begun") == 4  # the worker died in the second of three epochs
        assert rank.pop("seen") == other.pop("seen")[12:]
    assert found == whole
