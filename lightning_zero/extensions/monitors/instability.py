"""``InstabilityMonitor``: a callback that says where a training goes wrong, and may leave such steps out.

[Note: where values are looked at]
At what units return in the forward, and at the gradient of that in the backward; at losses; and at averaged gradients.
A sum is infinite or NaN if an element is. Sums stay on the device until the optimizer steps, where the host reads all
of them at once. What is computed again in the backward was looked at before. A unit may return a mask of infinities, or
of numbers whose sum is one: what was not finite in a step with finite losses and gradients is not what breaks another.

[Note: what a spike is]
A value that is above the running median by more than so many times the spread, which is the median distance from the
median, or a hundredth of the median if that is more. A loss is compared with earlier ones of its rank, the norm of all
gradients with earlier norms. Nothing is one before there are twenty values.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import disable_dynamo, tree_leaves
from lightning_zero.config import validate_units
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import some
from lightning_zero.extensions.monitors.usage import StepMonitor
from lightning_zero.plan.tree import ModuleTree
from lightning_zero.plan.units import find_units
from lightning_zero.shards.slice import Slice
from lightning_zero.trainer.precision import unwrapped
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["InstabilityMonitor"]

_LEAST = 20  # values before one can be a spike
_TOLD = 10  # times that a fit tells of; more are counted
_MOST = 2**16  # looks that are kept: nobody asks for them where optimizers step without Lightning's knowledge
_ROOT = "(root)"


class InstabilityMonitor(StepMonitor):
    """Name the first value that is not finite, and spikes of the loss and of the gradients; log norms of each unit.

    A step is told of if a loss or an averaged gradient is not finite, or a spike. A warning of rank 0 has the unit or
    parameter where that began, whether it was in the forward or the backward, the micro-step, the Trainer's step, the
    rank and its batches, and what the loss scale did. Norms of averaged gradients (before clipping) and of updates are
    logged as ``zero/norm/gradient/<unit>`` and ``zero/norm/update/<unit>``, those of several optimizers each by its own
    last step. Each step has two small agreements between ranks more, and the host waits for the device before the
    optimizer. In steps whose updates are measured each rank holds a copy of its masters.

    Args:
        every_n_steps: how often norms are logged, from the third step on; ``None``: the Trainer's
            ``log_every_n_steps``.
        spike: how far above the running median a spike is, in times of the usual distance from it; ``None``: none is.
        window: steps that the running median is of. A fit begins with none, also one that resumes.
        batch_ids: called with each batch: what names its samples in a warning, for example
            ``lambda batch: batch["id"]``.
        skip: leave out the optimizer's step on all ranks, if it is told of. Parameters and optimizer states stay as
            they are, as without gradients; the batch counts as one that was trained on.

    Raises:
        ValueError: if a setting is not usable.

    Example::

        Trainer(strategy="zero3", callbacks=[lightning_zero.InstabilityMonitor(skip=True)])
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        spike: float | None = 20.0,
        window: int = 100,
        batch_ids: Callable[[Any], Any] | None = None,
        skip: bool = False,
    ) -> None:
        if spike is not None and not 0 < spike < math.inf:
            raise ValueError(f"spike must be a positive number, or None, got {spike!r}.")
        if isinstance(window, bool) or not isinstance(window, int) or window < _LEAST:
            raise ValueError(f"window must be a whole number of steps, {_LEAST} or more, got {window!r}.")
        self.batch_ids, self.skip = batch_ids, skip
        self._spikes = _Spikes(spike, window)
        super().__init__(every_n_steps, summary=False)

    def _forget(self) -> None:
        super()._forget()
        self._looks: _Looks | None = None
        self._norms: _Norms | None = None
        self._spikes.history.clear()
        self._told = 0
        self._scale: float | None = None  # of the loss, before a step that it may leave out

    def attach(self, strategy: ZeroStrategy) -> None:
        units = find_units(ModuleTree(strategy.engine.module), validate_units(strategy.settings.units))
        self._looks = _Looks(strategy, [unit.name for unit in units])
        owner = {spec.name: unit.name or _ROOT for unit in units for spec in unit.parameters}
        self._norms = _Norms(strategy, owner)

    def detach(self, engine: ZeroEngine) -> None:
        if self._looks is not None:
            self._looks.remove()
        self._looks = self._norms = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say how often more there was something to tell of."""
        if self._told > _TOLD:
            rank_zero_warn(f"InstabilityMonitor: {self._told - _TOLD} more steps were not finite, or had a spike.")
        super().on_train_end(trainer, pl_module)

    # -------------------------------------------------------------------------------------------------------- a step

    def begin(self, engine: ZeroEngine) -> None:
        if self._looks is not None:
            self._looks.found.clear()
            self._looks.batches.clear()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._looks is not None:
            self._looks.micro_step = self._micro_steps
            ids = "" if self.batch_ids is None else f" (samples {self.batch_ids(batch)})"
            self._looks.batches.append(f"{batch_idx}{ids}")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Look at the loss, as it is without a loss scale."""
        if self._looks is not None and self._strategy is not None:
            scaler = self._strategy.precision_plugin.scaler
            self._looks.look("", loss if scaler is None else loss.detach() / scaler.get_scale())

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at what the step is made of. Collective: every rank."""
        strategy, looks, norms = self._strategy, self._looks, self._norms
        if strategy is None or looks is None or norms is None:
            return
        engine, which = strategy.engine, strategy.optimizers.index(unwrapped(optimizer))
        trained = [entry for entry in strategy.adapter(optimizer).entries if entry.parameter is not None]
        norm = norms.of_gradients(which, trained)
        if self._measured:
            norms.keep_masters(trained)
        losses, first = looks.read(broken=not math.isfinite(norm))
        here = [] if first is None else [first]
        spikes = [self._spikes.has((which, micro_step), value) for micro_step, value in losses]
        if any(spikes):
            here.append(f"a spike of the loss, {', '.join(f'{value:.4g}' for _, value in losses)}")
        anywhere = engine.control.meet("InstabilityMonitor", (), [int(bool(here))]).marks[0]
        everywhere = []
        if not math.isfinite(norm):
            here += [f"the gradient of {name}" for name in _not_finite(trained)] if first is None else []
            everywhere = ["gradients that are not finite"]
        elif self._spikes.has(which, norm):
            everywhere = [f"a spike of the gradients' norm, {norm:.4g}"]
        if anywhere or everywhere:
            self._tell(trainer, engine, here, everywhere, looks.batches)
            if (scaler := strategy.precision_plugin.scaler) is not None:
                self._scale = scaler.get_scale()
            if self.skip:
                optimizer.zero_grad(set_to_none=True)

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """Log what was measured. Collective: every rank."""
        scaler, before = strategy.precision_plugin.scaler, self._scale
        if before is not None and scaler is not None and self._told <= _TOLD:
            now = scaler.get_scale()
            went = f"went from {before:g} to {now:g}" if now != before else f"is {now:g}, as before"
            left_out = ", and the step was left out" * (now < before)
            rank_zero_warn(f"InstabilityMonitor: after step {trainer.global_step} the loss scale {went}{left_out}.")
        self._scale = None
        if self._measured and self._norms is not None:
            self.log_numbers(trainer, self._norms.numbers())

    def _tell(
        self,
        trainer: pl.Trainer,
        engine: ZeroEngine,
        here: Sequence[str],
        everywhere: Sequence[str],
        batches: Iterable[str],
    ) -> None:
        """Have rank 0 warn of what the ranks found. Collective: every rank."""
        self._told += 1
        if self._told > _TOLD:  # alike on all ranks
            return
        told = f"{'; '.join(here)} (batch {', '.join(batches)})" if here else None
        rows = engine.control.gather_objects(told, "InstabilityMonitor")
        ranks = some([f"rank {rank}: {row}" for rank, row in enumerate(rows) if row is not None])
        left_out = " The step is left out." if self.skip else ""
        what = "; ".join(filter(None, [*everywhere, ranks]))
        rank_zero_warn(f"InstabilityMonitor, step {trainer.global_step + 1}: {what}.{left_out}")


class _Spikes:
    """Earlier values, to know a spike by; see [Note: what a spike is]."""

    def __init__(self, factor: float | None, window: int) -> None:
        self._factor, self._window = factor, window
        self.history: dict[Any, deque[float]] = {}

    def has(self, key: Any, value: float) -> bool:
        """Whether the next value of a series is one."""
        if self._factor is None or not math.isfinite(value):
            return False
        history = self.history.setdefault(key, deque(maxlen=self._window))
        history.append(value)
        if len(history) <= _LEAST:
            return False
        middle = median(history)
        spread = max(median(abs(one - middle) for one in history), abs(middle) / 100)
        return value - middle > self._factor * spread


class _Look(NamedTuple):
    """At a value."""

    micro_step: int
    unit: str  # "" for a loss
    place: int  # among the tensors that the unit returns
    backward: bool
    sum: Tensor  # of all elements


class _Looks:
    """What was looked at in the running step, in this order; see [Note: where values are looked at]."""

    def __init__(self, strategy: ZeroStrategy, names: Sequence[str]) -> None:
        self._strategy, self.micro_step = strategy, 0
        self.found: deque[_Look] = deque(maxlen=_MOST)
        self.batches: deque[str] = deque(maxlen=_MOST)
        self._harmless: set[tuple[str, int, bool]] = set()  # see [Note: where values are looked at]
        modules = {name: strategy.engine.module.get_submodule(name) for name in names if name}
        self._classes = {name: type(module).__name__ for name, module in modules.items()}
        self._handles = [
            module.register_forward_hook(disable_dynamo(partial(self._returned, name)))
            for name, module in modules.items()
        ]

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def look(self, unit: str, value: Tensor, place: int = 0, backward: bool = False) -> None:
        """At a value, now."""
        value = getattr(value, "to_local", value.detach)().detach()  # a DTensor's
        self.found.append(_Look(self.micro_step, unit, place, backward, value.sum(dtype=_at_least_single(value.dtype))))

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        engine = self._strategy.engine  # another one once parameters have thawed
        if engine.progress.in_backward or not torch.is_grad_enabled():
            return
        values = [getattr(output, field.name) for field in fields(output)] if is_dataclass(output) else output
        for place, value in enumerate(tree_leaves(values)):
            if isinstance(value, Tensor) and value.is_floating_point() and value.device == engine.device:
                self.look(name, value, place)
                if value.grad_fn is not None:  # a parameter, which a unit may return, would keep its hooks
                    value.register_hook(partial(self._arrived, name, place))

    def _arrived(self, name: str, place: int, gradient: Tensor) -> None:
        self.look(name, gradient, place, backward=True)

    def read(self, broken: bool) -> tuple[list[tuple[int, float]], str | None]:
        """The losses with their micro-steps, and where in words a value was not finite first: in a step that is
        ``broken`` by its gradients, or by a loss. Waits for the device. What was found is forgotten."""
        found = [*self.found]
        self.found.clear()
        sums = torch.stack([one.sum.to(torch.float64) for one in found]).tolist() if found else []
        losses = [(one.micro_step, value) for one, value in zip(found, sums, strict=True) if not one.unit]
        suspects = [one for one, value in zip(found, sums, strict=True) if not math.isfinite(value)]
        if not broken and all(math.isfinite(value) for _, value in losses):
            self._harmless |= {(one.unit, one.place, one.backward) for one in suspects}
            return losses, None
        for one in suspects:
            if (one.unit, one.place, one.backward) not in self._harmless:
                what = f"the output of '{one.unit}' ({self._classes[one.unit]})" if one.unit else "the loss"
                way = f"the gradient of {what} in the backward" if one.backward else f"{what} in the forward"
                return losses, f"not finite first: {way} of micro-step {one.micro_step}"
        return losses, None


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Where a sum of finite halves is finite."""
    return torch.promote_types(dtype, torch.float32)


def _not_finite(entries: Iterable[Slice]) -> list[str]:
    """The first parameter of whose gradient this rank has elements that are not finite."""
    gradients = ((one.name, one.gradient) for one in entries)
    return [name for name, part in gradients if part is not None and not part.isfinite().all()][:1]


class _Norms:
    """Norms of each unit, over all ranks. ``owner``: the unit of each parameter, by their names."""

    def __init__(self, strategy: ZeroStrategy, owner: dict[str, str]) -> None:
        self._strategy, self._owner = strategy, owner
        self._gradients: dict[int, dict[str, float]] = {}  # squares, of each optimizer's last step
        self._masters: dict[Slice, Tensor] = {}

    def of_gradients(self, which: int, trained: Sequence[Slice]) -> float:
        """That of the averaged gradients of one of the optimizers. Collective: every rank."""
        squares = self._gradients[which] = self._squares({one: one.counted for one in trained})
        return math.sqrt(sum(squares.values()))

    def keep_masters(self, trained: Sequence[Slice]) -> None:
        """So that the updates of the running step are known."""
        for one in trained:
            if one not in self._masters:
                self._masters[one] = one.read().detach().clone()

    def numbers(self) -> dict[str, float]:
        """For a logger: norms of the step that has ended. Collective: every rank."""
        moved = {one: one.read().detach() - was if one.spec.counted else None for one, was in self._masters.items()}
        found = [("gradient", squares) for squares in self._gradients.values()] + [("update", self._squares(moved))]
        self._masters, self._gradients = {}, {}
        sums: dict[str, float] = {}
        for what, squares in found:
            for unit, square in squares.items():
                name = f"zero/norm/{what}/{unit}"
                sums[name] = sums.get(name, 0.0) + square
        return {name: math.sqrt(square) for name, square in sums.items()}

    def _squares(self, parts: dict[Slice, Tensor | None]) -> dict[str, float]:
        """Sums of squares over all ranks, by unit; equally many units on each."""
        units: dict[str, list[Tensor]] = {}
        for one, part in parts.items():
            held = units.setdefault(self._owner.get(one.name, _ROOT), [])
            if part is not None and part.numel():
                held.append(part.detach())
        totals = self._strategy.engine.totals
        sums = torch.zeros(len(units), dtype=torch.float64, device=totals.device)
        for at, held in enumerate(units.values()):
            if held:
                norms = [torch.linalg.vector_norm(part, dtype=_at_least_single(part.dtype)) for part in held]
                sums[at] = torch.stack([norm.to(totals.device, torch.float64) for norm in norms]).square().sum()
        return dict(zip(units, totals.total(sums).tolist(), strict=True))
