"""The page of features, made of the tables that the tests play."""

from __future__ import annotations

from tests.features import callbacks, checkpoints, loops, optimization
from tests.features.feature import Feature

__all__ = ["TABLES", "text"]

TABLES: dict[str, list[Feature]] = {
    **loops.FEATURES,
    **optimization.FEATURES,
    **checkpoints.FEATURES,
    **callbacks.FEATURES,
}

_HEAD = """# Features of Lightning

Every line has been played under DDP and in `zero1`, `zero2` and `zero3` by two processes with different data, and by
one (not `zero2`), and what came of it was compared: losses, weights, what was logged and restored, the order of
calls. *As DDP* is bit for bit. A number is the largest relative difference. *Refused* is an error on every process.

The tests behind this page are part of every test run. `python -m tests.features NAME` plays the lines whose names have
that in them, `python -m tests.features --page` writes the page.
"""


def text() -> str:
    """The page."""
    parts = [_HEAD]
    for title, features in TABLES.items():
        parts += [f"## {title}\n", "| feature | `zero1` | `zero2` | `zero3` | |", "| --- | --- | --- | --- | --- |"]
        for feature in features:
            verdicts = " | ".join(feature.verdict(stage) for stage in (1, 2, 3))
            parts.append(f"| {feature.name} | {verdicts} | {feature.remark} |")
        parts.append("")
    return "\n".join(parts)
