"""The command line: ``ZeroCLI`` and the Trainer's commands. For ``lightning-zero plan`` see ``extensions/planner``."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_zero import ZeroCLI, ZeroStrategy, __version__
from lightning_zero.cli import main
from lightning_zero.config import CheckpointPolicy, HostOffload, NvmeOffload
from lightning_zero.extensions import doctor, tune
from lightning_zero.extensions.tune import children as tune_runs
from lightning_zero.extensions.tune.search import Settings
from tests.helpers.script import run_forked, run_script, start_forked
from tests.helpers.world import free_port, rank_environment

BORING = "--model=lightning.pytorch.demos.boring_classes.BoringModel"


# ------------------------------------------------------------------------------------------------------------ ZeroCLI


@pytest.fixture
def _bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when it gets arguments from Python while the process has arguments too."""
    monkeypatch.setattr(sys, "argv", ["script"])


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("defaults", "arguments", "expected"),
    [
        ({}, [], ZeroStrategy),
        ({}, ["--trainer.strategy=auto"], SingleDeviceStrategy),
        ({"strategy": "auto"}, ["--trainer.strategy=zero2"], ZeroStrategy),
    ],
)
def test_default_strategy(defaults: dict[str, str], arguments: list[str], expected: type) -> None:
    cli = ZeroCLI(
        BoringModel,
        run=False,
        trainer_defaults={"accelerator": "cpu", "devices": 1, "logger": False, **defaults},
        seed_everything_default=False,
        args=arguments,
    )

    assert type(cli.trainer.strategy) is expected


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("strategy", "arguments", "expected"),
    [
        ("auto", ["--trainer.strategy=zero1", "--trainer.strategy.bucket_mib=3"], ZeroStrategy(1, bucket_mib=3.0)),
        ("zero2", ["--trainer.strategy.bucket_mib=3"], ZeroStrategy(2, bucket_mib=3.0)),
        (
            "zero2",
            ["--trainer.strategy.checkpoint.async_save=true", "--trainer.strategy.prefetch=0"],
            ZeroStrategy(2, checkpoint=CheckpointPolicy(async_save=True), prefetch=0),
        ),
        ("{class_path: zero3, init_args: {prefetch: 1}}", [], ZeroStrategy(3, prefetch=1)),
        (
            "{class_path: lightning_zero.zero3, init_args: {prefetch: 1}}",
            ["--trainer.strategy.bucket_mib=3"],
            ZeroStrategy(3, prefetch=1, bucket_mib=3.0),
        ),
        (
            "{class_path: lightning_zero.ZeroStrategy, init_args: {stage: 3, offload: "
            "{class_path: lightning_zero.HostOffload, init_args: {parameters: true, pin_mib: 64}}}}",
            [],
            ZeroStrategy(3, offload=HostOffload(parameters=True, pin_mib=64.0)),
        ),
        (
            "zero1",
            ["--trainer.strategy=zero2_offload", "--trainer.strategy.bucket_mib=3"],
            ZeroStrategy(2, bucket_mib=3.0, offload=HostOffload()),
        ),
        (
            "zero3_offload",
            ["--trainer.strategy.offload.pin_mib=64"],
            ZeroStrategy(3, offload=HostOffload(parameters=True, pin_mib=64.0)),
        ),
        (
            "zero3",
            ["--trainer.strategy.offload=lightning_zero.NvmeOffload", "--trainer.strategy.offload.path=/var/tmp"],
            ZeroStrategy(3, offload=NvmeOffload(path="/var/tmp")),
        ),
    ],
)
def test_a_name_takes_arguments(tmp_path: Path, strategy: str, arguments: list[str], expected: ZeroStrategy) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"trainer: {{accelerator: cpu, devices: 1, logger: false, strategy: {strategy}}}")
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}", *arguments])

    assert type(cli.trainer.strategy) is ZeroStrategy
    assert cli.trainer.strategy.settings == expected.settings
    # What LightningCLI saves beside the checkpoints gives the same again, in ours too.
    file.write_text(cli.parser.dump(cli.config))
    again = ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])
    assert again.trainer.strategy.settings == expected.settings


STRATEGY = "--trainer.strategy="
OFFLOAD = "class_path: lightning_zero"
CLASS = "strategy: {class_path: lightning_zero.ZeroStrategy, init_args: {%s}}"


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("strategy: {class_path: zer3, init_args: {prefetch: 1}}", [], "zer3"),
        ("strategy: {name: zero3}", [], "trainer.strategy"),
        ("strategy: zero2", ["--trainer.strategy.bucket_mbi=3"], "bucket_mbi"),
        (CLASS % "bucket_mbi: 3", [], "bucket_mbi"),
        (CLASS % "checkpoint: {asnyc_save: true}", [], "asnyc_save"),
        (CLASS % "bucket_mib: much", [], "bucket_mib"),
        (
            CLASS % f"offload: {{{OFFLOAD}.HostOffload, init_args: {{pin_mb: true}}}}",
            [],
            "pin_mb",
        ),
        (CLASS % f"offload: {{{OFFLOAD}.HostOffload, init_args: {{pin_mib: much}}}}", [], "pin_mib"),
        (CLASS % f"offload: {{{OFFLOAD}.NvmeOffload, init_args: {{parameters: true}}}}", [], "are required: path"),
        ("", ["--trainer.strategy.checkpoint.format=shraded"], "shraded"),
        ("", [f"{STRATEGY}zero3", "--trainer.strategy.cpu_offload=true"], "cpu_offload"),
        ("", ["--trainer.stratgy=zero2"], "--trainer.stratgy=zero2"),
        ("", ["--trainer.max_epochs=x"], "trainer.max_epochs"),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: str,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer:\n  accelerator: cpu\n  devices: 1\n  logger: false\n  {config}\n")
    with pytest.raises(SystemExit) as stopped:
        ZeroCLI(
            BoringModel,
            run=False,
            seed_everything_default=False,
            args=[f"--config={tmp_path / 'config.yaml'}", *arguments],
        )

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.rpartition("error: ")[2]


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (f"{STRATEGY}zer3", "invalid strategy name: `strategy='zer3'`"),
        ("--trainer.strategy.bucket_mib=-3", "bucket_mib must be a positive number of MiB, got -3"),
    ],
)
def test_what_a_strategy_refuses_is_an_error_of_python(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[argument])


class Picky(BoringModel):
    """A model of somebody who refuses a setting."""

    def __init__(self, width: int | str = 1) -> None:
        super().__init__()
        raise ValueError(f"width {width} is too small")


@pytest.mark.usefixtures("_bare_command_line")
def test_what_a_model_raises_is_its_own() -> None:
    with pytest.raises(ValueError, match="width 1 is too small"):
        ZeroCLI(Picky, run=False, seed_everything_default=False, args=["--trainer.strategy.bucket_mib=3"])


# ----------------------------------------------------------------------------------------------------------- commands


OPTIONS = {
    "plan": ("--hf-config ", "--device-memory ", "--config FILE ", "--model CLASS ", "--trainer.NAME "),
    "inspect": ("--tensors ", "--no-verify"),
    "doctor": ("--offload-dir ", "--wait ", "--json"),
    "consolidate": ("--format {ckpt,safetensors}", "--max-shard-size "),
    **dict.fromkeys(
        ("fit", "validate", "test", "predict"),
        ("--config FILE ", "--model CLASS ", "--trainer.strategy NAME ", "--trainer.NAME "),
    ),
}


def forbid_imports(folder: Path) -> None:
    """What takes seconds is to import these: programs that start in the folder cannot."""
    for module in ("torch", "lightning", "jsonargparse"):
        (folder / f"{module}.py").write_text("raise RuntimeError(f'{__name__} is imported')")


def test_help_and_version_are_quick(tmp_path: Path) -> None:
    forbid_imports(tmp_path)
    (tmp_path / "lightning-zero").write_text("from lightning_zero.cli import main\nmain()\n")
    assert run_script(["-m", "lightning_zero", "--version"], cwd=tmp_path).stdout == f"lightning-zero {__version__}\n"
    for command in ("", *OPTIONS):
        arguments = [*filter(None, [command]), "--help"]
        stdout, stderr = run_script(["-m", "lightning_zero", *arguments], cwd=tmp_path)
        assert stdout.startswith(f"usage: lightning-zero {command}".rstrip())
        assert all(option in stdout for option in OPTIONS.get(command, OPTIONS)), command
        assert not stderr
    assert run_script(["lightning-zero", "plan", "-h"], cwd=tmp_path).stdout.startswith("usage: lightning-zero plan")


def test_programs_of_others_are_not_asked(tmp_path: Path) -> None:
    forbid_imports(tmp_path)
    (tmp_path / "fit.py").write_text(
        "import sys\ntry:\n    import lightning_zero\nexcept RuntimeError as error:\n    print(error, *sys.argv[1:])\n"
    )
    stdout, _ = run_script(["fit.py", "fit", "--help"], cwd=tmp_path)

    assert re.fullmatch(r"\w+ is imported fit --help\n", stdout)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspct"])

    assert stopped.value.code == 2
    assert "invalid choice: 'inspct' (choose from" in capsys.readouterr().err


def test_modules_of_the_current_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lightning-zero").write_text("from lightning_zero.cli import main\nmain()\n")
    (tmp_path / "my_module.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\nclass MyModel(BoringModel):\n    pass\n"
    )
    stdout, _ = run_forked(["bin/lightning-zero", "plan", "--model=my_module.MyModel", "--world_size=2"], cwd=tmp_path)

    assert "Plan for 2" in stdout


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_command_runs_on_two_processes(tmp_path: Path, command: str) -> None:
    _, stderr = run_forked(
        [
            *("-m", "lightning_zero", command, BORING),
            *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"),
            *(f"--trainer.limit_{part}_batches=2" for part in ("train", "val", "test", "predict")),
            *("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"),
        ],
        cwd=tmp_path,
        ranks=2,
    )

    assert "Starting with 2 processes" in stderr


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path: Path) -> None:
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    arguments = ["-m", "lightning_zero", "plan", "--parameters", "7B", "--world-size=8"]
    pid = start_forked(arguments, tmp_path, [pipe, errors])
    os.close(os.open(pipe, os.O_RDONLY))  # as `head` does
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "Traceback" not in errors.read_text()
    assert "BrokenPipe" not in errors.read_text()


def test_to_inspect_imports_no_lightning(tmp_path: Path) -> None:
    """Most of the seconds that it takes would be those."""
    for module in ("lightning", "torchmetrics"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError(f'{__name__} is imported')")
    stderr = run_script(["-m", "lightning_zero", "inspect", "missing.ckpt"], cwd=tmp_path, code=1).stderr
    assert "missing.ckpt" in stderr
    assert "is imported" not in stderr


# ------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    begin = time.monotonic()
    stdout, _ = run_forked(["-m", "lightning_zero", "doctor", "--json", "--offload-dir=disk"], cwd=tmp_path)
    assert time.monotonic() - begin < 30
    checks = {check["name"]: check for check in json.loads(stdout)["checks"]}
    assert {"torch", "network of gloo", "GPUs", "threads", "memory", "offload directory"} <= checks.keys()
    assert checks["two ranks, gloo"]["state"] == checks["two ranks, memory"]["state"] == "ok"
    assert re.match(r"all-reduce of 16.8 MB in [\d.]+ ms, ", checks["two ranks, gloo"]["found"])
    assert not list((tmp_path / "disk").iterdir())


def test_doctor_imports_no_lightning(tmp_path: Path) -> None:
    """It may be what is missing, as torch may."""
    for module in ("torch", "lightning", "torchmetrics"):
        (tmp_path / f"{module}.py").write_text("raise OSError(f'{__name__} is broken')")
    stdout, stderr = run_script(["-m", "lightning_zero", "doctor"], cwd=tmp_path, code=1)
    assert "OSError: torch is broken" in stdout
    assert not stderr


def test_doctor_fails_where_ranks_cannot_meet(tmp_path: Path) -> None:
    variables = [{"GLOO_SOCKET_IFNAME": "nothing0"}]
    stdout, stderr = run_forked(["-m", "lightning_zero", "doctor"], cwd=tmp_path, ranks=variables, code=1)
    assert re.search(r"^network of gloo +problem +GLOO_SOCKET_IFNAME=nothing0, and there is no nothing0$", stdout, re.M)
    assert re.search(r"^two ranks, gloo +problem +no all-reduce: ", stdout, re.M)
    assert not stderr


def of_job(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    return {**rank_environment(rank, size, port), **more}


def test_doctor_looks_at_the_ranks_of_a_job(tmp_path: Path) -> None:
    port = free_port()
    slurm = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_PROCID": "1", "SLURM_NODELIST": "localhost"}
    slurm |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [of_job(0, 2, port, LOCAL_WORLD_SIZE="3"), slurm]
    stdout, _ = run_forked(["-m", "lightning_zero", "doctor"], cwd=tmp_path, ranks=ranks, code=1)
    assert re.search(r"^2 ranks, gloo +ok +all-reduce of 16.8 MB", stdout, re.M)
    assert re.search(r"^clocks +ok +[-+]0.\d\d s on rank [01]", stdout, re.M)
    assert re.search(r"^LOCAL_WORLD_SIZE +problem +3 on ", stdout, re.M)
    assert stdout.count("problem(s)") == 1, "rank 1 has nothing to print"


def test_doctor_names_a_rank_that_does_not_come(tmp_path: Path) -> None:
    port = free_port()
    ranks = [of_job(rank, 3, port, LOCAL_RANK="1") for rank in (0, 2)]  # no first rank, which would look at the machine
    stdout, _ = run_forked(["-m", "lightning_zero", "doctor", "--wait=3"], cwd=tmp_path, ranks=ranks, code=1)
    assert re.search(r"^ranks +problem +2 of 3 came within 3 s, without rank 1$", stdout, re.M)


def children() -> set[int]:
    """Processes that this one has started, dead ones that nobody has waited for too."""
    listed = (Path(f"/proc/self/task/{thread}/children").read_text() for thread in os.listdir("/proc/self/task"))
    return {int(pid) for text in listed for pid in text.split()}


def hang(folder: Path, rank: int) -> Iterator[str]:
    """One of two processes that never come to their end, whatever they are asked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    (folder / str(rank)).write_text(str(os.getpid()))
    yield "begun"
    while True:
        time.sleep(60)


forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12+: a process with threads


@forks
def test_doctor_ends_an_all_reduce_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = dist.all_reduce, children()

    def all_reduce(tensor: Any) -> None:
        """Rank 1 never calls gloo's, in which rank 0 waits."""
        time.sleep(60) if dist.get_rank() == 1 else real(tensor)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setitem(doctor._SECONDS, "pair", 3.0)
    begin = time.monotonic()
    (found,) = doctor.pair("gloo")
    assert time.monotonic() - begin < 20
    assert found.found == "no all-reduce: no end within 3 s"
    assert found.problem
    assert children() == before


@forks
def test_doctor_ends_its_processes_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, work = children(), [partial(hang, tmp_path, rank) for rank in range(2)]
    assert doctor.watched(work, 0.5) == [(["begun"], "no end within 0.5 s")] * 2
    assert children() == before
    ends = [lambda: os.kill(os.getpid(), signal.SIGKILL), partial(int, "no number"), list]
    reasons = [reason for _, reason in doctor.watched(ends, 60.0)]
    assert reasons == ["its process was killed", "ValueError: invalid literal for int() with base 10: 'no number'", ""]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_heard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor.watched(work, 60.0)
    assert children() == before


@forks
def test_doctor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """Its processes have an alarm of their own."""
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=doctor.watched, args=([partial(hang, tmp_path, 0)], 3.0))
    killed.start()
    deadline = time.monotonic() + 60
    while not (pids := [int(path.read_text() or 0) for path in tmp_path.iterdir()]) or not pids[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.join()
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.1)


# --------------------------------------------------------------------------------------------------------------- tune

TRAIN = """\
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning_zero import ZeroCLI, ZeroStrategy


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 8), self.batch_size)


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if not isinstance(self.trainer.strategy, ZeroStrategy):
            raise MemoryError("no room for replicas")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.save_checkpoint("mine.ckpt")


ZeroCLI(Model, Data)
"""
RUN = """\
trainer:
  strategy: ddp  # so far
  accelerator: cpu
  devices: 2
  max_epochs: 1
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: kept, every_n_train_steps: 1}
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: nothing}
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
data:
  batch_size: 2
"""


def test_tune_writes_a_configuration_that_trains(tmp_path: Path) -> None:
    """Runs save nothing, do not end early at an end of an epoch, and log elsewhere, as a callback needs it."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.yaml").write_text(RUN)
    arguments = ["--config=run.yaml", "--runs=2", "--steps=2", "--", sys.executable, "train.py", "fit"]
    stdout, _ = run_script(["-m", "lightning_zero", "tune", *arguments], cwd=tmp_path, timeout=300.0)
    assert "as given: ended with exit code 1: MemoryError: no room for replicas" in stdout
    assert re.search(r"^zero1 +[\d.,]+ +[\d.,]+ ms +[\d.]+ MB +-$", stdout, re.M)
    assert "Not tried, for want of runs: zero2; zero3;" in stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run.yaml", "tuned.yaml"}
    changed = RUN.replace("strategy: ddp  # so far", "strategy:\n    class_path: lightning_zero.zero1  # so far")
    assert (tmp_path / "tuned.yaml").read_text() == changed
    options = ["--trainer.fast_dev_run=2", "--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    run_forked(
        ["train.py", "fit", "--config=tuned.yaml", *options, "--trainer.logger.save_dir=."], cwd=tmp_path, ranks=2
    )


STUBBORN = """\
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[-1] != "again":
    subprocess.Popen([sys.executable, __file__, "again"], start_new_session=True)
open("ready", "a").write("*")
time.sleep(100)
"""


def runs(pid: int) -> bool:
    """Whether a process does: its parent may not have asked yet how it ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_tune_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that heeds no SIGTERM, and of what it started in a session of its own, as torchrun does."""
    monkeypatch.setattr(tune_runs, "_GRACE", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("trainer: {strategy: zero3}")
    Path("program.py").write_text(STUBBORN)
    pids, find = set[int](), tune_runs._running

    def running(child: Any, mark: str) -> set[int]:
        found = find(child, mark)
        pids.update(found)
        return found

    def interrupt() -> None:
        while not Path("ready").exists() or len(Path("ready").read_text()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tune_runs, "_running", running)
    threading.Thread(target=interrupt, daemon=True).start()
    assert tune.run(["--config=run.yaml", "--timeout=60", "--", sys.executable, "program.py"]) == 130
    assert len(pids) == 2
    assert not any(map(runs, pids))
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "program.py", "ready"}


def test_runs_of_tune_are_short_and_keep_to_their_folder(tmp_path: Path) -> None:
    """The user's options override the configuration, and what makes a run short overrides both."""
    text = "import sys\nprint(*sys.argv[1:])\nprint(open(sys.argv[1][9:]).read())\nsys.exit('ValueError: no')"
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "runs").mkdir()
    kept = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    config = {"trainer": {"callbacks": [kept], "max_steps": 5}, "ckpt_path": "last.ckpt"}
    program = [sys.executable, str(tmp_path / "program.py")]
    made = tune_runs.Children(tmp_path / "runs", tmp_path, program, ["--model.width=3"], config, 5, 60.0)
    row = made.run(Settings(3), "trainer: {}")
    assert row.failure == "ended with exit code 1: ValueError: no"
    first, own, last = made.logs[0].splitlines()[0].split()
    assert own == "--model.width=3"
    assert made.logs[0].splitlines()[1] == "trainer: {}"
    candidate = Path(first.removeprefix("--config="))
    assert candidate.parent == tmp_path, "paths in it may start from its folder"
    assert not candidate.exists()
    short = yaml.safe_load(Path(last.removeprefix("--config=")).read_text())
    trainer = short["trainer"]
    assert short["ckpt_path"] is None
    assert trainer["limit_val_batches"] == 0
    assert trainer["default_root_dir"].startswith(str(tmp_path))
    assert trainer["callbacks"][0] == kept
    assert trainer["callbacks"][1]["class_path"].endswith(".Measurement")
    killed = [sys.executable, "-c", "import os; print('Set a lower value', flush=True); os.kill(os.getpid(), 9)"]
    (tmp_path / "others").mkdir()
    row = tune_runs.Children(tmp_path / "others", tmp_path, killed, [], config, 5, 60.0).run(Settings(3), "")
    assert (row.failure, row.of_memory) == ("ended with exit code -9: it was killed, as where memory runs out", True)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        tune_runs.Children(tmp_path / "runs/0", tmp_path, ["no-such-program"], [], config, 5, 60.0).run(Settings(3), "")
