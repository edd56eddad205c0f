"""Object stores: no rename, and still one whole checkpoint after a failure at any point."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.checkpoint import is_checkpoint_directory_at, open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.storage.publish import remove
from lightning_zero.errors import CheckpointError
from tests.helpers.samples import checkpoint, control, end_to_end, parameters, verify
from tests.helpers.world import run_world


def save(url: str, version: int) -> None:
    ranks = control()
    save_checkpoint_directory(checkpoint(version, end_to_end, ranks), url, ranks, plan_summary={})


def version_of(url: str) -> int:
    """Of a checkpoint all of whose parts are of that version."""
    ranks = control()
    loaded = open_checkpoint(url, ranks)
    verify(loaded, loaded["epoch"], end_to_end, ranks)
    return int(loaded["epoch"])


def listing(url: str) -> list[str]:
    """Names, with the save's own part of them cut out."""
    system, root = fsspec.url_to_fs(url)
    return sorted(re.sub(r"-[0-9a-f]{32}", "-id", Path(name).name) for name in system.find(root))


WHOLE = [".metadata", "__0_0-id.distcp", "meta-id.bin", "meta-id.pt", "meta.pt", "zero.json"]


class Down(Exception):
    """The store does not answer."""


class Store(MemoryFileSystem):
    """An object store: only whole objects, no rename; it notes what changes, and can go down."""

    protocol = "teststore"
    store: dict[str, Any] = {}  # noqa: RUF012  (as in the base class)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    changes: list[tuple[str, str]] = []  # noqa: RUF012
    down_from = -1  # the number of the first change that does not happen
    answer_lost = False  # the first of them happens, but nobody is told

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("teststore://", "memory://")))

    def _change(self, what: str, path: str) -> bool:
        """Whether it happens; raises where the caller learns nothing."""
        name = re.sub(r"-[0-9a-f]{32}", "-id", Path(path).name)
        if Store.down_from == len(Store.changes) and Store.answer_lost:
            Store.changes.append((what, name))
            return True
        if 0 <= Store.down_from <= len(Store.changes):
            raise Down(what)
        Store.changes.append((what, name))
        return False

    def _put(self, path: str, content: bytes) -> None:
        lost = self._change("put", path)
        MemoryFileSystem.pipe_file(self, path, content)
        if lost:
            raise Down("put")

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._put(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._put(path, value)

    def rm_file(self, path: str) -> None:
        self._change("delete", path)
        super().rm_file(path)

    def mv(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a store cannot rename")


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    fsspec.register_implementation("teststore", Store, clobber=True)
    for system in (Store, MemoryFileSystem):
        system.store.clear()
        system.pseudo_dirs[:] = [""]
    Store.changes.clear()
    Store.down_from, Store.answer_lost = -1, False
    yield
    Store.down_from = -1


def test_save_replace_and_remove_behind_a_url() -> None:
    url = "memory://bucket/run/last.ckpt"
    for version in (1, 2):
        save(url, version)
        assert version_of(url) == version
        assert listing(url) == WHOLE
    remove(url)
    assert listing("memory://bucket") == []
    remove(url)


def test_the_order_of_writes() -> None:
    save("teststore://b/c", 1)
    first = len(Store.changes)
    save("teststore://b/c", 2)
    written = [("put", name) for name in ("__0_0-id.distcp", "meta-id.pt", "meta-id.bin", "zero.json")]
    others = [("put", ".metadata"), ("put", "meta.pt")]
    assert Store.changes[:first] == written + others
    deleted = {("delete", name) for name in ("__0_0-id.distcp", "meta-id.pt", "meta-id.bin")}
    assert Store.changes[first : first + 6] == written + others
    assert set(Store.changes[first + 6 :]) == deleted
    Store.changes.clear()
    remove("teststore://b/c")
    assert Store.changes[:3] == [("delete", name) for name in ("zero.json", ".metadata", "meta.pt")]


@pytest.mark.parametrize("answer_lost", [False, True])
@pytest.mark.parametrize("change", range(9))
def test_a_store_that_goes_down_at_any_change_holds_the_old_or_the_new_checkpoint(
    change: int, answer_lost: bool
) -> None:
    url = "teststore://b/c"
    save(url, 1)
    Store.down_from, Store.answer_lost = len(Store.changes) + change, answer_lost
    failed = change < 6  # what is left to delete is no failure
    if failed:
        with pytest.raises(CheckpointError, match="Down"):
            save(url, 2)
    else:
        save(url, 2)
    Store.down_from = -1
    committed = change > 3 or (change == 3 and answer_lost)
    assert version_of(url) == (2 if committed else 1)
    save(url, 3)
    assert version_of(url) == 3
    assert listing(url) == WHOLE


@pytest.mark.parametrize("name", ["meta-", "zero.json"])
def test_a_failed_upload_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    url = "teststore://b/c"
    put = Store.put_file

    def refuse(self: Store, lpath: str, rpath: str, **options: Any) -> None:
        if name in rpath:
            raise PermissionError("403")
        put(self, lpath, rpath, **options)

    monkeypatch.setattr(Store, "put_file", refuse)
    with pytest.raises(CheckpointError, match=r"PermissionError.*403"):
        save(url, 1)
    assert listing(url) == []
    monkeypatch.undo()
    save(url, 1)
    monkeypatch.setattr(Store, "put_file", refuse)
    with pytest.raises(CheckpointError):
        save(url, 2)
    assert version_of(url) == 1
    assert listing(url) == WHOLE


@pytest.mark.parametrize("happened", [True, False])
def test_a_commit_whose_answer_is_lost_deletes_nothing_it_may_have_published(
    monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    url = "teststore://b/c"
    save(url, 1)

    def put(self: Store, lpath: str, rpath: str, **_: Any) -> None:
        if happened or not rpath.endswith("zero.json"):
            self._put(rpath, Path(lpath).read_bytes())
        if rpath.endswith("zero.json"):
            raise TimeoutError("no answer")

    monkeypatch.setattr(Store, "put_file", put)
    with pytest.raises(CheckpointError, match="no answer"):
        save(url, 2)
    monkeypatch.undo()
    assert version_of(url) == (2 if happened else 1)
    assert (listing(url) == WHOLE) is not happened  # else both are still there
    save(url, 3)
    assert version_of(url) == 3
    assert listing(url) == WHOLE


class SharedFolder(DirFileSystem):
    """A folder as a store that several processes share, without rename."""

    protocol = "testshared"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__("/", LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.replace("testshared://", "/").rstrip("/")

    def mv(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a store cannot rename")

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if (Path("/") / rpath.lstrip("/")).parent.joinpath("refuse").exists() and "__1_0-" in rpath:
            raise PermissionError("403")
        self.fs.put_file(lpath, self._join(rpath), **options)


def test_a_world_saves_and_a_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    url = f"testshared://{folder.relative_to('/')}"

    def rank(number: int) -> str:
        fsspec.register_implementation("testshared", SharedFolder, clobber=True)
        ranks = control()
        for version in (1, 2):
            save(url, version)
            assert version_of(url) == version
            ranks.barrier()
        if number == 0:
            (folder / "refuse").touch()
        ranks.barrier()
        with pytest.raises(CheckpointError) as caught:
            save(url, 3)
        ranks.barrier()
        assert version_of(url) == 2
        # Another reader finds whole tensors under the names it knows.
        whole = {"state_dict": {"embedding.weight": torch.zeros(13, 6)}}
        dcp.load(whole, checkpoint_id=folder)
        assert torch.equal(whole["state_dict"]["embedding.weight"], parameters(2)["embedding.weight"])
        return str(caught.value)

    messages = run_world(3, rank, timeout=40)
    assert messages[0] == messages[1] == messages[2]
    assert "failed on rank 1." in messages[0]
    assert "PermissionError" in messages[0]
    assert listing(f"file://{folder}") == sorted([*WHOLE, "__1_0-id.distcp", "__2_0-id.distcp", "refuse"])
    assert torch.load(folder / "meta.pt", weights_only=True)["epoch"] == 2


def test_a_folder_that_is_no_checkpoint_is_neither_used_nor_removed() -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/results/thesis.tex", b"x")
    system.pipe_file("/bucket/file", b"x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save("memory://bucket/results", 1)
    with pytest.raises(IsADirectoryError, match="not a checkpoint"):
        remove("memory://bucket/results")
    with pytest.raises(CheckpointError, match="is a file"):
        save("memory://bucket/file", 1)
    assert system.find("/bucket") == ["/bucket/file", "/bucket/results/thesis.tex"]


def test_files_that_are_not_of_the_checkpoint_stay() -> None:
    system = fsspec.filesystem("memory")
    save("memory://bucket/c", 1)
    system.pipe_file("/bucket/c/notes.txt", b"x")
    system.pipe_file("/bucket/c/c/zero.json", b"x")
    system.pipe_file("/bucket/c/__0_0.distcp", b"x")
    save("memory://bucket/c", 2)
    assert version_of("memory://bucket/c") == 2
    remove("memory://bucket/c")
    assert system.find("/bucket") == ["/bucket/c/c/zero.json", "/bucket/c/notes.txt"]


def test_what_a_killed_save_left_is_deleted_by_the_next() -> None:
    system = fsspec.filesystem("memory")
    left = uuid.uuid4().hex
    for name in (f"__0_0-{left}.distcp", f"__7_0-{left}.distcp", f"meta-{left}.pt"):
        system.pipe_file(f"/bucket/c/{name}", b"x")
    save("memory://bucket/c", 1)
    assert version_of("memory://bucket/c") == 1
    assert listing("memory://bucket/c") == WHOLE


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.ckpt", "https://127.0.0.1:9/a/model.safetensors"])
def test_a_web_server_is_refused_before_it_is_asked(url: str) -> None:
    refusal = r"is on a web server, from which checkpoints are not read.*fsspec"
    with pytest.raises(CheckpointError, match=refusal):
        open_checkpoint(url, control())
    with pytest.raises(CheckpointError, match=refusal):
        save_checkpoint_directory({"state_dict": {}}, url, control(), plan_summary={})
    assert not is_checkpoint_directory_at(url)


def test_a_single_file_is_removed_too() -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/a.ckpt", b"x")
    remove("memory://bucket/a.ckpt")
    assert not system.exists("/bucket/a.ckpt")
