"""How long a step keeps links busy, for every way to send what it sends, and the picture of the stages side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_zero.errors import UNITS, readable_size, table
from lightning_zero.extensions.planner.costs import StageMemory
from lightning_zero.extensions.planner.estimate import NONE, ROUNDED_NBYTES, MemoryEstimate, needed, word_of

__all__ = ["Way", "describe_ways", "draw", "fastest_way", "parse_speed", "ways_to_send"]


@dataclass(frozen=True)
class Way:
    """A stage and how it sends: whether memory is enough for it and how much it takes, bytes and seconds of a step.
    ``between`` is the link of a host to the others, ``within`` that of a rank to others of its host. ``host_nbytes`` is
    for all ranks of a host, ``compression`` what gradients are rounded to, seconds 0 where no speed is known."""

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
        shards += " with secondary_shards" * self.secondary_shards
        return f"{self.stage}{shards}" + (f" in {self.compression}" if self.compression else "")


def ways_to_send(
    estimates: Sequence[MemoryEstimate], memory: Mapping[str, Any] | None, speeds: Sequence[float | None]
) -> list[Way]:
    """Of all stages, from what changes least to what changes most. ``estimates``: first a plain one, then those with
    shard groups and with secondary shards. ``memory``: arguments of ``recommend``; ``None``: everything fits.
    ``speeds``: between hosts and within them, bytes a second, each way."""
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
    rows: list[Sequence[str]] = [("a step on the links", "leaves a node", "in", "sent within", "in", "at peak", "fits")]
    for way in ways:
        links = ((way.between_nbytes, way.between_seconds), (way.within_nbytes, way.within_seconds))
        cells = [text for nbytes, time in links for text in (readable_size(nbytes), f"{time:,.3f} s" if time else "-")]
        rows.append((str(way), *cells, readable_size(way.peak_nbytes), "yes" if way.fits else "no"))
    best, rounded, advice = fastest_way(ways), fastest_way(ways, rounded=True), "nothing, as nothing fits."
    if best and rounded:
        advice = f"{best}, {_costs(best)}."
        least = min((way for way in ways if way.fits), key=lambda way: way.peak_nbytes)
        if least.peak_nbytes < best.peak_nbytes:
            advice += f" Of what fits {least} takes least memory: {_costs(least)}."
        if rounded.compression:
            advice += f" With Compression, which rounds: {rounded}, {_costs(rounded)}."
    said = "Seconds add up, and what overlaps with computation is not subtracted."
    return "\n".join([*table(rows), "", said, "", f"Fastest by the links: {advice}"])


def _costs(way: Way) -> str:
    links = {"between nodes": way.between_seconds, "within": way.within_seconds}
    seconds = " and ".join(f"{time:,.3f} s {link}" for link, time in links.items() if time)
    text = f"{seconds or '0 s'} in a step, {readable_size(way.peak_nbytes)} at peak"
    return text + f" and {readable_size(way.host_nbytes)} of a node" * bool(way.host_nbytes)


def parse_speed(text: str) -> float:
    """Bytes a second of ``"10Gbit/s"``, ``"10Gb/s"``, ``"10Gbps"`` or ``"1.25GB/s"`` (units of 1000), or ValueError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(bit|b|B)(?:/s|ps)?", text)
    if matched is None or not float(matched[1]):
        raise ValueError(f"a speed like '10Gbit/s' or '1.25GB/s' is needed, got {text!r}")
    return float(matched[1]) * 1000.0 ** " KMGT".index(matched[2].upper() or " ") / (1 if matched[3] == "B" else 8)


def draw(stages: Mapping[str, StageMemory], path: str, at: str, line: int | None = None) -> None:
    """Draw a bar for each stage's peak, and a line at ``line`` bytes. ValueError of unknown formats; ImportError."""
    make = needed("matplotlib.figure", "--plot", "'lightning-zero[plot]'").Figure
    axes = (figure := make((9, 2.0 + 0.4 * len(stages)), layout="constrained")).subplots()
    most, left = max(line or 0, *(stage.peak.total for stage in stages.values())), [0.0] * len(stages)
    scale = 1000 ** UNITS.index(unit := readable_size(most).split()[1])
    for category, _ in next(iter(stages.values())).peak.items():
        sizes = [getattr(stage.peak, category) / scale for stage in stages.values()]
        if any(sizes):
            axes.barh(list(stages), sizes, left=left, label=word_of(category), height=0.7)
            left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    if line is not None:
        axes.axvline(line / scale, color="black", linestyle="--", label=f"{readable_size(line)} of a device")
    for end, (name, stage) in zip(left, stages.items(), strict=True):
        beside: Any = {"textcoords": "offset points", "va": "center", "bbox": {"fc": "white", "ec": "none", "pad": 1}}
        axes.annotate(readable_size(stage.peak.total), (end, name), (4, 0), **beside)
    axes.set(title=f"What a rank holds {at}", xlabel=unit, xlim=(0, 1.15 * most / scale))
    axes.invert_yaxis()
    figure.legend(handles=[*axes.containers, *axes.lines], loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.lower().endswith("svg") else None)
