"""From an offload policy to what carries it out: memory by tier for the engine, and how optimizers step on it."""

from __future__ import annotations

import os
from typing import cast

import torch

from lightning_zero.comm import ControlGroup, Streams
from lightning_zero.config import HostOffload, NvmeOffload, Offload
from lightning_zero.engine import ZeroEngine
from lightning_zero.offload import MemoryTiers
from lightning_zero.optim.stepper import Steps
from lightning_zero.plan import Plan
from lightning_zero.registry import extension

__all__ = ["make_steps", "make_tiers", "step_threads"]


def make_tiers(
    offload: Offload | None,
    plan: Plan,
    control: ControlGroup,
    device: torch.device,
    streams: Streams | None = None,
    local_rank: int = 0,
) -> MemoryTiers:
    """Memory for an engine, by tier.

    Collective: every rank; ``OffloadError`` on all, if the files of one cannot be made.
    """
    if isinstance(offload, NvmeOffload):
        return cast(MemoryTiers, extension("nvme").make_tiers(offload, plan, control, device, streams, local_rank))
    pin = offload.pin_mib if isinstance(offload, HostOffload) else None
    return MemoryTiers(device, streams, pin_nbytes=None if pin is None else int(pin * 2**20))


def make_steps(engine: ZeroEngine, local_ranks: int) -> Steps | None:
    """How optimizers update an engine's offloaded masters; ``None`` without offload."""
    offload = engine.plan.offload
    if offload is None or not offload.optimizer:
        return None
    threads = step_threads(offload, local_ranks, engine.device)
    steps = Steps(threads=threads, publish=engine.unit_stepped, agree=engine.agree_stepped)
    return cast(Steps, extension("nvme").make_steps(engine, steps)) if isinstance(offload, NvmeOffload) else steps


def step_threads(offload: Offload, local_ranks: int, device: torch.device) -> int:
    """Threads a step on the host computes with: what the policy says, or this rank's share of the cores.

    On a CPU not more than torch computes with there anyway: more could be against the user's will, and would hang in a
    process that was forked from one which has used them (OpenMP does not survive a fork).
    """
    if offload.threads is not None:
        return offload.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // max(1, local_ranks))
    return min(share, torch.get_num_threads()) if device.type == "cpu" else share
