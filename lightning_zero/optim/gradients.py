"""Gradients that lie in shards over the ranks: their norm, clipping, and the dynamic loss scale of fp16 training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import check_and_unscale, foreach_mul, foreach_norm
from lightning_zero.comm import Totals

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
    for chunk in _chunks(gradients, size):
        cast = chunk if chunk.dtype is torch.float64 else memory[: chunk.numel()].copy_(chunk)
        sums.append(torch.dot(cast, cast))
    return torch.stack(sums).sum()


def _chunks(gradients: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """All elements of 1-D gradients, at most ``size`` at a time: large ones in pieces, and small ones together."""
    held: list[Tensor] = []
    room = size
    for gradient in gradients:
        for piece in gradient.split(size) if gradient.numel() > size else (gradient,):
            if piece.numel() > room:
                yield torch.cat(held) if len(held) > 1 else held[0]
                held, room = [], size
            held.append(piece)
            room -= piece.numel()
    yield torch.cat(held) if len(held) > 1 else held[0]


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

    def unscale(self, gradients: Sequence[Tensor], totals: Totals) -> bool:
        """Undo the scale in this rank's gradient slices. Returns whether any gradient of any rank is not finite then;
        the same on every rank.

        On an accelerator the host waits for it, once for all ranks, as ``torch.amp.GradScaler`` does: whether the step
        is taken is decided by the host, with the optimizer's and the scheduler's counters, and so is the next scale.

        Collective: every rank.
        """
        factor = 1.0 / self._in_use
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
