"""Worlds of real processes: ``run_world(2, function)`` runs ``function(rank)`` in two forked ranks.

A rank is forked from the pytest process, which has imported torch and lightning already, so that a world starts in a
fraction of a second and any function will do, also a closure. What a rank returns comes back by value. A world never
outlives its deadline, and says where every rank was standing when it did not finish.

Limits: forking is safe because the parent runs one thread per process (``conftest.py``). A parent that has run a
backward on a machine with CUDA has started autograd's device threads and can not fork any more: GPU tests belong in
processes of their own (``subprocess_env``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_zero.comm.groups import RANKS_PER_HOST

__all__ = ["Failure", "WorldError", "die_with_parent", "free_port", "rank_environment", "run_world", "subprocess_env"]

ROOT = Path(__file__).resolve().parents[2]

# How long the other ranks may go on after the first one failed. A dead peer closes its sockets, so that they normally
# fail within milliseconds; what does not is reported as hanging.
GRACE_SECONDS = 10.0
# What is kept of a log. Stacks through pytest and Lightning are long, and longer still where the environment's path is.
LOG_TAIL = 20_000


class Failure(NamedTuple):
    """Why a rank did not return: an exception, a signal (``type`` is its name), or the deadline (``"Timeout"``)."""

    type: str
    message: str
    traceback: str


class WorldError(AssertionError):
    """At least one rank did not return. ``failures`` maps those ranks, the first to fail first, to what happened."""

    def __init__(self, failures: dict[int, Failure], world_size: int) -> None:
        self.failures = failures
        lines = [f"{len(failures)} of {world_size} ranks failed; first rank {next(iter(failures))}."]
        for rank, failure in failures.items():
            lines += [f"--- rank {rank}: {failure.type}: {failure.message}", failure.traceback]
        super().__init__("\n".join(lines))


@dataclass
class _Rank:
    rank: int
    pid: int
    alive: int  # read end of a pipe whose write end closes when the process ends
    directory: Path
    status: int | None = None  # as returned by ``os.waitpid``
    killed: bool = False

    def path(self, kind: str) -> Path:
        return self.directory / f"{self.rank}.{kind}"


@dataclass(frozen=True)
class _Setting:
    world_size: int
    port: int
    directory: Path
    init_group: bool
    timeout: float
    environment: dict[str, str] = field(default_factory=dict)


def run_world(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    grace: float = GRACE_SECONDS,
    init_group: bool = True,
    expect_failure: bool = False,
    environment: dict[str, str] | None = None,
) -> Any:
    """Run ``function(rank, *args)`` in ``world_size`` forked processes.

    Every rank starts with one thread, the same seeds, and the variables that ``torchrun`` sets, so that a Lightning
    ``Trainer(devices=world_size)`` inside joins the world and launches nothing.

    Args:
        world_size: number of ranks.
        function: anything callable, also a closure.
        args: passed on. Inherited by the fork, so not pickled.
        timeout: seconds for the whole world. Every rank still running then is killed.
        grace: seconds for the other ranks once one has failed.
        init_group: give every rank a gloo default process group (through a file, no port). ``False`` leaves that to
            the function, as a Trainer does it.
        expect_failure: return the failures instead of raising them; raise if no rank failed.
        environment: further variables for the ranks.

    Returns:
        The results in rank order (tensors by value), or with ``expect_failure`` a ``dict[rank, Failure]`` of the
        ranks that failed, the first one first.

    Raises:
        WorldError: a rank raised, died or hung.
        AssertionError: ``expect_failure`` and all ranks returned.
    """
    directory = Path(tempfile.mkdtemp(prefix="world-"))
    ranks: list[_Rank] = []
    try:
        with _reserved_port() as port:
            setting = _Setting(world_size, port, directory, init_group, timeout, environment or {})
            try:
                for rank in range(world_size):
                    ranks.append(_fork(rank, setting, function, args))
                _wait(ranks, timeout, grace)
            finally:
                _kill(ranks)
        failures = _failures(ranks)
        if expect_failure:
            if not failures:
                raise AssertionError(f"all {world_size} ranks returned, a failure was expected")
            return failures
        if failures:
            _raise(failures, world_size)
        return [pickle.loads(rank.path("result").read_bytes()) for rank in ranks]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def subprocess_env(**variables: str) -> dict[str, str]:
    """The environment for a test that starts its own processes: ours, without a trace of a world or of pytest."""
    foreign = ("PYTEST_", "TORCHELASTIC_", "SLURM_", "LIGHTNING_", "PL_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign) or name == RANKS_PER_HOST}
    for name in rank_environment(0, 1, 0):
        ours.pop(name, None)
    path = os.pathsep.join(filter(None, (str(ROOT), ours.get("PYTHONPATH"))))
    return {**ours, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **_LOOPBACK, **variables}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with _reserved_port() as port:
        return port


# ---------------------------------------------------------------------------------------------------------------------
# The parent's side


def _fork(rank: int, setting: _Setting, function: Callable[..., Any], args: Sequence[Any]) -> _Rank:
    alive, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork of a process that has threads
        pid = os.fork()
    if pid == 0:
        os.close(alive)
        _child(rank, setting, function, args)
    os.close(write_end)
    return _Rank(rank, pid, alive, setting.directory)


def _wait(ranks: list[_Rank], timeout: float, grace: float) -> None:
    """Wait until all ranks have ended; at the deadline, or a while after the first failure, make the others report."""
    deadline = time.monotonic() + timeout
    while running := [rank for rank in ranks if rank.status is None]:
        ready, _, _ = select.select([rank.alive for rank in running], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in running:
            if rank.alive in ready:
                _, rank.status = os.waitpid(rank.pid, 0)
                if rank.status != 0:
                    deadline = min(deadline, time.monotonic() + grace)
    for rank in running:
        rank.killed = True
        os.kill(rank.pid, signal.SIGUSR1)  # every thread's stack, written by faulthandler without the GIL
    if running:
        time.sleep(0.5)


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.status is None:
            os.kill(rank.pid, signal.SIGKILL)
            _, rank.status = os.waitpid(rank.pid, 0)
        os.close(rank.alive)


def _failures(ranks: list[_Rank]) -> dict[int, Failure]:
    found: list[tuple[float, int, Failure]] = []
    for rank in ranks:
        if rank.status == 0:
            continue
        output = _tail(rank.path("output"))
        if rank.path("failure").exists():
            when, failure = torch.load(rank.path("failure"), weights_only=False)
            failure = failure._replace(traceback=failure.traceback + output)
        elif rank.killed:
            when = float("inf")
            failure = Failure(
                "Timeout", "did not finish in time; its threads stood at", _tail(rank.path("stacks")) + output
            )
        else:
            when, code = 0.0, os.waitstatus_to_exitcode(rank.status or 0)
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            failure = Failure(name, "the process died", _tail(rank.path("stacks")) + output)
        found.append((when, rank.rank, failure))
    return {rank: failure for _, rank, failure in sorted(found)}


def _raise(failures: dict[int, Failure], world_size: int) -> NoReturn:
    first = next(iter(failures.values()))
    if first.type == "Skipped":
        pytest.skip(first.message)
    raise WorldError(failures, world_size)


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace")[-LOG_TAIL:] if path.exists() else ""
    return f"\n[{path.suffix[1:]}]\n{text}" if text.strip() else ""


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that nobody else is given while the context lasts.

    A socket that is bound but does not listen keeps the number from the kernel's choice, while a server that asks for
    ``SO_REUSEADDR`` (torch's store does) may still listen on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------------------
# The rank's side

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if any(name == "lo" for _, name in socket.if_nameindex()) else {}


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that ``torchrun`` sets."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "world",  # makes Lightning choose its TorchElasticEnvironment
    }


def _child(rank: int, setting: _Setting, function: Callable[..., Any], args: Sequence[Any]) -> NoReturn:
    """Run the function and leave by ``os._exit``: nothing the parent registered for its own end may run here."""
    code = 1
    try:
        _redirect_output(setting.directory / f"{rank}.output")
        with open(setting.directory / f"{rank}.stacks", "w") as stacks:
            faulthandler.enable(stacks)
            faulthandler.register(signal.SIGUSR1, stacks)
            # Also by the clock: a Trainer's teardown sets this signal back, which undoes the line above.
            faulthandler.dump_traceback_later(setting.timeout, file=stacks)
            try:
                _prepare(rank, setting)
                result = function(rank, *args)
                if dist.is_initialized():
                    _meet(rank, setting, "returned", 1.0)
                    dist.destroy_process_group()
                _keep(_detached(result), setting.directory / f"{rank}.result")
                code = 0
            except BaseException as error:
                name = type(error).__name__
                failure = Failure(name, getattr(error, "msg", None) or str(error), traceback.format_exc())
                torch.save((time.monotonic(), failure), setting.directory / f"{rank}.failure")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _prepare(rank: int, setting: _Setting) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(rank_environment(rank, setting.world_size, setting.port))
    os.environ.update(_LOOPBACK)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a world computes on the CPU, also where there is a GPU
    os.environ.update(setting.environment)
    rank_zero_only.rank = rank
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if setting.init_group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setting.directory}/rendezvous",
            rank=rank,
            world_size=setting.world_size,
            timeout=timedelta(seconds=2 * setting.timeout),  # the world's deadline comes first and says more
        )
        _meet(rank, setting, "joined", setting.timeout)


def _meet(rank: int, setting: _Setting, place: str, seconds: float) -> None:
    """Wait for the other ranks: torch raises where one is gone to which another still connects."""
    (setting.directory / f"{rank}.{place}").mkdir()  # a test may have taken `open` away
    deadline = time.monotonic() + seconds
    while len(list(setting.directory.glob(f"*.{place}"))) < setting.world_size and time.monotonic() < deadline:
        time.sleep(0.001)


def die_with_parent() -> None:
    """Linux: have the kernel kill this process when pytest is killed, so that nothing is left behind even then."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class _Pickler(pickle.Pickler):
    """Tensors as their bytes. ``torch.save`` asks about every object, an eighth of a test that returns many losses."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8)
        return _tensor, (data.numpy().tobytes(), value.dtype, value.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def _keep(value: Any, path: Path) -> None:
    with open(path, "wb") as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)


def _detached(value: Any) -> Any:
    """``value`` with every tensor in its lists, tuples and dicts detached and owning no more than it shows."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_detached, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_detached, value))
    return value
