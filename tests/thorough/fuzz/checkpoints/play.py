"""One damaged checkpoint, and what comes of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero import verify_checkpoint
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.inspection.contents import describe_checkpoint
from tests.thorough.fuzz.checkpoints.child import bounded
from tests.thorough.fuzz.checkpoints.damages import Case
from tests.thorough.fuzz.checkpoints.formats import fingerprint

FINE = ("refused", "equal", "equal, doubted", "different, no claim", "different, forged")
FAILED = ("different, called whole", "refused, called whole", "hung", "crashed", "other exception", "ran code")
PEAK_NBYTES = 300 << 20


class Verdict(NamedTuple):
    """What a case was, how it ended, and the detail of a failure."""

    number: int
    kind: str
    told: str
    ending: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.ending in FAILED


def play(number: int, samples: dict[str, Path], originals: dict[str, str], folder: Path) -> Verdict:
    """The case of a number, which says all about it."""
    draw = random.Random(number)
    kind = draw.choice(list(samples))
    folder = folder / str(number)
    folder.mkdir()
    path = folder / samples[kind].name
    (shutil.copytree if samples[kind].is_dir() else shutil.copyfile)(samples[kind], path)
    case = Case(path, draw)
    ended = bounded(lambda: _looked_into(path, folder))
    told = "; ".join(case.told)
    if (folder / "canary").exists():
        verdict = Verdict(number, kind, told, "ran code")
    elif ended.kind in ("hung", "crashed"):
        verdict = Verdict(number, kind, told, ended.kind, str(ended.value))
    elif ended.kind != "returned":
        verdict = Verdict(number, kind, told, "other exception", str(ended.value))
    else:
        loaded, is_whole = ended.value
        same = loaded == originals[kind]
        if ended.peak > PEAK_NBYTES:
            verdict = Verdict(number, kind, told, "crashed", f"{ended.peak >> 20} MiB of memory")
        elif loaded is None:
            verdict = Verdict(number, kind, told, "refused, called whole" if is_whole else "refused")
        elif same:
            verdict = Verdict(number, kind, told, "equal" if is_whole else "equal, doubted")
        elif case.is_forged:
            verdict = Verdict(number, kind, told, "different, forged")
        else:
            verdict = Verdict(number, kind, told, "different, called whole" if is_whole else "different, no claim")
    shutil.rmtree(folder)
    return verdict


def _looked_into(path: Path, folder: Path) -> tuple[Any, bool]:
    """What a load gives, ``None`` if it is refused, and whether the checkpoint is called whole."""
    os.chdir(folder)  # where the canary would be
    warnings.simplefilter("ignore")
    loaded = None
    try:
        loaded = fingerprint(path)
    except CheckpointError as error:
        if len(str(error)) > 5000:
            raise ValueError(f"a message of {len(str(error))} letters") from None
    with contextlib.suppress(CheckpointError):
        describe_checkpoint(path, tensors=True)
    return loaded, verify_checkpoint(path).is_whole
