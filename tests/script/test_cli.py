"""The command line: ``ZeroCLI`` and the Trainer's commands. For ``lightning-zero plan`` see ``extensions/planner``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_zero import ZeroCLI, ZeroStrategy, __version__
from lightning_zero.cli import main
from lightning_zero.config import CheckpointPolicy, HostOffload, NvmeOffload
from tests.helpers.script import run_forked, run_script, start_forked

BORING = "--model=lightning.pytorch.demos.boring_classes.BoringModel"


# ------------------------------------------------------------------------------------------------------------ ZeroCLI


@pytest.fixture
def _bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when it gets arguments from Python while the process has arguments too."""
    monkeypatch.setattr(sys, "argv", ["script"])


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("defaults", "arguments", "expected"),
    [
        ({}, [], ZeroStrategy),
        ({}, ["--trainer.strategy=auto"], SingleDeviceStrategy),
        ({"strategy": "auto"}, ["--trainer.strategy=zero2"], ZeroStrategy),
    ],
)
def test_default_strategy(defaults: dict[str, str], arguments: list[str], expected: type) -> None:
    cli = ZeroCLI(
        BoringModel,
        run=False,
        trainer_defaults={"accelerator": "cpu", "devices": 1, "logger": False, **defaults},
        seed_everything_default=False,
        args=arguments,
    )

    assert type(cli.trainer.strategy) is expected


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("strategy", "arguments", "expected"),
    [
        ("auto", ["--trainer.strategy=zero1", "--trainer.strategy.bucket_mib=3"], ZeroStrategy(1, bucket_mib=3.0)),
        ("zero2", ["--trainer.strategy.bucket_mib=3"], ZeroStrategy(2, bucket_mib=3.0)),
        (
            "zero2",
            ["--trainer.strategy.checkpoint.async_save=true", "--trainer.strategy.prefetch=0"],
            ZeroStrategy(2, checkpoint=CheckpointPolicy(async_save=True), prefetch=0),
        ),
        ("{class_path: zero3, init_args: {prefetch: 1}}", [], ZeroStrategy(3, prefetch=1)),
        (
            "{class_path: lightning_zero.zero3, init_args: {prefetch: 1}}",
            ["--trainer.strategy.bucket_mib=3"],
            ZeroStrategy(3, prefetch=1, bucket_mib=3.0),
        ),
        (
            "{class_path: lightning_zero.ZeroStrategy, init_args: {stage: 3, offload: "
            "{class_path: lightning_zero.HostOffload, init_args: {parameters: true, pin_mib: 64}}}}",
            [],
            ZeroStrategy(3, offload=HostOffload(parameters=True, pin_mib=64.0)),
        ),
        (
            "zero1",
            ["--trainer.strategy=zero2_offload", "--trainer.strategy.bucket_mib=3"],
            ZeroStrategy(2, bucket_mib=3.0, offload=HostOffload()),
        ),
        (
            "zero3_offload",
            ["--trainer.strategy.offload.pin_mib=64"],
            ZeroStrategy(3, offload=HostOffload(parameters=True, pin_mib=64.0)),
        ),
        (
            "zero3",
            ["--trainer.strategy.offload=lightning_zero.NvmeOffload", "--trainer.strategy.offload.path=/var/tmp"],
            ZeroStrategy(3, offload=NvmeOffload(path="/var/tmp")),
        ),
    ],
)
def test_a_name_takes_arguments(tmp_path: Path, strategy: str, arguments: list[str], expected: ZeroStrategy) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"trainer: {{accelerator: cpu, devices: 1, logger: false, strategy: {strategy}}}")
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}", *arguments])

    assert type(cli.trainer.strategy) is ZeroStrategy
    assert cli.trainer.strategy.settings == expected.settings
    # What LightningCLI saves beside the checkpoints gives the same again, in ours too.
    file.write_text(cli.parser.dump(cli.config))
    again = ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])
    assert again.trainer.strategy.settings == expected.settings


STRATEGY = "--trainer.strategy="
OFFLOAD = "class_path: lightning_zero"
CLASS = "strategy: {class_path: lightning_zero.ZeroStrategy, init_args: {%s}}"


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("strategy: {class_path: zer3, init_args: {prefetch: 1}}", [], "zer3"),
        ("strategy: {name: zero3}", [], "trainer.strategy"),
        ("strategy: zero2", ["--trainer.strategy.bucket_mbi=3"], "bucket_mbi"),
        (CLASS % "bucket_mbi: 3", [], "bucket_mbi"),
        (CLASS % "checkpoint: {asnyc_save: true}", [], "asnyc_save"),
        (CLASS % "bucket_mib: much", [], "bucket_mib"),
        (
            CLASS % f"offload: {{{OFFLOAD}.HostOffload, init_args: {{pin_mb: true}}}}",
            [],
            "pin_mb",
        ),
        (CLASS % f"offload: {{{OFFLOAD}.HostOffload, init_args: {{pin_mib: much}}}}", [], "pin_mib"),
        (CLASS % f"offload: {{{OFFLOAD}.NvmeOffload, init_args: {{parameters: true}}}}", [], "are required: path"),
        ("", ["--trainer.strategy.checkpoint.format=shraded"], "shraded"),
        ("", [f"{STRATEGY}zero3", "--trainer.strategy.cpu_offload=true"], "cpu_offload"),
        ("", ["--trainer.stratgy=zero2"], "--trainer.stratgy=zero2"),
        ("", ["--trainer.max_epochs=x"], "trainer.max_epochs"),
    ],
)
def test_a_wrong_option_is_named_without_the_usage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: str,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer:\n  accelerator: cpu\n  devices: 1\n  logger: false\n  {config}\n")
    with pytest.raises(SystemExit) as stopped:
        ZeroCLI(
            BoringModel,
            run=False,
            seed_everything_default=False,
            args=[f"--config={tmp_path / 'config.yaml'}", *arguments],
        )

    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "usage:" not in said


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (f"{STRATEGY}zer3", "invalid strategy name: `strategy='zer3'`"),
        ("--trainer.strategy.bucket_mib=-3", "bucket_mib must be a positive number of MiB, got -3"),
    ],
)
def test_what_a_strategy_refuses_is_an_error_of_python(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[argument])


class Picky(BoringModel):
    """A model of somebody who refuses a setting."""

    def __init__(self, width: int | str = 1) -> None:
        super().__init__()
        raise ValueError(f"width {width} is too small")


@pytest.mark.usefixtures("_bare_command_line")
def test_what_a_model_raises_is_its_own() -> None:
    with pytest.raises(ValueError, match="width 1 is too small"):
        ZeroCLI(Picky, run=False, seed_everything_default=False, args=["--trainer.strategy.bucket_mib=3"])


# ----------------------------------------------------------------------------------------------------------- commands


OPTIONS = {
    "plan": ("--hf-config ", "--device-memory ", "--config FILE ", "--model CLASS ", "--trainer.NAME ", "--help-all "),
    "inspect": ("--tensors ", "--no-verify"),
    "consolidate": ("--format {ckpt,safetensors,huggingface,peft}", "--max-shard-size "),
    **dict.fromkeys(
        ("fit", "validate", "test", "predict"),
        ("--config FILE ", "--model CLASS ", "--trainer.strategy NAME ", "--trainer.NAME ", "--help-all "),
    ),
}


def forbid_imports(folder: Path) -> None:
    """What takes seconds is to import these: programs that start in the folder cannot."""
    for module in ("torch", "lightning", "jsonargparse"):
        (folder / f"{module}.py").write_text("raise RuntimeError(f'{__name__} is imported')")


def test_help_and_version_are_quick(tmp_path: Path) -> None:
    forbid_imports(tmp_path)
    (tmp_path / "lightning-zero").write_text("from lightning_zero.cli import main\nmain()\n")
    assert run_script(["-m", "lightning_zero", "--version"], cwd=tmp_path).stdout == f"lightning-zero {__version__}\n"
    for command in ("", *OPTIONS):
        arguments = [*filter(None, [command]), "--help"]
        stdout, stderr = run_script(["-m", "lightning_zero", *arguments], cwd=tmp_path)
        assert stdout.startswith(f"usage: lightning-zero {command}".rstrip())
        assert all(option in stdout for option in OPTIONS.get(command, OPTIONS)), command
        assert not stderr
    assert run_script(["lightning-zero", "plan", "-h"], cwd=tmp_path).stdout.startswith("usage: lightning-zero plan")


def test_programs_of_others_are_not_asked(tmp_path: Path) -> None:
    forbid_imports(tmp_path)
    (tmp_path / "fit.py").write_text(
        "import sys\ntry:\n    import lightning_zero\nexcept RuntimeError as error:\n    print(error, *sys.argv[1:])\n"
    )
    stdout, _ = run_script(["fit.py", "fit", "--help"], cwd=tmp_path)

    assert re.fullmatch(r"\w+ is imported fit --help\n", stdout)


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_help_all_lists_what_help_leaves_out(tmp_path: Path, command: str) -> None:
    short, _ = run_script(["-m", "lightning_zero", command, "--help"], cwd=tmp_path)
    stdout, _ = run_forked(["-m", "lightning_zero", command, "--help-all"], cwd=tmp_path)

    options = re.findall(r"^  --([\w.-]+) ", short, re.MULTILINE)
    assert len(options) >= 9
    assert all(f"--{option}" in stdout for option in options if "NAME" not in option)
    assert "--trainer.gradient_clip_algorithm " in stdout


@pytest.mark.parametrize(
    ("command", "meant"),
    [("inspct", "Did you mean inspect?"), ("Fit", "Did you mean fit?"), ("xyz", "There are plan, inspect, ")],
)
def test_unknown_command(capsys: pytest.CaptureFixture[str], command: str, meant: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command])

    assert stopped.value.code == 2
    assert f"there is no command {command!r}. {meant}" in capsys.readouterr().err


def test_modules_of_the_current_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lightning-zero").write_text("from lightning_zero.cli import main\nmain()\n")
    (tmp_path / "my_module.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\nclass MyModel(BoringModel):\n    pass\n"
    )
    stdout, _ = run_forked(["bin/lightning-zero", "plan", "--model=my_module.MyModel", "--world_size=2"], cwd=tmp_path)

    assert "Plan for 2" in stdout


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_command_runs_on_two_processes(tmp_path: Path, command: str) -> None:
    _, stderr = run_forked(
        [
            *("-m", "lightning_zero", command, BORING),
            *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"),
            *(f"--trainer.limit_{part}_batches=2" for part in ("train", "val", "test", "predict")),
            *("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"),
        ],
        cwd=tmp_path,
        ranks=2,
    )

    assert "Starting with 2 processes" in stderr


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path: Path) -> None:
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    arguments = ["-m", "lightning_zero", "plan", "--parameters", "7B", "--world-size=8"]
    pid = start_forked(arguments, tmp_path, [pipe, errors])
    os.close(os.open(pipe, os.O_RDONLY))  # as `head` does
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "Traceback" not in errors.read_text()
    assert "BrokenPipe" not in errors.read_text()


def test_to_inspect_imports_no_lightning(tmp_path: Path) -> None:
    """Most of the seconds that it takes would be those."""
    for module in ("lightning", "torchmetrics"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError(f'{__name__} is imported')")
    stderr = run_script(["-m", "lightning_zero", "inspect", "missing.ckpt"], cwd=tmp_path, code=1).stderr
    assert "missing.ckpt" in stderr
    assert "is imported" not in stderr
