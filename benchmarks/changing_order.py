"""What it costs that the order of units changes: layer dropout in zero3, beside DDP with the same layers dropped.

    python benchmarks/changing_order.py

A stack of blocks is trained by two processes, which leave blocks out: none, the same third in every step, or another
third in every step, by all processes alike or by each on its own. Worlds take turns. Shown are medians of the rounds:
milliseconds of a step and what all processors computed for it, both as ratios to DDP's with the same blocks left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from worlds import Turns, World

from lightning_zero import ZeroStrategy

CASES = ("none left out", "the same third", "another third, alike", "another third, each its own")


class Block(nn.Module):
    """A perceptron with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Batches(IterableDataset[int]):
    """Numbers of steps, as long as there are turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def __iter__(self) -> Iterator[int]:
        while self.turns.more():
            yield self.turns.index


class Dropping(pl.LightningModule):
    """A stack that leaves blocks out as its case says."""

    def __init__(self, case: str, turns: Turns, width: int, blocks: int, rows: int) -> None:
        super().__init__()
        self.case, self.turns, self.width, self.rows = case, turns, width, rows
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def left_out(self, step: int) -> set[int]:
        count = len(self.blocks)
        if self.case == CASES[0]:
            return set()
        seeds = {CASES[1]: "fixed", CASES[2]: f"{step}", CASES[3]: f"{step} {dist.get_rank()}"}
        return set(random.Random(seeds[self.case]).sample(range(count), count // 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.randn(self.rows, self.width)
        skipped = self.left_out(int(batch))
        for index, block in enumerate(self.blocks):
            x = x if index in skipped else block(x)
        loss = x.pow(2).mean()
        self.turns.note(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def train(case: str, strategy: Callable[[], Any], sizes: dict[str, int], turns: Turns) -> None:
    """One world's run."""
    trainer = pl.Trainer(
        strategy=strategy(),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Dropping(case, turns, **sizes), DataLoader(Batches(turns), batch_size=None))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=256, help="tokens of a process and step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    options = parser.parse_args()
    sizes = {"width": options.width, "blocks": options.blocks, "rows": options.rows}
    strategies: dict[str, Callable[[], Any]] = {
        "DDP": partial(DDPStrategy, find_unused_parameters=True),
        "zero3": partial(ZeroStrategy, 3, units=["Block"]),
    }
    print(f"{'':<30}{'DDP, ms':>10}{'zero3, ms':>12}{'to DDP':>10}{'CPU, to DDP':>14}")
    for case in CASES:
        worlds = {name: World(2, partial(train, case, make, sizes)) for name, make in strategies.items()}
        wall: dict[str, list[float]] = {name: [] for name in worlds}
        cpu: dict[str, list[float]] = {name: [] for name in worlds}
        try:
            for _ in range(options.rounds):
                for name, world in worlds.items():
                    reports = world.turn(options.steps)
                    wall[name].append(statistics.mean(reports[0].seconds))
                    cpu[name].append(sum(statistics.mean(report.cpu) for report in reports))
        finally:
            for world in worlds.values():
                world.close()
        ratios = [
            statistics.median(own / other for own, other in zip(found["zero3"], found["DDP"], strict=True))
            for found in (wall, cpu)
        ]
        times = [1000 * statistics.median(wall[name]) for name in ("DDP", "zero3")]
        print(f"{case:<30}{times[0]:>10.0f}{times[1]:>12.0f}{ratios[0]:>10.2f}{ratios[1]:>14.2f}")


if __name__ == "__main__":
    main()
