"""What users write as arguments of the strategies: other words for our settings, and names of other strategies."""

from __future__ import annotations

import inspect
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from torch import nn

import lightning_zero
from lightning_zero import (
    ActivationPolicy,
    CheckpointPolicy,
    HostOffload,
    LoaderPolicy,
    NvmeOffload,
    ZeroCLI,
    ZeroFabricStrategy,
    ZeroStrategy,
    build_plan,
    measure_activations,
)
from lightning_zero.config import validate_units


class Block(nn.Linear):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(4, 4)


class Other(Block):
    """Another one."""


AGAIN = ActivationPolicy(checkpointing=["Block"])
BOTH: Any = [ZeroStrategy, ZeroFabricStrategy]


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"stage": "2"}, {"stage": 2}),
        ({"units": "Block"}, {"units": ["Block"]}),
        ({"units": Block}, {"units": ["Block"]}),
        ({"units": {Other, Block}}, {"units": ["Block", "Other"]}),
        ({"units": [Other, "my.models.Block", Block]}, {"units": ["Other", "Block"]}),
        ({"offload": "cpu"}, {"offload": HostOffload(parameters=True)}),
        ({"offload": True}, {"offload": HostOffload(parameters=True)}),
        ({"offload": "cpu", "stage": "1"}, {"offload": HostOffload(), "stage": 1}),
        ({"offload": True, "stage": 2}, {"offload": HostOffload(), "stage": 2}),
        ({"offload": False}, {}),
        ({"offload": NvmeOffload("/local")}, {"offload": NvmeOffload(path="/local")}),
        ({"activations": "units"}, {"activations": ActivationPolicy(checkpointing="units")}),
        ({"activations": ActivationPolicy("units")}, {"activations": ActivationPolicy(checkpointing="units")}),
        ({"activations": ["Block"]}, {"activations": AGAIN}),
        ({"activations": Block}, {"activations": AGAIN}),
        ({"activations": ActivationPolicy({Block})}, {"activations": AGAIN}),
        ({"checkpoint": "consolidated"}, {"checkpoint": CheckpointPolicy(format="consolidated")}),
        ({"checkpoint": CheckpointPolicy("consolidated")}, {"checkpoint": CheckpointPolicy(format="consolidated")}),
        ({"checkpoint": "sharded"}, {}),
    ],
)
def test_other_words_for_a_setting(strategy: Any, given: dict[str, Any], meant: dict[str, Any]) -> None:
    made = strategy(**given)
    assert made.settings == strategy(**meant).settings
    assert ZeroStrategy(**given).offload == made.settings.offload


@pytest.mark.parametrize("word", ["error", "stop"])
def test_a_word_is_for_all_loaders(word: Any) -> None:
    assert ZeroStrategy(loaders=word).loaders == LoaderPolicy(training=word, evaluation=word)
    with pytest.raises(ValueError, match=r"LoaderPolicy\.training must be one of error, stop, got 'join'"):
        ZeroStrategy(loaders="join")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", BOTH)
def test_a_timeout_is_a_time_or_seconds(strategy: Any) -> None:
    for timeout in (60, 60.0, timedelta(minutes=1)):
        assert strategy(timeout=timeout)._timeout == timedelta(minutes=1)
    assert strategy(timeout=None)._timeout is None
    for wrong in (0, -1, True, "60", float("nan"), float("inf"), 1e300, timedelta(0), timedelta(seconds=-3)):
        with pytest.raises(ValueError, match=r"^timeout must be a positive number of seconds or a timedelta, got "):
            strategy(timeout=wrong)


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": "nvme"}, r"offload must be a HostOffload, an NvmeOffload\('/local'\) or 'cpu', got 'nvme'"),
        ({"offload": "gpu"}, r"offload must be a HostOffload, an .* got 'gpu'"),
        ({"offload": 1}, r"offload must be a HostOffload, an .* got 1"),
        ({"stage": "4"}, r"ZeRO stage must be one of 1, 2, 3, got 4"),
        ({"stage": "three"}, r"ZeRO stage must be one of 1, 2, 3, got 'three'"),
        ({"units": 3}, r"units must be a list of class names"),
        ({"units": {Block, 3}}, r"units must hold class names such as 'Block', got 3"),
        ({"units": set()}, r"units must name at least one class, .* got set\(\)"),
        ({"activations": True}, r"ActivationPolicy.checkpointing, .* must be a list of class names .*, got True"),
        ({"checkpoint": "full"}, r"CheckpointPolicy.format must be one of sharded, consolidated, got 'full'"),
        ({"compression": "int8"}, r"got 'int8'\. Write Compression\(gradients='int8'\)"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(strategy: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(**given)


def test_loaders_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"LoaderPolicy\.training must be one of error, stop, got 'wait'"):
        ZeroStrategy(loaders="wait")  # type: ignore[arg-type]


def test_a_plan_takes_them_too() -> None:
    model = nn.Sequential(Block(), Other())
    with_names = build_plan(model, world_size=2, units=["Block"], offload=HostOffload(parameters=True))
    assert build_plan(model, world_size=2, units={Block}, offload="cpu", stage="3") == with_names  # type: ignore[arg-type]
    assert measure_activations(model, model[0].weight, policy=[Block]) == measure_activations(
        model, model[0].weight, policy=AGAIN
    )
    assert validate_units({Other, Block}) == validate_units({Block, Other})  # on every rank the same


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of other strategies


def test_arguments_of_another_strategy_are_named() -> None:
    for strategy in BOTH:
        with pytest.raises(TypeError, match="unexpected keyword argument 'cpu_offload'"):
            strategy(cpu_offload=True)


def test_what_the_answers_say_to_write_can_be_written() -> None:
    """Arguments that a sentence shows are accepted, by name."""
    for shown in (
        {"offload": NvmeOffload("/local", io_threads=4)},
        {"offload": NvmeOffload("/local", parameters=True), "stage": 3},
        {"offload": NvmeOffload("/local", buffer_mib=256.0)},
        {"activations": ActivationPolicy("units", offload=True)},
        {"shard_within": 8},
        {"stage": 3, "secondary_shards": True},
        {"compression": lightning_zero.Compression(weights="int8", gradients="int4")},
    ):
        ZeroStrategy(**shown)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


@pytest.mark.parametrize(
    ("cli", "settings", "meant"),
    [
        (
            ZeroCLI,
            "{units: Block, offload: cpu, activations: [Block], checkpoint: consolidated, timeout: 60}",
            {"units": ["Block"], "offload": "cpu", "activations": AGAIN, "checkpoint": "consolidated", "timeout": 60},
        ),
        (
            LightningCLI,
            "{stage: '2', units: [Block, Other], offload: true, activations: units, timeout: '0:01:00'}",
            {"stage": 2, "units": ["Block", "Other"], "offload": "cpu", "activations": "units", "timeout": 60},
        ),
        (
            LightningCLI,
            "{activations: {checkpointing: Block}, loaders: stop}",
            {"activations": AGAIN, "loaders": "stop"},
        ),
    ],
    ids=["ZeroCLI", "LightningCLI", "nested"],
)
def test_a_configuration_takes_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: type[LightningCLI], settings: str, meant: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script"])
    file, expected = tmp_path / "config.yaml", ZeroStrategy(**meant)
    text = "strategy: {class_path: lightning_zero.ZeroStrategy, init_args: %s}"
    file.write_text(f"trainer: {{accelerator: cpu, devices: 1, logger: false, {text % settings}}}")
    for _ in range(2):  # what LightningCLI saves beside the checkpoints gives the same again
        made = cli(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])
        strategy = made.trainer.strategy
        assert strategy.settings == expected.settings
        assert (strategy._timeout, strategy.loaders) == (expected._timeout, expected.loaders)
        file.write_text(made.parser.dump(made.config))


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_the_name_with_nvme_has_the_path_of_deepspeed() -> None:
    """What is not there is refused at set-up, as for any path."""
    expected = inspect.signature(DeepSpeedStrategy).parameters["nvme_path"].default
    assert StrategyRegistry["zero3_offload_nvme"]["init_params"]["offload"] == NvmeOffload(expected, parameters=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Trainer(strategy="zero_3", accelerator="cpu"), "write strategy='zero3'"),
        (lambda: Fabric(strategy="zero2-offload", accelerator="cpu"), "write strategy='zero2_offload'"),
        (lambda: lightning_zero.ema_update(nn.Module(), nn.Module(), 0.9, buffers=True), "'buffers'.*copy or average"),
        (lambda: lightning_zero.full_gradients(nn.Module(), ["a"]).__enter__(), r"`full_gradients\(module\.head\)`"),
        (lambda: lightning_zero.ZeroPrecision("bf16-true", buffers="keep"), "'buffers'.*cast your parameters yourself"),
        (lambda: lightning_zero.consolidate_checkpoint("a", "b", overwrite=True), "'overwrite'.*write to another name"),
        (lambda: lightning_zero.NoBatch, r"LoaderPolicy\(training=\"stop\"\) ends all ranks"),
    ],
)
def test_what_earlier_versions_had_says_what_to_do_now(call: Any, message: str) -> None:
    with pytest.raises((ImportError, TypeError, ValueError), match=message):
        call()


def test_an_error_inside_of_a_function_is_its_own() -> None:
    with pytest.raises(TypeError) as caught:
        lightning_zero.ema_update(BoringModel(), BoringModel(), "half")
    assert "Buffers stay" not in str(caught.value)
