"""One architecture under DDP and in every stage: four steps of two processes, with different data and dropout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.helpers.runs import STAGES, assert_same, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

__all__ = ["Architecture", "hold", "listed"]

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model with random weights, and what it is trained on.

    Args:
        library: where it is from.
        name: in that library.
        build: makes it.
        loss: of the model, drawing its own data: they depend on rank and step alone.
        accumulate: micro-steps per step. More than one is compared with a bound, since stages 2 and 3 sum in another
            order than DDP: in double precision, and with an optimizer that does not divide by what is small.
        clip: by value, if any.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    accumulate: int = 1
    clip: float | None = None


def listed(
    library: str, table: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]]
) -> list[Architecture]:
    """What is played of a library: every fifth with two micro-steps, every third with clipping."""
    return [
        Architecture(
            library=library,
            name=name,
            build=build,
            loss=loss,
            accumulate=2 if number % 5 == 1 else 1,
            clip=0.01 if number % 3 == 2 else None,
        )
        for number, (name, (build, loss)) in enumerate(table.items())
    ]


class _Trained(pl.LightningModule):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.architecture = architecture
        self.model = architecture.build().train()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.manual_seed(1000 * batch_idx + dist.get_rank())
        loss = self.architecture.loss(self.model)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.architecture.accumulate > 1:
            return torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        return torch.optim.AdamW(trained, lr=0.001)


def _play(architecture: Architecture, strategy: Strategy) -> dict[str, Any]:
    if architecture.accumulate > 1:
        torch.set_default_dtype(torch.float64)
    module = _Trained(architecture)
    options: dict[str, Any] = {"accumulate_grad_batches": architecture.accumulate}
    if architecture.clip is not None:
        options |= {"gradient_clip_val": architecture.clip, "gradient_clip_algorithm": "value"}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, DataLoader(range(STEPS), batch_size=1))  # type: ignore[arg-type]
    return {"losses": module.losses, "weights": values_of(module)}


def hold(architecture: Architecture) -> None:
    """Compare losses, weights and buffers of all stages with DDP's, bit for bit where sums are in one order.

    Raises:
        AssertionError: if something differs.
    """

    def world(rank: int) -> dict[str, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a library's own
            results = {"ddp": _play(architecture, DDPStrategy(find_unused_parameters=True))}
            for name, stage in STAGES.items():
                results[name] = _play(architecture, ZeroStrategy(stage=stage))  # type: ignore[arg-type]
        return results

    results = run_world(2, world, timeout=200)
    first = results[0]["ddp"]["losses"]
    assert len(first) == STEPS
    assert all(bool(loss.isfinite()) for loss in first)
    if architecture.accumulate == 1:
        assert_same(results)
    else:
        assert_same(results, ["stage 1"])
        assert_same(results, ["stage 2", "stage 3"], bound=1e-5)
