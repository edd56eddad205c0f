"""Programs as a user starts them: a command, its output, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers.world import ROOT, subprocess_env

__all__ = ["ROOT", "Finished", "run_script"]


class Finished(NamedTuple):
    """What a program wrote."""

    stdout: str
    stderr: str


def run_script(arguments: Sequence[str], *, cwd: Path, timeout: float = 120.0, code: int = 0) -> Finished:
    """Run ``python *arguments`` in ``cwd`` with the repository importable; fail unless it exits with ``code``.

    The program and the processes that it launches are one process group, killed as one at the deadline or when the
    program has ended, so that no rank outlives its test.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=subprocess_env(PYTHONUNBUFFERED="1", COLUMNS="200"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    in_time = True
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not in_time:
        stdout, stderr = process.communicate()
    told = f"{' '.join(arguments)}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
    assert in_time, f"no end after {timeout} s: {told}"
    assert process.returncode == code, f"exit {process.returncode} instead of {code}: {told}"
    return Finished(stdout, stderr)
