"""The page of features, made of the tables that the tests play."""

from __future__ import annotations

from tests.thorough.features import callbacks, checkpoints, loops, optimization
from tests.thorough.features.feature import Feature

__all__ = ["TABLES", "text"]

TABLES: dict[str, list[Feature]] = {
    **loops.FEATURES,
    **optimization.FEATURES,
    **checkpoints.FEATURES,
    **callbacks.FEATURES,
}

_HEAD = """# Features of Lightning

Two ranks with different data play every line under DDP and in `zero1`, `zero2` and `zero3`, and one rank alone. Tests
compare losses, weights, what was logged and restored, and the order of calls.

## The same as DDP, bit for bit, in every stage
"""
_DIFFERENT = """## Different

A number is the largest relative difference. "Refused" is an error on every rank.

| feature | `zero1` | `zero2` | `zero3` | |
| --- | --- | --- | --- | --- |
"""


def text() -> str:
    """The page. Features that differ in the same way, for the same reason, share a row."""
    parts, rows = [_HEAD], dict[tuple[str, str], list[str]]()
    for title, features in TABLES.items():
        same = [one for one in features if not one.bounds and not one.refused]
        if same:
            parts.append(f"- **{title}**: {'; '.join(map(_with_remark, same))}.")
        for one in features:
            if one not in same:
                verdicts = " | ".join(one.verdict(stage) for stage in (1, 2, 3))
                rows.setdefault((verdicts, one.remark), []).append(one.name)
    table = "".join(f"| {'; '.join(names)} | {' | '.join(row)} |\n" for row, names in rows.items())
    return "\n".join([*parts, "", _DIFFERENT]) + table


def _with_remark(feature: Feature) -> str:
    return feature.name + (f" ({feature.remark})" if feature.remark else "")
