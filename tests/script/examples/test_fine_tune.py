"""The example that fine-tunes: its model, its configuration, and a run as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from examples.fine_tune import FineTunedGPT, PackageText
from examples.language_model import ByteGPT
from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.comm import ControlGroup
from tests.helpers.script import ROOT, run_forked

TINY = {"dim": 32, "layers": 2, "heads": 2, "context": 64}


def test_adapters_change_nothing_before_they_learn() -> None:
    base, tuned = ByteGPT(**TINY), FineTunedGPT(rank=2, **TINY)
    tuned.load_state_dict(base.state_dict(), strict=False)
    text = torch.randint(256, (2, 9), dtype=torch.uint8)

    assert torch.equal(base(text), tuned(text))
    layer = tuned.blocks[0].network_in
    with torch.no_grad():
        layer.up.normal_()
    x = torch.randn(3, 32)
    torch.testing.assert_close(layer(x), x @ (layer.weight + layer.up @ layer.down).T)


def test_the_base_has_not_seen_the_text() -> None:
    data = PackageText()
    training, validation = data.files()

    assert min(len(training), len(validation)) > 5
    assert all(file.parent.name == "encodings" for file in training + validation)


def test_the_configuration_fits_the_one_of_the_base() -> None:
    base, tuned = (yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()) for name in ("zero3", "fine_tune"))

    for name in ("dim", "layers", "heads"):
        assert tuned["model"][name] == base["model"][name]
    assert tuned["data"]["window"] == base["data"]["window"]
    assert tuned["trainer"]["max_steps"] % tuned["trainer"]["val_check_interval"] == 0
    path = tuned["trainer"]["strategy"]["init_args"]["checkpoint"]["initial_weights"]
    (keeper,) = (one["init_args"] for one in base["trainer"]["callbacks"] if "ModelCheckpoint" in one["class_path"])
    assert path == f"{keeper['dirpath']}/{keeper['filename']}.ckpt"


@pytest.mark.timeout(300)
def test_a_run_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {"state_dict": ByteGPT(**TINY).state_dict()}
    save_checkpoint_directory(base, tmp_path / "base.ckpt", ControlGroup(None), plan_summary={})

    stdout, stderr = run_forked(
        [
            str(ROOT / "examples" / "fine_tune.py"),
            "fit",
            f"--config={ROOT / 'configs' / 'fine_tune.yaml'}",
            f"--trainer.strategy.init_args.checkpoint.initial_weights={tmp_path / 'base.ckpt'}",
            "--trainer.max_steps=6",
            "--trainer.val_check_interval=6",
            "--data.window=64",
            "--data.validation_windows=8",
            "--model.rank=2",
            "--model.dim=32",
            "--model.layers=2",
            "--model.heads=2",
            "--model.warmup_steps=2",
            "--sample.length=10",
        ],
        cwd=tmp_path,
        timeout=240,
        ranks=2,
    )

    def number(pattern: str) -> float:
        (found,) = re.findall(rf"^{pattern}", stdout, re.MULTILINE)
        return float(found)

    # 8 linear layers of 32 inputs: 2 * 32 elements down, and 2 * (96 + 32 + 128 + 32) up in each of two blocks; the
    # inputs of the last of the four are 128
    assert number(r"Trained (\d+) of") == 2 * (2 * (32 + 32 + 32 + 128) + 2 * (96 + 32 + 128 + 32))
    before = number(r"Validation bits per byte before: (\d\.\d+)$")
    after = number(r"Validation bits per byte after: (\d\.\d+)$")
    assert after < before
    assert number(r"Validation bits per byte in one process: (\d\.\d+)$") == pytest.approx(after, abs=2e-3)
    number(r"Checkpoint of the base: .*base\.ckpt \((\d+\.\d+) MiB\)$")
    assert stdout.count("decoding_table = (") == 1
    assert "Warning" not in stderr, stderr

    (adapters,) = tmp_path.glob("runs/fine_tune/version_0/checkpoints/*")
    assert adapters.name == "step=6.ckpt"
    checkpoint = open_checkpoint(adapters, ControlGroup(None))
    assert len(checkpoint["state_dict"]) == 2 * 4 * 2
    assert {name.rpartition(".")[2] for name in checkpoint["state_dict"]} == {"down", "up"}
    assert sorted(checkpoint["lightning_zero"]["excluded_frozen"]) == sorted(base["state_dict"])
