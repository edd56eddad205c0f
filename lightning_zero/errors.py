"""The few exceptions a caller may want to catch, and how messages and reports show names, numbers and tables.

Everything else is ``ValueError`` (settings) or ``RuntimeError`` (order).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "DivergenceError",
    "ExtensionError",
    "MaterialiseError",
    "OffloadError",
    "ParameterAccessError",
    "UNITS",
    "UnsupportedOptimizerError",
    "ZeroError",
    "add_note",
    "changed",
    "columns",
    "point_to_page",
    "readable_size",
    "shortened",
    "some",
    "table",
    "with_notes",
]

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_CELL_LETTERS = 400  # a column is as wide as its longest cell
_MAX_TEXT = 4000
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_PAGE = "https://github.com/lightning-zero/lightning-zero/blob/main/docs/troubleshooting.md"


def some(names: Iterable[object], limit: int = 4) -> str:
    """The first ``limit`` names, and how many there are beyond them."""
    every = [str(name) for name in names]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """A text without its middle, if it has more letters than that."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} [... {len(text) - limit} letters ...] {text[len(text) - limit // 3 :]}"


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


def changed(now: str) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function that took other arguments in an earlier version: the error of such a call says what to do."""

    def decorate(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ and error.__traceback__.tb_next:  # raised inside of the function
                    raise
                raise TypeError(f"{error}. {now}") from None

        return call  # type: ignore[return-value]

    return decorate


def point_to_page(error: BaseException, kind: type[ZeroError]) -> None:
    """Have an error's traceback end with the address of what troubleshooting says about a class of errors."""
    if sys.version_info >= (3, 11):
        documented = next(
            base.__name__ for base in kind.__mro__ if base.__module__ == __name__
        )  # a user may derive one
        error.add_note(f"See {_PAGE}" + (f"#{documented.lower()}" if documented != "ZeroError" else ""))


def add_note(error: BaseException, text: str) -> None:
    """Have a traceback of an error end with a text; where no traceback is shown, or has notes, it is a warning."""
    if sys.version_info >= (3, 11) and not isinstance(error, KeyboardInterrupt):
        error.add_note(text)
    else:
        warnings.warn(text, stacklevel=2)


def with_notes(error: BaseException) -> str:
    """An error's message and, each in a line of its own, its notes: what a traceback ends with."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class ZeroError(RuntimeError):
    """Base class of this package's errors.

    A traceback ends with the address of the class's section in docs/troubleshooting.md. That line is a note, not part
    of the message, so that it appears once, however many messages quote this one on however many ranks. Python 3.10
    has no notes.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        point_to_page(self, type(self))


class DivergenceError(ZeroError):
    """The ranks no longer run the same program.

    Cause: ranks have different models, optimizers or optimizer options, batch counts or orders of backward and
    optimizer steps, or one rank skipped a step. Raised on every rank that took part in the check, before weights are
    updated with mixed data.

    Fix: the message names the ranks and what each of them was doing; make that code independent of the rank.
    """


class CommunicationError(ZeroError):
    """A collective did not complete: a peer died, was killed, or did not arrive within the process group's timeout.

    Cause: almost always an error on *another* rank, whose own log says more.

    Fix: read the log of the rank that failed first; the checkpoint saved last is intact.
    """


class ParameterAccessError(ZeroError):
    """A sharded parameter was read or changed while it was not gathered.

    Cause: the parameter was used outside the forward of the unit that owns it.

    Fix: ``with lightning_zero.full_parameters(module): ...`` on every rank, or make the module that reads it a unit.
    """


class UnsupportedOptimizerError(ZeroError):
    """The optimizer would compute a different result on shards than on full parameters.

    Cause: it combines all parameters in one computation, or needs sparse gradients (SparseAdam).

    Fix: the message names an alternative.
    """


class MaterialiseError(ZeroError):
    """A module on the meta device has tensors without initial values.

    Cause: their class has no ``reset_parameters``, or initialises them in its constructor.

    Fix: write ``reset_parameters`` or ``_init_weights``, load the weights from a file, or build it on the CPU.
    """


class CheckpointError(ZeroError):
    """A checkpoint could not be written completely, or the files on disk are not a complete checkpoint.

    Cause: a full disk, a missing permission, a damaged or foreign file: the message names file, rank and reason.

    Fix: resume from the previous checkpoint, which is intact.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))  # it may quote what a damaged file holds


class OffloadError(ZeroError):
    """Offloaded data could not be read, written or updated on the host or on disk.

    Cause: a full disk, an input/output error: the message names rank, file and reason.
    Raised on every rank, before half-updated weights are used.

    Fix: remove the cause and resume from the last checkpoint, which is intact.
    """


class ExtensionError(ZeroError):
    """A part of the package was asked for that this copy does not have.

    Cause: a folder or file of ``lightning_zero/extensions/`` was deleted.

    Fix: install the package whole, or leave out the setting that the message names.
    """
