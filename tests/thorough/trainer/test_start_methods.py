"""Processes that are spawned or forked for a run, and end with it: weights and metrics come back, as with DDP.

And in Fabric what the function returns, also where Lightning's command line starts the processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero import ZeroStrategy
from tests.helpers.script import ROOT, run_script
from tests.helpers.world import free_port, subprocess_env

PROGRAM = """
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy, full_parameters


class Net(pl.LightningModule):
    fails = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    def training_step(self, batch, i):
        if self.fails and self.global_rank == 1:
            raise KeyError("rank 1 stumbles")
        x = torch.full((4, 8), 0.1 * float(batch) + self.global_rank) + torch.arange(4.0)[:, None]
        loss = self.b(torch.tanh(self.a(x))).square().sum() + self.a(torch.ones(1, 8)).square().mean()
        self.log("loss", loss, sync_dist=True, batch_size=4)
        return loss

    def validation_step(self, batch, i):
        self.log("val", self.a(torch.ones(1, 8)).square().mean(), sync_dist=True, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(strategy, **options):
    net = Net()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1], **options,
    )
    batches = DataLoader(range(8), batch_size=None)
    trainer.fit(net, batches, batches)
    return net, trainer


if __name__ == "__main__":
    expected, oracle = train(DDPStrategy(start_method="fork"))
    for method, stage in ("fork", 1), ("fork", 2), ("fork", 3), ("spawn", 3):
        net, trainer = train(ZeroStrategy(stage, start_method=method))
        assert all(map(torch.equal, expected.state_dict().values(), net.state_dict().values())), (method, stage)
        assert trainer.callback_metrics == oracle.callback_metrics
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        with full_parameters(net):
            assert net.a.weight.isfinite().all()
        path = trainer.checkpoint_callback.best_model_path
        loaded = Net.load_from_checkpoint(path)
        assert all(map(torch.equal, expected.parameters(), loaded.parameters()))
        if method == "fork":  # what is spawned imports for six seconds
            (found,) = trainer.validate(net, DataLoader(range(2), batch_size=None), verbose=False)
            assert found["val"] == oracle.callback_metrics["val"]
        try:
            trainer.save_checkpoint(sys.argv[1] + "/late.ckpt")
        except RuntimeError as error:
            assert "only in the processes that run it, which end with it" in str(error)
        else:
            raise AssertionError("saved without processes")
    plugin = ZeroPrecision("bf16-mixed")
    mixed = [train(ZeroStrategy(s, start_method="fork", precision_plugin=plugin))[0] for s in (1, 3)]
    assert all(map(torch.equal, *(net.state_dict().values() for net in mixed)))
    Net.fails = True
    try:
        train(ZeroStrategy(3, start_method="fork"))
    except Exception as error:
        assert "rank 1 stumbles" in str(error), error
    else:
        raise AssertionError("no error")
    print("all is well")
"""

FABRIC = """
import os
import sys
from argparse import Namespace

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.cli import main
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroFabricStrategy, full_parameters


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def train(fabric, net):
    fabric.seed_everything(3, verbose=False)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, shuffle=True)
    losses = []
    for (x,) in fabric.setup_dataloaders(data):
        loss = (model(x) - x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"model": model, "losses": losses, "optimizer": optimizer, "unwritable": (loss for loss in losses)}


def returned(fabric, net, *keys):
    if keys == ("failure",) and fabric.global_rank == 1:
        raise KeyError("rank 1 stumbles")
    found = train(fabric, net)
    return {"large": b"x" * 1_000_000, **{key: found[key] for key in keys}}


def as_numbers(fabric, net):  # under DDP, Fabric gives tensors back only if one is quick enough
    found = train(fabric, net)
    with full_parameters(net):
        weights = {name: value.tolist() for name, value in net.state_dict().items()}
    return weights, [loss.item() for loss in found["losses"]]


def launched(strategy, function, *args):
    return Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(function, *args)


def refused(message, function, *args):
    try:
        function(*args)
    except Exception as error:
        assert message in str(error), error
    else:
        raise AssertionError("no error")


if __name__ == "__main__" and "LT_CLI_USED" in os.environ:
    fabric = Fabric(accelerator="cpu")
    assert isinstance(fabric.strategy, ZeroFabricStrategy)
    found = as_numbers(fabric, Net())
    if fabric.global_rank == 0:
        torch.save(found, "found")
elif __name__ == "__main__":
    expected = launched(DDPStrategy(start_method="fork"), as_numbers, Net())
    for method, stage in ("fork", 1), ("fork", 2), ("fork", 3), ("spawn", 3):
        strategy = ZeroFabricStrategy(stage, start_method=method)
        assert launched(strategy, as_numbers, Net()) == expected, (method, stage)
    found = launched(ZeroFabricStrategy(3, start_method="fork"), returned, Net(), "losses")
    assert [loss.item() for loss in found["losses"]] == expected[1] and len(found["large"]) == 1_000_000

    forks = ZeroFabricStrategy(3, start_method="fork")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=forks)
    refused("pickle", fabric.launch, returned, Net(), "optimizer")
    refused("pickle", fabric.launch, returned, Net(), "model")
    refused("cannot pickle 'generator' object", fabric.launch, returned, Net(), "unwritable")
    refused("rank 1 stumbles", fabric.launch, returned, Net(), "failure")
    refused("`.launch()` needs to be called with a function", fabric.launch)
    refused("The strategy is not set up in this process", fabric.setup, Net())

    os.environ["LT_STRATEGY"] = "zero3"  # what --strategy does, for names that Lightning's command line does not know
    main(Namespace(
        accelerator="cpu", strategy=None, devices="2", num_nodes=1, node_rank=0, main_address="127.0.0.1",
        main_port=int(sys.argv[1]), precision=None, script=__file__,
    ))
    assert torch.load("found", weights_only=False) == expected
    print("all is well")
"""


def test_weights_and_metrics_come_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    assert "all is well" in run_script([str(script), str(tmp_path)], cwd=tmp_path, timeout=280).stdout


def test_fabric_gives_back_what_the_function_returns(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FABRIC)
    assert "all is well" in run_script([str(script), str(free_port())], cwd=tmp_path, timeout=280).stdout


def test_in_a_notebook(tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "notebook.ipynb"
    convert = ["-m", "nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.timeout=150", str(notebook)]
    command = [sys.executable, *convert, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=subprocess_env(), cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads((tmp_path / "notebook.ipynb").read_text())["cells"]
    told = "".join("".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", []))
    assert "sin(1) is 0.84, learned 0.8" in told
    assert told.count("loss 0.00") == 2


def test_an_unknown_method_is_refused() -> None:
    import lightning.pytorch as pl

    with pytest.raises(ValueError, match="start_method must be one of popen, spawn, fork, or None, got 'thread'"):
        pl.Trainer(strategy=ZeroStrategy(start_method="thread"), accelerator="cpu", devices=2)  # type: ignore[arg-type]
