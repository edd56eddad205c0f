"""Publishing: whatever happens, the name leads to one whole checkpoint."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.storage import publish
from lightning_zero.checkpoint.storage.files import local_path
from lightning_zero.checkpoint.storage.publish import Staging, sweep
from lightning_zero.errors import CheckpointError, CommunicationError
from tests.checkpoint.samples import checkpoint, control, end_to_end, load_and_verify, remove_checkpoint_directory
from tests.helpers.world import run_world


def save(path: Path, version: int) -> None:
    ranks = control()
    save_checkpoint_directory(checkpoint(version, end_to_end, ranks), path, ranks, plan_summary={})


def no_exchange(source: Path, final: Path) -> NoReturn:
    """A file system without ``renameat2``, as NFS is one."""
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.fixture(params=["exchange", "link"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether directories are published through links, because they cannot be exchanged."""
    if request.param == "link":
        monkeypatch.setattr(publish, "_exchange", no_exchange)
    return bool(request.param == "link")


def staged(final: Path, text: str) -> Staging:
    staging = Staging(final)
    staging.begin()
    (staging.path / "zero.json").write_text(text)
    return staging


def test_saving_twice_replaces(tmp_path: Path) -> None:
    for version in (1, 2):
        save(tmp_path / "c", version)
        load_and_verify(tmp_path / "c", version)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failure_on_one_rank_raises_on_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    def rank(number: int) -> str:
        save(tmp_path / "c", 1)
        if number == 1:  # a disk that is full for this rank alone: files end at 1000 bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "c", 2)
        if number == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        control().barrier()
        load_and_verify(tmp_path / "c", 1)
        save(tmp_path / "c", 3)  # and the next save works
        load_and_verify(tmp_path / "c", 3)
        return str(caught.value)

    messages = run_world(3, rank, timeout=40)
    for message in messages:
        assert "failed on rank 1" in message
        assert "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


class Deadly(dict[str, Any]):
    """A checkpoint that kills the process that looks into it."""

    def items(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_rank_that_dies_while_saving_is_an_error_on_the_others(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        save(tmp_path / "c", 1)
        if number == 1:
            save_checkpoint_directory(Deadly(), tmp_path / "c", control(), plan_summary={})
        with pytest.raises(CommunicationError, match="Another rank has died"):
            save(tmp_path / "c", 2)

    failures = run_world(2, rank, timeout=30, expect_failure=True)
    assert {number: failure.type for number, failure in failures.items()} == {1: "SIGKILL"}
    load_and_verify(tmp_path / "c", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failure_to_publish_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    def rank(_: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "file" / "c", 1)
        return str(caught.value)

    for message in run_world(2, rank, timeout=30):
        assert "failed on rank 0" in message
        assert "Not a directory" in message or "File exists" in message


def test_a_directory_that_is_no_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save(tmp_path / "results", 1)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        remove_checkpoint_directory(tmp_path / "results", control())
    assert (tmp_path / "results" / "thesis.tex").exists()


@pytest.mark.usefixtures("links")
def test_a_checkpoint_with_others_in_it_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "best.ckpt").mkdir()
    (tmp_path / "c" / "best.ckpt" / "zero.json").touch()
    with pytest.raises(CheckpointError, match=r"directories in it \(best.ckpt\).*not replaced"):
        save(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match=r"directories in it \(best.ckpt\).*not deleted"):
        remove_checkpoint_directory(tmp_path / "c", control())
    assert (tmp_path / "c" / "best.ckpt" / "zero.json").exists()
    assert (tmp_path / "c" / "zero.json").exists()


@pytest.mark.parametrize("mark", ["zero.json", ".metadata"])
def test_nothing_is_saved_into_a_checkpoint(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    with pytest.raises(CheckpointError, match=r"is a checkpoint, and 'best.ckpt' in it"):
        save(tmp_path / "best.ckpt", 1)
    assert [path.name for path in tmp_path.iterdir()] == [mark]


def test_a_link_to_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").touch()
    (tmp_path / "c").symlink_to("results")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save(tmp_path / "c", 1)
    assert (tmp_path / "c").is_symlink()
    remove_checkpoint_directory(tmp_path / "c", control())  # deletes no more than the link
    assert (tmp_path / "results" / "thesis.tex").exists()


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/c", "file://~/c"):
        assert local_path(path) == tmp_path / "c"
    assert local_path("/a/~/c") == Path("/a/~/c")


def a_checkpoint(final: Path) -> None:
    staged(final, "old").publish()


def a_foreign_checkpoint(final: Path) -> None:
    final.mkdir()
    (final / "meta.pt").write_text("old")


def a_link_to_another_checkpoint(final: Path) -> None:
    final.symlink_to("other")


OBSTACLES = [
    lambda final: None,
    lambda final: final.write_text("old"),
    lambda final: final.mkdir(),
    lambda final: final.symlink_to("nothing"),
    a_checkpoint,
    a_foreign_checkpoint,
    a_link_to_another_checkpoint,
]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_publishing_over_anything(tmp_path: Path, links: bool, obstacle: Callable[[Path], None]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "zero.json").write_text("other")
    final = tmp_path / "c"
    obstacle(final)
    staging = staged(final, "new")
    if links and obstacle is a_foreign_checkpoint:
        with pytest.raises(IsADirectoryError, match=r"cannot replace in one step\. Move it away"):
            staging.publish()
        staging.discard()
        assert (final / "meta.pt").read_text() == "old"
        assert {path.name for path in tmp_path.iterdir()} == {"c", "other"}
        return
    staging.publish()
    staging.discard()
    assert (final / "zero.json").read_text() == "new"
    assert (tmp_path / "other" / "zero.json").read_text() == "other"
    left = {path.name for path in tmp_path.iterdir()} - {"c", "other"}
    assert len(left) == links, left  # the data that the name links to
    remove_checkpoint_directory(final, control())
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_discarding_leaves_what_was_there(tmp_path: Path, links: bool) -> None:
    for number in (0, 1):
        staging = staged(tmp_path / "c", str(number))
        if number == 0:
            staging.publish()
        staging.discard()
    assert (tmp_path / "c" / "zero.json").read_text() == "0"
    assert len(list(tmp_path.iterdir())) == 1 + links


def test_discarding_after_half_a_publication_leaves_what_was_there(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_checkpoint(tmp_path / "c")
    staging = staged(tmp_path / "c", "new")

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(*((os, "replace") if links else (publish, "_exchange")), refuse)
    with pytest.raises(OSError, match="Input/output error"):
        staging.publish()
    staging.discard()
    assert (tmp_path / "c" / "zero.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1 + links


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publish, "_exchange", no_exchange)
        staged(tmp_path / "linked", "linked").publish()
    alive = staged(tmp_path / "c", "alive")
    names = {path.name for path in tmp_path.iterdir()}
    for stale in (".ztmp-", ".zdel-", ".zdata-"):
        folder = tmp_path / f"{stale}{'0' * 31}1"
        folder.mkdir()
        (folder / "x").write_text("x")
    (tmp_path / f".ztmp-{'0' * 31}2").symlink_to(f".zdata-{'0' * 31}2")
    (tmp_path / f".ztmp-{'0' * 31}3").symlink_to(f".zdata-{'0' * 31}3")
    (tmp_path / f".zdata-{'0' * 31}3").mkdir()
    (tmp_path / f".zdel-{'0' * 31}4").write_text("x")
    kept = [tmp_path / ".ztmp-notes", tmp_path / ".zdel-", tmp_path / f".zold-{'0' * 32}"]
    for path in kept:
        path.write_text("not ours to delete")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {path.name for path in kept}
    alive.publish()
    assert (tmp_path / "c" / "zero.json").read_text() == "alive"
    assert (tmp_path / "linked" / "zero.json").read_text() == "linked"


def test_no_temporary_name_looks_like_a_checkpoint(tmp_path: Path) -> None:
    staging = staged(tmp_path / "hpc_ckpt_4.ckpt", "")
    assert staging.path.name.startswith(".ztmp-")
    assert "ckpt" not in staging.path.name
    assert not staging.path.name.endswith(".ckpt")
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_replaced_while_it_is_read_is_an_error_and_no_mixture(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    loaded = open_checkpoint(tmp_path / "c", control())
    save(tmp_path / "c", 2)
    with pytest.raises(CheckpointError, match="removed or replaced"):
        loaded["state_dict"]["conv.weight"].read()
