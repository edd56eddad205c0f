"""The stage that a run takes by itself (``strategy="zero"``): the first one that fits, by its plan.

[Note: what fits]
What a rank's plan needs at its peak, with the activations of a training step, may take nine tenths of what is free on
the rank that has least: of its device, and of its share of the host for what is offloaded (for all of it on a CPU).
The module itself counts as free where it is, as its parameters become what the plan counts. Between runs free memory
may differ, and so may the stage: numbers do not depend on it.

[Note: a batch beside the training]
Activations are measured with the first samples of the training data in their order. No sampler is asked, and a worker
reads the data, whose generators and counters in this process stay as they are, so that the training gets what it gets
without this. An ``IterableDataset`` without workers, as of an open file, is not read: activations are not known then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero._torch import tree_map_only
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement, SessionSettings
from lightning_zero.errors import readable_size, table
from lightning_zero.extensions.planner.costs import ADAM, StageMemory, stage_memory
from lightning_zero.extensions.planner.estimate import fullest_rank
from lightning_zero.extensions.planner.measure import measure_activations
from lightning_zero.plan.plan import Plan
from lightning_zero.session.session import ZeroSession

__all__ = ["activations_of", "choose_stage", "free_host_memory"]

ROOM = 0.9
"""Of free memory what a plan may take: libraries, data and the allocator's gaps take some, too."""

_CGROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_NO_LIMIT = 2**60  # more is how cgroups say that there is none
_SECONDS = 60  # for a batch of data that are not made for workers


def choose_stage(
    session: ZeroSession,
    module: nn.Module,
    plan_of: Callable[[SessionSettings], Plan],
    receive_buffer: bool,
    activations: Callable[[], tuple[int, str]] | None,
) -> SessionSettings:
    """The settings of the first stage that fits, without offload if one does; see [Note: what fits].

    Where activations are not known it is stage 3, which leaves most room for them, if that fits. So it is where nothing
    is trained, and there are no gradients and no state of optimizers.

    Args:
        session: whose ``settings`` say all but the stage; their ``offload`` how to offload, and where to.
        module: not sharded yet.
        plan_of: its plan with such settings.
        receive_buffer: as for ``estimate_memory``.
        activations: their bytes, and why they are not known if they are not; None: nothing is trained.

    Raises:
        ValueError: on every rank, if nothing fits.

    Collective: every rank.
    """
    settings, device = session.settings, session.device

    def ask() -> tuple[int, int, tuple[int, str]]:
        host = free_host_memory(session.local_ranks) + _held(module, "cpu")
        there = host if device.type == "cpu" else _free(device) + _held(module, device.type)
        return there, host, activations() if activations else (0, "There is no training.")

    rows = session.groups.control.together("measure what a training step needs", ask, ValueError)
    room, host = int(ROOM * min(there for there, _, _ in rows)), int(ROOM * min(host for _, host, _ in rows))
    needed, unknown = max(nbytes for *_, (nbytes, _) in rows), next((why for *_, (_, why) in rows if why), "")
    sizes = _Sizes(device.type == "cpu", room, host, needed, unknown, {})
    for name, placement, offload in _candidates(settings.offload, only=3 if unknown else None):
        there = replace(settings, placement=placement, offload=offload, automatic=False)
        with _frozen(module) if activations is None else nullcontext():
            plan = plan_of(there)
        rank, wire = fullest_rank(plan, whole=False), {"receive_buffer": receive_buffer}
        memory = stage_memory(plan, name, rank, ADAM, accelerator=not sizes.on_cpu, activations=needed, **wire)
        if sizes.fits(name, memory):
            rank_zero_info(sizes.said())
            return there
    raise ValueError(sizes.nothing_fits())


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad = False
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


def _candidates(offload: Offload | None, only: int | None) -> Iterator[tuple[str, Placement, Offload | None]]:
    """Names, placements and offload, from what changes least to what takes most time. ``only``: one stage."""
    stages = [only] if only else [1, 2, 3]
    on_host = offload if isinstance(offload, HostOffload) else HostOffload()
    ways: list[tuple[str, Offload | None]] = [("", None), ("_offload", on_host)]
    ways += [("_offload_nvme", offload)] if isinstance(offload, NvmeOffload) else []
    for suffix, way in ways:
        for stage in stages:
            placement = Placement.from_stage(stage)
            policy = way and replace(way, parameters=placement.shards_parameters, optimizer=True)
            yield f"zero{stage}{suffix}", placement, policy


# ------------------------------------------------------------------------------------------------------------- memory


def _free(device: torch.device) -> int:
    """Bytes that this process can still get of an accelerator, with what torch's allocator has and does not use."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free) + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def _held(module: nn.Module, kind: str) -> int:
    """Bytes of a module's parameters on a kind of device."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.device.type == kind)


def free_host_memory(ranks: int) -> int:
    """Bytes of this host that one of so many processes can still get: what the system, and each group of processes that
    this one is in (a container, a job), leave."""
    return min([_available(), *_left_in_groups()]) // ranks


def _available() -> int:
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_groups() -> Iterator[int]:
    """What each control group of this process leaves: version 2 of the kernel's, or 1."""
    for line in _lines(_PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if not old and controllers:
            continue
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
        top = _CGROUPS / "memory" if old else _CGROUPS
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if not folder.is_relative_to(top):
                break
            numbers = [next(iter(_lines(folder / name)), "") for name in (limit, usage)]
            if all(map(str.isdecimal, numbers)) and int(numbers[0]) < _NO_LIMIT:
                cached = [line.split()[1] for line in _lines(folder / "memory.stat") if "inactive_file " in line]
                yield max(0, int(numbers[0]) - int(numbers[1]) + max(map(int, cached), default=0))


def _lines(file: Path) -> Sequence[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return ()


# -------------------------------------------------------------------------------------------------------- activations


def activations_of(trainer: Trainer, strategy: Any) -> tuple[int, str]:
    """Bytes that a training step of a Trainer holds beside the plan, and why they are not known if they are not. See
    [Note: a batch beside the training]."""
    source, precision, settings = trainer.fit_loop._data_source, strategy.precision_plugin, strategy.settings  # 2.6
    with isolate_rng():  # which puts nothing back after an error
        try:
            data = type(source).dataloader(source)  # not what locks the ranks' loaders
            data = data.iterables if isinstance(data, CombinedLoader) else data
            batch = precision.convert_input(tree_map_only(object, _batch, data))
            with precision.tensor_init_context():
                found = measure_activations(
                    trainer.lightning_module,
                    batch,
                    param_dtype=precision.param_dtype,
                    full_precision=precision.full_precision,
                    autocast=precision.autocast,
                    accelerator=strategy.root_device.type != "cpu",
                    policy=settings.activations,
                    units=settings.units,
                )
        except Exception as error:  # of the user's data, or code
            why = (str(error).strip().rpartition("\n")[2] or type(error).__name__)[:300].rstrip(".")
            return 0, f"{why}." if "are not known" in why else f"Activations are not known: {why}."
        return found.total, ""


def _batch(loader: Any) -> Any:
    """The first samples of a loader, collated."""
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{type(loader).__name__} is no DataLoader, and may give each batch once")
    data, workers = loader.dataset, loader.num_workers
    if isinstance(data, IterableDataset) and not workers:
        raise ValueError(f"{type(data).__name__} may give each sample once, as it is read without workers")
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None and loader.batch_sampler is not None:
        raise ValueError(f"the size of the batches of {type(loader.batch_sampler).__name__} is not known")
    settings: Mapping[str, Any] = {
        "batch_size": size,
        "collate_fn": loader.collate_fn,
        "num_workers": 1,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if workers else "fork",
        "timeout": loader.timeout if workers else _SECONDS,
    }
    return next(iter(DataLoader(data, **settings)))


# -------------------------------------------------------------------------------------------------------------- words


class _Sizes(NamedTuple):
    """Bytes of a rank: what stages need, in the order in which they are tried, and what there is."""

    on_cpu: bool  # where device and host are one
    room: int  # of the device
    host: int
    activations: int
    unknown: str  # why these are not known, if they are not
    needed: dict[str, tuple[int, int]]  # of the device and of the host, by stage

    def fits(self, name: str, memory: StageMemory) -> bool:
        """Whether the next stage does."""
        device, host = memory.peak.total, memory.host.total
        self.needed[name] = device, host = (device + host, 0) if self.on_cpu else (device, host)
        return device <= self.room and host <= self.host

    def said(self) -> str:
        """One line: the last stage, its numbers, and those of the one before it, which did not fit."""
        *before, chosen = self.needed
        known = "" if self.unknown else f" (activations: {readable_size(self.activations)})"
        said = f'strategy="zero" takes {chosen}: a rank needs {_words(*self.needed[chosen])} at the peak{known}, and '
        said += f"may take {_words(self.room, self.host * (self.needed[chosen][1] > 0))}"
        said += f"; {before[-1]} would need {_words(*self.needed[before[-1]])}" if before else ""
        return f"{said}. Stages 1 and 2 were not tried. {self.unknown}" if self.unknown else f"{said}."

    def nothing_fits(self) -> str:
        """The error, with all that was tried."""
        files = (
            "" if any("nvme" in name for name in self.needed) else ", offload=NvmeOffload(path) with a fast local disk"
        )
        places = 1 if self.on_cpu else 2
        rows = [("bytes of a rank", *("at the peak", "on the host")[:places])]
        for name, sizes in {**self.needed, "may take": (self.room, self.host)}.items():
            rows.append((name, *map(readable_size, sizes[:places])))
        counted = self.unknown or f"Activations are {readable_size(self.activations)} of each peak."
        return "\n".join(
            [
                'strategy="zero" finds no stage that fits:',
                *table(rows),
                f"{counted} What helps: more ranks, a smaller batch with accumulate_grad_batches, "
                f"ZeroStrategy(stage='auto', activations='units'){files}.",
            ]
        )


def _words(device: int, host: int) -> str:
    return readable_size(device) + (f" and {readable_size(host)} of host memory" if host else "")
