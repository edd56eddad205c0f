"""What a run leaves running: processes whose parents die become children of this one, and are counted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.world import ROOT, subprocess_env

__all__ = ["Orphans", "run_program"]


class Orphans:
    """As long as the context lasts. What still lives at its end is killed, by its number."""

    def __enter__(self) -> Orphans:
        self._ours = set(_children())
        _subreaper(1)
        return self

    def living(self) -> list[str]:
        """Names of processes; those that have ended are reaped."""
        found = []
        for pid in set(_children()) - self._ours:
            with contextlib.suppress(OSError):  # gone, or not ours to wait for any more
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    found.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:100]}")
        return found

    def __exit__(self, *_: object) -> None:
        while left := set(_children()) - self._ours:  # their children become ours in turn
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        _subreaper(0)


def run_program(arguments: Sequence[str], log: Path, seconds: float = 120) -> int:
    """Run ``python *arguments`` to its end, whatever its children do. Returns its exit code."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=subprocess_env(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        finally:
            process.kill()
            process.wait()


def _children() -> list[int]:
    texts = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    return [int(pid) for text in texts for pid in text.split()]


def _subreaper(on: int) -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, on)
