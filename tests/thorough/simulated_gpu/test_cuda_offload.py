"""On one GPU, in a process of its own: offloaded runs have the losses, the bytes and the overlap that are promised.

Skipped without a GPU. Forked worlds cannot be used here: see ``test_cuda.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.script import ROOT, run_script

SCRIPT = """
import gc, json, os, sys, tempfile, torch, lightning.pytorch as pl
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from lightning_zero import ActivationPolicy, HostOffload, NvmeOffload, ZeroStrategy

WIDTH, LAYERS, STEPS = 1024, 8, 4
# So many that the device needs longer for a layer than the host to issue it.
ROWS = 256 if "SIMULATED_GPU" in os.environ else 32768

def allocated():
    # Without the workspaces of cuBLAS: every thread and stream that multiplies gets one, 65 MiB on an H100.
    torch.cuda.synchronize()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # not in a build for CPUs, simulated or not
    return torch.cuda.memory_allocated()

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.losses, self.allocated = [], 0
    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        x = torch.randn(ROWS, WIDTH, device=self.device)
        for layer in self.layers:
            x = x + layer(x)
        loss = x.square().mean()
        self.losses.append(loss.detach())
        return loss
    def on_train_batch_end(self, *_):
        self.allocated = allocated()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Profiled(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == STEPS - 1:
            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.__enter__()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == STEPS - 1:
            torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)

def overlapping(events):
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
    copies = [(a, b) for name, a, b in spans if "DtoH" in name]
    kernels = [(a, b) for name, a, b in spans if "Memcpy" not in name and "Memset" not in name]
    return len(copies), sum(any(a < d and c < b for c, d in kernels) for a, b in copies)

folder = tempfile.mkdtemp()
policies = {
    "none": None,
    "host": HostOffload(),
    "host and parameters": HostOffload(parameters=True),
    "files": NvmeOffload(path=folder, buffer_mib=32),
    "files and parameters": NvmeOffload(path=folder, buffer_mib=32, parameters=True),
}
found = {}
for stage in (1, 2, 3):
    for name, offload in policies.items():
        if offload is not None and offload.parameters and stage < 3:
            continue
        for activations in (None, ActivationPolicy(checkpointing="units", offload=True)):
            gc.collect()
            base = allocated()
            net, seen = Net(), Profiled()
            strategy = ZeroStrategy(stage, units=["Sequential"], offload=offload, activations=activations)
            trainer = pl.Trainer(
                accelerator="gpu", devices=1, strategy=strategy, precision=sys.argv[1], max_steps=STEPS,
                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                callbacks=[seen], gradient_clip_val=1.0)
            trainer.fit(net, DataLoader(range(STEPS)))
            engine = trainer.strategy.engine
            tiers, flats = engine.tiers, [flat for unit in engine.units for flat in unit.flats]
            tiers.wake()
            pinned = [flat.master.is_pinned() for flat in flats if flat.rest.master.value == "host"]
            tiers.rest()
            found[f"stage {stage}, {name}, {activations is not None}"] = {
                "losses": [loss.item() for loss in net.losses],
                "at rest": net.allocated - base,
                "expected": engine.plan.expected_memory(accelerator=True, receive_buffer=False).total,
                "pinned": pinned,
                "copies": overlapping(seen.profile.events()),
            }
            del net, trainer, engine, tiers, flats, strategy, seen
print("FOUND" + json.dumps(found))
"""


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["32-true", "bf16-mixed"])
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ended = run_script(["-c", SCRIPT, request.param], cwd=ROOT, timeout=280)
    found: dict[str, Any] = json.loads(ended.stdout.rpartition("FOUND")[2])
    return found


def test_losses_are_those_without_offload(runs: dict[str, Any]) -> None:
    """To rounding: the optimizer's arithmetic on the host need not round as the GPU's does."""
    for name, found in runs.items():
        expected = runs[f"{name.partition(',')[0]}, none, False"]["losses"]
        assert found["losses"] == pytest.approx(expected, rel=1e-3), name


def test_device_memory_at_rest_is_the_plan_s(runs: dict[str, Any]) -> None:
    for name, found in runs.items():
        slack = 0.02 * found["expected"] + 2**20  # blocks of the allocator, the loss, the state of random numbers
        assert abs(found["at rest"] - found["expected"]) <= slack, (name, found["at rest"], found["expected"])


def test_masters_are_page_locked_in_a_run_and_not_after_it(runs: dict[str, Any]) -> None:
    for name, found in runs.items():
        assert all(found["pinned"]), name
        assert bool(found["pinned"]) == (", host" in name), name


def test_gradients_leave_while_the_backward_goes_on(runs: dict[str, Any]) -> None:
    for name, found in runs.items():
        if ", none" not in name:
            copies, overlapping = found["copies"]
            assert copies > 0, name
            assert overlapping > 0, name
