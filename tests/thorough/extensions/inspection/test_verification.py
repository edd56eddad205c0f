"""Whole, damaged, or neither: what has no checksums is never called whole; and the sample that a resume checks."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import save_file

from lightning_zero import CheckpointPolicy, ZeroStrategy, load_from_checkpoint, load_full_state_dict, verify_checkpoint
from lightning_zero.checkpoint import FlatShard, open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.load import Directory, find_checkpoint
from lightning_zero.cli import main
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.inspection.verification import own_checks, run_checks
from tests.helpers.samples import checkpoint, control, end_to_end
from tests.helpers.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"state_dict": {"a": torch.arange(600.0), "b": torch.ones(500)}}


def make(kind: str, path: Path) -> Path:
    """A checkpoint of a kind in a folder."""
    kind, _, option = kind.partition(" ")
    torch.serialization.set_crc32_options(option != "without")
    try:
        if kind == "own":
            save_checkpoint_directory(checkpoint(1, end_to_end, control()), path / "c", control(), plan_summary={})
            return path / "c"
        if kind == "stock":
            dcp.save(STATE, checkpoint_id=path / "c", no_dist=True)
            return path / "c"
        if kind == "hub":
            (path / "c").mkdir()
            save_file(STATE["state_dict"], path / "c" / "model.safetensors")
            return path / "c"
        if kind == "safetensors":
            save_file(STATE["state_dict"], path / "x.safetensors")
            return path / "x.safetensors"
        torch.save(STATE, path / "x.ckpt", _use_new_zipfile_serialization=option != "old")
        return path / "x.ckpt"
    finally:
        torch.serialization.set_crc32_options(True)


WHOLE = ["own", "torch"]
UNVERIFIED = {
    "own without": "__0_0.distcp",
    "torch without": "x.ckpt",
    "torch old": "x.ckpt",
    "stock": "c/.metadata",
    "hub": "c",
    "safetensors": "x.safetensors",
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_has_checksums_is_whole(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(kind, tmp_path)
    found = verify_checkpoint(path)
    assert (list(found), found.unverified, found.is_whole, found.doubt()) == ([], [], True, "")
    open_checkpoint(path, control(), verify=True)
    assert code_of("inspect", path) == 0
    assert "Verified: every file is whole." in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "name"), UNVERIFIED.items())
def test_what_has_no_checksums_is_not_called_whole(
    tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(kind, tmp_path)
    found = verify_checkpoint(path)
    assert list(found) == []
    assert not found.is_whole
    assert any(text.endswith(f"{name}'") for text in found.unverified)
    with pytest.warns(UserWarning, match="cannot be verified") as caught:
        open_checkpoint(path, control(), verify=True)
    assert len(caught) == 1
    assert f"{name}'" in str(caught[0].message)
    for verify in (False, "sample"):
        open_checkpoint(path, control(), verify=verify)  # says nothing, as nothing was asked
    assert code_of("inspect", path) == 3
    told = capsys.readouterr().out
    assert "It cannot be verified: " in told
    assert "Verified" not in told
    assert code_of("inspect", path, "--no-verify") == 0


def test_a_damage_counts_more_than_a_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("stock", tmp_path)
    flip(path / "__0_0.distcp", torch.arange(600.0))
    found = verify_checkpoint(path)
    assert len(found) == 1
    assert found.unverified
    assert not found.is_whole
    assert code_of("inspect", path) == 1
    assert "cannot be verified" not in capsys.readouterr().out.partition("Damaged")[2]


def test_the_policy_says_what_it_could_not_verify(tmp_path: Path) -> None:
    save_file(BoringModel().state_dict(), tmp_path / "x.safetensors")

    def rank(_: int) -> list[str]:
        policy = CheckpointPolicy(verify=True, initial_weights=str(tmp_path / "x.safetensors"))
        options: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = ZeroStrategy(3, checkpoint=policy)
            Trainer(accelerator="cpu", devices=1, strategy=strategy, fast_dev_run=True, **options).fit(BoringModel())
        return [str(warning.message) for warning in caught if "cannot be verified" in str(warning.message)]

    ((message,),) = run_world(1, rank, init_group=False, timeout=60)
    assert "x.safetensors' was loaded. It cannot be verified" in message


def test_loading_in_one_process_says_so_too(tmp_path: Path) -> None:
    path = make("safetensors", tmp_path)
    with pytest.warns(UserWarning, match=r"x\.safetensors' was loaded\. It cannot be verified"):
        load_full_state_dict(path, verify=True)


def code_of(*arguments: str | Path) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code  # type: ignore[return-value]
    return 0


def flip(path: Path, value: torch.Tensor) -> None:
    """Change a bit of a tensor in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(value.numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)


# ----------------------------------------------------------------------------------------------------------- the sample


TENSORS = 200


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, whose files have 200 tensors of 40 kB each, and differ in values only."""
    path = tmp_path_factory.mktemp("large") / "c"

    def rank(number: int) -> None:
        state = {
            f"w{name}": FlatShard(torch.arange(10_000.0) + name + 10_000 * number, (20_000,), 10_000 * number)
            for name in range(TENSORS)
        }
        save_checkpoint_directory({"state_dict": state}, path, control(), plan_summary={})

    run_world(2, rank, timeout=60)
    return path


@pytest.fixture
def copied(large: Path, tmp_path: Path) -> Path:
    shutil.copytree(large, tmp_path / "c")
    return tmp_path / "c"


def test_a_sample_is_a_twentieth_of_each_file(large: Path) -> None:
    read: dict[str, int] = {}
    for name, check in zip(Directory(find_checkpoint(large).files).record.files, checks(large), strict=True):
        pieces: list[int] = []
        assert run_checks([check], pieces.append) == []
        read[name] = check.nbytes
        assert sum(pieces) == check.nbytes  # and nothing beside it
    for name in ("__0_0.distcp", "__1_0.distcp"):
        nbytes = (large / name).stat().st_size
        assert 0.8 * nbytes / 20 < read[name] <= nbytes / 20
    assert read["meta.pt"] == (large / "meta.pt").stat().st_size  # small ones whole
    assert [check.nbytes for check in checks(large)] == list(read.values())  # and the same each time


def checks(path: Path) -> Any:
    return own_checks(Directory(find_checkpoint(path).files), sampled=True)


def test_exchanged_files_are_found_by_the_sample(copied: Path) -> None:
    (copied / "__0_0.distcp").rename(copied / "other")
    (copied / "__1_0.distcp").rename(copied / "__0_0.distcp")
    (copied / "other").rename(copied / "__1_0.distcp")
    open_checkpoint(copied, control())  # which nothing else notices
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is damaged"):
        open_checkpoint(copied, control(), verify="sample")


def test_a_file_of_zeros_is_found_by_the_sample(copied: Path) -> None:
    nbytes = (copied / "__1_0.distcp").stat().st_size
    (copied / "__1_0.distcp").write_bytes(b"\0" * nbytes)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp' is damaged"):
        open_checkpoint(copied, control(), verify="sample")


def test_a_changed_bit_is_found_in_one_of_twenty_tensors(copied: Path) -> None:
    """Which is why there is more than the sample."""
    place = next(iter(checks(copied)[0].damages.args[2]))  # type: ignore[attr-defined]
    content = bytearray((copied / "__0_0.distcp").read_bytes())
    content[place[0] + 5] ^= 1
    (copied / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is damaged"):
        open_checkpoint(copied, control(), verify="sample")


def test_a_single_large_tensor_is_the_sample(tmp_path: Path) -> None:
    shard = FlatShard(torch.arange(1_000_000.0), (1_000_000,), 0)
    save_checkpoint_directory({"state_dict": {"w": shard}}, tmp_path / "c", control(), plan_summary={})
    flip(tmp_path / "c" / "__0_0.distcp", torch.arange(1_000_000.0))
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(tmp_path / "c", control(), verify="sample")


@pytest.mark.parametrize("verify", [False, True])
def test_loading_checks_the_sample_without_being_asked(tmp_path: Path, verify: bool) -> None:
    """Small files whole."""
    model = BoringModel()
    weight = torch.arange(64.0).reshape(2, 32)
    state = {"layer.weight": FlatShard(weight.reshape(-1), (2, 32), 0), "layer.bias": FlatShard(torch.ones(2), (2,), 0)}
    save_checkpoint_directory({"state_dict": state}, tmp_path / "c", control(), plan_summary={})
    loaded = load_from_checkpoint(type(model), tmp_path / "c", verify=verify)
    assert torch.equal(loaded.layer.weight, weight)
    flip(tmp_path / "c" / "__0_0.distcp", weight)
    with pytest.raises(CheckpointError, match=r"layer\.weight' at byte \d+ do not match their checksum"):
        load_from_checkpoint(type(model), tmp_path / "c", verify=verify)
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        load_full_state_dict(tmp_path / "c", verify=verify)


def test_one_rank_warns_once(tmp_path: Path) -> None:
    path = make("stock", tmp_path)

    def rank(_: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            open_checkpoint(path, control(), verify=True)
        return sum("cannot be verified" in str(warning.message) for warning in caught)

    assert run_world(2, rank, timeout=30) == [1, 0]
