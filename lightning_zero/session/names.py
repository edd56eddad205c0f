"""Names of weights in files, and in a module that has them under others."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info
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
    """The stored values under a module's names, if they differ in wrapped blocks or a common prefix (`renamed`). What a
    model of transformers, or peft around it, has under other names than its files is found by ``formats``.
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
    """What adapters add to a module of the names ``own``; ``stored`` gets what they take from their base."""
    if all(name in stored for name in own) or not installed("formats"):
        return Adapters()
    found: Adapters = extension("formats").adapters_in(module, own, weights, stored, path)
    return found


def renamed(
    stored: Mapping[str, Any], known: Sequence[Mapping[str, str]], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under the module's names, which may have another prefix: the first of the ``known`` ways to
    find these by plain names that makes most fit, or all with ``strict``. Where several do, names stay as they are.
    """
    plain = [unwrapped(name) for name in stored]

    def way(names: Mapping[str, str]) -> tuple[int, str, str]:
        cut, add = _prefix_change(plain, names, strict)
        return sum(add + name.removeprefix(cut) in names for name in plain), cut, add

    (_, cut, add), names = max(((way(names), names) for names in known), key=lambda found: found[0][0])
    if cut or add:
        how = " and ".join(
            [f"without their prefix '{cut}'"] * bool(cut) + [f"with '{add}' put before them"] * bool(add)
        )
        rank_zero_info(f"The names in '{os.fspath(path)}' are the module's {how}: loading them under those.")
    return {names.get(add + unwrapped(name).removeprefix(cut), name): value for name, value in stored.items()}


def _prefix_change(stored: Collection[str], own: Collection[str], strict: bool) -> tuple[str, str]:
    """What to cut off the stored names, and to put before them, to make them the module's; nothing if several ways do.

    DDP's ``module.`` may be replaced by another prefix.
    """
    if not stored or any(name in own for name in stored):
        return "", ""
    longer: dict[str, list[str]] = {}
    for name in own:
        for rest in _rests(name):
            longer.setdefault(rest, []).append(name[: -len(rest)])
    counts: Counter[tuple[str, str]] = Counter()
    for name in stored:
        counts.update(("", prefix) for prefix in longer.get(name, ()))
        counts.update((name[: -len(rest)], "") for rest in _rests(name) if rest in own)
    all_fit = [change for change, count in counts.items() if strict and count == len(stored)]
    changes = all_fit or [change for change, count in counts.items() if count > len(stored) // 2]
    if not changes and all(name.startswith(_DDP) for name in stored):
        cut, add = _prefix_change([name.removeprefix(_DDP) for name in stored], own, strict)
        return (_DDP + cut, add) if cut or add else ("", "")
    return changes[0] if len(changes) == 1 else ("", "")


def _rests(name: str) -> Iterator[str]:
    """What is left of a dotted name when its first parts are cut off: of ``a.b.c`` it is ``b.c`` and ``c``."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
