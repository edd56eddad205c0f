"""Trainings under memory limits that the kernel enforces: the stage that ``strategy="zero"`` takes, and batch sizes.

    python benchmarks/memory_limits.py stage     # five sizes on two ranks: does it take what a search by hand finds?
    python benchmarks/memory_limits.py batch     # 1, 2 and 4 ranks with so much memory each: the largest batch

Needs Linux with control groups of version 1 for memory, and the right to make one; where the processes of a group go
beyond its limit, the kernel kills one. ``stage`` tries the stages by hand in the order of ``strategy="zero"`` until one
survives three steps, and then lets it choose. ``batch`` looks for the largest batch of a rank that survives in
``zero3``, and what a sample then costs in CPU time (the cores may be fewer than the ranks): ZeRO's argument for more
than linear scaling is that the memory that other ranks free allows larger batches, which compute more efficiently.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import results
import torch
from offload_training import GPT, VOCABULARY, numel_of
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, NvmeOffload, ZeroStrategy

GROUPS = Path("/sys/fs/cgroup/memory")
WAYS = [f"zero{stage}{where}" for where in ("", "_offload", "_offload_nvme") for stage in (1, 2, 3)]
DEADLINE = 300  # seconds of a try
LENGTH = 64  # tokens of a sample


@dataclass(frozen=True)
class Try:
    """What became of one training.

    Args:
        said: by rank 0 when it ended; nothing if it did not survive.
        most_nbytes: that the ranks had together, with what the kernel keeps of files for them.
        words: all that was written.
    """

    said: dict[str, Any]
    most_nbytes: int
    words: str

    @property
    def survived(self) -> bool:
        """Whether all steps were done."""
        return bool(self.said)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A control group with this much memory. In the end nothing is left of it, nor of its processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    group = GROUPS / f"lightning-zero-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield group
    finally:
        while inside := (group / "cgroup.procs").read_text().split():
            for process in map(int, inside):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()


def attempt(nbytes: int, ranks: int, way: str, size: tuple[int, int], batch: int, steps: int) -> Try:
    """One training of so many ranks with so much memory together."""
    with limited(nbytes) as group, tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as words:
        options = {"ranks": ranks, "way": way, "width": size[0], "layers": size[1], "batch": batch, "steps": steps}
        process = subprocess.Popen(
            # The shell joins the group before Python begins.
            ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", sys.executable, __file__, "train"]
            + [f"--{name}={value}" for name, value in {**options, "folder": folder}.items()],
            stdout=words,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEADLINE)
        most = int((group / "memory.max_usage_in_bytes").read_text())
        words.seek(0)
        text = words.read()
    process.wait()
    found = re.search(r"^ended (.*)$", text, re.MULTILINE)
    return Try(json.loads(found[1]) if found else {}, most, text)


# ------------------------------------------------------------------------------------------- one training, in its group


class Clock(pl.Callback):
    """CPU time of this process at the beginning of each step."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it."""
        self.moments.append(time.process_time())


def train(options: argparse.Namespace) -> None:
    """A rank of it."""
    stage, clock = "auto" if options.way == "zero" else int(options.way[4]), Clock()
    offload: HostOffload | NvmeOffload | None = None
    if options.way == "zero" or "nvme" in options.way:
        offload = NvmeOffload(options.folder, buffer_mib=16, parameters=stage == 3)
    elif "offload" in options.way:
        offload = HostOffload(parameters=stage == 3)
    samples = options.batch * options.ranks * options.steps
    trainer = pl.Trainer(
        strategy=ZeroStrategy(stage, offload=offload),
        accelerator="cpu",
        devices=options.ranks,
        max_steps=options.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    trainer.fit(GPT(options.width, options.layers), DataLoader(data, options.batch))
    steps = [after - before for before, after in pairwise(clock.moments[1:])] or [0.0]
    seconds = trainer.strategy.reduce(torch.tensor(statistics.median(steps)), reduce_op="mean")
    if trainer.is_global_zero:
        print("ended", json.dumps({"cpu_seconds": float(seconds)}), flush=True)


# -------------------------------------------------------------------------------------------------------- what is shown


def stages(options: argparse.Namespace) -> None:
    """The stage for each size, by hand and by itself."""
    limit = int(options.limit_mb * 1e6)
    cases = []
    print(f"two ranks have {options.limit_mb:g} MB together\n")
    print("| parameters | by hand | chosen | survived | planned for a rank | most used by both |\n" + "|---" * 6 + "|")
    for width, layers in options.sizes:
        died = []
        for by_hand in WAYS:
            if attempt(limit, 2, by_hand, (width, layers), options.batch, 3).survived:
                break
            died.append(by_hand)
        chosen = attempt(limit, 2, "zero", (width, layers), options.batch, 3)
        words = re.search(r"takes (\w+): a rank needs (.+?) at the peak.* may take (.+?)[.;]", chosen.words)
        case = {
            "parameters": numel_of(width, layers),
            "died": died,
            "by_hand": by_hand if len(died) < len(WAYS) else None,
            "chosen": words[1] if words else None,
            "survived": chosen.survived,
            "planned": words[2] if words else "",
            "most_nbytes": chosen.most_nbytes,
        }
        cases.append(case)
        print(
            f"| {case['parameters'] / 1e6:.0f}M | {case['by_hand']} | {case['chosen']} | {case['survived']} | "
            f"{case['planned']} | {case['most_nbytes'] / 1e6:.0f} MB |",
            flush=True,
        )
    case = {"name": "stage", "limit_mb": options.limit_mb, "sizes": cases, "run": results.circumstances()}
    results.save(options.results / "memory_limits.json", [case], ("name",))


def batches(options: argparse.Namespace) -> None:
    """The largest batch by the number of ranks, and what a sample costs."""
    rows = []
    print(f"{options.limit_mb:g} MB for each rank\n\n| ranks | batch of a rank | CPU ms of a sample |\n|---|---|---|")
    for ranks in options.ranks:
        tried: dict[int, Try] = {}

        def survives(batch: int, ranks: int = ranks, tried: dict[int, Try] = tried) -> bool:
            limit = int(ranks * options.limit_mb * 1e6)
            tried[batch] = attempt(limit, ranks, "zero3", options.size, batch, options.steps)
            return tried[batch].survived

        low, high = 0, 1
        while survives(high):  # more ranks have room for at least as much
            low, high = high, max(2 * high, rows[-1]["batch"] if rows else 0)
        while high - low > max(1, low // 8):
            middle = (low + high) // 2
            low, high = (middle, high) if survives(middle) else (low, middle)
        for batch in sorted({1, low} - {0}):
            if tried[batch].survived:
                rows.append({"ranks": ranks, "batch": batch, "cpu_ms": 1000 * tried[batch].said["cpu_seconds"] / batch})
                print(f"| {ranks} | {batch} | {rows[-1]['cpu_ms']:.1f} |", flush=True)
        if not low:
            print(f"| {ranks} | none survives | |", flush=True)
    case = {"name": "batch", "limit_mb": options.limit_mb, "parameters": numel_of(*options.size), "rows": rows}
    case["run"] = results.circumstances()
    results.save(options.results / "memory_limits.json", [case], ("name",))
    draw(case, options.results)


def draw(case: dict[str, Any], folder: Path) -> None:
    """``batch_size.svg``."""
    results.bars(
        folder / "batch_size.svg",
        f"CPU time of a sample, {case['parameters'] / 1e6:.0f}M parameters, {case['limit_mb']:g} MB for each rank",
        "milliseconds",
        [
            results.Bar(
                f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}, batch {row['batch']}",
                row["cpu_ms"],
                f"{row['cpu_ms']:.0f}",
                ours=True,
            )
            for row in case["rows"]
        ],
    )


def size(text: str) -> tuple[int, int]:
    """Width and layers of a model, as ``640x9``."""
    width, layers = map(int, text.split("x"))
    return width, layers


def main() -> None:
    """Read the command line, and see whether there can be limits here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    stage = parts.add_parser("stage", help="what strategy='zero' takes")
    stage.add_argument("--sizes", type=size, nargs="+", default=[(320, 6), (512, 8), (640, 9), (704, 10), (896, 12)])
    stage.add_argument("--limit-mb", type=float, default=1800, help="of two ranks together")
    stage.add_argument("--batch", type=int, default=1, help="samples of a rank")
    batch = parts.add_parser("batch", help="the largest batch")
    batch.add_argument("--size", type=size, default=(640, 6))
    batch.add_argument("--limit-mb", type=float, default=1000, help="of each rank")
    batch.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    batch.add_argument("--steps", type=int, default=6, help="of each try")
    for part in (stage, batch):
        part.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and picture")
    one = parts.add_parser("train", help="one training, as the other two start it")
    for name in ("ranks", "width", "layers", "batch", "steps"):
        one.add_argument(f"--{name}", type=int, required=True)
    one.add_argument("--way", choices=["zero", *WAYS], required=True)
    one.add_argument("--folder", required=True, help="for what is in files")
    options = parser.parse_args()
    if options.part == "train":
        train(options)
    elif not os.access(GROUPS, os.W_OK):
        print(f"no limits here: {GROUPS} (control groups of version 1) cannot be written")
    else:
        {"stage": stages, "batch": batches}[options.part](options)


if __name__ == "__main__":
    main()
