"""Weights and buffers of a sharded module: names and full shapes in checkpoints, slices here."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from lightning_zero._torch import no_torch_function, without_swaps
from lightning_zero.checkpoint import FlatShard, StoredTensor, open_checkpoint
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.comm import ControlGroup
from lightning_zero.engine import Slice, ZeroEngine
from lightning_zero.errors import CheckpointError, ZeroError, some
from lightning_zero.session.names import adapters_in, under_names_of, unwrapped

__all__ = [
    "ModuleState",
    "left_out_of",
    "load_initial_weights",
    "weights_of",
]


class ModuleState:
    """Weights and buffers of a sharded module; ``state_dict`` of another may decide about names."""

    def __init__(self, engine: ZeroEngine, module: nn.Module | None) -> None:
        self._engine = engine
        self.module: nn.Module = module if module is not None else engine.module

    def save(self, exclude_frozen: bool = False) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: the keys, order and hooks are the module's own. No communication."""
        state = {}
        self._engine.take_over_shown(on_disk=False)
        for key, value in self.module.state_dict(keep_vars=True).items():
            if exclude_frozen and _is_frozen(value):
                continue
            name = self._engine.names.get(value) if isinstance(value, nn.Parameter) else None
            if name is not None:
                shard = self._engine.shards[name]
                value = FlatShard(shard.data, shard.spec.shape, shard.start)
            elif isinstance(value, Tensor):
                value = value.detach()
            state[unwrapped(key)] = value
        return state

    def excluded_frozen(self) -> list[str]:
        """The names that ``save(exclude_frozen=True)`` leaves out."""
        return [unwrapped(key) for key, value in self.module.state_dict(keep_vars=True).items() if _is_frozen(value)]

    def load(
        self, state: Mapping[str, Any], strict: bool, excluded: Collection[str] = (), optional: Collection[str] = ()
    ) -> None:
        """Take weights and buffers over by full name, each rank reading its own slices.

        The module's own ``load_state_dict`` decides what goes where, so that its hooks, overrides, extra state and
        errors are the ordinary ones; only what it copies into a sharded parameter is read slice by slice. Names that
        are ``excluded`` (of what was not saved) or ``optional`` may be missing. Collective: every rank.
        """
        current = self.module.state_dict(keep_vars=True)
        own = {unwrapped(key): (key, value) for key, value in current.items()}
        # Without versions modules would take the state for that of their oldest release.
        versions = getattr(state, "_metadata", None) or getattr(current, "_metadata", None)
        state = {unwrapped(key): value for key, value in state.items()}
        kept = [name for name in excluded if name in own and name not in state]
        expendable = {*kept, *optional, *_filled({key: value for key, (_, value) in own.items()}, state)}
        refused: list[Exception] = []

        def read() -> None:
            prepared = self._prepared(state, own)
            if versions is not None:
                prepared._metadata = versions  # type: ignore[attr-defined]
            try:
                copies = self._noted_copies(prepared, strict, expendable)
            except Exception as error:
                refused.append(error)
                raise
            read_slices((value, shard.start, shard.data) for shard, value in copies)

        self._engine.control.barrier()  # after an error another rank may still be reading weights in a forward
        try:
            self._engine.control.together("load the weights of the checkpoint", read)
        except CheckpointError:
            if refused:
                raise refused[0] from None
            raise
        self._engine.masters_changed(range(len(self._engine.units)))
        self._engine.updating = False  # whatever step was interrupted: all weights are of one moment again
        if kept and self._engine.control.rank == 0:
            warnings.warn(
                f"The checkpoint was saved without its frozen parameters: {len(kept)} keep the values that the module "
                f"was built with or has loaded before ({some(map(repr, kept))}).",
                stacklevel=2,
            )

    def _prepared(self, state: Mapping[str, Any], own: Mapping[str, tuple[str, Any]]) -> OrderedDict[str, Any]:
        """The state under the module's own keys, with everything read that is no sharded parameter's.

        Modules may keep what they are given (metrics do), and a handle on a file cannot be written to.
        """
        prepared: OrderedDict[str, Any] = OrderedDict()
        for key, value in state.items():
            target_key, target = own.get(key, (key, None))
            sharded = isinstance(target, nn.Parameter) and target in self._engine.names
            read_now = key in own and not sharded and isinstance(value, StoredTensor)
            prepared[target_key] = value.read() if read_now else value
        return prepared

    def _noted_copies(
        self, state: Mapping[str, Any], strict: bool, expendable: Collection[str]
    ) -> list[tuple[Slice, Any]]:
        """Run the module's ``load_state_dict``, to which ``expendable`` keys may be missing.

        Returns what is to be read into shards after it. A parameter that is another object afterwards, which the
        engine would not know, is refused.
        """

        def forgive(_: nn.Module, keys: Any) -> None:
            keys.missing_keys[:] = [key for key in map(unwrapped, keys.missing_keys) if key not in expendable]

        before = dict(self.module.named_parameters(remove_duplicate=False))
        copies: list[tuple[Slice, Any]] = []
        hook = self.module.register_load_state_dict_post_hook(forgive)
        try:
            with _receiving(self._engine, copies), without_swaps():
                self.module.load_state_dict(state, strict=strict)
        finally:
            hook.remove()
        after = dict(self.module.named_parameters(remove_duplicate=False))
        for name in (name for name in after if after[name] is not before.get(name)):
            raise RuntimeError(
                f"Loading replaced the parameter '{name}' by another object, which would not be trained. A module's "
                "own `load_state_dict` must copy into its parameters: call the ordinary one with `assign=False`."
            )
        return copies


@contextmanager
def _receiving(engine: ZeroEngine, copies: list[tuple[Slice, Any]]) -> Iterator[None]:
    """While active, a copy into a sharded parameter, or into its ``.data``, goes to ``copies``: only a placeholder may
    stand there. ``copies`` gets the slice to fill and a value of full shape. A copy into a part is not noted.
    """
    shards = {id(parameter): engine.shards[name] for parameter, name in engine.names.items()}

    class Receiver:
        __slots__ = ()
        __torch_function__ = no_torch_function

        def copy_(self: Any, value: Any, non_blocking: bool = False) -> Any:
            shard = shards[id(self)]
            same = value.shape == shard.spec.shape
            copies.append((shard, value if same else value.expand(shard.spec.shape)))
            return self

        def detach(self: Any) -> Any:
            return self

        data = property(detach, copy_)

    @cache
    def receiver(kind: type) -> Any:
        return type(kind)(kind.__name__, (Receiver, kind), {"__module__": kind.__module__, "__slots__": ()})

    kinds = [(parameter, type(parameter)) for parameter in engine.names]
    try:
        for parameter, kind in kinds:
            parameter.__class__ = receiver(kind)
        yield
    finally:
        for parameter, kind in kinds:
            parameter.__class__ = kind


def load_initial_weights(
    state: ModuleState,
    path: str | os.PathLike[str],
    control: ControlGroup,
    *,
    strict: bool,
    verify: bool,
    frozen_as_built: bool = False,
) -> Collection[str]:
    """Read weights and buffers into a sharded module, each rank its own slices. Returns the names of what was read.

    With ``strict`` what does not fit is a ``RuntimeError`` as of ``nn.Module.load_state_dict``, but for adapters of
    which nothing is stored; without it, rank 0 warns of it. A frozen parameter that is not there is a
    ``CheckpointError`` in both cases, unless ``frozen_as_built``. Collective: every rank.
    """
    checkpoint = open_checkpoint(path, control, verify=verify or "sample")
    weights = weights_of(checkpoint, path)
    own = {unwrapped(key): value for key, value in state.module.state_dict(keep_vars=True).items()}
    stored: OrderedDict[str, Any] = OrderedDict(under_names_of(state.module, own, weights, path, strict))
    adapters = adapters_in(state.module, own, weights, stored, path)
    if not strict:
        stored = OrderedDict(_what_fits(stored, own, path, control, adapters.hint))
    if hasattr(weights, "_metadata"):
        stored._metadata = weights._metadata  # type: ignore[attr-defined]  # versions, for the modules' own loading
    left_out = len(left_out_of(checkpoint))
    why = f" That checkpoint was saved without its {left_out} frozen parameters." if left_out else ""
    parameters = {unwrapped(key): value for key, value in state.module.named_parameters(remove_duplicate=False)}
    filled = _filled(parameters, {*stored, *adapters.names})
    random = [name for name, value in parameters.items() if _is_frozen(value) and name not in filled]
    if random and not strict and not frozen_as_built:
        raise CheckpointError(
            f"{len(random)} frozen parameters are not in the initial weights '{os.fspath(path)}' and would keep random "
            f"values: {some(random)}.{why}{adapters.hint} Name weights that hold them, or set "
            "CheckpointPolicy(frozen_as_built=True) if the module was built with the values it is to have."
        )
    try:
        state.load(stored, strict=strict, optional=adapters.optional)
    except RuntimeError as error:
        if isinstance(error, ZeroError):
            raise
        raise RuntimeError(
            f"The initial weights '{os.fspath(path)}' do not fit.{why}{adapters.hint} With "
            "CheckpointPolicy(strict_initial_weights=False) what does not fit keeps its initial values.\n"
            f"{error}"
        ) from None
    return stored.keys()


def _filled(own: Mapping[str, Any], stored: Collection[str]) -> set[str]:
    """The names whose values are stored; of a tied parameter, under any of its names."""
    there = {id(own[name]) for name in stored if name in own}
    return {name for name, value in own.items() if id(value) in there}


def _what_fits(
    stored: Mapping[str, Any], own: Mapping[str, Any], path: str | os.PathLike[str], control: ControlGroup, hint: str
) -> dict[str, Any]:
    """The stored tensors that have the name and shape of one of the module's; a warning names all others."""
    known = {name: value for name, value in stored.items() if name in own}
    fitting = {name: value for name, value in known.items() if _shape(value) == _shape(own[name])}
    reshaped = [name for name in known if name not in fitting]
    if not fitting and own:
        raise RuntimeError(
            f"Nothing in the initial weights '{os.fspath(path)}' fits the module: stored are {some(stored)}; the "
            f"module has {some(own)}.{hint} Compare the names, and save the weights under those of the module."
        )
    filled = _filled(own, stored)
    shapes = [f"{name} {_shape(stored[name])} instead of {_shape(own[name])}" for name in reshaped]
    lines = [
        f"{len(names)} {what}: {some(names)}."
        for names, what in (
            (shapes, "of another shape were skipped"),
            ([name for name in own if name not in filled], "are not there and keep their initial values"),
            ([name for name in stored if name not in own], "are not in the module and were ignored"),
        )
        if names
    ]
    if lines and control.rank == 0:
        warnings.warn(
            f"Initial weights from '{os.fspath(path)}': {len(fitting)} of {len(own)} tensors were read. "
            + " ".join(lines),
            stacklevel=3,
        )
    return fitting


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def weights_of(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Its weights by name."""
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"'{os.fspath(path)}' holds no weights: it has no 'state_dict'.")
    weights: Mapping[str, Any] = checkpoint["state_dict"]
    return weights


def left_out_of(checkpoint: Mapping[str, Any]) -> list[str]:
    """The frozen parameters that were not saved."""
    return list(checkpoint.get("lightning_zero", {}).get("excluded_frozen", ()))


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad
