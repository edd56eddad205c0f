"""Every way of asking for a strategy, under every launcher: the same ranks, the same samples, the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import HostOffload, ZeroStrategy, full_parameters
from tests.helpers import launched
from tests.helpers.script import run_forked
from tests.helpers.training import quiet
from tests.helpers.world import _reserved_port, rank_environment, run_world, subprocess_env

SCRIPT = str(Path(launched.__file__))
DEADLINE = 150.0
ABORTED = ("terminate called", "Fatal Python error", "Aborted", "Timeout (")

Reports = dict[str, list[dict[str, Any]]]


def forked(ways: Sequence[str], folder: Path, ranks: Sequence[dict[str, str]]) -> Reports:
    """Reports by way, in rank order, of programs that somebody started with these variables."""
    told = run_forked([SCRIPT, str(folder), *ways], cwd=folder, timeout=DEADLINE, ranks=ranks)
    assert not [word for word in ABORTED for output in told if word in output], told
    return {way: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{way}.*.json"))] for way in ways}


def check_two_ranks(reports: Reports, ways: dict[str, int]) -> None:
    """What every launch of two ranks has in common; ``ways`` to the stage they ask for."""
    for way, stage in ways.items():
        ranks = reports[way]
        assert [r["rank"] for r in ranks] == [0, 1], way
        for r in ranks:
            assert (r["strategy"], r["stage"], r["world_size"], r["backend"]) == ("ZeroStrategy", stage, 2, "gloo"), way
            assert r["launcher"] == "_SubprocessScriptLauncher"  # on every rank: it shares out the cores
            assert r["is_distributed"] is True
            assert r["replicas"] == 2  # the Trainer put a DistributedSampler in
            assert r["mean_rank"] == 0.5  # sync_dist averages
            assert r["steps"] == 2  # 12 samples, 2 ranks, batches of 3
        assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(launched.SAMPLES)), way
    assert len({r["weights"] for way in ways for r in reports[way]}) == 1, "ways or ranks ended with other weights"


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def test_own_launcher_and_every_way_to_ask_for_a_strategy(tmp_path: Path) -> None:
    """One command, ``python script.py``: the first Trainer starts the second process, the others find it."""
    ways = {"zero1": 1, "zero2": 2, "zero3": 3, "instance": 2, "yaml-name": 3, "yaml-class": 2}
    reports = forked(list(ways), tmp_path, [{"DEVICES": "2", "NODES": "1", "DEADLINE": str(DEADLINE - 30)}])
    check_two_ranks(reports, ways)
    for rank, report in enumerate(reports["zero1"]):
        assert report["environment"] == "LightningEnvironment"
        assert report["local_rank"] == rank
    assert reports["zero1"][0]["launcher"] == "_SubprocessScriptLauncher"
    for way in ("instance", "yaml-class"):  # bucket_mib=0.001 arrived: several buckets, so the ranks' shares differ
        assert reports[way][0]["shard_numel"] != reports["zero2"][0]["shard_numel"], way


def test_one_node(tmp_path: Path) -> None:
    """What torchrun tells two processes of one; tests/thorough/chaos/test_chaos.py starts torchrun."""
    with _reserved_port() as port:
        common = {"DEVICES": "2", "NODES": "1", "DEADLINE": str(DEADLINE - 30)}
        reports = forked(["zero3"], tmp_path, [{**rank_environment(i, 2, port), **common} for i in (0, 1)])
    check_two_ranks(reports, {"zero3": 3})
    assert [r["environment"] for r in reports["zero3"]] == ["TorchElasticEnvironment"] * 2
    assert [(r["local_rank"], r["node_rank"]) for r in reports["zero3"]] == [(0, 0), (1, 0)]


def test_two_nodes(tmp_path: Path) -> None:
    """What torchrun tells a process on each of two; thorough/examples/test_clusters.py starts torchrun on both."""
    with _reserved_port() as port:
        common = {"DEVICES": "1", "NODES": "2", "DEADLINE": str(DEADLINE - 30)}
        here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        nodes = [{**rank_environment(i, 2, port), **here, "GROUP_RANK": str(i), **common} for i in (0, 1)]
        reports = forked(["zero3", "zero1"], tmp_path, nodes)
    check_two_ranks(reports, {"zero3": 3, "zero1": 1})
    assert [(r["local_rank"], r["node_rank"]) for r in reports["zero3"]] == [(0, 0), (0, 1)]


def test_slurm(tmp_path: Path) -> None:
    """Two tasks as ``srun --ntasks=2`` starts them; the Trainer must not start any."""
    with _reserved_port() as port:
        common = {
            "DEVICES": "2",
            "NODES": "1",
            "DEADLINE": str(DEADLINE - 30),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
        }
        tasks = [{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in (0, 1)]
        reports = forked(["zero3", "zero2"], tmp_path, tasks)
    check_two_ranks(reports, {"zero3": 3, "zero2": 2})
    assert [r["environment"] for r in reports["zero3"]] == ["SLURMEnvironment"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# One process


def test_one_device_is_plain_training_bit_for_bit() -> None:
    def train(strategy: Any) -> tuple[str, list[int], torch.Tensor]:
        torch.manual_seed(3)
        module = launched.Launched()
        # As under DDP a single rank gets a (shuffling) DistributedSampler too; here the samples have to be the same.
        options = {**launched.options(), "use_distributed_sampler": False}
        trainer = pl.Trainer(
            strategy=strategy, gradient_clip_val=0.001, gradient_clip_algorithm="value", max_steps=3, **options
        )
        data = DataLoader(module.train_dataloader().dataset, batch_size=4)
        trainer.fit(module, data)
        context = full_parameters(module) if isinstance(strategy, ZeroStrategy) else contextlib.nullcontext()
        with context:
            return launched.digest(module), module.seen, trainer.callback_metrics["mean_rank"]

    def both(rank: int) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
            del os.environ[name]  # as if nothing had launched this process
        with quiet():
            expected = train(SingleDeviceStrategy(torch.device("cpu")))
            for stage in (1, 2, 3):
                assert train(ZeroStrategy(stage=stage)) == expected, f"stage {stage}"  # type: ignore[arg-type]

    environment = {"DEVICES": "1", "NODES": "1"}
    run_world(1, both, init_group=False, environment=environment)


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def test_names_are_registered_once_and_a_name_that_was_taken_stays_so() -> None:
    before = dict(StrategyRegistry)
    lightning_zero.register_strategies()
    assert dict(StrategyRegistry) == before
    for stage in (1, 2, 3):
        assert StrategyRegistry.get(f"zero{stage}").placement == ZeroStrategy(stage=stage).placement
        offloading = StrategyRegistry.get(f"zero{stage}_offload")
        assert offloading.placement == ZeroStrategy(stage=stage).placement
        assert offloading.offload == HostOffload(parameters=stage == 3)
    try:
        StrategyRegistry.register("zero2", ZeroStrategy, description="somebody's own", override=True, stage=1)
        lightning_zero.register_strategies()
        assert StrategyRegistry["zero2"]["description"] == "somebody's own"
        assert StrategyRegistry["zero2"]["init_params"] == {"stage": 1}
    finally:
        StrategyRegistry["zero2"] = before["zero2"]


INTERACTIVE = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_zero
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for strategy in ("zero3", "zero1"):
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=2, **quiet)
    trainer.fit(BoringModel())
    print("steps", trainer.global_step)
trainer = pl.Trainer(strategy="zero3", accelerator="cpu", devices=2, max_steps=3, **quiet)
trainer.fit(BoringModel())
print("two:", trainer.state.status)

"""


@pytest.mark.thorough
def test_one_process_in_interactive_python() -> None:
    """As in a notebook: two runs one after the other, and then one with processes that are forked."""
    done = subprocess.run(
        [sys.executable, "-i", "-c", INTERACTIVE],
        env=subprocess_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout.count("steps 2") == 2, done.stderr
    assert "two: TrainerStatus.FINISHED" in done.stdout, done.stderr
