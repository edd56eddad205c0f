"""Seconds of a training step under every engine, side by side, as ratios to plain DDP in the same round.

    python benchmarks/step_time.py                      # 10, 50 and 125 million parameters: takes hours
    python benchmarks/step_time.py --models 50m --worlds 2 --precisions fp32
    python benchmarks/step_time.py --models 50m --worlds 2 --precisions fp32 --wire
    python benchmarks/step_time.py --models 1m --worlds 2 --precisions fp32 --rounds 1 --tokens 1 8 --engines zero3

Every engine trains the same GPT from the same weights on the same tokens, with ``AdamW(fused=True)`` and the norm
clipped. Worlds of processes are started for as many engines as fit into memory, always with one of DDP among them. Then
they take turns, round after round: some steps each, while the others wait. A turn's first step is not timed. Shown are
medians of the rounds: milliseconds of a step, and its ratio to DDP's turn in the same round, with the smallest and the
largest. ``loss`` is the largest relative difference to DDP's loss, of all steps and ranks; 0 means that every bit is
the same. With ``--wire`` batches are so small that the exchange between the ranks takes most of the step.

DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed run in a plain loop. Lightning's strategies, ours among them, run in a
Trainer and pay for it ("DDP in a Trainer" shows how much). What is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from engines import ENGINES, SIZES, Engine, Task
from offload_training import numel_of
from worlds import Report, World, WorldFailed

KEY = ("numel", "precision", "ranks", "batch")
WIRE = (1, 8)
PROCESS_NBYTES = 350 * 10**6  # of a rank, without its model


class Table:
    """Seconds and losses of one case, by engine.

    Args:
        task: what is trained.
        ranks: in each world.
    """

    def __init__(self, task: Task, ranks: int) -> None:
        self.task, self.ranks = task, ranks
        self.rows: dict[str, dict[str, Any]] = {}

    def measure(self, names: list[str], rounds: int, steps: int) -> None:
        """Start a world for DDP and each of ``names``, and have them take turns."""
        worlds = {name: self._start(ENGINES[name]) for name in ["ddp", *names]}
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        losses: dict[str, list[list[float]]] = {name: [] for name in worlds}
        try:
            for turn in range(rounds + 1):
                for name in list(worlds):
                    reports = self._turn(worlds, name, steps)
                    losses[name] += [[*step] for step in zip(*(report.losses for report in reports), strict=True)]
                    if turn and reports:  # the first one sets up, allocates, and learns the order of units
                        seconds[name].append(max(statistics.fmean(report.seconds) for report in reports))
        finally:
            for world in worlds.values():
                world.close()
        if "ddp" not in worlds:
            return
        for name in worlds:
            ratios = [a / b for a, b in zip(seconds[name], seconds["ddp"], strict=True)]
            self.rows.setdefault(name, summary(name, seconds[name], ratios, difference(losses[name], losses["ddp"])))

    def _start(self, engine: Engine) -> World:
        return World(self.ranks, partial(engine.train, self.task), dict(engine.environment))

    def _turn(self, worlds: dict[str, World], name: str, steps: int) -> list[Report]:
        try:
            return worlds[name].turn(steps)
        except WorldFailed as error:
            print(f"{ENGINES[name].label} failed: {error}", flush=True)
            worlds.pop(name).close()
            return []

    def lines(self) -> list[str]:
        """For a person, with the differences that the goals are about."""
        found = [f"{'':26}{'ms':>9}{'to DDP':>9}{'min':>8}{'max':>7}{'loss':>10}"]
        for name, row in self.sorted_rows():
            loss = "same" if row["loss_difference"] == 0 else f"{row['loss_difference']:.0e}"
            found.append(
                f"{ENGINES[name].label:26}{1000 * row['seconds']:9.1f}{row['ratio']:8.3f}x"
                f"{min(row['ratios']):8.3f}{max(row['ratios']):7.3f}{loss:>10}"
            )
        for stage in (1, 2, 3):
            ours = self.rows.get(f"zero{stage}")
            peers = {n: row for n, row in self.rows.items() if ENGINES[n].stage == stage and not ENGINES[n].ours}
            if ours and peers:
                best = min(peers, key=lambda n: peers[n]["ratio"])
                found.append(
                    f"zero{stage}: {ours['ratio'] / peers[best]['ratio'] - 1:+.1%} to the fastest peer of its stage, "
                    f"{ENGINES[best].label}"
                )
        return found

    def sorted_rows(self) -> list[tuple[str, dict[str, Any]]]:
        """In the order in which engines are known."""
        return [(name, self.rows[name]) for name in ENGINES if name in self.rows]


def summary(name: str, seconds: list[float], ratios: list[float], loss_difference: float) -> dict[str, Any]:
    """One row as it is saved."""
    return {
        "label": ENGINES[name].label,
        "stage": ENGINES[name].stage,
        "ours": ENGINES[name].ours,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "loss_difference": loss_difference,
    }


def difference(losses: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference of any step's loss on any rank."""
    pairs = [pair for ours, ddp in zip(losses, expected, strict=True) for pair in zip(ours, ddp, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def groups(names: list[str], numel: int, ranks: int, memory: float) -> list[list[str]]:
    """Engines whose worlds fit into memory together with one of DDP; each alone with it where not even two do."""

    def needed(name: str) -> float:
        return ranks * (PROCESS_NBYTES + ENGINES[name].peak * numel)

    found: list[list[str]] = []
    left = 0.0
    for name in names:
        if not found or needed(name) > left:
            found.append([])
            left = memory - needed("ddp")
        found[-1].append(name)
        left -= needed(name)
    return found or [[]]


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Bars of the ratios, one field for each case."""
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    tallest = max(len(case["engines"]) for case in cases)
    drawn = results.figure(lines, columns, (3.6 * columns, lines * (0.7 + 0.17 * tallest)))
    if drawn is None:
        return
    picture, fields = drawn
    colours = ("#888888", "#9ecae1", "#6baed6", "#3182bd")  # of a peer's stage
    for number, field in enumerate(fields.flat):
        if number >= len(cases):
            field.axis("off")
            continue
        case = cases[number]
        rows = list(case["engines"].values())[::-1]
        shades = ["#e6550d" if row["ours"] else colours[row["stage"]] for row in rows]
        bars = field.barh([row["label"] for row in rows], [row["ratio"] for row in rows], color=shades)
        field.bar_label(bars, fmt="%.2f", padding=2)
        field.axvline(1.0, color="black", linewidth=0.6)
        field.margins(x=0.15)
        field.set_title(f"{case['model']}, {case['precision']}, {case['ranks']} ranks, {case['batch']} tokens: to DDP")
    results.save_figure(picture, path)


def main() -> None:
    """Measure all cases, print their tables, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["10m", "50m", "125m"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of ranks")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="only these, and DDP")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(4, 128), help="a rank's sequences and their length")
    parser.add_argument("--wire", action="store_true", help=f"short for --tokens {WIRE[0]} {WIRE[1]}")
    parser.add_argument(
        "--memory-gib", type=float, help="what worlds may take together (default: 80 %% of what is free)"
    )
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and plot")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is forked must not have started more
    missing = {ENGINES[name].package for name in options.engines if not ENGINES[name].installed}
    names = [name for name in options.engines if name != "ddp" and ENGINES[name].installed]
    found = results.circumstances()
    print(results.headline(found))
    for package in sorted(missing):
        print(f"left out: {package} is not installed")
    cases = []
    for model in options.models:
        numel = numel_of(*SIZES[model])
        for precision in options.precisions:
            for ranks in options.worlds:
                tokens = WIRE if options.wire else tuple(options.tokens)
                batch = f"{tokens[0]}x{tokens[1]}"
                print(f"\n{model} ({numel / 1e6:.1f} million), {precision}, {ranks} ranks, {batch} tokens", flush=True)
                table = Table(Task(*SIZES[model], precision, tokens), ranks)
                memory = 2**30 * options.memory_gib if options.memory_gib else 0.8 * results.available()
                for group in groups(names, numel, ranks, memory):
                    table.measure(group, options.rounds, options.steps)
                print("\n".join(table.lines()), flush=True)
                case = {"model": model, "numel": numel, "precision": precision, "ranks": ranks, "batch": batch}
                cases.append({**case, "engines": dict(table.sorted_rows()), "run": found})
                everything = results.save(options.results / "step_time.json", cases, KEY)
    plot(everything, options.results / "step_time.svg")


if __name__ == "__main__":
    main()
