"""A training loop of one's own, without a Trainer: a network learns which of two spirals a point lies on.

    python examples/fabric_loop.py --strategy zero3 --devices 2 --steps 300

Fabric starts the second process, which runs the same program. At its end the loop saves a checkpoint directory. With
more ``--steps`` it goes on from there, also with other ``--devices`` and another ``--strategy``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers "zero1", "zero2" and "zero3")


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, ``[count, 2]``, and which spiral each belongs to: 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator).sqrt() * 2 * math.pi
    angle, noise = turn + math.pi * label, torch.randn(count, 2, generator=generator) / 20
    return torch.stack([angle.cos(), angle.sin()], dim=1) * turn.unsqueeze(1) / math.pi + noise, label


def main(arguments: argparse.Namespace) -> None:
    """Train, save, and print how many new points are told right."""
    options = {name: getattr(arguments, name) for name in ("strategy", "devices", "precision")}
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    layers = [module for _ in range(3) for module in (nn.Linear(64, 64), nn.GELU())]
    module = nn.Sequential(nn.Linear(2, 64), nn.GELU(), *layers, nn.Linear(64, 2))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
    loader: Any = fabric.setup_dataloaders(DataLoader(TensorDataset(*spirals(4096, 1)), batch_size=32, shuffle=True))

    state = {"model": model, "optimizer": optimizer, "micro_steps": 0}
    if arguments.checkpoint.exists():
        fabric.load(arguments.checkpoint, state)
        fabric.print(f"goes on after {state['micro_steps'] // arguments.accumulate} steps")
    while state["micro_steps"] < arguments.steps * arguments.accumulate:
        for points, label in loader:
            state["micro_steps"] += 1
            accumulating = state["micro_steps"] % arguments.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.cross_entropy(model(points), label)
                fabric.backward(loss)
            if accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if state["micro_steps"] >= arguments.steps * arguments.accumulate:
                break
    fabric.save(arguments.checkpoint, state)

    model.eval()
    points, label = spirals(1024, 2)
    with torch.no_grad():  # every process calls the model: each holds a part of it
        right = (model(points).argmax(dim=1) == label).float().mean()
    fabric.print(f"after {arguments.steps} steps {right:.1%} of new points are told right: {arguments.checkpoint}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", help="zero1, zero2, zero3, the same with _offload, or ddp")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, bf16-true, ...")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps, those of earlier runs included")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each optimizer step")
    parser.add_argument("--checkpoint", type=Path, default=Path("fabric_loop.ckpt"), help="where to save, and go on")
    main(parser.parse_args())
