"""What grows with the number of ranks, and what with the number of units.

python benchmarks/scaling.py
python benchmarks/scaling.py --worlds 8 64 --blocks 2 --units 4 8 --rounds 1 --steps 1

plan     a model of 70 billion parameters on the meta device: seconds to plan it, and bytes of one rank, by world
set-up   a real model in a fake world, whose collectives answer at once: seconds until it can train, and
         milliseconds of a step, by world; beside FSDP2
units    steps of a model of many tiny units (a linear layer of 16 and a norm) on one rank, where there is nothing to
         exchange: what a unit costs. In turns with DDP, as ratios to its turn in the same round
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fake_world
import results
import torch
from engines import Engine, lightning, trainer_ddp
from offload_training import GPT
from torch import Tensor, nn
from worlds import Turns, World

from lightning_zero import ZeroStrategy, build_plan

WIDTH = 16
LARGE = (8192, 86)  # 69 billion parameters
DDP_NBYTES = 16  # of a parameter under autocast with Adam: weight, gradient and two moments in float32


class Block(nn.Module):
    """A unit that hardly computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, width."""
        return self.norm(self.linear(x))


class Tiny(nn.Module):
    """Many of them.

    Args:
        units: how many.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(units)))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return (self.blocks(x) - x).square().mean()


@dataclass(frozen=True)
class TinyTask(fake_world.Task):
    """Trains ``Tiny``, with as many units as the task has layers."""

    def model(self) -> Any:
        """The same weights every time."""
        torch.manual_seed(0)
        return Tiny(self.layers)

    def batch(self, index: int) -> Tensor:
        """Of one step."""
        return torch.randn(self.tokens[0], WIDTH, generator=torch.Generator().manual_seed(index))


def tiny(units: int) -> TinyTask:
    """The task with so many units."""
    return TinyTask(WIDTH, units, (8, 1), "32-true", torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------------
# By ranks


def _numel(size: tuple[int, int]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(*size).parameters())


def planned(worlds: list[int], size: tuple[int, int]) -> list[dict[str, Any]]:
    """Seconds and bytes of plans for a large model in 16 bits with float32 masters and Adam."""
    with torch.device("meta"):
        model = GPT(*size)
    found = []
    for stage in (1, 2, 3):
        for world_size in worlds:
            start = time.perf_counter()
            plan = build_plan(model, stage=stage, world_size=world_size, units=["Block"], param_dtype=torch.bfloat16)
            plan.fingerprint()
            seconds = time.perf_counter() - start
            rest, peak = (plan.expected_memory(receive_buffer=False, peak=peak).total for peak in (False, True))
            found.append({"stage": stage, "ranks": world_size, "seconds": seconds, "rest": rest, "peak": peak})
    return found


def set_up(worlds: list[int], size: tuple[int, int], steps: int) -> list[dict[str, Any]]:
    """Seconds until one rank of a fake world can train, and of its steps. In processes of their own."""
    task = fake_world.Task(*size, (1, 8), "32-true", torch.device("cpu"))
    found = []
    for name in ("zero1", "zero2", "zero3", "fsdp2"):
        for world_size in worlds:
            world = World(1, partial(_set_up, name, task, world_size), fake_size=world_size, threads=1)
            try:
                (report,) = world.turn(steps)
            finally:
                world.close()
            seconds = statistics.median(report.seconds)
            found.append({"way": name, "ranks": world_size, **report.extra, "step": seconds})
    return found


def _set_up(name: str, task: fake_world.Task, world_size: int, turns: Turns) -> None:
    torch.set_flush_denormal(True)  # weights that no other rank sends become tiny numbers, with which all is slow
    start = time.perf_counter()
    way = fake_world.rows()[name].make(task, world_size)
    seconds = time.perf_counter() - start
    turns.at_end = lambda: {"set_up": seconds}
    train(way.step, task, turns)


# ---------------------------------------------------------------------------------------------------------------------
# By units


def train(step: Callable[[Tensor], Tensor], task: fake_world.Task, turns: Turns) -> None:
    """Until the turns are over."""
    while turns.more():
        turns.note(step(task.batch(turns.index)))


def way(task: fake_world.Task, turns: Turns, *, name: str) -> None:
    """A way of ``fake_world`` on one rank."""
    train(fake_world.rows()[name].make(task, 1).step, task, turns)


def _in_trainer(strategy: Callable[[], Any]) -> Callable[..., None]:
    return partial(lightning, strategy=strategy, clip_at=None)


WAYS: dict[str, Engine] = {
    "ddp": Engine("DDP", 0, partial(way, name="ddp")),
    "plain": Engine("PyTorch alone", 0, partial(way, name="plain")),
    "fsdp2": Engine("FSDP2", 3, partial(way, name="fsdp2")),
    **{f"zero{s}": Engine(f"zero{s}", s, partial(way, name=f"zero{s}"), ours=True) for s in (1, 2, 3)},
    "trainer-ddp": Engine("DDP in a Trainer", 0, _in_trainer(trainer_ddp)),
    **{
        f"trainer-zero{s}": Engine(
            f"zero{s} in a Trainer", s, _in_trainer(partial(ZeroStrategy, s, units=["Block"])), ours=True
        )
        for s in (1, 2, 3)
    },
}


def by_units(counts: list[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Seconds of a step of each way, all of them in turns."""
    found = []
    for units in counts:
        worlds = {name: World(1, partial(engine.train, tiny(units)), threads=1) for name, engine in WAYS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        cpu: dict[str, list[float]] = {name: [] for name in WAYS}
        losses: dict[str, list[float]] = {name: [] for name in WAYS}
        try:
            for turn in range(rounds + 1):
                for name, world in worlds.items():
                    (report,) = world.turn(steps)
                    losses[name] += report.losses
                    if turn:
                        seconds[name].append(statistics.median(report.seconds))
                        cpu[name].append(min(report.cpu))
        finally:
            for world in worlds.values():
                world.close()
        for name, engine in WAYS.items():
            base = "trainer-ddp" if name.startswith("trainer") else "ddp"
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))
            row = {"way": name, "label": engine.label, "ours": engine.ours, "units": units, "ratio": ratio}
            row["cpu"] = min(cpu[name]) / min(cpu[base])
            found.append({**row, "seconds": statistics.median(seconds[name]), "same": losses[name] == losses["ddp"]})
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Telling


def show_worlds(plans: list[dict[str, Any]], starts: list[dict[str, Any]], worlds: list[int]) -> None:
    """Tables by ranks."""
    print("\nplan" + " " * 22 + "".join(f"{world_size:>10}" for world_size in worlds) + " ranks")
    for stage in (1, 2, 3):
        rows = [row for row in plans if row["stage"] == stage]
        print(f"zero{stage:<9}{'seconds':>12}" + "".join(f"{row['seconds']:10.3f}" for row in rows))
        print(f"{'':14}{'GB at rest':>12}" + "".join(f"{row['rest'] / 1e9:10.2f}" for row in rows))
        print(f"{'':14}{'GB at peak':>12}" + "".join(f"{row['peak'] / 1e9:10.2f}" for row in rows))
    print("\nset-up and steps" + " " * 10 + "".join(f"{world_size:>10}" for world_size in worlds) + " ranks")
    for name in dict.fromkeys(row["way"] for row in starts):
        rows = [row for row in starts if row["way"] == name]
        label = fake_world.rows()[name].label
        print(f"{label:14}{'seconds':>12}" + "".join(f"{row['set_up']:10.3f}" for row in rows))
        print(f"{'':14}{'ms a step':>12}" + "".join(f"{1000 * row['step']:10.1f}" for row in rows))


def show_units(rows: list[dict[str, Any]]) -> None:
    """The table by units."""
    counts = sorted({row["units"] for row in rows})
    print("\nms a step (to DDP)" + " " * 4 + "".join(f"{units:>18}" for units in counts) + " units  µs more for each")
    for name, engine in WAYS.items():
        mine = [row for row in rows if row["way"] == name]
        line = "".join(f"{1000 * row['seconds']:9.2f} ({row['ratio']:5.2f}x)" for row in mine)
        slope = (mine[-1]["seconds"] - mine[0]["seconds"]) / max(1, mine[-1]["units"] - mine[0]["units"])
        same = "" if all(row["same"] for row in mine) else "  other losses than DDP's"
        print(f"{engine.label:22}{line}{1e6 * slope:12.0f}{same}")
    print("in a Trainer: to DDP in a Trainer")
    most = [row for row in rows if row["units"] == counts[-1]]
    ratios = ", ".join(f"{WAYS[row['way']].label} {row['cpu']:.2f}x" for row in most)
    print(f"CPU time of the quickest step, to DDP's: {ratios}")


def plot(case: dict[str, Any], folder: Path) -> None:
    """``scaling.svg``: what a rank holds, by ranks; ``units.svg``: what a step of many tiny units takes."""
    most = max(row["units"] for row in case["units"])
    results.bars(
        folder / "units.svg",
        f"Time of a step of {most} tiny units on one rank (no communication)",
        "milliseconds",
        [
            results.Bar(row["label"], 1000 * row["seconds"], f"{1000 * row['seconds']:.1f}", ours=row["ours"])
            for row in case["units"]
            if row["units"] == most
        ],
    )
    drawn = results.figure(1, 1, (results.WIDTH, 4))
    if drawn is None:
        return
    picture, ((field,),) = drawn
    numel = _numel(LARGE)
    lines = {"DDP": {row["ranks"]: DDP_NBYTES * numel for row in case["plan"]}}
    for row in case["plan"]:
        lines.setdefault(f"zero{row['stage']}", {})[row["ranks"]] = row["rest"]
    for (name, line), colour in zip(lines.items(), ("#8c959f", "#e0a100", "#e6550d", "#4c8fc0"), strict=True):
        ranks, held = list(line), [nbytes / 1e9 for nbytes in line.values()]
        field.plot(ranks, held, "o-", color=colour)
        field.annotate(
            f"  {name}: {held[-1]:,.3g} GB" if held[-1] < 1000 else f"  {name}: {held[-1]:,.0f} GB",
            (ranks[-1], held[-1]),
            va="center",
        )
    field.set_xscale("log", base=2)
    field.set_yscale("log")
    field.set_xticks(ranks, [str(number) for number in ranks])
    field.set_xlim(ranks[0] / 1.3, ranks[-1] * 6)
    field.set_xlabel("ranks")
    field.set_ylabel("GB on each rank")
    field.yaxis.set_major_formatter("{x:,g}")
    for side in ("top", "right"):
        field.spines[side].set_visible(False)
    title = f"{numel / 1e9:.0f} billion parameters, bf16-mixed, Adam: memory of each rank between steps (computed)"
    picture.suptitle(title, x=0.01, ha="left")
    results.save_figure(picture, folder / "scaling.svg")


def main() -> None:
    """Measure, print the tables, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096], help="numbers of ranks")
    parser.add_argument("--blocks", type=int, default=24, help="of the model that is set up (default: %(default)s)")
    parser.add_argument("--units", type=int, nargs="+", default=[25, 50, 100, 200], help="numbers of tiny units")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps in a turn (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and plot")
    parser.add_argument("--draw", action="store_true", help="measure nothing: only draw what the folder has")
    options = parser.parse_args()
    if options.draw:
        return plot(results.load(options.results / "scaling.json")[0], options.results)
    torch.set_num_threads(1)  # what is forked must not have started more
    run = results.circumstances()
    print(results.headline(run))
    plans = planned(options.worlds, LARGE)
    starts = set_up(options.worlds, (256, options.blocks), min(options.steps, 5))  # these are long
    show_worlds(plans, starts, options.worlds)
    units = by_units(options.units, options.rounds, options.steps)
    show_units(units)
    case = {"name": "scaling", "plan": plans, "set_up": starts, "units": units, "run": run}
    results.save(options.results / "scaling.json", [case], ("name",))
    plot(case, options.results)


if __name__ == "__main__":
    main()
