"""``python -m tests.thorough.fuzz.checkpoints``: damage many checkpoints, and print how each kind of them ended."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.thorough.fuzz.checkpoints.formats import fingerprint, written
from tests.thorough.fuzz.checkpoints.play import FAILED, FINE, Verdict, play


def played(numbers: Sequence[int]) -> list[Verdict]:
    """What becomes of the cases of these numbers."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name in ("samples", "cases"):
            (Path(folder) / name).mkdir()
        samples = written(Path(folder) / "samples")
        originals = {kind: fingerprint(path) for kind, path in samples.items()}
        gc.collect()
        gc.freeze()  # children of this process copy what they collect
        try:
            return [play(number, samples, originals, Path(folder) / "cases") for number in numbers]
        finally:
            gc.unfreeze()


def table(verdicts: Sequence[Verdict]) -> str:
    """Endings by format."""
    counts = Counter((verdict.kind, verdict.ending) for verdict in verdicts)
    endings = [ending for ending in (*FINE, *FAILED) if any(ending == found for _, found in counts)]
    kinds = sorted({verdict.kind for verdict in verdicts})
    rows = [["", *endings], *([kind, *(str(counts[kind, ending] or "") for ending in endings)] for kind in kinds)]
    rows.append(["all", *(str(sum(counts[kind, ending] for kind in kinds)) for ending in endings)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, report, and return how many cases failed (at most 100)."""
    parser = argparse.ArgumentParser(prog="python -m tests.thorough.fuzz.checkpoints", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first; each one's is one more")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # children are forked from this process
    logging.disable()
    began = time.monotonic()
    verdicts = played(range(options.seed, options.seed + options.cases))
    print(table(verdicts))
    failed = [verdict for verdict in verdicts if verdict.is_failure]
    for verdict in failed[:50]:
        print(
            f"\n--seed {verdict.number} --cases 1: {verdict.kind}: {verdict.ending}: {verdict.told}\n{verdict.detail}"
        )
    print(f"\n{len(verdicts)} cases in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    return min(len(failed), 100)


if __name__ == "__main__":
    sys.exit(main())
