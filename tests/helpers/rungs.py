"""The rung of a test: what it takes to run it. Each has one, read from its code, or given with a marker.

``pure``: this process alone. ``world``: forks ranks. ``script``: starts programs. ``timing``: measures seconds, and so
runs after all others and beside none.

The code of a test is followed through everything it names that is defined below ``tests``: functions, classes,
fixtures, parameters, tables of them. What that misses, the guard of ``conftest.py`` finds: a ``pure`` test can neither
fork nor start a program nor open a process group.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

__all__ = ["RUNGS", "forbid_processes", "rung_of"]

RUNGS = ("pure", "world", "script", "timing")

# A function that uses one of these names needs the rung.
_MARKS = {
    "world": {"run_world", "fork", "init_process_group", "multiprocessing"},
    "script": {"run_script", "run_forked", "start_forked", "subprocess", "Popen"},
    "timing": {"monotonic", "perf_counter", "process_time", "thread_time"},
}


def rung_of(item: pytest.Function) -> str:
    """The rung that a marker gives, else the highest that the test's code needs."""
    given = [mark.name for mark in item.iter_markers() if mark.name in RUNGS]
    if given:
        return given[0]
    roots: list[Any] = [item.function]
    roots += [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    if hasattr(item, "callspec"):
        roots += item.callspec.params.values()
    return max((_rung_from(root, item.module.__name__) for root in roots), key=RUNGS.index)


def _rung_from(root: Any, module: str) -> str:
    key = (id(root), module)
    if key not in _known:
        seen: dict[int, Any] = {}
        found = {"pure"}
        ahead = [root]
        while ahead:
            value = ahead.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                needs, more = _looked(value)
                # A helper has deadlines; a test that reads the clock measures.
                found |= needs if getattr(value, "__module__", None) == module else needs - {"timing"}
                ahead += more
        _known[key] = (max(found, key=RUNGS.index), seen)  # what was seen stays alive, so that each id stays its own
    return _known[key][0]


_known: dict[tuple[int, str], tuple[str, dict[int, Any]]] = {}
_looks: dict[int, tuple[set[str], list[Any]]] = {}


def _looked(value: Any) -> tuple[set[str], list[Any]]:
    if not isinstance(value, FunctionType):
        return _look(value)
    if id(value) not in _looks:
        _looks[id(value)] = _look(value)
    return _looks[id(value)]


def _look(value: Any) -> tuple[set[str], list[Any]]:
    """What ``value`` itself needs, and what it names."""
    if isinstance(value, functools.partial):
        return set(), [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return set(), [value.__func__]
    if isinstance(value, (list, tuple, set, frozenset)):
        return set(), list(value)
    if isinstance(value, dict):
        return set(), list(value.values())
    if isinstance(value, property):
        return set(), [value.fget, value.fset]
    if isinstance(value, (staticmethod, classmethod)):
        return set(), [value.__func__]
    if not _is_ours(value):
        return set(), []
    if isinstance(value, type):
        return set(), [*vars(value).values(), *value.__mro__[1:]]
    if not isinstance(value, FunctionType):
        return _look_at_wrapped(value)
    used = set(_names(value.__code__))
    names = {name for _, name in used}
    closed = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    more = [value.__globals__[name] for is_global, name in used if is_global and name in value.__globals__]
    for part in list(more):
        if isinstance(part, ModuleType) and _is_ours(part):
            more += [getattr(part, name) for name in names if hasattr(part, name)]
    more += [value.__defaults__, *(value.__kwdefaults__ or {}).values(), *closed, *_wrapped(value)]
    return {rung for rung, marks in _MARKS.items() if names & marks}, more


def _look_at_wrapped(value: Any) -> tuple[set[str], list[Any]]:
    """A cached function, a fixture, or an object of a class of ours."""
    return set(), [*_wrapped(value), type(value), *getattr(value, "__dict__", {}).values()]


def _wrapped(value: Any) -> list[Any]:
    inner = inspect.unwrap(value) if callable(value) else value
    return [] if inner is value else [inner]


def _is_ours(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.startswith("tests.") and name not in ("tests.conftest", __name__)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: CodeType) -> Iterator[tuple[bool, str]]:
    """Every name in the code, and whether it is looked up among the globals."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield True, instruction.argval
        elif instruction.argval in code.co_names:
            yield False, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@contextlib.contextmanager
def forbid_processes() -> Iterator[None]:
    """As long as it lasts, forking, starting a program and opening a process group fail."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a test of the rung `pure` starts a process or opens a process group: give it its marker")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(dist, "init_process_group", refuse)
        if sys.platform != "win32":
            patch.setattr(os, "posix_spawn", refuse)
        yield
