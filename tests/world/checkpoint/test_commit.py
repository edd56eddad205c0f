"""Publishing: whatever happens, the name leads to one whole checkpoint."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.storage.files import local_path
from lightning_zero.checkpoint.storage.publish import StagedFile, Staging, sweep
from lightning_zero.errors import CheckpointError, CommunicationError
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify, remove_checkpoint_directory
from tests.helpers.world import run_world


def save(path: Path, version: int) -> None:
    ranks = control()
    save_checkpoint_directory(checkpoint(version, end_to_end, ranks), path, ranks, plan_summary={})


def staged(final: Path, text: str) -> Staging:
    staging = Staging(final)
    staging.begin()
    (staging.path / "zero.json").write_text(text)
    return staging


@pytest.mark.parametrize("name", ["c", "val::loss=0.1 %20"])
def test_saving_twice_replaces(tmp_path: Path, name: str) -> None:
    for version in (1, 2):
        save(tmp_path / name, version)
        load_and_verify(tmp_path / name, version)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert len(os.listdir(tmp_path / name)) == 5 + (version - 1)


def test_runs_that_save_to_one_name_by_mistake_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    pids = []
    for first in (100, 200):
        if (pid := os.fork()) == 0:
            for version in range(first, first + 20):
                save(tmp_path / "c", version)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    last = open_checkpoint(tmp_path / "c", control())["epoch"]
    assert last in (119, 219)
    load_and_verify(tmp_path / "c", last)
    assert len(os.listdir(tmp_path / "c")) == 6


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


def test_a_directory_that_is_no_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save(tmp_path / "results", 1)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        remove_checkpoint_directory(tmp_path / "results", control())
    assert (tmp_path / "results" / "thesis.tex").exists()


def test_what_is_no_part_of_a_checkpoint_stays_when_it_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    (tmp_path / "c" / "best.ckpt").mkdir()
    (tmp_path / "c" / "config.json").touch()
    save(tmp_path / "c", 2)
    load_and_verify(tmp_path / "c", 2)
    with pytest.raises(CheckpointError, match=r"directories in it \(best.ckpt\).*not deleted"):
        remove_checkpoint_directory(tmp_path / "c", control())
    assert (tmp_path / "c" / "config.json").exists()
    load_and_verify(tmp_path / "c", 2)


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


def a_foreign_checkpoint(final: Path) -> None:
    final.mkdir()
    (final / "meta.pt").write_text("old")


def a_checkpoint_of_a_file_system_without_exchange(final: Path) -> None:
    """As version 0.2 made it."""
    data = final.with_name(f".zdata-{'0' * 32}")
    a_foreign_checkpoint(data)
    final.symlink_to(data.name)


OBSTACLES = [
    lambda final: None,
    lambda final: final.write_text("old"),
    lambda final: final.mkdir(),
    lambda final: final.symlink_to("nothing"),
    lambda final: final.symlink_to("other"),
    lambda final: save(final, 1),
    a_foreign_checkpoint,
    a_checkpoint_of_a_file_system_without_exchange,
]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_publishing_over_anything(tmp_path: Path, obstacle: Callable[[Path], None]) -> None:
    save(tmp_path / "other", 1)
    final = tmp_path / "c"
    obstacle(final)
    save(final, 2)
    load_and_verify(final, 2)
    load_and_verify(tmp_path / "other", 1)
    assert len(list(final.glob("*.distcp"))) == 1
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".zdata")} == {"c", "other"}
    remove_checkpoint_directory(final, control())
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_a_copy_that_somebody_keeps_beside_it_stays(tmp_path: Path) -> None:
    for name in ("c", "c.old"):
        (tmp_path / name).write_text(name)
    save(tmp_path / "c", 1)
    load_and_verify(tmp_path / "c", 1)
    assert (tmp_path / "c.old").read_text() == "c.old"
    with StagedFile(tmp_path / "c") as file:
        file.path.touch()
        file.publish()
    assert {path.name for path in tmp_path.iterdir()} == {"c", "c.old"}


@pytest.mark.parametrize("change", ["rename", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_or_an_interrupt_at_a_name_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, error: type[BaseException]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise error

    (tmp_path / "c").write_text("old")
    monkeypatch.setattr(os, change, refuse)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        save(tmp_path / "c", 1)
    monkeypatch.undo()
    assert (tmp_path / "c").read_text() == "old"
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_replaces_what_version_0_2_linked_to(tmp_path: Path) -> None:
    a_checkpoint_of_a_file_system_without_exchange(tmp_path / "c")
    with StagedFile(tmp_path / "c") as file:
        file.path.touch()
        file.publish()
    assert os.listdir(tmp_path) == ["c"]


class Refused(Exception):
    """The change that does not happen."""


@pytest.mark.parametrize("change", range(8))
@pytest.mark.parametrize("dies", [False, True])
def test_a_save_that_ends_at_any_change_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int, dies: bool
) -> None:
    save(tmp_path / "c", 1)
    before = sorted(os.listdir(tmp_path / "c"))
    changes: list[str] = []
    replace = os.replace

    def until(source: Path, final: Path) -> None:
        if len(changes) == change:
            if dies:
                os._exit(0)
            raise Refused
        changes.append(Path(final).name)
        replace(source, final)

    monkeypatch.setattr(os, "replace", until)
    if dies:
        if os.fork() == 0:
            save(tmp_path / "c", 2)
            os._exit(0)
        os.wait()
    elif change < 6:
        with pytest.raises(CheckpointError, match="Refused"):
            save(tmp_path / "c", 2)
    else:
        save(tmp_path / "c", 2)
        assert [re.sub("-.*[.]", ".", name) for name in changes[3:]] == ["zero.json", ".metadata", "meta.pt"]
    monkeypatch.undo()
    load_and_verify(tmp_path / "c", 2 if change > 3 else 1)
    if change <= 3 and not dies:
        assert sorted(os.listdir(tmp_path / "c")) == before
    save(tmp_path / "c", 3)
    load_and_verify(tmp_path / "c", 3)
    assert len(os.listdir(tmp_path / "c")) == 6
    assert os.listdir(tmp_path) == ["c"]


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    alive = staged(tmp_path / "c", "alive")
    names = {path.name for path in tmp_path.iterdir()}
    for stale in (".ztmp-", ".zdel-"):
        folder = tmp_path / f"{stale}{'0' * 31}1"
        folder.mkdir()
        (folder / "x").write_text("x")
    (tmp_path / f".ztmp-{'0' * 31}2").symlink_to(f".zdata-{'0' * 31}2")
    (tmp_path / f".zdel-{'0' * 31}4").write_text("x")
    kept = [tmp_path / ".ztmp-notes", tmp_path / ".zdel-", tmp_path / f".zold-{'0' * 32}"]
    for path in kept:
        path.write_text("not ours to delete")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {path.name for path in kept}
    alive.publish()
    assert (tmp_path / "c" / "zero.json").read_text() == "alive"


def test_a_folder_that_another_save_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, swept = Path.mkdir, []

    def make_and_sweep(path: Path, *arguments: object, **options: object) -> None:
        make(path, *arguments, **options)
        if not swept and path.name.startswith(".z"):
            swept.append(path)
            sweep(tmp_path)

    monkeypatch.setattr(Path, "mkdir", make_and_sweep)
    staging = Staging(tmp_path / "c.ckpt")
    staging.begin()
    assert swept
    assert not swept[0].exists()
    sweep(tmp_path)
    assert staging.path.is_dir()
    staging.discard()
    assert list(tmp_path.iterdir()) == []


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
