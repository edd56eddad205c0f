"""An ordinary module from any checkpoint, in one process.

``LightningModule.load_from_checkpoint`` hands its path to one private function, which opens a file. A checkpoint that
is a directory ends there, before a module or a strategy is asked, so there is no seam and this function is wrapped: a
path where a checkpoint directory lies goes to our loader, and everything else goes on as it came.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import datamodule
from lightning.pytorch.core import module as lightning_module
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import StoredTensor, is_checkpoint_directory_at
from lightning_zero.errors import CheckpointError, MaterialiseError, some
from lightning_zero.init import InitRecord, InitRecorder
from lightning_zero.loading.hparams import choose_hparams, instantiate
from lightning_zero.loading.weights import open_here
from lightning_zero.session.module_state import left_out_of, under_own_names, weights_of

__all__ = ["let_lightning_load_directories", "load_from_checkpoint"]

AnyPath = str | os.PathLike[str]
MapLocation = (
    str | int | torch.device | Mapping[str, Any] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage] | None
)
ModelT = TypeVar("ModelT", bound=LightningModule | LightningDataModule)


def load_from_checkpoint(
    model_class: type[ModelT],
    path: AnyPath,
    *,
    map_location: MapLocation = None,
    hparams_file: AnyPath | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    verify: bool = False,
    initial_weights: AnyPath | None = None,
    **kwargs: Any,
) -> ModelT:
    """Build an ordinary module and read its weights, in this process alone.

    This is ``LightningModule.load_from_checkpoint`` for every kind of checkpoint. Each tensor is read straight into
    the module's own memory. A module that ``configure_model`` builds on the meta device gets its memory here; what the
    checkpoint does not hold, such as buffers that are not persistent, gets its initial values.

    Args:
        model_class: the class to build, with the hyper-parameters that were saved. For a data module, its state is
            loaded in place of weights.
        path: the checkpoint.
        map_location: the device of the result; ``None`` leaves the module where it was built. Of a dictionary the
            values have to be one device. A function is called as ``torch.load`` does for a tensor on the CPU.
        hparams_file: a ``.yaml`` or ``.csv`` file with hyper-parameters to use in place of the saved ones.
        strict: whether missing and unexpected names are errors; ``None`` asks the module's ``strict_loading``.
        weights_only: for files that hold pickles, as for ``torch.load``; ``None`` is ``True``: no code is run.
        verify: check every checksum first.
        initial_weights: another checkpoint, for what ``path`` does not hold: the frozen base that a checkpoint of
            adapters was trained on.
        kwargs: arguments for the class, which take precedence over the saved hyper-parameters.

    Raises:
        CheckpointError: if a checkpoint cannot be read, naming the file.
        MaterialiseError: if a meta tensor has a value neither in the checkpoint nor from ``configure_model``.
        RuntimeError: as ``nn.Module.load_state_dict`` does, for names or shapes that do not fit.
        ValueError: for settings that cannot be used together.
    """
    return load_with(
        model_class,
        path,
        kwargs,
        LoadSettings(map_location, hparams_file, strict, weights_only, verify, initial_weights),
    )


class LoadSettings(NamedTuple):
    """What ``load_from_checkpoint`` is asked for beside the class, the path and the class's own arguments."""

    map_location: MapLocation = None
    hparams_file: AnyPath | None = None
    strict: bool | None = None
    weights_only: bool | None = None
    verify: bool = False
    initial_weights: AnyPath | None = None


def load_with(model_class: type[ModelT], path: AnyPath, kwargs: Mapping[str, Any], settings: LoadSettings) -> ModelT:
    """``load_from_checkpoint`` for arguments of any name."""
    device = _device(settings.map_location)
    verify, weights_only, initial_weights = settings.verify, settings.weights_only, settings.initial_weights
    checkpoint = open_here(path, verify=verify, weights_only=weights_only)
    choose_hparams(checkpoint, model_class, settings.hparams_file, kwargs)
    built = instantiate(model_class, checkpoint, kwargs)
    if isinstance(built, LightningDataModule):
        if type(built).__qualname__ in checkpoint:
            built.load_state_dict(checkpoint[type(built).__qualname__])
        return built
    strict = _strictness(built, settings.strict)
    record: InitRecord | None = None
    if is_overridden("configure_model", built):
        with InitRecorder() as record:
            built.configure_model()
    built.on_load_checkpoint(checkpoint)
    stored = weights_of(checkpoint, path)
    base: Mapping[str, Any] = {}
    if initial_weights is not None:
        base = weights_of(open_here(initial_weights, verify=verify, weights_only=weights_only), initial_weights)
    _read_into_module(built, _Source(path, stored, left_out_of(checkpoint), base), strict, device, record)
    return built


class _Source(NamedTuple):
    """Where a module's weights come from.

    Attributes:
        path: of the checkpoint, for messages.
        stored: its weights by name.
        left_out: the frozen parameters that were not saved.
        base: weights for what is not in ``stored``.
    """

    path: AnyPath
    stored: Mapping[str, Any]
    left_out: Collection[str]
    base: Mapping[str, Any]


def _read_into_module(
    module: LightningModule, source: _Source, strict: bool, device: torch.device | None, record: InitRecord | None
) -> None:
    own = module.state_dict(keep_vars=True)
    state = under_own_names(source.stored, own, source.path, strict)
    base = under_own_names(source.base, own, "initial_weights", strict=False)
    state.update({name: base[name] for name in own if name in base and name not in state})
    kept = _tied_elsewhere(own, state)
    left_out = under_own_names(dict.fromkeys(source.left_out), own, source.path, strict=False)
    unsaved = [name for name in left_out if name in own and name not in state and name not in kept]
    _materialise(module, {id(own[name]) for name in own if name in state}, device or torch.device("cpu"), record)
    if device is not None:
        module.to(device)
    result, failure = None, None
    with _Streaming() as streaming:
        try:
            result = module.load_state_dict(_prepared(module, source, state, [*kept, *unsaved]), strict=strict)
        except RuntimeError as error:
            failure = streaming.failure or error
    if failure is not None:
        raise failure
    _read_what_is_left(module, device)
    if unsaved:
        rank_zero_warn(
            f"'{os.fspath(source.path)}' was saved without its frozen parameters: {len(unsaved)} of them keep the "
            f"values they were built with ({some(unsaved)}). If these are not the values the others were trained "
            "with, name the checkpoint that has them: `load_from_checkpoint(..., initial_weights=...)`."
        )
    if not source.stored:
        rank_zero_warn(f"The state dict in {os.fspath(source.path)!r} contains no parameters.")
    if not strict and result is not None:
        _warn_of_keys(result.missing_keys, result.unexpected_keys)


def _prepared(
    module: LightningModule, source: _Source, state: Mapping[str, Any], kept: Collection[str]
) -> OrderedDict[str, Any]:
    """What the module's ``load_state_dict`` is given."""
    own = module.state_dict(keep_vars=True)
    copied_to = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    prepared: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        # A module may keep what it is given for something else (metrics do), and a handle on a file is no value.
        keeps = name in own and id(own[name]) not in copied_to
        prepared[name] = value.read() if keeps and isinstance(value, StoredTensor) else value
    prepared.update({name: own[name] for name in kept})
    # Without versions modules would take the state for that of their oldest release.
    versions = getattr(source.stored, "_metadata", None) or getattr(own, "_metadata", None)
    if versions is not None:
        prepared._metadata = versions  # type: ignore[attr-defined]
    return prepared


def _read_what_is_left(module: nn.Module, device: torch.device | None) -> None:
    """Read what is on disk still, because the module's ``load_state_dict`` takes over (``assign=True``)."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in [*tensors.items()]:
                if isinstance(tensor, StoredTensor):
                    value = tensor.read().to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    setattr(part, name, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)


def _warn_of_keys(missing: list[str], unexpected: list[str]) -> None:
    """In Lightning's words."""
    if missing:
        rank_zero_warn(f"Found keys that are in the model state dict but not in the checkpoint: {missing}")
    if unexpected:
        rank_zero_warn(f"Found keys that are not in the model state dict but in the checkpoint: {unexpected}")


class _Streaming(TorchFunctionMode):
    """Reads a stored tensor from disk straight into the tensor that it is copied to.

    Attributes:
        failure: what was wrong with a file; ``load_state_dict`` makes it a line among others.
    """

    failure: CheckpointError | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take over ``destination.copy_(stored)`` where no layout is in between."""
        try:
            if func is not Tensor.copy_ or len(args) < 2 or not isinstance(args[1], StoredTensor):
                return func(*args, **(kwargs or {}))
            destination, stored = args[0], args[1]
            plain = type(destination) in (Tensor, nn.Parameter, nn.Buffer) and destination.is_contiguous()
            if not plain or destination.shape != stored.shape:
                return func(*args, **(kwargs or {}))
            with untracked():
                stored.read_into(destination.detach().view(-1), 0)
            return destination
        except CheckpointError as error:
            self.failure = self.failure or error
            raise


def _materialise(module: nn.Module, read: set[int], device: torch.device, record: InitRecord | None) -> None:
    """Give memory to what is on the meta device: empty to what will be ``read``, else with its initial values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if not tensor.is_meta:
            continue
        if id(tensor) in read:
            with untracked():
                values = torch.empty_like(tensor, device=device)
        elif record is None:
            raise MaterialiseError(
                f"'{name}' is on the meta device and has no value in the checkpoint. Build the module on the CPU, or "
                "inside `configure_model`, where its initialisation is recorded."
            )
        else:
            (values,) = record.materialise([tensor], device, [f"'{name}'"])
        real = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)  # the user's object stays: ties and references hold


def _tied_elsewhere(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Missing names of tensors that are read under another name: safetensors files hold one name of a tied weight."""
    read = {id(own[name]) for name in own if name in state and isinstance(own[name], Tensor)}
    return [name for name in own if name not in state and id(own[name]) in read]


def _device(map_location: Any) -> torch.device | None:
    """The one device that is meant."""
    given = map_location
    if isinstance(given, Mapping):
        devices = {torch.device(device) for device in given.values()}
        given = next(iter(devices), None) if len(devices) < 2 else given
    elif callable(given):
        storage = given(torch.UntypedStorage(0), "cpu")
        given = None if storage is None else storage.device
    if given is None:
        return None
    if not isinstance(given, (str, int, torch.device)):
        raise TypeError(
            f"map_location must be one device such as 'cpu' or 'cuda:0', or lead to one, got {map_location!r}: a "
            "module is put on one device as a whole, wherever its tensors were when they were saved."
        )
    device = torch.device(given)
    if device.type == "meta":
        raise ValueError("map_location='meta': there is no memory to read the weights into. Use 'cpu'.")
    return device


def _strictness(module: LightningModule, strict: bool | None) -> bool:
    """Whether loading is strict, by Lightning's rules."""
    if module._strict_loading is not None and strict is not None and strict != module.strict_loading:
        raise ValueError(
            f"load_from_checkpoint(..., strict={strict!r}) is in conflict with "
            f"`{type(module).__name__}.strict_loading={module.strict_loading!r}`. Set the same value for both."
        )
    return module.strict_loading if strict is None else strict


_NAME: Final = "_load_from_checkpoint"  # private: 2.6


class _Loader:
    """What Lightning calls in place of its own function.

    Args:
        original: Lightning's function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(
        self,
        cls: Any,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``load_from_checkpoint``."""
        if isinstance(checkpoint_path, (str, os.PathLike)) and is_checkpoint_directory_at(checkpoint_path):
            settings = LoadSettings(map_location, hparams_file, strict, weights_only)
            return load_with(cls, checkpoint_path, kwargs, settings)
        return self._original(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)


def let_lightning_load_directories() -> None:
    """Make ``load_from_checkpoint`` of Lightning's modules and data modules take directories, too. Once is enough."""
    for place in (lightning_module, datamodule):
        original = getattr(place, _NAME, None)
        if original is not None and not isinstance(original, _Loader):
            setattr(place, _NAME, _Loader(original))
