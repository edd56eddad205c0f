"""Checkpoints of tensor-parallel runs: whole tensors, whatever ranks of either kind save and load them."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_zero import CheckpointPolicy, consolidate_checkpoint
from tests.helpers.parallel import Llama, Parallel, drawn, llama_plan, made
from tests.helpers.split import Layout, Net, Split, alone, contents, distance, fit, same
from tests.helpers.world import run_world
from tests.world.extensions.test_deepspeed import Save

SAVED, STEPS = 2, 4  # steps before the checkpoint, and in all


def halves(folder: Path) -> None:
    """Begin with weights of which one is only as large as the part of it that each of two ranks has; note what is said.

    ``not fitting.json`` gets the error, and the warning where what does not fit may be passed over.
    """
    found, path = [], str(folder / "halved.pt")
    for strict in (True, False):
        policy = CheckpointPolicy(initial_weights=path, strict_initial_weights=strict)
        net = Split(seed=1)
        try:
            fit(Layout(3, 2, 2).strategy(checkpoint=policy), net, 0, ended=folder / "halved")
        except RuntimeError as error:
            found.append(str(error))
    if dist.get_rank() == 0:
        (folder / "not fitting.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks: of runs, and of runs that resumed from them under another layout."""
    folder = tmp_path_factory.mktemp("parallel")

    def rank(_: int) -> None:
        fit(Layout(3, 2, 2), Split(), SAVED, ended=folder / "saved")
        for layout in (Layout(3, 2, 2), Layout(2, 4, 1), Layout(1, 1, 4)):
            name = "{}x{}".format(*layout[1:])
            resumed = {"resume": folder / "saved", "begun": folder / f"begun {name}", "ended": folder / f"ended {name}"}
            fit(layout, Split(seed=1), STEPS, **resumed)
        turned = {"resume": folder / "saved", "begun": folder / "begun turned", "ended": folder / "ended turned"}
        fit(Layout(2, 2, 2), Split(seed=1, turned=True), STEPS, **turned)
        file = CheckpointPolicy(format="consolidated")
        resumed = {"resume": folder / "begun turned", "begun": folder / "file.ckpt"}
        fit(Layout(1, 2, 2).strategy(checkpoint=file), Split(seed=1), SAVED + 1, **resumed)
        resumed = {"resume": folder / "file.ckpt", "begun": folder / "begun ddp.ckpt", "ended": folder / "ended.ckpt"}
        fit("ddp", Split(seed=1), STEPS, **resumed)
        halves(folder)

    weights = {name: value for name, value in alone(0).items() if name.startswith("net.")}
    torch.save({"state_dict": {**weights, "net.head.weight": torch.ones(12, 16)}}, folder / "halved.pt")
    run_world(4, rank, timeout=90)
    return folder


BEGUN = ["begun 2x2", "begun 4x1", "begun 1x4", "begun turned", "file.ckpt", "begun ddp.ckpt"]


@pytest.mark.parametrize("name", BEGUN)
def test_a_run_begins_with_the_bits_that_another_layout_saved(world: Path, name: str) -> None:
    same(contents(world / "saved"), contents(world / name))


@pytest.mark.parametrize("name", ["ended 2x2", "ended 4x1", "ended 1x4", "ended turned", "ended.ckpt"])
def test_training_goes_on_as_in_one_process(world: Path, name: str) -> None:
    assert distance(alone(SAVED), contents(world / "saved")) < 1e-12
    assert distance(alone(STEPS), contents(world / name)) < 1e-12


def sizes_of(values: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.dtype.itemsize for value in values.values())


@pytest.mark.parametrize("name", ["saved", "begun 1x4", "begun turned"])
def test_each_byte_is_written_by_one_rank(world: Path, name: str) -> None:
    """Chunks have as many bytes as tensors, none lies over another, and files have their archives and nothing else."""
    items = json.loads((world / name / "zero.json").read_text())["content"]["items"]
    itemsize = {"float64": 8, "float32": 4}
    places = [
        (file, offset, offset + numel * itemsize[item["dtype"]])
        for key, item in items.items()
        if not key.startswith("lightning_zero.")  # random states
        for _, numel, file, offset, _ in item.get("parts", item.get("chunks", ()))
    ]
    assert sum(end - begin for _, begin, end in places) == sizes_of(contents(world / name))
    for (file, _, end), (after, begin, _) in zip(sorted(places), sorted(places)[1:], strict=False):
        assert file != after or end <= begin
    assert len({file for file, _, _ in places}) == 4
    index = dcp.FileSystemReader(world / name).read_metadata()
    archives = sum(info.length for info in index.storage_data.values())
    assert archives == sum(path.stat().st_size for path in (world / name).glob("*.distcp"))
    split = {key: item["split"] for key, item in items.items() if "split" in item}
    assert split["state_dict.net.blocks.0.up.weight"][0] == (1 if name == "begun turned" else 0)
    assert "state_dict.net.blocks.0.norm.weight" not in split


def test_a_tensor_as_large_as_a_part_does_not_fit(world: Path) -> None:
    (error,) = json.loads((world / "not fitting.json").read_text())
    assert "size mismatch for net.head.weight: copying a param with shape torch.Size([12, 16])" in error
    assert "the shape in current model is torch.Size([24, 16])" in error
    expected = {name: value for name, value in alone(0).items() if name.startswith("net.")}
    found = contents(world / "halved")
    assert torch.equal(found["net.embedding.weight"], expected["net.embedding.weight"])
    assert torch.equal(found["net.head.weight"], Net(seed=1).head.weight)


class Drawing(Split):
    """Draws numbers, which are others on ranks that have other data."""

    def on_fit_start(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        torch.manual_seed(dist.get_rank() if mesh is None else mesh["data_parallel"].get_local_rank())
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def test_ranks_of_a_tensor_parallel_group_go_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    """Else dropout would differ between them, and then what all of them have alike."""

    def rank(_: int) -> dict[str, list[float]]:
        found = {}
        for name, layout in (("4x1", Layout(2, 4, 1)), ("2x2", Layout(2, 2, 2))):
            fit(layout, whole := Drawing(), STEPS)
            fit(layout, Drawing(), SAVED, ended=tmp_path / name)
            found[name] = whole.drawn
        for saved in ("4x1", "2x2"):
            for layout in (Layout(2, 4, 1), Layout(2, 2, 2), Layout(2, 1, 4)):
                fit(layout, resumed := Drawing(), STEPS, resume=tmp_path / saved)
                found["{} {}x{}".format(saved, *layout[1:])] = resumed.drawn
        return found

    ranks = run_world(4, rank, timeout=90)
    for run in ranks[0]:
        drawn = [found[run] for found in ranks]
        group = {"4": 1, "2": 2, "1": 4}[run.split()[-1][0]]
        for number, own in enumerate(drawn):
            assert own == drawn[number // group * group], (run, number)
        assert len(set(map(tuple, drawn))) == 4 // group, run
        if run.split()[0] == run.split()[-1]:
            assert all(found[run][-2:] == found[run[:3]][-2:] for found in ranks)


def test_stock_readers_load_whole_tensors_and_other_parts(world: Path) -> None:
    expected = contents(world / "saved")
    weights = {name: value for name, value in expected.items() if name.startswith("net.")}

    def rank(_: int) -> None:
        whole = {name: torch.zeros_like(value) for name, value in weights.items()}
        dcp.load({"state_dict": whole}, checkpoint_id=world / "saved")
        same(weights, whole)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for dim in (0, 1):
            matrices = {name: value for name, value in weights.items() if value.dim() > dim}
            placed = {
                name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(dim)]) for name, value in matrices.items()
            }
            dcp.load({"state_dict": placed}, checkpoint_id=world / "saved")
            assert all(isinstance(value, DTensor) for value in placed.values())
            same(matrices, {name: value.full_tensor() for name, value in placed.items()})

    run_world(4, rank, timeout=60)


class Anywhere(Parallel):
    def configure_model(self) -> None:
        if self.net is None and self.device_mesh is None:
            self.net = made(Llama, torch.float32)
        super().configure_model()

    def rows(self, batch_idx: int) -> Any:
        return drawn(batch_idx) if self.device_mesh is None else super().rows(batch_idx)


def test_directories_of_other_strategies_go_on_here(tmp_path: Path) -> None:
    """Of ModelParallelStrategy, and of DeepSpeed's stages with three ranks: weights and states bit for bit."""

    def save(_: int) -> None:
        fit(ModelParallelStrategy(2, 2), Anywhere(Llama, llama_plan), SAVED, ended=tmp_path / "stock")
        fit("ddp", Anywhere(Llama, llama_plan), SAVED, ended=tmp_path / "ddp.ckpt")

    def resume(_: int) -> None:
        for name, stage in (("stock", 3), ("deepspeed1", 2), ("deepspeed3", 3)):
            begun = {"resume": tmp_path / name, "begun": tmp_path / f"begun {name}"}
            fit(Layout(stage, 2, 2), Anywhere(Llama, llama_plan), SAVED + 1, **begun)

    run_world(4, save, timeout=90)
    plain = torch.load(tmp_path / "ddp.ckpt", weights_only=False)
    values, (optimizer,) = plain.pop("state_dict"), plain.pop("optimizer_states")
    optimizer["state"] = dict(zip(values, optimizer["state"].values(), strict=True))
    rest: dict[str, Any] = {"values": values, "optimizer": optimizer, "client": plain, "groups": [list(values)]}
    for stage in (1, 3):
        Save(tmp_path / f"deepspeed{stage}", stage, 3, types.ModuleType("deepspeed"), **rest)
    run_world(4, resume, timeout=90)
    consolidate_checkpoint(tmp_path / "stock", tmp_path / "stock.ckpt", progress=False)
    same(contents(tmp_path / "stock.ckpt"), contents(tmp_path / "begun stock"))
    for stage in (1, 3):
        same(contents(tmp_path / "ddp.ckpt"), contents(tmp_path / f"begun deepspeed{stage}"))
