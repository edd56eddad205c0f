"""Our sharded directories under Lightning's FSDPStrategy."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _get_sharded_state_dict_context
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_zero.checkpoint import consolidate_checkpoint, open_checkpoint, save_checkpoint_directory
from lightning_zero.cli import main
from lightning_zero.errors import CheckpointError
from tests.checkpoint.samples import checkpoint, control, end_to_end, parameters, verify
from tests.helpers.world import run_world
from tests.strategy.resumed import run
from tests.strategy.runs import _differences, quiet, silent, zero
from tests.strategy.test_portable import Portable


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of our directories with every kind of shape and value."""
    path = tmp_path_factory.mktemp("relabel") / "ours"

    def rank(_: int) -> None:
        ranks = control()
        save_checkpoint_directory(checkpoint(7, end_to_end, ranks), path, ranks, plan_summary={})

    run_world(2, rank, timeout=30)
    return path


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A directory as Lightning's ModelParallelStrategy writes it."""
    path = tmp_path / "stock"
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    silent(dcp.save)({"state_dict": state, "optimizer_0": {"param_groups": [{"lr": 0.1}]}}, checkpoint_id=path)
    torch.save({"epoch": 1}, path / "meta.pt")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def export(source: Path, out: Path, **options: Any) -> Path:
    """Make a directory for FSDPStrategy; the source stays what it is, and nothing is left beside it."""
    before, beside = contents(source), {*os.listdir(out.parent), out.name}
    assert consolidate_checkpoint(source, out, format="fsdp", progress=False, **options) == [out]
    assert contents(source) == before
    assert set(os.listdir(out.parent)) == beside
    return out


def refused(source: Path, out: Path, kind: type[Exception], match: str, **options: Any) -> None:
    """It is an error that says what, and leaves nothing."""
    beside = sorted(os.listdir(out.parent))
    with pytest.raises(kind, match=match):
        consolidate_checkpoint(source, out, format="fsdp", progress=False, **options)
    assert sorted(os.listdir(out.parent)) == beside


def data_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


# ---------------------------------------------------------------------------------------------------------------------
# What it is good for


def test_fsdp_strategy_goes_on_with_our_weights_and_moments(tmp_path: Path) -> None:
    """The calls of ``FSDPStrategy.load_checkpoint`` on the CPU; that strategy itself needs CUDA."""

    def save(rank: int) -> dict[str, Any]:
        with quiet():
            return run(zero(3), Portable(), save=tmp_path / "ours", keeper=False, epochs=2)

    expected = run_world(2, save)[0]["at"]
    out = export(tmp_path / "ours", tmp_path / "theirs.ckpt")

    @silent
    def load(rank: int) -> tuple[Any, ...]:
        module = Portable(seed=5)
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [{**group, "params": [names[p] for p in group["params"]]} for group in module.groups()]
        model = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        now = dict(module.named_parameters())
        optimizer = torch.optim.AdamW(
            [{**group, "params": [now[name] for name in group["params"]]} for group in groups], lr=1.0
        )
        with _get_sharded_state_dict_context(model):
            state = {"model": model.state_dict()}
            _distributed_checkpoint_load(state, out)
            model.load_state_dict(state["model"], strict=True)
            found = load_sharded_optimizer_state_dict(state["model"], "optimizer_0", dcp.FileSystemReader(out))
            found = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found["optimizer_0"])
            optimizer.load_state_dict(found)
            held = {"optimizer_0": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
            dcp.save(held, checkpoint_id=tmp_path / "held")
        meta = torch.load(out / "meta.pt", weights_only=True)
        with FullyShardedDataParallel.summon_full_params(model):
            weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            weights = {name.replace("_fsdp_wrapped_module.", ""): v.detach().clone() for name, v in weights.items()}
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return weights, options, meta["global_step"]

    for weights, options, step in run_world(2, load, timeout=60):
        assert not _differences(expected["weights"], weights, 0.0, "weights")
        assert options == expected["options"][0]
        assert step == expected["progress"][0]
    silent(dcp_to_torch_save)(tmp_path / "held", tmp_path / "held.pt")
    held = torch.load(tmp_path / "held.pt", weights_only=True)["optimizer_0"]["state"]
    states = {f"0 {name} {key}": value for name, state in held.items() for key, value in state.items()}
    assert not _differences(expected["states"], states, 0.0, "states")


def test_every_kind_of_tensor_and_value_is_there(source: Path, tmp_path: Path) -> None:
    out = export(source, tmp_path / "out")
    assert not (out / "zero.json").exists()
    verify(open_checkpoint(out, control()), 7, end_to_end, control())
    wanted = {"model": {name: torch.ones_like(value) for name, value in parameters(7).items()}}
    silent(dcp.load)(wanted, checkpoint_id=out)
    assert not _differences(parameters(7), wanted["model"], 0.0, "")
    silent(dcp_to_torch_save)(out, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert not _differences(parameters(7), {name: whole["model"][name] for name in parameters(7)}, 0.0, "")
    assert whole["optimizer_0"]["param_groups"][0]["params"] == list(parameters(7))
    assert whole["model"]["_extra_state"] == {"v": 7}


def test_a_directory_of_model_parallel_strategy(stock: Path, tmp_path: Path) -> None:
    out = export(stock, tmp_path / "out")
    found = open_checkpoint(out, control())
    assert torch.equal(found["state_dict"]["a"].read(), torch.arange(6.0).reshape(2, 3))
    assert (found["epoch"], found["optimizer_states"][0]["param_groups"]) == (1, [{"lr": 0.1}])


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_the_data_is_copied(source: Path, tmp_path: Path) -> None:
    out = export(source, tmp_path / "out")
    assert [path.read_bytes() for path in data_of(out)] == [path.read_bytes() for path in data_of(source)]
    assert {path.stat().st_nlink for path in out.iterdir()} == {1}


def test_deleting_the_source_leaves_it_whole(copy: Path, tmp_path: Path) -> None:
    out = export(copy, tmp_path / "out")
    shutil.rmtree(copy)
    verify(open_checkpoint(out, control()), 7, end_to_end, control())


def test_saving_over_it_leaves_the_source_whole(copy: Path, tmp_path: Path) -> None:
    """As FSDPStrategy does: in place, file by file."""
    before = contents(copy)
    out = export(copy, tmp_path / "out")

    @silent
    def save(rank: int) -> None:
        dcp.save({"model": {f"x{rank}": torch.ones(3)}}, checkpoint_id=out)
        torch.save({}, out / "meta.pt") if rank == 0 else None
        dist.barrier()

    run_world(2, save, timeout=30)
    assert contents(copy) == before


# ---------------------------------------------------------------------------------------------------------------------
# Refused


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_code_in_the_index_is_not_run(stock: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    metadata.planner_data = {"x": Evil(tmp_path / "trace")}
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(stock, tmp_path / "out", CheckpointError, r"posix\.mkdir")
    assert not (tmp_path / "trace").exists()


def test_code_in_the_meta_file_is_not_run(stock: Path, tmp_path: Path) -> None:
    torch.save({"x": Evil(tmp_path / "trace")}, stock / "meta.pt")
    export(stock, tmp_path / "out")
    assert not (tmp_path / "trace").exists()


def test_a_damaged_source(copy: Path, tmp_path: Path) -> None:
    index = bytearray((copy / ".metadata").read_bytes())
    (copy / ".metadata").write_bytes(index.replace(b"scale", b"scald"))
    assert (copy / ".metadata").read_bytes() != index
    refused(copy, tmp_path / "out", CheckpointError, r"\.metadata' does not match its checksum")
    (copy / ".metadata").write_bytes(index)
    data = bytearray((copy / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__1_0.distcp").write_bytes(data)
    refused(copy, tmp_path / "out", CheckpointError, r"__1_0\.distcp' does not match its checksum")
    os.truncate(copy / "__1_0.distcp", 100)
    refused(copy, tmp_path / "out", CheckpointError, "__1_0.distcp' has 100 bytes")
    (copy / "__1_0.distcp").unlink()
    refused(copy, tmp_path / "out", CheckpointError, "__1_0.distcp' is missing")


def test_what_cannot_be_the_source(source: Path, stock: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    torch.save({"state_dict": {}}, tmp_path / "file.ckpt")
    refused(tmp_path / "file.ckpt", out, CheckpointError, "is no directory.*ordinary files.*consolidate")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", out, CheckpointError, r"has no \.metadata")
    refused(export(source, tmp_path / "done"), out, CheckpointError, "names of FSDPStrategy already")
    silent(dcp.save)({"w": torch.ones(3)}, checkpoint_id=tmp_path / "bare")
    refused(tmp_path / "bare", out, CheckpointError, "no weights under `state_dict`")
    (stock / "meta.pt").unlink()
    refused(stock, out, CheckpointError, "has no meta.pt")


def test_what_exists_is_not_replaced(source: Path, stock: Path, tmp_path: Path) -> None:
    before = contents(stock)
    refused(source, stock, ValueError, "exists: write to another place")
    assert contents(stock) == before
    (tmp_path / "file").write_text("mine")
    refused(source, tmp_path / "file", ValueError, "exists")
    refused(stock, stock, ValueError, "the source itself")
    refused(stock, stock / "inside", ValueError, "is within the source")
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty")


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"weights_only": True}, {"prefix": "model."}])
def test_what_would_change_the_data(source: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    refused(source, tmp_path / "out", ValueError, "do not go with it", **option)


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["consolidate", str(source), str(tmp_path / "x.ckpt"), "--format", "fsdp"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt" / ".metadata").is_file()
