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
    """One row of a picture: a label, a length and what is written behind it; ``dark`` is drawn over its beginning."""

    label: str
    length: float
    text: str
    dark: float = 0.0
    ours: bool = False


def bars(path: Path, title: str, rows: list[Bar], line: float | None = None) -> None:
    """One field of bars, the longest at the bottom, ours in another colour, and nothing without matplotlib.

    Args:
        path: of the SVG.
        title: what is to be seen.
        rows: the bars.
        line: where a line goes across all of them.
    """
    drawn = figure(1, 1, (8.5, 1.1 + 0.34 * len(rows)))
    if drawn is None:
        return
    picture, ((field,),) = drawn
    rows = sorted(rows, key=lambda row: -row.length)
    light = [
        ("#fdae6b" if row.ours else "#c6dbef") if row.dark else ("#e6550d" if row.ours else "#6baed6") for row in rows
    ]
    found = field.barh([row.label for row in rows], [row.length for row in rows], color=light, height=0.7)
    field.barh(
        [row.label for row in rows],
        [row.dark for row in rows],
        color=["#e6550d" if row.ours else "#6baed6" for row in rows],
        height=0.7,
    )
    texts = field.bar_label(found, [row.text for row in rows], padding=4)
    for text in texts:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the line
    if line is not None:
        field.axvline(line, color="black", linewidth=0.8)
    field.set_xlim(0, 1.15 * max(row.length for row in rows))
    for side in ("top", "right"):
        field.spines[side].set_visible(False)
    for label, row in zip(field.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.ours else "normal")
    picture.suptitle(title, x=0.01, ha="left")
    save_figure(picture, path)


def figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    """A matplotlib figure and its axes in an array of two dimensions, or None and a line about what is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot: matplotlib is not installed (pip install -e ".[benchmarks]")')
        return None
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "lightning_zero", "font.size": 10})
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save_figure(drawn: Any, path: Path) -> None:
    """As SVG, without the moment at which it was made."""
    drawn.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def _line(path: str, name: str) -> str:
    if not Path(path).exists():
        return ""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return ""
