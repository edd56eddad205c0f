"""A plan and a comparison of stages as tables and pictures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from lightning_zero.config import Tier
from lightning_zero.errors import UNITS, readable_size, table
from lightning_zero.plan import FlatLayout, Plan, UnitPlan
from lightning_zero.plan.costs import (
    DiskBytes,
    HostBytes,
    Memory,
    OptimizerCost,
    StageMemory,
    Traffic,
    expected_traffic,
    stage_memory,
)

__all__ = ["describe_plan", "draw", "plan_numbers", "word_of"]

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


def describe_plan(plan: Plan, *, optimizer: OptimizerCost, accelerator: bool, micro_steps: int) -> str:
    """What ``ZeroPlan.describe`` says: units, totals, traffic and memory."""
    placement, offload = plan.placement, plan.offload
    lines = [
        f"Plan for {plan.world_size} ranks: parameters {placement.parameters.value}, gradients "
        f"{placement.gradients.value}, optimizer {placement.optimizer.value}; prefetch {plan.prefetch}"
        + (f"; shard groups of {plan.group_size}" if plan.group_size != plan.world_size else "")
    ]
    if offload is not None:
        what = " and ".join(name for name in ("optimizer", "parameters") if getattr(offload, name))
        lines.append(f"Offloaded to the {offload.tier.value}: {what}")
    traffic = expected_traffic(plan, micro_steps=micro_steps)
    tables = (_unit_rows(plan), _traffic_rows(traffic), _memory_rows(plan, optimizer, accelerator))
    return "\n\n".join("\n".join(block) for block in (lines, *map(table, tables)))


def plan_numbers(plan: Plan, micro_steps: int) -> dict[str, Any]:
    """The units and the traffic of a step, for programs."""
    units = [
        {"name": unit.name, "numel": sum(spec.numel for spec in unit.parameters), "slot": unit.slot}
        for unit in plan.units
    ]
    traffic = expected_traffic(plan, micro_steps=micro_steps)
    return {"prefetch": plan.prefetch, "units": units, "traffic": asdict(traffic)}


# --------------------------------------------------------------------------------------------------------------- tables


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("unit", "parameters", "elements", "frozen", "shard", "padding", "slot", "dtype"),
    ]
    alike: dict[tuple[object, ...], list[UnitPlan]] = {}
    for unit in plan.units:
        alike.setdefault(_likeness(unit), []).append(unit)
    for units in alike.values():
        first, last = units[0], units[-1]
        name = first.name or "(root)"
        if len(units) > 1:
            name = f"{name} … {_difference(first.name, last.name)} ({len(units)} alike)"
        name = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
        slots = sorted({unit.slot for unit in units if unit.slot is not None})
        slot = "-".join(str(slot) for slot in dict.fromkeys(slots[:1] + slots[-1:])) or "-"
        dtypes = ", ".join(dict.fromkeys(map(_dtype_text, first.layouts))) or "-"
        rows.append(("  " * first.depth + name, *_sizes(first.layouts), slot, dtypes))
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


def _dtype_text(layout: FlatLayout) -> str:
    return " as ".join(
        dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (layout.dtype, layout.compute_dtype))
    )


def _likeness(unit: UnitPlan) -> tuple[object, ...]:
    layouts = tuple(
        (tuple(spec.shape for spec in layout.parameters), layout.dtype, layout.compute_dtype, layout.trainable)
        for layout in unit.layouts
    )
    return re.sub(r"\d+", "#", unit.name), unit.depth, layouts


def _difference(first: str, last: str) -> str:
    """The part of ``last`` from the dotted part on in which it differs: ("model.0.a", "model.7.a") gives ".7.a"."""
    pairs = zip(first.split("."), last.split("."), strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return "." * (same > 0) + ".".join(last.split(".")[same:])


def _traffic_rows(traffic: Traffic) -> list[tuple[str, ...]]:
    parts = {"all-gather": traffic.all_gather, "reduce-scatter": traffic.reduce_scatter}
    if traffic.all_reduce.calls:
        parts["all-reduce across groups"] = traffic.all_reduce
    if traffic.broadcast.calls:
        parts["broadcast of buffers"] = traffic.broadcast
    return [
        ("traffic of a step", "calls", "elements", "size"),
        *(
            (kind, f"{part.calls:,}", f"{part.numel:,}", readable_size(part.nbytes))
            for kind, part in {**parts, "total": traffic.total}.items()
        ),
    ]


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
    return [
        (f"memory of rank 0, {optimizer.name}", *places),
        *(
            (
                category.replace("_", " "),
                *(readable_size(column[category]) if category in column else "-" for column in columns),
            )
            for category in categories
        ),
        ("total without activations", *(readable_size(memory.total) for memory in places.values())),
    ]


def word_of(category: str) -> str:
    """What people call a category of memory."""
    return _WORDS.get(category, category.replace("_", " "))


def draw(stages: Mapping[str, StageMemory], path: str, title: str, line: int | None = None) -> None:
    """Write a picture, ``.png`` or ``.svg``: for each stage a bar of what a rank's device holds at the peak, and a line
    at so many bytes. Raises ValueError for what matplotlib cannot write, ImportError without it."""
    try:
        figure: Any = importlib.import_module("matplotlib.figure").Figure(
            (9, 1.6 + 0.4 * len(stages)), layout="constrained"
        )
        colors: Any = importlib.import_module("matplotlib").colormaps["tab20"].colors
    except ImportError as error:
        raise ImportError(f"A picture needs matplotlib ({error}): pip install 'lightning-zero[plot]'.") from error
    most = max(line or 0, *(stage.peak.total for stage in stages.values()))
    unit = readable_size(most).split()[1]
    scale = 1000 ** UNITS.index(unit)
    axes, left = figure.subplots(), [0.0] * len(stages)
    for color, (category, _) in zip(colors, next(iter(stages.values())).peak.items(), strict=False):
        sizes = [getattr(stage.peak, category) / scale for stage in stages.values()]
        if any(sizes):
            axes.barh(list(stages), sizes, left=left, label=word_of(category), height=0.7, color=color)
            left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    if line is not None:
        axes.axvline(line / scale, color="black", linestyle="--", label=f"{readable_size(line)} of a device")
    for end, (name, stage) in zip(left, stages.items(), strict=True):
        axes.annotate(readable_size(stage.peak.total), (end, name), (4, 0), textcoords="offset points", va="center")
    axes.set(xlabel=f"{unit} of one process, {title}", xlim=(0, 1.15 * most / scale))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.lower().endswith("svg") else None)
