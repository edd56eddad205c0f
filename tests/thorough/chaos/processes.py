"""What a run leaves running: processes whose parents die become children of this one, and are counted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.script import ROOT, start_forked
from tests.helpers.waiting import until

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
    """Run ``python *arguments`` to its end, whatever its children do. Returns its exit code.

    It is forked, and need not import torch; what it starts itself is fresh.
    """
    pid, ended, status = start_forked(arguments, ROOT, [log, log]), 0, 0

    def has_ended() -> bool:
        nonlocal ended, status
        ended, status = os.waitpid(pid, os.WNOHANG)
        return ended == pid

    assert until(has_ended, seconds), log.read_text()  # what is left is killed as an orphan
    return os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    texts = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    return [int(pid) for text in texts for pid in text.split()]


def _subreaper(on: int) -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, on)
