"""The precision plugin: which dtype a unit computes in, and what happens to gradients between backward and step.

[Note: cast in the engine, not by autocast]
Under autocast over fp32 weights, autograd keeps a 16-bit copy of every weight alive until backward: a full 16-bit model
that sharding was to avoid. So mixed precision here gathers 16-bit copies of the fp32 masters, and autocast (which stays
on, for the operations it keeps in fp32) finds the weights in its dtype already. Without autocast these compute in 16
bits too, and norms keep no fp32 copy of what they normalise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor, _DtypeContextManager
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import precision as pytorch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import is_traceable_wrapper_subclass
from lightning_zero.comm import ControlGroup, Totals
from lightning_zero.errors import ParameterAccessError, UnsupportedOptimizerError, ZeroError, changed
from lightning_zero.optim.gradients import LossScaler, clip_by_norm, clip_by_value, gradient_norm
from lightning_zero.optim.rules import refuse_closure
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.plan.plan import MIXED_DTYPES, TRUE_DTYPES
from lightning_zero.session.session import Dtypes

__all__ = ["PrecisionName", "ZeroPrecision", "precision_property", "unwrapped"]

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")
_SCALES = (
    "MixedPrecision",
    "FSDPPrecision",
    "native_amp_scaling_state",
)  # where Lightning's plugins save the loss scale
_TWO_DTYPES = re.compile(  # torch's messages
    "same dtype|expected scalar type|mixed dtype|Low precision dtypes not|not implemented for '(BFloat16|Half)'"
)
_WITHOUT_AUTOCAST = (
    "With autocast=False weights and the batch are in 16 bits. Cast what is not, such as buffers and what a step makes "
    "in float32: `x.to(self.weight.dtype)`. Or leave autocast on: Trainer(precision='bf16-mixed')."
)
_IN_16_BITS = (
    "In mixed precision modules compute with 16-bit copies of their weights. Where your code has switched autocast off "
    "for a module that is to compute in float32 (`with torch.autocast(..., enabled=False): self.router(x.float())`), "
    "or gives a weight to an operation that takes no 16 bits (`torch.slogdet(self.weight)`), "
    "name its class: Trainer(plugins=ZeroPrecision('bf16-mixed', full_precision=['Router'])). Its weights are used as "
    "the float32 that they are then."
)


class ZeroPrecision(Dtypes, Precision):
    """Precision of a sharded run.

    Args:
        precision: ``32-true``, ``64-true``; ``bf16-mixed`` and ``16-mixed``: units compute in 16 bit, masters and
            optimizer state stay in fp32, fp16 with a dynamic loss scale; ``bf16-true`` and ``16-true``: everything in
            16 bit.
        reduce_dtype: dtype of gradient averaging under mixed precision. ``float32`` is exact; a 16-bit dtype halves
            gradient traffic and gradient memory.
        scaler: a ``torch.amp.GradScaler`` for ``16-mixed``; ``None`` for the default one.
        full_precision: under mixed precision, class names of modules that compute with ``float32`` parameters. Name
            the modules that your code calls with autocast switched off. Naming the whole module (your
            ``LightningModule``) gives DDP's numbers under autocast, for twice the memory and traffic of the weights to
            compute with.
        autocast: under mixed precision, whether steps run under autocast, which is Lightning's meaning of
            ``bf16-mixed``. ``False`` is that of FSDP2's ``MixedPrecisionPolicy`` and of DeepSpeed's ``bf16``: the batch
            is cast to 16 bits, and norms and losses compute in them too, for smaller activations. Cast buffers
            yourself, and tensors that a step makes.

    Under mixed precision buffers, batch norm layers and metrics keep their dtype.

    Raises:
        ValueError: if a setting is unknown or does not fit the others.
    """

    @changed("To keep buffers in float32, cast your parameters yourself, under '32-true'.")
    def __init__(
        self,
        precision: PrecisionName = "32-true",
        reduce_dtype: DtypeName | None = None,
        scaler: torch.amp.GradScaler | None = None,
        full_precision: Sequence[str] = (),
        autocast: bool = True,
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"ZeroPrecision takes one of {', '.join(get_args(PrecisionName))}, got precision={precision!r}."
            )
        if reduce_dtype not in (None, *_DTYPES):
            raise ValueError(f"reduce_dtype must be one of {', '.join(_DTYPES)}, got reduce_dtype={reduce_dtype!r}.")
        if isinstance(full_precision, str) or not all(isinstance(name, str) for name in full_precision):
            raise ValueError(
                "full_precision must be a list of class names such as ['Router'], got "
                f"full_precision={full_precision!r}."
            )
        mixed = tuple(MIXED_DTYPES)
        for name, value, given, usable in (
            ("reduce_dtype", reduce_dtype, reduce_dtype is not None, mixed),
            ("scaler", scaler, scaler is not None, ("16-mixed",)),
            ("full_precision", full_precision, bool(full_precision), mixed),
            ("autocast", autocast, not autocast, mixed),
        ):
            if given and precision not in usable:
                raise ValueError(
                    f"{name} only applies to {' and '.join(usable)}, got {name}={value!r} with {precision=}. Leave "
                    f"{name} out."
                )
        self.precision = precision
        self.autocast = autocast
        self.full_precision: Sequence[str] = tuple(full_precision)
        self.scaler: LossScaler | None = None
        if precision == "16-mixed":
            self.scaler = LossScaler() if scaler is None else LossScaler.of(scaler)
        self.scales_loss = self.scaler is not None and self.scaler.is_enabled()
        self.param_dtype = MIXED_DTYPES.get(precision)
        self.reduce_dtype = None if reduce_dtype is None else _DTYPES[reduce_dtype]
        self._device_type = "cpu"
        self._totals: Totals = ControlGroup(None)
        self._adapter: Callable[[Optimizer], ShardedOptimizer] | None = None

    @classmethod
    def convert(cls, plugin: fabric.Precision) -> ZeroPrecision:
        """Lightning's own plugin, as ``precision=`` made it (the Trainer's, or Fabric's), in this package's terms.

        Raises:
            ValueError: for a plugin that sharding cannot serve, by name.
        """
        if isinstance(plugin, ZeroPrecision):
            return plugin
        if any(type(plugin) is getattr(module, kind) for module in (fabric, pytorch) for kind in _KINDS):
            return cls(plugin.precision, scaler=getattr(plugin, "scaler", None))  # type: ignore[arg-type]
        raise ValueError(
            f"{type(plugin).__name__} is not supported by ZeroStrategy. Use precision= one of "
            f"{', '.join(get_args(PrecisionName))}, or pass ZeroPrecision(...) as a plugin."
        )

    def attach(self, device: torch.device, totals: Totals, adapter: Callable[[Optimizer], ShardedOptimizer]) -> None:
        """Connect to a run, where ``adapter`` finds the sharded view of an optimizer."""
        self._device_type = device.type
        self._totals = totals
        self._adapter = adapter
        if self.scaler is not None:
            self.scaler.attach(adapter, totals)

    def teardown(self) -> None:
        """Leave the loss scale, which user code may hold, to a run of another strategy."""
        if self.scaler is not None:
            self.scaler.detach()

    # ------------------------------------------------------------------- dtypes

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a module for the ``-true`` precisions, as Lightning's own plugins do."""
        dtype = TRUE_DTYPES.get(self.precision)
        if self.precision == "64-true":
            module.double()
        elif dtype is not None:
            module.to(dtype=dtype)
        return module

    def would_cast(self, module: nn.Module) -> bool:
        """Whether ``convert_module`` changes a parameter: then the parameters' values must be in memory first."""
        dtype = TRUE_DTYPES.get(self.precision)
        for parameter in nn.Module.parameters(module) if dtype is not None else ():
            composed: bool = is_traceable_wrapper_subclass(parameter)
            if parameter.is_floating_point() and parameter.dtype is not dtype and not composed:
                return True
        return False

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """New floating tensors get the precision's dtype."""
        dtype = TRUE_DTYPES.get(self.precision)
        return nullcontext() if dtype is None else _DtypeContextManager(dtype)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around every step method: autocast or none, or the default dtype."""
        if self.precision in MIXED_DTYPES:
            dtype, enabled = MIXED_DTYPES[self.precision], self.autocast
            with (
                torch.autocast(self._device_type, dtype=dtype, enabled=enabled, cache_enabled=False),
                _no_fast_path(),
            ):
                try:
                    yield
                except RuntimeError as error:
                    if _TWO_DTYPES.search(str(error)) and not isinstance(error, ZeroError):
                        why = _IN_16_BITS if self.autocast else _WITHOUT_AUTOCAST
                        raise ParameterAccessError(f"{error}. {why}") from error
                    raise
        else:
            with self.tensor_init_context():
                yield

    def convert_input(self, data: Any) -> Any:
        """Floating inputs get the dtype of the weights, for the ``-true`` precisions and without autocast."""
        dtype = TRUE_DTYPES.get(self.precision) if self.autocast else self.param_dtype
        return data if dtype is None else apply_to_collection(data, Tensor, _convert_fp_tensor, dst_type=dtype)

    def convert_output(self, data: Any) -> Any:
        """What a module returns in Fabric: in the default dtype, whatever it was computed in."""
        if self.precision == "32-true":
            return data
        return apply_to_collection(data, Tensor, _convert_fp_tensor, dst_type=torch.get_default_dtype())

    # ---------------------------------------------------------------- gradients

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss for fp16, then the user's ``on_before_backward``."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, the user's hooks and clipping, then the step. Collective: every rank."""
        hooks = partial(self._after_closure, model, optimizer)
        return self.step(optimizer, closure, hooks, may_skip=model.automatic_optimization, **kwargs)

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        hooks: Callable[[], None] = lambda: None,
        may_skip: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, ``hooks`` on unscaled gradients, and the step. The Trainer's steps and Fabric's are this.

        The closure runs here and not inside ``optimizer.step``: what a step needs (agreement on used parameters, whole
        matrices) exists only after backward. An optimizer that needs a closure runs it as often as it likes.
        ``may_skip``: a closure that returns None had no backward, and there is nothing to unscale.

        Collective: every rank.
        """
        adapter = self._sharded(optimizer)
        if adapter.rule == "closure":
            if self.scaler is not None:
                raise UnsupportedOptimizerError(
                    f"{adapter.label} needs a closure in step(), where the loss scale of 16-mixed cannot tell "
                    "whether gradients have overflowed. Use precision='bf16-mixed' or '32-true'."
                )

            def with_hooks() -> Any:
                result = closure()
                hooks()
                return result

            return cast(Any, adapter).step(with_hooks, **kwargs)
        result = closure()
        scaler = None if may_skip and result is None else self.scaler
        try:
            if scaler is not None:
                scaler.unscale_once(optimizer)
            hooks()
            optimizer.step(**kwargs) if scaler is None else scaler.step(optimizer, **kwargs)
        except BaseException as error:  # torch calls no hook then, and the user may catch it
            if scaler is not None:
                scaler.forget(optimizer)
            adapter.abandon()
            refuse_closure(optimizer, error)
            raise
        if scaler is not None:
            scaler.stepped(optimizer)
        return result

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every element of the gradients of one optimizer. Collective: every rank."""
        clip_by_value(self._sharded(optimizer).gradients(), float(clip_val))

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the gradients of one optimizer over all ranks. Collective: every rank."""
        clip_by_norm(self._sharded(optimizer).gradients(), float(clip_val), self.gradient_norm(optimizer))

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of one optimizer over all ranks. Collective: every rank."""
        return gradient_norm(self._sharded(optimizer).gradients(counted=True), self._totals, norm_type)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the loss scale in the gradients of one optimizer, once before its step. Collective: every rank."""
        if self.scaler is not None:
            self.scaler.unscale_once(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the loss scale where Lightning's own plugin looks for it: a run may go on under another strategy."""
        if (state := checkpoint.pop(type(self).__qualname__, None)) is not None:
            checkpoint[_SCALES[0]] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the loss scale of a run under any strategy."""
        self.load_state_dict(next((checkpoint[name] for name in _SCALES if name in checkpoint), {}))

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        if self._adapter is None:
            raise RuntimeError("ZeroPrecision only works together with ZeroStrategy: Trainer(strategy='zero3', ...).")
        return self._adapter(optimizer)


def precision_property(place: str) -> property:
    """The plugin of a strategy, in the attribute ``place``: in this package's terms, whatever Lightning gives it."""

    def get(strategy: Any) -> ZeroPrecision:
        if getattr(strategy, place, None) is None:
            setattr(strategy, place, ZeroPrecision())
        plugin: ZeroPrecision = getattr(strategy, place)
        return plugin

    def put(strategy: Any, plugin: fabric.Precision | None) -> None:
        setattr(strategy, place, None if plugin is None else ZeroPrecision.convert(plugin))

    return property(get, put)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Attention without the kernels that torch takes for evaluation on CPUs, which autocast does not reach."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that the user made, without Lightning's or Fabric's wrapper."""
    if isinstance(optimizer, _FabricOptimizer):
        return optimizer.optimizer
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
