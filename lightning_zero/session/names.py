"""Names of weights in files, and in a module that has them under others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

__all__ = ["under_own_names", "unwrapped"]

# torch.compile, activation checkpointing and FSDP wrap a block in a module of this attribute; names in a checkpoint do
# not depend on whether a block is wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrapped(key: Any) -> Any:
    """A name without what wraps its blocks; an index as it is."""
    if isinstance(key, str):
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
    return key


def under_own_names(
    stored: Mapping[str, Any], own: Collection[str], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under the module's names, if they differ in wrapped blocks or one common prefix only.

    It has to make most names fit; with ``strict``, one that makes all fit comes before others. ``path`` is for the
    message about it.
    """
    names = {unwrapped(name): name for name in own}
    changes = _prefix_changes([unwrapped(name) for name in stored], names, strict)
    cut, add = changes[0] if len(changes) == 1 else ("", "")
    if changes:
        differ = f"The names in '{os.fspath(path)}' are the module's "
        how = [f"with '{add}' put before them" if add else f"without their prefix '{cut}'" for cut, add in changes]
        if len(changes) == 1:
            rank_zero_info(f"{differ}{how[0]}: loading them under those.")
        else:
            rank_zero_warn(
                f"{differ}{' and also '.join(how)}: which of them is meant is not known, so that they are left as they "
                "are. Save the weights under the module's names."
            )
    found = {}
    for name, value in stored.items():
        found[names.get(add + unwrapped(name).removeprefix(cut), name)] = value
    return found


def _prefix_changes(stored: Collection[str], own: Collection[str], strict: bool) -> list[tuple[str, str]]:
    """What could be cut off all stored names, or put before them, to make them the module's; at most two ways."""
    if any(name in own for name in stored):
        return []
    longer: dict[str, list[str]] = {}
    for name in own:
        for rest in _rests(name):
            longer.setdefault(rest, []).append(name[: -len(rest)])
    counts: Counter[tuple[str, str]] = Counter()
    for name in stored:
        counts.update(("", prefix) for prefix in longer.get(name, ()))
        counts.update((name[: -len(rest)], "") for rest in _rests(name) if rest in own)
    most = counts.most_common(2)
    all_fit = [change for change, count in most if strict and count == len(stored)]
    return all_fit or [change for change, count in most if count > len(stored) // 2]


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
