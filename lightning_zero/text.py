"""Numbers and tables for people, as all reports have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_zero.errors import shortened

__all__ = ["UNITS", "columns", "readable_size", "table"]

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_CELL_LETTERS = 400  # a column is as wide as its longest cell


def readable_size(nbytes: int) -> str:
    """Bytes in units of 1000 with three digits, as papers and data sheets have them: ``"31.4 GB"``."""
    size = float(nbytes)
    for name in UNITS[:-1]:
        if size < 999.5:
            return f"{_three_digits(size)} {name}"
        size /= 1000
    return f"{_three_digits(size)} {UNITS[-1]}"


def _three_digits(size: float) -> str:
    if size == int(size) or size >= 99.95:
        return f"{size:,.0f}"
    return f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines of aligned columns, those in ``right`` aligned to the right."""
    rows = [[shortened(cell, _CELL_LETTERS) for cell in row] for row in rows]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines with a rule under the header: the first column to the left, the others to the right."""
    lines = columns(rows, right=range(1, len(rows[0])))
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
