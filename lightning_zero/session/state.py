"""What checkpoints hold of a sharded run: weights, buffers and optimizer state by name in full shape, slices here."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_zero._torch import no_torch_function, tree_map_only, without_swaps
from lightning_zero.checkpoint import FlatShard, StoredTensor, open_checkpoint
from lightning_zero.checkpoint.format.record import Split
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.comm import ControlGroup
from lightning_zero.engine import Slice, ZeroEngine
from lightning_zero.engine.full import whole
from lightning_zero.errors import CheckpointError, ZeroError, some
from lightning_zero.offload import in_memory
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.state import copied, extent, grain, shape_of
from lightning_zero.optim.whole import WholeState
from lightning_zero.plan.layout import ParameterSpec, Part
from lightning_zero.registry import extension, installed

__all__ = [
    "Adapters",
    "ModuleState",
    "OptimizerState",
    "adapters_in",
    "cut_anew",
    "flat_shard",
    "left_out_of",
    "load_initial_weights",
    "local_part",
    "read_into_memory",
    "renamed",
    "under_names_of",
    "unwrapped",
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
                value = flat_shard(shard.data, shard.spec, shard.start)
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
            prepared[target_key] = value if key not in own or sharded else _read(value)
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
    stand there, of the whole shape. ``copies`` gets the slice to fill and its value. A copy into a part is not noted.
    """
    shards = {id(parameter): engine.shards[name] for parameter, name in engine.names.items()}

    class Receiver:
        __slots__ = ()
        __torch_function__ = no_torch_function

        @property
        def shape(self: Any) -> Any:
            return torch.Size(shards[id(self)].spec.whole_shape)

        def copy_(self: Any, value: Any, non_blocking: bool = False) -> Any:
            whole = value if value.shape == self.shape else value.expand(self.shape)
            copies.append((shards[id(self)], local_part(whole, shards[id(self)].spec.part)))
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
    return tuple(getattr(value, "tensor_part", value).shape) if isinstance(value, Tensor) else None


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


_SAME_GROUPS = "Build the optimizer with the same groups as when the checkpoint was saved, or load the weights only."


class OptimizerState:
    """State and options of one sharded optimizer."""

    def __init__(self, engine: ZeroEngine, optimizer: ShardedOptimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer
        # In a checkpoint parameters are called what the module calls them now: user code may have put one elsewhere
        # since set-up (`register_parametrization`, a wrapper around its layer).
        now = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._names: dict[Slice, str] = {
            entry: unwrapped(now.get(entry.user, entry.name)) for entry in optimizer.entries
        }

    def save(self) -> dict[str, Any]:
        """This rank's part of ``optimizer.state_dict()``, with names in place of parameter indices.

        Raises ``ValueError`` if a parameter that has state was taken out of all param groups, where torch's own raises
        ``KeyError``. Collective: every rank, for an optimizer with whole parameters; local otherwise.
        """
        label = self._optimizer.label
        entries = {entry.name: entry for entry in self._optimizer.entries}
        state = {}
        for name, parts in self._optimizer.named_state().items():
            if name not in entries:
                raise ValueError(
                    f"{label} has state for '{name}', which is in none of its param groups, so no run that resumes "
                    "could take it. Put the parameter back into a group, or delete its state, before you save: "
                    f"`del optimizer.state[parameter]`."
                )
            shard = entries[name]
            specs = {key: replace(shard.spec, shape=shape_of(key, shard.spec.shape)) for key in parts.slices}
            wrapped = {k: flat_shard(part, specs[k], extent(k, shard.start)) for k, part in parts.slices.items()}
            state[self._names[entries[name]]] = {**parts.values, **wrapped}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [self._names[entry] for entry in members]}
            for group, members in zip(self._optimizer.optimizer.param_groups, self._optimizer.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load(self, saved: Mapping[str, Any], *, weights: Mapping[str, Any] | None = None) -> None:
        """Take over what ``save`` gave, or an ordinary optimizer state dict with parameter indices.

        State goes by name, indices by the order of the param groups; a parameter that the checkpoint does not know
        starts with fresh state. ``weights``, the checkpoint's ``state_dict``: state follows a weight that was stored
        under another name, and takes over its dtype. ``ValueError`` if state or groups do not fit. Collective.
        """
        label = self._optimizer.label
        saved_groups = [dict(group) for group in saved["param_groups"]]
        own_names = [[self._names[entry] for entry in members] for members in self._optimizer.groups]
        rename = self._renaming(saved_groups, own_names, weights or {})
        for group in saved_groups:
            group["params"] = [rename(key) for key in group["params"]]
        entries = {self._names[entry]: entry for entry in self._optimizer.entries}
        found: dict[str, Mapping[str, Any]] = {}
        unfit: list[str] = []
        for key, values in saved["state"].items():
            entry = entries.get(rename(key))
            shape = () if entry is None else entry.spec.whole_shape
            shapes = {k: tuple(v.shape) for k, v in values.items() if isinstance(v, Tensor) and v.dim()}
            wrong: list[str] = []
            if self._optimizer.rule == "elementwise":
                wrong = [k for k in shapes if shapes[k] != (shape_of(k, shape) if self._optimizer.in_blocks else shape)]
            if entry is not None and wrong:
                why = f"{wrong[0]} of shape {shapes[wrong[0]]}, the parameter has {shape}"
                unfit.append(f"'{rename(key)}' ({why})")
            elif entry is not None and found.setdefault(self._names[entry], values) is not values:
                unfit.append(f"'{unwrapped(key)}' (also stored as '{rename(key)}': two parameters that are one now)")
            elif entry is None and values:
                unfit.append(f"'{rename(key)}' (not in the optimizer)")
        if unfit:
            raise ValueError(
                f"The checkpoint holds optimizer state that does not fit {label}: {some(unfit)}. "
                "Build the optimizer over the same parameters as when the checkpoint was saved, or rename them in "
                "`on_load_checkpoint`. To go on without that state, delete it there: "
                "`del checkpoint['optimizer_states'][index]['state'][name]`."
            )
        known = {name for group in saved_groups for name in group["params"]}
        fresh = [name for names in own_names for name in names if name not in known and name not in found]
        options = _matched(label, saved_groups, own_names)
        state: dict[str, WholeState] = {}

        def read() -> None:
            self._optimizer.make_room()
            slices: list[tuple[Tensor, int, Tensor]] = []
            for name, values in found.items():
                stored = (weights or {}).get(name)
                state[entries[name].name] = self._taken(entries[name], values, stored, slices)
            read_slices(slices)

        self._engine.control.together(f"load the state of {label}", read)
        self._optimizer.load_named_state(state, options)
        if fresh and self._engine.control.rank == 0:
            warnings.warn(
                f"{label} does not fit the checkpoint everywhere: {len(fresh)} parameters that it does not know start "
                f"fresh ({some(map(repr, fresh))}).",
                stacklevel=2,
            )

    def _renaming(
        self, saved_groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]], weights: Mapping[str, Any]
    ) -> Callable[[Any], Any]:
        """What a key of the saved state is called in this optimizer. Indices need param groups of the same sizes."""
        keys = list(chain.from_iterable(group["params"] for group in saved_groups))
        names: dict[Any, str] = {}
        if any(isinstance(key, int) for key in keys):
            sizes = [len(group["params"]) for group in saved_groups]
            if sizes != [len(group) for group in own_names]:
                raise ValueError(
                    f"The checkpoint's optimizer numbers its parameters, in param groups of {sizes} parameters, but "
                    f"{self._optimizer.label} has param groups of {[len(group) for group in own_names]}. {_SAME_GROUPS}"
                )
            names.update(zip(keys, chain.from_iterable(own_names), strict=True))
        for entry in self._optimizer.entries:
            names.update((unwrapped(alias), self._names[entry]) for alias in entry.spec.aliases)
        own = set(chain.from_iterable(own_names))
        for name, value in weights.items():
            if isinstance(value, StoredTensor) and unwrapped(name) in own:
                stored = unwrapped(value.key.partition(".")[2])
                if stored not in own:
                    names.setdefault(stored, unwrapped(name))
        # `ModelPruning` saves weights under the names from before it, and its module has the others.
        former = {unmoved(name): name for name in own}

        def rename(key: Any) -> Any:
            plain = unwrapped(key)
            return plain if plain in own else names.get(plain) or former.get(unmoved(str(plain)), plain)

        return rename

    def _taken(
        self, entry: Slice, values: Mapping[str, Any], weight: Any, slices: list[tuple[Tensor, int, Tensor]]
    ) -> WholeState:
        """One parameter's state: what is whole is read; where its slices are to be read goes to ``slices``."""
        data = entry.data
        into = WholeState()
        for key, value in values.items():
            if not isinstance(value, Tensor):
                into.values[key] = tree_map_only(Tensor, lambda part: copied(_read(part)).to(data.device), value)
                continue
            value = local_part(value, entry.spec.part)
            as_weight = key != "step" and grain(key) == 1 and isinstance(weight, Tensor) and value.dtype == weight.dtype
            dtype = data.dtype if as_weight and value.is_floating_point() else value.dtype
            if self._optimizer.slices_state(entry, key, value.shape):
                into.slices[key] = self._optimizer.homes.slice_for(entry, key, dtype)
                slices.append((value, extent(key, entry.start), into.slices[key]))
            else:
                loaded = value.read() if isinstance(value, StoredTensor) else copied(value)
                # As torch's own loading does: step counters live on the host unless the optimizer's kernels read them.
                on_device = key != "step" or self._optimizer.steps_on_device(entry)
                into.values[key] = loaded.to(device=data.device if on_device else loaded.device, dtype=dtype)
        return into


def read_into_memory(states: Sequence[Mapping[str, WholeState]]) -> None:
    """Read the slices that are in files, which are about to go. Raises ``OffloadError`` if a disk failed. Local."""
    for state in states:
        for one in state.values():
            one.slices.update({key: in_memory(value) for key, value in one.slices.items()})


def cut_anew(state: Mapping[str, WholeState], former: ZeroEngine, engine: ZeroEngine) -> dict[str, WholeState]:
    """State by parameter name, cut as the ``former`` engine's masters, cut as those of the ``engine`` that took its
    place. Whole state is in memory for a layout at a time. Collective: every rank."""
    new = {entry.user: entry for entry in engine.shards.values()}
    layouts: dict[int, list[Slice]] = {}
    for entry in former.shards.values():
        if entry.name in state:
            layouts.setdefault(id(entry.layout), []).append(entry)
    found = {new[e.user].name: WholeState(values=state[e.name].values) for e in chain(*layouts.values())}
    for entries in layouts.values():
        for key in sorted({key for entry in entries for key in state[entry.name].slices}):
            pieces = {
                entry: piece for entry in entries if (piece := state[entry.name].slices.pop(key, None)) is not None
            }
            for user, tensor in whole(engine, pieces, f"'{key}' of an optimizer", grain(key)).items():
                found[new[user].name].slices[key] = new[user].of(tensor, grain(key)).to(new[user].device, copy=True)
    return found


def flat_shard(elements: Tensor, spec: ParameterSpec, start: int) -> FlatShard:
    """What a checkpoint has of a tensor like a parameter, whose elements from ``start`` on are here.

    Where all ranks of a tensor group have the same, the first one's are saved.
    """
    part = spec.part
    if part is None or part.dim is None:
        return FlatShard(elements if spec.counted else elements[:0], spec.shape, start)
    return FlatShard(elements, part.shape, part.rank * spec.numel + start, Split(part.dim, part.ranks))


def local_part(value: Any, part: Part | None) -> Any:
    """Of a stored tensor of the whole shape, what is this rank's by tensor parallelism; anything else as it is."""
    if part is None or part.dim is None or not isinstance(value, Tensor) or tuple(value.shape) != part.shape:
        return value
    if isinstance(value, FlatShard):  # of this rank already
        return FlatShard(value.local, part.own_shape, value.start - part.rank * math.prod(part.own_shape))
    if isinstance(value, StoredTensor) and value.memory is None:
        return value.part(part.dim, part.start, part.own_shape[part.dim])
    return part.of(value)


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value


def _matched(
    label: str, saved_groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The saved options of each of the optimizer's param groups, found by the names in them; none for a new group.

    Groups that were split or joined are refused: options would belong to several.
    """
    group_of = {name: index for index, group in enumerate(saved_groups) for name in group["params"]}
    found: list[int | None] = []
    for index, names in enumerate(own_names):
        sources = sorted({group_of[name] for name in names if name in group_of})
        if len(sources) > 1:
            raise ValueError(
                f"Param group {index} of {label} has parameters of param groups {sources} of the checkpoint. "
                + _SAME_GROUPS
            )
        if sources and sources[0] in found:
            raise ValueError(
                f"Param groups {found.index(sources[0])} and {index} of {label} are one group, {sources[0]}, in the "
                f"checkpoint. {_SAME_GROUPS}"
            )
        found.append(sources[0] if sources else None)
    if len(saved_groups) == len(own_names):  # groups of renamed parameters only, or of none
        free = [index not in found for index in range(len(saved_groups))]
        found = [index if source is None and free[index] else source for index, source in enumerate(found)]
    matched = []
    for source in found:
        group = {} if source is None else saved_groups[source]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        matched.append({key: _read(value) for key, value in options.items()})
    return matched


# ---------------------------------------------------------------------------------------------------------- names

# torch.compile, activation checkpointing and FSDP wrap a block in a module of this attribute; names in a checkpoint do
# not depend on whether a block is wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_DDP = "module."
_MOVED = re.compile(r"\b(?:parametrizations\.(\w+)\.original|(\w+)_orig)$")


def unwrapped(key: Any) -> Any:
    """A name without what wraps its blocks; an index as it is."""
    if isinstance(key, str):
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
    return key


def unmoved(name: str) -> str:
    """What a parameter was called before ``torch.nn.utils.prune`` or ``parametrize`` put it elsewhere in its layer."""
    return _MOVED.sub(r"\1\2", name)


def under_names_of(
    module: nn.Module, own: Collection[str], stored: Mapping[str, Any], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under a module's names, if they differ in wrapped blocks or a common prefix (`renamed`). What a
    model of transformers, or peft around it, has under other names than its files is found by ``formats``.
    """
    names = {unwrapped(name): name for name in own}
    if any(unwrapped(name) not in names for name in stored) and installed("formats"):
        found: dict[str, Any] = extension("formats").under_names_of(module, own, stored, path, strict)
        return found
    return renamed(stored, (names,), path, strict)


class Adapters(NamedTuple):
    """What peft has added to a module."""

    names: Sequence[str] = ()
    optional: Sequence[str] = ()  # those of them that a file of the base need not hold
    hint: str = ""  # for errors about names


def adapters_in(
    module: nn.Module,
    own: Collection[str],
    weights: Collection[str],
    stored: MutableMapping[str, Any],
    path: str | os.PathLike[str],
) -> Adapters:
    """What adapters add to a module of the names ``own``; ``stored`` gets what they take from their base."""
    if all(name in stored for name in own) or not installed("formats"):
        return Adapters()
    found: Adapters = extension("formats").adapters_in(module, own, weights, stored, path)
    return found


def renamed(
    stored: Mapping[str, Any], known: Sequence[Mapping[str, str]], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under the module's names, which may have another prefix: the first of the ``known`` ways to
    find these by plain names that makes most fit, or all with ``strict``. Where several do, names stay as they are.
    """
    plain = [unwrapped(name) for name in stored]

    def way(names: Mapping[str, str]) -> tuple[int, str, str]:
        cut, add = _prefix_change(plain, names, strict)
        return sum(add + name.removeprefix(cut) in names for name in plain), cut, add

    (_, cut, add), names = max(((way(names), names) for names in known), key=lambda found: found[0][0])
    if cut or add:
        how = " and ".join(
            [f"without their prefix '{cut}'"] * bool(cut) + [f"with '{add}' put before them"] * bool(add)
        )
        rank_zero_info(f"The names in '{os.fspath(path)}' are the module's {how}: loading them under those.")
    return {names.get(add + unwrapped(name).removeprefix(cut), name): value for name, value in stored.items()}


def _prefix_change(stored: Collection[str], own: Collection[str], strict: bool) -> tuple[str, str]:
    """What to cut off the stored names, and to put before them, to make them the module's; nothing if several ways do.

    DDP's ``module.`` may be replaced by another prefix.
    """
    if not stored or any(name in own for name in stored):
        return "", ""
    longer: dict[str, list[str]] = {}
    for name in own:
        for rest in _rests(name):
            longer.setdefault(rest, []).append(name[: -len(rest)])
    counts: Counter[tuple[str, str]] = Counter()
    for name in stored:
        counts.update(("", prefix) for prefix in longer.get(name, ()))
        counts.update((name[: -len(rest)], "") for rest in _rests(name) if rest in own)
    all_fit = [change for change, count in counts.items() if strict and count == len(stored)]
    changes = all_fit or [change for change, count in counts.items() if count > len(stored) // 2]
    if not changes and all(name.startswith(_DDP) for name in stored):
        cut, add = _prefix_change([name.removeprefix(_DDP) for name in stored], own, strict)
        return (_DDP + cut, add) if cut or add else ("", "")
    return changes[0] if len(changes) == 1 else ("", "")


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
