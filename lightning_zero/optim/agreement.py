"""Whether the optimizers and schedulers of all ranks are the same: classes, param groups, who is in them, and options.

Every rank steps on its slices of each parameter. An option that differs would train the slices of one weight at
different rates, and a parameter that one optimizer lacks would be trained in part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import ControlGroup
from lightning_zero.errors import DivergenceError, some
from lightning_zero.optim.groups import ParamGroups
from lightning_zero.optim.hooks import kept_of
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["Fingerprint", "agree_on_optimizers", "agree_on_set_up", "described"]


_SHOWN = 5
_NOT_OPTIONS = ("params", "param_names")
_TOLERANCE = 1e-9  # relative: machines round a cosine differently, and no weight sees the difference
_SLICES = "Every rank steps on its slices of each parameter, so parts of one weight would be trained differently."


@dataclass(frozen=True)
class Description:
    """One optimizer as plain data, to be sent to the other ranks: names of parameters and options of each param group,
    and whether an earlier fit has ``used`` it."""

    label: str
    kind: str
    used: bool
    names: list[list[str]]
    options: list[dict[str, Any]]


class _Thing(str):
    """What an object that cannot be compared by value is called."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _same(left: Any, right: Any) -> bool:
    """Whether two plain values mean the same: 1 and 1.0 do, and so do numbers that differ in their last bits."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right or (left != left and right != right) or math.isclose(left, right, rel_tol=_TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def described(
    optimizer: Optimizer,
    label: str,
    names: Sequence[Sequence[str]],
    used: bool = False,
    all_options: bool = True,
) -> Description:
    """An optimizer as it is now, with all options, or those that count in every step. Waits for the device where
    options are tensors there."""
    options = []
    for group in optimizer.param_groups:
        plain = {key: _plain(group[key]) for key in sorted(group, key=str) if key not in _NOT_OPTIONS}
        options.append({key: value for key, value in plain.items() if all_options or _counts(value)})
    return Description(label, _name_of(type(optimizer)), used, [list(group) for group in names], options)


def agree_on_optimizers(
    control: ControlGroup,
    optimizers: Sequence[Description],
    schedulers: Sequence[Mapping[str, Any]],
    own: Sequence[Optimizer],
) -> None:
    """Compare what ``configure_optimizers`` has returned: this rank's optimizers, described and ``own``, and the
    settings of its schedulers, with the scheduler itself under ``"scheduler"``.

    Raises ``DivergenceError`` on every rank, naming ranks, optimizer, param group, option or parameter, and the values.
    Collective: every rank.
    """
    if control.world_size == 1:
        return
    mine = (list(optimizers), [_scheduler(settings, own) for settings in schedulers])
    if len(set(control.gather_objects(fingerprint(repr(mine))))) == 1:
        return
    rows = control.gather_objects(mine)
    found = _set_up_differences(rows)
    if found:
        raise DivergenceError(
            f"configure_optimizers has not returned the same on every rank:\n{_listed(found)}\n{_SLICES} Look for code "
            "in configure_optimizers that depends on the rank, on a file only some ranks see, or on a random choice, "
            "and let every rank build the same optimizers and schedulers over the same parameters in the same order."
        )


def _set_up_differences(rows: Sequence[tuple[list[Description], list[dict[str, Any]]]]) -> list[str]:
    kinds = [", ".join(one.kind for one in optimizers) or "none" for optimizers, _ in rows]
    if found := _unlike("optimizers", list(map(_Thing, kinds))):
        return found
    for column in zip(*(optimizers for optimizers, _ in rows), strict=True):
        found += [f"{column[0].label}, {text}" for text in _differences(column)]
    kinds = [", ".join(one["class"] for one in schedulers) or "none" for _, schedulers in rows]
    if unlike := _unlike("schedulers", list(map(_Thing, kinds))):
        return found + unlike
    for index, settings in enumerate(zip(*(schedulers for _, schedulers in rows), strict=True)):
        label = f"scheduler {index} ({settings[0]['class'].rpartition('.')[2]})"
        found += [f"{label}, {text}" for text in _option_differences(settings, "setting")]
    return found


def _differences(rows: Sequence[Description]) -> list[str]:
    """What of one optimizer is not the same on all ranks, in words."""
    found = _unlike("used in an earlier fit", [row.used for row in rows])
    found += _unlike("number of param groups", [len(row.names) for row in rows])
    found += _member_differences([row.names for row in rows])
    for index, groups in enumerate(zip(*(row.options for row in rows), strict=False)):
        found += [f"param group {index}, {text}" for text in _option_differences(groups, "option")]
    return found


def _member_differences(rows: Sequence[list[list[str]]]) -> list[str]:
    places = [{name: index for index, group in enumerate(row) for name in group} for row in rows]
    found = []
    for name in dict.fromkeys(chain.from_iterable(places)):
        held = [f"it in param group {place[name]}" if name in place else "it in no param group" for place in places]
        found += _unlike(f"parameter '{name}'", list(map(_Thing, held)))
    if found:
        return found
    for index, groups_of in enumerate(zip(*rows, strict=False)):
        for place, names in enumerate(zip(*groups_of, strict=False)):
            if any(name != names[0] for name in names):
                found.append(f"param group {index}, order of parameters: at place {place} {_by_rank(names)}")
                break
    return found


def _option_differences(rows: Sequence[Mapping[str, Any]], word: str) -> list[str]:
    found = []
    for key in dict.fromkeys(chain.from_iterable(rows)):
        found += _unlike(f"{word} '{key}'", [row.get(key, _Thing(f"no such {word}")) for row in rows])
    return found


def _unlike(what: str, values: Sequence[Any]) -> list[str]:
    """A line that says which ranks have which value; none if they are the same."""
    return [] if all(_same(value, values[0]) for value in values) else [f"{what}: {_by_rank(values)}"]


def _by_rank(values: Sequence[Any]) -> str:
    ranks: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        known = next((members for other, members in ranks if _same(other, value)), None)
        if known is None:
            ranks.append((value, [rank]))
        else:
            known.append(rank)
    return ", ".join(f"{_ranks(members)} {value!r}" for value, members in ranks)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {some(ranks, _SHOWN)} have"


def _listed(found: Sequence[str]) -> str:
    more = [f"and {len(found) - _SHOWN} more differences"] if len(found) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*found[:_SHOWN], *more])


def _plain(value: Any) -> Any:
    """What a value is, comparable and without addresses: a tensor of one element, or another library's number, is a
    number. Devices do not count, and large tensors by shape."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return value.item()
        return _Thing(f"a tensor of {value.dtype}, shape {list(value.shape)}")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, type) or inspect.isroutine(value):
        return _Thing(_name_of(value))
    return _Thing(f"a {_name_of(type(value))}")


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _scheduler(settings: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """A scheduler's settings as plain data: when it steps, on what, and what torch's own were built with."""
    scheduler = settings["scheduler"]
    known: dict[str, Any] = {"class": _name_of(type(scheduler))}
    known |= {key: _plain(value) for key, value in settings.items() if key != "scheduler"}
    optimizer = getattr(scheduler, "optimizer", None)
    known["optimizer"] = next((index for index, own in enumerate(optimizers) if own is optimizer), None)
    attributes = getattr(scheduler, "__dict__", {})
    for base in type(scheduler).__mro__:
        if base.__module__ == "torch.optim.lr_scheduler" and "__init__" in vars(base):
            for key in inspect.signature(base).parameters:
                if key in attributes and key not in ("optimizer", "last_epoch", "verbose"):
                    known.setdefault(key, _plain(attributes[key]))
    return known


def agree_on_set_up(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Mapping[str, Any]],
    owned: Mapping[nn.Parameter, Slice],
    control: ControlGroup,
) -> list[str]:
    """Compare optimizers and schedulers of all ranks, as ``agree_on_optimizers`` does; ``owned`` are the engine's
    parameters by the user's. Groups hold the user's parameters from now on.

    Returns how messages name each optimizer, the same on every rank. Collective: every rank.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers]
    labels = [name if len(names) == 1 else f"{name} {index}" for index, name in enumerate(names)]
    descriptions = []
    for optimizer, label in zip(optimizers, labels, strict=True):
        used = kept_of(optimizer) is not None
        descriptions.append(described(optimizer, label, ParamGroups(optimizer, label, owned).names(), used))
    agree_on_optimizers(control, descriptions, schedulers, optimizers)
    return labels


_CHANGING = object()
_CODE = attrgetter("code")


@dataclass
class _Group:
    """A param group as it was: its keys and values in their order, with ``_CHANGING`` for a value that may change while
    it is the same object, and a number for each option that counts, and for all of them."""

    keys: list[str]
    values: list[Any]
    codes: list[int]
    code: int


class Fingerprint:
    """The options and members of one optimizer's param groups as a 64-bit number.

    Numbers, texts, and flat sequences of them count. What else an optimizer keeps in a group (caches, modules) may be
    another thing on every rank. An option that is the object that it was is not looked at again: that waits for the
    device where it is a tensor there. With ``whole``, steps see whole parameters, of which each rank has its own.
    """

    def __init__(self, optimizer: Optimizer, label: str, whole: bool) -> None:
        self._optimizer = optimizer
        self._label = label
        self._whole = whole
        self._names: Sequence[Sequence[str]] = []
        self._members = 0
        self._groups: list[_Group] = []
        self._read: dict[int, tuple[Tensor, int, Any]] = {}

    def take(self, names: Sequence[Sequence[str]]) -> int:
        """The number for now. ``names`` are those of the parameters of each param group; the same object means the same
        names."""
        if names is not self._names:
            self._names, self._members = names, fingerprint(repr(names))
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            self._groups = [_Group([], [], [], 0) for _ in groups]
        former, self._read = self._read, {}
        for group, known in zip(groups, self._groups, strict=True):
            if len(group) != len(known.values) or not all(map(is_, group.values(), known.values)):
                self._look_at(group, known, former)
        return hash((self._members, *map(_CODE, self._groups)))

    def _look_at(self, group: dict[str, Any], known: _Group, read: dict[int, tuple[Tensor, int, Any]]) -> None:
        if known.keys != (keys := list(group)):
            known.keys, known.values, known.codes = keys, [_CHANGING] * len(keys), [0] * len(keys)
        for place, (key, value) in enumerate(group.items()):
            if value is known.values[place]:
                continue
            plain = _Thing() if key in _NOT_OPTIONS else self._plain_of(value, read)
            counted = _counts(plain)
            known.codes[place] = fingerprint(f"{key} {_text(plain)}") if counted else 0
            known.values[place] = _CHANGING if counted and _can_change(value) else value
        known.code = hash(frozenset(known.codes))  # the order of options does not matter

    def _plain_of(self, value: Any, read: dict[int, tuple[Tensor, int, Any]]) -> Any:
        """Options that are tensors elsewhere than on the host are read, which waits for the device, if written to."""
        if not isinstance(value, Tensor) or value.device.type == "cpu" or value.is_inference():
            return _plain(value)
        known = read.get(id(value))
        if known is None or known[1] != value._version:
            known = (value, value._version, _plain(value))
        self._read[id(value)] = known
        return known[2]

    def compare(self, control: ControlGroup) -> None:
        """Say what differs between the ranks, now that their numbers do: raises ``DivergenceError`` on every rank, or
        nothing happens if it is nothing that matters. Collective: every rank."""
        mine = described(self._optimizer, self._label, self._names, all_options=False)
        found = _differences(control.gather_objects(mine))
        if found:
            cause = (
                ", or an optimizer that computes an option from all parameters in its step, of which each rank has "
                "only its own here: such an optimizer cannot be sharded"
            )
            raise DivergenceError(
                f"{self._label} is about to step with other param groups on some ranks than on others:\n"
                f"{_listed(found)}\n{_SLICES} No rank has taken this step. Usual causes: a scheduler with `monitor` "
                "(ReduceLROnPlateau) on a metric that every rank computes from its own data, where `self.log(..., "
                "sync_dist=True)` gives all ranks the same value; code that changes `optimizer.param_groups` on some "
                f"ranks only{cause if self._whole else ''}."
            )


def _can_change(value: Any) -> bool:
    """Whether a value may be another while it is the same object."""
    return isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value))


def _counts(plain: Any) -> bool:
    """Whether an option has to be the same on every rank in every step."""
    values = plain if isinstance(plain, list) else [plain]
    return all(isinstance(v, (int, float, str, type(None))) and not isinstance(v, _Thing) for v in values)


def _text(value: Any) -> str:
    """The same for what means the same: 1, 1.0 and True; the last digits are left out, because machines round."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, int):
        return f"{value:.10g}" if -(2**33) < value < 2**33 else str(value)
    if isinstance(value, list):
        return f"[{' '.join(map(_text, value))}]"
    return repr(value)
