"""What every rank is doing, told to those that wait: so that no rank waits for what can never come.

[Note: when nobody can go on]
One rank waits in a collective of one group, another in one of another group, and only the timeout would end that, after
half an hour. So a thread of each process looks twice a second at what the rank's own thread is doing. A rank that has
waited for a second says in the store of the default group in which collective of which group it is, and how many of
each group it has entered.

Once all ranks wait, or have failed, the first one judges. A rank can go on if all members of the group have entered
the collective that it waits in, or wait in it; if nobody can, nobody ever will. Then the judge calls, and who waits
answers after another look. If the waits are the same ones, all were under way when it called. As long as one computes,
loads, compiles or sleeps nobody judges. Runs are counted: who has failed in an earlier one may still come to this one.

Then each thread ends the wait of its rank: where that waits for memory of other ranks it looks whether there is a
verdict; in a process group its connections are shut, as if the others had ended.

[Note: few requests]
One store serves all. Ranks that wait ask it for calls and a verdict, all together ``_RATE`` times a second: those of
one host in turns, and the hosts one after the other. Who hears of calls writes as many bytes to its file, and behind
them the verdict; the others of the host read it there. A rank tells what is new of it in turn: ``_TOLD`` ranks at a
look. So the store may show a wait that has ended. It brings no verdict: only its rank, while it waits, answers a call.

[Note: how a wait is known]
Our own code notes what it waits for (``comm/control.py``). For a call of torch.distributed in user code or in Lightning
the stacks of all threads show that a thread is in such a function. Its group is the one, of those that are not ours,
whose count of collectives has grown last. Where several have, nobody judges. DTensors have groups of their own.

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
import re
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_zero import _torch
from lightning_zero._torch import abort_group, default_store, entered_collectives, group_called, groups_made
from lightning_zero.comm.control import ANY_AGREEMENT, notes_of, passed_on
from lightning_zero.comm.groups import ANSWER_SECONDS, connections, sockets, this_host
from lightning_zero.comm.groups import STORE as _STORE

__all__ = ["Watch", "current_watch", "watch_ranks"]

_TICK_SECONDS = 0.5
_LONG_SECONDS = 1.0  # in one wait, before anybody is told
_LONG_ALONE_SECONDS = 5.0  # of a rank that has lost the store
_RATE, _JUDGE_RATE = 25, 1000  # questions a second of all ranks together; states a second that are read by one
_TOLD = 48  # ranks whose turn it is to tell something at one look
_TEXT, _NAMED = 500, 16  # characters of what a rank does; ranks that are told of one by one
_NO_WAITS = {"_object_to_tensor", "_tensor_to_object", "destroy_process_group", "_shutdown_backend"}
_MAKE_GROUPS = {"_new_process_group_helper", "_store_based_barrier", "init_process_group"}
_MAKE_GROUPS |= {"_create_gloo_process_group", "_create_nccl_process_group"}  # since 2.14

_NOBODY = "No rank can go on, because they wait for one another in different places:"
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
    members: list[tuple[int, int, int]]  # ranges
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
    """One rank's side: a thread that looks, tells and judges. ``group`` gives the default group as long as it lives."""

    def __init__(self, group: weakref.ref[Any]) -> None:
        self.group = group
        self.verdict = ""
        """Why nobody can go on; empty while somebody may."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._default: Any = default_store()  # kept: perhaps this process serves it, and its client may wait
        connections[_STORE] = clients_of(self._default)
        self._store: Any = _torch.prefix_store(f"lightning_zero/watch/{next(_NUMBERS)}", self._default.clone())
        connections[_CLIENT] = [place for place in clients_of(self._default) if place not in connections[_STORE]]
        for file, _ in connections[_CLIENT]:  # the store itself waits without end for a server that is stopped
            with socket.socket(fileno=os.dup(file)) as client:
                seconds = max(1, int(self._default.timeout.total_seconds()))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
        self._stacks = _Stacks(threading.get_ident())
        self._failure, self._runs, self._running = "", 0, False
        self._over, self._lock = threading.Event(), threading.Lock()
        self._others = _Others(self._store, self._rank, self._world_size)
        self._tell(state="runs")
        self._thread = threading.Thread(target=self._run, name="lightning_zero: watch", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error that ends this rank's run: it comes to no collective of that any more. Local."""
        if not self._running:  # others may have begun this run
            self._runs, self._running = self._runs + 1, True
        first = not self._failure
        self._failure = f"has failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:_TEXT]
        with connections.shut_after(ANSWER_SECONDS, _CLIENT), contextlib.suppress(RuntimeError):
            self._tell(state="runs")
            if first:
                count = self._store.add(f"failures {self._runs}", 1)
                self._store.set(f"failure {self._runs} {count}", json.dumps([self._rank, self._failure]))

    def begins_anew(self) -> None:
        """Take part in another run, which each rank counts once. Local."""
        self._failure, self._runs, self._running = "", self._runs + 1, True
        with contextlib.suppress(RuntimeError):  # who has failed has not waited, and may not know of it yet
            self._tell(state="runs")
            self.verdict = self.verdict or "".join(_read(self._store, ["verdict"]))
        if self.verdict and not self.verdict.startswith(_EARLIER):
            self.verdict = f"{_EARLIER} {self.verdict}"

    def run_ends(self) -> None:
        """What fails from now on belongs to the next run. Local."""
        self._running = False

    def explain(self) -> str:
        """What is known of why a collective did not complete, as lines; ``verdict`` if nobody could go on. Local."""
        # Who ends for a reason has told of it before its connections are shut; who is killed is gone soon after.
        with connections.shut_after(ANSWER_SECONDS, _CLIENT):
            for pause in (0.0, 0.05, 0.15, 0.3):
                time.sleep(pause)
                ended: dict[int, str] = {rank: _GONE for rank, mine in self._others.here.items() if is_gone(mine[0])}
                silent = _SILENT
                with contextlib.suppress(RuntimeError):
                    self.verdict = self.verdict or "".join(_read(self._store, ["verdict"]))
                    for run in (self._runs, self._runs + 1):  # others may be ahead
                        first = range(min(4, self._store.add(f"failures {run}", 0)))
                        ended |= _read(self._store, [f"failure {run} {place + 1}" for place in first])
                    silent = ""
                if self.verdict or ended:
                    break
        told = "".join(f"Rank {rank} {text}.\n" for rank, text in sorted([*ended.items()][:4]))
        return self.verdict or told or silent

    def end(self) -> None:
        """End the thread, while the interpreter still runs. May be called again. Rank 0, whose process mostly serves
        the store, first lets the others read why it has failed."""
        atexit.unregister(self.end)
        self._over.set()
        self._thread.join(5.0)
        deadline = time.monotonic() + (_LONG_SECONDS if self._failure and self._rank == 0 else 0.0)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and self._store.add(f"failures {self._runs}", 0) < self._world_size:
                time.sleep(0.05)
        self._default = None

    def _tell(self, **state: Any) -> None:
        with self._lock:
            if self._failure:
                state |= {"state": "over", "text": self._failure, "run": self._runs}
            state["entered"] = {_STORE: groups_made(), **entered_collectives(), **passed_on}
            state["process"] = process_of(os.getpid())
            self._store.set(f"state {self._rank}", json.dumps(state, separators=(",", ":")))

    def _tell_in_turn(self, last: SimpleNamespace, news: tuple[float, int] | None, **state: Any) -> None:
        """Tell the state once its turn has come, if ``news`` differ from what was told. See [Note: few requests]."""
        if news != last.told and last.looks % -(-self._world_size // _TOLD) == self._rank // _TOLD:
            self._tell(**state)
            last.told = news

    def _run(self) -> None:
        last = SimpleNamespace(wait=None, since=0.0, turn=0, told=None, looks=0, alone=False)
        with self._others.file:
            while not self._over.wait(_TICK_SECONDS) and self.group() is not None:
                try:
                    self._others.find()
                    self._look(last)
                except RuntimeError:  # of the store, whose process has ended or is stopped; or the connection is cut
                    connections.shut(_CLIENT)  # no late answer shall be taken for that to another question
                    last.alone = True

    def _look(self, last: SimpleNamespace) -> None:
        """Look, tell of it, judge, and end the wait if nobody can go on. ``last`` says what the last look has found."""
        calls, wait, now = self._others.calls, self._stacks.wait(), time.monotonic()  # it answers the calls until then
        last.looks += 1
        if wait is None or last.wait is None or wait.key != last.wait.key:
            last.wait, last.since, last.turn = wait, now, 0
        seconds = now - last.since
        if wait is None or seconds < (_LONG_ALONE_SECONDS if last.alone else _LONG_SECONDS):
            if not last.alone:
                self._tell_in_turn(last, None, state="runs")
            return
        text = f"has waited for {seconds:.0f} s {wait.text}"
        if last.alone:  # nobody can be asked or told any more: so no wait is a long one of which all know
            self.verdict = f"It has lost the store that the ranks share, and {text}."
        else:
            what = {"state": "waits", "text": text[:_TEXT], "since": last.since, "calls": calls}
            self._tell_in_turn(last, (last.since, calls), **wait._asdict() | what)
        if not self.verdict:
            self.verdict = self._others.hear()
            if not self.verdict and self._others.has_turn(last, seconds):
                self.verdict = self._others.ask(self._runs)
                self._others.pass_on(self.verdict)
            if self.verdict and self._rank == 0:  # the store mostly ends with its process: first the others ask
                self._over.wait(2 * (_TICK_SECONDS + self._world_size / _RATE / len(self._others.here)))
        if self.verdict and wait.group:
            connections.shut(wait.group)
            abort_group(wait.group)


class _Others:
    """What a rank hears of the others; the process and file of each that is ``here``. See [Note: few requests]."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size, self._host = store, rank, world_size, this_host() or f"rank {rank}"
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.here = {rank: (process_of(os.getpid()), f"/proc/{os.getpid()}/fd/{self.file.fileno()}")}
        self.calls, self.first = 0, 0  # of so many calls it has heard; who judges: the first that has not failed
        self._looks, self._asked, self._waits = itertools.count(1), 0, list[Any]()
        store.set(f"{self._host} {store.add(self._host, 1)}", json.dumps([rank, self.here[rank]]))
        if rank == 0:
            store.set("verdict", '""')
            store.add("calls", 0)

    def find(self) -> None:
        """See who is on this host, now and then, as not all begin at once."""
        if next(self._looks) in (1, 4, 16, 64) and (count := self._store.add(self._host, 0)) > len(self.here):
            self.here = self.here | dict(_read(self._store, [f"{self._host} {n + 1}" for n in range(count)]))

    def has_turn(self, last: SimpleNamespace, seconds: float) -> bool:
        """Whether this rank asks now, which has waited for so long."""
        pause = self._world_size / (_JUDGE_RATE if self.first == self._rank else _RATE)
        place = (sorted(self.here).index(self._rank) + self._rank / self._world_size) / len(self.here)
        turn = int((seconds - _LONG_SECONDS) / max(_TICK_SECONDS, pause) + 1 - place)
        before, last.turn = last.turn, turn
        return bool(turn > before)

    def hear(self) -> str:
        """The verdict, if another rank of this host has passed it on; and of how many calls that one has heard."""
        for _, path in self.here.values():
            with contextlib.suppress(OSError):
                if os.stat(path).st_size > self.calls:
                    content = Path(path).read_bytes()
                    verdict = content.lstrip(b"\0")
                    self.calls = max(self.calls, len(content) - len(verdict))
                    if verdict.endswith(b"\0"):  # it is complete
                        return verdict[:-1].decode()
        return ""

    def pass_on(self, verdict: str) -> None:
        """Let the others of this host hear of the calls, and of the verdict if there is one."""
        content = bytes(self.calls) + verdict.encode() + b"\0" * bool(verdict)
        os.pwrite(self.file.fileno(), content, 0)

    def ask(self, runs: int) -> str:
        """Hear of calls and of the verdict, and judge if this rank does. ``runs`` are counted by this rank."""
        while told := _read(self._store, ["calls", "verdict", f"state {self.first}"]):
            self.calls, verdict, first = told
            if verdict or self.first == self._rank or _seen(first, runs)["state"] != "over":
                return str(verdict or (self._judge(runs) if self.first == self._rank else ""))
            self.first += 1
        return ""

    def _judge(self, runs: int) -> str:
        states = [_seen(state, runs) for state in _read(self._store, [f"state {n}" for n in range(self._world_size)])]
        waits = [(state["state"], state.get("since")) for state in states]
        if not _stuck(states):
            self._waits = []
        elif waits != self._waits:
            self._waits, self.calls = waits, self._store.add("calls", 1)
            self._asked = self.calls
        elif all(state.get("calls", self._asked) >= self._asked for state in states):
            verdict = _explained(states)
            self._store.set("verdict", json.dumps(verdict))
            self.calls = self._store.add("calls", 1)
            return verdict
        return ""


def _read(store: Any, keys: list[str]) -> list[Any]:
    """What has been told under these keys; nothing until it has been under all."""
    return [json.loads(told) for told in store.multi_get(keys)] if keys and store.check(keys) else []


def _seen(state: dict[str, Any], runs: int) -> dict[str, Any]:
    """What a rank has told, as one sees it that has taken part in so many runs."""
    if is_gone(state["process"]):
        return state if state["state"] == "over" else state | {"state": "over", "text": _GONE}
    return state | {"state": "runs"} if state.get("run", runs) < runs else state


def _explained(states: Sequence[Mapping[str, Any]]) -> str:
    """What each rank does; where they are many once for all that do the same, the fewest first."""
    alike: dict[Any, list[str]] = {}
    for rank, state in enumerate(states):
        what = rank if len(states) <= _NAMED else re.sub(r"waited for \d+ s", "", state["text"])
        alike.setdefault(what, []).append(f"  rank {rank} {state['text']}")
    lines = [some[0] + f" (and {len(some) - 1} more)" * (len(some) > 1) for some in sorted(alike.values(), key=len)]
    return "\n".join([_NOBODY, *lines[:_NAMED], _ADVICE])


def _ranges(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranks in few words: as one range if they are evenly spaced."""
    step = max(1, ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    evenly = [*range(ranks[0], ranks[-1] + 1, step)] == [*ranks]
    return [(ranks[0], ranks[-1] + 1, step)] if evenly else [(rank, rank + 1, 1) for rank in ranks]


def _stuck(states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no rank will ever go on, given what all of them have told."""
    waits = [rank for rank, state in enumerate(states) if state["state"] == "waits"]
    runs = any(state["state"] == "runs" for state in states)
    return bool(states) and not runs and not any(_can_go_on(rank, states) for rank in waits)


def _can_go_on(rank: int, states: Sequence[Mapping[str, Any]]) -> bool:
    mine = states[rank]
    group, place = mine["group"], mine["place"]
    if not group:  # memory: whoever waits there has heard everything that the others had to say
        return False
    for other in (states[member] for some in mine["members"] for member in range(*some)):
        there = other["state"] == "waits" and other["group"] == group
        same = there and other["operation"] == mine["operation"]
        if not same and ((there and other["place"] == place) or other["entered"].get(group, 0) < place):
            return False
    return True


class _Stacks:
    """The waits of one thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._entered: dict[str, int] = {}  # by group, when last looked
        # The group that is not ours whose count has grown since then, by who calls it; empty: several have.
        self._latest = {_COLLECTIVES: "", _OF_DTENSORS: ""}

    def wait(self) -> Wait | None:
        """What the thread waits in, if no other thread does something that ranks may wait for."""
        self._note_entered()
        stacks = self.written()
        lines, _ = stacks.pop(self._thread, []), stacks.pop(threading.get_ident())
        lines = lines[1:] if lines and lines[0].file == _OPERATORS else lines
        if not lines or lines[0].file not in _WAITING or any(map(_communicates, stacks.values())):
            return None
        if lines[0].file == _LINKS and _runs(self._thread):
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
        grown = {name for name, count in entered.items() if count != self._entered.get(name, 0)}
        foreign, split = grown - (connections.keys() - connections.of_users), grown & connections.of_dtensors
        for file, names in ((_COLLECTIVES, foreign), (_OF_DTENSORS, split)):
            if names:
                self._latest[file] = names.pop() if len(names) == 1 else ""
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
            members, operation = _ranges(note.members or range(dist.get_world_size())), "transfer" if group else ""
            return Wait(key, group, operation, place, members, _text(lines, kind, told))
        operation = "transfer" if place >= 0 else _operation(lines) or "exchange"
        return self._in_group(lines, group, operation, place, key, told)

    def _in_group(
        self, lines: list[_Line], group: Any, operation: str, place: int, key: tuple[int, ...], told: str
    ) -> Wait | None:
        name, members = str(group.group_name), _ranges(dist.get_process_group_ranks(group))
        if operation in _NO_WAITS:
            return None
        where = "the default group" if group is dist.group.WORLD else f"the group '{group.group_desc}'"
        text = f"in {operation} of {where}" if operation != "transfer" else f"through {where}"
        place = place if place >= 0 else self._entered.get(name, 0)
        return Wait((*key, place), name, operation, place, members, _text(lines, text, told))

    def _foreign(self, lines: list[_Line]) -> Wait | None:
        operation = _operation(lines)
        if operation in _MAKE_GROUPS:
            place, everyone = groups_made(), _ranges(range(dist.get_world_size()))
            return Wait((place,), _STORE, "new_group", place, everyone, _text(lines, "for a new process group", ""))
        group = group_called(self._latest[lines[0].file]) if operation else None
        return None if group is None else self._in_group(lines, group, operation, -1, (), "")


class _Line(NamedTuple):
    file: str
    number: int
    function: str


def _runs(thread: int) -> bool:
    """Whether a thread has a core, or waits for one, as on a busy machine; False where the system does not tell."""
    native = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


def _operation(lines: list[_Line]) -> str:
    """The function of torch.distributed that a thread is in; empty if it is in none."""
    return lines[0].function if lines[0].file in _FOREIGN else ""


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
_OF_DTENSORS = str(Path(_COLLECTIVES).with_name("_functional_collectives.py"))
_OPERATORS = str(Path(_COLLECTIVES).parents[1] / "_ops.py")
_FOREIGN = {_COLLECTIVES, _OF_DTENSORS}
_LINKS = str(Path(_OURS, "extensions", "shared_memory", "links.py"))
_WAITING = {
    _LINKS,
    *_FOREIGN,
    *(str(Path(_OURS, "comm", name)) for name in ("control.py", "native.py")),
}
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


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


_CLIENT = "(the watch's client of the store)"
_SILENT = (
    "The process that serves the store of the ranks, rank 0's or torchrun's, does not answer: it is stopped, has "
    "ended, or cannot be reached.\n"
)
_EARLIER = "An earlier run has closed the connections: restart all ranks. It ended with:"
_GONE = "has ended without a word: its process is gone"
_NUMBERS = itertools.count()  # alike on all ranks; the store may outlive the default group
_WATCH: Watch | None = None


def _after_fork() -> None:
    global _WATCH
    _WATCH = None
    connections.clear()


os.register_at_fork(after_in_child=_after_fork)
