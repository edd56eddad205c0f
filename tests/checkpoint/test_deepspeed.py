"""DeepSpeed's directories: in the layout that runs of 0.19.8 left, and by DeepSpeed itself where it is installed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_zero import CheckpointPolicy, ZeroStrategy
from lightning_zero.checkpoint import StoredTensor, is_checkpoint_directory_at, open_checkpoint
from lightning_zero.checkpoint.consolidate import consolidate_checkpoint
from lightning_zero.checkpoint.inspection import inspect_checkpoint
from lightning_zero.checkpoint.load import verify_checkpoint
from lightning_zero.errors import CheckpointError
from lightning_zero.loading import load_full_state_dict
from tests.checkpoint.samples import control
from tests.helpers.training import make_trainer
from tests.helpers.world import free_port, run_world
from tests.strategy.runs import Net, batches, quiet, raised, values_of, zero

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
    ) -> None:
        self.root, self.folder, self.module = root, root / "checkpoint", module
        self.groups = GROUPS if values is None else [{name: tuple(value.shape) for name, value in values.items()}]
        self.frozen = FROZEN if values is None else {}
        self.folder.mkdir(parents=True)
        (root / "latest").write_text("checkpoint")
        self.values = weights(dtype) if values is None else values
        self.bf16 = "bf16_" if dtype == torch.bfloat16 else ""
        parts = [self.flat(group, stage, world_size) for group in self.groups]
        for rank in range(world_size):
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            flats = [torch.nn.Parameter(ranks[rank].clone()) if stage == 3 else ranks[rank].clone() for ranks in parts]
            state: dict[str, Any] = {"zero_stage": Stage.ONE, "loss_scaler": Scaler(), key: flats}
            state["partition_count"] = world_size if stage == 3 else [world_size] * len(self.groups)
            self.write(self.optimizer(rank), {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"})
            if stage == 3 or rank == 0:
                self.write(self.model(stage, rank), self.content(stage, rank, world_size, dtype))

    def optimizer(self, rank: int) -> str:
        return f"{self.bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model(self, stage: int, rank: int = 0) -> str:
        return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"

    def flat(self, group: dict[str, tuple[int, ...]], stage: int, world_size: int) -> list[Tensor]:
        """The parts of the ranks."""
        if stage == 3:
            each = [self.parts(self.values[name], world_size) for name in group]
            return [torch.cat([parts[rank] for parts in each]) for rank in range(world_size)]
        whole = torch.cat([self.values[name].flatten() for name in group])
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
        }

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


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_that_were_saved(
    tmp_path: Path, foreign: types.ModuleType, stage: int, world_size: int, dtype: torch.dtype
) -> None:
    save = Save(tmp_path / "c.ckpt", stage, world_size, foreign, dtype)
    for path in (save.root, save.folder):  # the last save, and the folder of one
        assert is_checkpoint_directory_at(path)
        checkpoint = found(path)
        assert_same(read(checkpoint.pop("state_dict")), save.values)
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
    text = inspect_checkpoint(save.root).describe()
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
        first, second = state["single_partition_of_fp32_groups"]
        gap = torch.full((1,), 99.0)
        state["single_partition_of_fp32_groups"] = [
            torch.cat([first[: sizes[0][0]], gap, first[sizes[0][0] :]]),
            torch.cat([second, gap, gap, gap]),
        ]

    save.change(save.optimizer(0), pad)
    assert_same(read(found(save.root)["state_dict"]), save.values)


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
    assert_same(read(found(save.root)["state_dict"]), save.values)


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


def doubled(times: int) -> Any:
    """A little that is a lot with what it shares written out."""
    value: Any = ()
    for _ in range(times):
        value = (value, value)
    return value


BAD: dict[str, tuple[int, Callable[[Save], Any], str]] = {
    "no rank 1": (
        2,
        lambda s: (s.folder / s.optimizer(1)).unlink(),
        r"not whole: 'zero_pp_rank_1\S*optim.*missing.*copy",
    ),
    "no model of rank 1": (
        3,
        lambda s: (s.folder / s.model(3, 1)).unlink(),
        r"'zero_pp_rank_1\S*model_states.*missing",
    ),
    "no optimizer": (2, lambda s: [f.unlink() for f in s.folder.glob("*optim*")], r"zero_pp_rank_0\S*optim.*stage 0"),
    "no module": (2, lambda s: (s.folder / s.model(2)).unlink(), r"zero_pp_rank_0_mp_rank_00_model_states.*missing"),
    "more ranks": (2, lambda s: s.write(s.optimizer(3), {}), r"several saves: '\S*rank_3\S*' is beyond the 3 ranks"),
    "two worlds": (
        2,
        lambda s: s.change(s.optimizer(1), lambda c: c["optimizer_state_dict"].update(partition_count=[4, 4])),
        r"several saves: 'zero_pp_rank_1\S*' is of 4 ranks, 'zero_pp_rank_0\S*' of 3",
    ),
    "two steps": (3, lambda s: s.change(s.model(3, 2), lambda c: c.update(global_steps=4)), r"zero_pp_rank_2\S*model"),
    "two stages": (2, lambda s: s.write(s.model(3), {}), "several saves"),
    "two precisions": (2, lambda s: s.write(f"bf16_{s.optimizer(0)}", {}), "several saves"),
    "experts": (
        2,
        lambda s: s.change(s.optimizer(0), lambda c: c["optimizer_state_dict"].update(partition_count=[3, 1])),
        r"zero_pp_rank_0\S* cannot be used: groups of ranks .*experts",
    ),
    "expert files": (2, lambda s: s.write("layer_0_expert_0_mp_rank_00_model_states.pt", {}), "mixture of experts"),
    "model parallel": (2, lambda s: s.write("mp_rank_01_model_states.pt", {}), "of model parallelism"),
    "model parallel by size": (2, lambda s: s.change(s.model(2), lambda c: c.update(mp_world_size=2)), "parallelism"),
    "pipeline": (2, lambda s: s.change(s.model(2), lambda c: c.update(module=None)), "pipeline"),
    "universal": (2, lambda s: (s.folder / "zero").mkdir(), "in the universal format"),
    "cut off": (2, lambda s: cut_off(s, s.optimizer(1)), r"zero_pp_rank_1\S* cannot be used"),
    "no pickle": (2, lambda s: (s.folder / s.model(2)).write_bytes(b"x" * 500), r"mp_rank_00_model\S* cannot be used"),
    "no masters": (
        3,
        lambda s: s.change(s.optimizer(2), lambda c: c["optimizer_state_dict"].pop("fp32_flat_groups")),
        r"zero_pp_rank_2\S* cannot be used: `optimizer_state_dict.fp32_flat_groups` in it is a NoneType",
    ),
    "larger shape": (
        2,
        lambda s: s.change(s.model(2), lambda c: shapes(c, "body.weight", torch.Size((1 << 20, 1 << 20)))),
        r"mp_rank_00\S* cannot be used: .*'body.weight' cannot be put together",
    ),
    "huge part": (
        3,
        lambda s: [
            s.change(s.model(3, rank), lambda c: shapes(c, "scale", torch.Size((1 << 40,)))) for rank in range(3)
        ],
        "'scale' cannot be put together",
    ),
    "smaller shape": (
        2,
        lambda s: s.change(s.model(2), lambda c: shapes(c, "body.bias", torch.Size((2,)))),
        "elements",
    ),
    "no shape": (2, lambda s: s.change(s.model(2), lambda c: shapes(c, "scale", "x")), r"mp_rank_00\S* cannot be used"),
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
    "a place for nothing": (
        3,
        lambda s: [s.change(s.model(3, r), lambda c: c["frozen_param_shapes"].pop("frozen.bias")) for r in range(3)],
        r"does not say where the elements of 'frozen.bias' are",
    ),
    "no folder": (
        2,
        lambda s: (s.root / "latest").write_text("global_step9"),
        "names the folder 'global_step9', which",
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
    "one element over and over": (
        2,
        lambda s: s.change(s.model(2), lambda c: c["module"].update(mean=Forged(1 << 40, 0))),
        "a tensor claims the shape",
    ),
    "doubled": (
        2,
        lambda s: s.change(s.model(2), lambda c: c.update(more=doubled(60))),
        r"mp_rank_00\S* cannot be used",
    ),
    "an empty folder": (
        2,
        lambda s: [f.unlink() for f in s.folder.iterdir()],
        "holds neither mp_rank_00_model_states.pt",
    ),
}


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


def test_a_changed_byte_is_found(tmp_path: Path, foreign: types.ModuleType) -> None:
    save = Save(tmp_path / "c", 2, 2, foreign)
    file = save.folder / save.optimizer(1)
    content = bytearray(file.read_bytes())
    content[content.index(save.values["body.weight"].flatten()[60:65].numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)
    assert save.optimizer(1) in str(verify_checkpoint(save.root))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_begins_with_the_weights_and_does_not_go_on_from_them(
    tmp_path: Path, foreign: types.ModuleType, stage: int
) -> None:
    values = {name: value.detach().clone() for name, value in Net(seed=8).state_dict().items()}
    save = Save(tmp_path / "c.ckpt", stage, 3, foreign, values=values)

    def play(rank: int) -> Any:
        first: list[dict[str, Tensor]] = []
        beginning = LambdaCallback(on_train_start=lambda trainer, module: first.append(values_of(module)))
        with quiet():
            policy = CheckpointPolicy(initial_weights=str(save.root))
            trainer = make_trainer(ZeroStrategy(stage=3, checkpoint=policy), callbacks=[beginning])
            trainer.fit(Net(seed=5), batches(1))
            errors: list[str] = []
            with raised(errors):
                make_trainer(zero(2)).fit(Net(seed=5), batches(1), ckpt_path=save.root)
        return first[0], errors

    for first, errors in run_world(2, play):
        assert_same(first, values)
        assert "optimizer" in errors[0]


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed itself, in processes of its own: it changes much of what it is imported into


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_saves(tmp_path: Path, stage: int, precision: str, world_size: int) -> None:
    pytest.importorskip("deepspeed")
    port, out = str(free_port()), tmp_path / "c.ckpt"
    run = [sys.executable, "-m", "tests.checkpoint.deepspeed_run", str(out), str(stage), precision]
    ranks = [
        subprocess.Popen([*run, str(rank), str(world_size), port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(world_size)
    ]
    for rank in ranks:
        text, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0, text.decode()[-2000:]
    got = read(open_checkpoint(out, control())["state_dict"])
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
