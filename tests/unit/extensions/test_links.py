"""What a step sends between nodes and within them, by formulas written out and as it was measured."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import Compression, build_plan
from lightning_zero.config import Placement
from lightning_zero.errors import readable_size
from lightning_zero.extensions.compression.codes import Format, format_nbytes
from lightning_zero.extensions.planner.estimate import (
    ROUNDED_NBYTES,
    MemoryEstimate,
    estimate_memory,
    on_links,
)
from tests.helpers.script import ROOT

P = 10**6


def on_hosts(hosts: int, ranks: int, *, numel: int = P, **settings: Any) -> MemoryEstimate:
    return estimate_memory(numel, world_size=hosts * ranks, hosts=hosts, **settings)


# Bytes for each parameter that left a host, of 2 with 2 ranks each: docs/benchmarks.md, "Between nodes".
MEASURED = {
    ("none", None, None): 6.02,
    ("zero1", None, None): 4.01,
    ("zero1", "int8", None): 2.54,
    ("zero1", None, 2): 4.01,
    ("zero1", "int8", 2): 1.07,
    ("zero2", None, None): 4.01,
    ("zero2", "int8", None): 2.54,
    ("zero3", None, None): 5.00,
    ("zero3", "int8", None): 1.33,
    ("zero3", None, 2): 4.01,
    ("zero3", "int8", 2): 1.07,
    ("zero3", None, "kept"): 4.01,
    ("zero3", "int8", "kept"): 1.07,
}
MEASURED_IN_BF16 = {
    ("none", None, None): 6.02,
    ("zero1", None, None): 3.00,
    ("zero1", "int8", None): 1.06,
    ("zero2", "int8", None): 1.06,
    ("zero3", None, None): 3.50,
    ("zero3", "int8", None): 1.33,
    ("zero3", "int8", "kept"): 1.07,
}
CASES = [(*case, nbytes, None) for case, nbytes in MEASURED.items()]
CASES += [(*case, nbytes, torch.bfloat16) for case, nbytes in MEASURED_IN_BF16.items()]


@pytest.fixture(scope="module")
def measured_model() -> nn.Module:
    """The 10M GPT of ``benchmarks/network.py``."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13, of its own import, if it is the first one
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        from engines import SIZES
        from offload_training import GPT
    with torch.device("meta"):
        return GPT(*SIZES["10m"])


@pytest.mark.parametrize(("stage", "rounded", "shards", "measured", "dtype"), CASES)
def test_what_leaves_a_host_is_what_was_measured(
    measured_model: nn.Module, stage: str, rounded: Any, shards: Any, measured: float, dtype: torch.dtype | None
) -> None:
    """In ``float32`` and ``bf16-mixed``."""
    settings: dict[str, Any] = {"world_size": 4, "hosts": 2, "units": ["Block"], "param_dtype": dtype}
    settings |= {"reduce_dtype": dtype and torch.float32, "secondary_shards": shards == "kept"}
    settings["shard_within"] = None if shards == "kept" else shards
    both = dtype is not None or stage == "zero3"
    weights = rounded if both and shards in (None, "kept") else None
    compression = Compression(weights=weights, gradients=rounded) if rounded else None
    estimate = estimate_memory(measured_model, compression=compression, **settings)
    # Headers are in what was measured, and the page has two digits.
    assert estimate.leaving_nbytes(stage) / estimate.numel == pytest.approx(measured, rel=0.012)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"| {measured:.2f} | " in page.partition("## Between nodes")[2]
    exact = estimate_memory(measured_model, **settings)
    assert estimate.within_nbytes(stage) == exact.within_nbytes(stage)  # nothing is rounded within a host


@pytest.mark.parametrize("kind", ROUNDED_NBYTES)
def test_rounded_elements_take_what_they_take_on_the_wire(kind: Format) -> None:
    assert format_nbytes(kind, 640) == 640 * ROUNDED_NBYTES[kind]


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (4, 8), (3, 1)])
def test_the_formulas_of_the_page_about_clusters(hosts: int, ranks: int, micro_steps: int) -> None:
    """With k micro-steps gradients cross k times in ``zero2`` and ``zero3``, and weights in ``zero3``."""
    estimate = on_hosts(hosts, ranks, micro_steps=micro_steps)
    sums = {"zero1": 4 + 4, "zero2": 4 + 4 * micro_steps, "zero3": (8 + 4) * micro_steps}
    for name, nbytes in sums.items():
        assert estimate.leaving_nbytes(name) == nbytes * P * (hosts - 1) // hosts, name
        assert estimate.within_nbytes(name) == nbytes * P * (ranks - 1) // ranks, name
    world = hosts * ranks
    assert estimate.leaving_nbytes("none") == 8 * P * (world - 1) // world
    assert estimate.within_nbytes("none") == 8 * P * (world - 1) // world * (ranks - 1) // ranks
    if ranks > 1:
        parted = on_hosts(hosts, ranks, shard_within=ranks, micro_steps=micro_steps)
        for name, nbytes in sums.items():
            assert parted.leaving_nbytes(name) == 8 * P * (hosts - 1) // hosts, name
            assert parted.within_nbytes(name) == nbytes * P * (ranks - 1) // ranks, name


def test_rings_of_accelerators_pass_every_host_with_all_that_a_rank_sends() -> None:
    """2 hosts of 8 in bfloat16: 31 / 32 of it would be 4 hosts of 8."""
    estimate = on_hosts(2, 8, accelerator=True, param_dtype=torch.bfloat16)
    assert estimate.leaving_nbytes("zero1") == (4 + 2) * P * 15 // 16
    assert estimate.within_nbytes("zero3") == (4 + 2 * 2) * P * 15 // 16 * 7 // 8
    parted = on_hosts(2, 8, accelerator=True, param_dtype=torch.bfloat16, shard_within=8)
    assert parted.leaving_nbytes("zero3") == 8 * P // 2  # gradient shards, in float32
    assert parted.within_nbytes("zero3") == (4 + 2 * 2) * P * 7 // 8


@pytest.mark.parametrize("exchange", [{"secondary_shards": True}, {"compression": Compression(gradients="int8")}])
def test_accelerators_take_two_hops_where_something_is_rounded_or_kept(exchange: dict[str, Any]) -> None:
    """As the CPU does, but for what goes as before: without a stage, and whole within shard groups."""
    there, here = (on_hosts(4, 8, accelerator=accelerator, **exchange) for accelerator in (True, False))
    assert there.leaving_nbytes("zero3") == here.leaving_nbytes("zero3") < on_hosts(4, 8).leaving_nbytes("zero3")
    assert there.within_nbytes("zero3") == here.within_nbytes("zero3")
    assert there.leaving_nbytes("none") == on_hosts(4, 8, accelerator=True).leaving_nbytes("none")


def test_one_host_sends_nothing_to_others() -> None:
    estimate = on_hosts(1, 4)
    assert {estimate.leaving_nbytes(name) for name in estimate.stages} == {0}


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("name", ["none", "zero1", "zero3"])
def test_what_a_rank_sends_goes_over_one_of_both_links(name: str, rings: bool) -> None:
    estimate = on_hosts(4, 4, accelerator=rings)
    sent = estimate.leaving_nbytes(name) / 4 + estimate.within_nbytes(name)
    assert sent == pytest.approx(on_hosts(1, 16).within_nbytes(name), rel=1e-6)


def test_rounding() -> None:
    """Weights in ``zero3`` alone, gradients in every stage, and nothing that is as small already."""

    def leaving(stage: str, kind: Format, **settings: Any) -> int:
        weights = None if stage != "zero3" else "int8" if kind == "int4" else kind
        settings["compression"] = Compression(weights=weights, gradients=kind)
        return on_hosts(2, 2, **settings).leaving_nbytes(stage)

    assert leaving("zero2", "bfloat16") == (4 + 2) * P // 2
    assert leaving("zero3", "bfloat16") == (2 * 2 + 2) * P // 2
    assert leaving("zero1", "int4") == int((4 + 0.5625) * P) // 2
    assert leaving("zero3", "int4") == int((2 * 1.0625 + 0.5625) * P) // 2
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    narrow = on_hosts(2, 2, **half)
    assert leaving("zero3", "bfloat16", **half) == narrow.leaving_nbytes("zero3")
    assert leaving("zero3", "int8", **half) < narrow.leaving_nbytes("zero3")
    assert leaving("none", "int8") == on_hosts(2, 2).leaving_nbytes("none")


def test_shards_of_a_host_take_more_memory() -> None:
    """16 bytes of a parameter, divided by the ranks of a host: on the device, or in host memory."""
    numel = 8 * 10**6
    parted = on_hosts(4, 2, numel=numel, shard_within=2)
    assert parted.stages["zero3"].rest.total == 16 * numel // 2
    assert parted.stages["zero3_offload"].host.total == 16 * numel // 2
    assert parted.host_nbytes("zero3_offload") == 16 * numel
    assert on_hosts(4, 2, numel=numel).stages["zero3"].rest.total == 16 * numel // 8
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="meta") for _ in range(4)))
    module = estimate_memory(model, world_size=8, hosts=4, shard_within=2)
    count = on_hosts(4, 2, numel=4 * 256**2, shard_within=2)
    for name in ("zero1", "zero2"):
        assert module.leaving_nbytes(name) == count.leaving_nbytes(name)
        assert module.within_nbytes(name) == count.within_nbytes(name)


@pytest.mark.parametrize("half", [False, True])
def test_secondary_shards_of_a_number_of_parameters(half: bool) -> None:
    """4 (or 2) bytes of a weight cross once and 4 of a gradient in each micro-step; a host's 4 ranks keep a quarter."""
    weight = 2 if half else 4
    settings: dict[str, Any] = {"numel": 8 * P, "micro_steps": 3}
    settings |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
    kept, plain = on_hosts(2, 4, secondary_shards=True, **settings), on_hosts(2, 4, **settings)
    for name in ("zero3", "zero3_offload"):
        assert kept.leaving_nbytes(name) == (weight + 3 * 4) * 8 * P // 2
        assert kept.within_nbytes(name) == plain.within_nbytes(name)
        more = kept.stages[name].peak.total - plain.stages[name].peak.total
        assert more == kept.stages[name].rest.weights == weight * 8 * P // 4
        assert kept.host_nbytes(name) == plain.host_nbytes(name) + weight * 8 * P
    assert kept.stages["zero2"] == plain.stages["zero2"]
    precision = "bf16-mixed" if half else "32-true"
    shown = f"8,000,000 parameters, AdamW, {precision}, 8 ranks, 3 micro-steps in a step, secondary shards\n"
    assert shown in kept.describe()
    sent = kept.leaving_nbytes("zero3") // 4 + kept.within_nbytes("zero3")
    row = next(line for line in kept.describe().splitlines() if line.startswith("sent in a step"))
    assert row.endswith(f" {readable_size(sent)}")
    alone = on_hosts(1, 4, secondary_shards=True)
    assert alone.keeping is None
    assert alone.stages == on_hosts(1, 4).stages


def test_a_plan_with_secondary_shards_is_estimated_with_them() -> None:
    """Frozen units never cross again; those with something trainable cross in whole."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(6)))
    model[:2].requires_grad_(False)
    placement = replace(Placement.from_stage(3), keeping=2)
    plan = build_plan(model, placement=placement, world_size=4, units=["Linear"])
    estimate = estimate_memory(plan, hosts=2)
    assert estimate.keeping == 2
    assert estimate.leaving_nbytes("zero3") == 4 * (4 + 4) * 64 * 64 // 2
    rounded = estimate_memory(plan, hosts=2, compression=Compression(gradients="int4"))
    assert rounded.leaving_nbytes("zero3") == int(4 * (4 + 0.5625) * 64 * 64) // 2
    with pytest.raises(ValueError, match="A plan has its own"):
        estimate_memory(plan, hosts=2, secondary_shards=True)


@pytest.mark.parametrize("within", [None, 2])
def test_what_error_feedback_keeps_is_counted(within: int | None) -> None:
    """In float32, of a half of all sums, and with two shard groups of their average too."""
    numel = 4 * 256**2
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="meta") for _ in range(4)))
    ways = (partial(estimate_memory, model, world_size=4, hosts=2), partial(on_hosts, 2, 2, numel=numel))
    for estimated in ways:
        fed = estimated(shard_within=within, compression=Compression(gradients="int4", error_feedback=True))
        plain = estimated(shard_within=within, compression=Compression(gradients="int4"))
        for name in ("zero1", "zero2", "zero3"):
            kept = fed.stages[name].peak.total - plain.stages[name].peak.total
            assert kept == fed.stages[name].rest.transport == 4 * numel // 2 * (3 if within else 2) // 2
    alone = on_hosts(1, 4, compression=Compression(gradients="int4", error_feedback=True))
    assert alone.stages == on_hosts(1, 4, compression=Compression(gradients="int4")).stages


def test_only_copies_of_masters_are_rounded_in_stages_1_and_2() -> None:
    """A normalisation in full precision keeps weights that stay as they come, unless a bucket has copies beside it."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.LayerNorm(6400, bias=False))
    settings: dict[str, Any] = {"world_size": 4, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    settings["bucket_mib"] = 1e-3
    plan = build_plan(model, stage=1, full_precision=["LayerNorm"], **settings)
    traffic = plan.expected_traffic()
    assert (traffic.copies.numel, traffic.exact.numel) == (2 * 64 * 64, 6400)
    out = on_links(traffic, 2, rings=False, formats=("int8", None))[0]
    assert out == (int(2 * 4096 * 1.0625) + 4 * 6400 + 4 * (2 * 4096 + 6400)) // 2


def test_groups_of_several_hosts_exchange_directly() -> None:
    """4 hosts of 2 ranks in groups of 4: a rank sends a quarter of all to each of 3, of whom 2 are on another host."""
    estimate = on_hosts(4, 2, shard_within=4)
    ring = 2 * (4 * P // 4) // 2  # of a rank, to the one in its place of the other group
    assert estimate.leaving_nbytes("zero3") == 2 * (12 * P // 4 * 2 + ring)
    assert estimate.within_nbytes("zero3") == 12 * P // 4


def test_settings_that_do_not_go_together() -> None:
    for settings in ({"secondary_shards": True}, {"compression": Compression(weights="int8")}):
        with pytest.raises(ValueError, match="shard_within goes neither"):
            on_hosts(2, 2, shard_within=2, **settings)
