"""What every stage would take, side by side: from a module to the byte, from a number of parameters by the paper's
arithmetic; and how long a step is busy with the links between hosts and within them.

[Note: links]

Of n bytes that R hosts of S ranks gather or reduce, (R - 1) / R leave a host in two hops (over gloo, and on devices
where something is rounded or kept), of which the first sums up and hands on within hosts: a rank sends (S - 1) / S
there. Rings, nccl's otherwise and DDP's, pass every host with all that a rank sends:
(R S - 1) / (R S) leave it, and S - 1 of S ranks send as much within. Where shard groups are hosts, or parts of one,
nothing leaves one but the all-reduces across groups, rings of a shard each. Where groups reach over several hosts,
their ranks exchange directly: S times as much leaves a host. Where a host's ranks keep weights (``Placement.keeping``),
those of each unit that is trained cross hosts once a step. Buffers, which are few, count as gathered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import HostOffload, Offload, Placement, check_whole
from lightning_zero.errors import readable_size, table
from lightning_zero.extensions.planner.report import draw, word_of
from lightning_zero.plan import ParameterSpec, Plan
from lightning_zero.plan.costs import (
    CollectiveTraffic,
    HostBytes,
    Memory,
    OptimizerCost,
    StageMemory,
    Traffic,
    expected_memory,
    expected_traffic,
    owners_of,
    stage_memory,
)
from lightning_zero.plan.layout import residual_nbytes

__all__ = [
    "MemoryEstimate",
    "Recommendation",
    "Way",
    "describe_ways",
    "estimate_memory",
    "fastest_way",
    "fullest_rank",
    "on_links",
    "parse_count",
    "parse_speed",
    "ways_to_send",
]

MOST = 10**18
"""Parameters of the largest model that a number of parameters stands for. Beyond it, it is a slip of the pen."""

ROUNDED_NBYTES = {"bfloat16": 2.0, "int8": 1 + 4 / 64, "int4": 1 / 2 + 4 / 64}
"""Of an element that ``Compression`` rounds, by the format, with its part of a scale."""

NONE = "none"
"""No stage: plain PyTorch, ``DistributedDataParallel`` where there is more than one process."""

# From what changes least to what takes most time: a wider wire, then the way to the host. Names are the strategy's.
_STAGES: Mapping[str, tuple[Placement, Offload | None]] = {
    "zero1": (Placement.from_stage(1), None),
    "zero2": (Placement.from_stage(2), None),
    "zero3": (Placement.from_stage(3), None),
    "zero2_offload": (Placement.from_stage(2), HostOffload()),
    "zero3_offload": (Placement.from_stage(3), HostOffload(parameters=True)),
}


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to choose."""

    name: str | None  #: Of the stage; ``None`` if none fits, or if nobody knows what activations take.
    reason: str  #: Why, in a sentence or two.
    fits: tuple[str, ...]  #: All stages that fit, without activations if these are not known.


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Stages side by side."""

    numel: int  #: Parameters of the model.
    world_size: int  #: Ranks that share it.
    optimizer: OptimizerCost  #: What was counted with.
    precision: str  #: As Lightning calls it, of the largest unit that is trained: ``bf16-mixed``.
    stages: Mapping[str, StageMemory]  #: By name, from what changes least to what takes most time.
    counted: bool  #: Whether the model's parts are known. If not, slots, buckets and what autograd makes are missing.
    hosts: int  #: That the ranks are on, equally many on each.
    accelerator: bool  #: Whether the ranks compute on one; otherwise the memory of their device is the host's.
    micro_steps: int  #: Forwards and backwards of a step.
    shard_within: int | None = None  #: Ranks in a row that share what a stage divides; ``None``: all.
    keeping: int | None = None  #: Ranks of a host, which keep the weights that came from others in stage 3.
    compression: Any = None  #: What is rounded between hosts: a ``Compression``, or ``None``.
    activations: int | None = None  #: Bytes of them that are in every peak; ``None``: they are in none.

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.world_size % self.hosts:
            raise ValueError(f"hosts must be a number that divides the {self.world_size} ranks, got {self.hosts}.")
        if self.shard_within and (self.keeping or getattr(self.compression, "weights", None)):
            raise ValueError("shard_within goes neither with secondary_shards nor with Compression.weights.")
        if self.activations is not None:
            check_whole("activations", self.activations, least=0, unit="bytes")

    def host_nbytes(self, name: str, *, activations_nbytes: int = 0) -> int:
        """Host memory that all ranks of one host take: what is offloaded, and on the CPU all of a rank at its peak."""
        stage = self.stages[name]
        computing = 0 if self.accelerator else stage.peak.total + activations_nbytes
        return self.world_size // self.hosts * (stage.host.total + computing)

    def leaving_nbytes(self, name: str, *, rounded: str | None = None) -> int:
        """Bytes that leave a host in a step, with ``compression`` or all in the format ``rounded``; see [Note: links].

        Weights are rounded where they may be: in stage 3, and with mixed precision in stages 1 and 2. With ``"int4"``
        gradients they are in ``"int8"``.
        """
        return self._on_links(name, rounded)[0]

    def within_nbytes(self, name: str) -> int:
        """Bytes that one rank sends to others of its host in a step; see [Note: links]."""
        return self._on_links(name)[1]

    def _on_links(self, name: str, rounded: str | None = None) -> tuple[int, int]:
        formats = "int8" if rounded == "int4" else rounded, rounded
        if self.compression is not None and rounded is None:
            formats = self.compression.weights, self.compression.gradients
        formats = (None, None) if name == NONE else formats
        kept = self.keeping is not None and name.startswith("zero3")
        hops = self.shard_within is None and (any(formats) or kept)
        rings = name == NONE or (self.accelerator and not hops)
        return on_links(self.stages[name].traffic, self.hosts, rings=rings, formats=formats)

    def recommend(
        self, device_nbytes: int, *, host_nbytes: int | None = None, activations_nbytes: int | None = None
    ) -> Recommendation:
        """The first stage, from what changes least to what takes most time, that fits.

        Args:
            device_nbytes: memory of one device.
            host_nbytes: memory of one host, for all its ranks; ``None``: enough.
            activations_nbytes: what has to stay free on the device. Without it nothing is recommended, unless
                activations are counted (``activations``): they often take more than all the rest.

        Raises:
            ValueError: if a size is negative.
        """
        known = activations_nbytes is not None or self.activations is not None
        activations_nbytes = activations_nbytes or 0
        if min(device_nbytes, activations_nbytes, host_nbytes or 0) < 0:
            raise ValueError("Sizes of memory must not be negative.")
        room = device_nbytes - activations_nbytes
        activations, device = readable_size(activations_nbytes), readable_size(device_nbytes)
        if room < 0:
            reason = f"{activations} of activations do not fit into {device}."
            return Recommendation(name=None, reason=reason, fits=())
        problems = {name: self._lacks(name, room, host_nbytes, activations_nbytes) for name in self.stages}
        fits = tuple(name for name, problem in problems.items() if not problem)
        device += f" beside {activations} of activations" if activations_nbytes else ""
        more = "" if self.counted else " Slots and buckets, which a number of parameters does not tell, come on top."
        if not fits:
            reason = (
                f"Nothing fits into {device}: {'; '.join(problems.values())}.{more} Use more processes or larger "
                "devices, or lightning_zero.NvmeOffload where it is host memory that is missing."
            )
            return Recommendation(name=None, reason=reason, fits=())
        if not known:
            shown = [name for name in fits if not name.endswith("_offload")] or fits
            free = ", ".join(f"{readable_size(room - self.stages[name].peak.total)} with {name}" for name in shown)
            reason = f"Activations are not counted. Of {device} so much stays free for them: {free}.{more}"
            return Recommendation(name=None, reason=reason, fits=fits)
        needed = self.stages[fits[0]].peak.total
        left = readable_size(room - needed)
        reason = f"{fits[0]} needs {readable_size(needed)} at peak, which fits into {device} and leaves {left}.{more}"
        if self.stages[fits[0]].host.total or not self.accelerator:
            held = readable_size(self.host_nbytes(fits[0], activations_nbytes=activations_nbytes))
            has = "how much there is was not said" if host_nbytes is None else f"there are {readable_size(host_nbytes)}"
            takes = "takes" if self._ranks.startswith("1 ") else "take"
            reason += f" Its {self._ranks} {takes} {held} of host memory on each machine; {has}."
        before = list(problems.values())[: list(problems).index(fits[0])]
        reason += f" Less would not do: {'; '.join(before)}." if before else " There is no need to split anything."
        return Recommendation(name=fits[0], reason=reason, fits=fits)

    def _lacks(self, name: str, room: int, host_nbytes: int | None, activations_nbytes: int) -> str:
        """Why it does not fit into so much of a device and of a host; empty if it does."""
        missing, peak = [], self.stages[name].peak.total
        held = self.host_nbytes(name, activations_nbytes=activations_nbytes)
        if peak > room:
            missing.append(f"{readable_size(peak)} on the device")
        elif peak == room and not activations_nbytes and self.activations is None:
            missing.append(f"{readable_size(peak)} on the device, which leaves nothing for activations")
        if host_nbytes is not None and held > host_nbytes:
            there = readable_size(host_nbytes)
            missing.append(f"{readable_size(held)} of host memory for {self._ranks} of a machine, which has {there}")
        return f"{name} needs {' and '.join(missing)}" if missing else ""

    @property
    def _ranks(self) -> str:
        ranks = self.world_size // self.hosts
        return "1 rank" if ranks == 1 else f"{ranks:,} ranks"

    def describe(self, *, offload: bool = False) -> str:
        """A table for people, in units of 1000 as devices and papers have them.

        Args:
            offload: with a column for each stage that offloads.
        """
        stages = self._shown(offload)
        columns = [self._rows(stage) for stage in stages.values()]
        rows = [("bytes of one process", *stages)]
        for word in columns[0]:
            sizes = [column[word] for column in columns]
            if any(sizes) or word.startswith("at "):
                rows.append((word, *(readable_size(size) if size else "-" for size in sizes)))
        processes = "1 process" if self.world_size == 1 else f"{self.world_size:,} processes"
        processes += f", {self.micro_steps} micro-steps in a step" if self.micro_steps > 1 else ""
        shards = (
            f"shard groups of {self.shard_within}" if self.shard_within else "secondary shards" * bool(self.keeping)
        )
        processes += "".join(f", {said}" for said in (shards, self.compression) if said)
        lines = [f"{self.numel:,} parameters, {self.optimizer.name}, {self.precision}, {processes}", "", *table(rows)]
        more = "From a number of parameters: slots and buckets, which depend on the model's parts, come on top."
        return "\n".join(lines if self.counted else [*lines, "", more])

    def draw(self, path: str, *, device_nbytes: int | None = None, offload: bool = False) -> None:
        """Write a picture of the peaks in ``describe``, with a line at so many bytes; see ``report.draw``."""
        draw(self._shown(offload), path, self._at_peak, device_nbytes)

    def _shown(self, offload: bool) -> dict[str, StageMemory]:
        shown = {name: stage for name, stage in self.stages.items() if offload or not name.endswith("_offload")}
        return shown if len(shown) > 1 else dict(self.stages)

    @property
    def _at_peak(self) -> str:
        return "at peak" if self.activations is not None else "at peak, without activations"

    def _rows(self, stage: StageMemory) -> dict[str, int]:
        """Bytes in the order and in the words of the table."""
        rest, peak = dict(stage.rest.items()), dict(stage.peak.items())
        leaving, within = self._on_links(stage.name)
        words = {name: word_of(name) for name in rest}
        return {
            **{word: rest[name] for name, word in words.items()},
            "at rest": stage.rest.total,
            **{f"+ {word}": max(0, peak[name] - rest[name]) for name, word in words.items()},
            **{f"- {word} not there then": max(0, rest[name] - peak[name]) for name, word in words.items()},
            self._at_peak: stage.peak.total,
            "host memory": stage.host.total,
            f"host memory of a machine, {self._ranks}": self.host_nbytes(stage.name),
            "files": stage.disk.total,
            "sent in a step": leaving * self.hosts // self.world_size + within,
            "leaves a host in a step": leaving,
        }


def estimate_memory(
    model: nn.Module | Plan | float | str,
    *,
    world_size: int | None = None,
    optimizer: Optimizer | type | str | OptimizerCost = "AdamW",
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    accelerator: bool = False,
    receive_buffer: bool = False,
    hosts: int = 1,
    shard_within: int | None = None,
    secondary_shards: bool = False,
    compression: Any = None,
    micro_steps: int = 1,
    activations: int | None = None,
    **settings: Any,
) -> MemoryEstimate:
    """Bytes of one rank for no stage and for each stage, at rest and at peak, before anything runs.

    A module is counted to the byte, as this package will hold it, on the rank that holds most; a plan for its stage and
    none; a number of parameters by the ZeRO paper's arithmetic: parameters in ``param_dtype``, gradients in
    ``reduce_dtype`` (else ``dtype``), masters in ``dtype`` where that is another one, and the optimizer's state.

    Args:
        model: a module (on the meta device, if it is large), a plan, or a number of parameters such as ``"7.5B"``.
        world_size, hosts, micro_steps: ranks (a plan has its own); hosts, with equally many; forwards of a step.
        optimizer, dtype: see ``OptimizerCost.of``; the parameters' own, where the model is a number.
        param_dtype, reduce_dtype: that it computes and averages gradients in; ``None``: the parameters', or a plan's.
        accelerator: whether it runs on one, where torch's optimizers take more memory for a step unless they are fused.
        receive_buffer: whether the transport keeps one: gloo does where it carries reductions alone.
        shard_within, secondary_shards, compression: as for ``ZeroStrategy``; the first ranks in a row, or ``None``.
        activations: bytes, the ``total`` of ``measure_activations``; ``None``: they are not counted.
        settings: of ``build_plan``, for a module: ``units``, ``bucket_mib``, ``prefetch``, ``broadcast_buffers``.

    ValueError if the world size is none or not of so many hosts, a count is none, settings clash, or no plan fits.

    Source: ZeRO, section 5, table 1 and figure 1 (arXiv:1910.02054).
    """
    cost = OptimizerCost.of(optimizer)
    told = {"optimizer": cost, "hosts": hosts, "accelerator": accelerator, "micro_steps": micro_steps}
    told |= {"compression": compression, "activations": activations}
    if isinstance(model, Plan):
        own = (settings, param_dtype, reduce_dtype, shard_within, secondary_shards)
        if world_size not in (None, model.world_size) or any(own):
            raise ValueError("A plan has its own world size and settings: build another one instead.")
        return _of_plans({_name_of(model): model}, receive_buffer, **told)
    world_size = check_whole("world_size", world_size, least=1, unit="ranks")
    exchange: dict[str, Any] = {"span": shard_within, "secondary_shards": secondary_shards, "compression": compression}
    kinds = _kinds(hosts, world_size, exchange, offloads=not (cost.whole and accelerator))
    if not isinstance(model, nn.Module):
        if settings or activations is not None:
            raise ValueError(f"A number of parameters has no {next(iter(settings), 'activations')}: give the module.")
        dtypes = (dtype, param_dtype or dtype, reduce_dtype or dtype)
        return _of_count(parse_count(model), world_size, kinds, dtypes, **told)
    if settings.keys() & {"stage", "placement", "offload"}:
        raise ValueError("All stages are estimated, with and without offload; for a single one, build its plan.")
    settings |= {"world_size": world_size, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    plans = {name: Plan.build(model, placement=where, offload=on, **settings) for name, (where, on) in kinds.items()}
    return _of_plans(plans, receive_buffer, **told)


def _kinds(
    hosts: int, world_size: int, exchange: Mapping[str, Any], *, offloads: bool
) -> dict[str, tuple[Placement, Offload | None]]:
    # Not for optimizers of whole parameters, from an accelerator: see optim/rules.py.
    kinds = {name: kind for name, kind in _STAGES.items() if offloads or not kind[1]}
    return {name: (where.on_hosts(hosts, world_size, **exchange), on) for name, (where, on) in kinds.items()}


def _name_of(plan: Plan) -> str:
    number = 1 + plan.placement.shards_gradients + plan.placement.shards_parameters
    return f"zero{number}" + ("" if plan.offload is None else "_offload")


def _of_plans(plans: Mapping[str, Plan], receive_buffer: bool, **told: Any) -> MemoryEstimate:
    """``told``: what the estimate says too."""
    first, cost, accelerator = next(iter(plans.values())), told["optimizer"], told["accelerator"]
    told |= {"shard_within": first.placement.span, "keeping": first.placement.keeping}
    stages = {NONE: _without(first, cost, accelerator, told["activations"] or 0)}
    for name, plan in plans.items():
        rank = fullest_rank(plan, whole=cost.whole)
        stage = stage_memory(plan, name, rank, cost, receive_buffer=receive_buffer, accelerator=accelerator)
        if told["activations"]:  # which are gone when the optimizer steps
            settings = {"optimizer": replace(cost, way="fused"), "accelerator": accelerator, "peak": True}
            backward = expected_memory(plan, rank=rank, receive_buffer=receive_buffer, **settings)
            backward = replace(backward, activations=told["activations"])
            stage = replace(stage, peak=max(stage.peak, backward, key=lambda memory: memory.total))
        stages[name] = replace(stage, traffic=expected_traffic(plan, micro_steps=told["micro_steps"]))
    layouts = first.trainable_layouts or first.layouts
    most = max(layouts, key=lambda layout: layout.parameter_numel, default=None)
    told["precision"] = _precision(most.dtype, most.compute_dtype, most.reduce_dtype) if most else NONE
    return MemoryEstimate(numel=first.numel, world_size=first.world_size, stages=stages, counted=True, **told)


def _without(plan: Plan, cost: OptimizerCost, accelerator: bool, activations: int) -> StageMemory:
    """Plain PyTorch with ``gradient_as_bucket_view=True``; by default DDP holds another copy of the gradients.

    Under autocast, which has no masters, autograd keeps a copy of every weight in the dtype of compute until backward.
    """
    held = [(spec, layout) for layout in plan.layouts for spec in layout.parameters]
    trained = [spec for spec, layout in held if layout.trainable]
    gradients = sum(map(_nbytes, trained))
    parameters = sum(_nbytes(spec) for spec, _ in held)
    rest = Memory(parameters=parameters, gradients=gradients, optimizer=cost.state * gradients)
    copies = sum(
        spec.numel * layout.compute_dtype.itemsize for spec, layout in held if layout.compute_dtype != layout.dtype
    )
    raw = _raw_gradient_nbytes([(spec, spec.dtype.itemsize) for spec in trained])
    step = cost.step_nbytes([_nbytes(spec) for spec in reversed(trained)], accelerator)
    backward = replace(rest, weights=copies, raw_gradients=raw, activations=activations)
    peak = max(backward, replace(rest, temporaries=step), key=lambda memory: memory.total)
    reduced = CollectiveTraffic(numel=sum(spec.numel for spec in trained), nbytes=gradients)
    buffers = CollectiveTraffic(nbytes=sum(buffer.nbytes for buffer in plan.buffers))
    traffic = Traffic(all_reduce=reduced, broadcast=buffers, world_size=plan.world_size)
    return StageMemory(name=NONE, rest=rest, peak=peak, traffic=traffic)


def _of_count(
    numel: int,
    world_size: int,
    kinds: Mapping[str, tuple[Placement, Offload | None]],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    **told: Any,
) -> MemoryEstimate:
    """``dtypes``: of parameters, of compute, and that gradients are averaged in."""
    first, _ = next(iter(kinds.values()))
    told |= {"shard_within": first.span, "keeping": first.keeping, "precision": _precision(*dtypes)}
    ranks = world_size, first.span or world_size
    stages = {
        name: _stage_of_count(name, placement, offload is not None, numel, ranks, dtypes, told)
        for name, (placement, offload) in {NONE: (None, None), **kinds}.items()
    }
    return MemoryEstimate(numel=numel, world_size=world_size, stages=stages, counted=False, **told)


def _stage_of_count(
    name: str,
    placement: Placement | None,
    offload: bool,
    numel: int,
    ranks: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    told: Mapping[str, Any],
) -> StageMemory:
    cost, micro_steps, share = told["optimizer"], told["micro_steps"], -(-numel // ranks[1])
    own, compute, reduced = (dtype.itemsize for dtype in dtypes)
    mixed = dtypes[0] != dtypes[1]
    # The paper's arithmetic has parameters and gradients in 16 bits wherever they are, and masters beside them.
    # Gradients in the masters' own dtype are those of autocast without a stage, and here with stage 3: no copy rests.
    autocast = mixed and own == reduced
    sharded = placement is not None and placement.shards_parameters
    copied = autocast and placement is None  # by autograd, until backward
    stepped = numel if placement is None else share
    parameters = (share if sharded else numel) * (own if copied else compute)
    if sharded and (autocast or offload):
        parameters = 0
    masters = own * stepped if mixed and not copied else 0
    keeping = placement.keeping if placement is not None and sharded else None
    kept = -(-numel // keeping) * compute if keeping else 0
    feedback = placement.feedback if placement is not None else None
    residuals = residual_nbytes(numel // feedback, ranks[0] // ranks[1]) if feedback else 0
    # The owner of a whole parameter has a copy of what it steps on.
    state = (cost.state + (cost.whole and placement is not None)) * own * stepped
    host = HostBytes()
    if offload:  # beside the masters, in another dtype, what stage 3 is gathered from
        weights = compute * share if mixed and sharded else 0
        host = HostBytes(weights=weights, masters=own * share, gradients=own * share, optimizer=state)
        rest, made = Memory(parameters=parameters, weights=kept), 0
    else:
        gradients = reduced * (share if placement is not None and placement.shards_gradients else numel)
        rest = Memory(parameters=parameters, weights=kept, masters=masters, gradients=gradients, optimizer=state)
        made = cost.foreach * own * stepped if cost.way_on(told["accelerator"]) == "foreach" else 0
    rest = replace(rest, transport=residuals)
    copies = compute * numel if copied else 0
    peak = replace(rest, weights=copies) if copies > made else replace(rest, temporaries=made)
    part = partial(CollectiveTraffic, 1)
    traffic = Traffic(all_reduce=part(numel, reduced * numel), world_size=ranks[0])
    if placement is not None:
        gathered = part(numel, compute * numel).times(2 * micro_steps if sharded else 1)
        averaged = traffic.all_reduce.times(micro_steps if placement.shards_gradients else 1)
        once, none = part(numel, compute * numel) if keeping else gathered, CollectiveTraffic()
        crossing = (once, none) if sharded or mixed else (none, once)
        traffic = Traffic(gathered, averaged, none, part(share, own * share), *ranks, *crossing)
    return StageMemory(name=name, rest=rest, peak=peak, host=host, traffic=traffic)


def _precision(own: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> str:
    """As Lightning calls it, of parameters in a dtype, what is computed in, and what gradients are averaged in."""
    bits = {torch.float64: "64", torch.float32: "32", torch.bfloat16: "bf16", torch.float16: "16"}
    name = f"{bits.get(compute, _word(compute))}-{'true' if own == compute else 'mixed'}"
    return name if reduce == own else f"{name} with gradients in {_word(reduce)}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(spec: ParameterSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _raw_gradient_nbytes(parameters: Sequence[tuple[ParameterSpec, int]]) -> int:
    """Most bytes of gradients that autograd holds at once without this package, of parameters with the bytes of a
    gradient's element. Those that are reached under several names are taken for tied."""
    held = sum(spec.numel * itemsize for spec, itemsize in parameters if spec.aliases)
    return held + max((spec.numel * itemsize * (1 + bool(spec.aliases)) for spec, itemsize in parameters), default=0)


def fullest_rank(plan: Plan, *, whole: bool) -> int:
    """The rank with most optimizer state, the first of equals. Everything else is the same on all ranks.

    ``whole``: the optimizer needs whole parameters. Costs O(parameters + ranks).
    """
    held = [0] * plan.group_size
    if whole:
        for owner, nbytes in owners_of(plan, plan.trainable_layouts):
            held[owner] += nbytes
        return held.index(max(held))
    more = [0] * (plan.group_size + 1)  # than the rank before, by shards that one parameter fills
    for layout in plan.trainable_layouts:
        shard, itemsize = layout.shard_numel, layout.dtype.itemsize
        for spec, offset in zip(layout.parameters, layout.offsets, strict=True):
            if not spec.numel:
                continue
            first, last = offset // shard, (offset + spec.numel - 1) // shard
            held[first] += itemsize * (min(offset + spec.numel, (first + 1) * shard) - offset)
            if last > first:
                held[last] += itemsize * (offset + spec.numel - last * shard)
                more[first + 1] += itemsize * shard
                more[last] -= itemsize * shard
    totals = [nbytes + filled for nbytes, filled in zip(held, accumulate(more), strict=False)]
    return totals.index(max(totals))


def parse_count(text: float | str) -> int:
    """A number of parameters: ``7.5e9``, ``"7.5B"``, ``"350M"``, ``"1T"``.

    Raises:
        ValueError: if it is none, less than one parameter, or more than any model has.
    """
    number, factor = text, 1
    if isinstance(text, str):
        number = text.strip()
        if re.fullmatch(r"\d{1,3}(,\d{3})+", number):  # any other comma may be a decimal one: "7,5B" is not 75B
            number = number.replace(",", "")
        scale = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(number[-1:].upper())
        if scale is not None:
            number, factor = number[:-1], scale
    try:
        count = 0 if isinstance(text, bool | bytes) else round(float(number) * factor)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if not 1 <= count <= MOST:
        raise ValueError(f"A number of parameters is written as 7.5B, 350M or 7500000000, got {text!r}.")
    return count


# --------------------------------------------------------------------------------------------------------------- links


def on_links(
    traffic: Traffic, hosts: int, *, rings: bool, formats: Sequence[str | None] = (None, None)
) -> tuple[int, int]:
    """Bytes that leave a host, weights and gradients in ``formats``, and that a rank sends in it: [Note: links]."""
    ranks, groups = traffic.world_size // hosts, traffic.world_size // traffic.group_size
    weights, gradients = formats if groups == 1 else (None, None)
    crossing = traffic.exact.nbytes + _rounded(traffic.copies, weights) + _rounded(traffic.reduce_scatter, gradients)
    flat, buffers = traffic.all_gather.nbytes + traffic.reduce_scatter.nbytes, traffic.broadcast.nbytes
    leaving = within = 0
    for whole, out, size in ((flat, crossing, traffic.group_size), (buffers, buffers, traffic.world_size)):
        spanned, inside = max(1, size // ranks), min(size, ranks)  # hosts of a group, and its ranks on each
        if rings and spanned > 1:
            whole = out = whole * (size - 1) // size
        elif spanned > 1 and size < traffic.world_size:
            whole, out = whole // spanned, out * inside * (spanned - 1) // spanned
        else:
            out = out * (spanned - 1) // spanned
        leaving += out
        within += whole * (inside - 1) // inside
    ring = 2 * _rounded(traffic.all_reduce, formats[1] if hosts > 1 else None) * (groups - 1) // groups
    inside = max(1, ranks // traffic.group_size)  # ranks of a ring that are on one host
    if hosts == 1:
        return 0, within + ring
    return leaving + ring * ranks // inside, within + ring * (inside - 1) // inside


def _rounded(sent: CollectiveTraffic, kind: str | None) -> int:
    """Bytes in a format of ``Compression``, which makes nothing larger; ``None``: as they are."""
    return sent.nbytes if kind is None else min(sent.nbytes, int(sent.numel * ROUNDED_NBYTES[kind]))


@dataclass(frozen=True)
class Way:
    """A stage and how it sends: whether memory is enough for it and how much it takes, bytes and seconds of a step.

    ``between`` is the link of a host to the others, ``within`` that of a rank to others of its host. ``host_nbytes`` is
    for all ranks of a host, ``compression`` what gradients are rounded to, seconds 0 where no speed is known.
    """

    stage: str
    shard_within: str | int | None
    secondary_shards: bool
    compression: str | None
    fits: bool
    peak_nbytes: int
    host_nbytes: int
    between_nbytes: int
    within_nbytes: int
    between_seconds: float
    within_seconds: float

    def __str__(self) -> str:
        shards = f" with shard_within={self.shard_within!r}".replace("'", '"') if self.shard_within else ""
        shards += " with secondary_shards" if self.secondary_shards else ""
        return f"{self.stage}{shards}" + (f" in {self.compression}" if self.compression else "")


def ways_to_send(
    estimates: Sequence[MemoryEstimate], memory: Mapping[str, Any] | None, speeds: Sequence[float | None]
) -> list[Way]:
    """Of all stages, from what changes least to what changes most.

    ``estimates``: first a plain one, then those with shard groups and with secondary shards. ``memory``: arguments of
    ``recommend``; ``None``: everything fits. ``speeds``: between hosts and within them, bytes a second, each way.
    """
    ways = []
    for name, estimate in product(estimates[0].stages, estimates):
        within, kept = estimate.shard_within, estimate.keeping is not None
        if name not in estimate.stages or (within and name == NONE) or (kept and not name.startswith("zero3")):
            continue
        span = "node" if within and within * estimate.hosts == estimate.world_size else within
        fits = memory is None or name in estimate.recommend(**memory).fits
        alone = estimate.hosts == 1 or name == NONE
        for kind in (None, *(() if alone else ROUNDED_NBYTES)):
            nbytes = estimate.leaving_nbytes(name, rounded=kind), estimate.within_nbytes(name)
            seconds = [sent / speed if speed else 0.0 for sent, speed in zip(nbytes, speeds, strict=True)]
            peak, host = estimate.stages[name].peak.total, estimate.host_nbytes(name)
            ways.append(Way(name, span, kept, kind, fits, peak, host, *nbytes, *seconds))
    return ways


def fastest_way(ways: Sequence[Way], *, rounded: bool = False) -> Way | None:
    """Of what fits, and without ``rounded`` rounds nothing; of equals the one that takes least memory."""
    fitting = [way for way in ways if way.fits and (rounded or not way.compression)]
    # Copies to the host and back, which offloading takes, are on no link: only if nothing else fits.
    fitting = [way for way in fitting if not way.stage.endswith("_offload")] or fitting
    return min(fitting, key=lambda way: (way.between_seconds + way.within_seconds, way.peak_nbytes), default=None)


def describe_ways(ways: Sequence[Way]) -> str:
    """A table for people, and which way is the fastest."""
    rows: list[Sequence[str]] = [("a step on the links", "leaves a host", "in", "sent within", "in", "at peak", "fits")]
    for way in ways:
        links = ((way.between_nbytes, way.between_seconds), (way.within_nbytes, way.within_seconds))
        cells = [text for nbytes, time in links for text in (readable_size(nbytes), f"{time:,.3f} s" if time else "-")]
        rows.append((str(way), *cells, readable_size(way.peak_nbytes), "yes" if way.fits else "no"))
    best, rounded, advice = fastest_way(ways), fastest_way(ways, rounded=True), "nothing, as nothing fits."
    if best and rounded:
        least = min((way for way in ways if way.fits), key=lambda way: way.peak_nbytes)
        advice = f"{best}, {_costs(best)}."
        if least.peak_nbytes < best.peak_nbytes:
            advice += f" Of what fits {least} takes least memory: {_costs(least)}."
        if rounded.compression:
            advice += f" With Compression, which rounds: {rounded}, {_costs(rounded)}."
    lines = [*table(rows), "", "Seconds add up, and what overlaps with computation is not subtracted."]
    return "\n".join([*lines, "", f"Fastest by the links: {advice}"])


def _costs(way: Way) -> str:
    links = (way.between_seconds, "between hosts"), (way.within_seconds, "within")
    seconds = " and ".join(f"{time:,.3f} s {link}" for time, link in links if time)
    host = f" and {readable_size(way.host_nbytes)} of a host" if way.host_nbytes else ""
    return f"{seconds or '0 s'} in a step, {readable_size(way.peak_nbytes)} at peak{host}"


def parse_speed(text: str) -> float:
    """Bytes a second of ``"10Gbit/s"``, ``"10Gb/s"``, ``"10Gbps"`` or ``"1.25GB/s"`` (units of 1000), or ValueError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(bit|b|B)(?:/s|ps)?", text)
    if matched is None or not float(matched[1]):
        raise ValueError(f"a speed like '10Gbit/s' or '1.25GB/s' is needed, got {text!r}")
    return float(matched[1]) * 1000.0 ** " KMGT".index(matched[2].upper() or " ") / (1 if matched[3] == "B" else 8)
