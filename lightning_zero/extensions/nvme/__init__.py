"""Offload to files (``NvmeOffload``): a tier of memory beyond the host's, and the optimizer's step through it."""

from __future__ import annotations

import os
import platform

import torch

from lightning_zero.comm import ControlGroup, Streams
from lightning_zero.config import NvmeOffload, Tier
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme.files import FileSystem, FileTensor, fill_from
from lightning_zero.extensions.nvme.pipeline import Pipeline, Request
from lightning_zero.extensions.nvme.step import FileSteps
from lightning_zero.extensions.nvme.store import FileTiers, NvmeStore
from lightning_zero.optim.stepper import Steps
from lightning_zero.plan.layout import PAGE_NBYTES, align_up
from lightning_zero.plan.plan import FETCH_UNITS, Plan

__all__ = ["FileSteps", "FileTensor", "FileTiers", "NvmeStore", "Pipeline", "Request", "fill_from"]


def make_tiers(
    offload: NvmeOffload,
    plan: Plan,
    control: ControlGroup,
    device: torch.device,
    streams: Streams | None = None,
    system: FileSystem | None = None,
) -> FileTiers:
    """Memory for an engine, by tier.

    Collective: every rank; ``OffloadError`` on all, if the file of one cannot be made, or has no room for the masters.
    """
    made: list[NvmeStore] = []

    def make() -> None:
        store = NvmeStore(
            offload.path,
            rank=control.rank,
            buffer_nbytes=int(offload.buffer_mib * 2**20),
            io_threads=offload.io_threads,
            device=device,
            system=system,
            checksums=offload.checksums,
        )
        made.append(store)

    try:
        control.together(f"offload to '{offload.path}'", make, OffloadError)
        rests = [(layout, plan.rest_of(layout)) for layout in plan.layouts]  # alike on all ranks
        sizes = [la.shard_numel * la.dtype.itemsize for la, rest in rests if rest.master is Tier.DISK]
        sizes += [la.shard_numel * la.compute_dtype.itemsize for la, rest in rests if rest.weights is Tier.DISK]
        _check_room(made[0], sum(align_up(size, PAGE_NBYTES) for size in sizes), control)
    except BaseException:
        for store in made:
            store.close()
        raise
    tiers = FileTiers(made[0], device, streams)
    tiers.reserve(FETCH_UNITS, plan.fetch_nbytes)
    return tiers


def make_steps(engine: ZeroEngine, steps: Steps) -> FileSteps:
    """The same ``steps`` on an engine's shards in files."""
    store: NvmeStore = engine.tiers.store  # type: ignore[attr-defined]
    return FileSteps(check_room=lambda nbytes: _check_room(store, nbytes, engine.control), store=store, **vars(steps))


def _check_room(store: NvmeStore, nbytes: int, control: ControlGroup) -> None:
    """Make sure that the disks have room for bytes that are about to be put there: ``OffloadError`` on every rank.

    Collective: every rank.
    """
    disk = (platform.node(), os.stat(store.path).st_dev)
    needs = control.gather_objects((disk, nbytes))
    nbytes = sum(need for other, need in needs if other == disk)  # ranks of one machine share its disk
    control.together(f"offload to '{store.path}'", lambda: store.check_space(nbytes), OffloadError)
