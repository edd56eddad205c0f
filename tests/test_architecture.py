"""The architecture, read from the source: who imports whom, and the rules that a reviewer would otherwise repeat."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_zero"
FILES = sorted(PACKAGE.rglob("*.py"))

# A layer is a folder, or the files of the top level that it names.
LAYERS = {
    "config": "vocabulary",
    "errors": "vocabulary",
    "_torch": "vocabulary",
    "plan": "plan",
    "comm": "comm",
    "offload": "offload",
    "engine": "engine",
    "optim": "optim",
    "checkpoint": "checkpoint",
    "debug": "debug",
    "strategy": "top",
    "precision": "top",
    "random_state": "top",
    "state": "top",
    "callbacks": "top",
    "checkpoints": "top",
    "loading": "top",
    "offloading": "top",
    "refusals": "top",
    "handover": "top",
    "cli": "top",
    "planning": "top",
    "hugging_face": "top",
    "shown_state": "top",
    "stand_in": "top",
    "tools": "top",
    "__init__": "top",
    "__main__": "top",
}
EVERY_LAYER = frozenset(LAYERS.values())

# Who may import whom. `engine`, `optim` and `checkpoint` do not know each other: `strategy` puts them together.
MAY_IMPORT = {
    "vocabulary": {"vocabulary"},
    "plan": {"vocabulary", "plan"},
    "comm": {"vocabulary", "comm"},
    "offload": {"vocabulary", "comm", "offload"},
    "engine": {"vocabulary", "plan", "comm", "offload", "engine"},
    "optim": {"vocabulary", "plan", "comm", "offload", "optim"},
    "checkpoint": {"vocabulary", "plan", "comm", "offload", "checkpoint"},
    "debug": {"vocabulary", "plan", "comm", "engine", "optim", "debug"},
    "top": EVERY_LAYER,
}

# What a layer may use of torch.distributed and of Lightning. `_torch` shields the rest from torch's private names.
DISTRIBUTED = {"comm": "torch.distributed", "checkpoint": "torch.distributed.checkpoint"}
# `strategy` answers Lightning's barrier and broadcast, which are about the default group.
DISTRIBUTED_FILES = {"_torch": "torch.distributed", "strategy": "torch.distributed"}
LIGHTNING = {"top"}
# Where hooks are registered: on modules and parameters, on the outputs of a call, on the user's optimizers; and, while
# weights are loaded, on what is missing.
HOOKS = {"engine/hooks.py", "engine/calls.py", "optim/innermost.py", "optim/kept.py", "state.py"}
# Files that are read from top to bottom: the verbs of a step, and Lightning's hooks in Lightning's order.
LONGER = {"engine/engine.py": 600, "strategy.py": 600}
THIRD_PARTY = {"torch", "lightning", "lightning_utilities", "torchmetrics", "jsonargparse", "fsspec", "tqdm"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of the package."""

    path: Path

    @property
    def layer(self) -> str:
        """The layer it belongs to; fails for a new file or folder that nobody gave a place."""
        top = self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if top not in LAYERS:
            pytest.fail(f"{self.name}: give `{top}` a layer in LAYERS, and say in MAY_IMPORT what it may import")
        return LAYERS[top]

    @property
    def name(self) -> str:
        """Its path from the repository's root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def inside(self) -> str:
        """Its path from the package."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of everything imported anywhere in the file, also under TYPE_CHECKING.

        ``from a.b import c`` counts as ``a.b.c``, because ``c`` may be a module; so does the expression
        ``torch.distributed.x``.
        """
        folder = ["lightning_zero", *self.path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = folder[: len(folder) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch.distributed"):
                yield node.lineno, dotted(node)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain on a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.fixture(params=FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def source(request: pytest.FixtureRequest) -> Source:
    return Source(path=request.param)


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 10


def test_imports_point_down(source: Source) -> None:
    allowed = MAY_IMPORT[source.layer]
    wrong = []
    for line, name in source.imports():
        if not within(name, "lightning_zero") or name.count(".") == 0:
            continue
        top = name.split(".")[1]
        imported = LAYERS.get(top, "top")  # a name of `lightning_zero/__init__.py` itself
        if imported not in allowed:
            wrong.append(f"{source.name}:{line} imports {name} ({source.layer} may not import {imported})")
    assert not wrong, "\n".join(wrong)


def test_only_the_wire_knows_torch_distributed(source: Source) -> None:
    stem = source.path.stem if source.path.parent == PACKAGE else ""
    allowed = DISTRIBUTED_FILES.get(stem) or DISTRIBUTED.get(source.layer)
    wrong = [
        f"{source.name}:{line} uses {name}"
        for line, name in source.imports()
        if within(name, "torch.distributed") and not (allowed and within(name, allowed))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_top_knows_lightning(source: Source) -> None:
    wrong = [
        f"{source.name}:{line} imports {name}"
        for line, name in source.imports()
        if within(name, "lightning") and source.layer not in LIGHTNING
    ]
    assert not wrong, "\n".join(wrong)


def test_no_dependency_beyond_the_declared_ones(source: Source) -> None:
    known = THIRD_PARTY | set(sys.stdlib_module_names) | {"lightning_zero"}
    wrong = [
        f"{source.name}:{line} imports {name}" for line, name in source.imports() if name.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_no_assert_statement(source: Source) -> None:
    """``python -O`` removes them: an error is raised, with what was expected and what was found."""
    lines = [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Assert)]
    assert not lines, f"{source.name}: `assert` in line {lines}"


def test_stage_is_data(source: Source) -> None:
    """Only ``config.py`` knows stage numbers; everyone else asks what is sharded."""
    if source.path == PACKAGE / "config.py":
        return
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            names = {dotted(part).rpartition(".")[2] for part in [node.left, *node.comparators]}
            numbers = any(isinstance(part, ast.Constant) and type(part.value) is int for part in ast.walk(node))
            if numbers and any(name == "stage" or name.endswith("_stage") for name in names):
                wrong.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.Match) and dotted(node.subject).rpartition(".")[2] == "stage":
            wrong.append(f"{source.name}:{node.lineno} match {ast.unparse(node.subject)}")
    assert not wrong, "\n".join(wrong)


def test_hooks_are_registered_in_few_files(source: Source) -> None:
    if source.inside in HOOKS:
        return
    wrong = [
        f"{source.name}:{node.lineno} {ast.unparse(node.func)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and re.fullmatch(r"register_(\w+_)?(pre)?hook", node.func.attr)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_star_import(source: Source) -> None:
    wrong = [f"{source.name}:{line} {name}" for line, name in source.imports() if name.endswith(".*")]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_readable(source: Source) -> None:
    lines = len(source.path.read_text(encoding="utf-8").splitlines())
    assert lines < LONGER.get(source.inside, 400), f"{source.name} has {lines} lines: split it"
    long = [
        f"{source.name}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long, "\n".join(long)


def test_every_file_says_what_it_is(source: Source) -> None:
    assert ast.get_docstring(source.tree), f"{source.name} has no docstring"


def test_no_machine_path() -> None:
    """Nothing in the repository names a folder of the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:root|work|Users|home/\w+)/")
    wrong = []
    for folder in ("lightning_zero", "tests", "examples", "configs", "benchmarks", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts or path == Path(__file__).resolve():
                continue
            for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(text):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} {text.strip()}")
    assert not wrong, "\n".join(wrong)


def test_public_names_are_frozen() -> None:
    """Adding one is a decision, removing one breaks users: both change this list."""
    import lightning_zero

    assert sorted(lightning_zero.__all__) == sorted(
        [
            "ActivationPolicy",
            "CheckpointPolicy",
            "CommunicationMonitor",
            "HostOffload",
            "MemoryMonitor",
            "NvmeOffload",
            "ZeroCLI",
            "ZeroPlan",
            "ZeroPrecision",
            "ZeroStrategy",
            "build_plan",
            "consolidate_checkpoint",
            "estimate_memory",
            "full_gradient",
            "full_gradients",
            "full_optimizer_state",
            "full_parameters",
            "grad_norm",
            "load_from_checkpoint",
            "load_full_state_dict",
            "register_strategies",
        ]
    )
    missing = [name for name in lightning_zero.__all__ if not hasattr(lightning_zero, name)]
    assert not missing


def test_import_table_has_no_cycle_below_the_top() -> None:
    """With no cycle between layers, one can be read, tested and replaced without those above it."""
    below = {layer: set(allowed) - {layer} for layer, allowed in MAY_IMPORT.items() if layer != "top"}
    done: set[str] = set()
    while below:
        ready = [layer for layer, allowed in below.items() if allowed <= done]
        assert ready, f"cycle among {sorted(below)}"
        for layer in ready:
            done.add(layer)
            del below[layer]
