"""What each stage costs on one GPU: seconds, memory and kernels beside plain PyTorch and FSDP2, without a wire.

    python benchmarks/gpu.py --first-look   # ten minutes of everything: see first_look.py
    python benchmarks/gpu.py
    python benchmarks/gpu.py --presets 1.3b 7b --modes eager --rounds 3
    python benchmarks/gpu.py --device cpu --width 64 --layers 2 --tokens 2 16 --rounds 1 --steps 1 --modes eager

World 1 is what a single GPU is used for; a fake world of 8 holds an eighth of what is sharded, and its collectives are
answered at once. So this is the cost of everything but the wire. All ways of a table are in memory at once and take
turns; a ratio is that of two turns of the same round. In bf16-mixed plain PyTorch and DDP compute under autocast, and
FSDP2 and DeepSpeed without, as this package does but with --autocast.

A preset has the blocks of a model of that size, and so few of them that all ways fit on 80 GB. What is printed of the
whole model is not measured: its tokens per second are these, by the ratio of FLOPs. MFU counts 6 FLOPs for each
parameter and token, and 12 x layers x width x length for the attention, as PaLM does (arXiv:2204.02311, appendix B),
against the dense rate that the maker of the device gives for bf16.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if missing := [name for name in ("torch", "lightning", "jsonargparse") if importlib.util.find_spec(name) is None]:
    sys.exit(f"Not installed: {', '.join(missing)}. In a clone of the repository: pip install -e .")

import torch
from fake_world import PRECISIONS, Task, Way, fake_world, rows
from offload_training import numel_of, quiet
from results import FOLDER, circumstances, figure, headline, save_figure
from torch.profiler import DeviceType, ProfilerActivity, profile, supported_activities

from lightning_zero.errors import readable_size
from lightning_zero.extensions.planner.costs import OptimizerCost

# Moves, fills, casts and collectives, as kernels on CUDA and as operators on the CPU.
MOVES = re.compile(r"mem(cpy|set)|copy|fill|zero_|\bcat\b|CatArray|chunk_cat|split_with_sizes|nccl|c10d", re.IGNORECASE)
# Dense bf16 TFLOP/s by the name of the device, as their makers give them; the first that the name contains.
PEAKS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
}
WARM_UP_STEPS = 3
PROFILED_STEPS = 2
FAILED: list[str] = []  # ways that could not be set up


@dataclass(frozen=True)
class Preset:
    """The blocks of a model.

    Args:
        width: of the model.
        layers: that are measured.
        whole: layers of the model that has its name.
        tokens: sequences in a batch, and their length.
    """

    width: int
    layers: int
    whole: int
    tokens: tuple[int, int]


PRESETS = {"1.3b": Preset(2048, 4, 24, (4, 2048)), "7b": Preset(4096, 2, 32, (2, 2048))}


def flops(width: int, layers: int, length: int) -> float:
    """Of one token, forward and backward."""
    return 6.0 * numel_of(width, layers) + 12.0 * layers * width * length


def peak_of(name: str, precision: str) -> float | None:
    """FLOP/s of a device that ``PEAKS`` knows; float32 is computed as TF32, at half of bf16's rate."""
    found = next((rate for part, rate in PEAKS.items() if part in name), None)
    if found is None:
        return None
    return found * 1e12 / (2 if precision == "32-true" else 1)


@dataclass
class Found:
    """One line of the table.

    Args:
        mode: ``eager`` or ``compile``.
        world_size: of the fake world.
        way: its name.
        seconds: of a step, by round.
        ratios: to plain PyTorch in the same round.
        tokens_per_second: at the median step.
        mfu: of the device's peak; ``None`` if that is not known.
        peak_nbytes: most that the allocator had handed out during a step, and the way's own share of it at rest.
        plan_nbytes: at the peak by plan, without activations.
        kernels: of a step.
        moves: those of them that only move, fill or cast.
        move_seconds: what these take on the device.
        busy_seconds: of a step, in which the device runs any.
        loss_difference: largest relative one to plain PyTorch; of world 1 only, a fake one computes with wrong values.
    """

    mode: str
    world_size: int
    way: str
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    mfu: float | None = None
    peak_nbytes: int | None = None
    rest_nbytes: int | None = None
    plan_nbytes: int | None = None
    kernels: float = 0.0
    moves: float = 0.0
    move_seconds: float = 0.0
    busy_seconds: float = 0.0
    loss_difference: float | None = None


class Runner:
    """One way with its place in the data.

    Args:
        way: to train.
        task: that it trains on.
    """

    def __init__(self, way: Way, task: Task) -> None:
        self.way = way
        self.losses: list[float] = []
        self._task = task
        self._index = 0

    def steps(self, count: int) -> float:
        """Seconds of a step, the device's work included."""
        batches = [self._task.batch(self._index + step) for step in range(count)]
        self._index += count
        synchronize(self._task.device)
        begin = time.perf_counter()
        losses = [self.way.step(batch).detach() for batch in batches]
        synchronize(self._task.device)
        seconds = (time.perf_counter() - begin) / count
        self.losses += [float(loss) for loss in losses]
        return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """What tensors hold on it."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def seen_on(device: torch.device) -> list[ProfilerActivity]:
    """What a profiler sees of the work on a device. Of a simulated one that is the host's."""
    on_cuda = device.type == "cuda" and ProfilerActivity.CUDA in supported_activities()
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]


def kernels_of(runner: Runner, device: torch.device) -> dict[str, float]:
    """Kernels of a step (on the CPU: operators that no other one calls), those that only move, and seconds of both."""
    activities = seen_on(device)
    on_cuda = ProfilerActivity.CUDA in activities
    with profile(activities=activities) as profiler:
        runner.steps(PROFILED_STEPS)
    found: list[tuple[float, float, str]] = []
    for event in profiler.events():
        if event.is_user_annotation or "annotation" in (getattr(event, "activity_type", None) or ""):
            continue  # a labelled range, which a profiler shows on the device too
        on_host = not on_cuda and event.name.startswith("aten::") and not event.cpu_children
        if on_host or (on_cuda and event.device_type == DeviceType.CUDA):
            found.append((event.time_range.start, event.time_range.end, event.name))
    moves = [end - start for start, end, name in found if MOVES.search(name)]
    busy, until = 0.0, 0.0
    for start, end, _ in sorted(found):  # those of several streams overlap
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    counted = {"kernels": len(found), "moves": len(moves), "move_seconds": sum(moves) / 1e6, "busy_seconds": busy / 1e6}
    return {name: number / PROFILED_STEPS for name, number in counted.items()}


def planned_peak(way: Way, device: torch.device) -> int | None:
    """Bytes at the peak by plan, without activations; ``None`` for what this package does not train."""
    if way.plan is None:
        return None
    fused = OptimizerCost.of("AdamW", fused=True)  # as the task's is: its step makes nothing
    accelerator = device.type != "cpu"
    return way.plan.expected_memory(optimizer=fused, receive_buffer=False, accelerator=accelerator, peak=True).total


def prepare(task: Task, found: Found) -> Runner:
    """Build a way, warm it up, and see what it holds. The others are there already and do nothing meanwhile."""
    before = allocated(task.device)
    runner = Runner(rows()[found.way].make(task, found.world_size), task)
    runner.steps(WARM_UP_STEPS)
    if task.device.type == "cuda":
        found.rest_nbytes = allocated(task.device) - before
        torch.cuda.reset_peak_memory_stats(task.device)
        runner.steps(1)
        found.peak_nbytes = torch.cuda.max_memory_allocated(task.device) - before
    else:
        runner.steps(1)
    found.plan_nbytes = planned_peak(runner.way, task.device)
    return runner


def compare(
    task: Task, mode: str, world_size: int, ways: Sequence[str], rounds: int, steps: int, peak: float | None
) -> list[Found]:
    """One table: all ways in the fake world that is open."""
    torch._dynamo.reset()
    lines = []
    runners = {}
    if world_size > 1:  # DeepSpeed refuses a group that is not there
        ways = [way for way in ways if not way.startswith("deepspeed")]
    for line in (Found(mode, world_size, way) for way in ways):
        print(f"{mode}, world {world_size}: {line.way} is set up", file=sys.stderr, flush=True)
        try:
            runners[line.way] = prepare(task, line)
            lines.append(line)
        except Exception as error:
            if line.way == "plain":
                raise
            print(f"{line.way} is left out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            traceback.print_exc()
            FAILED.append(f"{line.way} ({mode}, world {world_size})")
    for _ in range(rounds):
        turn = {line.way: runners[line.way].steps(steps) for line in lines}
        for line in lines:
            line.seconds.append(turn[line.way])
            line.ratios.append(turn[line.way] / turn["plain"])
    plain = list(runners["plain"].losses)
    for line in lines:
        if world_size == 1:
            pairs = zip(runners[line.way].losses, plain, strict=True)
            line.loss_difference = max(abs(loss - other) / abs(other) for loss, other in pairs)
        sequences, length = task.tokens
        line.tokens_per_second = sequences * length / statistics.median(line.seconds)
        line.mfu = line.tokens_per_second * flops(task.width, task.layers, length) / peak if peak else None
        for name, number in kernels_of(runners[line.way], task.device).items():
            setattr(line, name, number)
    runners.clear()
    gc.collect()
    return lines


def table(lines: Sequence[Found]) -> list[str]:
    """Lines for people."""
    header = (
        "blocks",
        "world",
        "way",
        "ms",
        "to plain",
        "tokens/s",
        "MFU",
        "peak",
        "plan",
        "kernels",
        "moving",
        "ms moving",
        "ms busy",
        "loss",
    )
    cells = [header]
    for line in lines:
        cells.append(
            (
                line.mode,
                str(line.world_size),
                rows()[line.way].label,
                f"{1000 * statistics.median(line.seconds):.2f}",
                f"{statistics.median(line.ratios):.3f}",
                f"{line.tokens_per_second:.0f}",
                "-" if line.mfu is None else f"{line.mfu:.1%}",
                "-" if line.peak_nbytes is None else readable_size(line.peak_nbytes),
                "-" if line.plan_nbytes is None else readable_size(line.plan_nbytes),
                f"{line.kernels:.0f}",
                f"{line.moves:.0f}",
                f"{1000 * line.move_seconds:.3f}",
                f"{1000 * line.busy_seconds:.2f}",
                "-" if line.loss_difference is None else f"{line.loss_difference:.0e}",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def plot(lines: Sequence[Found], title: str, path: Path) -> None:
    """Ratios as bars, a group for each world and mode; nothing without matplotlib."""
    drawn = figure(1, 1, (9, 4))
    if drawn is None:
        return
    axes = drawn[1][0][0]
    groups = list(dict.fromkeys((line.mode, line.world_size) for line in lines))
    ways = list(dict.fromkeys(line.way for line in lines if line.way != "plain"))
    ratios = {(line.mode, line.world_size, line.way): statistics.median(line.ratios) for line in lines}
    for number, way in enumerate(ways):
        bars = {place: ratios[(*group, way)] for place, group in enumerate(groups) if (*group, way) in ratios}
        places = [place + 0.8 * number / len(ways) for place in bars]
        axes.bar(places, list(bars.values()), 0.75 / len(ways), label=rows()[way].label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([place + 0.3 for place in range(len(groups))], [f"{mode}, world {size}" for mode, size in groups])
    axes.set_ylabel("seconds of a step, to plain PyTorch")
    axes.set_title(title)
    axes.legend()
    save_figure(drawn[0], path)


def machine(device: torch.device) -> dict[str, Any]:
    """What it was measured on, and with."""
    if device.type != "cuda":
        return circumstances()
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {readable_size(properties.total_memory)}, CUDA {torch.version.cuda}"
    return {**circumstances(), "device": name}


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, help="models instead of width, layers and tokens")
    parser.add_argument("--peak-tflops", type=float, help="of the device, instead of what is known of its name")
    parser.add_argument("--width", type=positive, default=1536, help="of the model")
    parser.add_argument("--layers", type=positive, default=16, help="of the model")
    parser.add_argument(
        "--tokens", type=positive, nargs=2, default=(8, 1024), help="sequences in a batch, and their length"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed")
    parser.add_argument("--autocast", action="store_true", help="in this package too")
    parser.add_argument("--worlds", type=positive, nargs="+", default=[1, 8], help="sizes of the fake worlds")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compile"], default=["eager", "compile"])
    parser.add_argument("--backend", default="inductor", help="what torch.compile uses for the blocks")
    parser.add_argument("--ways", nargs="+", choices=rows(), default=list(rows()), help="plain PyTorch is always there")
    parser.add_argument("--stop-after", type=float, default=8.5, help="minutes, after which no table begins")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=10, help="of a turn")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of JSON and plot")
    return parser.parse_args()


def main() -> None:
    """Measure, and print and write each table as soon as it is there: who has so many minutes may end this process."""
    if "--first-look" in sys.argv:
        import first_look

        first_look.main()
        return
    begin = time.monotonic()
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, and nothing was measured. --device cpu runs the same code; see --help.")
        return
    quiet()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64  # each way compiles the blocks anew
    about = machine(device)
    name = about.get("device", about["processor"])
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_of(name, options.precision)
    print(headline(about))
    print(f"Peak of {name}: {'not known' if peak is None else f'{peak / 1e12:g} TFLOP/s'}", flush=True)
    given = {"": Preset(options.width, options.layers, options.layers, tuple(options.tokens))}
    models = {name: PRESETS[name] for name in options.presets} if options.presets else given
    if "deepspeed1" not in rows():
        print("DeepSpeed is not installed, and left out.", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key != "output"} | {"peak": peak}
    saved: dict[str, Any] = {"machine": about, "settings": settings, "rows": []}
    deadline = begin + 60 * options.stop_after
    found: list[Found] = []
    for world_size in options.worlds:
        with fake_world(world_size):  # one for all models: DeepSpeed keeps its groups
            for label, model in models.items():
                place = {"place": device, "peak": peak, "name": name}
                for lines in measure(options, label, model, world_size, place, deadline):
                    found += lines
                    saved["rows"] += [{"model": label, **asdict(line)} for line in lines]
                    (options.output / "gpu.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if len(models) == 1 and found:
        plot(found, f"{options.precision}, {name}", options.output / "gpu.svg")
    if FAILED:
        sys.exit("These failed, with what is above: " + ", ".join(FAILED))


def measure(
    options: argparse.Namespace, label: str, model: Preset, world_size: int, about: dict[str, Any], deadline: float
) -> Iterator[list[Found]]:
    """The tables of a model in one world, each printed as soon as it is measured, if it can end in time."""
    ways = ["plain", *(way for way in options.ways if way != "plain")]
    device, peak, longest = about["place"], about["peak"], 0.0
    print(f"\n{numel_of(model.width, model.layers) / 1e6:.1f}M parameters, {options.precision}, {about['name']}")
    for mode in options.modes:
        begin = time.monotonic()
        if begin + longest > deadline:
            what = " ".join(filter(None, (label, mode)))
            print(f"Left out for want of time (--stop-after): {what}, world {world_size}", flush=True)
            continue
        backend = options.backend if mode == "compile" else None
        like = not options.autocast
        task = Task(model.width, model.layers, model.tokens, options.precision, device, backend, like)
        lines = compare(task, mode, world_size, ways, options.rounds, options.steps, peak)
        longest = max(longest, time.monotonic() - begin)
        print("\n" + "\n".join(table(lines)))
        if model.whole > model.layers and world_size == 1:
            length = model.tokens[1]
            ratio = flops(model.width, model.layers, length) / flops(model.width, model.whole, length)
            whole = numel_of(model.width, model.whole) / 1e9
            rates = ", ".join(f"{line.mode} {line.way} {line.tokens_per_second * ratio:.0f}" for line in lines)
            print(f"\nNot measured: {label} has {model.whole} such blocks, {whole:.2f}B parameters.")
            print(f"By FLOPs, tokens/s: {rates}")
        sys.stdout.flush()
        yield lines


if __name__ == "__main__":
    main()
