"""Many programs in few worlds: a rank that raises, hangs or dies ends its world, and the next one goes on."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import logging
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.helpers.world import WorldError, run_world
from tests.thorough.fuzz.oracle import Verdict, judge
from tests.thorough.fuzz.play import Fuzzed, Player, Record, play
from tests.thorough.fuzz.programs import Program
from tests.thorough.fuzz.vocabulary import load_vocabulary

__all__ = ["Job", "judged", "played"]

WORLD = 2
DEADLINE = 20.0  # seconds for one run, which takes a tenth of one
PATIENCE = 3.0  # seconds for the other rank, once one has ended with an error, before that one leaves
JOBS = 120  # of one world


@dataclass(frozen=True)
class Job:
    """One program under one strategy; stage 0 is DDP."""

    key: int
    program: Program
    stage: int


def judged(programs: Sequence[Program]) -> list[dict[int, Verdict]]:
    """The verdicts of each program, by stage."""
    jobs = [Job(8 * i + stage, p, stage) for i, p in enumerate(programs) for stage in (0, *p.stages)]
    records = played(jobs)
    verdicts = []
    for i, program in enumerate(programs):
        expected = records[8 * i]
        expected = None if isinstance(expected, str) else expected
        verdicts.append({s: judge(program, s, expected, records[8 * i + s]) for s in program.stages})
    return verdicts


def played(jobs: Iterable[Job]) -> dict[int, list[Record] | str]:
    """The records of all ranks by job, or how it hung or died: twice, since a machine may be busy."""
    _warm_up()
    left, again = list(jobs), set()
    results: dict[int, list[Record] | str] = {}
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        while left:
            batch, failure = left[:JOBS], ""
            try:
                run_world(WORLD, _work, batch, folder, timeout=DEADLINE * len(batch))
            except WorldError as error:
                failure = str(error)
            done = {job.key: _results(folder, job) for job in batch if _ended(folder, job)}
            results.update(done)
            left = [job for job in left if job.key not in results]
            begun = bool(left) and any(_path(folder, left[0], rank, "stacks").exists() for rank in range(WORLD))
            if failure and begun and left[0].key not in again:  # a busy machine, perhaps
                again.add(left[0].key)
                for path in folder.glob(f"{left[0].key}.*.*"):
                    path.unlink()
            elif failure and begun:  # the job that the world died of
                results[left[0].key] = f"{_stacks(folder, left[0])}\n{failure}"
                left = left[1:]
            elif not done:
                raise RuntimeError(f"a world ended before it played anything: {failure}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


@functools.cache
def _warm_up() -> None:
    """What every world would do anew at its first run: imports, and Python's caches of abstract classes."""
    for name in ("default_hooks", "post_localSGD_hook"):
        importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{name}")
    for name in ("collectives", "links", "transport"):
        importlib.import_module(f"lightning_zero.extensions.shared_memory.{name}")
    load_vocabulary()
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, enable_progress_bar=False, **options)
        batches = DataLoader(range(2), batch_size=1)  # type: ignore[arg-type]
        trainer.fit(Fuzzed(Program(), Player(Program(), 0, Path())), batches, batches)
    log.setLevel(level)  # this process goes on with other tests


def _path(folder: Path, job: Job, rank: int, kind: str) -> Path:
    return folder / f"{job.key}.{rank}.{kind}"


def _ended(folder: Path, job: Job) -> bool:
    return all(_path(folder, job, rank, "record").exists() for rank in range(WORLD))


def _results(folder: Path, job: Job) -> list[Record]:
    return [torch.load(_path(folder, job, rank, "record"), weights_only=False) for rank in range(WORLD)]


def _stacks(folder: Path, job: Job) -> str:
    texts = []
    for rank in range(WORLD):
        path = _path(folder, job, rank, "record")
        if path.exists():
            error = torch.load(path, weights_only=False).error
            texts.append(f"rank {rank} ended: {f'{error.type}: {error.message[:400]}' if error else 'without error'}")
        elif (path := _path(folder, job, rank, "stacks")).exists():
            texts.append(f"rank {rank} stood at\n{path.read_text(errors='replace')[:2500]}")
    return "\n".join(texts)


# ---------------------------------------------------------------------------------------------------- the rank's side


def _work(rank: int, jobs: Sequence[Job], folder: Path) -> None:
    """Play jobs until one breaks the world; the next one goes on from there."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also where a thread keeps Python's lock
    for number, job in enumerate(jobs):
        with open(_path(folder, job, rank, "stacks"), "w") as stacks:
            faulthandler.dump_traceback_later(DEADLINE, file=stacks)
            signal.setitimer(signal.ITIMER_REAL, DEADLINE + 1.0)  # later: where one has left, another stands elsewhere
            record = play(job.program, job.stage, rank, _shared(folder, job))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()
        torch.save(record, _path(folder, job, rank, "part"))
        _path(folder, job, rank, "part").rename(_path(folder, job, rank, "record"))
        other = _wait_for(_path(folder, job, 1 - rank, "record"), PATIENCE if record.error else DEADLINE + PATIENCE)
        if other is None:  # it may notice that this one has left, as it would after any exception
            raise RuntimeError(f"rank {1 - rank} goes on alone")
        if not _alike(record, other):
            return
        if number % 10 == 9:
            gc.collect()


def _alike(record: Record, other: Record) -> bool:
    """Both ended well, or were stopped by the same action, so that no collective was left half done."""
    mine, theirs = record.error, other.error
    if mine is None or theirs is None:
        return mine is theirs
    return mine.during == theirs.during is not None and mine.during >= 0


def _shared(folder: Path, job: Job) -> Path:
    path = folder / f"saved-{job.key}"
    path.mkdir(exist_ok=True)
    return path


def _wait_for(path: Path, seconds: float) -> Record | None:
    """The other rank's record, when it is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)
    return torch.load(path, weights_only=False)
