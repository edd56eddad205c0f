"""One ordinary file from all ranks, and ordinary files from a directory: what other programs find in them."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_optimizer_state, full_parameters
from lightning_zero.checkpoint import FlatShard, consolidated, save_checkpoint_directory
from lightning_zero.checkpoint.consolidated import by_parameter_index, consolidate_checkpoint, save_consolidated_file
from lightning_zero.comm import ControlGroup
from lightning_zero.config import parse_size
from lightning_zero.errors import CheckpointError
from tests.helpers.runs import quiet
from tests.helpers.samples import SHAPES, checkpoint, control, end_to_end, one_by_one, parameters
from tests.helpers.script import run_script
from tests.helpers.training import make_trainer
from tests.helpers.waiting import until
from tests.helpers.world import run_world

TIED = "tied.weight"


def content(version: int, ranks: ControlGroup, cut: Any = end_to_end) -> dict[str, Any]:
    """The sample checkpoint with a second name for one of its weights."""
    whole = checkpoint(version, cut, ranks)
    shard = whole["state_dict"]["conv.weight"]
    whole["state_dict"][TIED] = FlatShard(shard.local, shard.shape, shard.start)
    return whole


def save_file(path: Path, version: int = 1, cut: Any = end_to_end) -> None:
    ranks = control()
    save_consolidated_file(content(version, ranks, cut), path, ranks, plan_summary={"world_size": ranks.world_size})


def check(path: Path, version: int, mmap: bool = True) -> dict[str, Any]:
    """Everything in the file is what ``torch.save`` of the whole would have put there."""
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    state, optimizer = loaded["state_dict"], loaded["optimizer_states"][0]
    for number, (name, value) in enumerate(parameters(version).items()):
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
        assert torch.equal(optimizer["state"][number]["exp_avg"], value * 0.5), name
        assert optimizer["state"][number]["step"].item() == version
        assert optimizer["state"][number]["count"] == version
    group = {"params": list(range(len(SHAPES))), "lr": 0.1 * version, "betas": (0.9, 0.99), "fused": None}
    assert optimizer["param_groups"] == [group]
    assert loaded["optimizer_states"][1] == {"state": {}, "param_groups": [{"params": [], "lr": 1.0}]}
    assert torch.equal(state["norm.running_mean"], torch.full((3, 4), float(version)))
    assert state["_extra_state"] == {"v": version}
    assert torch.equal(state[TIED], parameters(version)["conv.weight"])
    assert state[TIED].data_ptr() == state["conv.weight"].data_ptr()
    assert (loaded["epoch"], loaded["global_step"]) == (version, 10 * version)
    assert loaded["lr_schedulers"] == [{"last_epoch": version, "_last_lr": [0.1 * version]}]
    assert torch.equal(loaded["callbacks"]["History"]["values"], torch.full((9000,), float(version)))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint as a file (``online.ckpt``) and as a directory (``folder``), by three ranks."""
    folder = tmp_path_factory.mktemp("saved")

    def rank(_: int) -> None:
        save_file(folder / "online.ckpt", 3)
        ranks = control()
        save_checkpoint_directory(content(3, ranks), folder / "folder", ranks, plan_summary={"world_size": 3})

    run_world(3, rank, timeout=30)
    return folder


# ---------------------------------------------------------------------------------------------------------- from ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cut", [end_to_end, one_by_one])
def test_ranks_write_one_file_that_torch_loads(tmp_path: Path, world_size: int, cut: Any) -> None:
    run_world(world_size, lambda _: save_file(tmp_path / "new" / "c.ckpt", 2, cut), timeout=30)

    assert [path.name for path in tmp_path.rglob("*")] == ["new", "c.ckpt"]
    for mmap in (True, False):
        assert check(tmp_path / "new" / "c.ckpt", 2, mmap)["lightning_zero"] == {"plan": {"world_size": world_size}}


# ----------------------------------------------------------------------------------------------------------- failures


def _limit_files(nbytes: int) -> None:
    """What a full disk does to a write: it fails after some of the file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def _unlimit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("failing", "part"), [(0, True), (1, True), (0, False)], ids=["part 0", "part 1", "the file"])
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_old_file(
    tmp_path: Path, failing: int, part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = consolidated._write

    def write_to_a_full_disk(*given: Any) -> Any:
        _limit_files(2000)
        return write(*given)

    def rank(number: int) -> str:
        save_file(tmp_path / "c.ckpt", 1)
        if number == failing and part:
            _limit_files(2000)
        monkeypatch.setattr(consolidated, "_write", write if part else write_to_a_full_disk)
        try:
            with pytest.raises(CheckpointError) as caught:
                save_file(tmp_path / "c.ckpt", 2)
        finally:
            _unlimit_files()
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        assert not [path for path in opened if ".ztmp-" in path]  # with the error at hand: it would keep their space
        return str(caught.value)

    messages = run_world(2, rank, timeout=30)
    assert messages[0] == messages[1]
    assert f"rank {failing}" in messages[0]
    assert "File too large" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]
    check(tmp_path / "c.ckpt", 1)


# ---------------------------------------------------------------------------------------------------------- replacing


def _directory(path: Path) -> None:
    save_checkpoint_directory(content(1, control()), path, control(), plan_summary={})


def _link(path: Path) -> None:
    save_file(path.with_name("target"), 1)
    path.symlink_to("target")


@pytest.mark.parametrize("make", [save_file, _directory, _link], ids=["file", "directory", "link"])
def test_what_has_the_name_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "c.ckpt")
    save_file(tmp_path / "c.ckpt", 2)

    assert (tmp_path / "c.ckpt").is_file()
    assert not (tmp_path / "c.ckpt").is_symlink()
    check(tmp_path / "c.ckpt", 2)
    if make is _link:
        check(tmp_path / "target", 1)
        (tmp_path / "target").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "c.ckpt").mkdir()
    (tmp_path / "c.ckpt" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save_file(tmp_path / "c.ckpt")
    assert [path.name for path in tmp_path.rglob("*")] == ["c.ckpt", "thesis.txt"]


def test_a_url_is_refused_with_a_way_out() -> None:
    with pytest.raises(CheckpointError, match=r"memory://c\.ckpt.*local or mounted"):
        save_file("memory://c.ckpt")  # type: ignore[arg-type]


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    save_file(tmp_path / "c.ckpt", 1)
    chance = random.Random(0)
    versions = set()

    def written() -> tuple[int, int]:
        found = (tmp_path / "c.ckpt").stat()
        return found.st_ino, found.st_mtime_ns

    for first in range(100, 900, 100):
        before = written()
        pid = os.fork()
        if pid == 0:
            try:
                for version in range(first, first + 100):
                    save_file(tmp_path / "c.ckpt", version)
            finally:
                os._exit(1)
        if first % 200:  # every other time not before it has saved one, however busy the machine is
            assert until(lambda before=before: written() != before, seconds=20)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        version = torch.load(tmp_path / "c.ckpt", weights_only=True)["epoch"]
        check(tmp_path / "c.ckpt", version)
        versions.add(version)
    assert len(versions) > 2
    save_file(tmp_path / "c.ckpt", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]


def test_optimizer_states_are_counted_through_the_groups() -> None:
    state = {"state": {"c": 3, "a": 1}, "param_groups": [{"params": ["a", "b"], "lr": 1}, {"params": ["c"]}]}
    assert by_parameter_index(state) == {
        "state": {0: 1, 2: 3},
        "param_groups": [{"params": [0, 1], "lr": 1}, {"params": [2]}],
    }
    plain = {"state": {0: 1}, "param_groups": [{"params": [0]}]}
    assert by_parameter_index(plain) is plain


# ------------------------------------------------------------------------------------------------------ from directory


def test_a_directory_becomes_the_file_that_the_ranks_would_have_written(saved: Path, tmp_path: Path) -> None:
    assert consolidate_checkpoint(saved / "folder", tmp_path / "c.ckpt") == [tmp_path / "c.ckpt"]

    online, offline = check(saved / "online.ckpt", 3), check(tmp_path / "c.ckpt", 3)
    assert online.keys() == offline.keys()
    assert online["lightning_zero"] == offline["lightning_zero"] == {"plan": {"world_size": 3}}
    assert [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("out", ["c.ckpt", "c.safetensors"])
def test_a_progress_bar_on_a_terminal(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    shown = {}
    for progress in (True, False):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        consolidate_checkpoint(saved / "folder", tmp_path / str(progress) / out, progress=progress)
        shown[progress] = terminal.getvalue()
    assert f"{out}: 100%" in shown[True]
    assert shown[False] == ""


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    save_checkpoint_directory({"epoch": 1}, tmp_path / "folder", control(), plan_summary={})
    with pytest.raises(CheckpointError, match=r"folder' holds no weights"):
        consolidate_checkpoint(tmp_path / "folder", tmp_path / "c.ckpt")


@pytest.mark.parametrize("kind", ["torch.distributed.checkpoint", "url"])
def test_other_sources_give_the_same_file(saved: Path, tmp_path: Path, kind: str) -> None:
    """A directory without our record, and one in an object store."""
    source: Path | str = tmp_path / "foreign"
    if kind == "url":
        source = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(f"{saved / 'folder'}/", f"/{tmp_path.name}/", recursive=True)
    else:
        shutil.copytree(saved / "folder", source)
        (tmp_path / "foreign" / "zero.json").unlink()
    consolidate_checkpoint(source, tmp_path / "c.ckpt")
    check(tmp_path / "c.ckpt", 3)


def test_weights_are_cast_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(saved / "folder", tmp_path / "c.ckpt", dtype="bfloat16")
    consolidate_checkpoint(saved / "online.ckpt", tmp_path / "d.ckpt", dtype="bfloat16")

    for name in ("c.ckpt", "d.ckpt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        for number, (key, value) in enumerate(parameters(3).items()):
            assert torch.equal(loaded["state_dict"][key], value.bfloat16())
            assert loaded["state_dict"][key].dtype == torch.bfloat16
            assert torch.equal(loaded["optimizer_states"][0]["state"][number]["exp_avg"], value * 0.5)
        assert loaded["state_dict"][TIED].data_ptr() == loaded["state_dict"]["conv.weight"].data_ptr()
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert archive.testzip() is None


def test_weights_beyond_the_range_of_the_dtype_are_named(tmp_path: Path) -> None:
    torch.save(
        {"fits": torch.ones(2), "large": torch.tensor([1.0, 1e6]), "inf": torch.tensor(torch.inf)}, tmp_path / "s"
    )
    with pytest.warns(UserWarning, match=r"1 weights .*'large'"):
        consolidate_checkpoint(tmp_path / "s", tmp_path / "out.safetensors", dtype="float16")


def test_weights_only_leaves_the_state_of_training_out(saved: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(saved / "folder", tmp_path / "c.pt", weights_only=True, prefix="conv.")

    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded.keys() == {"epoch", "global_step", "state_dict", "lightning_zero"}
    assert torch.equal(loaded["state_dict"]["weight"], parameters(3)["conv.weight"])


def _assert_same_weights(found: dict[str, Tensor], version: int = 3) -> None:
    for name, value in parameters(version).items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert torch.equal(found["norm.running_mean"], torch.full((3, 4), float(version)))


def test_one_safetensors_file(saved: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="_extra_state"):
        written = consolidate_checkpoint(saved / "folder", tmp_path / "c.safetensors", max_shard_size=1)

    assert written == [tmp_path / "c.safetensors"]
    found = load_file(tmp_path / "c.safetensors")
    _assert_same_weights(found)
    with safe_open(tmp_path / "c.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", TIED: "conv.weight"}
    assert TIED not in found


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_directory_of_safetensors_with_an_index(saved: Path, tmp_path: Path) -> None:
    """The largest weight has 480 bytes and gets a file of its own, as do the two before it together."""
    written = consolidate_checkpoint(saved / "folder", tmp_path / "hf", max_shard_size=400)

    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [path.name for path in written] == [*names, "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == sorted(path.name for path in written)
    index = json.loads(written[-1].read_text())
    found: dict[str, Tensor] = {}
    for name in names:
        part = load_file(tmp_path / "hf" / name)
        assert set(part) == {key for key, place in index["weight_map"].items() if place == name}
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 400
        found |= part
    _assert_same_weights(found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("out", ["c.ckpt", "c.safetensors", "hf", "named"])
def test_what_is_there_is_not_replaced(saved: Path, tmp_path: Path, out: str) -> None:
    """A directory may hold other files, as those of a model on Hugging Face."""
    if "." not in out:
        (tmp_path / out).mkdir()
        (tmp_path / out / "config.json").write_text("{}")
    options = {"format": "safetensors"} if out == "named" else {}
    consolidate_checkpoint(saved / "folder", tmp_path / out, **options)
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))]
    for more in ({}, {"max_shard_size": 400}):
        with pytest.raises(ValueError, match=r"exists: write to another place, or delete it first"):
            consolidate_checkpoint(saved / "folder", tmp_path / out, **options, **more)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))] == before


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("prefix", ["conv.", "conv"])
def test_a_prefix_is_cut_off(saved: Path, tmp_path: Path, prefix: str) -> None:
    consolidate_checkpoint(saved / "folder", tmp_path / "c.safetensors", prefix=prefix)
    assert {"weight", "embedding.weight"} <= load_file(tmp_path / "c.safetensors").keys()


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_dtype_has_several_names(saved: Path, tmp_path: Path) -> None:
    for number, dtype in enumerate(("bf16", "BFloat16", "torch.bfloat16", torch.bfloat16)):
        (written,) = consolidate_checkpoint(saved / "folder", tmp_path / f"{number}.safetensors", dtype=dtype)
        assert load_file(written)["embedding.weight"].dtype == torch.bfloat16, dtype


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("c.ckpt", {"format": "safetensors"}, "contradicts the name 'c.ckpt'"),
        ("c.safetensors", {"format": "ckpt"}, "contradicts"),
        ("c.ckpt", {"format": "fsdp"}, "FSDPStrategy loads the file of format='ckpt'"),
        (
            "c",
            {"format": "huggingface"},
            r"not written any more.*load_from_checkpoint\(MyModule, path\).*save_pretrained",
        ),
        ("c", {"format": "peft"}, r"not written any more.*initial_weights=base.*merge_and_unload\(\)"),
        ("c.zip", {}, "does not say what to write"),
        ("c.ckpt", {"format": "zip"}, "format must be"),
        ("c.ckpt", {"dtype": "int8"}, "dtype must be"),
        ("c.ckpt", {"dtype": "load"}, "dtype must be"),
        ("c", {"max_shard_size": "5 parsecs"}, "5 parsecs"),
        ("c", {"max_shard_size": "5"}, "5 would be so many bytes. Did you mean 5GB?"),
        ("c.ckpt", {"prefix": "model."}, "prefix"),
        ("c.safetensors", {"prefix": "nothing."}, "no weight's name begins so"),
        ("folder", {}, "is a sharded checkpoint"),
        ("folder", {"format": "ckpt"}, "exists"),
        ("folder/zero.json", {"format": "ckpt"}, "exists"),
        ("other.ckpt", {}, "exists"),
        ("memory://c.ckpt", {}, "local or mounted"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    saved: Path, tmp_path: Path, out: str, options: dict[str, Any], message: str
) -> None:
    os.symlink(saved / "folder", tmp_path / "folder")
    os.symlink(saved / "folder", tmp_path / "other.ckpt")
    source = saved / "folder" if out != "other.ckpt" else saved / "online.ckpt"
    with pytest.raises(ValueError, match=message):
        consolidate_checkpoint(source, out if "://" in out else tmp_path / out, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "other.ckpt"]


def test_a_file_within_a_checkpoint_is_refused(saved: Path) -> None:
    """It would be deleted with it."""
    names = sorted(os.listdir(saved / "folder"))
    with pytest.raises(CheckpointError, match=r"is a checkpoint, and 'c\.ckpt' in it would be deleted"):
        consolidate_checkpoint(saved / "folder", saved / "folder" / "c.ckpt")
    assert sorted(os.listdir(saved / "folder")) == names


@pytest.mark.filterwarnings("ignore:Left out, because safetensors")
def test_a_file_may_be_made_beside_its_source(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "online.ckpt", tmp_path)
    (written,) = consolidate_checkpoint(tmp_path / "online.ckpt", tmp_path)
    _assert_same_weights(load_file(written))


def test_a_file_where_a_directory_was_to_be_made(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(ValueError, match="without a suffix OUT is a directory"):
        consolidate_checkpoint(saved / "folder", tmp_path / "plain")
    assert (tmp_path / "plain").read_text() == "mine"


@pytest.mark.filterwarnings("ignore:Left out, because safetensors")
def test_suffixes_of_any_case(saved: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(saved / "folder", tmp_path / "C.CKPT", progress=False)
    check(tmp_path / "C.CKPT", 3)
    consolidate_checkpoint(tmp_path / "C.CKPT", tmp_path / "A.SafeTensors", progress=False)
    consolidate_checkpoint(tmp_path / "A.SafeTensors", tmp_path / "b.safetensors", progress=False)
    _assert_same_weights(load_file(tmp_path / "b.safetensors"))


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "2GiB": 2 * 2**30, "1.5 kb": 1500, 7: 7, "7B": 7, "7000000": 7_000_000, "1TB": 10**12}
    sizes |= {"80G": 80 * 10**9, "1.5 k": 1500, "80Gi": 80 * 2**30}
    assert {size: parse_size(size) for size in sizes} == sizes
    for size in ("", "GB", "-1GB", "0", "1 XB", "1e3", "1iB", "i", True):
        with pytest.raises(ValueError, match="a size in bytes"):
            parse_size(size)


@pytest.mark.parametrize("out", ["c.ckpt", "c.safetensors"])
@pytest.mark.parametrize("numel", [1000, 5_000_000], ids=["one piece", "five pieces"])
def test_a_damaged_source_is_noticed_and_leaves_no_file(tmp_path: Path, out: str, numel: int) -> None:
    """Whether a chunk is read in one piece or in several of 4 MiB, its checksum is verified."""
    ranks = control()
    whole = {"state_dict": {"w": FlatShard(torch.ones(numel), (numel,), 0)}}
    save_checkpoint_directory(whole, tmp_path / "folder", ranks, plan_summary={})
    data = tmp_path / "folder" / "__0_0.distcp"
    with open(data, "r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"\xff")

    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is damaged.*state_dict\.w"):
        consolidate_checkpoint(tmp_path / "folder", tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("out", ["c.ckpt", "c.safetensors"])
def test_a_full_disk_leaves_no_file(saved: Path, tmp_path: Path, out: str) -> None:
    _limit_files(500)
    try:
        with pytest.raises(CheckpointError, match=f"Could not write '.*{out}': .*File too large"):
            consolidate_checkpoint(saved / "folder", tmp_path / out, weights_only=True)
    finally:
        _unlimit_files()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- memory

_PEAK = """
import resource, sys
from pathlib import Path
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
"""


def test_consolidation_needs_no_memory_for_the_model(tmp_path: Path) -> None:
    """160 MB in two tensors, on top of what the program itself needs."""
    numel = 20_000_000
    whole = {"state_dict": {name: FlatShard(torch.zeros(numel), (numel,), 0) for name in ("a", "b")}}
    save_checkpoint_directory(whole, tmp_path / "folder", control(), plan_summary={})
    del whole
    code = _PEAK + (
        "from lightning_zero.checkpoint.consolidated import consolidate_checkpoint as consolidate\n"
        "import torch; torch.ones(1).bfloat16()\n"
        "before = peak()\n"
        "consolidate('folder', 'c.ckpt')\n"
        "consolidate('folder', 'c.safetensors', dtype='bfloat16')\n"
        "print((peak() - before) // 10**6)\n"
    )
    stdout, _ = run_script(["-c", code], cwd=tmp_path)
    assert int(stdout) < 60, "less than one of them"
    assert (tmp_path / "c.ckpt").stat().st_size > 160_000_000
    assert (tmp_path / "c.safetensors").stat().st_size > 80_000_000


def test_saving_one_file_needs_no_memory_for_the_model(tmp_path: Path) -> None:
    """Two ranks hold 60 MB each and write a file of 120 MB."""
    numel = 15_000_000

    def rank(number: int) -> int:
        def peak() -> int:
            text = Path("/proc/self/status").read_text()
            return int(text.partition("VmHWM:")[2].split()[0]) * 1024

        whole = {"state_dict": {"w": FlatShard(torch.ones(numel), (2, numel), number * numel)}}
        before = peak()
        save_consolidated_file(whole, tmp_path / "c.ckpt", control())
        return peak() - before

    assert all(nbytes <= 30 * 10**6 for nbytes in run_world(2, rank, timeout=60))
    assert torch.load(tmp_path / "c.ckpt", mmap=True)["state_dict"]["w"].sum() == 2 * numel


# ----------------------------------------------------------------------------------------------------------- training


class Model(pl.LightningModule):
    """With everything a checkpoint carries: tied weights, a buffer, two groups, a parameter without a gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.blocks[2].weight = self.blocks[0].weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.at_start: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.randn(4, self.hparams["width"], generator=torch.Generator().manual_seed(int(batch)))
        self.seen += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(x, torch.ones_like(x))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.ndim < 2]}, {"params": [p for p in trained if p.ndim > 1]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        if not isinstance(self.trainer.strategy, ZeroStrategy):
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.at_start = {
                "weights": {name: p.detach().clone() for name, p in self.named_parameters()},
                "seen": self.seen.clone(),
                "step": self.trainer.global_step,
                "rates": [group["lr"] for group in optimizer.param_groups],
                "states": {
                    name: {key: value.clone() for key, value in optimizer.state.get(p, {}).items()}
                    for name, p in self.named_parameters()
                },
            }


def loader() -> DataLoader[Any]:
    return DataLoader(range(3), batch_size=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A stage 3 run of two ranks, saved both ways, and what it held."""
    folder = tmp_path_factory.mktemp("trained")

    def rank(_: int) -> dict[str, Any]:
        model = Model()
        with quiet():
            trainer = make_trainer(ZeroStrategy(3, units=["Linear"]), max_epochs=2)
            trainer.fit(model, loader())
        dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        ranks = control()
        save_consolidated_file(dumped, folder / "online.ckpt", ranks, plan_summary={})
        save_checkpoint_directory(dumped, folder / "folder", ranks, plan_summary={})
        keys = ("step", "exp_avg", "exp_avg_sq")
        states = {
            name: {key: full_optimizer_state(model, name, key) for key in keys}
            for name, p in model.named_parameters()
            if p.requires_grad and name != "unused"
        }
        with full_parameters(model):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = model.optimizers(use_pl_optimizer=False)
        return {
            "weights": weights,
            "seen": model.seen.clone(),
            "step": trainer.global_step,
            "rates": [group["lr"] for group in optimizer.param_groups],
            "states": states,
        }

    held = run_world(2, rank, timeout=60)[0]
    consolidate_checkpoint(folder / "folder", folder / "offline.ckpt")
    return folder, held


@pytest.mark.parametrize("name", ["online.ckpt", "offline.ckpt"])
def test_a_run_goes_on_on_one_device_without_this_package(trained: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, held = trained
    model = Model()
    with quiet():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader(), ckpt_path=folder / name)

    found = model.at_start
    assert found["step"] == held["step"] == 6
    assert found["rates"] == held["rates"]
    assert torch.equal(found["seen"], held["seen"])
    assert found["weights"].keys() == held["weights"].keys()
    for key, value in held["weights"].items():
        assert torch.equal(found["weights"][key], value), key
    assert {key for key, state in found["states"].items() if state} == held["states"].keys()
    for key, state in held["states"].items():
        for part, value in state.items():
            assert torch.equal(found["states"][key][part], value), (key, part)
    assert trainer.global_step == 9

    loaded = Model.load_from_checkpoint(folder / name, map_location="cpu")
    assert loaded.hparams["width"] == 6
    for key, value in loaded.named_parameters():
        assert torch.equal(value, held["weights"][key]), key
    assert torch.equal(loaded.seen, held["seen"])


def test_names_that_peft_has_changed_are_refused(tmp_path: Path) -> None:
    """``from_pretrained`` would initialise these layers anew."""
    names = [f"model.base_model.model.h.0.{name}.weight" for name in ("attn.base_layer", "attn.lora_A.default", "norm")]
    torch.save({"state_dict": {name: torch.ones(2) for name in names}}, tmp_path / "run.ckpt")

    for format in (None, "safetensors"):
        with pytest.raises(ValueError, match=r"'h\.0\.attn\.base_layer\.weight'.*anew.*load_from_checkpoint"):
            consolidate_checkpoint(
                tmp_path / "run.ckpt", tmp_path / "out", format=format, prefix="model.base_model.model"
            )
    assert not (tmp_path / "out").exists()
    assert consolidate_checkpoint(tmp_path / "run.ckpt", tmp_path / "out", prefix="model")
