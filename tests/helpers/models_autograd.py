"""Cases about autograd: recomputation, odd outputs, hooks of the user, gradients inside of forward, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.cases import VOCABULARY, WIDTH, Batch, Block, Case, Stack, case, cross_entropy, mse, tokens

__all__ = ["CASES"]

CASES: dict[str, Case] = {}


def _add(name: str, build: Callable[[], nn.Module], **options: Any) -> None:
    CASES[name] = case(name, build, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Recomputation


class CheckpointedBlock(Block):
    """Recomputes its own inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.dropout = nn.Dropout(0.1)

    def _inside(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=self.reentrant)


class CheckpointedStack(Stack):
    """Recomputes three blocks at a time."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(*(Block() for _ in range(6)))
        self.reentrant = reentrant

    def run(self, x: Tensor) -> Tensor:
        for start in (0, 3):
            part = nn.Sequential(*self.layers[start : start + 3])
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class CheckpointedPart(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(checkpoint(lambda y: F.gelu(self.up(y)), self.norm(x), use_reentrant=self.reentrant))


for _reentrant in (False, True):
    _name = "reentrant" if _reentrant else "non_reentrant"
    # DDP can not search for unused parameters through a reentrant checkpoint.
    _ddp = {"find_unused_parameters": not _reentrant}
    _add(
        f"checkpoint_{_name}_inside_unit",
        lambda reentrant=_reentrant: Stack(*(CheckpointedBlock(reentrant) for _ in range(3))),
        units=("CheckpointedBlock",),
        ddp=_ddp,
        notes="with dropout: the random state is restored",
    )
    _add(
        f"checkpoint_{_name}_around_three_units",
        lambda reentrant=_reentrant: CheckpointedStack(reentrant),
        ddp=_ddp,
    )
    _add(
        f"checkpoint_{_name}_around_part_of_a_unit",
        lambda reentrant=_reentrant: Stack(*(CheckpointedPart(reentrant) for _ in range(3))),
        units=("CheckpointedPart",),
        ddp=_ddp,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Outputs that are more than a tensor


class Routed(NamedTuple):
    hidden: Tensor
    extras: dict[str, list[Tensor]]


@dataclass
class Output:
    hidden: Tensor
    auxiliary: Tensor


class AuxiliaryBlock(Block):
    """Hands out an auxiliary loss next to its output, wrapped in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        auxiliary = self.up(x).square().mean()
        return {
            "nested": lambda: Routed(hidden, {"losses": [auxiliary, torch.ones(())]}),
            "dataclass": lambda: Output(hidden, auxiliary),
        }[self.kind]()


class AuxiliaryStack(Stack):
    def __init__(self, kind: str) -> None:
        super().__init__(*(AuxiliaryBlock(kind) for _ in range(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.stem(x), torch.zeros(())
        for layer in self.layers:
            out = layer(x)
            if isinstance(out, Routed):
                x, auxiliary = out.hidden, out.extras["losses"][0]
            else:
                x, auxiliary = out.hidden, out.auxiliary
            total = total + auxiliary
        return self.head(x), total


def _with_auxiliary(model: nn.Module, batch: Batch) -> Tensor:
    output, auxiliary = model(batch[0])
    return F.mse_loss(output, batch[1]) + auxiliary


for _kind in ("nested", "dataclass"):
    _add(
        f"auxiliary_in_{_kind}",
        lambda kind=_kind: AuxiliaryStack(kind),
        units=("AuxiliaryBlock",),
        loss=_with_auxiliary,
    )


class KeywordBlock(Block):
    def forward(self, *, hidden: Tensor, scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden if scale is None else hidden * scale)


class KeywordStack(Stack):
    def __init__(self) -> None:
        super().__init__(KeywordBlock(), KeywordBlock())

    def run(self, x: Tensor) -> Tensor:
        return self.layers[1](scale=x.mean(), hidden=self.layers[0](hidden=x))


_add("keyword_arguments", KeywordStack, units=("KeywordBlock",))

# ---------------------------------------------------------------------------------------------------------------------
# Weights used in other ways than by a layer's forward


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)


class Assorted(nn.Module):
    """Layers that save their weight as it is, as a view of it, as a copy of it, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.prelu = nn.PReLU(WIDTH)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.group_norm = nn.GroupNorm(4, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag(torch.arange(6).view(2, 3) + x.shape[1]).sum(0)
        x = self.prelu((self.norm(x) + bags).transpose(1, 2)).transpose(1, 2)
        x = self.bilinear(x, torch.einsum("abc,cd->abd", x, self.matrix))
        x = F.linear(x, self.matrix[:WIDTH].t() * 2)
        return self.group_norm(x.transpose(1, 2)).transpose(1, 2)


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, transposed = ctx.saved_tensors
        return gradient @ transposed.t(), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return SavesWeight.apply(x, self.weight)


_add("weight_norm", lambda: Stack(Normed(), Normed()), units=("Normed",), notes="a parametrization")
_add("assorted_layers", lambda: Stack(Assorted(), Assorted()), units=("Assorted",))
_add("custom_function", lambda: Stack(CustomFunction(), CustomFunction()), units=("CustomFunction",))


class OwnMethods(Stack):
    """Used through its parts: ``forward`` is never called."""

    def encode(self, x: Tensor) -> Tensor:
        return self.run(F.linear(x, self.stem.weight, self.stem.bias))


_add("own_methods", OwnMethods, loss=lambda model, batch: F.mse_loss(model.head(model.encode(batch[0])), batch[1]))


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers[1](self.layers[0](self.embedding(ids))))


_add(
    "sparse_embedding",
    SparseEmbedding,
    batch=tokens,
    loss=cross_entropy,
    units=("Embedding", "Block"),
    optimizer="sgd",
    notes="sparse gradients are reduced as dense ones",
)

# ---------------------------------------------------------------------------------------------------------------------
# More than one pass, and other hooks


def _two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return mse(model, batch) + mse(model, (batch[1], batch[0]))


def _evaluation_between(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch[0])
    with torch.no_grad():
        whole = model(batch[1])
        part = model.layers[1](batch[1])
    return F.mse_loss(output, batch[1]) * (1 + whole.square().mean() + part.square().mean())


def _inner_gradient(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
    return F.mse_loss(output + gradient, batch[1])


def _frozen_teacher() -> nn.Module:
    model = Stack(Block(), Block(), Block(), Block())
    model.layers[3].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    return model


def _distill(model: nn.Module, batch: Batch) -> Tensor:
    x = model.stem(batch[0])
    with torch.no_grad():
        target = model.layers[3](model.layers[2](x))
    return F.mse_loss(model.head(model.layers[1](model.layers[0](x))), target)


class InnerGradient(Block):
    """Needs a gradient of its own in forward (energy models, inner adaptation)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (direction,) = torch.autograd.grad(super().forward(y).square().sum(), y)
        return super().forward(x) - 0.1 * direction


class SavesThroughHooks(Block):
    """Doubles what it saves, halves what it reads: wrong bits if its hooks are switched off or applied twice."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return super().forward(x)


class HookedBlock(Block):
    """User hooks that read the module's own weights, registered before the engine's and on a unit itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * module.up.weight.sum().tanh(),))
        self.register_forward_hook(lambda module, args, output: output + module.down.bias)


class BackwardHookedBlock(Block):
    """A backward hook of the user that reads the module's weights and changes the gradient it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, inputs, _: (inputs[0] * module.up.weight.sum().cos(),))


class CompiledStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="aot_eager")


_add("two_forwards_one_backward", Stack, loss=_two_forwards)
_add("evaluation_between", Stack, loss=_evaluation_between)
_add("gradient_of_inputs", Stack, loss=_inner_gradient)
_add("frozen_teacher_without_grad", _frozen_teacher, loss=_distill)
_add("inner_gradient", lambda: Stack(InnerGradient(), InnerGradient()), units=("InnerGradient",))
_add("saved_tensors_hooks", lambda: Stack(*(SavesThroughHooks() for _ in range(2))), units=("SavesThroughHooks",))
_add("user_forward_hooks", lambda: Stack(HookedBlock(), HookedBlock()), units=("HookedBlock",))
_add("user_backward_hooks", lambda: Stack(*(BackwardHookedBlock() for _ in range(3))), units=("BackwardHookedBlock",))
_add("compiled_blocks", CompiledStack, notes="traced and differentiated ahead of time, no compiler needed")
