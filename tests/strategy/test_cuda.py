"""On one GPU, in a process of its own: the losses of plain Lightning, in every stage and in 16 bits. Else skipped.

Forked worlds cannot be used here: a process that has run a backward with CUDA cannot fork (``helpers/world.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.world import ROOT, subprocess_env

SCRIPT = """
import json, sys, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
import lightning_zero

class Net(BoringModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(4))
        self.losses = []
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.layer(x)
    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        loss = self(torch.randn(8, 32, device=self.device)).square().mean()
        self.losses.append(loss.item())
        return loss

found = {}
for strategy in ("auto", "zero1", "zero2", "zero3"):
    net = Net()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    pl.Trainer(accelerator="gpu", devices=1, strategy=strategy, precision=sys.argv[1], max_steps=6, **quiet).fit(net)
    found[strategy] = net.losses
print("FOUND" + json.dumps(found))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("precision", "bound"), [("32-true", 1e-5), ("bf16-mixed", 5e-2)])
def test_one_gpu_gives_the_losses_of_plain_lightning(precision: str, bound: float) -> None:
    command = [sys.executable, "-c", SCRIPT, precision]
    run = subprocess.run(
        command, cwd=ROOT, env=subprocess_env(), capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.rpartition("FOUND")[2])
    for stage in ("zero1", "zero2", "zero3"):
        assert found[stage] == pytest.approx(found["auto"], rel=bound), stage


NO_WAITING = """
import sys, torch, lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader
import lightning_zero

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(4))
    def training_step(self, batch, batch_idx):
        x = self.x
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()
    def on_train_start(self):
        self.x = torch.randn(8, 32, device=self.device)
    def on_train_batch_start(self, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 3 else "default")
    def on_train_batch_end(self, *args):
        torch.cuda.set_sync_debug_mode("default")
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

for stage in (1, 2, 3):
    strategy = lightning_zero.ZeroStrategy(stage=stage, units=["Sequential"])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    common = dict(accelerator="gpu", devices=1, max_epochs=1, gradient_clip_val=0.1, **quiet)
    trainer = pl.Trainer(strategy=strategy, precision=sys.argv[1], **common)
    trainer.fit(Net(), DataLoader(range(6), batch_size=None))
print("DONE")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_host_never_waits_for_the_device_inside_a_step(precision: str) -> None:
    """With clipping by norm, and without a loss scale, which asks the device for a number once a step."""
    command = [sys.executable, "-c", NO_WAITING, precision]
    run = subprocess.run(
        command, cwd=ROOT, env=subprocess_env(), capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "DONE" in run.stdout
