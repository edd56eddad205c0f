"""Worlds of forked ranks that take turns: each trains a few steps while the others wait.

What is compared is measured in turns of a second or so, so that a slow minute of the machine slows all of it. A rank is
forked from a process that has imported everything, starts its trainer, and from then on asks ``Turns.more()`` before
each step; there it waits until its world's next turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from offload_training import free_port, launched, quiet
from torch.testing._internal.distributed.fake_pg import FakeStore

_PR_SET_PDEATHSIG = 1


def restart_with(variables: dict[str, str]) -> None:
    """Begin this program anew unless these variables are set: libc reads its own once, and forked ranks never."""
    if any(name not in os.environ for name in variables):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


@dataclass
class Report:
    """One turn on one rank: seconds of each step but the first, and losses of all of them; ``extra`` for the asker.

    ``cpu`` are seconds that the process computed, in all of its threads, user and system together: on a machine that
    others use too they repeat far better than the time that passes. ``faults`` are pages that it got from the system.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class WorldFailed(RuntimeError):
    """A rank raised, died, or did not answer in time."""


class Turns:
    """A rank's side: ``while turns.more(): turns.note(one_step(turns.index))``.

    Args:
        commands: the pipe to the parent.

    Attributes:
        index: of the step.
        at_end: called when a turn's steps are over, for what the report says beside the seconds.
        trainer: Lightning's, where there is one, for ``at_end`` to look at.
    """

    def __init__(self, commands: Connection) -> None:
        self._commands = commands
        self._stamps: list[tuple[float, ...]] = []  # of the clock, and of the process
        self._steps = 0
        self._losses: list[torch.Tensor] = []
        self.index = -1
        self.at_end: Callable[[], dict[str, Any]] = dict
        self.trainer: Any = None

    def more(self) -> bool:
        """Whether there is another step, whose number is ``index``. Waits when a turn is over. Collective."""
        if len(self._stamps) == self._steps:
            if self._steps:
                self._stamps.append(_stamp())
                self._report()
            self._steps = self._commands.recv()
            self._stamps = []
            if not self._steps:
                return False
            dist.barrier()
        self._stamps.append(_stamp())
        self.index += 1
        return True

    def note(self, loss: torch.Tensor) -> None:
        """Keep a step's loss; it is read when the turn is over."""
        self._losses.append(loss.detach())

    def _report(self) -> None:
        seconds, cpu, faults = (
            [after - before for before, after in pairwise(stamps)] for stamps in zip(*self._stamps, strict=True)
        )
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # others compute now, and need what was freed; the next first step pays
        self._commands.send(Report(seconds[1:] or seconds, cpu[1:] or cpu, faults[1:] or faults, losses, self.at_end()))


def _stamp() -> tuple[float, ...]:
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class World:
    """The parent's side of one world.

    Args:
        size: ranks.
        train: ``train(turns)`` in each of them, with a gloo default group, until ``turns.more()`` is false.
        environment: variables of theirs.
        fake_size: the default group is a fake one of so many ranks, of which this world is the first.
        threads: that each of them computes with; as many as there are cores for it, if it is not given.
        timeout: seconds that a turn may take, the first with its set-up included.
        enter: called with the rank in its process, before anything connects.
    """

    def __init__(
        self,
        size: int,
        train: Callable[[Turns], None],
        environment: dict[str, str] | None = None,
        fake_size: int | None = None,
        threads: int | None = None,
        timeout: float = 600.0,
        enter: Callable[[int], None] | None = None,
    ) -> None:
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        context = mp.get_context("fork")
        port = free_port()
        threads = threads or max(1, (os.cpu_count() or 1) // size)
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (
                rank,
                size,
                port,
                self._folder.name,
                environment or {},
                fake_size,
                threads,
                train,
                there,
                enter,
            )
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ranks.append(process)
            self._pipes.append(here)

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid for process in self._ranks]

    def turn(self, steps: int) -> list[Report]:
        """Have every rank take so many steps and one before them that is not timed; the reports by rank.

        The first step of a turn waits for what the last turn left under way, and finds cold caches.

        Raises:
            WorldFailed: with the first rank's reason.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(steps + 1)
        deadline = time.monotonic() + self._timeout
        answers: dict[Connection, Report] = {}
        while pending := [pipe for pipe in self._pipes if pipe not in answers]:
            ends = [process.sentinel for process in self._ranks]
            ready = wait([*pending, *ends], max(0.0, deadline - time.monotonic()))
            answered = [pipe for pipe in pending if pipe in ready]
            if not answered:
                self._fail("a rank died" if ready else f"no answer within {self._timeout:.0f} s")
            for pipe in answered:
                try:
                    answer = pipe.recv()
                except EOFError:
                    self._fail("a rank died")
                if isinstance(answer, str):
                    self._fail(answer)
                answers[pipe] = answer
        return [answers[pipe] for pipe in self._pipes]

    def close(self) -> None:
        """End the ranks, those that do not come by themselves too."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(0)
        for process in self._ranks:
            process.join(20)
        self._kill()
        self._folder.cleanup()

    def _fail(self, reason: str) -> NoReturn:
        self._kill()
        raise WorldFailed(reason)

    def _kill(self) -> None:
        for process in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(
    rank: int,
    size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    fake_size: int | None,
    threads: int,
    train: Callable[[Turns], None],
    pipe: Connection,
    enter: Callable[[int], None] | None,
) -> None:
    os.environ.update({**launched(rank, size, port), **environment})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing is left behind if the parent is killed
    output = os.open(f"{folder}/{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    quiet()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        if enter is not None:
            enter(rank)
        if fake_size is not None:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fake_size)
        else:
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
        train(Turns(pipe))
        dist.destroy_process_group()
    except BaseException as error:  # whatever it was, the parent tells it
        lines = "".join(traceback.format_exception(error)[-4:])
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}\n{lines}")
        os._exit(1)
