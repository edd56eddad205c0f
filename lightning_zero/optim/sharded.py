"""The user's optimizer on shards: same object, same param groups, same options; only the tensors are this rank's part.

Elementwise optimizers step on 1-D slices, bit-identical to the whole. Every rank keeps every parameter in its place in
the groups, with 0 elements where it owns nothing, so parameter indices mean the same everywhere and step counters
agree. With offload ``optim/stepper.py`` updates the masters, otherwise the optimizer's own step does.

Optimizers that need whole matrices get them at one owner rank (``optim/whole.py``). During a step their groups hold the
whole parameters this rank owns *and* the shard parameters of all, without gradients, so that the optimizer passes them
over. Shards are in the groups during a step only: see [Note: the user's view of an optimizer].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import Collectives, ControlGroup
from lightning_zero.errors import UnsupportedOptimizerError, some
from lightning_zero.offload import OffloadedTensor
from lightning_zero.optim.agreement import Fingerprint
from lightning_zero.optim.groups import ParamGroups, restore_options
from lightning_zero.optim.hooks import StepHooks, is_hooked
from lightning_zero.optim.rules import check_offloadable, optimizer_rule, torch_class, try_in_parts
from lightning_zero.optim.state import SCALARS, StateHomes, copied, covers, grain, shape_of
from lightning_zero.optim.stepper import Stepper, Steps
from lightning_zero.optim.visible import OptimizerView
from lightning_zero.optim.whole import WholeParameters, WholeState
from lightning_zero.registry import extension
from lightning_zero.shards.sharded import ShardedTensor
from lightning_zero.shards.slice import Slice

__all__ = ["ShardedOptimizer", "optimizer_rule"]


class ShardedOptimizer:
    """Adapts one of the user's optimizers in place, over the user's parameters.

    Args:
        label: how to name it in messages; the same on every rank.
        owned: all parameters of the engine.
        before_step: called before every step with the label; 64-bit numbers that all ranks compare; what is called on
            every rank if they differ; and what says whether a step of the optimizer runs. Collective: every rank.
        after_step: called after every step with the units whose weights may have changed, and these.
        note: called with what user code writes to state.
        writable: whether the user can write to the masters at any time, because parameters show them; whole parameters
            are then brought up to date before every step.
        steps: how the run's optimizers update offloaded masters; ``None`` without offload.

    Raises:
        UnsupportedOptimizerError: if the optimizer cannot be sharded, or not step where its masters are, or has trained
            in an earlier fit.
        ValueError: if it holds parameters that are not the model's.
        OffloadError: on every rank, if one has no space for the optimizer's state.

    Collective: every rank, for an optimizer with whole parameters or with state in files.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, Slice],
        collectives: Collectives,
        before_step: Callable[[str, Sequence[int], Callable[[ControlGroup], None], Callable[[], bool]], None],
        after_step: Callable[[Mapping[int, Sequence[nn.Parameter]]], None],
        note: Callable[[str, int], None],
        writable: bool = False,
        steps: Steps | None = None,
    ) -> None:
        if is_hooked(optimizer):
            raise UnsupportedOptimizerError(
                f"{label} has trained in an earlier fit, whose slices of its state do not belong to this one. Build a "
                "new optimizer in configure_optimizers. To keep the state, save a checkpoint and resume from it: "
                "`trainer.fit(..., ckpt_path=...)`."
            )
        self.optimizer = optimizer
        self.label = label
        self.rule = optimizer_rule(optimizer)
        self.in_blocks = getattr(torch_class(type(optimizer)), "__name__", "") == "AdamW8bit"
        """Whether some of its state stands for blocks of elements."""
        if self.rule == "whole":
            try_in_parts(optimizer, label)
        self.units: dict[int, list[nn.Parameter]] = {}
        """Units with parameters that this optimizer may change, in order, and these: the same on every rank."""
        self._before_step, self._after_step = before_step, after_step
        self._members = ParamGroups(optimizer, label, owned)
        self.homes = StateHomes() if steps is None else steps.homes(optimizer, label)
        self._stepper: Stepper | None = None
        if steps is not None and self.rule != "whole":
            self._stepper = steps.stepper(optimizer, self.homes)
        self._view = OptimizerView(optimizer, label, owned, note, whole=self.rule == "whole")
        if type(optimizer).state_dict is not Optimizer.state_dict and not self._view.wraps and collectives.rank == 0:
            warnings.warn(
                f"Checkpoints hold the `state` of {label} and the options of its param groups, nothing else that its "
                "own `state_dict` has: a run that resumes goes on without that.",
                stacklevel=2,
            )
        self._whole: WholeParameters | None = None
        if self.rule == "whole":
            entries = [entry for group in self._members.current() for entry in group]
            self._check_offloadable(entries)
            self._whole = WholeParameters(entries, collectives, writable)
        self.adopt_new_groups()
        self._fingerprint = Fingerprint(optimizer, label, whole=self._whole is not None)
        self._hooks = StepHooks(optimizer, self._before, self._after)
        self._retired = False

    @property
    def state(self) -> MutableMapping[Any, dict[str, Any]]:
        """The optimizer's state as it steps with it: this rank's slices, by what stands for the parameters."""
        return self._view.state

    @property
    def groups(self) -> list[list[Slice]]:
        """The parameters of each param group as it is now: the user may move them, or take them out. Raises
        ``ValueError`` if a group holds what is not the model's, or what is in a group already."""
        return self._view.members if self._view.entered else self._members.current()

    @property
    def entries(self) -> list[Slice]:
        """All parameters of the optimizer, in the order of its groups."""
        return [entry for group in self.groups for entry in group]

    def gradients(self, counted: bool = False) -> list[Tensor]:
        """This rank's gradient slices, 1-D, of the parameters that have a gradient; also those without elements.

        ``counted``: for sums over the ranks, to which each element comes from one.
        """
        return [one.counted if counted else one.gradient for one in self.entries if one.gradient is not None]

    def announced(self) -> tuple[str, Sequence[int]] | None:
        """What all ranks agree on before a step, if no hook of others' comes before that. Local."""
        return (self.label, self._options()) if self._hooks.alone else None

    def masters_changed(self, units: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Note that the masters of some units' parameters were written, if not by this optimizer's step."""
        if self._whole is not None and units is not self.units:
            written = set(chain.from_iterable(units.values()))
            self._whole.stale |= any(entry.user in written for entry in self._whole.places)

    def abandon(self) -> None:
        """Forget a step that raised."""
        self._hooks.forget()
        self._leave()

    def hand_over(self) -> None:
        """Give the optimizer back without state, to be adapted anew. Local."""
        self._hooks.remove()
        self._give_up()

    def retire(self) -> None:
        """Give up the state, and refuse to step: the run goes on with other optimizers. Local."""
        self._retired = True
        self._give_up()

    def _give_up(self) -> None:
        self._leave()
        self._view.let_go()
        self.homes.release()

    # ------------------------------------------------------------------- steps

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs:  # the first is the optimizer
            self._refuse_closures(args, kwargs)
        if self._retired:
            raise RuntimeError(
                f"{self.label} is an optimizer of an earlier fit and is not part of the run that the model is in now, "
                "so its step would train nothing. Build a new one in configure_optimizers."
            )
        view, members = self._view, self._members
        if view.entered:  # by a step that raised
            self._leave()
        if replaced := view.replaced:
            self._take_over()
        self._before_step(self.label, self._options(), self._fingerprint.compare, self._hooks.running)
        if replaced or members.known is not view.members:
            self.adopt_new_groups()
        view.enter()
        try:
            if self._stepper is not None:
                self._stepper.run()
            elif self._whole is not None:
                self._whole.begin(self.entries)
        except BaseException:
            self._leave()
            raise

    def _options(self) -> list[int]:
        return [self._fingerprint.take(self._members.names())]

    def _refuse_closures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(a) for a in args) or kwargs.get("closure") is not None:
            raise RuntimeError(
                f"{self.label}.step(closure) would run forward and backward inside the step, after the gradients were "
                "agreed on. Call backward first and step() without a closure; Lightning does so by itself. (An "
                "optimizer that needs one says so by its `step(self, closure)`, without a default.)"
            )

    def _after(self) -> None:
        if self._whole is not None:
            self._whole.publish()
        self._leave()
        self._after_step(self.units)

    def _leave(self) -> None:
        """Let the user see gradients, groups and state again. May be called again."""
        if self._whole is not None:
            self._whole.leave()
        self._view.leave()

    # -------------------------------------------------------------- adaptation

    def adopt_new_groups(self) -> None:
        """Take over what is new in groups and state, at set-up or between steps, before anybody goes by them. An
        optimizer with whole parameters refuses new ones. Collective: every rank, if there is something to take over."""
        self._leave()  # of a step that raised
        members, view = self._members.current(), self._view
        if members is view.members and not view.replaced:
            return
        known = {entry for group in view.members for entry in group}
        fresh = [[entry for entry in entries if entry not in known] for entries in members]
        self._check_offloadable([entry for group in fresh for entry in group])
        whole = self._whole
        if whole is None:
            view.stand_ins = [[] if self._stepper else [entry.target for entry in group] for group in members]
        else:
            if any(entry not in whole.places for group in members for entry in group):
                raise UnsupportedOptimizerError(
                    f"{self.label}: add_param_group after set-up is not supported for {type(self.optimizer).__name__}, "
                    "whose parameters are handed out to owner ranks at set-up. Put all parameters in groups from the "
                    "start."
                )
            own = [[p for entry in group if (p := whole.owned(entry)) is not None] for group in members]
            view.stand_ins = [
                [*first, *(entry.target for entry in group)] for first, group in zip(own, members, strict=True)
            ]
        view.members = members
        trained = {e: index for index, group in enumerate(members) for e in group if e.parameter is not None}
        if self._stepper is None:
            self._take_over()
        else:
            self._stepper.take_over(fresh, self._take_over)
            self._stepper.members = trained
        self.units = {}
        for entry in sorted(trained, key=attrgetter("unit")):
            self.units.setdefault(entry.unit, []).append(entry.user)

    def _check_offloadable(self, entries: Sequence[Slice]) -> None:
        if self.in_blocks:
            extension("eight_bit").check_parameters(self.label, entries)
        for tier, entry in {e.flat.rest.master: e for e in entries if e.parameter is not None}.items():
            check_offloadable(self.optimizer, self.label, self.rule, tier, entry.user.device)

    def _take_over(self) -> None:
        """Take over state that a constructor has made, or user code has put in place of all that was there. Local."""
        if self._view.replaced:
            self._view.take_over(self._put)

    def _put(self, entry: Slice, state: dict[str, Any]) -> None:
        if self._whole is None:
            slices = {}
            for key, value in list(state.items()):
                if isinstance(value, ShardedTensor):  # a copy of what was shown
                    if value.source.place is not entry:
                        value.source.refuse(f"it was put where the state '{key}' of '{entry.name}' belongs")
                    own = state.pop(key).own
                    slices[key] = self.homes.put(entry, key, own if isinstance(own, OffloadedTensor) else own.clone())
            self.state[entry.target] = slices | self.homes.adopt(entry, state)
        elif state and (whole := self._whole.owned(entry)) is not None:
            self.state[whole] = {
                key: copied(value.to(whole.device) if isinstance(value, Tensor) and value.dim() else value)
                for key, value in state.items()
            }

    # ------------------------------------------------------------------- state

    def named_state(self) -> dict[str, WholeState]:
        """Optimizer state by parameter name, also of parameters that were taken out of the groups. Collective: every
        rank, for an optimizer with whole parameters; local otherwise."""
        self._take_over()
        named: dict[str, WholeState] = {}
        if self._whole is None:
            for entry in self._view.entries():
                if state := self.state.get(entry.target):
                    slices = {key: value for key, value in state.items() if covers(key, value, entry.place.numel)}
                    values = {key: value for key, value in state.items() if key not in slices}
                    named[entry.name] = WholeState(slices, values)
            return named
        states = [None if (p := self._whole.owned(e)) is None else self.state.get(p) for e in self._whole.places]
        for entry, found in zip(self._whole.places, self._whole.state_to_slices(states), strict=True):
            if found.slices or found.values:
                named[entry.name] = found
        return named

    def slices_state(self, entry: Slice, key: str, shape: Sequence[int]) -> bool:
        """Whether state of a full ``shape`` covers the parameter's elements, so that each rank takes its slice."""
        if tuple(shape) != shape_of(key, entry.spec.shape):
            return False
        return (bool(shape) and grain(key) == 1) or (self._whole is None and key not in SCALARS)

    def steps_on_device(self, entry: Slice) -> bool:
        """Whether the step counter of a parameter belongs on its device (fused and capturable optimizers)."""
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            if entry in members:
                return bool(group.get("fused") or group.get("capturable"))
        return False

    def make_room(self) -> None:
        """Give up state that is about to be loaded anew, where there is no memory for both: off the device."""
        if self._stepper is not None:
            self.state.clear()

    def load_named_state(self, state: Mapping[str, WholeState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over state by parameter name, as ``named_state`` gives it, and options of each param group, of which
        there have to be as many as here. Collective: every rank, for an optimizer with whole parameters; local
        otherwise."""
        if len(groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"{self.label} has {len(self.optimizer.param_groups)} param groups, the checkpoint has {len(groups)}. "
                "Build the optimizer with the same groups as when the checkpoint was saved."
            )
        # With offload these options would be refused at set-up.
        own = ("params",) if self._stepper is None else ("params", "capturable", "differentiable")
        restore_options(self.optimizer, groups, own)
        self.state.clear()
        if self._whole is not None:
            whole = self._whole
            if lost := sorted(state.keys() - {entry.name for entry in whole.places}):
                raise UnsupportedOptimizerError(
                    f"{self.label} has state for {some(map(repr, lost))}, which are in none of its param groups, and "
                    f"would lose it when the module is sharded again: {type(self.optimizer).__name__} needs whole "
                    "parameters. Leave them in their groups, with `requires_grad` set to False."
                )
            whole.load()
            found = whole.state_from_slices([state.get(entry.name, WholeState()) for entry in whole.places])
            for entry, values in zip(whole.places, found, strict=True):
                if values and (parameter := whole.owned(entry)) is not None:
                    self.state[parameter] = values
        else:
            for entry in self._view.entries():
                if (loaded := state.get(entry.name)) is not None:
                    slices = {key: self.homes.put(entry, key, value) for key, value in loaded.slices.items()}
                    self.state[entry.target] = {**loaded.values, **slices}
        self._view.show()

    def tensors(self) -> Iterable[Tensor]:
        """What this rank holds for the optimizer beside shards: its state, and the whole parameters that it owns."""
        for state in self.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        if self._whole is not None:
            yield from (whole for entry in self._whole.places if (whole := self._whole.owned(entry)) is not None)
