"""Which options of a saved optimizer belong to which of its param groups now."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.session.state import _matched


def saved(*groups: list[str]) -> list[dict[str, Any]]:
    return [{"params": names, "lr": float(index)} for index, names in enumerate(groups)]


@pytest.mark.parametrize(
    ("was", "now", "rates"),
    [
        ([["a", "b"], ["c"]], [["b"], ["c", "new"]], [0.0, 1.0]),
        ([["a"], ["b"]], [["b"], ["a"]], [1.0, 0.0]),
        ([["a"], ["old"]], [["a"], ["renamed"]], [0.0, 1.0]),
        ([["a"]], [["a"], ["new"]], [0.0, None]),
        ([["a"], ["gone"]], [["a"]], [0.0]),
    ],
    ids=["moved on", "another order", "renamed", "a new group", "one left"],
)
def test_options_follow_the_names(was: Any, now: Any, rates: list[float | None]) -> None:
    assert [group.get("lr") for group in _matched("Adam", saved(*was), now)] == rates


@pytest.mark.parametrize(
    ("was", "now"), [([["a"], ["b"]], [["a", "b"]]), ([["a", "b"]], [["a"], ["b"]])], ids=["joined", "split"]
)
def test_groups_that_were_joined_or_split_are_refused(was: Any, now: Any) -> None:
    with pytest.raises(ValueError, match="Adam"):
        _matched("Adam", saved(*was), now)
