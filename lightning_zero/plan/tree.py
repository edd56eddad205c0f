"""The module tree as plain data: every module once, with all its paths, and every parameter once, with all its
holders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_zero.plan.flat import ParameterSpec


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
        parameters: every parameter once, in registration order, ignored ones left out.
        ignored: names of the frozen parameters that are left alone because they are tensor subclasses.
    """

    nodes: tuple[ModuleNode, ...]
    parameters: tuple[HeldParameter, ...]
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTree:
        """Read the tree below ``module``.

        Raises:
            ValueError: naming the parameter, if one has no shape yet (a lazy module) or is a trainable tensor subclass.
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
        held: list[HeldParameter] = []
        ignored: list[str] = []
        for key, parameter in objects.items():
            spec = _read_parameter(parameter, names[key])
            if spec is None:
                ignored.append(names[key][0])
            else:
                held.append(HeldParameter(spec, tuple(holders[key])))
        return cls(nodes, tuple(held), tuple(ignored))

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


def refuse_weights_that_write_to_themselves(module: nn.Module) -> None:
    """``max_norm`` scales the rows that a forward looks up in place: on each rank those of its own data.

    Under ``DistributedDataParallel`` every rank's model comes to be another one. Here a weight has one value, and with
    sharded parameters what a forward writes to gathered ones is given up with them.

    Raises:
        ValueError: naming the module.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            raise ValueError(
                f"'{name}' is a {type(child).__name__} with max_norm={child.max_norm}, which changes its weight in "
                "every forward, on each rank in the rows that this rank's data look up. Under DDP the ranks' models "
                "drift apart by that, and a sharded weight has one value only. Leave max_norm out and scale the rows "
                "for all ranks alike, in on_train_batch_end inside `with lightning_zero.full_parameters(module):`."
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


def _read_parameter(parameter: nn.Parameter, names: list[str]) -> ParameterSpec | None:
    """The parameter's spec, or None if it is to be left alone."""
    if is_lazy(parameter):
        raise ValueError(
            f"Parameter '{names[0]}' has no shape yet: it belongs to a lazy module. "
            "Run one forward pass (or give the layer its sizes) before the plan is built."
        )
    subclass: bool = is_traceable_wrapper_subclass(parameter)  # mypy takes it for impossible
    if subclass:
        if not parameter.requires_grad:
            return None
        raise ValueError(
            f"Parameter '{names[0]}' is a trainable {type(parameter.data).__name__}. Only plain tensors can be "
            "laid out in a flat buffer: freeze it (requires_grad=False; it is then left alone) or make it a plain one."
        )
    return ParameterSpec(
        name=names[0],
        aliases=tuple(names[1:]),
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
    )
