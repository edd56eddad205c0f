"""Stored names and the module's names for the same tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info

__all__ = ["some", "under_own_names"]

# torch.compile, activation checkpointing and FSDP wrap a block in a module of this attribute; names in a checkpoint do
# not depend on whether a block is wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_NAMED = 4  # how many a message spells out


def under_own_names(
    stored: Mapping[str, Any], own: Collection[str], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under the module's names, if they differ in wrapped blocks or one common prefix only.

    Args:
        stored: by stored name.
        own: the module's names.
        path: where they are stored, for a message when a prefix made the difference.
        strict: whether that prefix has to make all names fit, and not just most.
    """
    names = {_unwrapped(name): name for name in own}
    change = _prefix_change([_unwrapped(name) for name in stored], names, strict)
    if change is not None:
        done = f"with '{change.add}' put before them" if change.add else f"without their prefix '{change.cut}'"
        rank_zero_info(f"The names in '{os.fspath(path)}' are the module's {done}: loading them under those.")
    found = {}
    for name, value in stored.items():
        plain = _unwrapped(name) if change is None else change.apply(_unwrapped(name))
        found[names.get(plain, name)] = value
    return found


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class _Change(NamedTuple):
    """What makes a stored name one of the module's."""

    cut: str
    add: str

    def apply(self, name: str) -> str:
        """The module's name."""
        return self.add + name.removeprefix(self.cut)


def _prefix_change(stored: Collection[str], own: Collection[str], strict: bool) -> _Change | None:
    """The one prefix that has to be put before all stored names, or cut off, to make them the module's.

    ``None`` if a name fits as it is, if no prefix makes all fit (without ``strict``: more than half), or if several
    do equally well.
    """
    if any(name in own for name in stored):
        return None
    longer: dict[str, list[str]] = {}
    for name in own:
        for rest in _rests(name):
            longer.setdefault(rest, []).append(name[: -len(rest)])
    counts: Counter[_Change] = Counter()
    for name in stored:
        counts.update(_Change("", prefix) for prefix in longer.get(name, ()))
        counts.update(_Change(name[: -len(rest)], "") for rest in _rests(name) if rest in own)
    best = counts.most_common(2)
    enough = len(stored) if strict else len(stored) // 2 + 1
    if not best or best[0][1] < enough or (len(best) > 1 and best[1][1] == best[0][1]):
        return None
    return best[0][0]


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def some(names: Iterable[str]) -> str:
    """A few names, and how many there are beyond them."""
    every = list(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more
