"""Units: which module's call gathers which parameters.

A unit owns the parameters that can only be reached through its module, innermost unit first: the unit is their
*dominator*. A tied parameter therefore belongs to the innermost unit around all of its holders, and the root owns the
rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_zero.config import validate_units
from lightning_zero.plan.automatic import class_name, compiled_module, find_automatic, has_forward
from lightning_zero.plan.flat import ParameterSpec
from lightning_zero.plan.tree import ModuleNode, ModuleTree


@dataclass(frozen=True)
class UnitSpec:
    """The parameters that are gathered by the call of one module.

    Attributes:
        name: the module's first path; "" for the root.
        parameters: what the unit owns, in registration order.
        depth: how many units may be computing around it (the longest path, if the module is shared); 0 for the root.
        ancestors: names of those units, over all paths, outermost first.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    depth: int
    ancestors: tuple[str, ...]


def find_units(module: nn.Module, rules: Sequence[str] | None) -> tuple[UnitSpec, ...]:
    """Cut a module tree into units.

    Args:
        module: the root; may be on the meta device.
        rules: class names whose modules become units; None: found automatically, see
            ``lightning_zero.plan.automatic``.

    Returns:
        The root first (even without parameters), then the other units in registration order, each with parameters.

    Raises:
        ValueError: for a rule that matches nothing or matches a module whose call gathers nothing, and for parameters
            that cannot be laid out (see ``ModuleTree.of``).
    """
    return units_of(ModuleTree.of(module), validate_units(rules))


def units_of(tree: ModuleTree, rules: Sequence[str] | None) -> tuple[UnitSpec, ...]:
    """``find_units`` for a tree that was already read."""
    floors = find_automatic(tree) if rules is None else dict.fromkeys(find_named(tree, rules), 1)
    owned = _drop_small(tree, floors)
    found = []
    for index in sorted(owned):
        node = tree.nodes[index]
        around = [[above for above in path[:-1] if above in owned] for path in node.paths]
        ancestors = sorted({above for path in around for above in path})
        found.append(
            UnitSpec(
                name=node.name,
                parameters=owned[index],
                depth=max(len(path) for path in around),
                ancestors=tuple(tree.nodes[above].name for above in ancestors),
            )
        )
    return tuple(found)


def _drop_small(tree: ModuleTree, floors: Mapping[int, int]) -> dict[int, tuple[ParameterSpec, ...]]:
    """Owned parameters of each unit, after candidates that own less than their floor have been given up.

    A tied weight leaves its module for the common ancestor, and nested units take most of a block away, so what a
    candidate owns is known only once ownership is settled. Innermost candidates go first: what they give up may save
    their parent.
    """
    candidates = {0, *floors}
    while True:
        owned = _assign_owners(tree, candidates)
        small = [index for index in candidates if index != 0 and _numel(owned[index]) < floors[index]]
        if not small:
            return owned
        depths = {
            index: max(sum(above in candidates for above in path) for path in tree.nodes[index].paths)
            for index in small
        }
        deepest = max(depths.values())
        candidates -= {index for index in small if depths[index] == deepest}


def _numel(parameters: Sequence[ParameterSpec]) -> int:
    return sum(spec.numel for spec in parameters)


def _assign_owners(tree: ModuleTree, candidates: Collection[int]) -> dict[int, tuple[ParameterSpec, ...]]:
    """Each parameter to its dominator: the innermost candidate on every path from the root to it."""
    owned: dict[int, list[ParameterSpec]] = {index: [] for index in candidates}
    for parameter in tree.parameters:
        paths = [path for holder in parameter.holders for path in tree.nodes[holder].paths]
        on_every_path = set(paths[0]).intersection(*paths[1:]).intersection(candidates)
        # Dominators lie in the same order on every path, so the innermost may be read from any of them.
        owner = next(index for index in reversed(paths[0]) if index in on_every_path)
        owned[owner].append(parameter.spec)
    return {index: tuple(specs) for index, specs in owned.items()}


def find_named(tree: ModuleTree, rules: Sequence[str]) -> list[int]:
    """Nodes below the root whose class name is one of ``rules``.

    Raises:
        ValueError: for a rule that matches nothing or matches a module whose call gathers nothing.
    """
    wrapped = {id(inner) for node in tree.nodes if (inner := compiled_module(node.module)) is not None}
    matched: set[str] = set()
    found: list[int] = []
    for node in tree.nodes:
        name = class_name(node.module)
        # A compiled module is gathered by its wrapper's call, outside the compiled region.
        if name not in rules or id(node.module) in wrapped:
            continue
        matched.add(name)
        if node.index != 0:
            _refuse_uncallable(tree, node)
            found.append(node.index)
    missing = [rule for rule in rules if rule not in matched]
    if missing:
        existing = sorted({class_name(node.module) for node in tree.nodes})
        raise ValueError(
            f"units names {missing}, but the model has no module of that class. Its classes are: {', '.join(existing)}."
        )
    return found


def _refuse_uncallable(tree: ModuleTree, node: ModuleNode) -> None:
    """Raises ValueError if the module's call is known not to happen."""
    name = class_name(node.module)
    if not has_forward(node.module):
        raise ValueError(
            f"units names '{name}', but a {name} ('{node.name}') is never called: name the class of its items."
        )
    for path in node.paths:
        parent = tree.nodes[path[-2]].module
        if isinstance(parent, nn.MultiheadAttention) and node.module is parent.out_proj:
            raise ValueError(
                f"units names '{name}', but '{node.name}' is the out_proj of a MultiheadAttention, which reads its "
                "weight without calling it: name 'MultiheadAttention' or a class around it."
            )
