"""A training in a process of limited memory: ``python -m tests.thorough.offload.limited FOLDER STAGE...``.

It is trained twice, in a process each: with ``none``, and with ``files`` (``NvmeOffload``). Beyond what the process has
before it makes the model, it may have what the plan of the run with files expects, and ``SLACK_NBYTES``. The limit is
the system's own (``RLIMIT_DATA``: heap and private mappings, touched or not): it is hard, and needs no privilege.

Prints one line of JSON: what was allowed, expected and found, in bytes, for each of the two, by stage.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import NvmeOffload, ZeroPlan, ZeroStrategy, build_plan
from lightning_zero.config import Offload

WIDTH = 1024
ROWS = 8
STEPS = 2
BUFFER_MIB = 8.0
BUCKET_MIB = 4.0

SLACK_NBYTES = 32 << 20
"""For what no plan counts: activations, a unit's gradients between autograd and its bucket (4 MB each), the stacks of
threads (of which the limit counts all 8 MB, used or not), and small things."""


@dataclass(frozen=True)
class Case:
    """One stage's run, sized so that the optimizer's state is more than the run is allowed in all.

    Attributes:
        layers: of ``WIDTH`` by ``WIDTH``, with biases.
        precision: as the Trainer takes it.
        parameters: ``NvmeOffload.parameters``.
    """

    layers: int
    precision: str
    parameters: bool

    @property
    def param_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision.startswith("bf16") else None

    @property
    def numel(self) -> int:
        return self.layers * (WIDTH + 1) * WIDTH


CASES = {2: Case(32, "bf16-mixed", False), 3: Case(32, "32-true", True)}


class Layer(nn.Linear):
    """A unit."""


class Tall(pl.LightningModule):
    """Many matrices and few activations."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, width) for _ in range(layers))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        loss = (x - 1).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def offload_of(kind: str, stage: int, folder: Path) -> Offload | None:
    parameters = CASES[stage].parameters
    if kind == "files":
        return NvmeOffload(path=str(folder), parameters=parameters, buffer_mib=BUFFER_MIB, io_threads=1)
    return None


def plan_of(stage: int, folder: Path) -> ZeroPlan:
    """Of the run with files."""
    case = CASES[stage]
    with torch.device("meta"):
        module = Tall(case.layers, WIDTH)
    return build_plan(
        module,
        stage=stage,
        world_size=1,
        units=["Layer"],
        bucket_mib=BUCKET_MIB,
        offload=offload_of("files", stage, folder),
        param_dtype=case.param_dtype,
        prefetch=0,  # what a rank that is alone chooses
    )


def train(kind: str, stage: int, folder: Path, layers: int, width: int) -> list[float]:
    """The losses."""
    module = Tall(layers, width)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=CASES[stage].precision,
        strategy=ZeroStrategy(stage, units=["Layer"], bucket_mib=BUCKET_MIB, offload=offload_of(kind, stage, folder)),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randn(1, width).repeat(ROWS * STEPS, 1), ROWS))
    return module.losses


def status(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def limited(kind: str, stage: int, folder: Path) -> dict[str, Any]:
    """What a process has found that has imported everything, and has no limit yet."""
    case, plan = CASES[stage], plan_of(stage, folder)
    device, host = plan.expected_memory(peak=True), plan.expected_host_memory()
    disk = plan.expected_disk()
    train(kind, stage, folder, layers=2, width=WIDTH)  # threads and libraries are the process, not the run
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process_rss, process_data = status("VmRSS"), status("VmData")
    expected = device.total + host.total
    allowed = expected + SLACK_NBYTES
    resource.setrlimit(resource.RLIMIT_DATA, (process_data + allowed, process_data + allowed))
    found: dict[str, Any] = {
        "allowed": allowed,
        "expected": expected,
        "device": asdict(device),
        "host": asdict(host),
        "disk": asdict(disk),
        "states": 8 * case.numel,  # two tensors of Adam, fp32
        "process": process_rss,
        "process data": process_data,
        "losses": None,
        "error": None,
    }
    try:
        found["losses"] = train(kind, stage, folder, case.layers, WIDTH)
    except (MemoryError, RuntimeError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["peak"] = status("VmHWM") - process_rss
    found["left"] = sorted(os.listdir(folder))
    return found


def main(stage: int, folder: Path) -> dict[str, Any]:
    """What was found, by kind."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in ("none", "files"):
        reader, writer = os.pipe()
        pid = os.fork()  # of a process that has no other threads, as nothing was computed
        if pid == 0:
            code = 1
            try:
                os.write(writer, json.dumps(limited(kind, stage, folder)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with open(reader) as pipe:
            found[kind] = json.loads(pipe.read())
        os.waitpid(pid, 0)
    return found


if __name__ == "__main__":
    print(json.dumps({stage: main(int(stage), Path(sys.argv[1])) for stage in sys.argv[2:]}))
