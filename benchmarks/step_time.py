"""Seconds of a training step under every engine, side by side, as ratios to plain DDP in the same round.

    python benchmarks/step_time.py                      # 10, 50 and 125 million parameters: takes hours
    python benchmarks/step_time.py --models 50m --worlds 2 --precisions fp32
    python benchmarks/step_time.py --models 50m --worlds 2 --precisions fp32 --wire
    python benchmarks/step_time.py --models 125m --worlds 4 --rounds 1 --steps 1 --engines zero1 zero2 zero3 fsdp2
    python benchmarks/step_time.py --draw               # only the picture, of what earlier runs have saved

Every engine trains the same GPT from the same weights on the same tokens, with ``AdamW(fused=True)`` and the norm
clipped. Worlds of processes are started for as many engines as fit into memory, always with one of DDP among them. Then
they take turns, round after round: some steps each, while the others wait. A turn's first step is not timed. libc keeps
what was freed, under every engine alike, or with ``--malloc default`` does what it does for users. With ``--wire``
batches are so small that the exchange between the ranks takes most of the step. Shown are medians of the rounds:

ms, to DDP      milliseconds of a step, and its ratio to DDP's turn in the same round; min and max are of that ratio
CPU ms, to DDP  what all ranks' processors computed for a step: on a machine that others use too, this repeats within
                some percent, and the time that passes does not
faults          thousands of pages that all ranks got from the system in a step
loss            the largest relative difference to DDP's, of all steps and ranks; "same": every bit is

What has no room beside DDP is measured alone, after the others, and compared with the median of DDP's turns.

Numbers are saved after every turn, so a run that is interrupted leaves what it has. Cases and engines of earlier runs
stay in the JSON, with the command and the date they are from, until they are measured again.

With "no exchange" each rank trains a model of its own: no other row can be far below that, whatever it does.
DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed run in a plain loop. Lightning's strategies, ours among them, run in a
Trainer and pay for it ("DDP in a Trainer" shows how much). What is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from engines import ENGINES, SIZES, VARIANTS, Task, earlier
from offload_training import numel_of
from worlds import Report, World, WorldFailed, restart_with

KEY = ("numel", "precision", "ranks", "batch", "malloc")
# glibc otherwise gives memory back to the system in one step and takes it again in the next, or does not, by chance:
# that is up to a tenth of a step of any engine, from one run to the next.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
MAIN, WIRE = (4, 128), (1, 8)


class Table:
    """Seconds and losses of one case, by engine. DDP's world stays from group to group, until the ``with`` is over.

    Args:
        task: what is trained.
        ranks: in each world.
        keep: called with the rows there are after each turn that was timed.
    """

    def __init__(self, task: Task, ranks: int, keep: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        self.task, self.ranks = task, ranks
        self.rows: dict[str, dict[str, Any]] = {}
        self._keep = keep
        self._worlds: dict[str, World] = {}
        self._losses: dict[str, list[list[float]]] = {}
        self._cpu: dict[str, list[float]] = {}
        self._faults: dict[str, list[float]] = {}
        self._ddp: list[float] = []  # of all groups

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(list(self._worlds))

    def measure(self, names: list[str], rounds: int, steps: int) -> None:
        """Start a world for each of ``names``, and have DDP's and them take turns.

        Raises:
            WorldFailed: if DDP's does. Other engines that fail are left out.
        """
        seconds: dict[str, list[float]] = {name: [] for name in ["ddp", *names]}
        try:
            for name in seconds:
                self._set_up(name)
            for number in range(rounds):
                for name in [name for name in seconds if name in self._worlds]:
                    if reports := self._turn(name, steps):
                        seconds[name].append(self._timed(name, reports))
                        self._note(name, f"round {number + 1} of {rounds}", seconds[name], seconds["ddp"])
        finally:
            self._close(names)

    def measure_alone(self, name: str, rounds: int, steps: int) -> None:
        """Start a world for one that has no room beside DDP's; it is compared with the median of DDP's turns before."""
        self._close(["ddp"])
        seconds: list[float] = []
        try:
            self._set_up(name)
            while name in self._worlds and len(seconds) < rounds:
                if reports := self._turn(name, steps):
                    seconds.append(self._timed(name, reports))
                    base = [statistics.median(self._ddp)] * len(seconds)
                    self._note(name, f"alone {len(seconds)} of {rounds}", seconds, base)
        finally:
            self._close([name])

    def _set_up(self, name: str) -> None:
        """The first two steps, which build, allocate, and learn the order of units."""
        if name in self._worlds:
            return
        engine = ENGINES[name]
        start = time.perf_counter()
        self._worlds[name] = World(self.ranks, partial(engine.train, self.task), dict(engine.environment))
        self._losses[name], self._cpu[name], self._faults[name] = [], [], []
        if self._turn(name, 1):
            print(f"  set up          {engine.label:26}{time.perf_counter() - start:7.1f} s", flush=True)

    def _turn(self, name: str, steps: int) -> list[Report]:
        try:
            reports = self._worlds[name].turn(steps)
        except WorldFailed as error:
            self._close([name])
            if name == "ddp":
                raise
            print(f"{ENGINES[name].label} failed: {error}", flush=True)
            return []
        self._losses[name] += [[*step] for step in zip(*(report.losses for report in reports), strict=True)]
        return reports

    def _timed(self, name: str, reports: list[Report]) -> float:
        """Seconds of a step, of the rank that took longest; the ranks' sums of the rest are kept."""
        self._cpu[name].append(sum(statistics.fmean(report.cpu) for report in reports))
        self._faults[name].append(sum(statistics.fmean(report.faults) for report in reports))
        return max(statistics.fmean(report.seconds) for report in reports)

    def _note(self, name: str, turn: str, seconds: list[float], base: list[float]) -> None:
        """Print the turn, and bring the row up to date."""
        if name == "ddp":
            self._ddp.append(seconds[-1])
            seconds = base = self._ddp
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        print(f"  {turn:16}{ENGINES[name].label:26}{1000 * seconds[-1]:7.1f} ms{ratios[-1]:8.3f}x", flush=True)
        differs = difference(self._losses[name], self._losses["ddp"], ENGINES[name].group)
        self.rows[name] = summary(name, seconds, ratios, differs)
        self.rows[name]["cpu"] = statistics.median(self._cpu[name])
        self.rows[name]["cpu_ratio"] = self.rows[name]["cpu"] / statistics.median(self._cpu["ddp"])
        self.rows[name]["faults"] = statistics.median(self._faults[name])
        self.rows[name]["alone"] = turn.startswith("alone")
        self._keep(dict(self.sorted_rows()))

    def _close(self, names: list[str]) -> None:
        for name in names:
            if name in self._worlds:
                self._worlds.pop(name).close()

    def lines(self) -> list[str]:
        """For a person, with the differences that the goals are about."""
        found = [f"{'':26}{'ms':>9}{'to DDP':>9}{'min':>8}{'max':>7}{'CPU ms':>9}{'to DDP':>9}{'faults':>8}{'loss':>8}"]
        for name, row in self.sorted_rows():
            loss = "same" if row["loss_difference"] == 0 else f"{row['loss_difference']:.0e}"
            found.append(
                f"{ENGINES[name].label:26}{1000 * row['seconds']:9.1f}{row['ratio']:8.3f}x"
                f"{min(row['ratios']):8.3f}{max(row['ratios']):7.3f}"
                f"{1000 * row['cpu']:9.1f}{row['cpu_ratio']:8.3f}x{row['faults'] / 1000:8.1f}{loss:>8}"
            )
        for stage in (1, 2, 3):
            ours = self.rows.get(f"zero{stage}")
            peers = {n: row for n, row in self.rows.items() if ENGINES[n].stage == stage and ENGINES[n].is_peer}
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


def difference(losses: list[list[float]], expected: list[list[float]], group: int = 1) -> float:
    """The largest relative difference of any step's loss on any rank; ``expected`` may go further.

    Of ``group`` neighbouring ranks that have one loss, the mean is expected.
    """
    pairs = []
    for ours, ddp in zip(losses, expected, strict=False):
        means = [statistics.fmean(ddp[rank // group * group :][:group]) for rank in range(len(ddp))]
        pairs += zip(ours, means, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def groups(names: list[str], numel: int, ranks: int, memory: float) -> list[list[str]]:
    """Engines whose worlds fit into memory together with one of DDP. One that does not is in none."""

    def fit(group: list[str]) -> bool:
        engines = [ENGINES[name] for name in ("ddp", *group)]
        rest = sum(engine.process + engine.rest * numel for engine in engines)
        return ranks * (rest + max(engine.peak - engine.rest for engine in engines) * numel) <= memory

    found: list[list[str]] = [[]]
    for name in names:
        if fit([*found[-1], name]):
            found[-1].append(name)
        elif fit([name]):
            found.append([name])
    return found


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Bars of one case, the main one if it was measured: a step of every engine, as a ratio to DDP's."""
    case = max(cases, key=_weight)
    rows = [row for name, row in case["engines"].items() if name not in ("no-exchange", *VARIANTS)]
    which = f"{case['model'].upper()}, {case['precision']}, {case['ranks']} ranks on {case['run']['cores']} cores"
    results.bars(
        path,
        f"Time of a training step relative to DDP\n{which}, {case['batch'].replace('x', ' x ')} tokens per rank",
        "time of DDP's step = 1; median, smallest and largest of all rounds",
        [results.Bar(row["label"], row["ratio"], _range(row), span=_span(row), ours=row["ours"]) for row in rows],
        line=1.0,
    )


def _span(row: dict[str, Any]) -> tuple[float, float] | None:
    ratios = row.get("ratios", [])
    return (min(ratios), max(ratios)) if len(set(ratios)) > 1 else None


def _range(row: dict[str, Any]) -> str:
    span = _span(row)
    return f"{row['ratio']:.2f}" + (f" ({span[0]:.2f}–{span[1]:.2f})" if span else "")  # noqa: RUF001


def _weight(case: dict[str, Any]) -> tuple[bool, ...]:
    """Of several cases the one that tells most: the main model, and the batch that is nearest to a user's."""
    main = {"model": "50m", "precision": "fp32", "ranks": 2, "batch": "x".join(map(str, MAIN)), "malloc": "kept"}
    return tuple(case[name] == value for name, value in main.items())


def main() -> None:
    """Measure all cases, print their tables, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["10m", "50m", "125m"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of ranks")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="only these, beside DDP")
    parser.add_argument("--earlier", type=Path, help="a checkout of another commit, whose stages take turns with these")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs=2, default=MAIN, help="a rank's sequences and their length")
    parser.add_argument("--wire", action="store_true", help=f"short for --tokens {WIRE[0]} {WIRE[1]}")
    parser.add_argument(
        "--malloc", choices=("kept", "default"), default="kept", help="whether libc keeps what was freed"
    )
    parser.add_argument(
        "--memory-gib", type=float, help="what worlds may take together (default: 90 %% of what is free)"
    )
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and plot")
    parser.add_argument("--draw", action="store_true", help="measure nothing: only draw what the folder has")
    options = parser.parse_args()
    if options.draw:
        return plot(results.load(options.results / "step_time.json"), options.results / "step_time.svg")
    if options.malloc == "kept":
        restart_with(MALLOC)
    torch.set_num_threads(1)  # what is forked must not have started more
    missing = {ENGINES[name].package for name in options.engines if not ENGINES[name].installed}
    names = [name for name in options.engines if name != "ddp" and ENGINES[name].installed]
    if options.earlier:
        before = {f"zero{stage}-earlier": earlier(stage, options.earlier) for stage in (1, 2, 3)}
        ENGINES.update(before)
        names += [name for name in before if name.removesuffix("-earlier") in names]
    found = results.circumstances()
    print(results.headline(found))
    for package in sorted(missing):
        print(f"left out: {package} is not installed")
    for model in options.models:
        for precision in options.precisions:
            for ranks in options.worlds:
                case = {"model": model, "numel": numel_of(*SIZES[model]), "precision": precision, "ranks": ranks}
                run_case({**case, "run": found}, names, options)


def run_case(case: dict[str, Any], names: list[str], options: argparse.Namespace) -> None:
    """Measure one case, print its table, and save it after every turn."""
    tokens = WIRE if options.wire else tuple(options.tokens)
    case["batch"] = batch = f"{tokens[0]}x{tokens[1]}"
    case["malloc"] = options.malloc
    model, numel, precision, ranks = (case[name] for name in ("model", "numel", "precision", "ranks"))
    print(f"\n{model} ({numel / 1e6:.1f} million), {precision}, {ranks} ranks, {batch} tokens", flush=True)
    memory = 2**30 * options.memory_gib if options.memory_gib else 0.9 * results.available()
    together = groups(names, numel, ranks, memory)
    alone = [name for name in names if not any(name in group for group in together)]
    for name in alone:
        print(f"{ENGINES[name].label} does not fit into memory beside DDP: it comes alone, after all others")
    if len(together) > 1:
        print(f"all at once do not fit into memory: {len(together)} groups, one after the other, each beside DDP")
    everything: list[dict[str, Any]] = []

    def keep(rows: dict[str, dict[str, Any]]) -> None:
        everything[:] = results.save(options.results / "step_time.json", [{**case, "engines": rows}], KEY)

    try:
        with Table(Task(*SIZES[model], precision, tokens), ranks, keep) as table:
            for group in together:
                table.measure(group, options.rounds, options.steps)
            for name in alone:
                table.measure_alone(name, options.rounds, options.steps)
    except WorldFailed as error:
        print(f"DDP failed, with which all are compared: {error}", flush=True)
    print("\n".join(table.lines()), flush=True)
    if everything:
        plot(everything, options.results / "step_time.svg")


if __name__ == "__main__":
    main()
