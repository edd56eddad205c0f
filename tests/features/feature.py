"""A feature of Lightning: what a user does with it, and what becomes of it in every stage, beside DDP."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_zero import ZeroStrategy
from tests.helpers.world import run_world
from tests.strategy.runs import STAGES, assert_same

__all__ = ["Feature", "Refusal", "hold"]

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


@dataclass(frozen=True, kw_only=True)
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


def hold(feature: Feature, ranks: int = 2) -> None:
    """Play a feature under DDP and in every stage, by ``ranks`` processes; by one, in stages 1 and 3.

    Raises:
        AssertionError: if a stage does not what the feature says of it.
    """
    if ranks == 1 and feature.alone:
        feature = replace(feature, refused={})
    with tempfile.TemporaryDirectory() as shared:
        results = run_world(ranks, lambda rank: _played(feature, Path(shared), ranks), timeout=200)
    if feature.ddp_refuses:
        assert all("error" in result["ddp"] for result in results), "DDP does it"
    for name, stage in STAGES.items():
        if not _is_played(stage, ranks):
            continue
        if stage in feature.refused:
            for rank, result in enumerate(results):
                assert re.search(feature.refused[stage].message, result[name].get("error", "")), (rank, result[name])
        else:
            assert_same(results, [name], bound=feature.bounds.get(stage, 0.0))


def _is_played(stage: int, ranks: int) -> bool:
    """One process alone has nothing to divide: there stage 2 does what stage 1 does."""
    return ranks > 1 or stage != 2


def _played(feature: Feature, shared: Path, ranks: int) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    makers: dict[str, Callable[[], Strategy]] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True)}
    for name, stage in STAGES.items():
        if not _is_played(stage, ranks):
            continue
        makers[name] = lambda stage=stage: ZeroStrategy(stage, units=["Block"], **feature.options)  # type: ignore[misc]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice of Lightning's, under any strategy
        for name, make in makers.items():
            folder = shared / name.replace(" ", "_")
            folder.mkdir(exist_ok=True)
            refused = feature.ddp_refuses if name == "ddp" else STAGES[name] in feature.refused
            if not refused:
                results[name] = {"made": feature.play(make, folder)}
                continue
            try:
                feature.play(make, folder)
                results[name] = {}
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results
