"""Gradients that lie in shards over the ranks: their norm, clipping, and the dynamic loss scale of fp16 training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import ControlGroup

__all__ = ["LossScaler", "clip_by_norm", "clip_by_value", "gradient_norm"]


def gradient_norm(gradients: Sequence[Tensor], control: ControlGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of all ranks' gradient slices together.

    Accumulated in float64 over real slices, never over padding, and summed once: the same number in every stage and for
    every cut, and the one a float64 norm over the full gradients has. ``torch.nn.utils.clip_grad_norm_`` sums in
    float32 tensor by tensor and differs from it in the last bit.

    Args:
        gradients: this rank's 1-D slices, any floating or complex dtype.
        control: the control plane.
        norm_type: 1, 2, another positive number, or ``inf``.

    Returns:
        0-d float32 on the CPU (float64 if a gradient is), the same on every rank.

    Collective: every rank.
    """
    real = [g.detach() for g in gradients if g.numel()]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float64)) for g in real]
    norms = norms or [torch.zeros(())]
    if norm_type == float("inf"):
        rows = control.gather_objects(float(torch.stack(norms).max()))
        total = float(torch.tensor(rows, dtype=torch.float64).max())  # torch's maximum keeps NaN, Python's does not
    else:
        total = control.sum_float64([float(torch.stack(norms).pow_(norm_type).sum())])[0] ** (1.0 / norm_type)
    wide = control.agree_any(any(g.dtype in (torch.float64, torch.complex128) for g in gradients))
    return torch.tensor(total, dtype=torch.float64 if wide else torch.float32)


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale this rank's slices so that the common norm of all ranks', which ``gradient_norm`` returned, is at most
    ``max_norm``, with the formula of ``clip_grad_norm_``."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(coefficient.to(gradient.device, gradient.dtype))


def clip_by_value(gradients: Sequence[Tensor], clip_value: float) -> None:
    """Clamp every element of this rank's slices to ``[-clip_value, clip_value]``."""
    for gradient in gradients:
        gradient.detach().clamp_(min=-clip_value, max=clip_value)


class LossScaler:
    """Multiplies the loss so that small fp16 gradients survive, and skips steps whose gradients overflowed, by the rule
    of ``torch.amp.GradScaler``: the scale grows after ``growth_interval`` good steps in a row."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                "A loss scale needs init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= "
                f"1, got {init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}."
            )
        self.value = float(init_scale)  # of the next backward
        self._in_use = self.value  # of the last one: another optimizer's step in between must not change it
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward on."""
        self._in_use = self.value
        return loss * self.value

    def unscale(self, gradients: Sequence[Tensor], control: ControlGroup) -> bool:
        """Undo the scale in this rank's gradient slices. Returns whether any gradient of any rank is not finite; the
        same on every rank. Collective: every rank."""
        finite: dict[torch.device, list[Tensor]] = {}
        for gradient in gradients:
            gradient.mul_(1.0 / self._in_use)
            finite.setdefault(gradient.device, []).append(torch.isfinite(gradient).all())
        # The host waits for the device here, once: whether the step is taken at all is decided by the host.
        overflow = not all(bool(torch.stack(flags).all()) for flags in finite.values())
        return control.agree_any(overflow)

    def update(self, overflow: bool) -> None:
        """Note how a step went."""
        if overflow:
            self.value *= self.backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.value *= self.growth_factor
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, in the keys of ``torch.amp.GradScaler``."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.value = self._in_use = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._good_steps = int(state["_growth_tracker"])
