"""A tensor in a file behaves like the ordinary tensor, or says that it cannot; no write is lost."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.extensions.nvme import FileTensor, NvmeStore, fill_from
from lightning_zero.offload.host import host_memory
from tests.helpers.stores import NAMES, Disk, store

NUMEL = 20_011  # 19 whole pages of float32 and some


@pytest.fixture(params=NAMES)
def disk(request: pytest.FixtureRequest) -> Disk:
    return Disk(direct=NAMES[request.param])


@pytest.fixture
def opened(tmp_path: Path, disk: Disk) -> Iterator[NvmeStore]:
    with store(tmp_path, disk, kib=64) as found:  # two pages of staging
        assert found.direct == disk.direct
        yield found


def values(numel: int = NUMEL) -> Tensor:
    return torch.arange(1.0, numel + 1)


@pytest.fixture
def resting(opened: NvmeStore) -> FileTensor:
    """Filled with ``values()``, between two others."""
    before, found, after = (opened.allocate(NUMEL, torch.float32, f"tensor {i}") for i in range(3))
    before.fill(-1), after.fill(-2)
    found.write(values())
    yield found
    assert (before.read() == -1).all(), "a neighbour was written to"
    assert (after.read() == -2).all(), "a neighbour was written to"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("numel", [0, 1, 1024, 5000])
def test_every_dtype_and_size(opened: NvmeStore, dtype: torch.dtype, numel: int) -> None:
    expected = (torch.arange(numel) % 2).to(dtype)
    resting = opened.allocate(numel, dtype, "x")
    resting.write(expected)
    assert resting.read().dtype == dtype
    assert torch.equal(resting.read(), expected)


def test_ranges_like_an_ordinary_tensor(resting: FileTensor) -> None:
    """Random ranges, aligned and not, of other dtypes and strides, into and out of aligned and unaligned memory."""
    expected, choose = values(), random.Random(0)
    aligned = host_memory(NUMEL * 4, locked=False).view(torch.float32)
    for turn in range(120):
        start = choose.choice([0, 1024, 2048, choose.randrange(NUMEL)])
        numel = choose.choice([0, 1, 1024, 4096, NUMEL]) if turn % 3 else choose.randrange(NUMEL)
        numel = min(numel, NUMEL - start)
        new = torch.full((numel,), float(turn)) + torch.arange(numel) % 7
        source = [new, new.double(), new.repeat_interleave(2)[::2], aligned[:numel].copy_(new)][turn % 4]
        resting.write(source, start)
        expected[start : start + numel] = new
        start = choose.randrange(NUMEL)
        numel = choose.randrange(NUMEL - start + 1)
        into = [torch.empty(numel), torch.empty(numel).double(), torch.empty(2 * numel)[::2], aligned[:numel]][turn % 4]
        fill_from(into, resting.part(start, numel))
        assert torch.equal(into.float(), expected[start : start + numel]), (turn, start, numel)
    assert torch.equal(resting.read(), expected)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda x: x.copy_(torch.arange(NUMEL) * 2.0),
    "copy_ of a row": lambda x: x.view(-1, 1).copy_(torch.ones(1)),
    "fill_": lambda x: x.fill_(3),
    "fill_ by tensor": lambda x: x.fill_(torch.tensor(4.0)),
    "zero_ of a part": lambda x: x[5:2000].zero_(),
    "unbind": lambda x: x[:4].unbind()[2].fill_(9),
    "item": lambda x: x.__setitem__(7, 1.5),
    "range": lambda x: x.__setitem__(slice(3, 9), x[30:36]),
    "data": lambda x: x.data.narrow(0, 1024, 1024).zero_(),
    "double source": lambda x: x.copy_(torch.ones(NUMEL, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_writes_in_place_reach_the_file(resting: FileTensor, change: str) -> None:
    expected = values()
    IN_PLACE[change](expected)
    IN_PLACE[change](resting)
    assert torch.equal(resting.read(), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x[5:2000].add_(1),
        lambda x: x.detach().addcmul_(x, x, value=0.5),
        lambda x: x.__setitem__(x > 100, 0.0),
        lambda x: torch._foreach_add_([x[:10], torch.ones(10)], [torch.ones(10), x[20:30]]),
        lambda x: torch.add(x, 1, out=x),
    ],
    ids=["mul_", "part", "addcmul_", "mask", "foreach", "out"],
)
def test_other_writes_in_place_are_refused(resting: FileTensor, change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"tensor 1.*rests in a file and is not changed by .*`read\(\)`.*`write\(\)`"):
        change(resting)
    assert torch.equal(resting.read(), values())


COMPUTE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + 1,
    "clone": lambda x: x.clone(),
    "sum": lambda x: x[3:].sum(),
    "cast": lambda x: x.bfloat16(),
    "copied": lambda x: torch.empty(NUMEL).copy_(x),
    "copied to another dtype": lambda x: torch.empty(NUMEL, dtype=torch.float64).copy_(x),
    "copied to a stride": lambda x: torch.empty(2 * NUMEL)[::2].copy_(x),
    "copied wider": lambda x: torch.empty(2, NUMEL).copy_(x),
    "cat": lambda x: torch.cat([x, x]),
    "equal": lambda x: torch.tensor(torch.equal(x, x.clone())),
    "norms": lambda x: torch.stack(torch._foreach_norm([x, x[1:]])),
    "item": lambda x: torch.tensor(x[4].item()),
    "deepcopy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": lambda x: _saved(x),
    "mask": lambda x: x[x > 7],
}


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("compute", COMPUTE)
def test_computing_gives_ordinary_tensors(resting: FileTensor, compute: str) -> None:
    expected, found = COMPUTE[compute](values()), COMPUTE[compute](resting)
    assert not isinstance(found, FileTensor)
    assert torch.equal(found, expected)
    found.zero_()
    assert torch.equal(resting.read(), values()), "a result shares its elements with the file"


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.data_ptr(),
        lambda x: x.untyped_storage(),
        lambda x: x.share_memory_(),
        lambda x: torch.from_dlpack(x),
    ],
    ids=["data_ptr", "untyped_storage", "share_memory_", "dlpack"],
)
def test_what_needs_an_address_is_refused(resting: FileTensor, look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"tensor 1.*rests in a file.*read\(\)"):
        look(resting)


@pytest.mark.parametrize(
    "show",
    [
        lambda x: x[::2],
        lambda x: x[:20000].view(100, 200).t(),
        lambda x: x[:20000].view(100, 200)[:, 3],
        lambda x: x.view(torch.int32),
        lambda x: x.expand(2, NUMEL),
        lambda x: x.resize_(3),
        lambda x: x.unsqueeze_(0),
        lambda x: x.set_(torch.ones(NUMEL)),
        lambda x: setattr(x, "data", torch.ones(NUMEL)),
        lambda x: torch.cat([torch.ones(NUMEL), torch.ones(NUMEL)], out=x),
    ],
    ids=["stride", "transposed", "column", "dtype", "expand", "resize_", "unsqueeze_", "set_", "data", "out"],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_is_no_range_of_elements_is_refused(resting: FileTensor, show: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match="tensor 1"):
        show(resting)
    assert torch.equal(resting.read(), values())
    assert resting.shape == (NUMEL,)


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, NUMEL + 1), (NUMEL, 1), (5, -1)])
def test_ranges_outside_are_refused(resting: FileTensor, start: int, numel: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        resting.part(start, numel)
    if numel > 0:
        with pytest.raises(ValueError, match="not inside"):
            resting.write(torch.empty(numel), start)
    assert torch.equal(resting.read(), values())


def test_only_flat_tensors_are_read_and_written(resting: FileTensor) -> None:
    with pytest.raises(ValueError, match=r"\(6,\) cannot be filled from shape \(2, 3\)"):
        resting.write(torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filling_for_every_mix(opened: NvmeStore, resting: FileTensor, dtype: torch.dtype) -> None:
    other = opened.allocate(NUMEL, dtype, "other")
    memory = torch.zeros(NUMEL, dtype=dtype)
    plain = torch.zeros(NUMEL)
    fill_from(other, resting)
    fill_from(memory, resting)
    fill_from(plain, memory)
    assert torch.equal(other.read(), values().to(dtype))
    assert torch.equal(plain.to(dtype), other.read())
    fill_from(resting, memory)
    fill_from(resting, resting)
    assert torch.equal(resting.read(), values().to(dtype).float())
    resting.fill(7)
    fill_from(other, resting)
    assert (other.read() == 7).all()
    resting.write(other)
    with pytest.raises(ValueError, match="filled"):
        fill_from(other, resting[1:])


def test_a_copy_does_not_see_later_writes(resting: FileTensor) -> None:
    copied = copy.deepcopy({"x": resting, "again": resting})
    assert copied["x"] is copied["again"]
    resting.zero_()
    assert torch.equal(copied["x"], values())
    parameter = copy.deepcopy(torch.nn.Parameter(resting))
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.any()


@pytest.mark.parametrize("move", ["fill", "write", "read", "fill_from"])
def test_large_tensors_move_in_pieces(tmp_path: Path, move: str) -> None:
    """What has no aligned memory of its own dtype takes no memory but the staging piece."""
    disk = Disk()
    with store(tmp_path, disk, kib=64) as opened:
        one, other = (opened.allocate(1 << 20, torch.float32, "x") for _ in range(2))
        plain = torch.arange(1 << 20, dtype=torch.float64)
        other.write(plain)
        disk.calls.clear()
        if move == "fill":
            one.fill(1)
        elif move == "fill_from":
            fill_from(one, other)
        elif move == "write":
            one.write(plain)
        else:
            fill_from(plain, one)
        # Staging is 64 KiB // 8; 1 MiB is what passes through memory between files.
        assert max(call.nbytes for call in disk.calls) <= (8192 if move in ("write", "read") else 1 << 20)
        if move in ("write", "fill_from"):
            assert torch.equal(one.read(), other.read())
            assert torch.equal(one.read(), torch.arange(float(1 << 20)))
