"""Two trainers for one case: plain DDP in a hand-written loop, and ``ZeroStrategy`` in a real ``lightning.Trainer``.

Both leave a ``Record`` of everything a stage must not change: losses, every gradient before it is clipped, every
parameter at the end.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_gradients, full_parameters, grad_norm
from tests.helpers.cases import Case

__all__ = [
    "LightningCase",
    "Recipe",
    "Record",
    "build",
    "differences",
    "loss_of",
    "make_optimizer",
    "make_trainer",
    "order_changes",
    "quiet",
    "train_ddp",
    "train_zero",
]

Clip = Literal["value", "norm"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a case.

    Args:
        steps: optimizer steps; ``None``: what the case asks for.
        accumulate: micro-steps per step.
        clip: gradient clipping by value or by total norm, at ``clip_at``.
        double_norm: the reference clips by a norm computed in float64 (rounded once, at the end) instead of torch's,
            which sums in float32, tensor by tensor, and so depends on how parameters are cut.
        fused: the optimizer's ``fused`` setting.
    """

    steps: int | None = None
    accumulate: int = 1
    clip: Clip | None = None
    clip_at: float = 0.05
    double_norm: bool = True
    fused: bool = False


@dataclass
class Record:
    """What one rank saw. Gradients are averaged over ranks, whole, and as they were before clipping."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def loss_of(case: Case, model: nn.Module, step: int) -> Tensor:
    """The loss of one micro-step. Random numbers depend on rank and step only."""
    rank = dist.get_rank()
    torch.manual_seed(7919 * (step + 1) + rank)
    return case.loss(model, case.batch(rank, step))


def build(case: Case) -> nn.Module:
    """The case's module with the same values on every rank and at every call."""
    torch.manual_seed(1)
    return case.build()


def make_optimizer(case: Case, module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, the usual two groups; ``eps`` keeps gradients that are pure noise (the bias of
    an attention key, a bias before a batch norm) from being blown up to the size of all others."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trainable, lr=0.1)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-4, fused=recipe.fused)


# ---------------------------------------------------------------------------------------------------------------------
# The reference


class _Step(nn.Module):
    """One micro-step as a module: everything of it happens inside DDP's forward, as it does under Lightning."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = build(case)
        self._case = case

    def forward(self, step: int) -> Tensor:
        return loss_of(self._case, self.model, step)


def train_ddp(case: Case, recipe: Recipe) -> Record:
    """Train under DDP. Collective: every rank of the default group, which must be there."""
    module = _Step(case)
    ddp = DistributedDataParallel(module, **case.ddp)
    optimizer = make_optimizer(case, module, recipe)
    record = Record()
    for step in range(recipe.steps or case.steps):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                with quiet():
                    loss = ddp(step * recipe.accumulate + micro)
                record.losses.append(loss.detach().clone())
                (loss / recipe.accumulate).backward()
        record.gradients.append({name: _dense(p.grad) for name, p in module.named_parameters() if p.requires_grad})
        record.norms.append(_double_norm(module).float())
        _clip(module, recipe)
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return record


def _dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def _double_norm(module: nn.Module) -> Tensor:
    """Computed in float64, in the widest dtype of the gradients."""
    gradients = [_dense(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    squares = [gradient.double().square().sum() for gradient in gradients]
    dtypes = [gradient.dtype for gradient in gradients]
    return torch.stack(squares).sum().sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32)


def _clip(module: nn.Module, recipe: Recipe) -> None:
    if recipe.clip == "value":
        torch.nn.utils.clip_grad_value_(module.parameters(), recipe.clip_at)
    elif recipe.clip == "norm" and not recipe.double_norm:
        torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_at)
    elif recipe.clip == "norm":
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), recipe.clip_at, _double_norm(module))


# ---------------------------------------------------------------------------------------------------------------------
# The strategy


class LightningCase(pl.LightningModule):
    """A case as a user would write it, with a ``Record``."""

    def __init__(self, case: Case, recipe: Recipe) -> None:
        super().__init__()
        self.model = build(case)
        self.case, self.recipe, self.record = case, recipe, Record()
        self._names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.case, self.model, int(batch))
        self.record.losses.append(loss.detach().clone())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.record.gradients:
            whole = _assembled(self.trainer.strategy.engine)
            self.record.gradients.append({name: whole[name] for name in self._names})
        else:  # the public way, once; one by one it is the same, as tests/world/test_debug.py and tests/engine say
            with full_gradients(self):
                whole = dict(self.named_parameters())
                self.record.gradients.append({name: _dense(whole[name].grad) for name in self._names})
        self.record.norms.append(grad_norm(self).float())

    def on_train_end(self) -> None:
        with full_parameters(self):
            self.record.parameters = {name: p.detach().clone() for name, p in self.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case, self, self.recipe)


def _assembled(engine: Any) -> dict[str, Tensor | None]:
    """All gradients, put together from the slices that the optimizers of all ranks are about to use. Collective."""
    mine = {}
    for name, shard in engine.shards.items():
        if shard.parameter is not None:
            mine[name] = (shard.start, None if shard.parameter.grad is None else shard.parameter.grad.numpy())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: dict[str, Tensor | None] = {}
    for name in mine:
        spec = engine.shards[name].spec
        pieces = [
            (start, torch.from_numpy(piece)) for start, piece in (row[name] for row in every) if piece is not None
        ]
        whole[name] = None
        if pieces:
            flat = torch.full((spec.numel,), float("nan"), dtype=spec.dtype)
            for start, piece in pieces:
                flat[start : start + piece.numel()] = piece
            whole[name] = flat.view(spec.shape)
    return whole


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer over all ranks of this world."""
    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def train_zero(case: Case, recipe: Recipe, *, stage: int, prefetch: int = 1, **strategy: Any) -> Record:
    """Train under ``ZeroStrategy``. Collective: every rank of the default group, which must be there."""
    micro_steps = (recipe.steps or case.steps) * recipe.accumulate
    module = LightningCase(case, recipe)
    with quiet():
        trainer = make_trainer(
            ZeroStrategy(stage=stage, units=case.units, prefetch=prefetch, **strategy),
            accumulate_grad_batches=recipe.accumulate,
            gradient_clip_val=recipe.clip_at if recipe.clip else None,
            gradient_clip_algorithm=recipe.clip,
        )
        trainer.fit(module, DataLoader(range(micro_steps), batch_size=None))
    return module.record


@contextlib.contextmanager
def order_changes() -> Iterator[list[str]]:
    """What the log says of units that ran in another order than before."""
    log, found = logging.getLogger("lightning_zero.engine.schedule"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice about data loaders and what torch warns itself of; other warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*The .grad attribute of a Tensor that is not a leaf.*")  # Dynamo, tracing
        warnings.filterwarnings("ignore", ".*while no module of its unit ran.*")
        warnings.filterwarnings("ignore", ".*treespec.*LeafSpec.*", FutureWarning)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def differences(expected: Record, actual: Record, bound: float = 0.0) -> list[str]:
    """Where two records differ by more than ``bound``; with 0 every bit counts (and NaN differs from everything).

    The bound is relative to the largest element of a tensor, or to a thousandth of the largest of all tensors of its
    kind, where a tensor holds nothing but rounding noise.
    """
    found: list[str] = []
    if len(expected.losses) != len(actual.losses) or len(expected.gradients) != len(actual.gradients):
        counts = [(len(record.losses), len(record.gradients)) for record in (expected, actual)]
        return [f"(micro-steps, steps) {counts[0]} against {counts[1]}"]
    found += _compare("loss", dict(enumerate(expected.losses)), dict(enumerate(actual.losses)), bound)
    for step, (ours, theirs) in enumerate(zip(expected.gradients, actual.gradients, strict=True)):
        found += _compare(f"step {step} gradient", ours, theirs, bound)
    found += _compare("norm at step", dict(enumerate(expected.norms)), dict(enumerate(actual.norms)), bound)
    return found + _compare("parameter", expected.parameters, actual.parameters, bound)


def _compare(
    kind: str, expected: dict[Any, Tensor | None], actual: dict[Any, Tensor | None], bound: float
) -> list[str]:
    if expected.keys() != actual.keys():
        return [f"{kind}: {sorted(expected.keys() ^ actual.keys())} on one side only"]
    sizes = [tensor.abs().max().item() for tensor in expected.values() if tensor is not None and tensor.numel()]
    floor = max(sizes, default=0.0) / 1000
    found = []
    for name, left in expected.items():
        right = actual[name]
        if left is None or right is None:
            if left is not right:
                found.append(f"{kind} {name}: {'none' if left is None else 'some'} expected, got the opposite")
        elif left.shape != right.shape or left.dtype != right.dtype:
            found.append(f"{kind} {name}: {left.dtype} {(*left.shape,)} against {right.dtype} {(*right.shape,)}")
        elif not torch.equal(left, right):
            error = (left.double() - right.double()).abs().max().item() / max(left.abs().max().item(), floor, 1e-30)
            if not error <= bound:
                found.append(f"{kind} {name}: relative difference {error:.3g}")
    return found
