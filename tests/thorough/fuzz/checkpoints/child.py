"""Running something in a forked child with a deadline and a limit of memory."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero.errors import CheckpointError

SECONDS = 20
NBYTES = 1 << 30  # beyond what the child has when it begins


class Ending(NamedTuple):
    """How a child ended: ``returned``, ``refused`` (a CheckpointError), ``raised``, ``hung`` or ``crashed``."""

    kind: str
    value: Any = None
    peak: int = 0  # bytes that it used in memory beyond what it began with


def bounded(action: Callable[[], Any], *, seconds: float = SECONDS, nbytes: int = NBYTES) -> Ending:
    """What an action does in a child. It returns something small that can be pickled.

    The deadline is one of the kernel's, which no loop in C outlasts, and the limit one of addresses, so that memory
    that is asked for and not touched counts.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            begin = _status("VmRSS")
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + nbytes,) * 2)
            Path("/proc/self/clear_refs").write_text("5")
            kind, value = _tried(action)
            peak = max(0, _status("VmHWM") - begin)
            os.write(writer, pickle.dumps((kind, value, peak))[: 1 << 16])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Ending("hung" if number == signal.SIGALRM else "crashed", signal.Signals(number).name)
    return Ending(*pickle.loads(answer)) if answer else Ending("crashed", "without a word")


def _tried(action: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "returned", action()
    except CheckpointError as error:
        return "refused", str(error)
    except BaseException:
        return "raised", traceback.format_exc()[-2000:]


def _status(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
