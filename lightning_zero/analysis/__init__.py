"""What a plan costs: memory at rest and at peak, what a step sends, and which stage to choose. Functions of a plan."""

from lightning_zero.analysis.estimate import MemoryEstimate, Recommendation, estimate_memory
from lightning_zero.analysis.memory import DiskBytes, HostBytes, Memory, StageMemory
from lightning_zero.analysis.optimizers import ADAM, OptimizerCost
from lightning_zero.analysis.report import ZeroPlan, build_plan
from lightning_zero.analysis.traffic import CollectiveTraffic, Traffic, gather_order

__all__ = [
    "ADAM",
    "CollectiveTraffic",
    "DiskBytes",
    "HostBytes",
    "Memory",
    "MemoryEstimate",
    "OptimizerCost",
    "Recommendation",
    "StageMemory",
    "Traffic",
    "ZeroPlan",
    "build_plan",
    "estimate_memory",
    "gather_order",
]
