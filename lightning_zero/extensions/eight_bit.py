"""AdamW whose state takes 2.13 bytes per parameter in the place of 8, in plain torch: on shards, under DDP, or alone.

[Note: blocks]
Both moments are kept in 8 bits, with one float32 scale for each block of 64 elements of the flattened parameter: the
largest magnitude in it. A code is the nearest of 256 fixed values between -1 and 1, or between 0 and 1. Parameters lie
in a flat buffer from a multiple of 64 elements on, and shards end at one, so no block is ever on two ranks, and bits do
not depend on how many there are. Larger blocks, as other libraries have, would be cut.

[Note: values]
The values are those of dynamic tree quantisation: seven decades, each with twice as many values as the one below.
Of the second moment the root is kept. Its decades are two of the moment, so what is small beside the largest of its
block is not rounded to zero, where the step would divide by next to nothing. Source: 8-bit Optimizers via Block-wise
Quantization (arXiv:2110.02861).

[Note: bits of a step]
A step takes a piece of a parameter after the other, so that what it makes beside the state does not grow with the
parameter. Every operation rounds once, by IEEE 754: no `addcmul`, `lerp` or `alpha`, which kernels contract in some
lanes and not in others. So an element's bits depend neither on where pieces and slices begin nor on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lightning_zero.config import Tier
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.plan.layout import ALIGNMENT as BLOCK
from lightning_zero.shards.slice import Slice

__all__ = ["BLOCK", "PIECE_NUMEL", "AdamW8bit", "check_parameters"]

PIECE_NUMEL = {True: 2**22, False: 2**18}
"""Elements that a step computes with at once, by whether the device is an accelerator: multiples of a block."""

_MOST = torch.finfo(torch.float32).max
_STATES = (("exp_avg", True), ("exp_avg_sq", False))  # and whether there are negative ones


class AdamW8bit(Optimizer):
    """AdamW with block-wise 8-bit state.

    Parameters with fewer than ``min_8bit_size`` elements, such as norms and biases, are updated as by
    ``torch.optim.AdamW``, bit for bit. The update of the others is computed in float32 with moments that were rounded
    after the step before; NaN in a gradient spreads to its block. State is saved as codes of the parameter's shape and
    scales by block. It is neither that of ``AdamW`` nor of other 8-bit optimizers, and is not loaded by them.

    Raises:
        ValueError: for a setting out of its range, or a parameter that is not a floating-point number.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = 4096,
    ) -> None:
        wrong = [
            f"{name}={value}" for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)) if value < 0
        ]
        wrong += [f"betas={betas}"] * (not all(0.0 <= beta < 1.0 for beta in betas))
        if wrong:
            raise ValueError(
                f"AdamW8bit(lr, eps, weight_decay) are at least 0, betas from 0 to below 1: got {wrong[0]}."
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "min_8bit_size": min_8bit_size}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer. Raises ``ValueError`` for a parameter that is not a floating-point number."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"AdamW8bit updates floating-point parameters, got one of {parameter.dtype}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            small, large = self._init_group(group)
            if small:
                _step_in_full([(parameter, self.state[parameter]) for parameter in small], group)
            for parameter in large:
                _step_in_blocks(parameter, self.state[parameter], group)
        return loss

    def _init_group(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of a group with a gradient: those with state in full, and those with state in blocks."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError("AdamW8bit needs dense gradients: use torch.optim.SparseAdam for sparse ones.")
            # What a strategy steps on may be a slice of a parameter: each rank must take the same way.
            numel = getattr(parameter, "whole_numel", parameter.numel())
            in_blocks = numel >= group["min_8bit_size"]
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update(_zeros(parameter, in_blocks))
            elif in_blocks != ("exp_avg_codes" in state):
                raise RuntimeError(
                    f"AdamW8bit has state in {('8 bits', 'full precision')[in_blocks]} for a parameter of {numel} "
                    f"elements, and min_8bit_size is {group['min_8bit_size']}. State of torch.optim.AdamW, or that "
                    "was saved with another min_8bit_size, cannot be used: set that one, or begin with fresh state."
                )
            found[in_blocks].append(parameter)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer, but that codes and scales keep their dtypes."""
        blocks: dict[Any, dict[str, Any]] = {}
        others: dict[Any, dict[str, Any]] = {}
        for key, state in state_dict["state"].items():
            for name, value in state.items():
                (blocks if name.endswith(("_codes", "_scales")) else others).setdefault(key, {})[name] = value
        super().load_state_dict({**state_dict, "state": others})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            for name, value in blocks.get(key, {}).items():
                self.state[parameter][name] = value.detach().to(parameter.device, copy=True)


def check_parameters(label: str, entries: Sequence[Slice]) -> None:
    """Raise ``UnsupportedOptimizerError`` for a parameter that is a part of another, or whose state is in files."""
    for entry in entries:
        in_files = entry.parameter is not None and entry.flat.rest.state is Tier.DISK
        if entry.spec.is_split or in_files:
            why = "NvmeOffload keeps in files" if in_files else "tensor parallelism splits"
            raise UnsupportedOptimizerError(
                f"{label}: AdamW8bit cannot update '{entry.name}', which {why}. Use torch.optim.AdamW"
                f"{', or HostOffload' * in_files}."
            )


def _zeros(parameter: Tensor, in_blocks: bool) -> dict[str, Tensor]:
    """Moments of zeros."""
    if not in_blocks:
        return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name, _ in _STATES}
    found: dict[str, Tensor] = {}
    for name, signed in _STATES:
        zero = _values(signed).index(0.0)
        codes = torch.full(parameter.shape, zero, dtype=torch.uint8, device=parameter.device)
        scales = torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=parameter.device)
        found |= {f"{name}_codes": codes, f"{name}_scales": scales}
    return found


def _step_in_full(members: list[tuple[Tensor, dict[str, Tensor]]], group: dict[str, Any]) -> None:
    """What ``torch.optim.AdamW`` does, over all parameters at once where it would."""
    adamw(
        [parameter for parameter, _ in members],
        [parameter.grad for parameter, _ in members if parameter.grad is not None],
        [state["exp_avg"] for _, state in members],
        [state["exp_avg_sq"] for _, state in members],
        [],
        [state["step"] for _, state in members],
        foreach=False if isinstance(group["lr"], Tensor) else None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _step_in_blocks(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update one parameter, piece by piece: see [Note: bits of a step]."""
    state["step"] += 1
    step, (beta1, beta2), lr = state["step"].item(), group["betas"], group["lr"]
    step_size, root_correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    gradient: Any = parameter.grad
    flat, gradient = parameter.detach().reshape(-1), gradient.detach().reshape(-1)
    flat_state = {key: value.view(-1) for key, value in state.items() if key != "step"}
    most = PIECE_NUMEL[parameter.device.type != "cpu"]
    for start in range(0, flat.numel(), most):
        piece = slice(start, start + most)
        blocks = slice(start // BLOCK, (start + most) // BLOCK)
        moments = [
            (flat_state[f"{name}_codes"][piece], flat_state[f"{name}_scales"][blocks], signed)
            for name, signed in _STATES
        ]
        master, own = flat[piece], gradient[piece].to(torch.float32)
        values = master.to(torch.float32) if master.dtype.itemsize < 4 else master
        values.mul_(1 - lr * group["weight_decay"])
        average, root = (_decoded(*moment) for moment in moments)
        average.mul_(beta1)[: own.numel()].add_(own * (1 - beta1))
        root.square_().mul_(beta2)[: own.numel()].add_((own * own).mul_(1 - beta2))
        root.sqrt_()
        update = (root[: own.numel()] / root_correction).add_(group["eps"])
        torch.div(average[: own.numel()], update, out=update)
        values.sub_(update.mul_(step_size))
        del own, update
        if values is not master:
            master.copy_(values)
        del values
        for value, moment in zip((average, root), moments, strict=True):
            _encode(value, *moment)
    if not parameter.is_contiguous():
        parameter.copy_(flat.view(parameter.shape))


def _decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values of some blocks, with zeros behind them to the end of the last block."""
    found = torch.zeros(len(scales) * BLOCK, dtype=torch.float32, device=codes.device)
    torch.index_select(_table(signed, codes.device), 0, codes.int(), out=found[: len(codes)])
    found.view(-1, BLOCK).mul_(scales[:, None])
    return found


def _encode(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """Write some blocks of float32 values, which are overwritten, as codes and scales."""
    blocks = values.view(-1, BLOCK)
    torch.amax(blocks.abs() if signed else blocks, dim=1, out=scales)
    scales.clamp_(max=_MOST)  # one infinite element must not make the others of its block NaN
    blocks.div_(scales.masked_fill(scales == 0, 1.0)[:, None])
    own, (first, bounds) = values[: len(codes)], _search(signed, values.device)
    key = own.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
    codes.copy_(first.index_select(0, key))
    key.copy_(codes)
    limits = bounds.index_select(0, key)
    del key
    codes.add_(own > limits)


@cache
def _values(signed: bool) -> list[float]:
    """The 256 values of a code, ascending: see [Note: values]."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent + (not signed))  # between a tenth and one, in the middles of equal parts
        parts = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
        found += parts + [-part for part in parts] * signed
    return sorted(found)


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(_values(signed), dtype=torch.float32, device=device)


@cache
def _search(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """How to find the nearest value without a search: by the upper 16 bits of a float32, the code of the smallest one
    that has them; and by code, what is nearer to the next one if it is larger. No two bounds have the same 16 bits."""
    bounds = torch.tensor([(one + other) / 2 for one, other in pairwise(_values(signed))], dtype=torch.float32)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(2**15).bitwise_left_shift(16)
    smallest = torch.where(bits < 0, bits + 0xFFFF, bits).view(torch.float32)
    first = torch.bucketize(smallest, bounds).to(torch.uint8)
    return first.to(device), torch.cat([bounds, torch.tensor([math.inf])]).to(device)
