"""What every stage would take, side by side: from a module to the byte, from a number of parameters by the paper's
arithmetic; and what a step sends between hosts and within them.

[Note: links]
Of n bytes that R hosts of S ranks gather or reduce, (R - 1) / R leave a host in two hops (over gloo, and on devices
where something is rounded or kept), of which the first sums up and hands on within hosts: a rank sends (S - 1) / S
there. Rings, nccl's otherwise and DDP's, pass every host with all that a rank sends: (R S - 1) / (R S) leave it, and
S - 1 of S ranks send as much within. Where shard groups lie within hosts, nothing leaves one but the all-reduces across
groups, rings of a shard each; where they reach over several, their ranks exchange directly, as do those with the same
part of a tensor-parallel model: S times as much leaves a host. Weights that a host's ranks keep
(``Placement.keeping``) cross hosts once a step. Buffers count as gathered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import HostOffload, Offload, Placement, Tier, check_whole
from lightning_zero.errors import readable_size, table
from lightning_zero.extensions.planner.costs import (
    ADAM,
    DiskBytes,
    HostBytes,
    Memory,
    OptimizerCost,
    StageMemory,
    owners_of,
    stage_memory,
)
from lightning_zero.extensions.planner.measure import copied
from lightning_zero.plan.layout import FlatLayout, residual_nbytes
from lightning_zero.plan.plan import CollectiveTraffic, Plan, Traffic, UnitPlan
from lightning_zero.registry import extension

__all__ = [
    "MemoryEstimate",
    "Recommendation",
    "describe_plan",
    "estimate_memory",
    "fullest_rank",
    "on_links",
    "parse_count",
    "plan_numbers",
]

MOST = 10**18
"""Parameters of the largest model that a number of parameters stands for. Beyond it, it is a slip of the pen."""

ROUNDED_NBYTES = {"bfloat16": 2.0, "int8": 1 + 4 / 64, "int4": 1 / 2 + 4 / 64}
"""Of an element that ``Compression`` rounds, by the format, with its part of a scale."""

LONGEST_NAME = 48
"""Characters of a unit's name that the table shows."""

# Categories of memory that people call by another name.
_WORDS = {
    "weights": "weights to compute with",
    "optimizer": "optimizer state",
    "transport": "receive buffers",
    "raw_gradients": "a gradient on its way",
    "temporaries": "temporaries of the step",
}

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
    tensor_parallel_size: int = 1  #: Of them, those that compute each layer together.
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
        if self.hosts < 1 or self.world_size % (self.hosts * self.tensor_parallel_size):
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

    def leaving_nbytes(self, name: str) -> int:
        """Bytes that leave a host in a step; see [Note: links]."""
        return self._on_links(name)[0]

    def within_nbytes(self, name: str) -> int:
        """Bytes that one rank sends to others of its host in a step; see [Note: links]."""
        return self._on_links(name)[1]

    def _on_links(self, name: str) -> tuple[int, int]:
        formats: tuple[str | None, str | None] = (None, None)
        if self.compression is not None and name != NONE:
            formats = self.compression.weights, self.compression.gradients
        kept = self.keeping is not None and name.startswith("zero3")
        hops = self.shard_within is None and (any(formats) or kept)
        rings = name == NONE or (self.accelerator and not hops)
        size, traffic = self.tensor_parallel_size, self.stages[name].traffic
        leaving, within = on_links(traffic, self.hosts, rings=rings, formats=formats, direct=size > 1)
        return leaving * size, within

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
        room, nothing = device_nbytes - activations_nbytes, partial(Recommendation, name=None)
        activations, device = readable_size(activations_nbytes), readable_size(device_nbytes)
        if room < 0:
            return nothing(reason=f"{activations} of activations do not fit into {device}.", fits=())
        problems = {name: self._lacks(name, room, host_nbytes, activations_nbytes) for name in self.stages}
        fits = tuple(name for name, problem in problems.items() if not problem)
        device += f" beside {activations} of activations" if activations_nbytes else ""
        more = "" if self.counted else " Slots and buckets, which a number of parameters does not tell, come on top."
        if not fits:
            reason = (
                f"Nothing fits into {device}: {'; '.join(problems.values())}.{more} Use more ranks or larger "
                "devices, or lightning_zero.NvmeOffload if host memory is missing."
            )
            return nothing(reason=reason, fits=())
        if not known:
            shown = [name for name in fits if not name.endswith("_offload")] or fits
            free = ", ".join(f"{readable_size(room - self.stages[name].peak.total)} with {name}" for name in shown)
            reason = f"Activations are not counted. Of {device} so much stays free for them: {free}.{more}"
            return nothing(reason=reason, fits=fits)
        needed = self.stages[fits[0]].peak.total
        left = readable_size(room - needed)
        reason = f"{fits[0]} needs {readable_size(needed)} at peak, which fits into {device} and leaves {left}.{more}"
        if self.stages[fits[0]].host.total or not self.accelerator:
            held = readable_size(self.host_nbytes(fits[0], activations_nbytes=activations_nbytes))
            has = "how much there is was not said" if host_nbytes is None else f"there are {readable_size(host_nbytes)}"
            takes = "takes" if self._ranks.startswith("1 ") else "take"
            reason += f" Its {self._ranks} {takes} {held} of host memory on each node; {has}."
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
            missing.append(f"{readable_size(held)} of host memory for {self._ranks} of a node, which has {there}")
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
        stages = {name: stage for name, stage in self.stages.items() if offload or not name.endswith("_offload")}
        stages = stages if len(stages) > 1 else dict(self.stages)
        at_peak = "at peak" if self.activations is not None else "at peak, without activations"
        columns = [self._rows(stage, at_peak) for stage in stages.values()]
        rows = [("bytes of one rank", *stages)]
        for word in columns[0]:
            sizes = [column[word] for column in columns]
            if any(sizes) or word.startswith("at "):
                rows.append((word, *(readable_size(size) if size else "-" for size in sizes)))
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size:,} ranks"
        ranks += f" in tensor-parallel groups of {self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        ranks += f", {self.micro_steps} micro-steps in a step" if self.micro_steps > 1 else ""
        shards = (
            f"shard groups of {self.shard_within}" if self.shard_within else "secondary shards" * bool(self.keeping)
        )
        ranks += "".join(f", {said}" for said in (shards, self.compression) if said)
        lines = [f"{self.numel:,} parameters, {self.optimizer.name}, {self.precision}, {ranks}", "", *table(rows)]
        more = "From a number of parameters: slots and buckets, which depend on the model's parts, come on top."
        return "\n".join(lines if self.counted else [*lines, "", more])

    def _rows(self, stage: StageMemory, at_peak: str) -> dict[str, int]:
        """Bytes in the order and in the words of the table."""
        rest, peak = dict(stage.rest.items()), dict(stage.peak.items())
        leaving, within = self._on_links(stage.name)
        words = {name: _WORDS.get(name, name.replace("_", " ")) for name in rest}
        return {
            **{word: rest[name] for name, word in words.items()},
            "at rest": stage.rest.total,
            **{f"+ {word}": max(0, peak[name] - rest[name]) for name, word in words.items()},
            **{f"- {word} not there then": max(0, rest[name] - peak[name]) for name, word in words.items()},
            at_peak: stage.peak.total,
            "host memory": stage.host.total,
            f"host memory of a node, {self._ranks}": self.host_nbytes(stage.name),
            "files": stage.disk.total,
            "sent in a step": leaving * self.hosts // self.world_size + within,
            "leaves a node in a step": leaving,
        }


def estimate_memory(
    model: nn.Module | Plan | float | str,
    *,
    world_size: int | None = None,
    tensor_parallel_size: int = 1,
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
    """Estimate the memory of one rank in each stage and without ZeRO, at rest and at peak, before a run.

    A module is counted exactly, for the rank that needs most memory; a plan for its stage and without ZeRO; a number
    of parameters by the formulas of the ZeRO paper: parameters in ``param_dtype``, gradients in ``reduce_dtype`` (else
    ``dtype``), masters in ``dtype`` if that differs, and the optimizer state.

    Args:
        model: a module (on the meta device, if it is large), a plan, or a number of parameters such as ``"7.5B"``.
        world_size, hosts, micro_steps: ranks (a plan has its own); nodes of equal size; forwards per step.
        tensor_parallel_size: of a node's ranks. A module is parallelised already, or in ``configure_model``, which a
            copy of it runs on the meta device. A number of parameters counts as split.
        optimizer, dtype: see ``OptimizerCost.of``; the dtype of the parameters, where the model is a number.
        param_dtype, reduce_dtype: dtypes of computation and of gradient averaging; ``None``: the parameters' or plan's.
        accelerator: whether ranks use one, where torch's optimizers take more memory for a step unless they are fused.
        receive_buffer: whether the transport keeps one: gloo does where it carries reductions alone.
        shard_within, secondary_shards, compression: as for ``ZeroStrategy``, with a number of ranks for the first.
        activations: bytes, the ``total`` of ``measure_activations``; ``None``: they are not counted.
        settings: of ``build_plan``, for a module: ``units``, ``bucket_mib``, ``prefetch``, ``broadcast_buffers``.

    ValueError if ``world_size`` is missing or no multiple of ``hosts``, a count is below 1, or settings clash.

    Source: ZeRO, section 5, table 1 and figure 1 (arXiv:1910.02054).
    """
    cost = OptimizerCost.of(optimizer)
    told = {"optimizer": cost, "hosts": hosts, "accelerator": accelerator, "micro_steps": micro_steps}
    told |= {"compression": compression, "activations": activations}
    if isinstance(model, Plan):
        own = (settings, param_dtype, reduce_dtype, shard_within, secondary_shards)
        if world_size not in (None, model.world_size) or any(own):
            raise ValueError("A plan has its own world size and settings: build another one instead.")
        number = 1 + model.placement.shards_gradients + model.placement.shards_parameters
        name = f"zero{number}" + ("" if model.offload is None else "_offload")
        return _of_plans({name: model}, receive_buffer, **told)
    world_size = check_whole("world_size", world_size, least=1, unit="ranks")
    size = check_whole("tensor_parallel_size", tensor_parallel_size, least=1, unit="ranks")
    told["tensor_parallel_size"] = size
    if size > 1 and world_size // max(1, hosts) % size:
        raise ValueError(
            f"tensor_parallel_size={size} does not divide the {world_size // max(1, hosts)} ranks of a node."
        )
    world_size //= size
    if size > 1 and cost.whole:
        raise ValueError(f"{cost.name} steps on whole parameters, and tensor parallelism splits them: take AdamW.")
    if size > 1 and isinstance(model, nn.Module) and not any(hasattr(one, "tensor_part") for one in model.parameters()):
        model = copied(model, lambda tensor: tensor.detach().to("meta"))
        extension("tensor_parallel").plan_alone(model, world_size, size)
    exchange: dict[str, Any] = {"span": shard_within, "compression": compression}
    exchange["secondary_shards"] = secondary_shards and size == 1  # which tensor-parallel ranks do not have
    # Optimizers of whole parameters do not go with offload from an accelerator: see optim/rules.py.
    kinds = {name: kind for name, kind in _STAGES.items() if not (kind[1] and cost.whole and accelerator)}
    kinds = {name: (where.on_hosts(hosts, world_size, **exchange), on) for name, (where, on) in kinds.items()}
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


def _of_plans(plans: Mapping[str, Plan], receive_buffer: bool, **told: Any) -> MemoryEstimate:
    """``told``: what the estimate says too."""
    first, cost, accelerator = next(iter(plans.values())), told["optimizer"], told["accelerator"]
    told |= {"shard_within": first.placement.span, "keeping": first.placement.keeping}
    stages = {NONE: _without(first, cost, accelerator, told["activations"] or 0)}
    for name, plan in plans.items():
        rank = fullest_rank(plan, whole=cost.whole)
        settings = {"receive_buffer": receive_buffer, "accelerator": accelerator}
        stage = stage_memory(plan, name, rank, cost, **settings, activations=told["activations"] or 0)
        stages[name] = replace(stage, traffic=plan.expected_traffic(micro_steps=told["micro_steps"]))
    layouts = first.trainable_layouts or first.layouts
    most = max(layouts, key=lambda layout: layout.parameter_numel, default=None)
    told["precision"] = _precision(most.dtype, most.compute_dtype, most.reduce_dtype) if most else NONE
    size = _tensor_ranks(first)
    if told.setdefault("tensor_parallel_size", size) != size:
        raise ValueError(f"The module is parallelised over {size} ranks: give tensor_parallel_size={size}.")
    told |= {"numel": sum(math.prod(spec.whole_shape) for spec in first.parameters), "stages": stages}
    return MemoryEstimate(world_size=first.world_size * size, counted=True, **told)


def _tensor_ranks(plan: Plan) -> int:
    return max((spec.part.ranks for spec in plan.parameters if spec.part), default=1)


def _without(plan: Plan, cost: OptimizerCost, accelerator: bool, activations: int) -> StageMemory:
    """Plain PyTorch with ``gradient_as_bucket_view=True``; by default DDP holds another copy of the gradients.

    Under autocast, which has no masters, autograd keeps a copy of every weight in the dtype of compute until backward.
    """
    held = [(spec, layout) for layout in plan.layouts for spec in layout.parameters]
    sizes = [(spec, spec.numel * spec.dtype.itemsize) for spec, layout in held if layout.trainable]
    gradients = sum(size for _, size in sizes)
    parameters = sum(spec.numel * spec.dtype.itemsize for spec, _ in held)
    state = sum(cost.state_nbytes(spec.numel, spec.dtype.itemsize, spec.numel) for spec, _ in sizes)
    rest = Memory(parameters=parameters, gradients=gradients, optimizer=state)
    copies = sum(s.numel * la.compute_dtype.itemsize for s, la in held if la.compute_dtype != la.dtype)
    # What is reached under several names is taken for tied: autograd holds the sum of its parts, and one more of them.
    raw = sum(size for spec, size in sizes if spec.aliases)
    several = ((size, spec.parts, bool(spec.aliases)) for spec, size in sizes)
    raw += max((size * max(parts - tied, 1 + tied) for size, parts, tied in several), default=0)
    step = cost.step_nbytes([size for _, size in reversed(sizes)], accelerator)
    backward = replace(rest, weights=copies, raw_gradients=raw, activations=activations)
    peak = max(backward, replace(rest, temporaries=step), key=lambda memory: memory.total)
    reduced = CollectiveTraffic(numel=sum(spec.numel for spec, _ in sizes), nbytes=gradients)
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
    whole, size = numel, told["tensor_parallel_size"]
    numel = -(-numel // size)
    cost, micro_steps, share = told["optimizer"], told["micro_steps"], -(-numel // ranks[1])
    own, compute, reduced = (dtype.itemsize for dtype in dtypes)
    mixed, part, none = dtypes[0] != dtypes[1], partial(CollectiveTraffic, 1), CollectiveTraffic()
    # The paper's arithmetic has parameters and gradients in 16 bits wherever they are, and masters beside them.
    # Gradients in the masters' own dtype are those of autocast without a stage, and here with stage 3: no copy rests.
    autocast = mixed and own == reduced

    def stage(name: str, placement: Placement | None, offload: Offload | None) -> StageMemory:
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
        state = cost.state_nbytes(stepped, own) + (cost.whole and placement is not None) * own * stepped
        host, made = HostBytes(), 0
        rest = Memory(parameters=parameters, weights=kept, transport=residuals)
        if offload:  # beside the masters, in another dtype, what stage 3 is gathered from
            weights = compute * share if mixed and sharded else 0
            host = HostBytes(weights=weights, masters=own * share, gradients=own * share, optimizer=state)
        else:
            gradients = reduced * (share if placement is not None and placement.shards_gradients else numel)
            rest = replace(rest, masters=masters, gradients=gradients, optimizer=state)
            made = cost.foreach * own * stepped if cost.way_on(told["accelerator"]) == "foreach" else 0
        copies = compute * numel if copied else 0
        peak = replace(rest, weights=copies) if copies > made else replace(rest, temporaries=made)
        traffic = Traffic(all_reduce=part(numel, reduced * numel), world_size=ranks[0])
        if placement is not None:
            gathered = part(numel, compute * numel).times(2 * micro_steps if sharded else 1)
            averaged = traffic.all_reduce.times(micro_steps if placement.shards_gradients else 1)
            once = part(numel, compute * numel) if keeping else gathered
            crossing = (once, none) if sharded or mixed else (none, once)
            traffic = Traffic(gathered, averaged, none, part(share, own * share), *ranks, *crossing)
        return StageMemory(name=name, rest=rest, peak=peak, host=host, traffic=traffic)

    stages = {name: stage(name, *kind) for name, kind in {NONE: (None, None), **kinds}.items()}
    return MemoryEstimate(numel=whole, world_size=world_size * size, stages=stages, counted=False, **told)


def _precision(own: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> str:
    """As Lightning calls it, of parameters in a dtype, what is computed in, and what gradients are averaged in."""
    bits = {torch.float64: "64", torch.float32: "32", torch.bfloat16: "bf16", torch.float16: "16"}
    computed, reduced = (str(dtype).removeprefix("torch.") for dtype in (compute, reduce))
    name = f"{bits.get(compute, computed)}-{'true' if own == compute else 'mixed'}"
    return name if reduce == own else f"{name} with gradients in {reduced}"


def fullest_rank(plan: Plan, *, whole: bool) -> int:
    """The rank with most optimizer state, the first of equals. Everything else is the same on all ranks.

    ``whole``: the optimizer needs whole parameters. Costs O(parameters + ranks).
    """
    if whole:
        held = [0] * plan.group_size
        for owner, nbytes in owners_of(plan, plan.trainable_layouts):
            held[owner] += nbytes
        return held.index(max(held))
    # Bytes of a shard that belong to no parameter, and how many more of them than the rank before, in whole shards.
    lacking, more = [0] * plan.group_size, [0] * (plan.group_size + 1)
    for layout in plan.trainable_layouts:
        shard, itemsize = layout.shard_numel, layout.dtype.itemsize
        for start, end in layout.gaps():
            first, last = start // shard, (end - 1) // shard
            lacking[first] += itemsize * (min(end, (first + 1) * shard) - start)
            if last > first:
                lacking[last] += itemsize * (end - last * shard)
                more[first + 1] += itemsize * shard
                more[last] -= itemsize * shard
    totals = [nbytes + whole for nbytes, whole in zip(lacking, accumulate(more), strict=False)]
    return totals.index(min(totals))


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
        factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(number[-1:].upper(), 1)
        number = number[:-1] if factor > 1 else number
    try:
        count = 0 if isinstance(text, bool | bytes) else round(float(number) * factor)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if not 1 <= count <= MOST:
        raise ValueError(f"A number of parameters is written as 7.5B, 350M or 7500000000, got {text!r}.")
    return count


# --------------------------------------------------------------------------------------------------------------- links


def on_links(
    traffic: Traffic, hosts: int, *, rings: bool, direct: bool = False, formats: Sequence[str | None] = (None, None)
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
        elif spanned > 1 and (direct or size < traffic.world_size):
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


# --------------------------------------------------------------------------------------------------- a plan for people


def describe_plan(
    plan: Plan, *, optimizer: OptimizerCost = ADAM, accelerator: bool = False, micro_steps: int = 1
) -> str:
    """What ``ZeroPlan.describe`` says: units, totals, traffic and memory."""
    placement, offload = plan.placement, plan.offload
    lines = [
        f"Plan for {plan.world_size} ranks: {placement}; prefetch {plan.prefetch}"
        + (f"; shard groups of {plan.group_size}" if plan.group_size != plan.world_size else "")
        + (f"; of each tensor-parallel group of {ranks} one rank" if (ranks := _tensor_ranks(plan)) > 1 else "")
    ]
    if offload is not None:
        what = " and ".join(name for name in ("optimizer", "parameters") if getattr(offload, name))
        lines.append(f"Offloaded to the {offload.tier.value}: {what}")
    traffic = plan.expected_traffic(micro_steps=micro_steps)
    tables = (_unit_rows(plan), _traffic_rows(traffic), _memory_rows(plan, optimizer, accelerator))
    return "\n\n".join("\n".join(block) for block in (lines, *map(table, tables)))


def plan_numbers(plan: Plan, micro_steps: int) -> dict[str, Any]:
    """The units and the traffic of a step, for programs."""
    units = [{"name": u.name, "numel": sum(spec.numel for spec in u.parameters), "slot": u.slot} for u in plan.units]
    traffic = plan.expected_traffic(micro_steps=micro_steps)
    return {"prefetch": plan.prefetch, "units": units, "traffic": asdict(traffic)}


# --------------------------------------------------------------------------------------------------------------- tables


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("unit", "parameters", "elements", "frozen", "shard", "padding", "slot", "dtype")]
    alike: dict[tuple[str, int, tuple[str, ...], str], list[UnitPlan]] = {}
    for unit in plan.units:
        both = [dict.fromkeys((layout.dtype, layout.compute_dtype)) for layout in unit.layouts]
        dtypes = ", ".join(dict.fromkeys(" as ".join(map(str, two)) for two in both)).replace("torch.", "") or "-"
        key = re.sub(r"\d+", "#", unit.name), unit.depth, _sizes(unit.layouts), dtypes
        alike.setdefault(key, []).append(unit)
    for (_, depth, sizes, dtypes), units in alike.items():
        first, last = units[0], units[-1]
        name = first.name or "(root)"
        if len(units) > 1:
            name = f"{name} … {_difference(first.name, last.name)} ({len(units)} alike)"
        name = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
        slots = sorted({unit.slot for unit in units if unit.slot is not None})
        slot = "-".join(str(slot) for slot in dict.fromkeys(slots[:1] + slots[-1:])) or "-"
        rows.append(("  " * depth + name, *sizes, slot, dtypes))
    return [*rows, (f"total ({len(plan.units)} units)", *_sizes(plan.layouts), str(len(plan.slots) or "-"), "")]


def _sizes(layouts: Sequence[FlatLayout]) -> tuple[str, ...]:
    """Parameters, elements, frozen ones of them, those of a shard, and the share of padding."""
    numel = sum(layout.parameter_numel for layout in layouts)
    frozen = sum(layout.parameter_numel for layout in layouts if not layout.trainable)
    padded = sum(layout.numel for layout in layouts)
    return (
        f"{sum(len(layout.parameters) for layout in layouts):,}",
        f"{numel:,}",
        f"{frozen:,}" if frozen else "-",
        f"{sum(layout.shard_numel for layout in layouts):,}",
        f"{100 * (padded - numel) / padded:.2f} %" if padded else "-",
    )


def _difference(first: str, last: str) -> str:
    """The part of ``last`` from the dotted part on in which it differs: ("model.0.a", "model.7.a") gives ".7.a"."""
    pairs = zip(first.split("."), last.split("."), strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return "." * (same > 0) + ".".join(last.split(".")[same:])


def _traffic_rows(traffic: Traffic) -> Sequence[tuple[str, ...]]:
    parts = {"all-gather": traffic.all_gather, "reduce-scatter": traffic.reduce_scatter}
    if traffic.all_reduce.calls:
        parts["all-reduce across groups"] = traffic.all_reduce
    if traffic.broadcast.calls:
        parts["broadcast of buffers"] = traffic.broadcast
    rows = [("traffic of a step", "calls", "elements", "size")]
    for kind, part in {**parts, "total": traffic.total}.items():
        rows.append((kind, f"{part.calls:,}", f"{part.numel:,}", readable_size(part.nbytes)))
    return rows


def _memory_rows(plan: Plan, optimizer: OptimizerCost, accelerator: bool) -> list[tuple[str, ...]]:
    """A column for each place where something may be: with a transport that keeps no receive buffer."""
    found = stage_memory(plan, "", 0, optimizer, receive_buffer=False, accelerator=accelerator)
    places: dict[str, Memory | HostBytes | DiskBytes] = {"at rest": found.rest, "at peak": found.peak}
    if plan.offload is not None:
        places = {"device": found.rest, "host": found.host, "disk": found.disk, "device at peak": found.peak}
        if plan.offload.tier is Tier.HOST:
            del places["disk"]
    columns = [dict(memory.items()) for memory in places.values()]
    categories = dict.fromkeys(category for column in columns for category, nbytes in column.items() if nbytes)
    rows: list[tuple[str, ...]] = [(f"memory of rank 0, {optimizer.name}", *places)]
    for category in categories:
        sizes = (readable_size(column[category]) if category in column else "-" for column in columns)
        rows.append((category.replace("_", " "), *sizes))
    return [*rows, ("total without activations", *(readable_size(memory.total) for memory in places.values()))]
