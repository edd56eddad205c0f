"""Parameters in a process that is no rank: a worker of a DataLoader, say, that a rank has forked or spawned.

It has none of the threads and connections that bring values together. A parameter that showed its values when the
process was started is an ordinary one there, and whatever is done to it stays there. One that is absent goes on
answering questions about shape, dtype and the like, may be overwritten, and raises where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_zero._torch import make_subclass, untracked
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import Binding, set_gradient
from lightning_zero.shards.slice import Placeholders

__all__ = ["WORKER", "for_worker"]


class Worker:
    """Looks after all parameters of such a process: an ``Owner``."""

    def __init__(self) -> None:
        self.bindings: list[Binding] = []  # of parameters that came here without their values
        self.placeholders = Placeholders()
        self.behind: WeakSet[Binding] = WeakSet()
        """Those whose rank had a gradient, averaged or on its way to be, when it forked this process."""

    def bring(self, binding: Binding, together: bool) -> bool:
        return False

    def assigned(self, binding: Binding, value: Tensor | None) -> bool:
        return False

    def assigned_slice(self, binding: Binding, value: Tensor) -> bool:
        return False

    def handed_out(self, binding: Binding) -> None:
        """Nobody has to know."""

    def sliced(self, binding: Binding) -> Tensor | None:
        return None

    def read_slice(self, binding: Binding) -> Tensor | None:
        return None

    def read_gradient(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        if binding in self.behind:
            raise ParameterAccessError(
                f"The gradient that '{binding.name}' has in its rank is not in this process, and what is computed here "
                "would be added to it: this is a worker that a rank has started (of a DataLoader, say). Call "
                "`module.zero_grad()` in the worker first, or let it have what it needs of the gradient before it "
                "starts: `lightning_zero.full_gradient(module, name)`, on every rank."
            )
        return local

    def write_gradient(self, binding: Binding, value: Tensor | None) -> None:
        self.behind.discard(binding)
        set_gradient(binding.parameter, value)

    def clear_gradient(self, binding: Binding) -> None:
        """``.grad = None`` in a ``zero_grad``."""
        self.write_gradient(binding, None)

    def shows_for_good(self, binding: Binding) -> bool:
        return True

    def for_worker(self, binding: Binding) -> tuple[Any, ...]:
        return for_worker(binding)

    def refusal(self, names: Sequence[str], use: str) -> ParameterAccessError:
        return ParameterAccessError(
            f"The values of parameter '{names[0]}' are not in this process, and {use} needs them: it is a worker that "
            "a rank has started (of a DataLoader, say), and only ranks put sharded parameters together. Compute with "
            "the module in the step method, or give the loader a copy that every rank makes before the workers start: "
            "`with lightning_zero.full_parameters(module): net = copy.deepcopy(module.net)`. With `num_workers=0` "
            "there is no worker."
        )


WORKER = Worker()
"""That of this process, if it is one."""


def for_worker(binding: Binding) -> tuple[Any, ...]:
    """What a parameter is pickled as, without its values, for a process that is being spawned."""
    parameter, like = binding.parameter, binding.placeholder
    kept = tuple(like.shape), like.dtype, parameter.requires_grad, vars(parameter)
    return _without_values, (binding.base, binding.name, *kept)


def _without_values(
    kind: type[nn.Parameter],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    marks: dict[str, Any],
) -> nn.Parameter:
    like = torch.empty(shape, dtype=dtype, device="meta")
    placeholder = WORKER.placeholders.like(like, torch.device("cpu"))
    with untracked():
        parameter: nn.Parameter = make_subclass(kind, placeholder)
    parameter.requires_grad_(requires_grad)
    vars(parameter).update(marks)
    WORKER.bindings.append(Binding(parameter, name, placeholder, WORKER))
    return parameter
