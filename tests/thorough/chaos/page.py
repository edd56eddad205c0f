"""The page of faults, made of the record of what was played."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from tests.thorough.chaos.faults import FAULTS

__all__ = ["read", "text"]

Row = dict[str, Any]

_HEAD = """# Faults

Each of these faults has been thrown into a training as users write it: a `Trainer` with `ModelCheckpoint` and two to
four processes on one machine, in every stage, through shared memory and through gloo, with checkpoints written at once
and in the background, with and without offload. The places are set-up, every hook of a step, forward and backward,
saving, loading, validation and data.

- *ended*: on every other process with an error that says what it was doing and why that failed; else the run went on,
  with the numbers of a run that nothing disturbs. *rank named*: how often all these errors have the number of the
  process that the fault struck. Without it are errors of gloo that came before the processes knew of one another,
  SIGTERM, after which Lightning's exception is empty, and errors that concern all.
- *seconds*: from the fault until the last of the others had ended, median and most. Those for a process that is
  stopped until the timeout are about the timeout, 4 s there.
- *left*: processes, shared memory, and files that the next run does not remove.
- *resumed*: the same program, started again with `ckpt_path="last"`, gave the losses and weights of a run that
  nothing disturbs, bit for bit.
"""

_FOOT = """Played by `python -m tests.thorough.chaos`, with torch {torch} on two cores of a CPU, several runs at once;
`python -m tests.thorough.chaos --page RECORD` wrote this page. `pytest -m chaos` plays a thousand such cases. One of
each kind is part of `pytest -m thorough`, and so are a killed process of the Trainer's own launcher and of
`torchrun --max-restarts`, after which the run goes on by itself, bit for bit.
"""

_ABORT = """Once, before these, a value that one process logs met a broadcast of Lightning's that another was in: gloo
itself ends (SIGABRT) a process in which collectives of different sizes meet in one group. The other process had an
error that named it. Nothing prevents that.
"""


def read(record: Path) -> list[Row]:
    """What ``python -m tests.thorough.chaos`` has written."""
    return [json.loads(line) for line in record.read_text().splitlines()]


def text(rows: list[Row]) -> str:
    """The page."""
    good = sum(not row["wrong"] for row in rows)
    lines = [_HEAD, f"{len(rows)} cases, of which {good} ended as they should.\n"]
    lines += [
        "| fault | cases | ended | rank named | seconds | left | resumed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in FAULTS:
        found = [row for row in rows if row["case"]["fault"] == name]
        if found:
            lines.append(f"| {name} | {' | '.join(_cells(found))} |")
    lines += ["", *(f"Otherwise: {_told(row)}\n" for row in rows if row["wrong"])]
    lines.append(_ABORT)
    return "\n".join([*lines, _FOOT.format(torch=torch.__version__.partition("+")[0])])


def _told(row: Row) -> str:
    case = row["case"]
    why = " ".join(row["wrong"][0].partition("[stacks]")[0].split())[:200]
    return (
        f"{case['fault']}, `{case['place']}`, `zero{case['stage']}`, rank {case['victim']} of {case['ranks']}: {why}."
    )


def _cells(rows: list[Row]) -> list[str]:
    ended = [row for row in rows if row["ended"]]
    seconds = [row["seconds"] for row in ended if row["message"]]
    return [
        str(len(rows)),
        str(len(ended)) if ended else "goes on",
        str(sum(row["named"] for row in ended)) if seconds else "",
        f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "",
        str(sum(len(row["left"]) for row in rows)),
        str(sum(row["same"] for row in rows)),
    ]
