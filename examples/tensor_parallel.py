"""A byte-level Llama of which neighbouring ranks compute each layer together, beside ZeRO.

    python examples/tensor_parallel.py fit --config configs/tensor_parallel.yaml

Data, training and report are those of ``language_model.py``; the model has RMSNorm, rotary attention and SwiGLU. Four
processes form a mesh of 2 x 2: two compute each layer together, and ZeRO shards what each of them has of it with the
process that has the same part. The same model without tensor parallelism, on two processes with the same batches:

    python examples/tensor_parallel.py fit --config configs/tensor_parallel.yaml --trainer.strategy zero3
        --trainer.devices 2

``--model.sequence_parallel true`` splits the activations between the layers too, along the sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # data and training are in the other example

from examples.language_model import VOCABULARY, ByteModel, Rotary, main


class Attention(nn.Module):
    """Causal attention with rotary positions. It computes the heads of which it has the projections."""

    def __init__(self, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.rotary = Rotary(self.head_dim, context)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, dim)`` to the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """A network whose hidden units have gates.

    Source: GLU variants improve transformer (arXiv:2002.05202).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-8 * dim // 3 // 32) * 32  # about as many weights as a network of width 4 * dim without gates
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, dim)`` to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Pre-norm transformer block: attention, then a network, each added to its input."""

    def __init__(self, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, context)
        self.network_norm = nn.RMSNorm(dim)
        self.network = SwiGLU(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, dim)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.network(self.network_norm(x))


def parallel_plan(layers: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How ``parallelize_module`` divides a ``ByteLlama``.

    The first layers of attention and network are split by their outputs, the last by their inputs, so that one sum over
    the ranks ends each. Between them activations are whole on every rank, or split along the sequence.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for index in range(layers):
        block = f"blocks.{index}"
        for first in ("attention.query", "attention.key", "attention.value", "network.gate", "network.up"):
            plan[f"{block}.{first}"] = ColwiseParallel()
        for last in ("attention.out", "network.down"):
            plan[f"{block}.{last}"] = RowwiseParallel(output_layouts=between)
        for part in ("attention", "network"):  # one exchange for the layers that have the same input
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            if sequence_parallel:
                plan[f"{block}.{part}_norm"] = SequenceParallel()
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    return plan


class ByteLlama(ByteModel):
    """A Llama over bytes, parallelised if the strategy has a mesh.

    Args:
        dim: Width of the model, a multiple of ``2 * heads``.
        layers: Number of transformer blocks.
        heads: Attention heads per block, a multiple of the ranks that compute a layer together.
        context: Most bytes the model can see. Taken from ``data.window``.
        sequence_parallel: Split the activations between the layers along the sequence.
        learning_rate: Highest learning rate, reached at the end of the warm-up.
        weight_decay: AdamW's weight decay, for matrices only.
        warmup_steps: Steps of linear warm-up; from there the learning rate falls to a tenth along a cosine.
    """

    def __init__(
        self,
        dim: int = 128,
        layers: int = 6,
        heads: int = 4,
        context: int = 256,
        sequence_parallel: bool = False,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__(context, learning_rate, weight_decay, warmup_steps)
        if dim % (2 * heads):
            raise ValueError(f"model.dim must be a multiple of 2 * model.heads, got dim={dim} and heads={heads}")
        self.save_hyperparameters()
        self.dim, self.layers, self.heads = dim, layers, heads
        self.sequence_parallel = sequence_parallel
        self.pieces = 1  # of a sequence

    def configure_model(self) -> None:
        """Make the layers, and divide them over the ranks of a tensor-parallel group."""
        if hasattr(self, "embedding"):
            return
        self.embedding = nn.Embedding(VOCABULARY, self.dim)
        self.blocks = nn.ModuleList(LlamaBlock(self.dim, self.heads, self.context) for _ in range(self.layers))
        self.norm = nn.RMSNorm(self.dim)
        self.head = nn.Linear(self.dim, VOCABULARY, bias=False)
        self._initialize([linear for block in self.blocks for linear in (block.attention.out, block.network.down)])
        if self.device_mesh is not None:
            self._parallelize(self.device_mesh["tensor_parallel"])

    def _parallelize(self, mesh: DeviceMesh) -> None:
        if self.heads % mesh.size():
            raise ValueError(f"model.heads must be a multiple of tensor_parallel_size={mesh.size()}, got {self.heads}")
        parallelize_module(self, mesh, parallel_plan(self.layers, self.sequence_parallel))
        self.pieces = mesh.size() if self.sequence_parallel else 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes ``(batch, time)`` of any integer dtype to the logits of the next byte, ``(batch, time, 256)``."""
        time = tokens.shape[1]
        if time % self.pieces:  # no byte sees what follows it
            tokens = F.pad(tokens, (0, -time % self.pieces))
        return super().forward(tokens)[:, :time]


if __name__ == "__main__":
    main(ByteLlama)
