"""Looking inside a sharded run: full parameters, gradients, optimizer states and norms."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn

from lightning_zero._torch import untracked, use_count
from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.engine.full import average_into, gather_layout, gathered, gathered_gradients
from lightning_zero.errors import OffloadError
from lightning_zero.optim.gradients import gradient_norm
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.whole import WholeState
from lightning_zero.shards.binding import is_absent
from lightning_zero.shards.slice import FlatParameters

__all__ = [
    "ema_update",
    "full_gradient",
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "note_optimizers",
]

# Weak on both sides: an optimizer holds its engine, and a strong value would keep its own key alive for good.
_OPTIMIZERS: WeakKeyDictionary[ZeroEngine, list[ref[ShardedOptimizer]]] = WeakKeyDictionary()


def note_optimizers(engine: ZeroEngine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Remember which optimizers step on an engine's shards."""
    _OPTIMIZERS[engine] = [ref(optimizer) for optimizer in optimizers]


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Let all parameters below ``module`` hold their full values, to read and to write.

    Values are the masters (fp32 under mixed precision). What rank 0 has written when the block ends is what every rank
    keeps. An exception inside the block leaves everything as it was before. A program of ``torch.jit`` that is made
    inside shares the parameters and lives there, too: save it inside; a loaded one needs nothing of this package.

    Args:
        module: the LightningModule or any module below it. A module that is not sharded is left as it is.

    Warns:
        UserWarning: if such a program outlives the block, on the rank that keeps it: values would be NaN there.

    Collective: every rank.

    Example::

        with lightning_zero.full_parameters(model.head):
            if trainer.is_global_zero:
                model.head.weight.data.zero_()
    """
    module = _without_fabric(module)
    engine = engine_of(module)
    if engine is None:
        yield
        return
    parameters = list(nn.Module.parameters(module))  # all, whatever a method of the user's shows
    before = {parameter: use_count(parameter) for parameter in parameters}
    with gathered(engine, parameters):
        yield
    risen = [p for p, count in before.items() if is_absent(p) and use_count(p) > count]  # also by graphs of autograd
    programs = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.jit.ScriptModule)] if risen else []
    kept = {parameter for program in programs for parameter in program.parameters()}.intersection(risen)
    if kept:
        name = next(engine.names[parameter] for parameter in risen if parameter in kept)
        warnings.warn(
            f"A program of torch.jit that was made inside of full_parameters keeps {len(kept)} parameters, such as "
            f"'{name}', whose values are not in memory any more: it would compute with NaN. Save it inside of "
            "full_parameters and load the file, or call it there.",
            stacklevel=3,
        )


def ema_update(
    average: nn.Module, module: nn.Module, momentum: float, *, buffers: Literal["keep", "copy", "average"] = "keep"
) -> None:
    """Move the weights of ``average``, a momentum teacher or another running average, towards those of ``module``.

    Each parameter becomes ``average.mul_(momentum).add_(module * (1 - momentum))``, with the bits that this line has on
    whole parameters under DDP, which are those of ``m * average + (1 - m) * module`` too (DINO, BYOL, MoCo). ``lerp_``
    and ``add_(..., alpha=...)`` round in another way. In ``zero3`` and in mixed precision each rank averages its slices
    of the masters, without a message, in whatever tier they rest. Units of ``module`` whose parameters are cut over the
    ranks at other places than those of ``average`` are gathered, one after the other.

    Args:
        average: frozen or not. A part of the LightningModule, or a module that nothing has sharded.
        module: has parameters of the same names and shapes.
        momentum: what is kept of the average, between 0 and 1. Another number at each call makes a schedule.
        buffers: ``keep``: those of ``average`` stay what they are. ``copy``: they become those of ``module``.
            ``average``: the floating ones are averaged as parameters are, and others copied.

    Raises:
        ValueError: if names or shapes differ, or for another momentum.
        ParameterAccessError: in a step method or a backward.

    Collective: every rank, with the same momentum, between steps (``on_train_batch_start``, ``on_train_batch_end``).

    Example::

        def on_train_batch_end(self, outputs, batch, batch_idx):
            lightning_zero.ema_update(self.teacher, self.student, 0.996)
    """
    average, module = _without_fabric(average), _without_fabric(module)
    if not 0 <= momentum <= 1 or buffers not in ("keep", "copy", "average"):
        raise ValueError(
            "ema_update needs a momentum between 0 and 1, and buffers='keep', 'copy' or 'average'; got "
            f"momentum={momentum!r}, buffers={buffers!r}."
        )
    pairs = _pairs(dict(average.named_parameters()), dict(module.named_parameters()), "parameter")
    more = [] if buffers == "keep" else _pairs(dict(average.named_buffers()), dict(module.named_buffers()), "buffer")
    engines = dict.fromkeys(engine for part in (average, module) if (engine := engine_of(part)) is not None)
    average_into(list(engines), pairs, momentum)
    with torch.no_grad():
        for target, source in more:
            if buffers == "average" and (target.is_floating_point() or target.is_complex()):
                target.mul_(momentum).add_(source.to(target.device) * (1 - momentum))
            else:
                target.copy_(source)


def _pairs(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], kind: str) -> list[tuple[Any, Any]]:
    """Those of one name; not what is one tensor in both."""
    for name in [*targets, *sources]:
        shapes = [tuple(found[name].shape) if name in found else "nothing" for found in (targets, sources)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"ema_update needs {kind}s of the same names and shapes, but '{name}' is {shapes[0]} in the average "
                f"and {shapes[1]} in the module. Pass the parts that are alike: `ema_update(teacher.backbone, "
                "student.backbone, momentum)`."
            )
    return [(target, sources[name]) for name, target in targets.items() if target is not sources[name]]


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
    module = _without_fabric(module)
    engine = engine_of(module)
    if engine is None:
        yield
        return
    known = dict(module.named_parameters(remove_duplicate=False))
    for name in names or ():
        if name not in known:
            raise ValueError(f"{type(module).__name__} has no parameter '{name}'.")
    chosen = module.parameters() if names is None else [known[name] for name in names]
    with gathered_gradients(engine, list(chosen)):
        yield


def full_optimizer_state(module: nn.Module, name: str, key: str) -> Any:
    """One entry of an optimizer's state for one parameter, whole.

    Args:
        module: the LightningModule or any module below it.
        name: the parameter's name within ``module``.
        key: for example ``exp_avg``.

    Returns:
        A tensor of the parameter's shape, or the scalar state; freshly allocated. Of several optimizers with such
        state for it, the first one's.

    Raises:
        ValueError: if the parameter is in no optimizer or has no such state (yet).

    Collective: every rank.
    """
    engine, flat, position = _locate(module, name)
    spec = flat.shards[position].spec
    engine.agree(f"full_optimizer_state('{spec.name}', '{key}')")
    known: list[str] | None = None
    for optimizer in filter(None, [weak() for weak in _OPTIMIZERS.get(engine, [])]):
        if all(entry.shard.spec.name != spec.name for entry in optimizer.entries):
            continue
        state = optimizer.named_state().get(spec.name, WholeState())
        if key in state.slices:
            return _assemble(engine, flat, position, state.slices[key], f"state '{key}' of '{name}'")
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
        0-d, the same on every rank, accumulated in float64; on the device, where gradients rest there.

    Raises:
        ValueError: for another norm.

    Collective: every rank. Between a backward (``on_after_backward``) and ``zero_grad``.
    """
    module = _without_fabric(module)
    engine = engine_of(module)
    if engine is None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    wanted = {engine.names[p] for p in module.parameters() if p in engine.names}
    shards = [shard.parameter for name, shard in engine.shards.items() if name in wanted]
    slices = [shard.grad for shard in shards if shard is not None and shard.grad is not None]
    engine.agree("grad_norm")
    return gradient_norm(slices, engine.totals, norm_type)


def _without_fabric(module: nn.Module) -> nn.Module:
    """The user's module, if this is what ``fabric.setup`` made of it."""
    return module.module if isinstance(module, _FabricModule) else module


def _locate(module: nn.Module, name: str) -> tuple[ZeroEngine, FlatParameters, int]:
    module = _without_fabric(module)
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
        if engine.tiers.can_fail:
            engine.control.raise_together(failure, f"read its part of the {what}")
        with engine.paused():
            full = gather_layout(engine, flat, shard, what)
        spec = layout.parameters[position]
        start = layout.offsets[position] if spec.numel else 0
        return full.narrow(0, start, spec.numel).view(spec.shape).clone()
