"""Training with offload is, bit for bit, the same training without: losses, parameters, optimizer state, schedules."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import HostOffload, NvmeOffload, Offload
from lightning_zero.errors import OffloadError, UnsupportedOptimizerError
from lightning_zero.trainer.precision import ZeroPrecision
from tests.helpers.cases import Block, case
from tests.helpers.probe import Probe, fit, masters
from tests.helpers.rig import looking
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Net, batches, quiet, values_of, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world
from tests.world.optim.test_optimizers import MATRICES, Odd, SaveAfter, two_groups

optim = torch.optim


class Wide(Odd):
    """The odd sizes again, and matrices of several windows of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Block(hidden=701))


WIDE = case("wide", Wide, units=("Block", "OddSizes", "Gain"))


def policies(stage: int, path: Path) -> dict[str, Offload]:
    found: dict[str, Offload] = {"host": HostOffload(threads=1)}
    files = {"path": str(path), "buffer_mib": 1, "io_threads": 2, "threads": 1}
    found["files"] = NvmeOffload(**files)
    if stage == 3:
        found["host, parameters"] = HostOffload(parameters=True, threads=1)
        found["files, parameters"] = NvmeOffload(parameters=True, **files)
    return found


def outcome(probe: Probe, trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that offload must not change, on this rank. Collective."""
    found: dict[str, Any] = {f"loss {index}": loss for index, loss in enumerate(probe.losses)}
    found |= masters(probe)
    for index, optimizer in enumerate(trainer.optimizers):
        for name, state in trainer.strategy.adapter(optimizer).named_state().items():
            for key, value in {**state.slices, **state.values}.items():
                found[f"{key} of {name} in {index}"] = value.clone() if isinstance(value, Tensor) else value
        for number, group in enumerate(optimizer.param_groups):
            found |= {f"{key} of group {number} of {index}": value for key, value in group.items() if key != "params"}
    for index, config in enumerate(trainer.lr_scheduler_configs):
        found[f"scheduler {index}"] = config.scheduler.state_dict()
    return found | {"steps": trainer.global_step}


def unlike(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())
    return [
        name
        for name, value in expected.items()
        if not (torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name])
    ]


Make = Callable[[Any], Any]


def differences(
    path: Path,
    make: Make,
    stage: int,
    *,
    only: Sequence[str] = (),
    kind: Callable[..., Probe] = Probe,
    callbacks: Callable[[], list[pl.Callback]] = list,
    options: Callable[[], dict[str, Any]] = dict,
    steps: int = 4,
) -> dict[str, list[str]]:
    """What differs under each policy from the same training without one. Collective."""

    def play(offload: Offload | None) -> dict[str, Any]:
        probe = kind(WIDE, make)
        trainer = fit(probe, stage=stage, micro_steps=steps, options=options(), callbacks=callbacks(), offload=offload)
        return outcome(probe, trainer)

    expected = play(None)
    assert any(name.startswith("loss") for name in expected)
    return {
        f"stage {stage}, {name}": unlike(expected, play(policy))
        for name, policy in policies(stage, path).items()
        if not only or name in only
    }


def none_of(results: list[dict[str, list[str]]]) -> None:
    """Every rank found that nothing differs."""
    for found in results:
        assert found
        assert not any(found.values()), {name: bad for name, bad in found.items() if bad}


def adamw(module: nn.Module) -> Optimizer:
    return optim.AdamW(two_groups(module), lr=0.01, amsgrad=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_stage_and_policy(world_size: int, tmp_path: Path) -> None:
    """With accumulation and clipping by norm, frozen, unused, empty and 0-d parameters."""

    def run(rank: int) -> dict[str, list[str]]:
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
        found = {}
        for stage in {2: (1,), 3: (2, 3)}[world_size]:
            found |= differences(tmp_path, adamw, stage, options=lambda: options)
        return found

    none_of(run_world(world_size, run))


class Overflowing(Probe):
    """Gradients of the third batch overflow on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1 else loss


def scheduled(module: nn.Module) -> Any:
    optimizer = optim.SGD(two_groups(module), lr=0.05, momentum=0.9)
    return [optimizer], [{"scheduler": optim.lr_scheduler.CosineAnnealingLR(optimizer, 5), "interval": "step"}]


def precisions_skipped_steps_and_schedulers(tmp_path: Path) -> Row:
    """A step that overflowed is skipped, and neither optimizer nor scheduler advance."""

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for precision, kind, stage, only in (
            ("16-mixed", Overflowing, 3, ("host", "files, parameters")),
            ("16-mixed", Overflowing, 2, ("files",)),
            ("bf16-mixed", Probe, 3, ("host, parameters",)),
            ("bf16-true", Probe, 1, ("host",)),
            ("64-true", Probe, 3, ("files",)),
        ):

            def options(precision: Any = precision) -> dict[str, Any]:
                clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
                return {"plugins": ZeroPrecision(precision), **clip}

            some = differences(tmp_path, scheduled, stage, only=only, kind=kind, options=options)
            found |= {f"{precision}, {name}": bad for name, bad in some.items()}
        assert len(found) == 6
        return found

    none_of((yield run))


def a_late_step_hook_counts_for_whole_matrices(tmp_path: Path) -> Row:
    """They are collected from the ranks after it, not before. On the host of a CPU they can be stepped on, too."""

    def run(rank: int) -> dict[str, list[str]]:
        def play(offload: Offload | None, half: bool) -> dict[str, Any]:
            probe = Probe(MATRICES, lambda m: optim.Muon(list(m.model.layers.parameters()), lr=0.02))
            callbacks = [Clamp()] if half else []
            trainer = fit(probe, stage=3, micro_steps=3, callbacks=callbacks, offload=offload)
            return outcome(probe, trainer)

        expected, host = play(None, True), play(HostOffload(threads=1), True)
        with pytest.raises(UnsupportedOptimizerError, match="Muon"):
            play(NvmeOffload(path=str(tmp_path)), True)
        assert unlike(expected, play(None, False))
        return {"host": unlike(expected, host)}

    none_of((yield run))


class Clamp(pl.Callback):
    """Clamps gradients right before each step."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_pre_hook(self.drop)

    def drop(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1e-3, 1e-3)


class Two(Probe):
    """Two optimizers, stepped in turns by hand, whose parameters share units."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()[batch_idx % 2]
        if batch_idx == 3:
            optimizer = optimizer.optimizer  # torch's own step, past Lightning
        self.toggle_optimizer(optimizer)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        return loss


def in_turns(module: nn.Module) -> list[Optimizer]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [optim.Adam(parameters[::2], lr=0.01), optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]


def several_optimizers_by_hand(tmp_path: Path) -> Row:
    def run(rank: int) -> dict[str, list[str]]:
        return differences(tmp_path, in_turns, 3, kind=Two, steps=5)

    none_of((yield run))


def test_a_step_that_fails_on_one_rank_raises_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its second step if it has one unit, of its first if it has several.

    None hangs, and the processes can train again.
    """

    def run(rank: int) -> list[tuple[str, int]]:
        found = []
        for stage in (1, 3):
            for policy in policies(stage, tmp_path).values():

                def failing(module: nn.Module) -> Any:
                    calls = itertools.count(1)

                    def fail(group: dict[str, Any]) -> None:
                        if any(p.grad is not None for p in group["params"]) and next(calls) == 3 and rank == 1:
                            raise ArithmeticError("made to fail")

                    return looking(monkeypatch, torch.optim.SGD(two_groups(module), lr=0.05, momentum=0.9), fail)

                probe = Probe(WIDE, failing)
                with pytest.raises(OffloadError) as caught:
                    fit(probe, stage=stage, micro_steps=4, offload=policy)
                assert isinstance(caught.value.__cause__, ArithmeticError) == (rank == 1)
                found.append(str(caught.value))
        probe = Probe(WIDE, adamw)
        fit(probe, stage=3, micro_steps=2, offload=policies(3, tmp_path)["files"])
        assert len(probe.losses) == 2
        return found

    for messages in run_world(2, run):
        assert len(messages) == 6
        for message in messages:
            assert "rank 1" in message.lower()
            assert "ArithmeticError on host" in message
            assert "made to fail" in message


# What saved a checkpoint, and what goes on from it.
RESUMED = [("none", "files"), ("files", "host, parameters"), ("host", "none")]


def checkpoints_are_the_same_with_and_without_offload(tmp_path: Path) -> Row:
    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for saver, loader in RESUMED:
            known: dict[str, Offload | None] = {"none": None, **policies(3, tmp_path)}
            path = str(tmp_path / f"{saver}.ckpt")
            first, second = Probe(WIDE, adamw), Probe(WIDE, adamw)
            trainer = fit(first, stage=3, micro_steps=4, callbacks=[SaveAfter(path, 1)], offload=known[saver])
            expected = outcome(first, trainer)
            trainer = fit(second, stage=3, micro_steps=4, ckpt_path=path, first=2, offload=known[loader])
            second.losses = first.losses[:2] + second.losses
            found[f"{saver} to {loader}"] = unlike(expected, outcome(second, trainer))
        return found

    none_of((yield run))


class Big(nn.Module):
    """16 MiB of parameters, twice as much state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 3072), nn.Linear(3072, 3068), nn.Linear(3068, 20))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MIB = 2**20


class Peak(pl.Callback):
    """Measures how much memory loading the optimizer's state takes on top of what there was before, at its peak."""

    def __init__(self) -> None:
        self.nbytes = 0

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.nbytes = -self.read("VmRSS")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.nbytes += self.read("VmHWM")

    def read(self, what: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) * 1024


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peaks of memory")
def test_state_goes_from_a_checkpoint_to_files_in_pieces(tmp_path: Path) -> None:
    big = case("big", Big, units=("Linear",))

    def run(rank: int) -> int:
        path, peak = str(tmp_path / "big.ckpt"), Peak()
        fit(Probe(big), stage=3, micro_steps=2, callbacks=[SaveAfter(path, 0)])
        files = policies(3, tmp_path)["files"]
        fit(Probe(big), stage=3, micro_steps=2, ckpt_path=path, first=1, callbacks=[peak], offload=files)
        return peak.nbytes

    state_nbytes = 2 * 4 * sum(p.numel() for p in Big().parameters())
    assert state_nbytes > 72 * MIB
    assert run_world(1, run)[0] < 32 * MIB  # 16 MiB are read and checked at a time


class Clamping(Net):
    """Writes to its weights between steps, as weight clipping does."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.05, 0.05)
        self.model.head.weight.data.mul_(0.5)  # unseen by version counters


def what_the_user_writes_to_replicated_parameters_counts(stage: int, tmp_path: Path) -> Row:
    """Also in what is saved right after it."""
    files = tmp_path / "written"
    files.mkdir()
    policies = {"none": None, "host": HostOffload(), "files": NvmeOffload(path=str(files), buffer_mib=1)}

    @quiet()
    def run(rank: int) -> dict[str, list[Tensor]]:
        ends = {}
        for name, offload in policies.items():
            module = Clamping()
            trainer = make_trainer(zero(stage, offload=offload), max_steps=3)
            trainer.fit(module, batches(4))
            trainer.save_checkpoint(tmp_path / name)
            resumed = Net()
            make_trainer(zero(3), max_steps=4).fit(resumed, batches(4), ckpt_path=tmp_path / name)
            ends[name] = [*values_of(module).values(), *values_of(resumed).values()]
        return ends

    for ends in (yield run):
        assert max(float(value.abs().max()) for value in ends["none"][: len(ends["none"]) // 2]) <= 0.0501
        for name, values in ends.items():
            assert all(torch.equal(a, b) for a, b in zip(ends["none"], values, strict=True)), name


class Writing(pl.Callback):
    """Writes to weights through param groups: before and after a step, and between steps; and to some directly."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: self.write(optimizer, 0, lambda p: p.mul_(0.9)))
        optimizer.register_step_post_hook(lambda *_: self.write(optimizer, 1, lambda p: p.clamp_(-0.1, 0.1)))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, out: Any, batch: Any, i: int) -> None:
        if i == 1:
            self.write(trainer.optimizers[0], 2, lambda p: p.add_(0.01))
        with torch.no_grad():
            list(module.parameters())[3].data.mul_(0.8)

    def write(self, optimizer: Optimizer, first: int, change: Callable[[Tensor], Any]) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"][first::4]:
                    change(parameter)


def what_the_user_writes_through_param_groups_counts(stage: int, tmp_path: Path) -> Row:
    """From the next forward on, on all ranks."""

    def adam(module: nn.Module) -> Optimizer:
        return optim.Adam(module.parameters(), lr=0.01)

    def run(rank: int) -> dict[str, list[str]]:
        return differences(tmp_path, adam, stage, callbacks=lambda: [Writing()], only=("host", "host, parameters"))

    none_of((yield run))


class Quantised(nn.Module):
    """With a frozen parameter of bytes, which the optimizer is given as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(400, dtype=torch.uint8).view(20, 20), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x @ (self.table.to(x.dtype) / 1000))


def frozen_bytes_stay_in_files(path: Path) -> Row:
    quantised = case("quantised", Quantised, units=("Linear",))

    def run(rank: int) -> list[Tensor]:
        found = []
        for offload in (None, NvmeOffload(path=str(path), parameters=True, buffer_mib=1)):
            probe = Probe(quantised, lambda module: optim.AdamW(module.parameters(), lr=0.01))
            fit(probe, stage=3, micro_steps=3, offload=offload)
            found.append(torch.stack(probe.losses))
        return found

    for expected, found in (yield run):
        assert torch.equal(expected, found)


def test_what_else_offload_does_not_change(tmp_path: Path) -> None:
    in_one_world(
        2,
        precisions_skipped_steps_and_schedulers(tmp_path),
        a_late_step_hook_counts_for_whole_matrices(tmp_path),
        several_optimizers_by_hand(tmp_path),
        checkpoints_are_the_same_with_and_without_offload(tmp_path),
        what_the_user_writes_to_replicated_parameters_counts(1, tmp_path),
        what_the_user_writes_through_param_groups_counts(2, tmp_path),
        frozen_bytes_stay_in_files(tmp_path),
    )
