"""What a training step holds for its backward, measured before anything runs: a forward and a backward without memory.

[Note: a step of fake tensors]
A copy of the module runs its step with shapes and dtypes only, its weights in the dtype that units compute in. What
autograd saves counts once by storage, without weights, buffers and the batch; in the backward all that comes and goes,
but for the parameters' gradients, which a plan has. Only metrics of torchmetrics may ask for values. Kernels are of a
GPU if one is here. Else a step on an accelerator has those of CPUs, but for what differs most: dropout keeps a byte of
an element; attention drops nothing, and so keeps no matrix of positions; norms and softmax are in float32.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from lightning_zero import _torch
from lightning_zero._torch import WeakStorage, storage_key, tree_leaves, tree_map_only
from lightning_zero.activations import Recomputed
from lightning_zero.config import ActivationPolicy, ActivationsLike, UnitsLike, validate_activations
from lightning_zero.plan.plan import Plan
from lightning_zero.plan.units import find_recomputed

__all__ = ["ActivationBytes", "first_batch", "measure_activations"]

# What keeps memory of a size which torch knows when it runs.
_OPAQUE = ("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn")
# On GPUs and not on CPUs: what has no dropout here (and its place among the arguments), and autocast's float32.
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
_FULL_PRECISION = {F.layer_norm, F.group_norm, F.cross_entropy, F.softmax, torch.softmax, Tensor.softmax}
_FULL_PRECISION |= {F.log_softmax, torch.log_softmax, Tensor.log_softmax}


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes of one rank in a training step, beside what a plan counts."""

    batch: int
    saved: int  #: By autograd when the forward ends, but for what is on the host by ``ActivationPolicy``.
    temporaries: int  #: Beside these at the worst moment: what is computed again, and gradients of activations.

    @property
    def total(self) -> int:
        """On the device, at the worst moment."""
        return self.batch + self.saved + self.temporaries


def measure_activations(
    model: nn.Module,
    batch: Any,
    *,
    param_dtype: torch.dtype | None = None,
    full_precision: Sequence[str] = (),
    autocast: bool = True,
    accelerator: bool = False,
    policy: ActivationsLike = None,
    units: UnitsLike | None = None,
) -> ActivationBytes:
    """Bytes of the activations of a training step, which is run without memory; see [Note: a step of fake tensors].

    Args:
        model: with a ``training_step``, or called with the batch, whose items may be arguments; may be on the meta
            device. Its loss is what it returns as ``loss``, or the sum of its outputs. Not changed.
        batch: of one rank. Only its shapes and dtypes are looked at.
        param_dtype, full_precision: as in ``build_plan``; the step is run under ``autocast`` to the former.
        accelerator: whether ranks compute on one.
        policy, units: the strategy's ``activations`` and ``units``.

    Raises:
        ValueError: if the step depends on values, optimizes by hand, is tensor-parallel or fails (saying where), or the
            policy is unfit.
    """
    if any(hasattr(parameter, "tensor_part") for parameter in model.parameters()):
        raise ValueError(f"Activations of a tensor-parallel {type(model).__name__} are not known: give their size.")
    if not getattr(model, "automatic_optimization", True):
        raise ValueError(f"Activations of {type(model).__name__} are not known: it optimizes by hand.")
    policy = validate_activations(policy) or ActivationPolicy()
    again = () if policy.checkpointing is None else find_recomputed(model, policy.checkpointing, units)
    plan = Plan.build(model, stage=1, world_size=1, param_dtype=param_dtype, full_precision=full_precision)
    dtypes = {spec.name: layout.compute_dtype for layout in plan.layouts for spec in layout.parameters}
    device = torch.device("cuda" if accelerator and torch.cuda.is_available() else "cpu")
    log = logging.getLogger("torch._subclasses.fake_tensor")
    # Before FakeTensorMode pretends that there is a GPU: the first backward of a process starts threads for GPUs it
    # finds, and then backwards in processes that are forked afterwards fail.
    torch.ones((), requires_grad=True).backward()
    try:
        with ExitStack() as stack, _torch.FakeTensorMode(allow_non_fake_inputs=True):
            stack.callback(random.setstate, random.getstate())
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)  # it tells of operators that fail, with their traceback, and so does ours
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if autocast and param_dtype is not None:
                stack.enter_context(torch.autocast(device.type, dtype=param_dtype, cache_enabled=False))
            stack.enter_context(_AsOnAccelerators() if accelerator and device.type == "cpu" else nullcontext())
            step = _Step(model, dtypes, device, policy.min_kib * 1024 if policy.offload and accelerator else None)
            for name in again:
                stack.callback(Recomputed(name, step.module.get_submodule(name), nullcontext).remove)
            return step.run(batch)
    except Exception as error:  # of the user's code, and of all that fake tensors cannot do
        asks = isinstance(error, _torch.ASKS_FOR_VALUES)
        why = "it asks for values" if asks else f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        others = ("<", sys.prefix, str(Path(__file__).parent))  # torch, Lightning, this
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
        where = "".join(f" ({Path(f.filename).name}, line {f.lineno}: `{f.line}`)" for f in frames[-1:])
        what = f"Activations of {type(model).__name__} are not known: a step without values cannot be run"
        raise ValueError(f"{what}, because {why}{where}.") from error


def copied(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with what ``make`` makes of its tensors, ties and all."""
    leaves = (leaf for inner in module.modules() for leaf in tree_leaves(vars(inner)))
    memo: dict[int, Any] = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    for key, one in memo.items():
        memo[key] = nn.Parameter(make(one), one.requires_grad) if isinstance(one, nn.Parameter) else make(one)
    return copy.deepcopy(module, memo)


class _Step(_torch.TorchDispatchMode):
    """A step of a copy of ``module``. What is saved and has ``host_from`` bytes or more goes to the host."""

    def __init__(
        self, module: nn.Module, dtypes: Mapping[str, torch.dtype], device: torch.device, host_from: float | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._host_from = device, host_from
        self._standing: dict[int, Tensor] = {}  # what does not count, by storage
        self._saved: dict[int, WeakStorage] = {}
        self._alive: dict[int, tuple[int, Any]] = {}  # storages' numbers, and what waits for their end
        self._changes: list[tuple[int, int]] = []  # a storage's number, and bytes
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.module: Any = copied(module, lambda one: self._fake(one, dtypes.get(names.get(id(one), ""))))
        for own, made in zip(module.modules(), self.module.modules(), strict=True):
            given = {"_trainer": vars(own).get("_trainer"), "_device": device}  # a LightningModule's, and a metric's
            vars(made).update({name: value for name, value in given.items() if name in vars(own)})
            if hasattr(own, "training_step"):
                vars(made).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))
            for name in ("forward", "update", "compute") if isinstance(made, Metric | MetricCollection) else ():
                vars(made)[name] = functools.partial(_if_possible, getattr(made, name))

    def run(self, batch: Any) -> ActivationBytes:
        """Forward and backward."""
        weights = set(self._standing)
        batch = tree_map_only(Tensor, self._fake, batch)
        batch_nbytes = sum(t.untyped_storage().nbytes() for key, t in self._standing.items() if key not in weights)
        with self:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one() if callable(one) else one):
                step = getattr(self.module, "training_step", None)
                arguments = (batch, 0) if step else batch if isinstance(batch, list | tuple) else (batch,)
                by_name = isinstance(batch, Mapping) and step is None
                result = self.module(**batch) if by_name else (step or self.module)(*arguments)
                loss = result["loss"] if isinstance(result, Mapping) and result.get("loss") is not None else result
                losses = [leaf.sum() for leaf in tree_leaves(loss) if isinstance(leaf, Tensor) and leaf.requires_grad]
                if not losses:
                    raise ValueError("no loss that depends on a weight is returned")
            saved = sum(memory.nbytes() for one in self._saved.values() if (memory := one.lock()) is not None)
            torch.autograd.backward(losses)
        gradients = {storage_key(p.grad) for p in self.module.parameters() if p.grad is not None}
        left_out = {number for key, (number, _) in self._alive.items() if key in gradients}
        changes = (nbytes for number, nbytes in self._changes if number not in left_out)
        temporaries = max(0, max(accumulate(changes, initial=0)) - saved)
        return ActivationBytes(batch=batch_nbytes, saved=saved, temporaries=temporaries)

    def _fake(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=self._device)
        self._standing[storage_key(fake)] = fake
        return fake

    def _pack(self, tensor: Tensor) -> Any:
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if tensor.device.type == self._device.type and key not in self._standing:
            if self._host_from is not None and nbytes >= self._host_from:
                like: Any = {"dtype": tensor.dtype, "device": self._device}
                return functools.partial(torch.empty_strided, tensor.size(), tensor.stride(), **like)
            self._saved[key] = WeakStorage(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_OPAQUE):
            raise NotImplementedError("what torch's kernels for recurrent layers keep is known only when they run")
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                self._follow(storage_key(leaf), leaf)
        return result

    def _follow(self, key: int, tensor: Tensor) -> None:
        if key and key not in self._alive and key not in self._standing:
            number, storage = len(self._changes), tensor.untyped_storage()
            gone = functools.partial(self._gone, key, number, storage.nbytes())
            self._alive[key] = number, weakref.ref(storage, gone)
            self._changes.append((number, storage.nbytes()))

    def _gone(self, key: int, number: int, nbytes: int, _: Any) -> None:
        self._changes.append((number, -nbytes))
        self._alive.pop(key, None)


class _AsOnAccelerators(TorchFunctionMode):
    """What CPUs compute otherwise; see [Note: a step of fake tensors]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            given = {"p": 0.5, "training": True, **dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            if given["training"] and given["p"]:
                return torch.native_dropout(given["input"], given["p"], True)[0]
        if (place := _DROPOUT_AT.get(func)) is not None:
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
        if func in _FULL_PRECISION and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        return func(*args, **kwargs)


def _if_possible(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except _torch.ASKS_FOR_VALUES:
        return torch.empty(())  # nobody trains on what depends on values


def first_batch(module: Any, configured: Any) -> Any:
    """The first batch that one process would train with: of data as configurations have them (arguments may stand
    beside ``class_path``), or of the module, which has a Trainer or what stands for one; else raises ValueError."""
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.cli import LightningArgumentParser

    source: Any = module
    try:
        if configured:
            loose = dict(configured) if isinstance(configured, dict) else {"class_path": configured}
            path, arguments = loose.pop("class_path", None), loose.pop("init_args", None) or {}
            parser = LightningArgumentParser(exit_on_error=False)
            parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
            given = parser.parse_object({"data": {"class_path": path, "init_args": {**arguments, **loose}}})
            source = parser.instantiate(given).data
            source.trainer = module.trainer
        source.prepare_data()
        source.setup("fit")
        return tree_map_only(object, lambda loader: next(iter(loader)), source.train_dataloader())
    except Exception as error:  # the user's code, or a setting
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{type(source).__name__} has no first batch: {why}. The data's class is --data.") from error
