"""Bytes of each parameter on one rank, at rest and at the peak of a step, under every engine, beside the plan's.

    python benchmarks/memory.py                               # 50 and 125 million parameters
    python benchmarks/memory.py --models 1m --worlds 2 --precisions fp32 --engines zero3
    python benchmarks/memory.py --models 10m 50m narrow giant untied --engines zero2 zero3 fsdp2 fsdp2-whole --gate

The engines of ``step_time.py`` train a batch of eight tokens, so that activations weigh next to nothing, with
``AdamW(fused=True)``. Each of them runs twice, alone. In one run torch's allocator counts what it gives out and takes
back; memory that ranks share is added as the kernel counts it at that moment, in equal parts. In the other it is the
process that is looked at, a thousand times a second: what it has in memory, less what it had before the model was
built. At rest is after a step and its ``zero_grad``, the peak is that of a step in the steady state. Numbers are saved
after every engine; earlier runs' cases and engines stay in the JSON until they are measured again.

``narrow`` has 100 thin layers, in ``giant`` and ``untied`` most parameters are those of embedding and head. With
``--gate`` the command fails if ``zero3`` takes more than FSDP2, at rest or at the peak, or ``zero2`` more at the peak
than FSDP2 that gathers once. (At rest ``zero2`` has all weights, by definition, and FSDP2 has given them back.)
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from engines import ENGINES, OPTIONS, SIZES, VARIANTS, Engine, Task
from offload_training import numel_of
from torch.profiler import ProfilerActivity, profile
from worlds import Turns, World, WorldFailed, restart_with

from lightning_zero import ZeroStrategy
from lightning_zero.extensions.planner.costs import OptimizerCost

KEY = ("numel", "precision", "ranks")
TOKENS = (1, 8)
# glibc otherwise keeps what was freed for later, more and more of it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}


# ---------------------------------------------------------------------------------------------------------------------
# A rank's side


def watched(engine: Engine, task: Task, turns: Turns) -> None:
    """Train; each report says what the process held before the model was built, and what the plan expects."""
    before = anonymous(os.getpid())
    turns.at_end = lambda: {"before": before, **expected(turns.trainer)}
    engine.train(task, turns)


def counted(engine: Engine, task: Task, turns: Turns) -> None:
    """Train; the second report says what torch's allocator has given out, when, since the first."""
    count_all_threads()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    ends: list[int] = []

    def at_end() -> dict[str, Any]:
        ends.append(turns.index)
        if len(ends) == 1:
            recording.start()
            return {}
        recording.stop()
        totals = list(allocated(recording.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
        return {"rest": totals[-1][1], "totals": totals}

    turns.at_end = at_end
    engine.train(task, turns)


def count_all_threads() -> None:
    """Have torch's CPU allocator count from now on; with a profiler alone it counts that one's thread and time."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def allocated(nodes: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The time (ns) and the allocator's count after each of its calls, in the order of time."""
    for node in sorted(nodes, key=lambda node: node.start_time_ns):
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            yield node.start_time_ns, node.extra_fields.total_allocated
        yield from allocated(node.children)


def most_together(totals: Sequence[tuple[int, int]], common: Sequence[tuple[int, int]]) -> int:
    """The most of two counts over time together; between two looks at the second one, the larger counts."""
    times = [moment for moment, _ in common]
    found = 0
    for moment, total in totals:
        after = bisect.bisect(times, moment)
        found = max(found, total + max((nbytes for _, nbytes in common[max(0, after - 1) : after + 1]), default=0))
    return found


def expected(trainer: Any) -> dict[str, int]:
    """What the plan says, where this package trains."""
    if trainer is None or not isinstance(trainer.strategy, ZeroStrategy):
        return {}
    engine = trainer.strategy.engine
    options = {
        "rank": engine.collectives.rank,
        "optimizer": OptimizerCost.of(trainer.optimizers[0]),
        "receive_buffer": engine.collectives.receives,
    }
    rest, peak = (engine.plan.expected_memory(**options, peak=peak) for peak in (False, True))
    passing = engine.plan.placement.shards_gradients and engine.plan.world_size > 1
    return {"plan_rest": rest.total - rest.gradients * passing, "plan_peak": peak.total}


# ---------------------------------------------------------------------------------------------------------------------
# The parent's side


def fields(path: str) -> dict[str, int]:
    """Lines of a file in /proc that end in kB, in bytes."""
    pairs = (line.split(":", 1) for line in Path(path).read_text().splitlines() if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def anonymous(pid: int) -> int:
    """Memory of the process alone."""
    return fields(f"/proc/{pid}/status")["RssAnon"]


class Common:
    """Memory that processes have in common: the files without a name that ranks of this package map.

    The kernel counts the pages of a file as they come and go, so that a look takes microseconds. They are shared out
    equally: of a page of 2 MiB another rank maps all as soon as it has read some of it, and who does so is chance.

    Args:
        pids: the processes, after their set-up.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._ranks = len(pids)
        opened = [entry.path for pid in pids for entry in os.scandir(f"/proc/{pid}/fd")]
        files = [path for path in opened if os.readlink(path).startswith("/memfd:lightning_zero")]
        self._files = list({os.stat(path).st_ino: path for path in files}.values())

    def nbytes(self) -> int:
        """Of each process, now."""
        return sum(os.stat(path).st_blocks * 512 for path in self._files) // self._ranks


class Sampler(threading.Thread):
    """The most that processes hold while it runs.

    Args:
        pids: the processes.

    Attributes:
        both: of each, the most that it had alone and in common together.
        history: times (ns), and what each had in common with the others then.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids, self._over = pids, threading.Event()
        self._common = Common(pids)
        self.both = [0] * len(pids)
        self.history: list[tuple[int, int]] = []

    def run(self) -> None:
        """Look again and again."""
        while not self._over.wait(0.0005):
            in_common = self._common.nbytes()
            self.history.append((time.time_ns(), in_common))
            for rank, pid in enumerate(self._pids):
                self.both[rank] = max(self.both[rank], in_common + anonymous(pid))

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


def measure(engine: Engine, task: Task, ranks: int) -> dict[str, float]:
    """Bytes of the rank that has most, from two worlds.

    Raises:
        WorldFailed: if one of them does.
    """
    environment = dict(engine.environment)
    world = World(ranks, partial(watched, engine, task), environment)
    try:
        world.turn(1)
        with Sampler(world.pids) as most:
            extras = [report.extra for report in world.turn(1)]
        in_common = Common(world.pids).nbytes()
        alone = [anonymous(pid) for pid in world.pids]
    finally:
        world.close()
    world = World(ranks, partial(counted, engine, task), environment)
    try:
        world.turn(1)
        with Sampler(world.pids) as looks:
            counts = [report.extra for report in world.turn(1)]
    finally:
        world.close()
    found = {
        "rest": max(count["rest"] for count in counts) + in_common,
        "peak": max(most_together(count["totals"], looks.history) for count in counts),
        "process_rest": max(a - e["before"] for a, e in zip(alone, extras, strict=True)) + in_common,
        "process_peak": max(both - e["before"] for both, e in zip(most.both, extras, strict=True)),
    }
    for name in ("plan_rest", "plan_peak"):
        if name in extras[0]:
            found[name] = max(extra[name] for extra in extras)
    return found


COLUMNS = ("rest", "plan_rest", "peak", "plan_peak", "process_rest", "process_peak")


def lines_of(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A table for a person, in bytes of a parameter, with what the goals are about below it."""
    found = [f"{'':26}{'rest':>7}{'(plan)':>8}{'peak':>7}{'(plan)':>8}{'process: rest':>16}{'peak':>7}"]
    for name, row in rows.items():
        cells = [f"{row[column]:.2f}" if column in row else "" for column in COLUMNS]
        widths = (7, 8, 7, 8, 16, 7)
        found.append(f"{ENGINES[name].label:26}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    for stage in (1, 2, 3):
        ours = rows.get(f"zero{stage}")
        peers = {name: row for name, row in rows.items() if ENGINES[name].stage == stage and ENGINES[name].is_peer}
        if ours and "plan_rest" in ours:
            text = f"zero{stage}: at rest {ours['rest'] / ours['plan_rest'] - 1:+.1%} to the plan"
            if peers:
                best = min(peers, key=lambda name: peers[name]["peak"])
                text += f"; peak {ours['peak'] / peers[best]['peak'] - 1:+.1%} to the lowest peer's of its stage, "
                text += ENGINES[best].label
            found.append(text)
    return found


def missed_goals(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Where one of ours takes more than FSDP2, by what both are rounded to."""
    for ours, peer, moments in (("zero3", "fsdp2", ("rest", "peak")), ("zero2", "fsdp2-whole", ("peak",))):
        if ours in rows and peer in rows:
            for moment in moments:
                mine, other = rows[ours][moment], rows[peer][moment]
                if mine > other + 0.01:
                    yield f"{ours} {mine:.2f} at {moment}, FSDP2 {other:.2f}"


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Bars of one case: what the allocator counts at the peak of a step and, darker, at rest."""
    case = max(cases, key=lambda case: [case["model"] == "50m", case["precision"] == "fp32", -case["ranks"]])
    which = f"{case['model'].upper()}, {case['precision']}, {case['ranks']} ranks"
    results.bars(
        path,
        f"Memory of a rank, counted by the allocator\n{which}",
        "bytes per parameter",
        [
            results.Bar(
                row["label"], row["peak"], f"{row['rest']:.2f}, {row['peak']:.2f}", row["rest"], ours=row["ours"]
            )
            for name, row in case["engines"].items()
            if name not in VARIANTS
        ],
        shades=("at rest", "at the peak of a step"),
    )


def main() -> None:
    """Measure all cases, print their tables, and write JSON and plot."""
    restart_with(MALLOC)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["50m", "125m"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of ranks")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="only these")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and plot")
    parser.add_argument("--gate", action="store_true", help="fail if a goal is missed")
    parser.add_argument("--draw", action="store_true", help="measure nothing: only draw what the folder has")
    options = parser.parse_args()
    if options.draw:
        return plot(results.load(options.results / "memory.json"), options.results / "memory.svg")
    torch.set_num_threads(1)  # what is forked must not have started more
    run = results.circumstances()
    print(results.headline(run))
    for package in sorted({ENGINES[name].package for name in options.engines if not ENGINES[name].installed}):
        print(f"left out: {package} is not installed")
    everything: list[dict[str, Any]] = []
    missed: list[str] = []
    for model in options.models:
        numel = numel_of(*SIZES[model], **OPTIONS.get(model, {}))
        for precision in options.precisions:
            for ranks in options.worlds:
                print(
                    f"\n{model} ({numel / 1e6:.1f} million), {precision}, {ranks} ranks: bytes of a parameter",
                    flush=True,
                )
                rows: dict[str, dict[str, Any]] = {}
                for name in (name for name in ENGINES if name in options.engines and ENGINES[name].installed):
                    engine = ENGINES[name]
                    try:
                        found = measure(engine, Task(*SIZES[model], precision, TOKENS, OPTIONS.get(model, {})), ranks)
                    except WorldFailed as error:
                        print(f"{engine.label} failed: {error}", flush=True)
                        continue
                    kind = {"label": engine.label, "stage": engine.stage, "ours": engine.ours}
                    rows[name] = {**kind, **{key: round(nbytes / numel, 4) for key, nbytes in found.items()}}
                    print(f"  {engine.label:26}{rows[name]['rest']:7.2f} / {rows[name]['peak']:.2f}", flush=True)
                    case = {"model": model, "numel": numel, "precision": precision, "ranks": ranks}
                    case.update(engines=dict(rows), run=run)
                    everything = results.save(options.results / "memory.json", [case], KEY)
                print("\n".join(lines_of(rows)), flush=True)
                missed += [f"{model}, {precision}, {ranks} ranks: {goal}" for goal in missed_goals(rows)]
    if everything:
        plot(everything, options.results / "memory.svg")
    if options.gate and missed:
        raise SystemExit("\n".join(["above FSDP2:", *missed]))


if __name__ == "__main__":
    main()
