"""What is not a whole checkpoint is refused, and the message names the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_zero import verify_checkpoint
from lightning_zero.checkpoint import (
    FlatShard,
    open_checkpoint,
    save_checkpoint_directory,
)
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.inspection import verification
from lightning_zero.extensions.inspection.contents import describe_checkpoint
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify, parameters
from tests.helpers.world import run_world


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "c"
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), path, control(), plan_summary={})
    return path


@pytest.fixture
def damaged(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "c")
    return tmp_path / "c"


def load(path: Path) -> dict[str, Any]:
    return open_checkpoint(path, control())


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record's content, with a checksum that fits."""
    whole = json.loads((path / "zero.json").read_text())
    change(whole["content"])
    text = json.dumps(whole["content"], separators=(",", ":"))
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "zero.json").write_text(json.dumps(whole))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", "meta.bin"])
def test_a_missing_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(damaged)


def test_without_our_record_it_is_a_directory_of_other_programs(damaged: Path) -> None:
    (damaged / "zero.json").unlink()
    load_and_verify(damaged, 1)
    (damaged / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"neither zero\.json nor \.metadata"):
        load(damaged)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", "meta.bin", "zero.json"])
@pytest.mark.parametrize("nbytes", [-1, 0, 1])
def test_a_file_of_another_size_is_named(damaged: Path, name: str, nbytes: int) -> None:
    content = (damaged / name).read_bytes()
    (damaged / name).write_bytes({-1: content[:-30], 0: b"", 1: content + b"x"}[nbytes])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(damaged)


def test_a_changed_byte_of_the_record_is_found_wherever_it_is(damaged: Path) -> None:
    size = (damaged / "zero.json").stat().st_size
    for position in range(0, size - 1, max(1, size // 200)):
        flip(damaged / "zero.json", position)
        with pytest.raises(CheckpointError, match=r"zero\.json"):
            load(damaged)
        flip(damaged / "zero.json", position)


def test_a_changed_byte_of_a_large_tensor_of_meta_is_found(damaged: Path) -> None:
    flip(damaged / "meta.bin", 100)
    with pytest.raises(CheckpointError, match=r"meta\.bin"):
        load(damaged)


def test_a_newer_version_is_named(damaged: Path) -> None:
    whole = json.loads((damaged / "zero.json").read_text())
    (damaged / "zero.json").write_text(json.dumps({**whole, "version": 2}))
    with pytest.raises(CheckpointError, match=r"format version 2 .*reads version 1"):
        load(damaged)


def test_another_byte_order_is_named(damaged: Path) -> None:
    rewrite(damaged, lambda content: content.update(byteorder="big"))
    with pytest.raises(CheckpointError, match="big-endian"):
        load(damaged)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "a\\b", "zero.json", "a\x00b"])
def test_a_file_name_that_leaves_the_directory_is_refused(damaged: Path, name: str) -> None:
    (damaged.parent / "secret").write_bytes((damaged / "__0_0.distcp").read_bytes())

    def change(content: dict[str, Any]) -> None:
        content["files"] = {name if old == "__0_0.distcp" else old: entry for old, entry in content["files"].items()}

    rewrite(damaged, change)
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load(damaged)


def test_a_link_out_of_the_directory_is_refused(damaged: Path) -> None:
    (damaged / "__0_0.distcp").rename(damaged.parent / "secret")
    (damaged / "__0_0.distcp").symlink_to(damaged.parent / "secret")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(damaged)


def test_a_file_that_becomes_a_link_after_opening_is_refused(damaged: Path) -> None:
    loaded = load(damaged)
    (damaged / "__0_0.distcp").rename(damaged.parent / "secret")
    (damaged / "__0_0.distcp").symlink_to(damaged.parent / "secret")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' cannot be read"):
        loaded["state_dict"]["vector"].read()


def test_a_pipe_does_not_block(damaged: Path) -> None:
    (damaged / "meta.pt").unlink()
    os.mkfifo(damaged / "meta.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(damaged)


def chunk(content: dict[str, Any], place: int, value: Any) -> None:
    content["items"]["state_dict.conv.weight"]["chunks"][0][place] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda content: chunk(content, 0, 1),
        lambda content: chunk(content, 1, 119),
        lambda content: chunk(content, 2, 99),
        lambda content: chunk(content, 2, -1),
        lambda content: chunk(content, 2, True),
        lambda content: chunk(content, 3, 10**9),
        lambda content: chunk(content, 3, -1),
        lambda content: chunk(content, 4, "x"),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[0, 2**62, 2**62], chunks=[]),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[0], chunks=[], dtype="quint8"),
        lambda content: content["meta"].update(x={"$": "timedelta", "value": [10**12, 0, 0]}),
        lambda content: content["meta"].update(x={"$": "tensor", "dtype": "float32", "shape": [9], "value": ""}),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[-3, -2, 4, 5]),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[10**12]),
        lambda content: content["items"]["state_dict.conv.weight"].update(dtype="Tensor"),
        lambda content: content["items"]["state_dict.conv.weight"].update(path=[5, "x"]),
        lambda content: content["items"]["state_dict.conv.weight"].update(path=["optimizer_states", 10**9]),
        lambda content: content["items"]["state_dict.conv.weight"].pop("path"),
        lambda content: content.update(meta=[]),
        lambda content: content["meta"]["callbacks"]["History"]["values"]["value"].update(offset=10**9),
        lambda content: content["meta"]["callbacks"]["History"]["values"]["value"].update(shape=[-1]),
    ],
)
def test_a_record_that_does_not_fit_the_files_is_refused(
    damaged: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(damaged, change)
    with pytest.raises(CheckpointError, match=r"zero\.json"):
        load(damaged)
    with pytest.raises(CheckpointError, match=r"zero\.json"):
        describe_checkpoint(damaged)
    (damage,) = verify_checkpoint(damaged)
    assert "zero.json" in damage


def test_a_plan_that_was_forged_is_named(damaged: Path) -> None:
    rewrite(damaged, lambda content: content.update(plan={"$": "nope"}))
    with pytest.raises(CheckpointError, match=r"zero\.json' cannot be used: an unknown type 'nope'"):
        describe_checkpoint(damaged)


def test_an_optimizer_that_is_none_is_described(tmp_path: Path) -> None:
    states = [{"state": [], "param_groups": [3, {"params": 1}]}, {"state": {0: 1}, "param_groups": 5}]
    rest = {"state_dict": {}, "lightning_zero": {"excluded_frozen": 3}}
    torch.save({**rest, "optimizer_states": states}, tmp_path / "x.ckpt")
    assert describe_checkpoint(tmp_path / "x.ckpt").count("not a group") == 2


def test_whatever_goes_wrong_while_verifying_is_a_damage(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(verification, "_checks", fail)
    assert verify_checkpoint(damaged) == [f"'{damaged}' is damaged: OverflowError: too large"]


def test_names_do_not_command_the_terminal(damaged: Path) -> None:
    name = "\x1b[2J\x1b]0;x\x07\nü"
    entry = {"path": ["state_dict", name], "dtype": "float32", "shape": [0], "chunks": []}
    rewrite(damaged, lambda content: content["items"].update({name: entry}))
    text = describe_checkpoint(damaged, tensors=True)
    assert r"\x1b[2J\x1b]0;x\x07\nü" in text
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


def test_nothing_but_the_record_and_raw_bytes_is_needed(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pickle is opened: both may hold anything, as long as their size is right."""
    for name in (".metadata", "meta.pt"):
        (damaged / name).write_bytes(b"\x80" * (damaged / name).stat().st_size)
    load_and_verify(damaged, 1)


def test_ranks_agree_on_the_failure(damaged: Path) -> None:
    def rank(number: int) -> str:
        path = damaged if number == 1 else damaged.parent / "nothing"
        with pytest.raises(CheckpointError) as caught:
            load(path)
        return str(caught.value)

    messages = run_world(2, rank, timeout=30)
    assert all("failed on rank 0" in message for message in messages)


def test_ranks_that_see_different_checkpoints_are_told_so(damaged: Path, original: Path) -> None:
    rewrite(damaged, lambda content: content.update(plan="another"))

    def rank(number: int) -> None:
        with pytest.raises(CheckpointError, match="rank 1 sees another checkpoint there than rank 0"):
            load(damaged if number == 1 else original)

    run_world(2, rank, timeout=30)


# ---------------------------------------------------------------------------------------------------------------------
# Verifying


FILES = ["__0_0.distcp", ".metadata", "meta.pt", "meta.bin", "zero.json"]


def test_a_whole_checkpoint_has_no_damage_and_is_read_once(original: Path) -> None:
    read: list[int] = []
    assert verify_checkpoint(original, progress=read.append) == []
    assert sum(read) == sum((original / name).stat().st_size for name in FILES if name != "zero.json")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found_wherever_it_is(damaged: Path, name: str) -> None:
    """Also in what no tensor lies in, and what our own loading never looks at."""
    size = (damaged / name).stat().st_size
    for position in {*range(0, size - 1, max(1, size // 60)), size - 2}:
        flip(damaged / name, position)
        found = verify_checkpoint(damaged)
        assert len(found) == 1
        assert str(damaged / name) in found[0]
        flip(damaged / name, position)
    assert verify_checkpoint(damaged) == []


def test_all_damages_are_listed_with_the_tensors(damaged: Path) -> None:
    items = json.loads((damaged / "zero.json").read_text())["content"]["items"]
    for name in ("conv.weight", "vector"):
        flip(damaged / "__0_0.distcp", items[f"state_dict.{name}"]["chunks"][0][3])
    (damaged / "meta.bin").unlink()
    (damaged / ".metadata").write_bytes(b"x")
    found = verify_checkpoint(damaged)
    assert len(found) == 4
    for words in (["conv.weight", "__0_0"], ["vector", "__0_0"], ["meta.bin", "missing"], [".metadata", "1 bytes"]):
        assert sum(all(word in line for word in words) for line in found) == 1


def test_verifying_before_loading_names_the_damage_on_every_rank(damaged: Path) -> None:
    """Whichever rank has the file to verify."""

    def rank(number: int) -> list[str]:
        messages = []
        for name in FILES[:-1]:
            if number == 0:
                flip(damaged / name, 200)
            control().barrier()
            with pytest.raises(CheckpointError) as caught:
                open_checkpoint(damaged, control(), verify=True)
            messages.append(str(caught.value))
            if number == 0:
                flip(damaged / name, 200)
        control().barrier()
        open_checkpoint(damaged, control(), verify=True)
        return messages

    for messages in run_world(2, rank, timeout=30):
        for name, message in zip(FILES, messages, strict=False):
            assert f"{name}' is damaged" in message


def save_two_equal_files(path: Path) -> None:
    """Two ranks, whose files differ in values only."""

    def rank(number: int) -> None:
        shard = FlatShard(torch.arange(8.0) + 8 * number, (16,), 8 * number)
        save_checkpoint_directory({"state_dict": {"w": shard}}, path, control(), plan_summary={})

    run_world(2, rank, timeout=30)


def exchange(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "other")
    (path / "__1_0.distcp").rename(path / "__0_0.distcp")
    (path / "other").rename(path / "__1_0.distcp")


def test_exchanged_files_are_found(tmp_path: Path) -> None:
    save_two_equal_files(tmp_path / "c")
    assert open_checkpoint(tmp_path / "c", control(), verify=True)["state_dict"]["w"].read().tolist() == list(range(16))
    exchange(tmp_path / "c")
    found = verify_checkpoint(tmp_path / "c")
    assert ["__0_0.distcp" in line for line in found] == [True, False]
    assert ["__1_0.distcp" in line for line in found] == [False, True]
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is damaged.*'state_dict\.w'"):
        open_checkpoint(tmp_path / "c", control(), verify=True)


def test_tied_tensors_are_damaged_together_and_read_once(tmp_path: Path) -> None:
    shard = FlatShard(torch.arange(16.0), (4, 4), 0)
    content = {"state_dict": {"a": shard, "b": FlatShard(shard.local, (4, 4), 0)}}
    save_checkpoint_directory(content, tmp_path / "c", control(), plan_summary={})
    read: list[int] = []
    assert verify_checkpoint(tmp_path / "c", progress=read.append) == []
    assert sum(read) == sum(file.stat().st_size for file in (tmp_path / "c").iterdir() if file.name != "zero.json")
    place = (tmp_path / "c" / "__0_0.distcp").read_bytes().index(torch.arange(16.0).numpy().tobytes())
    flip(tmp_path / "c" / "__0_0.distcp", place)
    (found,) = verify_checkpoint(tmp_path / "c")
    assert "'state_dict.a' and 'state_dict.b'" in found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_changed_byte_of_a_stock_directory_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    state = {"state_dict": {"a": torch.arange(600.0), "b": torch.ones(500)}, "extra": "words"}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.save({"callbacks": torch.arange(500.0)}, path / "meta.pt")
    assert verify_checkpoint(path) == []
    content = (path / "__0_0.distcp").read_bytes()
    for value, name in ((torch.arange(600.0), "state_dict.a"), (torch.ones(500), "state_dict.b")):
        position = content.index(value.numpy().tobytes()) + 100
        flip(path / "__0_0.distcp", position)
        (found,) = verify_checkpoint(path)
        assert "__0_0.distcp' is damaged" in found
        assert name in found
        with pytest.raises(CheckpointError, match=f"__0_0.distcp' is damaged.*{name}"):
            open_checkpoint(path, control(), verify=True)
        flip(path / "__0_0.distcp", position)
    flip(path / "meta.pt", 1500)
    (found,) = verify_checkpoint(path)
    assert "meta.pt' is damaged" in found


def test_a_changed_byte_of_a_torch_file_is_found(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.arange(600.0)}}, tmp_path / "x.ckpt")
    assert verify_checkpoint(tmp_path / "x.ckpt") == []
    flip(tmp_path / "x.ckpt", 1500)
    with pytest.raises(CheckpointError, match=r"x\.ckpt' is damaged"):
        open_checkpoint(tmp_path / "x.ckpt", control(), verify=True)


def test_an_archive_without_checksums_is_no_damage(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"a": torch.arange(600.0)}}, tmp_path / "x.ckpt")
        save_checkpoint_directory(checkpoint(1, end_to_end, control()), tmp_path / "c", control(), plan_summary={})
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify_checkpoint(tmp_path / "x.ckpt") == []
    assert verify_checkpoint(tmp_path / "c") == []
    (tmp_path / "c" / "zero.json").unlink()
    assert verify_checkpoint(tmp_path / "c") == []
    load_values = open_checkpoint(tmp_path / "c", control())["state_dict"]
    assert torch.equal(load_values["vector"].read(), parameters(1)["vector"])
