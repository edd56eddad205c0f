"""How many requests to the store a meeting takes where ranks are many."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.comm import ControlGroup, Groups
from lightning_zero.comm import groups as module
from lightning_zero.comm.groups import ShardGroup

SECONDS = 30.0


class Store:
    """Counts the requests to another one."""

    def __init__(self) -> None:
        self._store, self.requests = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.requests[threading.current_thread().name] += 1
            return getattr(self._store, name)(*args)

        return call


def come(size: int, missing: int, seconds: float, late: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Store]:
    """What the ranks of a world find, each in a thread; one comes not at all, or when the others have given up."""
    store, found = Store(), dict[int, dict[int, str]]()
    monkeypatch.setattr(module, "default_store", lambda: store)

    def rank(number: int) -> None:
        control = ControlGroup(None, number, size)
        groups = Groups(None, None, control, control, ShardGroup(number, size), size, number=0)
        found[number] = groups.rendezvous("meeting", f"note of {number}", seconds)

    def together(numbers: list[int]) -> None:
        threads = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together([number for number in range(size) if number != missing])
    together([missing] if late else [])
    return found, store


@pytest.mark.parametrize("size", [2, 64, 200])
def test_who_meets_asks_the_store_a_few_times(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, store = come(size, -1, SECONDS, False, monkeypatch)
    notes = {number: f"note of {number}" for number in range(size)}
    assert found == dict.fromkeys(range(size), notes)
    assert max(store.requests.values()) <= 7  # whatever the size


@pytest.mark.parametrize("late", [False, True])
def test_nobody_goes_on_without_one_that_is_missing(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete for all or for none, also where the missing one comes as the others give up."""
    size, missing = 70, 66
    found, store = come(size, missing, 0.05, late, monkeypatch)
    assert found.pop(missing, {missing: f"note of {missing}"}) == {missing: f"note of {missing}"}
    assert len(found) == size - 1
    for number, notes in found.items():
        assert number in notes
        assert missing not in notes
    assert max(store.requests.values()) <= 7 + 4
