"""Which optimizers step on slices, which need whole parameters, and which cannot be sharded.

[Note: optimizers that relate parameters to one another]
An optimizer with a ``step`` of its own, or an ``_init_group``, gets whole parameters, each at one rank. That is right
as long as it treats each parameter on its own. One that takes a norm over all of them, counts them, goes by their
places, or draws random numbers would train something else on every rank, and nobody would see it. So before the first
step a copy of it steps on small tensors in place of the parameters: once with all of them, and once as each of two
ranks would see them. What it does only after the first few steps is not seen.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from numbers import Real
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import TorchDispatchMode, bare_step, tree_leaves, without_hooks
from lightning_zero.config import Tier
from lightning_zero.errors import UnsupportedOptimizerError, ZeroError
from lightning_zero.optim.agreement import lines_of

__all__ = ["check_offloadable", "optimizer_rule", "refuse_closure", "steps_on_slices", "torch_class", "try_in_parts"]

_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
    | {"AdamW8bit"}  # ours: block by block, and no rank has a part of one
)
_KNOWN = ("torch.optim", "lightning_zero.extensions.eight_bit")


def torch_class(cls: type) -> Any:
    """The optimizer of torch, or of ours, that a class is or derives from, or ``None``."""
    return next((base for base in cls.__mro__ if base.__module__.startswith(_KNOWN)), None)


def steps_on_slices(optimizer: Optimizer | type) -> bool:
    """Whether an optimizer, or one of a class, steps as one of torch's that works element by element does."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    base = torch_class(cls)
    if base is None or base.__name__ not in _ELEMENTWISE:
        return False
    derived = [vars(each) for each in cls.__mro__[: cls.__mro__.index(base)]]
    # Without what torch puts around a class's step when the first optimizer of it is made, also where it inherits it.
    if any(without_hooks(own["step"]) is not without_hooks(base.step) for own in derived if "step" in own):
        return False
    # An `_init_group` sees, and may change, all that the step is about to update.
    own_group = any(own.get("_init_group", base._init_group) is not base._init_group for own in derived)
    return not own_group and (optimizer is cls or "_init_group" not in vars(optimizer))


def optimizer_rule(optimizer: Optimizer) -> str:
    """How an optimizer is served: ``elementwise`` (on slices), ``whole`` (on whole parameters at their owner) or
    ``closure``, by the extension for those that run forward and backward in their step.

    Optimizers we do not know treat each parameter on its own as a rule, so they get whole parameters: always right, at
    the price of two more exchanges per step. Raises ``UnsupportedOptimizerError``, with the reason and an alternative,
    for an optimizer neither way can serve.
    """
    cls = type(optimizer)
    if not isinstance(vars(optimizer).get("_optimizer_step_pre_hooks"), OrderedDict):
        raise UnsupportedOptimizerError(
            f"{cls.__name__} cannot be sharded: it has no step hooks, because its __init__ does not call "
            "`super().__init__(params, defaults)`. Call it there; a wrapper can pass the param_groups of what it wraps."
        )
    why = ""
    if isinstance(optimizer, torch.optim.SparseAdam):
        why = "it needs sparse gradients and sharded gradients are dense; use Adam with the same options"
    elif any(base.__module__.startswith("torchao.") for base in cls.__mro__):  # a save would dequantise it, or fail
        why = "it keeps its state in classes of torchao's, which checkpoints cannot hold; use lightning_zero.AdamW8bit"
    if why:
        raise UnsupportedOptimizerError(f"{cls.__name__} cannot be sharded: {why} instead.")
    if _needs_closure(optimizer):
        return "closure"
    return "elementwise" if steps_on_slices(optimizer) else "whole"


def check_offloadable(optimizer: Optimizer, label: str, rule: str, tier: Tier, device: torch.device) -> None:
    """Raise ``UnsupportedOptimizerError`` for what cannot step where its masters rest, in ``tier``, for a module that
    computes on ``device``."""
    name = type(optimizer).__name__
    in_place = tier is Tier.DEVICE or (tier is Tier.HOST and device.type == "cpu")
    if rule == "whole" and not in_place:
        raise UnsupportedOptimizerError(
            f"{label}: {name} needs whole parameters at one rank, which are put together on the {device.type} device, "
            "where offload does not leave the masters. Use HostOffload on the CPU, leave `offload` out, or use an "
            "optimizer of torch that works element by element such as AdamW."
        )
    for option in ("capturable", "differentiable"):
        if tier is not Tier.DEVICE and any(group.get(option) for group in optimizer.param_groups):
            raise UnsupportedOptimizerError(
                f"{label}: {name}({option}=True) cannot step on the host, where offload keeps what it steps on. Build "
                f"it with {option}=False, or leave `offload` out."
            )


_NEEDS_CLOSURE = (
    "{name} cannot be sharded as it is: its step() needs a closure, which runs forward and backward inside of the "
    "step. Declare it as an argument without a default: `def step(self, closure)`. Every rank then steps on full "
    "parameters, with the memory of DDP."
)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` has an argument ``closure`` without a default, or a copy on small tensors raises without one and
    calls one that it gets."""
    step: Any = inspect.unwrap(type(optimizer).step)  # without what torch has wrapped around it
    try:
        closure = inspect.signature(step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    if closure is None or str(step.__module__).startswith("torch.optim."):
        return closure is not None and closure.default is closure.empty
    calls: list[Tensor] = []

    def loss() -> Tensor:
        calls.append(torch.ones((), requires_grad=True))
        return calls[-1]

    for arguments in ({}, {"closure": loss}):
        with suppress(Exception, _CollectiveError), _trial():
            _stepped(optimizer, None, 1.0, None, **arguments)
            return bool(calls)
    return False


def refuse_closure(optimizer: Optimizer, error: BaseException) -> None:
    """Raise what to do instead if ``error``, of a step without a closure, says that the optimizer wants one."""
    if isinstance(error, Exception) and not isinstance(error, ZeroError) and "closure" in repr(error).lower():
        raise UnsupportedOptimizerError(_NEEDS_CLOSURE.format(name=type(optimizer).__name__)) from error


_LENGTH = 4  # of a stand-in, in each dimension at most
# Of gradients: some clip only large ones, others raise small ones, or pass over all if one is not finite.
_SCALES = (1e-3, 1.0, 1e3, math.nan)
_STEPS = 2
# Of learning: its own, and 1, as one that a warm-up has set to 0 would hide everything, and a small one most.
_RATES = (None, 1.0)
_BOUND = 1e-5  # of a relative difference, which rounding does not reach
_WHY = (
    "{label} cannot be sharded. Tried out on small tensors, its step() {found} when each rank steps on some of "
    "the parameters only. So it takes a norm over all parameters, counts them or goes by their places, draws random "
    "numbers, uses parameters whose `grad` is None, or keeps parameters beside `self.param_groups`. Have step() treat "
    "each parameter on its own, pass over those without `grad`, keep what belongs to one in `self.state[parameter]`, "
    "and do the rest outside: `Trainer(gradient_clip_val=...)` for a norm of gradients, `full_gradients` in "
    "`on_before_optimizer_step`, options of param groups for what differs between parameters. Or have it be "
    "`step(self, closure)` and call the closure: every rank then steps on all parameters, with the memory of DDP."
)


def try_in_parts(optimizer: Optimizer, label: str) -> None:
    """Raise ``UnsupportedOptimizerError`` for an optimizer whose parameters cannot be dealt out to ranks. See the note
    of the file. Local.

    The values of its parameters need not be there, and it is not changed. One that does not step on small tensors at
    all, or cannot be copied, is let through with a warning.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    try:
        with _trial():
            found = _tried(optimizer)
    except _CollectiveError as error:
        raise UnsupportedOptimizerError(
            f"{label} cannot be sharded: its step() calls the collective {error}, and each rank would call it for "
            "other parameters. Leave that out: gradients are averaged, and all ranks get the weights, as from "
            "torch.optim.Muon. Or have it be `step(self, closure)` and call the closure: every rank then steps on "
            "all parameters, with the memory of DDP."
        ) from None
    except Exception as error:
        warnings.warn(
            f"{label} could not be tried out on small tensors ({type(error).__name__}: {error}). It gets "
            "whole parameters, each at one rank, which is right if its step() treats every parameter on its own.",
            stacklevel=2,
        )
        return
    if found:
        raise UnsupportedOptimizerError(_WHY.format(label=label, found=found))


class _CollectiveError(BaseException):
    """Not an ``Exception``, which a trial takes for one of the optimizer's."""


class _Alone(TorchDispatchMode):
    """Has no collective of torch's called."""

    @classmethod
    def is_infra_mode(cls) -> bool:  # else nothing is compiled inside, which ``fullgraph=True`` takes for an error
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _CollectiveError(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _trial() -> Iterator[None]:
    """Around a trial: generators go on afterwards as if nothing had been drawn, and nothing is warned of."""
    numbers = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), warnings.catch_warnings(), _Alone():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(numbers)


def _tried(optimizer: Optimizer) -> str:
    """What is different if two ranks step on half of the parameters each; raises if it never steps."""
    failure: Exception | None = None
    stepped = False
    for rate, scale in product(_RATES, _SCALES):
        try:
            whole, options = _stepped(optimizer, rate, scale, None)
        except Exception as error:
            failure = failure or error
            continue
        stepped = True
        try:
            parts = [_stepped(optimizer, rate, scale, rank) for rank in (0, 1)]
        except Exception as error:
            return f"raises {type(error).__name__} ({shorten(str(error), 120)})"
        dealt = [parts[place % 2][0][place] for place in range(len(whole))]
        if not all(len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(whole, dealt, strict=True)):
            return "gives other numbers"
        if any(options != other for _, other in parts):
            return "leaves other options in its param groups"
    if failure is not None and not stepped:
        raise failure
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other.to(one.dtype), _BOUND, 0.0, equal_nan=True)


def _stepped(
    optimizer: Optimizer, rate: float | None, scale: float, rank: int | None, **arguments: Any
) -> tuple[list[list[Tensor]], list[str]]:
    """Each stand-in and its state after some steps of a copy, and the options of its param groups.

    ``arguments`` are those of the step. ``rank``: which of two it is, ``None``: the only one. A ``scale`` that is not
    finite is one of the first parameter.
    """
    torch.manual_seed(0)
    random.seed(0)
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [[min(length, _LENGTH) for length in parameter.shape] for parameter in originals]
    stand_ins = [
        nn.Parameter(torch.randn(shape, dtype=original.dtype), requires_grad=original.requires_grad)
        for shape, original in zip(shapes, originals, strict=True)
    ]
    scales = [scale if math.isfinite(scale) or place == 0 else 1.0 for place in range(len(stand_ins))]
    gradients = [[own * torch.randn_like(s) for own, s in zip(scales, stand_ins, strict=True)] for _ in range(_STEPS)]
    twin = _copied(optimizer, {id(p): s for p, s in zip(originals, stand_ins, strict=True)})
    for group in twin.param_groups:
        if rate is not None and isinstance(group.get("lr"), Real | Tensor):
            group["lr"] = group["lr"] * 0 + rate
    stepped = list(stand_ins)
    if rank is not None:  # what it owns, as parameters that the optimizer has not seen, and behind that slices of all
        owned = {s: nn.Parameter(s.detach(), s.requires_grad) for s in stand_ins[rank::2]}
        stepped = [owned.get(s, s) for s in stand_ins]
        for group in twin.param_groups:
            slices = [p.detach().flatten()[: 0 if p in owned else 2].clone() for p in group["params"]]
            group["params"] = [*(owned[p] for p in group["params"] if p in owned), *map(nn.Parameter, slices)]
    for step in gradients:
        for place, (parameter, gradient) in enumerate(zip(stepped, step, strict=True)):
            parameter.grad = gradient if parameter.requires_grad and rank in (None, place % 2) else None
        bare_step(twin)(**arguments)
    values = [[p, *(v for v in tree_leaves(twin.state.get(p, {})) if isinstance(v, Tensor))] for p in stepped]
    found = [[v.detach() for v in each if v.is_floating_point() or v.is_complex()] for each in values]
    return found, lines_of(twin, "", [])


def _copied(optimizer: Optimizer, stand_ins: dict[int, Any]) -> Optimizer:
    """The same optimizer over other parameters, without hooks and schedulers, before its first step."""
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {**stand_ins, id(optimizer): twin}
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    for value in tree_leaves(vars(optimizer)):
        if isinstance(value, Tensor) and value.shape in shapes and id(value) not in memo:
            # What goes with a parameter in an attribute of the optimizer (``self.bufs``), as small as its stand-in.
            memo[id(value)] = value.detach()[tuple(slice(_LENGTH) for _ in value.shape)].to("cpu", copy=True)
    for key, value in vars(optimizer).items():
        if key != "step":
            if key == "state":
                value = defaultdict(dict)
            vars(twin)[key] = OrderedDict() if "hooks" in key else copy.deepcopy(value, memo)
    return twin
