"""A fault of each kind in every run, and a thousand with ``pytest -m chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cases import cases
from tests.chaos.faults import FAULTS
from tests.chaos.play import Case, play

ALL = cases(1000)


def hold(case: Case) -> None:
    verdict = play(case)
    assert not verdict.wrong, "\n".join([*verdict.wrong, verdict.message])


@pytest.mark.parametrize("case", ALL[: len(FAULTS)], ids=str)
def test_a_fault_of_each_kind(case: Case) -> None:
    hold(case)


@pytest.mark.chaos
@pytest.mark.parametrize("case", ALL[len(FAULTS) :], ids=lambda case: f"{case}-step{case.step}")
def test_a_fault(case: Case) -> None:
    hold(case)
