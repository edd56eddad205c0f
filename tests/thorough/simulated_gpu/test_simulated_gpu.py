"""Programs on a simulated GPU have the numbers of the same programs on the CPU's kernels, and a GPU's rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, logging, sys, warnings
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_zero import ZeroStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.losses = []

    def training_step(self, batch, batch_idx):
        assert batch.device.type == "cuda"
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def losses(strategy, precision):
    module = Model()
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options["use_distributed_sampler"] = False  # it would shuffle
    trainer = pl.Trainer(accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=1, **options)
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    trainer.fit(module, DataLoader(data, batch_size=None))
    return module.losses


def refusal(attempt):
    try:
        attempt()
    except RuntimeError as error:
        return str(error)


def wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


found = {f"{stage} {precision}": losses(ZeroStrategy(stage), precision)
         for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")}
refused = [refusal(lambda: torch.ones(2, device="cuda") + torch.ones(2)), refusal(wait)]
fresh = torch.empty(3, device="cuda").isnan().all().item()
print(json.dumps({"plain": losses("auto", "32-true"), "stages": found, "refused": refused, "fresh": fresh}))
"""

IN_GROUPS = """
import json, logging, os, sys, warnings
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_zero import ZeroStrategy
from lightning_zero.comm import native

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
device = sys.argv[1]
seen = {}


def noted(module, name):
    call = getattr(module, name)

    def noting(tensor, *arguments, **named):
        if tensor.is_cuda and not named.get("async_op"):
            stream = torch.cuda.current_stream()
            seen.setdefault((name, stream.stream_id, stream.priority), []).append(tensor)
        return call(tensor, *arguments, **named)

    setattr(module, name, noting)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 9)) for _ in range(3)))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch + self.global_rank).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_fit_start(self):
        noted(native, "reduce_scatter_single")
        noted(native.dist, "all_reduce")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


module = Model()
options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
settings = json.loads(sys.argv[2])
strategy = ZeroStrategy(units=["Sequential"], **settings)
trainer = pl.Trainer(accelerator=device, devices=int(os.environ["SIMULATED_GPUS"]), strategy=strategy, max_epochs=1,
                     use_distributed_sampler=False, **options)
data = [torch.randn(4, 9, generator=torch.Generator().manual_seed(i)) for i in range(4)]
trainer.fit(module, DataLoader(data, batch_size=None))
if trainer.global_rank == 0:
    calls = [(name, priority, len(found)) for (name, _, priority), found in seen.items()]
    print(json.dumps({"losses": module.losses, "calls": sorted(calls)}))
"""


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.thorough.simulated_gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_stages_train_on_it_as_plain_lightning_does(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = start(str(program))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    stages = found["stages"]
    assert all(stages[f"{stage} 32-true"] == found["plain"] for stage in (1, 2, 3))
    assert all(stages[f"{stage} bf16-mixed"] == stages["1 bf16-mixed"] != found["plain"] for stage in (2, 3))
    assert "same device" in found["refused"][0]
    assert "called a synchronizing CUDA operation" in found["refused"][1]
    assert found["fresh"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_shard_groups_on_it_have_the_numbers_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages between groups are as many as reductions, on a stream of their own; both are of high priority."""
    program = tmp_path / "program.py"
    program.write_text(IN_GROUPS)
    monkeypatch.setenv("SIMULATED_GPUS", "4")
    found = []
    for device in ("gpu", "cpu"):
        run = start(str(program), device, json.dumps({"shard_within": 2}))
        assert run.returncode == 0, run.stderr
        found.append(json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"losses"'))))
    assert found[0]["losses"] == found[1]["losses"]
    urgent = {name: count for name, priority, count in found[0]["calls"] if priority == -1}
    assert urgent == {"all_reduce": 12, "reduce_scatter_single": 12}  # of three buckets in four steps
    assert all(name == "all_reduce" for name, priority, _ in found[0]["calls"] if priority != -1)  # of Lightning


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_process_groups_send_from_and_into_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the simulated nccl insists on where it has some. Without it the setting is refused by name."""
    program = tmp_path / "program.py"
    program.write_text(IN_GROUPS)
    monkeypatch.setenv("SIMULATED_GPUS", "2")
    plain = start(str(program), "gpu", "{}")
    settings = json.dumps({"allocate_memory_from_process_group": True})
    refused = start(str(program), "gpu", settings)
    assert "allocate_memory_from_process_group needs process groups with memory of their own" in refused.stderr
    monkeypatch.setenv("SIMULATED_NVLS", "1")
    registered = start(str(program), "gpu", settings)
    assert registered.returncode == 0, registered.stderr
    found = [[line for line in run.stdout.splitlines() if '{"losses"' in line] for run in (plain, registered)]
    assert found[0] == found[1] != []


@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA of its own")
def test_torch_with_cuda_is_refused() -> None:
    run = start("-c", "pass")
    assert run.returncode == 1
    assert "has CUDA of its own" in run.stderr


def test_it_says_what_it_is() -> None:
    run = start("--help")
    assert "python -m tests.thorough.simulated_gpu -m pytest" in run.stderr
