"""What offload costs: the step through files, the step on the host, and whole training steps, each beside its bound.

    python benchmarks/offload.py                         # 50 million parameters, AdamW(fused=True), 1 and 2 ranks
    python benchmarks/offload.py --width 64 --layers 1 --repeat 1 --parts files host

Everything that is compared is measured in turns, round after round in the same run, and the medians are shown.

    files      the optimizer step of ``NvmeOffload``: its wall time beside what it consists of, each measured alone in
               the same windows (reading, computing, writing), and beside plain loops over the same file, in the same
               mode, with as many threads. One disk serves reads and writes: what both take at once is the honest bound.
               All that is without checksums; what they add is measured behind it.
    host       the optimizer step of ``HostOffload`` beside the same kind of step on one flat tensor
    training   steps of a whole Trainer with each kind of offload, as a ratio to the same round's without; the losses
               are compared bit for bit
    device     with a GPU: step time and device memory of the largest model that fits, beside DeepSpeed and torchao
               where those are installed (see ``offload_device.py``)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from offload_device import measure_device
from offload_training import GPT, free_port, gradients_of, numel_of, train
from torch import Tensor, nn

from lightning_zero import HostOffload, NvmeOffload, build_plan
from lightning_zero.comm import ControlGroup, LocalCollectives
from lightning_zero.config import Placement
from lightning_zero.engine import ZeroEngine
from lightning_zero.extensions import nvme
from lightning_zero.extensions.nvme.files import FileSystem
from lightning_zero.extensions.nvme.pipeline import Request
from lightning_zero.offload.host import host_memory, view_of
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.session.session import make_steps, make_tiers

PARTS = ("files", "host", "training", "device")
KINDS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False, "fused": False},
}
_TRANSFER_NBYTES = 4 << 20


@dataclass(frozen=True)
class Setting:
    """What to measure. Picklable."""

    width: int
    layers: int
    repeat: int
    steps: int
    ranks: tuple[int, ...]
    tokens: tuple[int, int]
    folder: str
    buffer_mib: float
    io_threads: int


class Meter:
    """For how long at least one of several threads was at it."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0
        self._active = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                self.seconds += time.perf_counter() - self._since


class Switched(FileSystem):
    """A disk that can be left out: then reads leave memory as it is, and writes go nowhere."""

    def __init__(self) -> None:
        self.connected = True
        self.reading, self.writing = Meter(), Meter()

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """All of it at once, when left out."""
        with self.reading:
            return super().preadv(descriptor, memory, offset) if self.connected else len(memory)

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        """Likewise."""
        with self.writing:
            return super().pwritev(descriptor, memory, offset) if self.connected else len(memory)


class Rig:
    """An engine and an optimizer as the strategy makes them, with gradients of one backward; one rank, fp32.

    Args:
        setting: of the model.
        offload: where things rest.
        kind: of AdamW.
        stage: in 1 and 2 parameters that the user sees are the weights, and what is written to them counts.
        system: how the disk is used.
    """

    def __init__(
        self,
        setting: Setting,
        offload: Any,
        kind: str = "fused",
        stage: int = 3,
        system: FileSystem | None = None,
    ) -> None:
        torch.manual_seed(0)
        model = GPT(setting.width, setting.layers)
        placement = Placement.from_stage(stage)
        plan = build_plan(model, placement=placement, world_size=1, units=["Block"], offload=offload)
        control, collectives = ControlGroup(None), LocalCollectives()
        make, options = (nvme.make_tiers, {"system": system}) if isinstance(offload, NvmeOffload) else (make_tiers, {})
        self.tiers = make(offload, plan, control, torch.device("cpu"), **options)
        engine = ZeroEngine(model, plan, collectives, control, self.tiers)
        engine.prepare_training()
        self.engine = engine
        self.numel = sum(flat.layout.shard_numel for unit in engine.units for flat in unit.flats)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **KINDS[kind])
        owned = {one.user: one for one in engine.shards.values()}
        before, after = engine.before_optimizer_step, engine.after_optimizer_step
        note, steps = engine.access.writes.note, make_steps(engine, 1)
        ShardedOptimizer(self.optimizer, "AdamW", owned, collectives, before, after, note, steps=steps)
        gradients_of(engine, model)

    def step(self) -> float:
        """Seconds of one step."""
        return timed(self.optimizer.step)


def timed(operation: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def in_turns(ways: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Seconds of every way, round after round; the first one only warms up."""
    rounds = [{name: way() for name, way in ways.items()} for _ in range(repeat + 1)]
    return {name: [found[name] for found in rounds[1:]] for name in ways}


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# ------------------------------------------------------------------------------------------------------------- files


class Raw:
    """Plain loops over the data file, as it was opened: what the disk gives.

    What is written is the same small number everywhere, which is a fine value for weights and for their state.

    Args:
        rig: whose file.
        threads: that share the transfers of a loop.
    """

    def __init__(self, rig: Rig, threads: int) -> None:
        store = rig.tiers.store
        self._path = f"/proc/self/fd/{store._file._descriptor}"  # it has no name
        self._flags = os.O_RDWR | (os.O_DIRECT if store.direct else 0)
        self.nbytes = store.nbytes_on_disk
        self._memory = [host_memory(_TRANSFER_NBYTES, locked=False) for _ in range(2 * threads)]
        for memory in self._memory:
            memory.view(torch.float32).fill_(1e-4)

    def read(self, threads: int) -> float:
        """Seconds to read all of it."""
        return timed(lambda: self._run(self._loops(os.preadv, threads)))

    def write(self, threads: int) -> float:
        """Seconds to write all of it."""
        return timed(lambda: self._run(self._loops(os.pwritev, threads)))

    def both(self, threads: int) -> float:
        """Seconds to read and to write all of it at the same time."""
        loops = [*self._loops(os.pwritev, threads), *self._loops(os.preadv, threads, first=threads)]
        return timed(lambda: self._run(loops))

    def _loops(self, call: Callable[..., int], threads: int, first: int = 0) -> list[Callable[[], None]]:
        places, lock = iter(range(0, self.nbytes, _TRANSFER_NBYTES)), threading.Lock()

        def loop(memory: Tensor) -> None:
            descriptor = os.open(self._path, self._flags)
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    break
                nbytes = min(_TRANSFER_NBYTES, self.nbytes - place)
                if call(descriptor, [view_of(memory[:nbytes])], place) != nbytes:
                    raise OSError(f"A short transfer at byte {place} of {self._path}.")
            os.close(descriptor)

        return [lambda memory=memory: loop(memory) for memory in self._memory[first : first + threads]]

    def _run(self, loops: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=loop) for loop in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def noted(pipeline: Any, working: Meter) -> Iterator[list[Request]]:
    """The windows that pass through a pipeline meanwhile; and for how long it has worked on them."""
    found: list[Request] = []
    run = pipeline.run

    def note(requests: Any, work: Any) -> None:
        def measured(*window: Any) -> Any:
            with working:
                return work(*window)

        passing = list(requests)
        found.extend(passing)
        run(passing, measured)

    pipeline.run = note
    try:
        yield found
    finally:
        del pipeline.run


def in_files(setting: Setting, checksums: bool) -> NvmeOffload:
    """Everything that an optimizer steps on in files."""
    return NvmeOffload(
        path=setting.folder, buffer_mib=setting.buffer_mib, io_threads=setting.io_threads, checksums=checksums
    )


def measure_checksums(setting: Setting) -> dict[str, Any]:
    """The step through files with and without checksums: seconds of wall time, and of all processors together."""
    rigs = {checksums: Rig(setting, in_files(setting, checksums)) for checksums in (False, True)}
    wall: dict[bool, list[float]] = {checksums: [] for checksums in rigs}
    cpu: dict[bool, list[float]] = {checksums: [] for checksums in rigs}
    for turn in range(setting.repeat + 1):
        for checksums in sorted(rigs, reverse=bool(turn % 2)):
            before = time.process_time()
            wall[checksums].append(rigs[checksums].step())
            cpu[checksums].append(time.process_time() - before)
    for rig in rigs.values():
        rig.tiers.close()
    found = {}
    for name, seconds in {"wall": wall, "cpu": cpu}.items():
        without, checked = seconds[False][1:], seconds[True][1:]  # the first ones warm up
        found[name] = {
            "without": statistics.median(without),
            "with": statistics.median(checked),
            "ratio": median_ratio(checked, without),
        }
    return found


def measure_files(setting: Setting) -> dict[str, Any]:
    """The step through files beside its parts."""
    system = Switched()
    rig = Rig(setting, in_files(setting, checksums=False), system=system)  # parts of the step leave the disk out
    rig.step()
    pipeline = rig.tiers.store.pipeline()
    with noted(pipeline, Meter()) as windows:
        rig.step()
    busy: dict[str, list[float]] = {"reading": [], "writing": []}

    def passing(read: bool, write: bool) -> float:
        requests = [Request(w.numel, [(tensor, read, write) for tensor, _, _ in w.regions]) for w in windows]
        return timed(lambda: pipeline.run(requests, lambda request, buffers: None))

    def step() -> float:
        reads, writes = system.reading.seconds, system.writing.seconds
        seconds = rig.step()
        busy["reading"].append(system.reading.seconds - reads)
        busy["writing"].append(system.writing.seconds - writes)
        return seconds

    def computing() -> float:
        working, system.connected = Meter(), False
        with noted(pipeline, working):
            rig.step()
        system.connected = True
        return working.seconds

    def writing() -> float:
        system.connected = False  # every window's memory, for the values that are written to be usable ones
        fill = [Request(w.numel, [(tensor, False, False) for tensor, _, _ in w.regions]) for w in windows]
        pipeline.run(fill, lambda request, buffers: [b.fill_(1e-4) for b in buffers] and None)
        system.connected = True
        return passing(False, True)

    raw, threads = Raw(rig, setting.io_threads), setting.io_threads
    ways = {
        "step": step,
        "reading alone": lambda: passing(True, False),
        "computing alone": computing,
        "writing alone": writing,
        "raw read": lambda: raw.read(threads),
        "raw write": lambda: raw.write(threads),
        "raw read, one thread": lambda: raw.read(1),
        "raw write, one thread": lambda: raw.write(1),
        "raw read and write at once": lambda: raw.both(threads),
    }
    found = in_turns(ways, setting.repeat)
    moved = sum(
        window.numel * tensor.dtype.itemsize * (read + write)
        for window in windows
        for tensor, read, write in window.regions
    )
    nbytes = {name: raw.nbytes * (2 if "at once" in name else 1) for name in ways if "raw" in name}
    nbytes |= {"step": moved, "reading alone": moved // 2, "writing alone": moved // 2}
    alone = [found[f"{part} alone"] for part in ("reading", "computing", "writing")]
    parts = [max(row) for row in zip(*alone, strict=True)]
    disk = [max(row) for row in zip(found["computing alone"], found["raw read and write at once"], strict=True)]
    serial = [sum(row) for row in zip(found["raw read"], found["raw write"], strict=True)]
    result = {
        "mode": "direct" if rig.tiers.store.direct else "buffered",
        "numel": rig.numel,
        "windows": len(windows),
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "gb_per_second": {n: size / statistics.median(found[n]) / 1e9 for n, size in nbytes.items()},
        "busy_seconds": {name: statistics.median(values[1:]) for name, values in busy.items()},
        "step_of_largest_part": median_ratio(found["step"], parts),
        "step_of_disk_bound": median_ratio(found["step"], disk),
        "rate_of_raw_serial": median_ratio([t * moved / 2 / raw.nbytes for t in serial], found["step"]),
        "rate_of_raw_at_once": median_ratio(
            [t * moved / 2 / raw.nbytes for t in found["raw read and write at once"]], found["step"]
        ),
    }
    rig.tiers.close()
    return result | {"checksums": measure_checksums(setting)}


def show_files(found: dict[str, Any]) -> None:
    """Print the table."""
    numel, windows = found["numel"], found["windows"]
    print(f"files: step through {found['mode']} files, {numel / 1e6:.0f} million parameters in {windows} windows")
    for name, seconds in found["seconds"].items():
        rate = f"{found['gb_per_second'][name]:8.2f} GB/s" if name in found["gb_per_second"] else ""
        print(f"  {name:28}{seconds * 1e3:9.1f} ms{rate}")
    print(f"  {'step, of its largest part':28}{found['step_of_largest_part']:9.2f} x   (goal: at most 1.15)")
    print(f"  {'step, of compute or disk':28}{found['step_of_disk_bound']:9.2f} x   (reads and writes share the disk)")
    print(f"  {'bytes/s, of raw one by one':28}{found['rate_of_raw_serial']:9.2f} x")
    print(f"  {'bytes/s, of raw at once':28}{found['rate_of_raw_at_once']:9.2f} x")
    for name, row in found["checksums"].items():
        label = f"step with checksums, {name}"
        print(
            f"  {label:28}{row['with'] * 1e3:9.1f} ms {row['ratio']:7.2f} x  of {row['without'] * 1e3:.1f} ms without"
        )
    print(flush=True)


# -------------------------------------------------------------------------------------------------------------- host


def deepspeed_adam(parameter: nn.Parameter) -> torch.optim.Optimizer | None:
    """DeepSpeed's compiled optimizer, if it is installed and can be compiled here."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam([parameter], lr=1e-4, adamw_mode=True)
    except ImportError:
        print("host: DeepSpeed is not installed: skipped")
    except Exception as error:  # whatever a compiler has to say
        print(f"host: DeepSpeed's CPUAdam cannot be built here, skipped: {str(error).splitlines()[-1]}")
    return None


def measure_host(setting: Setting) -> dict[str, Any]:
    """The step on the host beside steps on one flat tensor."""
    rigs = {f"offloaded, {kind}": Rig(setting, HostOffload(), kind) for kind in KINDS}
    rigs["offloaded with parameters, fused"] = Rig(setting, HostOffload(parameters=True))  # nothing goes back
    rigs["offloaded, fused, stage 2"] = Rig(setting, HostOffload(), stage=2)
    numel = rigs["offloaded, fused"].numel
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel) * 1e-3
    weights = torch.zeros(numel)
    flat: dict[str, torch.optim.Optimizer] = {
        f"flat, {kind}": torch.optim.AdamW([parameter], lr=1e-4, **options) for kind, options in KINDS.items()
    }
    sizes = [p.numel() for group in rigs["offloaded, fused"].optimizer.param_groups for p in group["params"]]
    parts = [nn.Parameter(part) for part in parameter.detach().split(sizes)]
    for part, gradient in zip(parts, parameter.grad.split(sizes), strict=True):
        part.grad = gradient
    flat[f"{len(parts)} parameters, fused"] = torch.optim.AdamW(parts, lr=1e-4, fused=True)
    compiled = deepspeed_adam(parameter)
    if compiled is not None:
        flat["flat, DeepSpeed CPUAdam"] = compiled

    def step_and_copy() -> float:
        return timed(lambda: (flat["flat, fused"].step(), weights.copy_(parameter.detach())))

    ways = {name: (lambda optimizer=optimizer: timed(optimizer.step)) for name, optimizer in flat.items()}
    ways["flat, fused, then a copy to the weights"] = step_and_copy
    ways |= {name: rig.step for name, rig in rigs.items()}
    found = in_turns(ways, setting.repeat)
    for rig in rigs.values():
        rig.tiers.close()
    base = found["flat, fused"]
    return {
        "numel": numel,
        "threads": torch.get_num_threads(),
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "elements_per_second": {name: numel / statistics.median(values) for name, values in found.items()},
        "of_flat_fused": {name: median_ratio(base, values) for name, values in found.items()},
        "of_flat_of_its_kind": {
            kind: median_ratio(found[f"flat, {kind}"], found[f"offloaded, {kind}"]) for kind in KINDS
        },
    }


def show_host(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"host: AdamW on {found['numel'] / 1e6:.0f} million parameters, {found['threads']} threads")
    for name, seconds in found["seconds"].items():
        rate, ratio = found["elements_per_second"][name] / 1e6, found["of_flat_fused"][name]
        print(f"  {name:42}{seconds * 1e3:9.1f} ms{rate:8.0f} million/s{ratio:7.2f} x of flat, fused")
    kinds = ", ".join(f"{kind} {ratio:.2f} x" for kind, ratio in found["of_flat_of_its_kind"].items())
    print(f"  offloaded of flat of its kind: {kinds}   (goal: fused at least 0.9)\n", flush=True)


# ---------------------------------------------------------------------------------------------------------- training


def measure_training(setting: Setting) -> dict[str, Any]:
    """Steps of a Trainer with each kind of offload, in worlds of each size."""
    found: dict[str, Any] = {}
    for world_size in setting.ranks:
        results = mp.get_context("fork").SimpleQueue()
        arguments = (asdict(setting), world_size, free_port(), results)
        mp.start_processes(train, arguments, nprocs=world_size, start_method="fork")
        rounds: dict[str, list[Any]] = results.get()
        base = [seconds for seconds, _ in rounds["none"]]
        found[f"{world_size} ranks"] = {
            name: {
                "seconds": statistics.median(seconds for seconds, _ in runs),
                "of_none": median_ratio([seconds for seconds, _ in runs], base),
                "same_losses": all(losses == rounds["none"][0][1] for _, losses in runs),
            }
            for name, runs in rounds.items()
        }
    return found


def show_training(found: dict[str, Any]) -> None:
    """Print the table."""
    print("training: whole steps in stage 3, fp32")
    for world, ways in found.items():
        for name, way in ways.items():
            losses = "equal" if way["same_losses"] else "DIFFERENT"
            print(f"  {world:10}{name:20}{way['seconds'] * 1e3:9.0f} ms{way['of_none']:7.2f} x   losses {losses}")
    print(flush=True)


# -------------------------------------------------------------------------------------------------------------- main

MEASURES: dict[str, tuple[Callable[[Setting], Any], Callable[[Any], None]]] = {
    "files": (measure_files, show_files),
    "host": (measure_host, show_host),
    "training": (measure_training, show_training),
}


def run_part(index: int, part: str, setting: Setting, results: Any) -> None:
    """One part, in a process that is its own."""
    torch.set_num_threads(os.cpu_count() or 1)
    results.put(MEASURES[part][0](setting))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768, help="model width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="blocks (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that are measured (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of each training (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="worlds to train in (default: 1 2)")
    parser.add_argument("--batch", type=int, default=4, help="sequences on each rank (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to use (default: the temporary folder)")
    parser.add_argument("--buffer-mib", type=float, default=256.0, help="NvmeOffload's (default: %(default)s)")
    parser.add_argument("--io-threads", type=int, default=4, help="NvmeOffload's (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the parts one by one and print their tables."""
    options = options_of()
    versions = f"torch {torch.__version__}, lightning {pl.__version__}, Python {sys.version.split()[0]}"
    print(f"{versions}, {os.cpu_count()} cores")
    print(f"{numel_of(options.width, options.layers) / 1e6:.0f} million parameters\n", flush=True)
    found: dict[str, Any] = {"versions": versions, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        setting = Setting(
            width=options.width,
            layers=options.layers,
            repeat=options.repeat,
            steps=options.steps,
            ranks=tuple(options.ranks),
            tokens=(options.batch, options.length),
            folder=folder,
            buffer_mib=options.buffer_mib,
            io_threads=options.io_threads,
        )
        for part in options.parts:
            if part == "device":
                found[part] = measure_device(asdict(setting))
                continue
            if part == "training":
                found[part] = measure_training(setting)  # its worlds are processes of their own
            else:
                # Forked, which saves an import: this process computes nothing, so it has no threads to lose.
                results = mp.get_context("fork").SimpleQueue()
                mp.start_processes(run_part, (part, setting, results), nprocs=1, start_method="fork")
                found[part] = results.get()
            MEASURES[part][1](found[part])
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
