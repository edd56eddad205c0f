"""Looking inside a sharded run: full parameters, gradients, optimizer states and norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn

from lightning_zero._torch import version_of
from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.engine.full import (
    average_into,
    check_between_steps,
    gathered,
    gathered_gradients,
    joined,
    whole,
    whole_gradients,
)
from lightning_zero.errors import DivergenceError, ParameterAccessError, UnsupportedOptimizerError, changed
from lightning_zero.offload.host import OffloadedTensor
from lightning_zero.optim.gradients import gradient_norm
from lightning_zero.optim.state import grain
from lightning_zero.optim.whole import WholeState
from lightning_zero.shards.slice import Slice

__all__ = [
    "LocalSlice",
    "ema_update",
    "full_gradient",
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "local_slices",
]


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Gather all parameters below ``module`` inside a ``with`` block, to read and to write.

    The values are the masters (fp32 under mixed precision). When the block ends, every rank keeps what rank 0 wrote.
    If the block raises an exception, nothing changes. Save a ``torch.jit`` program inside the block and load it from
    the file: it shares the parameters, and computes NaN when it is called after the block.

    Args:
        module: the LightningModule or any module below it. A module that is not sharded stays as it is.

    Collective: every rank.

    Example::

        with lightning_zero.full_parameters(model.head):
            if trainer.is_global_zero:
                model.head.weight.data.zero_()
    """
    module, engine = _engine_of(module)
    if engine is None:
        yield
        return
    with gathered(engine, nn.Module.parameters(module), join=True):  # all, whatever a method of the user's shows
        yield


@changed("Buffers stay as they are: copy or average them in a loop over `buffers()`, which every rank has.")
def ema_update(average: nn.Module, module: nn.Module, momentum: float) -> None:
    """Move the weights of ``average``, a momentum teacher or another running average, towards those of ``module``.

    Each parameter becomes ``average.mul_(momentum).add_(module * (1 - momentum))``, bit for bit as with full parameters
    under DDP. ``m * average + (1 - m) * module`` (DINO, BYOL, MoCo) gives the same bits; ``lerp_`` and
    ``add_(..., alpha=...)`` round differently. In ``zero3`` and in mixed precision each rank averages its slices of
    the masters where they are kept, without communication. Units of ``module`` whose shards are laid out differently
    from those of ``average`` are gathered, one after the other. Buffers stay: every rank has them, to copy as you like.

    Args:
        average: frozen or not. A part of the LightningModule, or a module that is not sharded.
        module: has parameters of the same names and shapes.
        momentum: the weight of the average, between 0 and 1. Pass another number at each call for a schedule.

    Raises:
        ValueError: if names or shapes differ, or for another momentum.
        ParameterAccessError: in a step method or a backward.

    Collective: every rank, with the same momentum, between steps (``on_train_batch_start``, ``on_train_batch_end``).

    Example::

        def on_train_batch_end(self, outputs, batch, batch_idx):
            lightning_zero.ema_update(self.teacher, self.student, 0.996)
    """
    (average, first), (module, second) = _engine_of(average), _engine_of(module)
    if not 0 <= momentum <= 1:
        raise ValueError(f"ema_update needs a momentum between 0 and 1, got {momentum!r}.")
    targets, sources = dict(average.named_parameters()), dict(module.named_parameters())
    for name in [*targets, *sources]:
        shapes = [tuple(found[name].shape) if name in found else "nothing" for found in (targets, sources)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"ema_update needs parameters of the same names and shapes, but '{name}' is {shapes[0]} in the average "
                f"and {shapes[1]} in the module. Pass the parts that are alike: `ema_update(teacher.backbone, "
                "student.backbone, momentum)`."
            )
    pairs = [(target, sources[name]) for name, target in targets.items() if target is not sources[name]]
    average_into([engine for engine in dict.fromkeys((first, second)) if engine is not None], pairs, momentum)


def full_gradient(module: nn.Module, name: str) -> Tensor | None:
    """Gather the averaged gradient of one parameter, as the optimizer will use it.

    Args:
        module: the LightningModule or any module below it.
        name: the parameter's name within ``module``.

    Returns:
        Full shape, the parameter's dtype, freshly allocated; ``None`` if no rank had a gradient for it.

    Raises:
        ValueError: if there is no such trainable parameter.
        RuntimeError: if the last backward did not reduce gradients (``no_sync``, micro-steps in ``zero1``).

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``.
    """
    engine, one = _locate(module, name)
    if one.parameter is None:
        raise ValueError(f"'{name}' is frozen and has no gradient.")
    _check_averaged(engine, f"full_gradient('{one.name}')")
    with engine.paused():
        gradient = whole_gradients(engine, [one], f"gradient of '{name}'")[one.user]
        return None if gradient is None else joined(one, gradient)


@contextmanager
@changed("In the place of names give a part of the module: `full_gradients(module.head)`.")
def full_gradients(module: nn.Module) -> Iterator[None]:
    """Gather the averaged gradients of parameters below ``module`` into ``.grad``, as DDP leaves them.

    They are ordinary tensors of the parameters' dtype, which you may read, edit, replace or set to ``None``.
    ``torch.nn.utils.clip_grad_norm_``, Lightning's ``grad_norm`` and your own code work as under DDP. The optimizer
    uses what ``.grad`` contains when the block ends. If the block raises an exception, the gradients do not change.

    Costs one all-gather of these gradients, their full size in device memory on every rank during the block, and a
    checksum at its end. Pass a part of the module if you need only a few parameters.

    Args:
        module: the LightningModule or any module below it. A module that is not sharded stays as it is.

    Raises:
        DivergenceError: on every rank, if the ranks leave different gradients.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``. Gradients of a backward that
    did not reduce stay as they are, local to each rank.

    Example::

        def on_before_optimizer_step(self, optimizer):
            with lightning_zero.full_gradients(self):
                self.log_dict(lightning.pytorch.utilities.grad_norm(self, 2))
    """
    module, engine = _engine_of(module)
    if engine is None:
        yield
        return
    with gathered_gradients(engine, list(module.parameters())):
        yield


def full_optimizer_state(module: nn.Module, name: str, key: str) -> Any:
    """Gather one entry of the optimizer state of one parameter.

    Args:
        module: the LightningModule or any module below it.
        name: the parameter's name within ``module``.
        key: for example ``exp_avg``.

    Returns:
        A tensor of the parameter's shape, 1-D for state by blocks, or the scalar state; freshly allocated. If several
        optimizers have such state for the parameter, that of the first one.

    Raises:
        ValueError: if the parameter is in no optimizer or has no such state (yet).

    Collective: every rank.
    """
    engine, one = _locate(module, name)
    engine.agree(f"full_optimizer_state('{one.name}', '{key}')")
    known: list[str] | None = None
    for optimizer in engine.optimizers:
        if one not in optimizer.entries:
            continue
        state = optimizer.named_state().get(one.name, WholeState())
        if key in state.slices:
            with engine.paused():
                found = whole(engine, {one: state.slices[key]}, f"state '{key}' of '{name}'", grain(key))[one.user]
                return joined(one, found)
        if key in state.values:
            value = state.values[key]
            return value.clone() if isinstance(value, Tensor) else value
        known = [*(known or ()), *state.slices, *state.values]
    if known is None:
        raise ValueError(f"'{name}' is in no optimizer of this run.")
    raise ValueError(f"'{name}' has no optimizer state '{key}'; there is: {', '.join(known) or 'nothing yet'}.")


def grad_norm(module: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients below ``module``, over all ranks.

    Args:
        module: the LightningModule or any module below it.
        norm_type: 1, 2, another positive number, or ``inf``.

    Returns:
        A 0-d tensor, the same on every rank, accumulated in float64; on the device if gradients are kept there.

    Raises:
        ValueError: for another norm.
        RuntimeError: as of ``full_gradient``.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``.
    """
    module, engine = _engine_of(module)
    if engine is None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    wanted = set(module.parameters())
    slices = [one.counted for one in engine.shards.values() if one.user in wanted and one.gradient is not None]
    _check_averaged(engine, "grad_norm")
    return gradient_norm(slices, engine.totals, norm_type)


def _check_averaged(engine: ZeroEngine, what: str) -> None:
    """Raise RuntimeError on every rank if one has sums of its own. Collective: every rank."""
    if any(row[0] for row in engine.agree(what, [int(engine.accumulates)])):
        raise RuntimeError(f"{what}: the last backward did not reduce gradients, so there are no averages yet.")


def _engine_of(module: nn.Module) -> tuple[nn.Module, ZeroEngine | None]:
    """The user's module, if this is what ``fabric.setup`` made of it, and its engine, if it is sharded."""
    module = module.module if isinstance(module, _FabricModule) else module
    return module, engine_of(module)


class LocalSlice:
    """This rank's part of one parameter, of its averaged gradient and of its optimizer state: 1-D tensors.

    Attributes:
        name: the parameter's, within the module.
        parameter: the user's, whose shape and dtype are those of the whole.
        start: the first element of the flattened parameter that is here. There may be none.
    """

    def __init__(self, engine: ZeroEngine, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self._engine = engine
        self._slice: Slice = engine.shards[engine.names[parameter]]
        self.start = self._slice.start
        self._value: Tensor | None = self._slice.read().detach()
        self._version = version_of(self._value)

    @property
    def value(self) -> Tensor:
        """The master's elements (fp32 under mixed precision), the memory itself unless they are on disk. In its turn of
        the loop only: what is written to it later would not reach the other ranks."""
        if self._value is None:
            raise ParameterAccessError(
                f"The slice of '{self.name}' was kept beyond its turn in the loop over local_slices. Write to `value` "
                "in the loop, and keep a clone of what is needed later."
            )
        return self._value

    @property
    def gradient(self) -> Tensor | None:
        """To read and to edit; what is written there is what the optimizer uses. ``None`` if there is none."""
        if self._engine.accumulates or self._engine.progress.in_backward:
            raise ParameterAccessError(f"The gradient of '{self.name}' is not averaged yet: this rank has its own sum.")
        return self._slice.gradient

    @property
    def state(self) -> dict[str, Any]:
        """By key: 1-D tensors, to read and to edit, and numbers such as ``step``. Empty before the first step."""
        for optimizer in self._engine.optimizers:
            if self._slice in optimizer.entries:
                if optimizer.rule == "whole":
                    raise UnsupportedOptimizerError(
                        f"{optimizer.label} needs whole parameters, so the state of '{self.name}' is on one "
                        "rank only: `lightning_zero.full_optimizer_state(module, name, key)`, on every rank."
                    )
                return dict(optimizer.state.get(self._slice.target, {}))
        return {}

    def keep(self) -> bool:
        """Its turn is over: bring what was written to ``value`` where it belongs. Returns whether anything was."""
        value, self._value = self.value, None
        if version_of(value) == self._version:
            return False
        if isinstance(self._slice.data, OffloadedTensor):
            self._slice.write(value)
        return True


def local_slices(module: nn.Module, *, write: bool = False) -> Iterator[LocalSlice]:
    """Yield this rank's slices of all parameters below ``module``, in their order, without communication.

    Use it for elementwise code: averages, pruning by a threshold, noise, statistics that you sum over the ranks
    afterwards. Every rank must run the whole loop and do the same to its own elements.

    Args:
        module: the LightningModule or any module below it.
        write: whether ``value`` may be written to. The new values are published when the loop ends, which is
            collective: every rank.

    Raises:
        ValueError: if the module is not part of a sharded run.
        ParameterAccessError: in a step method, a backward or a step of the optimizer; if values were written to without
            ``write``; and, at the next step, if a loop that writes was left before its end.

    Example::

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for part in lightning_zero.local_slices(self, write=True):
                part.value.clamp_(-1.0, 1.0)
    """
    module, engine = _engine_of(module)
    if engine is None:
        raise ValueError(f"{type(module).__name__} is not part of a sharded run.")
    check_between_steps(engine, "local_slices")
    return _slices(engine, module, write)


def _slices(engine: ZeroEngine, module: nn.Module, write: bool) -> Iterator[LocalSlice]:
    changed: list[str] = []
    for name, parameter in nn.Module.named_parameters(module):
        if parameter not in engine.names:
            continue
        part = LocalSlice(engine, name, parameter)
        if write:  # until the end of the loop, which a `break` does not reach
            engine.access.torn = f"A loop over local_slices that may have written to '{name}'"
        try:
            yield part
        finally:
            if part.keep():
                changed.append(engine.names[parameter])
                if not write:  # also where a `break` ends the loop
                    engine.access.torn = f"A loop over local_slices that wrote to '{name}' without `write=True`"
        if changed and not write:
            raise ParameterAccessError(
                f"The value of '{name}' was written to in local_slices: pass `write=True`, on every rank."
            )
    if write:
        engine.access.torn = ""
        if (size := len(engine.control.counted)) < engine.control.world_size:  # others have the same slices
            rows = engine.control.gather_objects(changed, "writes in local_slices")
            for rank, row in enumerate(rows):
                if row != rows[rank % size]:
                    raise DivergenceError(
                        f"Ranks {rank % size} and {rank} have the same slices, and wrote to different ones in "
                        f"local_slices: {rows[rank % size]} and {row}. Let every rank run the same loop."
                    )
        written = {engine.shards[name].unit for name in changed}
        wrote = engine.control.any_of(torch.tensor([unit.index in written for unit in engine.units])).tolist()
        if any(wrote):
            engine.masters_changed([index for index, had in enumerate(wrote) if had])


def _locate(module: nn.Module, name: str) -> tuple[ZeroEngine, Slice]:
    module, engine = _engine_of(module)
    if engine is None:
        raise ValueError(f"{type(module).__name__} is not part of a sharded run.")
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None or parameter not in engine.names:
        raise ValueError(f"{type(module).__name__} has no sharded parameter '{name}'.")
    return engine, engine.shards[engine.names[parameter]]
