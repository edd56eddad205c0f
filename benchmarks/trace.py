"""One training step, seen by torch's profiler: a labelled range for every unit and phase.

    python benchmarks/trace.py                                   # stage 3, fp32, 2 ranks on the CPU
    python benchmarks/trace.py --stage 2 --precision bf16-mixed
    python benchmarks/trace.py --device cuda --ranks 1 --width 1024 --layers 8

Writes, of rank 0, the trace for chrome://tracing or https://ui.perfetto.dev (``trace.json.gz``), and a picture with a
lane for each phase (``trace.svg``): what the host does. On a GPU the kernels are in the trace, and beneath each range
what it has placed on the streams.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from offload_training import GPT, VOCABULARY, free_port, quiet
from results import FOLDER, WIDTH, circumstances, figure, headline, save_figure
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

PREFIX = "zero: "
_CHARACTER = 0.0105  # of the picture's width
LANES = (
    "forward",
    "backward",
    "gather",
    "wait for gather",
    "reduce",
    "wait for reduce",
    "step",
    "publish",
    "wait for publish",
    "agree",
    "offload",
)
COLOURS = {"wait": "#c44e52", "forward": "#4c72b0", "backward": "#55a868", "step": "#8172b2", "agree": "#999999"}


@dataclass(frozen=True)
class Setting:
    """What to trace. Picklable."""

    stage: int
    precision: str
    device: str
    ranks: int
    width: int
    layers: int
    batch: int
    length: int
    warm_up: int
    folder: str


@dataclass(frozen=True)
class Range:
    """A stretch of the step, in microseconds from its beginning."""

    phase: str
    unit: str
    start: float
    end: float


class Tracer(pl.Callback):
    """Profiles the step behind the warm-up, from batch to batch."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        activities = [ProfilerActivity.CPU]
        if setting.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Start."""
        if batch_idx == self.setting.warm_up:
            self.profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop."""
        if batch_idx == self.setting.warm_up:
            self.profiler.stop()


def _run(rank: int, setting: Setting, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(setting.ranks),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    quiet()
    torch.manual_seed(0)
    tracer = Tracer(setting)
    tokens = torch.randint(0, VOCABULARY, (setting.warm_up + 1, setting.batch, setting.length))
    trainer = pl.Trainer(
        accelerator="gpu" if setting.device == "cuda" else "cpu",
        devices=setting.ranks,
        strategy=ZeroStrategy(stage=setting.stage, units=["Block"], bucket_mib=4.0),  # type: ignore[arg-type]
        precision=setting.precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[tracer] if rank == 0 else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(GPT(setting.width, setting.layers), DataLoader(tokens, batch_size=None))
    if rank == 0:
        folder = Path(setting.folder)
        tracer.profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        (folder / "ranges.json").write_text(json.dumps([asdict(found) for found in ranges_of(tracer.profiler)]))


def ranges_of(profiler: Any) -> list[Range]:
    """The engine's ranges in a profile, in the order in which they began."""
    events = [e for e in profiler.events() if e.name.startswith(PREFIX) and e.device_type.name == "CPU"]
    if not events:
        return []
    begin = min(event.time_range.start for event in events)
    found = []
    for event in events:
        title = event.name.removeprefix(PREFIX)
        phase = max((lane for lane in LANES if title == lane or title.startswith(lane + " ")), key=len)
        unit = title.removeprefix(phase).strip()
        found.append(Range(phase, unit, event.time_range.start - begin, event.time_range.end - begin))
    return sorted(found, key=lambda found: found.start)


def draw(ranges: list[Range], title: str, path: Path) -> None:
    """A lane for each phase that occurs, and in it a bar for each range, with the unit's name where there is room."""
    lanes = [lane for lane in LANES if any(found.phase == lane for found in ranges)]
    last = max(found.end for found in ranges)
    drawn = figure(1, 1, (WIDTH, 0.42 * len(lanes) + 1.1))
    if drawn is None:
        return
    axes = drawn[1][0][0]
    begin = max((found.end for found in ranges if found.phase == "forward"), default=0.0)
    end = min((found.start for found in ranges if found.phase == "backward" and found.start > begin), default=begin)
    if end > begin + 0.13 * last:  # the model's own forward goes on there, and its backward begins
        axes.axvspan(begin / 1000, end / 1000, facecolor="#8c959f", alpha=0.25, linewidth=0)
        text = "head and loss,\nforward and\nbackward (in\nno unit)"
        axes.text((begin + end) / 2000, len(lanes) - 1.5, text, ha="center", va="center", fontsize=8)
    for height, lane in enumerate(reversed(lanes)):
        colour = next((c for word, c in COLOURS.items() if lane.startswith(word)), "#dd8452")
        own = [found for found in ranges if found.phase == lane]
        axes.broken_barh(
            [(found.start / 1000, (found.end - found.start) / 1000) for found in own],
            (height - 0.35, 0.7),
            facecolors=colour,
            edgecolors="white",
            linewidth=0.3,
        )
        for found in own:
            room = (found.end - found.start) / last / _CHARACTER
            name = next((name for name in _names(found.unit) if len(name) < room), "")
            if name and lane != "agree":
                middle = (found.start + found.end) / 2000
                axes.text(middle, height, name, ha="center", va="center", fontsize=7, color="#fefefe")
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_xlabel("milliseconds since the step began")
    axes.set_xlim(0, last / 1000)
    drawn[0].suptitle(title, x=0.01, ha="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(drawn[0], path)


def _names(unit: str) -> list[str]:
    """What a unit may be called in a picture, from the longest to the shortest."""
    parts = unit.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def table(ranges: list[Range]) -> str:
    """Calls and milliseconds by phase."""
    lines = [f"{'phase':18}{'ranges':>8}{'ms':>10}"]
    for lane in LANES:
        own = [found.end - found.start for found in ranges if found.phase == lane]
        if own:
            lines.append(f"{lane:18}{len(own):8}{sum(own) / 1000:10.2f}")
    return "\n".join(lines)


def main() -> None:
    """Trace, and say where the trace and the picture are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    parser.add_argument("--length", type=int, default=65, help="tokens of a sequence")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the traced one")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of trace.json.gz and trace.svg")
    chosen = vars(parser.parse_args())
    output: Path = chosen.pop("output")
    if chosen["device"] == "cuda" and not torch.cuda.is_available():
        print("No GPU here: nothing to trace on one. Leave --device out to trace on the CPU.")
        return
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(**chosen, folder=folder)
        method = "spawn" if setting.device == "cuda" else "fork"  # the latter saves an import
        mp.start_processes(_run, (setting, free_port()), nprocs=setting.ranks, start_method=method)
        ranges = [Range(**found) for found in json.loads((Path(folder) / "ranges.json").read_text())]
        output.mkdir(parents=True, exist_ok=True)
        (output / "trace.json.gz").write_bytes((Path(folder) / "trace.json.gz").read_bytes())
    title = f"One training step of zero{setting.stage} ({setting.precision}, {setting.ranks} ranks): what rank 0 does"
    draw(ranges, title, output / "trace.svg")
    print(headline(circumstances()))
    print(table(ranges))
    print(f"\nwrote {output / 'trace.json.gz'}")


if __name__ == "__main__":
    main()
