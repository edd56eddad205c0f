"""The architecture, read from the source: who imports whom, and the rules that a reviewer would otherwise repeat.

A rule is one test over all files, and lists everything that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_zero"

# ---------------------------------------------------------------------------------------------------------------------
# Limits. A number here falls as the code does, and is never raised to let something pass.

CORE_LINES = 23_070
CORE_FILES = 84
# What came to the 9,500 that were planned: tensor parallelism with shared memory between shard groups and activations
# split by it (1,100), `lightning-zero tune` (852), the doctor (541), 8-bit states (268), a stage that is chosen (263).
EXTENSION_LINES = 11_500
CIRCLES_OF_PACKAGES = 0
CIRCLES_OF_MODULES = 0
FILES_WITH_HOOKS = 5  # one is a monitor, which looks at what units return
ATTRIBUTES = 15
OF_LIGHTNING = {"model", "_launcher", "_precision_plugin"}  # which its strategies have, and ours assign
# Classes that are to be made smaller, and how many they have.
TOO_MANY: dict[str, int] = {}
# Files that still read frames, and in how many places.
FRAMES: dict[str, int] = {}

# ---------------------------------------------------------------------------------------------------------------------
# Layers: a folder or a file of the top level belongs to one, and imports from its own and from those above it only.

ORDER = {
    "vocabulary": {"config", "errors", "registry", "_torch"},
    "plan": {"plan"},
    "comm": {"comm"},
    "offload": {"offload"},
    "shards": {"shards"},
    "meta": {"meta"},
    "engine": {"engine"},
    "activations": {"activations"},
    "optim": {"optim"},
    "checkpoint": {"checkpoint"},
    "session": {"session"},
    "leaves": {"debug", "loading"},
    "trainer": {"trainer"},
    "door": {"__init__", "__main__", "cli", "ray"},
    # They know the core; the core asks ``registry.py`` for them by name.
    "extensions": {"extensions"},
}
LAYER = {name: layer for layer, names in ORDER.items() for name in names}
# These do not know each other although one stands above the other: `session` puts them together.
STRANGERS = {
    "comm": {"plan"},
    "offload": {"plan"},
    "optim": {"meta", "activations", "engine"},
    "checkpoint": {"meta", "activations", "engine", "optim"},
}

# What a layer may use of torch.distributed and of Lightning. `_torch` shields the rest from torch's private names, and
# `trainer/processes.py` answers Lightning's barrier and broadcast, which are about the default group.
DISTRIBUTED = {"comm/": "torch.distributed", "checkpoint/": "torch.distributed.checkpoint"}
DISTRIBUTED |= {"extensions/": "torch.distributed"}
DISTRIBUTED |= dict.fromkeys(("_torch.py", "trainer/processes.py"), "torch.distributed")
LIGHTNING = {"trainer", "leaves", "door", "extensions"}
HOOKS = {"engine", "optim", "session", "extensions"}
THIRD_PARTY = {"torch", "lightning", "lightning_utilities", "torchmetrics", "jsonargparse", "fsspec", "ray", "tqdm"}
THIRD_PARTY |= {"yaml"}


class Source:
    """One file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(PACKAGE).as_posix()
        self.top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        self.layer = LAYER.get(self.top, "")
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.folder = ".".join(parts[:-1])
        self.text = path.read_text(encoding="utf-8")
        self.lines = len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of its syntax tree."""
        return list(ast.walk(ast.parse(self.text, filename=str(self.path))))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and dotted name of everything imported anywhere in the file, also under TYPE_CHECKING.

        ``from a.b import c`` counts as ``a.b.c``, because ``c`` may be a module; so does the expression
        ``torch.distributed.x``.
        """
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = self.folder.split(".")
                base = above[: len(above) - node.level + 1] if node.level else []
                found += [
                    (node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name])) for alias in node.names
                ]
            elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch.distributed"):
                found.append((node.lineno, dotted(node)))
        return found

    def imported_modules(self) -> Iterator[tuple[int, Source]]:
        """The files of the package that it imports, with the line."""
        for line, name in self.imports:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name and name != self.module:
                yield line, MODULES[name]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain on a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        ahead, reached[start] = [start], set()
        while ahead:
            new = graph.get(ahead.pop(), set()) - reached[start]
            reached[start] |= new
            ahead += new
    groups = {frozenset(n for n in reached[start] if start in reached[n]) for start in graph if start in reached[start]}
    return sorted(sorted(group) for group in groups)


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]
MODULES = {source.module: source for source in SOURCES}


def told(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def test_imports_point_to_layers_above() -> None:
    homeless = sorted({source.top for source in SOURCES if not source.layer})
    assert not homeless, f"give {homeless} a place in ORDER"
    wrong, above = [], set()
    allowed = {}
    for layer in ORDER:
        above.add(layer)
        allowed[layer] = above - STRANGERS.get(layer, set())
    for source in SOURCES:
        for line, imported in source.imported_modules():
            if imported.layer not in allowed[source.layer]:
                wrong.append(f"{source.name}:{line} ({source.layer}) imports {imported.name} ({imported.layer})")
    assert not wrong, told(wrong)


def test_core_asks_the_registry_for_extensions() -> None:
    """An extension that the core imports could not be deleted."""
    from lightning_zero.registry import EXTENSIONS

    folder = PACKAGE / "extensions"
    wrong = [
        f"{source.name}:{line}"
        for source in SOURCES
        if source.top != "extensions"
        for line, name in source.imports
        if within(name, "lightning_zero.extensions")
    ]
    there = {path.stem for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__")}
    wrong += [f"extensions/{name} is not in the registry" for name in there - set(EXTENSIONS)]
    assert not wrong, told(wrong)


def test_no_circle_between_packages() -> None:
    """Each can be read, tested and replaced without those that use it. An import for types alone counts."""
    graph: dict[str, set[str]] = {}
    for source in SOURCES:
        imported = {other.top for _, other in source.imported_modules()}
        graph.setdefault(source.top, set()).update(imported - {source.top})
    found = [" <-> ".join(circle) for circle in circles(graph)]
    assert len(found) <= CIRCLES_OF_PACKAGES, told(found)


def test_no_circle_between_modules() -> None:
    graph = {source.module: {other.module for _, other in source.imported_modules()} for source in SOURCES}
    found = [" <-> ".join(circle) for circle in circles(graph)]
    assert len(found) <= CIRCLES_OF_MODULES, told(found)


def test_others_are_known_where_they_belong() -> None:
    """Only the wire knows torch.distributed, only the trainer knows Lightning, and all dependencies are declared."""
    wrong = []
    known = THIRD_PARTY | set(sys.stdlib_module_names) | {"lightning_zero"}
    for source in SOURCES:
        mine = [name for place, name in DISTRIBUTED.items() if source.name.startswith(place)]
        for line, name in source.imports:
            if within(name, "torch.distributed") and not any(within(name, allowed) for allowed in mine):
                wrong.append(f"{source.name}:{line} uses {name}")
            if within(name, "lightning") and source.layer not in LIGHTNING:
                wrong.append(f"{source.name}:{line} imports {name}")
            if name.split(".")[0] not in known:
                wrong.append(f"{source.name}:{line} imports {name}, which is not declared")
    assert not wrong, told(wrong)


def test_only_one_file_knows_private_names_of_torch() -> None:
    """What is reached through ``torch.`` and begins with an underscore. What checkpoints name is in their format."""
    wrong = []
    for source in SOURCES:
        if source.name == "_torch.py":
            continue
        names = [(line, name) for line, name in source.imports if within(name, "torch")]
        names += [
            (node.lineno, re.sub(r"^Tensor\b", "torch.Tensor", dotted(node)))
            for node in source.nodes
            if isinstance(node, ast.Attribute)
        ]
        wrong += [
            f"{source.name}:{line} uses {name}"
            for line, name in names
            if re.search(r"^torch\.(.*\.)?_[a-z]", name, re.IGNORECASE)
            and not within(name, "torch.distributed.checkpoint")
            and not within(name, "torch.ops")
        ]
    assert not wrong, told(wrong)


def test_no_assert_and_no_star_import() -> None:
    """``python -O`` removes an assert: an error is raised, with what was expected and what was found."""
    wrong = [
        f"{source.name}:{node.lineno} assert"
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.Assert)
    ]
    wrong += [
        f"{source.name}:{line} {name}" for source in SOURCES for line, name in source.imports if name.endswith(".*")
    ]
    assert not wrong, told(wrong)


def test_stage_is_data() -> None:
    """Only ``config.py`` knows stage numbers; everyone else asks what is sharded."""
    wrong = []
    for source in SOURCES:
        if source.name == "config.py":
            continue
        for node in source.nodes:
            if isinstance(node, ast.Compare):
                names = {dotted(part).rpartition(".")[2] for part in [node.left, *node.comparators]}
                numbers = any(isinstance(part, ast.Constant) and type(part.value) is int for part in ast.walk(node))
                if numbers and any(name == "stage" or name.endswith("_stage") for name in names):
                    wrong.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.Match) and dotted(node.subject).rpartition(".")[2] == "stage":
                wrong.append(f"{source.name}:{node.lineno} match {ast.unparse(node.subject)}")
    assert not wrong, told(wrong)


def test_hooks_are_registered_in_few_files() -> None:
    """On modules and parameters, on the outputs of a call, on the user's optimizers, and while weights are loaded."""
    found = {
        source.name: source.layer
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and re.fullmatch(r"register_(\w+_)?(pre)?hook", node.func.attr)
    }
    assert set(found.values()) <= HOOKS, found
    assert len(found) <= FILES_WITH_HOOKS, found


def test_the_package_does_not_grow() -> None:
    """More code for the same promises is a decision, which changes the limit."""
    core = [source.lines for source in SOURCES if source.top != "extensions"]
    assert 10 < len(core) <= CORE_FILES
    assert sum(core) <= CORE_LINES
    assert sum(source.lines for source in SOURCES if source.top == "extensions") <= EXTENSION_LINES


def attributes_of(tree: ast.ClassDef) -> set[str]:
    """What an instance holds by this class's own methods, fields and slots."""
    names = set()
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in tree.decorator_list)
    is_tuple = any(dotted(base).endswith("NamedTuple") for base in tree.bases)
    for node in tree.body if is_dataclass or is_tuple else ():
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            names.add(ast.unparse(node.target))
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.comprehension):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and dotted(part.value) == "self":
                    names.add(part.attr)
    return names


def test_classes_can_be_held_in_mind() -> None:
    """At most so many attributes in an instance, those of the package's base classes counted."""
    classes = {
        node.name: (source, node) for source in SOURCES for node in source.nodes if isinstance(node, ast.ClassDef)
    }

    def attributes(name: str) -> set[str]:
        node = classes[name][1]
        bases = [
            known for base in node.bases if (known := dotted(base).rpartition(".")[2]) in classes and known != name
        ]
        return attributes_of(node).union(*map(attributes, bases)) - OF_LIGHTNING

    counts = {name: len(attributes(name)) for name in classes}
    over = {name: count for name, count in counts.items() if count > ATTRIBUTES}
    grown = [f"{classes[n][0].name}: {n} has {c} attributes" for n, c in over.items() if c > TOO_MANY.get(n, 0)]
    assert not grown, told(grown)


def test_nobody_looks_into_the_callers_frame() -> None:
    """What a caller is may not change what it gets."""
    pattern = re.compile(r"\b(_getframe|inspect\.stack|currentframe|f_locals|f_back)\b")
    wrong = {s.name: n for s in SOURCES if (n := len(pattern.findall(s.text))) > FRAMES.get(s.name, 0)}
    assert not wrong, wrong


def test_every_file_says_what_it_is() -> None:
    wrong = [s.name for s in SOURCES if not isinstance(s.nodes[0], ast.Module) or not ast.get_docstring(s.nodes[0])]
    assert not wrong, told(wrong)


def test_no_machine_path() -> None:
    """Nothing in the repository names a folder of the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:root|work|Users|home/\w+)/")
    wrong = []
    for folder in ("lightning_zero", "tests", "examples", "configs", "benchmarks", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts or path == Path(__file__).resolve():
                continue
            # Not every file is text: old checkpoints are kept, for instance.
            for line, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if pattern.search(text):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} {text.strip()}")
    assert not wrong, told(wrong)


def test_public_names_are_frozen() -> None:
    """Adding one is a decision, removing one breaks users: both change this list."""
    import lightning_zero

    assert sorted(lightning_zero.__all__) == sorted(
        [
            "ActivationPolicy",
            "AdamW8bit",
            "CheckpointPolicy",
            "CommunicationMonitor",
            "Compression",
            "HostOffload",
            "InstabilityMonitor",
            "LoaderPolicy",
            "MemoryMonitor",
            "NvmeOffload",
            "ZeroCLI",
            "ZeroError",
            "ZeroFabricStrategy",
            "ZeroPlan",
            "ZeroPrecision",
            "ZeroStrategy",
            "build_plan",
            "consolidate_checkpoint",
            "ema_update",
            "estimate_memory",
            "full_gradient",
            "full_gradients",
            "full_optimizer_state",
            "full_parameters",
            "grad_norm",
            "load_from_checkpoint",
            "load_full_state_dict",
            "local_slices",
            "measure_activations",
            "register_strategies",
            "verify_checkpoint",
        ]
    )
    missing = [name for name in lightning_zero.__all__ if not hasattr(lightning_zero, name)]
    assert not missing
