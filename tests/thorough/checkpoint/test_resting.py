"""Checkpoints of what rests in files: saved from there and loaded to there, without a second copy of it in memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint import (
    FlatShard,
    StoredTensor,
    open_checkpoint,
    save_checkpoint_directory,
)
from lightning_zero.checkpoint.background import Snapshots
from lightning_zero.checkpoint.consolidated import save_consolidated_file
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.nvme.files import FileSystem, FileTensor
from lightning_zero.extensions.nvme.store import NvmeStore
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify, one_by_one, parameters, verify
from tests.helpers.world import run_world

MIB = 1 << 20


@contextlib.contextmanager
def store_in(folder: Path, system: FileSystem | None = None) -> Iterator[NvmeStore]:
    """What one rank has open during a run."""
    ranks = control()
    store = NvmeStore(
        str(folder),
        rank=ranks.rank,
        buffer_nbytes=MIB,
        io_threads=1,
        device=torch.device("cpu"),
        system=system,
    )
    try:
        yield store
    finally:
        store.close()


def rested(value: Any, store: NvmeStore, regions: dict[tuple[int, torch.dtype], FileTensor] | None = None) -> Any:
    """The same structure, with every shard's elements in a file: a region for each buffer, as the engine has them."""
    regions = {} if regions is None else regions
    if isinstance(value, FlatShard):
        local = value.local
        storage = local.untyped_storage()
        key = storage.data_ptr(), local.dtype  # no memory has the address 0
        if key not in regions:
            whole = torch.empty(0, dtype=local.dtype).set_(storage)
            regions[key] = store.allocate(whole.numel(), whole.dtype, "a test")
            regions[key].write(whole)
        return FlatShard(regions[key].part(local.storage_offset(), local.numel()), value.shape, value.start)
    if isinstance(value, Mapping):
        return {key: rested(item, store, regions) for key, item in value.items()}
    if isinstance(value, list):
        return [rested(item, store, regions) for item in value]
    return value


def content(version: int = 1, cut: Any = end_to_end) -> dict[str, Any]:
    """The sample checkpoint with a second name for one of its weights."""
    whole = checkpoint(version, cut, control())
    shard = whole["state_dict"]["conv.weight"]
    whole["state_dict"]["tied.weight"] = FlatShard(shard.local, shard.shape, shard.start)
    return whole


class Counting(FileSystem):
    """Counts the bytes that are read; can fail."""

    def __init__(self) -> None:
        self.total = 0
        self.broken = False

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Count, or fail."""
        if self.broken:
            raise OSError(5, "Input/output error")
        done = super().preadv(descriptor, memory, offset)
        self.total += done
        return done


def peak_of(work: Callable[[], None]) -> int:
    """How much more memory the process has had at a time than at the beginning."""

    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition(f"{key}:")[2].split()[0]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


# --------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_directory_is_the_same_wherever_the_elements_rest(tmp_path: Path, world_size: int) -> None:
    def rank(number: int) -> None:
        whole = content()
        save_checkpoint_directory(whole, tmp_path / "memory", control(), plan_summary={})
        with store_in(tmp_path) as store:
            save_checkpoint_directory(rested(whole, store), tmp_path / "files", control(), plan_summary={})
        load_and_verify(tmp_path / "files", 1, one_by_one)
        name = f"__{number}_0.distcp"
        assert (tmp_path / "files" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()

    run_world(world_size, rank, timeout=60)
    assert (tmp_path / "files" / "meta.bin").read_bytes() == (tmp_path / "memory" / "meta.bin").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "memory"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_ordinary_file_is_the_same_wherever_the_elements_rest(tmp_path: Path, world_size: int) -> None:
    def rank(_: int) -> None:
        whole = content()
        save_consolidated_file(whole, tmp_path / "memory.ckpt", control())
        with store_in(tmp_path) as store:
            save_consolidated_file(rested(whole, store), tmp_path / "files.ckpt", control())

    run_world(world_size, rank, timeout=60)
    assert (tmp_path / "files.ckpt").read_bytes() == (tmp_path / "memory.ckpt").read_bytes()
    state = torch.load(tmp_path / "files.ckpt")["state_dict"]
    assert all(torch.equal(state[name], value) for name, value in parameters(1).items())
    assert state["tied.weight"].data_ptr() == state["conv.weight"].data_ptr()


@pytest.mark.parametrize(("kind", "tensors", "most"), [("directory", 16, 24), ("file", 64, 64)])
def test_saving_holds_one_part_at_a_time(tmp_path: Path, kind: str, tensors: int, most: int) -> None:
    """64 or 256 MiB in tensors of 4: what is read is written and forgotten; and each is read once. For a file it is
    read from a temporary directory once more, and the system takes its time to take pages back."""

    def rank(_: int) -> tuple[int, int]:
        system = Counting()
        numel = MIB  # 4 MiB each
        with store_in(tmp_path, system) as store:
            region = store.allocate(tensors * numel, torch.float32, "a test")
            region.fill(1.0)
            state = {f"w{i}": FlatShard(region.part(i * numel, numel), (16, numel // 16), 0) for i in range(tensors)}
            before = system.total

            def work(state: dict[str, FlatShard] = state) -> None:
                if kind == "directory":
                    save_checkpoint_directory({"state_dict": state}, tmp_path / "c", control(), plan_summary={})
                else:
                    save_consolidated_file({"state_dict": state}, tmp_path / "c", control())

            work({"w": FlatShard(torch.ones(1), (1,), 0)})  # the code itself comes into memory
            return peak_of(work), system.total - before

    ((peak, read),) = run_world(1, rank, timeout=60)
    # A part, what torch.save makes of it, and a page or two at the ends of pieces.
    assert peak < most * MIB
    assert 0 <= read - 4 * tensors * MIB < 2 * MIB


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_read_fails_the_save_on_every_rank(tmp_path: Path, world_size: int) -> None:
    def rank(number: int) -> None:
        system = Counting()
        with store_in(tmp_path, system) as store:
            whole = rested(content(), store)
            save_checkpoint_directory(whole, tmp_path / "c", control(), plan_summary={})
            system.broken = number == world_size - 1
            with pytest.raises(CheckpointError, match=f"rank {world_size - 1}.*OffloadError.*Input/output error"):
                save_checkpoint_directory(whole, tmp_path / "c", control(), plan_summary={})
            with pytest.raises(CheckpointError, match=f"rank {world_size - 1}.*OffloadError.*Input/output error"):
                save_consolidated_file(whole, tmp_path / "c.ckpt", control())
        load_and_verify(tmp_path / "c", 1)

    run_world(world_size, rank, timeout=60)
    assert not (tmp_path / "c.ckpt").exists()


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_snapshot_is_a_copy_with_the_same_ties(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        whole = content()
        regions: dict[tuple[int, torch.dtype], FileTensor] = {}
        resting = rested(whole, store, regions)
        snapshots = Snapshots()
        taken = snapshots.take(resting)
        for region in regions.values():
            region.fill(-1)
        local, tied = (taken["state_dict"][name].local for name in ("conv.weight", "tied.weight"))
        assert type(local) is Tensor
        assert local.data_ptr() == tied.data_ptr()
        save_checkpoint_directory(taken, tmp_path / "c", control(), plan_summary={})
        load_and_verify(tmp_path / "c", 1)
        # Once for the two names; up to a cache line between two.
        shards = [
            *whole["state_dict"].values(),
            *(s["exp_avg"] for s in whole["optimizer_states"][0]["state"].values()),
        ]
        needed = sum(shard.local.nbytes for shard in shards if isinstance(shard, FlatShard)) - local.nbytes
        assert needed <= snapshots.nbytes - 9000 * 4 <= needed + 64 * (len(shards) + 3)


# -------------------------------------------------------------------------------------------------------------- loading


def check_ranges(found: Mapping[str, StoredTensor], values: Mapping[str, Tensor], store: NvmeStore) -> None:
    """Any range of any tensor, cast too, anywhere in a region; its neighbours stay as they are."""
    random_ = random.Random(1)
    for name, value in values.items():
        for dtype in (value.dtype, torch.float64):
            start = random_.randrange(value.numel() + 1)
            end = random_.randrange(start, value.numel() + 1)
            before = random_.choice([0, 1, 1024, 2000])
            region = store.allocate(before + end - start + 3, dtype, "a test")
            region.fill(-1)
            found[name].read_into(region.part(before, end - start), start)
            expected = torch.full((region.numel(),), -1, dtype=dtype)
            expected[before : before + end - start] = value.reshape(-1)[start:end].to(dtype)
            assert torch.equal(region.read(), expected), name


def test_a_directory_is_read_into_files(tmp_path: Path) -> None:
    run_world(3, lambda _: save_checkpoint_directory(content(), tmp_path / "c", control(), plan_summary={}), timeout=60)
    with store_in(tmp_path) as store:
        found = open_checkpoint(tmp_path / "c", control())
        check_ranges(found["state_dict"], parameters(1), store)
        verify(found, 1, end_to_end, control())


def test_loading_holds_one_piece_at_a_time(tmp_path: Path) -> None:
    """96 MiB of one tensor, in pieces of 16 MiB."""
    numel = 24 * MIB

    def rank(_: int) -> int:
        state = {"w": FlatShard(torch.ones(numel), (numel,), 0)}
        save_checkpoint_directory({"state_dict": state}, tmp_path / "c", control(), plan_summary={})
        del state
        stored = open_checkpoint(tmp_path / "c", control())["state_dict"]["w"]
        with store_in(tmp_path) as store:
            region = store.allocate(numel, torch.float32, "a test")
            peak = peak_of(lambda: stored.read_into(region, 0))
            assert all((region.part(start, MIB).read() == 1).all() for start in range(0, numel, MIB))
        return peak

    (peak,) = run_world(1, rank, timeout=60)
    assert peak < 32 * MIB
