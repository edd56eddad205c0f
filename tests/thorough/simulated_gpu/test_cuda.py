"""On one GPU, in a process of its own: losses, memory and who waits for whom, in every stage. Else skipped.

``device_runs`` has the programs; what of them is not about a GPU alone is played on the CPU, too.
"""

from __future__ import annotations

import os
import shutil

import pytest

from lightning_zero.errors import readable_size
from tests.helpers.device_runs import needs_gpu, run_on
from tests.helpers.script import ROOT, run_script

STAGES = ("zero1", "zero2", "zero3")
# 16 bits round where the engine casts weights, autocast does so at each operation.
BOUNDS = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 2e-2, "bf16-true": 5e-2}


def check_losses(device: str, precision: str) -> None:
    (found,) = run_on(device, "losses", precision)
    assert len(found["auto"]) == 6
    assert found["auto"][-1] < found["auto"][0]
    for stage in STAGES:
        assert found[stage] == pytest.approx(found["auto"], rel=BOUNDS[precision]), stage


@needs_gpu
@pytest.mark.parametrize("precision", BOUNDS)
def test_one_gpu_gives_the_losses_of_plain_lightning(precision: str) -> None:
    check_losses("cuda", precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_same_program_runs_on_the_cpu(precision: str) -> None:
    check_losses("cpu", precision)


def check_models(device: str, precision: str, world_size: int) -> None:
    for differ in run_on(device, "beside_ddp", precision, world_size=world_size):
        assert len(differ) == 21
        assert not any(differ.values()), {case: names for case, names in differ.items() if names}


@needs_gpu
@pytest.mark.skipif("SIMULATED_GPU" in os.environ, reason="needs cuDNN's recurrent layers, DDP and dynamo")
@pytest.mark.parametrize(("precision", "world_size"), [("32-true", 1), ("bf16-true", 1), ("32-true", 2)])
def test_models_train_there_as_under_ddp(precision: str, world_size: int) -> None:
    check_models("cuda", precision, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_these_models_train_on_the_cpu_as_under_ddp(world_size: int) -> None:
    check_models("cpu", "32-true", world_size)


def check_two_ranks(device: str) -> None:
    for found in run_on(device, "two_ranks", world_size=2):
        for stage in "123":
            assert found[stage] == pytest.approx(found["plain"], rel=1e-5), stage


@needs_gpu
def test_two_ranks_share_one_gpu_over_gloo() -> None:
    check_two_ranks("cuda")


def test_two_ranks_share_one_cpu_over_the_same_wire() -> None:
    check_two_ranks("cpu")


@needs_gpu
def test_what_is_rounded_there_has_the_bits_of_the_cpu() -> None:
    (found,) = run_on("cuda", "codes")
    assert all(found.values()), found


def test_the_program_about_rounding_runs_on_the_cpu() -> None:
    (found,) = run_on("cpu", "codes")
    assert len(found) == 9
    assert all(found.values())


def check_across_hosts(device: str) -> None:
    """Kept weights are the same weights, and what is rounded is close."""
    for found in run_on(device, "across_hosts", world_size=4):
        assert found["plain"][-1] < found["plain"][0]
        assert found["kept"] == pytest.approx(found["plain"], rel=1e-5)
        for name in ("rounded", "fed 1", "fed 2"):
            assert found[name] == pytest.approx(found["plain"], rel=2e-2), name
            assert found[name] != found["plain"], name
        assert found["fed 1"] == found["fed 2"]


@needs_gpu
def test_four_ranks_share_one_gpu_as_two_hosts() -> None:
    check_across_hosts("cuda")


def test_four_ranks_share_one_cpu_as_two_hosts() -> None:
    check_across_hosts("cpu")


@needs_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_allocator_counts_what_the_plan_says(precision: str) -> None:
    (found,) = run_on("cuda", "peaks", precision)
    for stage, (rest, planned_rest, peak, planned_peak) in found.items():
        for measured, planned in ((rest, planned_rest), (peak, planned_peak)):
            slack = 0.03 * planned + 2**21  # blocks of 512 bytes and of 2 MiB, and rows of activations
            assert abs(measured - planned) <= slack, (stage, readable_size(measured), readable_size(planned))


def test_the_plan_of_that_program_is_made_on_the_cpu() -> None:
    (found,) = run_on("cpu", "peaks", "32-true")
    assert all(0 < rest < peak for _, rest, _, peak in found.values())


@needs_gpu
@pytest.mark.timing
def test_copies_to_the_host_run_beside_computing() -> None:
    (found,) = run_on("cuda", "overlap")
    alone = found["copy"] + found["compute"]
    hidden = alone - found["both"]
    assert hidden > 0.7 * min(found["copy"], found["compute"]), found


def test_the_program_about_overlap_runs_on_the_cpu() -> None:
    (found,) = run_on("cpu", "overlap")
    assert all(milliseconds > 0 for milliseconds in found.values())


@needs_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    """In kernels. Nccl asks the driver for kernels of other devices, and takes the error for the answer."""
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    run_on("cuda", "short", before=["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9"])


def test_what_the_sanitizer_watches_runs() -> None:
    (found,) = run_on("cpu", "short")
    assert found["loss"] > 0


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
