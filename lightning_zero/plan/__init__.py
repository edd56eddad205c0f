"""What is decided before training: units, flat buffers, shards, buckets, slots, and the memory tier of each.

Numbers only: works on meta tensors, needs no process group, is equal on all ranks, and proves itself.
"""

from lightning_zero.plan.buckets import (
    ROUND_NBYTES,
    BufferPiece,
    BufferSpec,
    deal_out,
    make_buckets,
    make_pieces,
    sent_buffers,
)
from lightning_zero.plan.layout import (
    ALIGNMENT,
    PAGE_NBYTES,
    DtypeRules,
    FlatLayout,
    ParameterSpec,
    Part,
    Rest,
    ShardSlice,
    align_up,
    rest_of,
)
from lightning_zero.plan.plan import (
    FETCH_UNITS,
    IDLE_NBYTES,
    KEPT_NBYTES,
    STAGING_BUFFERS,
    CollectiveTraffic,
    Plan,
    Traffic,
    UnitPlan,
    ZeroPlan,
    build_plan,
    kept_nbytes,
    pack,
)
from lightning_zero.plan.tree import check_memory, sums_in_place
from lightning_zero.plan.units import find_recomputed

__all__ = [
    "ALIGNMENT",
    "FETCH_UNITS",
    "IDLE_NBYTES",
    "KEPT_NBYTES",
    "PAGE_NBYTES",
    "ROUND_NBYTES",
    "STAGING_BUFFERS",
    "BufferPiece",
    "BufferSpec",
    "CollectiveTraffic",
    "DtypeRules",
    "FlatLayout",
    "ParameterSpec",
    "Part",
    "Plan",
    "Rest",
    "ShardSlice",
    "Traffic",
    "UnitPlan",
    "ZeroPlan",
    "align_up",
    "build_plan",
    "check_memory",
    "deal_out",
    "find_recomputed",
    "kept_nbytes",
    "make_buckets",
    "make_pieces",
    "pack",
    "rest_of",
    "sent_buffers",
    "sums_in_place",
]
