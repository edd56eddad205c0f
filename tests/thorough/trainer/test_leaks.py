"""Many steps and many fits in one process: memory, descriptors, threads and files stay as they are after a few.

``LEAK_FITS=50 LEAK_STEPS=3000`` plays more than the ordinary suite does.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest

from lightning_zero import HostOffload, NvmeOffload
from lightning_zero.comm.native import SWITCH
from lightning_zero.config import Offload
from tests.helpers.runs import Net, batches, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.waiting import until
from tests.helpers.world import run_world

FITS = int(os.environ.get("LEAK_FITS", "50"))
STEPS = int(os.environ.get("LEAK_STEPS", "300"))
WARM_FITS, WARM_STEPS = 20, 100
# Resident memory takes some 80 fits to come to rest, under DDP as well, and gloo takes a few hundred steps: until then
# its growth says little. Objects of Python are counted to the last one; a fit leaves 1 or 2 behind under DDP.
NBYTES_OF_FIT, NBYTES_OF_STEP = 300 << 10, 30 << 10
OBJECTS_OF_FIT, OBJECTS_OF_STEP = 6.0, 1.5
STRETCHES = 4  # caches are made once, when depends on what ran in this process before: what leaks does so in each
STRETCH = (STEPS - WARM_STEPS) // STRETCHES


class Held(NamedTuple):
    """What this process has open, and what lies where its runs put files."""

    descriptors: int
    threads: int
    shared: int  # files in /dev/shm
    files: int
    objects: int  # of Python
    nbytes: int  # of memory that is resident and its own


def held(files: Path) -> Held:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    counts = (len(os.listdir(path)) for path in ("/proc/self/fd", "/proc/self/task", "/dev/shm", files))
    return Held(*counts, sys.getallocatedblocks(), (resident - shared) * os.sysconf("SC_PAGE_SIZE"))


def held_again(files: Path, before: Held) -> Held:
    """What is held when it is no more than before; a thread of gloo may be late by a moment to let go of something."""
    until(lambda: all(now <= then for now, then in zip(held(files)[:4], before[:4], strict=True)), seconds=1)
    return held(files)


def check(before: Held, after: Held, objects: float, nbytes: int) -> None:
    for name, then, now in zip(Held._fields[:4], before, after, strict=False):
        assert now <= then, f"{name} of {before} and {after}"
    assert after.objects - before.objects <= objects, (before, after)
    assert after.nbytes - before.nbytes <= nbytes, (before, after)


class Kind(NamedTuple):
    """How a run trains."""

    stage: int
    shared_memory: bool
    offload: Callable[[Path], Offload | None] = lambda files: None


KINDS = {
    "stage 1": Kind(1, True),
    "stage 3, gloo": Kind(3, False),
    "stage 3, host": Kind(3, True, lambda files: HostOffload(parameters=True)),
    "stage 3, files": Kind(3, True, lambda files: NvmeOffload(path=str(files), buffer_mib=1, parameters=True)),
}


def fit(kind: Kind, files: Path, steps: int, **options: Any) -> None:
    logging.disable()  # pytest keeps what is logged
    os.environ[SWITCH] = str(int(kind.shared_memory))
    make_trainer(zero(kind.stage, offload=kind.offload(files)), max_steps=steps, **options).fit(Net(), batches(steps))


def test_many_fits_in_one_process_leave_nothing(tmp_path: Path) -> None:
    """Of several kinds in turns."""

    @quiet()
    def run(rank: int) -> tuple[Held, Held]:
        kinds = itertools.cycle(KINDS.values())
        for kind in itertools.islice(kinds, WARM_FITS):
            fit(kind, tmp_path, 2)
        before = held(tmp_path)
        for kind in itertools.islice(kinds, FITS - WARM_FITS):
            fit(kind, tmp_path, 2)
        return before, held_again(tmp_path, before)

    for before, after in run_world(2, run, timeout=60 + 2 * FITS):
        check(before, after, (FITS - WARM_FITS) * OBJECTS_OF_FIT, (FITS - WARM_FITS) * NBYTES_OF_FIT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["stage 1", "stage 3, gloo"])
def test_many_steps_leave_nothing(kind: str, tmp_path: Path) -> None:
    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Held] = []

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            module.losses.clear()
            if trainer.global_step == WARM_STEPS:
                self.seen = [held(tmp_path)]
            elif self.seen and (trainer.global_step - WARM_STEPS) % STRETCH == 0:
                self.seen.append(held_again(tmp_path, self.seen[0]))

    @quiet()
    def run(rank: int) -> list[Held]:
        watch = Watch()
        fit(KINDS[kind], tmp_path, STEPS, callbacks=[watch])
        return watch.seen

    for seen in run_world(2, run, timeout=60 + STEPS / 2):
        assert len(seen) == STRETCHES + 1
        least = min(pairwise(seen), key=lambda pair: pair[1].objects - pair[0].objects)
        assert least[1].objects - least[0].objects <= STRETCH * OBJECTS_OF_STEP, seen
        check(seen[0], seen[-1], float("inf"), (STEPS - WARM_STEPS) * NBYTES_OF_STEP)
