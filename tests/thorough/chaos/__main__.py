"""Throw faults: ``python -m tests.thorough.chaos --cases 1000 --jobs 2``. ``--page RECORD`` writes the page of it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

from tests import conftest  # noqa: F401  (before torch: one thread in each process)
from tests.thorough.chaos import page
from tests.thorough.chaos.cases import cases
from tests.thorough.chaos.play import Case, Verdict, play


def _part(mine: list[Case], record: Path) -> None:
    for case in mine:
        began = time.monotonic()
        try:
            verdict = play(case)
        except Exception as error:
            verdict = Verdict(case, wrong=[f"{type(error).__name__}: {error}"])
        with open(record, "a") as lines:
            lines.write(verdict.line() + "\n")
        told = " ".join(" | ".join(verdict.wrong).split())[-600:]
        print(f"{time.monotonic() - began:5.1f} s  {case}  {'WRONG ' + told if verdict.wrong else 'ok'}", flush=True)


def main() -> int:
    """Returns the number of cases in which something was wrong, at most 99."""
    parser = argparse.ArgumentParser(prog="python -m tests.thorough.chaos", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="leave out those before")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path(tempfile.gettempdir(), "chaos.jsonl"))
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    parser.add_argument("--page", type=Path, metavar="RECORD")
    asked = parser.parse_args()
    if asked.page is not None:
        text = page.text(page.read(asked.page))
        (Path(__file__).parent / "faults.md").write_text(text, encoding="utf-8")
        return 0
    asked.record.unlink(missing_ok=True)
    asked.record.touch()
    chosen = [case for case in cases(asked.cases, asked.seed)[asked.first :] if asked.only in case.fault]
    gc.collect()
    gc.freeze()  # what is here by now is not looked through again by the ranks that are forked
    children = []
    for job in range(asked.jobs):
        if (pid := os.fork()) == 0:
            with contextlib.suppress(KeyboardInterrupt):
                _part(chosen[job :: asked.jobs], asked.record)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return min(99, sum(bool(row["wrong"]) for row in page.read(asked.record)))


if __name__ == "__main__":
    sys.exit(main())
