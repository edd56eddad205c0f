from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ZeroPlan, build_plan
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement
from tests.helpers.plan_models import Gpt, on_meta


class Mixed(nn.Module):
    """Convolutions, a batch norm, a frozen layer and a float64 scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 64)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        for layer in self.layers:
            layer[2].requires_grad_(False)

    def forward(self) -> None: ...


def every_name(module: nn.Module) -> list[str]:
    return sorted(name for name, _ in module.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("build", [Gpt, Mixed])
def test_every_parameter_is_planned_once(
    build: type[nn.Module], param_dtype: torch.dtype | None, stage: int, world_size: int
) -> None:
    model = on_meta(build)
    plan = build_plan(model, stage=stage, world_size=world_size, bucket_mib=0.05, param_dtype=param_dtype)
    assert sorted(spec.name for spec in plan.parameters) == every_name(model)
    assert (plan.root == 0) == (stage == 3 and (world_size > 1 or param_dtype is not None))
    for unit in plan.units:
        assert all(layout.world_size == world_size for layout in unit.layouts)
        assert (unit.gradient_slot is not None) == (stage != 1 and any(spec.trainable for spec in unit.parameters))


def test_sharded_parameters_have_units_of_modules() -> None:
    plan = build_plan(on_meta(Gpt), world_size=2)
    assert [unit.module for unit in plan.units] == ["", "embedding", *(f"blocks.{i}" for i in range(4)), "head"]
    # Embedding and head have 512,000 bytes and one slot. The blocks have 49,984 elements = 199,936 bytes; none is in
    # the slot of one beside it.
    assert [unit.slot for unit in plan.units] == [0, 1, 2, 1, 2, 3, 1]
    assert [unit.gradient_slot for unit in plan.units] == [0, 1, 2, 1, 2, 3, 1]
    assert [unit.ancestors for unit in plan.units] == [(), *[(0,)] * 6]


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (2, 3), (9, 4)])
def test_prefetch_decides_the_slots_of_a_pool(prefetch: int, slots: int) -> None:
    plan = build_plan(on_meta(Gpt), world_size=2, units=["Block"], prefetch=prefetch)
    assert len({unit.slot for unit in plan.units[1:]}) == slots
    assert len(plan.slots) == 1 + slots


def test_replicated_parameters_have_buckets_in_backward_order() -> None:
    model = on_meta(Gpt, blocks=1)
    plan = build_plan(model, stage=2, world_size=2, bucket_mib=0.25)
    assert all(unit.module is None and unit.slot is None and not unit.ancestors for unit in plan.units)
    assert [spec.name for spec in plan.parameters] == [name for name, _ in model.named_parameters()][::-1]
    assert plan.slots == ()
    assert [unit.gradient_slot for unit in plan.units] == [i % 2 for i in range(len(plan.units))]
    assert build_plan(model, stage=1, world_size=2).gradient_slots == ()


def test_frozen_buckets_come_last_and_have_no_gradient_slot() -> None:
    plan = build_plan(on_meta(Mixed), stage=2, world_size=2)
    trainable = [bool(unit.trainable_layouts) for unit in plan.units]
    assert trainable == sorted(trainable, reverse=True)
    assert plan.units[-1].gradient_slot is None


def test_one_layout_per_dtype_and_trainability() -> None:
    plan = build_plan(on_meta(Mixed), world_size=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    unit = next(unit for unit in plan.units if unit.name == "layers.0")
    found = [
        ([spec.name.removeprefix("layers.0.") for spec in layout.parameters], layout.compute_dtype, layout.reduce_dtype)
        for layout in unit.layouts
    ]
    assert found == [
        (["0.weight", "0.bias"], torch.bfloat16, torch.float16),
        (["1.weight", "1.bias"], torch.float32, torch.float16),  # a batch norm computes in its own dtype
        (["2.weight", "2.bias"], torch.bfloat16, torch.bfloat16),  # frozen
    ]
    # 2,320 elements padded to 19 x 128, then 64 + 64 of the norm, then 1,024 + 64 padded to 9 x 128.
    assert [layout.numel for layout in unit.layouts] == [2_432, 128, 1_152]
    # bfloat16, float32 at a multiple of 256 bytes, bfloat16 at a multiple of 128 bytes.
    assert unit.slot_nbytes == 5_376 + 2_304
    assert unit.gradient_slot_nbytes == 4_864 + 256


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"bucket_mib": 0.0}, "bucket_mib"),
        ({"prefetch": -1}, "prefetch"),
        ({"stage": 4}, "stage"),
        ({"units": ["Missing"]}, "Missing"),
        ({"param_dtype": torch.int8}, "param_dtype"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype"),
        ({"offload": "disc"}, "offload must be a HostOffload, an NvmeOffload.* or 'cpu', got 'disc'"),
        ({"offload": HostOffload(parameters=True), "stage": 2}, "HostOffload.parameters is for stage 3 only"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build_plan(on_meta(Gpt), **{"world_size": 2, **settings})


def test_the_module_may_lie_on_meta_or_not() -> None:
    real = build_plan(Gpt(), world_size=3)
    assert real == build_plan(on_meta(Gpt), world_size=3)
    assert real.fingerprint() == build_plan(on_meta(Gpt), world_size=3).fingerprint()


def changed_plans() -> dict[str, ZeroPlan]:
    frozen, renamed, tied = on_meta(Gpt), on_meta(Gpt), on_meta(Gpt)
    frozen.norm.weight.requires_grad_(False)
    renamed.last_norm = renamed.norm
    del renamed.norm
    tied.also = tied.norm
    model = on_meta(Gpt)
    return {
        "world size": build_plan(model, world_size=3),
        "stage": build_plan(model, world_size=2, stage=2),
        "units": build_plan(model, world_size=2, units=["Block"]),
        "prefetch": build_plan(model, world_size=2, prefetch=2),
        "param_dtype": build_plan(model, world_size=2, param_dtype=torch.bfloat16),
        "reduce_dtype": build_plan(model, world_size=2, reduce_dtype=torch.bfloat16),
        "dtype": build_plan(on_meta(Gpt).half(), world_size=2),
        "shape": build_plan(on_meta(Gpt, vocabulary=2_001), world_size=2),
        "trainable": build_plan(frozen, world_size=2),
        "name": build_plan(renamed, world_size=2),
        "alias": build_plan(tied, world_size=2),
        "offload": build_plan(model, world_size=2, offload=HostOffload()),
    }


@pytest.mark.parametrize("name", changed_plans())
def test_the_fingerprint_sees_every_change(name: str) -> None:
    plan, other = build_plan(on_meta(Gpt), world_size=2), changed_plans()[name]
    assert len(plan.fingerprint()) == 64
    assert plan.fingerprint() != other.fingerprint()
    assert plan.summary_lines() != other.summary_lines()


def test_the_fingerprint_sees_what_is_offloaded_but_not_through_what() -> None:
    """A path and sizes of buffers are each machine's own."""

    def fingerprint(offload: Offload) -> str:
        return build_plan(on_meta(Gpt), world_size=2, offload=offload).fingerprint()

    assert fingerprint(NvmeOffload(path="/a", buffer_mib=1.0)) == fingerprint(NvmeOffload(path="/b", io_threads=1))
    assert fingerprint(HostOffload()) == fingerprint(HostOffload(pin_mib=1.0, threads=3))
    different: list[Offload] = [
        NvmeOffload(path="/a"),
        NvmeOffload(path="/a", parameters=True),
        HostOffload(),
        HostOffload(parameters=True),
        HostOffload(parameters=True, optimizer=False),
    ]
    assert len({fingerprint(offload) for offload in different}) == len(different)


def test_shard_groups_divide_the_world() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot be split into shard groups of 2"):
        build_plan(on_meta(Gpt), placement=dataclasses.replace(Placement.from_stage(3), span=2), world_size=3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_weight_that_its_forward_changes_is_refused(kind: type[nn.Embedding], stage: int) -> None:
    with pytest.raises(ValueError, match=r"'0' is a Embedding.* with max_norm=1\.0.*drift apart.*full_parameters"):
        build_plan(nn.Sequential(kind(10, 4, max_norm=1.0)), stage=stage, world_size=2)
    build_plan(nn.Sequential(kind(10, 4, max_norm=1.0)), stage=stage, world_size=1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_every_rank_of_ddp_trains_alone_is_refused(stage: int) -> None:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module._ddp_params_and_buffers_to_ignore = ["1.weight"]
    with pytest.raises(ValueError, match=r"'1\.weight' is named in _ddp_params_and_buffers_to_ignore"):
        build_plan(module, stage=stage, world_size=2)
    module[1].requires_grad_(False)
    build_plan(module, stage=stage, world_size=2)


@pytest.mark.parametrize(("stage", "buckets"), [(1, 8), (2, 16)])
def test_a_small_model_has_buckets_all_the_same(stage: int, buckets: int) -> None:
    """Most are reduced beside the backward then; and two of them, which are beside shards, are a small part of all."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    plan = build_plan(model, stage=stage, world_size=2)
    assert len(plan.units) == buckets
    assert len(build_plan(model, stage=stage, world_size=2, bucket_mib=0.5).units) == 16
