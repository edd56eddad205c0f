"""DeepSpeed's directories: in the layout that runs of 0.19.8 left, and by DeepSpeed itself where it is installed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero import CheckpointPolicy, ZeroStrategy, verify_checkpoint
from lightning_zero.checkpoint import StoredTensor, is_checkpoint_directory_at, open_checkpoint
from lightning_zero.checkpoint.consolidated import consolidate_checkpoint
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.inspection.contents import describe_checkpoint
from lightning_zero.loading import load_full_state_dict
from tests.helpers.runs import Net, batches, quiet, values_of, zero
from tests.helpers.samples import control
from tests.helpers.training import make_trainer
from tests.helpers.world import free_port, run_world
from tests.world.extensions.deepspeed_run import STEPS, Model, make_optimizer, tokens

Groups = list[dict[str, tuple[int, ...]]]

GROUPS: Groups = [{"embed.weight": (11, 7), "body.weight": (13, 7)}, {"scale": (1,), "body.bias": (13,)}]
FROZEN = {"frozen.weight": (5, 3), "frozen.bias": (5,)}


class Stage(IntEnum):
    """In place of DeepSpeed's."""

    ONE = 1


class Scaler:
    """In place of DeepSpeed's: an object with a state."""

    def __init__(self) -> None:
        self.scale = 1.0


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that is there while a pickle is written, and not when it is read."""
    module = types.ModuleType("deepspeed_of_a_test")
    for kind in (Stage, Scaler):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    return module


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """In the order of the module, with a tied one; trained ones in float32."""
    torch.manual_seed(1)
    shapes = {name: shape for group in GROUPS for name, shape in group.items()}
    found = {name: torch.randn(shape) for name, shape in shapes.items()}
    found |= {name: torch.randn(shape).to(dtype) for name, shape in FROZEN.items()}
    found |= {"mean": torch.randn(7).to(dtype).float(), "table": torch.arange(5)}
    return {**found, "head.weight": found["embed.weight"]}


def moments(groups: Groups) -> dict[str, Any]:
    """A state of AdamW, by names."""
    torch.manual_seed(2)
    state = {}
    for number, group in enumerate(groups):
        for name, shape in group.items():
            both = {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
            state[name] = {"step": torch.tensor(3.0 + number), **both}
    options = {"lr": 0.01, "betas": (0.9, 0.99), "initial_lr": 0.02}
    return {
        "state": state,
        "param_groups": [{**options, "weight_decay": 0.1 * n, "params": [*group]} for n, group in enumerate(groups)],
    }


class Save:
    """What a run of DeepSpeed leaves on disk."""

    def __init__(
        self,
        root: Path,
        stage: int,
        world_size: int,
        module: types.ModuleType,
        dtype: torch.dtype = torch.float32,
        values: dict[str, Tensor] | None = None,
        optimizer: dict[str, Any] | None = None,
        client: dict[str, Any] | None = None,
        groups: list[list[str]] | None = None,
    ) -> None:
        self.root, self.folder, self.module = root, root / "checkpoint", module
        if groups is None:
            groups = [list(group) for group in GROUPS] if values is None else [list(values)]
        self.values = weights(dtype) if values is None else values
        self.groups = [{name: tuple(self.values[name].shape) for name in group} for group in groups]
        self.frozen = FROZEN if values is None else {}
        self.folder.mkdir(parents=True)
        (root / "latest").write_text("checkpoint")
        self.states = moments(self.groups) if optimizer is None else optimizer
        self.client = client or {}
        self.bf16 = "bf16_" if dtype == torch.bfloat16 else ""
        self.stage, self.world_size = stage, world_size
        parts = [self.flat(group, stage, world_size, self.values) for group in self.groups]
        for rank in range(world_size):
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            flats = [torch.nn.Parameter(ranks[rank].clone()) if stage == 3 else ranks[rank].clone() for ranks in parts]
            state: dict[str, Any] = {"zero_stage": Stage.ONE, "loss_scaler": Scaler(), key: flats}
            state["partition_count"] = world_size if stage == 3 else [world_size] * len(self.groups)
            state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = self.base(rank)
            state["group_paddings"] = [self.padding(group, rank) for group in self.groups]
            state["dynamic_loss_scale"] = False
            self.write(self.optimizer(rank), {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"})
            if stage == 3 or rank == 0:
                self.write(self.model(stage, rank), self.content(stage, rank, world_size, dtype))

    def optimizer(self, rank: int) -> str:
        return f"{self.bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model(self, stage: int, rank: int = 0) -> str:
        return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"

    def base(self, rank: int) -> dict[str, Any]:
        """What a rank's optimizer says of itself, which steps one flat tensor of each group."""
        state: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(self.groups):
            kept = next(iter(self.states["state"].values()))
            state[number] = {}
            for key in kept:
                values = {name: self.states["state"][name][key] for name in group}
                if key == "step":
                    state[number][key] = next(iter(values.values())).clone()
                else:
                    flat = self.flat(group, self.stage, self.world_size, values)[rank]
                    gap = 0 if self.stage == 3 else self.padding(group, rank)
                    state[number][key] = torch.cat([flat, torch.zeros(gap)])
        groups = self.states["param_groups"]
        return {"state": state, "param_groups": [{**g, "params": [n]} for n, g in enumerate(groups)]}

    def base_of(self, content: dict[str, Any]) -> Any:
        """That in a file."""
        return content["optimizer_state_dict"]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def padding(self, group: dict[str, tuple[int, ...]], rank: int) -> int:
        """What is behind a rank's elements in its memory, in stages 1 and 2."""
        numel = sum(math.prod(shape) for shape in group.values())
        size = -(-numel // (2 * self.world_size)) * 2
        return size - max(0, min(size, numel - rank * size))

    def flat(
        self, group: dict[str, tuple[int, ...]], stage: int, world_size: int, values: dict[str, Tensor]
    ) -> list[Tensor]:
        """The parts of the ranks."""
        if stage == 3:
            each = [self.parts(values[name], world_size) for name in group]
            return [torch.cat([parts[rank] for parts in each]) for rank in range(world_size)]
        whole = torch.cat([values[name].flatten() for name in group])
        size = -(-whole.numel() // (2 * world_size)) * 2
        ends = [min(rank * size, whole.numel()) for rank in range(world_size + 1)]  # without padding, as it saves them
        return [whole[begin:end] for begin, end in pairwise(ends)]

    def parts(self, value: Tensor, world_size: int) -> list[Tensor]:
        each = -(-value.numel() // world_size)
        padded = torch.cat([value.flatten(), torch.full((each * world_size - value.numel(),), 99, dtype=value.dtype)])
        return [part.clone() for part in padded.split(each)]

    def content(self, stage: int, rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Any]:
        computing = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in self.values.items()
        }
        empty = {name: torch.zeros(0, dtype=dtype) for name in self.values if name not in ("mean", "table")}
        fragments = {name: computing[name] for name in self.frozen}
        if stage == 3:
            fragments = {name: self.parts(value, world_size)[rank] for name, value in fragments.items()}
        return {
            "module": OrderedDict({**computing, **empty} if stage == 3 else computing),
            "buffer_names": ["mean", "table"],
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in self.groups
            ],
            "frozen_param_shapes": {name: torch.Size(shape) for name, shape in self.frozen.items()}
            if stage > 1
            else None,
            "frozen_param_fragments": fragments if stage > 1 else None,
            "shared_params": {"head.weight": "embed.weight"} if rank == 0 and self.frozen else {},
            "global_steps": 3,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8",
            "pytorch-lightning_version": "2.6.0",
            "epoch": 3,
            "hyper_parameters": {"width": 7, **({"odd": Scaler(), "kind": Scaler} if self.frozen else {})},
            **self.client,
        }

    def universal(self) -> Path:
        """What ``ds_to_universal.py`` makes of it, beside it."""
        folder = self.root / "universal"
        folder.mkdir()
        (self.root / "latest_universal").write_text("universal")
        for file in self.folder.glob("*model_states.pt"):
            shutil.copy(file, folder)
        for name, state in self.states["state"].items():
            (folder / "zero" / name).mkdir(parents=True)
            flat = self.stage == 3
            kept = {key: value.flatten() if flat else {"param": value, "cat_dim": 0} for key, value in state.items()}
            kept["fp32"] = self.values[name].flatten() if flat else {"param": self.values[name], "cat_dim": 0}
            kept["step"] = state["step"]
            for key, value in kept.items():
                if key != "step" or not flat:
                    torch.save(value, folder / "zero" / name / f"{key}.pt")
        sys.modules[self.module.__name__] = self.module
        whole = torch.load(self.folder / self.optimizer(0), weights_only=False)["optimizer_state_dict"]
        del sys.modules[self.module.__name__]
        base = whole.get("optimizer_state_dict") or whole.pop("base_optimizer_state")
        self.write("../universal/zero/optimizer_state.pt", {**whole, "param_groups": base["param_groups"]})
        return folder

    def write(self, name: str, content: Any) -> None:
        sys.modules[self.module.__name__] = self.module
        try:
            torch.save(content, self.folder / name)
        finally:
            del sys.modules[self.module.__name__]

    def change(self, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Save a file with another content."""
        sys.modules[self.module.__name__] = self.module
        content = torch.load(self.folder / name, weights_only=False)
        change(content)
        self.write(name, content)


def found(path: Path | str) -> dict[str, Any]:
    with pytest.warns(UserWarning, match=r"Left out.*hyper_parameters\.odd.*deepspeed_of_a_test\.Scaler.*\.kind"):
        return open_checkpoint(path, control())


def read(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.read() if isinstance(value, StoredTensor) else value for name, value in state.items()}


def assert_states(checkpoint: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same state of an optimizer, to the bit, and the same options."""
    (got,) = checkpoint["optimizer_states"]
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert_same(read(got["state"][name]), state)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("stage", "world_size", "dtype"),
    [(1, 5, torch.float32), (1, 1, torch.bfloat16), (2, 2, torch.bfloat16), (3, 3, torch.float32)],
)
def test_weights_are_those_that_were_saved(
    tmp_path: Path, foreign: types.ModuleType, stage: int, world_size: int, dtype: torch.dtype
) -> None:
    save = Save(tmp_path / "c.ckpt", stage, world_size, foreign, dtype)
    for path in (save.root, save.folder):  # the last save, and the folder of one
        assert is_checkpoint_directory_at(path)
        checkpoint = found(path)
        assert_same(read(checkpoint.pop("state_dict")), save.values)
        assert_states(checkpoint, save.states)
        del checkpoint["optimizer_states"]
        assert checkpoint == {"pytorch-lightning_version": "2.6.0", "epoch": 3, "hyper_parameters": {"width": 7}}
    assert verify_checkpoint(save.root).is_whole
    part = torch.empty(50, dtype=torch.float64)  # any range of a parameter, whatever the ranks were
    found(save.root)["state_dict"]["body.weight"].read_into(part, 17)
    assert torch.equal(part.float(), save.values["body.weight"].flatten()[17:67])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.filterwarnings("ignore:Left out")
def test_it_is_consolidated_inspected_and_loaded(tmp_path: Path, foreign: types.ModuleType, stage: int) -> None:
    save = Save(tmp_path / "c.ckpt", stage, 2, foreign)
    consolidate_checkpoint(save.root, tmp_path / "out.ckpt", progress=False)
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert_same(loaded["state_dict"], save.values)
    assert loaded["state_dict"]["head.weight"].data_ptr() == loaded["state_dict"]["embed.weight"].data_ptr()
    assert (loaded["epoch"], loaded["hyper_parameters"]) == (3, {"width": 7})
    consolidate_checkpoint(save.root, tmp_path / "out.safetensors", progress=False)
    untied = {name: value for name, value in save.values.items() if name != "head.weight"}  # as Hugging Face has it
    assert_same(load_full_state_dict(tmp_path / "out.safetensors"), untied)
    assert_same(load_full_state_dict(save.root), save.values)
    text = describe_checkpoint(save.root)
    assert "sharded directory of DeepSpeed" in text
    assert save.model(stage) in text


def test_it_is_read_from_an_object_store(tmp_path: Path, foreign: types.ModuleType) -> None:
    save, store = Save(tmp_path / "c", 3, 2, foreign), fsspec.filesystem("memory")
    store.put(str(save.root), "/deepspeed", recursive=True)
    try:
        for url in ("memory://deepspeed", "memory://deepspeed/checkpoint"):
            assert_same(read(found(url)["state_dict"]), save.values)
    finally:
        store.rm("/deepspeed", recursive=True)


def test_the_padding_behind_each_parameter_is_skipped(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 1, foreign)

    def pad(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]
        sizes = [[math.prod(shape) for shape in group.values()] for group in GROUPS]
        state["param_alignment_paddings"] = [[1, 0], [0, 3]]
        gap = torch.full((1,), 99.0)

        def padded(first: Tensor, second: Tensor) -> list[Tensor]:
            return [torch.cat([first[: sizes[0][0]], gap, first[sizes[0][0] :]]), torch.cat([second, gap, gap, gap])]

        state["single_partition_of_fp32_groups"] = padded(*state["single_partition_of_fp32_groups"])
        kept = state["base_optimizer_state"]["state"]
        for key in ("exp_avg", "exp_avg_sq"):
            kept[0][key], kept[1][key] = padded(kept[0][key], kept[1][key])

    save.change(save.optimizer(0), pad)
    checkpoint = found(save.root)
    assert_same(read(checkpoint["state_dict"]), save.values)
    assert_states(checkpoint, save.states)


def test_prefixes_layouts_and_memory_formats_of_other_ages(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 2, foreign)

    def age(content: dict[str, Any]) -> None:
        content["module"] = {f"_forward_module.{name}": value for name, value in content["module"].items()}
        content["module"]["_forward_module.frozen.weight"] = save.values["frozen.weight"].t().contiguous().t()
        names = {"head.weight": "embed.weight"}.items()
        content["shared_params"] = {f"_forward_module.{name}": f"_forward_module.{twin}" for name, twin in names}
        for group in content["param_shapes"]:
            for name in list(group):
                group[f"_forward_module.{name}"] = group.pop(name)

    save.change(save.model(2), age)
    checkpoint = found(save.root)
    assert_same(read(checkpoint["state_dict"]), save.values)
    assert_states(checkpoint, save.states)


def test_names_of_nothing_that_is_known_are_not_called(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 1, foreign)

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "done"),)

    save.change(save.optimizer(0), lambda content: content.update(ds_config=Evil()))
    save.change(save.model(2), lambda content: content.update(epoch=Evil(), hyper_parameters={"width": Evil()}))
    with pytest.warns(UserWarning, match=r"'hyper_parameters\.width' \(posix\.mkdir\), 'epoch' \(posix\.mkdir\)"):
        checkpoint = open_checkpoint(save.root, control())
    assert_same(read(checkpoint["state_dict"]), save.values)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(("stage", "world_size"), [(2, 1), (3, 3)])
def test_the_universal_format_holds_the_same(
    tmp_path: Path, foreign: types.ModuleType, stage: int, world_size: int
) -> None:
    save = Save(tmp_path / "c.ckpt", stage, world_size, foreign, torch.bfloat16)
    folder = save.universal()
    for path in (folder, save.root):
        checkpoint = found(path)
        assert_same(read(checkpoint["state_dict"]), save.values)
        assert_states(checkpoint, save.states)
        (save.root / "latest").unlink(missing_ok=True)  # as it is in a new place, with `latest_universal` alone
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out")
        assert verify_checkpoint(folder).is_whole
        assert "zero/body.weight/exp_avg.pt" in describe_checkpoint(folder)
    flat = save.states["state"]["body.weight"]["exp_avg_sq"].flatten()
    part = torch.empty(50)
    checkpoint["optimizer_states"][0]["state"]["body.weight"]["exp_avg_sq"].read_into(part, 17)
    assert torch.equal(part, flat[17:67])
    file = folder / "zero" / "body.weight" / "exp_avg_sq.pt"
    content = bytearray(file.read_bytes())
    content[content.index(flat[60:65].numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)
    assert "zero/body.weight/exp_avg_sq.pt" in str(verify_checkpoint(folder))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.filterwarnings("ignore:Left out")
def test_steps_of_other_optimizers_and_ages(tmp_path: Path, foreign: types.ModuleType, stage: int) -> None:
    """``DeepSpeedCPUAdam`` counts in an ``int``; ``FusedAdam`` did so in its groups."""
    for place in ("state", "group"):
        save = Save(tmp_path / place, stage, 2, foreign)

        def age(content: dict[str, Any], save: Save = save, in_state: bool = place == "state") -> None:
            base = save.base_of(content)
            for number, group in enumerate(base["param_groups"]):
                count = int(base["state"][number].pop("step"))
                (base["state"][number] if in_state else group)["step"] = count

        for rank in range(2):
            save.change(save.optimizer(rank), age)
        assert_states(open_checkpoint(save.root, control()), save.states)


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_group_that_was_dealt_to_the_ranks_has_its_order_again(tmp_path: Path, foreign: types.ModuleType) -> None:
    values = {name: torch.randn(size) for name, size in zip("abcde", (4, 3, 5, 2, 6), strict=True)}
    dealt = {name: values[name] for name in "adbec"}
    save = Save(tmp_path / "c", 2, 3, foreign, values=dealt)
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    save.change(save.model(2), lambda content: content.update(ds_config=config))
    checkpoint = open_checkpoint(save.root, control())
    assert_same(read(checkpoint["state_dict"]), dealt)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["params"] == [*"abcde"]
    with pytest.raises(CheckpointError, match=r"`ds_to_universal.py` gives elements wrong names"):
        open_checkpoint(save.universal(), control())


def keep(key: str, value: Any) -> Callable[[Save], Any]:
    """Have every rank's optimizer keep something else."""

    def change(save: Save) -> None:
        for rank in range(3):
            save.change(
                save.optimizer(rank),
                lambda content: [state.update({key: value}) for state in save.base_of(content)["state"].values()],
            )

    return change


def option(key: str) -> Callable[[Save], Any]:
    return lambda save: save.change(
        save.optimizer(0), lambda content: save.base_of(content)["param_groups"][0].update({key: 1.0})
    )


def elastic(save: Save) -> None:
    def change(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]
        state["base_optimizer_state"] = [*state["base_optimizer_state"]["state"].values()]

    for rank in range(3):
        save.change(save.optimizer(rank), change)


UNKNOWN: dict[str, tuple[int, Callable[[Save], Any], str]] = {
    "1-bit Adam": (1, keep("worker_error", torch.zeros(3)), "it keeps exp_avg, exp_avg_sq, worker_error, which no"),
    "LAMB": (2, option("max_coeff"), "it is that of LAMB"),
    "elastic": (2, elastic, "it is elastic, without the options"),
    "other groups": (
        3,
        lambda s: s.change(s.optimizer(0), lambda c: s.base_of(c)["param_groups"].pop()),
        "its groups are not those of the parameters",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.filterwarnings("ignore:Left out")
def test_of_an_optimizer_that_is_not_known_the_weights_are_read(
    tmp_path: Path, foreign: types.ModuleType, name: str
) -> None:
    stage, change, message = UNKNOWN[name]
    save = Save(tmp_path / "c", stage, 3, foreign)
    change(save)
    with pytest.warns(UserWarning, match=f"the state of the optimizer is not read: {message}.*needs a new optimizer"):
        checkpoint = open_checkpoint(save.root, control())
    assert_same(read(checkpoint["state_dict"]), save.values)
    assert "optimizer_states" not in checkpoint


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_loss_scale_is_named_and_options_of_unknown_classes_too(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 2, foreign)

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["dynamic_loss_scale"] = True
        save.base_of(content)["param_groups"][1]["odd"] = Scaler()

    save.change(save.optimizer(0), change)
    with (
        pytest.warns(UserWarning, match=r"the loss scale of float16 is not read\. A run begins with its own"),
        pytest.warns(UserWarning, match=r"Left out.*'param_groups\.odd' \(deepspeed_of_a_test\.Scaler\)"),
    ):
        checkpoint = open_checkpoint(save.root, control())
    assert_states(checkpoint, save.states)


def rename(save: Save, old: str, new: str) -> None:
    (save.folder / old).rename(save.folder / new)


def cut_off(save: Save, name: str) -> None:
    content = (save.folder / name).read_bytes()
    (save.folder / name).write_bytes(content[: len(content) // 2])


def shapes(content: dict[str, Any], name: str, shape: Any) -> None:
    for group in content["param_shapes"]:
        if name in group:
            group[name] = shape


class Forged:
    """A tensor with more elements than its storage."""

    def __init__(self, numel: int, stride: int) -> None:
        self.size = ((numel,), (stride,))

    def __reduce__(self) -> Any:
        rebuild, (storage, start, _, _, *rest) = torch.ones(3).__reduce_ex__(2)
        return rebuild, (storage, start, *self.size, *rest)


BAD: dict[str, tuple[int, Callable[[Save], Any], str]] = {
    "no rank 1": (
        2,
        lambda s: (s.folder / s.optimizer(1)).unlink(),
        r"not whole: 'zero_pp_rank_1\S*optim.*missing.*copy",
    ),
    "no optimizer": (2, lambda s: [f.unlink() for f in s.folder.glob("*optim*")], r"zero_pp_rank_0\S*optim.*stage 0"),
    "more ranks": (2, lambda s: s.write(s.optimizer(3), {}), r"several saves: '\S*rank_3\S*' is beyond the 3 ranks"),
    "two worlds": (
        2,
        lambda s: s.change(s.optimizer(1), lambda c: c["optimizer_state_dict"].update(partition_count=[4, 4])),
        r"several saves: 'zero_pp_rank_1\S*' is of 4 ranks, 'zero_pp_rank_0\S*' of 3",
    ),
    "two steps": (3, lambda s: s.change(s.model(3, 2), lambda c: c.update(global_steps=4)), r"zero_pp_rank_2\S*model"),
    "two stages": (2, lambda s: s.write(s.model(3), {}), "several saves"),
    "expert files": (2, lambda s: s.write("layer_0_expert_0_mp_rank_00_model_states.pt", {}), "mixture of experts"),
    "model parallel": (2, lambda s: s.write("mp_rank_01_model_states.pt", {}), "of model parallelism"),
    "model parallel by size": (2, lambda s: s.change(s.model(2), lambda c: c.update(mp_world_size=2)), "parallelism"),
    "pipeline": (2, lambda s: s.change(s.model(2), lambda c: c.update(module=None)), "pipeline"),
    "universal, and not": (2, lambda s: (s.folder / "zero").mkdir(), r"several saves: it has .* and zero/optimizer_st"),
    "cut off": (2, lambda s: cut_off(s, s.optimizer(1)), r"zero_pp_rank_1\S* cannot be used"),
    "no masters": (
        3,
        lambda s: s.change(s.optimizer(2), lambda c: c["optimizer_state_dict"].pop("fp32_flat_groups")),
        r"zero_pp_rank_2\S* cannot be used: `optimizer_state_dict.fp32_flat_groups` in it is a NoneType",
    ),
    "huge part": (
        3,
        lambda s: [
            s.change(s.model(3, rank), lambda c: shapes(c, "scale", torch.Size((1 << 40,)))) for rank in range(3)
        ],
        "scale' cannot be put together",
    ),
    "short part": (
        3,
        lambda s: s.change(
            s.optimizer(1),
            lambda c: c["optimizer_state_dict"].update(
                fp32_flat_groups=[flat[:-1].clone() for flat in c["optimizer_state_dict"]["fp32_flat_groups"]]
            ),
        ),
        "cannot be used",
    ),
    "a way out": (
        2,
        lambda s: (s.root / "latest").write_text("../c/checkpoint"),
        r"names the folder '\.\./c/checkpoint'",
    ),
    "beyond its bytes": (
        2,
        lambda s: s.change(s.model(2), lambda c: c["module"].update(mean=Forged(1000, 1))),
        r"mp_rank_00\S* cannot be used: ValueError: a tensor of shape \(1000,\) claims more than its 12 bytes",
    ),
    "short state": (
        3,
        keep("exp_avg", torch.zeros(9)),
        r"cannot be used: ValueError: 'exp_avg of embed.weight' cannot be put together",
    ),
    "a large step": (3, keep("step", torch.zeros(5)), r"cannot be used: ValueError: a step has the shape \(5,\)"),
    "an empty folder": (
        2,
        lambda s: [f.unlink() for f in s.folder.iterdir()],
        "holds neither mp_rank_00_model_states.pt",
    ),
}


UNIVERSAL: dict[str, tuple[int, Callable[[Save, Path], Any], str]] = {
    "no options": (2, lambda s, f: (f / "optimizer_state.pt").unlink(), "'zero/optimizer_state.pt' is missing"),
    "no state": (2, lambda s, f: (f / "scale" / "exp_avg.pt").unlink(), "'zero/scale/exp_avg.pt' is missing"),
    "cut off": (2, lambda s, f: cut_off(s, f"{f}/scale/exp_avg_sq.pt"), r"zero/scale/exp_avg_sq.pt' cannot be used"),
    "a way out": (
        3,
        lambda s, f: [
            s.change(f"../universal/{s.model(3, r)}", lambda c: c["param_shapes"][0].update({"../x": torch.Size((1,))}))
            for r in range(3)
        ],
        r"a parameter is called '\.\./x'",
    ),
}


@pytest.mark.parametrize("name", UNIVERSAL)
@pytest.mark.filterwarnings("ignore:Left out")
def test_what_is_not_whole_in_the_universal_format_is_refused_by_name(
    tmp_path: Path, foreign: types.ModuleType, name: str
) -> None:
    stage, damage, message = UNIVERSAL[name]
    save = Save(tmp_path / "c", stage, 3, foreign)
    folder = save.universal()
    damage(save, folder / "zero")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, control())


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:Left out")
def test_what_is_not_one_whole_save_of_zero_is_refused_by_name(
    tmp_path: Path, foreign: types.ModuleType, name: str
) -> None:
    stage, damage, message = BAD[name]
    save = Save(tmp_path / "c", stage, 3, foreign)
    damage(save)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save.root, control())


def resumed(strategy: Any, path: Any, build: Callable[[], Any] = Net) -> dict[str, Any]:
    """What the second epoch of a run makes of a checkpoint after the first."""
    module = build()
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(module, batches(3), ckpt_path=path)
    states = [optimizer.state_dict() for optimizer in trainer.optimizers] if isinstance(strategy, DDPStrategy) else []
    return {"losses": module.losses, "weights": values_of(module), "states": states, "step": trainer.global_step}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_a_run_goes_on_as_from_an_ordinary_checkpoint(tmp_path: Path, foreign: types.ModuleType, stage: int) -> None:
    """From the directory, the file that is made of it, and the universal format: every bit of losses and moments."""

    def first(rank: int) -> None:
        with quiet():
            trainer = make_trainer(DDPStrategy())
            trainer.fit(Net(), batches(3))
            trainer.save_checkpoint(tmp_path / "plain.ckpt")

    run_world(2, first)
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    values, (optimizer,) = plain.pop("state_dict"), plain.pop("optimizer_states")
    groups = [[name for name, value in values.items() if value.dim() == dim] for dim in (2, 1)]
    names = [name for group in groups for name in group]
    by_name = {"state": {names[number]: state for number, state in optimizer["state"].items()}}
    parts = {"values": values, "optimizer": {**optimizer, **by_name}, "client": plain, "groups": groups}
    save = Save(tmp_path / "c.ckpt", stage, 3, foreign, **parts)
    save.universal()
    out = tmp_path / "out.ckpt"
    consolidate_checkpoint(save.root, out, progress=False)
    steps = [state["step"].data_ptr() for state in torch.load(out)["optimizer_states"][0]["state"].values()]
    assert len({*steps}) == len(names)  # each is counted up for itself

    def play(rank: int) -> Any:
        with quiet():
            return {
                "ddp": resumed(DDPStrategy(), tmp_path / "plain.ckpt"),
                "ddp, file": resumed(DDPStrategy(), out),
                "stage 2, directory": resumed(zero(2), save.root),
                "stage 3, file": resumed(zero(3), out),
                "stage 3, universal": resumed(zero(3), save.root / "universal"),
            }

    for made in run_world(2, play, timeout=200):
        for name, result in made.items():
            assert len(result["losses"]) == 3, name
            assert result["step"] == 6, name
            assert torch.equal(torch.stack(result["losses"]), torch.stack(made["ddp"]["losses"])), name
            assert_same(result["weights"], made["ddp"]["weights"])
        for number, state in made["ddp"]["states"][0]["state"].items():
            assert_same(made["ddp, file"]["states"][0]["state"][number], state)


def test_a_run_begins_with_the_weights(tmp_path: Path, foreign: types.ModuleType) -> None:
    values = {name: value.detach().clone() for name, value in Net(seed=8).state_dict().items()}
    save = Save(tmp_path / "c.ckpt", 3, 3, foreign, values=values)

    def play(rank: int) -> Any:
        first: list[dict[str, Tensor]] = []
        beginning = LambdaCallback(on_train_start=lambda trainer, module: first.append(values_of(module)))
        with quiet():
            policy = CheckpointPolicy(initial_weights=str(save.root))
            trainer = make_trainer(ZeroStrategy(stage=3, checkpoint=policy), callbacks=[beginning])
            trainer.fit(Net(seed=5), batches(1))
        return first[0]

    for first in run_world(2, play):
        assert_same(first, values)


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed itself, in processes of its own: it changes much of what it is imported into


class Run(Model, pl.LightningModule):
    """The model of ``deepspeed_run``, trained as it is there."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.kind = kind
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(tokens(self.global_step, self.trainer.global_rank, self.trainer.world_size))
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.kind, self)


def deepspeed(*arguments: Any) -> None:
    """Run a module in a process for each of what is given."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, each)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
        for each in arguments
    ]
    for process in started:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text.decode()[-2000:]


ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(("stage", "precision", "world_size"), [(1, "fp32", 2), (2, "fp32", 3), (3, "bf16", 2)])
def test_what_deepspeed_saves(tmp_path: Path, stage: int, precision: str, world_size: int) -> None:
    """The same weights and moments as by its own scripts."""
    pytest.importorskip("deepspeed")
    port, out = free_port(), tmp_path / "c.ckpt"
    run = ["tests.world.extensions.deepspeed_run", out, stage, precision, "adamw"]
    deepspeed(*([*run, rank, world_size, port] for rank in range(world_size)))
    checkpoint = open_checkpoint(out, control())
    got = read(checkpoint["state_dict"])
    expected = torch.load(out / "weights.pt", weights_only=True)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].float(), value.float()), name
    code = (
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get; import sys, torch; "
    )
    code += "torch.save({n: v.clone() for n, v in get(sys.argv[1]).items()}, sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, out, tmp_path / "theirs.pt"], check=True, capture_output=True)
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    if stage == 1:  # where it leaves frozen ones out
        theirs |= {name: got[name] for name in ("frozen.weight", "frozen.bias")}
    assert_same(got, {name: theirs[name] for name in got})
    assert len(got) == len(theirs)

    folder, options = (
        out / "universal",
        ["--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state"],
    )
    script = ["deepspeed.checkpoint.ds_to_universal", "--input_folder", out / "checkpoint", "--output_folder", folder]
    deepspeed([*script, *options])
    if stage < 3 and world_size == 3 and precision == "fp32":  # `round_robin_gradients`
        with pytest.raises(CheckpointError, match="gives elements wrong names"):
            open_checkpoint(folder, control())
        return
    universal = open_checkpoint(folder, control())
    assert_same(read(universal["state_dict"]), got)
    (state,) = checkpoint["optimizer_states"]
    assert state["param_groups"] == universal["optimizer_states"][0]["param_groups"]
    for name, kept in state["state"].items():
        assert_same(read(kept), read(universal["optimizer_states"][0]["state"][name]))
        for key in ("exp_avg", "exp_avg_sq"):
            theirs = torch.load(folder / "zero" / name / f"{key}.pt")
            value = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(kept[key].read(), value.view(kept[key].shape))
            assert value.any()
        assert kept["step"] == STEPS
    assert len(state["state"]) == 8


@pytest.mark.parametrize(("stage", "kind", "world_size"), [(1, "sgd", 2), (2, "adamw", 3), (3, "amsgrad", 2)])
def test_a_run_of_deepspeed_goes_on(tmp_path: Path, stage: int, kind: str, world_size: int) -> None:
    """With the losses that DeepSpeed has when it goes on itself."""
    pytest.importorskip("deepspeed")

    def first(rank: int) -> None:
        with quiet():
            trainer = make_trainer(DDPStrategy())
            trainer.fit(Run(kind), batches(STEPS))
            trainer.save_checkpoint(tmp_path / "plain.ckpt")

    run_world(world_size, first)
    client = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    client = {key: value for key, value in client.items() if key not in ("state_dict", "optimizer_states")}
    torch.save(client, tmp_path / "client.pt")
    port, out = free_port(), tmp_path / "c.ckpt"
    run = ["tests.world.extensions.deepspeed_run", out, stage, "fp32", kind]
    deepspeed(*([*run, rank, world_size, port] for rank in range(world_size)))
    consolidate_checkpoint(out, tmp_path / "out.ckpt", progress=False)

    def play(rank: int) -> Any:
        with quiet():
            paths = {"ddp": tmp_path / "out.ckpt", "zero2": tmp_path / "out.ckpt", "zero3": out}
            return {name: resumed(name, path, lambda: Run(kind))["losses"] for name, path in paths.items()}

    for rank, losses in enumerate(run_world(world_size, play, timeout=200)):
        theirs = torch.load(out / f"losses_{rank}.pt")
        for values in losses.values():
            torch.testing.assert_close(torch.stack(values), theirs, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_parameter_that_never_had_a_gradient_starts_afresh(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 2, foreign)
    folder = save.universal()
    for key in ("exp_avg", "exp_avg_sq", "step"):
        (folder / "zero" / "scale" / f"{key}.pt").unlink()
    (state,) = open_checkpoint(folder, control())["optimizer_states"]
    assert state["state"].keys() == save.states["state"].keys() - {"scale"}
    assert "scale" in state["param_groups"][1]["params"]


def test_a_changed_byte_is_found(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 2, foreign)
    file = save.folder / save.optimizer(1)
    content = bytearray(file.read_bytes())
    content[content.index(save.values["body.weight"].flatten()[60:65].numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)
    assert save.optimizer(1) in str(verify_checkpoint(save.root))
