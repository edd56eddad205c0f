"""From a module and a plan to units: every rank keeps rank 0's values, and of sharded ones only its own part.

One layout at a time is on its way, so the peak is the module as the user built it plus what this rank keeps, and one
unit; a module on the meta device is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.comm import raising
from lightning_zero.engine.agreement import Means
from lightning_zero.engine.reducer import GradientBucket, GradientReducer
from lightning_zero.engine.unit import ReplicatedUnit, ShardedUnit, Unit
from lightning_zero.errors import MaterialiseError, OffloadError
from lightning_zero.meta import MetaValues
from lightning_zero.plan.layout import FlatLayout
from lightning_zero.plan.plan import STAGING_BUFFERS, Plan, UnitPlan
from lightning_zero.shards.binding import set_data
from lightning_zero.shards.slice import FlatParameters, Placeholders, views_of

__all__ = ["UnitBuilder", "build_reducer"]


class UnitBuilder:
    """Builds the units of one engine. The module's parameters keep identity, only what they show changes. Collective.

    ``values`` initialises what is on the meta device. Raises ``ValueError`` if the plan's shard groups are smaller than
    the world.
    """

    def __init__(self, module: nn.Module, plan: Plan, means: Means, values: MetaValues) -> None:
        collectives, control = means.collectives, means.control
        if plan.group_size != collectives.world_size or control.world_size % plan.world_size:
            raise ValueError(
                f"The plan has shard groups of {plan.group_size} of {plan.world_size} ranks (Placement.span), the wire "
                f"has groups of {collectives.world_size} of {control.world_size}."
            )
        _check_scripts(module, plan)
        self._module = module
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._plan = plan
        self._collectives, self._control = collectives, control
        self._tiers, self._device = means.tiers, means.tiers.device
        self._placeholders = Placeholders()
        self._values = values
        self._offloaded: dict[FlatLayout, tuple[Tensor, Tensor | None]] = {}
        self._failure: Exception | None = None

    def build(self) -> list[Unit]:
        """All units, by index.

        Raises ``OffloadError`` on every rank if one has no room for what is offloaded, or could not put it there.
        """
        if self._plan.offload is not None:
            try:  # before the ranks depend on each other
                for unit in self._plan.units:
                    offloaded = [layout for layout in unit.layouts if self._plan.rest_of(layout).offloaded]
                    self._offloaded |= {layout: self._room(unit, layout) for layout in offloaded}
            except (OffloadError, MemoryError) as error:
                self._failure = error
            self._control.together("find room for what is offloaded", raising(self._failure), OffloadError)
        units: list[Unit] = []
        for plan in self._plan.units:
            made = self._unit(plan)
            units.append(made)
            for flat in made.flats:
                for parameter, placeholder, shard in zip(flat.parameters, flat.placeholders, flat.shards, strict=True):
                    _point(shard.spec.name, parameter, placeholder)
            made.forget_written()  # what left the meta device counts its writes anew
            if isinstance(made, ReplicatedUnit) and made.always_bound:
                made.bind()
        if self._tiers.can_fail:
            self._control.together("put the first weights where they rest", raising(self._failure), OffloadError)
        return units

    def _room(self, unit: UnitPlan, layout: FlatLayout) -> tuple[Tensor, Tensor | None]:
        """Memory for a master, and for the weights made of it if they are a copy elsewhere. See ``_offloaded``."""
        if layout in self._offloaded:
            return self._offloaded[layout]
        rest, numel, name = self._plan.rest_of(layout), layout.shard_numel, unit.name or "(root)"
        if not rest.offloaded:
            return self._collectives.allocate(numel, layout.dtype, self._device), None
        master = self._tiers.allocate(rest.master, numel, layout.dtype, f"masters of '{name}'")
        if rest.weights is None:
            return master, None
        return master, self._tiers.allocate(rest.weights, numel, layout.compute_dtype, f"weights of '{name}'")

    def _unit(self, plan: UnitPlan) -> Unit:
        """One unit. A disk that fails is reported when all ranks are through."""
        collectives, whole = self._collectives, not self._plan.placement.shards_parameters
        buffers, flats = list[Tensor](), list[FlatParameters]()
        for layout in plan.layouts:
            rest, full = self._plan.rest_of(layout), None
            if whole:
                full = collectives.allocate(layout.numel, layout.compute_dtype, self._device)
                buffers.append(full)
            if full is not None and layout.dtype == layout.compute_dtype and not rest.offloaded:
                shared, master, weights = full, collectives.own_range(full), None
            else:
                shared, (master, weights) = None, self._room(plan, layout)
            if full is not None and shared is None:
                weights = collectives.own_range(full)
            parameters = [self._parameters[spec.name] for spec in layout.parameters]
            placeholders = [self._placeholders.like(parameter, self._device) for parameter in parameters]
            rank = collectives.rank
            flat = FlatParameters(layout, parameters, rank, master, placeholders, rest, weights, plan.index)
            flats.append(flat)
            values = self._fill(plan, layout, shared)
            if shared is not None:
                continue
            try:
                with untracked():
                    if full is not None:
                        full.copy_(values)
                    master.copy_(collectives.own_range(values))
                flat.refresh()
            except OffloadError as error:
                self._failure = self._failure or error
            del values  # before the next layout's
        if whole:
            return ReplicatedUnit(plan, flats, buffers)
        unit = ShardedUnit(plan, flats)
        for spec in plan.parameters:
            for name in (spec.name, *spec.aliases):
                owner, _, key = name.rpartition(".")
                unit.holders.append((self._module.get_submodule(owner), key, name, self._parameters[spec.name]))
        return unit

    def _fill(self, unit: UnitPlan, layout: FlatLayout, full: Tensor | None = None) -> Tensor:
        """A layout's flat buffer, in memory of zeros if there is ``full``, with rank 0's values. Collective."""
        with untracked():
            full = torch.zeros(layout.numel, dtype=layout.dtype, device=self._device) if full is None else full
            for spec, view in zip(layout.parameters, views_of(full, layout), strict=True):
                parameter = self._parameters[spec.name]
                view.copy_(self._values.take(spec.name) if parameter.is_meta else parameter.detach())
            if full.numel():
                self._collectives.broadcast(
                    full.view(torch.uint8), 0, f"initial values of '{unit.name or '(root)'}'"
                ).wait()
        return full


def _check_scripts(module: nn.Module, plan: Plan) -> None:
    """Raise ValueError for TorchScript that would read parameters while their values are absent."""
    absent = plan.placement.shards_parameters or any(
        layout.dtype != layout.compute_dtype for unit in plan.units for layout in unit.layouts
    )
    for name, child in module.named_modules() if absent else ():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ValueError(
                f"'{name}' is a TorchScript module: its compiled code reads parameters past everything that could "
                "gather them. Use the module that it was made from, or `torch.compile`; or keep it with stage 1 or 2 "
                "in full precision."
            )


def build_reducer(plan: Plan, units: Sequence[Unit], means: Means) -> GradientReducer:
    """Memory for gradients, on the tier that the plan names, and the reducer over it."""
    collectives, tiers, device = means.collectives, means.tiers, means.tiers.device
    tiers.transfers.reserve(STAGING_BUFFERS, *plan.staging_nbytes)
    collecting_apart = plan.collecting_apart()
    buckets: list[GradientBucket] = []
    for unit in units:
        for flat in unit.flats:
            layout = flat.layout
            if not layout.trainable:
                continue
            in_place, alone = (
                layout.reduce_dtype == layout.dtype and not flat.rest.offloaded,
                collectives.world_size == 1,
            )
            resident = shard = None
            if not plan.placement.shards_gradients or (in_place and alone):
                resident = collectives.allocate(layout.numel, layout.reduce_dtype, device)
            if resident is not None and in_place:
                shard = collectives.own_range(resident)
            elif resident is not None or flat.rest.offloaded or alone:
                name = f"gradients of '{unit.name}'"
                shard = tiers.allocate(flat.rest.gradients, layout.shard_numel, layout.dtype, name)
            transfers = tiers.transfers if flat.rest.offloaded else None
            apart = unit.index in collecting_apart
            buckets.append(GradientBucket(len(buckets), unit, flat, shard, resident, collectives, transfers, apart))
    return GradientReducer(buckets, means, forwards=plan.placement.shards_parameters)


def _point(name: str, parameter: nn.Parameter, data: Tensor) -> None:
    """Let a parameter show ``data``. It stays the same object, also where it has to leave the meta device."""
    if not parameter.is_meta or data.is_meta:
        set_data(parameter, data)
        return
    kind, attributes = type(parameter), dict(vars(parameter))
    try:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise RuntimeError("it has hooks")
        with torch.inference_mode(False):
            # Not of ``data``, which placeholders share: a parameter of it would share their count of writes, too.
            fresh = torch.empty(0, dtype=data.dtype, device=data.device)
            torch.utils.swap_tensors(parameter, nn.Parameter(fresh, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        raise MaterialiseError(
            f"'{name}' is on the meta device and cannot be given real memory: {error}. Register hooks on parameters "
            "and keep references to them after set-up, for example in on_fit_start; or build the module on the CPU."
        ) from error
    parameter.__class__ = kind
    vars(parameter).update(attributes)
    set_data(parameter, data)
