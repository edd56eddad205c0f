"""What a file claims is compared with what is there, where a length or a shape in it would be believed otherwise.

Each file here made a process take gigabytes, or end. They are opened in a child with a deadline and little memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_zero import load_full_state_dict, verify_checkpoint
from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.format.torch_file import archive_entries
from lightning_zero.checkpoint.storage import files as ranges
from lightning_zero.errors import CheckpointError, shortened
from lightning_zero.extensions.inspection.contents import describe_checkpoint
from tests.helpers.samples import checkpoint, control, end_to_end
from tests.thorough.fuzz.checkpoints.child import bounded

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*It cannot be verified"),
]
MIB = 1 << 20


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    save_checkpoint_directory(checkpoint(1, end_to_end, control()), path, control(), plan_summary={})
    return path


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    path = tmp_path / "stock"
    dcp.save({"state_dict": {"a": torch.ones(6)}, "x": {"y": 1}}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1}, path / "meta.pt")
    return path


def read(path: Path) -> None:
    for value in open_checkpoint(path, control())["state_dict"].values():
        if isinstance(value, torch.Tensor):
            value.clone()


ACTIONS: dict[str, Callable[[Path], Any]] = {
    "load": read,
    "weights": load_full_state_dict,
    "inspect": lambda path: describe_checkpoint(path, tensors=True),
    "verify": lambda path: list(verify_checkpoint(path)),
}


def is_refused(path: Path, match: str, *, only: tuple[str, ...] = tuple(ACTIONS)) -> None:
    """By everything that looks into it, at once, for a reason that is short, and with little memory."""
    for name in only:
        ended = bounded(lambda name=name: ACTIONS[name](path), seconds=15, nbytes=600 * MIB)
        text = "\n".join(ended.value) if name == "verify" and ended.kind == "returned" else str(ended.value)
        assert ended.kind == ("returned" if name == "verify" else "refused"), (name, ended)
        assert match in text, (name, text)
        assert len(text) < 5000
        assert ended.peak < 200 * MIB, name


@pytest.mark.parametrize("levels", [200, 100_000])
@pytest.mark.parametrize("form", [lambda n: "[" * n + "]" * n, lambda n: '{"$":"tuple","value":[' * n + "]}" * n])
def test_a_record_that_is_deep(own: Path, levels: int, form: Callable[[int], str]) -> None:
    for place in ('"meta":{', '"meta":{"plan":'):
        text = (own / "zero.json").read_text()
        begin = text.index('"content":') + len('"content":')
        content = text[begin:-2].replace('"meta":{', f'"meta":{{"evil":{form(levels)},', 1)
        if "plan" in place:
            content = text[begin:-2].replace('"plan":{}', f'"plan":{form(levels)}', 1)
        digest = hashlib.sha256(content.encode()).hexdigest()
        head = '{"format":"lightning_zero","version":1,"sha256":"'
        other = own.parent / f"deep{len(place)}"
        os.makedirs(other, exist_ok=True)
        for file in own.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        (other / "zero.json").write_text(f'{head}{digest}","content":{content}}}')
        is_refused(other, "zero.json", only=("inspect",) if "plan" in place else tuple(ACTIONS))


# ---------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", ["zero.json", ".metadata", "meta.pt", "model.safetensors.index.json"])
def test_an_index_of_forty_gigabytes_of_nothing(tmp_path: Path, own: Path, stock: Path, name: str) -> None:
    path = {"zero.json": own, ".metadata": stock, "meta.pt": stock}.get(name, tmp_path / "hf")
    path.mkdir(exist_ok=True)
    (path / name).touch()
    os.truncate(path / name, 40 << 30)
    is_refused(path, name)


def test_a_terabyte_of_safetensors_that_is_not_there(tmp_path: Path) -> None:
    nbytes = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(tmp_path / "x.safetensors", 8 + len(header) + nbytes)
    is_refused(tmp_path / "x.safetensors", "The tensor 'w' claims 1099511627776 bytes", only=("load", "weights"))
    assert bounded(lambda: describe_checkpoint(tmp_path / "x.safetensors")).kind == "returned"
    ended = bounded(lambda: list(verify_checkpoint(tmp_path / "x.safetensors")))
    assert (ended.kind, ended.value) == ("returned", [])


def test_what_the_machine_has_no_memory_for_is_not_asked_for(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = open_checkpoint(own, control())["state_dict"]
    monkeypatch.setattr("lightning_zero.checkpoint.format.stored.memory_nbytes", lambda: 300)
    state["vector"].read()  # 74 bytes
    with pytest.raises(CheckpointError, match=r"'state_dict\.conv\.weight' claims 480 bytes.*: this machine has 300\."):
        state["conv.weight"].read()
    torch.save({"state_dict": {"w": torch.ones(100)}}, tmp_path / "x.ckpt")
    open_checkpoint(tmp_path / "x.ckpt", control())  # which is mapped


# ------------------------------------------------------------------------------------------------------------- archives


def ordinary() -> bytes:
    file = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(300)}}, file)
    return file.getvalue()


def rezipped(**options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ordinary())) as source, zipfile.ZipFile(file, "w") as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry), **options)
    return file.getvalue()


def test_archives_that_are_not_as_torch_writes_them(tmp_path: Path) -> None:
    archive_entries(io.BytesIO(ordinary()))
    archive_entries(io.BytesIO(rezipped()))
    twice = io.BytesIO(rezipped())
    with zipfile.ZipFile(twice, "a") as archive:
        archive.writestr("other/data.pkl", b"x")
    compressed = rezipped(compress_type=zipfile.ZIP_DEFLATED)
    for content in (compressed, twice.getvalue()):
        with pytest.raises(ValueError, match=r"same name|compressed"):
            archive_entries(io.BytesIO(content))
    for content in (compressed, twice.getvalue(), ordinary()[:-1], b"", b"PK\x03\x04"):
        (tmp_path / "x.ckpt").write_bytes(content)
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "x.ckpt", control())
        assert verify_checkpoint(tmp_path / "x.ckpt")


def test_an_archive_that_inflates(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 30))
        archive.writestr("archive/version", b"3\n")
    (tmp_path / "x.ckpt").write_bytes(file.getvalue())
    is_refused(tmp_path / "x.ckpt", "compressed")


# ----------------------------------------------------------------------------------------------------------- our record


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    whole = json.loads((path / "zero.json").read_text())
    change(whole["content"])
    text = json.dumps(whole["content"], separators=(",", ":"))
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "zero.json").write_text(json.dumps(whole))


def test_tensors_that_claim_the_same_bytes_in_many_shapes(own: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        item = content["items"]["state_dict.conv.weight"]
        for number in range(2000):
            shape = [1] * (number % 50) + [120] + [1] * (number // 50 % 14)
            content["items"][f"x{number}"] = {**item, "path": ["state_dict", f"x{number}"], "shape": shape}

    changed(own, change)
    is_refused(own, "its tensors claim")


def test_two_values_at_one_path(own: Path) -> None:
    changed(own, lambda content: content["items"].update(other={"path": ["state_dict", "scale"], "value": 1}))
    is_refused(own, "two values are at the path")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["items"].update(x={"path": ["state_dict", {"key": []}], "value": 1}),
        lambda content: content["items"].update(x={"path": "ab", "value": 1}),
        lambda content: content["meta"].update(x={"$": "numpy", "dtype": "(", "shape": None, "value": ""}),
        lambda content: content["meta"].update(x={"$": "numpy", "dtype": "V9", "shape": None, "value": ""}),
        lambda content: content["meta"].update(x={"$": ["tuple"], "value": ""}),
        lambda content: content["meta"].update(x={"$": "path", "type": [], "value": ""}),
        lambda content: content["meta"].update(x={"$": "enum", "module": [], "type": 3, "value": ""}),
        lambda content: content["meta"]["callbacks"]["History"]["values"]["value"].update(shape=["a", 2]),
        lambda content: content["meta"]["callbacks"]["History"]["values"]["value"].update(shape=[9] * 100_000),
    ],
)
def test_values_that_are_none(own: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    changed(own, change)
    is_refused(own, "zero.json")


def test_a_box_that_claims_more_than_its_archive(stock: Path) -> None:
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["state_dict.a"]
    entry.size = torch.Size([1 << 40])
    entry.chunks[0] = type(entry.chunks[0])(torch.Size([0]), torch.Size([1 << 40]))
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    is_refused(stock, "claims more than the")


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((6,), [((0,), (5,)), ((2,), (1,))]),
        ((6,), [((0,), (3,)), ((0,), (3,))]),
        ((2, 3), [((0, 0), (2, 2)), ((0, 1), (2, 1))]),
        ((2, 3), [((0, 0), (1, 2)), ((0, 1), (2, 2))]),
    ],
)
def test_boxes_that_leave_elements_to_chance(stock: Path, shape: tuple[int, ...], boxes: list[Any]) -> None:
    """As many elements as there are, but some twice: others would be whatever lay in memory."""
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    entry, name = metadata.state_dict_metadata["state_dict.a"], "state_dict.a"
    (old,) = (key for key in metadata.storage_data if key.fqn == name)
    info = metadata.storage_data.pop(old)
    entry.size = torch.Size(shape)
    entry.chunks = [type(entry.chunks[0])(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    for number, (offsets, _) in enumerate(boxes):
        metadata.storage_data[type(old)(name, torch.Size(offsets), number)] = info
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    is_refused(stock, "stored nowhere or twice")


# ------------------------------------------------------------------------------------------------------------- messages


def test_a_message_is_short_whatever_it_quotes(own: Path, tmp_path: Path) -> None:
    long = "x" * 3_000_000
    changed(
        own,
        lambda content: content["items"].update(
            {long: {"path": ["state_dict", "y"], "blob": [0, 10**9, 1], "type": "x"}}
        ),
    )
    is_refused(own, "letters ...]")
    assert shortened("a" * 5000, 4000).startswith("a" * 2666 + " [... 1000 letters ...] ")
    assert shortened("short") == "short"


def test_a_name_does_not_widen_the_table(own: Path) -> None:
    changed(
        own,
        lambda content: content["items"].update(
            {
                "n" * size: {"path": ["state_dict", "n" * size], "dtype": "float32", "shape": [0], "chunks": []}
                for size in [1_000_000, *range(1, 1000)]
            }
        ),
    )
    assert len(describe_checkpoint(own, tensors=True)) < 1_000_000


def test_a_record_is_not_written_too_large_to_be_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.save.MAX_INDEX_NBYTES", 100)
    with pytest.raises(CheckpointError, match=r"zero\.json would have \d+ bytes, too many"):
        save_checkpoint_directory(checkpoint(2, end_to_end, control()), own, control(), plan_summary={})
    assert open_checkpoint(own, control())["epoch"] == 1


def test_a_buffer_that_was_expanded_is_loaded(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1).expand(1000, 1000)}}, tmp_path / "x.ckpt")
    assert torch.equal(load_full_state_dict(tmp_path / "x.ckpt")["w"], torch.ones(1000, 1000))


def test_what_a_byte_array_really_holds_is_loaded(tmp_path: Path) -> None:
    torch.save(
        {"state_dict": {"w": torch.ones(1)}, "x": [bytearray(b"\xff\0abc"), b"\xff", {1, 2}, 1j]}, tmp_path / "x.ckpt"
    )
    assert open_checkpoint(tmp_path / "x.ckpt", control())["x"] == [bytearray(b"\xff\0abc"), b"\xff", {1, 2}, 1j]


def test_a_record_with_a_name_twice(own: Path) -> None:
    text = (own / "zero.json").read_text()
    (own / "zero.json").write_text(text.replace('{"format":', '{"version":2,"format":', 1))
    is_refused(own, "a name appears twice")


@pytest.mark.parametrize("name", ["zero.json", ".metadata"])
def test_the_limit_of_an_index(own: Path, stock: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own if name == "zero.json" else stock
    nbytes = (path / name).stat().st_size
    monkeypatch.setattr(ranges, "MAX_INDEX_NBYTES", nbytes)
    open_checkpoint(path, control())
    monkeypatch.setattr(ranges, "MAX_INDEX_NBYTES", nbytes - 1)
    with pytest.raises(CheckpointError, match=f"has {nbytes} bytes, which is too large for an index"):
        open_checkpoint(path, control())


@pytest.mark.parametrize("number", [-1, True, 99, 0.0, None, "0"])
def test_a_file_is_counted_from_the_beginning(own: Path, number: Any) -> None:
    changed(own, lambda content: content["items"]["state_dict.conv.weight"]["chunks"][0].__setitem__(2, number))
    is_refused(own, "zero.json' cannot be used: ")
