"""The example that is tensor-parallel: its model, and runs as a user starts them."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.tensor_parallel import ByteLlama, parallel_plan
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from tests.helpers.script import ROOT, run_forked

STEPS = 6
TINY = {"dim": 32, "layers": 2, "heads": 2, "context": 64}


def tiny_model(**arguments: object) -> ByteLlama:
    torch.manual_seed(0)
    model = ByteLlama(**{**TINY, **arguments})  # type: ignore[arg-type]
    model.configure_model()
    return model


@torch.no_grad()
def test_a_byte_sees_only_what_is_before_it() -> None:
    model = tiny_model()
    model.pieces = 2  # as with a sequence that two ranks share
    text = torch.randint(1, 256, (1, 7), dtype=torch.uint8)
    other = text.clone()
    other[0, 4] += 1

    before, after = model(text), model(other)

    assert before.shape == (1, 7, 256)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_the_plan_names_every_layer_with_a_matrix() -> None:
    model = tiny_model()
    matrices = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.RMSNorm)}

    inputs = {f"blocks.{index}.{part}" for index in range(2) for part in ("attention", "network")}
    assert set(parallel_plan(2, sequence_parallel=False)) == matrices | inputs
    assert set(parallel_plan(2, sequence_parallel=True)) == matrices | inputs | norms


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """A run with these options, once."""

    @functools.cache
    def run(*options: str, ranks: int = 4) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("run")
        stdout, stderr = run_forked(
            [
                str(ROOT / "examples" / "tensor_parallel.py"),
                "fit",
                f"--config={ROOT / 'configs' / 'tensor_parallel.yaml'}",
                f"--trainer.max_steps={STEPS}",
                f"--trainer.val_check_interval={STEPS}",
                "--trainer.log_every_n_steps=1",
                f"--data.path={ROOT / 'lightning_zero'}",
                "--data.validation_share=0.25",
                "--data.window=64",
                "--data.validation_windows=8",
                "--model.dim=32",
                "--model.layers=2",
                "--model.warmup_steps=3",
                "--report.length=10",
                *options,
            ],
            cwd=folder,
            timeout=240,
            ranks=ranks,
        )
        assert "Warning" not in stderr, stderr
        return folder, stdout

    return run


def losses(folder: Path) -> list[float]:
    (file,) = folder.glob("runs/tensor_parallel/version_0/metrics.csv")
    with file.open() as lines:
        return [float(row["train/loss"]) for row in csv.DictReader(lines) if row["train/loss"]]


@pytest.mark.timeout(300)
def test_a_run_of_two_by_two(ran: Callable[..., tuple[Path, str]]) -> None:
    folder, stdout = ran("--model.sequence_parallel=true")

    (bits,) = re.findall(rf"^Validation bits per byte after {STEPS} steps: (\d\.\d+)$", stdout, re.MULTILINE)
    assert 4.0 < float(bits) < 8.0
    assert stdout.count("A sample:\n") == 1
    assert len(losses(folder)) == STEPS
    checkpoint = open_checkpoint(folder / "runs/tensor_parallel/checkpoints/last.ckpt", ControlGroup(None))
    assert checkpoint["state_dict"]["blocks.0.attention.out.weight"].shape == (32, 32)  # of the whole layer


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_loss_is_that_of_a_run_without_tensor_parallelism(ran: Callable[..., tuple[Path, str]]) -> None:
    folder, _ = ran("--trainer.strategy=zero3", "--trainer.devices=2", ranks=2)
    expected = losses(folder)

    assert len(expected) == STEPS
    for options in (("--model.sequence_parallel=true",), ()):
        torch.testing.assert_close(losses(ran(*options)[0]), expected, rtol=1e-5, atol=0.0)
