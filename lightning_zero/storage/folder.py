"""The folder that one rank of one run keeps its files in, and what earlier runs left beside it.

[Note: Whose folder is it?]
A folder belongs to the process that created it, under a name that nobody else can have chosen, and is removed by that
process alone, at the end of its run. A process that was killed leaves its folder behind. Nothing in it can be used
again (it is half of an optimizer step), but deleting what another process may be using is worse than a full disk: it is
only reported. Its owner holds a lock on ``owner.json`` as long as it lives, which the kernel releases however it ends,
and which shows through containers and network file systems where a process number means nothing. Where there are no
locks, number and start time of the process decide, on its own host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_zero.errors import OffloadError
from lightning_zero.storage.files import FileSystem, amount

try:
    import fcntl
except ImportError:  # no locks on this system
    fcntl = None  # type: ignore[assignment]

__all__ = ["DATA", "Leftover", "RunFolder", "check_space", "find_leftovers"]

DATA = "data"
_OWNER = "owner.json"
_PREFIX = "lightning_zero-"
_NAME = re.compile(re.escape(_PREFIX) + r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{12}-rank(?P<rank>\d+)")
_SETTLING_SECONDS = 60.0  # how long a folder without an owner's file may be one that is just being made or removed


@dataclass(frozen=True)
class _Owner:
    """The process that created a folder, and when."""

    host: str
    pid: int
    started: int | None  # in the system's own ticks, where they are known
    rank: int
    world_size: int
    when: str


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
    """A new folder for this process, removed by ``remove``.

    Args:
        parent: an existing directory.
        rank: of this process.
        world_size: of its run.

    Raises:
        OffloadError: if it cannot be created.
    """

    def __init__(self, parent: str, rank: int, world_size: int) -> None:
        host, pid = _host(), os.getpid()
        self._rank = rank
        self.pid = pid
        self._lock: int | None = None
        self.path = Path(os.path.abspath(parent)) / f"{_PREFIX}{host}-{pid}-{secrets.token_hex(6)}-rank{rank}"
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        try:
            self.path.mkdir(mode=0o700)
            self._sign(_Owner(host, pid, _started(pid), rank, world_size, when))
        except BaseException as error:
            self.remove()
            if not isinstance(error, OSError):
                raise
            raise OffloadError(
                f"Rank {rank}: the folder for offloaded files '{self.path}' cannot be created: {error.strerror}."
            ) from error

    def remove(self) -> str | None:
        """Remove the folder with what this package put into it; in a forked process, and the second time, nothing.

        Returns:
            Why it is still there, if it is.
        """
        if os.getpid() != self.pid:
            return None
        failed: OSError | None = None
        for name in (DATA, _OWNER + ".new", _OWNER):
            try:
                self.path.joinpath(name).unlink(missing_ok=True)
            except OSError as error:
                failed = failed or error
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return None
        except OSError as error:
            failed = failed or error
            return f"Rank {self._rank}: the offloaded files in '{self.path}' were not removed: {failed.strerror}."
        return None

    def _sign(self, owner: _Owner) -> None:
        """Write the owner's file, locked before anybody can see it."""
        new = self.path / f"{_OWNER}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # not offered here
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(asdict(owner)).encode())
        new.rename(self.path / _OWNER)


def check_space(path: str, nbytes: int, rank: int, system: FileSystem) -> None:
    """See whether files of ``nbytes`` in all could be kept in a directory.

    Raises:
        OffloadError: if it is missing, no directory, not writable or too full.
    """
    try:
        if not Path(path).is_dir():
            reason = "is not a directory" if os.path.lexists(path) else "does not exist"
            raise OffloadError(
                f"Rank {rank}: the offload path '{path}' {reason}. It must be an existing directory on a fast local "
                "disk."
            )
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise OffloadError(f"Rank {rank}: the offload path '{path}' is not writable for this user.")
        free = system.free_nbytes(Path(path))
    except OSError as error:
        raise OffloadError(f"Rank {rank}: the offload path '{path}' cannot be used: {error.strerror}.") from error
    if nbytes > free:
        raise OffloadError(
            f"Rank {rank}: the offload path '{path}' has too little space: {amount(nbytes)} are needed and "
            f"{amount(free)} are free. Free some space, or take another path."
        )


def find_leftovers(parent: str) -> list[Leftover]:
    """The folders in ``parent`` whose process has ended, or cannot be asked. What vanishes meanwhile is not counted."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(Path(os.path.abspath(parent)).glob(_PREFIX + "*")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if (name := _NAME.fullmatch(entry.name)) and (leftover := _leftover(entry, name)):
                    found.append(leftover)
    return found


def _leftover(path: Path, name: re.Match[str]) -> Leftover | None:
    """What is known about a folder, unless its owner lives."""
    changed = path.stat().st_mtime
    pid, host = int(name["pid"]), name["host"]
    owner: dict[str, Any] = {}
    locked: bool | None = None
    with contextlib.suppress(PermissionError):
        try:
            owner, locked = _asked(path / _OWNER)
        except FileNotFoundError:
            if time.time() - changed < _SETTLING_SECONDS:
                return None
    ours = host == _host()
    dead = locked is False and ours
    if locked or (locked is None and ours and _lives(pid, owner.get("started"))):
        return None
    if locked is None and ours:
        dead = True
    when = str(owner.get("when") or time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(changed)))
    return Leftover(path, _nbytes(path), when, f"process {pid} on {host}", dead)


def _asked(path: Path) -> tuple[dict[str, Any], bool | None]:
    """What an owner's file says, and whether its owner still holds the lock; ``None`` where there are no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    try:
        locked: bool | None = None
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others ask at the same time
                locked = False
            except BlockingIOError:
                locked = True
            except OSError:
                locked = None
        try:
            owner = json.loads(os.pread(descriptor, 1 << 16, 0))
        except ValueError:
            owner = {}
        return owner if isinstance(owner, dict) else {}, locked
    finally:
        os.close(descriptor)


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


def _nbytes(path: Path) -> int | None:
    try:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(path))
    except OSError:
        return None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "localhost"
