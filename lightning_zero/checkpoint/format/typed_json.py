"""Python values as JSON that remembers types, so that loading a checkpoint executes nothing.

Plain JSON values stand for themselves. Everything else is an object with the key ``"$"`` that names its type from a
fixed list; a dictionary that holds such a key, or keys that are no strings, is written as a list of pairs. What is
not on the list is *recorded, not kept*: its place holds the name of its type.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import pathlib
import re
import reprlib
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lightning_zero.offload.host import in_memory

__all__ = [
    "DTYPES",
    "Decoder",
    "Encoder",
    "Inexpressible",
    "check_stored",
    "dtype_name",
    "is_plain",
    "raw_memory",
    "strict_json",
    "type_name",
]

_TAG = "$"
_MAX_DEPTH = 64
_MAPPINGS = {dict: "dict", OrderedDict: "odict", Counter: "counter", defaultdict: "defaultdict"}
_SEQUENCES: dict[str, Any] = {cls.__name__: cls for cls in (tuple, set, frozenset, torch.Size, deque)}
_CONTAINERS = (*_MAPPINGS, *_SEQUENCES.values(), Namespace, list)
_FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (bool, int, float, str, bytes, list, tuple, set, dict, Counter, OrderedDict, defaultdict, deque)
}
_INLINE_NBYTES = 16384  # a random number generator's state (5056 bytes) is written inline, a weight is not

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Every dtype of this torch by its short name; not by its aliases: ``float16``, and not ``half``."""

_QUANTIZED = {dtype for name, dtype in DTYPES.items() if name.startswith(("qint", "quint"))}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls for cls in (pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path)
}


def check_stored(dtype: torch.dtype, shape: Sequence[Any]) -> None:
    """``ValueError`` if no tensor can be like that, before torch or the memory is asked for it."""
    if dtype in _QUANTIZED:  # a scale and a zero point belong to them
        raise ValueError(f"it has the dtype {dtype}, whose elements are not all of the tensor")
    if len(shape) > 64:  # as torch
        raise ValueError(f"it has {len(shape)} dimensions")
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= max(size, 1) if type(size) is int and size >= 0 else 1 << 63
    if nbytes >= 1 << 63:  # also without elements: strides
        raise ValueError(f"it has the shape {reprlib.repr(shape)}")


def strict_json(data: bytes) -> Any:
    """A JSON value; ``ValueError`` if it is none, a name appears twice in an object, or it is nested too deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        return json.loads(data.decode(), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError(f"nested too deep: {type(error).__name__}") from error


class Inexpressible(TypeError):
    """A value that typed JSON has no form for.

    Cause: an instance of a class that is not on the list, for example ``functools.partial``.
    Fix: none needed; the value stays in ``meta.pt``. Saving and loading say which key is missing.
    """


def type_name(value: object) -> str:
    """Module and class of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of contiguous, ordinary elements, up to a copy."""
    return type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and (
        value.layout is torch.strided and not value.is_quantized
    )


def raw_memory(tensor: Tensor) -> memoryview:
    """The elements in order, in this machine's byte order; a copy only if they do not lie so in host memory."""
    here = in_memory(tensor.detach()).cpu()
    flat = here.resolve_conj().resolve_neg().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # one element may come with any stride, and only 1 becomes bytes
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Encoder:
    """Python values to JSON values.

    ``store`` is called with a plain tensor too large to be written inline, and returns a JSON value from which the
    decoder's ``fetch`` gets it back. ``strict`` raises for a value that cannot be expressed; otherwise it is recorded
    only, and ``unsupported`` has key path and type of it, in order.
    """

    def __init__(self, store: Callable[[Tensor], Any] | None = None, *, strict: bool = False) -> None:
        self._store = store
        self._strict = strict
        self._open: set[int] = set()  # the containers around the value being encoded, to notice one inside itself
        self.unsupported: list[tuple[tuple[Any, ...], str]] = []

    def encode(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """The JSON value.

        Raises:
            Inexpressible: in strict mode for any part that cannot be expressed; otherwise only where there is no
                dictionary around it whose key could be recorded as missing.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind not in _CONTAINERS:
            return self._scalar(value)
        if len(path) > _MAX_DEPTH or id(value) in self._open:
            raise Inexpressible(f"{type_name(value)} nested deeper than {_MAX_DEPTH} levels, or in itself")
        self._open.add(id(value))
        try:
            if kind is Namespace:
                return {_TAG: "namespace", "value": self._mapping(vars(value), path)}
            if kind in _MAPPINGS:
                return self._mapping(value, path)
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        if kind is list:
            return items
        return {_TAG: kind.__name__, "value": items, **({"maxlen": value.maxlen} if kind is deque else {})}

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        more = {}
        if type(value) is defaultdict:
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            more = {"factory": name}
            if factory is not None and _FACTORIES.get(str(name)) is not factory:
                raise Inexpressible(f"{type_name(value)} of {name or type_name(factory)}")
        pairs = []
        for key, item in value.items():
            try:
                pairs.append((key, self.encode(item, (*path, key))))
            except Inexpressible as error:
                if self._strict:
                    raise
                self.unsupported.append(((*path, key), str(error)))
                pairs.append((key, {_TAG: "unsupported", "value": str(error)}))
        if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
            return dict(pairs)
        encoded = [[self.encode(key, (*path, key)), item] for key, item in pairs]
        return {_TAG: _MAPPINGS[type(value)], "value": encoded, **more}

    def _scalar(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return {_TAG: kind.__name__, "value": _SCALARS[kind][0](value)}
        if isinstance(value, Tensor) and type(value) is not torch.nn.Buffer and is_plain(value) and not value.is_meta:
            if value.nbytes > _INLINE_NBYTES:
                if self._store is None:
                    raise Inexpressible(f"{type_name(value)} of {value.nbytes} bytes")
                return {_TAG: "stored", "value": self._store(value)}
            form = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
            return {_TAG: "tensor", **form, "value": _text(raw_memory(value))}
        if isinstance(value, pathlib.PurePath) and kind.__module__.partition(".")[0] == "pathlib":
            name = "Path" if isinstance(value, pathlib.Path) else kind.__name__
            return {_TAG: "path", "type": name, "value": str(value)}
        if isinstance(value, Enum) and _enum_class(kind.__module__, kind.__qualname__) is kind:
            return {_TAG: "enum", "module": kind.__module__, "type": kind.__qualname__, "value": value.name}
        is_number = kind.__module__ == "numpy" and hasattr(value, "nbytes") and value.dtype.kind in "biufcmM"
        if is_number and value.nbytes <= _INLINE_NBYTES:
            shape = None if kind.__name__ != "ndarray" else list(value.shape)
            return {_TAG: "numpy", "dtype": value.dtype.str, "shape": shape, "value": _text(value.tobytes())}
        raise Inexpressible(type_name(value))


class Decoder:
    """JSON values back to Python values. Calls no code that the input names.

    ``fetch`` gets a large tensor back from what the encoder's ``store`` returned. ``unsupported`` has key path and type
    of what the encoder recorded only, and of members of enums whose module is not imported here: those are left out.
    """

    def __init__(self, fetch: Callable[[Any], Tensor] | None = None) -> None:
        self._fetch = fetch
        self.unsupported: list[tuple[tuple[Any, ...], str]] = []

    def decode(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """The Python value; ``ValueError`` if the JSON value is none that an encoder writes."""
        if len(path) > 2 * _MAX_DEPTH:  # what is in a key or in an object of a type is not deeper than that
            raise ValueError(f"values in one another more than {2 * _MAX_DEPTH} deep")
        if isinstance(value, list):
            return [
                self.decode(item, (*path, index)) if isinstance(item, (dict, list)) else item
                for index, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return self._mapping(value.items(), path)
        try:
            return self._tagged(value[_TAG], value.get("value"), value, path)
        except Inexpressible:
            raise
        except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"a damaged {value[_TAG]!r} value: {error!r}") from error

    def _mapping(self, pairs: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
        found = {}
        for key, item in pairs:
            try:
                if isinstance(item, dict) and item.get(_TAG) == "unsupported":
                    raise Inexpressible(str(item.get("value")))
                found[key] = self.decode(item, (*path, key)) if isinstance(item, (dict, list)) else item
            except Inexpressible as error:
                self.unsupported.append(((*path, key), str(error)))
        return found

    def _tagged(self, tag: str, value: Any, whole: dict[str, Any], path: tuple[Any, ...]) -> Any:
        if tag in _READ:
            return _READ[tag](value)
        if tag in _SEQUENCES:
            items = self.decode(value if type(value) is list else None, path)
            return deque(items, whole["maxlen"]) if tag == "deque" else _SEQUENCES[tag](items)
        if tag in _MAPPINGS.values():
            content = self._mapping([(self.decode(key, (*path, 0)), item) for key, item in value], path)
            if tag == "defaultdict":
                factory = whole["factory"]
                return defaultdict(None if factory is None else _FACTORIES[factory], content)
            return content if tag == "dict" else OrderedDict(content) if tag == "odict" else Counter(content)
        if tag == "namespace":
            return Namespace(**self.decode(value, (*path, tag)))
        if tag == "path":
            return _PATHS[whole["type"]](value)
        if tag == "enum":
            found = _enum_class(whole["module"], whole["type"])
            if found is None or value not in found.__members__:
                name = f"{whole['module']}.{whole['type']}.{value}"
                raise Inexpressible(f"{name}, an enum that this program has not imported")
            return found.__members__[value]
        if tag == "numpy":
            return _numpy(whole["dtype"], whole["shape"], base64.b64decode(value))
        if tag == "tensor":
            dtype, shape, memory = DTYPES[whole["dtype"]], whole["shape"], bytearray(base64.b64decode(value))
            check_stored(dtype, shape)
            if len(memory) != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{len(memory)} bytes for {dtype} {shape}")
            return (torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)).view(shape)
        if tag == "stored" and self._fetch is not None:
            return self._fetch(value)
        raise ValueError(f"an unknown type {tag!r}")


def _text(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode("ascii")


# By class, what is written under its name, and what is read of that.
_SCALARS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (repr, {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__),
    bytes: (_text, base64.b64decode),
    complex: (
        lambda value: [Encoder().encode(value.real), Encoder().encode(value.imag)],
        lambda value: complex(*map(Decoder().decode, value)),
    ),
    torch.dtype: (dtype_name, DTYPES.__getitem__),
    torch.device: (str, torch.device),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda value: timedelta(*value)),
    date: (date.isoformat, date.fromisoformat),
    datetime: (datetime.isoformat, datetime.fromisoformat),
}
_READ = {kind.__name__: read for kind, (_, read) in _SCALARS.items()}


_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcmM]\d{1,2}(\[\d{0,9}\w{1,2}\])?")


def _numpy(dtype: str, shape: list[int] | None, content: bytes) -> Any:
    numpy = importlib.import_module("numpy")  # not a dependency: it is there if the value was
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"a numpy dtype {dtype!r}")
    array = numpy.frombuffer(content, dtype=numpy.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape).copy()


def _enum_class(module: str, name: str) -> type[Enum] | None:
    """An enum class that is already imported; nothing is imported and no module code runs to find one."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and issubclass(found, Enum) else None
