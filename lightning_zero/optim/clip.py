"""Norm and clipping of gradients that lie in shards over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.comm import ControlGroup

__all__ = ["clip_by_norm", "clip_by_value", "gradient_norm"]


def gradient_norm(gradients: Sequence[Tensor], control: ControlGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of all ranks' gradient slices together.

    Accumulated in float64 over real slices, never over padding, and summed once: the same number in every stage and for
    every cut, and the one a float64 norm over the full gradients has. ``torch.nn.utils.clip_grad_norm_`` sums in
    float32 tensor by tensor and differs from it in the last bit.

    Args:
        gradients: this rank's 1-D slices, any floating dtype.
        control: the control plane.
        norm_type: 1, 2, another positive number, or ``inf``.

    Returns:
        0-d float32 on the CPU (float64 if a gradient is), the same on every rank.

    Collective: every rank.
    """
    double = any(g.dtype is torch.float64 for g in gradients)
    real = [g for g in gradients if g.numel()]
    if norm_type == float("inf"):
        norms = [torch.linalg.vector_norm(g.detach(), norm_type, dtype=torch.float64) for g in real]
        largest = float(torch.stack(norms).max()) if norms else 0.0  # torch's maximum keeps NaN, Python's does not
        rows = control.gather_objects(largest)
        total = float("nan") if any(row != row for row in rows) else max(rows)
    else:
        partial = 0.0
        if real:
            norms = [torch.linalg.vector_norm(g.detach(), norm_type, dtype=torch.float64) for g in real]
            partial = float(torch.stack(norms).pow_(norm_type).sum())
        total = control.sum_float64([partial])[0] ** (1.0 / norm_type)
    wide = control.agree_any(double) if control.world_size > 1 else double
    return torch.tensor(total, dtype=torch.float64 if wide else torch.float32)


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their common norm is at most ``max_norm``, with the formula of ``clip_grad_norm_``.

    Args:
        gradients: this rank's slices. Written.
        max_norm: the bound.
        norm: what ``gradient_norm`` returned for all ranks' slices.
    """
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(coefficient.to(gradient.device, gradient.dtype))


def clip_by_value(gradients: Sequence[Tensor], clip_value: float) -> None:
    """Clamp every element of this rank's slices to ``[-clip_value, clip_value]``."""
    for gradient in gradients:
        gradient.detach().clamp_(min=-clip_value, max=clip_value)
