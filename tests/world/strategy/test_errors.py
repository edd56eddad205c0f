"""What goes wrong is said on every rank that can still speak: what, where, what to do next. Soon, without a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroCLI, ZeroPrecision, ZeroStrategy, full_parameters
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import Failure, run_world

STAGES = (1, 2, 3)
WEIGHT = "model.layers.0.up.weight"


class Module(pl.LightningModule):
    """Trains a stack; what goes wrong is in subclasses, or in ``mishap(module, batch_idx)``, called by every step."""

    def __init__(self, mishap: Callable[[Any, int], Any] | None = None, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = model or Stack()
        self._mishap = mishap
        self.losses: list[float] = []

    @property
    def weight(self) -> nn.Parameter:
        return self.model.layers[0].up.weight

    def inputs(self, batch_idx: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(batch_idx))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.model(self.inputs(batch_idx)).square().mean()
        if self._mishap is not None:
            extra = self._mishap(self, batch_idx)
            loss = loss if extra is None else loss + extra
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Module):
    """Optimizes by hand: ``play(module, optimizer, loss)``."""

    def __init__(self, play: Callable[[Any, Any, Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._play = play

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self._play(self, optimizer, self.model(self.inputs(batch_idx)).square().mean())


def fit(
    module: pl.LightningModule, strategy: ZeroStrategy | int = 3, *, batches: int = 3, **options: Any
) -> pl.Trainer:
    if isinstance(strategy, int):
        strategy = ZeroStrategy(stage=strategy, units=["Block"])  # type: ignore[arg-type]
    with quiet():
        trainer = make_trainer(strategy, **options)
        trainer.fit(module, DataLoader(range(batches), batch_size=None))
    return trainer


def told(run: Callable[[int], Any], *, world_size: int = 2, **options: Any) -> list[str]:
    """What each rank was told: ``"Type: message"``, or ``""`` where nothing was raised."""

    def attempt(rank: int) -> str:
        try:
            run(rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_world(world_size, attempt, timeout=90, **options)


def check(messages: list[str], error: str, *parts: str) -> None:
    """Every rank was told this error, with all of these parts."""
    for rank, message in enumerate(messages):
        assert message.startswith(f"{error}: "), f"rank {rank}: {message or 'nothing'}"
        for part in parts:
            assert part in message, f"rank {rank} was not told {part!r}: {message}"


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are not the same program


@pytest.mark.parametrize("stage", STAGES)
def test_different_models(stage: int) -> None:
    def run(rank: int) -> None:
        model = Stack()
        if rank:
            model.head = nn.Linear(WIDTH, 7)
        fit(Module(model=model), stage)

    check(told(run), "DivergenceError", "Rank 1 has another model", "model.head.weight", "same model")


SETTINGS: dict[str, Callable[[int], ZeroStrategy]] = {
    "stage": lambda rank: ZeroStrategy(stage=3 if rank else 1),
    "bucket_mib": lambda rank: ZeroStrategy(stage=1, bucket_mib=0.001 if rank else 25.0),
    "units": lambda rank: ZeroStrategy(units=["Block"] if rank else ["Linear"]),
    "prefetch": lambda rank: ZeroStrategy(units=["Block"], prefetch=rank),
    "precision": lambda rank: ZeroStrategy(precision_plugin=ZeroPrecision("bf16-mixed" if rank else "32-true")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_different_settings(name: str) -> None:
    messages = told(lambda rank: fit(Module(), SETTINGS[name](rank)))
    check(messages, "DivergenceError", "Rank 1 has another", "rank 0:", "rank 1:", "same strategy settings")


@pytest.mark.parametrize(("devices", "nodes"), [(3, 1), (2, 2)])
def test_a_world_that_does_not_match(devices: int, nodes: int) -> None:
    messages = told(lambda rank: fit(Module(), devices=devices, num_nodes=nodes))
    check(messages, "ValueError", "world size (2)", f"devices={devices}", f"num_nodes={nodes}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_step_that_returned_none_on_one_rank(stage: int) -> None:
    """Lightning refuses it where it happens; the other rank must not wait for it."""

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 and self.global_rank == 1 else loss

    waiting, skipping = told(lambda rank: fit(Skips(), stage))
    assert skipping.startswith("RuntimeError: Skipping the `training_step` by returning None"), skipping
    assert waiting.startswith("CommunicationError: Rank 0: "), waiting


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_one_rank_left_out(stage: int) -> None:
    def play(module: Manual, optimizer: Any, loss: Tensor) -> None:
        if not (module.global_rank == 1 and module.global_step == 1):
            module.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    messages = told(lambda rank: fit(Manual(play), stage))
    check(messages, "DivergenceError", "rank 0:", "rank 1:", "depends on the rank")


# ---------------------------------------------------------------------------------------------------------------------
# Settings that cannot work


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_over_foreign_parameters(stage: int) -> None:
    class Foreign(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=0.1)

    check(told(lambda rank: fit(Foreign(), stage)), "ValueError", "SGD", "(3, 5)", "self.parameters()")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda p: torch.optim.SparseAdam(p), ("SparseAdam", "dense", "use Adam")),
    ],
    ids=["SparseAdam"],
)
def test_optimizers_that_cannot_be_sharded(make: Callable[..., Any], parts: tuple[str, ...]) -> None:
    class Refused(Module):
        def configure_optimizers(self) -> Any:
            return make(list(self.parameters()))

    for stage in (1, 3):
        check(told(lambda rank, stage=stage: fit(Refused(), stage)), "UnsupportedOptimizerError", *parts)


@pytest.mark.parametrize("cli", [LightningCLI, ZeroCLI])
def test_an_unknown_option_in_yaml(
    cli: type[LightningCLI], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_zero.ZeroStrategy\n    init_args:\n      bucket_mb: 3\n"
    )
    with pytest.raises(SystemExit) as stopped:
        cli(Module, args=["fit", "--config", str(config)], save_config_callback=None)
    assert stopped.value.code == 2
    assert "bucket_mb" in capsys.readouterr().err


def test_a_setting_out_of_range_is_named() -> None:
    for arguments, name in (({"stage": 4}, "stage"), ({"bucket_mib": 0}, "bucket_mib"), ({"prefetch": -1}, "prefetch")):
        with pytest.raises(ValueError, match=name):
            ZeroStrategy(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="overlap_comm"):
        ZeroStrategy(overlap_comm=True)  # type: ignore[call-arg]


class Quantised(Precision):
    """A precision plugin that this package knows nothing about."""


class SpecialMixed(MixedPrecision):
    """Changes what a known plugin does, perhaps."""


@pytest.mark.parametrize("plugin", [Quantised(), SpecialMixed("bf16-mixed", "cpu")], ids=lambda p: type(p).__name__)
def test_precision_plugins_that_are_not_supported(plugin: Precision) -> None:
    with pytest.raises(ValueError, match=f"{type(plugin).__name__} is not supported.*bf16-mixed"):
        pl.Trainer(strategy=ZeroStrategy(), accelerator="cpu", devices=1, plugins=[plugin])


def test_checkpoint_plugins_are_refused() -> None:
    with pytest.raises(ValueError, match="no checkpoint plugin, got TorchCheckpointIO"):
        pl.Trainer(strategy="zero3", accelerator="cpu", devices=1, plugins=[TorchCheckpointIO()])


# ---------------------------------------------------------------------------------------------------------------------
# Parameters that are used where they are not


READS: dict[str, Callable[[Tensor], Any]] = {
    "median": lambda w: w.median(),
    "product": lambda w: w.prod(),
    "square": lambda w: (w**2).mean(),
    "operator": lambda w: (2 * w).mean(),
    "indexing": lambda w: w[0, 0],
    "linear": lambda w: nn.functional.linear(torch.ones(w.shape[1]), w).sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_parameter_read_between_phases_is_named(name: str) -> None:
    class Reads(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            READS[name](self.weight)

    check(told(lambda rank: fit(Reads())), "ParameterAccessError", f"'{WEIGHT}'", "full_parameters")


def test_an_in_place_change_where_it_is_allowed_is_kept() -> None:
    """The next step the messages name works: the change is what all ranks go on with."""

    def run(rank: int) -> Tensor:
        module = Module()
        trainer = fit(module, batches=1)
        with full_parameters(module):
            module.weight.detach().fill_(0.5)
        del trainer
        with full_parameters(module):
            return module.weight.detach().clone()

    for weight in run_world(2, run, timeout=90):
        assert bool((weight == 0.5).all())


# ---------------------------------------------------------------------------------------------------------------------
# Steps that cannot be taken


def test_a_raw_step_with_a_closure() -> None:
    def play(module: Manual, optimizer: Any, loss: Tensor) -> None:
        module.manual_backward(loss)
        optimizer.optimizer.step(lambda: loss)

    for stage in (1, 3):
        check(
            told(lambda rank, stage=stage: fit(Manual(play), stage)), "RuntimeError", "AdamW.step(closure)", "backward"
        )


def test_a_step_after_a_backward_without_synchronisation() -> None:
    def play(module: Manual, optimizer: Any, loss: Tensor) -> None:
        with module.trainer.strategy.block_backward_sync():
            module.manual_backward(loss)
        optimizer.step()

    check(
        told(lambda rank: fit(Manual(play), 1)), "RuntimeError", "AdamW", "between micro-steps", "block_backward_sync"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_builds_a_graph(stage: int) -> None:
    def play(module: Manual, optimizer: Any, loss: Tensor) -> None:
        module.manual_backward(loss, create_graph=True)

    messages = told(lambda rank: fit(Manual(play), stage))
    check(messages, "RuntimeError", "create_graph=True", "not supported")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_do_not_corrupt_memory(optimizer: Any) -> None:
    """Fused CPU kernels write ``numel()`` elements from a pointer. Three ranks: some own nothing of some parameters."""

    class Fused(Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self._fused = fused

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.01, fused=self._fused)

    def run(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for stage in STAGES:
            for fused in (False, True):
                module = Fused(fused)
                fit(module, stage)
                with full_parameters(module):
                    ends.append({name: p.detach().clone() for name, p in module.named_parameters()})
        return ends

    for ends in run_world(3, run, timeout=120):
        for end in ends[1:]:
            for name, value in end.items():
                torch.testing.assert_close(value, ends[0][name], rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are gone. A rank that has not given up ten seconds after the first failure is reported as "Timeout".


class Breaks(Module):
    """Rank 1 does something terrible in the second batch."""

    def __init__(self, place: str, deed: Callable[[], Any]) -> None:
        super().__init__()
        self._place, self._deed = place, deed

    def _now(self, place: str, batch_idx: int) -> bool:
        return place == self._place and batch_idx == 1 and self.global_rank == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        handle = None
        if self._now("forward", batch_idx):
            handle = self.model.layers[1].register_forward_pre_hook(lambda *_: self._deed())
        if self._now("backward", batch_idx):
            self.model.layers[1].register_forward_hook(lambda m, i, o: o.register_hook(lambda g: self._deed()) and None)
        loss = super().training_step(batch, batch_idx)
        if handle is not None:
            handle.remove()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._now("step", self.global_step):
            self._deed()


def fail(message: str) -> None:
    raise ArithmeticError(message)


DEEDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exit": (lambda: os._exit(7), "exit code 7"),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
    "raise": (lambda: fail("only here"), "ArithmeticError"),
}


def failures(deed: str, place: str, stage: int) -> dict[int, Failure]:
    def run(rank: int) -> None:
        fit(Breaks(place, DEEDS[deed][0]), stage)

    return run_world(2, run, timeout=90, expect_failure=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_rank_that_is_gone(deed: str, place: str, stage: int) -> None:
    found = failures(deed, place, stage)
    assert found[1].type == DEEDS[deed][1]
    assert found[0].type == "CommunicationError", found[0]
    message = found[0].message
    assert message.startswith("Rank 0: ")
    assert "did not complete" in message
    assert "log of the rank that stopped first" in message


@pytest.mark.timing
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_sleeps_is_given_up_after_the_timeout(stage: int) -> None:
    """``timeout`` holds for whatever a rank waits for; the default group is the strategy's own here."""
    limit = 4.0

    def run(rank: int) -> float:
        module = Breaks("step", lambda: time.sleep(limit + 5))
        began: list[float] = []
        module.on_after_backward = lambda: began.append(time.monotonic())  # type: ignore[method-assign]
        strategy = ZeroStrategy(stage=stage, units=["Block"], timeout=timedelta(seconds=limit))  # type: ignore[arg-type]
        try:
            with quiet():
                trainer = pl.Trainer(
                    strategy=strategy,
                    accelerator="cpu",
                    devices=2,
                    max_epochs=1,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(module, DataLoader(range(3), batch_size=None))
        except Exception as error:
            seconds = time.monotonic() - began[-1]
            raise type(error)(f"{seconds} seconds: {error}") from None
        return 0.0

    found = run_world(2, run, timeout=90, expect_failure=True, init_group=False)
    assert found[0].type == "CommunicationError", found[0]
    assert limit - 0.5 < float(found[0].message.split()[0]) < limit + 4, found[0].message
    assert "timeout" in found[0].message.lower()
    assert found[1].type == "CommunicationError", found[1]
