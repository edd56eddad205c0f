"""Checkpoints that older versions wrote, in format 1: they load and resume bit for bit with whatever reads them now.

``write`` below made ``tests/fixtures/format1`` with version 0.1.0 and ``tests/fixtures/v0_2`` with version 0.2.0, both
in two processes with torch 2.13.0. They are not made again when the code changes: that is the point. Of each kind there
is the checkpoint, and beside it an ordinary torch file with everything that it stands for, whole: weights, optimizer
state, options, schedulers, progress.
"""

from __future__ import annotations

import datetime
import random
from argparse import Namespace
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import (
    CheckpointPolicy,
    NvmeOffload,
    consolidate_checkpoint,
    load_from_checkpoint,
    load_full_state_dict,
)
from lightning_zero.cli import main
from tests.helpers.cases import Block
from tests.helpers.resumed import snapshot, weights_of
from tests.helpers.runs import _differences, batches, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

FIXTURES = Path(__file__).parents[2] / "fixtures"
KINDS = {
    "format1": ("zero1", "zero2", "zero3", "zero3_files", "zero3_one_file"),
    "v0_2": ("zero1", "zero2", "zero3", "zero3_async", "zero3_one_file"),
}
WIDTH, ROWS, COUNT, EPOCHS = 6, 4, 3, 2
SAVED_AT = (1, 0)  # epoch and batch: in mid-epoch
BOUND = 1e-4  # of what is computed after loading: another machine may round in another way

KEPT = {
    "path": Path("some/where"),
    "namespace": Namespace(a=1, b=[None, True]),
    "timedelta": datetime.timedelta(3, 4, 5),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4),
    "ordered": OrderedDict(b=1, a=2.5),
    "counter": Counter("aab"),
    "sets": ({1, 2}, frozenset(["x"])),
    "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
    "numbers": (1j, float("inf"), np.float64(1.5), b"ab"),
    ("key", 1): {2: "two"},
}


class Small(pl.LightningModule):
    """A tied and a frozen weight, a scalar, a parameter without elements, a buffer, and an entry of the user's."""

    def __init__(self, width: int = WIDTH, when: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, 7) for _ in range(1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, width)
        self.head.weight = self.stem.weight
        self.register_buffer("seen", torch.zeros(2))
        self.mine: Any = None
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.current_epoch + batch_idx)
        both = torch.randn(2, ROWS, WIDTH, generator=generator).chunk(dist.get_world_size(), dim=1)
        x, y = both[dist.get_rank()]
        self.seen += torch.tensor([1.0, 0.5])
        hidden = self.stem(x) * self.scale + self.empty.sum()
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.mse_loss(self.head(self.frozen(hidden)), y)
        self.losses.append(loss.detach().clone())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.hparams["when"] is None:  # a single file is read by torch alone, which knows few classes
            checkpoint["mine"] = {"ordered": KEPT["ordered"]}
        else:
            checkpoint["mine"] = {**KEPT, "array": np.arange(3), "large": torch.arange(17000, dtype=torch.uint8)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine = dict(checkpoint["mine"])
        if len(mine) > 1:
            assert mine.pop("array").tolist() == [0, 1, 2]
            assert torch.equal(mine.pop("large"), torch.arange(17000, dtype=torch.uint8))
            assert mine == KEPT
        assert mine["ordered"] == KEPT["ordered"]
        assert type(mine["ordered"]) is OrderedDict
        self.mine = mine

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tiny(Small):
    """The same with a fifth of the bytes."""

    def __init__(self, width: int = WIDTH, when: Any = None) -> None:
        super().__init__(width, when)
        self.blocks = nn.ModuleList([type("Block", (nn.Linear,), {})(width, width, bias=False)])
        self.stem.bias = None
        self.head.bias = self.frozen.bias = None
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"].pop("large", None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        large = {} if self.hparams["when"] is None else {"large": torch.arange(17000, dtype=torch.uint8)}
        super().on_load_checkpoint({"mine": checkpoint["mine"] | large})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


MODULES = {"format1": Small, "v0_2": Tiny}


class Saver(pl.Callback):
    """Saves once, in mid-epoch, and notes what is there; in a resumed run notes it at the start."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.at: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Small, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and (trainer.current_epoch, batch_idx) == SAVED_AT:
            trainer.save_checkpoint(self.path)
            self.note(trainer, module)
            # What is drawn from here on is not the test's but of the run.
            self.at["drawn"] = [(random.random(), float(np.random.rand()), torch.rand(()).item())]

    def on_train_start(self, trainer: pl.Trainer, module: Small) -> None:
        if self.path is None:
            self.note(trainer, module)

    def on_train_batch_start(self, *args: Any) -> None:
        if self.path is None and "drawn" not in self.at:
            self.at["drawn"] = [(random.random(), float(np.random.rand()), torch.rand(()).item())]

    def note(self, trainer: pl.Trainer, module: Small) -> None:
        module.mine = None
        self.at |= {key: value for key, value in snapshot(module, trainer).items() if key != "mine"}


class Case(NamedTuple):
    """One fixture: its version, and what was saved."""

    version: str
    kind: str

    @property
    def path(self) -> Path:
        return FIXTURES / self.version / f"{self.kind}.ckpt"

    @property
    def when(self) -> Any:
        return None if self.kind == "zero3_one_file" else datetime.timedelta(1)


def train(case: Case, files: Path, *, save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    """One fit. Returns what was saved or restored, this rank's losses after that, and the weights at the end."""
    kind = case.kind
    offload = NvmeOffload(path=str(files), parameters=True) if kind == "zero3_files" else None
    policy = CheckpointPolicy(
        format="consolidated" if kind == "zero3_one_file" else "sharded", async_save=kind == "zero3_async"
    )
    strategy = zero(int(kind[4]), offload=offload, checkpoint=policy)
    saver = Saver(save)
    module = MODULES[case.version](when=case.when)
    random.seed(5 + dist.get_rank())
    with quiet():
        trainer = make_trainer(strategy, max_epochs=EPOCHS, callbacks=[saver])
        trainer.fit(module, batches(COUNT), ckpt_path=resume)
        steps = EPOCHS * COUNT - (SAVED_AT[0] * COUNT + SAVED_AT[1] + 1)
        return {"at": saver.at, "losses": module.losses[-steps:], "end": weights_of(module, trainer)}


def write(version: str, folder: Path, files: Path) -> None:
    """Make every kind, and beside it what it stands for."""
    for kind in KINDS[version]:
        case = Case(version, kind)
        ranks = run_world(2, lambda rank, case=case: train(case, files, save=folder / f"{case.kind}.ckpt"))
        content = {**ranks[0], "losses": [r["losses"] for r in ranks], "drawn": [r["at"].pop("drawn") for r in ranks]}
        torch.save(content, folder / f"{kind}.expected.pt")


@pytest.fixture(params=[Case(version, kind) for version, kinds in KINDS.items() for kind in kinds], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def path(case: Case) -> Path:
    return case.path


@pytest.fixture
def expected(path: Path) -> dict[str, Any]:
    return torch.load(path.with_name(f"{path.stem}.expected.pt"), weights_only=False)


def same(expected: Any, found: Any) -> bool:
    wrong = _differences(expected, found, 0.0, "")
    assert not wrong, "\n".join(wrong[:10])
    return True


def test_weights_without_the_run(case: Case, path: Path, expected: dict[str, Any]) -> None:
    weights = expected["at"]["weights"]
    tied = {**weights, "head.weight": weights["stem.weight"]}
    assert same(tied, load_full_state_dict(path, verify=True))
    module = load_from_checkpoint(MODULES[case.version], path, verify=True)
    assert module.hparams == {"width": WIDTH, "when": case.when}
    assert module.mine["ordered"] == KEPT["ordered"]
    assert module.head.weight is module.stem.weight
    assert same(tied, {name: tensor.detach() for name, tensor in module.state_dict().items()})


def test_inspect_and_consolidate(path: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    main(["inspect", str(path), "--verify"])
    consolidate_checkpoint(path, tmp_path / "whole.ckpt", progress=False)
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert same(expected["at"]["weights"]["stem.weight"], whole["state_dict"]["head.weight"])
    moments = [state["exp_avg"] for state in whole["optimizer_states"][0]["state"].values()]
    by_name = [value for key, value in expected["at"]["states"].items() if key.endswith(" exp_avg")]
    assert {tuple(moment.flatten().tolist()) for moment in moments} == {tuple(m.flatten().tolist()) for m in by_name}
    assert whole["mine"]["ordered"] == KEPT["ordered"]


def test_it_resumes_in_two_processes(case: Case, path: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(2, lambda rank: train(case, tmp_path, resume=path))):
        drawn = found["at"].pop("drawn")
        assert same(expected["at"], found["at"])
        if case.kind != "zero3_one_file":  # where there are no random numbers
            assert drawn == expected["drawn"][rank]
        assert not _differences(expected["losses"][rank], found["losses"], BOUND, "losses")
        assert not _differences(expected["end"], found["end"], BOUND, "end")


def test_it_resumes_in_one_process(case: Case, path: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    found = run_world(1, lambda rank: train(case, tmp_path, resume=path))[0]
    found["at"].pop("drawn")
    assert same(expected["at"], found["at"])
    assert not _differences(expected["end"], found["end"], BOUND, "end")
