"""Whether the optimizers and schedulers of all ranks are the same: classes, param groups, parameters in them, options.

Every rank steps on its slices of each parameter. An option that differs would train the slices of one weight at
different rates, and a parameter that one optimizer lacks would be trained in part.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import version_of
from lightning_zero.comm import ControlGroup
from lightning_zero.optim.groups import ParamGroups
from lightning_zero.optim.hooks import is_hooked
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["Fingerprint", "agree_on_set_up", "lines_of"]

_MEMBERS = ("params", "param_names")
_SLICES = "Every rank steps on its slices of each parameter, so parts of one weight would be trained differently."
_AT_SET_UP = (
    f"{_SLICES} Look for code in configure_optimizers that depends on the rank, on a file only some ranks see, or on a "
    "random choice, and let every rank build the same optimizers and schedulers over the same parameters in the same "
    "order."
)
_IN_A_STEP = (
    f"{_SLICES} No rank has taken this step. Usual causes: a scheduler with `monitor` (ReduceLROnPlateau) on a metric "
    "that every rank computes from its own data, where `self.log(..., sync_dist=True)` gives all ranks the same value; "
    "code that changes `optimizer.param_groups` on some ranks only"
)
_WHOLE = (
    ", or an optimizer that computes an option from all parameters in its step, of which each rank has only its own "
    "here: such an optimizer cannot be sharded"
)


def agree_on_set_up(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Mapping[str, Any]],
    owned: Mapping[nn.Parameter, Slice],
    control: ControlGroup,
) -> list[str]:
    """Compare what ``configure_optimizers`` has returned on every rank: optimizers, and the settings of schedulers,
    with the scheduler itself under ``"scheduler"``. ``owned`` are the engine's parameters by the user's.

    Returns how messages name each optimizer, the same on every rank. Raises ``DivergenceError`` on every rank, with the
    first differences. Collective: every rank.
    """
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    labels = [kind if len(kinds) == 1 else f"{kind} {index}" for index, kind in enumerate(kinds)]
    lines = [f"optimizers: {', '.join(map(_name_of, optimizers))}"]
    lines.append(f"schedulers: {', '.join(_name_of(settings['scheduler']) for settings in schedulers)}")
    for optimizer, label in zip(optimizers, labels, strict=True):
        lines.append(f"{label}, used in an earlier fit: {is_hooked(optimizer)}")
        lines += lines_of(optimizer, label, ParamGroups(optimizer, label, owned).names())
    for index, settings in enumerate(schedulers):
        scheduler = settings["scheduler"]
        label = f"scheduler {index} ({type(scheduler).__name__})"
        own = [optimizer is getattr(scheduler, "optimizer", None) for optimizer in optimizers]
        lines.append(f"{label}, of optimizer: {own.index(True) if any(own) else None}")
        built_with = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch"}
        lines += _options(label, "setting", {k: v for k, v in vars(scheduler).items() if k in built_with})
        lines += _options(label, "setting", settings)
    control.alike("result of configure_optimizers", lines, _AT_SET_UP)
    return labels


def lines_of(optimizer: Optimizer, label: str, names: Sequence[Sequence[str]]) -> list[str]:
    """What has to be the same in every step, for people and for comparing."""
    lines: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        members = names[index] if index < len(names) else ()
        lines += _options(f"{label}, param group {index}", "option", group)
        lines += [f"{label}, param group {index}, parameter {i}: '{n}'" for i, n in enumerate(members)]
    return lines


def _options(label: str, word: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Lines about those options that count, in an order that is the same on every rank."""
    for key in sorted(options, key=str):
        if key not in _MEMBERS and (text := _text(options[key])):
            yield f"{label}, {word} '{key}': {text}"


def _text(value: Any) -> str:
    """Numbers, strings, and flat sequences of them: the same for what means the same (1, 1.0 and True), without the
    last digits, because machines round. Empty for anything else, which may be another thing on every rank."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, int) and abs(value) >= 2**33:
        return str(value)
    if isinstance(value, Real):
        return f"{float(value):.10g}"
    if isinstance(value, (list, tuple)):
        texts = [_text(item) for item in value if not isinstance(item, (list, tuple))]
        return f"[{', '.join(texts)}]" if len(texts) == len(value) and all(texts) else ""
    return ""


def _name_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


class Fingerprint:
    """The options and members of one optimizer's param groups as a number, compared before every step.

    An option that is the same object as before is not looked at again. A tensor on a device is read, which waits for
    the device, if it was written to. With ``whole``, a step sees whole parameters, of which each rank has its own.
    """

    def __init__(self, optimizer: Optimizer, label: str, whole: bool) -> None:
        self._optimizer = optimizer
        self._label = label
        self._whole = whole
        self._names: Sequence[Sequence[str]] = []
        self._seen: list[Any] = []  # keys and values of all groups
        self._versions: list[int | None] = []
        self._number = 0

    def take(self, names: Sequence[Sequence[str]]) -> int:
        """The number for now. ``names`` are those of the parameters of each param group; the same object means the same
        names."""
        seen: list[Any] = []
        for group in self._optimizer.param_groups:
            seen += group
            seen += group.values()
        same = names is self._names and len(seen) == len(self._seen) and all(map(is_, seen, self._seen))
        if not same or self._versions:
            self._look(seen, names, same)
        return self._number

    def _look(self, seen: list[Any], names: Sequence[Sequence[str]], same: bool) -> None:
        """Read the options again, unless they are the same and nobody has written to them."""
        options = [v for group in self._optimizer.param_groups for k, v in group.items() if k not in _MEMBERS]
        parts = [part for option in options for part in (option if isinstance(option, tuple) else (option,))]
        # A list, or a tensor on the host, may be written to without a version.
        versions = [_version(part) for part in parts if isinstance(part, (list, Tensor))]
        if not same or versions != self._versions or None in versions:
            self._number = fingerprint("\n".join(lines_of(self._optimizer, self._label, names)))
        self._names, self._seen, self._versions = names, seen, versions

    def compare(self, control: ControlGroup) -> None:
        """Raise ``DivergenceError`` on every rank, with what differs between the ranks, now that their numbers do.
        Collective: every rank."""
        what = f"list of options and parameters of {self._label} in this step"
        advice = f"{_IN_A_STEP}{_WHOLE if self._whole else ''}."
        control.alike(what, lines_of(self._optimizer, self._label, self._names), advice)


def _version(option: Any) -> int | None:
    """A number that changes with a tensor's values; ``None`` where it must be read each time."""
    known = isinstance(option, Tensor) and option.device.type != "cpu" and not option.is_inference()
    return version_of(option) if known else None
