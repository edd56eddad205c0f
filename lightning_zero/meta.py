"""Modules built on the meta device: their tensors get values one unit at a time, as FSDP2 and Lightning give them.

[Note: where values come from]
A constructor under ``torch.device("meta")`` allocates nothing, and what it writes is lost. When a unit is built,
its tensors get memory, and each module in it that owns some is initialised: by its ``reset_parameters`` (all layers of
torch have one), then by ``_init_weights(module)`` of the nearest module around it that has one (models of transformers
and timm, GPTs written by hand). Children come before their parents, whose word is the last one, as in a constructor. A
tied weight is initialised as the first of its owners does it.

Each module draws from a generator that is seeded by torch's seed and the module's path. So values depend neither on the
number of ranks, nor on the stage, nor on how the model is cut into units; they are not those of a build on the CPU.

[Note: never garbage]
Fresh memory is filled with NaN, or the largest number of its dtype. What still holds it after the initialisation is a
tensor that nobody initialises. It is an error by name, unless a file brings its values. What other code writes to is an
error, too: its version is not that of the writes by the initialisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import MaterialiseError, some
from lightning_zero.plan.plan import Plan

__all__ = ["MetaValues"]


class MetaValues:
    """Gives the tensors of ``root`` that are on the meta device their initial values. One per set-up of a module.

    Args:
        root: the module. Its parameters stay on the meta device, its buffers leave it.
        units: the path of each unit's module, and the names of the unit's parameters.
    """

    def __init__(self, root: nn.Module, units: Iterable[tuple[str, Sequence[str]]]) -> None:
        self._root = root
        self._modules = dict(root.named_modules())
        self._unit_of = {name: (top, names) for top, names in units for name in names}
        self._values: dict[str, Tensor] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by id: buffers on the meta device, which ties share
        self.unset: dict[str, str] = {}
        """Tensors that nobody initialises, by name, with the class of their owner."""
        self.lost: list[str] = []
        """Parameters that were also written to by other code, by name."""
        self.failure: MaterialiseError | None = None
        """Of the first module whose initialisation has raised an error."""

    @classmethod
    def by_unit(cls, root: nn.Module, plan: Plan) -> MetaValues:
        """For a module that is laid out by a plan. Gradient buckets, which cut modules in two, are made all at once."""
        units: dict[str, list[str]] = {}
        for unit in plan.units:
            units.setdefault(unit.module or "", []).extend([spec.name for spec in unit.parameters])
        return cls(root, units.items())

    def take(self, name: str) -> Tensor:
        """The value of a parameter on the meta device, on the CPU. The others of its unit are made with it, and kept
        until they are taken."""
        if name not in self._values:
            top, names = self._unit_of[name]
            owners = {one.rpartition(".")[0] for one in names}
            self._initialise({path for owner in owners for path in _around(owner) if _inside(path, top)}, names, top)
        return self._values.pop(name)

    def place_buffers(self, device: torch.device | None) -> None:
        """Give the other buffers their values, and put all on ``device``. What is there already stays the same object.

        ``None``: leave them where they are.
        """
        every = [(path, one) for path, owner in self._modules.items() for one in owner._buffers.values()]
        self._initialise({path for path, buffer in every if buffer is not None and buffer.is_meta}, ())
        placed: dict[int, Tensor] = {}
        for owner in self._modules.values():
            for key, buffer in owner._buffers.items():
                if buffer is not None and buffer.device != (device or buffer.device):
                    with untracked():
                        owner._buffers[key] = placed.setdefault(id(buffer), buffer.detach().to(device))

    def check(self, control: ControlGroup, stored: Collection[str] = ()) -> None:
        """Raise ``MaterialiseError`` on every rank if one has a tensor without values. Collective: every rank.

        ``stored`` are the names of tensors that get their values from a file.
        """
        problems = control.gather_objects(self.problem(stored))
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is not None:
            raise MaterialiseError(f"Rank {first}: {problems[first]}") from self.failure

    def problem(self, stored: Collection[str] = ()) -> str:
        """Why the module cannot be used, if no values come for any but the ``stored`` names; nothing if it can."""
        if self.failure is not None:
            return str(self.failure)
        state = self._root.state_dict(keep_vars=True) if stored else {}
        read = {id(value) for name, value in state.items() if name in stored}
        unset, lost = ([n for n in names if id(state.get(n)) not in read] for names in (self.unset, self.lost))
        if lost:
            return (
                f"{some(map(repr, lost))}: on the meta device, and written to by other code than `reset_parameters` "
                "and `_init_weights` of the modules in its unit, such as a constructor or a module around the unit. "
                "That has no effect here: move it there, or build the module on the CPU."
            )
        if not unset:
            return ""
        return (
            f"{some(map(repr, unset))}: on the meta device, and {self.unset[unset[0]]} does not initialise it. Give "
            "that class a `reset_parameters()` that fills its own parameters and buffers, or the model an "
            "`_init_weights(module)`; or name a file that has them, CheckpointPolicy(initial_weights=...). Or build "
            "this part on the CPU."
        )

    def _initialise(self, paths: Collection[str], names: Collection[str], top: str = "") -> None:
        """Run the initialisation of the modules at ``paths``, which lie in the one at ``top``. Parameters of ``names``
        get values, and buffers of these modules; what is written to all others is lost."""
        fresh: list[tuple[str, Tensor, int]] = []  # with the version that it should reach
        others: list[tuple[str, Tensor, int]] = []  # with its version
        originals: list[tuple[dict[str, Any], str, Tensor]] = []
        for path, owner in self._modules.items() if paths else ():
            if not _inside(path, top) or isinstance(owner, torch.jit.ScriptModule):
                continue
            for store, key, tensor in [(s, *item) for s in (owner._parameters, owner._buffers) for item in s.items()]:
                name, parameter = f"{path}.{key}".removeprefix("."), store is owner._parameters
                if tensor is None or path not in paths:
                    others += [] if tensor is None else [(name, tensor, tensor._version)]
                    continue
                wanted = tensor.is_meta and (name in names or not parameter)
                if wanted and id(tensor) in self._buffers:  # a tie
                    store[key] = self._buffers[id(tensor)][1]
                    continue
                made = _unwritten(tensor)  # what has values already is safe from an initialisation
                if parameter:
                    made = nn.Parameter(made, tensor.requires_grad)
                    vars(made).update(vars(tensor))
                    vars(made).pop("tensor_spec", None)  # an ordinary tensor, of the whole shape
                if wanted:
                    fresh.append((name, made, made._version + tensor._version))
                if wanted and not parameter:
                    self._buffers[id(tensor)] = tensor, made
                else:
                    originals.append((store, key, tensor))
                store[key] = made
        for path in sorted(paths, key=lambda path: -path.count(".") - bool(path)):
            self._call(path)
        self.lost += [name for name, made, before in others if made._version != before]
        for name, made, version in fresh:
            path, _, key = name.rpartition(".")
            owner, parameter = self._modules[path], isinstance(made, nn.Parameter)
            value = (owner._parameters if parameter else owner._buffers).get(key)
            if value is None or value.shape != made.shape or value.dtype != made.dtype:
                text = f"'{name}' was initialised with another shape or dtype."
                self.failure = self.failure or MaterialiseError(text)
                value = made
            if _is_unwritten(value):
                self.unset[name] = type(owner).__name__
            if parameter:
                part = getattr(made, "tensor_part", None)
                self._values[name] = value.detach() if part is None else part.of(value.detach())
                if value is made and value._version < version:
                    self.lost.append(name)
        for store, key, tensor in originals:
            store[key] = tensor

    def _call(self, path: str) -> None:
        """Have a module initialise itself, with random numbers of its own."""
        module = self._modules[path]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        around = (getattr(self._modules[one], "_init_weights", None) for one in reversed(_around(path)))
        takes = next((function for function in around if function is not None), None)
        try:
            with untracked(), _seeded(path):
                if callable(reset):
                    reset()
                if takes is not None:
                    takes(module)
        except Exception as error:  # the other ranks go on: it is raised when all are through
            what = f"{type(error).__name__} while '{path}' ({type(module).__name__}) was initialised: {error}"
            self.failure = self.failure or MaterialiseError(what)


def _around(path: str) -> list[str]:
    """The path, and those of all modules around it, the root first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _inside(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")


@contextmanager
def _seeded(path: str) -> Iterator[None]:
    """Random numbers that depend on torch's seed and the path only. The generator is afterwards what it was."""
    generator = torch.default_generator
    state = generator.get_state()
    text = f"{generator.initial_seed()} {path}".encode()
    generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)


def _unwritten(tensor: Tensor) -> Tensor:
    """Memory on the CPU like a tensor, or the whole one that it is a part of, that holds what nobody writes."""
    part = getattr(tensor, "tensor_part", None)
    shape = tensor.shape if part is None else part.shape
    with untracked():
        own = tensor.is_meta and shape == tensor.shape
        stride = tensor.stride() if own else torch.empty(shape, device="meta").stride()
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
        return made.fill_(_nobody_writes(made.dtype))


def _nobody_writes(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unwritten(tensor: Tensor) -> bool:
    """Whether some of a tensor's numbers are what ``_unwritten`` has put there, or all of integers."""
    with untracked():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return bool((tensor if tensor.dtype.itemsize > 1 else tensor.float()).isnan().any())
        return bool(tensor.numel()) and bool((tensor == _nobody_writes(tensor.dtype)).all())
