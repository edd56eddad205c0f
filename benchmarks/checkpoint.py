"""Save and load the same training state in five ways, side by side, and print a table.

    python benchmarks/checkpoint.py                     # 136 million parameters with AdamW: 1.6 GB, 2 ranks
    python benchmarks/checkpoint.py --width 256 --layers 4 --repeat 1

Every way runs in processes of its own, on the same model, one after the other:

    raw write     the bytes of the shards, written and synced: what the disk can do
    torch.save    every rank pickles its local tensors to a file of its own, synced
    stock DCP     ``fully_shard`` with ``torch.distributed.checkpoint.save`` and ``load``
    Lightning     ``ModelParallelStrategy`` with its sharded directories
    zero3         this package; also with ``async_save``, for how long training is blocked

Seconds are those of the slowest rank, from a barrier to a barrier; the best of ``--repeat`` saves, the first of which
also pays for first-time allocations. Bytes are what the processes asked the kernel to read and write, summed over the
ranks (reads through ``mmap`` are not seen). RSS is what the peak had more than the moments before and after, on the
worst rank: memory that the operation itself takes, without what it loads.
Loads are from the page cache: they show the work, not the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy
from offload_training import free_port, launched, quiet
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_zero import CheckpointPolicy, ZeroStrategy

WAYS = ("raw write", "torch.save", "stock DCP", "Lightning", "zero3", "zero3 async")
RESHARDS = ("stock DCP", "Lightning", "zero3")  # the ways that can load at another world size


@dataclass
class Measure:
    """One operation on one rank: seconds, bytes through system calls, memory taken and given back."""

    seconds: float
    read: int
    written: int
    rss: int


@dataclass(frozen=True)
class Setting:
    """What a world is started for."""

    way: str
    action: str  # "save" or "load"
    world_size: int
    path: str
    width: int
    layers: int
    repeat: int


class Block(nn.Module):
    """A transformer block's matrices without its attention: what matters here is their number and size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        y = self.norm(x)
        return x + self.down(torch.tanh(self.mix(y)) * self.up(y))


class Model(pl.LightningModule):
    """An embedding and a stack of blocks; sharded by FSDP2 when the strategy brings a mesh."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def configure_model(self) -> None:
        """FSDP2 wants the model rewritten here."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not hasattr(self.embedding, "unshard"):
            mesh = self.device_mesh["data_parallel"]
            for module in (self.embedding, *self.blocks, self):
                fully_shard(module, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Any loss that reaches every parameter."""
        return self.blocks(self.embedding(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two more copies of the model to save."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Actions(pl.Callback):
    """Runs the measured operations between two steps."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.measures: list[Measure] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The optimizer has its state now."""
        for number in range(self.setting.repeat):
            self.measures.append(getattr(self, self.setting.action)(trainer, module, number))

    def save(self, trainer: pl.Trainer, module: Any, number: int) -> Measure:
        """Save to a new place; what was saved before is deleted outside of the measurement."""
        way, path = self.setting.way, Path(self.setting.path)
        rank = dist.get_rank()
        if rank == 0 and path.exists():
            shutil.rmtree(path)
        dist.barrier()
        if way == "raw write":
            path.mkdir(exist_ok=True)
            return measured(lambda: write_raw(local_tensors(trainer), path / f"{rank}.bin"))
        if way == "torch.save":
            path.mkdir(exist_ok=True)
            return measured(lambda: write_pickle(local_tensors(trainer), path / f"{rank}.pt"))
        if way == "stock DCP":
            return measured(lambda: dcp.save(dcp_state(module, trainer), checkpoint_id=path))
        if way == "zero3 async":
            found = measured(lambda: trainer.save_checkpoint(path))
            trainer.strategy.checkpoints.wait()
            return found
        return measured(lambda: trainer.save_checkpoint(path))

    def load(self, trainer: pl.Trainer, module: Any, number: int) -> Measure:
        """Load what was saved into a module and an optimizer that has no state yet, as when a run resumes."""
        way, path = self.setting.way, self.setting.path
        if way != "torch.save":
            trainer.optimizers[0].zero_grad()
            trainer.optimizers[0].state.clear()
        if way == "torch.save":
            return measured(lambda: read_pickle(local_tensors(trainer), Path(path) / f"{dist.get_rank()}.pt"))
        if way == "stock DCP":

            def load() -> None:
                state = dcp_state(module, trainer)
                dcp.load(state, checkpoint_id=path)
                set_state_dict(
                    module,
                    trainer.optimizers,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )

            return measured(load)

        def load_through_strategy() -> None:
            checkpoint = trainer.strategy.load_checkpoint(path)
            if way == "zero3":
                trainer.strategy.load_model_state_dict(checkpoint)
                trainer.strategy.load_optimizer_state_dict(checkpoint)

        return measured(load_through_strategy)


def local_tensors(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What this rank holds of weights and moments: the masters and states of a zero3 run."""
    found = {}
    for i, state in enumerate(trainer.optimizers[0].state_dict()["state"].values()):
        found.update({f"{i}.{key}": value for key, value in state.items() if value.dim()})
    for i, parameter in enumerate(p for group in trainer.optimizers[0].param_groups for p in group["params"]):
        found[f"{i}.weight"] = parameter.detach()
    return found


def dcp_state(module: Any, trainer: pl.Trainer) -> dict[str, Any]:
    """The state dicts that a user of FSDP2 without Lightning saves."""
    model, optimizer = get_state_dict(module, trainer.optimizers)
    return {"model": model, "optimizer": optimizer}


def write_raw(tensors: dict[str, Tensor], path: Path) -> None:
    """The bytes and nothing else."""
    with open(path, "wb") as file:
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_pickle(tensors: dict[str, Tensor], path: Path) -> None:
    """``torch.save``; cloned one by one, because a slice would drag the whole flat buffer along."""
    with open(path, "wb") as file:
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def read_pickle(tensors: dict[str, Tensor], path: Path) -> None:
    """Into tensors that are there."""
    loaded = torch.load(path, weights_only=True)
    for name, tensor in tensors.items():
        tensor.copy_(loaded[name])


def measured(operation: Callable[[], Any]) -> Measure:
    """Run it on all ranks between two barriers."""
    os.sync()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present
    rss, io = status("VmRSS"), counters()
    start = time.perf_counter()
    operation()
    dist.barrier()
    seconds = time.perf_counter() - start
    after = counters()
    extra = status("VmHWM") - max(rss, status("VmRSS"))
    return Measure(seconds, after["rchar"] - io["rchar"], after["wchar"] - io["wchar"], extra)


def status(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def counters() -> dict[str, int]:
    """What went through read and write calls of this process."""
    return {
        key: int(value) for key, value in (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    }


def strategy_of(way: str) -> Any:
    """The strategy that trains for a way; the plain files hold a zero3 run's shards."""
    if way in ("stock DCP", "Lightning"):
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return ZeroStrategy(3, units=["Block", "Embedding"], checkpoint=CheckpointPolicy(async_save=way == "zero3 async"))


def run_rank(rank: int, setting: Setting, port: int, results: Any) -> None:
    """One rank of a world."""
    quiet()
    os.environ.update(launched(rank, setting.world_size, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    actions = Actions(setting)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=setting.world_size,
        strategy=strategy_of(setting.way),
        max_steps=1,
        callbacks=[actions],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(
        Model(setting.width, setting.layers), DataLoader(torch.randint(0, 8192, (8 * setting.world_size, 8)), 8)
    )
    results.put((rank, [asdict(measure) for measure in actions.measures]))
    dist.destroy_process_group()


def run_world(setting: Setting) -> dict[str, float]:
    """The slowest rank's best time, and the bytes and memory that go with it."""
    results = mp.get_context("fork").SimpleQueue()
    arguments = (setting, free_port(), results)
    mp.start_processes(run_rank, arguments, nprocs=setting.world_size, start_method="fork")
    ranks = [[Measure(**m) for m in results.get()[1]] for _ in range(setting.world_size)]
    rounds = list(zip(*ranks, strict=True))
    best = min(rounds, key=lambda measures: max(m.seconds for m in measures))
    last = rounds[-1]
    return {
        "seconds": max(m.seconds for m in best),
        "read": sum(m.read for m in best),
        "written": sum(m.written for m in best),
        "rss": max(m.rss for m in last),
    }


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="model width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="blocks (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--other-ranks", type=int, default=3, help="processes that reload it (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each kind (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is forked must not have started more
    numel = 8192 * options.width + options.layers * (12 * options.width**2 + 11 * options.width)
    versions = f"torch {torch.__version__}, lightning {pl.__version__}, Python {sys.version.split()[0]}"
    print(f"{versions}, {os.cpu_count()} cores")
    print(f"{numel / 1e6:.0f} million parameters, AdamW: {12 * numel / 1e9:.2f} GB in {options.ranks} ranks\n")
    print(f"{'':14}{'save':>8}{'of raw':>8}{'written':>9}{'RSS':>8}{'load':>10}{'read':>9}{'RSS':>8}", end="")
    print(f"{f'load at {options.other_ranks}':>12}{'read':>9}{'RSS':>8}")
    raw = None
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for way in options.ways:
            path = str(Path(folder) / "checkpoint")
            common = {"path": path, "width": options.width, "layers": options.layers, "repeat": options.repeat}
            saved = run_world(Setting(way=way, action="save", world_size=options.ranks, **common))
            raw = raw or saved["seconds"]
            line = f"{way:14}{saved['seconds']:7.2f}s{saved['seconds'] / raw:7.2f}x{saved['written'] / 1e9:6.2f} GB"
            line += f"{saved['rss'] / 1e6:5.0f} MB"
            if way in RESHARDS or way == "torch.save":
                for world_size in (options.ranks, options.other_ranks) if way in RESHARDS else (options.ranks,):
                    found = run_world(Setting(way=way, action="load", world_size=world_size, **common))
                    line += f"{found['seconds']:{9 if world_size == options.ranks else 11}.2f}s"
                    line += f"{found['read'] / 1e9:6.2f} GB{found['rss'] / 1e6:5.0f} MB"
            print(line, flush=True)
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
