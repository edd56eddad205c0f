"""Host time of a step for each unit: what a way to train adds to plain PyTorch, in microseconds of processor time.

    python benchmarks/host_time.py                          # 64 narrow transformer blocks, fp32 and bf16: minutes
    python benchmarks/host_time.py --units 32 64 128 --precisions 32-true --rounds 5

The process is one rank of a fake world, whose collectives answer at once: no time is spent on a wire, and next to none
on computing, because blocks are 16 wide. What is left is what the host does. Ways take turns, round after round. Shown
are medians over all steps, forward, backward and optimizer step apart, divided by the number of blocks; "added" is what
is above plain PyTorch, and its ratio to what FSDP2 adds. On a fast GPU this time decides how small a layer may be.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import results
import torch
from fake_world import Task, fake_world, rows
from offload_training import GPT
from torch import Tensor

WAYS = ("plain", "ddp", "fsdp2-whole", "fsdp2", "zero1", "zero2", "zero3")
PARTS = ("forward", "backward", "step")
WIDTH, LENGTH, VOCABULARY, WORLD, WARM_UP = 16, 4, 128, 8, 4


@dataclass(frozen=True)
class Narrow(Task):
    """A language model whose blocks compute next to nothing."""

    def model(self) -> GPT:
        """The same weights every time."""
        torch.manual_seed(0)
        return GPT(WIDTH, self.layers, vocabulary=VOCABULARY, tied=False)

    def batch(self, index: int) -> Tensor:
        """The tokens of one step."""
        return torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))


def measure(precision: str, units: int, rounds: int, steps: int, ways: list[str]) -> dict[str, list[float]]:
    """Microseconds of processor time for each unit, by way: forward, backward and optimizer step."""
    task = Narrow(WIDTH, units, (1, LENGTH), precision, torch.device("cpu"))
    batch = task.batch(0)
    made = {name: rows()[name].make(task, WORLD) for name in ways}
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for way in made.values():
        for _ in range(WARM_UP):
            way.step(batch)
    for _ in range(rounds):
        for name, way in made.items():
            gc.collect()
            way.step(batch)
            for _ in range(steps):
                moments = [time.process_time()]
                loss = way.forward(batch)
                moments.append(time.process_time())
                way.backward(loss)
                moments.append(time.process_time())
                way.update()
                moments.append(time.process_time())
                seconds[name].append([after - before for before, after in pairwise(moments)])
    return {
        name: [statistics.median(part) * 1e6 / units for part in zip(*each, strict=True)]
        for name, each in seconds.items()
    }


def table(found: dict[str, list[float]]) -> list[str]:
    """Lines of Markdown."""
    base = sum(found["plain"])
    theirs = sum(found["fsdp2"]) - base if "fsdp2" in found else 0.0
    lines = ["| | " + " | ".join(PARTS) + " | sum | added | to FSDP2 |", "|---" * 7 + "|"]
    for name, parts in found.items():
        added = sum(parts) - base
        ratio = f"{added / theirs:.2f} x" if theirs and name != "plain" else ""
        numbers = " | ".join(f"{number:.0f}" for number in [*parts, sum(parts), added])
        lines.append(f"| {rows()[name].label} | {numbers} | {ratio} |")
    return lines


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[64], help="blocks of the model")
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a turn")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(rows()))
    parser.add_argument("--out", type=Path, default=results.FOLDER / "host_time.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # weights that no other rank sends become tiny numbers, with which all is slow
    run = results.circumstances()
    print(results.headline(run))
    cases: list[dict[str, Any]] = []
    ways = list(dict.fromkeys(["plain", *options.ways]))
    with fake_world(WORLD):
        for precision in options.precisions:
            for units in options.units:
                found = measure(precision, units, options.rounds, options.steps, ways)
                print(f"\n{precision}, {units} blocks, microseconds for each block\n")
                print("\n".join(table(found)), flush=True)
                cases.append({"precision": precision, "units": units, "microseconds": found, "run": run})
    results.save(options.out, cases, ("precision", "units"))


if __name__ == "__main__":
    main()
