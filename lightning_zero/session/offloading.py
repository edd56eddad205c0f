"""From an offload policy to what carries it out: memory by tier for the engine, steps on the host for optimizers."""

from __future__ import annotations

import os
import platform

import torch

from lightning_zero.analysis.memory import expected_disk
from lightning_zero.comm import ControlGroup, Streams
from lightning_zero.config import HostOffload, NvmeOffload, Offload
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.groups import OffloadedSteps
from lightning_zero.plan import Plan
from lightning_zero.storage.files import FileSystem
from lightning_zero.storage.tiers import MemoryTiers, NvmeStore

__all__ = ["make_tiers", "offloaded_steps", "step_threads"]

_MIB = 2**20


def make_tiers(
    offload: Offload | None,
    plan: Plan,
    control: ControlGroup,
    device: torch.device,
    streams: Streams | None = None,
    local_rank: int = 0,
    system: FileSystem | None = None,
) -> MemoryTiers:
    """Memory for an engine, by tier. The first rank of a host reports what earlier runs have left on its disk.

    Collective: every rank; ``OffloadError`` on all, if the files of one cannot be made, or have no room for the
    masters.
    """
    if not isinstance(offload, NvmeOffload):
        pin = offload.pin_mib if isinstance(offload, HostOffload) else None
        return MemoryTiers(device, streams, pin_nbytes=None if pin is None else int(pin * _MIB))
    store, failure = None, None
    try:
        store = NvmeStore(
            offload.path,
            rank=control.rank,
            world_size=control.world_size,
            buffer_nbytes=int(offload.buffer_mib * _MIB),
            io_threads=offload.io_threads,
            device=device,
            system=system,
            report=local_rank == 0,
            checksums=offload.checksums,
        )
    except Exception as error:
        failure = error
    try:
        control.raise_together(failure, f"offload to '{offload.path}'")
        _check_room(store, expected_disk(plan, optimizer_tensors=0).total, control)  # masters of all ranks are alike
    except BaseException:
        if store is not None:
            store.close()
        raise
    return MemoryTiers(device, streams, store=store)


def _check_room(store: NvmeStore | None, nbytes: int, control: ControlGroup) -> None:
    """Make sure that the disks have room for bytes that are about to be put there: ``OffloadError`` on every rank.

    Collective: every rank.
    """
    if store is None:
        return
    disk = (platform.node(), os.stat(store.path).st_dev)
    needs = control.gather_objects((disk, nbytes))
    failure = None
    try:
        store.check_space(sum(need for other, need in needs if other == disk))  # ranks of one machine share its disk
    except Exception as error:
        failure = error
    control.raise_together(failure, f"offload to '{store.path}'")


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


def offloaded_steps(engine: ZeroEngine, local_ranks: int) -> OffloadedSteps | None:
    """How optimizers step on an engine's shards; ``None`` if those rest on the device."""
    offload = engine.plan.offload
    if offload is None or not offload.optimizer:
        return None
    return OffloadedSteps(
        unit_stepped=engine.unit_stepped,
        agree=engine.agree_stepped,
        check_room=lambda nbytes: _check_room(engine.tiers.store, nbytes, engine.control),
        store=engine.tiers.store,
        threads=step_threads(offload, local_ranks, engine.device),
    )
