"""Programs as a user starts them: a command, its output, and nothing left running."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.helpers.world import ROOT, die_with_parent, free_port, rank_environment, subprocess_env

__all__ = ["ROOT", "Finished", "run_forked", "run_script", "start_forked"]


class Finished(NamedTuple):
    """What a program wrote."""

    stdout: str
    stderr: str


def run_script(arguments: Sequence[str], *, cwd: Path, timeout: float = 120.0, code: int = 0) -> Finished:
    """Run ``python *arguments`` in ``cwd`` with the repository importable; fail unless it exits with ``code``.

    The program and the processes that it launches are one process group, killed as one at the deadline or when the
    program has ended, so that no rank outlives its test; the program itself also ends with pytest.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    in_time = True
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        _kill(process.pid)
    if not in_time:
        stdout, stderr = process.communicate()
    return _judge(arguments, stdout, stderr, timeout if not in_time else None, process.returncode, code)


def run_forked(
    arguments: Sequence[str],
    *,
    cwd: Path,
    timeout: float = 120.0,
    code: int = 0,
    ranks: int | Sequence[Mapping[str, str]] = 1,
) -> Finished:
    """As ``run_script``, in a process forked from this one, which has imported torch and Lightning: seconds less.

    For ``FILE *ARGUMENTS`` and ``-m MODULE *ARGUMENTS``. What it launches itself are fresh processes, which import
    for themselves. With ``ranks`` there are so many, as ``torchrun`` starts them, or one with each of these variables;
    their outputs become one.
    """
    pids, codes = [], {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        if isinstance(ranks, int):
            port = free_port()
            ranks = [rank_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
        for variables in ranks:
            pids.append(start_forked(arguments, cwd, outputs, variables))
        deadline = time.monotonic() + timeout
        try:
            while len(codes) < len(ranks) and not any(codes.values()) and time.monotonic() < deadline:
                for pid in (pid for pid in pids if pid not in codes):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[pid] = os.waitstatus_to_exitcode(status)
                time.sleep(0.01)
            in_time = time.monotonic() < deadline
        finally:
            for pid in pids:
                _kill(pid)
                if pid not in codes:
                    os.waitpid(pid, 0)
        stdout, stderr = (path.read_text(errors="replace") for path in outputs)
    returncode = next(filter(None, codes.values()), 0)
    return _judge(arguments, stdout, stderr, None if in_time else timeout, returncode, code)


def start_forked(
    arguments: Sequence[str], cwd: Path, outputs: Sequence[Path], variables: Mapping[str, str] | None = None
) -> int:
    """Start one process as ``run_forked`` does, in a group of its own; ``outputs`` are of both streams."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork of a process with threads
        pid = os.fork()
    if pid == 0:
        _be_a_program(arguments, cwd, outputs, variables or {})
    return pid


def _environment() -> dict[str, str]:
    return subprocess_env(PYTHONUNBUFFERED="1", COLUMNS="200")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _judge(
    arguments: Sequence[str], stdout: str, stderr: str, late: float | None, returncode: int, code: int
) -> Finished:
    told = f"{' '.join(arguments)}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
    assert late is None, f"no end after {late} s: {told}"
    assert returncode == code, f"exit {returncode} instead of {code}: {told}"
    return Finished(stdout, stderr)


def _be_a_program(
    arguments: Sequence[str], cwd: Path, outputs: Sequence[Path], environment: Mapping[str, str]
) -> NoReturn:
    """What an interpreter would do from its start to its end."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        for logger in (logging.getLogger(), *map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))):
            for handler in logger.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stderr)
        atexit._clear()  # of pytest
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        os.environ.clear()
        os.environ.update({**_environment(), **environment})
        rank_zero_only.rank = int(environment.get("RANK", environment.get("SLURM_PROCID", 0)))
        os.chdir(cwd)
        module = arguments[0] == "-m"
        sys.argv = [*arguments[module:]]
        sys.path.insert(0, str(cwd) if module else str(Path(arguments[0]).resolve().parent))
        if module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)  # as the interpreter does
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
