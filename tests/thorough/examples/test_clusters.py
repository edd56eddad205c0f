"""The scripts for clusters, run with what this machine has: torchrun itself, and stand-ins for Slurm's programs.

Each runs in a folder with links to the repository, as in a clone. The run is ended by what ends runs on a cluster, a
process that dies or the end of a job's time, and goes on when the script runs again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from tests.helpers.script import ROOT, run_forked
from tests.helpers.waiting import until
from tests.helpers.world import free_port, subprocess_env

CLUSTERS = ROOT / "examples" / "clusters"
SCRIPTS = sorted(CLUSTERS.glob("*.sh"))
DEADLINE = 140.0
EVERY = 20  # steps between checkpoints, a fifth of what `run.yaml` says
TINY = [
    *("--model.dim=16", "--model.layers=1", "--model.heads=1", "--data.window=16", "--data.batch_size=1"),
    *(f"--data.path={ROOT / 'lightning_zero'}", "--report.length=0", "--trainer.enable_progress_bar=false"),
    *("--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1", f"--trainer.limit_train_batches={EVERY}"),
]


class Kill(Callback):
    """Kills one rank in the middle of a step, once in all attempts."""

    def __init__(self, rank: int, step: int, mark: str) -> None:
        self.rank, self.step, self.mark = rank, step, Path(mark)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which the scripts find what they name, and checkpoints are saved often."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "examples" / "clusters" / "run.yaml"
    settings.write_text(settings.read_text().replace("every_n_train_steps: 100", f"every_n_train_steps: {EVERY}"))
    return tmp_path


@contextlib.contextmanager
def running(script: str, clone: Path, *options: str, log: str = "log", **variables: str) -> Iterator[subprocess.Popen]:
    """The script with ``python`` and ``torchrun`` of this environment, and with the programs in ``clone / "bin"``."""
    path = os.pathsep.join([str(clone / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    with open(clone / log, "wb") as output:
        process = subprocess.Popen(
            ["bash", str(CLUSTERS / script), *options],
            cwd=clone,
            env=subprocess_env(PATH=path, PET_LOCAL_ADDR="127.0.0.1", PYTHONUNBUFFERED="1", **variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def saved(path: Path) -> dict[str, Any]:
    return open_checkpoint(path, ControlGroup(None))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value[...]) for name, value in saved(path)["state_dict"].items()}


def logged_steps(clone: Path, version: int) -> list[int]:
    rows = (clone / "runs" / "cluster" / f"version_{version}" / "metrics.csv").read_text().splitlines()
    return [int(row.split(",")[rows[0].split(",").index("step")]) for row in rows[1:]]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_understands_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=True).stderr == b""


# ----------------------------------------------------------------------------------------------------------- torchrun


def test_torchrun_starts_two_machines_again_after_a_process_has_died(clone: Path) -> None:
    """The run goes on from the checkpoint of step 20, with the numbers of one that nobody has disturbed."""
    options = [*TINY, f"--trainer.max_steps={2 * EVERY}"]
    kill = {"class_path": f"{__name__}.Kill", "init_args": {"rank": 1, "step": 26, "mark": str(clone / "killed")}}
    variables = {"JOB": "night", "NODES": "2", "DEVICES": "1", "HEAD": "127.0.0.1", "PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(
                running(
                    "torchrun.sh", clone, *options, f"--trainer.callbacks+={json.dumps(kill)}", log=log, **variables
                )
            )
            for log in ("first", "second")
        ]
        assert until(lambda: all(machine.poll() is not None for machine in machines), DEADLINE)
    output = "".join((clone / log).read_text() for log in ("first", "second"))
    assert [machine.returncode for machine in machines] == [0, 0], output
    assert (clone / "killed").exists()
    assert len(re.findall(r"Restored all states from the checkpoint at \S+/last\.ckpt$", output, re.MULTILINE)) == 1
    assert logged_steps(clone, 0)[-1] < 2 * EVERY
    assert logged_steps(clone, 1) == list(range(EVERY, 2 * EVERY))

    undisturbed = clone / "undisturbed"
    undisturbed.mkdir()
    program = shlex.split((CLUSTERS / "torchrun.sh").read_text().split("--max-restarts=3")[1].split("--trainer")[0])
    arguments = [str(clone / word) if (clone / word).is_file() else word for word in program if word.strip()]
    ranks = ["--trainer.devices=2", "--trainer.accelerator=cpu"]
    run_forked([*arguments, *options, *ranks], cwd=undisturbed, ranks=2, timeout=DEADLINE)
    expected = weights(undisturbed / "runs" / "cluster" / "last.ckpt")
    found = weights(clone / "runs" / "cluster" / "last.ckpt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# -------------------------------------------------------------------------------------------------------------- Slurm

# Starts the tasks. When there is a checkpoint and the job is to run out of time, it sends them the signal of
# `#SBATCH --signal`; as soon as the job is queued again, it ends them.
SRUN = """
import os, signal, subprocess, sys, time
from pathlib import Path

command = [word for index, word in enumerate(sys.argv) if index and not (index == 1 and word.startswith("--"))]
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
    for task in range(int(os.environ["SLURM_NTASKS"]))
]
asked = Path("requeued").exists() or "OVERTIME" not in os.environ
while not asked and all(task.poll() is None for task in tasks):
    if asked := Path("runs/cluster/last.ckpt").exists():
        for task in tasks:
            task.send_signal(getattr(signal, os.environ["OVERTIME"]))
    time.sleep(0.01)
while any(task.poll() is None for task in tasks):
    if "OVERTIME" in os.environ and Path("requeued").exists() or any(task.poll() for task in tasks):
        for task in tasks:
            task.kill()
    time.sleep(0.01)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """
import sys
from pathlib import Path

Path("requeued").write_text(" ".join(sys.argv[1:]))
"""
# Keeps what it would start, and for which task.
KEEP = """
import json, os, sys
from pathlib import Path

variables = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "MASTER_"))}
Path("kept").write_text(json.dumps([sys.argv[3:], {**variables, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}]))
"""
# What the script would start.
ECHO = """
import sys

print("started", *sys.argv[1:])
"""


def directives() -> dict[str, str]:
    """What the script asks of sbatch."""
    lines = re.findall(r"^#SBATCH --(\S+)$", (CLUSTERS / "slurm.sh").read_text(), re.MULTILINE)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def install(clone: Path, **programs: str) -> None:
    (clone / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        program = clone / "bin" / name
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)


def sbatch(clone: Path, *options: str, tasks: int, code: int = 0, **variables: str) -> str:
    """``sbatch --nodes=1 --ntasks-per-node=TASKS slurm.sh OPTIONS``, to its end; what it has written."""
    job = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": directives()["job-name"],
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    with running("slurm.sh", clone, *options, **job, **variables) as process:
        assert until(lambda: process.poll() is not None, DEADLINE), (clone / "log").read_text()
    output = (clone / "log").read_text()
    assert (process.returncode != 0) == (code != 0), output
    return output


def test_slurm_is_asked_for_what_lightning_needs() -> None:
    asked = directives()
    assert asked["distribution"] == "block"
    assert re.fullmatch(r"SIGUSR1@\d+", asked["signal"])
    assert {"requeue", "nodes", "ntasks-per-node", "gpus-per-node"} <= asked.keys()
    assert not {"ntasks", "gpus-per-task"} & asked.keys()
    assert asked["job-name"] not in ("bash", "interactive")


def test_slurm_queues_a_job_again_that_goes_on_with_fewer_tasks(clone: Path) -> None:
    install(clone, srun=SRUN, scontrol=SCONTROL)

    output = sbatch(
        clone, *TINY, "--trainer.max_steps=1000000", tasks=2, code=1, OVERTIME=directives()["signal"].split("@")[0]
    )
    assert (clone / "requeued").read_text() == "requeue 1234567", output
    checkpoint = clone / "runs" / "cluster" / "hpc_ckpt_1.ckpt"
    step = saved(checkpoint)["global_step"]
    assert step >= EVERY
    assert saved(clone / "runs" / "cluster" / "last.ckpt")["global_step"] <= step

    install(clone, srun=KEEP)
    sbatch(clone, *TINY, f"--trainer.max_steps={step + 3}", tasks=1)
    program, task = json.loads((clone / "kept").read_text())
    output = "".join(run_forked(program, cwd=clone, ranks=[task]))
    assert "Restored all states from the checkpoint at runs/cluster/hpc_ckpt_1.ckpt" in output
    assert logged_steps(clone, 1) == [step, step + 1, step + 2]


def test_slurm_goes_on_from_the_newest_checkpoint(clone: Path) -> None:
    install(clone, srun=ECHO)
    run = clone / "runs" / "cluster"

    def resumed_from() -> str:
        (found,) = re.findall(r"--ckpt_path=(\S+)", sbatch(clone, "--trainer.max_steps=7", tasks=2))
        return found

    assert resumed_from() == "last"  # there is none: the run begins
    for seconds, name in enumerate(["last.ckpt", "hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt", "last.ckpt"]):
        (run / name).mkdir(parents=True, exist_ok=True)
        os.utime(run / name, (seconds, seconds))
        assert resumed_from() == f"runs/cluster/{name}"
    output = (clone / "log").read_text()
    assert "--trainer.num_nodes=1 --trainer.devices=2" in output
    assert output.rstrip().endswith("--trainer.max_steps=7")


# --------------------------------------------------------------------------------------------------------- Kubernetes


def test_kubernetes_runs_the_script_of_torchrun() -> None:
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    told = {variable["name"]: variable["value"] for variable in container["env"]}
    program, script = container["command"]

    assert (service["kind"], service["apiVersion"]) == ("Service", "v1")
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    assert program == "bash"
    assert (ROOT / script).is_file()
    asked = re.findall(r"\$([A-Z]+)\b", (ROOT / script).read_text())  # what has a default is in braces
    assert set(asked) == told.keys()
    assert all(isinstance(value, str) for value in told.values())  # a number is refused
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(told["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == told["DEVICES"]
    assert told["HEAD"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


# ---------------------------------------------------------------------------------------------------------------- MPI


@pytest.mark.skipif(
    shutil.which("mpiexec") is None or importlib.util.find_spec("mpi4py") is None, reason="needs MPI and mpi4py"
)
def test_mpi(clone: Path) -> None:
    for steps in (EVERY, EVERY + 3):
        variables = {"NODES": "1", "DEVICES": "2"}
        with running("mpi.sh", clone, *TINY, f"--trainer.max_steps={steps}", **variables) as process:
            assert until(lambda process=process: process.poll() is not None, DEADLINE)
        assert process.returncode == 0, (clone / "log").read_text()
    assert logged_steps(clone, 1) == [EVERY, EVERY + 1, EVERY + 2]
