"""``pytorch_lightning``, the twin of ``lightning``, whose Trainer says that it is the wrong one.

``lightning`` 2.6 requires it, so that a user has it without having asked, and may import it first or last.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.script import run_script

pytestmark = pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")

PROGRAM = """
import json
import sys

{imports}

def error_of(call):
    try:
        return ["", type(call()).__module__]
    except Exception as error:
        return [str(error), type(error).__name__]

def trainer(package, strategy, **settings):
    return package.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, **settings).strategy

import lightning.pytorch
from pytorch_lightning.demos.boring_classes import BoringModel

Zero = lightning_zero.ZeroStrategy
print("told", json.dumps({{
    "before": before,
    "name": error_of(lambda: trainer(pl, "zero3")),
    "offloaded, in 16 bit": error_of(lambda: trainer(pl, "zero2_offload", precision="bf16-mixed")),
    "strategy": error_of(lambda: trainer(pl, Zero(stage=1))),
    "strategy with a plugin": error_of(lambda: trainer(pl, Zero(precision_plugin=lightning_zero.ZeroPrecision()))),
    "plugin": error_of(lambda: Zero(precision_plugin=pl.plugins.DoublePrecision())),
    "unknown": error_of(lambda: trainer(pl, "zero4")),
    "ddp": error_of(lambda: trainer(pl, "ddp")),
    "ours": error_of(lambda: trainer(lightning.pytorch, "zero3")),
    "module": error_of(lambda: lightning.pytorch.Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False,
                                                         fast_dev_run=True).fit(BoringModel())),
}}))
"""
BEFORE = """
slow = ("pytorch_lightning", "lightning_fabric", "jsonargparse", "torch.distributed.checkpoint",
        "torch.distributed.elastic.agent")
before = sorted(name for name in sys.modules if name.startswith(slow))
"""


def told(tmp_path: Path, *imports: str) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(imports="\n".join(imports)), encoding="utf-8")
    output = run_script([str(program)], cwd=tmp_path).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("told "))
    return json.loads(line.removeprefix("told "))


@pytest.mark.parametrize(
    "imports",
    [
        ["import lightning_zero", BEFORE, "import pytorch_lightning as pl"],
        ["import pytorch_lightning as pl", BEFORE, "import lightning_zero"],
    ],
    ids=["imported after", "imported before"],
)
def test_its_trainer_says_that_it_is_the_wrong_one(tmp_path: Path, imports: list[str]) -> None:
    found = told(tmp_path, *imports)

    if imports[0] == "import lightning_zero":
        assert not found["before"]  # neither the twin, nor what a training does not need and takes long to import
    for case, plugin in {
        "name": "Precision",
        "offloaded, in 16 bit": "MixedPrecision",
        "strategy": "Precision",
        "strategy with a plugin": "Precision",
        "plugin": "DoublePrecision",
    }.items():
        message, kind = found[case]
        assert kind == "ValueError", case
        assert f"of the package `pytorch_lightning`, of which it gave ZeroStrategy a {plugin}, and" in message, case
        assert "Write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`" in message, case
    # What concerns one of the two alone is as it was, and Lightning itself refuses a module of the other.
    assert "invalid strategy name: `strategy='zero4'`" in found["unknown"][0]
    assert found["ddp"] == ["", "pytorch_lightning.strategies.ddp"]
    assert found["ours"] == ["", "lightning_zero.trainer.strategy"]
    assert (
        "You passed a `pytorch_lightning` object (BoringModel) to a `lightning.pytorch` Trainer" in found["module"][0]
    )
