"""The user's optimizer on shards: same object, same param groups, same options; only the tensors are this rank's part.

Elementwise optimizers step on 1-D slices, bit-identical to the whole. Every rank keeps every parameter in its place in
the groups, with 0 elements where it owns nothing, so parameter indices mean the same everywhere and step counters
agree.

Optimizers that need whole matrices get them at one owner rank (``optim/whole.py``). Their groups hold the whole
parameters this rank owns *and* the shard parameters of all: ``zero_grad`` and ``toggle_optimizer`` act on the latter,
where gradients are accumulated, and during a step those show no gradient, so that the optimizer passes them over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.outermost import OutermostStep
from lightning_zero.optim.rules import optimizer_rule
from lightning_zero.optim.whole import WholeEntry, WholeParameters, WholeState
from lightning_zero.plan import FlatLayout, ParameterSpec

__all__ = ["OwnedParameter", "Shard", "ShardedOptimizer", "optimizer_rule"]


class Shard(Protocol):
    """This rank's part of one parameter, as the engine keeps it."""

    @property
    def spec(self) -> ParameterSpec: ...
    @property
    def start(self) -> int: ...
    @property
    def data(self) -> Tensor: ...
    @property
    def parameter(self) -> nn.Parameter | None: ...


@dataclass(frozen=True)
class OwnedParameter:
    """What an optimizer has to know of one of the user's parameters.

    Args:
        shard: this rank's part.
        unit: index of the unit it belongs to.
        layout: where all ranks' parts are.
        position: which parameter of the layout.
    """

    shard: Shard
    unit: int
    layout: FlatLayout
    position: int


# Scalar states of the elementwise optimizers; only matters for 0-d parameters, where shape cannot tell.
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})


class ShardedOptimizer:
    """Adapts one of the user's optimizers in place.

    Args:
        optimizer: the user's optimizer over the user's parameters.
        label: how to name it in messages; the same on every rank.
        owned: all parameters of the engine.
        collectives: the wire.
        before_step: called before every step, on every rank.
        after_step: called after every step with the units whose weights may have changed.
        writable: whether the user can write to the masters at any time, because parameters show them; whole parameters
            are then brought up to date before every step.

    Raises:
        UnsupportedOptimizerError: if the optimizer cannot be sharded.
        ValueError: if it holds parameters that are not the model's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, OwnedParameter],
        collectives: Collectives,
        before_step: Callable[[str], None],
        after_step: Callable[[Sequence[int]], None],
        writable: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.label = label
        self.rule = optimizer_rule(optimizer)
        self._owned = owned
        self._collectives = collectives
        self._before_step = before_step
        self._after_step = after_step
        self.groups: list[list[OwnedParameter]] = []
        self._whole: WholeParameters | None = None
        self._whole_is_stale = False
        self._writable = writable
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []
        self._frozen: dict[str, nn.Parameter] = {}
        self._steps = OutermostStep()
        self._adopt()
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def entries(self) -> list[OwnedParameter]:
        """All parameters of the optimizer, in the order of its groups."""
        return [entry for group in self.groups for entry in group]

    @property
    def units(self) -> list[int]:
        """Units with parameters that this optimizer may change, the same list on every rank."""
        return sorted({entry.unit for entry in self.entries if entry.shard.parameter is not None})

    def gradients(self) -> list[Tensor]:
        """This rank's gradient slices, 1-D, of the parameters that have a gradient."""
        found = []
        for entry in self.entries:
            parameter = entry.shard.parameter
            if parameter is not None and parameter.grad is not None and parameter.grad.numel():
                found.append(parameter.grad)
        return found

    def adopt_new_groups(self) -> None:
        """Take over groups from ``add_param_group``: before ``zero_grad`` and clipping, which go by groups.

        Raises:
            UnsupportedOptimizerError: if the optimizer has whole parameters.
        """
        if len(self.optimizer.param_groups) != len(self.groups):
            self._adopt()

    def masters_changed(self) -> None:
        """Note that the masters were written by something other than this optimizer's step."""
        self._whole_is_stale = True

    def abandon(self) -> None:
        """Forget a step that raised."""
        self._steps.forget()

    def detach(self) -> None:
        """Take the step hooks off again."""
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------- steps

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(a) for a in args) or kwargs.get("closure") is not None:
            raise RuntimeError(
                f"{self.label}.step(closure) would run forward and backward inside the step, after the gradients were "
                "agreed on. Call backward first and step() without a closure; Lightning does so by itself."
            )
        if not self._steps.begins(sys._getframe(1)):
            return
        self._before_step(self.label)
        self.adopt_new_groups()
        if self._whole is not None:
            if self._whole_is_stale or self._writable:
                self._whole.load()
                self._whole_is_stale = False
            self._hidden = [(p, p.grad) for e in self.entries if (p := e.shard.parameter) is not None]
            self._whole.collect_gradients([_gradient(entry) for entry in self.entries])
            for parameter, _ in self._hidden:
                parameter.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._steps.ends():
            return
        if self._whole is not None:
            self._whole.publish()
            self._whole.release_gradients()
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden = []
        self._after_step(self.units)

    # -------------------------------------------------------------- adaptation

    def _adopt(self) -> None:
        """Replace the user's parameters in groups that still hold them (at set-up, or added by ``add_param_group``)."""
        first = len(self.groups)
        fresh = self.optimizer.param_groups[first:]
        groups = [[self._lookup(first + i, p) for p in group["params"]] for i, group in enumerate(fresh)]
        if self.rule == "whole":
            if first:
                raise UnsupportedOptimizerError(
                    f"{self.label}: add_param_group after set-up is not supported for "
                    f"{type(self.optimizer).__name__}, whose parameters are handed out to owner ranks at set-up. Put "
                    "all parameters in groups from the start."
                )
            self.groups = groups
            self._hand_out(fresh)
            return
        for group, entries in zip(fresh, groups, strict=True):
            for parameter, entry in zip(list(group["params"]), entries, strict=True):
                state = self.optimizer.state.pop(parameter, None)
                if state:
                    self.optimizer.state[self._target(entry)] = {
                        key: _slice_state(key, value, entry.shard) for key, value in state.items()
                    }
            group["params"] = [self._target(entry) for entry in entries]
        self.groups += groups

    def _hand_out(self, groups: Sequence[dict[str, Any]]) -> None:
        world_size = self._collectives.world_size
        slices = {id(e.layout): [e.layout.slices(rank) for rank in range(world_size)] for e in self.entries}
        self._whole = WholeParameters(
            [
                WholeEntry(
                    name=entry.shard.spec.name,
                    shape=tuple(entry.shard.spec.shape),
                    dtype=entry.shard.spec.dtype,
                    shard=entry.shard.data,
                    ranges=[
                        (ranks[entry.position].parameter_start, ranks[entry.position].numel)
                        for ranks in slices[id(entry.layout)]
                    ],
                )
                for entry in self.entries
            ],
            self._collectives,
        )
        index = 0
        for group in groups:
            kept = []
            for parameter in list(group["params"]):
                whole = self._whole.whole(index)
                state = self.optimizer.state.pop(parameter, None)
                if whole is not None:
                    kept.append(whole)
                    if state:
                        self.optimizer.state[whole] = {k: _densify(v) for k, v in state.items()}
                index += 1
            group["params"] = kept
        for group, members in zip(groups, self.groups, strict=True):
            group["params"] += [self._target(entry) for entry in members]

    def _lookup(self, group: int, parameter: nn.Parameter) -> OwnedParameter:
        owned = self._owned.get(parameter)
        if owned is None:
            raise ValueError(
                f"{self.label}, param group {group}, holds a parameter of shape {tuple(parameter.shape)} that is not "
                "one of the model's. Build the optimizer in configure_optimizers from self.parameters(); a parameter "
                "that was replaced or created after the module was set up is not trained."
            )
        return owned

    def _target(self, entry: OwnedParameter) -> nn.Parameter:
        if entry.shard.parameter is not None:
            return entry.shard.parameter
        name = entry.shard.spec.name
        if name not in self._frozen:
            with torch.inference_mode(False):
                self._frozen[name] = nn.Parameter(entry.shard.data.detach(), requires_grad=False)
        return self._frozen[name]

    # ------------------------------------------------------------------- state

    def named_state(self) -> dict[str, WholeState]:
        """Optimizer state by parameter name.

        Collective: every rank, for an optimizer with whole parameters; local otherwise.
        """
        if self._whole is not None:
            whole = [self._whole.whole(index) for index in range(len(self.entries))]
            states = [None if p is None else self.optimizer.state.get(p) for p in whole]
            found = self._whole.state_to_slices(states)
            return {
                e.shard.spec.name: state
                for e, state in zip(self.entries, found, strict=True)
                if state.slices or state.values
            }
        named = {}
        for entry in self.entries:
            state = self.optimizer.state.get(self._target(entry))
            if state:
                slices = {key: value for key, value in state.items() if _covers(value, entry)}
                values = {key: value for key, value in state.items() if key not in slices}
                named[entry.shard.spec.name] = WholeState(slices, values)
        return named

    def slices_state(self, entry: OwnedParameter, key: str, shape: Sequence[int]) -> bool:
        """Whether state of a full ``shape`` covers the parameter's elements, so that each rank takes its slice."""
        if tuple(shape) != tuple(entry.shard.spec.shape):
            return False
        return bool(shape) or (self._whole is None and key not in _SCALARS)

    def steps_on_device(self, entry: OwnedParameter) -> bool:
        """Whether the step counter of a parameter belongs on its device (fused and capturable optimizers)."""
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            if any(member is entry for member in members):
                return bool(group.get("fused") or group.get("capturable"))
        return False

    def load_named_state(self, state: Mapping[str, WholeState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take state over.

        Args:
            state: by parameter name, as ``named_state`` gives it.
            groups: options of each param group (``params`` is ignored).

        Raises:
            ValueError: if the number of groups differs.

        Collective: every rank, for an optimizer with whole parameters; local otherwise.
        """
        if len(groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"{self.label} has {len(self.optimizer.param_groups)} param groups, the checkpoint has {len(groups)}. "
                "Build the optimizer with the same groups as when the checkpoint was saved."
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.optimizer.state.clear()
        if self._whole is not None:
            self._whole.load()
            self._whole_is_stale = False
            found = self._whole.state_from_slices([state.get(e.shard.spec.name, WholeState()) for e in self.entries])
            for index, values in enumerate(found):
                whole = self._whole.whole(index)
                if whole is not None and values:
                    self.optimizer.state[whole] = values
            return
        for entry in self.entries:
            loaded = state.get(entry.shard.spec.name)
            if loaded is not None:
                self.optimizer.state[self._target(entry)] = {**loaded.values, **loaded.slices}


def _covers(value: Any, entry: OwnedParameter) -> bool:
    """Whether a state value of an elementwise optimizer is this rank's slice, rather than a scalar."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == entry.shard.data.numel()


def _gradient(entry: OwnedParameter) -> Tensor | None:
    parameter = entry.shard.parameter
    return None if parameter is None else parameter.grad


def _slice_state(key: str, value: Any, shard: Shard) -> Any:
    """State that a constructor made for the whole parameter, cut to this rank's slice."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shard.spec.shape):
        return value
    if value.dim() == 0 and key in _SCALARS:
        return value
    with untracked():
        numel = shard.data.numel()
        if value.numel() > 1 and not any(value.stride()):
            return torch.full((numel,), value[(0,) * value.dim()].item(), dtype=value.dtype, device=value.device)
        return value.reshape(-1).narrow(0, shard.start if numel else 0, numel).clone()


def _densify(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
