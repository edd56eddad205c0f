"""Gradients that lie in shards over the ranks: their norm, clipping, and the dynamic loss scale of fp16 training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero._torch import check_and_unscale, foreach_mul, foreach_norm
from lightning_zero.comm import ControlGroup, Totals
from lightning_zero.optim.sharded import ShardedOptimizer

__all__ = ["LossScaler", "clip_by_norm", "clip_by_value", "gradient_norm"]

_CHUNK = 2**15  # elements that are squared at a time by each thread: as float64 they stay in a core's cache


def gradient_norm(gradients: Sequence[Tensor], totals: Totals, norm_type: float = 2.0) -> Tensor:
    """The norm of all ranks' gradient slices together. On an accelerator no host waits for it.

    Accumulated in float64 over real slices, never over padding, and summed once: the same number in every stage and for
    every cut, and the one a float64 norm over the full gradients has. ``torch.nn.utils.clip_grad_norm_`` sums in
    float32 tensor by tensor and differs from it in the last bit.

    Args:
        gradients: this rank's 1-D slices, any floating or complex dtype. Of the same parameters on every rank, also
            where it has no elements of one: so that all know of a float64 one.
        totals: of the ranks.
        norm_type: 1, 2, another positive number, or ``inf``.

    Returns:
        0-d float32 (float64 if a gradient is) on the device of ``totals``, the same on every rank.

    Raises:
        ValueError: for another norm.

    Collective: every rank.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be 1, 2, another positive number, or inf, got {norm_type}.")
    largest = norm_type == float("inf")
    total = torch.zeros(1, dtype=torch.float64, device=totals.device)
    for group in _alike(gradients):
        if norm_type == 2.0 and group[0].device.type == "cpu" and not group[0].is_complex():
            part = _sum_of_squares(group)
        else:
            wide = torch.promote_types(group[0].dtype, torch.float64)
            norms = torch.stack(foreach_norm(group, norm_type, dtype=wide))
            part = norms.max() if largest else norms.pow_(norm_type).sum()
        total = torch.maximum(total, part.to(total)) if largest else total + part.to(total)
    total = totals.total(total, largest)[0]
    total = total if largest else total.pow(1.0 / norm_type)
    return total if any(g.dtype in (torch.float64, torch.complex128) for g in gradients) else total.float()


def _alike(gradients: Sequence[Tensor]) -> Collection[list[Tensor]]:
    """Those that have elements, by device and dtype: one kernel takes many."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    return groups.values()


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """In float64, of real gradients of one dtype on the CPU: ``vector_norm`` would write out a whole one as such."""
    sums, size = [], _CHUNK * torch.get_num_threads()
    memory = torch.empty(size, dtype=torch.float64, device="cpu")
    for gradient in gradients:
        for chunk in gradient.split(size) if gradient.numel() > size else (gradient,):
            cast = chunk if chunk.dtype is torch.float64 else memory[: chunk.numel()].copy_(chunk)
            sums.append(torch.dot(cast, cast))
    return torch.stack(sums).sum()


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale this rank's slices so that the common norm of all ranks', which ``gradient_norm`` returned, is at most
    ``max_norm``, with the formula of ``clip_grad_norm_``. Where the norm is on the host, nothing is multiplied by 1."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in _alike(gradients):
        factor = coefficient.to(group[0].device, group[0].dtype)
        # What an accelerator has computed is not asked for; and a product with 1 + 0i can change signs of zeros.
        if factor.device.type != "cpu" or factor.is_complex() or factor != 1.0:
            foreach_mul(group, factor)


def clip_by_value(gradients: Sequence[Tensor], clip_value: float) -> None:
    """Clamp every element of this rank's slices to ``[-clip_value, clip_value]``."""
    for gradient in gradients:
        gradient.detach().clamp_(min=-clip_value, max=clip_value)


_TORCHS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, getattr(torch.cpu.amp, "GradScaler"))  # noqa: B009


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` where every rank holds a slice of each gradient: with its rule, methods and state.

    ``unscale_`` and ``step`` look at the gradients of all ranks: collective. The scale stays on the host, so that to
    read it waits for no device. Before ``attach`` it is torch's in all it does.
    """

    _adapter: Callable[[Optimizer], ShardedOptimizer] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self._begin()

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> LossScaler:
        """A ``GradScaler``, which becomes a ``LossScaler``: the same object, because user code may read it.

        Raises:
            ValueError: for a subclass that the user wrote, whose methods would not be called.
        """
        if isinstance(scaler, LossScaler):
            return scaler
        if type(scaler) not in _TORCHS:
            raise ValueError(
                f"{type(scaler).__name__} is a custom GradScaler, whose methods need full gradients; a rank "
                "holds slices. Pass `torch.amp.GradScaler(...)`, or derive it from "
                "`lightning_zero.optim.gradients.LossScaler` and override `update`."
            )
        state, ours = scaler.__getstate__(), cast(LossScaler, scaler)
        ours.__class__ = cls
        ours.__setstate__(state)
        return ours

    def attach(self, adapter: Callable[[Optimizer], ShardedOptimizer], totals: Totals) -> None:
        """Connect to a run, where ``adapter`` finds the sharded view of an optimizer."""
        self._adapter, self._totals = adapter, totals

    def detach(self) -> None:
        """Be torch's again: the run is over."""
        self._adapter, self._totals = None, ControlGroup(None)

    def _begin(self) -> None:
        if self.is_enabled():  # otherwise torch's has no scale
            self._scale, self._growth_tracker = None, None
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        self._in_use = self.get_scale()  # of the last backward: another optimizer's step must not change it
        self.detach()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_adapter", "_totals")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        super().load_state_dict(state_dict)
        self._in_use = self.get_scale()

    def scale(self, outputs: Any) -> Any:
        """The loss, or losses, to run backward on."""
        self._in_use = self.get_scale()
        return super().scale(outputs)

    def unscale(self, gradients: Sequence[Tensor], totals: Totals) -> bool:
        """Undo the scale in this rank's gradient slices. Returns whether any gradient of any rank is not finite then;
        the same on every rank.

        On an accelerator the host waits for it, once for all ranks, as torch's does in ``step``: whether the step is
        taken is decided by the host, with the optimizer's and the scheduler's counters, and so is the next scale.

        Collective: every rank.
        """
        factor = 1.0 / self._in_use if self._in_use else float("inf")
        found = torch.zeros(1, dtype=torch.float64, device=totals.device)
        for group in _alike(gradients):
            flag = group[0].new_zeros((), dtype=torch.float32)
            narrow = group[0].dtype in (torch.float16, torch.bfloat16, torch.float32)
            if narrow:  # the kernel's factor is a float32, and it looks at what it multiplies, not at what that makes
                check_and_unscale(group, flag, torch.full_like(flag, factor, dtype=torch.float64).float())
            else:
                foreach_mul(group, factor)
            if factor > 1.0 or not narrow:
                real = [torch.view_as_real(g) if g.is_complex() else g for g in group]
                check_and_unscale(real, flag, torch.ones_like(flag))
            found += flag.to(found)
        return bool(totals.total(found))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undo the scale in the gradients of one optimizer, once before its step. Collective: every rank."""
        super().unscale_(self._raw(optimizer))

    def unscale_once(self, optimizer: Optimizer) -> None:
        """``unscale_``, unless that was done since the optimizer's last step. Collective: every rank."""
        if self._per_step(optimizer)["stage"] is OptState.READY:
            self.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``unscale_`` if that was not done, and the optimizer's step if no gradient has overflowed.

        Collective: every rank.
        """
        if self._adapter is None or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        # Not torch's: it leaves the unscaling to fused optimizers, which step on some of the slices at a time.
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if self._per_step(optimizer)["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self.unscale_once(optimizer)
        state = self._per_step(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Note how the steps since the last call went, by torch's rule; or set the scale."""
        super().update(None if new_scale is None else float(new_scale))

    def stepped(self, optimizer: Optimizer) -> None:
        """``update`` for this optimizer alone: others may wait for their steps."""
        if not self.is_enabled():
            return
        others, key = self._per_optimizer_states, id(self._raw(optimizer))
        self._per_optimizer_states = type(others)(others.default_factory, {key: others.pop(key)})  # type: ignore
        self.update()
        self._per_optimizer_states.update(others)

    def forget(self, optimizer: Optimizer) -> None:
        """Note that a step raised: the gradients of the next one are scaled."""
        if self.is_enabled():
            self._per_optimizer_states.pop(id(self._raw(optimizer)), None)

    def _per_step(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._per_optimizer_states[id(self._raw(optimizer))]

    def _raw(self, optimizer: Optimizer) -> Optimizer:
        """Without Lightning's wrapper: what was done to one was done to the other."""
        return optimizer if self._adapter is None else self._adapter(optimizer).optimizer

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """What torch's methods unscale and check by."""
        if self._adapter is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflow = self.unscale(self._adapter(optimizer).gradients(), self._totals)
        return {found_inf.device: torch.full_like(found_inf, float(overflow))}
