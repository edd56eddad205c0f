"""A plan as text: canonical lines for machines to compare, a table for people to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_zero.config import Tier

if TYPE_CHECKING:
    from lightning_zero.config import Offload
    from lightning_zero.plan.memory import DiskBytes, HostBytes, Memory
    from lightning_zero.plan.optimizers import OptimizerCost
    from lightning_zero.plan.plan import ZeroPlan
    from lightning_zero.plan.unit_plan import UnitPlan

LONGEST_NAME = 48
"""Characters of a unit's name that the table shows."""

LONGEST_PATTERN = 16
"""Units of the longest repeating pattern that the table looks for."""


def summary_lines(plan: ZeroPlan) -> tuple[str, ...]:
    """See ``ZeroPlan.summary_lines``."""
    return tuple(_summary(plan))


def _summary(plan: ZeroPlan) -> Iterator[str]:
    placement = plan.placement
    yield (
        f"plan: world size {plan.world_size}, parameters {placement.parameters.value}, "
        f"gradients {placement.gradients.value}, optimizer {placement.optimizer.value}, "
        f"prefetch {plan.prefetch}, root {plan.root}, offload {_offload_text(plan.offload)}"
    )
    for unit in plan.units:
        yield (
            f"unit {unit.index}: {unit.name!r}, module {unit.module!r}, depth {unit.depth}, "
            f"ancestors {unit.ancestors}, slot {unit.slot}, gradient slot {unit.gradient_slot}"
        )
        for number, layout in enumerate(unit.layouts):
            yield (
                f"unit {unit.index} layout {number}: {layout.numel} elements, {layout.dtype}, computed in "
                f"{layout.compute_dtype}, reduced in {layout.reduce_dtype}, trainable {layout.trainable}"
            )
            for spec, offset in zip(layout.parameters, layout.offsets, strict=True):
                yield (
                    f"parameter {spec.name!r}: aliases {spec.aliases}, shape {spec.shape}, {spec.dtype}, "
                    f"trainable {spec.trainable}, unit {unit.index} layout {number} offset {offset}"
                )
    for kind, slots in (("slot", plan.slots), ("gradient slot", plan.gradient_slots)):
        for slot in slots:
            yield f"{kind} {slot.index}: {slot.nbytes} bytes"


def _offload_text(offload: Offload | None) -> str:
    """What ranks must agree on: not paths and sizes of buffers, which are a machine's own matter."""
    if offload is None:
        return "none"
    return f"{offload.tier.value} (optimizer {offload.optimizer}, parameters {offload.parameters})"


def describe(plan: ZeroPlan, optimizer: OptimizerCost, accelerator: bool) -> str:
    """See ``ZeroPlan.describe``."""
    placement = plan.placement
    lines = [
        f"Plan for {plan.world_size} ranks: parameters {placement.parameters.value}, gradients "
        f"{placement.gradients.value}, optimizer {placement.optimizer.value}; prefetch {plan.prefetch}",
        *([] if plan.offload is None else [f"Offloaded to the {plan.offload.tier.value}: {_offloaded(plan.offload)}"]),
        "",
        *table_lines([_HEADER, *(_row(run) for run in _runs(plan.units)), _total_row(plan)], left=1),
        "",
    ]
    traffic = plan.expected_traffic()
    lines += table_lines(
        [
            ("traffic of a step", "calls", "elements", "size"),
            *(
                (kind, f"{part.calls:,}", f"{part.numel:,}", format_nbytes(part.nbytes))
                for kind, part in (
                    ("all-gather", traffic.all_gather),
                    ("reduce-scatter", traffic.reduce_scatter),
                    ("broadcast of buffers", traffic.broadcast),
                    ("total", traffic.total),
                )
                if part.calls or kind != "broadcast of buffers"
            ),
        ],
        left=1,
    )
    lines += ["", *table_lines(_memory_rows(plan, optimizer, accelerator), left=1)]
    return "\n".join(lines)


def _offloaded(offload: Offload) -> str:
    return " and ".join(name for name in ("optimizer", "parameters") if getattr(offload, name))


def _memory_rows(plan: ZeroPlan, optimizer: OptimizerCost, accelerator: bool) -> list[tuple[str, ...]]:
    """A column for each place where something may be: with a transport that keeps no receive buffer."""
    rest, peak = (
        plan.expected_memory(optimizer=optimizer, accelerator=accelerator, receive_buffer=False, peak=peak)
        for peak in (False, True)
    )
    places: dict[str, Memory | HostBytes | DiskBytes] = {"at rest": rest}
    if plan.offload is not None:
        host = plan.expected_host_memory(optimizer_tensors=optimizer.state, accelerator=accelerator)
        places = {"device": rest, "host": host}
        if plan.offload.tier is Tier.DISK:
            places["disk"] = plan.expected_disk(optimizer_tensors=optimizer.state)
    places["device at peak" if plan.offload is not None else "at peak"] = peak
    columns = [dict(memory.items()) for memory in places.values()]
    categories = dict.fromkeys(category for column in columns for category, nbytes in column.items() if nbytes)
    return [
        (f"memory of rank 0, {optimizer.name}", *places),
        *(
            (
                category.replace("_", " "),
                *(format_nbytes(column[category]) if category in column else "-" for column in columns),
            )
            for category in categories
        ),
        ("total without activations", *(format_nbytes(memory.total) for memory in places.values())),
    ]


def format_nbytes(nbytes: int) -> str:
    """Bytes for people, in binary units with three or four digits: ``"1.50 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


_HEADER = ("unit", "parameters", "elements", "frozen", "shard", "padding", "slot", "dtype")


def _runs(units: Sequence[UnitPlan]) -> list[list[UnitPlan]]:
    """Units in rows of the table: alike units whose pattern repeats share rows.

    The pattern may be several units long: the buckets of a deep model repeat with the period of a block.
    """
    kinds: dict[tuple[object, ...], int] = {}
    likeness = [kinds.setdefault(_likeness(unit), len(kinds)) for unit in units]
    rows: list[list[UnitPlan]] = []
    start = 0
    while start < len(units):
        period, times = max(
            ((period, _repetitions(likeness, start, period)) for period in range(1, LONGEST_PATTERN + 1)),
            key=lambda pattern: (pattern[1] > 1) * pattern[0] * pattern[1],
        )
        end = start + period * times
        rows.extend(list(units[start + offset : end : period]) for offset in range(period))
        start = end
    return rows


def _repetitions(kinds: Sequence[int], start: int, period: int) -> int:
    """How often the first ``period`` items from ``start`` on occur in a row there."""
    pattern = kinds[start : start + period]
    times = 1
    while kinds[start + times * period : start + (times + 1) * period] == pattern:
        times += 1
    return times


def _likeness(unit: UnitPlan) -> tuple[object, ...]:
    layouts = tuple(
        (tuple(spec.shape for spec in layout.parameters), layout.dtype, layout.compute_dtype, layout.trainable)
        for layout in unit.layouts
    )
    return re.sub(r"\d+", "#", unit.name), unit.depth, layouts


def _row(run: Sequence[UnitPlan]) -> tuple[str, ...]:
    first = run[0]
    padded = sum(layout.numel for layout in first.layouts)
    slots = sorted({unit.slot for unit in run if unit.slot is not None})
    name = first.name or "(root)"
    if len(run) > 1:
        name = f"{name} … {_difference(first.name, run[-1].name)} ({len(run)} alike)"
    return (
        "  " * first.depth + (name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]),
        f"{len(first.parameters):,}",
        f"{first.numel:,}",
        f"{first.numel - first.trainable_numel:,}" if first.numel != first.trainable_numel else "-",
        f"{sum(layout.shard_numel for layout in first.layouts):,}",
        f"{100 * (padded - first.numel) / padded:.2f} %" if padded else "-",
        (str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}") if slots else "-",
        ", ".join(dict.fromkeys(_dtype_text(layout.dtype, layout.compute_dtype) for layout in first.layouts)) or "-",
    )


def _total_row(plan: ZeroPlan) -> tuple[str, ...]:
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    padded = sum(layout.numel for layout in layouts)
    frozen = plan.numel - plan.trainable_numel
    return (
        f"total ({len(plan.units)} units)",
        f"{sum(len(layout.parameters) for layout in layouts):,}",
        f"{plan.numel:,}",
        f"{frozen:,}" if frozen else "-",
        f"{sum(layout.shard_numel for layout in layouts):,}",
        f"{100 * (padded - plan.numel) / padded:.2f} %" if padded else "-",
        str(len(plan.slots)) if plan.slots else "-",
        "",
    )


def _difference(first: str, last: str) -> str:
    """The part of ``last`` from the dotted part on in which it differs: ("model.0.a", "model.7.a") gives ".7.a"."""
    first_parts, last_parts = first.split("."), last.split(".")
    same = 0
    while same < min(len(first_parts), len(last_parts)) and first_parts[same] == last_parts[same]:
        same += 1
    return "." * (same > 0) + ".".join(last_parts[same:])


def _dtype_text(dtype: object, compute_dtype: object) -> str:
    names = dict.fromkeys(str(name).removeprefix("torch.") for name in (dtype, compute_dtype))
    return " as ".join(names)


def table_lines(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Aligned columns: the first ``left`` to the left, the others to the right; a rule under the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
