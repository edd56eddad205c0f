"""An estimate as a table, and the stage that fits: what to choose, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_zero.plan.report import table_lines

if TYPE_CHECKING:
    from lightning_zero.plan.estimate import MemoryEstimate, StageMemory

__all__ = ["Recommendation", "compare", "format_decimal", "recommend"]


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


def recommend(
    estimate: MemoryEstimate, device_nbytes: int, host_nbytes: int | None, activations_nbytes: int
) -> Recommendation:
    """See ``MemoryEstimate.recommend``."""
    if min(device_nbytes, activations_nbytes, host_nbytes or 0) < 0:
        raise ValueError("Sizes of memory must not be negative.")
    stages = list(estimate.stages.values())
    room = device_nbytes - activations_nbytes
    problems = {stage.name: _problem(stage, room, host_nbytes) for stage in stages}
    fits = tuple(name for name, problem in problems.items() if not problem)
    beside = f" beside {format_decimal(activations_nbytes)} of activations" if activations_nbytes else ""
    device_text = format_decimal(device_nbytes)
    device = f"{device_text}{beside}"
    without = "" if activations_nbytes else " for activations"
    more = "" if estimate.counted else " Slots and buckets, which a number of parameters does not tell, come on top."
    if room < 0:
        return Recommendation(
            name=None,
            reason=f"{format_decimal(activations_nbytes)} of activations do not fit into {device_text}.",
            fits=(),
        )
    if not fits:
        return Recommendation(
            name=None,
            reason=(
                f"Nothing fits into {device}: {'; '.join(problems.values())}.{more} Use more processes or larger "
                "devices, or lightning_zero.NvmeOffload where it is host memory that is missing."
            ),
            fits=(),
        )
    chosen = estimate.stages[fits[0]]
    left = room - chosen.peak.total
    reason = (
        f"{chosen.name} needs {format_decimal(chosen.peak.total)} at peak, which fits into {device} and leaves "
        f"{format_decimal(left)}{without}.{more}"
    )
    before = [problems[stage.name] for stage in stages[: stages.index(chosen)]]
    reason += f" Less would not do: {'; '.join(before)}." if before else " There is no need to split anything."
    return Recommendation(name=chosen.name, reason=reason, fits=fits)


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


def compare(estimate: MemoryEstimate, *, offload: bool = False) -> str:
    """See ``MemoryEstimate.describe``."""
    stages = [stage for stage in estimate.stages.values() if offload or not stage.name.endswith("_offload")]
    if not stages[1:]:
        stages = list(estimate.stages.values())
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
    processes = "1 process" if estimate.world_size == 1 else f"{estimate.world_size:,} processes"
    lines = [f"{estimate.numel:,} parameters, {estimate.optimizer.name}, {processes}", "", *table_lines(shown, left=1)]
    if not estimate.counted:
        lines += ["", "From a number of parameters: slots and buckets, which depend on the model's parts, come on top."]
    return "\n".join(lines)


def _row(name: str, values: list[int]) -> tuple[str, ...]:
    return (name, *(format_decimal(value) if value else "-" for value in values))


def format_decimal(nbytes: int) -> str:
    """Bytes for people, in units of 1000 with three digits, as papers and data sheets have them: ``"31.4 GB"``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{_three_digits(size)} {unit}"
        size /= 1000
    return f"{_three_digits(size)} PB"


def _three_digits(size: float) -> str:
    if size == int(size) or size >= 99.95:
        return f"{size:,.0f}"
    return f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
