"""A checkpoint saved by one world is what another loads, and what other readers find."""

from __future__ import annotations

import functools
import json
import sys
import zlib
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero.checkpoint import (
    FlatShard,
    StoredTensor,
    is_checkpoint_directory_at,
    open_checkpoint,
    save_checkpoint_directory,
)
from lightning_zero.errors import CheckpointError
from tests.helpers.samples import (
    Cut,
    checkpoint,
    control,
    end_to_end,
    load_and_verify,
    one_by_one,
    parameters,
    sharded,
)
from tests.helpers.world import run_world


def save(path: Path, version: int = 1, cut: Cut = end_to_end) -> None:
    ranks = control()
    save_checkpoint_directory(checkpoint(version, cut, ranks), path, ranks, plan_summary={"stage": 3})


def save_alone(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    save_checkpoint_directory(content, path, control(), plan_summary={})
    return open_checkpoint(path, control())


@pytest.fixture(scope="module")
def saved_by_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per way of cutting, saved at world 3."""
    folder = tmp_path_factory.mktemp("saved")

    def rank(_: int) -> None:
        save(folder / "end_to_end", 1, end_to_end)
        save(folder / "one_by_one", 2, one_by_one)

    run_world(3, rank, timeout=30)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_saved_at_world_3_loads_at_any_world_with_any_cut(saved_by_three: Path, world_size: int) -> None:
    def rank(_: int) -> None:
        for cut in (end_to_end, one_by_one):
            load_and_verify(saved_by_three / "end_to_end", 1, cut)
            load_and_verify(saved_by_three / "one_by_one", 2, cut)

    run_world(world_size, rank, timeout=30)


def test_the_directory_holds_the_names_of_the_format(saved_by_three: Path) -> None:
    folder = saved_by_three / "end_to_end"
    names = {path.name for path in folder.iterdir()}
    assert names == {"zero.json", ".metadata", "meta.pt", "meta.bin", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert {path.name for path in saved_by_three.iterdir()} == {"end_to_end", "one_by_one"}
    keys = set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert {
        "state_dict.conv.weight",
        "state_dict.norm.running_mean",
        "optimizer_0.state.conv.weight.exp_avg",
        "optimizer_0.state.conv.weight.step",
        "optimizer_0.param_groups.0.params",
        "optimizer_0.param_groups.0.betas",
        "optimizer_1.param_groups.0.lr",
    } <= keys
    assert keys <= set(json.loads((folder / "zero.json").read_text())["content"]["items"])
    assert str(saved_by_three) not in (folder / ".metadata").read_bytes().decode("latin-1")


def check_full(loaded: dict[str, Any], version: int) -> None:
    for name, value in parameters(version).items():
        assert torch.equal(loaded["state_dict"][name], value), name
        assert torch.equal(loaded["optimizer_0"]["state"][name]["exp_avg"], value * 0.5), name
        assert loaded["optimizer_0"]["state"][name]["step"].item() == version
    group = loaded["optimizer_0"]["param_groups"][0]
    assert group == {"params": list(parameters()), "lr": 0.1 * version, "betas": (0.9, 0.99), "fused": None}


def test_lightning_fabric_reads_it(saved_by_three: Path) -> None:
    loaded = _load_distributed_checkpoint(saved_by_three / "one_by_one")
    check_full(loaded, 2)
    assert loaded["epoch"] == 2
    assert loaded["lr_schedulers"] == [{"last_epoch": 2, "_last_lr": [0.2]}]


def test_plain_dcp_load_fills_tensors(saved_by_three: Path) -> None:
    def rank(_: int) -> None:
        whole = {name: torch.zeros_like(value) for name, value in parameters().items()}
        dcp.load({"state_dict": whole}, checkpoint_id=saved_by_three / "end_to_end")
        for name, value in parameters(1).items():
            assert torch.equal(whole[name], value), name

    run_world(2, rank, timeout=30)


def test_read_into_casts_and_reads_any_range(saved_by_three: Path) -> None:
    loaded = open_checkpoint(saved_by_three / "end_to_end", control())
    stored, full = loaded["state_dict"]["conv.weight"], parameters(1)["conv.weight"].reshape(-1)
    for start in range(0, full.numel(), 7):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            part = torch.zeros(full.numel() - start, dtype=dtype)
            stored.read_into(part, start)
            assert torch.equal(part, full[start:].to(dtype))
    strided = torch.zeros(10)[::2]
    stored.read_into(strided, 3)
    assert torch.equal(strided, full[3:8])
    with pytest.raises(ValueError, match=r"conv\.weight"):
        stored.read_into(torch.zeros(10), full.numel() - 9)


def test_a_stored_tensor_is_a_tensor_to_code_that_rearranges_a_checkpoint(saved_by_three: Path) -> None:
    state = open_checkpoint(saved_by_three / "end_to_end", control())["state_dict"]
    stored, full = state["embedding.weight"], parameters(1)["embedding.weight"]
    assert isinstance(stored, torch.Tensor)
    assert (stored.shape, stored.dtype, stored.numel(), stored.ndim) == (full.shape, full.dtype, full.numel(), 2)
    assert isinstance(stored.detach(), StoredTensor)
    assert torch.equal(torch.cat([stored, stored[2:]]), torch.cat([full, full[2:]]))
    assert torch.equal(stored.t().contiguous() * 2, full.t() * 2)
    assert torch.equal(stored.to(torch.float64), full.double())
    module = torch.nn.Embedding(13, 6)
    module.load_state_dict({"weight": stored})
    assert torch.equal(module.weight, full)
    state["embedding.weight"] += 1
    assert torch.equal(state["embedding.weight"], full + 1)


def test_a_state_that_only_some_ranks_have_is_kept(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        ranks = control()
        content = checkpoint(1, end_to_end, ranks)
        states = content["optimizer_states"][0]["state"]
        for name in list(states):
            shard = states[name]["exp_avg"]
            if shard.numel() and not shard.local.numel():
                del states[name]  # what an optimizer without this parameter in its groups would have
        save_checkpoint_directory(content, tmp_path / "c", ranks, plan_summary={})
        load_and_verify(tmp_path / "c", 1)

    run_world(3, rank, timeout=30)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "full.pt")
    check_full(torch.load(tmp_path / "full.pt", weights_only=True), 1)


def test_ranks_with_different_checkpoints_are_refused_on_all(tmp_path: Path) -> None:
    def rank(number: int) -> str:
        shape = (4, 2) if number == 1 else (2, 4)
        content = {"state_dict": {"w": FlatShard(torch.zeros(4), shape, 4 * number)}}
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint_directory(content, tmp_path / "c", control(), plan_summary={})
        return str(caught.value)

    messages = run_world(2, rank, timeout=30)
    assert messages[0] == messages[1]
    assert "state_dict.w" in messages[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_that_leave_a_hole_or_overlap_are_refused(tmp_path: Path, world_size: int) -> None:
    def rank(number: int) -> None:
        hole = FlatShard(torch.zeros(3), (4, 2), 4 * number)
        overlap = FlatShard(torch.zeros(4), (8,), 3 * number)  # as many elements as there are, but the last is nowhere
        for shard in (hole, overlap):
            with pytest.raises(CheckpointError, match=r"state_dict\.w.* stored"):
                save_checkpoint_directory({"state_dict": {"w": shard}}, tmp_path / "c", control(), plan_summary={})

    run_world(world_size, rank, timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_shards_under_another_key_are_stored_sharded_too(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        ranks = control()
        content = {
            "state_dict": {},
            "averaging_state": {
                "n": 3,
                7: [sharded(parameters(4), end_to_end, ranks)["vector"], {"x": torch.zeros(2)}],
            },
        }
        save_checkpoint_directory(content, tmp_path / "c", ranks, plan_summary={})
        loaded = open_checkpoint(tmp_path / "c", ranks)
        assert loaded["state_dict"] == {}
        assert loaded["averaging_state"]["n"] == 3
        assert torch.equal(loaded["averaging_state"][7][0].read(), parameters(4)["vector"])
        assert torch.equal(loaded["averaging_state"][7][1]["x"].read(), torch.zeros(2))

    run_world(2, rank, timeout=30)


def test_a_tied_parameter_is_stored_once(tmp_path: Path) -> None:
    value = torch.randn(100_000)
    loaded = save_alone(
        tmp_path / "c", {"state_dict": {name: FlatShard(value, (1000, 100), 0) for name in ("a.weight", "b.weight")}}
    )
    assert (tmp_path / "c" / "__0_0.distcp").stat().st_size < 1.1 * value.nbytes
    for name in ("a.weight", "b.weight"):
        assert torch.equal(loaded["state_dict"][name].read().view(-1), value)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "full.pt")
    assert torch.equal(torch.load(tmp_path / "full.pt")["state_dict"]["b.weight"].view(-1), value)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.float8_e4m3fn]
)
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(24).remainder(2).to(dtype)
    loaded = save_alone(tmp_path / "c", {"state_dict": {"s": FlatShard(value, (4, 6), 0), "p": value.view(2, 12)}})
    for name in ("s", "p"):
        found = loaded["state_dict"][name].read().view(-1)
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_what_is_not_safe_to_load_is_named_and_does_not_stop_a_resume(tmp_path: Path) -> None:
    content = {
        "state_dict": {"w": torch.ones(2), "_extra_state": functools.partial(print)},
        "hyper_parameters": {"activation": functools.partial(torch.relu), "path": Path("x"), "lr": 0.1},
        "large": torch.ones(100_000),
    }
    with pytest.warns(UserWarning, match="hyper_parameters.activation") as caught:
        loaded = save_alone(tmp_path / "c", content)
    assert "state_dict._extra_state" in str(caught[0].message)
    assert loaded["hyper_parameters"] == {"path": Path("x"), "lr": 0.1}
    assert set(loaded["state_dict"]) == {"w"}
    assert torch.equal(loaded["large"], content["large"])
    whole = torch.load(tmp_path / "c" / "meta.pt", weights_only=False)
    assert whole["hyper_parameters"]["activation"].func is torch.relu


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, whenever it loads one
def test_what_weights_only_accepts_is_loaded_from_the_file(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    loaded = save_alone(tmp_path / "c", {"state_dict": {"mask": sparse}, "extra": {"mask": sparse, "n": 1}})
    assert torch.equal(loaded["state_dict"]["mask"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["extra"]["mask"].to_dense(), torch.eye(3))


def test_under_inference_mode(tmp_path: Path) -> None:
    """Lightning saves from validation hooks, which run under it."""
    with torch.inference_mode():
        save(tmp_path / "c")
        loaded = open_checkpoint(tmp_path / "c", control())
        whole = loaded["state_dict"]["conv.weight"].read()
        value = loaded["callbacks"]["History"]["values"]
    assert not whole.is_inference()
    assert not value.is_inference()
    whole.requires_grad_().sum().backward()
    load_and_verify(tmp_path / "c", 1)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"nosuch://bucket/x.*\n.*Protocol not known"):
        save_checkpoint_directory({"state_dict": {}}, "nosuch://bucket/x", control(), plan_summary={})
    assert not is_checkpoint_directory_at("nosuch://bucket/x")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_record_holds_the_checksum_of_every_file(tmp_path: Path, wanted: bool) -> None:
    content = {
        "state_dict": {
            "small": torch.rand(10),
            "large": torch.rand(300_000),
            "odd": {1: 2},
            "middle": torch.rand(70_000),
        },
        "meta": [torch.rand(9000), torch.rand(300_000)],
    }
    torch.serialization.set_crc32_options(wanted)
    try:
        loaded = save_alone(tmp_path / "c", content)
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("small", "large", "middle"):
        assert torch.equal(loaded["state_dict"][name].read(), content["state_dict"][name])
    files = json.loads((tmp_path / "c" / "zero.json").read_text())["content"]["files"]
    assert set(files) == {"__0_0.distcp", ".metadata", "meta.pt", "meta.bin"}
    for name, (nbytes, crc32) in files.items():
        data = (tmp_path / "c" / name).read_bytes()
        assert len(data) == nbytes
        assert crc32 == (zlib.crc32(data) if wanted or name != "__0_0.distcp" else None), name


def test_shards_in_a_tuple_are_refused_by_name(tmp_path: Path) -> None:
    shards = tuple(checkpoint(3, end_to_end, control())["state_dict"].values())
    for ema in (shards, [shards], {"a": shards, "b": 1}):
        with pytest.raises(CheckpointError, match=r"'ema(\.a)?' holds sharded parameters in a tuple: use a list"):
            save_alone(tmp_path / "c", {"state_dict": {}, "ema": ema})
    assert list(tmp_path.iterdir()) == []


def test_a_member_of_an_enum_that_this_program_has_not_imported_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere: Any = ModuleType("elsewhere")
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, "elsewhere", elsewhere)
        elsewhere.Mode = Enum("Mode", ["A"], module="elsewhere")
        state = {"w": torch.ones(2), "mode": elsewhere.Mode.A, "n": 3}
        save_checkpoint_directory({"state_dict": state}, tmp_path / "c", control(), plan_summary={})
        assert open_checkpoint(tmp_path / "c", control())["state_dict"]["mode"] is elsewhere.Mode.A
    with pytest.warns(UserWarning, match=r"Left out .*'state_dict\.mode' \(elsewhere\.Mode\.A, an enum that"):
        loaded = open_checkpoint(tmp_path / "c", control())
    assert list(loaded["state_dict"]) == ["w", "n"]
