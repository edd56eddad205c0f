"""Files that were made to run code, to read other files or to use up the memory: refused by name, on every rank.

The code they would run makes a folder. Every kind is first loaded the way that runs it, so that a refusal is not one
of a file that is only broken.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from lightning_zero import verify_checkpoint
from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.format.dcp import parse_metadata
from lightning_zero.errors import CheckpointError
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*It cannot be verified"),
]


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What exists if code was run."""
    return tmp_path / "trace"


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A harmless directory as Lightning's ModelParallelStrategy writes it."""
    path = tmp_path / "c"
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    dcp.save({"state_dict": state, "optimizer_0": {"param_groups": [{"lr": 0.1}]}}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1}, path / "meta.pt")
    return path


def archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def ran(trace: Path) -> bool:
    """Whether code was run since the last question."""
    if not trace.exists():
        return False
    trace.rmdir()
    return True


def refused(path: Path, match: str, **options: Any) -> None:
    """Opened or read, alone and verified, it is an error that says what."""

    def load(verify: bool) -> None:
        found = open_checkpoint(path, control(), verify=verify, **options)
        for value in found["state_dict"].values():
            value.read()

    for verify in (False, True):
        with pytest.raises(CheckpointError, match=match):
            load(verify)


def change(path: Path, edit: Callable[[Metadata], Any]) -> None:
    """Edit ``.metadata``."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(metadata: Metadata, name: str) -> tuple[MetadataIndex, Any]:
    (place,) = [(index, info) for index, info in metadata.storage_data.items() if index.fqn == name]
    return place


def append(path: Path, name: str, data: bytes, *, file: str = "__0_0.distcp") -> None:
    """Let an entry lie in bytes that are appended to a file."""
    offset = (path / file).stat().st_size
    with open(path / file, "ab") as opened:
        opened.write(data)

    def edit(metadata: Metadata) -> None:
        index, info = place_of(metadata, name)
        metadata.storage_data[index] = replace(info, relative_path=file, offset=offset, length=len(data))

    change(path, edit)


# ---------------------------------------------------------------------------------------------------------------------
# `.metadata`


def test_code_in_the_index(stock: Path, trace: Path) -> None:
    change(stock, lambda metadata: setattr(metadata, "planner_data", {"x": Evil(trace)}))
    dcp.load({"state_dict": {"b": torch.zeros(4)}}, checkpoint_id=stock, no_dist=True)
    assert ran(trace)
    refused(stock, r"\.metadata.*posix\.mkdir")
    assert verify_checkpoint(stock)[0].count("posix.mkdir") == 1
    assert not ran(trace)


def test_code_that_one_rank_sees(stock: Path, trace: Path, tmp_path: Path) -> None:
    shutil.copytree(stock, tmp_path / "evil")
    change(tmp_path / "evil", lambda metadata: setattr(metadata, "planner_data", {"x": Evil(trace)}))

    def rank(number: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / "evil" if number else stock, control())
        return str(caught.value)

    assert all("failed on rank 1" in message for message in run_world(2, rank, timeout=30))
    assert not ran(trace)


def naming(module: str, name: str) -> bytes:
    """A pickle that is one name, called with ``("x",)``."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return b"\x80\x04" + b"".join(texts) + b"\x93\x8c\x01x\x85R."


FORBIDDEN = {
    "builtins": ["eval", "setattr", "list"],
    "os": ["system"],
    "functools": ["partial"],
    "collections": ["OrderedDict"],
    "torch": ["load", "Tensor", "os", "Size.__class__", "float32.__class__"],
    "torch.serialization": ["_get_layout.__globals__", "os.system"],
    "torch.distributed.checkpoint.metadata": ["os", "Metadata.__init__", "Metadata.__init__.__globals__"],
    "torch.distributed.checkpoint.filesystem": ["os", "pickle"],
    "pathlib": ["PosixPath.read_text", "os.system"],
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_name_that_is_not_on_the_list(module: str) -> None:
    for name in FORBIDDEN[module]:
        with pytest.raises(ValueError, match=f"names {module}.{name}, which does not belong".replace(".", r"\.")):
            parse_metadata(naming(module, name))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"no pickle",
        pickle.dumps({"a": 1}),
        naming("torch", "float32"),  # an instance, not to be called
        b"\x80\x04\x82\x01.",  # a name by its number in the registry of extensions
        b"\x80\x02Pname\n.",  # a persistent id
        b"\x80\x04" + b"(" * 100_000,
        pickle.dumps(Metadata(state_dict_metadata=[], storage_data={})),
        pickle.dumps(Metadata(state_dict_metadata={"x": BytesStorageMetadata()}, storage_data={})),
        pickle.dumps(Metadata(state_dict_metadata={}, storage_data={"x": 1})),
    ],
)
def test_an_index_of_anything_else(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(it|'x') "):
        parse_metadata(data)


def test_an_index_that_was_written_by_an_early_python_3_11(stock: Path) -> None:
    """There a member of an enum is ``getattr`` of its name, of which nothing is looked up here."""

    class Early(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

    metadata, buffer = pickle.loads((stock / ".metadata").read_bytes()), io.BytesIO()
    Early(buffer).dump(metadata)
    assert b"getattr" in buffer.getvalue()
    assert parse_metadata(buffer.getvalue()) == parse_metadata(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="it is damaged"):
        parse_metadata(naming("builtins", "getattr"))
    for kind in (Metadata, MetadataIndex, torch.Size, torch.float32):

        class Reads:
            def __reduce__(self, kind: Any = kind) -> Any:
                return getattr, (kind, "__class__")

        with pytest.raises(ValueError, match=r"names builtins\.getattr of another class, which does not belong"):
            parse_metadata(pickle.dumps(Reads()))


def test_a_class_of_torch_cannot_be_changed_from_the_index() -> None:
    """The instruction that sets attributes also works on a class."""
    texts = [b"\x8c" + bytes([len(text)]) + text for text in (b"torch.distributed.checkpoint.metadata", b"Metadata")]
    state = b"N}\x8c\x05extra\x8c\x04evils\x86b."  # (None, {"extra": "evil"})
    data = b"\x80\x04" + b"".join(texts) + b"\x93" + state
    assert pickle.loads(data).extra == "evil"  # this is what a list of allowed classes does not prevent
    del Metadata.extra  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="it is damaged"):
        parse_metadata(data)
    assert not hasattr(Metadata, "extra")


# ---------------------------------------------------------------------------------------------------------------------
# The files of a stock directory


def test_code_in_a_value(stock: Path, trace: Path) -> None:
    append(stock, "optimizer_0.param_groups.0.lr", archive(Evil(trace)))
    dcp.load({"optimizer_0": {"param_groups": [{"lr": 0.0}]}}, checkpoint_id=stock, no_dist=True)
    assert ran(trace)
    refused(stock, r"'optimizer_0\.param_groups\.0\.lr' in '.*__0_0\.distcp' was not loaded")
    assert not ran(trace)


def test_a_tensor_that_is_declared_as_a_value(stock: Path, trace: Path) -> None:
    def edit(metadata: Metadata) -> None:
        index, info = place_of(metadata, "state_dict.a")
        del metadata.storage_data[index]
        metadata.storage_data[MetadataIndex("state_dict.a")] = info
        metadata.state_dict_metadata["state_dict.a"] = BytesStorageMetadata()

    change(stock, edit)
    append(stock, "state_dict.a", archive(Evil(trace)))
    dcp.load({"state_dict": {"a": torch.zeros(2, 3)}}, checkpoint_id=stock, no_dist=True)
    assert ran(trace)
    refused(stock, r"'state_dict\.a' in '.*__0_0\.distcp' was not loaded")
    assert not ran(trace)


def test_code_in_place_of_a_tensor(stock: Path, trace: Path) -> None:
    append(stock, "state_dict.a", archive(Evil(trace)))
    refused(stock, r"'state_dict\.a' in '.*__0_0\.distcp' was not loaded")
    assert not ran(trace)


@pytest.mark.parametrize("other", [torch.arange(6), torch.zeros(3, 2), torch.zeros(7), [torch.zeros(2, 3)]])
def test_another_tensor_in_place_of_a_tensor(stock: Path, other: Any) -> None:
    append(stock, "state_dict.a", archive(other))
    refused(stock, r"'state_dict\.a' in '.*__0_0\.distcp'.* belongs to another")


def test_code_in_the_rest(stock: Path, trace: Path) -> None:
    torch.save({"epoch": Evil(trace)}, stock / "meta.pt")
    refused(stock, r"meta\.pt' was not loaded.*weights_only=False")
    assert not ran(trace)
    open_checkpoint(stock, control(), weights_only=False)  # as asked
    assert ran(trace)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b"])
def test_a_file_outside_of_the_directory(stock: Path, name: str) -> None:
    shutil.copy(stock / "__0_0.distcp", stock.parent / "secret")

    def edit(metadata: Metadata) -> None:
        index, info = place_of(metadata, "state_dict.a")
        metadata.storage_data[index] = replace(info, relative_path=name)

    change(stock, edit)
    refused(stock, r"\.metadata.*not a plain file name")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_a_link_out_of_the_directory(stock: Path, name: str) -> None:
    (stock / name).rename(stock.parent / "secret")
    (stock / name).symlink_to(stock.parent / "secret")
    refused(stock, f"{name}' is not a regular file")


def test_a_stock_file_that_was_cut_off_or_is_missing(stock: Path) -> None:
    content = (stock / "__0_0.distcp").read_bytes()
    (stock / "__0_0.distcp").write_bytes(content[:-1])
    refused(stock, rf"__0_0\.distcp' has {len(content) - 1} bytes where at least {len(content)}")
    (stock / "__0_0.distcp").unlink()
    refused(stock, r"__0_0\.distcp' is missing")


def test_a_tensor_whose_parts_are_missing_overlap_or_are_too_large(stock: Path) -> None:
    original = (stock / ".metadata").read_bytes()

    def entry(metadata: Metadata) -> Any:
        return metadata.state_dict_metadata["state_dict.a"]

    def shrink(metadata: Metadata) -> None:
        entry(metadata).chunks[0] = replace(entry(metadata).chunks[0], sizes=torch.Size([2, 2]))

    def double(metadata: Metadata) -> None:
        entry(metadata).chunks *= 2

    def overlap(metadata: Metadata) -> None:
        entry(metadata).size = torch.Size([4, 3])
        entry(metadata).chunks *= 2

    def enlarge(metadata: Metadata) -> None:
        entry(metadata).size = torch.Size([1 << 40, 3])

    def outside(metadata: Metadata) -> None:
        entry(metadata).chunks[0] = replace(entry(metadata).chunks[0], sizes=torch.Size([3, 2]))

    def nowhere(metadata: Metadata) -> None:
        del metadata.storage_data[place_of(metadata, "state_dict.a")[0]]

    for edit in (shrink, double, overlap, enlarge, outside, nowhere):
        (stock / ".metadata").write_bytes(original)
        change(stock, edit)
        refused(stock, r"\.metadata' cannot be used: .*'state_dict\.a'")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x80\x02Nr" + struct.pack("<I", 1 << 28) + b".", "it holds a NoneType"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x.", "it holds a bytearray"),
        (b"\x80\x02\x82\x01.", "unregistered extension"),
    ],
)
def test_an_index_that_takes_memory_for_what_it_does_not_hold(data: bytes, match: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match):
            parse_metadata(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Our own directories


def test_no_pickle_of_our_own_directory_is_loaded(tmp_path: Path, trace: Path) -> None:
    """Not even with a record that fits."""
    path = tmp_path / "c"
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), path, control(), plan_summary={})
    whole = json.loads((path / "zero.json").read_text())
    for name, content in ((".metadata", pickle.dumps(Evil(trace))), ("meta.pt", archive(Evil(trace)))):
        (path / name).write_bytes(content)
        whole["content"]["files"][name] = [len(content), None]
    text = json.dumps(whole["content"], separators=(",", ":"))
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "zero.json").write_text(json.dumps(whole))
    load_and_verify(path, 1)
    open_checkpoint(path, control(), weights_only=False, verify=True)
    assert not ran(trace)


class Unknown:
    """Not expressible in the record, so that it is looked for in ``meta.pt``."""


@pytest.mark.filterwarnings("ignore:Left out of the checkpoint")
def test_code_where_the_record_says_that_something_is_missing(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "c"
    content = {"state_dict": {"x": Unknown()}, "hyper_parameters": {"y": Unknown()}}
    save_checkpoint_directory(content, path, control(), plan_summary={})
    whole = json.loads((path / "zero.json").read_text())
    (path / "meta.pt").write_bytes(archive({"hyper_parameters": {"y": Evil(trace)}}))
    blob = archive(Evil(trace))
    (path / "__0_0.distcp").write_bytes(blob)
    whole["content"]["files"]["meta.pt"] = [(path / "meta.pt").stat().st_size, None]
    whole["content"]["files"]["__0_0.distcp"] = [len(blob), None]
    item = whole["content"]["items"]["state_dict.x"]
    item["blob"] = [item["blob"][0], 0, len(blob)]
    text = json.dumps(whole["content"], separators=(",", ":"))
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "zero.json").write_text(json.dumps(whole))
    assert open_checkpoint(path, control(), weights_only=False)["hyper_parameters"] == {}
    assert not ran(trace)


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", [lambda evil: evil, lambda evil: {"state_dict": {"w": evil}}])
def test_code_in_a_torch_file(tmp_path: Path, trace: Path, content: Callable[[Evil], Any], zipped: bool) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(content(Evil(trace)), path, _use_new_zipfile_serialization=zipped)
    torch.load(path, weights_only=False)
    assert ran(trace)
    for weights_only in (None, True):
        refused(path, r"x\.ckpt' was not loaded.*weights_only=False", weights_only=weights_only)
    assert not ran(trace)


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(first: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\0" * 7, "header"),
        (safetensors({}, length=1 << 60), "header should have 1152921504606846976 bytes"),
        (safetensors(b"\xff\xfe"), "UnicodeDecodeError"),
        (safetensors(b"[" * 100_000), "RecursionError"),
        (safetensors([]), "TypeError"),
        (safetensors({"a": 1}), "TypeError"),
        (safetensors({"a": tensor(dtype="F4")}, b"\0" * 8), "dtype 'F4'"),
        (safetensors({"a": tensor(shape=(-2,))}, b"\0" * 8), "shape"),
        (safetensors({"a": tensor(shape=(1 << 62, 1 << 62))}, b"\0" * 8), "shape"),
        (safetensors({"a": tensor(0, 0, (1 << 59,) * 50_000)}), "50000 dimensions"),
        (safetensors({"a": tensor(shape=(3,))}, b"\0" * 12), "2 of the 3 elements"),
        (safetensors({"a": tensor(-8, 0)}, b"\0" * 8), "lies at bytes"),
        (safetensors({"a": tensor(1 << 70, (1 << 70) + 8)}, b"\0" * 8), "lies at bytes"),
        (safetensors({"a": tensor()}, b"\0" * 7), "tensors end at byte"),
        (safetensors({"a": tensor(8, 16)}, b"\0" * 16), "lies at bytes"),
        (safetensors({"a": tensor(), "b": tensor(4, 12)}, b"\0" * 12), "'b' lies at bytes"),
        (safetensors(b'{"a":{},"a":{}}'), "appears twice"),
    ],
)
def test_a_safetensors_header_that_lies(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    refused(path, rf"x\.safetensors' is cut off.*{match}")
    assert len(verify_checkpoint(path)) == 1


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (b"{", "cannot be used"),
        (b"[" * 100_000, "cannot be used"),
        (b'{"weight_map": []}', "cannot be used"),
        (b'{"weight_map": {"a": 1}}', "not a plain file name"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "not a plain file name"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not a plain file name"),
        (b'{"weight_map": {"a": "y.safetensors"}}', r"'y\.safetensors' is missing"),
        (b'{"weight_map": {"b": "x.safetensors"}}', r"'b' is in 'x\.safetensors', which does not hold it"),
    ],
)
def test_an_index_of_safetensors_that_lies(tmp_path: Path, index: bytes, match: str) -> None:
    (tmp_path / "c").mkdir()
    for folder in (tmp_path, tmp_path / "c"):
        (folder / "x.safetensors").write_bytes(safetensors({"a": tensor()}, b"\0" * 8))
    (tmp_path / "c" / "model.safetensors.index.json").write_bytes(index)
    refused(tmp_path / "c", match)
