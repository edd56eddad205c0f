"""The first ten minutes with a GPU: what only a GPU can show, most important first.

    python benchmarks/gpu.py --first-look                        # on one GPU, below ten minutes
    python benchmarks/gpu.py --first-look --stages nccl ways     # some of it
    python benchmarks/gpu.py --first-look --device cpu --tiny    # the same code, of which numbers mean nothing

Every stage is a process of its own with a deadline: one that hangs or crashes costs no other. What is found is at once
a line on the screen and a line of JSON in ``first_look.jsonl``, so that this may be killed at any moment; a later run
adds its lines there. What a stage says besides is in ``STAGE.log``, and is quoted if it fails. Nothing is needed but
torch, lightning, pytest and what this package installs.

tests:     those about a GPU: losses, memory by plan, no waits of the host, kernels.
ways:      plain PyTorch, zero1, zero3 and FSDP2 at three sizes, as one rank of a fake world of 8 and alone. Forward,
           backward and step apart: until the host has issued them (``issue``), and until the device has run them
           (``device``), each begun on an idle device. Of a step as it is: both, and how long the device is ``busy``.
nccl:      a Trainer with clipping, accumulation and a checkpoint, on one rank and on two that share the GPU, which
           nccl takes for two hosts; beside DDP. Then zero3 again with streams of each priority, and in memory of
           the process groups, which is refused where these have none.
trace:     one step of each way for chrome://tracing or https://ui.perfetto.dev (``trace-WAY.json.gz``).
offload:   copies to the host beside computing, and a step with and without offload.
compiled:  as ``ways``, with compiled blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fake_world import Task, fake_world, rows
from gpu import (
    PRESETS,
    WARM_UP_STEPS,
    Preset,
    Runner,
    allocated,
    kernels_of,
    machine,
    planned_peak,
    seen_on,
    synchronize,
)
from lightning.pytorch.strategies import DDPStrategy
from offload_training import GPT, VOCABULARY, Clock, fit, free_port, launched, quiet
from results import FOLDER, headline
from torch.profiler import profile
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, ZeroStrategy

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("plain", "zero1", "zero3", "fsdp2")
PARTS = ("forward", "backward", "step")
SIZES = {"466m": Preset(1536, 16, 16, (8, 1024)), **PRESETS}
TINY = {"tiny": Preset(64, 2, 2, (1, 16))}
CUDA_TESTS = "tests/thorough/simulated_gpu/test_cuda.py"
# Groups run side by side. Sanitizers take minutes, and what measures seconds would measure the others.
TESTS = {
    "memory and waits": [CUDA_TESTS, "tests/world/offload/test_host.py", "-k", "allocator or waits or memory"],
    "losses": [CUDA_TESTS, "-k", "losses"],
    "kernels": [CUDA_TESTS, "tests/thorough/extensions/compression/test_kernels.py", "-k", "rounded or kernels"],
    "ranks": [CUDA_TESTS, "-k", "two_ranks or four_ranks"],
    "activations": ["tests/world/strategy/test_activations.py"],
    "beside DDP": [CUDA_TESTS, "-k", "as_under_ddp"],
}
CPU_TESTS = {"kernels": [CUDA_TESTS, "-k", "rounded"]}


@dataclass(frozen=True)
class Look:
    """What a stage is told.

    Args:
        stage: its name.
        device: ``cuda`` or ``cpu``.
        tiny: whether to compute next to nothing.
        folder: of all files.
        seconds: that it may take.
    """

    stage: str
    device: str
    tiny: bool
    folder: Path
    seconds: float = 0.0

    @property
    def place(self) -> torch.device:
        """The one device."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def sizes(self) -> dict[str, Preset]:
        """Models, from the one with most to issue to the one with most to compute."""
        return TINY if self.tiny else SIZES

    def note(self, what: str, **found: Any) -> None:
        """Print and write what was found, at once and for good."""
        line = json.dumps({"stage": self.stage, "what": what, **found})
        descriptor = os.open(self.folder / "first_look.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (line + "\n").encode())  # in one piece, also beside others
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        shown = ", ".join(f"{name} {_readable(name, value)}" for name, value in found.items() if name != "machine")
        print(f"{self.stage:9} {what}: {shown}", flush=True)

    def attempt(self, what: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Note what is measured, or why there is nothing, and go on."""
        try:
            found = measure()
        except Exception as error:  # of any kind, as this is the first time that it runs there
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        self.note(what, **found)

    def command(self, *arguments: str) -> list[str]:
        """This program with the same settings."""
        settings = ["--device", self.device, "--output", str(self.folder), "--seconds", str(self.seconds)]
        return [sys.executable, __file__, *settings, *(["--tiny"] if self.tiny else []), *arguments]


def _readable(name: str, value: Any) -> str:
    if name.endswith("nbytes") and value is not None:
        return f"{value / 2**30:.3f} GiB"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_readable(key, item)}" for key, item in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def die_with_parent() -> None:
    """Linux: have the kernel kill this process when its parent ends, however that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# The stages


def tests(look: Look) -> None:
    """Groups of tests side by side, each test noted as it ends (``pytest_runtest_logreport``)."""
    settings = look.folder / "pytest.ini"
    settings.write_text("[pytest]\n")  # not the project's, whose settings are for plugins that need not be here
    options = ["--noconftest", "-c", str(settings), "--rootdir", str(ROOT), "--import-mode=importlib", "-s"]
    options += ["-p", "first_look", "-p", "no:terminal", "-p", "no:cacheprovider"]  # the former says what there is
    options += [] if look.device == "cpu" else ["-m", "gpu"]
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FIRST_LOOK": str(look.folder)}
    groups = CPU_TESTS if look.device == "cpu" else TESTS
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT, env=environment, preexec_fn=die_with_parent
        )
        for name, chosen in groups.items()
    }
    for name, process in running.items():
        code = process.wait()
        look.note(name, **({"ended": "well"} if code == 0 else {"failed": f"pytest ended with {code}"}))


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: note a test that has ended, or has not begun."""
    if report.when == "call" or report.outcome != "passed":
        found = {"outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "failed":
            found["failed"] = report.longreprtext[-2000:]
        Look("tests", "", False, Path(os.environ["FIRST_LOOK"])).note(report.nodeid.rpartition("/")[2], **found)


def pytest_collectreport(report: Any) -> None:
    """Likewise: note a file that cannot be imported."""
    if report.outcome == "failed":
        where = Path(os.environ["FIRST_LOOK"])
        Look("tests", "", False, where).note(report.nodeid, failed=report.longreprtext[-2000:])


def ways(look: Look, compiled: bool = False) -> None:
    """Every way at every size, alone on the device."""
    backend = ("eager" if look.tiny else "inductor") if compiled else None
    chosen = dict(list(look.sizes.items())[:1]) if compiled else look.sizes
    for world_size in (8,) if compiled else (8, 1):
        with fake_world(world_size):
            for name, size in chosen.items():
                task = Task(size.width, size.layers, size.tokens, "bf16-mixed", look.place, backend, like=True)
                for way in WAYS:
                    look.attempt(f"{name}, world {world_size}, {way}", partial(times, look, task, world_size, way))


def times(look: Look, task: Task, world_size: int, way: str) -> dict[str, Any]:
    """Times and peaks of a way."""
    torch._dynamo.reset()
    before, count = allocated(task.device), 2 if look.tiny else 6
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
    runner = Runner(rows()[way].make(task, world_size), task)
    runner.steps(WARM_UP_STEPS)
    found: dict[str, Any] = {}
    if task.device.type == "cuda":
        found["rest_nbytes"] = allocated(task.device) - before
        torch.cuda.reset_peak_memory_stats(task.device)
        runner.steps(1)
        found["peak_nbytes"] = torch.cuda.max_memory_allocated(task.device) - before
        found["reserved_nbytes"] = torch.cuda.max_memory_reserved(task.device)
    found["plan_nbytes"] = planned_peak(runner.way, task.device)
    found["issue_ms"], found["device_ms"] = by_part(runner, task, count)
    found["step_ms"] = 1e3 * statistics.median(runner.steps(count) for _ in range(3))
    found |= kernels_of(runner, task.device)
    found["loss"] = runner.losses[WARM_UP_STEPS]
    return found


def by_part(runner: Runner, task: Task, count: int) -> list[dict[str, float]]:
    """Milliseconds of forward, backward and step, by the host's clock until they are issued, and by the device's."""
    on_cuda = task.device.type == "cuda"
    issued: dict[str, list[float]] = {part: [] for part in PARTS}
    taken: dict[str, list[float]] = {part: [] for part in PARTS}

    def play(part: str, work: Callable[[], Any]) -> Any:
        synchronize(task.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        begin = time.perf_counter()
        if on_cuda:
            marks[0].record()
        result = work()
        if on_cuda:
            marks[1].record()
        issued[part].append(1e3 * (time.perf_counter() - begin))
        synchronize(task.device)
        taken[part].append(marks[0].elapsed_time(marks[1]) if on_cuda else issued[part][-1])
        return result

    for index in range(count):
        batch = task.batch(index)
        loss = play("forward", partial(runner.way.forward, batch))
        play("backward", partial(runner.way.backward, loss))
        play("step", runner.way.update)
    return [{part: statistics.median(numbers) for part, numbers in each.items()} for each in (issued, taken)]


def nccl(look: Look) -> None:
    """Ranks in processes of their own: one, two, and two with each priority of streams, and in registered memory."""
    for world_size, options in ((1, []), (2, []), (2, ["--priority=0"]), (2, ["--priority=-1"]), (2, ["--registered"])):
        if options and look.device == "cpu":
            continue  # there are no streams, and no such memory
        run_ranks(look, world_size, options)


def run_ranks(look: Look, world_size: int, options: Sequence[str]) -> None:
    """Run ``rank`` in so many processes on the one device, for a third of the stage's time. One that fails ends all."""
    port, running, end = free_port(), [], time.monotonic() + look.seconds / 3
    for index in range(world_size):
        place = launched(index, world_size, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"GROUP_RANK": str(index), "LIGHTNING_ZERO_RANKS_PER_HOST": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # Of two ranks on one device nccl says "Duplicate GPU", unless they are on two hosts.
        place |= {"NCCL_HOSTID": f"first-look-{index}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        if "--priority" in "".join(options):
            place |= {"TORCH_NCCL_HIGH_PRIORITY": str(int("--priority=-1" in options))}
        command, environment = look.command("--run", "rank", *options), {**os.environ, **place}
        running.append(subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, stdout=sys.stdout))
    while None in (codes := [process.poll() for process in running]) and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
    for process in running:
        process.kill()
        process.wait()
    if codes != [0] * world_size:
        look.note(
            f"world {world_size}, {' '.join(options) or 'as it is'}", failed=f"ranks ended with {codes}, see nccl.log"
        )


def rank(look: Look, priority: int | None, registered: bool) -> None:
    """One rank: zero3, zero1 and DDP with numbers side by side, or zero3 with a priority of its streams or with memory
    that nccl has registered."""
    quiet()
    world_size, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    if priority is not None and look.device == "cuda":
        stream: Any = torch.cuda.Stream

        def prioritized(device: Any = None, **options: Any) -> Any:
            return stream(device, **{**options, "priority": priority})

        torch.cuda.Stream = prioritized  # type: ignore[misc, assignment]
    variant = priority is not None or registered
    zero3 = partial(ZeroStrategy, 3, units=["Block"], allocate_memory_from_process_group=registered)
    makes: dict[str, Any] = {"zero3": zero3}
    if not variant:
        makes |= {"zero1": partial(ZeroStrategy, 1), "ddp": DDPStrategy}
    losses: dict[str, list[float]] = {}
    for name, make in makes.items():
        path = look.folder / f"{name}-{world_size}.ckpt"

        def measure(name: str = name, make: Any = make, path: Path = path) -> dict[str, Any]:
            trainer, clock = trained(look, make(), world_size, 2)
            losses[name] = [float(loss) for loss in trainer.lightning_module.losses]
            found: dict[str, Any] = {"step_ms": 1e3 * clock.median, "loss": losses[name][-1]}
            if variant:
                return found
            resumed, _ = trained(look, make(), world_size, 1)
            begin = time.perf_counter()
            resumed.save_checkpoint(path)
            found["save_seconds"] = time.perf_counter() - begin
            resumed, _ = trained(look, make(), world_size, 2, str(path))
            again = [float(loss) for loss in resumed.lightning_module.losses]
            found["resumed_difference"] = difference(again, losses[name][-len(again) :])
            if name == "ddp":
                found |= {f"{other}_difference": difference(losses[other], losses[name]) for other in losses}
            return found

        what = f"world {world_size}, {name}" + ("" if priority is None else f", streams of priority {priority}")
        what += ", registered memory" * registered
        try:
            found = measure()
        except Exception as error:  # and this process, so that the others do not wait for it
            look.note(what, rank=int(os.environ["RANK"]), failed=f"{type(error).__name__}: {error}"[:2000])
            raise
        if first:
            look.note(what, **found)


def difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative one."""
    return max(abs(one - other) / abs(other) for one, other in zip(some, others, strict=True))


def trained(
    look: Look, strategy: Any, world_size: int, epochs: int, path: str | None = None
) -> tuple[pl.Trainer, Clock]:
    """A Trainer that has trained for so many epochs of two steps, and the clock of its micro-steps."""
    size = TINY["tiny"] if look.tiny else Preset(1024, 8, 8, (4, 512))
    (sequences, length), micro = size.tokens, 4
    torch.manual_seed(0)
    model, clock = GPT(size.width, size.layers), Clock(look.place)
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, VOCABULARY, (micro * sequences * world_size, length + 1), generator=generator)
    trainer = pl.Trainer(
        accelerator="gpu" if look.device == "cuda" else "cpu",
        devices=1,
        num_nodes=world_size,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, sequences), ckpt_path=path)
    return trainer, clock


def trace(look: Look) -> None:
    """A profile of one step of each way, of few blocks."""
    size = next(iter(look.sizes.values()))
    task = Task(size.width, min(4, size.layers), size.tokens, "bf16-mixed", look.place, like=True)

    def measure(way: str) -> dict[str, Any]:
        runner = Runner(rows()[way].make(task, 8), task)
        runner.steps(WARM_UP_STEPS)
        with profile(activities=seen_on(look.place)) as profiler:
            runner.steps(1)
        path = look.folder / f"trace-{way}.json.gz"
        profiler.export_chrome_trace(str(path))
        return {"file": path.name, "file_nbytes": path.stat().st_size}

    with fake_world(8):
        for way in WAYS:
            look.attempt(way, partial(measure, way))
            gc.collect()


def offload(look: Look) -> None:
    """Whether copies and computing overlap, and what a step with offload takes."""

    def overlap() -> dict[str, Any]:
        device = "cpu" if look.tiny else look.device  # of which it takes little
        command = [sys.executable, "-m", "tests.helpers.device_runs", "overlap", device]
        ended = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
        found = json.loads(ended.stdout.rpartition("FOUND")[2])
        hidden = found["copy"] + found["compute"] - found["both"]
        return {**{f"{name}_ms": number for name, number in found.items()}, "hidden_ms": hidden}

    def measure(policy: HostOffload | None) -> dict[str, Any]:
        size = list(look.sizes.values())[-1]
        clock = Clock(look.place)
        torch.manual_seed(0)
        if look.device == "cuda":
            torch.cuda.reset_peak_memory_stats(look.place)
        model, strategy = GPT(size.width, size.layers), ZeroStrategy(3, units=["Block"], offload=policy)
        options = {"accelerator": "gpu" if look.device == "cuda" else "cpu", "devices": 1, "precision": "bf16-mixed"}
        fit(model, clock, 3 if look.tiny else 6, size.tokens, strategy=strategy, **options)
        peak = torch.cuda.max_memory_allocated(look.place) if look.device == "cuda" else None
        return {"step_ms": 1e3 * clock.median, "peak_nbytes": peak, "loss": float(model.losses[-1])}

    look.attempt("copies beside computing", overlap)
    for name, policy in (
        ("no offload", None),
        ("host", HostOffload()),
        ("host, parameters", HostOffload(parameters=True)),
    ):
        look.attempt(name, partial(measure, policy))
        gc.collect()


MINUTES = 9.8
STAGES: dict[str, tuple[Callable[[Look], None], int]] = {  # and the seconds of these that each may take
    "tests": (tests, 150),
    "ways": (ways, 140),
    "nccl": (nccl, 110),
    "trace": (trace, 40),
    "offload": (offload, 60),
    "compiled": (partial(ways, compiled=True), 80),
}


# ---------------------------------------------------------------------------------------------------------------------
# Their processes


def run_stage(look: Look) -> bool:
    """Run a stage in a process of its own; whether it ended well and in time."""
    begin, log = time.monotonic(), look.folder / f"{look.stage}.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            look.command("--run", look.stage), stderr=errors, start_new_session=True, preexec_fn=die_with_parent
        )
        try:
            code = process.wait(timeout=look.seconds)
            ended = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {look.seconds:.0f} seconds"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    look.note("the stage", seconds=time.monotonic() - begin, **({"failed": ended} if ended else {"ended": "well"}))
    if ended:
        print("".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-15:]), flush=True)
    return not ended


def begin(look: Look) -> None:
    """Run a stage in this process."""
    quiet()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64  # each way compiles the blocks anew
    found = machine(look.place)
    look.note(headline(found), device=found.get("device", look.device), machine=found)
    STAGES[look.stage][0](look)


def main() -> None:
    """Run the stages that were asked for, one after the other."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-look", action="store_true", help="to gpu.py, what this is")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="to try the program, not the device")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all stages, each has its share")
    parser.add_argument("--output", type=Path, default=FOLDER / "first_look", help="folder of all files")
    parser.add_argument("--run", choices=[*STAGES, "rank"], help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--priority", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--registered", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    look = partial(Look, device=options.device, tiny=options.tiny, folder=options.output.resolve())
    if options.run == "rank":
        rank(look("nccl", seconds=options.seconds), options.priority, options.registered)
    elif options.run:
        begin(look(options.run, seconds=options.seconds))
    elif options.device == "cuda" and not torch.cuda.is_available():  # without beginning to use it
        print("There is no GPU here, and nothing was measured. --device cpu --tiny runs the same code; see --help.")
    else:
        end = time.monotonic() + 60 * options.minutes
        options.output.mkdir(parents=True, exist_ok=True)
        for stage in options.stages:
            seconds = min(STAGES[stage][1] * options.minutes / MINUTES, end - time.monotonic())
            if seconds > 0:
                run_stage(look(stage, seconds=seconds))
            else:
                look(stage).note("the stage", failed="no time was left")


if __name__ == "__main__":
    main()
