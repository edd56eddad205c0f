from __future__ import annotations

import pytest

from lightning_zero.plan import build_plan
from lightning_zero.plan.report import format_nbytes
from tests.plan.models import Gpt, Llama70B, on_meta


def test_equal_units_share_a_row() -> None:
    text = build_plan(on_meta(Llama70B), world_size=8).describe()
    assert "blocks.0 … .79 (80 alike)" in text
    assert "total (83 units)" in text
    assert len(text.splitlines()) < 40


def test_a_repeating_pattern_of_units_shares_rows() -> None:
    text = build_plan(on_meta(Gpt, blocks=20), world_size=2, units=["Linear", "MultiheadAttention"]).describe()
    rows = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")]
    assert rows == [
        "blocks.0.attention … .19.attention (20 alike)",
        "blocks.0.mlp.0 … .19.mlp.0 (20 alike)",
        "blocks.0.mlp.2 … .19.mlp.2 (20 alike)",
        "head",
    ]


def test_the_columns_are_aligned() -> None:
    table = build_plan(on_meta(Gpt), world_size=3).describe().split("\n\n")[1].splitlines()
    assert table[1] == "-" * len(table[1])
    end = table[0].index("elements") + len("elements")
    assert all(line[end - 1].isdigit() and line[end : end + 2] == "  " for line in table[2:])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_totals_traffic_and_memory(stage: int) -> None:
    plan = build_plan(on_meta(Gpt), stage=stage, world_size=3)
    text = plan.describe()
    assert f"{plan.numel:,}" in text
    assert f"{plan.expected_traffic().total.numel:,}" in text
    assert format_nbytes(plan.expected_memory().total) in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**30, "1.00 GiB"), (3 * 2**50, "3072.00 TiB")],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
