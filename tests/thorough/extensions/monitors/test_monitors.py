"""The monitors: what loggers get is what was sent and held, next to what the plan says; and off, nothing is left."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_zero import (
    CommunicationMonitor,
    HostOffload,
    MemoryMonitor,
    NvmeOffload,
    ZeroCLI,
    ZeroPrecision,
    full_gradient,
)
from tests.helpers.cases import WIDTH, Block, Stack, case
from tests.helpers.device_runs import needs_gpu
from tests.helpers.models import ZOO
from tests.helpers.probe import Probe, fit
from tests.helpers.script import ROOT, run_script
from tests.helpers.world import run_world

STAGES = (1, 2, 3)


class Notes(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.setdefault(-1 if step is None else step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def ours(notes: Notes) -> dict[int, dict[str, float]]:
    """By step, without what Lightning logs."""
    found = {step: {k: v for k, v in metrics.items() if k.startswith("zero/")} for step, metrics in notes.steps.items()}
    return {step: metrics for step, metrics in found.items() if metrics}


def observers(trainer: pl.Trainer) -> int:
    engine = trainer.strategy.engine
    return len(engine.collectives.observers) + len(engine.means.spans.observers)


def watched(stage: int, micro_steps: int = 6, *, every: int = 2, **settings: Any) -> tuple[pl.Trainer, list[Notes]]:
    """Train the small GPT under both monitors, with two loggers."""
    notes = [Notes(), Notes()]
    options = {"logger": notes, "log_every_n_steps": 4, **settings.pop("options", {})}
    callbacks = [CommunicationMonitor(every), MemoryMonitor(every)]
    probe = settings.pop("probe", None) or Probe(ZOO["gpt_tied"])
    trainer = fit(probe, stage=stage, micro_steps=micro_steps, callbacks=callbacks, options=options, **settings)
    return trainer, notes


# ------------------------------------------------------------------------------------------------------------- numbers


def observe(rank: int, stage: int, accumulate: int) -> dict[str, Any]:
    trainer, notes = watched(stage, 6 * accumulate, options={"accumulate_grad_batches": accumulate})
    plan, collectives = trainer.strategy.engine.plan, trainer.strategy.engine.collectives
    traffic = plan.expected_traffic(micro_steps=accumulate)
    receives = collectives.receives
    memory = {
        when: plan.expected_memory(rank=rank, receive_buffer=receives, peak=when == "peak") for when in ("rest", "peak")
    }
    return {
        "logged": [ours(note) for note in notes],
        "left": observers(trainer),
        # One rank alone collects gradients in their shards, but for those of a second micro-step: not in the plan.
        "second": sum(plan.gradient_slots) if collectives.world_size == 1 and accumulate > 1 else 0,
        "traffic": {kind: getattr(traffic, kind) for kind in ("all_gather", "reduce_scatter")},
        "memory": {
            when: {name: nbytes for name, nbytes in found.items() if name != "activations"} | {"total": found.total}
            for when, found in memory.items()
        },
    }


@pytest.mark.usefixtures("one_host")  # over a wire, how many reductions are on their way at once is a matter of time
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loggers_get_what_is_sent_and_held_next_to_the_plan(world_size: int) -> None:
    def every(rank: int) -> dict[tuple[int, int], dict[str, Any]]:
        return {(stage, accumulate): observe(rank, stage, accumulate) for stage in STAGES for accumulate in (1, 2)}

    for rank, runs in enumerate(run_world(world_size, every, timeout=120)):
        for setting, found in runs.items():
            where = f"rank {rank} of {world_size}, (stage, micro-steps) {setting}"
            first, second = found["logged"]
            assert first == second, where
            assert list(first) == [2, 3, 5], where  # the third step, and every other one: the fourth, and the sixth
            assert found["left"] == 0, where
            for metrics in first.values():
                check(metrics, found, world_size, where)


def check(metrics: dict[str, float], found: dict[str, Any], world_size: int, where: str) -> None:
    for kind, plan in found["traffic"].items():
        assert metrics[f"zero/traffic/{kind}/calls"] == plan.calls, f"{where}, {kind}"
        assert metrics[f"zero/traffic/{kind}/nbytes"] == plan.nbytes, f"{where}, {kind}"
        assert metrics[f"zero/traffic/{kind}/expected_calls"] == plan.calls, f"{where}, {kind}"
        assert metrics[f"zero/traffic/{kind}/expected_nbytes"] == plan.nbytes, f"{where}, {kind}"
        assert metrics.get(f"zero/traffic/{kind}/ratio") == (1.0 if world_size > 1 else None), f"{where}, {kind}"
    for category, nbytes in found["memory"]["rest"].items():
        assert metrics[f"zero/memory/expected_rest/{category}"] == nbytes, f"{where}, {category}"
        if category not in ("raw_gradients", "temporaries"):
            assert metrics[f"zero/memory/rest/{category}"] == nbytes, f"{where}, {category}"
    for category, nbytes in found["memory"]["peak"].items():
        assert metrics[f"zero/memory/expected_peak/{category}"] == nbytes, f"{where}, {category}"
    assert metrics["zero/memory/rest/ratio"] == 1.0, where
    assert metrics["zero/memory/rest/total"] <= metrics["zero/memory/peak/total"], where
    most = metrics["zero/memory/expected_peak/total"] + found["second"]
    assert metrics["zero/memory/peak/total"] <= most, where
    if sys.platform == "linux":
        assert 2**20 < metrics["zero/memory/process/now"] <= metrics["zero/memory/process/peak"], where


@pytest.mark.parametrize("kind", ["host", "files"])
def test_offloaded_bytes_are_shown_where_they_rest(kind: str, tmp_path: Path) -> None:
    def run(rank: int) -> dict[str, float]:
        os.chdir(tmp_path)
        offload = HostOffload() if kind == "host" else NvmeOffload(path="files", buffer_mib=1)
        _, (notes, _) = watched(2, offload=offload)
        return ours(notes)[5]

    (tmp_path / "files").mkdir()
    for metrics in run_world(2, run):
        for category in ("weights", "masters", "gradients", "optimizer", "buffers"):
            assert metrics[f"zero/memory/host/{category}"] == metrics[f"zero/memory/expected_host/{category}"], category
        assert (metrics["zero/memory/host/masters"] > 0) == (kind == "host")
        assert metrics["zero/memory/host/gradients"] > 0
        assert (metrics.get("zero/memory/disk/total", 0) > 0) == (kind == "files")
        assert metrics.get("zero/memory/disk/total") == metrics.get("zero/memory/expected_disk/total")
        assert metrics["zero/memory/rest/ratio"] == 1.0
        assert metrics["zero/memory/rest/optimizer"] == 0


MAKES = {
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-4, amsgrad=True),
    "muon": lambda module: torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit_gradients_and_other_optimizers_are_what_the_plan_says(stage: int) -> None:
    def run(rank: int) -> dict[str, dict[str, float]]:
        found = {}
        for name, make in MAKES.items():
            probe = Probe(case("blocks", lambda: Stack(Block(), Block())), make)
            plugins = ZeroPrecision("bf16-mixed", reduce_dtype="bfloat16")
            _, (notes, _) = watched(stage, probe=probe, options={"plugins": plugins})
            found[name] = ours(notes)[5]
        return found

    for found in run_world(2, run):
        for name in ("momentum", "amsgrad"):
            metrics = found[name]
            assert metrics["zero/memory/rest/ratio"] == 1.0, name
            for category in ("parameters", "masters", "gradients", "optimizer", "slots", "gradient_slots"):
                measured, expected = (metrics[f"zero/memory/{when}/{category}"] for when in ("rest", "expected_rest"))
                assert measured == expected, f"{name}, {category}"
        assert found["momentum"]["zero/memory/rest/optimizer"] * 3 == found["amsgrad"]["zero/memory/rest/optimizer"]
        assert found["muon"]["zero/memory/rest/optimizer"] > 0
        assert found["muon"]["zero/traffic/all_to_all/calls"] > 0  # logged, though the plan says nothing of it


class WideHead(torch.nn.Module):
    """Most parameters are those of the root, whose gradients are the last ones that a backward reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(hidden=8192) for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, 16384)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)[..., :WIDTH]  # type: ignore[no-any-return]


def test_a_peak_is_that_of_one_moment() -> None:
    def run(rank: int) -> None:
        notes = Notes()
        options = {"logger": notes, "log_every_n_steps": 1}
        probe = Probe(case("wide", WideHead))
        fit(probe, stage=3, micro_steps=4, callbacks=[MemoryMonitor(1)], options=options)
        metrics = ours(notes)[3]
        peak = metrics["zero/memory/peak/total"]
        planned = metrics["zero/memory/expected_peak/total"] - metrics["zero/memory/expected_peak/raw_gradients"]
        assert metrics["zero/memory/rest/total"] < peak < 1.002 * planned  # what rounds carry is not planned

    run_world(2, run)


# ---------------------------------------------------------------------------------------------------------- mismatches


class Reader(Probe):
    """Looks at a whole gradient in some steps."""

    def __init__(self, reads: tuple[int, ...]) -> None:
        super().__init__(ZOO["gpt_tied"])
        self.reads = reads

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step in self.reads:
            full_gradient(self, "model." + next(name for name, _ in self.model.named_parameters()))


def test_a_step_that_sends_more_is_warned_of_once() -> None:
    def run(rank: int) -> tuple[list[str], list[float]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, (notes, _) = watched(1, 8, every=1, probe=Reader((3, 5)))
        texts = [
            str(warning.message) for warning in caught if "sent something else than planned" in str(warning.message)
        ]
        return texts, [metrics["zero/traffic/all_gather/ratio"] for metrics in ours(notes).values()]

    for texts, ratios in run_world(2, run):
        assert len(texts) == 1
        assert "all_gather: " in texts[0]
        assert "reduce_scatter" not in texts[0]
        assert [ratio > 1 for ratio in ratios] == [False, True, False, True, False, False]


class Validated(Probe):
    """Validates between steps, which leaves other units resident than a step does."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.case.loss(self.model, batch)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([self.case.batch(0, 0)], batch_size=None)


def test_validation_between_steps_is_no_mismatch() -> None:
    """Warnings are errors."""

    def run(rank: int) -> dict[int, dict[str, float]]:
        _, (notes, _) = watched(3, 8, every=1, probe=Validated(ZOO["gpt_tied"]), options={"val_check_interval": 2})
        return ours(notes)

    for found in run_world(2, run):
        assert {metrics["zero/traffic/reduce_scatter/ratio"] for metrics in found.values()} == {1.0}
        # After validation the root is there already: that is less than the plan says, not more.
        ratios = [metrics["zero/traffic/all_gather/ratio"] for metrics in found.values()]
        assert 1.0 in ratios
        assert max(ratios) == 1.0


def test_validation_inside_of_a_step_is_not_the_step_s() -> None:
    """Between two of its micro-steps. Warnings are errors."""

    def run(rank: int) -> tuple[list[float], int]:
        options = {"accumulate_grad_batches": 4, "val_check_interval": 5}
        trainer, (notes, _) = watched(3, 24, every=1, probe=Validated(ZOO["gpt_tied"]), options=options)
        ratios = [metrics.get("zero/traffic/all_gather/ratio", 0.0) for metrics in ours(notes).values()]
        return ratios, observers(trainer)

    for (third, fourth, fifth, sixth), left in run_world(2, run):
        # Batches 9-12, 13-16, 17-20, 21-24; validation after 5, 10, 15 and 20. Memory is measured in all steps.
        assert (third, fourth) == (0.0, 0.0)
        assert fifth == 1.0
        assert 0.0 < sixth < 1.0  # the root is there already
        assert left == 0


class TwoByHand(Probe):
    """Two optimizers, two steps for each batch."""

    def __init__(self) -> None:
        super().__init__(case("two", lambda: Stack(Block(), Block())))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            loss = self.case.loss(self.model, batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        layers = self.model.layers
        first = torch.optim.Adam(layers[0].parameters(), lr=0.01, eps=1e-4)
        rest = [p for p in self.model.parameters() if all(p is not q for q in layers[0].parameters())]
        return [first, torch.optim.SGD(rest, lr=0.01, momentum=0.9)]


def test_steps_by_hand_are_counted_but_not_predicted() -> None:
    def run(rank: int) -> dict[int, dict[str, float]]:
        _, (notes, _) = watched(3, probe=TwoByHand())
        return ours(notes)

    for found in run_world(2, run):
        assert list(found) == [2, 3, 5]
        for metrics in found.values():
            assert metrics["zero/traffic/all_gather/nbytes"] > 0
            assert not [name for name in metrics if "traffic" in name and ("expected" in name or "ratio" in name)]
            # Each optimizer counts for its own parameters. The last one's gradients have been cleared, and the root has
            # been gathered behind its step.
            for category in ("parameters", "masters", "optimizer"):
                assert metrics[f"zero/memory/rest/{category}"] == metrics[f"zero/memory/expected_rest/{category}"]
            assert metrics["zero/memory/rest/gradients"] < metrics["zero/memory/expected_rest/gradients"]


# ----------------------------------------------------------------------------------------------- nothing left, no toll


class Looks(pl.Callback):
    """How many observers there are in the middle of each step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        engine = trainer.strategy.engine
        self.found.append((len(engine.collectives.observers), len(engine.means.spans.observers)))


def test_without_monitors_nobody_observes() -> None:
    def run(rank: int) -> list[list[tuple[int, int]]]:
        plain, monitored = Looks(), Looks()
        fit(Probe(ZOO["gpt_tied"]), stage=3, micro_steps=6, callbacks=[plain])
        monitors = [CommunicationMonitor(5), MemoryMonitor(4)]
        fit(Probe(ZOO["gpt_tied"]), stage=3, micro_steps=6, callbacks=[*monitors, monitored])
        return [plain.found, monitored.found]

    for plain, monitored in run_world(2, run):
        assert plain == [(0, 0)] * 6
        # Collectives are counted all the time; spans are observed in the third step and the fourth.
        assert monitored == [(1, 0), (1, 0), (1, 1), (1, 1), (1, 0), (1, 0)]


class Fails(Probe):
    """Raises in the third step, where everybody observes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("trouble")
        return super().training_step(batch, batch_idx)


def test_an_error_leaves_no_observer_behind() -> None:
    def run(rank: int) -> tuple[int, list[int]]:
        probe, monitors = Fails(ZOO["gpt_tied"]), [CommunicationMonitor(1), MemoryMonitor(1)]
        with pytest.raises(ArithmeticError, match="trouble"):
            fit(probe, stage=3, micro_steps=4, callbacks=monitors)
        left = observers(probe.trainer)
        notes = Notes()
        fit(
            Probe(ZOO["gpt_tied"]),
            stage=3,
            micro_steps=4,
            callbacks=monitors,
            options={"logger": notes, "log_every_n_steps": 2},
        )
        return left, list(ours(notes))

    for left, steps in run_world(1, run):
        assert left == 0
        assert steps == [2, 3]


SCRIPT = """
import json, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_zero
from tests.thorough.extensions.monitors.test_monitors import Notes

class Net(BoringModel):
    def training_step(self, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error")  # until the step is over: see on_train_batch_end
        return super().training_step(batch, batch_idx)
    def on_train_batch_end(self, *args):
        torch.cuda.set_sync_debug_mode("default")

notes = Notes()
monitors = [lightning_zero.CommunicationMonitor(2), lightning_zero.MemoryMonitor(2)]
quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2)
pl.Trainer(
    accelerator="gpu", devices=1, strategy="zero3", max_steps=6, logger=notes, callbacks=monitors, **quiet
).fit(Net())
print("FOUND" + json.dumps(notes.steps))
"""


@needs_gpu
def test_on_a_gpu_nothing_waits_and_bytes_are_the_allocator_s() -> None:
    ended = run_script(["-c", SCRIPT], cwd=ROOT, timeout=240)
    found = {int(step): metrics for step, metrics in json.loads(ended.stdout.rpartition("FOUND")[2]).items()}
    for step in (2, 3, 5):
        metrics = found[step]
        assert metrics["zero/memory/rest/ratio"] == 1.0
        assert metrics["zero/memory/rest/total"] <= metrics["zero/memory/device/now"]
        assert metrics["zero/memory/device/now"] <= metrics["zero/memory/device/peak"]


# -------------------------------------------------------------------------------------------------------------- people


class Lines(logging.Handler):
    """What Lightning tells people."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Monitor, rank 0" in record.getMessage():
            self.texts.append(record.getMessage())


def told(rank: int, micro_steps: int, logger: Any, summary: bool | None) -> list[str]:
    lines, log = Lines(), logging.getLogger("lightning.pytorch")
    log.addHandler(lines)
    monitors = [CommunicationMonitor(1, summary), MemoryMonitor(1, summary)]
    try:
        fit(
            Probe(ZOO["gpt_tied"]),
            stage=3,
            micro_steps=micro_steps,
            callbacks=monitors,
            options={"logger": logger, "log_every_n_steps": 1},
        )
    finally:
        log.removeHandler(lines)
    return lines.texts


def test_without_a_logger_there_is_a_table_at_the_end() -> None:
    def run(rank: int) -> list[list[str]]:
        settings = [(4, False, None), (4, Notes(), None), (4, Notes(), True), (4, False, False), (2, False, None)]
        return [told(rank, *setting) for setting in settings]

    first, second = run_world(2, run)
    (traffic, memory), logged, (asked, _), unwanted, (short, _) = first
    assert second == [[]] * 5
    assert logged == unwanted == []
    assert traffic.startswith("CommunicationMonitor, rank 0 of 2\n\nthe last step that was measured")
    assert asked.startswith("CommunicationMonitor, rank 0 of 2\n\nthe last step that was measured")
    rows = {words[0]: words[1:] for words in map(str.split, (traffic + memory).splitlines()) if words}
    assert rows["zero/traffic/all_gather/ratio"] == rows["zero/memory/rest/ratio"] == ["1", "-"]
    calls, planned = rows["zero/traffic/reduce_scatter/calls"]
    assert calls == planned > "0"
    total = rows["zero/memory/rest/total"]
    assert total[:2] == total[2:]  # a size, and by plan
    assert "no step was measured; the first one that is would have been step 3" in short


@pytest.mark.parametrize("monitor", [CommunicationMonitor, MemoryMonitor])
def test_another_strategy_is_named(monitor: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, callbacks=[monitor()], barebones=False
    )
    with pytest.raises(ValueError, match=f"{monitor.__name__} .* runs SingleDeviceStrategy"):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("every", [0, -1, True])
def test_a_step_count_has_to_be_one(every: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps must be 1 or more"):
        MemoryMonitor(every_n_steps=every)


YAML = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy: zero3
  callbacks:
    - class_path: lightning_zero.MemoryMonitor
      init_args: {every_n_steps: 10}
    - class_path: lightning_zero.CommunicationMonitor
"""


def test_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script"])
    file = tmp_path / "config.yaml"
    file.write_text(YAML)
    cli = ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])
    monitors = [c for c in cli.trainer.callbacks if isinstance(c, (MemoryMonitor, CommunicationMonitor))]

    assert [(type(m), m.every_n_steps, m.summary) for m in monitors] == [
        (MemoryMonitor, 10, None),
        (CommunicationMonitor, None, None),
    ]
