"""``lightning-zero plan``: whose model, which settings, what every stage takes, which one to choose."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.language_model import ByteGPT
from lightning_zero import ActivationPolicy, measure_activations
from lightning_zero.cli import main
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement
from lightning_zero.extensions.planner.command import PlanCLI, Planner, tokens_for
from tests.helpers.script import ROOT

MODEL = "--model=examples.language_model.ByteGPT"
TWO = ("--world_size=2",)
SMALL = (MODEL, "--model.dim=32", "--model.layers=2")
PARALLEL = ("--model=examples.tensor_parallel.ByteLlama", "--model.dim=64", "--model.layers=2", "--model.heads=4")

OWN = __name__


def plan_cli(*arguments: str) -> Planner:
    cli = PlanCLI(args=list(arguments), run=False, seed_everything_default=False, load_from_checkpoint_support=False)
    return cli.planner


def exits(code: int, *arguments: str) -> None:
    """The command ends so."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == code


# --------------------------------------------------------------------------------------------------------------- plan


def test_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *SMALL, "--world-size=4"])

    printed = capsys.readouterr().out
    assert "blocks" in printed
    assert "bytes of one rank" in printed
    assert printed == plan_cli(*SMALL, "--world-size=4").describe() + "\n"


@pytest.mark.parametrize(
    ("arguments", "stage", "world_size"),
    [
        (["--world_size=8"], 3, 8),
        (["--world-size=8", "--stage=2"], 2, 8),
        (["--trainer.devices=4", "--trainer.num_nodes=3", "--trainer.strategy=zero1"], 1, 12),
        (["--trainer.devices=[0,1,5]"], 3, 3),
        (["--trainer.devices=4", "--world_size=5"], 3, 5),
        (["--trainer.strategy=zero1", "--stage=3", "--world_size=2"], 3, 2),
        (["--trainer.strategy=ddp", "--stage=2", "--world_size=2"], 2, 2),
        ([f"--config={ROOT / 'configs' / 'zero1.yaml'}"], 1, 2),
        ([f"--config={ROOT / 'configs' / 'zero2.yaml'}"], 2, 2),
        ([f"--config={ROOT / 'configs' / 'zero3.yaml'}"], 3, 2),
        ([f"--config={ROOT / 'configs' / 'zero2_offload.yaml'}"], 2, 2),
    ],
)
def test_plan_takes_its_settings_from_the_trainer(arguments: list[str], stage: int, world_size: int) -> None:
    plan = plan_cli(MODEL, *arguments).plan()

    assert plan.placement == Placement.from_stage(stage)
    assert plan.world_size == world_size


def test_plan_takes_the_arguments_of_the_strategy() -> None:
    """Buckets of 0.25 MiB of float32 hold 65,536 elements unless they are one larger parameter."""
    strategy = ("--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=2")

    large = plan_cli(MODEL, "--world_size=2", *strategy).plan()
    small = plan_cli(MODEL, "--world_size=2", *strategy, "--trainer.strategy.bucket_mib=0.25").plan()
    override = plan_cli(MODEL, "--world_size=2", *strategy, "--bucket_mib=0.25").plan()

    assert len(large.units) < 10
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
        (["--trainer.strategy=zero3", "--trainer.strategy.offload=cpu"], HostOffload(parameters=True)),
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
    assert sum(spec.numel for spec in plan.parameters) > 20 * 12 * 65536**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--stage=3"], r"--world-size is needed: trainer\.devices is 'auto'"),
        ([*SMALL, "--trainer.devices=-1"], r"--world-size is needed: trainer\.devices is -1"),
        ([*SMALL, *TWO, "--trainer.strategy=ddp"], r"trainer\.strategy is 'ddp', which has no ZeRO stage: give"),
        ([*SMALL, *TWO, "--units=[Missing]"], "Missing"),
        ([*SMALL, *TWO, "--trainer.strategy=zero3_offload", "--stage=2"], r"HostOffload\.parameters is for stage 3"),
        ([*SMALL, *TWO, "--trainer.precision=transformer-engine"], "got precision='transformer-engine'"),
        ([*SMALL, *TWO, "--stage=4"], "stage"),
        ([*SMALL, "--world_size=0"], "world_size"),
        ([*SMALL, *TWO, "--nonsense=1"], "nonsense"),
        ([*SMALL, *TWO, "--offload=cloud"], "offload"),
        ([*TWO], "model"),
        ([*TWO, "--parameters=1B", *SMALL], "not model and parameters"),
        ([*TWO, "--parameters=1B", "--device-memory=80XB"], "--device-memory: a size in bytes"),
        ([*TWO, "--parameters=1B", "--activations=-3"], "--activations: a size in bytes"),
        ([*TWO, "--parameters=1B", "--device-memory=80"], r"80 would be so many bytes. Did you mean 80GB\?"),
        ([*TWO, "--parameters=1B", "--host-memory=1TB"], "need --device-memory beside them"),
        ([*TWO, "--parameters=1B", "--activations=1GB"], "need --device-memory beside them"),
        ([*TWO, "--parameters=1B", "--lora=8"], "--lora does not exist any more: give --model a module that adds"),
        ([*TWO, "--parameters=many"], "written as 7.5B"),
        ([*TWO, "--parameters=1B", "--trainer.num_nodes=4"], "divides the 2 ranks, got 4"),
        ([*TWO, "--hf-config=missing"], "neither. Nothing is downloaded"),
        ([*TWO, "--parameters=1B", "--link-between=10Gbit/s"], "--link-between does not exist any more: divide"),
        ([*TWO, "--parameters=1B", "--plot", "a.svg"], "--plot does not exist any more: draw what --json prints"),
        ([*TWO, *SMALL, "--tensor-parallel-size=2"], "ByteGPT has no parameter that is a DTensor: each of the 2 ranks"),
        ([*TWO, *PARALLEL, "--tensor-parallel-size=3"], "make a mesh of 0 x 3 ranks, and 2 run"),
        ([*TWO, *PARALLEL, "--tensor-parallel-size=half"], "tensor_parallel_size"),
        ([*TWO, "--hf-config=missing", "--tensor-parallel-size=2"], "needs --model, not --hf-config"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    exits(2, *arguments)
    assert re.search(message, capsys.readouterr().err.partition("error:")[2])


# -------------------------------------------------------------------------------------------------- tensor parallelism


def test_a_tensor_parallel_model_is_planned_as_a_rank_has_it() -> None:
    """``"auto"``: the ranks of a node. What is divided by them is divided once more by those with the same part."""
    whole = plan_cli(*PARALLEL, "--world-size=8")
    four = plan_cli(*PARALLEL, "--world-size=8", "--tensor-parallel-size=4")
    auto = plan_cli(*PARALLEL, "--world-size=8", "--tensor-parallel-size=auto", "--trainer.num_nodes=2")

    assert four.plan().fingerprint() == auto.plan().fingerprint()
    assert four.plan().world_size == 2
    split = [spec for spec in four.plan().parameters if spec.is_split]
    assert {spec.numel * 4 for spec in split} == {spec.numel for spec in whole.plan().parameters if spec.numel >= 4096}
    assert (four.estimate().numel, four.estimate().world_size) == (whole.estimate().numel, 8)
    assert "8 ranks in tensor-parallel groups of 4" in four.describe()
    assert "of each tensor-parallel group of 4 one rank" in four.describe()
    assert four.optimizer.name == "AdamW"


@pytest.mark.parametrize(("nodes", "receives"), [(1, False), (2, True)])
def test_the_way_of_tensor_parallel_ranks_is_that_of_a_run(nodes: int, receives: bool) -> None:
    """On CPUs: those of one node read one another's memory, of several they do not, and have no secondary shards."""
    settings = ("--trainer.accelerator=cpu", "--trainer.devices=4", f"--trainer.num_nodes={nodes}")
    cli = plan_cli(*PARALLEL, *settings, "--tensor-parallel-size=2", "--trainer.strategy.secondary_shards=true")
    estimate = cli.estimate()
    assert (estimate.stages["zero3"].rest.transport > 0) == receives
    assert estimate.keeping is None
    assert cli.plan().placement.keeping is None


def test_activations_of_a_tensor_parallel_model_are_not_measured() -> None:
    settings = (
        "--world-size=4",
        "--tensor-parallel-size=2",
        "--activations=measured",
        "--data=examples.language_model.SourceText",
    )
    assert (
        "Activations of a tensor-parallel ByteLlama are not known: give their size"
        in plan_cli(*PARALLEL, *settings).describe()
    )


# ----------------------------------------------------------------------------------------------- configurations of runs


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_s_configuration_is_planned_as_it_is(config: Path) -> None:
    """With its ``data`` block, of a class that only the script knows."""
    model = "examples.fine_tune.FineTunedGPT" if config.stem == "fine_tune" else "examples.language_model.ByteGPT"
    model = "examples.tensor_parallel.ByteLlama" if config.stem == "tensor_parallel" else model
    cli = plan_cli(f"--model={model}", f"--config={config}")

    assert cli.plan().world_size == 2
    assert cli.optimizer.name == "AdamW"
    assert "at peak" in cli.describe()


RUN = """
seed_everything: 7
trainer:
  strategy: zero2
  devices: 4
  precision: bf16-mixed
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: nowhere.to.be.Found
  init_args: {anything: [1, 2]}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1, momentum: 0.9}
ckpt_path: null
"""


def test_the_model_and_the_optimizer_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    cli = plan_cli(f"--config={tmp_path / 'run.yaml'}")

    assert (cli.plan().world_size, cli.plan().placement) == (4, Placement.from_stage(2))
    assert (cli.optimizer.name, cli.optimizer.state) == ("SGD", 1)
    assert cli.estimate().numel == 32 * 2 + 2


OF_A_SCRIPT = """
trainer:
  devices: 2
model:
  dim: 32
  layers: 1
"""


def numel_of(plan: Any) -> int:
    return sum(parameter.numel for parameter in plan.parameters)


def test_the_model_s_class_comes_before_the_configuration(tmp_path: Path) -> None:
    """That of a script which fixes the class has nothing but its arguments."""
    (tmp_path / "run.yaml").write_text(OF_A_SCRIPT)
    cli = plan_cli(MODEL, f"--config={tmp_path / 'run.yaml'}", "--model.layers=2")

    assert numel_of(cli.plan()) == numel_of(plan_cli(*SMALL, "--world-size=2").plan())


class Adam(torch.optim.Optimizer):
    """Not torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_optimizer_is_known_by_its_class_and_not_by_its_name() -> None:
    own, torch_s = (
        plan_cli(*SMALL, "--world-size=2", f"--optimizer={path}").optimizer
        for path in (f"{OWN}.Adam", "torch.optim.Adam")
    )
    assert (own.name, own.whole) == ("Adam", True)
    assert (torch_s.name, torch_s.whole) == ("Adam", False)


class Sized(BoringModel):
    """Asks its Trainer when it is built."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(10 * self.trainer.world_size, 2, bias=False)


class Lazy(BoringModel):
    """Has a parameter without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)


def test_a_model_that_asks_for_the_world_is_answered() -> None:
    assert plan_cli(f"--model={OWN}.Sized", "--world-size=3").estimate().numel == 60


def test_a_model_without_shapes_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="uninitialized parameter"):
        plan_cli(f"--model={OWN}.Lazy", "--world-size=3")


class Scheduled(BoringModel):
    """Asks its Trainer for something."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0 / getattr(self.trainer, self.what), momentum=0.9)


@pytest.mark.parametrize(
    ("what", "name", "state"), [("estimated_stepping_batches", "SGD", 1), ("something_of_a_run", "AdamW", 2)]
)
def test_the_optimizer_is_the_one_that_the_model_makes(what: str, name: str, state: int) -> None:
    """Unless it needs a run for that."""
    cli = plan_cli(f"--model={OWN}.Scheduled", f"--model.what={what}", "--world-size=2")

    assert (cli.optimizer.name, cli.optimizer.state) == (name, state)
    assert ("AdamW is assumed" in cli.describe()) == (name == "AdamW")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("devices: 4", "devices: 4\n  max_stepps: 3"), "max_stepps"),
        (("seed_everything", "seed_everythin"), "seed_everythin"),
        (("BoringModel", "BoringModel\n  init_args: {widht: 3}"), "widht"),
        (("init_args: {lr: 0.1", "init_args: {lrr: 0.1"), "lrr"),
    ],
)
def test_a_wrong_key_of_a_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], named: str
) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace(*change))
    with pytest.raises(SystemExit):
        plan_cli(f"--config={tmp_path / 'run.yaml'}")

    assert f"'{named}" in capsys.readouterr().err.partition("error:")[2]


def test_the_precision_may_be_a_plugin(tmp_path: Path) -> None:
    plugin = """
  plugins:
    class_path: lightning_zero.ZeroPrecision
    init_args: {precision: bf16-mixed, reduce_dtype: bfloat16}"""
    (tmp_path / "run.yaml").write_text(RUN.replace("\n  precision: bf16-mixed", plugin))
    layouts = [layout for unit in plan_cli(f"--config={tmp_path / 'run.yaml'}").plan().units for layout in unit.layouts]

    assert {(layout.compute_dtype, layout.reduce_dtype) for layout in layouts} == {(torch.bfloat16, torch.bfloat16)}


# ------------------------------------------------------------------------------------------------ stages, and which one


def test_a_number_of_parameters_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["--device-memory=40GB", "--activations=1GB"]
    main(["plan", "--parameters=7.5B", "--world-size=64", "--trainer.precision=16-mixed", *known])

    printed = capsys.readouterr().out
    assert printed.startswith("7,500,000,000 parameters, AdamW, 16-mixed, 64 ranks\n")
    assert "Recommended: zero2. zero2 needs " in printed
    assert "none needs 150 GB on the device; zero1 needs 46.9 GB on the device" in printed


@pytest.mark.parametrize(
    ("arguments", "recommended"),
    [
        (["--device-memory=1GB", "--activations=1MB"], "none"),
        (["--device-memory=1GB", "--activations=800MB"], "zero1"),
        (["--device-memory=120MB", "--activations=1kB"], "zero3"),
        (["--device-memory=75MB", "--activations=1kB"], "zero3_offload"),
        (["--device-memory=75MB", "--host-memory=1MB", "--activations=1kB"], "nothing"),
        (["--device-memory=75MB", "--host-memory=1MB"], "nothing"),
    ],
)
def test_the_stage_that_fits_is_recommended(arguments: list[str], recommended: str) -> None:
    text = plan_cli(MODEL, "--model.dim=512", "--world-size=8", *arguments).describe()

    assert f"\n\nRecommended: {recommended}. " in text
    assert ("zero3_offload" in text.partition("Recommended")[0]) == (recommended in ("zero3_offload", "nothing"))


def of_70b(*arguments: str) -> str:
    """What a user reads at the end."""
    with redirect_stdout(StringIO()) as printed:
        main(["plan", "--parameters=70B", "--trainer.precision=bf16-mixed", "--activations=1kB", *arguments])
    return printed.getvalue()


def test_host_memory_of_a_machine_is_shown_and_respected() -> None:
    """18 bytes for each of 70 billion parameters, wherever they are."""
    table, _, advice = of_70b("--world-size=8", "--device-memory=80GB").partition("Recommended: ")
    assert re.search(r"^host memory of a node, 8 ranks .* 1\.26 TB$", table, re.MULTILINE)
    assert advice.startswith("zero3_offload. ")
    assert "Its 8 ranks take 1.26 TB of host memory on each node; how much there is was not said." in advice
    four = ["--trainer.devices=8", "--trainer.num_nodes=4", "--device-memory=40GB"]
    assert "Its 8 ranks take 315 GB of host memory on each node; there are 512 GB." in of_70b(
        *four, "--host-memory=512GB"
    )
    short = of_70b(*four, "--host-memory=256GB")
    assert "Recommended: nothing." in short
    assert "zero3 needs 43.8 GB on the device" in short
    assert "zero3_offload needs 315 GB of host memory for 8 ranks of a node, which has 256 GB" in short


def test_ranks_on_cpus_share_the_memory_of_a_machine() -> None:
    arguments = ["--parameters=1B", "--world-size=4", "--trainer.accelerator=cpu", "--activations=1kB"]
    assert "Recommended: none. " in plan_cli(*arguments, "--host-memory=65GB").describe()
    assert "Recommended: zero1. " in plan_cli(*arguments, "--host-memory=41GB").describe()


TWO_BY_TWO = ["--parameters=1B", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.num_nodes=2"]
ROUNDED = ["--trainer.strategy.compression.weights=int8", "--trainer.strategy.compression.gradients=int8"]


@pytest.mark.parametrize(
    ("strategy", "said", "leaving"),
    [
        (["zero3"], "", 6.0),
        (["zero3", *ROUNDED], ", Compression(weights='int8', gradients='int8', error_feedback=False)", 3 * 1.0625 / 2),
        (["zero3", "--trainer.strategy.secondary_shards=true"], ", secondary shards", 4.0),
        (
            ["zero3", "--trainer.strategy.secondary_shards=true", *ROUNDED],
            ", secondary shards, Compression(weights='int8', gradients='int8', error_feedback=False)",
            1.0625,
        ),
        (["zero3", "--trainer.strategy.shard_within=node"], ", shard groups of 2", 4.0),
        (["zero1", "--trainer.strategy.shard_within=2", ROUNDED[1]], ", shard groups of 2, Compression(", 1.0625),
        (["lightning_zero.ZeroStrategy", "--trainer.strategy.stage=2", ROUNDED[1]], ", Compression(", 2 + 1.0625 / 2),
    ],
)
def test_the_configured_exchange_between_machines_is_counted(strategy: list[str], said: str, leaving: float) -> None:
    """Bytes of a parameter, of which 10^9: 4 of weights and 4 of gradients, half of which leaves either machine."""
    cli = plan_cli(*TWO_BY_TWO, f"--trainer.strategy={strategy[0]}", *strategy[1:])
    printed = cli.describe()
    assert f"1,000,000,000 parameters, AdamW, 32-true, 4 ranks{said}" in printed
    stage = strategy[0] if strategy[0] in ("zero1", "zero3") else "zero2"
    rows = {row[0]: row[1:] for row in (re.split("  +", line) for line in printed.splitlines())}
    cells = dict(zip(rows["bytes of one rank"], rows["leaves a node in a step"], strict=True))
    assert cells[stage] == f"{leaving:.2f} GB".replace(".00", "")
    kept = dict(zip(rows["bytes of one rank"], rows.get("weights to compute with", ()), strict=False))
    assert kept.get("zero3") == ("2 GB" if "secondary" in said else None)


def test_the_configured_exchange_of_a_configuration(tmp_path: Path) -> None:
    """The plan's memory and the way are those of the strategy; what a strategy refuses is said in one line."""
    config = tmp_path / "run.yaml"
    strategy = {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 3, "secondary_shards": True}}
    trainer = {"accelerator": "cpu", "devices": 2, "num_nodes": 2, "strategy": strategy}
    config.write_text(json.dumps({"trainer": trainer}))
    cli = plan_cli(*SMALL, "--model.layers=6", f"--config={config}")
    plan = cli.plan()
    assert plan.placement.keeping == 2
    kept = sum(layout.numel for layout in plan.layouts) * 4 // 2
    assert cli.estimate().stages["zero3"].rest.weights == plan.expected_memory().weights == kept
    leaving = cli.estimate().leaving_nbytes("zero3")
    assert leaving < plan_cli(*SMALL, "--model.layers=6", *TWO_BY_TWO[1:]).estimate().leaving_nbytes("zero3")
    report = cli.numbers()
    assert report["estimate"]["keeping"] == 2
    fed = ["--trainer.strategy.init_args.compression.gradients=int4"]
    fed.append("--trainer.strategy.init_args.compression.error_feedback=true")
    cli = plan_cli(*SMALL, "--model.layers=6", f"--config={config}", *fed)
    more = cli.plan().expected_memory().transport - plan.expected_memory().transport
    assert cli.estimate().stages["zero3"].rest.transport == more == kept  # and no receive buffer
    for wrong, message in (
        (["--stage=2"], "secondary_shards is for stage 3"),
        (["--trainer.strategy.init_args.shard_within=2"], "leave secondary_shards out"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_cli(*SMALL, f"--config={config}", *wrong).describe()
    with pytest.raises(ValueError, match=r"Compression\.weights='int8' is for stage 3, and for mixed precision"):
        plan_cli(*SMALL, *TWO_BY_TWO[1:], "--trainer.strategy=zero1", *ROUNDED).describe()
    assert plan_cli(
        *SMALL, *TWO_BY_TWO[1:], "--trainer.strategy=zero1", *ROUNDED, "--trainer.precision=bf16-mixed"
    ).plan()
    with pytest.raises(ValueError, match="cannot be split into groups of 3"):
        plan_cli(*TWO_BY_TWO, "--trainer.strategy=zero3", "--trainer.strategy.shard_within=3")


# --------------------------------------------------------------------------------------------------------- Hugging Face

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
# Embedding and head, and a norm; in each layer queries and outputs, keys and values, three matrices, two norms.
LLAMA_NUMEL = 2 * 1000 * 256 + 256 + 4 * (2 * 256**2 + 2 * 256 * 64 + 3 * 256 * 688 + 2 * 256)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_real_hugging_face_configuration(llama: Path) -> None:
    cli = plan_cli(f"--hf-config={llama}", "--world-size=8", "--trainer.precision=bf16-mixed")

    assert numel_of(cli.plan()) == LLAMA_NUMEL
    assert sum("layers" in unit.name for unit in cli.plan().units) == 4


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_a_module_are_what_is_trained() -> None:
    plain, adapted = (plan_cli(f"--model={OWN}.{name}", "--world-size=2") for name in ("Plain", "Adapted"))
    frozen = sum(layout.parameter_numel for layout in adapted.plan().layouts if not layout.trainable)
    assert frozen == numel_of(plain.plan())
    assert adapted.estimate().stages["none"].rest.gradients == 4 * (2 * 32 + 2 * 96)


class Plain(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)


class Adapted(Plain):
    def configure_model(self) -> None:
        import peft

        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["layer"]), self)


def library(built: list[Any]) -> ModuleType:
    """As much of transformers as is used."""

    class AutoConfig:
        @staticmethod
        def from_pretrained(file: Path, **_: Any) -> SimpleNamespace:
            content = json.loads(file.read_text())
            if content.get("model_type") != "llama":
                raise ValueError("Unrecognized model.\nMore lines.")
            return SimpleNamespace(**content)

    class LlamaForCausalLM(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            built.append(config)
            layer = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)]
            self.layers = nn.ModuleList(layer)

    class AutoModelForCausalLM:
        from_config = LlamaForCausalLM

    module = ModuleType("transformers")
    vars(module).update(
        AutoConfig=AutoConfig, LlamaForCausalLM=LlamaForCausalLM, AutoModelForCausalLM=AutoModelForCausalLM
    )
    return module


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "transformers cannot build the model of .*config.json: JSONDecodeError"),
        ('{"model_type": "unheard"}', "transformers cannot build the model of .*: ValueError: Unrecognized model.$"),
    ],
)
def test_what_is_wrong_with_a_hugging_face_configuration(
    llama: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", library([]))
    (llama / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        plan_cli(f"--hf-config={llama}", "--world-size=2")


def test_without_transformers_the_error_says_what_to_install(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    exits(1, f"--hf-config={llama}", "--world-size=2")
    assert "pip install transformers" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- a step


def test_all_tables_are_of_a_step_with_all_its_micro_steps() -> None:
    """``zero3`` reduces in each of them."""
    arguments = [*SMALL, "--trainer.devices=8", "--trainer.accumulate_grad_batches=4"]
    cli = plan_cli(*arguments)
    must = cli.plan().expected_traffic(micro_steps=4)
    assert must.reduce_scatter.nbytes == 4 * cli.plan().expected_traffic().reduce_scatter.nbytes
    assert cli.estimate().stages["zero3"].traffic == must
    assert re.search(
        rf"^reduce-scatter +{must.reduce_scatter.calls} +{must.reduce_scatter.numel:,} ", cli.describe(), re.M
    )
    assert cli.numbers()["plan"]["traffic"] == asdict(must) | {"world_size": 8, "group_size": 8}


# --------------------------------------------------------------------------------------------------------------- JSON


def test_the_report_is_one_json_object() -> None:
    arguments = ["--json", "--device-memory=80GB", "--host-memory=1TB", "--trainer.devices=8", "--trainer.num_nodes=4"]
    report = json.loads(of_70b(*arguments))
    links = {"leaving_nbytes", "within_nbytes"}
    assert set(report) == {"plan", "estimate", "activations", "recommended", *links}
    assert report["leaving_nbytes"]["zero1"] == 6 * 70 * 10**9 * 31 // 32
    assert all(set(report[name]) == set(report["estimate"]["stages"]) for name in links)
    assert report["plan"] is None
    estimate = report["estimate"]
    assert (estimate["numel"], estimate["world_size"], estimate["hosts"]) == (70 * 10**9, 32, 4)
    assert estimate["stages"]["zero3"]["rest"]["optimizer"] == 8 * 70 * 10**9 // 32
    assert estimate["optimizer"]["name"] == "AdamW"
    assert report["recommended"]["name"] == report["recommended"]["fits"][0] == "zero3"


def test_the_report_of_a_model_has_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *SMALL, "--world-size=4", "--json"])
    report = json.loads(capsys.readouterr().out)
    cli = plan_cli(*SMALL, "--world-size=4")
    assert [unit["name"] for unit in report["plan"]["units"]] == [unit.name for unit in cli.plan().units]
    assert sum(unit["numel"] for unit in report["plan"]["units"]) == report["estimate"]["numel"]
    assert report["plan"]["traffic"]["all_gather"]["nbytes"] == cli.plan().expected_traffic().all_gather.nbytes
    for name, stage in cli.estimate().stages.items():
        found = report["estimate"]["stages"][name]
        assert sum(found["peak"].values()) == stage.peak.total
    assert report["recommended"] is None


def test_nothing_fits_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ["--device-memory=1GB", "--host-memory=1GB"]
    main(["plan", "--parameters=7B", "--world-size=2", "--json", *memory])
    report = json.loads(capsys.readouterr().out)
    assert (report["recommended"]["name"], report["recommended"]["fits"]) == (None, [])


# -------------------------------------------------------------------------------------------------------- activations


class Words(LightningDataModule):
    """Asks its Trainer for something."""

    def __init__(self, batch_size: int = 2, length: int = 17) -> None:
        super().__init__()
        self.batch_size, self.length = batch_size, length

    def setup(self, stage: str) -> None:
        self.data = torch.zeros(64, self.length * self.trainer.world_size, dtype=torch.uint8)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.data, self.batch_size)  # type: ignore[arg-type]


class Curious(BoringModel):
    """Looks at values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch.sum().item() else None


MEASURED = ["--activations=measured", "--world-size=2", "--trainer.accelerator=cpu"]
WORDS = f"--data={OWN}.Words"


def batch_of(size: int) -> Tensor:
    return torch.empty(size, 2 * 17, dtype=torch.uint8)


@pytest.mark.parametrize("settings", [{}, {"activations.checkpointing": "[Block]"}])
def test_activations_are_those_of_the_first_batch(settings: dict[str, str]) -> None:
    strategy = ["--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=3"]
    strategy += [f"--trainer.strategy.{name}={value}" for name, value in settings.items()]
    arguments = [*SMALL, *MEASURED, WORDS, "--data.batch_size=4", *strategy, "--trainer.precision=bf16-mixed"]
    cli = plan_cli(*arguments)
    policy = ActivationPolicy(checkpointing=["Block"]) if settings else None
    found = measure_activations(ByteGPT(32, 2), batch_of(4), param_dtype=torch.bfloat16, policy=policy)

    assert cli.measured == found
    for stage in cli.estimate().stages.values():
        assert stage.peak.activations == found.total
    assert re.search(r"^\+ activations +\d", cli.describe(), re.MULTILINE)
    assert re.search(r"^at peak  ", cli.describe(), re.MULTILINE)
    assert cli.numbers()["activations"] == asdict(found)


def test_activations_decide_what_fits() -> None:
    known = plan_cli(
        *SMALL, *MEASURED, WORDS, "--data.batch_size=64", "--trainer.accelerator=gpu", "--device-memory=1GB"
    )
    peak = known.estimate().stages["none"].peak.total
    cli = plan_cli(*SMALL, "--world-size=2", f"--device-memory={peak - 1}")
    advice = cli.estimate().recommend(**cli.memory)
    assert (advice.name, advice.fits[0]) == (None, "none")
    assert "Recommended: nothing. Activations are not counted. Of " in cli.describe()
    assert cli.describe().endswith(" Give --activations measured, or a size such as --activations 20GB.")
    assert known.estimate().recommend(peak).name == "none"
    assert known.estimate().recommend(peak - 1).name != "none"
    assert "for activations" not in known.describe()


def test_a_model_s_own_data_and_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    boring = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
    assert plan_cli(boring, *MEASURED).measured == measure_activations(BoringModel(), torch.empty(1, 32))
    main(["plan", f"--model={OWN}.Curious", *MEASURED])
    printed = capsys.readouterr().out
    assert re.search(r"^Activations of Curious are not known: .* asks for values \(test_command.py", printed, re.M)
    assert "at peak, without activations" in printed
    unknown = plan_cli(f"--model={OWN}.Curious", *MEASURED).numbers()["activations"]
    assert "not known" in unknown["unknown"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL], "ByteGPT has no first batch"),
        ([*SMALL, "--data=nowhere.Found"], "no first batch: .*nowhere"),
        ([*SMALL, WORDS, "--data.batch_size=0"], "Words has no first batch: ValueError: batch_size should be"),
        (["--parameters=1B"], "measured needs --hf-config, --batch-size and --sequence-length"),
    ],
)
def test_without_a_batch_nothing_is_measured(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_cli(*arguments, *MEASURED)


def test_activations_of_a_hugging_face_model(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.head(self.embedding(input_ids))
            assert labels is not None
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    module = library([])
    vars(module)["LlamaForCausalLM"] = type("LlamaForCausalLM", (Model,), {})
    monkeypatch.setitem(sys.modules, "transformers", module)
    cli = plan_cli(f"--hf-config={llama}", *MEASURED, "--batch-size=3", "--sequence-length=64")
    tokens = torch.empty(3, 64, dtype=torch.int64)
    assert cli.measured == measure_activations(Model(None), {"input_ids": tokens, "labels": tokens})
    assert cli.measured.saved > 3 * 64 * (256 + 1000) * 4
    with pytest.raises(ValueError, match="Linear takes no tokens"):
        tokens_for(nn.Linear(1, 1), 3, 64)
