"""The command line: ``ZeroCLI``, ``lightning-zero plan`` and the Trainer's commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_zero import ZeroCLI, ZeroStrategy
from lightning_zero.cli import PlanCLI, main
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement
from tests.helpers.script import ROOT, run_script

MODEL = "--model=examples.language_model.ByteGPT"
SMALL = (MODEL, "--model.dim=32", "--model.layers=2")
BORING = "--model=lightning.pytorch.demos.boring_classes.BoringModel"


def plan_cli(*arguments: str) -> PlanCLI:
    return PlanCLI(args=list(arguments), run=False, seed_everything_default=False, load_from_checkpoint_support=False)


# --------------------------------------------------------------------------------------------------------------- plan


def test_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *SMALL, "--world-size=4"])

    printed = capsys.readouterr().out
    assert "blocks" in printed
    assert printed == plan_cli(*SMALL, "--world-size=4").plan().describe() + "\n"


@pytest.mark.parametrize(
    ("arguments", "stage", "world_size"),
    [
        (["--world_size=8"], 3, 8),
        (["--world-size=8", "--stage=2"], 2, 8),
        (["--trainer.devices=4", "--trainer.num_nodes=3", "--trainer.strategy=zero1"], 1, 12),
        (["--trainer.devices=[0,1,5]"], 3, 3),
        (["--trainer.devices=4", "--world_size=5"], 3, 5),
        (["--trainer.strategy=zero1", "--stage=3", "--world_size=1"], 3, 1),
        (["--trainer.strategy=ddp", "--stage=2", "--world_size=2"], 2, 2),
        ([f"--config={ROOT / 'configs' / 'zero1.yaml'}"], 1, 2),
        ([f"--config={ROOT / 'configs' / 'zero2.yaml'}"], 2, 2),
        ([f"--config={ROOT / 'configs' / 'zero3.yaml'}"], 3, 2),
        ([f"--config={ROOT / 'configs' / 'zero2_offload.yaml'}"], 2, 2),
    ],
)
def test_plan_takes_its_settings_from_the_trainer(arguments: list[str], stage: int, world_size: int) -> None:
    plan = plan_cli(MODEL, "--data=examples.language_model.SourceText", *arguments).plan()

    assert plan.placement == Placement.from_stage(stage)
    assert plan.world_size == world_size


def test_plan_takes_the_arguments_of_the_strategy() -> None:
    """Buckets of 0.25 MiB of float32 hold 65,536 elements unless they are one larger parameter."""
    strategy = ("--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=2")

    large = plan_cli(MODEL, "--world_size=2", *strategy).plan()
    small = plan_cli(MODEL, "--world_size=2", *strategy, "--trainer.strategy.bucket_mib=0.25").plan()
    override = plan_cli(MODEL, "--world_size=2", *strategy, "--bucket_mib=0.25").plan()

    assert len(large.units) == 1
    assert len(small.units) > 10
    assert small.fingerprint() == override.fingerprint()


def by_class(*arguments: str) -> list[str]:
    """The strategy by its class, with ``offload`` settings."""
    options = [f"--trainer.strategy.offload.{argument}" for argument in arguments]
    return ["--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=3", *options]


HERE = NvmeOffload(path=".", parameters=True)


@pytest.mark.parametrize(
    ("arguments", "offload"),
    [
        ([], None),
        (["--offload=host", "--stage=2"], HostOffload()),
        (["--offload=host"], HostOffload(parameters=True)),
        (["--offload=nvme"], HERE),
        (["--offload=nvme", "--stage=1"], NvmeOffload(path=".")),
        (["--trainer.strategy=zero1_offload"], HostOffload()),
        (["--trainer.strategy=zero2_offload"], HostOffload()),
        (["--trainer.strategy=zero3_offload"], HostOffload(parameters=True)),
        (["--trainer.strategy=zero3_offload", "--offload=none"], None),
        (["--trainer.strategy=zero3_offload", "--offload=nvme"], HERE),
        (by_class(), None),
        (by_class("parameters=true"), HostOffload(parameters=True)),
        (by_class("path=/data", "buffer_mib=32"), NvmeOffload(path="/data", buffer_mib=32.0)),
        # Of the kind that is configured already: its settings count.
        ([*by_class("path=/data", "buffer_mib=32"), "--offload=nvme"], NvmeOffload(path="/data", buffer_mib=32.0)),
        ([*by_class("path=/data", "buffer_mib=32"), "--offload=host"], HostOffload(parameters=True)),
    ],
)
def test_plan_takes_what_is_offloaded(arguments: list[str], offload: Offload | None) -> None:
    assert plan_cli(*SMALL, "--world_size=2", *arguments).plan().offload == offload


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("zero1_offload", HostOffload()),
        ("zero2_offload", HostOffload(threads=1, pin_mib=4096)),
        ("zero3_offload", HostOffload(parameters=True)),
        ("zero3_nvme", NvmeOffload(path="/var/tmp", parameters=True, buffer_mib=16.0)),
    ],
)
def test_plan_of_a_configuration_with_offload(name: str, offload: Offload) -> None:
    config = ROOT / "configs" / f"{name}.yaml"
    plan = plan_cli(MODEL, "--data=examples.language_model.SourceText", f"--config={config}").plan()

    assert plan.offload == offload
    assert f"Offloaded to the {offload.tier.value}: optimizer" in plan.describe()


@pytest.mark.parametrize(
    ("precision", "stored", "computed"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float16),
        ("64", torch.float64, torch.float64),
    ],
)
def test_plan_follows_the_precision(precision: str, stored: torch.dtype, computed: torch.dtype) -> None:
    plan = plan_cli(*SMALL, "--world_size=2", f"--trainer.precision={precision}").plan()

    layouts = [layout for unit in plan.units for layout in unit.layouts]
    assert {layout.dtype for layout in layouts} == {stored}
    assert {layout.compute_dtype for layout in layouts} == {computed}
    assert torch.get_default_dtype() == torch.float32


def test_plan_of_a_model_larger_than_any_memory() -> None:
    cli = plan_cli(MODEL, "--model.dim=65536", "--model.layers=20", "--model.heads=512", "--world_size=1024")
    plan = cli.plan()

    assert all(parameter.is_meta for parameter in cli.model.parameters())
    # 12 dim^2 per block in its four matrices alone
    assert sum(unit.numel for unit in plan.units) > 20 * 12 * 65536**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage=3"], r"--world_size is needed: trainer\.devices is 'auto'"),
        (["--trainer.devices=-1"], r"--world_size is needed: trainer\.devices is -1"),
        (["--trainer.strategy=ddp", "--world_size=2"], r"--stage is needed: trainer\.strategy is 'ddp'"),
        (["--world_size=2", "--units=[Missing]"], "Missing"),
        (
            ["--world_size=2", "--trainer.strategy=zero3_offload", "--stage=2"],
            r"HostOffload\.parameters is for stage 3 only",
        ),
        (["--world_size=2", "--trainer.precision=transformer-engine"], "got precision='transformer-engine'"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as stopped:
        main(["plan", *SMALL, *arguments])

    assert str(stopped.value).startswith("lightning-zero plan: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world_size=2", "--stage=4"], "stage"),
        (["--world_size=0"], "world_size"),
        (["--world_size=2", "--nonsense=1"], "nonsense"),
        (["--world_size=2", "--offload=cloud"], "offload"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *SMALL, *arguments])

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.partition("error:")[2]


def test_plan_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--world_size=2"])

    assert "model" in capsys.readouterr().err.partition("error:")[2]


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
        ({"strategy": "auto"}, [], SingleDeviceStrategy),
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


OFFLOADING = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args:
      stage: 3
      offload:
        class_path: lightning_zero.{kind}
        init_args:
          {settings}
"""


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("HostOffload", "parameters: true", HostOffload(parameters=True)),
        ("HostOffload", "pin_mib: 64", HostOffload(pin_mib=64.0)),
        ("NvmeOffload", "path: /var/tmp", NvmeOffload(path="/var/tmp")),
    ],
)
def test_offload_by_class(tmp_path: Path, kind: str, settings: str, expected: Offload) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OFFLOADING.format(kind=kind, settings=settings))
    cli = ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])

    assert cli.trainer.strategy.offload == expected
    # What LightningCLI saves beside the checkpoints gives the same again.
    file.write_text(cli.parser.dump(cli.config))
    again = ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])
    assert again.trainer.strategy.offload == expected


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("HostOffload", "paramters: true", "Option 'paramters' is not accepted"),
        ("HostOffload", "pin_mib: much", 'Parser key "pin_mib"'),
        ("HostOffload", "path: /var/tmp", "Option 'path' is not accepted"),
        ("NvmeOffload", "parameters: true", "the following arguments are required: path"),
    ],
)
def test_a_wrong_setting_of_offload_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, settings: str, message: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OFFLOADING.format(kind=kind, settings=settings))
    with pytest.raises(SystemExit):
        ZeroCLI(BoringModel, run=False, seed_everything_default=False, args=[f"--config={file}"])

    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("module", [True, False], ids=["python -m lightning_zero", "lightning-zero"])
def test_help_lists_the_commands(tmp_path: Path, module: bool) -> None:
    start = ["-m", "lightning_zero"] if module else ["-c", "from lightning_zero.cli import main; main()"]
    stdout, stderr = run_script([*start, "--help"], cwd=tmp_path)

    assert all(
        f"  {command} " in stdout
        for command in ("plan", "inspect", "consolidate", "fit", "validate", "test", "predict")
    )
    assert not stderr


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["consult"])

    assert stopped.value.code == 2
    assert "invalid choice: 'consult'" in capsys.readouterr().err


def test_modules_of_the_current_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\nclass MyModel(BoringModel):\n    pass\n"
    )
    code = "import sys; sys.path.remove(''); from lightning_zero.cli import main; main()"

    stdout, _ = run_script(["-c", code, "plan", "--model=my_module.MyModel", "--world_size=2"], cwd=tmp_path)

    assert "Plan for 2" in stdout


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_command_runs_on_two_processes(tmp_path: Path, command: str) -> None:
    _, stderr = run_script(
        [
            *("-m", "lightning_zero", command, BORING),
            *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"),
            *(f"--trainer.limit_{part}_batches=2" for part in ("train", "val", "test", "predict")),
            *("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"),
        ],
        cwd=tmp_path,
    )

    assert "Starting with 2 processes" in stderr
