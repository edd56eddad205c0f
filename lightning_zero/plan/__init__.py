"""What is decided before training: units, flat buffers, shards, buckets, slots, and what they cost.

Numbers only: works on meta tensors, needs no process group, and is equal on all ranks.
"""

from lightning_zero.plan.buckets import make_buckets
from lightning_zero.plan.buffers import BufferPiece, BufferSpec, make_pieces, sent_buffers
from lightning_zero.plan.comparison import Recommendation
from lightning_zero.plan.dtypes import DtypeRules
from lightning_zero.plan.estimate import MemoryEstimate, StageMemory, estimate_memory
from lightning_zero.plan.flat import ALIGNMENT, FlatLayout, ParameterSpec, ShardSlice
from lightning_zero.plan.memory import (
    FETCH_UNITS,
    STAGING_BUFFERS,
    DiskBytes,
    HostBytes,
    Memory,
    fetch_nbytes,
    staging_nbytes,
)
from lightning_zero.plan.optimizers import ADAM, OptimizerCost
from lightning_zero.plan.plan import ZeroPlan, build_plan
from lightning_zero.plan.resting import Rest, rest_of
from lightning_zero.plan.slots import SlotPlan
from lightning_zero.plan.traffic import CollectiveTraffic, Traffic, gather_order
from lightning_zero.plan.unit_plan import UnitPlan
from lightning_zero.plan.units import UnitSpec, find_units
from lightning_zero.plan.unsupported import refuse_shared_memory, warn_of_views

__all__ = [
    "ADAM",
    "ALIGNMENT",
    "FETCH_UNITS",
    "STAGING_BUFFERS",
    "BufferPiece",
    "BufferSpec",
    "CollectiveTraffic",
    "DiskBytes",
    "DtypeRules",
    "FlatLayout",
    "HostBytes",
    "Memory",
    "MemoryEstimate",
    "OptimizerCost",
    "ParameterSpec",
    "Recommendation",
    "Rest",
    "ShardSlice",
    "SlotPlan",
    "StageMemory",
    "Traffic",
    "UnitPlan",
    "UnitSpec",
    "ZeroPlan",
    "build_plan",
    "estimate_memory",
    "fetch_nbytes",
    "find_units",
    "gather_order",
    "make_buckets",
    "make_pieces",
    "refuse_shared_memory",
    "rest_of",
    "sent_buffers",
    "staging_nbytes",
    "warn_of_views",
]
