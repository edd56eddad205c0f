"""The module tree as plain data: every module once, with all its paths, and every parameter once, with all its
holders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_zero.plan.flat import ParameterSpec
from lightning_zero.plan.unsupported import refuse_tensor


@dataclass(frozen=True)
class ModuleNode:
    """One module object.

    Attributes:
        index: in the tree, in order of the first visit; 0 is the root.
        name: its first path, "" for the root.
        module: the object itself, read for its type only.
        paths: every way from the root to it, as node indices, both ends included.
        children: its children as ``(attribute name, node index)``, a shared child once per attribute.
    """

    index: int
    name: str
    module: nn.Module
    paths: tuple[tuple[int, ...], ...]
    children: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class HeldParameter:
    """One parameter object and the modules (node indices) that hold it directly."""

    spec: ParameterSpec
    holders: tuple[int, ...]


@dataclass(frozen=True)
class ModuleTree:
    """A module tree, read without touching data, hooks or devices.

    Attributes:
        nodes: every module once, in registration order, root first.
        parameters: every parameter once, in registration order.
    """

    nodes: tuple[ModuleNode, ...]
    parameters: tuple[HeldParameter, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTree:
        """Read the tree below ``module``.

        Raises:
            ValueError: naming the parameter or buffer, if one is no plain tensor (see ``refuse_tensor``).
        """
        nodes = _read_nodes(module)
        names: dict[int, list[str]] = {}
        holders: dict[int, list[int]] = {}
        objects: dict[int, nn.Parameter] = {}
        for prefix, node in _walk(nodes):
            for local_name, parameter in node.module.named_parameters(recurse=False, remove_duplicate=False):
                key = id(parameter)
                objects[key] = parameter
                names.setdefault(key, []).append(f"{prefix}.{local_name}" if prefix else local_name)
                if node.index not in holders.setdefault(key, []):
                    holders[key].append(node.index)
            for local_name, buffer in node.module.named_buffers(recurse=False):
                refuse_tensor("Buffer", f"{prefix}.{local_name}" if prefix else local_name, buffer)
        held = (HeldParameter(_read_parameter(p, names[key]), tuple(holders[key])) for key, p in objects.items())
        return cls(nodes, tuple(held))

    def numels(self) -> tuple[int, ...]:
        """For every node: elements of the distinct parameters in it or anywhere below it."""
        totals = [0] * len(self.nodes)
        for parameter in self.parameters:
            inside = {index for holder in parameter.holders for path in self.nodes[holder].paths for index in path}
            for index in inside:
                totals[index] += parameter.spec.numel
        return tuple(totals)

    def in_batch_norm(self) -> frozenset[str]:
        """Names of the parameters that a batch norm holds directly."""
        return frozenset(
            parameter.spec.name
            for parameter in self.parameters
            if any(isinstance(self.nodes[holder].module, _BatchNorm) for holder in parameter.holders)
        )


def _read_nodes(root: nn.Module) -> tuple[ModuleNode, ...]:
    modules: list[nn.Module] = []
    names: list[str] = []
    paths: list[list[tuple[int, ...]]] = []
    indices: dict[int, int] = {}

    def visit(module: nn.Module, name: str, above: tuple[int, ...]) -> None:
        index = indices.get(id(module))
        if index is None:
            index = indices[id(module)] = len(modules)
            modules.append(module)
            names.append(name)
            paths.append([])
        if index in above:  # a cycle: going round once more leads nowhere new
            return
        path = (*above, index)
        paths[index].append(path)
        for attribute, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{attribute}" if name else attribute, path)

    visit(root, "", ())
    return tuple(
        ModuleNode(
            index=index,
            name=names[index],
            module=module,
            paths=tuple(paths[index]),
            children=tuple((attribute, indices[id(child)]) for attribute, child in _children(module)),
        )
        for index, module in enumerate(modules)
    )


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((attribute, child) for attribute, child in module._modules.items() if child is not None)


def _walk(nodes: tuple[ModuleNode, ...]) -> Iterable[tuple[str, ModuleNode]]:
    """Every path to every module as ``(name, node)``, in registration order: a shared module once per path."""
    stack: list[tuple[str, int, tuple[int, ...]]] = [("", 0, ())]
    while stack:
        name, index, above = stack.pop()
        if index in above:
            continue
        yield name, nodes[index]
        for attribute, child in reversed(nodes[index].children):
            stack.append((f"{name}.{attribute}" if name else attribute, child, (*above, index)))


def _read_parameter(parameter: nn.Parameter, names: list[str]) -> ParameterSpec:
    refuse_tensor("Parameter", names[0], parameter)
    return ParameterSpec(
        name=names[0],
        aliases=tuple(names[1:]),
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
    )
