"""The kinds of faults: what happens to a rank, where it may, and what becomes of the others."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.checkpoint.save import ChecksummedFile
from lightning_zero.comm.groups import shut, sockets
from tests.helpers.cases import WIDTH
from tests.helpers.stores import flip
from tests.thorough.chaos.run import LOADING, SETTING_UP, STEPPING, Struck
from tests.thorough.offload.test_offload_liveness import break_disk, resting

__all__ = ["FAULTS", "Fault"]

ANYWHERE = (*SETTING_UP, *STEPPING, *LOADING)
BETWEEN = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end")
IN_A_STEP = tuple(place for place in STEPPING[:11])
OFFLOADED = ("on_train_batch_start", "training_step", "on_before_optimizer_step", "on_train_batch_end")
LOST = r"Rank \d"
STUCK = r"No rank can go on(.|\n)*rank 0(.|\n)*rank 1"
NOBODY = 65534


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault.

    Args:
        name: for people.
        act: does it, given the victim's module.
        damage: does it to the checkpoint from which a run is about to go on, while none runs.
        places: where ``act`` may happen.
        told: what the other ranks' errors match; empty: the run goes on.
        harmless: whether it may also go on: what was damaged is written before it is read again.
        dies: whether the victim ends without a word.
        everywhere: whether all ranks are victims.
        older: whether the victims go on from an older checkpoint than the others.
        workers: of the DataLoader.
        offload: what has to be offloaded.
        disk: whether checkpoints go to a small disk of their own. That takes the right to mount one.
        timeout: of the process groups, in seconds.
        points: how many moments there are at each place: of rank 0, and of another rank.
    """

    name: str
    act: Callable[[Struck], object] | None = None
    damage: Callable[[Path], object] | None = None
    places: tuple[str, ...] = ANYWHERE
    told: str = LOST
    harmless: bool = False
    dies: bool = False
    everywhere: bool = False
    older: bool = False
    workers: int = 0
    offload: str = ""
    disk: bool = False
    timeout: float = 300.0
    points: tuple[int, int] = (0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def _signal(number: int) -> Callable[[Struck], object]:
    return lambda module: os.kill(os.getpid(), number)


def _stop(module: Struck, then: int, seconds: float) -> None:
    """Stop this process; a child of it sends it another signal later."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, then)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def _raise(module: Struck) -> None:
    raise ValueError("a mistake of the user's")


def _kill_worker(module: Struck) -> None:
    """And remove what torch leaves in shared memory where a worker dies while it hands over a batch."""
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)  # the loader is told of it all the same
        for left in Path("/dev/shm").glob(f"torch_{child.pid}_*"):
            left.unlink(missing_ok=True)


def _kill_at_call(module: Struck) -> None:
    """Kill this process at its so manieth call of the system about files or modules, of any thread."""
    calls = 0

    def count(event: str, arguments: Any) -> None:
        nonlocal calls
        calls += event == "open" or event.startswith(("os.", "shutil.", "fcntl."))
        if calls >= module.scene.point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


# ---------------------------------------------------------------------------------------------------------------------
# What the system gives


def _limit(module: Struck, what: int, least: int) -> None:
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (least, limits[1]))
    module.scene.undo.append(lambda: resource.setrlimit(what, limits))


def _use_up_memory(module: Struck) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(module, resource.RLIMIT_AS, pages * resource.getpagesize() + (32 << 20))
    torch.zeros(1 << 30)


def _use_up_files(module: Struck) -> None:
    _limit(module, resource.RLIMIT_NOFILE, 3)


def _fill_disk(module: Struck) -> None:
    with open(module.scene.folder / "saved" / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def _lose_rights(module: Struck) -> None:
    os.seteuid(NOBODY)
    module.scene.undo.append(lambda: os.seteuid(0))


def _fail_to_write(module: Struck) -> None:
    def fail(file: ChecksummedFile, data: bytes) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ChecksummedFile._append = fail  # type: ignore[method-assign, assignment]


def _jump(seconds: float) -> Callable[[Struck], object]:
    def act(module: Struck) -> None:
        clock = time.time
        time.time = lambda: clock() + seconds

    return act


def _cut_connections(module: Struck) -> None:
    for file in sockets():
        shut(file)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _move_away(module: Struck) -> None:
    (module.scene.folder / "saved").rename(module.scene.folder / "away")


def _flip_offloaded(module: Struck) -> None:
    tensor = resting(module.trainer, "masters")
    flip(tensor, 0, bit=5)


def _data_file(checkpoint: Path) -> Path:
    return sorted(checkpoint.resolve().glob("*.distcp"))[-1]


def _flip(checkpoint: Path) -> None:
    file = _data_file(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


# ---------------------------------------------------------------------------------------------------------------------
# Divergence


def _grow(module: Struck) -> None:
    module.more = nn.Linear(WIDTH, 3)


def _skip(module: Struck) -> None:
    module.skips = True


def _other_rate(module: Struck) -> None:
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.5


DISK = "No space left on device"
ALONE: dict[str, Callable[[Struck], object]] = {
    "barrier": lambda module: module.trainer.strategy.barrier("mine"),
    "logged value": lambda module: module.log("value", torch.tensor(1.0), sync_dist=True),
    "checkpoint": lambda module: module.trainer.save_checkpoint(module.scene.folder / "saved" / "never.ckpt"),
    "collective": lambda module: dist.all_reduce(torch.ones(1)),
    "process group": lambda module: dist.new_group(),
}

ALL = [
    Fault(name="killed", act=_signal(signal.SIGKILL), dies=True),
    Fault(name="all ranks killed", act=_signal(signal.SIGKILL), dies=True, everywhere=True, places=STEPPING),
    Fault(
        name="killed while saving", act=_kill_at_call, dies=True, places=("on_save_checkpoint",), points=(52, 5),
        told=f"{LOST}|rank",
    ),
    Fault(name="killed while loading", act=_kill_at_call, dies=True, places=LOADING, points=(12, 5)),
    Fault(name="segmentation fault", act=_signal(signal.SIGSEGV), dies=True),
    Fault(name="abort", act=lambda module: os.abort(), dies=True),
    Fault(name="os._exit", act=lambda module: os._exit(3), dies=True),
    Fault(name="sys.exit", act=lambda module: sys.exit(3)),
    Fault(name="terminated", act=_signal(signal.SIGTERM), places=STEPPING[:-1], told="SIGTERMException"),
    Fault(name="interrupted", act=_signal(signal.SIGINT)),
    Fault(name="stopped and continued", act=lambda m: _stop(m, signal.SIGCONT, 3), places=IN_A_STEP, told=""),
    Fault(
        name="stopped until the timeout", act=lambda m: _stop(m, signal.SIGKILL, 12), dies=True, places=IN_A_STEP,
        timeout=4,
    ),
    Fault(name="slow", act=lambda module: time.sleep(4), told=""),
    Fault(name="exception", act=_raise),
    Fault(name="out of memory", act=_use_up_memory),
    Fault(name="no more file descriptors", act=_use_up_files, places=IN_A_STEP, told="Too many open files"),
    Fault(name="worker killed", act=_kill_worker, workers=1, places=IN_A_STEP),
    Fault(name="exception in a worker", act=_raise, workers=1, places=("data",)),
    Fault(name="segmentation fault in a worker", act=_signal(signal.SIGSEGV), workers=1, places=("data",)),
    Fault(name="disk full", act=_fill_disk, places=IN_A_STEP, disk=True, told=f"rank.*{DISK}"),
    Fault(
        name="file size limit", act=lambda m: _limit(m, resource.RLIMIT_FSIZE, 1000), places=IN_A_STEP,
        told="File too large|Invalid argument",
    ),
    Fault(name="no permission", act=_lose_rights, places=IN_A_STEP, told="Permission denied"),
    Fault(name="EIO while saving", act=_fail_to_write, places=IN_A_STEP, told="Input/output error"),
    Fault(name="checkpoints moved away", act=_move_away, places=IN_A_STEP, told=r"rank \d: FileNot", harmless=True),
    *(
        Fault(name=f"offload: {name}", act=act, places=OFFLOADED, offload="files", harmless="bit" in name,
              told=rf"Rank \d(.|\n)*{told}")
        for name, act, told in [
            ("EIO", lambda m: break_disk(m.trainer, "read"), "Input/output error"),
            ("short read", lambda m: break_disk(m.trainer, "short read"), "gave 0 of"),
            ("disk full", lambda m: break_disk(m.trainer, "write"), DISK),
            ("flipped bit", _flip_offloaded, "window of elements"),
        ]
    ),
    Fault(name="clock a day forward", act=_jump(86400), told=""),
    Fault(name="clock a day back", act=_jump(-86400), told=""),
    Fault(name="connections cut", act=_cut_connections, places=IN_A_STEP),
    *(Fault(name=f"{name} alone", act=act, places=BETWEEN, told=STUCK) for name, act in ALONE.items()),
    Fault(name="batch skipped", act=_skip, places=("on_train_batch_start",)),
    Fault(name="fewer batches", act=lambda m: setattr(m, "batches", 3), places=("setup",), told="has ended on rank"),
    Fault(name="another model", act=_grow, places=("configure_model",), told="another .* than rank 0"),
    Fault(name="another learning rate", act=_other_rate, places=BETWEEN, told=r"option 'lr': 0\.\d+\n  rank 1"),
    Fault(name="another checkpoint", older=True, places=LOADING, told=r"rank \d sees another checkpoint"),
    Fault(name="file deleted", damage=lambda c: _data_file(c).unlink(), places=LOADING, told=r"distcp"),
    Fault(name="file cut", damage=lambda c: os.truncate(_data_file(c), 900), places=LOADING, told=r"distcp"),
    Fault(name="byte flipped", damage=_flip, places=LOADING, told=r"distcp.*damaged"),
    Fault(
        name="another file deleted", damage=lambda c: [file.unlink() for file in c.glob("meta*.pt")], places=LOADING,
        told=r"meta.*\.pt",
    ),
]  # fmt: skip
FAULTS = {fault.name: fault for fault in ALL}
