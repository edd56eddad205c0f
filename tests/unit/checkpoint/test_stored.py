"""A tensor on disk is used and written to as an ordinary one, and stays on disk until that makes a difference."""

from __future__ import annotations

import copy
import io
import math
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_zero.checkpoint import StoredTensor, open_checkpoint
from lightning_zero.checkpoint.format.record import Chunk, FileEntry, Record, Split, TensorItem
from lightning_zero.checkpoint.format.stored import Source, read_slices
from lightning_zero.checkpoint.format.torch_file import Hole, TorchFile
from lightning_zero.checkpoint.save import ChecksummedFile, stored_identity
from lightning_zero.checkpoint.storage.files import open_folder
from tests.helpers.allocator import Allocations
from tests.helpers.samples import control


class Memory:
    """A source that counts how often it is asked."""

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements.reshape(-1)
        self.reads = 0

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        self.reads += 1
        destination.copy_(self.elements[start : start + destination.numel()])


def stored(elements: Tensor) -> StoredTensor:
    chunk = Chunk(0, elements.numel(), "f", 0, zlib.crc32(elements.contiguous().numpy().tobytes()))
    return StoredTensor(Memory(elements), "w", TensorItem((), elements.dtype, tuple(elements.shape), (chunk,)))


def reads(handle: StoredTensor) -> int:
    assert isinstance(handle._source, Memory)
    return handle._source.reads


def elements() -> Tensor:
    return torch.arange(12.0).reshape(4, 3) - 5


def index(w: Tensor) -> None:
    w[0] = 1


def mask(w: Tensor) -> None:
    w[w > 0] = 0


def array(w: Tensor) -> None:
    w.numpy()[1] = 7


def exchanged(w: Tensor) -> None:
    from_dlpack(w)[1, 1] = 7


def part(w: Tensor) -> None:
    w.chunk(2)[1].zero_()


WRITES: list[Callable[[Tensor], Any]] = [
    index,
    mask,
    array,
    exchanged,
    part,
    lambda w: w.add_(1),
    lambda w: w.view(-1).add_(1),
    lambda w: w.t().mul_(2),
    lambda w: w[..., 0].zero_(),
    lambda w: w.data.mul_(2),
    lambda w: w.detach()[1].mul_(2),
    lambda w: w.unbind()[2].fill_(3),
    lambda w: w.copy_(torch.ones(4, 3)),
    lambda w: torch._foreach_mul_([w], 2),
    lambda w: torch.nn.init.zeros_(w),
    lambda w: w.untyped_storage().fill_(0),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_what_is_read_afterwards(write: Callable[[Tensor], Any]) -> None:
    handle, expected = stored(elements()), elements()
    write(handle)
    write(expected)
    assert type(handle) is StoredTensor
    assert not torch.equal(expected, elements())
    assert torch.equal(handle.read(), expected)
    destination = torch.empty(5)
    handle.read_into(destination, 4)
    assert torch.equal(destination, expected.view(-1)[4:9])
    assert torch.equal(handle * 1, expected)
    assert torch.equal(handle.detach().clone(), expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: torch.zeros(4, 3).copy_(w),
        lambda w: copy.deepcopy(w),
        lambda w: torch.save(w, io.BytesIO()),
    ],
)
def test_what_only_passes_it_on_keeps_no_memory(use: Callable[[Tensor], Any]) -> None:
    handle = stored(elements())
    use(handle)
    assert handle.memory is None


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: torch.cat([w, w]),
        lambda w: w.half(),
        lambda w: w * 2,
        lambda w: w.sum(),
        lambda w: torch.equal(w, w),
        lambda w: torch._foreach_add([w], [w])[0],
    ],
)
def test_computing_gives_ordinary_tensors(compute: Callable[[Tensor], Any]) -> None:
    handle = stored(elements())
    found, expected = compute(handle), compute(elements())
    assert type(found) is type(expected)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert torch.equal(handle.read(), elements())
    assert reads(handle) == 1


@pytest.mark.parametrize("change", ["squeeze_", "t_", "resize_"])
def test_a_shape_that_is_changed_in_place_is_an_error(change: str) -> None:
    handle = stored(elements())
    with pytest.raises(TypeError, match=r"'w'.*another shape.*clone"):
        getattr(handle, change)(*([3] if change == "resize_" else []))
    assert torch.equal(handle.read(), elements())


@pytest.mark.parametrize("rows", [4, 8])
def test_other_data_and_outputs_are_errors(rows: int) -> None:
    with pytest.raises(TypeError, match=r"'w'.*cannot get other data: use `copy_`"):
        stored(elements()).data = torch.ones(rows, 3)
    with pytest.raises(TypeError, match=r"'w'.*clone"):
        torch.cat([elements()] * (rows // 4), out=stored(elements()))


@pytest.mark.parametrize("loaded", [False, True])
def test_copies_do_not_see_later_writes(loaded: bool) -> None:
    handle = stored(elements())
    if loaded:
        handle.add_(1)
    before = handle.read()
    copied = copy.deepcopy({"w": handle, "tied": handle})
    assert copied["w"] is copied["tied"]
    handle.zero_()
    assert type(copied["w"]) is Tensor
    assert torch.equal(copied["w"], before)
    copied["w"].fill_(3)
    assert not handle.read().any()


def test_what_was_written_to_is_written_to_the_file() -> None:
    handle, whole = stored(elements()), stored(elements())
    assert stored_identity(handle.detach()) == stored_identity(handle)
    identity = stored_identity(handle)
    handle[0] = 1  # the checksum of what is stored is not its checksum any more
    assert stored_identity(handle) != identity
    file = ChecksummedFile(content := io.BytesIO())
    for tensor in (handle, whole):
        assert file.write_elements(tensor) == zlib.crc32(tensor.read().numpy().tobytes())
    found = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.float32).view(2, 4, 3)
    assert torch.equal(found[0], handle.read())
    assert torch.equal(found[1], elements())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_what_a_cast_makes_infinite_is_noticed(dtype: torch.dtype) -> None:
    file = ChecksummedFile(io.BytesIO())
    tensors = {"large": torch.tensor([1.0, 1e6]), "small": torch.tensor([1.0, torch.inf])}
    file.write_archive(TorchFile([Hole(name, dtype, (2,), tensor) for name, tensor in tensors.items()]))
    assert file.overflowed == {"large"}


def test_a_state_dict_that_is_changed_in_the_file_s_place(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": elements()}, tmp_path / "m.safetensors")
    state = open_checkpoint(tmp_path / "m.safetensors", control())["state_dict"]
    state["w"][0] = 9
    module = torch.nn.Linear(3, 4, bias=False)
    module.load_state_dict({"weight": state["w"]})
    assert torch.equal(module.weight[0].detach(), torch.full((3,), 9.0))
    assert torch.equal(module.weight[1:].detach(), elements()[1:])


@pytest.mark.parametrize(("shape", "dim"), [((6,), 0), ((6, 5), 0), ((5, 6), 1), ((4, 6, 3), 1), ((3, 2, 6), 2)])
def test_a_tensor_in_parts_is_read_as_the_whole(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    """Every range of it, and every part of another cut, whatever chunks it lies in."""
    tensor, parts = torch.arange(math.prod(shape), dtype=torch.float32).view(shape), 3
    stored_order = torch.cat([part.reshape(-1) for part in tensor.chunk(parts, dim)])
    (tmp_path / "data").write_bytes(b"...." + stored_order.numpy().tobytes())
    size = tensor.numel() // parts
    cuts = sorted({0, size // 2, size, 2 * size - 1, 2 * size, tensor.numel()})
    chunks = tuple(Chunk(a, b - a, "data", 4 + 4 * a, None) for a, b in pairwise(cuts))
    item = TensorItem((), torch.float32, shape, chunks, split=Split(dim, parts))
    handle = StoredTensor(Source(open_folder(tmp_path)), "w", item)
    assert torch.equal(handle.read(), tensor)
    for start in range(tensor.numel()):
        for end in range(start, tensor.numel() + 1):
            read_slices([(handle, start, found := torch.full((end - start,), -1.0))])
            assert torch.equal(found, tensor.view(-1)[start:end])
    for axis, length in enumerate(shape):
        for start in range(length):
            for count in range(length - start + 1):
                assert torch.equal(handle.part(axis, start, count).read(), tensor.narrow(axis, start, count))
    again = Record(files={"data": FileEntry(4 + tensor.nbytes, None)}, items={"w": item}, meta=None).to_bytes()
    assert Record.from_bytes(again).items == {"w": item}
    assert b'"chunks"' not in again  # a reader that knows of no parts must not take them for the whole


@pytest.mark.parametrize("split", [None, Split(1, 3)])
def test_columns_are_read_with_little_memory(tmp_path: Path, split: Split | None) -> None:
    """Rows have other columns between them, which are read too: pieces of 16 MiB at a time, of 67."""
    tensor = torch.arange(4_099 * 4_095, dtype=torch.float32).view(4_099, 4_095)
    order = tensor if split is None else torch.cat([part.reshape(-1) for part in tensor.chunk(split.parts, 1)])
    order.numpy().tofile(tmp_path / "data")
    numel = tensor.numel() // (1 if split is None else split.parts)
    chunks = tuple(Chunk(start, numel, "data", 4 * start, None) for start in range(0, tensor.numel(), numel))
    item = TensorItem((), torch.float32, tuple(tensor.shape), chunks, split=split)
    part = StoredTensor(Source(open_folder(tmp_path)), "w", item).part(1, 1_360, 10)
    found, taken = torch.empty(4_099 * 10), Allocations()
    with taken:
        read_slices([(part, 0, found)])
    assert torch.equal(found.view(4_099, 10), tensor[:, 1_360:1_370])
    assert taken.most <= 17 * 2**20


def test_chunks_that_cross_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="a chunk is of two of the 2 parts"):
        TensorItem((), torch.float32, (4, 4), (Chunk(0, 16, "data", 0, None),), split=Split(1, 2))
    with pytest.raises(ValueError, match="no 3 equal parts in dimension 0"):
        TensorItem((), torch.float32, (4, 4), (Chunk(0, 16, "data", 0, None),), split=Split(0, 3))
