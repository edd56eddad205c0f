"""Checkpoints do not know of offload: the same bytes are saved wherever they rest, and any run resumes from them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero import CheckpointPolicy, HostOffload, NvmeOffload, ZeroPrecision
from lightning_zero.config import Offload
from tests.helpers.runs import Net, batches, quiet, values_of, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


def kinds(files: Path) -> dict[str, tuple[int, Offload | None]]:
    return {
        "stage 3": (3, None),
        "stage 3, host": (3, HostOffload()),
        "stage 3, host, parameters": (3, HostOffload(parameters=True)),
        "stage 3, files": (3, NvmeOffload(path=str(files), buffer_mib=1)),
        "stage 3, files, parameters": (3, NvmeOffload(path=str(files), buffer_mib=1, parameters=True)),
        "stage 1, files": (1, NvmeOffload(path=str(files), buffer_mib=1)),
        "stage 2, host": (2, HostOffload()),
    }


# Everything resumes from these. The others of stage 3 saved the same bytes, as the test below sees: from each of them
# one run without offload and one of its own kind go on.
SOURCES = ("stage 3", "stage 1, files", "stage 2, host")


class Adagrad(Net):
    """An optimizer whose constructor makes state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.distcp"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("net", [Net, Adagrad])
def test_every_kind_saves_the_same_bytes_and_resumes_from_every_other(net: type[Net], tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()

    @quiet()
    def run(rank: int) -> dict[str, Any]:
        ends = {}
        plugin = {"plugins": ZeroPrecision("bf16-mixed")}
        for name, (stage, offload) in kinds(files).items():
            trainer = make_trainer(zero(stage, offload=offload), max_steps=3, **plugin)
            trainer.fit(net(), batches(6))
            trainer.save_checkpoint(tmp_path / name)
        for source in kinds(files):
            for name, (stage, offload) in kinds(files).items():
                if source not in SOURCES and name not in ("stage 3", source):
                    continue
                module = net()
                trainer = make_trainer(zero(stage, offload=offload), max_steps=5, **plugin)
                trainer.fit(module, batches(6), ckpt_path=tmp_path / source)
                ends[f"{source} -> {name}"] = values_of(module)
        return ends

    for ends in run_world(2, run, timeout=200):
        expected = ends["stage 3 -> stage 3"]
        assert len(ends) == 29
        assert len(expected) > 5
        for name, values in ends.items():
            assert all(torch.equal(value, values[key]) for key, value in expected.items()), name
    saved = {name: digests(tmp_path / name) for name, (stage, _) in kinds(files).items() if stage == 3}
    assert len(saved["stage 3"]) == 2
    assert all(found == saved["stage 3"] for found in saved.values())


def test_saving_in_the_background_and_one_file(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()

    @quiet()
    def run(rank: int) -> bool:
        ends = []
        for name in ("stage 3", "stage 3, host, parameters", "stage 3, files, parameters"):
            stage, offload = kinds(files)[name]
            for number, policy in enumerate(
                (CheckpointPolicy(async_save=True), CheckpointPolicy(format="consolidated"))
            ):
                path = tmp_path / f"{name} {number}.ckpt"
                saving = SaveAt(2, path)
                trainer = make_trainer(zero(stage, offload=offload, checkpoint=policy), callbacks=[saving])
                trainer.fit(Net(), batches(5))
                module = Net()
                make_trainer(zero(stage, offload=offload), max_steps=4).fit(module, batches(5), ckpt_path=path)
                ends.append(values_of(module))
        return all(torch.equal(value, end[key]) for end in ends for key, value in ends[0].items())

    assert run_world(2, run, timeout=90) == [True, True]


class SaveAt(pl.Callback):
    """Saves in the middle of a run, which goes on changing what was saved."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
