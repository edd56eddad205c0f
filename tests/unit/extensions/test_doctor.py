"""``lightning-zero doctor``, line by line, on machines that lack something. What takes processes: tests/script."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.extensions import doctor
from lightning_zero.extensions.doctor import Finding
from lightning_zero.extensions.nvme.files import FileSystem

ROOT = Path(__file__).resolve().parents[3]
GLOO, NCCL, GPUS, OFFLOAD = "network of gloo", "network of nccl", "GPUs", "offload directory"


def only(name: str, findings: Iterable[Finding]) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    assert (found.state == "ok") == (not found.advice)
    return found


# ------------------------------------------------------------------------------------------------- versions and torch


def test_supported_versions_are_those_of_the_package() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'    "{requirement}",\n' in declared for requirement in doctor.SUPPORTED)
    assert "Python 3.10 to 3.14" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert doctor._LAST_PYTHON == (3, 14)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("torch", "2.10.1", "problem"),
        ("torch", "2.11.0+cu128", "ok"),
        ("torch", "2.15.0a0+git1", "ok"),
        ("torch", "2.16.0.dev20261101", "problem"),
        ("lightning", "2.5.6", "problem"),
        ("lightning", "3.0.0", "problem"),
        ("torchmetrics", "1.3.2", "problem"),
        ("torchmetrics", "2.0", "ok"),
        ("lightning", None, "problem"),
        ("pytorch-lightning", "2.4.0", "warning"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, state: str) -> None:
    versions = {"torch": "2.14.1", "lightning": "2.6.6", "pytorch-lightning": "2.6.6", "torchmetrics": "1.9"}
    versions |= {name: version}

    def installed(package: str) -> str:
        if versions[package] is None:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(doctor, "version", installed)
    found = list(doctor.versions())
    assert only(name, found).state == state
    assert {other.state for other in found if other.name not in (name, "pytorch-lightning")} == {"ok"}


def test_a_python_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LAST_PYTHON", (3, 9))
    assert "3.9" in only("Python", doctor.versions()).warning


@pytest.mark.parametrize(
    ("gpus", "built", "driver", "works", "state", "advice"),
    [
        (0, None, None, False, "ok", ""),
        (0, "13.0", None, False, "ok", ""),
        (2, "13.0", (13, 0), True, "ok", ""),
        (2, "12.8", (12, 2), True, "warning", "driver to CUDA 12.3"),
        (2, None, (13, 0), False, "problem", "build of torch for CUDA"),
        (2, "13.0", (12, 8), False, "problem", "built for CUDA 12"),
        (2, "13.0", (13, 0), False, "problem", "CUDA_VISIBLE_DEVICES"),
        (2, "13.0", None, False, "problem", "nvidia-smi"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: int,
    built: str | None,
    driver: tuple[int, int] | None,
    works: bool,
    state: str,
    advice: str,
) -> None:
    for number in range(gpus):
        (tmp_path / f"0000:{number}").mkdir()
    monkeypatch.setattr(doctor, "_GPUS", tmp_path)
    monkeypatch.setattr(doctor, "driver_cuda", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    found = only(GPUS, doctor.torch_build())
    assert found.state == state
    assert advice in found.advice
    assert f"{gpus if works else 0} of {gpus} usable" in found.found


def test_backends_that_a_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr(dist, f"is_{backend}_available", lambda: False)
    assert [found.name for found in doctor.torch_build() if found.state == "problem"] == ["gloo", "nccl"]


# -------------------------------------------------------------------------------------------- threads, memory, limits


@contextmanager
def lowered(kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Control groups of either version, in which every process is."""
    for name, text in files.items():
        place = folder / name.replace("__", "/").replace("_dot_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    monkeypatch.setattr(doctor, "_CGROUPS", folder)
    (folder / "mine").write_text("5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/job/step\n")
    text = doctor._text
    monkeypatch.setattr(doctor, "_text", lambda path: text(folder / "mine" if path.name == "cgroup" else path))


def test_threads_against_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert doctor.threads(2).state == "ok"
    assert "OMP_NUM_THREADS=2:" in doctor.threads(4).warning
    assert "at most 8 rank(s)" in doctor.threads(9).warning


@pytest.mark.parametrize(
    "files",
    [
        {"job__cpu_dot_max": "150000 100000", "job__step__cpu_dot_max": "max 100000"},
        {"cpu__job__cpu_dot_cfs_quota_us": "150000", "cpu__job__cpu_dot_cfs_period_us": "100000"},
    ],
)
def test_cores_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert doctor.threads(1).state == "ok"
    cgroup(tmp_path, monkeypatch, **files)
    assert "OMP_NUM_THREADS=2:" in doctor.threads(1).warning


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"job__memory_dot_max": str(64 << 20), "job__step__memory_dot_max": "max"}, "warning"),
        ({"memory__job__step__memory_dot_limit_in_bytes": str(64 << 20)}, "warning"),
        ({"memory__job__step__memory_dot_limit_in_bytes": str(2**63 - 4096)}, "ok"),
        ({"job__step__memory_dot_max": "max"}, "ok"),
    ],
)
def test_memory_of_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], state: str
) -> None:
    cgroup(tmp_path, monkeypatch, **files)
    found = only("memory", doctor.limits())
    assert found.state == state
    assert ("--host-memory=64MiB" in found.advice) == (state == "warning")


def test_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which cannot be made here: docker gives 64 MiB."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_bavail=1 << 14, f_blocks=1 << 14))
    assert "--shm-size" in only("/dev/shm", doctor.limits()).warning
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_SHM", tmp_path / "missing")
    assert only(str(tmp_path / "missing"), doctor.limits()).state == "warning"


def test_limits_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not {"address space", "locked memory"} & {found.name for found in doctor.limits()}
    assert only("open files", doctor.limits()).state == "ok"
    monkeypatch.setenv("WORLD_SIZE", str(resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 9))
    assert "LimitNOFILE" in only("open files", doctor.limits()).warning
    with monkeypatch.context() as unlimited:
        unlimited.setattr(doctor.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert only("open files", doctor.limits()).found == "no limit"
    with lowered(resource.RLIMIT_AS, 1 << 46):
        assert "ulimit -v" in only("address space", doctor.limits()).warning
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    with lowered(resource.RLIMIT_MEMLOCK, 1 << 16):
        assert "ulimit -l" in only("locked memory", doctor.limits()).warning


# ------------------------------------------------------------------------------------------------------------- offload


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FILE_NBYTES", 4 << 20)
    monkeypatch.setattr(doctor, "_BLOCK_NBYTES", 1 << 20)
    monkeypatch.setattr(doctor, "_SLOW", 0)
    monkeypatch.setattr(doctor, "_filesystem", lambda _: "ext4")


class Slow(FileSystem):
    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        time.sleep(0.02)
        return super().pwritev(descriptor, memory, offset)


class Full(FileSystem):
    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")


class Buffered(FileSystem):
    @staticmethod
    def open(path: Any, flags: int, mode: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return os.open(path, flags, mode)


class Dying(FileSystem):
    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if len(memory) > 4096:
            raise OSError(5, "Input/output error")
        return super().preadv(descriptor, memory, offset)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("system", "kind", "state", "text"),
    [
        (FileSystem, "ext4", "ok", "ext4, "),
        (FileSystem, "tmpfs", "warning", "memory that offload saves"),
        (FileSystem, "nfs4", "warning", "local disk"),
        (FileSystem, "fuse.sshfs", "warning", "local disk"),
        (Slow, "ext4", "warning", "faster disk"),
        (Buffered, "ext4", "warning", "O_DIRECT"),
        (Full, "ext4", "problem", "No space left"),
        (Dying, "ext4", "problem", "Input/output error"),
    ],
)
def test_offload_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: type, kind: str, state: str, text: str
) -> None:
    monkeypatch.setattr(doctor, "_filesystem", lambda _: kind)
    monkeypatch.setattr(doctor, "_SLOW", 60e6 if system is Slow else 0)
    if system is FileSystem and not only(OFFLOAD, doctor.offload_directory(str(tmp_path))).found.endswith(
        "with O_DIRECT"
    ):
        pytest.skip("no O_DIRECT here, which is a warning of its own")
    found = only(OFFLOAD, doctor.offload_directory(str(tmp_path), system()))
    assert found.state == state, found
    assert text in found.found + found.advice
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_quick")
def test_offload_to_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "missing"):
        assert "cannot be created" in only(OFFLOAD, doctor.offload_directory(str(tmp_path / name))).found
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_file_system_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /big\\040disk rw shared:1 - nfs4 server:/ rw\n"
    monkeypatch.setattr(
        doctor, "_text", lambda _: mounts + "3 1 0:7 / /run rw - xfs /dev/b rw\n4 1 0:8 / /run rw - tmpfs x rw"
    )
    folders = ("/big disk/a", "/run/b", "/running", "/")
    assert [doctor._filesystem(Path(folder)) for folder in folders] == ["nfs4", "tmpfs", "ext4", "ext4"]


# ------------------------------------------------------------------------------------------------------------- network


@pytest.fixture(autouse=True)
def _no_interface_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("names", [[], ["127.0.1.1"], ["::1"], ["192.0.2.123"]])  # the last is nobody's
def test_a_host_name_that_leads_nowhere(names: list[str], several: bool) -> None:
    found = only(GLOO, doctor.network(names, "gaierror: unknown", several))
    assert found.state == ("problem" if several else "warning")
    assert (names[0] if names else "does not resolve (gaierror: unknown)") in found.found
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_a_host_name_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_reaches_others", lambda address: address == "10.0.0.5")
    found = only(GLOO, doctor.network(["127.0.0.1", "10.0.0.5"], "", True))
    assert found.state == "ok"
    assert "10.0.0.5" in found.found


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("GLOO", "lo", "ok"),
        ("GLOO", "lo,nothing0", "problem"),
        ("NCCL", "lo", "ok"),
        ("NCCL", "l", "ok"),  # names begin so
        ("NCCL", "=l", "problem"),
        ("NCCL", "=lo", "ok"),
        ("NCCL", "nothing", "problem"),
        ("NCCL", "^nothing", "ok"),
    ],
)
def test_an_interface_that_is_chosen(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, state: str) -> None:
    monkeypatch.setenv(f"{variable}_SOCKET_IFNAME", value)
    found = only(f"network of {variable.lower()}", doctor.network([], "", False))
    assert found.state == state
    assert f"{variable}_SOCKET_IFNAME={value}" in found.found


# ---------------------------------------------------------------------------------------------------- a job, printing

SAME = {"torch": "2.14.1", "WORLD_SIZE": "3"}


def rank(host: str = "a", here: int = 3, found: Iterable[Finding] = (), **versions: str) -> Any:
    return json.loads(json.dumps([host, here, {**SAME, **versions}, list(found)]))


def test_ranks_that_are_alike() -> None:
    found = list(doctor.compared([rank()] * 3, [7.0, 7.2, 6.9]))
    assert [(one.name, one.state) for one in found] == [("ranks", "ok"), ("clocks", "ok")]
    assert found[0].found == "3: 3 on a"


@pytest.mark.parametrize(
    ("ranks", "clocks", "name", "state", "text"),
    [
        ([rank(), rank(torch="2.13.0"), rank()], [0, 0, 0], "torch", "problem", "2.14.1 on rank 0, 2.13.0 on rank 1"),
        ([rank(), rank(), rank(WORLD_SIZE="4")], [0, 0, 0], "WORLD_SIZE", "problem", "4 on rank 2"),
        ([rank(), rank(), rank()], [5, 5, 3.5], "clocks", "warning", "-1.50 s on rank 2"),
        ([rank("a", 2), rank("a", 2), rank("b", 1)], [0, 0, 0], "ranks", "warning", "2 on a, 1 on b"),
        ([rank("a", 2), rank("b", 2), rank("c", 2)], [0, 0, 0], "LOCAL_WORLD_SIZE", "problem", "2 on a, 2 on b"),
        ([rank(), rank("b", 1, [Finding("memory", "x", "y")])], [0, 0], "memory (b)", "problem", "x"),
    ],
)
def test_ranks_that_differ(ranks: list[Any], clocks: list[float], name: str, state: str, text: str) -> None:
    found = only(name, doctor.compared(ranks, clocks))
    assert found.state == state
    assert text in found.found


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([Finding("a", "b"), Finding("c", "d", warning="Do e.")], 0),
        ([Finding("a", "b"), Finding("c", "d", problem="Do e.")], 1),
    ],
)
def test_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], findings: list[Finding], code: int
) -> None:
    monkeypatch.setattr(doctor, "_findings", lambda *_: findings)
    assert doctor.run([]) == code
    state = findings[1].state
    rows = ["check  state    found", "-" * 21, "a      ok       b", f"c      {state}  d", "                Do e."]
    assert capsys.readouterr().out.splitlines() == [*rows, "", f"{code} problem(s), {1 - code} warning(s)"]

    assert doctor.run(["--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["problems"], shown["warnings"]) == (code, 1 - code)
    assert shown["checks"][1] == {"name": "c", "state": state, "found": "d", "advice": "Do e."}


def test_wrong_options() -> None:
    for arguments in (["--nothing"], ["--wait", "long"]):
        with pytest.raises(SystemExit) as stopped:
            doctor.run(arguments)
        assert stopped.value.code == 2
