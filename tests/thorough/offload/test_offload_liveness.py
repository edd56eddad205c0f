"""Whatever goes wrong while something is offloaded: a named error on every rank, and nothing left behind."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_zero import HostOffload, NvmeOffload, ZeroPrecision, build_plan, full_parameters
from lightning_zero.comm import GlooCollectives, Groups, Streams
from lightning_zero.config import Offload
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import CheckpointError, OffloadError, readable_size
from lightning_zero.extensions.nvme import FileTensor, make_tiers
from lightning_zero.extensions.nvme.files import FileSystem
from lightning_zero.extensions.planner.costs import OptimizerCost
from tests.helpers.runs import Net, batches, quiet, values_of, zero
from tests.helpers.stores import flip
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

KINDS: dict[str, Callable[[Path], Offload]] = {
    "host": lambda path: HostOffload(),
    "host, parameters": lambda path: HostOffload(parameters=True),
    "files": lambda path: NvmeOffload(path=str(path), buffer_mib=1),
    "files, parameters": lambda path: NvmeOffload(path=str(path), buffer_mib=1, parameters=True),
}


class Failing(FileSystem):
    """A disk that works until it is told not to."""

    def __init__(self) -> None:
        self.broken: str | None = None

    def preadv(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if self.broken == "read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.broken == "short read":
            return 0
        return super().preadv(descriptor, memory, offset)

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if self.broken == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(descriptor, memory, offset)


def break_disk(trainer: pl.Trainer, how: str) -> None:
    """Have this rank's disk fail from now on."""
    system = Failing()
    system.broken = how
    trainer.strategy.engine.tiers.store._file._system = system


class Breaking(pl.Callback):
    """Breaks the disk of one rank in the third step, at ``hook``."""

    def __init__(self, rank: int, how: str, hook: str) -> None:
        self.rank, self.how = rank, how
        setattr(self, hook, self.act)

    def act(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            break_disk(trainer, self.how)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_zero-")]


FAULTS = [
    ("write", "on_before_optimizer_step", "files", "No space left on device"),
    ("read", "on_before_optimizer_step", "files", "Input/output error"),
    ("short read", "on_before_optimizer_step", "files", "gave 0 of"),
    ("read", "on_train_batch_start", "files, parameters", "Input/output error"),
]


@pytest.mark.parametrize(("how", "hook", "kind", "reason"), FAULTS)
def test_a_disk_that_fails_on_one_rank_is_an_error_on_every_rank(
    how: str, hook: str, kind: str, reason: str, tmp_path: Path
) -> None:
    files, checkpoint = tmp_path / "files", str(tmp_path / "checkpoint")
    files.mkdir()

    @quiet()
    def run(rank: int) -> dict[str, Any]:
        offload = KINDS[kind](files)
        save = SaveAt(2, checkpoint)
        trainer = make_trainer(zero(3, offload=offload), callbacks=[save, Breaking(1, how, hook)])
        with pytest.raises(OffloadError) as caught:
            trainer.fit(Net(), batches(5))
        left = threads()
        module = Net()
        resumed = make_trainer(zero(3, offload=KINDS["host"](files)), max_steps=5)
        resumed.fit(module, batches(5), ckpt_path=checkpoint)
        undisturbed = Net()
        make_trainer(zero(3), max_steps=5).fit(undisturbed, batches(5))
        same = [torch.equal(a, b) for a, b in zip(*map(ordered, (module, undisturbed)), strict=True)]
        return {"message": str(caught.value), "threads": left, "same": all(same) and bool(same)}

    for found in run_world(2, run, timeout=90):
        assert "Rank 1" in found["message"], found
        assert reason in found["message"]
        assert "checkpoint" in found["message"]  # and what to do next
        assert found["threads"] == []
        assert found["same"], "the checkpoint of step 2 is whole"
    assert list(files.iterdir()) == []


def resting(trainer: pl.Trainer, what: str) -> FileTensor:
    """Some of what rests in this rank's files."""
    flats = [flat for unit in trainer.strategy.engine.units for flat in unit.flats]
    states = trainer.strategy.adapter(trainer.optimizers[0]).state
    state = [value for found in states.values() for value in found.values()]
    tensors = {"masters": [f.master for f in flats], "weights": [f.weights for f in flats], "state": state}[what]
    (found, *_) = (tensor for tensor in tensors if isinstance(tensor, FileTensor) and tensor.numel())
    return found


class Flipping(pl.Callback):
    """Flips a bit of one rank's files in the third step, at ``hook``."""

    def __init__(self, rank: int, what: str, hook: str) -> None:
        self.rank, self.what = rank, what
        self.place = ""
        setattr(self, hook, self.act)

    def act(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank and not self.place:
            tensor = resting(trainer, self.what)
            flip(tensor, tensor.numel() - 1, bit=5)
            self.place = f"{tensor.region.what} (the window of elements"


FLIPS = [
    ("masters", "on_before_optimizer_step", "files"),
    ("state", "on_before_optimizer_step", "files"),
    ("masters", "on_train_batch_start", "files, parameters"),
    ("weights", "on_train_batch_start", "files, parameters"),
    ("masters", "on_save_checkpoint", "files"),
    ("state", "on_save_checkpoint", "files"),
]


def test_a_bit_that_flips_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """And neither in weights nor in a checkpoint; without checksums it is."""
    files, checkpoint = tmp_path / "files", str(tmp_path / "checkpoint")
    files.mkdir()

    def train(rank: int, what: str, hook: str, kind: str) -> tuple[str, str]:
        plugins = {"plugins": ZeroPrecision("bf16-mixed")} if what == "weights" else {}
        offload = KINDS[kind](files)
        flipping, blind = Flipping(1, what, hook), Flipping(1, what, hook)
        trainer = make_trainer(zero(3, offload=offload), callbacks=[SaveAt(2, checkpoint), flipping], **plugins)
        with pytest.raises(CheckpointError if "save" in hook else OffloadError) as caught:
            trainer.fit(Net(), batches(5))
        assert threads() == []
        unchecked = zero(3, offload=dataclasses.replace(offload, checksums=False))
        save = SaveAt(2, f"{checkpoint} of something else")
        make_trainer(unchecked, callbacks=[save, blind], max_steps=4, **plugins).fit(Net(), batches(5))
        assert bool(blind.place) == (rank == 1)
        return str(caught.value), flipping.place

    @quiet()
    def run(rank: int) -> list[tuple[str, str]]:
        return [train(rank, *row) for row in FLIPS]

    for row, (zeroth, _), (first, place) in zip(FLIPS, *run_world(2, run, timeout=90), strict=True):
        for message in (zeroth, first):
            for words in ("Rank 1", place, str(files), "resume from it, on another disk"):
                assert words in message, (row, message)
    assert list(files.iterdir()) == []


class SaveAt(pl.Callback):
    """Saves once, before the step in which the disk breaks."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def ordered(module: pl.LightningModule) -> list[Tensor]:
    return list(values_of(module).values())


def test_a_path_that_cannot_be_used_is_an_error_on_every_rank_before_training(tmp_path: Path) -> None:
    """On one rank only: the paths of hosts differ."""
    good, file = tmp_path / "good", tmp_path / "a file"
    good.mkdir()
    file.touch()
    bad = [tmp_path / "missing", file, Path("/proc")]

    @quiet()
    def run(rank: int) -> list[str]:
        told = []
        for path in bad:
            offload = NvmeOffload(path=str(path if rank == 1 else good), buffer_mib=1)
            trainer = make_trainer(zero(3, offload=offload))
            with pytest.raises(OffloadError) as caught:
                trainer.fit(Net(), batches(2))
            assert trainer.global_step == 0
            told.append(str(caught.value))
        return told

    for told in run_world(2, run, timeout=60):
        for path, message in zip(bad, told, strict=True):
            assert "Rank 1" in message
            assert str(path) in message
    assert list(good.iterdir()) == []


class Full(FileSystem):
    """Has no room, although it had when it was asked a moment before."""

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(descriptor, offset, nbytes)


class Worn(FileSystem):
    """Fails in the middle of the first weights."""

    left = 3

    def pwritev(self, descriptor: int, memory: memoryview, offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(descriptor, memory, offset)


@pytest.mark.parametrize(
    ("disk", "told", "reason"),
    [
        (Full, "Could not find room for what is offloaded: failed on rank 1", "No space left on device"),
        (Worn, "Could not put the first weights where they rest: failed on rank 1", "Input/output error"),
    ],
)
def test_a_disk_that_fails_at_set_up_is_an_error_on_every_rank(
    disk: type[FileSystem], told: str, reason: str, tmp_path: Path
) -> None:
    @quiet()
    def run(rank: int) -> str:
        groups = Groups.create()
        offload = NvmeOffload(path=str(tmp_path), buffer_mib=1)
        module = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4)))
        plan = build_plan(module, stage=3, units=["Linear"], world_size=2, offload=offload)
        system = disk() if rank == 1 else None
        tiers = make_tiers(offload, plan, groups.control, torch.device("cpu"), system=system)
        with pytest.raises(OffloadError) as caught:
            ZeroEngine(module, plan, GlooCollectives(groups, Streams(tiers.device)), groups.control, tiers)
        tiers.close()
        return str(caught.value)

    for message in run_world(2, run, timeout=60):
        assert told in message
        assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_named_with_the_bytes_needed_and_found(tmp_path: Path) -> None:
    class Small(FileSystem):
        def free_nbytes(self, path: Path) -> int:
            return 20_000

    @quiet()
    def run(rank: int) -> str:
        offload = NvmeOffload(path=str(tmp_path), buffer_mib=1)
        plan = build_plan(torch.nn.Linear(60, 60), stage=3, world_size=2, offload=offload)
        none = OptimizerCost(name="none", state=0)
        assert plan.expected_disk(rank=rank, optimizer=none).total == 8192  # 1920 elements in whole pages
        control = Groups.create().control
        tiers = make_tiers(offload, plan, control, torch.device("cpu"), system=Small())  # 2 ranks x 8192: that fits
        tiers.close()
        larger = build_plan(torch.nn.Linear(100, 60), stage=3, world_size=2, offload=offload)
        with pytest.raises(OffloadError) as caught:  # 2 ranks x 12288: each alone would fit
            make_tiers(offload, larger, control, torch.device("cpu"), system=Small())
        return str(caught.value)

    for message in run_world(2, run, timeout=60):
        assert readable_size(24576) in message
        assert readable_size(20000) in message
    assert list(tmp_path.iterdir()) == []


def test_room_for_optimizer_state_is_asked_for_before_training(tmp_path: Path) -> None:
    """Of all ranks that share the disk together: each alone would fit."""

    class Small(FileSystem):
        free = 0

        def free_nbytes(self, path: Path) -> int:
            return self.free

    class Asking(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            engine = self.trainer.strategy.engine
            self.needed = engine.plan.expected_disk(rank=self.global_rank).optimizer
            engine.tiers.store._system = Small()
            engine.tiers.store._system.free = self.free = self.needed * 3 // 2
            return super().configure_optimizers()

    @quiet()
    def run(rank: int) -> tuple[str, int, int]:
        trainer, module = make_trainer(zero(3, offload=KINDS["files"](tmp_path))), Asking()
        with pytest.raises(OffloadError) as caught:
            trainer.fit(module, batches(2))
        assert trainer.global_step == 0
        return str(caught.value), module.needed, module.free

    found = run_world(2, run, timeout=60)
    assert found[0][1] > 0
    for message, _, _ in found:
        assert readable_size(sum(needed for _, needed, _ in found)) in message
        assert readable_size(found[0][2]) in message
    assert list(tmp_path.iterdir()) == []


class Stop(Exception):
    pass


class Fragile(Net):
    """Raises at ``place`` in the second step, once."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        super().__init__()
        self.place, self.error, self.armed = place, error, True

    def fail(self, place: str) -> None:
        if self.armed and place == self.place and self.global_step == 1:
            self.armed = False
            raise self.error(place)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.fail("backward"))
        self.fail("forward")
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.fail("before step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.fail("step"))
        optimizer.register_step_post_hook(lambda *_: self.fail("after step"))
        return optimizer


def test_an_exception_and_a_second_fit_leave_nothing_and_train_as_without_offload(tmp_path: Path) -> None:
    places = ["forward", "backward", "before step", "step", "after step"]

    @quiet()
    def run(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place in places:
            for error in (Stop, KeyboardInterrupt) if place == "backward" else (Stop,):
                results: list[list[Tensor]] = []
                for kind in ("nothing", *KINDS):
                    offload = KINDS[kind](tmp_path) if results else None
                    module = Fragile(place, error)
                    trainer = make_trainer(zero(3, offload=offload))
                    with pytest.raises((Stop, SystemExit)):
                        trainer.fit(module, batches(4))
                    left = (threads(), [name for name in os.listdir(tmp_path) if name.endswith(f"rank{rank}")])
                    # The same module, and whatever was half done is forgotten.
                    again = make_trainer(zero(3, offload=offload), max_steps=3)
                    again.fit(module, batches(4))
                    results.append(ordered(module))
                    left += (threads(), [name for name in os.listdir(tmp_path) if name.endswith(f"rank{rank}")])
                    same = all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
                    found[f"{kind}, {place} {error.__name__}"] = (same, left)
        return found

    for found in run_world(2, run, timeout=200):
        assert len(found) == 6 * (1 + len(KINDS))
        for where, (same, left) in found.items():
            assert left == ([], [], [], []), where
            assert same, where


def test_after_a_run_the_module_saves_validates_and_shows_its_weights(tmp_path: Path) -> None:
    """Files have no name any more then, and are there all the same."""

    @quiet()
    def run(rank: int) -> list[bool]:
        found = []
        for kind in ("nothing", *KINDS):
            path = str(tmp_path / f"checkpoint of {kind}")
            module = Net()
            trainer = make_trainer(zero(3, offload=KINDS[kind](tmp_path) if found else None), max_steps=3)
            trainer.fit(module, batches(4))
            trainer.save_checkpoint(path)
            trainer.validate(module, batches(2), verbose=False)
            with torch.no_grad(), full_parameters(module.model.layers[0]):
                for parameter in module.model.layers[0].parameters():
                    parameter.mul_(0.5)
            changed = ordered(module)
            resumed = Net()
            make_trainer(zero(2), max_steps=5).fit(resumed, batches(5), ckpt_path=path)
            found.append([*changed, *ordered(resumed), trainer.callback_metrics["val_loss"]])
        assert len(found[0]) > 10
        assert threads() == []
        return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found]

    assert run_world(2, run, timeout=90) == [[True] * (1 + len(KINDS))] * 2
