"""On one GPU, in a process of its own: losses, memory and who waits for whom, in every stage. Else skipped.

``device_runs`` has the programs; what of them is not about a GPU alone is played on the CPU, too.
"""

from __future__ import annotations

import os
import shutil

import pytest

from lightning_zero.errors import readable_size
from tests.helpers.device_runs import ON_GPU, needs_gpu, run_on
from tests.helpers.script import ROOT, run_script

STAGES = ("zero1", "zero2", "zero3")
# 16 bits round where the engine casts weights, autocast does so at each operation.
BOUNDS = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 2e-2, "bf16-true": 5e-2}


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        *(("cpu", precision) for precision in BOUNDS if precision != "16-mixed"),
        *(pytest.param("cuda", precision, marks=ON_GPU) for precision in BOUNDS),
    ],
)
def test_stages_have_the_losses_of_plain_lightning(device: str, precision: str) -> None:
    (found,) = run_on(device, "losses", precision)
    assert len(found["auto"]) == 6
    assert found["auto"][-1] < found["auto"][0]
    for stage in STAGES:
        assert found[stage] == pytest.approx(found["auto"], rel=BOUNDS[precision]), stage


of_dynamo = pytest.mark.skipif("SIMULATED_GPU" in os.environ, reason="needs cuDNN's recurrent layers, DDP and dynamo")


@pytest.mark.parametrize(
    ("device", "precision", "world_size"),
    [
        ("cpu", "32-true", 1),
        ("cpu", "32-true", 2),
        *(
            pytest.param("cuda", *row, marks=[*ON_GPU, of_dynamo])
            for row in (("32-true", 1), ("bf16-true", 1), ("32-true", 2))
        ),
    ],
)
def test_models_train_as_under_ddp(device: str, precision: str, world_size: int) -> None:
    for differ in run_on(device, "beside_ddp", precision, world_size=world_size):
        assert len(differ) == 21
        assert not any(differ.values()), {case: names for case, names in differ.items() if names}


@on_both
def test_two_ranks_share_one_device_over_gloo(device: str) -> None:
    for found in run_on(device, "two_ranks", world_size=2):
        for stage in "123":
            assert found[stage] == pytest.approx(found["plain"], rel=1e-5), stage


@on_both
def test_what_is_rounded_has_the_bits_of_the_cpu(device: str) -> None:
    (found,) = run_on(device, "codes")
    assert len(found) == 9
    assert all(found.values()), found


@on_both
def test_four_ranks_share_one_device_as_two_hosts(device: str) -> None:
    """Kept weights are the same weights, and what is rounded is close."""
    for found in run_on(device, "across_hosts", world_size=4):
        assert found["plain"][-1] < found["plain"][0]
        assert found["kept"] == pytest.approx(found["plain"], rel=1e-5)
        for name in ("rounded", "fed 1", "fed 2"):
            assert found[name] == pytest.approx(found["plain"], rel=2e-2), name
            assert found[name] != found["plain"], name
        assert found["fed 1"] == found["fed 2"]


@needs_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_allocator_counts_what_the_plan_says(precision: str) -> None:
    (found,) = run_on("cuda", "peaks", precision)
    for stage, (rest, planned_rest, peak, planned_peak) in found.items():
        for measured, planned in ((rest, planned_rest), (peak, planned_peak)):
            slack = 0.03 * planned + 2**21  # blocks of 512 bytes and of 2 MiB, and rows of activations
            assert abs(measured - planned) <= slack, (stage, readable_size(measured), readable_size(planned))


def test_programs_of_the_gpu_run_on_the_cpu() -> None:
    """Those whose answers are about a GPU alone."""
    (peaks,) = run_on("cpu", "peaks", "32-true")
    assert all(0 < rest < peak for _, rest, _, peak in peaks.values())
    (overlap,) = run_on("cpu", "overlap")
    assert all(milliseconds > 0 for milliseconds in overlap.values())
    (short,) = run_on("cpu", "short")
    assert short["loss"] > 0


@needs_gpu
@pytest.mark.timing
def test_copies_to_the_host_run_beside_computing() -> None:
    (found,) = run_on("cuda", "overlap")
    alone = found["copy"] + found["compute"]
    hidden = alone - found["both"]
    assert hidden > 0.7 * min(found["copy"], found["compute"]), found


@needs_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    """In kernels. Nccl asks the driver for kernels of other devices, and takes the error for the answer."""
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    run_on("cuda", "short", before=["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9"])


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


@needs_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_host_never_waits_for_the_device_inside_a_step(precision: str) -> None:
    """With clipping by norm, and without a loss scale, which asks the device for a number once a step."""
    ended = run_script(["-c", NO_WAITING, precision], cwd=ROOT, timeout=240)
    assert "DONE" in ended.stdout
