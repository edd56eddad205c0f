"""What a process can still get of its host, as the stage is chosen by it (``strategy="zero"``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero import ZeroFabricStrategy, ZeroStrategy
from lightning_zero.extensions.planner import choose
from lightning_zero.extensions.planner.choose import free_host_memory

GB = 10**9


@pytest.fixture
def _system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 80 GB left, without any limit."""
    monkeypatch.setattr(choose, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(choose, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", f"MemTotal: {GB} kB\nMemAvailable: {80 * GB // 1024} kB\n")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group(folder: Path, limit: str, usage: int, cached: int, old: bool = False) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\n{'total_' * old}inactive_file {cached}\n")


@pytest.mark.usefixtures("_system")
def test_ranks_share_what_the_host_has_left() -> None:
    assert free_host_memory(1) == 80 * GB // 1024 * 1024
    assert free_host_memory(8) == 80 * GB // 1024 * 1024 // 8


@pytest.mark.usefixtures("_system")
@pytest.mark.parametrize("old", [False, True])
def test_the_narrowest_control_group_counts(tmp_path: Path, old: bool) -> None:
    """Pages of files that nobody uses at the moment can be had; a group without a limit leaves everything."""
    write(tmp_path / "proc/self/cgroup", "4:cpu,memory:/job/step\n1:name=systemd:/\n" if old else "0::/job/step\n")
    top = tmp_path / "cgroup" / ("memory" if old else "")
    group(top / "job/step", str(2**63 - 4096) if old else "max", 3 * GB, GB, old)

    assert free_host_memory(1) == 80 * GB // 1024 * 1024

    group(top / "job", str(40 * GB), 30 * GB, 2 * GB, old)

    assert free_host_memory(1) == 12 * GB
    assert free_host_memory(4) == 3 * GB


def test_settings_of_one_stage_do_not_go_with_a_choice() -> None:
    with pytest.raises(ValueError, match="secondary_shards is for stage 3, and stage='auto' may take another"):
        ZeroStrategy(stage="auto", secondary_shards=True)
    with pytest.raises(ValueError, match="ZeRO stage must be one of 1, 2, 3"):
        ZeroFabricStrategy(stage="automatic")  # type: ignore[arg-type]
