"""Between Lightning's checkpoint dictionary and the engine: names and full shapes there, slices here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import FlatShard, StoredTensor
from lightning_zero.engine import ParameterShard, ZeroEngine
from lightning_zero.optim.sharded import OwnedParameter, ShardedOptimizer
from lightning_zero.optim.whole import WholeState

__all__ = ["ModuleState", "OptimizerState"]

# torch.compile wraps a block in a module of this attribute; names on disk do not depend on whether a block is compiled.
_COMPILED = "_orig_mod."


class ModuleState:
    """Weights and buffers of a sharded module.

    Args:
        engine: who holds the parameters.
        module: the user's module.
    """

    def __init__(self, engine: ZeroEngine, module: LightningModule | None) -> None:
        self._engine = engine
        self._module: nn.Module = module if module is not None else engine.module

    def save(self) -> dict[str, Any]:
        """This rank's part of ``state_dict()``: the keys, order and hooks are the module's own. No communication."""
        state = {}
        for key, value in self._module.state_dict(keep_vars=True).items():
            name = self._engine.names.get(value) if isinstance(value, nn.Parameter) else None
            if name is not None:
                shard = self._engine.shards[name]
                value = FlatShard(shard.data, shard.spec.shape, shard.start)
            elif isinstance(value, Tensor):
                value = value.detach()
            state[key.replace(_COMPILED, "")] = value
        return state

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Take weights and buffers over, each rank reading its own slices.

        Args:
            state: by full name, tensors as stored, plain, or this rank's own slices.
            strict: whether missing and unexpected keys are errors.

        Raises:
            RuntimeError: as ``nn.Module.load_state_dict`` does, for keys or shapes that do not fit.

        Collective: every rank.
        """
        own = {
            key.replace(_COMPILED, ""): (key, value) for key, value in self._module.state_dict(keep_vars=True).items()
        }
        errors = []
        if strict:
            missing = [key for key in own if key not in state]
            unexpected = [key for key in state if key not in own]
            if missing:
                errors.append("Missing key(s) in state_dict: " + ", ".join(f'"{key}"' for key in missing) + ".")
            if unexpected:
                errors.append("Unexpected key(s) in state_dict: " + ", ".join(f'"{key}"' for key in unexpected) + ".")
        rest: dict[str, Any] = {}
        slices: list[tuple[ParameterShard, Any]] = []
        for key, value in state.items():
            if key not in own:
                continue
            target_key, target = own[key]
            if isinstance(target, Tensor) and isinstance(value, Tensor) and target.shape != value.shape:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, the "
                    f"shape in current model is {tuple(target.shape)}."
                )
                continue
            name = self._engine.names.get(target) if isinstance(target, nn.Parameter) else None
            if name is not None:
                slices.append((self._engine.shards[name], value))
            else:
                rest[target_key] = value.read() if isinstance(value, StoredTensor) else value
        if errors:
            lines = "\n\t".join(errors)
            raise RuntimeError(f"Error(s) in loading state_dict for {type(self._module).__name__}:\n\t{lines}")
        for shard, value in slices:
            read_slice(value, shard.start, shard.data)
        if rest:
            self._module.load_state_dict(rest, strict=False)
        self._engine.masters_changed(range(len(self._engine.units)))


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
        """This rank's part of ``optimizer.state_dict()``, with names in place of parameter indices."""
        entries = {entry.shard.spec.name: entry for entry in self._optimizer.entries}
        state = {}
        for name, parts in self._optimizer.named_state().items():
            shard = entries[name].shard
            wrapped = {key: FlatShard(part, shard.spec.shape, shard.start) for key, part in parts.slices.items()}
            state[name] = {**parts.values, **wrapped}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [e.shard.spec.name for e in members]}
            for group, members in zip(self._optimizer.optimizer.param_groups, self._optimizer.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``save`` gave, or an ordinary optimizer state dict with parameter indices.

        Raises:
            ValueError: if the param groups do not fit.

        Collective: every rank, for an optimizer with whole parameters.
        """
        entries = self._optimizer.entries
        by_name = {entry.shard.spec.name: entry for entry in entries}
        state: dict[str, WholeState] = {}
        for key, values in saved["state"].items():
            name = entries[key].shard.spec.name if isinstance(key, int) and key < len(entries) else key
            if name not in by_name:
                raise ValueError(
                    f"The checkpoint holds optimizer state for '{name}', which is not in {self._optimizer.label}. "
                    "Build the optimizer over the same parameters as when the checkpoint was saved."
                )
            state[name] = WholeState()
            for part, value in values.items():
                self._read(by_name[name], part, value, state[name])
        self._optimizer.load_named_state(state, saved["param_groups"])

    def _read(self, entry: OwnedParameter, key: str, value: Any, into: WholeState) -> None:
        if not isinstance(value, Tensor):
            into.values[key] = value
        elif self._optimizer.slices_state(entry, key, value.shape):
            data = entry.shard.data
            with untracked():
                into.slices[key] = torch.empty(data.numel(), dtype=value.dtype, device=data.device)
            read_slice(value, entry.shard.start, into.slices[key])
        else:
            loaded = value.read() if isinstance(value, StoredTensor) else value.clone()
            # As torch's own loading does: step counters live on the host unless the optimizer's kernels read them.
            on_device = key != "step" or self._optimizer.steps_on_device(entry)
            into.values[key] = loaded.to(entry.shard.data.device) if on_device else loaded


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
