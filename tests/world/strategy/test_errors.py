"""What goes wrong is said on every rank that can still speak: what, where, what to do next. Soon, without a crash."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
from lightning_zero.comm import Groups
from lightning_zero.comm.groups import allow_files
from lightning_zero.errors import CommunicationError
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Net, quiet
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
WEIGHT = "model.layers.0.up.weight"


class Module(Net):
    """What goes wrong is in subclasses."""

    @property
    def weight(self) -> nn.Parameter:
        return self.model.layers[0].up.weight


class Manual(Module):
    """Optimizes by hand: ``play(module, optimizer, loss)``."""

    def __init__(self, play: Callable[[Any, Any, Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._play = play

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self._play(self, optimizer, self.model(self.data(batch_idx)[0]).square().mean())


def fit(
    module: pl.LightningModule, strategy: ZeroStrategy | int = 3, *, batches: int = 3, **options: Any
) -> pl.Trainer:
    if isinstance(strategy, int):
        strategy = ZeroStrategy(stage=strategy, units=["Block"])  # type: ignore[arg-type]
    with quiet():
        trainer = make_trainer(strategy, **options)
        trainer.fit(module, DataLoader(range(batches), batch_size=None))
    return trainer


def attempt(run: Callable[[int], Any]) -> Callable[[int], str]:
    """What a rank is told: ``"Type: message"``, or ``""`` where nothing is raised."""

    def act(rank: int) -> str:
        try:
            run(rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return act


def check(messages: list[str], error: str, *parts: str) -> None:
    """Every rank was told this error, with all of these parts."""
    for rank, message in enumerate(messages):
        assert message.startswith(f"{error}: "), f"rank {rank}: {message or 'nothing'}"
        for part in parts:
            assert part in message, f"rank {rank} was not told {part!r}: {message}"


def refused(run: Callable[[int], Any], error: str, *parts: str) -> Row:
    check((yield attempt(run)), error, *parts)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are not the same program


def other_models(stage: int, rank: int) -> None:
    model = Stack()
    if rank:
        model.head = nn.Linear(WIDTH, 7)
    fit(Module(lambda: model), stage)


SETTINGS: dict[str, Callable[[int], ZeroStrategy]] = {
    "stage": lambda rank: ZeroStrategy(stage=3 if rank else 1),
    "bucket_mib": lambda rank: ZeroStrategy(stage=1, bucket_mib=0.001 if rank else 25.0),
    "units": lambda rank: ZeroStrategy(units=["Block"] if rank else ["Linear"]),
    "prefetch": lambda rank: ZeroStrategy(units=["Block"], prefetch=rank),
    "precision": lambda rank: ZeroStrategy(precision_plugin=ZeroPrecision("bf16-mixed" if rank else "32-true")),
}


def leaves_out_a_backward(module: Manual, optimizer: Any, loss: Tensor) -> None:
    if not (module.global_rank == 1 and module.global_step == 1):
        module.manual_backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def test_ranks_that_are_not_the_same_program() -> None:
    settings = ("DivergenceError", "Rank 1 has another", "rank 0:", "rank 1:", "same strategy settings")
    model = ("DivergenceError", "Rank 1 has another model", "model.head.weight", "same model")
    in_one_world(
        2,
        *(refused(partial(other_models, stage), *model) for stage in (1, 3)),
        *(refused(lambda rank, make=make: fit(Module(), make(rank)), *settings) for make in SETTINGS.values()),
        refused(lambda rank: fit(Module(), devices=3), "ValueError", "world size (2)", "devices=3", "num_nodes=1"),
        refused(lambda rank: fit(Module(), num_nodes=2), "ValueError", "world size (2)", "devices=2", "num_nodes=2"),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_one_rank_left_out(stage: int) -> None:
    messages = run_world(2, attempt(lambda rank: fit(Manual(leaves_out_a_backward), stage)))
    check(messages, "DivergenceError", "rank 0:", "rank 1:", "depends on the rank")


def test_a_training_step_that_returned_none_on_one_rank() -> None:
    """Lightning refuses it where it happens; the other rank must not wait for it."""

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 and self.global_rank == 1 else loss

    waiting, skipping = run_world(2, attempt(lambda rank: fit(Skips(), 3)))
    assert skipping.startswith("RuntimeError: Skipping the `training_step` by returning None"), skipping
    assert waiting.startswith("CommunicationError: Rank 0: "), waiting


# ---------------------------------------------------------------------------------------------------------------------
# Settings that cannot work


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
    wrong = {"stage": 4, "bucket_mib": 0, "prefetch": -1, "allocate_memory_from_process_group": "nccl"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            ZeroStrategy(**{name: value})  # type: ignore[arg-type]
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


def read_between_phases(name: str) -> Row:
    class Reads(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            READS[name](self.weight)

    return refused(lambda rank: fit(Reads()), "ParameterAccessError", f"'{WEIGHT}'", "full_parameters")


def an_in_place_change_where_it_is_allowed_is_kept() -> Row:
    """The next step the messages name works: the change is what all ranks go on with."""

    def run(rank: int) -> Tensor:
        module = Module()
        fit(module, batches=1)
        with full_parameters(module):
            module.weight.detach().fill_(0.5)
        with full_parameters(module):
            return module.weight.detach().clone()

    for weight in (yield run):
        assert bool((weight == 0.5).all())


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers and steps


class With(Module):
    """An optimizer of ``make(parameters)``."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(list(self.parameters()))


def foreign(parameters: list[nn.Parameter]) -> Any:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3, 5))], lr=0.1)


def closure(module: Manual, optimizer: Any, loss: Tensor) -> None:
    module.manual_backward(loss)
    optimizer.optimizer.step(lambda: loss)


def unsynchronised(module: Manual, optimizer: Any, loss: Tensor) -> None:
    with module.trainer.strategy.block_backward_sync():
        module.manual_backward(loss)
    optimizer.step()


def graph(module: Manual, optimizer: Any, loss: Tensor) -> None:
    module.manual_backward(loss, create_graph=True)


def test_what_cannot_work_is_refused_by_name() -> None:
    rows: dict[Callable[[], Module], tuple[str, ...]] = {
        lambda: With(foreign): ("ValueError", "SGD", "(3, 5)", "self.parameters()"),
        lambda: With(torch.optim.SparseAdam): ("UnsupportedOptimizerError", "SparseAdam", "dense", "use Adam"),
        lambda: Manual(closure): ("RuntimeError", "AdamW.step(closure)", "backward"),
        lambda: Manual(graph): ("RuntimeError", "create_graph=True", "not supported"),
    }
    between = ("RuntimeError", "AdamW", "between micro-steps", "block_backward_sync")
    in_one_world(
        2,
        *(
            refused(lambda rank, make=make, stage=stage: fit(make(), stage), *words)
            for make, words in rows.items()
            for stage in (1, 3)
        ),
        refused(lambda rank: fit(Manual(unsynchronised), 1), *between),
        refused(
            lambda rank: fit(Module(), ZeroStrategy(3, allocate_memory_from_process_group=True)),
            *("ValueError", "allocate_memory_from_process_group needs process groups with memory of their own"),
        ),
        *map(read_between_phases, READS),
        an_in_place_change_where_it_is_allowed_is_kept(),
    )


def test_fused_optimizers_do_not_corrupt_memory() -> None:
    """Fused CPU kernels write ``numel()`` elements from a pointer. Three ranks: some own nothing of some parameters."""

    def run(rank: int) -> None:
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
            ends = []
            for stage, fused in ((1, False), (1, True), (3, True)):
                module = With(partial(kind, lr=0.01, fused=fused))
                fit(module, stage)
                with full_parameters(module):
                    ends.append({name: p.detach().clone() for name, p in module.named_parameters()})
            for end in ends[1:]:
                for name, value in end.items():
                    torch.testing.assert_close(value, ends[0][name], rtol=1e-4, atol=1e-6, msg=f"{kind}, {name}")

    run_world(3, run, timeout=120)


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


@pytest.mark.parametrize(
    ("deed", "place", "stage"),
    [("exit", "forward", 3), ("kill", "backward", 1), ("raise", "step", 2), ("raise", "backward", 3)],
)
def test_a_rank_that_is_gone(deed: str, place: str, stage: int) -> None:
    act, end = DEEDS[deed]
    found = run_world(2, lambda rank: fit(Breaks(place, act), stage), timeout=90, expect_failure=True)
    assert found[1].type == end
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
                options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
                trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **options)
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


def test_a_low_limit_of_open_files_is_raised_or_named() -> None:
    """The soft one by a run, torchrun's too where it serves the store. A hard one is an error on every rank."""

    def limit(soft: int, hard: int | None = None) -> None:
        """More files than this process has open."""
        opened = len(os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else opened + hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + soft, hard))

    def spare() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))

    def rank(number: int) -> tuple[str, list[int]]:
        limit(8)
        with quiet():
            options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = pl.Trainer(strategy=ZeroStrategy(), accelerator="cpu", devices=2, max_epochs=1, **options)
            trainer.fit(Module(), DataLoader(range(3), batch_size=None))
        raised = [spare()]
        limit(8)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if (child := os.fork()) == 0:
            allow_files(0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        raised.append(spare())
        if number == 1:
            limit(40, 40)  # enough for agreements
        with pytest.raises(CommunicationError) as caught:
            Groups.create("gloo", timedelta(seconds=50))
        return str(caught.value), raised

    (one, raised), (other, _) = run_world(2, rank, init_group=False, timeout=60)
    assert one == other
    assert re.search(r"failed on rank 1\.\n.* of a rank make \d+ open files, and it may have \d+\.", one)
    assert min(raised) > 50
