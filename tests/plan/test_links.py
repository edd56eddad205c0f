"""What a step sends between hosts and within them, by formulas written out and as it was measured, and its seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.analysis import MemoryEstimate, estimate_memory
from lightning_zero.analysis.links import Way, describe_ways, fastest_way, parse_speed, ways_to_send
from lightning_zero.analysis.traffic import ROUNDED_NBYTES
from lightning_zero.comm.compression import Format, format_nbytes
from tests.helpers.script import ROOT

P = 10**6


def on_hosts(hosts: int, ranks: int, *, numel: int = P, **settings: Any) -> MemoryEstimate:
    return estimate_memory(numel, world_size=hosts * ranks, hosts=hosts, **settings)


# Bytes for each parameter that left a host, of 2 with 2 ranks each: docs/benchmarks.md, "Between hosts".
MEASURED = {
    ("none", None, None): 6.01,
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
}


@pytest.fixture(scope="module")
def measured_model() -> nn.Module:
    """The 10M GPT of ``benchmarks/network.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        from engines import SIZES
        from offload_training import GPT
    with torch.device("meta"):
        return GPT(*SIZES["10m"])


@pytest.mark.parametrize(("stage", "rounded", "within"), MEASURED)
def test_what_leaves_a_host_is_what_was_measured(
    measured_model: nn.Module, stage: str, rounded: str | None, within: int | None
) -> None:
    estimate = estimate_memory(measured_model, world_size=4, hosts=2, units=["Block"], shard_within=within)
    found = estimate.leaving_nbytes(stage, rounded=rounded) / estimate.numel
    assert found == pytest.approx(MEASURED[stage, rounded, within], rel=0.01)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"| {MEASURED[stage, rounded, within]:.2f} | " in page.partition("## Between hosts")[2]


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


def test_one_host_sends_nothing_to_others() -> None:
    estimate = on_hosts(1, 4)
    assert {estimate.leaving_nbytes(name) for name in estimate.stages} == {0}
    for name, stage in estimate.stages.items():
        assert estimate.within_nbytes(name) == stage.traffic.sent_nbytes, name


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("name", ["none", "zero1", "zero3"])
def test_what_a_rank_sends_goes_over_one_of_both_links(name: str, rings: bool) -> None:
    estimate = on_hosts(4, 4, accelerator=rings)
    sent = estimate.leaving_nbytes(name) / 4 + estimate.within_nbytes(name)
    assert sent == pytest.approx(estimate.stages[name].traffic.sent_nbytes, rel=1e-6)


def test_rounding() -> None:
    """Weights in ``zero3`` alone, gradients in every stage, and nothing that is as small already."""
    estimate = on_hosts(2, 2)
    assert estimate.leaving_nbytes("zero2", rounded="bfloat16") == (4 + 2) * P // 2
    assert estimate.leaving_nbytes("zero3", rounded="bfloat16") == (2 * 2 + 2) * P // 2
    assert estimate.leaving_nbytes("zero1", rounded="int4") == int((4 + 0.5625) * P) // 2
    assert estimate.leaving_nbytes("zero3", rounded="int4") == int((2 * 1.0625 + 0.5625) * P) // 2
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    narrow = on_hosts(2, 2, **half)
    assert narrow.leaving_nbytes("zero3", rounded="bfloat16") == narrow.leaving_nbytes("zero3")
    assert narrow.leaving_nbytes("zero3", rounded="int8") < narrow.leaving_nbytes("zero3")
    assert estimate.leaving_nbytes("none", rounded="int8") == estimate.leaving_nbytes("none")


def test_shards_of_a_host_take_more_memory_and_are_not_offloaded() -> None:
    """16 bytes of a parameter, divided by the ranks of a host."""
    numel = 8 * 10**6
    parted = on_hosts(4, 2, numel=numel, shard_within=2)
    assert list(parted.stages) == ["none", "zero1", "zero2", "zero3"]
    assert parted.stages["zero3"].rest.total == 16 * numel // 2
    assert on_hosts(4, 2, numel=numel).stages["zero3"].rest.total == 16 * numel // 8
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="meta") for _ in range(4)))
    module = estimate_memory(model, world_size=8, hosts=4, shard_within=2)
    count = on_hosts(4, 2, numel=4 * 256**2, shard_within=2)
    for name in ("zero1", "zero2"):
        assert module.leaving_nbytes(name) == count.leaving_nbytes(name)
        assert module.within_nbytes(name) == count.within_nbytes(name)


# ----------------------------------------------------------------------------------------------------------------- ways


def ways(memory: dict[str, int] | None = None, speeds: Any = (1e6, 4e6), **settings: Any) -> list[Way]:
    estimates = {None: on_hosts(2, 2, **settings), "node": on_hosts(2, 2, shard_within=2, **settings)}
    return ways_to_send(estimates, memory, speeds)


def named(found: list[Way]) -> dict[str, Way]:
    return {str(way): way for way in found}


def test_seconds_are_bytes_by_the_speed() -> None:
    """4 P bytes leave a host with a megabyte a second; a rank sends 4 P within, at four times the speed."""
    found = named(ways())
    assert (found["zero1"].between_seconds, found["zero1"].within_seconds) == (4.0, 1.0)
    assert found["none"].between_seconds == 6.0
    assert found['zero3 with shard_within="node"'].between_seconds == 4.0
    assert found["zero3 in int8"].between_seconds == pytest.approx(12 * 1.0625 / 4 / 2)
    assert found["zero3 in int8"].within_seconds == found["zero3"].within_seconds == 1.5
    assert {way.between_seconds for way in ways(speeds=(None, 1e6))} == {0.0}


def test_only_what_can_be_done_is_shown() -> None:
    assert not [way for way in ways(accelerator=True) if way.compression]
    found = ways()
    assert not [way for way in found if way.shard_within and "offload" in way.stage]
    assert not [way for way in found if way.stage == "none" and (way.compression or way.shard_within)]


def test_the_fastest_of_what_fits() -> None:
    """4 micro-steps: ``zero1`` sends gradients once, and takes 10 bytes of a parameter, ``shard_within`` 12 or 8."""
    found = ways(micro_steps=4)
    assert str(fastest_way(found)) == "zero1"
    assert fastest_way(found).peak_nbytes == 10 * P
    # 8 bytes are enough for all of zero3, which over the thin link is fastest with shards of a host.
    tight = ways({"device_nbytes": 8 * P}, micro_steps=4)
    assert str(fastest_way(tight)) == 'zero3 with shard_within="node"'
    assert fastest_way(tight).between_seconds == 4.0
    assert str(fastest_way(tight, rounded=True)) == "zero2 in int4"  # gradients four times, in 0.5625 bytes
    text = describe_ways(tight)
    assert 'Fastest by the links: zero3 with shard_within="node", 4.000 s between hosts and ' in text
    assert "8 MB at peak" in text
    assert "takes least memory" in text
    assert "With Compression, which rounds: zero2 in int4, " in text
    assert "what overlaps with computation is not subtracted" in text
    nothing = ways({"device_nbytes": 10, "host_nbytes": 10})
    assert fastest_way(nothing) is None
    assert describe_ways(nothing).endswith("Fastest by the links: nothing, as nothing fits.")


def test_of_equals_the_one_that_takes_least_memory() -> None:
    """But nothing is offloaded that need not be."""
    assert str(fastest_way(ways())) == "zero2"
    assert str(fastest_way(ways({"device_nbytes": 3 * P}))) == "zero3_offload"


@pytest.mark.parametrize(
    ("text", "speed"),
    [("10Gbit", 1.25e9), ("10Gbit/s", 1.25e9), ("100GB/s", 1e11), ("200 Mbit/s", 25e6), ("1.5kB", 1500), ("8bit/s", 1)],
)
def test_speeds(text: str, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["10", "10G", "10Gb/s", "10Gbps", "0Gbit", "-1GB/s", "fast", "10GiB/s", "1,5GB/s", ""])
def test_what_is_no_speed(text: str) -> None:
    """``Gb`` may be meant as either, and would be wrong by a factor of 8."""
    with pytest.raises(ValueError, match=r"a speed like '10Gbit/s' or '1\.25GB/s' is needed, got"):
        parse_speed(text)
