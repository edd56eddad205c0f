from __future__ import annotations

import re

import pytest
import torch

from lightning_zero import build_plan
from lightning_zero.config import HostOffload, NvmeOffload, Offload
from lightning_zero.errors import readable_size
from lightning_zero.extensions.planner.costs import OptimizerCost
from tests.helpers.plan_models import Gpt, Llama70B, on_meta


def test_equal_units_share_a_row() -> None:
    text = build_plan(on_meta(Llama70B), world_size=8).describe()
    assert "blocks.0 … .79 (80 alike)" in text
    assert "total (83 units)" in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_totals_traffic_and_memory(stage: int) -> None:
    plan = build_plan(on_meta(Gpt), stage=stage, world_size=3)
    text = plan.describe()
    assert f"{sum(spec.numel for spec in plan.parameters):,}" in text
    assert f"{plan.expected_traffic().total.numel:,}" in text
    assert readable_size(plan.expected_memory(receive_buffer=False).total) in text
    assert readable_size(plan.expected_memory(receive_buffer=False, peak=True).total) in text


def test_memory_is_that_of_the_optimizer_and_the_device() -> None:
    plan = build_plan(on_meta(Gpt), world_size=3)
    sgd = OptimizerCost.of("SGD", momentum=0.9, weight_decay=0.1)
    text = plan.describe(optimizer=sgd, accelerator=True)
    assert "memory of rank 0, SGD" in text
    peak = plan.expected_memory(receive_buffer=False, optimizer=sgd, accelerator=True, peak=True)
    assert readable_size(peak.total) in text


def columns(text: str, heading: str) -> dict[str, list[str]]:
    """A table's rows by their first cell."""
    table = next(block for block in text.split("\n\n") if block.startswith(heading)).splitlines()
    assert table[1] == "-" * len(table[1])
    rows = [re.split("  +", line) for line in (table[0], *table[2:])]
    return {row[0]: row[1:] for row in rows}


def test_offloaded_bytes_have_a_column_for_each_place() -> None:
    def memory(offload: Offload | None) -> dict[str, list[str]]:
        plan = build_plan(on_meta(Gpt), world_size=3, param_dtype=torch.bfloat16, offload=offload)
        return columns(plan.describe(), heading)

    heading = "memory of rank 0, AdamW"
    masters = readable_size(152_256 * 4)
    assert memory(None)[heading] == ["at rest", "at peak"]
    assert "weights" not in memory(None)
    host = memory(HostOffload())
    assert host[heading] == ["device", "host", "device at peak"]
    assert host["masters"] == ["0 B", masters, "0 B"]
    assert host["slots"][1] == "-"
    assert host["weights"] == [readable_size(152_256 * 2), "0 B", readable_size(152_256 * 2)]
    disk = memory(NvmeOffload(path="/never/looked/at", buffer_mib=8.0))
    assert disk[heading] == ["device", "host", "disk", "device at peak"]
    # The root's region of 64 float32 is a page; those of two embeddings and four blocks are less than a page longer.
    assert disk["masters"] == ["0 B", "0 B", readable_size(4096 + 2 * 42 * 4096 + 4 * 17 * 4096), "0 B"]
    assert disk["buffers"] == ["-", "8.39 MB", "-", "-"]


@pytest.mark.parametrize(
    ("offload", "text"),
    [
        (HostOffload(), "Offloaded to the host: optimizer"),
        (HostOffload(optimizer=False, parameters=True), "Offloaded to the host: parameters"),
        (NvmeOffload(path="/never/looked/at", parameters=True), "Offloaded to the disk: optimizer and parameters"),
    ],
)
def test_what_is_offloaded_is_said_above_the_table(offload: Offload, text: str) -> None:
    assert build_plan(on_meta(Gpt), world_size=3, offload=offload).describe().splitlines()[1:3] == [text, ""]
