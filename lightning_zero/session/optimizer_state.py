"""State and options of one sharded optimizer: names and full shapes in checkpoints, slices here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_zero._torch import tree_map_only
from lightning_zero.checkpoint import FlatShard, StoredTensor
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.full import whole
from lightning_zero.errors import some
from lightning_zero.offload import in_memory
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.whole import WholeState
from lightning_zero.session.names import unmoved, unwrapped
from lightning_zero.shards.slice import Slice

__all__ = ["OptimizerState", "cut_anew", "read_into_memory"]

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
            wrapped = {key: FlatShard(part, shard.spec.shape, shard.start) for key, part in parts.slices.items()}
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
            if entry is not None and (wrong := self._misfit(entry, values)) is not None:
                unfit.append(f"'{rename(key)}' ({wrong})")
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

    def _misfit(self, entry: Slice, values: Mapping[str, Any]) -> str | None:
        """What is wrong with the shapes of a parameter's state; only known of elementwise optimizers."""
        shape = tuple(entry.spec.shape)
        if self._optimizer.rule == "elementwise":
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shape:
                    return f"{key} of shape {tuple(value.shape)}, the parameter has {shape}"
        return None

    def _taken(
        self, entry: Slice, values: Mapping[str, Any], weight: Any, slices: list[tuple[Tensor, int, Tensor]]
    ) -> WholeState:
        """One parameter's state: what is whole is read; where its slices are to be read goes to ``slices``."""
        data = entry.data
        into = WholeState()
        for key, value in values.items():
            if not isinstance(value, Tensor):
                into.values[key] = tree_map_only(Tensor, lambda part: _read_whole(part).to(data.device), value)
                continue
            as_weight = key != "step" and isinstance(weight, Tensor) and value.dtype == weight.dtype
            dtype = data.dtype if as_weight and value.is_floating_point() else value.dtype
            if self._optimizer.slices_state(entry, key, value.shape):
                into.slices[key] = self._optimizer.homes.slice_for(entry, key, dtype)
                slices.append((value, entry.start, into.slices[key]))
            else:
                loaded = _read_whole(value)
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
            for user, tensor in whole(engine, pieces, f"'{key}' of an optimizer").items():
                found[new[user].name].slices[key] = new[user].of(tensor).to(new[user].device, copy=True)
    return found


def _read_whole(value: Tensor) -> Tensor:
    return value.read() if isinstance(value, StoredTensor) else value.clone()


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
        matched.append({k: v.read() if isinstance(v, StoredTensor) else v for k, v in options.items()})
    return matched
