"""Typed JSON: what goes in comes out, and what cannot is named."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import random
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zero.checkpoint.format.typed_json import Decoder, Encoder, Inexpressible


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def through(value: Any) -> Any:
    return Decoder().decode(json.loads(json.dumps(Encoder(strict=True).encode(value), allow_nan=False)))


VALUES = [
    None,
    True,
    -(10**40),
    0.1,
    1e-320,
    -0.0,
    math.inf,
    -math.inf,
    "a $ \u00e4 \U0001f600 \n",
    b"\x00\xff",
    complex(1.5, -math.inf),
    [1, [2.5, "x"], []],
    (1, (2, [3])),
    {1, 2, 3},
    frozenset({"a"}),
    {},
    {"a": {"b": 1}},
    {1: "int", (2, "x"): "tuple", None: "none", False: 1.5},
    {"$": "tuple", "value": [1]},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter("hello"),
    Counter(),
    Counter({(1, "x"): -2, "half": 0.5}),
    deque([1, (2, 3), {"a": 4}], maxlen=5),
    deque("abc"),
    deque(maxlen=0),
    defaultdict(list, {"a": [1], 2: [3]}),
    defaultdict(int, {"a": 1}),
    defaultdict(Counter, {"a": Counter(b=2)}),
    defaultdict(None, {"a": 1}),
    {"nested": deque([defaultdict(set, {"a": {1}})], 2)},
    Namespace(lr=0.1, path=pathlib.Path("x/y")),
    pathlib.Path("/data/x.bin"),
    pathlib.PureWindowsPath("c:/x"),
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    timedelta(days=1, microseconds=7),
    date(2025, 2, 3),
    datetime(2025, 2, 3, 4, 5, 6, 7, tzinfo=timezone.utc),
    np.float32(0.1),
    np.int64(-5),
    np.bool_(True),
    Colour.BLUE,
    random.Random(3).getstate(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_round_trip(value: Any) -> None:
    found = through(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert found == value


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.empty(0, 3, dtype=torch.int8),
        torch.randn(6)[::2],
        torch.randn(3, 2)[:1, 0],  # one element with a stride of two
        torch.randn(3, 2).t(),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.get_rng_state(),
    ],
)
def test_small_tensors(value: torch.Tensor) -> None:
    found = through({"x": value})["x"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found, value)
    found.add_(0) if found.dtype != torch.bool else found.zero_()  # it owns its memory


def test_nan_and_arrays() -> None:
    assert math.isnan(through(math.nan))
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    found = through([array])[0]
    assert found.dtype == array.dtype
    assert (found == array).all()


class Tally(Counter[str]):
    """Its class would have to be imported."""


@dataclasses.dataclass
class Best:
    """So would this one."""

    score: float


def int_() -> int:
    return 0


int_.__name__ = "int"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Tally("a"), "test_typed_json.Tally"),
        (Best(0.5), "test_typed_json.Best"),
        (UserDict(a=1), "collections.UserDict"),
        (defaultdict(lambda: 0, a=1), "collections.defaultdict of <lambda>"),
        (defaultdict(int_, a=1), "collections.defaultdict of int"),
        (defaultdict(Tally, a=1), "collections.defaultdict of Tally"),
        (defaultdict(functools.partial(int, 1), a=1), "collections.defaultdict of functools.partial"),
        (deque([Best(0.5)]), "test_typed_json.Best"),
        (Counter({Best: 1}), "builtins.type"),
    ],
)
def test_other_classes_are_named(value: Any, named: str) -> None:
    encoder, decoder = Encoder(), Decoder()
    assert decoder.decode(encoder.encode({"a": {"b": value}, "c": 1})) == {"a": {}, "c": 1}
    for unsupported in (encoder.unsupported, decoder.unsupported):
        ((path, kind),) = unsupported
        assert path == ("a", "b")
        assert kind.endswith(named)


def test_what_cannot_be_expressed_is_named_and_the_rest_is_kept() -> None:
    value = {"a": 1, "hparams": {"f": functools.partial(print), "g": [1, torch.nn.ReLU()], "lr": 0.1}}
    encoder, decoder = Encoder(), Decoder()
    encoded = json.loads(json.dumps(encoder.encode(value)))
    assert decoder.decode(encoded) == {"a": 1, "hparams": {"lr": 0.1}}
    expected = [
        (("hparams", "f"), "functools.partial"),
        (("hparams", "g"), "torch.nn.modules.activation.ReLU"),
    ]
    assert encoder.unsupported == expected
    assert decoder.unsupported == expected
    with pytest.raises(Inexpressible):
        Encoder(strict=True).encode(value)


def test_large_tensors_go_where_the_caller_wants_them() -> None:
    large = torch.randn(100_000)
    encoded = Encoder(lambda tensor: tensor.numel()).encode({"x": large})
    assert Decoder(lambda numel: large[:numel]).decode(encoded)["x"] is not None
    encoder = Encoder()
    encoder.encode({"x": large})
    assert encoder.unsupported == [(("x",), "torch.Tensor of 400000 bytes")]


def test_what_contains_itself_ends() -> None:
    value: dict[str, Any] = {"x": 1}
    value["a"] = value["b"] = value
    encoder = Encoder()
    assert Decoder().decode(encoder.encode(value)) == {"x": 1}
    assert [path for path, _ in encoder.unsupported] == [("a",), ("b",)]


def test_an_enum_of_a_module_that_is_not_imported_is_left_out() -> None:
    decoder = Decoder()
    encoded = {"a": {"$": "enum", "module": "antigravity", "type": "X", "value": "Y"}, "b": 1}
    assert decoder.decode(encoded) == {"b": 1}
    assert decoder.unsupported[0][0] == ("a",)


@pytest.mark.parametrize(
    "damaged",
    [
        {"$": "no such type"},
        {"$": "path", "type": "object", "value": "x"},
        {"$": "numpy", "dtype": "O", "shape": None, "value": "AAAA"},
        {"$": "numpy", "dtype": "f4", "shape": [3], "value": "AAAA"},
        {"$": "tensor", "dtype": "float32", "shape": [7], "value": "AAAAAAAA"},
        {"$": "tensor", "dtype": "Tensor", "shape": [7], "value": ""},
        {"$": "tensor", "dtype": "float32", "shape": [7], "value": ""},  # would be memory that is not initialised
        {"$": "tensor", "dtype": "float32", "shape": [1 << 44], "value": ""},
        {"$": "tensor", "dtype": "float32", "shape": [0, 1 << 70], "value": ""},
        {"$": "tensor", "dtype": "float32", "shape": [-1], "value": "AAAAAA=="},
        {"$": "tensor", "dtype": "float32", "shape": [True], "value": "AAAAAA=="},
        {"$": "tensor", "dtype": "quint8", "shape": [3], "value": "AAAA"},
        {"$": "dict", "value": [[[1], 2]]},
        {"$": "dtype", "value": "nn"},
        {"$": "timedelta", "value": 3},
        {"$": "timedelta", "value": [10**12, 0, 0]},
        {"$": "namespace", "value": 3},
        {"$": ["tuple"], "value": 3},
        {"$": "deque", "value": [1]},
        {"$": "deque", "maxlen": "x", "value": [1]},
        {"$": "deque", "maxlen": -1, "value": [1]},
        {"$": "counter", "value": 3},
        {"$": "defaultdict", "value": []},
        {"$": "defaultdict", "factory": "eval", "value": []},
        {"$": "defaultdict", "factory": ["list"], "value": []},
    ],
)
def test_a_damaged_value_is_a_value_error(damaged: Any) -> None:
    with pytest.raises(ValueError):
        Decoder().decode([damaged])
