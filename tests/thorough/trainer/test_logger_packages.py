"""Weights & Biases and MLflow, on two ranks: the monitors' numbers arrive under the names that they have everywhere.

Both packages keep connections of their own in the process. Skipped where they are not installed (extra ``loggers``).
"""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.script import run_script

PROGRAM = """
import json
import os
import sys

# Nothing is sent anywhere.
os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

from lightning_zero import CommunicationMonitor, MemoryMonitor

package = sys.argv[1]
if package == "wandb":
    logger = WandbLogger(project="zero", offline=True, save_dir=".")
else:
    logger = MLFlowLogger("zero", tracking_uri="sqlite:///mlflow.db", artifact_location="artifacts")
module = BoringModel()
if package == "wandb":
    logger.watch(module, log="all", log_freq=1)
trainer = pl.Trainer(
    strategy="zero3", devices=2, accelerator="cpu", max_steps=12, log_every_n_steps=2,
    logger=[logger, CSVLogger(".", name="csv", version=0)], callbacks=[MemoryMonitor(), CommunicationMonitor()],
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module)
if trainer.is_global_zero:
    if package == "wandb":
        summary = dict(logger.experiment.summary)
        found = {name: value for name, value in summary.items() if isinstance(value, (int, float))}
    else:
        found = logger.experiment.get_run(logger.run_id).data.metrics
    print("found", json.dumps(found))
"""


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_the_monitors_names_and_numbers_arrive(package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")

    output = run_script([str(program), package], cwd=tmp_path, timeout=240).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))

    with open(tmp_path / "csv" / "version_0" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # What was logged last of each, beside what the CSV file has.
    expected = {name: float(row[name]) for row in rows for name in row if name.startswith("zero/") and row[name]}
    assert {"zero/memory/rest/total", "zero/traffic/all_gather/nbytes"} <= expected.keys()
    assert {name: value for name, value in found.items() if name.startswith("zero/")} == pytest.approx(expected)
