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

from lightning_zero.checkpoint import load_checkpoint_directory, save_checkpoint_directory
from lightning_zero.checkpoint.schema import Record
from lightning_zero.errors import CheckpointError
from tests.checkpoint.samples import checkpoint, control, end_to_end, load_and_verify
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
    return load_checkpoint_directory(path, control())


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


def test_a_copy_is_as_good(damaged: Path) -> None:
    load_and_verify(damaged, 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", "meta.bin", "zero.json"])
def test_a_missing_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(damaged)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", "meta.bin", "zero.json"])
@pytest.mark.parametrize("nbytes", [-1, 0, 1])
def test_a_file_of_another_size_is_named(damaged: Path, name: str, nbytes: int) -> None:
    content = (damaged / name).read_bytes()
    (damaged / name).write_bytes({-1: content[:-30], 0: b"", 1: content + b"x"}[nbytes])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(damaged)


def test_a_changed_byte_of_a_weight_is_found(damaged: Path) -> None:
    items = json.loads((damaged / "zero.json").read_text())["content"]["items"]
    flip(damaged / "__0_0.distcp", items["state_dict.conv.weight"]["chunks"][0][3] + 5)
    loaded = load(damaged)
    loaded["state_dict"]["embedding.weight"].read()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*damaged.*conv\.weight"):
        loaded["state_dict"]["conv.weight"].read()


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
        lambda content: chunk(content, 1, -1),
        lambda content: chunk(content, 2, 99),
        lambda content: chunk(content, 3, 10**9),
        lambda content: chunk(content, 3, -1),
        lambda content: chunk(content, 3, 1.5),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[-3, -2, 4, 5]),
        lambda content: content["items"]["state_dict.conv.weight"].update(shape=[10**12]),
        lambda content: content["items"]["state_dict.conv.weight"].update(dtype="Tensor"),
        lambda content: content["items"]["state_dict.conv.weight"].update(path=[]),
        lambda content: content["items"]["state_dict.conv.weight"].update(path=[5, "x"]),
        lambda content: content["items"]["state_dict.conv.weight"].update(path=["optimizer_states", 10**9]),
        lambda content: content["items"]["state_dict.conv.weight"].pop("path"),
        lambda content: content["items"]["state_dict.conv.weight"].pop("chunks"),
        lambda content: content.update(items=[]),
        lambda content: content.update(meta=[]),
        lambda content: content.pop("files"),
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
        with pytest.raises(CheckpointError, match="different directories"):
            load(damaged if number == 1 else original)

    run_world(2, rank, timeout=30)


def test_a_record_is_the_same_after_a_round_trip(original: Path) -> None:
    data = (original / "zero.json").read_bytes()
    assert Record.from_bytes(data).to_bytes() == data
    assert torch.float32 in {getattr(item, "dtype", None) for item in Record.from_bytes(data).items.values()}
