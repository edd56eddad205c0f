"""Our checkpoints under other strategies and tools, theirs under ours: the same bits, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)

from lightning_zero import AdamW8bit, CheckpointPolicy, HostOffload
from tests.helpers.resumed import Everything, run
from tests.helpers.runs import STAGES, _differences, batches, quiet, silent, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

BOUND = 1e-5  # sums over the ranks in another order


class Portable(Everything):
    """What ``fully_shard`` takes, wrapped by it where Lightning's strategy wants the user to."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(odder=False, seed=seed)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)


def fsdp2() -> ModelParallelStrategy:
    """Lightning's strategy over all ranks of this world."""
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def compare(
    expected: list[dict[str, Any]], result: dict[str, Any], rank: int, at: str, bound: float = BOUND
) -> list[str]:
    """The restored state bitwise; what follows bitwise at the same world size, within rounding at others."""
    same = dist.get_world_size() == len(expected)
    wrong = _differences(expected[0]["at"], result["at"], 0.0, f"{at}: restored")
    if same:
        wrong += _differences(expected[rank]["losses"], result["losses"], 0.0, f"{at}: losses")
    return wrong + _differences(expected[0]["end"], result["end"], 0.0 if same else bound, f"{at}: at the end")


class EightBit(Portable):
    """State of matrices in blocks of 8-bit codes, each block with a scale; of the rest in full."""

    def configure_optimizers(self) -> Any:
        return AdamW8bit(self.groups(), lr=0.01, min_8bit_size=100)


class Plain(Portable):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.groups(), lr=0.01)


def resume_everywhere(
    path: Path, expected: list[dict[str, Any]], worlds: tuple[int, ...] = (1, 2, 3), make: type[Portable] = Portable
) -> None:
    """Resume under every stage at some worlds, and compare."""

    def resume(rank: int) -> list[str]:
        wrong = []
        for name, stage in STAGES.items():
            with quiet():
                result = run(zero(stage), make(seed=5), resume=path, keeper=False)
            wrong += compare(expected, result, rank, name, BOUNDS[make])
        return wrong

    for world in worlds:
        for wrong in run_world(world, resume):
            assert not wrong, f"world {world}: " + "\n".join(wrong[:10])


BOUNDS = {Portable: BOUND, EightBit: 1e-2}  # a sum that rounds otherwise may have the next code


def save_under(
    strategy: Callable[[], Any], path: Path, world: int = 2, make: type[Portable] = Portable
) -> list[dict[str, Any]]:
    """A run that saves in mid-epoch, by rank."""

    def save(rank: int) -> dict[str, Any]:
        with quiet():
            return run(strategy(), make(), save=path, keeper=False)

    return run_world(world, save)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of stage 3 at world 2, and its run."""
    path = tmp_path_factory.mktemp("ours") / "step=3.ckpt"
    return path, save_under(lambda: zero(3), path)


# ---------------------------------------------------------------------------------------------------------------------
# Theirs, here


def test_a_checkpoint_of_model_parallel_strategy_goes_on_here(tmp_path: Path) -> None:
    resume_everywhere(tmp_path / "theirs", save_under(fsdp2, tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["ddp", "single device"])
def test_an_ordinary_file_with_its_optimizer_goes_on_here(kind: str, tmp_path: Path) -> None:
    """The optimizer numbers its parameters there."""
    strategy, world = (DDPStrategy, 2) if kind == "ddp" else ((lambda: "auto"), 1)
    resume_everywhere(tmp_path / "plain.ckpt", save_under(strategy, tmp_path / "plain.ckpt", world), (1, 2, 3))


def test_a_directory_in_the_layout_of_fsdp_strategy_goes_on_here(ours: Any, tmp_path: Path) -> None:
    """FSDP1 on the CPU, saved as FSDPStrategy does; that strategy itself needs CUDA."""
    path, expected = ours

    @silent
    def save(rank: int) -> dict[str, Any]:
        module = Portable()
        weights = expected[0]["at"]["weights"]
        module.load_state_dict({**weights, "head.weight": weights["stem.weight"]})
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [{**group, "params": [names[p] for p in group["params"]]} for group in module.groups()]
        wrapped = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        parameters = dict(module.named_parameters())  # of one dimension now
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        torch.manual_seed(3 + rank)
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.numel():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(
            wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        ):
            content = {
                "model": wrapped.state_dict(),
                "optimizer_0": FullyShardedDataParallel.optim_state_dict(wrapped, optimizer),
            }
            dcp.save(content, checkpoint_id=tmp_path / "fsdp")
        if rank == 0:
            torch.save(torch.load(path / "meta.pt", weights_only=True), tmp_path / "fsdp" / "meta.pt")
        with FullyShardedDataParallel.summon_full_params(wrapped):
            found = {name: value.detach().clone() for name, value in module.named_parameters()}
        return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()}

    weights = run_world(2, save)[0]
    moments = torch.load(_as_file(tmp_path / "fsdp", tmp_path / "fsdp.pt"), weights_only=False)["optimizer_0"]["state"]

    def resume(rank: int, stage: int) -> dict[str, Any]:
        with quiet():
            return run(zero(stage), Portable(seed=5), resume=tmp_path / "fsdp", keeper=False)

    for world, stage in ((2, 3), (3, 1)):
        for result in run_world(world, resume, stage):
            found = {name: value for name, value in result["at"]["weights"].items() if name in weights}
            assert not _differences(weights, found, 0.0, "weights")
            states = {f"0 {name} {key}": v for name, state in moments.items() for key, v in state.items()}
            assert not _differences(states, result["at"]["states"], 0.0, "states")
            assert result["at"]["progress"] == expected[0]["at"]["progress"]


@silent
def _as_file(directory: Path, file: Path) -> Path:
    dcp_to_torch_save(directory, file)
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Ours, there


@pytest.mark.parametrize("world", [1, 2, 3])
def test_our_checkpoint_goes_on_under_model_parallel_strategy(world: int, ours: Any) -> None:
    path, expected = ours

    def resume(rank: int) -> list[str]:
        with quiet():
            result = run(fsdp2(), Portable(seed=5), resume=path, keeper=False)
        return compare(expected, result, rank, "model parallel")

    for wrong in run_world(world, resume):
        assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize("kind", ["ddp", "single device"])
def test_our_consolidated_file_goes_on_elsewhere(kind: str, tmp_path: Path) -> None:
    """Saved by a sharded run; the optimizer numbers its parameters again."""
    policy = CheckpointPolicy(format="consolidated")
    expected = save_under(lambda: zero(3, checkpoint=policy), tmp_path / "whole.ckpt")
    strategy, world = (DDPStrategy, 2) if kind == "ddp" else ((lambda: "auto"), 1)

    def resume(rank: int) -> list[str]:
        with quiet():
            result = run(strategy(), Portable(seed=5), resume=tmp_path / "whole.ckpt", keeper=False)
        return compare(expected, result, rank, kind)

    for wrong in run_world(world, resume):
        assert not wrong, "\n".join(wrong[:10])


def test_state_in_8_bits_goes_from_any_world_stage_and_file_to_any_other(tmp_path: Path) -> None:
    """Codes and scales bit for bit: of DDP's file here, of our directory here, of our file under DDP and alone."""
    theirs = save_under(DDPStrategy, tmp_path / "ddp.ckpt", make=EightBit)
    resume_everywhere(tmp_path / "ddp.ckpt", theirs, (2, 3), EightBit)
    keys = {name.rsplit(" ", 1)[1] for name in theirs[0]["at"]["states"]}
    assert keys >= {"exp_avg", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"}
    ours = save_under(lambda: zero(3, offload=HostOffload()), tmp_path / "ours", 3, EightBit)
    resume_everywhere(tmp_path / "ours", ours, (1, 2, 3), EightBit)
    file = CheckpointPolicy(format="consolidated")
    whole = save_under(lambda: zero(2, checkpoint=file), tmp_path / "whole.ckpt", 2, EightBit)

    def resume(rank: int, strategy: Any) -> list[str]:
        with quiet():
            result = run(strategy(), EightBit(seed=5), resume=tmp_path / "whole.ckpt", keeper=False)
            if isinstance(strategy(), DDPStrategy):
                # SGD would go on without any of it.
                with pytest.raises(ValueError, match=r"does not fit SGD: '[^']*' \(exp_avg_scales of shape"):
                    run(zero(2), Plain(seed=5), resume=tmp_path / "whole.ckpt", keeper=False)
        return compare(whole, result, rank, "elsewhere", BOUNDS[EightBit])

    for strategy, world in ((DDPStrategy, 2), ((lambda: "auto"), 1)):
        for wrong in run_world(world, resume, strategy):
            assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize("reader", ["dcp_to_torch_save", "fabric"])
def test_their_consolidation_reads_our_checkpoint(reader: str, ours: Any, tmp_path: Path) -> None:
    path, expected = ours
    if reader == "fabric":
        found = silent(_load_distributed_checkpoint)(path)
    else:
        found = torch.load(_as_file(path, tmp_path / "whole.pt"), weights_only=True)
    assert_holds(found["state_dict"], found["optimizer_0"], expected[0]["at"])


def test_plain_dcp_load_fills_ordinary_tensors_from_our_checkpoint(ours: Any) -> None:
    path, expected = ours
    module = Portable(seed=5)
    optimizer = torch.optim.AdamW(module.groups())
    states = {
        name: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [{**g, "initial_lr": 0.0, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    content = {"state_dict": module.state_dict(), "optimizer_0": {"state": states, "param_groups": groups}}
    silent(dcp.load)(content, checkpoint_id=path)
    assert_holds(content["state_dict"], content["optimizer_0"], expected[0]["at"])


def assert_holds(weights: dict[str, Any], optimizer: dict[str, Any], at: dict[str, Any]) -> None:
    """Weights, moments and options are those of a snapshot, bit for bit; the tied weight has both its names."""
    assert not _differences({**at["weights"], "head.weight": at["weights"]["stem.weight"]}, dict(weights), 0.0, "")
    states = {f"0 {name} {key}": v for name, state in optimizer["state"].items() for key, v in state.items()}
    assert not _differences(at["states"], states, 0.0, "states")
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
    assert options == at["options"][0]
    assert "frozen.weight" in optimizer["param_groups"][0]["params"]


# ---------------------------------------------------------------------------------------------------------------------
# Other precisions


def test_moments_of_a_16_bit_run_follow_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """As torch's own optimizers do when they load; ours keep fp32 masters."""

    def save(rank: int) -> dict[str, Any]:
        with quiet():
            return run("auto", Portable(), save=tmp_path / "half.ckpt", keeper=False, precision="bf16-true")

    def resume(rank: int) -> dict[str, Any]:
        with quiet():
            return run(zero(3), Portable(seed=5), resume=tmp_path / "half.ckpt", keeper=False)

    (saved,) = run_world(1, save)
    moments = {name: value for name, value in saved["at"]["states"].items() if not name.endswith("step")}
    assert {value.dtype for value in moments.values()} == {torch.bfloat16}
    for result in run_world(2, resume):
        for name, value in moments.items():
            assert result["at"]["states"][name].dtype == torch.float32
            assert torch.equal(result["at"]["states"][name], value.float()), name
        assert {value.dtype for value in result["at"]["weights"].values()} == {torch.float32}


def test_numbered_state_of_other_param_groups_is_refused(tmp_path: Path) -> None:
    class OneGroup(Portable):
        def groups(self) -> list[dict[str, Any]]:
            return [{"params": list(self.parameters())}]

    def save(rank: int) -> None:
        with quiet():
            run("auto", Portable(), save=tmp_path / "plain.ckpt", keeper=False)

    def resume(rank: int) -> None:
        trainer = make_trainer(zero(3), max_epochs=3)
        with quiet(), pytest.raises(ValueError, match=r"in param groups of \[\d+, \d+\] parameters, but AdamW has"):
            trainer.fit(OneGroup(), batches(2), ckpt_path=tmp_path / "plain.ckpt")

    run_world(1, save)
    run_world(2, resume)
