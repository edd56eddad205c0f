"""The page of faults, made of the record of what was played."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS

__all__ = ["read", "text"]

Row = dict[str, Any]

_HEAD = """# Faults

Each of these faults has been thrown into a training as users write it: a `Trainer` with `ModelCheckpoint` and two to
four processes on one machine, in every stage, through shared memory and through gloo, with checkpoints written at once
and in the background, with and without offload. The places are set-up, every hook of a step, forward and backward,
saving, loading, validation and data.

- *ended*: on every other process with an error that says what it was doing; else the run went on, with the numbers of
  a run that nothing disturbs. *rank named*: in how many of these errors the process that the fault struck has its
  number; each has its own.
- *seconds*: from the fault until the last of the others had ended, median and most.
- *left*: processes, shared memory, and files that the next run does not remove. Not counted are folders of
  `NvmeOffload` whose process was killed: the next run names them in a warning, and never deletes them.
- *resumed*: the same program, started again with `ckpt_path="last"`, gave the losses and weights of a run that nothing
  disturbs, bit for bit.
"""

_FOOT = """The time is that of the machine's two cores, on which several runs took place at once.
`python -m tests.chaos` plays the cases and `python -m tests.chaos --page RECORD` writes this page; `pytest -m chaos`
plays them as tests. One of each kind is part of every test run.
"""


def read(record: Path) -> list[Row]:
    """What ``python -m tests.chaos`` has written."""
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
    return "\n".join([*lines, "", _FOOT])


def _cells(rows: list[Row]) -> list[str]:
    ended = [row for row in rows if row["ended"]]
    seconds = [row["seconds"] for row in ended]
    return [
        str(len(rows)),
        str(len(ended)) if ended else "goes on",
        str(sum(row["named"] for row in ended)) if ended else "",
        f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if ended else "",
        str(sum(len(row["left"]) for row in rows)),
        str(sum(row["same"] for row in rows)),
    ]
