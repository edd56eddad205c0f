"""Contents of objects shown as they were, and put back, in place."""

from __future__ import annotations

import collections
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.activations.states import CallStates, HeldTensor


def refuse(held: HeldTensor) -> None:
    raise ValueError(held.where)


def states_of(value: Any) -> CallStates:
    return CallStates((), [value], set())


class Slotted:
    __slots__ = ("first", "second")


class Record(Slotted):
    """Slots of its base, and a dictionary."""


class Growing(list):
    """Would do something else if asked itself."""

    def __iter__(self) -> Any:
        raise AssertionError

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError


def _record() -> Record:
    record = Record()
    record.first, record.name = 1, "a"
    return record


def _change_record(record: Record) -> None:
    del record.first, record.name
    record.second, record.other = 2, 3


def _look_at_record(record: Record) -> Any:
    return vars(record).copy(), [getattr(record, name, None) for name in Slotted.__slots__]


def _reorder(value: Any) -> None:
    value["a"] = value.pop("a")


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "list": (lambda: [1, 2], lambda x: x.append(3), list),
    "own list": (lambda: Growing([1, 2]), lambda x: x.append(3), lambda x: x[:]),
    "order of a dict": (lambda: {"a": 1, "b": 2}, _reorder, lambda x: list(x.items())),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2),
        _reorder,
        lambda x: (list(x.items()), list(reversed(x))),
    ),
    "defaultdict": (lambda: collections.defaultdict(list), lambda x: x["new"], dict),
    "Counter": (lambda: collections.Counter("aab"), lambda x: x.update("c"), dict),
    "set": (lambda: {1, 2}, lambda x: x.add(3), set),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda x: x.append(3), list),
    "bytearray": (lambda: bytearray(b"ab"), lambda x: x.extend(b"c"), bytes),
    "record": (_record, _change_record, _look_at_record),
    "namespace": (lambda: SimpleNamespace(a=1), lambda x: setattr(x, "a", 2), lambda x: dict(vars(x))),
    "nested": (lambda: {"a": ([1], 2)}, lambda x: x["a"][0].append(3), lambda x: list(x["a"][0])),
}


@pytest.mark.parametrize("name", KINDS)
def test_contents_are_shown_and_put_back(name: str) -> None:
    make, change, look = KINDS[name]
    value = make()
    then = look(value)
    states = states_of(value)
    change(value)
    now = look(value)
    assert now != then
    for _ in range(2):
        with states.shown(refuse):
            assert look(value) == then
            change(value)
        assert look(value) == now


def test_put_back_after_an_error() -> None:
    value = [1]
    states = states_of(value)
    value.append(2)
    with pytest.raises(KeyError), states.shown(refuse):
        raise KeyError
    assert value == [1, 2]


Pair = collections.namedtuple("Pair", "left right")


def test_tensors_are_the_same_or_without_their_graph() -> None:
    plain, number = torch.ones(2), torch.ones(2, requires_grad=True) * 2
    value = [plain, number, (plain, 1), Pair(number, 2), {"a": number}]
    states = states_of(value)
    pair = value[2]
    value.clear()
    with states.shown(refuse):
        assert value[0] is plain
        assert value[2] is pair
        assert type(value[3]) is Pair
        for seen in (value[1], value[3].left, value[4]["a"]):
            assert seen.grad_fn is None
            assert seen.requires_grad
            assert seen.data_ptr() == number.data_ptr()
    assert value == []


def test_a_tuple_shows_the_copies_of_tensors_that_are_attributes_too() -> None:
    module = nn.Module()
    module.mean = torch.ones(2)
    module.pair = pair = (module.mean, 1)
    states = CallStates([module], (), set())
    with states.shown(refuse):
        seen = module.pair[0]
    assert seen.tolist() == [1, 1]
    module.mean.add_(1)
    with states.shown(refuse):
        assert module.pair[0].tolist() == module.mean.tolist() == [1, 1]
    assert module.pair is pair


def test_a_tensor_that_was_changed_is_refused_and_nothing_is_touched() -> None:
    tensor = torch.ones(2)
    value: list[Any] = [tensor]
    states = states_of(value)
    tensor.add_(1)
    value.append(1)
    with pytest.raises(ValueError, match="An argument of class list"), states.shown(refuse):
        pass
    assert len(value) == 2


def test_what_counts_no_versions_is_shown_as_it_is() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    weight = nn.Parameter(torch.ones(2))
    view = weight.view(1, 2)
    states = states_of([inference, weight, view])
    weight.data.add_(1)
    with torch.no_grad():
        weight.add_(1)
    with states.shown(refuse):
        pass


def test_objects_of_others_are_left_alone() -> None:
    module, logger = nn.Linear(1, 1), logging.getLogger("a")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    states = states_of([module, logger, optimizer, Tensor, states_of])
    module.extra, optimizer.extra, level = 1, 1, logger.level  # type: ignore[assignment]
    logger.setLevel(logging.CRITICAL)
    with states.shown(refuse):
        assert (module.extra, optimizer.extra, logger.level) == (1, 1, logging.CRITICAL)
    logger.setLevel(level)


def test_large_containers_are_shown_and_their_elements_not_looked_at() -> None:
    value = [[1] for _ in range(5000)]
    states = states_of(value)
    value[0].append(2)
    value.pop()
    with states.shown(refuse):
        assert len(value) == 5000
        assert value[0] == [1, 2]
    assert len(value) == 4999
