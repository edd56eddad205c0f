"""A Lightning checkpoint dictionary taken apart into named values, and put together again.

The names are those of stock DCP directories, as Lightning's own sharded strategies write them: ``state_dict.<name>``,
``optimizer_0.state.<name>.<key>``, ``optimizer_0.param_groups.0.lr``.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from lightning_zero.checkpoint.format.flat_shard import FlatShard
from lightning_zero.checkpoint.format.record import Index
from lightning_zero.checkpoint.format.typed_json import type_name

__all__ = [
    "Leaf",
    "Opened",
    "changed",
    "check_savable",
    "describe",
    "digest",
    "disagreement",
    "put_together",
    "split",
    "tensors_in",
]

_ALWAYS_ROUTED = ("state_dict", "optimizer_states")


class Leaf(NamedTuple):
    """One value of the sharded part of a checkpoint."""

    path: tuple[Any, ...]  # from the checkpoint dictionary to the value; ``Index`` in lists, keys in dictionaries
    # In the DCP directory, where ``optimizer_states[i]`` is called ``optimizer_{i}``.
    stored_path: tuple[str | int, ...]
    value: Any  # a FlatShard, a tensor, an empty dictionary, or any other value, such as a Counter

    @property
    def key(self) -> str:
        """The DCP name."""
        return ".".join(map(str, self.stored_path))

    @property
    def is_container(self) -> bool:
        """Whether it is an empty dictionary: of it DCP knows nothing, only our own record does."""
        return isinstance(self.value, Mapping) and not _is_whole(self.value)


class Opened(NamedTuple):
    """What one rank found when it opened a checkpoint."""

    checkpoint: dict[str, Any]  # Lightning's
    digest: Any = None  # equal on ranks that see the same checkpoint
    missing: Sequence[str] = ()  # what was left out of it because it could run code
    notes: Sequence[str] = ()  # what else is not read, in sentences about "the checkpoint"


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """Separate what goes to DCP from what stays one file.

    Weights and optimizer states go to DCP, and so does any other top-level key that holds a FlatShard somewhere:
    callbacks move weights to keys of their own (Lightning's ``WeightAveraging`` does).

    Returns:
        The leaves of the former by DCP name, in the order of the checkpoint, and the rest of the dictionary.

    Raises:
        ValueError: if two values would get the same name, or a tuple holds FlatShards.
    """
    leaves: dict[str, Leaf] = {}
    rest: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key not in _ALWAYS_ROUTED and not _holds_shards(value):
            rest[key] = value
            continue
        for leaf in _top_level_leaves(key, value):
            if leaf.key in leaves:
                raise ValueError(
                    f"two values of the checkpoint are both called '{leaf.key}': {leaves[leaf.key].path}, {leaf.path}"
                )
            leaves[leaf.key] = leaf
    return leaves, rest


def _top_level_leaves(key: str, value: Any) -> Iterator[Leaf]:
    if key == "optimizer_states" and isinstance(value, list) and value:
        for number, state in enumerate(value):
            yield from _leaves((key, Index(number)), (f"optimizer_{number}",), state)
    else:
        yield from _leaves((key,), (str(key),), value)


def _leaves(path: tuple[Any, ...], stored_path: tuple[str | int, ...], value: Any) -> Iterator[Leaf]:
    parts = list(_inside(value))
    for part, item in parts:
        yield from _leaves((*path, part), (*stored_path, int(part) if type(part) is Index else str(part)), item)
    if not parts:
        leaf = Leaf(path, stored_path, value)
        if not isinstance(value, FlatShard) and _holds_shards(value):
            raise ValueError(f"'{leaf.key}' holds sharded parameters in a tuple: use a list or a dictionary")
        yield leaf


def changed(checkpoint: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Path and class of every dictionary that ``split`` takes apart and that comes back as an ordinary one."""
    for key, value in checkpoint.items():
        if key in _ALWAYS_ROUTED or _holds_shards(value):
            yield from _changed((key,), value)


def _changed(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, Mapping) and type(value) not in (dict, OrderedDict) and not _is_whole(value):
        yield path, f"{type_name(value)}, which comes back as a dict"
    for part, item in _inside(value):
        yield from _changed((*path, part), item)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of what is taken apart, each with its place on a path; nothing of what is one value."""
    if isinstance(value, Mapping) and not _is_whole(value):
        yield from value.items()
    elif isinstance(value, list) and not _is_terminal(value):
        yield from ((Index(number), item) for number, item in enumerate(value))


def _is_whole(value: Mapping[Any, Any]) -> bool:
    """Whether a dictionary is one value: its class matters, and no tensor is in it that DCP should store."""
    return type(value) in (Counter, defaultdict) and not _holds(value, Tensor)


def _is_terminal(values: list[Any]) -> bool:
    """Whether DCP keeps a list as one value: it does unless a dictionary or a tensor is in it or in a list in it."""
    return not any(
        isinstance(value, (Mapping, Tensor)) or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def _holds_shards(value: Any) -> bool:
    return _holds(value, FlatShard)


def _holds(value: Any, kind: type[Tensor]) -> bool:
    return any(True for _ in tensors_in(value, kind))


def tensors_in(value: Any, kind: Any = Tensor) -> Iterator[Any]:
    """The tensors, or what is of another kind, in a structure, in order. What is in it twice is looked through once."""
    ahead, seen = [value], set()
    while ahead:
        value = ahead.pop()
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            ahead += reversed(list(value.values() if isinstance(value, Mapping) else value))


def check_savable(leaf: Leaf) -> None:
    """``ValueError`` if a value has no elements here, or is sharded in a way of its own."""
    value = leaf.value
    if not isinstance(value, Tensor) or isinstance(value, FlatShard):
        return
    if value.is_meta:
        raise ValueError(f"'{leaf.key}' is on the meta device: it has no values to save")
    if hasattr(value, "__create_write_items__"):
        raise ValueError(f"'{leaf.key}' is a {type_name(value)}, sharded by something else than this strategy")


def describe(leaves: Mapping[str, Leaf]) -> dict[str, tuple[Any, ...]]:
    """What the ranks must agree on for each name: its kind, dtype and shape."""
    found: dict[str, tuple[Any, ...]] = {}
    for key, leaf in leaves.items():
        value = leaf.value
        if isinstance(value, Tensor):
            kind = "shard" if isinstance(value, FlatShard) else "tensor"
            found[key] = (kind, str(value.dtype), tuple(value.shape))
        else:
            found[key] = ("value", type_name(value))
    return found


def digest(leaves: Mapping[str, Leaf]) -> str:
    """A short form of ``describe``, which depends on the order too."""
    return hashlib.sha256(repr(list(describe(leaves).items())).encode()).hexdigest()


def disagreement(descriptions: Sequence[Mapping[str, tuple[Any, ...]]]) -> str | None:
    """Say how two ranks differ about the same name; ``None`` if they do not (one may lack it)."""
    first: dict[str, tuple[int, tuple[Any, ...]]] = {}
    for rank, description in enumerate(descriptions):
        for key, value in description.items():
            owner, known = first.setdefault(key, (rank, value))
            if known != value:
                return f"'{key}' is {known} on rank {owner} and {value} on rank {rank}"
    return None


def put_together(values: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    """The checkpoint dictionary that has ``value`` at ``path`` for every pair; pairs in the order of ``split``.

    ``ValueError`` if the paths contradict each other.
    """
    whole: dict[str, Any] = {}
    for path, value in values:
        if not path or not isinstance(path[0], str):
            raise ValueError(f"a path {path} does not start with a name")
        place: Any = whole
        for part, following in pairwise(path):
            place = _descend(place, part, list if isinstance(following, Index) else dict, path)
        if _descend(place, path[-1], lambda value=value: value, path) is not value:
            raise ValueError(f"two values are at the path {path}")
    return whole


def _descend(place: Any, part: Any, make: Any, path: tuple[Any, ...]) -> Any:
    """The element of a container, made if it is the next one."""
    if isinstance(part, Index) and type(place) is list and 0 <= part <= len(place):
        if part == len(place):
            place.append(make())
        return place[part]
    if not isinstance(part, Index) and type(place) is dict:
        return place.setdefault(part, make())
    raise ValueError(f"the path {path} leads through {type(place).__name__}, where {part!r} is not possible")
