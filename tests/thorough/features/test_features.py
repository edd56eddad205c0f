"""Every line of the page of features holds, and no callback or profiler of Lightning's is missing there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import callbacks, profilers

from lightning_zero import CheckpointPolicy
from tests.thorough.features import page
from tests.thorough.features.feature import hold, hold_on_two_hosts

ALL = [feature for features in page.TABLES.values() for feature in features]
NOT_PLAYED = {"Checkpoint", "ProgressBar", "Profiler"}  # bases without code
NOT_PLAYED |= {"PassThroughProfiler", "XLAProfiler"}  # the one that is always there, and one for TPUs


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("table", page.TABLES)
def test_holds(table: str, ranks: int) -> None:
    hold(page.TABLES[table], ranks)


# Those in which ranks meet in other ways than in a step; `python -m tests.thorough.features --hosts` plays all.
ACROSS_HOSTS: list[tuple[str, dict[str, Any]]] = [
    ("`EMAWeightAveraging`", {"shard_within": 2}),
    ("`StochasticWeightAveraging`", {}),
    ("resuming in mid-epoch, hooks, hyperparameters", {"checkpoint": CheckpointPolicy(async_save=True)}),
    ("several optimizers, `toggle_optimizer`, `clip_gradients`, schedulers", {}),
]


@pytest.mark.parametrize(("name", "options"), ACROSS_HOSTS, ids=lambda value: value if isinstance(value, str) else "")
def test_holds_across_hosts(name: str, options: dict[str, Any]) -> None:
    (feature,) = (feature for feature in ALL if feature.name == name)
    hold_on_two_hosts(replace(feature, options=options), stages=(1, 3))


def test_nothing_that_lightning_ships_is_missing() -> None:
    shipped = {*callbacks.__all__, *profilers.__all__} - NOT_PLAYED
    missing = {name for name in shipped if not any(f"`{name}`" in feature.name for feature in ALL)}
    assert not missing


def test_the_page_is_that_of_the_tables() -> None:
    stored = Path(__file__).parents[3] / "docs" / "features.md"
    assert stored.read_text(encoding="utf-8") == page.text(), "python -m tests.thorough.features --page writes it"
