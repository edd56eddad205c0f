"""Files laid out before their tensors exist are the files that torch and safetensors would have written."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.format.typed_json import raw_memory
from lightning_zero.checkpoint.storage.publish import StagedFile, Staging
from lightning_zero.extensions.formats.safetensors import SafetensorsFile

VALUES: dict[str, Tensor] = {
    **{
        str(dtype): (torch.arange(35).view(5, 7) - 17).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8)
    },
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "five": torch.randn(2, 1, 3, 2, 2),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "uint16": torch.arange(9).to(torch.uint16),
}


def write(path: Path, content: Any, values: dict[str, Tensor], *, checksums: bool = True) -> TorchFile:
    """Lay a file out and fill it, last places first."""
    layout = TorchFile(content)
    crcs = []
    with open(path, "w+b") as file:
        for place in reversed(layout.places):
            memory = raw_memory(values[str(place.key)] if place.tensor is None else place.tensor)
            assert len(memory) == place.nbytes
            os.pwrite(file.fileno(), memory, place.offset)
            crcs.append(zlib.crc32(memory) if checksums else 0)
        for offset, part in layout.frame(crcs[::-1]):
            os.pwrite(file.fileno(), part, offset)
    assert path.stat().st_size == layout.nbytes
    return layout


def holes(values: dict[str, Tensor]) -> dict[str, Hole]:
    return {name: Hole(name, value.dtype, value.shape) for name, value in values.items()}


def same(found: Tensor, expected: Tensor) -> bool:
    alike = found.dtype == expected.dtype and found.shape == expected.shape and found.stride() == expected.stride()
    return alike and raw_memory(found).tobytes() == raw_memory(expected).tobytes()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_torch_loads_every_dtype(tmp_path: Path, mmap: bool, checksums: bool) -> None:
    write(tmp_path / "f", {"state": holes(VALUES), "n": [1, "x"]}, VALUES, checksums=checksums)

    loaded = torch.load(tmp_path / "f", weights_only=True, mmap=mmap)
    assert loaded["n"] == [1, "x"]
    for name, value in VALUES.items():
        assert same(loaded["state"][name], value), name


def test_records_lie_where_torch_puts_them(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(VALUES, buffer)
    write(tmp_path / "f", holes(VALUES), VALUES)
    with zipfile.ZipFile(buffer) as theirs, zipfile.ZipFile(tmp_path / "f") as ours:
        expected = {entry.filename: (entry.header_offset, entry.file_size, entry.CRC) for entry in theirs.infolist()}
        found = {entry.filename: (entry.header_offset, entry.file_size, entry.CRC) for entry in ours.infolist()}
        pickles = [archive.read("archive/data.pkl") for archive in (theirs, ours)]
    for records in (expected, found):
        records.pop("archive/.data/serialization_id")  # a name for logs
    assert pickles[0] == pickles[1]
    assert found == expected


def test_offsets_can_be_computed_instead_of_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch raises in this mode if what it computes is not what is in the directory of the zip."""
    write(tmp_path / "f", holes(VALUES), VALUES)
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    loaded = torch.load(tmp_path / "f", weights_only=True)
    assert same(loaded["five"], VALUES["five"])


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_tensors_that_are_there_keep_what_torch_keeps(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    content = {
        "part": base[1:, :2],
        "parameter": torch.nn.Parameter(base[0]),
        "again": base[0],
        "requires_grad": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(base, 0.5, 1, torch.qint8),
        "conjugate": torch.view_as_complex(torch.ones(3, 2)).conj(),
    }
    layout = write(tmp_path / "f", content, {})

    loaded = torch.load(tmp_path / "f", weights_only=True)
    for name in ("part", "again", "requires_grad", "conjugate"):
        assert torch.equal(loaded[name], content[name]), name
        assert loaded[name].requires_grad == content[name].requires_grad
    assert type(loaded["parameter"]) is torch.nn.Parameter
    assert torch.equal(loaded["parameter"], base[0])
    assert loaded["parameter"].data_ptr() == loaded["again"].data_ptr()
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["quantised"], content["quantised"])
    assert layout.places[0].nbytes == 4 * 4  # four elements and not the whole storage


def test_holes_with_one_key_share_their_elements(tmp_path: Path) -> None:
    values = {"w": torch.arange(6.0)}
    layout = write(tmp_path / "f", {"a": Hole("w", torch.float32, (2, 3)), "b": Hole("w", torch.float32, (6,))}, values)

    loaded = torch.load(tmp_path / "f", weights_only=True)
    assert len(layout.places) == 1
    assert layout.places[0].nbytes == 24
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    loaded["a"][0, 0] = 5
    assert loaded["b"][0] == 5


def test_nothing_loads_a_file_that_was_not_completed(tmp_path: Path) -> None:
    layout = TorchFile(holes(VALUES))
    with open(tmp_path / "f", "wb") as file:
        file.truncate(layout.nbytes)
        parts = list(layout.frame([0] * len(layout.places)))
        for offset, part in parts[:-1]:
            os.pwrite(file.fileno(), part, offset)
    assert not zipfile.is_zipfile(tmp_path / "f")
    for mmap in (True, False):
        with pytest.raises((RuntimeError, OSError)):
            torch.load(tmp_path / "f", weights_only=True, mmap=mmap)


def write_sparse(path: Path, layout: TorchFile) -> None:
    """Everything but the elements, of which the file has none."""
    with open(path, "wb") as file:
        file.truncate(layout.nbytes)
        for offset, part in layout.frame([0] * len(layout.places)):
            os.pwrite(file.fileno(), part, offset)


def test_tensors_beyond_4_gib(tmp_path: Path) -> None:
    large = 2**32 + 64
    content = {
        "first": Hole("first", torch.uint8, (large,)),
        "second": Hole("second", torch.float32, (large // 4,)),
        "last": Hole("last", torch.int64, (2,)),
    }
    layout = TorchFile(content)
    write_sparse(tmp_path / "f", layout)
    first, second, last = (place.offset for place in layout.places)
    with open(tmp_path / "f", "r+b") as file:
        os.pwrite(file.fileno(), b"\x07", first + large - 1)
        os.pwrite(file.fileno(), raw_memory(torch.tensor([1.5])), second)
        os.pwrite(file.fileno(), raw_memory(torch.tensor([3, 4])), last)

    loaded = torch.load(tmp_path / "f", weights_only=True, mmap=True)
    assert loaded["first"].shape == (large,)
    assert loaded["first"][-1] == 7
    assert loaded["second"][0] == 1.5
    assert loaded["last"].tolist() == [3, 4]
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert [archive.getinfo(f"archive/data/{number}").file_size for number in range(3)] == [large, large, 16]
    assert os.stat(tmp_path / "f").st_blocks * 512 < 2**20  # the test has not filled the disk


def test_more_records_than_a_plain_zip_can_count(tmp_path: Path) -> None:
    count = 2**16
    layout = TorchFile([Hole(number, torch.uint8, (1,)) for number in range(count)])
    write_sparse(tmp_path / "f", layout)

    reader = torch._C.PyTorchFileReader(str(tmp_path / "f"))
    for number in (0, 1, count - 1):
        assert reader.get_record_offset(f"data/{number}") == layout.places[number].offset
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert len(archive.infolist()) == count + 6


# -------------------------------------------------------------------------------------------------------- safetensors


def write_safetensors(path: Path, values: dict[str, Tensor]) -> SafetensorsFile:
    layout = SafetensorsFile({n: Hole(n, v.dtype, tuple(v.shape)) for n, v in values.items()}, {"format": "pt"})
    with open(path, "wb") as file:
        os.pwrite(file.fileno(), layout.head, 0)
        for place in layout.places:
            os.pwrite(file.fileno(), raw_memory(values[str(place.key)]), place.offset)
    assert path.stat().st_size == layout.nbytes
    return layout


def test_the_safetensors_library_loads_every_dtype(tmp_path: Path) -> None:
    layout = write_safetensors(tmp_path / "f", VALUES)

    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == VALUES.keys()
    assert all(same(loaded[name], value) for name, value in VALUES.items())
    assert all(place.offset % VALUES[str(place.key)].dtype.itemsize == 0 for place in layout.places)
    assert len(layout.head) % 8 == 0


def test_a_safetensors_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    """It sorts by dtype and then by name."""
    values = {f"{dtype} {name}": value for name, value in VALUES.items() for dtype in [value.dtype]}
    values = {name: value for name, value in sorted(values.items()) if value.dtype in (torch.float32, torch.bfloat16)}
    write_safetensors(tmp_path / "ours", values)
    save_file(values, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_dtype_that_safetensors_do_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"'my\.weight' is of complex128"):
        SafetensorsFile({"my.weight": Hole("w", torch.complex128, (2,))}, {})


# ---------------------------------------------------------------------------------------------------------- publishing


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    if os.fork() == 0:
        StagedFile(tmp_path / "c").__enter__()
        os._exit(0)
    os.wait()
    assert len(list(tmp_path.iterdir())) == 1
    with StagedFile(tmp_path / "other") as held, StagedFile(tmp_path / "c") as staged:  # sweeps, but for its own
        staged.path.write_text("new")
        staged.publish()
        assert held.path.parent.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert (tmp_path / "c").read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_file_and_a_directory_replace_each_other(tmp_path: Path, kind: str) -> None:
    """In two steps: what was there has another name meanwhile, which nobody had."""

    def give(folder: bool, text: str) -> None:
        if not folder:
            with StagedFile(tmp_path / "c") as file:
                file.path.write_text(text)
                file.publish()
            return
        staged = Staging(tmp_path / "c")
        staged.begin()
        (staged.path / "zero.json").write_text(text)
        staged.publish()
        staged.discard()

    give(kind == "directory", "old")
    (tmp_path / "c.old").mkdir()
    (tmp_path / "c.old" / "x").touch()
    (tmp_path / "c.old.old").touch()
    give(kind == "file", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "c.old", "c.old.old"}
    assert (tmp_path / "c.old" / "x").exists()
    assert (tmp_path / "c" / "zero.json" if kind == "file" else tmp_path / "c").read_text() == "new"


def test_offsets_beyond_4_gib_are_those_that_torch_computes(tmp_path: Path) -> None:
    """From there on torch leaves 8 more bytes after every tensor."""
    content = [Hole(0, torch.uint8, (2**32,)), Hole(1, torch.uint8, (3,)), Hole(2, torch.uint8, (3,))]
    layout = TorchFile(content)
    write_sparse(tmp_path / "f", layout)
    reader = torch._C.PyTorchFileReader(str(tmp_path / "f"))
    end = reader.get_record_offset("data/0") + 2**32 + 24
    second = reader.get_record_offset_no_read(end, "data/1", 3, 64)
    third = reader.get_record_offset_no_read(second + 3 + 24, "data/2", 3, 64)
    assert [place.offset for place in layout.places[1:]] == [second, third]
