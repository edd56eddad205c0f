"""The page for those who come from another strategy: it knows every argument of theirs, and names what ours have."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from lightning_utilities.core import rank_zero

import lightning_zero
from tests.helpers.script import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
OURS = {
    name: getattr(lightning_zero, name)
    for name in [
        *("ActivationPolicy", "CheckpointPolicy", "Compression", "HostOffload", "LoaderPolicy", "NvmeOffload"),
        *("ZeroPrecision", "ZeroStrategy"),
    ]
}


def rows(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_of(heading: str) -> set[str]:
    """What the first column is about: ``name`` of ``name`` and of ``name=value``."""
    return {span.partition("=")[0] for row in rows(heading) for span in spans(row[0])}


def arguments_of(strategy: type) -> set[str]:
    return {n for n, p in inspect.signature(strategy).parameters.items() if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize(
    "strategy", [DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy], ids=lambda s: s.__name__
)
def test_every_argument_has_a_row(strategy: type) -> None:
    common, its = names_of("Arguments of all strategies"), names_of(f"From {strategy.__name__}")
    assert arguments_of(strategy) <= common | its
    assert strategy.__name__ in its  # the header of its table


def test_every_name_of_a_strategy_that_was_registered_for_deepspeed_has_a_row() -> None:
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("deepspeed")}
    assert names <= names_of("From DeepSpeedStrategy")


def test_arguments_that_ours_have_too_have_the_same_names() -> None:
    (same,) = (row for row in rows("Arguments of all strategies") if "accelerator" in row[0])
    assert set(spans(same[0])) <= arguments_of(lightning_zero.ZeroStrategy)
    assert not {"checkpoint_io"} & arguments_of(lightning_zero.ZeroStrategy)


def calls() -> list[str]:
    """Every call of a class of ours, or of a Trainer, that the page shows in a table."""
    found = [span for line in PAGE.splitlines() if line.startswith("|") for span in spans(line)]
    return sorted({span for span in found if span.partition("(")[0] in {*OURS, "Trainer"} and span.endswith(")")})


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize("call", calls())
def test_what_is_shown_instead_is_valid(call: str) -> None:
    """Policies refuse what they cannot do when they are built; the Trainer's arguments are looked up."""
    if call.startswith("Trainer("):
        node: Any = ast.parse(call, mode="eval").body
        inspect.signature(pl.Trainer).bind(**{keyword.arg: None for keyword in node.keywords})
    else:
        eval(call, {**OURS, "torch": torch})


def test_names_of_strategies_are_registered() -> None:
    known = set(StrategyRegistry.available_strategies())
    shown = {span for span in spans(PAGE) if re.fullmatch(r"zero\d(_offload)?", span)}
    assert shown <= known
    assert {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"} <= shown


def test_the_trainer_of_the_twin_package_refuses_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "log", rank_zero.log)  # which the twin takes for itself when it is imported
    twin = pytest.importorskip("pytorch_lightning")
    for strategy in ("zero3", lightning_zero.ZeroStrategy()):
        with pytest.raises(ValueError, match=r"invalid strategy name: `strategy=('zero3'|<ZeroStrategy for )"):
            twin.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
