"""A LightningModule as users write them, trained by a real Trainer under DDP and under every stage in one world.

``each_strategy(play)`` gives ``play(strategy)`` of both ranks under ``"ddp"`` and under each stage; ``assert_same``
compares what it returned, bit for bit unless a bound is given.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

__all__ = [
    "STAGES",
    "Memory",
    "Net",
    "again",
    "assert_same",
    "batches",
    "each_strategy",
    "fit",
    "made",
    "name_of",
    "quiet",
    "raised",
    "under_ddp_and_stages",
    "values_of",
    "zero",
]

STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3}
Play = Callable[[Strategy], dict[str, Any]]


class Net(pl.LightningModule):
    """A small regression. Its data depend on rank, epoch and batch index only, so that a resumed run sees the same."""

    def __init__(self, build: Callable[[], nn.Module] = Stack, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = build()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def data(self, batch_idx: int, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        epoch = self.current_epoch if epoch is None else epoch
        generator = torch.Generator().manual_seed(10_000 * epoch + 100 * batch_idx + dist.get_rank())
        both = torch.randn(2, 3, WIDTH, generator=generator)
        return both[0], both[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx, epoch=77)
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.data(batch_idx, epoch=78)
        self.log("test_loss", F.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(self.data(batch_idx, epoch=79)[0])

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


class Memory(Logger):
    """Keeps what was logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = version = "memory"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice; other warnings stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", ".*treespec.*LeafSpec.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*The .grad attribute of a Tensor that is not a leaf.*")  # Dynamo, tracing
        warnings.filterwarnings("ignore", ".*exists and is not empty.*")  # folders of checkpoints, in resumed runs
        yield


def silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without what FSDP and DCP warn of, which changes with every version of torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call


def zero(stage: int, **options: Any) -> ZeroStrategy:
    """The strategy with the blocks of ``Stack`` as units."""
    return ZeroStrategy(stage=stage, **{"units": ["Block"], **options})  # type: ignore[arg-type]


def name_of(strategy: Strategy) -> str:
    """``"ddp"`` or ``"stage 3"``."""
    if not isinstance(strategy, ZeroStrategy):
        return "ddp"
    return f"stage {1 + strategy.placement.shards_gradients + strategy.placement.shards_parameters}"


def again(strategy: Strategy) -> Strategy:
    """A fresh strategy of the same kind, for another Trainer."""
    name = name_of(strategy)
    return zero(STAGES[name]) if name in STAGES else DDPStrategy(find_unused_parameters=True)


def batches(count: int) -> DataLoader[Any]:
    """A loader of ``count`` batches for ``Net``, which makes the data itself."""
    return DataLoader(range(count), batch_size=1)  # type: ignore[arg-type]


def fit(strategy: Strategy, module: pl.LightningModule, count: int = 4, val: int = 0, **options: Any) -> pl.Trainer:
    """Fit ``module`` on ``count`` batches per epoch and validate on ``val``. Collective."""
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, batches(count), batches(val) if val else None)
    return trainer


def values_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """All weights and buffers, whole. Collective."""
    with full_parameters(module):
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


def made(module: Net, trainer: pl.Trainer) -> dict[str, Any]:
    """What a run must not differ in. Collective."""
    metrics = {name: value.detach() for name, value in trainer.callback_metrics.items()}
    return {
        "losses": list(module.losses),
        "metrics": metrics,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weights": values_of(module),
    }


def under_ddp_and_stages(play: Play) -> dict[str, dict[str, Any]]:
    """``play`` under each strategy in turn, in this world."""
    strategies: dict[str, Callable[[], Strategy]] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True)}
    strategies |= {name: lambda stage=stage: zero(stage) for name, stage in STAGES.items()}  # type: ignore[misc]
    results = {}
    for name, make in strategies.items():
        torch.manual_seed(1234)
        with quiet():
            results[name] = play(make())
    return results


def each_strategy(play: Play, world_size: int = 2, timeout: float = 200) -> list[dict[str, dict[str, Any]]]:
    """The results of ``play(strategy)`` by strategy, for each rank of one world."""
    return run_world(world_size, lambda rank: under_ddp_and_stages(play), timeout=timeout)


def assert_same(
    results: Sequence[Mapping[str, dict[str, Any]]],
    names: Sequence[str] = tuple(STAGES),
    bound: float = 0.0,
    expected: str = "ddp",
) -> None:
    """On every rank, each of ``names`` made what ``expected`` made.

    Args:
        results: what ``each_strategy`` gave.
        names: the strategies to look at.
        bound: largest relative difference of two tensors; 0: every bit counts.
        expected: the strategy to compare with.
    """
    for rank, by_name in enumerate(results):
        for name in names:
            found = _differences(by_name[expected], by_name[name], bound, "")
            assert not found, f"rank {rank}, {name} against {expected}:\n" + "\n".join(found[:10])


def _differences(left: Any, right: Any, bound: float, at: str) -> list[str]:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _tensor_difference(left, right, bound, at)
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{at}: {sorted(map(str, left.keys() ^ right.keys()))} on one side only"]
        return [line for key in left for line in _differences(left[key], right[key], bound, f"{at}/{key}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{at}: {len(left)} and {len(right)} entries"]
        return [
            line
            for i, (a, b) in enumerate(zip(left, right, strict=True))
            for line in _differences(a, b, bound, f"{at}/{i}")
        ]
    if isinstance(left, float) and isinstance(right, float) and bound:
        same = abs(left - right) <= bound * max(abs(left), 1e-3)
    else:
        same = left == right
    return [] if same else [f"{at}: {left!r} and {right!r}"]


def _tensor_difference(left: Tensor, right: Tensor, bound: float, at: str) -> list[str]:
    if left.shape != right.shape or left.dtype != right.dtype:
        return [f"{at}: {left.dtype} {(*left.shape,)} and {right.dtype} {(*right.shape,)}"]
    if torch.equal(left, right):
        return []
    exact = torch.promote_types(left.dtype, torch.float64)  # or a complex type
    error = (left.to(exact) - right.to(exact)).abs().max().item() / max(left.abs().max().item(), 1e-3)
    return [] if error <= bound else [f"{at}: relative difference {error:.3g}"]


@contextlib.contextmanager
def raised(errors: list[str]) -> Any:
    """Note an exception instead of letting it through: a rank that leaves takes the others' connections with it."""
    try:
        yield
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
