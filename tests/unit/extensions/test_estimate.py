from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import build_plan
from lightning_zero.config import HostOffload, NvmeOffload
from lightning_zero.errors import readable_size
from lightning_zero.extensions.planner.costs import OptimizerCost
from lightning_zero.extensions.planner.estimate import MemoryEstimate, estimate_memory, fullest_rank, parse_count

GB = 10**9
HALF = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}

# Table 1 of the ZeRO paper: GB of one rank with stages 1, 2 and 3, by parameters in billions and ranks.
TABLE = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


def at_rest(estimate: MemoryEstimate) -> list[float]:
    """GB for no stage, 1, 2 and 3."""
    return [estimate.stages[name].rest.total / GB for name in ("none", "zero1", "zero2", "zero3")]


@pytest.mark.parametrize(("billions", "world_size"), [(size, ranks) for size, row in TABLE.items() for ranks in row])
def test_table_1_of_the_paper(billions: float, world_size: int) -> None:
    """The paper rounds its small numbers, and cuts its large ones off."""
    none, *stages = at_rest(estimate_memory(billions * GB, world_size=world_size, **HALF))
    assert none == 16 * billions
    for ours, paper in zip(stages, TABLE[billions][world_size], strict=True):
        digits = max(0, 2 - len(str(int(paper)))) + (paper < 1) if paper < 100 else 0
        assert ours == pytest.approx(paper, abs=1 if paper >= 100 else 0.51 * 10**-digits)


@pytest.fixture
def model() -> nn.Module:
    """16 layers of 256 x 256: nothing is padded on 8 ranks."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("settings", [{}, {"param_dtype": torch.bfloat16}])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_count_is_the_module_without_its_slots(
    model: nn.Module, settings: dict[str, Any], optimizer: str, accelerator: bool
) -> None:
    given = {"world_size": 8, "optimizer": optimizer, "accelerator": accelerator, **settings}
    module, count = estimate_memory(model, **given), estimate_memory(16 * 256**2, **given)
    assert list(module.stages) == list(count.stages)
    for name, stage in module.stages.items():
        rest = stage.rest
        assert count.stages[name].rest.total == rest.total - rest.slots - rest.gradient_slots, name
        if accelerator and stage.peak.temporaries:
            assert count.stages[name].peak.temporaries == stage.peak.temporaries, name
    assert count.within_nbytes("zero2") == module.within_nbytes("zero2")


def test_what_leaves_a_host_does_not_grow_with_its_ranks() -> None:
    one, two, four = (estimate_memory(1e6, world_size=2 * ranks, hosts=2) for ranks in (1, 2, 4))
    for name, copies in (("zero1", 2), ("zero2", 2), ("zero3", 3)):
        assert [estimate.leaving_nbytes(name) for estimate in (one, two, four)] == [copies * 4 * 10**6 // 2] * 3
    assert [estimate.leaving_nbytes("none") for estimate in (one, two, four)] == [4 * 10**6, 6 * 10**6, 7 * 10**6]
    assert "leaves a node in a step" in two.describe()
    alone = estimate_memory(1e6, world_size=4)
    assert alone.leaving_nbytes("zero3") == 0
    assert "leaves a node" not in alone.describe()
    for hosts in (0, 3):
        with pytest.raises(ValueError, match=f"divides the 4 ranks, got {hosts}"):
            estimate_memory(1e6, world_size=4, hosts=hosts)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_is_what_its_plan_says(model: nn.Module, stage: int) -> None:
    settings = {"param_dtype": torch.bfloat16, "prefetch": 2}
    estimate = estimate_memory(model, world_size=4, optimizer="SGD", **settings)
    plan = build_plan(model, stage=stage, world_size=4, **settings)
    sgd = OptimizerCost.of("SGD")
    found = estimate.stages[f"zero{stage}"]
    assert found.rest == plan.expected_memory(optimizer=sgd, receive_buffer=False)
    assert found.peak == plan.expected_memory(optimizer=sgd, receive_buffer=False, peak=True)
    assert estimate_memory(plan, optimizer="SGD").stages[f"zero{stage}"] == found
    assert estimate_memory(plan, optimizer="SGD").stages["none"] == estimate.stages["none"]


def test_a_plan_with_offload_has_its_own_name(model: nn.Module) -> None:
    plan = build_plan(model, stage=2, world_size=2, offload=HostOffload())
    assert list(estimate_memory(plan).stages) == ["none", "zero2_offload"]
    nvme = build_plan(model, stage=3, world_size=2, offload=NvmeOffload(path="/never/looked/at"))
    assert estimate_memory(nvme).stages["zero3_offload"].disk.total > 0


def test_no_stage_with_autocast(model: nn.Module) -> None:
    """16 bytes of a parameter at rest; in backward a copy in bfloat16 and one layer's gradient beside."""
    none = estimate_memory(model, world_size=2, param_dtype=torch.bfloat16).stages["none"]
    numel = 16 * 256**2
    assert none.rest.total == 16 * numel
    assert (none.peak.weights, none.peak.raw_gradients) == (2 * numel, 4 * 256**2)


def test_optimizers_that_need_whole_parameters(model: nn.Module) -> None:
    """Each rank owns its share of whole copies beside the masters; offloaded on an accelerator they are refused."""
    estimate = estimate_memory(model, world_size=8, optimizer="Muon", accelerator=True)
    assert list(estimate.stages) == ["none", "zero1", "zero2", "zero3"]
    assert estimate.stages["zero3"].rest.optimizer == 2 * 4 * 16 * 256**2 // 8


def test_a_count_has_the_copies_of_whole_parameters_too() -> None:
    """Muon keeps one tensor, and an owner a copy of each parameter that it steps on."""
    stages = estimate_memory(8000, world_size=8, optimizer="Muon").stages
    assert stages["none"].rest.optimizer == 4 * 8000
    assert [stages[name].rest.optimizer for name in ("zero1", "zero2", "zero3")] == [2 * 4 * 1000] * 3


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
def test_the_rank_that_holds_most_counts(optimizer: str, stage: int, world_size: int) -> None:
    """Which is not the first: of 5, 4 and 4 parts dealt out to two ranks, it gets 5 and the second one gets 8."""
    sizes = [(5, 400), (4, 400), (4, 400), (3, 7)]
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=columns == 3, device="meta") for columns, rows in sizes))
    plan = build_plan(model, stage=stage, world_size=world_size)
    cost = OptimizerCost.of(optimizer)
    totals = [plan.expected_memory(rank=rank, optimizer=cost).total for rank in range(world_size)]
    assert fullest_rank(plan, whole=cost.whole) == totals.index(max(totals))
    found = estimate_memory(model, world_size=world_size, optimizer=optimizer, receive_buffer=True)
    assert found.stages[f"zero{stage}"].rest.total == max(totals)


# ------------------------------------------------------------------------------------------------------ recommendations


@pytest.fixture
def estimate() -> MemoryEstimate:
    """The paper's: 120, 31.4, 16.6 and 1.88 GB; with offload 15 and 0 on the device, 1.88 and 2.11 on the host."""
    return estimate_memory("7.5B", world_size=64, **HALF)


@pytest.mark.parametrize(
    ("device", "activations", "expected"),
    [
        (121 * GB, 0, "none"),
        (121 * GB, GB, "none"),
        (120 * GB, 0, "zero1"),  # nothing would be left for activations
        (119 * GB, 0, "zero1"),
        (32 * GB, 0, "zero1"),
        (32 * GB, GB, "zero2"),
        (20 * GB, 0, "zero2"),
        (16 * GB, 0, "zero3"),
        (GB, 0, "zero3_offload"),
    ],
)
def test_the_first_stage_that_fits_is_recommended(
    estimate: MemoryEstimate, device: int, activations: int, expected: str
) -> None:
    advice = estimate.recommend(device, activations_nbytes=activations)
    assert advice.name == expected
    assert advice.fits[0] == expected
    assert advice.reason.startswith(f"{expected} needs ")


def test_nothing_is_recommended_while_nobody_knows_the_activations(estimate: MemoryEstimate) -> None:
    advice = estimate.recommend(32 * GB)
    assert (advice.name, advice.fits[0]) == (None, "zero1")
    assert advice.reason.startswith(
        "Activations are not counted. Of 32 GB so much stays free for them: 594 MB with zero1, 15.4 GB with zero2, "
        "30.1 GB with zero3. Slots"
    )
    assert "16.6 GB with zero2_offload" not in advice.reason
    assert "so much stays free for them: 1 GB with zero3_offload." in estimate.recommend(GB).reason
    # What does not fit without any does not fit at all.
    assert estimate.recommend(GB, host_nbytes=GB).reason.startswith("Nothing fits into 1 GB: ")


OF_8_MACHINES = {"world_size": 64, "hosts": 8, "accelerator": True, **HALF}


def test_host_memory_is_that_of_a_machine_for_all_its_ranks() -> None:
    estimate = estimate_memory("7.5B", **OF_8_MACHINES)
    # On each of 8 machines an eighth of 16 bytes for each parameter, and of the 2 that they are gathered from.
    assert estimate.host_nbytes("zero3_offload") == 18 * 7_500_000_000 // 8
    assert estimate.host_nbytes("zero3") == 0
    table = estimate.describe(offload=True)
    row = next(line for line in table.splitlines() if line.startswith("host memory of a node, 8 ranks"))
    assert row.endswith(" 15 GB        16.9 GB")
    assert "host memory" not in estimate.describe()
    assert estimate.recommend(GB, host_nbytes=17 * GB, activations_nbytes=0).name == "zero3_offload"
    advice = estimate.recommend(GB, host_nbytes=16 * GB, activations_nbytes=0)
    assert (advice.name, advice.fits) == (None, ())
    needs = "zero3_offload needs 16.9 GB of host memory for 8 ranks of a node, which has 16 GB"
    assert f"zero2_offload needs 15 GB on the device; {needs}." in advice.reason


def test_ranks_on_cpus_compute_in_host_memory() -> None:
    """16 bytes of a parameter, and a temporary tensor of a step is not in a count."""
    estimate = estimate_memory(1e9, world_size=4, hosts=2)
    assert estimate.host_nbytes("none") == 2 * 16 * GB
    assert estimate.host_nbytes("none", activations_nbytes=GB) == 2 * 17 * GB
    assert estimate.host_nbytes("zero3_offload") == 2 * 4 * GB
    assert estimate.recommend(16 * GB + 1, host_nbytes=32 * GB, activations_nbytes=0).name == "none"
    tight = estimate.recommend(16 * GB, host_nbytes=32 * GB, activations_nbytes=0)
    assert tight.name == "zero1"
    assert "none needs 16 GB on the device, which leaves nothing for activations" in tight.reason
    assert estimate.recommend(17 * GB, host_nbytes=32 * GB, activations_nbytes=GB).name == "zero1"


def test_activations_may_be_too_many(estimate: MemoryEstimate) -> None:
    advice = estimate.recommend(24 * GB, activations_nbytes=30 * GB)
    assert (advice.name, advice.reason) == (None, "30 GB of activations do not fit into 24 GB.")


def test_sizes_of_memory_are_not_negative(estimate: MemoryEstimate) -> None:
    with pytest.raises(ValueError, match="negative"):
        estimate.recommend(-1)


# ---------------------------------------------------------------------------------------------------------------- table


def test_the_table_has_a_column_for_each_stage(estimate: MemoryEstimate) -> None:
    lines = estimate.describe().splitlines()
    assert lines[0] == "7,500,000,000 parameters, AdamW, 16-mixed with gradients in float16, 64 ranks"
    assert lines[2].split()[-4:] == ["none", "zero1", "zero2", "zero3"]
    rest = next(line for line in lines if line.startswith("at rest"))
    assert re.split(" {2,}", rest)[-4:] == ["120 GB", "31.4 GB", "16.6 GB", "1.88 GB"]
    assert "slots and buckets" in lines[-1]
    assert "zero3_offload" in estimate.describe(offload=True)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (31_406_250_000, "31.4 GB"),
        (120 * GB, "120 GB"),
        (4 * 10**15, "4 PB"),
        (4 * 10**18, "4,000 PB"),
    ],
)
def test_decimal_units(nbytes: int, text: str) -> None:
    assert readable_size(nbytes) == text


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "count"),
    [("7.5B", 75 * 10**8), ("350M", 35 * 10**7), ("1t", 10**12), (1e3, 1000), ("7,500,000", 75 * 10**5)],
)
def test_counts(text: str | float, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "B", "7.5Q", "-3", 0, "nan", "inf", "many", "7,5B", "7,50", "1e300", True, b"7", None]
)
def test_what_is_no_count(text: Any) -> None:
    with pytest.raises(ValueError, match="number of parameters"):
        parse_count(text)


@pytest.mark.parametrize(
    ("settings", "error"),
    [({}, "world_size"), ({"world_size": 0}, "world_size"), ({"world_size": 2, "units": ["Block"]}, "has no units")],
)
def test_settings_of_a_count(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        estimate_memory("7.5B", **settings)


@pytest.mark.parametrize("settings", [{"world_size": 3}, {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.half}])
def test_a_plan_has_its_own_settings(model: nn.Module, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="own world size and settings"):
        estimate_memory(build_plan(model, world_size=2), **settings)


@pytest.mark.parametrize("settings", [{"stage": 2}, {"offload": HostOffload()}])
def test_a_module_is_estimated_for_all_stages(model: nn.Module, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="All stages are estimated"):
        estimate_memory(model, world_size=2, **settings)


@pytest.mark.parametrize("optimizer", ["adam", "Nope", None, 3])
def test_what_is_no_optimizer(model: nn.Module, optimizer: Any) -> None:
    """A class that is not torch's is given as a class, or with its module."""
    with pytest.raises(ValueError, match="optimizer"):
        estimate_memory(model, world_size=2, optimizer=optimizer)
    assert OptimizerCost.of("elsewhere.Adam").whole
    assert not OptimizerCost.of("torch.optim.Adam").whole


def test_a_number_of_parameters_is_divided_by_tensor_parallel_ranks() -> None:
    """As much as half the model takes on half of the ranks; what leaves a node is of both ranks of each group.

    On CPUs the four ranks of a node that have the same part exchange directly with those of the other node: four times
    what two hops take.
    """
    for accelerator, directly in ((True, 1), (False, 4)):
        whole = estimate_memory("8B", world_size=16, hosts=2, tensor_parallel_size=2, accelerator=accelerator)
        half = estimate_memory("4B", world_size=8, hosts=2, accelerator=accelerator)
        for name, stage in half.stages.items():
            assert whole.stages[name] == stage
            times = 1 if name == "none" else directly
            assert whole.leaving_nbytes(name) == 2 * times * half.leaving_nbytes(name) > 0
    assert whole.numel == 8 * 10**9
    assert "16 ranks in tensor-parallel groups of 2" in whole.describe()
