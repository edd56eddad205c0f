"""Models whose backward reaches weights behind the engine's back. An engine that does not notice computes nonsense.

What each may end in is stated with it: ``"exact"`` (bit for bit as DDP), ``"error"`` (the same on every rank, before
anything was updated), ``"nan"`` (loud in the loss). Silently wrong is never among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.cases import WIDTH, Batch, Block, Case, Stack, case, mse

__all__ = ["HAZARDS", "Hazard"]


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """A case, and the outcomes allowed while parameters are replicated or sharded. ``error`` is what errors name."""

    case: Case
    replicated: frozenset[str]
    sharded: frozenset[str]
    error: str = ""

    def __repr__(self) -> str:
        return self.case.name


HAZARDS: dict[str, Hazard] = {}


def _add(
    name: str,
    build: Callable[[], nn.Module],
    *,
    replicated: str = "exact",
    sharded: str = "exact",
    error: str = "",
    **options: Any,
) -> None:
    HAZARDS[name] = Hazard(
        case=case(name, build, **options),
        replicated=frozenset(replicated.split()),
        sharded=frozenset(sharded.split()),
        error=error,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Outputs whose hooks get lost


class Wide(nn.Module):
    """A bare 3-D linear layer: its output is a view, and it saves a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class InPlaceOnOutput(Stack):
    """In-place arithmetic on a unit's output makes torch drop the tensor hooks on it, if it is a view."""

    def __init__(self) -> None:
        super().__init__(Wide(), Wide(), Wide())

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return x


class InPlaceOnViewOfOutput(InPlaceOnOutput):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.view(-1, WIDTH).mul_(0.5).add_(1)
            y[:, 0].zero_()
            x = x + y
        return x


_add("in_place_on_output", InPlaceOnOutput, units=("Wide",))
_add("in_place_on_view_of_output", InPlaceOnViewOfOutput, units=("Wide",))


class SideChannel(Block):
    """Leaves its auxiliary loss on itself. ``shares``: the same weights are in the main path too."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.shares = shares
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        self.auxiliary = gate.square().mean()
        return super().forward(x * gate.sigmoid() if self.shares else x)


def _with_side_channel(model: nn.Module, batch: Batch) -> Tensor:
    loss = mse(model, batch)
    return loss + sum(layer.auxiliary for layer in model.layers)


for _shares in (False, True):
    _add(
        f"side_channel{'_shares_weight' if _shares else ''}",
        lambda shares=_shares: Stack(*(SideChannel(shares) for _ in range(3))),
        units=("SideChannel",),
        loss=_with_side_channel,
    )


class Opaque:
    """Hides a tensor from everything that looks through containers."""

    __slots__ = ("_hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def reveal(self) -> Tensor:
        return self._hidden


class OpaqueBlock(Block):
    def forward(self, x: Any) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x.reveal()))


class OpaqueStack(Stack):
    def __init__(self, frozen: bool) -> None:
        super().__init__(*(OpaqueBlock() for _ in range(4)))
        for layer in self.layers[1:3] if frozen else ():
            layer.requires_grad_(False)

    def run(self, x: Tensor) -> Tensor:
        hidden = Opaque(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.reveal()


_add("opaque_output", lambda: OpaqueStack(frozen=False), units=("OpaqueBlock",))
_add("opaque_output_of_frozen_unit", lambda: OpaqueStack(frozen=True), units=("OpaqueBlock",))

# ---------------------------------------------------------------------------------------------------------------------
# Weights read where their unit does not compute


class Stashing(Block):
    """Keeps a view of its weight for later use outside."""

    def forward(self, x: Tensor) -> Tensor:
        self.stashed = self.up.weight.t()
        return super().forward(x)


class StashReader(Stack):
    def __init__(self) -> None:
        super().__init__(*(Stashing() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (x @ self.layers[0].stashed).mean() + (x @ self.layers[2].stashed).mean()


class StashInBackward(Stack):
    """The stashed view of a unit long gone takes part in a matrix product whose backward reads it."""

    def __init__(self) -> None:
        super().__init__(*(Stashing() for _ in range(4)))

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x + F.gelu(x @ self.layers[0].stashed).mean()
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def _decay_in_loss(model: nn.Module, batch: Batch) -> Tensor:
    return mse(model, batch) + 0.01 * model.layers[1].up.weight.square().sum()


_add("stashed_view", StashReader, sharded="nan error", units=("Stashing",))
_add("stashed_view_at_once", StashInBackward, sharded="nan error exact", units=("Stashing",))
_add("weight_read_outside_unit", Stack, sharded="exact", loss=_decay_in_loss)

# ---------------------------------------------------------------------------------------------------------------------
# Backward inside backward


def _gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, batch[1]) + gradient.square().mean()


def _gradient_of_weights(model: nn.Module, batch: Batch) -> Tensor:
    loss = mse(model, batch)
    first = torch.autograd.grad(loss, model.layers[0].up.weight, retain_graph=True)[0]
    return loss * (1 + first.square().sum())


_add("gradient_penalty", Stack, replicated="exact", sharded="exact", loss=_gradient_penalty)
_add(
    "gradient_of_weights",
    Stack,
    replicated="exact",
    sharded="exact",
    loss=_gradient_of_weights,
    notes="autograd.grad of a parameter inside of the step, as for gradient surgery",
)


class ModifiesActivation(Block):
    """Overwrites what its own backward needs. Torch's version check must survive the engine's hooks."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).exp()
        out = self.down(hidden)
        hidden.mul_(2)
        return out


_add(
    "modified_saved_tensor",
    lambda: Stack(ModifiesActivation(), ModifiesActivation()),
    replicated="error",
    sharded="error",
    error="modified by an inplace operation",
    units=("ModifiesActivation",),
)
