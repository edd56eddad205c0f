"""Whatever kind a checkpoint is and wherever it lies, what comes out is Lightning's dictionary, read once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_zero import verify_checkpoint
from lightning_zero.checkpoint import (
    FlatShard,
    StoredTensor,
    is_checkpoint_directory_at,
    open_checkpoint,
    save_checkpoint_directory,
)
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.checkpoint.load import Directory, read_directory, read_foreign_directory
from lightning_zero.checkpoint.storage.files import LocalFiles, read_bytes
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.formats.safetensors import SAFETENSORS_DTYPES, read_safetensors
from tests.helpers.samples import checkpoint, control, end_to_end, one_by_one, parameters, verify
from tests.helpers.world import run_world


@pytest.fixture
def store() -> Iterator[str]:
    """The URL of an empty folder in memory."""
    url = f"memory://{uuid.uuid4().hex}/folder"
    yield url
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(url.rpartition("/")[0].removeprefix("memory://"), recursive=True)


def upload(path: Path, url: str) -> str:
    system = fsspec.filesystem("memory")
    for file in [path] if path.is_file() else path.iterdir():
        system.pipe_file(f"{url}/{file.name}", file.read_bytes())
    return url


def same(found: Any, expected: Any) -> bool:
    return torch.equal(found.read() if isinstance(found, StoredTensor) else found, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Torch files


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"epoch": 1, "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def test_a_lightning_file_keeps_parameter_numbers(tmp_path: Path, trained: dict[str, Any]) -> None:
    torch.save(trained, tmp_path / "a.ckpt")
    found = open_checkpoint(tmp_path / "a.ckpt", control(), verify=True)
    assert found.keys() == trained.keys()
    assert found["state_dict"].keys() == {"weight", "bias"}
    assert same(found["state_dict"]["weight"], trained["state_dict"]["weight"])
    assert found["optimizer_states"][0]["state"].keys() == {0, 1}
    assert not is_checkpoint_directory_at(tmp_path / "a.ckpt")


def test_a_torch_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "w.pt")
    found = open_checkpoint(str(tmp_path / "w.pt"), control())
    assert str(tmp_path / "w.pt") in Path("/proc/self/maps").read_text()
    assert found.keys() == {"state_dict"}  # a bare state dict
    assert same(found["state_dict"]["w"], torch.ones(1 << 20))


def test_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match=r"cannot be verified: .*w\.pt'\.$"):
        assert same(open_checkpoint(tmp_path / "w.pt", control(), verify=True)["state_dict"]["w"], torch.ones(3))


def test_a_torch_file_behind_a_url(tmp_path: Path, store: str, trained: dict[str, Any]) -> None:
    torch.save(trained, tmp_path / "a.ckpt")
    upload(tmp_path / "a.ckpt", store)
    found = open_checkpoint(f"{store}/a.ckpt", control(), verify=True)
    assert same(found["state_dict"]["weight"], trained["state_dict"]["weight"])
    assert open_checkpoint(f"file://{tmp_path}/a.ckpt", control())["epoch"] == 1


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 1}, {1: torch.ones(1)}, torch.ones(2)], ids=repr)
def test_a_torch_file_of_something_else(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt.*neither a Lightning checkpoint"):
        open_checkpoint(tmp_path / "x.pt", control())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"some text", b"\x80\x02cos\nsystem\n"])
def test_a_file_that_is_no_torch_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.ckpt"):
        open_checkpoint(tmp_path / "x.ckpt", control())


@pytest.mark.parametrize("place", ["nothing", "nowhere/nothing", "empty"])
@pytest.mark.parametrize("remote", [False, True])
def test_nothing_there(tmp_path: Path, store: str, place: str, remote: bool) -> None:
    (tmp_path / "empty").mkdir()
    fsspec.filesystem("memory").pipe_file(f"{store}/empty/readme", b"")
    path = f"{store}/{place}" if remote else tmp_path / place
    assert not is_checkpoint_directory_at(path)
    with pytest.raises(CheckpointError, match=place):
        open_checkpoint(path, control())
    assert len(verify_checkpoint(path)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Safetensors


def of_every_dtype() -> dict[str, Tensor]:
    values = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    return {**values, **parameters()}


def test_a_safetensors_file_holds_what_their_library_wrote(tmp_path: Path) -> None:
    values = of_every_dtype()
    save_file(values, tmp_path / "w.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"cannot be verified: .*w\.safetensors'\.$"):
        state = open_checkpoint(tmp_path / "w.safetensors", control(), verify=True)["state_dict"]
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape)
        assert torch.equal(state[name].read().view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    part = torch.zeros(4)
    state["embedding.weight"].read_into(part, 11)
    assert torch.equal(part, values["embedding.weight"].reshape(-1)[11:15])


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_a_hugging_face_directory(tmp_path: Path, store: str, linked: bool, remote: bool) -> None:
    values = parameters()
    names = list(values)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    (tmp_path / "hf").mkdir()
    (tmp_path / "blobs").mkdir()
    for file, keys in files.items():
        target = tmp_path / ("blobs" if linked else "hf") / file
        save_file({key: values[key] for key in keys}, target)
        if linked:  # as in the hub's cache
            (tmp_path / "hf" / file).symlink_to(f"../blobs/{file}")
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    path = upload(tmp_path / "hf", store) if remote else tmp_path / "hf"
    assert is_checkpoint_directory_at(path)
    state = open_checkpoint(path, control())["state_dict"]
    assert all(same(state[name], value) for name, value in values.items())


def test_a_hugging_face_directory_with_one_file(tmp_path: Path) -> None:
    save_file(parameters(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    state = open_checkpoint(tmp_path, control())["state_dict"]
    assert same(state["vector"], parameters()["vector"])


# ---------------------------------------------------------------------------------------------------------------------
# Our own and stock directories behind a URL


def test_a_directory_behind_a_url(tmp_path: Path, store: str) -> None:
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), tmp_path / "c", control(), plan_summary={})
    upload(tmp_path / "c", store)
    assert is_checkpoint_directory_at(store)
    verify(open_checkpoint(store, control(), verify=True), 1, one_by_one, control())
    assert verify_checkpoint(f"{store}/") == []
    fsspec.filesystem("memory").rm_file(f"{store}/meta.pt")
    with pytest.raises(CheckpointError, match=r"meta\.pt"):
        open_checkpoint(store, control())
    fsspec.filesystem("memory").pipe_file(f"{store}/meta.pt", b"x")
    with pytest.raises(CheckpointError, match=r"meta\.pt.*1 bytes"):
        open_checkpoint(store, control())


def test_an_object_that_vanishes_while_it_is_read(tmp_path: Path, store: str) -> None:
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), tmp_path / "c", control(), plan_summary={})
    found = open_checkpoint(upload(tmp_path / "c", store), control())
    fsspec.filesystem("memory").rm_file(f"{store}/__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*removed"):
        found["state_dict"]["vector"].read()
    fsspec.filesystem("memory").pipe_file(f"{store}/__0_0.distcp", b"x" * 100)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' ends at byte 100"):
        found["state_dict"]["vector"].read()


@pytest.mark.parametrize("ending", ["safetensors", "ckpt"])
def test_a_file_at_the_root_of_a_file_system(tmp_path: Path, ending: str) -> None:
    state = {"w": torch.arange(3.0)}
    save_file(state, tmp_path / "x") if ending == "safetensors" else torch.save(state, tmp_path / "x")
    name = f"{uuid.uuid4().hex}.{ending}"
    fsspec.filesystem("memory").pipe_file(f"/{name}", (tmp_path / "x").read_bytes())
    try:
        for url in (f"memory://{name}", f"memory:///{name}"):
            assert same(open_checkpoint(url, control())["state_dict"]["w"], state["w"])
    finally:
        fsspec.filesystem("memory").rm_file(f"/{name}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stock_directory_behind_a_url(tmp_path: Path, store: str) -> None:
    dcp.save({"model": parameters()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.warns(UserWarning, match=r"cannot be verified: .*\.metadata'\.$"):
        found = open_checkpoint(upload(tmp_path / "c", store), control(), verify=True)
    assert all(same(found["state_dict"][name], value) for name, value in parameters().items())


class CountedStore(MemoryFileSystem):
    """Memory that counts requests for content."""

    protocol = "counted"
    requests = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        CountedStore.requests += 1
        return super().cat_file(*args, **kwargs)


def test_small_tensors_behind_a_url_do_not_take_a_request_each(tmp_path: Path, store: str) -> None:
    fsspec.register_implementation("counted", CountedStore, clobber=True)
    values = {f"layer.{number}": torch.full((1000,), float(number)) for number in range(700)}
    save_file(values, tmp_path / "w.safetensors")
    upload(tmp_path / "w.safetensors", store)
    state = open_checkpoint(store.replace("memory://", "counted://") + "/w.safetensors", control())["state_dict"]
    CountedStore.requests = 0
    assert all(same(state[name], value) for name, value in values.items())
    assert CountedStore.requests <= 3  # 2.8 MB in blocks of one


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is read twice


class Counting(LocalFiles):
    """Counts the bytes that are read."""

    count = 0

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        self.count += len(memory)
        super().read_into(name, offset, memory)


Opening = dict[str, tuple[Path, Callable[[Counting], Any]]]

VALUES = {**parameters(), "large": torch.arange(100 * 2003).float().reshape(2003, 100)}


def evenly(value: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's elements of a tensor cut by itself."""
    return value.numel() * rank // world_size, value.numel() * (rank + 1) // world_size


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> Opening:
    """Our own directory by two ranks, the same without its record, and a file; with how each is opened."""
    folder = tmp_path_factory.mktemp("sources")

    def rank(number: int) -> None:
        shards = {}
        for name, value in VALUES.items():
            start, end = evenly(value, number, 2)
            shards[name] = FlatShard(value.reshape(-1)[start:end].clone(), value.shape, start)
        save_checkpoint_directory({"state_dict": shards}, folder / "own", control(), plan_summary={})

    run_world(2, rank, timeout=30)
    shutil.copytree(folder / "own", folder / "stock")
    (folder / "stock" / "zero.json").unlink()
    (folder / "file").mkdir()
    save_file(VALUES, folder / "file" / "w.safetensors")
    return {
        "own": (folder / "own", lambda files: read_directory(Directory(files))),
        "stock": (folder / "stock", lambda files: read_foreign_directory(files, None)),
        "file": (folder / "file", lambda files: read_safetensors(files, "w.safetensors")),
    }


@pytest.mark.parametrize("kind", ["own", "file"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_byte_is_read_once_when_the_world_changes(opening: Opening, kind: str, world_size: int) -> None:
    path, read = opening[kind]
    total = 0
    for rank in range(world_size):
        files = Counting(path)
        state = read(files).checkpoint["state_dict"]
        files.count = 0
        expected = 0
        for key, value in VALUES.items():
            start, end = evenly(value, rank, world_size)
            part = torch.zeros(end - start, dtype=value.dtype)
            state[key].read_into(part, start)
            assert torch.equal(part, value.reshape(-1)[start:end])
            expected += part.nbytes
        assert files.count == expected
        total += expected
    assert total == sum(value.nbytes for value in VALUES.values())


def test_opening_reads_no_tensor(opening: Opening) -> None:
    for path, read in opening.values():
        files = Counting(path)
        read(files)
        assert files.count < 20_000 < VALUES["large"].nbytes


def test_many_files_do_not_use_up_the_descriptors(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / str(number)).write_bytes(bytes([number]))

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    files = LocalFiles(tmp_path)
    for number in [*range(40), *range(40)]:
        assert read_bytes(files, str(number)) == bytes([number])
    assert count() <= before + 17  # the folder and 16 files
    del files
    assert count() == before


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def anonymous_mib(field: str) -> float:
    """``VmRSS`` or ``VmHWM``, the peak, of this process, but for what is only mapped from files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(lines[field].split()[0]) - int(lines["RssFile"].split()[0])) / 1024


@pytest.mark.parametrize("kind", ["own", "file", "torch"])
def test_reading_needs_little_more_than_the_destination(tmp_path: Path, kind: str) -> None:
    value = torch.zeros(100, 1 << 18)  # 100 MiB
    if kind == "own":
        shard = FlatShard(value.view(-1), value.shape, 0)
        save_checkpoint_directory({"state_dict": {"w": shard}}, tmp_path / "w", control(), plan_summary={})
    elif kind == "file":
        save_file({"w": value}, tmp_path / "w.safetensors")
    elif kind == "torch":
        torch.save({"w": value}, tmp_path / "w")
    path = tmp_path / ("w.safetensors" if kind == "file" else "w")

    def rank(_: int) -> float:
        destination = torch.ones(50 << 18, dtype=torch.bfloat16)  # the second half, cast
        before = anonymous_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        found = open_checkpoint(path, control())  # stays mapped until the end
        read_slices([(found["state_dict"]["w"], 50 << 18, destination)])
        assert not destination.any()
        return anonymous_mib("VmHWM") - before

    # Pieces of 16 MiB, read and cast.
    assert run_world(1, rank, init_group=False, timeout=30)[0] < 40
