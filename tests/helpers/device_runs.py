"""Programs for a GPU, each in a process of its own: ``python -m tests.helpers.device_runs NAME DEVICE ARGUMENTS``.

Forked processes cannot be used there (``helpers/world.py``). What is not about a GPU alone runs with ``cpu`` too, so
that a test without one finds what would stop it on one; those are forked.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import Compression, ZeroStrategy
from lightning_zero.comm import GlooCollectives, Groups, Pending, Streams, native
from lightning_zero.comm.groups import RANKS_PER_HOST
from lightning_zero.config import Placement, SessionSettings
from lightning_zero.extensions.compression.codes import Format, compress, decompress, format_nbytes
from lightning_zero.extensions.planner.costs import OptimizerCost
from lightning_zero.offload.host import HostMemory, host_memory
from lightning_zero.offload.transfers import Copy, Transfers
from lightning_zero.session.session import ZeroSession
from tests.helpers.device_models import beside_ddp
from tests.helpers.script import run_forked
from tests.helpers.wires import WrappedCollectives
from tests.helpers.world import ROOT, die_with_parent, free_port, rank_environment, subprocess_env

__all__ = ["ON_GPU", "Staged", "needs_gpu", "run_on"]

CPU = torch.device("cpu")
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


# ``pytest -m gpu`` runs what has these marks; it is skipped where there is no GPU.
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test with ``ON_GPU``."""
    for mark in ON_GPU:
        test = mark(test)
    return test


def run_on(device: str, name: str, *arguments: str, world_size: int = 1, before: Sequence[str] = ()) -> list[Any]:
    """What a program below returns, on each rank. ``before``: a program that it is an argument of."""
    program = ["-m", "tests.helpers.device_runs", name, device, *arguments]
    if device == "cpu" and not before:  # which forked processes can use, and these import nothing
        printed = run_forked(program, cwd=ROOT, timeout=240, ranks=world_size).stdout
        found = [json.loads(line.removeprefix("FOUND")) for line in printed.splitlines() if line.startswith("FOUND")]
        assert len(found) == world_size, printed[-2000:]
        return found
    command = [*before, sys.executable, *program]
    port, ranks = free_port(), []
    for rank in range(world_size):
        place = rank_environment(rank, world_size, port) if world_size > 1 else {}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options |= {"env": subprocess_env(**place), "preexec_fn": die_with_parent}
        ranks.append(subprocess.Popen(command, cwd=ROOT, **options))
    try:
        ended = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (printed, error) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, printed[-2000:] + error[-4000:]
    # A program before it may print behind it.
    return [json.loads(printed.rpartition("FOUND")[2].splitlines()[0]) for printed, _ in ended]


# ---------------------------------------------------------------------------------------------------------------------
# A wire for ranks that share a GPU, which nccl refuses


class Staged(WrappedCollectives):
    """Carries a device's tensors over gloo, through host memory.

    What is sent is on the host when a verb returns; what is received comes to the device in the wait.
    """

    def __init__(self, groups: Groups, streams: Streams) -> None:
        super().__init__(GlooCollectives(groups, Streams(CPU)))
        self._streams = streams

    def _all_gather(self, buffer: Tensor, what: str, source: Tensor | None, *others: Any) -> Pending:
        host = torch.empty_like(buffer, device=CPU)
        with self._streams.gathering():
            self.own_range(host).copy_(self.own_range(buffer) if source is None else source)
        return self._returning(self.inner.all_gather(host, what), buffer, host)

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, *others: Any) -> Pending:
        host = torch.empty_like(shard, device=CPU)
        sent = torch.empty_like(bucket, device=CPU).copy_(
            bucket
        )  # gloo may overwrite it, and on the CPU it is the same
        return self._returning(self.inner.reduce_scatter(sent, host, what, patience, *others), shard, host)

    def _all_to_all(self, output: Tensor, input: Tensor, *others: Any) -> Pending:
        host = torch.empty_like(output, device=CPU)
        return self._returning(self.inner.all_to_all(host, input.cpu(), *others), output, host)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Pending:
        host = torch.empty_like(tensor, device=CPU).copy_(tensor)
        return self._returning(self.inner.broadcast(host, source, what), tensor, host)

    def _returning(self, sent: Pending, target: Tensor, host: Tensor) -> Pending:
        sent.then(lambda: target.copy_(host))
        return sent


# ---------------------------------------------------------------------------------------------------------------------
# What is run


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    def __init__(self, width: int = 64, layers: int = 4, rows: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.width, self.rows = width, rows
        self.seen: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

    def inputs(self, step: int) -> Tensor:
        return torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(step))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dtype = torch.float32 if torch.is_autocast_enabled(self.device.type) else self.stem.weight.dtype
        loss = self.loss(self.inputs(batch_idx).to(self.device, dtype))
        self.seen.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(6), batch_size=None)  # type: ignore[arg-type]


def fitted(device: str, strategy: Any, precision: str, net: Net, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    accelerator = "gpu" if device == "cuda" else "cpu"
    options: dict[str, Any] = {**QUIET, "callbacks": list(callbacks), "precision": precision}
    trainer = pl.Trainer(accelerator=accelerator, devices=1, max_epochs=1, strategy=strategy, **options)
    trainer.fit(net)
    return trainer


def losses(device: str, precision: str) -> dict[str, list[float]]:
    """Of plain Lightning and of every stage."""
    found = {}
    for strategy in ("auto", "zero1", "zero2", "zero3"):
        net = Net()
        fitted(device, strategy, precision, net)
        found[strategy] = [float(loss) for loss in net.seen]
    return found


class Peak(pl.Callback):
    """Most bytes that the allocator had handed out in the last step, and what rests behind it."""

    def __init__(self) -> None:
        self.peak = self.rest = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.peak, self.rest = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


def warm_up(device: str) -> None:
    """Have cuBLAS take its workspaces, 32 MiB and more on an H100, which stay and are nobody's."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(8, 64, device=device, dtype=dtype)).sum().backward()


def peaks(device: str, precision: str) -> dict[str, list[int]]:
    """At rest and at the peak, each measured and by plan. The model is wide and its batches are rows."""
    found = {}
    for stage in (1, 2, 3):
        warm_up(device)
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        strategy, peak = ZeroStrategy(stage, units=["Block"]), Peak()
        net = Net(width=1024, layers=6, rows=1)
        trainer = fitted(device, strategy, precision, net, [peak] if device == "cuda" else [])
        options: dict[str, Any] = {"optimizer": OptimizerCost.of("AdamW", fused=True), "receive_buffer": False}
        plan = strategy.engine.plan
        rest, most = (
            plan.expected_memory(accelerator=device == "cuda", peak=p, **options).total for p in (False, True)
        )
        found[str(stage)] = [peak.rest - before, rest, peak.peak - before, most]
        del net, trainer, strategy, plan
    return found


def two_ranks(device: str) -> dict[str, list[float]]:
    """Two ranks on one device: losses of every stage, and of both batches in one process."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, place, found = dist.get_rank(), torch.device(device, 0) if device == "cuda" else CPU, {}
    net = Net().to(place)
    optimizer, seen = net.configure_optimizers(), []
    for step in range(6):
        each = [net.loss(net.inputs(10 * step + other).to(place)) for other in range(2)]
        (sum(each) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(each[rank]))
    found["plain"] = seen
    for stage in (1, 2, 3):
        settings = SessionSettings(placement=Placement.from_stage(stage), units=["Block"])
        session = ZeroSession(
            settings, Groups.create("gloo"), place, wire=lambda groups, streams, _: Staged(groups, streams)
        )
        found[str(stage)] = trained(session, Net(), rank, place)
    dist.destroy_process_group()
    return found


def trained(session: ZeroSession, net: Net, rank: int, place: torch.device) -> list[float]:
    session.checkpoints.begin(training=True)
    session.shard(net)
    session.begin(training=True)
    optimizer = net.configure_optimizers()
    session.shard_optimizers([optimizer])
    seen = []
    for step in range(6):
        with session.step("training_step", training=True):
            loss = net.loss(net.inputs(10 * step + rank).to(place))
        with session.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss))
    session.rest()
    return seen


def codes(device: str) -> dict[str, bool]:
    """Whether tensors are rounded to the same bits there as on the CPU, with what is fed back, and come back so."""
    rows = (torch.randn(3, 6400) * torch.logspace(-40, 30, 3)[:, None]) * torch.rand(3, 6400).gt(0.1)
    rows[0, 64:128], rows[1, 70], lost, found = 0, float("inf"), torch.randn(3 * 6400) * 1e-3, {}
    for kind, dtype in product(get_args(Format), (torch.float32, torch.bfloat16, torch.float16)):
        there: list[list[Tensor]] = []
        for place in (CPU, torch.device(device)):
            values, residual = rows.to(dtype).to(place), lost.to(place, copy=True)
            made = torch.empty(3, format_nbytes(kind, 6400), dtype=torch.uint8, device=place)
            plain, back = torch.empty_like(made), torch.empty_like(values)
            compress(kind, values, made, residual)
            compress(kind, values, plain)
            decompress(kind, plain, back)
            there.append([tensor.cpu().nan_to_num(7.0) for tensor in (made, plain, residual, back)])
        found[f"{kind}, {dtype}"] = all(map(torch.equal, *there))
    return found


def staged(carry: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of gloo's for tensors of a device, through host memory: of the first argument, which it writes."""

    def through(*arguments: Any, **named: Any) -> Any:
        moved = [value.cpu() if isinstance(value, Tensor) else value for value in arguments]
        result = carry(*moved, **named)
        for written, host in zip(arguments[:1], moved, strict=False):
            if written is not host:
                written.copy_(host)
        return result

    return through


def across_hosts(device: str) -> dict[str, list[float]]:
    """Four ranks on one device, of which two are a host: losses as they are, and with what hosts keep and round."""
    os.environ |= {RANKS_PER_HOST: "2", "LIGHTNING_ZERO_SHARED_MEMORY": "0"}
    for module, names in (
        (native, ("all_gather_single", "reduce_scatter_single")),
        (dist, ("all_to_all_single", "broadcast")),
    ):
        for name in names:
            setattr(module, name, staged(getattr(module, name)))
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, place, found = dist.get_rank(), torch.device(device, 0) if device == "cuda" else CPU, {}
    rounded, fed = Compression(weights="int8", gradients="int8"), Compression(gradients="int4", error_feedback=True)
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "plain": (3, {}),
        "kept": (3, {"secondary_shards": True}),
        "rounded": (3, {"secondary_shards": True, "compression": rounded}),
        "fed 1": (1, {"compression": fed}),
        "fed 2": (2, {"compression": fed}),
    }
    for name, (stage, exchange) in kinds.items():
        settings = SessionSettings(placement=Placement.from_stage(stage), units=["Block"], **exchange)  # type: ignore[arg-type]
        session = ZeroSession(settings, Groups.create("gloo"), place)
        found[name] = trained(session, Net(), rank, place)
        wire = session.engine.collectives
        direct = getattr(wire, "_direct", wire)  # of a wire of two hops
        assert isinstance(direct, GlooCollectives) == (device != "cuda"), name
    dist.destroy_process_group()
    return found


def overlap(device: str) -> dict[str, float]:
    """Milliseconds, by events of the device: of copies to the host, of computing, and of both together."""
    there = device == "cuda"  # else little, by the host's clock: only whether it runs
    place = torch.device(device, 0) if there else CPU
    streams, memory = Streams(place), HostMemory(place, None)
    transfers = Transfers(streams, memory)
    source = torch.ones(2**26 if there else 2**12, device=place)  # 256 MiB, some 10 ms
    target = memory.allocate(source.numel(), torch.float32)
    matrix = torch.ones(*((4096, 4096) if there else (64, 64)), device=place)

    def copy() -> None:
        transfers.out([Copy(source, target)]).order()

    def compute() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix)

    def both() -> None:
        transfer = transfers.out([Copy(source, target)])
        compute()
        transfer.order()

    def took(work: Callable[[], None]) -> float:
        if not there:
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    named = {"copy": copy, "compute": compute, "both": both}
    found = {name: min(took(work) for _ in range(5)) for name, work in named.items()}
    transfers.close()
    return found


def locked(device: str) -> dict[str, Any]:
    """Host memory under a budget of three pages: what is locked of it, how much that is, and afterwards."""
    host = HostMemory(torch.device(device), 3 * 4096)
    first, second, third = (host.allocate(2048, torch.float32) for _ in range(3))
    small = host.allocate(1024, torch.float32)
    found = {"locked": [tensor.is_pinned() for tensor in (first, second, third, small)], "nbytes": host.locked_nbytes}
    values = torch.arange(2048.0, device=device)
    first.copy_(values, non_blocking=True)
    host.release()
    kept = host_memory(4096, locked=True).is_pinned()
    return {**found, "released": first.is_pinned(), "copied": torch.equal(first, values.cpu()), "kept": kept}


def short(device: str) -> dict[str, float]:
    """A fit of a few steps in zero3, for a tool that watches it."""
    net = Net(layers=2)
    fitted(device, ZeroStrategy(3, units=["Block"]), "32-true", net)
    return {"loss": float(net.seen[-1])}


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program
    for program in (
        losses,
        beside_ddp,
        peaks,
        two_ranks,
        codes,
        across_hosts,
        overlap,
        locked,
        short,
    )
}

if __name__ == "__main__":
    # In one write, as ranks may share where they write to; and on a line of its own.
    sys.stdout.write("\nFOUND" + json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])) + "\n")
    sys.stdout.flush()
