"""Units: which module's call gathers which parameters, and which modules run their forward again in backward.

A unit owns the parameters that can only be reached through its module, innermost unit first: the unit is their
*dominator*. A tied parameter therefore belongs to the innermost unit around all of its holders, and the root owns the
rest.

[Note: What makes a good unit]

A unit is gathered by the call of one module, so its module's ``forward`` has to be called, on every rank alike,
whenever its parameters are used. It should be large enough that a collective is bandwidth-bound and small enough that
the few slots that hold unsharded units are a small part of the model. From that:

* *Repeated children of a container* (``ModuleList``, ``Sequential``, ``ModuleDict``: two or more of one class) are the
  blocks that deep models are made of. They are units whatever they look like inside.
* *Large leaves* outside blocks (embeddings, heads) are units so that the root, which is never resharded between its
  forward and its backward, stays small. Only exact types of ``torch.nn``: a subclass may use its weight functionally.
* *Very large blocks* are split into nested units. An ordinary transformer block is not: all of it is used together.

Left alone, because a call is not certain: everything inside ``nn.MultiheadAttention`` (its ``out_proj`` is used
functionally), inside parametrization lists, inside scripted modules, inside ``nn.AdaptiveLogSoftmaxWithLoss`` and
inside anything whose attribute name says "expert": there the data decide which modules are called, so ranks may
disagree, and the collectives of different ranks would no longer match.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from lightning_zero._torch import BatchNorm
from lightning_zero.config import UnitsLike, validate_units
from lightning_zero.plan.layout import ParameterSpec
from lightning_zero.plan.tree import ModuleNode, ModuleTree, kind_of

__all__ = ["UnitSpec", "find_named", "find_recomputed", "find_units", "full_precision_names"]

BLOCK_FLOOR = 1_024
"""Elements that a container's child must own. A collective of 4 KiB costs its latency (0.2 to 5 ms on gloo, tens of
microseconds on NCCL) and nothing else, so smaller ones are gathered with their parent; yet a stack of three 64 x 64
linear layers in a first experiment still gets its units and shows what the engine does."""

LEAF_FLOOR = 65_536
"""Elements that a single leaf must own: 256 KiB in float32, where bandwidth begins to outweigh latency. There is no
repetition here that would make many of them add up, so the floor is higher than for blocks."""

FLOOR_SHARE = 65_536
"""Both floors rise to this fraction of the whole model: what is negligible depends on the model (1M elements for
70B)."""

STAGE_SHARE = 8
"""A block that holds more than an eighth of the model is too large for slots: two of them would hold a quarter."""

UNEVEN_RATIO = 8
"""A block more than eight times the median block is split towards the others' size."""

# Exact types: of the first the own ``forward`` uses the parameters; the second are gathered as one, never split.
CERTAIN_LEAVES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag)
CERTAIN_LEAVES += (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LOOKUPS: tuple[type[nn.Module], ...] = (nn.Embedding,)  # exact types whose backward needs no weights
WHOLE_MODULES: tuple[type[nn.Module], ...] = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class UnitSpec:
    """The parameters that are gathered by the call of one module."""

    name: str  # the module's first path; "" for the root
    parameters: tuple[ParameterSpec, ...]  # what the unit owns, in registration order
    depth: int = 0  # how many units may be computing around it (the longest path, if the module is shared)
    ancestors: tuple[str, ...] = ()  # names of those units, over all paths, outermost first
    looks_up: bool = False  # whether its module is one of ``LOOKUPS``, and the weight is nobody else's


def find_units(tree: ModuleTree, rules: Sequence[str] | None) -> tuple[UnitSpec, ...]:
    """Cut a module tree into units: the root first (even without parameters), then the others in registration order.

    Args:
        tree: of the root.
        rules: class names whose modules become units; None: found automatically, see [Note: What makes a good unit].

    Raises:
        ValueError: for a rule that matches nothing or matches a module whose call gathers nothing.
    """
    floors = _candidates(tree) if rules is None else dict.fromkeys(find_named(tree, rules), 1)
    owned = _drop_small(tree, floors)
    found = []
    for index in sorted(owned):
        node = tree.nodes[index]
        around = [[above for above in path[:-1] if above in owned] for path in node.paths]
        names = tuple(tree.nodes[above].name for above in sorted(set().union(*around)))
        looks_up = type(node.module) in LOOKUPS and len(owned[index]) == 1 and not owned[index][0].aliases
        found.append(UnitSpec(node.name, tuple(owned[index]), max(map(len, around)), names, looks_up))
    return tuple(found)


def _drop_small(tree: ModuleTree, floors: Mapping[int, int]) -> dict[int, list[ParameterSpec]]:
    """Owned parameters of each unit, after candidates that own less than their floor have been given up.

    Each parameter goes to its dominator, the innermost candidate on every path from the root to it: a tied weight
    leaves its module for the common ancestor, and nested units take most of a block away. So what a candidate owns is
    known only then. Innermost candidates go first: what they give up may save their parent.
    """
    candidates = {0, *floors}
    while True:
        owned: dict[int, list[ParameterSpec]] = {index: [] for index in candidates}
        for parameter in tree.parameters:
            first = parameter.paths[0]
            # Dominators lie in the same order on every path, so the innermost may be read from any of them.
            owned[max(candidates.intersection(*parameter.paths), key=first.index)].append(parameter.spec)
        depths = {
            index: max(len(candidates.intersection(path)) for path in tree.nodes[index].paths)
            for index in candidates
            if index != 0 and sum([spec.numel for spec in owned[index]]) < floors[index]
        }
        if not depths:
            return owned
        candidates -= {index for index, depth in depths.items() if depth == max(depths.values())}


def find_named(tree: ModuleTree, rules: Sequence[str]) -> list[int]:
    """Nodes below the root whose class name is one of ``rules``; ValueError as for ``find_units``."""
    found = [node for node in _of_classes(tree, rules, "units") if node.index != 0]
    for node, path in ((each, path) for each in found for path in each.paths):
        parent = tree.nodes[path[-2]].module
        if isinstance(parent, nn.MultiheadAttention) and node.module is parent.out_proj:
            raise ValueError(
                f"units names '{class_name(node.module)}', but '{node.name}' is the out_proj of a MultiheadAttention, "
                "which reads its weight without calling it: name 'MultiheadAttention' or a class around it."
            )
    return [node.index for node in found]


def full_precision_names(tree: ModuleTree, classes: Sequence[str]) -> frozenset[str]:
    """Names of the parameters in batch norms, and in modules of these classes; ValueError for one that is not there."""
    named = {node.index for node in _of_classes(tree, classes, "full_precision")} if classes else set()
    named |= {node.index for node in tree.nodes if isinstance(node.module, BatchNorm)}
    return frozenset([held.spec.name for held in tree.parameters if not named.isdisjoint(held.above)])


def find_recomputed(module: nn.Module, checkpointing: UnitsLike, rules: UnitsLike | None) -> tuple[str, ...]:
    """First paths of the modules that run their forward again in backward, in registration order.

    Args:
        module: the root; may be on the meta device.
        checkpointing: classes, or their names; each module of such a class is taken, nested ones too. Or ``"units"``:
            all units of stage 3, but no unit inside of another one (it would run a third time), and no single layer
            such as a ``Linear`` (it keeps its input in any case, so that there is nothing to gain).
        rules: classes of the units, or their names; ``None``: found automatically.

    Raises:
        ValueError: for a class that is not there or cannot be called, and if there is no module to recompute.
    """
    tree = ModuleTree(module)
    if checkpointing != "units":
        classes = validate_units(checkpointing) or ()
        return tuple(node.name for node in _of_classes(tree, classes, "ActivationPolicy.checkpointing"))
    units = [unit for unit in find_units(tree, validate_units(rules)) if unit.name]
    by_name = {node.name: compiled_module(node.module) or node.module for node in tree.nodes}
    names: list[str] = []
    for unit in units:
        if kind_of(by_name[unit.name]) not in CERTAIN_LEAVES and not set(unit.ancestors) & set(names):
            names.append(unit.name)
    if not names:
        raise ValueError(
            "ActivationPolicy(checkpointing='units') finds nothing worth recomputing: the model has "
            f"{f'no units but single layers ({units[0].name}, ...)' if units else 'no units'}. Name the classes to "
            "recompute, for example ActivationPolicy(checkpointing=['Block'])."
        )
    return tuple(names)


def _of_classes(tree: ModuleTree, classes: Sequence[str], setting: str) -> list[ModuleNode]:
    """The modules of these classes, which are all there and can be called; else raises ValueError."""
    # A compiled module is gathered by its wrapper's call, outside the compiled region.
    compiled = {id(compiled_module(node.module)) for node in tree.nodes}
    names = [class_name(node.module) for node in tree.nodes]
    if missing := [name for name in classes if name not in names]:
        raise ValueError(
            f"{setting} names {missing}, but the model has no module of that class. Its classes are: "
            f"{', '.join(sorted(set(names)))}."
        )
    pairs = zip(tree.nodes, names, strict=True)
    found = [(node, name) for node, name in pairs if name in classes and id(node.module) not in compiled]
    for node, name in found:
        if not has_forward(node.module):
            raise ValueError(
                f"{setting} names '{name}', but a {name} ('{node.name}') is never called: name the class of its items."
            )
    return [node for node, _ in found]


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all (``ModuleList``, ``ModuleDict`` and ``ParameterList`` cannot).

    Asks the object, not its class: ``torch.compile`` and users put a ``forward`` on the instance.
    """
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote, seen through a parametrization or ``torch.compile``."""
    return type_before_parametrizations(compiled_module(module) or module).__name__


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside a ``torch.compile`` wrapper. By name: importing the wrapper's class imports the compiler."""
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def _candidates(tree: ModuleTree) -> dict[int, int]:
    """Nodes that may become units, each with the elements that it must own in the end.

    Blocks are found first, because what is *too large* depends on all of them.
    """
    nodes, numels = tree.nodes, tree.numels()
    block_floor, leaf_floor = (max(floor, numels[0] // FLOOR_SHARE) for floor in (BLOCK_FLOOR, LEAF_FLOOR))

    def below(node: ModuleNode, seen: set[int]) -> Iterator[tuple[ModuleNode, bool]]:
        """Outermost blocks (with True) and large leaves outside of them, strictly below a node, each once."""
        if kind_of(node.module) in CERTAIN_LEAVES + WHOLE_MODULES:
            return
        counts: Counter[str] = Counter()
        if isinstance(node.module, CONTAINERS):
            counts.update(class_name(nodes[index].module) for index in node.children.values() if numels[index])
        for attribute, index in node.children.items():
            child = nodes[index]
            if index in seen or numels[index] == 0 or _is_closed(attribute, child.module):
                continue
            seen.add(index)
            repeated = counts[class_name(child.module)] >= 2
            if repeated and has_forward(child.module) and numels[index] >= block_floor:
                yield child, True
            elif kind_of(child.module) not in CERTAIN_LEAVES + WHOLE_MODULES:
                yield from below(child, seen)
            elif numels[index] >= leaf_floor:
                yield child, False

    def add(found: Sequence[tuple[ModuleNode, bool]], median: float) -> None:
        for leaf in (node for node, is_block in found if not is_block):
            floors.setdefault(leaf.index, leaf_floor)
        for block in (node for node, is_block in found if is_block and node.index not in floors):
            # The block stays a candidate when it is split: it becomes a unit if what is left to it is worth one.
            floors[block.index], numel = block_floor, numels[block.index]
            uneven = numel > UNEVEN_RATIO * median
            if uneven or numel * STAGE_SHARE > numels[0]:
                inner = [*below(block, {block.index})]
                stages = [
                    (node, is_block)
                    for node, is_block in inner
                    if is_block and node.children and kind_of(node.module) not in WHOLE_MODULES
                ]
                if sum(numels[node.index] for node, _ in stages) * 2 > numel:
                    add(stages, median)
                elif uneven:
                    add(inner, median)

    floors: dict[int, int] = {}
    found = [*below(nodes[0], {0})]
    blocks = [numels[node.index] for node, is_block in found if is_block]
    add(found, statistics.median(blocks) if blocks else 0)
    return floors


def _is_closed(attribute: str, module: nn.Module) -> bool:
    """Whether neither the module nor anything below it may become a unit. See [Note: What makes a good unit]."""
    return (
        "expert" in attribute.lower()
        or attribute == "parametrizations"
        or isinstance(module, (ParametrizationList, nn.AdaptiveLogSoftmaxWithLoss, torch.jit.ScriptModule))
    )
