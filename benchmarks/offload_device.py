"""Offload on a GPU: step time and device memory with and without, beside DeepSpeed's ZeRO-Offload and torchao's.

Every measurement is a process of its own, so that nothing is left on the device. The model gets as many layers as a
training without offload has room for, found by trying; then every way trains that one. Precision is bf16-mixed for all:
torchao and plain Lightning keep fp32 weights on the device then, this package and DeepSpeed bf16 ones.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from offload_training import GPT, Clock, fit, free_port, numel_of, quiet

from lightning_zero import HostOffload, NvmeOffload, ZeroStrategy, build_plan

_WIDTH = 2048
_ROOM = 0.9  # of the free memory, for the first try
_SHRINK = 0.9  # from one try to the next
_TRIES = 10

# Bytes at rest for each parameter without offload: weights, masters, gradients and two tensors of state.
_RESTING_NBYTES = 2 + 4 + 4 + 8

OURS: dict[str, Any] = {
    "no offload": lambda folder: None,
    "host": lambda folder: HostOffload(),
    "host, parameters": lambda folder: HostOffload(parameters=True),
    "files": lambda folder: NvmeOffload(path=folder),
    "files, parameters": lambda folder: NvmeOffload(path=folder, parameters=True),
}
PEERS = {"DeepSpeed ZeRO-Offload": "deepspeed", "torchao CPUOffloadOptimizer": "torchao"}


def options_for(way: str, folder: str) -> tuple[dict[str, Any], Any]:
    """Options for the Trainer, and what makes the optimizer."""
    if way in OURS:
        return {"strategy": ZeroStrategy(3, units=["Block"], offload=OURS[way](folder))}, None
    if way == "DeepSpeed ZeRO-Offload":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from lightning.pytorch.strategies import DeepSpeedStrategy

        strategy = DeepSpeedStrategy(stage=2, offload_optimizer=True, pin_memory=True, logging_batch_size_per_gpu=1)
        return {"strategy": strategy}, lambda parameters: DeepSpeedCPUAdam(parameters, lr=1e-4, adamw_mode=True)
    from torchao.optim import CPUOffloadOptimizer

    def make(parameters: Any) -> Any:
        return CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True)

    return {}, make


def train_way(index: int, way: str, layers: int, setting: dict[str, Any], port: int, results: Any) -> None:
    """One way in a process of its own: seconds of a step and the peak of device memory, or why there are none."""
    quiet()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    device = torch.device(setting["device"])
    clock = Clock(device)
    try:
        torch.manual_seed(0)
        options, make_optimizer = options_for(way, setting["folder"])
        model = GPT(setting["width"], layers, make_optimizer)
        options |= {"accelerator": "gpu" if device.type == "cuda" else "cpu", "devices": 1, "precision": "bf16-mixed"}
        fit(model, clock, max(3, setting["steps"]), tuple(setting["tokens"]), **options)
    except torch.OutOfMemoryError:
        results.put({"failed": "out of device memory"})
    except (MemoryError, RuntimeError, ImportError, ValueError) as error:
        results.put({"failed": f"{type(error).__name__}: {error}"})
    else:
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        losses = [float(loss) for loss in model.losses]
        results.put({"seconds": clock.median, "device_nbytes": peak, "losses": losses})


def measure_way(way: str, layers: int, setting: dict[str, Any]) -> dict[str, Any]:
    """One way; ``failed`` says why there are no numbers."""
    results = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(train_way, (way, layers, setting, free_port(), results), nprocs=1)
    except Exception as error:  # killed for its host memory, or a peer that ends the process
        return {"failed": str(error).strip().splitlines()[-1]}
    return results.get() if not results.empty() else {"failed": "it ended without a result"}


def layers_that_fit(setting: dict[str, Any]) -> int:
    """The most layers that train without offload."""
    free, _ = torch.cuda.mem_get_info()
    single = numel_of(setting["width"], 1)
    block = numel_of(setting["width"], 2) - single
    layers = max(1, 1 + int((_ROOM * free / _RESTING_NBYTES - single) / block))
    for _ in range(_TRIES):
        found = measure_way("no offload", layers, setting)
        if "failed" not in found or layers == 1:
            return layers
        print(f"device: {layers} layers do not fit: {found['failed']}", flush=True)
        layers = max(1, int(layers * _SHRINK))
    return layers


def host_nbytes(way: str, layers: int, setting: dict[str, Any]) -> int:
    """What one of our ways keeps in host memory, by its plan."""
    with torch.device("meta"):
        model = GPT(setting["width"], layers)
    plan = build_plan(
        model,
        stage=3,
        world_size=1,
        units=["Block"],
        offload=OURS[way](setting["folder"]),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    return plan.expected_host_memory(rank=0).total


def free_host_nbytes() -> int:
    """Host memory that a process may still take."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def measure_device(setting: dict[str, Any]) -> dict[str, Any] | None:
    """Measure and print everything; nothing without a GPU."""
    if not torch.cuda.is_available():
        print("device: there is no GPU here: skipped\n", flush=True)
        return None
    setting = {**setting, "device": "cuda:0", "width": max(setting["width"], _WIDTH)}
    layers = layers_that_fit(setting)
    numel = numel_of(setting["width"], layers)
    name = torch.cuda.get_device_name()
    print(f"device: {name}, {numel / 1e6:.0f} million parameters ({layers} layers), bf16-mixed", flush=True)
    found: dict[str, Any] = {"device": name, "numel": numel, "ways": {}}
    with tempfile.TemporaryDirectory(dir=setting["folder"]) as folder:
        setting["folder"] = folder
        for way in [*OURS, *PEERS]:
            found["ways"][way] = result = compare(way, layers, setting)
            base = found["ways"]["no offload"].get("seconds")
            if "failed" in result:
                print(f"  {way:30}{result['failed']}", flush=True)
                continue
            ratio = f"{result['seconds'] / base:7.2f} x" if base else " " * 9
            memory = result["device_nbytes"] / 2**30
            print(f"  {way:30}{result['seconds'] * 1e3:9.0f} ms{ratio}{memory:9.2f} GiB on the device", flush=True)
    print(flush=True)
    return found


def compare(way: str, layers: int, setting: dict[str, Any]) -> dict[str, Any]:
    """One way, unless something that it needs is missing."""
    if way in PEERS and importlib.util.find_spec(PEERS[way]) is None:
        return {"failed": f"{PEERS[way]} is not installed: skipped"}
    if way in OURS and way != "no offload":
        needed, free = host_nbytes(way, layers, setting), free_host_nbytes()
        if needed > free:
            return {"failed": f"{needed / 2**30:.1f} GiB of host memory are needed, {free / 2**30:.1f} are free"}
    return measure_way(way, layers, setting)
