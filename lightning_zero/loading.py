"""Weights out of a checkpoint of any kind without resuming its run: into an ordinary module, or into a dictionary.

Nothing here loads optimizer states, takes open files in place of paths, or sends tensors to different devices by
``map_location``: a module has one device here, and a sharded directory does not say where its tensors were.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from contextvars import ContextVar
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import datamodule, saving
from lightning.pytorch.core import module as lightning_module
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint, pl_legacy_patch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import StoredTensor, is_checkpoint_directory_at, open_checkpoint
from lightning_zero.checkpoint.format.stored import whole
from lightning_zero.checkpoint.load import find_checkpoint, read_checkpoint
from lightning_zero.checkpoint.save import stored_identity
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, MaterialiseError, some
from lightning_zero.meta import MetaValues
from lightning_zero.session.state import adapters_in, left_out_of, under_names_of, weights_of

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

__all__ = [
    "let_command_lines_load_directories",
    "let_lightning_load_directories",
    "load_from_checkpoint",
    "load_full_state_dict",
]

AnyPath = str | os.PathLike[str]
MapLocation = str | int | torch.device | None
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
    """Build an ordinary module and load its weights, in this process alone.

    This is ``LightningModule.load_from_checkpoint`` for every kind of checkpoint. Each tensor is read directly into the
    module's memory. A module that ``configure_model`` builds on the meta device is allocated here; tensors that are
    not in the checkpoint, such as non-persistent buffers, get their initial values.

    Args:
        model_class: the class to build, with the saved hyper-parameters. For a data module, loads its state instead of
            weights.
        path: the checkpoint.
        map_location: the device of the result; ``None`` leaves the module where it was built.
        hparams_file: a ``.yaml`` or ``.csv`` file with hyper-parameters to use in place of the saved ones.
        strict: whether missing and unexpected names are errors; ``None``: the module's ``strict_loading``.
        weights_only: for files with pickles, as in ``torch.load``; ``None`` means ``True``: no code is run.
        verify: check every checksum first.
        initial_weights: another checkpoint, for weights that are not in ``path``: the frozen base model of a
            checkpoint of adapters.
        kwargs: arguments for the class, which take precedence over the saved hyper-parameters.

    Raises:
        CheckpointError: if a checkpoint cannot be read, naming the file.
        MaterialiseError: if a meta tensor has a value neither in the checkpoint nor from ``configure_model``.
        RuntimeError: as ``nn.Module.load_state_dict`` does, for names or shapes that do not fit.
        ValueError: for settings that cannot be used together.
    """
    open_one = functools.partial(_open, verify=verify, weights_only=weights_only)
    return _load(model_class, path, kwargs, open_one, map_location, hparams_file, strict, initial_weights)


def load_full_state_dict(
    path: AnyPath, *, prefix: str | None = None, dtype: torch.dtype | None = None, verify: bool = False
) -> dict[str, Tensor]:
    """Read all weights and buffers of a checkpoint into host memory, in this process alone.

    Args:
        path: the checkpoint.
        prefix: read only tensors whose names begin with it, and remove it: ``"model."`` gives the state dict of
            ``self.model``.
        dtype: cast floating-point tensors to it, piece by piece while reading.
        verify: check every checksum first.

    Returns:
        Ordinary tensors by name; the names of a tied weight share one tensor. Frozen parameters that were left out of
        the checkpoint are missing, with a warning. State of modules that is not a tensor is missing too.

    Raises:
        CheckpointError: if the checkpoint cannot be read, naming the file, or no name begins with ``prefix``.
        ValueError: for a dtype that is not floating-point.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype like torch.bfloat16, got {dtype!r}.")
    checkpoint, prefix = _open(path, verify=verify), prefix or ""
    named = {name: value for name, value in weights_of(checkpoint, path).items() if isinstance(value, Tensor)}
    chosen = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    if prefix and not chosen:
        raise CheckpointError(
            f"No tensor in '{os.fspath(path)}' has a name that begins with '{prefix}': it holds {some(named)}."
        )
    left_out = [name for name in left_out_of(checkpoint) if name not in named and name.startswith(prefix)]
    if left_out:
        rank_zero_warn(
            f"'{os.fspath(path)}' was saved without its frozen parameters: {len(left_out)} of them are not in the "
            f"result ({some(left_out)})."
        )
    read: dict[Hashable, Tensor] = {}
    for value in chosen.values():
        if stored_identity(value) not in read:
            read[stored_identity(value)] = whole(value, dtype)
    return {name: read[stored_identity(value)] for name, value in chosen.items()}


def let_lightning_load_directories() -> None:
    """Have Lightning take a checkpoint directory in the places where it opens a file itself. Once is enough.

    These ask no module or strategy, so there is no seam, and the functions are wrapped: ``load_from_checkpoint`` loads
    a directory, and a strategy that reads files says what makes a file of it. All other paths go on as they came.
    """
    _wrap(lightning_module, "_load_from_checkpoint", _with_directories)  # private: 2.6
    _wrap(datamodule, "_load_from_checkpoint", _with_directories)
    _wrap(TorchCheckpointIO, "load_checkpoint", _or_consolidate)


def let_command_lines_load_directories(cli: Any) -> None:
    """Have ``LightningCLI`` take its hyperparameters from a checkpoint directory: that of ``lightning.pytorch.cli``.

    The module is not imported here, because jsonargparse takes long, and few trainings use it.
    """
    _wrap(cli.LightningCLI, "_parse_ckpt_path", _with_hyperparameters)  # private: 2.6


def _wrap(place: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(place, name, None)
    if original is not None and not hasattr(original, _OURS):
        wrapped = functools.wraps(original)(wrap(original))
        setattr(wrapped, _OURS, True)
        setattr(place, name, wrapped)


_HPARAMS: Final = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
_OURS: Final = "loads_directories"  # of a function that is wrapped here, also if another program wraps it again


def _with_hyperparameters(original: Callable[[LightningCLI], None]) -> Callable[[LightningCLI], None]:
    def parse(cli: LightningCLI) -> None:
        command = cli.config.get("subcommand")
        path = cli.config[command].get("ckpt_path") if command else None
        if not path or not is_checkpoint_directory_at(path):
            return original(cli)
        opened = read_checkpoint(path, find_checkpoint(path), weights_only=True)
        if lost := [name for name in opened.missing if name.startswith(f"'{_HPARAMS}")]:
            raise CheckpointError(
                f"The checkpoint '{os.fspath(path)}' does not give back all hyperparameters, because loading them "
                f"could run code: {some(lost)}. If you trust it, allow their classes with "
                "`torch.serialization.add_safe_globals`."
            )
        with TemporaryDirectory() as folder:
            file = os.path.join(folder, "hyper_parameters.ckpt")
            torch.save({_HPARAMS: opened.checkpoint.get(_HPARAMS, {})}, file)
            cli.config[command]["ckpt_path"] = file
            original(cli)  # which puts another configuration in the place of this one
        cli.config[command]["ckpt_path"] = path

    return parse


def _or_consolidate(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(io: TorchCheckpointIO, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(io, path, *args, **kwargs)
        except OSError:
            if not is_checkpoint_directory_at(path):
                raise
        raise CheckpointError(
            f"'{os.fspath(path)}' is a sharded checkpoint, and this strategy reads ordinary checkpoint files only. "
            f"Write one: `lightning-zero consolidate {shlex.quote(os.fspath(path))} consolidated.ckpt`"
        )

    return load


def _with_directories(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(
        cls: Any,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(checkpoint_path, (str, os.PathLike)) and is_checkpoint_directory_at(checkpoint_path):
            open_one = functools.partial(_open, verify=False, weights_only=weights_only)
            return _load(cls, checkpoint_path, kwargs, open_one, map_location, hparams_file, strict, None)
        return original(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    return load


def _open(path: AnyPath, *, verify: bool, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint, seen by this process alone, in today's layout."""
    with pl_legacy_patch():
        checkpoint = open_checkpoint(path, ControlGroup(None), verify=verify or "sample", weights_only=weights_only)
    if "pytorch-lightning_version" in checkpoint:
        migrate_checkpoint(checkpoint)
    return checkpoint


def _load(
    model_class: type[ModelT],
    path: AnyPath,
    kwargs: Mapping[str, Any],
    open_one: Callable[[AnyPath], dict[str, Any]],
    map_location: MapLocation,
    hparams_file: AnyPath | None,
    strict: bool | None,
    initial_weights: AnyPath | None,
) -> ModelT:
    """``load_from_checkpoint`` for arguments of the class of any name. Lightning builds, and this reads the weights."""
    device = _device(map_location)
    checkpoint = open_one(path)
    key = model_class.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        suffix = os.path.splitext(os.fspath(hparams_file))[1].lower()
        if suffix not in (".csv", ".yaml", ".yml"):
            raise ValueError(f"hparams_file must be a .csv, .yml or .yaml file, got '{os.fspath(hparams_file)}'.")
        load = saving.load_hparams_from_tags_csv if suffix == ".csv" else saving.load_hparams_from_yaml
        checkpoint[key] = load(os.fspath(hparams_file))
    checkpoint.setdefault(key, {}).update(kwargs)
    instantiator = checkpoint[key].get("_instantiator")
    if issubclass(model_class, LightningModule):
        weights_of(checkpoint, path)
    allowed = getattr(saving, "_ALLOWED_INSTANTIATORS", set(_INSTANTIATORS))  # private: in some of 2.6
    if instantiator not in (None, *allowed):
        raise ValueError(
            f"The checkpoint wants its module built by {instantiator!r}, which is not a function of Lightning: calling "
            "it could run any code. If you trust it, add it to "
            "`lightning.pytorch.core.saving._ALLOWED_INSTANTIATORS`."
        )

    def build(model_class: type[ModelT], arguments: dict[str, Any]) -> ModelT:
        if instantiator is None:
            built = model_class(**arguments)
        else:
            _check_imported(arguments.get("_class_path"), model_class)
            module, function = instantiator.rsplit(".", 1)
            built = getattr(importlib.import_module(module), function)(model_class, arguments)
        if isinstance(built, LightningModule):

            def read(_: Any, strict: bool) -> Any:  # once
                del built.load_state_dict
                return _read_weights(built, checkpoint, path, open_one, device, strict, initial_weights)

            built.load_state_dict = read  # type: ignore[method-assign, assignment]
        return built

    allowed.add(_BUILDER)
    token = _BUILD.set(build)
    try:
        load_state: Any = saving._load_state  # private: 2.6
        loaded: ModelT = load_state(model_class, checkpoint, strict=strict, _instantiator=_BUILDER, **kwargs)
        return loaded
    finally:
        _BUILD.reset(token)
        allowed.discard(_BUILDER)


def _check_imported(class_path: Any, model_class: type) -> None:
    """``ValueError`` for a class that building it would import, which could run any code. Some of 2.6 do not ask."""
    module, _, name = str(class_path).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if class_path is not None and not (isinstance(found, type) and issubclass(found, model_class)):
        raise ValueError(
            f"The checkpoint was saved for {class_path!r}, which is not an imported subclass of "
            f"{model_class.__name__}. Import the module that defines it before loading."
        )


_BUILD: ContextVar[Callable[..., Any]] = ContextVar("_BUILD")
_BUILDER = f"{__name__}.build_for_lightning"

# What a checkpoint may name to build its module with: LightningCLI's own function.
_INSTANTIATORS = frozenset({"lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module"})


def build_for_lightning(model_class: type, arguments: dict[str, Any]) -> Any:
    """Build a class for ``_load``: Lightning calls it by its name, as it calls what a checkpoint of its CLI names."""
    return _BUILD.get()(model_class, arguments)


def _read_weights(
    built: LightningModule,
    checkpoint: Mapping[str, Any],
    path: AnyPath,
    open_one: Callable[[AnyPath], dict[str, Any]],
    device: torch.device | None,
    strict: bool,
    initial_weights: AnyPath | None,
) -> Any:
    """Read the weights into a module. Returns the missing and the unexpected keys, of which Lightning warns."""
    own = built.state_dict(keep_vars=True)
    stored = weights_of(checkpoint, path)
    state = under_names_of(built, own, stored, path, strict)
    if initial_weights is not None:
        weights = weights_of(open_one(initial_weights), initial_weights)
        base = under_names_of(built, own, weights, initial_weights, strict=False)
        adapters_in(built, own, weights, base, initial_weights)
        state.update({name: base[name] for name in own if name in base and name not in state})
    # Safetensors files hold one name of a tied weight.
    read = {id(own[name]) for name in own if name in state and isinstance(own[name], Tensor)}
    tied = [name for name in own if name not in state and id(own[name]) in read]
    left_out = under_names_of(built, own, dict.fromkeys(left_out_of(checkpoint)), path, strict=False)
    unsaved = [name for name in left_out if name in own and name not in state and name not in tied]
    if unsaved and initial_weights is not None:
        raise CheckpointError(
            f"'{os.fspath(path)}' was saved without its frozen parameters, and the initial weights "
            f"'{os.fspath(initial_weights)}' do not hold {some(unsaved)}: these would keep random values. Name the "
            "model that they came from, or leave `initial_weights` out if the module itself loads them."
        )
    _materialise(built, read, device or torch.device("cpu"))
    if device is not None:
        built.to(device)
    keys = _copy_into(built, state, [*tied, *unsaved], getattr(stored, "_metadata", None), strict)
    _read_what_is_left(built, device)
    if unsaved:
        rank_zero_warn(
            f"'{os.fspath(path)}' was saved without its frozen parameters: {len(unsaved)} of them keep the "
            f"values they were built with ({some(unsaved)}). If these are not the values the others were trained "
            "with, name the checkpoint that has them: `load_from_checkpoint(..., initial_weights=...)`."
        )
    if not stored:
        rank_zero_warn(f"The state dict in {os.fspath(path)!r} contains no parameters.")
    return keys


def _copy_into(module: nn.Module, state: Mapping[str, Any], kept: Collection[str], versions: Any, strict: bool) -> Any:
    """Call the module's ``load_state_dict``, where ``kept`` values stay, and return what it does.

    ``versions`` are of the modules that were saved, if known. Without any, modules would take the state for that of
    their oldest release.
    """
    own = module.state_dict(keep_vars=True)
    copied_to = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    prepared: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        # A module may keep what it is given for something else (metrics do), and a handle on a file is no value.
        keeps = name in own and id(own[name]) not in copied_to
        prepared[name] = value.read() if keeps and isinstance(value, StoredTensor) else value
    prepared.update({name: own[name] for name in kept})
    versions = versions or getattr(own, "_metadata", None)
    if versions is not None:
        prepared._metadata = versions  # type: ignore[attr-defined]
    try:
        return module.load_state_dict(prepared, strict=strict)
    except RuntimeError as error:
        failures = [value.failure for value in prepared.values() if isinstance(value, StoredTensor) and value.failure]
        raise failures[0] if failures else error from None


def _read_what_is_left(module: nn.Module, device: torch.device | None) -> None:
    """Read what is on disk still, because the module's ``load_state_dict`` takes over (``assign=True``)."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in [*tensors.items()]:
                if isinstance(tensor, StoredTensor):
                    value = tensor.read().to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    setattr(part, name, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)


def _materialise(module: nn.Module, read: set[int], device: torch.device) -> None:
    """Give memory to what is on the meta device: empty to what will be ``read``, else with its initial values."""
    meta = [(name, one) for name, one in module.named_parameters() if one.is_meta]
    stored = [name for name, one in module.state_dict(keep_vars=True).items() if id(one) in read]
    values = MetaValues(module, [("", [name for name, one in meta if id(one) not in read])])
    for name, tensor in meta:
        with untracked():
            value = torch.empty_like(tensor, device=device) if id(tensor) in read else values.take(name).to(device)
        real = nn.Parameter(value, tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)  # the user's object stays: ties and references hold
    values.place_buffers(None)
    if problem := values.problem(stored):
        raise MaterialiseError(problem)


def _device(map_location: Any) -> torch.device | None:
    if not isinstance(map_location, (str, int, torch.device, type(None))):
        raise TypeError(
            f"map_location must be one device such as 'cpu' or 'cuda:0', got {map_location!r}: a module is loaded "
            "to one device, wherever its tensors were when they were saved."
        )
    device = None if map_location is None else torch.device(map_location)
    if device is not None and device.type == "meta":
        raise ValueError("map_location='meta': there is no memory to read the weights into. Use 'cpu'.")
    return device
