"""A feature of Lightning: what a user does with it, and what becomes of it in every stage, beside DDP."""

from __future__ import annotations

import functools
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_zero import ZeroStrategy
from lightning_zero.comm.groups import RANKS_PER_HOST
from tests.helpers.runs import STAGES, assert_same
from tests.helpers.world import run_world

__all__ = ["Feature", "Refusal", "hold", "hold_on_two_hosts"]

Play = Callable[[Callable[[], Strategy], Path], Any]
"""Given what makes fresh strategies and a folder that all ranks share, what it did: to be compared with DDP's."""


@dataclass(frozen=True)
class Refusal:
    """An error on every rank.

    Args:
        message: a regular expression that it matches.
        reason: why, for the page.
    """

    message: str
    reason: str


@dataclass(frozen=True)
class Feature:
    """One line of the page.

    Args:
        name: of Lightning's, where it has one.
        play: what is done.
        bounds: by stage, the largest relative difference of a number to DDP's. Not there: every bit is the same.
        refused: by stage.
        ddp_refuses: whether DDP raises an error as well.
        alone: whether one process is as DDP all the same.
        why: what the page says of bounds.
        options: of the strategy.
    """

    name: str
    play: Play
    _: KW_ONLY
    bounds: Mapping[int, float] = field(default_factory=dict)
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    ddp_refuses: bool = False
    alone: bool = False
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def verdict(self, stage: int) -> str:
        """What the page says of a stage."""
        if stage in self.refused:
            return "refused"
        return "as DDP" if stage not in self.bounds else f"within {self.bounds[stage]:g}"

    @property
    def remark(self) -> str:
        """What the page says beside that."""
        return "; ".join([*([self.why] if self.why else []), *sorted({r.reason for r in self.refused.values()})])


def hold(features: Sequence[Feature], ranks: int = 2) -> None:
    """Play features under DDP and in every stage, by ``ranks`` processes; by one, in stages 1 and 3.

    Raises:
        AssertionError: if a stage does not what a feature says of it.
    """
    if ranks == 1:
        features = [replace(feature, refused={}) if feature.alone else feature for feature in features]
    stages = {name: stage for name, stage in STAGES.items() if ranks > 1 or stage != 2}  # one has nothing to divide

    def play(rank: int) -> list[dict[str, dict[str, Any]]]:
        played = []
        for number, feature in enumerate(features):
            try:
                played.append(_played(feature, Path(shared) / str(number), {"ddp": 0, **stages}))
            except Exception as error:
                raise AssertionError(feature.name) from error
        return played

    with tempfile.TemporaryDirectory() as shared:
        ranks_played = run_world(ranks, play, timeout=200 + 20 * len(features))
    for feature, *results in zip(features, *ranks_played, strict=True):
        if feature.ddp_refuses:
            assert all("error" in result["ddp"] for result in results), f"DDP does it: {feature.name}"
        for name, stage in stages.items():
            if stage in feature.refused:
                told = [result[name].get("error", "") for result in results]
                assert all(re.search(feature.refused[stage].message, one) for one in told), (feature.name, name, told)
            else:
                given = [
                    {"ddp": {feature.name: result["ddp"]}, name: {feature.name: result[name]}} for result in results
                ]
                assert_same(given, [name], bound=feature.bounds.get(stage, 0.0))


def hold_on_two_hosts(feature: Feature, stages: Sequence[int] = (1, 2, 3)) -> None:
    """Play a feature by four ranks of one host and by four on two hosts, in those of ``stages`` that do not refuse it.

    Raises:
        AssertionError: if a bit differs.
    """
    played = {name: stage for name, stage in STAGES.items() if stage in {*stages} - feature.refused.keys()}

    def play(rank: int) -> dict[str, dict[str, Any]]:
        return _played(feature, Path(shared), played)

    found = []
    for per_host in ("", "2"):
        with tempfile.TemporaryDirectory() as shared:
            found.append(run_world(4, play, timeout=250, environment={RANKS_PER_HOST: per_host}))
    assert_same([{"one": one, "two": two} for one, two in zip(*found, strict=True)], ["two"], expected="one")


def _played(feature: Feature, shared: Path, stages: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """What came of it by name of the stage, of which 0 is DDP."""
    results: dict[str, dict[str, Any]] = {}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice of Lightning's, under any strategy
        for name, stage in stages.items():
            make = functools.partial(_strategy, feature, stage)
            folder = shared / name.replace(" ", "_")
            folder.mkdir(parents=True, exist_ok=True)
            refused = stage in feature.refused if stage else feature.ddp_refuses
            if not refused:
                results[name] = {"made": feature.play(make, folder)}
                continue
            try:
                feature.play(make, folder)
                results[name] = {}
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def _strategy(feature: Feature, stage: int) -> Strategy:
    if not stage:
        return DDPStrategy(find_unused_parameters=True)
    return ZeroStrategy(stage, units=["Block"], **feature.options)  # type: ignore[arg-type]
