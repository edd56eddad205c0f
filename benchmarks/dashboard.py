"""What the monitors of a run have logged, as one picture: memory, traffic and time of steps, measured and by plan.

It draws the ``metrics.csv`` of any run with a ``CSVLogger``, a ``MemoryMonitor`` and a ``CommunicationMonitor``
(``--metrics``), and else trains a small GPT on 2 CPU ranks in stage 3 and draws that.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.loggers import CSVLogger
from offload_training import GPT, VOCABULARY, free_port, quiet
from results import FOLDER, WIDTH, figure, save_figure
from torch.utils.data import DataLoader
from worlds import restart_with

from lightning_zero import CommunicationMonitor, MemoryMonitor, ZeroStrategy

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Large buffers go back to the system: else the process keeps free gaps between them, and its peak grows for long."""
Series = tuple[list[int], list[float]]
"""Steps, and a value of each."""


def _run(rank: int, chosen: Mapping[str, Any], folder: str, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE="2",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    quiet()
    torch.manual_seed(0)
    every = chosen["every"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(stage=chosen["stage"], units=["Block"]),
        max_epochs=1,
        log_every_n_steps=every,
        callbacks=[MemoryMonitor(every_n_steps=every), CommunicationMonitor(every_n_steps=every)],
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    tokens = torch.randint(0, VOCABULARY, (chosen["steps"], 2, 65))
    trainer.fit(GPT(chosen["width"], chosen["layers"]), DataLoader(tokens, batch_size=None))


def read(path: Path) -> dict[str, Series]:
    """The monitors' metrics in a ``metrics.csv``, by name."""
    found: dict[str, Series] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name.startswith("zero/") and value:
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(int(row["step"]))
                    values.append(float(value))
    return found


def draw(metrics: Mapping[str, Series], title: str, path: Path) -> None:
    """Three fields: memory at rest and at the peak, and traffic; what was measured, and dashed what was planned."""
    drawn = figure(3, 1, (WIDTH, 9))
    if drawn is None:
        return
    picture, fields = drawn
    rest, peak, traffic = fields[:, 0]
    rest.set_title("memory of the engine between steps, MB")
    _stack(rest, metrics, "zero/memory/rest/", 1e-6, ("total", "ratio"))
    _line(rest, metrics, "zero/memory/expected_rest/total", 1e-6, "by plan", planned=True)
    peak.set_title("memory at the peak of a step, MB")
    _line(peak, metrics, "zero/memory/process/peak", 1e-6, "whole process")
    _line(peak, metrics, "zero/memory/device/peak", 1e-6, "whole device")
    _line(peak, metrics, "zero/memory/peak/total", 1e-6, "engine")
    _line(peak, metrics, "zero/memory/expected_peak/total", 1e-6, "engine, by plan", planned=True)
    traffic.set_title("collectives of a step, MB of full buffers")
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        _line(traffic, metrics, f"zero/traffic/{kind}/nbytes", 1e-6, kind)
        _line(traffic, metrics, f"zero/traffic/{kind}/expected_nbytes", 1e-6, f"{kind}, by plan", planned=True)
    for field in (rest, peak, traffic):
        field.set_xlabel("step")
        field.set_ylim(bottom=0, top=1.15 * field.get_ylim()[1])
        field.spines[["top", "right"]].set_visible(False)
        field.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    picture.suptitle(title, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(picture, path)


def _line(
    field: Any, metrics: Mapping[str, Series], name: str, scale: float, label: str, planned: bool = False
) -> None:
    steps, values = metrics.get(name, ([], []))
    if any(values):
        style = {"color": "black", "linestyle": "--", "linewidth": 1} if planned else {"marker": "o", "markersize": 3}
        field.plot(steps, [value * scale for value in values], label=label, **style)


def _stack(field: Any, metrics: Mapping[str, Series], prefix: str, scale: float, but: tuple[str, ...]) -> None:
    names = [name for name in metrics if name.startswith(prefix) and name.removeprefix(prefix) not in but]
    parts = {name: dict(zip(*metrics[name], strict=True)) for name in names if any(metrics[name][1])}
    steps = sorted({step for part in parts.values() for step in part})
    labels = [name.removeprefix(prefix).replace("_", " ") for name in parts]
    heights = [[part.get(step, 0.0) * scale for step in steps] for part in parts.values()]
    if heights:
        field.stackplot(steps, heights, labels=labels, alpha=0.8)


def main() -> None:
    """Train unless there are metrics already, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, help="the metrics.csv of a run, instead of training one")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps from one measured step to the next")
    parser.add_argument("--output", type=Path, default=FOLDER / "dashboard.svg", help="the picture")
    options = parser.parse_args()
    if options.metrics is not None:
        return draw(read(options.metrics), str(options.metrics), options.output)
    restart_with(MALLOC)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (vars(options), folder, free_port()), nprocs=2, start_method="fork")
        metrics = read(Path(folder) / "metrics.csv")
    print(f"{len(metrics)} metrics of {options.steps} steps")
    draw(metrics, f"What the monitors logged: zero{options.stage}, 2 CPU ranks, rank 0", options.output)


if __name__ == "__main__":
    main()
