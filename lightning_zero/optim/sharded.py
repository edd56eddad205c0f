"""The user's optimizer on shards: same object, same param groups, same options; only the tensors are this rank's part.

Elementwise optimizers step on 1-D slices, bit-identical to the whole. Every rank keeps every parameter in its place in
the groups, with 0 elements where it owns nothing, so parameter indices mean the same everywhere and step counters
agree. How they step on each tier of memory is in ``optim/stepper.py``.

Optimizers that need whole matrices get them at one owner rank (``optim/whole.py``). During a step their groups hold the
whole parameters this rank owns *and* the shard parameters of all, which show no gradient then, so that the optimizer
passes them over. Shards are in the groups during a step only: see [Note: the user's view of an optimizer].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.errors import UnsupportedOptimizerError, some
from lightning_zero.optim.agreement import Fingerprint
from lightning_zero.optim.groups import BeforeStep, Note, OwnedParameter, ParamGroups, restore_options
from lightning_zero.optim.hooks import Kept, StepHooks, holds, kept_of
from lightning_zero.optim.rules import check_offloadable, optimizer_rule, try_in_parts
from lightning_zero.optim.segments import Member, members_of
from lightning_zero.optim.state import SCALARS, copied, covers
from lightning_zero.optim.stepper import Steps
from lightning_zero.optim.visible import OptimizerView
from lightning_zero.optim.whole import WholeParameters, WholeState, whole_entries

__all__ = ["OwnedParameter", "ShardedOptimizer", "optimizer_rule"]


class ShardedOptimizer:
    """Adapts one of the user's optimizers in place, over the user's parameters.

    Args:
        label: how to name it in messages; the same on every rank.
        owned: all parameters of the engine.
        before_step: called before every step, on every rank.
        after_step: called after every step with the units whose weights may have changed, and these.
        note: called with what user code writes to state.
        writable: whether the user can write to the masters at any time, because parameters show them; whole parameters
            are then brought up to date before every step.
        steps: how the run's optimizers step, by the tier of the masters.

    Raises:
        UnsupportedOptimizerError: if the optimizer cannot be sharded, or not be stepped on where its masters rest.
        ValueError: if it holds parameters that are not the model's.
        OffloadError: on every rank, if one has no space for the optimizer's state.

    Collective: every rank, for an optimizer with whole parameters or with state in files.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, OwnedParameter],
        collectives: Collectives,
        before_step: BeforeStep,
        after_step: Callable[[Mapping[int, Sequence[nn.Parameter]]], None],
        note: Note,
        writable: bool = False,
        steps: Steps | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.label = label
        self.rule = optimizer_rule(optimizer)
        kept = kept_of(optimizer)
        if self.rule == "whole" and kept is None:
            try_in_parts(optimizer, label)
        self.units: dict[int, list[nn.Parameter]] = {}
        """Units with parameters that this optimizer may change, in order, and these: the same on every rank."""
        self._collectives = collectives
        self._before_step = before_step
        self._after_step = after_step
        self._owned = owned
        self._members = ParamGroups(optimizer, label, owned)
        self._adopted: dict[OwnedParameter, None] = {}
        self._dealt: dict[OwnedParameter, int] = {}  # what is whole at owners, and its place there
        self._whole: WholeParameters | None = None
        self._whole_is_stale = False
        self._writable = writable
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []  # gradients that the step is not to see
        self._steps = steps or Steps()
        self.homes = self._steps.homes(optimizer, label, None if kept is None else kept.homes)
        self._stepper = self._steps.stepper(optimizer, self.homes)
        self._shards: list[Member] = []
        self._view = OptimizerView(optimizer, label, owned, self.homes, note, whole=self.rule == "whole")
        self.adopt_new_groups()
        if kept is not None:
            self.load_named_state(kept.state_for(owned, collectives), [{} for _ in optimizer.param_groups])
            kept.let_go()
        self._fingerprint = Fingerprint(optimizer, label, whole=self._whole is not None)
        self._hooks = StepHooks(optimizer, self._before, self._after)
        holds(optimizer, self.keep)

    @property
    def state(self) -> MutableMapping[Any, dict[str, Any]]:
        """The optimizer's state as it steps with it: this rank's slices, by what stands for the parameters."""
        return self._view.state

    @property
    def groups(self) -> list[list[OwnedParameter]]:
        """The parameters of each param group as it is now: the user may move them, or take them out. Raises
        ``ValueError`` if a group holds what is not the model's, or what is in a group already."""
        return self._view.members if self._view.entered else self._members.current()

    @property
    def entries(self) -> list[OwnedParameter]:
        """All parameters of the optimizer, in the order of its groups."""
        return [entry for group in self.groups for entry in group]

    def gradients(self) -> list[Tensor]:
        """This rank's gradient slices, 1-D, of the parameters that have a gradient; also those without elements."""
        return [gradient for gradient in map(_gradient, self.entries) if gradient is not None]

    def masters_changed(self) -> None:
        """Note that the masters were written by something other than this optimizer's step."""
        self._whole_is_stale = True

    def abandon(self) -> None:
        """Forget a step that raised."""
        self._hooks.forget()
        self._leave()

    def keep(self) -> Kept:
        """Give the optimizer back: its groups hold the user's parameters, its state waits for another fit. Local."""
        self._hooks.remove()
        self._leave()
        self._take_over()
        kept = Kept(self.optimizer, self.label, list(self._all_entries()), self._named_state_of(), self.homes)
        self._view.let_go()
        self._forget_segments()
        return kept

    def retire(self) -> None:
        """Give the optimizer back, as ``keep`` does, and nothing in files. Local."""
        self.keep().give_up_files()

    def _forget_segments(self) -> None:
        """Have state held nowhere else: it is about to be loaded anew, or given up."""
        self._stepper.forget()

    # ------------------------------------------------------------------- steps

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(a) for a in args) or kwargs.get("closure") is not None:
            raise RuntimeError(
                f"{self.label}.step(closure) would run forward and backward inside the step, after the gradients were "
                "agreed on. Call backward first and step() without a closure; Lightning does so by itself. (An "
                "optimizer that needs one says so by its `step(self, closure)`, without a default.)"
            )
        self._leave()  # of a step that raised
        self._take_over()
        options = [self._fingerprint.take(self._members.names())]
        self._before_step(self.label, options, self._fingerprint.compare, self._hooks.running)
        self.adopt_new_groups()
        self._view.enter()
        try:
            self._prepare()
        except BaseException:
            self._leave()
            raise

    def _prepare(self) -> None:
        """All that the step itself does not do."""
        if self._whole is not None:
            if self._whole_is_stale or self._writable:
                self._whole.load()
                self._whole_is_stale = False
            self._whole.collect_gradients([_gradient(entry) for entry in self._dealt])
            for entry in self._dealt:
                if (whole := self._owned_whole(entry)) is not None:
                    vars(whole).update(vars(entry.user))  # marks that user code has left, as a factor
            self._hidden = [(p, p.grad) for e in self.entries if (p := e.shard.parameter) is not None]
            for parameter, _ in self._hidden:
                parameter.grad = None
        else:
            self._view.pass_over(self._stepper.run(self._shards))

    def _after(self) -> None:
        if self._whole is not None:
            self._whole.publish()
        self._leave()
        self._after_step(self.units)

    def _leave(self) -> None:
        """Let the user see gradients, groups and state again. May be called again."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self._view.leave()

    # -------------------------------------------------------------- adaptation

    def adopt_new_groups(self) -> None:
        """Take over what is new in groups and state, at set-up or between steps, before anybody goes by them. An
        optimizer with whole parameters refuses new ones. Collective: every rank, if there is something to take over."""
        self._leave()  # of a step that raised
        members = self._members.current()
        if members is self._view.members and not self._view.replaced:
            return
        fresh = [[entry for entry in entries if entry not in self._adopted] for entries in members]
        entries = [entry for group in fresh for entry in group]
        for tier, entry in {e.flat.rest.master: e for e in entries if e.shard.parameter is not None}.items():
            check_offloadable(self.optimizer, self.label, self.rule, tier, entry.user.device)
        if self.rule == "whole" and entries:
            self._hand_out(entries)
        self._stepper.take_over(fresh, self._take_over)
        self._adopted.update(dict.fromkeys(entries))
        self._shards = members_of(members)
        self.units = {}
        for member in sorted(self._shards, key=lambda member: member.entry.unit):
            self.units.setdefault(member.entry.unit, []).append(member.entry.user)
        self._view.step_on(members, [self._stepped_on(group) for group in members])

    def _owned_whole(self, entry: OwnedParameter) -> nn.Parameter | None:
        """The whole parameter, if this rank owns it."""
        return None if self._whole is None else self._whole.whole(self._dealt[entry])

    def _stepped_on(self, members: Sequence[OwnedParameter]) -> list[nn.Parameter]:
        """What stands in a group during a step: shards, and before them the whole parameters that this rank owns."""
        whole = [parameter for entry in members if (parameter := self._owned_whole(entry)) is not None]
        return [*whole, *(entry.target for entry in members)]

    def _hand_out(self, entries: Sequence[OwnedParameter]) -> None:
        if self._whole is not None:
            raise UnsupportedOptimizerError(
                f"{self.label}: add_param_group after set-up is not supported for {type(self.optimizer).__name__}, "
                "whose parameters are handed out to owner ranks at set-up. Put all parameters in groups from the start."
            )
        self._dealt = {entry: place for place, entry in enumerate(entries)}
        self._whole = WholeParameters(whole_entries(entries, self._collectives.world_size), self._collectives)

    def _take_over(self) -> None:
        """Take over state that a constructor has made, or user code has put in place of all that was there. Local."""
        if self._view.replaced:
            self._forget_segments()
            self._view.take_over(self._put)

    def _put(self, entry: OwnedParameter, state: dict[str, Any]) -> None:
        if self._whole is None:
            self.state[entry.target] = self._view.cut(entry, state)
        elif state and (whole := self._owned_whole(entry)) is not None:
            self.state[whole] = {
                key: copied(value.to(whole.device) if isinstance(value, Tensor) and value.dim() else value)
                for key, value in state.items()
            }

    # ------------------------------------------------------------------- state

    def named_state(self) -> dict[str, WholeState]:
        """Optimizer state by parameter name, also of parameters that were taken out of the groups. Collective: every
        rank, for an optimizer with whole parameters; local otherwise."""
        self._take_over()
        return self._named_state_of()()

    def _all_entries(self) -> Iterable[OwnedParameter]:
        """Those of the groups in their order, then what the user has taken out of them, for a while perhaps."""
        return dict.fromkeys([*self.entries, *self._owned.values()])

    def _named_state_of(self) -> Callable[[], dict[str, WholeState]]:
        """What gives the state as it is now, and does not hold the optimizer."""
        named: dict[str, WholeState] = {}
        if self._whole is None:
            for entry in self._all_entries():
                if state := self.state.get(entry.target):
                    slices = {key: value for key, value in state.items() if covers(value, entry.slice.numel)}
                    values = {key: value for key, value in state.items() if key not in slices}
                    named[entry.name] = WholeState(slices, values)
            return lambda: named
        whole, names = self._whole, [entry.name for entry in self._dealt]
        states = [None if (p := self._owned_whole(entry)) is None else self.state.get(p) for entry in self._dealt]
        return lambda: {
            name: state
            for name, state in zip(names, whole.state_to_slices(states), strict=True)
            if state.slices or state.values
        }

    def slices_state(self, entry: OwnedParameter, key: str, shape: Sequence[int]) -> bool:
        """Whether state of a full ``shape`` covers the parameter's elements, so that each rank takes its slice."""
        if tuple(shape) != tuple(entry.shard.spec.shape):
            return False
        return bool(shape) or (self._whole is None and key not in SCALARS)

    def steps_on_device(self, entry: OwnedParameter) -> bool:
        """Whether the step counter of a parameter belongs on its device (fused and capturable optimizers)."""
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            if entry in members:
                return bool(group.get("fused") or group.get("capturable"))
        return False

    def make_room(self) -> None:
        """Give up state that is about to be loaded anew, where there is no memory for both: off the device."""
        if self._steps.range_numel is not None and self._whole is None:
            self.state.clear()
            self._forget_segments()

    def load_named_state(self, state: Mapping[str, WholeState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over state by parameter name, as ``named_state`` gives it, and options of each param group, of which
        there have to be as many as here. Collective: every rank, for an optimizer with whole parameters; local
        otherwise."""
        if len(groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"{self.label} has {len(self.optimizer.param_groups)} param groups, the checkpoint has {len(groups)}. "
                "Build the optimizer with the same groups as when the checkpoint was saved."
            )
        restore_options(self.optimizer, groups, self._steps.own_options)
        self.state.clear()
        self._forget_segments()
        if self._whole is not None:
            if lost := sorted(state.keys() - {entry.name for entry in self._dealt}):
                raise UnsupportedOptimizerError(
                    f"{self.label} has state for {some(map(repr, lost))}, which are in none of its param groups, and "
                    f"would lose it now that the module is laid out anew: {type(self.optimizer).__name__} needs whole "
                    "parameters. Leave them in their groups, with `requires_grad` set to False."
                )
            self._whole.load()
            self._whole_is_stale = False
            found = self._whole.state_from_slices([state.get(entry.name, WholeState()) for entry in self._dealt])
            for entry, values in zip(self._dealt, found, strict=True):
                if values and (whole := self._owned_whole(entry)) is not None:
                    self.state[whole] = values
        else:
            for entry in self._all_entries():
                if (loaded := state.get(entry.name)) is not None:
                    self._view.users.setdefault(entry.target, entry.user)
                    slices = {key: self.homes.put(entry, key, value) for key, value in loaded.slices.items()}
                    self.state[entry.target] = {**loaded.values, **slices}
        self._view.show()

    def tensors(self) -> Iterable[Tensor]:
        """What this rank holds for the optimizer beside shards: its state, and the whole parameters that it owns."""
        for state in self.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        yield from (whole for entry in self._dealt if (whole := self._owned_whole(entry)) is not None)


def _gradient(entry: OwnedParameter) -> Tensor | None:
    parameter = entry.shard.parameter
    return None if parameter is None else parameter.grad
