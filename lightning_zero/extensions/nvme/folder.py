"""The folder of one rank in a directory that it shares with others, and what earlier runs have left there.

[Note: whose folder is it?]
A folder belongs to the process that created it, under a name that nobody else can have chosen, and is removed by that
process alone, at the end of its run. A process that was killed leaves its folder behind. Nothing in it can be used
again (it is half of an optimizer step), but deleting what another process may be using is worse than a full disk: it is
only reported. Its owner holds a lock on ``owner.json`` as long as it lives, which the kernel releases however it ends,
and which shows through containers and network file systems where a process number means nothing. Where there are no
locks, number and start time of the process decide, on its own host.

[Note: strangers]
Others may write to the directory, too, and what looks like a run's folder may be anything. A name that no run would
give is none of our business, links are not followed, a page is read of an owner's file if that is a file, and what it
says is not repeated if it is no time. Nothing there is an error. Only the folder that was made is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero.errors import OffloadError
from lightning_zero.storage.files import amount
from lightning_zero.storage.host import PAGE_NBYTES

__all__ = ["DATA", "Leftover", "RunFolder", "find_leftovers"]

DATA = "data"
"""The name of the file that a run puts into its folder."""

_OWNER = "owner.json"
_PREFIX = "lightning_zero-"
_NAME = re.compile(re.escape(_PREFIX) + r"(?P<host>[A-Za-z0-9._]+)-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}-rank[0-9]{1,9}")
_WHEN, _TIME = "%Y-%m-%d %H:%M:%S %z", re.compile("[0-9: +-]{10,30}")
_LATEST = 1e11  # seconds that any system can tell the date of
_SETTLING_SECONDS = 60.0  # how long a folder without an owner's file may be one that is just being made or removed


@dataclass(frozen=True)
class Leftover:
    """A folder that a run left behind."""

    path: Path
    nbytes: int | None  # on disk, if that can be read
    when: str  # it was created, or last changed
    owner: str  # in words
    dead: bool  # whether that process is known to have ended

    def __str__(self) -> str:
        size = "unknown size" if self.nbytes is None else amount(self.nbytes)
        state = "which has ended" if self.dead else "of which nothing is known"
        return f"{self.path} ({size}, {self.when}, {self.owner}, {state})"


class RunFolder:
    """A new folder for this process in an existing directory: see [Note: whose folder is it?]."""

    def __init__(self, parent: str, rank: int, world_size: int) -> None:
        host, pid = _host(), os.getpid()
        self._rank = rank
        self.pid = pid
        self._lock: int | None = None
        self._made: tuple[int, int] | None = None  # its device and number
        self.path = Path(os.path.abspath(parent)) / f"{_PREFIX}{host}-{pid}-{secrets.token_hex(6)}-rank{rank}"
        owner = {"host": host, "pid": pid, "started": _started(pid), "rank": rank, "world_size": world_size}
        try:
            self.path.mkdir(mode=0o700)
            self._made = _identity(self.path)
            self._sign(owner | {"when": time.strftime(_WHEN)})
        except BaseException as error:
            self.remove()
            if not isinstance(error, OSError):
                raise
            raise OffloadError(
                f"Rank {rank}: the folder for offloaded files '{self.path}' cannot be created: {error.strerror}."
            ) from error

    def remove(self) -> str | None:
        """Remove the folder with what this package put into it; in a forked process, and the second time, nothing.

        Returns why it is still there, if it is.
        """
        if os.getpid() != self.pid:
            return None
        reason, there = "", _identity(self.path)
        ours = there is not None and there == self._made
        for name in (DATA, f"{_OWNER}.new", _OWNER) if ours else ():
            try:
                self.path.joinpath(name).unlink(missing_ok=True)
            except OSError as error:
                reason = reason or str(error.strerror)
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)
        try:
            if ours:
                self.path.rmdir()
            elif there and self._made:
                reason = "another one is in its place"
        except FileNotFoundError:
            reason = ""
        except OSError as error:
            reason = reason or str(error.strerror)
        left = f"Rank {self._rank}: the offloaded files in '{self.path}' were not removed: {reason}."
        return left if reason else None

    def _sign(self, owner: dict[str, Any]) -> None:
        """Write the owner's file, locked before anybody can see it."""
        new = self.path / f"{_OWNER}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # not offered here
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(owner).encode())
        new.rename(self.path / _OWNER)


def find_leftovers(parent: str) -> list[Leftover]:
    """The folders in ``parent`` whose process has ended, or cannot be asked. What vanishes meanwhile is not counted."""
    names: list[str] = []
    found: list[Leftover] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in filter(None, map(_NAME.fullmatch, names)):
        with contextlib.suppress(OSError):
            if leftover := _leftover(Path(os.path.abspath(parent), name.string), name):
                found.append(leftover)
    return found


def _leftover(path: Path, name: re.Match[str]) -> Leftover | None:
    """What is known about a folder, unless its owner lives."""
    changed = path.lstat().st_mtime
    pid, host = int(name["pid"]), name["host"]
    owner, locked = _asked(path / _OWNER)
    if owner is None:
        if time.time() - changed < _SETTLING_SECONDS:
            return None
        path.lstat()  # it may just have been removed
        owner = {}
    ours = host == _host()
    if locked or (locked is None and ours and _lives(pid, owner.get("started"))):
        return None
    nbytes: int | None = None
    with contextlib.suppress(OSError):
        nbytes = sum(path.joinpath(file).lstat().st_blocks * 512 for file in (DATA, _OWNER))
    when = owner.get("when")
    if not isinstance(when, str) or not _TIME.fullmatch(when):
        when = time.strftime(_WHEN, time.localtime(min(changed, _LATEST)))
    return Leftover(path, nbytes, when, f"process {pid} on {host}", dead=ours)


def _asked(path: Path) -> tuple[dict[str, Any] | None, bool | None]:
    """What an owner's file says, ``None`` if there is none; and whether its owner still holds the lock, if known."""
    # What takes its place meanwhile is neither followed nor waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return {}, None
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None, None
    except OSError:
        return {}, None
    try:
        locked: bool | None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others ask at the same time
            locked = False
        except OSError as error:
            locked = True if isinstance(error, BlockingIOError) else None
        try:
            owner = json.loads(os.pread(descriptor, PAGE_NBYTES, 0))
        except (OSError, ValueError, RecursionError):
            owner = {}
        return owner if isinstance(owner, dict) else {}, locked
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from every other one; ``None`` if there is none that can be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _lives(pid: int, started: Any) -> bool:
    """Whether that process of this host is running, and is not another one with the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is somebody else's
    now = _started(pid)
    return started is None or now is None or started == now


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the system's start."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "localhost"
