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

Two ranks with different data play every line under DDP and in `zero1`, `zero2` and `zero3`, and one rank alone too.
Tests compare losses, weights, what was logged and restored, and the order of calls. `python -m tests.features --page`
writes this page.

## The same as DDP, bit for bit, in every stage
"""
_DIFFERENT = """## Different

A number is the largest relative difference. "Refused" is an error on every rank.

| feature | `zero1` | `zero2` | `zero3` | |
| --- | --- | --- | --- | --- |
"""


def text() -> str:
    """The page."""
    parts, rows = [_HEAD], []
    for title, features in TABLES.items():
        same = [one.name for one in features if not one.bounds and not one.refused and not one.remark]
        if same:
            parts.append(f"- **{title}**: {'; '.join(same)}.")
        for one in features:
            if one.name not in same:
                verdicts = " | ".join(one.verdict(stage) for stage in (1, 2, 3))
                rows.append(f"| {one.name} | {verdicts} | {one.remark} |\n")
    return "\n".join([*parts, "", _DIFFERENT]) + "".join(rows)
