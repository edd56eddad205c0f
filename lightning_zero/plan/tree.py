"""The module tree as plain data, and what in it cannot be laid out: refused by name (or warned of) before anything is
allocated.

All of it is read from the module alone, which is the same on every rank: so every rank refuses, or none.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_zero._torch import storage_key, users_of
from lightning_zero.errors import some
from lightning_zero.plan.layout import ParameterSpec

__all__ = ["HeldParameter", "ModuleNode", "ModuleTree", "check_memory", "kind_of", "refuse_modules", "sums_in_place"]


@dataclass
class ModuleNode:
    """One module object."""

    index: int  # in the tree, in order of the first visit; 0 is the root
    name: str  # its first path, "" for the root
    module: nn.Module  # the object itself, read for its type only
    # Every way from the root to it, as node indices, both ends included.
    paths: list[tuple[int, ...]] = field(default_factory=list)
    # Node indices of its children by attribute name, a shared child once per attribute.
    children: dict[str, int] = field(default_factory=dict)


@dataclass
class HeldParameter:
    """One parameter object, the modules that hold it directly, and every way from the root to these."""

    spec: ParameterSpec
    holders: list[ModuleNode] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)  # node indices from the root to a holder
    above: frozenset[int] = frozenset()  # the nodes on these


class ModuleTree:
    """A module tree, read without touching data, hooks or devices.

    ``nodes`` has every module once and ``parameters`` every parameter once, both in registration order.

    Raises:
        ValueError: naming the parameter or buffer, if one is no plain dense tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._nodes: dict[int, ModuleNode] = {}
        self._held: dict[int, HeldParameter] = {}
        self._visit(module, "", ())
        self.nodes = tuple(self._nodes.values())
        self.parameters = tuple(self._held.values())
        for held in self.parameters:
            held.paths = [path for holder in held.holders for path in holder.paths]
            held.above = frozenset().union(*held.paths)
            part, layers, parts = held.spec.part, [holder.module for holder in held.holders], 1
            if held.spec.aliases:
                linear = sum(kind_of(layer) is nn.Linear for layer in layers)
                parts = 3 if not all(map(sums_in_place, layers)) else 1 if linear < 2 and not held.spec.is_split else 2
            lookups = [layer for layer in layers if isinstance(layer, nn.Embedding)]
            if part is not None and part.dim == 0 and not all(map(sums_in_place, lookups)):
                parts = max(2, parts) + part.ranks - 1  # torch makes the whole gradient, and takes its rows
            held.spec = replace(held.spec, parts=parts)

    def _visit(self, module: nn.Module, name: str, above: tuple[int, ...]) -> int:
        node = self._nodes.setdefault(id(module), ModuleNode(len(self._nodes), name, module))
        if node.index in above:  # a cycle: going round once more leads nowhere new
            return node.index
        path, prefix = (*above, node.index), f"{name}." if name else ""
        node.paths.append(path)
        for local_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            self._hold(parameter, prefix + local_name, node)
        for local_name, buffer in module.named_buffers(recurse=False):
            _refuse_tensor("Buffer", prefix + local_name, buffer)
        for attribute, child in module._modules.items():
            if child is not None:
                node.children[attribute] = self._visit(child, prefix + attribute, path)
        return node.index

    def _hold(self, parameter: nn.Parameter, name: str, holder: ModuleNode) -> None:
        held = self._held.get(id(parameter))
        if held is None:
            _refuse_tensor("Parameter", name, parameter)
            part = getattr(parameter, "tensor_part", None)
            spec = ParameterSpec(name, (), tuple(parameter.shape), parameter.dtype, parameter.requires_grad, part=part)
            held = self._held[id(parameter)] = HeldParameter(spec)
        else:
            held.spec = replace(held.spec, aliases=(*held.spec.aliases, name))
        if holder not in held.holders:
            held.holders.append(holder)

    def numels(self) -> list[int]:
        """For every node: elements of the distinct parameters in it or anywhere below it."""
        totals = [0] * len(self.nodes)
        for parameter in self.parameters:
            for index in parameter.above:
                totals[index] += parameter.spec.numel
        return totals


def _refuse_tensor(kind: str, name: str, tensor: Tensor) -> None:
    """Raise unless a parameter is a plain dense tensor, and a buffer a plain one, perhaps on the meta device.

    A subclass of ``nn.Parameter`` around a plain tensor is one. A sparse buffer is every rank's own.
    """
    if is_lazy(tensor):
        raise ValueError(
            f"{kind} '{name}' has no shape yet: it belongs to a lazy module. "
            "Run one forward pass in `__init__` or `configure_model`, a batch of zeros will do, or give the layer its "
            "sizes (`nn.Linear(in_features, ...)` in place of `nn.LazyLinear`)."
        )
    if type(tensor) is not Tensor and nn.Parameter not in type(tensor).__mro__:
        what = type(tensor).__name__
    elif tensor.layout is not torch.strided:
        what = f"tensor of layout {tensor.layout}" if kind == "Parameter" else ""
    else:
        what = "quantized tensor" if tensor.is_quantized else "nested tensor" if tensor.is_nested else ""
    if what:
        raise ValueError(
            f"{kind} '{name}' is a {what}. Only plain dense tensors can be sent to all ranks, be laid out in flat "
            "buffers and be read back from a checkpoint, whether they are trained or frozen. Make it a plain one "
            "before fit (`full_tensor()` of a DTensor, `dequantize()`, `to_dense()`), or keep it in an attribute that "
            "is not registered in the module."
        )


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was before tensor parallelism made a subclass of it."""
    return getattr(type(module), "_ordinary", type(module))


def sums_in_place(module: nn.Module) -> bool:
    """Whether the parts of a gradient that layers like this one give to one weight are added where the first lies."""
    own = "forward" not in vars(module)
    if kind_of(module) is nn.Embedding:
        return own and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
    return own and kind_of(module) is nn.Linear


def refuse_modules(module: nn.Module, world_size: int) -> None:
    """Raise ValueError for parameters that would be a rank's own, in a world of several ranks."""
    if world_size == 1:
        return
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in module.named_parameters(remove_duplicate=False) if ignored else ():
        if name in ignored and parameter.requires_grad:
            raise ValueError(
                f"'{name}' is named in _ddp_params_and_buffers_to_ignore: under DDP every rank trains a parameter of "
                "its own there, with its own gradients. Here a parameter is one for all ranks. Take it off that list, "
                "freeze it, or keep it and its optimizer in an attribute that is not registered in the module."
            )
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            # It scales the rows that a forward looks up in place: on each rank those of its own data.
            raise ValueError(
                f"'{name}' is a {type(child).__name__} with max_norm={child.max_norm}, which changes its weight in "
                "every forward, on each rank in the rows that this rank's data look up. Under DDP the ranks' models "
                "drift apart by that, and a sharded weight has one value only. Leave max_norm out and scale the rows "
                "for all ranks alike, in on_train_batch_end inside `with lightning_zero.full_parameters(module):`."
            )


def check_memory(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError if a trainable parameter has elements in common with another parameter, or with a buffer; warn
    of those whose memory tensors outside of the module keep.

    Every parameter gets memory of its own: what is one element now would be two, and such tensors would not follow.
    What has to be moved to ``device``, where the module computes, gets memory of its own in any trainer.
    """
    groups: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.numel() and tensor.device == device and tensor.layout is torch.strided:
            groups.setdefault(storage_key(tensor), {}).setdefault(id(tensor), (name, tensor))
    # Torch's older ``spectral_norm`` leaves a view of the weight that its first forward takes the place of.
    known = [
        storage_key(view)
        for child in module.modules()
        for hook in child._forward_pre_hooks.values()
        if isinstance(hook, SpectralNorm) and isinstance(view := vars(child).get(hook.name), Tensor)
    ]
    kept: list[str] = []
    for key, group in groups.items():
        near: list[tuple[str, Tensor]] = []  # those before that reach to this one or further
        alone = len(group) == 1
        for name, tensor in group.values() if alone else sorted(group.values(), key=lambda named: _extent(named[1])):
            near = [other for other in near if _extent(other[1])[1] > _extent(tensor)[0]] if near else near
            for other_name, other in near:
                if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                    raise ValueError(
                        f"'{other_name}' and '{name}' are two tensors in the same memory, so that a change of one "
                        "is a change of the other. Here every parameter gets memory of its own. To tie them, register "
                        "one object under both names (`b.weight = a.weight`, not `.data`); or `clone()` one."
                    )
            near.append((name, tensor))
        if key and users_of(key) - 1 > len(group) + known.count(key):
            kept += [name for name, tensor in group.values() if tensor.requires_grad]
    if kept:
        warnings.warn(
            f"Tensors outside of the module share the memory of {some(map(repr, kept))}: what "
            "`.detach()`, `.data`, a view or `state_dict()` gave before, and something still holds. They keep that "
            "memory and the values of now: they will not follow the training, as they would on a CPU under DDP. Where "
            "they are read later, read the parameter instead; else let them go.",
            stacklevel=2,
        )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors whose extents meet share an element: columns of one matrix, for example, do not."""
    if left.dtype != right.dtype:
        return True
    taken = torch.zeros(left.untyped_storage().nbytes() // left.element_size(), dtype=torch.bool)
    taken.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(taken.as_strided(right.shape, right.stride(), right.storage_offset()).any())
