"""What README and the pages of ``docs`` show runs: Python blocks as scripts, YAML as configurations, and commands.

Tables are compared with what the package does, quoted messages with what it says, and links with what is there.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import torch
import torch.distributed.run
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import nn

import lightning_zero
from lightning_zero import build_plan, errors
from lightning_zero.checkpoint import save_checkpoint_directory
from lightning_zero.cli import main
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.sharded import optimizer_rule
from lightning_zero.trainer.precision import PrecisionName
from tests.helpers.script import ROOT, run_forked, run_script

README = (ROOT / "README.md").read_text(encoding="utf-8")
# With these, benchmarks that look at memory do not start themselves again, as test_benchmarks.py does.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
START = "python examples/language_model.py fit --config configs/zero3.yaml"
BORING = "lightning.pytorch.demos.boring_classes.BoringModel"
SHORT = ["--trainer.fast_dev_run=true", "--report.length=5"]
SMALL = {
    "checkpoint": ["--width=16", "--layers=1", "--repeat=1", "--ways", "zero3"],
    "offload": ["--width=64", "--layers=1", "--repeat=1", "--parts", "files", "host", "device"],
    "step_time": [
        *["--models=1m", "--worlds=2", "--precisions=fp32", "--rounds=1", "--steps=1", "--tokens", "1", "8"],
        *["--engines", "zero3", "--results=."],
    ],
    "memory": ["--models=1m", "--worlds=2", "--precisions=fp32", "--engines", "zero3", "--results=."],
    "scaling": ["--worlds", "8", "--blocks=2", "--units", "4", "--rounds=1", "--steps=1", "--results=."],
    "gpu": [],
    "links": ["--model=1m", "--hosts", "2", "8", "--results=."],
    "network": ["--model=1m", "--engines", "zero3-node", "--rates", "1gbit", "--rounds=1", "--tokens", "1", "8"],
    "changing_order": ["--width=16", "--blocks=3", "--rows=4", "--rounds=1", "--steps=1"],
    "host_time": ["--units=2", "--rounds=1", "--steps=1", "--precisions=32-true", "--out=host_time.json"],
    "memory_limits": ["--help"],  # a limit takes control groups, and half an hour
    "optimizers": [
        *["--optimizers=adamw8bit", "--seeds=1", "--steps=2", "--out=optimizers.json", "--", "--model.dim=32"],
        *["--model.layers=1", "--trainer.val_check_interval=2", f"--data.path={ROOT / 'lightning_zero'}"],
    ],
    "verification": ["--mb=2", "--repeat=1"],
    "fabric_loop": ["--steps=2"],
    "language_model": [*SHORT, "--model.dim=32", "--model.layers=1", f"--data.path={ROOT / 'lightning_zero'}"],
    "tensor_parallel": [*SHORT, "--model.dim=32", "--model.layers=1", f"--data.path={ROOT / 'lightning_zero'}"],
    "dashboard": ["--width=64", "--layers=2", "--steps=12", "--output=dashboard.svg"],
    "trace": ["--width=64", "--layers=2", "--warm-up=2", "--length=17", "--output=."],
}


class Block(NamedTuple):
    """A fenced block: its language, its text, and where it starts."""

    language: str
    text: str
    place: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [Block(match[1], match[2], f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}") for match in found]
    assert text.count("```") == 2 * len(blocks), f"{page.name} has a block that is not closed, or ends in mid-line"
    return [block for block in blocks if not block.language.startswith("{")]  # those are Sphinx's directives


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_language(language: str) -> list[object]:
    """Each text once, however many pages show it."""
    places = {block.text: block.place for block in reversed(BLOCKS) if block.language == language}
    return [pytest.param(text, id=place) for text, place in reversed(places.items())]


def commands() -> list[object]:
    """Each once; those that measure something are thorough."""
    lines = "".join(block.text for block in BLOCKS if block.language == "bash").splitlines()
    found = dict.fromkeys(command.strip() for line in lines for command in line.split("&&"))
    return [pytest.param(one, marks=pytest.mark.thorough if "benchmarks/" in one else ()) for one in found]


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"python", "yaml", "bash", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_is_there(page: Path) -> None:
    """Headings within the pages of ``docs`` are checked by Sphinx, which builds them in ``.ci/run``."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    missing = [link for link in links if "://" not in link and not (page.parent / link.split("#")[0]).exists()]
    assert not missing


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 220


def ranks_of(text: str, otherwise: int = 1) -> int:
    """As many as it says, all of them forked: one that Lightning launches imports for six seconds."""
    found = re.search(r"\bdevices\W+([24])\b", text)
    return int(found[1]) if found else otherwise


@pytest.mark.parametrize("text", of_language("python"))
def test_python_block_runs(tmp_path: Path, text: str) -> None:
    script = tmp_path / "block.py"
    script.write_text(text, encoding="utf-8")
    arguments = ["--help"] if "ZeroCLI(" in text else []

    run_forked([str(script), *arguments], cwd=tmp_path, timeout=180, ranks=ranks_of(text))


@pytest.mark.parametrize("text", of_language("yaml"))
def test_yaml_block_trains(tmp_path: Path, text: str) -> None:
    config = tmp_path / "block.yaml"
    config.write_text(text, encoding="utf-8")

    run_forked(
        ["-m", "lightning_zero", "fit", f"--model={BORING}", f"--config={config}", "--trainer.fast_dev_run=2"],
        cwd=tmp_path,
        timeout=180,
        ranks=ranks_of(text),
    )


def save_checkpoint(path: Path) -> None:
    """What the commands about checkpoints are shown with."""
    state = {name: value.detach() for name, value in nn.Linear(3, 2).state_dict().items()}
    checkpoint = {"state_dict": state, "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.6.0"}
    save_checkpoint_directory(checkpoint, path, ControlGroup(None), plan_summary={})


def shown() -> list[object]:
    """Commands with what a page says that they print."""
    pairs = [pair for pair in pairwise(BLOCKS) if pair[1].language == "text"]
    return [pytest.param(block.text.splitlines()[-1], text.text, id=text.place) for block, text in pairs]


@pytest.mark.parametrize(("command", "text"), shown())
def test_what_is_shown_is_what_is_printed(capsys: pytest.CaptureFixture[str], command: str, text: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "lightning-zero"
    main(arguments)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", commands())
def test_command_runs(tmp_path: Path, command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program in ("pip", "pytest", "pre-commit", "sphinx-build", ".ci/run", "ruff", "mypy", "codespell", "proselint"):
        return  # what `.ci/run` does, of which this is a part
    if "fine_tune.py" in command:
        return  # goes on from the checkpoint of the first command: test_fine_tune.py runs it on one
    if program == "python":
        script, *options = (str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments)
        arguments = [script, *options, *SMALL[Path(script).stem]]
        # These fork, and must not find threads of OpenMP or the profiler that a test before this one has left.
        if Path(script).stem in ("offload", "trace", "dashboard", "optimizers"):
            run_script(arguments, cwd=tmp_path, timeout=180)
        else:
            again = Path(script).stem in ("memory", "step_time")
            example = 4 if "tensor_parallel" in script else 2  # as the configuration says
            ranks = [MALLOC] if again else ranks_of(command, example if "examples" in script else 1)
            run_forked(arguments, cwd=tmp_path, timeout=180, ranks=ranks)
    elif program == "torchrun":
        (text,) = (block.text for block in BLOCKS if block.text.count("class Classifier"))
        (tmp_path / "train.py").write_text(text, encoding="utf-8")
        # As torchrun understands it, and in two ranks as it starts them; test_chaos.py starts torchrun.
        understood = torch.distributed.run.parse_args(arguments)
        run_forked(
            [understood.training_script, *understood.training_script_args],
            cwd=tmp_path,
            ranks=int(understood.nproc_per_node),
        )
    elif program == "lightning-zero" and arguments[0] == "tune":
        words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments[1:]]
        words[words.index("python")] = sys.executable
        short = ["--runs=1", "--steps=1", *words, *SMALL["language_model"]]
        run_script(["-m", "lightning_zero", "tune", *short], cwd=tmp_path, timeout=300)
    elif program == "lightning-zero":
        save_checkpoint(tmp_path / "runs" / "last.ckpt")
        run_forked(["-m", "lightning_zero", *arguments], cwd=tmp_path)
    else:
        pytest.fail(f"a page shows a command that no test runs: {command}")


def test_the_two_commands_are_there() -> None:
    install = 'pip install -e ".[dev]" && '
    shown = [block.text.strip() for block in blocks_of(ROOT / "README.md") if block.text.startswith(install)]

    assert shown == [
        install + START,
        install + "pytest -n 2",
    ]


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its header."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_optimizers_run_as_the_table_says() -> None:
    rows = [re.findall(r"`(\w+)`", row[0]) for row in table("docs/optimizers.md", "Optimizers")]
    slices, whole, closure, refused = rows
    assert list(map(len, rows)) == [11, 2, 1, 1]

    def rule(name: str) -> str:
        return optimizer_rule(getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=0.1))

    assert {rule(name) for name in slices} == {"elementwise"}
    assert {rule(name) for name in whole} == {"whole"}
    assert {rule(name) for name in closure} == {"closure"}
    for name in refused:
        with pytest.raises(UnsupportedOptimizerError, match=name):
            rule(name)


@pytest.mark.parametrize("page", ["README.md", "docs/memory.md"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_per_parameter_are_what_the_plan_says(stage: int, page: str) -> None:
    """512 * 512 elements split into 4 equal shards without padding."""
    (row,) = (row for row in table(page, "What is split") if row[0].startswith("bytes per parameter"))
    formula = row[stage].strip("`")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512, bias=False))

    plan = build_plan(model, stage=stage, world_size=4)
    memory = plan.expected_memory()
    at_rest = memory.parameters + memory.masters + memory.gradients + memory.optimizer

    assert at_rest == eval(formula, {"W": 4}) * 512 * 512


def test_precisions_are_the_ones_that_exist() -> None:
    text = section("docs/optimizers.md", "Precision").split("```")[0]
    assert set(get_args(PrecisionName)) <= set(re.findall(r"`([\w-]+)`", text))


def strings_in(root: ast.AST) -> list[str]:
    """Every string of a piece of code, with ``...`` for what is filled in."""
    found = []
    for node in ast.walk(root):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"\{\w+\}|%s", "...", node.value))
    return [" ".join(text.split()) for text in found]


def test_quoted_messages_are_those_of_the_package_below_their_class() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    titles = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    quoted = [
        (title, message)
        for title, part in zip(titles[::2], titles[1::2], strict=True)
        for start in re.findall(r"^- (`.+?`):(?: |$)", part, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", start)
    ]
    assert len(quoted) > 50
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "lightning_zero").rglob("*.py")]
    strings = [*itertools.chain(*map(strings_in, trees)), inspect.getsource(accelerator_connector)]
    assert not [message for _, message in quoted if not any(message in string for string in strings)]

    ours = [name for name in errors.__all__ if name.endswith("Error") and name != "ZeroError"]
    raised = [
        (node.func.id, string)
        for node in itertools.chain(*map(ast.walk, trees))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours
        for string in strings_in(node)
    ]
    for title, message in quoted:
        assert {title} >= {name for name, string in raised if message in string}, message
    for name, part in zip(titles[::2], titles[1::2], strict=True):
        if name in ours:
            first = inspect.getdoc(getattr(errors, name)).splitlines()[0]  # type: ignore[union-attr]
            assert first in part, f"{name} has another docstring"


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(lightning_zero.__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)
