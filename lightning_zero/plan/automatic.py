"""The automatic rule: which modules of a tree become units when the user names none.

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

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from lightning_zero.plan.tree import ModuleNode, ModuleTree

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

CERTAIN_LEAVES: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Exact types whose parameters are used by their own ``forward``."""

WHOLE_MODULES: tuple[type[nn.Module], ...] = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
"""Exact types that are gathered as one, never split."""

CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all (``ModuleList``, ``ModuleDict`` and ``ParameterList`` cannot).

    Asks the object, not its class: ``torch.compile`` and users put a ``forward`` on the instance.
    """
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote, seen through a parametrization or ``torch.compile``."""
    return type_before_parametrizations(compiled_module(module) or module).__name__


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside a ``torch.compile`` wrapper, or None. By name: importing the wrapper's class imports the
    compiler."""
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return inner


def find_automatic(tree: ModuleTree) -> dict[int, int]:
    """Candidates for units: node index to the least number of elements it must own to become one.

    The root is not among them.
    """
    return _Search(tree).run()


class _Search:
    """One pass over a tree. Blocks are found first, because what is *too large* depends on all of them."""

    def __init__(self, tree: ModuleTree) -> None:
        self.nodes = tree.nodes
        self.numels = tree.numels()
        self.block_floor = max(BLOCK_FLOOR, self.numels[0] // FLOOR_SHARE)
        self.leaf_floor = max(LEAF_FLOOR, self.numels[0] // FLOOR_SHARE)
        self.floors: dict[int, int] = {}

    def run(self) -> dict[int, int]:
        blocks, leaves = self._below(self.nodes[0])
        for leaf in leaves:
            self.floors.setdefault(leaf.index, self.leaf_floor)
        median = statistics.median(self.numels[block.index] for block in blocks) if blocks else 0
        for block in blocks:
            self._add_block(block, median)
        return self.floors

    def _add_block(self, block: ModuleNode, median: float) -> None:
        if block.index in self.floors:
            return
        # The block stays a candidate when it is split: it becomes a unit if what is left to it is worth one.
        self.floors[block.index] = self.block_floor
        numel = self.numels[block.index]
        uneven = numel > UNEVEN_RATIO * median
        if type(block.module) in WHOLE_MODULES or not (uneven or numel * STAGE_SHARE > self.numels[0]):
            return
        inner, leaves = self._below(block)
        stages = [node for node in inner if node.children and type(node.module) not in WHOLE_MODULES]
        if sum(self.numels[node.index] for node in stages) * 2 > numel:
            for node in stages:
                self._add_block(node, median)
        elif uneven:
            for node in inner:
                self._add_block(node, median)
            for leaf in leaves:
                self.floors.setdefault(leaf.index, self.leaf_floor)

    def _below(self, top: ModuleNode) -> tuple[list[ModuleNode], list[ModuleNode]]:
        """The outermost blocks and the large leaves outside of them, strictly below ``top``, in registration order."""
        blocks: list[ModuleNode] = []
        leaves: list[ModuleNode] = []
        seen = {top.index}

        def visit(node: ModuleNode) -> None:
            repeated = self._repeated_classes(node)
            for attribute, index in node.children:
                child = self.nodes[index]
                if index in seen or self.numels[index] == 0 or _is_closed(attribute, child.module):
                    continue
                seen.add(index)
                if (
                    class_name(child.module) in repeated
                    and has_forward(child.module)
                    and self.numels[index] >= self.block_floor
                ):
                    blocks.append(child)
                elif type(child.module) in CERTAIN_LEAVES + WHOLE_MODULES:
                    if self.numels[index] >= self.leaf_floor:
                        leaves.append(child)
                else:
                    visit(child)

        if type(top.module) not in CERTAIN_LEAVES + WHOLE_MODULES:
            visit(top)
        return blocks, leaves

    def _repeated_classes(self, node: ModuleNode) -> set[str]:
        if not isinstance(node.module, CONTAINERS):
            return set()
        counts = Counter(class_name(self.nodes[index].module) for _, index in node.children if self.numels[index])
        return {name for name, count in counts.items() if count >= 2}


def _is_closed(attribute: str, module: nn.Module) -> bool:
    """Whether neither the module nor anything below it may become a unit. See [Note: What makes a good unit]."""
    return (
        "expert" in attribute.lower()
        or attribute == "parametrizations"
        or isinstance(module, (ParametrizationList, nn.AdaptiveLogSoftmaxWithLoss, torch.jit.ScriptModule))
    )
