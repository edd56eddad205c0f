"""What every rank is doing, told to those that wait: so that no rank waits for what can never come.

[Note: when nobody can go on]
One rank waits in a collective of one group, another in one of another group, and only the timeout would end that, after
half an hour. So a thread of each process looks twice a second at what the rank's own thread is doing. A rank that has
waited for a second says in the store of the default group in which collective of which group it is, and how many of
each group it has entered.

Once all ranks wait, or have failed, the first one judges. A rank can go on if all members of the group have entered
the collective that it waits in, or wait in it; if nobody can, nobody ever will. The waits have to be the same ones in
two looks, with two signs of life of every rank in between. As long as one computes, loads, compiles or sleeps nobody
judges. Runs are counted: who has failed in an earlier one may still come to this one.

Then each thread ends the wait of its rank: where that waits for memory of other ranks it looks whether there is a
verdict; in a process group its connections are shut, as if the others had ended.

[Note: how a wait is known]
Our own code notes what it waits for (``comm/control.py``). For a call of torch.distributed in user code or in Lightning
the stacks of all threads show that a thread is in such a function. Its group is the one, of those that are not ours,
whose count of collectives has grown last. Where several have, nobody judges.

[Note: stacks of other threads]
To make a frame object may begin a garbage collection, which may let other threads run; in Python 3.11 the frame may
have ended then, and its next use is a segmentation fault. So there is no collection meanwhile, and stacks are read at
the begin of a time slice: no other thread runs before that is done, so that no frame, with the tensors in it, outlives
its call. (``faulthandler`` makes no objects. But Python 3.11 lists a thread of C++ that comes to Python before it is
complete, and who looks at all threads without the lock of that list then dies of it, about once in a day.)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_zero._torch import abort_group, default_store, entered_collectives, group_called, groups_made
from lightning_zero.comm.control import ANY_AGREEMENT, notes_of, passed_on
from lightning_zero.comm.groups import connections, sockets, this_host

__all__ = ["Watch", "current_watch", "watch_ranks"]

_TICK_SECONDS = 0.5
_LONG_SECONDS = 1.0  # in one wait, before anybody is told
_LONG_ALONE_SECONDS = 5.0  # of a rank that has lost the store
_STORE = "(store)"  # in place of a group's name: where processes make groups
_NO_WAITS = {"_object_to_tensor", "_tensor_to_object", "destroy_process_group", "_shutdown_backend"}
_MAKE_GROUPS = {"_new_process_group_helper", "_store_based_barrier", "init_process_group"}
_MAKE_GROUPS |= {"_create_gloo_process_group", "_create_nccl_process_group"}  # since 2.14

_ADVICE = (
    "Every rank must make the same calls in the same order. Usual causes: dataloaders of different length; a branch "
    "that asks for the rank (`if self.global_rank == 0:`) around what all ranks have to do together (a checkpoint, "
    "`self.log(..., sync_dist=True)`, a call of the model, a barrier); an exception that one rank caught."
)


class Wait(NamedTuple):
    """What a rank's thread waits in."""

    key: tuple[int, ...]  # the same as long as it is the same wait
    group: str  # whose members it needs; empty where it needs any other rank
    operation: str
    place: int  # which one it is of the group's
    members: tuple[int, ...]
    text: str  # for people


def watch_ranks() -> Watch | None:
    """Watch the ranks of the default group from this thread's process on, once per default group. Not collective."""
    global _WATCH
    world = dist.group.WORLD
    if _WATCH is not None and _WATCH.group() is not world:
        _WATCH.end()
        _WATCH = None
    if _WATCH is None and world is not None and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError, OSError):  # the store has no copies
            _WATCH = Watch(weakref.ref(world))
    return _WATCH


def current_watch() -> Watch | None:
    """What watches the ranks of this process, if anything does."""
    return _WATCH


class Watch:
    """One rank's side: a thread that looks, tells and judges. See [Note: when nobody can go on].

    ``group`` gives the default group as long as it lives.
    """

    def __init__(self, group: weakref.ref[Any]) -> None:
        self.group = group
        self.verdict = ""
        """Why nobody can go on; empty while somebody may."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._default: Any = default_store()  # kept: perhaps this process serves it
        connections[_STORE] = clients_of(self._default)
        self._store: Any = self._default.clone()  # a client of its own: the rank's may be waiting
        self._stacks = _Stacks(threading.get_ident())
        self._failure = ""
        self._runs, self._running = 0, False
        self._number = next(_NUMBERS)  # the store may outlive the default group
        self._processes: list[list[Any]] = []  # of all ranks, once all have told
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._tell(state="runs")
        self._thread = threading.Thread(target=self._run, name="lightning_zero: watch", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error that ends this rank's run: it comes to no collective of that any more. Local."""
        if not self._running:  # others may have begun this run
            self._runs, self._running = self._runs + 1, True
        self._failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:500]
        self._tell_quietly()

    def begins_anew(self) -> None:
        """Take part in another run, which each rank counts once. Local."""
        failed, self._failure = self._failure, ""
        self._runs, self._running = self._runs + 1, True
        with contextlib.suppress(RuntimeError):  # who has failed has not waited, and may not know of it yet
            self._find_verdict()
        if self.verdict and not self.verdict.startswith(_EARLIER):
            self.verdict = f"{_EARLIER} {self.verdict}"
        if failed:
            self._tell_quietly()

    def run_ends(self) -> None:
        """What fails from now on belongs to the next run. Local."""
        self._running = False

    def explain(self) -> str:
        """What is known of why a collective did not complete, as lines; ``verdict`` if nobody could go on. Local."""
        # Who ends for a reason has told of it before its connections are shut; who is killed is gone soon after.
        deadline, ended = time.monotonic() + _TICK_SECONDS, dict[int, str]()
        while not ended and time.monotonic() < deadline:
            ended = {rank: _GONE for rank, process in enumerate(self._processes) if is_gone(process)}
            with contextlib.suppress(RuntimeError):  # the process with the store has ended
                if self._find_verdict():
                    return self.verdict
                ended |= {rank: s["text"] for rank, s in enumerate(self._states()) if s["state"] == "over"}
            time.sleep(0.0 if ended else 0.05)
        return "".join(f"Rank {rank} {text}.\n" for rank, text in sorted(ended.items())[:4])

    def end(self) -> None:
        """End the thread, while the interpreter still runs. May be called again.

        A rank that has failed lets the others, whose connections to it have just been shut, read why.
        """
        atexit.unregister(self.end)
        self._over.set()
        self._thread.join(5.0)
        deadline = time.monotonic() + (_LONG_SECONDS if self._failure else 0.0)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and any(state["state"] != "over" for state in self._states()):
                time.sleep(0.05)
        self._default = None

    # ----------------------------------------------------------------- private

    def _key(self, rank: int, what: str = "state") -> str:
        return f"lightning_zero/watch/{self._number}/{rank}/{what}"

    def _tell(self, **state: Any) -> None:
        with self._lock:
            if self._failure:
                state |= {"state": "over", "text": f"has failed with {self._failure}", "run": self._runs}
            state["entered"] = {_STORE: groups_made(), **entered_collectives(), **passed_on}
            state["process"] = process_of(os.getpid())
            self._store.set(self._key(self._rank), json.dumps(state))

    def _states(self, rank: int | None = None) -> list[dict[str, Any]]:
        """What one rank has told, or all, once all have told anything; until then nothing."""
        keys = [self._key(other) for other in (range(self._world_size) if rank is None else [rank])]
        states = [json.loads(state) for state in self._store.multi_get(keys)] if self._store.check(keys) else []
        for state in states:
            gone, over = is_gone(state["process"]), state["state"] == "over"
            if gone and not over:
                state |= {"state": "over", "text": _GONE}
            elif over and not gone and state["run"] < self._runs:
                state["state"] = "runs"
        self._processes = [state["process"] for state in states] if rank is None else self._processes
        return states

    def _tell_quietly(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._tell(state="runs")

    def _run(self) -> None:
        try:
            self._look()
        except RuntimeError:  # of the store, whose process has ended, of which gloo tells; or the connection is cut
            self._look_alone()

    def _look(self) -> None:
        wait: Wait | None = None
        since, beats, number = 0.0, 0, 0
        looks = _Looks()
        while not self._over.wait(_TICK_SECONDS) and self.group() is not None:
            if not self._processes:
                self._states()
            now = self._stacks.wait()
            if now is None or wait is None or now.key != wait.key:
                if beats:
                    self._tell(state="runs")
                wait, since, beats, looks = now, time.monotonic(), 0, _Looks()
                continue
            if time.monotonic() - since < _LONG_SECONDS:
                continue
            number, beats = number + (not beats), beats + 1
            told = {**wait._asdict(), "text": f"has waited for {time.monotonic() - since:.0f} s {wait.text}"}
            self._tell(state="waits", number=number, beats=beats, **told)
            if not self.verdict:
                self._judge(looks)
            if self.verdict:
                self._break(wait)

    def _look_alone(self) -> None:
        """Nobody can be asked or told any more: so no wait is a long one of which all know."""
        wait, since = None, 0.0
        while not self._over.wait(_TICK_SECONDS) and self.group() is not None:
            now = self._stacks.wait()
            if now is None or wait is None or now.key != wait.key:
                wait, since = now, time.monotonic()
            elif (seconds := time.monotonic() - since) > _LONG_ALONE_SECONDS:
                self.verdict = (
                    f"It has lost the store that the ranks share, and has waited for {seconds:.0f} s {wait.text}."
                )
                self._break(wait)

    def _judge(self, looks: _Looks) -> None:
        """Look at all ranks, and find a verdict if nobody can go on."""
        if self._find_verdict():
            return
        for rank in range(self._rank):  # the first that has not failed judges
            if [state["state"] for state in self._states(rank)] != ["over"]:
                return
        states = self._states()
        if not looks.stuck(states):
            return
        lines = "\n".join(f"  rank {rank} {state['text']}" for rank, state in enumerate(states))
        self.verdict = f"No rank can go on, because they wait for one another in different places:\n{lines}\n{_ADVICE}"
        self._store.set(self._key(0, "verdict"), self.verdict)
        self._over.wait(2 * _TICK_SECONDS)  # the process with the store does not end before the others have looked

    def _find_verdict(self) -> bool:
        key = self._key(0, "verdict")
        if not self.verdict and self._store.check([key]):
            self.verdict = self._store.get(key).decode()
        return bool(self.verdict)

    def _break(self, wait: Wait) -> None:
        if wait.group:
            connections.shut(wait.group)
            abort_group(wait.group)


class _Looks:
    """Looks at all ranks, one after the other: whether nobody can go on in two of them. See [Note: when nobody can go
    on]."""

    def __init__(self) -> None:
        self._first: tuple[Any, ...] = ()
        self._beats: tuple[int, ...] = ()

    def stuck(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Take a look; whether no rank will ever go on."""
        waits = tuple((state["state"], state.get("number")) for state in states) if _stuck(states) else ()
        beats = tuple(state.get("beats", 0) for state in states)
        if not waits or waits != self._first:
            self._first, self._beats = waits, beats
            return False
        return all(
            now - before >= 2 or state["state"] != "waits"
            for before, now, state in zip(self._beats, beats, states, strict=True)
        )


def _stuck(states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no rank will ever go on, given what all of them have told."""
    return (
        bool(states)
        and all(state["state"] != "runs" for state in states)
        and not any(state["state"] == "waits" and _can_go_on(rank, states) for rank, state in enumerate(states))
    )


def _can_go_on(rank: int, states: Sequence[Mapping[str, Any]]) -> bool:
    mine = states[rank]
    group, place = mine["group"], mine["place"]
    if not group:  # memory: whoever waits there has heard everything that the others had to say
        return False
    for other in (states[member] for member in mine["members"]):
        there = other["state"] == "waits" and other["group"] == group
        same = there and other["operation"] == mine["operation"]
        if there and not same and other["place"] == place:
            return False
        if other["entered"].get(group, 0) < place and not same:
            return False
    return True


class _Stacks:
    """The waits of one thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._entered: dict[str, int] = {}  # by group, when last looked
        self._latest = ""  # the group that is not ours whose count has grown since then; empty: several have

    def wait(self) -> Wait | None:
        """What the thread waits in, if no other thread does something that ranks may wait for."""
        self._note_entered()
        stacks = self.written()
        lines, _ = stacks.pop(self._thread, []), stacks.pop(threading.get_ident())
        if not lines or lines[0].file not in _WAITING or any(map(_communicates, stacks.values())):
            return None
        return self._noted(lines) or self._foreign(lines)

    def written(self) -> dict[int, list[_Line]]:
        """The stacks of all threads, the innermost call first. See [Note: stacks of other threads]."""
        collects = gc.isenabled()
        time.sleep(0)
        gc.disable()
        try:
            return {
                thread: [_Line(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_stack(top)]
                for thread, top in sys._current_frames().items()
            }
        finally:
            if collects:
                gc.enable()

    def _note_entered(self) -> None:
        entered = entered_collectives()
        ours = connections.keys() - {getattr(dist.group.WORLD, "group_name", None)}
        grown = [name for name, count in entered.items() if name not in ours and count != self._entered.get(name, 0)]
        if grown:
            self._latest = grown[0] if len(grown) == 1 else ""
        self._entered = entered

    def _noted(self, lines: list[_Line]) -> Wait | None:
        notes = notes_of(self._thread)
        note = next((note for note in reversed(notes) if note.group is not None), None)
        if note is None:
            return None
        told = next((other.what for other in reversed(notes) if other.what not in ("", ANY_AGREEMENT)), "")
        group, place, key = note.group, note.place, (id(note), note.moment(), note.place)
        if isinstance(group, str):
            kind = f"through {group}" if group else "for other ranks"
            members, operation = tuple(note.members) or _everyone(), "transfer" if group else ""
            return Wait(key, group, operation, place, members, _text(lines, kind, told))
        return self._in_group(
            lines, group, "transfer" if place >= 0 else _operation(lines) or "exchange", place, key, told
        )

    def _in_group(
        self, lines: list[_Line], group: Any, operation: str, place: int, key: tuple[int, ...], told: str
    ) -> Wait | None:
        name, members = str(group.group_name), tuple(dist.get_process_group_ranks(group))
        if operation in _NO_WAITS:
            return None
        where = "the default group" if group is dist.group.WORLD else f"the group '{group.group_desc}'"
        text = f"in {operation} of {where}" if operation != "transfer" else f"through {where}"
        place = place if place >= 0 else self._entered.get(name, 0)
        return Wait((*key, place), name, operation, place, members, _text(lines, text, told))

    def _foreign(self, lines: list[_Line]) -> Wait | None:
        operation = _operation(lines)
        if operation in _MAKE_GROUPS:
            place = groups_made()
            return Wait((place,), _STORE, "new_group", place, _everyone(), _text(lines, "for a new process group", ""))
        group = group_called(self._latest) if operation else None
        return None if group is None else self._in_group(lines, group, operation, -1, (), "")


class _Line(NamedTuple):
    file: str
    number: int
    function: str


def _operation(lines: list[_Line]) -> str:
    """The function of torch.distributed that a thread is in; empty if it is in none."""
    return lines[0].function if lines[0].file == _COLLECTIVES else ""


def _everyone() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def _communicates(lines: list[_Line]) -> bool:
    """Whether a thread that stands here does something that other ranks may wait for."""
    return any(file == _COLLECTIVES or file.startswith(f"{_OURS}checkpoint{os.sep}") for file, _, _ in lines)


def _text(lines: list[_Line], waits: str, told: str) -> str:
    """What a rank does there, for people: what our own code calls it, and where user code called that."""
    library = user = ""
    for file, number, function in lines:
        if f"{os.sep}site-packages{os.sep}" in file and not file.startswith(_OURS):
            library = library or f"{Path(file).name}:{number}, {function}"
        elif not file.startswith((_OURS, _STANDARD, "<")):
            user = f"{file}:{number}, {function}"
            break
    called = user or library
    return " ".join(filter(None, (waits, f"({told})" if told else "", f"at {called}" if called else "")))


_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_COLLECTIVES = dist.distributed_c10d.__file__
_WAITING = {
    _COLLECTIVES,
    *(str(Path(_OURS, "comm", name)) for name in ("control.py", "native.py")),
    str(Path(_OURS, "extensions", "shared_memory", "links.py")),
}
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


# What the system tells of processes and of the store's connections.


def process_of(pid: int) -> list[Any]:
    """Which process of which host that is, while it lives; empty when it does not, or the system does not tell."""
    with contextlib.suppress(OSError):
        state, *_, started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
        return [] if state in "ZX" or not this_host() else [this_host(), pid, started]
    return []


def is_gone(process: list[Any]) -> bool:
    """Whether what ``process_of`` has told of a process of this host is true no more."""
    return bool(process) and process[0] == this_host() and process_of(process[1]) != process


def clients_of(store: Any) -> list[tuple[int, str]]:
    """The connections of this process to the server of a store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, found = getattr(store, "port", None), []
    for file, what in sockets().items() if port else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                found.append((file, what))
    return found


_EARLIER = "An earlier run has closed the connections: restart all ranks. It ended with:"
_GONE = "has ended without a word: its process is gone"
_NUMBERS = itertools.count()  # alike on all ranks
_WATCH: Watch | None = None


def _after_fork() -> None:
    global _WATCH
    _WATCH = None
    connections.clear()


os.register_at_fork(after_in_child=_after_fork)
