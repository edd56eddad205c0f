"""Stored names and the module's names for the same tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

__all__ = ["under_own_names", "unwrapped"]

# torch.compile, activation checkpointing and FSDP wrap a block in a module of this attribute; names in a checkpoint do
# not depend on whether a block is wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


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
    names = {unwrapped(name): name for name in own}
    changes = _prefix_changes([unwrapped(name) for name in stored], names, strict)
    change = changes[0] if len(changes) == 1 else None
    if change is not None:
        rank_zero_info(f"The names in '{os.fspath(path)}' are the module's {change}: loading them under those.")
    elif changes:
        rank_zero_warn(
            f"The names in '{os.fspath(path)}' are the module's {' and also '.join(map(str, changes))}: which of them "
            "is meant is not known, so that they are left as they are. Save the weights under the module's names."
        )
    found = {}
    for name, value in stored.items():
        plain = unwrapped(name) if change is None else change.apply(unwrapped(name))
        found[names.get(plain, name)] = value
    return found


def unwrapped(key: Any) -> Any:
    """A name without what wraps its blocks; an index as it is."""
    if isinstance(key, str):
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
    return key


class _Change(NamedTuple):
    """What makes a stored name one of the module's."""

    cut: str
    add: str

    def apply(self, name: str) -> str:
        """The module's name."""
        return self.add + name.removeprefix(self.cut)

    def __str__(self) -> str:
        return f"with '{self.add}' put before them" if self.add else f"without their prefix '{self.cut}'"


def _prefix_changes(stored: Collection[str], own: Collection[str], strict: bool) -> list[_Change]:
    """The prefixes that could be put before all stored names, or cut off, to make them the module's; at most two."""
    if any(name in own for name in stored):
        return []
    longer: dict[str, list[str]] = {}
    for name in own:
        for rest in _rests(name):
            longer.setdefault(rest, []).append(name[: -len(rest)])
    counts: Counter[_Change] = Counter()
    for name in stored:
        counts.update(_Change("", prefix) for prefix in longer.get(name, ()))
        counts.update(_Change(name[: -len(rest)], "") for rest in _rests(name) if rest in own)
    enough = len(stored) if strict else len(stored) // 2 + 1
    return [change for change, count in counts.most_common(2) if count >= enough]


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
