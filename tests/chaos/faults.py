"""The kinds of faults: what happens to a rank, and what becomes of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.chaos.run import LOADING, SETTING_UP, STEPPING, Struck

__all__ = ["FAULTS", "Fault"]

ANYWHERE = (*SETTING_UP, *STEPPING, *LOADING)
LOST = r"Rank \d"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault.

    Args:
        name: for people.
        act: does it, given the victim's module.
        places: where it may.
        told: what the other ranks' errors match; empty: the run goes on.
        dies: whether the victim ends without a word.
    """

    name: str
    act: Callable[[Struck], object]
    places: tuple[str, ...] = ANYWHERE
    told: str = LOST
    dies: bool = False
    workers: int = 0


def _signal(number: int) -> Callable[[Struck], object]:
    return lambda module: os.kill(os.getpid(), number)


def _raise(module: Struck) -> None:
    raise ValueError("a mistake of the user's")


def stop_and_continue(module: Struck) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


ALL = [
    Fault(name="killed", act=_signal(signal.SIGKILL), dies=True),
    Fault(name="segmentation fault", act=_signal(signal.SIGSEGV), dies=True),
    Fault(name="exception", act=_raise),
    Fault(name="stopped and continued", act=stop_and_continue, places=STEPPING, told=""),
    Fault(name="terminated", act=_signal(signal.SIGTERM), places=STEPPING, told="SIGTERM"),
]
FAULTS = {fault.name: fault for fault in ALL}
