"""A plan as users have it: with what it costs."""

from __future__ import annotations

from lightning_zero.analysis.memory import expected_disk, expected_host_memory, expected_memory
from lightning_zero.analysis.report import describe
from lightning_zero.analysis.traffic import expected_traffic
from lightning_zero.plan import Plan

__all__ = ["ZeroPlan", "build_plan"]


class ZeroPlan(Plan):
    """Who holds what, in what order it moves, and how many bytes that takes. Numbers only; equal on all ranks.

    ``build_plan`` makes one. What is decided is in ``Plan``; the functions of a plan that follow from it can be called
    as methods.
    """

    expected_traffic = expected_traffic
    expected_memory = expected_memory
    expected_host_memory = expected_host_memory
    expected_disk = expected_disk
    describe = describe


build_plan = ZeroPlan.build
"""Turn a module, settings and a world size into a plan; see ``Plan.build``."""
