"""What users do: actions by name, where each of them makes sense, and where it has to work.

An action is a function of a ``Context`` that is written as a user writes it. What it returns is compared with what it
returns under DDP. It says at which hooks it makes sense and in which stages it has to work there; elsewhere an error by
name will do. Nowhere may it differ silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.thorough.fuzz.models import Block

__all__ = [
    "ACTIONS",
    "AFTER_BACKWARD",
    "ANY",
    "BEFORE_TRAINING",
    "BETWEEN",
    "CALLBACK_HOOKS",
    "HOOKS",
    "VALIDATION",
    "Action",
    "Context",
    "action",
    "load_vocabulary",
]

BEFORE_TRAINING = ("on_fit_start", "on_train_start")
START = ("on_train_epoch_start", "on_train_batch_start")
VALIDATION = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
END = ("on_train_batch_end", "on_train_epoch_end")
# Between steps: nothing of a step is under way.
BETWEEN = (*BEFORE_TRAINING, *START, "on_before_zero_grad", *END, "on_train_end", *VALIDATION)
IN_STEP = ("before_forward", "after_forward", "on_before_backward")
AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "manual_gradients")
ANY = (*BETWEEN, *IN_STEP, *AFTER_BACKWARD)
# `forward` is within the forward of a `Block`; the others are not hooks of Lightning but places in the user's methods.
OWN = ("configure_optimizers", "before_forward", "after_forward", "forward", "manual_gradients", "validation_step")
HOOKS = ("configure_optimizers", *ANY, "forward")
CALLBACK_HOOKS = tuple(hook for hook in HOOKS if hook not in (*OWN, "configure_gradient_clipping"))

EVERYWHERE = frozenset({1, 2, 3})


@dataclass
class Context:
    """What an action finds: the run, and what was drawn for it.

    Args:
        module: the LightningModule; the model to train is ``module.model``.
        trainer: as in every hook.
        rank: of this process.
        hook: where this happens.
        call: how often this action ran before.
        pick: a number that chooses among what there is, equal on all ranks.
        kept: what the action wants to remember until it is called again.
        folder: where this rank may write. Shared by the ranks.
        block: in ``forward`` the block that runs.
    """

    module: Any
    trainer: pl.Trainer
    rank: int
    hook: str
    call: int
    pick: int
    kept: dict[str, Any]
    folder: Path
    block: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        return self.module.model

    @property
    def name(self) -> str:
        """The parameter that the program chose, among the trainable ones (of the block, inside its forward)."""
        scope = self.model if self.block is None else self.block
        names = self.kept.setdefault("names", [n for n, p in scope.named_parameters() if p.requires_grad])
        names = names or [n for n, _ in scope.named_parameters()]
        return names[self.pick % len(names)]

    @property
    def p(self) -> nn.Parameter:
        """The parameter that the program chose."""
        return (self.model if self.block is None else self.block).get_parameter(self.name)

    @property
    def layer(self) -> nn.Linear:
        """A linear layer whose weight was trained at the beginning."""
        if self.block is not None:
            return self.block.up
        found = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear) and _trained(m)]
        names = self.kept.setdefault("layers", found)
        return self.model.get_submodule(names[self.pick % len(names)])

    @property
    def a_block(self) -> nn.Module:
        """A block of the model."""
        blocks = [m for m in self.model.modules() if isinstance(m, Block)]
        return blocks[self.pick % len(blocks)]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that ``configure_optimizers`` returned, as hooks are given it."""
        return self.trainer.optimizers[0]

    @property
    def group(self) -> dict[str, Any]:
        """A group of the optimizer."""
        return self.optimizer.param_groups[self.pick % len(self.optimizer.param_groups)]

    @property
    def buffer(self) -> tuple[nn.Module, str]:
        """A floating point buffer: whose, and its name there."""
        buffers = [
            (m, n) for m in self.model.modules() for n, b in m.named_buffers(recurse=False) if b.is_floating_point()
        ]
        return buffers[self.pick % len(buffers)]

    def generator(self, per_rank: bool = False) -> torch.Generator:
        """Seeded by the program; the same on every rank unless asked otherwise."""
        return torch.Generator().manual_seed(1000 * self.pick + 10 * self.call + (self.rank if per_rank else 5))

    def like(self, tensor: Tensor, per_rank: bool = False) -> Tensor:
        """Small random numbers, of a tensor's shape and dtype."""
        numbers = torch.randn(tensor.shape, generator=self.generator(per_rank), dtype=torch.float64)
        return (0.1 * numbers).to(tensor.dtype)


def _trained(module: nn.Module) -> bool:
    return module.weight.requires_grad and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


@dataclass(frozen=True)
class Action:
    """One thing that users do.

    Args:
        name: identifies it.
        run: does it; what it returns is compared.
        hooks: where it makes sense.
        works: the stages in which it has to work, by hook; where a hook is missing, nowhere.
        reads: it changes nothing, so that a program goes on after it was refused.
        bound: largest relative difference of what it returns; 0: every bit counts.
        models: names of the models it is for; empty: all.
        manual: for manual optimization only, or only for automatic; ``None``: both.
        gradients: it depends on gradients that are there between two micro-steps of an accumulation.
        rounds: gradients of two backwards are added, which DDP does in another order.
        alone: only one rank does something, and may be the only one that is told.
        parts: under DDP the parameter is reduced no more, and every rank goes on with a model of its own.
        ends: what was set up is replaced, so that errors by name are right from there on.
    """

    name: str
    run: Callable[[Context], Any]
    hooks: tuple[str, ...]
    works: Mapping[str, frozenset[int]] = field(repr=False)
    reads: bool = False
    bound: float = 0.0
    models: tuple[str, ...] = ()
    manual: bool | None = None
    gradients: bool = False
    rounds: bool = False
    alone: bool = False
    parts: bool = False
    ends: bool = False

    def must_work(self, stage: int, hook: str) -> bool:
        """Whether an error, even by name, is a failure here."""
        return stage in self.works.get(hook, frozenset())


ACTIONS: dict[str, Action] = {}


def action(
    hooks: tuple[str, ...], works: str = "", inside: str | None = None, **options: Any
) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
    """Put a function into the vocabulary.

    Args:
        hooks: where it makes sense.
        works: the stages in which it has to work, for example ``"12"``.
        inside: it also makes sense in the forward of a block, and has to work there in these stages.
        options: the rest of an ``Action``.
    """

    def register(run: Callable[[Context], Any]) -> Callable[[Context], Any]:
        stages = dict.fromkeys(hooks, frozenset(map(int, works)))
        places = hooks
        if inside is not None:
            stages["forward"] = frozenset(map(int, inside))
            places = (*hooks, "forward")
        if run.__name__ in ACTIONS:
            raise ValueError(f"two actions are called {run.__name__}")
        if not run.__doc__:
            raise ValueError(f"{run.__name__} does not say what it is")
        ACTIONS[run.__name__] = Action(run.__name__, run, places, stages, **options)
        return run

    return register


def load_vocabulary() -> dict[str, Action]:
    """All actions by name."""
    from tests.thorough.fuzz import gradients, groups, modules, reads, writes  # noqa: F401  (each registers its own)

    return ACTIONS
