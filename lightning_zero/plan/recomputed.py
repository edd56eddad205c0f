"""Which modules run their forward again in backward, by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from lightning_zero.config import validate_units
from lightning_zero.plan.automatic import CERTAIN_LEAVES, class_name, compiled_module, has_forward
from lightning_zero.plan.tree import ModuleTree
from lightning_zero.plan.units import units_of

__all__ = ["find_recomputed"]


def find_recomputed(
    module: nn.Module, checkpointing: Literal["units"] | Sequence[str], rules: Sequence[str] | None
) -> tuple[str, ...]:
    """Names of the modules to recompute.

    Args:
        module: the root; may be on the meta device.
        checkpointing: class names, each module of such a class is taken, nested ones too; or ``"units"``: all units of
            stage 3, but no unit inside of another one (it would run a third time), and no single layer such as a
            ``Linear`` (it keeps its input in any case, so that there is nothing to gain).
        rules: class names of the units; ``None``: found automatically.

    Returns:
        First paths, in registration order.

    Raises:
        ValueError: for a class that is not there or cannot be called, and if there is no module to recompute.
    """
    tree = ModuleTree.of(module)
    if checkpointing == "units":
        return _of_units(tree, rules)
    return _of_classes(tree, checkpointing)


def _of_units(tree: ModuleTree, rules: Sequence[str] | None) -> tuple[str, ...]:
    units = [unit for unit in units_of(tree, validate_units(rules)) if unit.name]
    by_name = {node.name: node.module for node in tree.nodes}
    names: list[str] = []
    for unit in units:
        inner = by_name[unit.name]
        if type(compiled_module(inner) or inner) not in CERTAIN_LEAVES and not set(unit.ancestors) & set(names):
            names.append(unit.name)
    if not names:
        raise ValueError(
            "ActivationPolicy(checkpointing='units') finds nothing worth recomputing: the model has "
            f"{f'no units but single layers ({units[0].name}, ...)' if units else 'no units'}. Name the classes to "
            "recompute, for example ActivationPolicy(checkpointing=['Block'])."
        )
    return tuple(names)


def _of_classes(tree: ModuleTree, classes: Sequence[str]) -> tuple[str, ...]:
    compiled = {id(inner) for node in tree.nodes if (inner := compiled_module(node.module)) is not None}
    found = [node for node in tree.nodes if class_name(node.module) in classes and id(node.module) not in compiled]
    missing = [name for name in classes if name not in {class_name(node.module) for node in found}]
    if missing:
        existing = sorted({class_name(node.module) for node in tree.nodes})
        raise ValueError(
            f"ActivationPolicy.checkpointing names {missing}, but the model has no module of that class. Its classes "
            f"are: {', '.join(existing)}."
        )
    for node in found:
        if not has_forward(node.module):
            name = class_name(node.module)
            raise ValueError(
                f"ActivationPolicy.checkpointing names '{name}', but a {name} ('{node.name}') is never called: name "
                "the class of its items."
            )
    return tuple(node.name for node in found)
