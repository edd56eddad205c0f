"""``lightning-zero doctor``: what of a machine, or of the ranks of a job, will hurt a training, and what to do.

Imported without torch, for the command's help, and because torch may be what is missing. What may hang runs in forked
processes, which end at a deadline: by their number, or by an alarm of their own where this process is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero.errors import OffloadError, columns, readable_size, some
from lightning_zero.registry import extension, installed

__all__ = ["SUPPORTED", "Finding", "run", "watched"]

SUPPORTED = ("torch>=2.11,<2.16", "lightning>=2.6,<2.7", "torchmetrics>=1.4")
_LAST_PYTHON = (3, 14)
_ORDERED = (12, 3)  # the CUDA from which on nccl starts kernels in the host's order
_CGROUPS, _GPUS, _SHM = Path("/sys/fs/cgroup"), Path("/proc/driver/nvidia/gpus"), Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_LEAST_SHM_NBYTES = 1 << 30
_ON_NETWORK = re.compile(r"nfs|cifs|smb|lustre|ceph|gpfs|beegfs|fuse|9p|gluster")
_FILE_NBYTES, _BLOCK_NBYTES, _FILE_SECONDS = 256 << 20, 16 << 20, 1.5  # at most, of writing and of reading
_SLOW = 200e6  # bytes per second
_NUMEL = 4 << 20  # of an all-reduce
_MESH = 256  # ranks that connect each to each other
_SECONDS = {"name": 5.0, "pair": 20.0, "offload": 20.0, "machine": 45.0}  # after which a check has failed
_CLOCK_SECONDS, _PATIENCE = 1.0, 2.0
_NO_WAY = "Set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to an interface that is up, and open its ports in the firewall."


class Finding(NamedTuple):
    """What a check has found; ``problem`` or ``warning`` is a sentence on what to do, if it is one."""

    name: str
    found: str
    problem: str = ""
    warning: str = ""

    @property
    def state(self) -> str:
        """In a word."""
        return "problem" if self.problem else "warning" if self.warning else "ok"

    @property
    def advice(self) -> str:
        """What to do."""
        return self.problem or self.warning


def parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero doctor``."""
    what = "Check this machine for what makes trainings fail or slow; started by torchrun or srun, also whether all "
    what += "ranks can work together. Exits with 1 if there is a problem; warnings do not count."
    made = argparse.ArgumentParser(prog="lightning-zero doctor", description=what)
    made.add_argument("--offload-dir", metavar="PATH", help="also check a directory for NvmeOffload")
    wait = "how long to wait for the other ranks of a job (default: %(default)g)"
    made.add_argument("--wait", metavar="SECONDS", type=float, default=60.0, help=wait)
    made.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return made


def run(args: Sequence[str]) -> int:
    """Run ``lightning-zero doctor`` with these options; the exit code is 1 if there is a problem.

    Of a job rank 0 prints; another rank only why it could not take part. Raises SystemExit for ``--help``, or with 2
    for wrong options.
    """
    options = parser().parse_args(args)
    findings = list(_findings(options.offload_dir, options.wait))
    counts = Counter(finding.state for finding in findings)
    if options.json and findings:
        checks = [{"name": one.name, "state": one.state, "found": one.found, "advice": one.advice} for one in findings]
        found = {"problems": counts["problem"], "warnings": counts["warning"], "checks": checks}
        print(json.dumps(found, indent=2))  # noqa: T201
    elif findings:
        rows = [("check", "state", "found")]
        for one in findings:
            lines = [line for text in (one.found, one.advice) for line in textwrap.wrap(text, 96)]
            rows += [(one.name, one.state, lines[0]), *(("", "", line) for line in lines[1:])]
        head, *lines = columns(rows)
        print(head, "-" * max(map(len, lines)), *lines, sep="\n")  # noqa: T201
        print(f"\n{counts['problem']} problem(s), {counts['warning']} warning(s)")  # noqa: T201
    return int(counts["problem"] > 0)


def _findings(offload_dir: str | None, wait: float) -> Iterator[Finding]:
    """What the first rank of each machine finds there, and rank 0 of all; of another rank only why it did not join."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that has begun to use GPUs cannot fork
    found = list(versions())
    try:
        import torch  # noqa: F401

        rank, size, here, first = _place()
    except Exception as error:  # of torch's libraries, or of wrong variables
        advice = "Install torch again, or start the ranks with torchrun or srun."
        yield from [*found, Finding("start", f"{type(error).__name__}: {error}", problem=advice)]
        return
    if first:
        ((names, reason),) = watched([partial(addresses, socket.gethostname())], _SECONDS["name"])
        found += network(names, reason, several=size > here > 0)
        found += [finding for backend in _backends(2) for finding in pair(backend)]
        found += [*torch_build(), threads(max(1, here)), *limits()]
    if first and offload_dir is not None:
        extension("nvme", "leave out --offload-dir")
        ((said, reason),) = watched([partial(offload_directory, offload_dir)], _SECONDS["offload"])
        found += said or [Finding("offload directory", reason, problem="Take another disk.")]
    if size > 1:
        seconds = wait + _SECONDS["machine"] + 2 * _SECONDS["pair"]
        ((said, reason),) = watched([partial(meet, rank, size, here, found if first else [], wait)], seconds)
        found = [*(() if rank else found), *said]
        if reason:
            advice = f"See that rank 0 runs, where MASTER_ADDR and MASTER_PORT say. {_NO_WAY}"
            found.append(Finding(f"rank {rank}", f"could not work with the others: {reason}", problem=advice))
    yield from found


def _place() -> tuple[int, int, int, bool]:
    """The rank, of how many ranks, of how many on this machine (0: nobody says), whether it is the first of those."""
    told = os.environ
    if "SLURM_PROCID" in told and "RANK" not in told:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm = SLURMEnvironment()  # which raises for what it would raise for in a training
        told |= {"RANK": told["SLURM_PROCID"], "WORLD_SIZE": told["SLURM_NTASKS"], "LOCAL_RANK": told["SLURM_LOCALID"]}
        told |= {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": str(slurm.main_port)}
        told.setdefault("LOCAL_WORLD_SIZE", told.get("SLURM_NTASKS_PER_NODE", "1"))
    size = int(told.get("WORLD_SIZE", "1"))
    here = int(told.get("LOCAL_WORLD_SIZE", "0"))
    return int(told.get("RANK", "0")), size, here, int(told.get("LOCAL_RANK", "0")) == 0


# ------------------------------------------------------------------------------------------------- versions and torch


def installed_versions() -> dict[str, str]:
    """What ranks must have alike."""
    found = {"Python": platform.python_version(), "lightning-zero": sys.modules["lightning_zero"].__version__}
    for name in ("torch", "lightning", "pytorch-lightning", "torchmetrics"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def versions() -> Iterator[Finding]:
    """What is installed, against what works together."""
    found, tried = installed_versions(), sys.version_info[:2] <= _LAST_PYTHON
    advice = "" if tried else "Install Python {}.{}: newer ones were not tried.".format(*_LAST_PYTHON)
    yield Finding("Python", found["Python"], warning=advice)
    yield Finding("lightning-zero", found["lightning-zero"])
    for requirement in SUPPORTED:
        name, first, end = [*re.split("[>=<,]+", requirement), "999"][:3]
        fits = name in found and _number(first) <= _number(found[name]) < _number(end)
        yield Finding(name, found.get(name, "not installed"), "" if fits else f"Run: pip install '{requirement}'")
    twin, ours = found.get("pytorch-lightning"), found.get("lightning")
    if twin and twin != ours:  # lightning installs the same version beside itself
        advice = "Install both in one version, and import lightning.pytorch alone."
        yield Finding("pytorch-lightning", f"{twin}, beside lightning {ours}", warning=advice)


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def torch_build() -> Iterator[Finding]:
    """Whether this build of torch can use the GPUs that are there, and has its process groups."""
    import torch
    import torch.distributed as dist

    built, gpus, driver = torch.version.cuda, len(list(_GPUS.glob("*"))), driver_cuda()
    works, problem, warning = torch.cuda.is_available(), "", ""
    if gpus and not works and built is None:
        problem = "Install a build of torch for CUDA (https://pytorch.org), to train on them."
    elif gpus and not works and built and driver and driver[0] < _number(built)[0]:
        problem = f"Update the driver, or install a torch that is built for CUDA {driver[0]}."
    elif gpus and not works:
        problem = "Look at what nvidia-smi says, and at CUDA_VISIBLE_DEVICES."
    elif works and driver and driver < _ORDERED:
        warning = "Update the driver to CUDA {}.{}: nccl orders its kernels from there on.".format(*_ORDERED)
    takes = "the driver takes CUDA {}.{}".format(*driver) if driver else "there is no driver"
    build = f"torch is built for CUDA {built}, {takes}" if built else "torch is built without CUDA"
    yield Finding("GPUs", f"{torch.cuda.device_count() if works else 0} of {gpus} usable; {build}", problem, warning)
    backends = {"gloo": dist.is_gloo_available(), **({"nccl": dist.is_nccl_available()} if built else {})}
    for backend in (name for name, there in backends.items() if not there):
        yield Finding(backend, "this build of torch has none", problem="Install a build that has, as those of PyPI.")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver takes; begins to use no GPU."""
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return number.value // 1000, number.value % 1000 // 10
    return None


# ------------------------------------------------------------------------------------------------- what the system has


def threads(ranks: int) -> Finding:
    """Whether so many ranks have a core for each of their threads."""
    import torch

    quotas = (text.split() for text in _cgroup("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    cores = [
        len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)),
        *(int(quota[0]) / int(quota[1]) for quota in quotas if quota[0].isdigit()),
    ]
    allowed, each = max(1, math.ceil(min(cores))), torch.get_num_threads()
    found = f"{each} for each of {ranks} rank(s); {allowed} of {os.cpu_count()} cores may be used"
    advice = f"Set OMP_NUM_THREADS={allowed // ranks}" if ranks <= allowed else f"Start at most {allowed} rank(s) here"
    advice = "" if each * ranks <= allowed else f"{advice}: they take cores from one another."
    return Finding("threads", found, warning=advice)


def _cgroup(controller: str, *names: str) -> Iterator[str]:
    """What files of this process's control group, and of those above it, say, of either version of cgroups."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            inner = _CGROUPS / (controllers and controller) / path.lstrip("/")
            said = (" ".join(_text(place / name) for name in names).strip() for place in (inner, *inner.parents))
            yield from filter(None, said)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def limits() -> Iterator[Finding]:
    """What the system lets a process have."""
    free = size = 0
    with suppress(OSError):
        shm = os.statvfs(_SHM)
        free, size = shm.f_frsize * shm.f_bavail, shm.f_frsize * shm.f_blocks
    advice = "Enlarge it (docker run --shm-size=8g): nccl and the workers of a DataLoader put data there."
    found = f"{readable_size(free)} of {readable_size(size)} free"
    yield Finding(str(_SHM), found, warning="" if free >= _LEAST_SHM_NBYTES else advice)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [int(text) for text in _cgroup("memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    usable = min([machine, *bounds])
    advice = f"Plan with --host-memory={usable >> 20}MiB: the system kills ranks that take more."
    found = f"{readable_size(usable)} of {readable_size(machine)} may be used"
    yield Finding("memory", found, warning="" if usable == machine else advice)
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 512 + 9 * int(os.environ.get("WORLD_SIZE", "1"))
    advice = f"Raise ulimit -Hn (LimitNOFILE= of slurmd or kubelet, docker run --ulimit nofile=) to {needed}."
    found, few = ("no limit", False) if hard == resource.RLIM_INFINITY else (f"at most {hard}", hard < needed)
    yield Finding("open files", found, warning=advice if few else "")
    space, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_MEMLOCK))
    if space != resource.RLIM_INFINITY:
        advice = "Run ulimit -v unlimited: shared memory and CUDA map much more than they use."
        yield Finding("address space", f"at most {readable_size(space)}", warning=advice)
    if locked != resource.RLIM_INFINITY and any(_INFINIBAND.glob("*")):
        advice = "Run ulimit -l unlimited: nccl locks memory for InfiniBand. What CUDA itself pins does not count."
        yield Finding("locked memory", f"at most {readable_size(locked)}", warning=advice)


def offload_directory(path: str, system: Any = None) -> Iterator[Finding]:
    """What ``NvmeOffload`` would meet there; writes a file that has no name. ``system`` stands for its system calls."""
    from lightning_zero.extensions.nvme.files import DataFile, FileSystem
    from lightning_zero.offload.host import host_memory

    system, folder, warning = system or FileSystem(), Path(path).resolve(), ""
    block = host_memory(_BLOCK_NBYTES, locked=False).random_()
    try:
        with closing(DataFile(str(folder), 0, system, block)) as file:
            file.grow(_FILE_NBYTES, "a test")
            writes, written = _rate(file.write, block, _FILE_NBYTES)
            reads, _ = _rate(file.read, block, written)
        kind, free = _filesystem(folder), readable_size(system.free_nbytes(folder))
    except (OffloadError, OSError) as error:
        advice = "Give a directory on a local disk with space, to which you may write."
        yield Finding("offload directory", str(error), problem=advice)
        return
    if kind in ("tmpfs", "ramfs"):
        warning = "Take a directory on a disk: what lies here takes the memory that offload saves."
    elif _ON_NETWORK.search(kind):
        warning = "Take a local disk: every step reads and writes all optimizer state."
    elif not file.direct:
        warning = "Take ext4 or xfs: without O_DIRECT the page cache takes memory, and hides what the disk can do."
    elif min(writes, reads) < _SLOW:
        warning = "Take a faster disk: every step reads and writes all optimizer state."
    speed = f"writes {readable_size(writes)}/s, reads {readable_size(reads)}/s"
    found = f"{kind}, {free} free, {speed}, {'with' if file.direct else 'without'} O_DIRECT"
    yield Finding("offload directory", found, warning=warning)


def _rate(move: Callable[..., None], block: Any, nbytes: int) -> tuple[int, int]:
    """Bytes per second of moving so many in blocks, and how many there was time for."""
    begin, done = time.perf_counter(), 0
    while done < nbytes and time.perf_counter() - begin < _FILE_SECONDS:
        move(block, done, "a test")
        done += _BLOCK_NBYTES
    return int(done / (time.perf_counter() - begin)), done


def _filesystem(folder: Path) -> str:
    """The kind of file system of a directory, as the last of the nearest mounts above it says."""
    mounts = [line.split(" - ") for line in _text(Path("/proc/self/mountinfo")).splitlines()]
    above = {fields.split()[4].replace("\\040", " "): what.split()[0] for fields, what in mounts}
    return next((above[str(place)] for place in (folder, *folder.parents) if str(place) in above), "unknown")


# ------------------------------------------------------------------------------------------------------------- network


def addresses(host: str) -> Iterator[str]:
    """What a name resolves to; takes as long as a name server does."""
    yield from dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def network(names: Sequence[str], reason: str, several: bool) -> Iterator[Finding]:
    """Where gloo and nccl listen. ``names`` are the addresses of this machine's name, or ``reason`` is why it has none.

    ``several``: ranks are on several machines.
    """
    known = [name for _, name in socket.if_nameindex()]
    advice = f"to the interface between the machines: {', '.join(name for name in known if name != 'lo') or 'lo'}."
    chosen, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    usable = [address for address in names if _reaches_others(address)]
    if chosen:
        missing = [name for name in chosen.split(",") if name not in known]
        found = f"GLOO_SOCKET_IFNAME={chosen}" + (f", and there is no {missing[0]}" if missing else "")
        yield Finding("network of gloo", found, problem=f"Set it {advice}" if missing else "")
    elif usable:
        yield Finding("network of gloo", f"{usable[0]}, as {socket.gethostname()} resolves to it")
    else:
        resolves = f"resolves to {names[0]}" if names else f"does not resolve ({reason})"
        found = f"loopback, as {socket.gethostname()} {resolves}: it reaches no other machine"
        advice = f"For ranks on several machines set GLOO_SOCKET_IFNAME {advice}"
        yield Finding("network of gloo", found, **{"problem" if several else "warning": advice})
    if nccl:
        given = tuple(nccl.lstrip("^=").split(","))
        named = [name for name in known if (name in given if "=" in nccl[:2] else name.startswith(given))]
        taken = [name for name in known if (name in named) != nccl.startswith("^")]
        found = f"NCCL_SOCKET_IFNAME={nccl}, which is {', '.join(taken) or 'no interface'}"
        yield Finding("network of nccl", found, problem="" if taken else f"Set it {advice}")


def _reaches_others(address: str) -> bool:
    """Whether it is an address of this machine, and not of loopback."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        return not ip_address(address).is_loopback
    return False


# ---------------------------------------------------------------------------------------------------------- processes


def watched(work: Sequence[Callable[[], Iterable[Any]]], seconds: float) -> list[tuple[list[Any], str]]:
    """What each yields in a process of its own, and why it yielded no more: empty if it came to its end.

    However this ends, by an error too, the processes have been killed.
    """
    context, deadline, started = multiprocessing.get_context("fork"), time.monotonic() + seconds, list[Any]()
    try:
        for each in work:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_yield_to, args=(writer, each, seconds))
            process.start()
            writer.close()
            started.append((process, reader))
        return [_heard(reader, deadline, seconds) for _, reader in started]
    finally:
        for process, reader in started:
            process.kill()
            process.join(_PATIENCE)  # one that waits for a disk cannot end
            reader.close()


def _yield_to(writer: Any, work: Callable[[], Iterable[Any]], seconds: float) -> None:
    import torch

    torch.set_num_threads(1)  # those of the process that this was forked from are not here
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds) + 2)  # where nobody is left to kill it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo prints there what it raises
    reason = ""
    try:
        for value in work():
            writer.send((value, None))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    writer.send((None, reason))
    os._exit(0)  # whatever threads and groups are still doing


def _heard(reader: Any, deadline: float, seconds: float) -> tuple[list[Any], str]:
    values: list[Any] = []
    with suppress(EOFError):
        while reader.poll(max(0.0, deadline - time.monotonic())):
            value, reason = reader.recv()
            if reason is not None:
                return values, reason
            values.append(value)
        return values, f"no end within {seconds:g} s"
    return values, "its process was killed"


def _backends(gpus: int) -> list[str]:
    """What can be tried: nccl where there are so many GPUs."""
    import torch

    return ["gloo", *(["nccl"] if torch.distributed.is_nccl_available() and torch.cuda.device_count() >= gpus else [])]


def _all_reduce(backend: str, rank: int, size: int, device: int, **where: Any) -> str:
    """Sum ones over all ranks in a new default group, and say what that took. Collective: every rank."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=_SECONDS["pair"])
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **where)
    for _ in range(2):  # the first one connects
        ones, begin = torch.ones(_NUMEL, device="cpu" if backend == "gloo" else device), time.perf_counter()
        dist.all_reduce(ones)
        total, seconds = float(ones[-1]), time.perf_counter() - begin
    if total != size:
        raise RuntimeError(f"the sum of {size} ones is {total}")
    rate = readable_size(int(ones.nbytes / seconds))
    return f"all-reduce of {readable_size(ones.nbytes)} in {1000 * seconds:.1f} ms, {rate}/s"


def pair(backend: str) -> Iterator[Finding]:
    """Whether two processes of this machine can work together, and read one another's memory."""
    with tempfile.TemporaryDirectory() as folder:
        work = [partial(one_of_two, backend, rank, f"file://{folder}/store") for rank in range(2)]
        both = watched(work, _SECONDS["pair"])
    said = both[0][0]
    reason = min((reason for _, reason in both if reason), key=lambda text: text.startswith("no end"), default="")
    found, advice = (said[0], "") if said else (f"no all-reduce: {reason}", _NO_WAY)
    yield Finding(f"two ranks, {backend}", found, problem=advice)
    if said and backend == "gloo" and installed("shared_memory"):
        reason = reason or said[1]
        advice = "Run ranks as one user in one container that allows it: over gloo they take longer."
        yield Finding("two ranks, memory", reason or "they read one another's", warning=reason and advice)


def one_of_two(backend: str, rank: int, place: str) -> Iterator[str]:
    """In its process: what an all-reduce took, and why memory cannot be shared. Collective: both."""
    import torch.distributed as dist

    from lightning_zero.comm.control import ControlGroup

    yield _all_reduce(backend, rank, 2, rank, init_method=place)
    if backend == "gloo" and installed("shared_memory"):
        connect = import_module("lightning_zero.extensions.shared_memory.links").connect
        connected = connect(ControlGroup(dist.group.WORLD, rank, 2), range(2), _SECONDS["pair"])
        yield connected if isinstance(connected, str) else ""


def meet(rank: int, size: int, here: int, found: Sequence[Finding], wait: float) -> Iterator[Finding]:
    """In its process: how the ranks work together, on rank 0; nothing on the others. Collective: every rank."""
    import torch.distributed as dist

    from lightning_zero._torch import prefix_store, tcp_store

    told, timeout = os.environ.get, timedelta(seconds=wait + _SECONDS["machine"] * (rank > 0))
    if size > _MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect neighbours only
    serves = rank == 0 and told("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = tcp_store(*place, is_master=serves, wait_for_workers=False, timeout=timeout)
    store = prefix_store(f"lightning_zero/doctor/{told('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    versions_here = {**installed_versions(), "WORLD_SIZE": str(size)}
    bad = [one for one in found if one.state != "ok"]
    store.set(f"rank {rank}", json.dumps([socket.gethostname(), here, versions_here, bad]))
    deadline, missing = time.monotonic() + wait, range(size) if rank == 0 else []
    while missing := [other for other in missing if not store.check([f"rank {other}"])]:
        if time.monotonic() > deadline:
            came = f"{size - len(missing)} of {size} came within {wait:g} s, without rank {some(missing)}"
            yield Finding("ranks", came, problem="Read what those print, and whether the launcher started them.")
            return
        time.sleep(0.1)
    if rank == 0:
        store.set("all are here", "")
    store.wait(["all are here"], timeout)
    store.set(f"clock {rank}", str(time.time()))
    if rank == 0:
        clocks = [float(store.get(f"clock {other}")) for other in range(size)]
        yield from compared([json.loads(store.get(f"rank {other}")) for other in range(size)], clocks)
    for backend in _backends(here or size):
        done = _all_reduce(backend, rank, size, int(told("LOCAL_RANK", "0")), store=prefix_store(backend, store))
        dist.destroy_process_group()
        if rank == 0:
            yield Finding(f"{size} ranks, {backend}", done)
    store.set(f"done {rank}", "")
    if rank == 0:  # which may serve the others
        store.wait([f"done {other}" for other in range(size)], timeout)


def compared(ranks: Sequence[Any], clocks: Sequence[float]) -> Iterator[Finding]:
    """What differs between ranks: each has its host, how many ranks should be there, versions, and what is wrong."""
    hosts = Counter(host for host, *_ in ranks)
    advice = "" if len(set(hosts.values())) == 1 else "Start as many ranks on each machine: shard_within needs it."
    found = some(f"{count} on {host}" for host, count in hosts.items())
    yield Finding("ranks", f"{len(ranks)}: {found}", warning=advice)
    if wrong := dict.fromkeys(f"{here} on {host}" for host, here, *_ in ranks if here and here != hosts[host]):
        advice = "Start torchrun with one --nproc-per-node everywhere, on machines with names of their own."
        yield Finding("LOCAL_WORLD_SIZE", some(wrong), problem=advice)
    for name, ours in ranks[0][2].items():
        theirs = [f"{there.get(name)} on rank {rank}" for rank, (_, _, there, _) in enumerate(ranks)]
        if others := [text for text in theirs if not text.startswith(f"{ours} on ")]:
            advice = "Start all ranks with the same packages, and as many everywhere."
            yield Finding(name, f"{ours} on rank 0, {some(others)}", problem=advice)
    ahead = [clock - clocks[0] for clock in clocks]
    worst = max(range(len(ranks)), key=lambda rank: abs(ahead[rank]))
    advice = "" if abs(ahead[worst]) <= _CLOCK_SECONDS else "Synchronise them (chrony): times of logs and files differ."
    yield Finding("clocks", f"{ahead[worst]:+.2f} s on rank {worst}, from that of rank 0", warning=advice)
    elsewhere = defaultdict(list)
    for host, _, _, wrong_there in ranks[1:]:
        for one in wrong_there:
            elsewhere[Finding(*one)].append(host)
    for one, places in elsewhere.items():
        yield one._replace(name=f"{one.name} ({some(places)})")
