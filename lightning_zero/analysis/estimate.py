"""What every stage would take, side by side: from a module to the byte, from a number of parameters by the paper's
arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.analysis.memory import (
    DiskBytes,
    HostBytes,
    Memory,
    expected_disk,
    expected_host_memory,
    expected_memory,
    fullest_rank,
    raw_gradient_nbytes,
)
from lightning_zero.analysis.optimizers import OptimizerCost
from lightning_zero.analysis.report import format_decimal, table
from lightning_zero.analysis.traffic import sent_nbytes
from lightning_zero.config import HostOffload, Offload, Placement
from lightning_zero.plan import ParameterSpec, Plan

__all__ = ["MemoryEstimate", "Recommendation", "StageMemory", "estimate_memory", "parse_count"]

MOST = 10**18
"""Parameters of the largest model that a number of parameters stands for. Beyond it, it is a slip of the pen."""

NONE = "none"
"""No stage: plain PyTorch, ``DistributedDataParallel`` where there is more than one process."""

# From what changes least to what takes most time: a wider wire, then the way to the host. Names are the strategy's.
_STAGES: Mapping[str, tuple[int, Offload | None]] = {
    "zero1": (1, None),
    "zero2": (2, None),
    "zero3": (3, None),
    "zero2_offload": (2, HostOffload()),
    "zero3_offload": (3, HostOffload(parameters=True)),
}


_WORDS = {
    "parameters": "parameters",
    "weights": "weights to compute with",
    "masters": "masters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "slots": "slots",
    "gradient_slots": "gradient slots",
    "transport": "receive buffers",
    "raw_gradients": "a gradient on its way",
    "temporaries": "temporaries of the step",
}


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage takes of one rank.

    Attributes:
        name: ``"none"``, or what the strategy is called.
        rest: on the device between steps.
        peak: on the device at the worst moment of a step, without activations.
        host: in host memory, because it is offloaded.
        disk: in files.
        sent_nbytes: that a rank sends in a step, and receives.
    """

    name: str
    rest: Memory
    peak: Memory
    host: HostBytes
    disk: DiskBytes
    sent_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to choose.

    Attributes:
        name: of the stage; ``None`` if none fits.
        reason: why, in a sentence or two.
        fits: names of all stages that fit, in the same order as the estimate's.
    """

    name: str | None
    reason: str
    fits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Stages side by side.

    Attributes:
        numel: parameters of the model.
        world_size: ranks that share it.
        optimizer: what was counted with.
        stages: by name, from what changes least to what takes most time.
        counted: whether the model's parts are known. If not, slots, buckets and what autograd and a step make for
            single parameters are not in it.
    """

    numel: int
    world_size: int
    optimizer: OptimizerCost
    stages: Mapping[str, StageMemory]
    counted: bool

    def recommend(
        self, device_nbytes: int, *, host_nbytes: int | None = None, activations_nbytes: int = 0
    ) -> Recommendation:
        """The first stage, from what changes least to what takes most time, that fits.

        Args:
            device_nbytes: memory of one device.
            host_nbytes: host memory for one rank; ``None``: enough.
            activations_nbytes: what has to stay free on the device.

        Raises:
            ValueError: if a size is negative.
        """
        if min(device_nbytes, activations_nbytes, host_nbytes or 0) < 0:
            raise ValueError("Sizes of memory must not be negative.")
        room = device_nbytes - activations_nbytes
        activations, device = format_decimal(activations_nbytes), format_decimal(device_nbytes)
        if room < 0:
            reason = f"{activations} of activations do not fit into {device}."
            return Recommendation(name=None, reason=reason, fits=())
        problems = {stage.name: _problem(stage, room, host_nbytes) for stage in self.stages.values()}
        fits = tuple(name for name, problem in problems.items() if not problem)
        device += f" beside {activations} of activations" if activations_nbytes else ""
        more = "" if self.counted else " Slots and buckets, which a number of parameters does not tell, come on top."
        if not fits:
            reason = (
                f"Nothing fits into {device}: {'; '.join(problems.values())}.{more} Use more processes or larger "
                "devices, or lightning_zero.NvmeOffload where it is host memory that is missing."
            )
            return Recommendation(name=None, reason=reason, fits=())
        needed = self.stages[fits[0]].peak.total
        left = format_decimal(room - needed) + ("" if activations_nbytes else " for activations")
        reason = f"{fits[0]} needs {format_decimal(needed)} at peak, which fits into {device} and leaves {left}.{more}"
        before = list(problems.values())[: list(problems).index(fits[0])]
        reason += f" Less would not do: {'; '.join(before)}." if before else " There is no need to split anything."
        return Recommendation(name=fits[0], reason=reason, fits=fits)

    def describe(self, *, offload: bool = False) -> str:
        """A table for people, in units of 1000 as devices and papers have them.

        Args:
            offload: with a column for each stage that offloads.
        """
        stages = [stage for stage in self.stages.values() if offload or not stage.name.endswith("_offload")]
        if not stages[1:]:
            stages = list(self.stages.values())
        at_rest = [dict(stage.rest.items()) for stage in stages]
        at_peak = [dict(stage.peak.items()) for stage in stages]
        rows = [("bytes of one process", *(stage.name for stage in stages))]
        rows += [_row(word, [column[name] for column in at_rest]) for name, word in _WORDS.items()]
        rows.append(_row("at rest", [stage.rest.total for stage in stages]))
        rows += [
            _row(f"+ {word}", [peak[name] - rest[name] for peak, rest in zip(at_peak, at_rest, strict=True)])
            for name, word in _WORDS.items()
        ]
        rows.append(_row("at peak, without activations", [stage.peak.total for stage in stages]))
        rows.append(_row("host memory", [stage.host.total for stage in stages]))
        rows.append(_row("files", [stage.disk.total for stage in stages]))
        rows.append(_row("sent in a step", [stage.sent_nbytes for stage in stages]))
        shown = [row for row in rows if row[0].startswith("at ") or any(cell != "-" for cell in row[1:])]
        processes = "1 process" if self.world_size == 1 else f"{self.world_size:,} processes"
        lines = [f"{self.numel:,} parameters, {self.optimizer.name}, {processes}", "", *table(shown)]
        if not self.counted:
            lines += [
                "",
                "From a number of parameters: slots and buckets, which depend on the model's parts, come on top.",
            ]
        return "\n".join(lines)


def _row(name: str, values: list[int]) -> tuple[str, ...]:
    return (name, *(format_decimal(value) if value else "-" for value in values))


def _problem(stage: StageMemory, room: int, host_nbytes: int | None) -> str:
    """Why a stage does not fit; empty if it does."""
    if stage.peak.total > room:
        return f"{stage.name} needs {format_decimal(stage.peak.total)}"
    if host_nbytes is not None and stage.host.total > host_nbytes:
        return (
            f"{stage.name} needs {format_decimal(stage.host.total)} of host memory, of which there are "
            f"{format_decimal(host_nbytes)}"
        )
    return ""


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
    **settings: Any,
) -> MemoryEstimate:
    """Bytes of one rank for no stage and for each stage, at rest and at peak, before anything runs.

    A module is counted to the byte, as this package will hold it, on the rank that holds most: ranks differ by padding,
    and by what they own of an optimizer that needs whole parameters. A plan is counted for its own stage and for none.
    A number of parameters is counted by the arithmetic of the ZeRO paper: parameters in ``param_dtype``, gradients in
    ``reduce_dtype``, beside them masters in ``dtype`` where that is another one, and the optimizer's state. Without a
    ``reduce_dtype`` gradients are in ``dtype``, as they are in this package unless told otherwise. ::

        estimate_memory(7.5e9, world_size=64, param_dtype=torch.float16, reduce_dtype=torch.float16)

    is its table for 7.5 billion parameters: 120 GB without a stage, 31.4, 16.6 and 1.9 GB with stage 1, 2 and 3.

    Args:
        model: a module (on the meta device, if it is large), a plan, or a number of parameters such as ``"7.5B"``.
        world_size: ranks that share the model. A plan has its own.
        optimizer: which, see ``OptimizerCost.of``.
        dtype: of the parameters, where the model is a number. Modules know theirs.
        param_dtype: that the module computes in; ``None``: the parameters' own. A plan has its own.
        reduce_dtype: that gradients are averaged in; ``None``: the parameters' own. A plan has its own.
        accelerator: whether it runs on one, where torch's optimizers take more memory for a step unless they are fused.
        receive_buffer: whether the transport keeps one: gloo does between hosts.
        settings: further arguments of ``build_plan``, for a module: ``units``, ``bucket_mib``, ``prefetch``,
            ``broadcast_buffers``.

    Raises:
        ValueError: if the world size is missing or not one, a count is no count, or the model cannot be laid out.

    Source: ZeRO, section 5, table 1 and figure 1 (arXiv:1910.02054).
    """
    cost = optimizer if isinstance(optimizer, OptimizerCost) else OptimizerCost.of(optimizer)
    if isinstance(model, Plan):
        if world_size not in (None, model.world_size) or settings or param_dtype or reduce_dtype:
            raise ValueError("A plan has its own world size and settings: build another one instead.")
        name = f"zero{_number(model.placement)}" + ("" if model.offload is None else "_offload")
        stages = [_without(model, cost, accelerator), _of_plan(name, model, cost, accelerator, receive_buffer)]
        return _estimate(model.numel, model.world_size, cost, stages, counted=True)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, got {world_size!r}.")
    if isinstance(model, nn.Module):
        if settings.keys() & {"stage", "placement", "offload"}:
            raise ValueError("All stages are estimated, with and without offload; for a single one, build its plan.")
        settings |= {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        return _of_module(model, world_size, settings, cost, accelerator, receive_buffer)
    if settings:
        raise ValueError(f"A number of parameters has no {', '.join(sorted(settings))}: give the module.")
    numel = parse_count(model)
    dtypes = dtype, param_dtype or dtype, reduce_dtype or dtype
    return _estimate(numel, world_size, cost, _of_count(numel, world_size, dtypes, cost, accelerator), counted=False)


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


def _estimate(
    numel: int, world_size: int, cost: OptimizerCost, stages: list[StageMemory], counted: bool
) -> MemoryEstimate:
    by_name = {stage.name: stage for stage in stages}
    return MemoryEstimate(numel=numel, world_size=world_size, optimizer=cost, stages=by_name, counted=counted)


def _number(placement: Placement) -> int:
    return 1 + placement.shards_gradients + placement.shards_parameters


# -------------------------------------------------------------------------------------------------- from modules, plans


def _of_module(
    module: nn.Module,
    world_size: int,
    settings: Mapping[str, Any],
    cost: OptimizerCost,
    accelerator: bool,
    receive_buffer: bool,
) -> MemoryEstimate:
    """``settings``: of ``build_plan``."""
    stages: list[StageMemory] = []
    for name, (stage, offload) in _STAGES.items():
        if cost.whole and offload is not None and accelerator:
            continue  # refused by the strategy: see optim/rules.py
        plan = Plan.build(module, stage=stage, world_size=world_size, offload=offload, **settings)
        if not stages:
            stages.append(_without(plan, cost, accelerator))
        stages.append(_of_plan(name, plan, cost, accelerator, receive_buffer))
    return _estimate(plan.numel, world_size, cost, stages, counted=True)


def _of_plan(name: str, plan: Plan, cost: OptimizerCost, accelerator: bool, receive_buffer: bool) -> StageMemory:
    rank = fullest_rank(plan, whole=cost.whole)
    rest, peak = (
        expected_memory(
            plan, rank=rank, optimizer=cost, accelerator=accelerator, receive_buffer=receive_buffer, peak=peak
        )
        for peak in (False, True)
    )
    return StageMemory(
        name=name,
        rest=rest,
        peak=peak,
        host=expected_host_memory(plan, rank=rank, optimizer_tensors=cost.state, accelerator=accelerator),
        disk=expected_disk(plan, rank=rank, optimizer_tensors=cost.state),
        sent_nbytes=sent_nbytes(plan),
    )


def _without(plan: Plan, cost: OptimizerCost, accelerator: bool) -> StageMemory:
    """Plain PyTorch with ``gradient_as_bucket_view=True``; by default DDP holds another copy of the gradients.

    Under autocast, which has no masters, autograd keeps a copy of every weight in the dtype of compute until backward.
    """
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    held = [(spec, layout) for layout in layouts for spec in layout.parameters]
    trained = [spec for spec, layout in held if layout.trainable]
    gradients = sum(map(_nbytes, trained))
    rest = Memory(
        parameters=sum(_nbytes(spec) for spec, _ in held),
        masters=0,
        gradients=gradients,
        optimizer=cost.state * gradients,
    )
    copies = sum(
        spec.numel * layout.compute_dtype.itemsize for spec, layout in held if layout.compute_dtype != layout.dtype
    )
    raw = raw_gradient_nbytes([(spec, spec.dtype.itemsize) for spec in trained])
    step = cost.step_nbytes([_nbytes(spec) for spec in reversed(trained)], accelerator)
    backward = replace(rest, weights=copies, raw_gradients=raw)
    peak = max(backward, replace(rest, temporaries=step), key=lambda memory: memory.total)
    return StageMemory(
        name=NONE,
        rest=rest,
        peak=peak,
        host=_NOWHERE,
        disk=_NO_FILES,
        sent_nbytes=_sent(2 * gradients + sum(buffer.nbytes for buffer in plan.buffers), plan.world_size),
    )


def _nbytes(spec: ParameterSpec) -> int:
    return spec.numel * spec.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------- from counts


def _of_count(
    numel: int,
    world_size: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    cost: OptimizerCost,
    accelerator: bool,
) -> list[StageMemory]:
    """``dtypes``: of the parameters, of compute, and that gradients are averaged in."""
    own, compute, reduced = (dtype.itemsize for dtype in dtypes)
    mixed = dtypes[0] != dtypes[1]
    # The paper's arithmetic has parameters and gradients in 16 bits wherever they are, and masters beside them.
    # Gradients in the masters' own dtype are those of autocast without a stage, and here with stage 3: no copy rests.
    copied = mixed and own != reduced
    share = -(-numel // world_size)
    gather, reduce = compute * numel, reduced * numel

    def stage(
        name: str, parameters: int, masters: int, gradients: int, sent: int, *, copies: int = 0, offload: bool = False
    ) -> StageMemory:
        stepped = numel if name == NONE else share
        copied_whole = cost.whole and name != NONE  # an owner has a copy of what it steps on
        kept = (cost.state + copied_whole) * stepped * own
        rest = Memory(parameters=parameters, masters=masters, gradients=gradients, optimizer=0 if offload else kept)
        made = cost.foreach * stepped * own if cost.way_on(accelerator) == "foreach" and not offload else 0
        peak = replace(rest, weights=copies) if copies > made else replace(rest, temporaries=made)
        host = _NOWHERE
        if offload:
            weights = share * compute if mixed and parameters == 0 else 0  # what stage 3 is gathered from
            host = replace(_NOWHERE, weights=weights, masters=share * own, gradients=share * own, optimizer=kept)
        sent_nbytes = _sent(sent, world_size)
        return StageMemory(name=name, rest=rest, peak=peak, host=host, disk=_NO_FILES, sent_nbytes=sent_nbytes)

    autocast = mixed and not copied
    beside = own * share if mixed else 0
    stages = [
        stage(
            NONE,
            numel * (own if autocast else compute),
            own * numel if copied else 0,
            reduce,
            2 * reduce,
            copies=gather if autocast else 0,
        ),
        stage("zero1", gather, beside, reduce, gather + reduce),
        stage("zero2", gather, beside, reduced * share, gather + reduce),
        stage("zero3", 0 if autocast else compute * share, beside, reduced * share, 2 * gather + reduce),
    ]
    if not (cost.whole and accelerator):
        stages.append(stage("zero2_offload", gather, 0, 0, gather + reduce, offload=True))
        stages.append(stage("zero3_offload", 0, 0, 0, 2 * gather + reduce, offload=True))
    return stages


def _sent(nbytes: int, world_size: int) -> int:
    """Of collectives over flat buffers of so many bytes, what one rank sends."""
    return nbytes * (world_size - 1) // world_size


_NOWHERE = HostBytes(weights=0, masters=0, gradients=0, optimizer=0, buffers=0)
_NO_FILES = DiskBytes(weights=0, masters=0, optimizer=0)
