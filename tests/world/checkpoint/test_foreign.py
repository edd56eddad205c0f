"""Directories of other programs: each element comes from where they put it, and is read once."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from lightning_zero.checkpoint import (
    StoredTensor,
    is_checkpoint_directory_at,
    open_checkpoint,
)
from lightning_zero.errors import CheckpointError
from tests.helpers.samples import control, parameters
from tests.helpers.world import run_world


def read(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value


def slices(stored: StoredTensor, world_size: int) -> list[Tensor]:
    """What the ranks of a world read of a tensor cut evenly."""
    per_rank = -(-stored.numel() // world_size)
    parts = []
    for rank in range(world_size):
        start = min(rank * per_rank, stored.numel())
        part = torch.full((min(per_rank, stored.numel() - start),), 77).to(stored.dtype)
        stored.read_into(part, start)
        parts.append(part)
    return parts


class Boxed(Tensor):
    """A tensor that DCP stores in given boxes (offsets, sizes)."""

    @staticmethod
    def __new__(cls, whole: Tensor, parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Boxed:
        made: Boxed = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.whole, made.parts = whole, parts
        return made

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.parts]
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        (sizes,) = [sizes for offsets, sizes in self.parts if index.offset == torch.Size(offsets)]
        return self.whole[tuple(map(slice, index.offset, map(sum, zip(index.offset, sizes, strict=True))))].clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]  # `detach`


def grid(shape: tuple[int, ...], random_: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random grid of boxes."""
    cuts = [sorted({0, size, *(random_.randrange(size + 1) for _ in range(random_.randrange(4)))}) for size in shape]
    cells = list(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
    random_.shuffle(cells)
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


def save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_grid_of_boxes_gives_any_range(tmp_path: Path) -> None:
    random_ = random.Random(0)
    shapes = [(), (7,), (5, 4), (4, 5, 3), (3, 4, 2, 5), (2, 3, 2, 2, 3), (1, 6), (6, 1, 3)] * 6
    wholes = {f"{n}": torch.arange(math.prod(shape)).float().reshape(shape) for n, shape in enumerate(shapes)}
    save(tmp_path / "c", {name: Boxed(whole, grid(tuple(whole.shape), random_)) for name, whole in wholes.items()})
    found = open_checkpoint(tmp_path / "c", control())["state_dict"]
    for name, whole in wholes.items():
        assert torch.equal(found[name].read(), whole)
        for world_size in (2, 3, 5):
            assert torch.equal(torch.cat(slices(found[name], world_size)), whole.reshape(-1))
        start = random_.randrange(whole.numel())
        end = random_.randrange(start, whole.numel() + 1)
        backing = torch.full((2 * (end - start) + 1,), -1, dtype=torch.float64)  # every second element, and cast
        found[name].read_into(backing[1::2], start)
        assert torch.equal(backing[1::2].float(), whole.reshape(-1)[start:end])
        assert (backing[::2] == -1).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_dtype_and_an_archive_of_another_kind(tmp_path: Path) -> None:
    values = {**parameters(), "fp8": torch.ones(5).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False])}
    values["complex"] = torch.tensor([1 + 2j])
    values["unusual"] = torch.arange(12).reshape(3, 4).t()  # its archive says it is transposed
    save(tmp_path / "c", {**values, "text": "words", "nested": {"list": [torch.ones(2), {"x": torch.zeros(3)}]}})
    state = open_checkpoint(tmp_path / "c", control())["state_dict"]
    for name, value in values.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name].read(), value), name
    assert state["text"] == "words"
    assert torch.equal(state["nested"]["list"][1]["x"].read(), torch.zeros(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_changed_byte_of_a_part_that_is_not_rows_is_found(tmp_path: Path) -> None:
    whole = torch.arange(600.0).reshape(20, 30)
    save(tmp_path / "c", {"w": Boxed(whole, [((0, 0), (20, 10)), ((0, 10), (20, 20))])})
    content = bytearray((tmp_path / "c" / "__0_0.distcp").read_bytes())
    place = content.index(whole[:, 10:].contiguous().numpy().tobytes()) + 400
    content[place] ^= 1
    (tmp_path / "c" / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is damaged.*'w'"):
        open_checkpoint(tmp_path / "c", control(), verify=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_lists_keep_their_order_whatever_the_order_of_the_index_is(tmp_path: Path) -> None:
    groups = [{"lr": float(number), "params": [f"p{number}"]} for number in range(12)]
    save(tmp_path / "c", {f"optimizer_{number}": {"param_groups": groups[number:]} for number in range(11)})
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = dict(reversed(metadata.planner_data.items()))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    found = open_checkpoint(tmp_path / "c", control())
    expected = [{"state": {}, "param_groups": groups[number:]} for number in range(11)]
    assert found == {"optimizer_states": expected}


# ---------------------------------------------------------------------------------------------------------------------
# What Lightning's strategies write


class Model(LightningModule):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def configure_model(self) -> None:
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_a_directory_of_the_model_parallel_strategy(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def rank(_: int) -> Any:
        warnings.simplefilter("ignore")  # of Lightning's own
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        model = Model()
        trainer.fit(model)
        trainer.save_checkpoint(path)
        optimizer = get_optimizer_state_dict(model, trainer.optimizers[0])
        return (
            {name: whole(value) for name, value in model.state_dict().items()},
            {n: {key: whole(part) for key, part in state.items()} for n, state in optimizer["state"].items()},
        )

    weights, moments = run_world(2, rank, init_group=False)[0]
    assert is_checkpoint_directory_at(path)
    with pytest.warns(UserWarning, match=r"cannot be verified: .*\.metadata'\.$"):
        found = open_checkpoint(path, control(), verify=True)
    assert list(found["state_dict"]) == list(weights)
    for name, value in weights.items():
        assert torch.equal(found["state_dict"][name].read(), value), name
        for world_size in (2, 3):
            assert torch.equal(torch.cat(slices(found["state_dict"][name], world_size)), value.reshape(-1))
    (optimizer,) = found["optimizer_states"]
    assert optimizer["state"].keys() == moments.keys()
    for name, state in moments.items():
        for key, part in state.items():
            assert torch.equal(optimizer["state"][name][key].read(), part), (name, key)
    (group,) = optimizer["param_groups"]
    assert group["params"] == list(moments)
    assert group["lr"] == pytest.approx(0.005)
    assert group["betas"] == (0.9, 0.999)
    assert found["global_step"] == 2
    assert found["hyper_parameters"] == {"width": 5}
    assert found["lr_schedulers"][0]["last_epoch"] == 1


def test_the_fsdp_layout_and_two_dimensional_shards(tmp_path: Path) -> None:
    full = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(24.0).reshape(4, 6)}

    def rank(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in full.items()}
        moments = {name: {"exp_avg": distribute_tensor(value * 2, mesh, [Shard(0)])} for name, value in full.items()}
        groups = [{"params": ["a"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
        dcp.save(
            {"model": state, "optimizer_0": {"state": moments, "param_groups": groups}}, checkpoint_id=tmp_path / "c"
        )
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save({"epoch": 3}, tmp_path / "c" / "meta.pt")
        dist.barrier()
        warnings.filterwarnings("ignore", ".*It cannot be verified")
        found = open_checkpoint(tmp_path / "c", control(), verify=True)  # and on several ranks
        assert found.keys() == {"epoch", "state_dict", "optimizer_states"}
        for name, value in full.items():
            assert torch.equal(found["state_dict"][name].read(), value)
            assert torch.equal(torch.cat(slices(found["state_dict"][name], 3)), value.reshape(-1))
            assert torch.equal(found["optimizer_states"][0]["state"][name]["exp_avg"].read(), value * 2)
        assert found["optimizer_states"][0]["param_groups"] == groups

    run_world(2, rank, timeout=40)
