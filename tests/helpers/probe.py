"""Looking inside of a run: a case in a real Trainer with any optimizer, precision and callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.helpers.cases import Case
from tests.helpers.training import build, make_trainer, quiet

__all__ = ["Probe", "fit", "masters", "pairwise_mean", "pairwise_sum"]

MakeOptimizer = Callable[[pl.LightningModule], Any]


def adamw(module: pl.LightningModule) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)  # 1e-8 is 0 in fp16


class Probe(pl.LightningModule):
    """A case whose data come from the loader, as a user's do, so that the precision plugin converts them.

    Args:
        case: model, data and loss.
        make: what ``configure_optimizers`` returns.
    """

    def __init__(self, case: Case, make: MakeOptimizer = adamw) -> None:
        super().__init__()
        self.model = build(case)
        self.case, self.make = case, make
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.case.loss(self.model, batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self)


def fit(
    probe: pl.LightningModule,
    *,
    stage: int,
    micro_steps: int,
    callbacks: Sequence[pl.Callback] = (),
    options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    first: int = 0,
    **strategy: Any,
) -> pl.Trainer:
    """Train on ``micro_steps`` batches of the case. Collective: every rank of the default group.

    Args:
        probe: the module, with a ``case``.
        stage: of the strategy; ``strategy`` are its other settings.
        micro_steps: number of batches.
        callbacks: the Trainer's.
        options: further arguments of the Trainer.
        ckpt_path: where to go on from.
        first: the batch that the loader begins with; on resuming in an epoch Lightning skips counters, not data.
    """
    from lightning_zero import ZeroStrategy

    case: Case = probe.case  # type: ignore[assignment]
    settings = {"units": case.units, **strategy}
    with quiet():
        warnings.filterwarnings("ignore", ".*ended before the epoch ended and your dataloader is not resumable.*")
        trainer = make_trainer(ZeroStrategy(stage=stage, **settings), callbacks=list(callbacks), **(options or {}))
        batches = [case.batch(dist.get_rank(), (first + step) % micro_steps) for step in range(micro_steps)]
        trainer.fit(probe, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def masters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all full parameters. Collective."""
    from lightning_zero import full_parameters

    with full_parameters(module):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def pairwise_sum(pieces: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor per rank: neighbours, then pairs of neighbours, and so on."""
    while len(pieces) > 1:
        pairs = [a + b for a, b in zip(pieces[::2], pieces[1::2], strict=False)]
        pieces = pairs + list(pieces[2 * len(pairs) :])
    return pieces[0]


def pairwise_mean(tensor: Tensor) -> Tensor:
    """The average over all ranks, summed in the order in which the package does. Collective."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return pairwise_sum(pieces) / len(pieces) if len(pieces) > 1 else pieces[0]
