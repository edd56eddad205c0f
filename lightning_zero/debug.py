"""Looking inside a sharded run: full parameters, gradients, optimizer states and norms, by module and name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.engine.flat import FlatParameters
from lightning_zero.engine.full import gather_layout, gathered
from lightning_zero.engine.full_gradients import gathered_gradients
from lightning_zero.errors import OffloadError
from lightning_zero.optim.clip import gradient_norm
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.whole import WholeState

__all__ = ["full_gradient", "full_gradients", "full_optimizer_state", "full_parameters", "grad_norm", "note_optimizers"]

# Weak on both sides: an optimizer holds its engine, and a strong value would keep its own key alive for good.
_OPTIMIZERS: WeakKeyDictionary[ZeroEngine, list[ref[ShardedOptimizer]]] = WeakKeyDictionary()


def note_optimizers(engine: ZeroEngine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Remember which optimizers step on an engine's shards."""
    _OPTIMIZERS[engine] = [ref(optimizer) for optimizer in optimizers]


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Let all parameters below ``module`` hold their full values, to read and to write.

    Values are the masters (fp32 under mixed precision). What rank 0 has written when the block ends is what every rank
    keeps. An exception inside the block leaves everything as it was before.

    Args:
        module: the LightningModule or any module below it. A module that is not sharded is left as it is.

    Collective: every rank.

    Example::

        with lightning_zero.full_parameters(model.head):
            if trainer.is_global_zero:
                model.head.weight.data.zero_()
    """
    engine = engine_of(module)
    if engine is None:
        yield
        return
    with gathered(engine, module.parameters()):
        yield


def full_gradient(module: nn.Module, name: str) -> Tensor | None:
    """The averaged gradient of one parameter, as the optimizer is about to use it.

    Args:
        module: the LightningModule or any module below it.
        name: the parameter's name within ``module``.

    Returns:
        Full shape, the parameter's dtype, freshly allocated; ``None`` if no rank had a gradient for it.

    Raises:
        ValueError: if there is no such trainable parameter.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``.
    """
    engine, flat, position = _locate(module, name)
    shard = flat.shards[position]
    if shard.parameter is None:
        raise ValueError(f"'{name}' is frozen and has no gradient.")
    rows = engine.agree(f"full_gradient('{shard.spec.name}')", [int(shard.parameter.grad is not None)])
    if not any(row[0] for row in rows):
        return None
    return _assemble(engine, flat, position, shard.parameter.grad, f"gradient of '{name}'")


@contextmanager
def full_gradients(module: nn.Module, names: Sequence[str] | None = None) -> Iterator[None]:
    """Let ``.grad`` of parameters below ``module`` be their whole averaged gradients, as DDP leaves them.

    They are ordinary tensors, of the parameters' dtype, to read, edit and replace, or to set to ``None``: so
    ``torch.nn.utils.clip_grad_norm_``, Lightning's ``grad_norm`` and hand-written code do what they do under DDP. What
    is in ``.grad`` when the block ends is what the optimizer uses. An exception inside the block leaves the gradients
    as they were before.

    Costs one gather of the gradients asked for, as many bytes on every rank's device for as long as the block runs, and
    a checksum of them at its end. Ask for ``names`` where a few parameters will do.

    Args:
        module: the LightningModule or any module below it. One that is not sharded is left as it is.
        names: parameters, by their names within ``module``; ``None``: all of them. Frozen ones have no gradient.

    Raises:
        ValueError: if there is no such parameter.
        DivergenceError: on every rank, if the ranks leave different gradients.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``. Gradients of a backward that
    did not reduce are each rank's own, and left as they are.

    Example::

        def on_before_optimizer_step(self, optimizer):
            with lightning_zero.full_gradients(self):
                self.log_dict(lightning.pytorch.utilities.grad_norm(self, 2))
    """
    engine = engine_of(module)
    if engine is None:
        yield
        return
    if names is None:
        chosen = list(module.parameters())
    else:
        known = dict(module.named_parameters(remove_duplicate=False))
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(f"{type(module).__name__} has no parameter '{missing[0]}'.")
        chosen = [known[name] for name in names]
    with gathered_gradients(engine, chosen):
        yield


def full_optimizer_state(module: nn.Module, name: str, key: str) -> Any:
    """One entry of an optimizer's state for one parameter, whole.

    Args:
        module: the LightningModule or any module below it.
        name: the parameter's name within ``module``.
        key: for example ``exp_avg``.

    Returns:
        A tensor of the parameter's shape, or the scalar state; freshly allocated.

    Raises:
        ValueError: if the parameter is in no optimizer or has no such state (yet).

    Collective: every rank.
    """
    engine, flat, position = _locate(module, name)
    spec = flat.shards[position].spec
    engine.agree(f"full_optimizer_state('{spec.name}', '{key}')")
    for optimizer in filter(None, [weak() for weak in _OPTIMIZERS.get(engine, [])]):
        for entry in optimizer.entries:
            if entry.shard.spec.name != spec.name:
                continue
            state = optimizer.named_state().get(spec.name, WholeState())
            if key in state.slices:
                return _assemble(engine, flat, position, state.slices[key], f"state '{key}' of '{name}'")
            if key in state.values:
                value = state.values[key]
                return value.clone() if isinstance(value, Tensor) else value
            known = ", ".join([*state.slices, *state.values]) or "nothing yet"
            raise ValueError(f"'{name}' has no optimizer state '{key}'; there is: {known}.")
    raise ValueError(f"'{name}' is in no optimizer of this run.")


def grad_norm(module: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients below ``module``, over all ranks.

    Args:
        module: the LightningModule or any module below it.
        norm_type: 1, 2, another positive number, or ``inf``.

    Returns:
        0-d, the same on every rank, accumulated in float64.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``.
    """
    engine = engine_of(module)
    if engine is None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    wanted = {engine.names[p] for p in module.parameters() if p in engine.names}
    slices = []
    for name, shard in engine.shards.items():
        if name in wanted and shard.parameter is not None and shard.parameter.grad is not None:
            slices.append(shard.parameter.grad)
    engine.agree("grad_norm")
    return gradient_norm(slices, engine.control, norm_type)


def _locate(module: nn.Module, name: str) -> tuple[ZeroEngine, FlatParameters, int]:
    engine = engine_of(module)
    if engine is None:
        raise ValueError(f"{type(module).__name__} is not part of a sharded run.")
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    for unit in engine.units:
        for flat in unit.flats:
            for position, candidate in enumerate(flat.parameters):
                if candidate is parameter:
                    return engine, flat, position
    raise ValueError(f"{type(module).__name__} has no sharded parameter '{name}'.")


def _assemble(engine: ZeroEngine, flat: FlatParameters, position: int, piece: Tensor | None, what: str) -> Tensor:
    layout, place = flat.layout, flat.slices[position]
    with untracked():
        dtype = piece.dtype if piece is not None else layout.dtype
        shard = torch.zeros(layout.shard_numel, dtype=dtype, device=engine.device)
        failure: OffloadError | None = None
        if piece is not None and place.numel:
            try:
                shard.narrow(0, place.shard_start, place.numel).copy_(piece.reshape(-1))
            except OffloadError as error:
                failure = error
        if engine.plan.offload is not None:
            engine.control.raise_together(failure, f"read its part of the {what}")
        with engine.paused():
            full = gather_layout(engine, flat, shard, what)
        spec = layout.parameters[position]
        start = layout.offsets[position] if spec.numel else 0
        return full.narrow(0, start, spec.numel).view(spec.shape).clone()
