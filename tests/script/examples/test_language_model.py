"""The example: its data, its model, and runs as a user starts them."""

from __future__ import annotations

import csv
import functools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from examples.language_model import (
    VOCABULARY,
    BitsPerByte,
    ByteGPT,
    Rotary,
    SourceText,
    Windows,
    generate,
)
from tests.helpers.script import ROOT, Finished, run_forked

CONFIGS = sorted((ROOT / "configs").glob("zero*.yaml"))


def tiny_model(**arguments: object) -> ByteGPT:
    torch.manual_seed(0)
    settings = {"dim": 16, "layers": 2, "heads": 2, "context": 8}
    return ByteGPT(**{**settings, **arguments})  # type: ignore[arg-type]


def write_files(folder: Path, count: int = 20) -> Path:
    """``count`` text files of 26 * 40 = 1040 bytes."""
    for index in range(count):
        file = folder / f"part{index % 3}" / f"module_{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function_{index:04d}(x): pass\n"[:26].ljust(26) * 40)
    return folder


# --------------------------------------------------------------------------------------------------------------- data


def test_a_file_is_on_one_side_wherever_the_folder_is(tmp_path: Path) -> None:
    first, second = write_files(tmp_path / "a"), write_files(tmp_path / "elsewhere" / "b")

    sides = []
    for folder in (first, second):
        data = SourceText(str(folder), suffixes=[".txt"], validation_share=0.3)
        training, validation = data.files()
        assert len(training) + len(validation) == 20
        assert not set(training) & set(validation)
        sides.append([file.relative_to(folder) for file in validation])
    assert sides[0] == sides[1]


def test_standard_library_is_found_without_tests_and_installed_packages() -> None:
    training, validation = SourceText().files()

    assert len(training) > 200 > len(validation) > 10
    parts = {part for file in training + validation for part in file.relative_to(SourceText().path).parts[:-1]}
    assert not parts & {"site-packages", "dist-packages", "test", "tests"}


def test_suffixes_and_excluded_folders(tmp_path: Path) -> None:
    folder = write_files(tmp_path)
    (folder / "notes.md").write_text("not this")
    data = SourceText(str(folder), suffixes=[".txt"], exclude=["part0"], validation_share=0.3)

    training, validation = data.files()

    assert {file.parent.name for file in training + validation} == {"part1", "part2"}


def test_every_byte_but_the_first_is_predicted_once() -> None:
    windows = Windows(torch.arange(50, dtype=torch.uint8), window=7)

    assert len(windows) == 7  # (50 - 1) // 7
    predicted = torch.cat([windows[index][1:] for index in range(len(windows))])
    assert predicted.tolist() == list(range(1, 50))
    assert {len(windows[index]) for index in range(7)} == {8}


def test_validation_windows_are_spread_over_the_files(tmp_path: Path) -> None:
    data = SourceText(str(write_files(tmp_path)), [".txt"], window=16, validation_share=0.3, validation_windows=10)
    data.setup("fit")

    held_out = data.held_out_bytes // 16
    assert len(data.validation) == 10
    assert data.validation.indices[0] == 0
    assert data.validation.indices[-1] >= held_out * 8 // 10
    assert [len(batch) for batch in data.val_dataloader()] == [4, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suffixes": [".nothing"]}, "0 training and 0 validation files"),
        ({"validation_share": 1e-9}, "0 validation files"),
        ({"window": 10**6}, "not one window"),
        ({"validation_share": 0.0}, r"validation_share must be between 0 and 1"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_unusable_data_is_named(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    folder = write_files(tmp_path)

    with pytest.raises(ValueError, match=message):
        SourceText(**{"path": str(folder), "suffixes": [".txt"], "validation_share": 0.3, **arguments}).setup("fit")


# -------------------------------------------------------------------------------------------------------------- model


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_bits_per_byte_weighs_bytes_alike_across_processes() -> None:
    """The mean of the processes' means would be 1.5 bits here: sums and counts are reduced, not means."""
    values = [torch.full((30,), math.log(2.0)), torch.full((10,), 2 * math.log(2.0))]
    ranks = [BitsPerByte(), BitsPerByte()]
    for rank, value in zip(ranks, values, strict=True):
        rank.update(value)

    ranks[0]._reduce_states(ranks[1].metric_state)  # what the states' `dist_reduce_fx` does between processes
    assert ranks[0].compute() == pytest.approx((30 * 1 + 10 * 2) / 40)


def test_rotary_sees_distances_only_and_stays_in_float32() -> None:
    torch.manual_seed(0)
    rotary = Rotary(head_dim=8, context=16)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 16, 8)
    scores = rotary(query) @ rotary(key).transpose(-1, -2)

    for distance in range(8):
        diagonal = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert rotary(query.bfloat16()).dtype == torch.bfloat16
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    assert not rotary.state_dict()


@torch.no_grad()
def test_a_byte_does_not_see_later_bytes() -> None:
    model = tiny_model()
    text = torch.randint(256, (1, 8), dtype=torch.uint8)
    other = text.clone()
    other[0, 5] += 1

    before, after = model(text), model(other)

    assert before.shape == (1, 8, VOCABULARY)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_new_model_is_near_uniform() -> None:
    with torch.no_grad():
        nats = tiny_model()._nats(torch.randint(256, (4, 9), dtype=torch.uint8))

    assert nats.shape == (4 * 8,)
    assert nats.mean().item() / math.log(2.0) == pytest.approx(8.0, abs=0.2)


def test_head_is_tied_on_request_only() -> None:
    untied, tied = tiny_model(), tiny_model(tied=True)

    assert untied.head.weight is not untied.embedding.weight
    assert tied.head.weight is tied.embedding.weight
    numel = {model: sum(parameter.numel() for parameter in model.parameters()) for model in (untied, tied)}
    assert numel[untied] - numel[tied] == 256 * 16


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_calls_the_model_once_per_byte_and_repeats_itself(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape))

    first, second = generate(model, b"abc", 12, seed=1), generate(model, b"abc", 12, seed=1)

    assert first == second
    assert first.startswith(b"abc")
    assert len(first) == 3 + 12
    # The prompt grows by one byte a call until the context of 8 bytes is full.
    assert calls == 2 * [(1, min(3 + index, 8)) for index in range(12)]


# --------------------------------------------------------------------------------------------------------------- runs


def test_configurations_differ_in_the_strategy_only() -> None:
    strategies, rest = {}, []
    for path in CONFIGS:
        config = yaml.safe_load(path.read_text())
        strategies[path.stem] = config["trainer"].pop("strategy")
        rest.append(config)

    long = {name: strategies.pop(name) for name in ("zero2", "zero2_offload", "zero3_nvme")}
    assert {given["class_path"] for given in long.values()} == {"lightning_zero.ZeroStrategy"}
    assert [given["init_args"]["stage"] for given in long.values()] == [2, 2, 3]
    assert strategies == {name: name for name in ("zero1", "zero1_offload", "zero3", "zero3_offload")}
    assert all(other == rest[0] for other in rest)


STEPS = 12


def run_example(command: str, config: Path, data: Path, folder: Path, *options: str) -> Finished:
    """A small model on the text files in ``data``, with the configuration as it is otherwise."""
    return run_forked(
        [
            str(ROOT / "examples" / "language_model.py"),
            command,
            f"--config={config}",
            f"--trainer.max_steps={STEPS}",
            "--trainer.val_check_interval=6",
            "--trainer.log_every_n_steps=1",
            f"--data.path={data}",
            "--data.validation_share=0.25",
            "--data.window=64",
            "--data.validation_windows=24",
            "--model.dim=32",
            "--model.layers=2",
            "--model.warmup_steps=5",
            "--report.length=20",
            *options,
        ],
        cwd=folder,
        timeout=240,
        ranks=2,
    )


def losses(folder: Path) -> list[str]:
    """The training losses in the metrics file, as written."""
    (file,) = folder.glob("runs/language_model/version_0/metrics.csv")
    with file.open() as lines:
        return [row["train/loss"] for row in csv.DictReader(lines) if row["train/loss"]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's own source, as it is now: nobody edits it between two runs."""
    ignore = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "lightning_zero", tmp_path_factory.mktemp("data") / "source", ignore=ignore)


@pytest.fixture(scope="module")
def ran(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Finished]]:
    """A configuration, run once in a folder of its own."""

    @functools.cache
    def run(name: str) -> tuple[Path, Finished]:
        folder = tmp_path_factory.mktemp(name)
        here = [f"--trainer.strategy.init_args.offload.path={folder}"] if name == "zero3_nvme" else []
        return folder, run_example("fit", ROOT / "configs" / f"{name}.yaml", source, folder, *here)

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(path.stem, marks=() if path.stem == "zero3" else pytest.mark.thorough) for path in CONFIGS],
)
def test_run_reports_what_was_learnt(ran: Callable[[str], tuple[Path, Finished]], name: str) -> None:
    folder, (stdout, stderr) = ran(name)

    (model,) = re.findall(rf"^Validation bits per byte after {STEPS} steps: (\d\.\d+)$", stdout, re.MULTILINE)
    (unigram,) = re.findall(r"^A unigram model on the same bytes: (\d\.\d+)$", stdout, re.MULTILINE)
    (lower,) = re.findall(r"^Lower by: (-?\d\.\d+) bits per byte", stdout, re.MULTILINE)
    assert 1.0 < float(model) < 8.0
    assert 4.0 < float(unigram) < 6.0
    assert float(unigram) - float(model) == pytest.approx(float(lower), abs=2e-3)
    assert stdout.count("A sample:\n") == 1  # the first process alone prints
    assert stdout.count("def read(self, ") == 1

    (checkpoint,) = folder.glob("runs/language_model/checkpoints/*")
    assert checkpoint.name == "last.ckpt"
    (printed,) = re.findall(r"^Checkpoint: (.+)$", stdout, re.MULTILINE)
    assert folder / printed == checkpoint
    # With two processes a sum has two terms, whose order does not matter: losses are equal to the bit in all stages.
    assert losses(folder) == losses(ran("zero3")[0])
    assert len(losses(folder)) == STEPS
    assert "Warning" not in stderr, stderr
    assert sorted(path.name for path in folder.iterdir()) == ["runs"]


def test_checkpoint_is_a_folder_that_can_be_validated(
    ran: Callable[[str], tuple[Path, Finished]], source: Path, tmp_path: Path
) -> None:
    folder, fitted = ran("zero3")
    (checkpoint,) = folder.glob("runs/language_model/checkpoints/*")
    assert checkpoint.is_dir()

    stdout, _ = run_example("validate", ROOT / "configs/zero3.yaml", source, tmp_path, f"--ckpt_path={checkpoint}")

    (fitted_bits,) = re.findall(r"Validation bits per byte after \d+ steps: (\d\.\d+)", fitted.stdout)
    (validated_bits,) = re.findall(r"val/bits_per_byte\W+(\d\.\d+)", stdout)
    assert float(validated_bits) == pytest.approx(float(fitted_bits), abs=1e-3)
