"""Names of weights in files, and in a module that has them under others."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_zero.registry import extension, installed

__all__ = ["Adapters", "adapters_in", "renamed", "under_names_of", "unmoved", "unwrapped"]

# torch.compile, activation checkpointing and FSDP wrap a block in a module of this attribute; names in a checkpoint do
# not depend on whether a block is wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_DDP = "module."
_MOVED = re.compile(r"\b(?:parametrizations\.(\w+)\.original|(\w+)_orig)$")


def unwrapped(key: Any) -> Any:
    """A name without what wraps its blocks; an index as it is."""
    if isinstance(key, str):
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
    return key


def unmoved(name: str) -> str:
    """What a parameter was called before ``torch.nn.utils.prune`` or ``parametrize`` put it elsewhere in its layer."""
    return _MOVED.sub(r"\1\2", name)


def under_names_of(
    module: nn.Module, own: Collection[str], stored: Mapping[str, Any], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under a module's names, if they differ in wrapped blocks or a common prefix.

    What a model of transformers, or peft around it, has under other names than its files is found too, by the extension
    ``formats``. ``strict`` and ``path`` are as for `renamed`.
    """
    names = {unwrapped(name): name for name in own}
    if any(unwrapped(name) not in names for name in stored) and installed("formats"):
        found: dict[str, Any] = extension("formats").under_names_of(module, own, stored, path, strict)
        return found
    return renamed(stored, (names,), path, strict)


class Adapters(NamedTuple):
    """What peft has added to a module."""

    names: Sequence[str] = ()
    optional: Sequence[str] = ()  # those of them that a file of the base need not hold
    hint: str = ""  # for errors about names


def adapters_in(
    module: nn.Module,
    own: Collection[str],
    weights: Collection[str],
    stored: MutableMapping[str, Any],
    path: str | os.PathLike[str],
) -> Adapters:
    """What adapters add to a module; ``stored`` gets what they take from their base.

    Args:
        module: with adapters or without.
        own: the names of its state.
        weights: the names in the file.
        stored: its values under names of the module.
        path: of the file, for messages.
    """
    if all(name in stored for name in own) or not installed("formats"):
        return Adapters()
    found: Adapters = extension("formats").adapters_in(module, own, weights, stored, path)
    return found


def renamed(
    stored: Mapping[str, Any], known: Sequence[Mapping[str, str]], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under the module's names, which may have another prefix.

    A prefix has to make most names fit; with ``strict``, one that makes all fit comes before others.

    Args:
        stored: by name.
        known: ways to find the module's own names, by plain ones; the first of those that fit most is taken.
        path: of the file, for the message about a prefix.
        strict: whether all have to fit.
    """
    plain = [unwrapped(name) for name in stored]
    ways = [(*_fit(plain, names, strict), names) for names in known]
    _, changes, names = max(ways, key=lambda way: way[0])
    cut, add = changes[0] if len(changes) == 1 else ("", "")
    if changes:
        differ = f"The names in '{os.fspath(path)}' are the module's "
        how = [
            " and ".join([f"without their prefix '{cut}'"] * bool(cut) + [f"with '{add}' put before them"] * bool(add))
            for cut, add in changes
        ]
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


def _fit(stored: Collection[str], own: Collection[str], strict: bool) -> tuple[int, list[tuple[str, str]]]:
    """How many stored names become the module's by a change of their prefix, and the change; two are ambiguous."""
    changes = _prefix_changes(stored, own, strict)
    cut, add = changes[0] if len(changes) == 1 else ("", "")
    return sum(add + name.removeprefix(cut) in own for name in stored), changes


def _prefix_changes(stored: Collection[str], own: Collection[str], strict: bool) -> list[tuple[str, str]]:
    """What could be cut off all stored names, or put before them, to make them the module's; at most two ways.

    DDP's ``module.`` may be replaced by another prefix.
    """
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
    changes = all_fit or [change for change, count in most if count > len(stored) // 2]
    if changes or not stored or not all(name.startswith(_DDP) for name in stored):
        return changes
    return [(_DDP + cut, add) for cut, add in _prefix_changes([n.removeprefix(_DDP) for n in stored], own, strict)]


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
