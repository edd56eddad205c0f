"""``python -m tests.thorough.fuzz``: play many programs, and say which of them differ from DDP."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from tests.thorough.fuzz.oracle import Verdict
from tests.thorough.fuzz.programs import Program, draw, matrix, simpler
from tests.thorough.fuzz.vocabulary import load_vocabulary
from tests.thorough.fuzz.worlds import judged

Failed = tuple[Program, int, Verdict]


def shrunk(program: Program, stage: int, kind: str) -> tuple[Program, Verdict]:
    """A smallest program that fails in the same way in this stage, found by leaving out one thing at a time."""
    program = dataclasses.replace(program, stages=(stage,))
    verdict = judged([program])[0][stage]
    while True:
        candidates = list(simpler(program))
        found = judged(candidates)
        better = next(((p, v[stage]) for p, v in zip(candidates, found, strict=True) if v[stage].kind == kind), None)
        if better is None:
            return program, verdict
        program, verdict = better


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, report, and return how many programs failed (at most 100)."""
    parser = argparse.ArgumentParser(prog="python -m tests.thorough.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; each one's seed is one more")
    parser.add_argument("--stages", type=int, nargs="+", help="all of these instead of the one that was drawn")
    parser.add_argument("--matrix", action="store_true", help="instead: each action alone at each of its hooks")
    parser.add_argument("--actions", nargs="+", default=(), help="of the matrix, only these")
    parser.add_argument("--hooks", nargs="+", default=(), help="of the matrix, only these")
    parser.add_argument("--program", help="instead: this one, as JSON")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for smaller programs that fail alike")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # worlds are forked from this process, and a team of threads does not survive a fork
    if options.program:
        programs = [Program.from_json(options.program)]
    elif options.matrix:
        programs = list(matrix(options.actions, options.hooks))
    else:
        programs = [draw(options.seed + i) for i in range(options.programs)]
    if options.stages:
        programs = [dataclasses.replace(p, stages=tuple(options.stages)) for p in programs]
    began = time.monotonic()
    verdicts = judged(programs)
    seconds = time.monotonic() - began
    runs = [(p, stage, v) for p, by_stage in zip(programs, verdicts, strict=True) for stage, v in by_stage.items()]
    failed = [run for run in runs if run[2].failed]
    _report(runs)
    _tell(failed, shrink=not options.no_shrink and not options.matrix)
    print(f"{len(load_vocabulary())} actions, {len(programs)} programs, {len(runs)} runs beside DDP in {seconds:.0f} s")
    print(dict(Counter(v.kind for _, _, v in runs)))
    return min(len({id(p) for p, _, _ in failed}), 100)


def _report(runs: Sequence[Failed]) -> None:
    """How runs ended, by action and stage. A run with several actions counts for each of them."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for program, stage, verdict in runs:
        for name in {placed.action for placed in program.actions}:
            counts[name, stage, verdict.kind] += 1
    for name in sorted({name for name, _, _ in counts}):
        cells = []
        for stage in sorted({stage for _, stage, _ in counts}):
            kinds = [f"{n} {kind}" for (a, s, kind), n in sorted(counts.items()) if (a, s) == (name, stage)]
            cells.append(f"{stage}: {', '.join(kinds)}" if kinds else "")
        print(f"{name:36} {' | '.join(filter(None, cells))}")


def _tell(failed: Sequence[Failed], shrink: bool) -> None:
    for program, stage, verdict in failed:
        print(f"\n=== stage {stage}: {verdict.kind}\n{program}\n{verdict.detail}")
        if shrink:
            program, verdict = shrunk(program, stage, verdict.kind)
            print(f"--- at least\n{program}\n{verdict.detail}")
        print(f"--- again: python -m tests.thorough.fuzz --program '{program.to_json()}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
