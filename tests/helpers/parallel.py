"""Models that are tensor-parallel, trained on a mesh of ranks and, by a plain loop, in one process.

``Parallel`` is a LightningModule around one of them, for ``ZeroStrategy(tensor_parallel_size=...)`` and for Lightning's
``ModelParallelStrategy``; ``alone`` trains the same model on the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from tests.helpers.split import Feed
from tests.helpers.training import make_trainer

__all__ = [
    "LENGTH",
    "Llama",
    "Mlp",
    "Parallel",
    "adamw",
    "alone",
    "distance",
    "drawn",
    "fit",
    "gelu_plan",
    "llama_plan",
    "loss_of",
    "made",
    "quiet",
    "whole",
]

VOCABULARY, WIDTH, LENGTH, ROWS = 36, 24, 12, 12  # rows of a batch over all ranks


class Mlp(nn.Module):
    """Embedding, blocks with biases and norms, and a head."""

    unit = "Feed"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Feed(WIDTH, 4 * WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gelu_plan(net: Mlp, sequence: bool = False) -> dict[str, Any]:
    """How ``Mlp`` is parallelised; with ``sequence``, activations between the layers are split by position."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(len(net.blocks)):
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=between)
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan[f"blocks.{index}.norm"] = SequenceParallel()
    return plan


class _Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.size = WIDTH // heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # By the size of a head, so that a rank that has some of the heads computes with these.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 100 ** (torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Layer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = (nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.attention, self.feed = _Attention(heads), _Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    """Llama's shape: RMSNorm, rotary attention, a gated feed-forward, no biases."""

    unit = "_Layer"

    def __init__(self, heads: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Layer(heads) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def llama_plan(net: Llama, sequence: bool = False, loss: bool = False) -> dict[str, Any]:
    """How ``Llama`` is parallelised; with ``loss``, the head's output stays split over the vocabulary."""
    between = Shard(1) if sequence else Replicate()
    outputs: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False} if loss else {}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, **(outputs or {"output_layouts": Replicate()})),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(len(net.layers)):
        at = f"layers.{index}"
        if sequence:
            plan |= {f"{at}.attention_norm": SequenceParallel(), f"{at}.feed_norm": SequenceParallel()}
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{at}.attention": whole, f"{at}.feed": whole}
        for name in ("attention.query", "attention.key", "attention.value", "feed.gate", "feed.up"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "feed.down"):
            plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=between)
    return plan


class Parallel(pl.LightningModule):
    """Trains one of these models. The batch is a number, from which each data-parallel rank makes its rows.

    Args:
        build: makes the model.
        plan: of the model: what ``parallelize_module`` is given.
        dtype: of its parameters.
        loss: computes the loss while the logits are split over the vocabulary.
        change: of the model, after it is parallelised.
    """

    def __init__(
        self,
        build: Callable[[], Any] = Mlp,
        plan: Callable[[Any], Any] = gelu_plan,
        dtype: torch.dtype = torch.float32,
        loss: bool = False,
        change: Callable[[Any], None] = lambda net: None,
        optimizer: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.build, self.plan, self.change, self.parallel_loss = build, plan, change, loss
        self.make_optimizer = optimizer or adamw
        self.kind = dtype
        self.net: Any = None
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = made(self.build, self.kind)
        if self.device_mesh is not None:
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], self.plan(self.net))
        self.change(self.net)
        if not isinstance(self.trainer.strategy, ZeroStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def rows(self, batch_idx: int) -> tuple[Tensor, Tensor]:
        data = self.device_mesh["data_parallel"]
        tokens, targets = drawn(batch_idx)
        own = ROWS // data.size()
        rows = slice(data.get_local_rank() * own, (data.get_local_rank() + 1) * own)
        return tokens[rows], targets[rows]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = self.rows(int(batch))
        loss = loss_of(self.net(tokens), targets)
        self.losses.append(loss.detach().clone())
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel() if self.parallel_loss else contextlib.nullcontext():
            loss.backward(*args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients: list[Any] = [p.grad for p in self.parameters() if p.grad is not None]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
        self.norms.append(torch.nn.utils.get_total_norm(whole))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` that leaves gradients of pure noise as small as they are."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def made(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    """The model, with the same values at every call."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()  # which the precision of a Trainer changes
    torch.set_default_dtype(torch.float32)
    try:
        return build().to(dtype)
    finally:
        torch.set_default_dtype(default)


def drawn(batch_idx: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all ranks."""
    generator = torch.Generator().manual_seed(1000 + batch_idx)
    both = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return both[0], both[1]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy; of logits that are split over the vocabulary, by ``loss_parallel``."""
    with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def alone(
    build: Callable[[], Any] = Mlp,
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
    accumulate: int = 1,
    clip: float | None = None,
    value: float | None = None,
    change: Callable[[Any], None] = lambda net: None,
    optimizer: Callable[..., Any] = adamw,
) -> dict[str, Any]:
    """What one process makes of the batches of all ranks: the norms, and the weights after so many steps."""
    net = made(build, dtype)
    change(net)
    stepper = optimizer([p for p in net.parameters() if p.requires_grad])
    norms = []
    for step in range(steps):
        for micro in range(accumulate):
            tokens, targets = drawn(step * accumulate + micro)
            (loss_of(net(tokens), targets) / accumulate).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        if value is not None:
            torch.nn.utils.clip_grad_value_(net.parameters(), value)
        stepper.step()
        stepper.zero_grad()
    return {"norms": norms, "weights": {f"net.{name}": p.detach().clone() for name, p in net.named_parameters()}}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without advice of Lightning's, and without what torch warns of in the stock strategy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit(strategy: Any, module: Parallel, steps: int = 4, **options: Any) -> dict[str, Any]:
    """Train; the norms, and the weights afterwards, whole. Collective: every rank."""
    accumulate = options.get("accumulate_grad_batches", 1)
    with quiet():
        trainer = make_trainer(strategy, **options)
        trainer.fit(module, DataLoader(range(steps * accumulate), batch_size=None))  # type: ignore[arg-type]
        return {"norms": module.norms, "weights": whole(module)}


def whole(module: pl.LightningModule) -> dict[str, Tensor]:
    """All weights, whole. Collective: every rank."""
    if not isinstance(module.trainer.strategy, ZeroStrategy):
        return {name: p.full_tensor().detach().clone() for name, p in module.named_parameters()}  # type: ignore[operator]
    with full_parameters(module):
        found = {}
        for name, parameter in module.named_parameters():
            value, part = parameter.detach().clone(), getattr(parameter, "tensor_part", None)
            if part is not None and part.dim is not None and tuple(value.shape) != part.shape:
                mesh = module.device_mesh["tensor_parallel"]  # type: ignore[index]
                value = DTensor.from_local(value, mesh, [Shard(part.dim)]).full_tensor()
            found[name] = value
    return copy.deepcopy(found)


def distance(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """The largest difference of two weights or, relative, of two norms."""
    assert expected["weights"].keys() == found["weights"].keys()
    assert len(expected["norms"]) == len(found["norms"])
    ours, theirs = found["weights"], expected["weights"]
    weights = [float((ours[name].double() - value.double()).abs().max()) for name, value in theirs.items()]
    pairs = zip(found["norms"], expected["norms"], strict=True)
    norms = [abs(float(one) - float(other)) / float(other) for one, other in pairs]
    return max([*weights, *norms])
