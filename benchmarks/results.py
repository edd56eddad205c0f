"""What a benchmark leaves behind: where and how it was run, its numbers as JSON, and a plot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"
WIDTH = 8.3  # inches of a picture, 800 pixels
INK = "#1f2328"
_COLOURS = (("#4c8fc0", "#a9cbe6"), ("#e6550d", "#fdae6b"))  # (dark, light) of the others and of ours
_PACKAGES = ("torch", "lightning", "lightning-zero", "deepspeed")


def circumstances() -> dict[str, Any]:
    """Hardware, versions, date and command of this run."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": _line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(available("MemTotal") / 2**30),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def headline(found: dict[str, Any]) -> str:
    """One line of it, for above a table."""
    versions = ", ".join(f"{package} {found[package]}" for package in _PACKAGES if package in found)
    machine = f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB"
    return f"{machine}; Python {found['python']}, {versions}; {found['date']}"


def available(name: str = "MemAvailable") -> int:
    """Bytes of this machine's memory."""
    line = _line("/proc/meminfo", name)
    return int(line.split()[0]) * 1024 if line else 2**33


def save(path: Path, cases: list[dict[str, Any]], key: tuple[str, ...]) -> list[dict[str, Any]]:
    """Write cases as JSON. What earlier runs have found stays, unless it was measured again.

    A case agrees with one of an earlier run in everything of ``key``; if both have ``engines``, the earlier one's rows
    of other engines stay, each with the ``run`` that it is from.

    Returns:
        All cases that the file has now.
    """
    old = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []
    found = {tuple(case[name] for name in key): case for case in old}
    for case in cases:
        which = tuple(case[name] for name in key)
        earlier = found.get(which, {})
        stay = {
            name: {**row, "run": row.get("run", earlier["run"])}
            for name, row in earlier.get("engines", {}).items()
            if name not in case["engines"]
        }
        found[which] = {**case, "engines": {**stay, **case["engines"]}} if stay else case
    cases = sorted(
        found.values(),
        key=lambda case: [case[name] if isinstance(case[name], int) else str(case[name]) for name in key],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)  # a run may be interrupted here
    return cases


def load(path: Path) -> list[dict[str, Any]]:
    """The cases that were saved there."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return found


@dataclass
class Bar:
    """One row of a picture: a label, a length and the text beside it.

    Attributes:
        label: the name of the row, left of the bar.
        length: of the bar.
        text: right of all bars.
        dark: how much of the beginning has the darker colour.
        span: the smallest and the largest value of several rounds, drawn as a thin line.
        ours: whether the row has lightning-zero's colour.
    """

    label: str
    length: float
    text: str
    dark: float = 0.0
    span: tuple[float, float] | None = None
    ours: bool = False


def bars(
    path: Path, title: str, unit: str, rows: list[Bar], line: float | None = None, shades: tuple[str, str] | None = None
) -> None:
    """One field of bars, the longest at the bottom, ours in another colour, and nothing without matplotlib.

    Args:
        path: of the SVG.
        title: what the picture shows.
        unit: of the lengths, below the axis.
        rows: the bars.
        line: where a line crosses all of them.
        shades: what the dark and the light part of a bar stand for.
    """
    drawn = figure(1, 1, (WIDTH, 1.3 + 0.3 * len(rows) + 0.3 * bool(shades)))
    if drawn is None:
        return
    picture, ((field,),) = drawn
    rows = sorted(rows, key=lambda row: -row.length)
    labels = [row.label for row in rows]
    for shaded in (False, True):
        lengths = [row.dark if shaded else row.length for row in rows]
        colours = [_COLOURS[row.ours][bool(row.dark) and not shaded] for row in rows]
        field.barh(labels, lengths, color=colours, height=0.7)
    for place, row in enumerate(rows):
        if row.span is not None:
            field.plot(row.span, (place, place), color=INK, linewidth=1.2, marker="|", markersize=6)
    if line is not None:
        field.axvline(line, color=INK, linewidth=0.8, linestyle="--")
    most = max(max(row.length, *(row.span or ())) if row.span else row.length for row in rows)
    column = any(row.span for row in rows)  # where lines would cross texts beside the bars
    for place, row in enumerate(rows):
        field.annotate(
            row.text, (most if column else row.length, place), (6, 0), textcoords="offset points", va="center"
        )
    field.set_xlim(0, most * (1.05 + 0.014 * max(len(row.text) for row in rows)))
    field.set_xticks([tick for tick in field.get_xticks() if 0 <= tick <= most])
    field.set_xlabel(unit, loc="left")
    field.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        field.spines[side].set_visible(False)
    for label, row in zip(field.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.ours else "normal")
    picture.suptitle(title, x=0.01, ha="left")
    if shades:
        from matplotlib.patches import Patch

        names = ("others", "lightning-zero")
        handles = [
            Patch(color=_COLOURS[ours][light], label=f"{names[ours]}, {shade}")
            for ours in (True, False)
            for light, shade in enumerate(shades)
        ]
        picture.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
    save_figure(picture, path)


def figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    """A matplotlib figure and its axes in an array of two dimensions, or None and a line about what is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot: matplotlib is not installed (pip install -e ".[benchmarks]")')
        return None
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "lightning_zero", "font.size": 10})
    parts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update(dict.fromkeys(parts, INK))
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save_figure(drawn: Any, path: Path) -> None:
    """As SVG, without the moment at which it was made, for light and dark pages."""
    drawn.savefig(path, metadata={"Date": None})
    path.write_text(follow_scheme(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {path}")


def follow_scheme(svg: str) -> str:
    """A picture of matplotlib's that turns its paper dark and its ink light where the reader's scheme is dark."""
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for kind in ("fill", "stroke")
        for light, dark in (("#ffffff", "#0d1117"), (INK, "#e6edf3"))
    ]
    style = "<style>@media (prefers-color-scheme: dark){svg{fill:#e6edf3}" + "".join(rules) + "}</style>\n"
    if style in svg:
        return svg
    svg = svg.replace("#000000", INK).replace("</metadata>\n", "</metadata>\n " + style, 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _line(path: str, name: str) -> str:
    if not Path(path).exists():
        return ""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return ""
