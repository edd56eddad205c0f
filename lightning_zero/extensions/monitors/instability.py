"""``InstabilityMonitor``: a callback that says where a training goes wrong, and may leave such steps out.

[Note: where values are looked at]
At what units return in the forward, and at the gradient of that in the backward; at losses; and at averaged gradients.
A sum is infinite or NaN if an element is. Sums stay on the device until the optimizer steps, where the host reads all
of them at once. What is computed again in the backward was looked at before.

[Note: what a spike is]
A value that is above the running median by more than so many times the spread, which is the median distance from the
median, or a hundredth of the median if that is more. A loss is compared with earlier ones of its rank, the norm of all
gradients with earlier norms. Nothing is one before there are twenty values.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
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
_ROOT = "(root)"


class InstabilityMonitor(StepMonitor):
    """Name the first value that is not finite, and spikes of the loss and of the gradients; log norms of each unit.

    A warning of rank 0 has the unit or parameter, whether it was in the forward or the backward, the micro-step, the
    optimizer step, the rank and its batches, and what the loss scale did. Norms of averaged gradients (before clipping)
    and of updates are logged as ``zero/norm/gradient/<unit>`` and ``zero/norm/update/<unit>``. Each step has two small
    agreements between ranks more, and the host waits for the device before the optimizer. In steps whose updates are
    measured each rank holds a copy of its masters.

    Args:
        every_n_steps: how often norms are logged, from the third step on; ``None``: the Trainer's
            ``log_every_n_steps``.
        spike: how far above the running median a spike is, in times of the usual distance from it; ``None``: none is.
        window: steps that the running median is of.
        batch_ids: called with each batch: what names its samples in a warning, for example
            ``lambda batch: batch["id"]``.
        skip: leave out the optimizer's step on all ranks, if there is a spike or a value that is not finite. Parameters
            and optimizer states stay as they are, as without gradients; the batch counts as one that was trained on.

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
        self._looks = _Looks(strategy.engine, [unit.name for unit in units])
        owner = {spec.name: unit.name or _ROOT for unit in units for spec in unit.parameters}
        self._norms = _Norms(strategy.engine, owner)

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
        norm = norms.of_gradients()
        if self._measured:
            norms.keep_masters()
        first, losses = looks.read()
        here = [] if first is None else [first]
        spikes = [self._spikes.has((which, micro_step), value) for micro_step, value in losses]
        if any(spikes):
            here.append(f"a spike of the loss, {', '.join(f'{value:.4g}' for _, value in losses)}")
        anywhere = engine.control.meet("InstabilityMonitor", (), [int(bool(here))]).marks[0]
        everywhere = []
        if not math.isfinite(norm):
            here += [f"the gradient of {name}" for name in norms.not_finite()] if first is None else []
            everywhere = ["gradients that are not finite"]
        elif self._spikes.has(which, norm):
            everywhere = [f"a spike of the gradients' norm, {norm:.4g}"]
        if anywhere or everywhere:
            self._tell(engine, here, everywhere, looks.batches)
            if (scaler := strategy.precision_plugin.scaler) is not None:
                self._scale = scaler.get_scale()
            if self.skip:
                optimizer.zero_grad(set_to_none=True)

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """Log what was measured. Collective: every rank."""
        scaler, before = strategy.precision_plugin.scaler, self._scale
        if before is not None and scaler is not None and self._told <= _TOLD:
            now = scaler.get_scale()
            rank_zero_warn(
                f"InstabilityMonitor: after step {self._step} the loss scale went from {before:g} to {now:g}, and the "
                "step was left out."
                if now < before
                else f"InstabilityMonitor: after step {self._step} the loss scale is {now:g}, as before."
            )
        self._scale = None
        if self._measured and self._norms is not None:
            self.log_numbers(trainer, self._norms.numbers())

    def _tell(self, engine: ZeroEngine, here: Sequence[str], everywhere: Sequence[str], batches: Sequence[str]) -> None:
        """Have rank 0 warn of what the ranks found. Collective: every rank."""
        self._told += 1
        if self._told > _TOLD:  # alike on all ranks
            return
        told = f"{'; '.join(here)} (batch {', '.join(batches)})" if here else None
        rows = engine.control.gather_objects(told, "InstabilityMonitor")
        ranks = some([f"rank {rank}: {row}" for rank, row in enumerate(rows) if row is not None])
        left_out = " The step is left out." if self.skip else ""
        what = "; ".join(filter(None, [*everywhere, ranks]))
        rank_zero_warn(f"InstabilityMonitor, step {self._step + 1}: {what}.{left_out}")


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
    backward: bool
    sum: Tensor  # of all elements


class _Looks:
    """What was looked at in the running step, in this order; see [Note: where values are looked at]."""

    def __init__(self, engine: ZeroEngine, names: Sequence[str]) -> None:
        self._engine, self.micro_step = engine, 0
        self.found: list[_Look] = []
        self.batches: list[str] = []
        modules = {name: engine.module.get_submodule(name) for name in names if name}
        self._classes = {name: type(module).__name__ for name, module in modules.items()}
        self._handles = [
            module.register_forward_hook(disable_dynamo(partial(self._returned, name)))
            for name, module in modules.items()
        ]

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def look(self, unit: str, value: Tensor, backward: bool = False) -> None:
        """At a value, now."""
        value = getattr(value, "to_local", value.detach)().detach()  # a DTensor's
        self.found.append(_Look(self.micro_step, unit, backward, value.sum(dtype=_at_least_single(value.dtype))))

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._engine.progress.in_backward or not torch.is_grad_enabled():
            return
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.is_floating_point() and value.device == self._engine.device:
                self.look(name, value)
                if value.requires_grad:
                    value.register_hook(partial(self._arrived, name))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        self.look(name, gradient, backward=True)

    def read(self) -> tuple[str | None, list[tuple[int, float]]]:
        """The first value that was not finite, in words, and the losses with their micro-steps. Waits for the device.
        What was found is forgotten."""
        found, self.found = self.found, []
        if not found:
            return None, []
        sums = torch.stack([one.sum.to(torch.float64) for one in found]).tolist()
        losses = [(one.micro_step, value) for one, value in zip(found, sums, strict=True) if not one.unit]
        for one, value in zip(found, sums, strict=True):
            if not math.isfinite(value):
                what = f"the output of '{one.unit}' ({self._classes[one.unit]})" if one.unit else "the loss"
                way = f"the gradient of {what} in the backward" if one.backward else f"{what} in the forward"
                return f"not finite first: {way} of micro-step {one.micro_step}", losses
        return None, losses


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Where a sum of finite halves is finite."""
    return torch.promote_types(dtype, torch.float32)


class _Norms:
    """Norms of each unit, over all ranks. ``owner``: the unit of each parameter, by their names."""

    def __init__(self, engine: ZeroEngine, owner: dict[str, str]) -> None:
        self._engine = engine
        self._units: dict[str, list[Slice]] = {}
        for name, unit in owner.items():
            if engine.shards[name].parameter is not None:
                self._units.setdefault(unit, []).append(engine.shards[name])
        self._gradients: list[float] = []
        self._masters: dict[Slice, Tensor] = {}

    def of_gradients(self) -> float:
        """That of all averaged gradients. Collective: every rank."""
        slices = {name: [one.counted for one in unit if one.gradient is not None] for name, unit in self._units.items()}
        self._gradients = self._squares(slices)
        return math.sqrt(sum(self._gradients))

    def keep_masters(self) -> None:
        """So that the next step's updates are known."""
        self._masters = {one: one.read().detach().clone() for unit in self._units.values() for one in unit}

    def not_finite(self) -> list[str]:
        """The first parameter of whose gradient this rank has elements that are not finite."""
        gradients = ((one.name, one.gradient) for unit in self._units.values() for one in unit)
        return [name for name, part in gradients if part is not None and not part.isfinite().all()][:1]

    def numbers(self) -> dict[str, float]:
        """For a logger: norms of the step that has ended. Collective: every rank."""
        found = {"gradient": self._gradients}
        if self._masters:
            moved = {
                name: [one.read().detach() - self._masters[one] for one in unit if one.spec.counted]
                for name, unit in self._units.items()
            }
            found["update"] = self._squares(moved)
            self._masters = {}
        return {
            f"zero/norm/{what}/{name}": math.sqrt(square)
            for what, squares in found.items()
            for name, square in zip(self._units, squares, strict=True)
        }

    def _squares(self, parts: dict[str, list[Tensor]]) -> list[float]:
        """Sums of squares over all ranks."""
        totals = self._engine.totals
        sums = torch.zeros(len(parts), dtype=torch.float64, device=totals.device)
        for at, tensors in enumerate(parts.values()):
            if held := [tensor.detach() for tensor in tensors if tensor.numel()]:
                norms = [torch.linalg.vector_norm(part, dtype=_at_least_single(part.dtype)) for part in held]
                sums[at] = torch.stack([norm.to(totals.device, torch.float64) for norm in norms]).square().sum()
        return totals.total(sums).tolist()
