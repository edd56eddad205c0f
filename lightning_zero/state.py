"""Between Lightning's checkpoint dictionary and the engine: names and full shapes there, slices here."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import FlatShard, StoredTensor
from lightning_zero.checkpoint.agreement import collect
from lightning_zero.engine import ParameterShard, ZeroEngine
from lightning_zero.errors import CheckpointError, some
from lightning_zero.loading.copies import NotedCopies
from lightning_zero.loading.names import unwrapped
from lightning_zero.optim.sharded import OwnedParameter, ShardedOptimizer
from lightning_zero.optim.whole import WholeState

__all__ = ["ModuleState", "OptimizerState"]

_SAME_GROUPS = "Build the optimizer with the same groups as when the checkpoint was saved, or load the weights only."


class ModuleState:
    """Weights and buffers of a sharded module.

    Args:
        engine: who holds the parameters.
        module: the user's module.
    """

    def __init__(self, engine: ZeroEngine, module: LightningModule | None) -> None:
        self._engine = engine
        self._module: nn.Module = module if module is not None else engine.module

    def save(self, exclude_frozen: bool = False) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: the keys, order and hooks are the module's own. No communication.

        Args:
            exclude_frozen: leave out parameters that do not require gradients.
        """
        state = {}
        self._engine.take_over_shown(on_disk=False)
        for key, value in self._module.state_dict(keep_vars=True).items():
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
        return [unwrapped(key) for key, value in self._module.state_dict(keep_vars=True).items() if _is_frozen(value)]

    def load(self, state: Mapping[str, Any], strict: bool, excluded: Collection[str] = ()) -> None:
        """Take weights and buffers over, each rank reading its own slices.

        The module's own ``load_state_dict`` decides what goes where, so that its hooks, overrides, extra state and
        messages are the ordinary ones; only what it copies into a sharded parameter is read slice by slice.

        Args:
            state: by full name, tensors as stored, plain, or this rank's own slices.
            strict: whether missing and unexpected keys are errors. Of a tied parameter one name is enough.
            excluded: names that were left out when the checkpoint was saved: they are not missing, and a warning says
                how many keep their values.

        Raises:
            RuntimeError: as ``nn.Module.load_state_dict`` does, for keys or shapes that do not fit.
            CheckpointError: on every rank, if one could not read its part or was given other keys than this one.

        Collective: every rank.
        """
        current = self._module.state_dict(keep_vars=True)
        own = {unwrapped(key): (key, value) for key, value in current.items()}
        # Without versions modules would take the state for that of their oldest release.
        versions = getattr(state, "_metadata", None) or getattr(current, "_metadata", None)
        state = {unwrapped(key): value for key, value in state.items()}
        kept = [name for name in excluded if name in own and name not in state]
        loaded = {id(value) for key, (_, value) in own.items() if key in state}
        expendable = {*kept, *(key for key, (_, value) in own.items() if id(value) in loaded)}
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
            for shard, value in copies:
                read_slice(value, shard.start, shard.data)

        self._engine.control.barrier()  # after an error another rank may still be reading weights in a forward
        try:
            collect(self._engine.control, "load the weights of the checkpoint", read)
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
    ) -> list[tuple[ParameterShard, Any]]:
        """Run the module's ``load_state_dict``. Returns what is to be read into shards after it.

        Raises:
            RuntimeError: as ``nn.Module.load_state_dict`` does; a missing key that is ``expendable`` does not count.
                Also if a parameter is another object afterwards, which the engine would not know.
        """

        def forgive(_: nn.Module, keys: Any) -> None:
            keys.missing_keys[:] = [key for key in map(unwrapped, keys.missing_keys) if key not in expendable]

        before = dict(self._module.named_parameters(remove_duplicate=False))
        hook = self._module.register_load_state_dict_post_hook(forgive)
        noted = NotedCopies(self._engine)
        try:
            with noted:
                self._module.load_state_dict(state, strict=strict)
        finally:
            hook.remove()
        after = dict(self._module.named_parameters(remove_duplicate=False))
        for name in (name for name in after if after[name] is not before.get(name)):
            raise RuntimeError(
                f"Loading replaced the parameter '{name}' by another object, which would not be trained. A module's "
                "own `load_state_dict` must copy into its parameters: call the ordinary one with `assign=False`."
            )
        return noted.copies


class OptimizerState:
    """State and options of one sharded optimizer.

    Args:
        engine: who holds the parameters.
        optimizer: the sharded view of the user's optimizer.
    """

    def __init__(self, engine: ZeroEngine, optimizer: ShardedOptimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer

    def save(self) -> dict[str, Any]:
        """This rank's part of ``optimizer.state_dict()``, with names in place of parameter indices.

        Collective: every rank, for an optimizer with whole parameters; local otherwise.
        """
        entries = {entry.shard.spec.name: entry for entry in self._optimizer.entries}
        state = {}
        for name, parts in self._optimizer.named_state().items():
            shard = entries[name].shard
            wrapped = {key: FlatShard(part, shard.spec.shape, shard.start) for key, part in parts.slices.items()}
            state[unwrapped(name)] = {**parts.values, **wrapped}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [_name(entry) for entry in members]}
            for group, members in zip(self._optimizer.optimizer.param_groups, self._optimizer.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load(self, saved: Mapping[str, Any], *, strict: bool = True, weights: Mapping[str, Any] | None = None) -> None:
        """Take over what ``save`` gave, or an ordinary optimizer state dict with parameter indices.

        State goes by name, whatever the order of the parameters: a parameter that the checkpoint does not know starts
        with fresh state, as one without a gradient so far does. Indices go by the order of the param groups.

        Args:
            saved: the state dict.
            strict: whether state of a parameter that is not in the optimizer any more, or that has another shape now,
                is an error; it is left out otherwise.
            weights: the ``state_dict`` of the checkpoint, as ``ModuleState.load`` got it. State follows a weight that
                was stored under another name than it is loaded under, and takes over the dtype of the weights if it
                was saved in that of the stored ones.

        Raises:
            ValueError: if state or param groups do not fit.
            CheckpointError: on every rank, if one could not read its part.

        Collective: every rank.
        """
        label = self._optimizer.label
        saved_groups = [dict(group) for group in saved["param_groups"]]
        own_names = [[_name(entry) for entry in members] for members in self._optimizer.groups]
        rename = self._renaming(saved_groups, own_names, weights or {})
        for group in saved_groups:
            group["params"] = [rename(key) for key in group["params"]]
        entries = {_name(entry): entry for entry in self._optimizer.entries}
        found: dict[str, Mapping[str, Any]] = {}
        left_out: list[str] = []
        for key, values in saved["state"].items():
            entry = entries.get(rename(key))
            if entry is not None and (wrong := self._misfit(entry, values)) is not None:
                left_out.append(f"'{rename(key)}' ({wrong})")
            elif entry is not None:
                found[_name(entry)] = values
            elif values:
                left_out.append(f"'{rename(key)}' (not in the optimizer)")
        if left_out and strict:
            raise ValueError(
                f"The checkpoint holds optimizer state that does not fit {label}: {some(left_out)}. "
                "Build the optimizer over the same parameters as when the checkpoint was saved, rename them in "
                "`on_load_checkpoint`, or set `strict_loading = False` in the module to go on without that state."
            )
        known = {name for group in saved_groups for name in group["params"]}
        fresh = [name for names in own_names for name in names if name not in known and name not in found]
        options = _matched(label, saved_groups, own_names)
        state: dict[str, WholeState] = {}

        def read() -> None:
            self._optimizer.make_room()
            for name, values in found.items():
                stored = (weights or {}).get(name)
                state[entries[name].shard.spec.name] = self._read(entries[name], values, stored)

        collect(self._engine.control, f"load the state of {label}", read)
        self._optimizer.load_named_state(state, options)
        if (left_out or fresh) and self._engine.control.rank == 0:
            new = f"{len(fresh)} parameters that it does not know start fresh ({some(map(repr, fresh))})"
            parts = [f"state was left out for {some(left_out)}"] * bool(left_out) + [new] * bool(fresh)
            warnings.warn(f"{label} does not fit the checkpoint everywhere: {'; '.join(parts)}.", stacklevel=2)

    def _renaming(
        self, saved_groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]], weights: Mapping[str, Any]
    ) -> Callable[[Any], Any]:
        """What a key of the saved state is called in this optimizer.

        Raises:
            ValueError: for indices, if the param groups are not of the same sizes.
        """
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
            names.update((unwrapped(alias), _name(entry)) for alias in entry.shard.spec.aliases)
        own = set(chain.from_iterable(own_names))
        for name, value in weights.items():
            if isinstance(value, StoredTensor) and unwrapped(name) in own:
                stored = unwrapped(value.key.partition(".")[2])
                if stored not in own:
                    names.setdefault(stored, unwrapped(name))
        return lambda key: names.get(plain, plain) if (plain := unwrapped(key)) not in own else plain

    def _misfit(self, entry: OwnedParameter, values: Mapping[str, Any]) -> str | None:
        """What is wrong with the shapes of a parameter's state; only known of elementwise optimizers."""
        shape = tuple(entry.shard.spec.shape)
        if self._optimizer.rule == "elementwise":
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shape:
                    return f"{key} of shape {tuple(value.shape)}, the parameter has {shape}"
        return None

    def _read(self, entry: OwnedParameter, values: Mapping[str, Any], weight: Any) -> WholeState:
        """One parameter's state: its slices read, everything else whole."""
        data = entry.shard.data
        into = WholeState()
        for key, value in values.items():
            if not isinstance(value, Tensor):
                into.values[key] = value
                continue
            as_weight = key != "step" and isinstance(weight, Tensor) and value.dtype == weight.dtype
            dtype = data.dtype if as_weight and value.is_floating_point() else value.dtype
            if self._optimizer.slices_state(entry, key, value.shape):
                into.slices[key] = self._optimizer.homes.slice_for(entry, key, dtype)
                read_slice(value, entry.shard.start, into.slices[key])
            else:
                loaded = value.read() if isinstance(value, StoredTensor) else value.clone()
                # As torch's own loading does: step counters live on the host unless the optimizer's kernels read them.
                on_device = key != "step" or self._optimizer.steps_on_device(entry)
                into.values[key] = loaded.to(device=data.device if on_device else loaded.device, dtype=dtype)
        return into


def _matched(
    label: str, saved_groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The saved options of each of the optimizer's param groups, found by the names in them; none for a new group.

    Raises:
        ValueError: if groups were split or joined, so that options would belong to several.
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
        matched.append({k: v.read() if isinstance(v, StoredTensor) else v for k, v in options.items()})
    return matched


def read_slice(value: Any, start: int, destination: Tensor) -> None:
    """Fill a 1-D slice of a tensor that starts at element ``start`` from wherever the tensor is."""
    with untracked():
        if isinstance(value, StoredTensor):
            value.read_into(destination, start)
        elif isinstance(value, FlatShard):
            destination.copy_(value.local)
        else:
            begin = start if destination.numel() else 0
            destination.copy_(value.detach().reshape(-1).narrow(0, begin, destination.numel()))


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _name(entry: OwnedParameter) -> str:
    """What a parameter of an optimizer is called in a checkpoint."""
    return str(unwrapped(entry.shard.spec.name))
