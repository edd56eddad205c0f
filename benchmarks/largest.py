"""The largest model that trains on one device in ``zero3``: without offload, and with all that can be on the host.

    python benchmarks/largest.py
    python benchmarks/largest.py --device cpu --width 256 --memory-mib 64 --ways none --tokens 1 8

How many layers, each try in a process of its own: two steps of a Trainer that end well. Beside each stands what the
plan expects on the device, without activations. The first try is the largest of which that fits.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fake_world import PRECISIONS
from offload_training import GPT, VOCABULARY, numel_of, quiet
from results import FOLDER, available, circumstances, headline
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ActivationPolicy, HostOffload, ZeroPlan, ZeroStrategy, build_plan
from lightning_zero.errors import readable_size
from lightning_zero.extensions.planner.costs import OptimizerCost

OFFLOADS: dict[str, HostOffload | None] = {"none": None, "host": HostOffload(parameters=True)}
WANT = ("memory", "Memory", "ALLOC_FAILED", "could not create a primitive")  # what is said for want of memory
STEPS = 2
MOST_LAYERS = 4096


class Model(pl.LightningModule):
    """A GPT that is never in memory as a whole.

    Args:
        width: of it.
        layers: of it.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.size = width, layers
        self.gpt: GPT

    def configure_model(self) -> None:
        """Build it, on the meta device."""
        with torch.device("meta"):
            self.gpt = GPT(*self.size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss."""
        loss: Tensor = self.gpt(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The usual one."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


@dataclass
class Tried:
    """One try.

    Args:
        way: what is offloaded.
        layers: of the model.
        parameters: of the model.
        plan_nbytes: on the device at the peak, by plan.
        trained: whether it did.
        peak_nbytes: on the device, as its allocator counted; ``None`` where it does not count, or it did not train.
        why: what the process said at last, if not.
    """

    way: str
    layers: int
    parameters: int
    plan_nbytes: int
    trained: bool = False
    peak_nbytes: int | None = None
    why: str = ""


def plan_of(options: argparse.Namespace, way: str, layers: int) -> ZeroPlan:
    """The plan of a model."""
    with torch.device("meta"):
        model = GPT(options.width, layers)
    mixed = options.precision == "bf16-mixed"
    if options.precision == "bf16-true":
        model = model.bfloat16()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    return build_plan(model, stage=3, world_size=1, units=["Block"], offload=OFFLOADS[way], **dtypes)


def expected(options: argparse.Namespace, way: str, layers: int) -> int:
    """Bytes on the device at the peak, without activations."""
    plan = plan_of(options, way, layers)
    cost = OptimizerCost.of("AdamW", fused=True)
    accelerator = options.device == "cuda"
    return plan.expected_memory(optimizer=cost, receive_buffer=False, accelerator=accelerator, peak=True).total


def capacity(options: argparse.Namespace) -> int:
    """Bytes that a process may have of the device."""
    if options.memory_mib is not None:
        return int(options.memory_mib * 2**20)
    return device_nbytes() if options.device == "cuda" else 2**33


@functools.cache
def device_nbytes() -> int:
    """Bytes of the device, asked by another process: one that has asked has half a gigabyte there itself."""
    asked = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    return int(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout)


def limit(options: argparse.Namespace) -> None:
    """Have the system, or the device's allocator, refuse more."""
    if options.memory_mib is None:
        return
    if options.device == "cuda":
        fraction = options.memory_mib * 2**20 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    now = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + capacity(options),) * 2)


def train(options: argparse.Namespace) -> int | None:
    """Two steps of one model. Returns the allocator's peak."""
    quiet()
    limit(options)
    rows, length = options.tokens
    data = torch.randint(0, VOCABULARY, (STEPS * rows, length + 1), generator=torch.Generator().manual_seed(1))
    strategy = ZeroStrategy(
        3,
        units=["Block"],
        offload=OFFLOADS[options.ways[0]],
        activations=ActivationPolicy(checkpointing="units"),
    )
    trainer = pl.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision=options.precision,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(options.width, options.layers), DataLoader(data, rows))
    return torch.cuda.max_memory_allocated() if options.device == "cuda" else None


def attempt(options: argparse.Namespace, way: str, layers: int) -> Tried:
    """Whether so many layers train, in a process of its own."""
    tried = Tried(way, layers, numel_of(options.width, layers), expected(options, way, layers))
    command = [sys.executable, __file__, "--layers", str(layers), "--ways", way, "--tokens", *map(str, options.tokens)]
    for name in ("device", "width", "precision", "memory_mib"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=options.try_seconds, check=False)
    except subprocess.TimeoutExpired:
        tried.why = f"not done after {options.try_seconds:.0f} s"
        return tried
    tried.trained = run.returncode == 0
    if tried.trained:
        tried.peak_nbytes = json.loads(run.stdout.rpartition("PEAK")[2])
    elif run.returncode > 0 and not any(word in run.stderr for word in WANT):
        raise RuntimeError(f"{layers} layers did not train, and not for want of memory:\n{run.stderr[-4000:]}")
    else:  # a signal: what the system does where an allocation does not even raise
        said = run.stderr.strip().splitlines()
        tried.why = said[-1][:80] if said and run.returncode > 0 else f"exit code {run.returncode}"
    return tried


def fitting(options: argparse.Namespace, way: str) -> int:
    """Most layers of which the plan alone fits, on the device and on the host."""
    few, many = 4, 8  # every further layer costs the same
    rooms = [(capacity(options), [expected(options, way, layers) for layers in (few, many)])]
    if OFFLOADS[way] is not None:
        host = [plan_of(options, way, layers).expected_host_memory(accelerator=True).total for layers in (few, many)]
        rooms.append((int(0.9 * available()), host))
    least = MOST_LAYERS
    for room, (first, second) in rooms:
        slope = max(1, (second - first) // (many - few))
        least = min(least, few + (room - first) // slope)
    return max(1, least)


def bisect(options: argparse.Namespace, way: str, deadline: float) -> list[Tried]:
    """Tries until the answer is known as well as it is wanted, or the time is up."""
    tries: list[Tried] = []
    good, bad = 0, MOST_LAYERS + 1
    layers = fitting(options, way)
    while bad - good > max(1, int(options.within * good)) and time.monotonic() < deadline:
        tries.append(attempt(options, way, layers))
        print(line_of(tries[-1]), flush=True)
        good, bad = (layers, bad) if tries[-1].trained else (good, layers)
        if bad > MOST_LAYERS:
            layers = min(MOST_LAYERS, math.ceil(1.15 * good))
        elif good == 0:
            layers = int(0.85 ** len(tries) * bad)
        else:
            layers = (good + bad) // 2
        if layers < 1 or layers == good:
            break
    return tries


def line_of(tried: Tried) -> str:
    """A try, for people."""
    measured = "" if tried.peak_nbytes is None else f", measured {readable_size(tried.peak_nbytes)}"
    outcome = "trains" if tried.trained else f"does not ({tried.why})"
    model = f"{tried.layers} layers, {tried.parameters / 1e9:.3g}B parameters"
    planned = f"on the device by plan {readable_size(tried.plan_nbytes)}"
    return f"  offload {tried.way}, {model}: {outcome}; {planned}{measured}"


def search(options: argparse.Namespace, deadline: float) -> list[Tried]:
    """All ways, one after the other."""
    tries: list[Tried] = []
    for number, way in enumerate(options.ways):
        share = (deadline - time.monotonic()) / (len(options.ways) - number)
        tries += bisect(options, way, time.monotonic() + share)
    return tries


def summary(tries: Sequence[Tried]) -> list[str]:
    """The largest of each way."""
    lines = []
    for way in dict.fromkeys(tried.way for tried in tries):
        trained = [tried for tried in tries if tried.way == way and tried.trained]
        largest = max(trained, key=lambda tried: tried.layers, default=None)
        found = "nothing trained" if largest is None else f"{largest.parameters / 1e9:.3g}B parameters trained"
        lines.append(f"offload {way}: {found}, of {len([t for t in tries if t.way == way])} tries")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--width", type=int, default=4096, help="of the model")
    parser.add_argument("--tokens", type=int, nargs=2, default=(1, 1024), help="sequences in a batch, and their length")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed")
    parser.add_argument("--ways", nargs="+", choices=OFFLOADS, default=list(OFFLOADS), help="what is offloaded")
    parser.add_argument("--memory-mib", type=float, help="that a process may have; default: all of the device")
    parser.add_argument("--try-seconds", type=float, default=90.0, help="after which a try has failed")
    parser.add_argument("--within", type=float, default=0.05, help="part of the largest that need not be known")
    parser.add_argument("--minutes", type=float, default=6.0, help="after which no try begins any more")
    parser.add_argument("--layers", type=int, help="train this many, here, and no other")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of JSON")
    return parser.parse_args(arguments)


def main() -> None:
    """Try, print, write."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, and nothing was tried. --device cpu runs the same code; see --help.")
        return
    if options.layers is not None:
        print(f"PEAK{json.dumps(train(options))}", flush=True)
        return
    about: dict[str, Any] = circumstances()
    print(headline(about), flush=True)
    tries = search(options, time.monotonic() + 60 * options.minutes)
    print("\n".join(summary(tries)))
    options.output.mkdir(parents=True, exist_ok=True)
    found = {"machine": about, "tries": [asdict(tried) for tried in tries]}
    (options.output / "largest.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
