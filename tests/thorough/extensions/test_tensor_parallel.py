"""Tensor parallelism on more meshes, and of models of other shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

from tests.helpers.parallel import (
    VOCABULARY,
    WIDTH,
    Llama,
    Mlp,
    Parallel,
    adamw,
    alone,
    distance,
    drawn,
    fit,
    gelu_plan,
    llama_plan,
    loss_of,
    made,
    quiet,
)
from tests.helpers.split import Feed
from tests.helpers.world import run_world
from tests.world.extensions.test_tensor_parallel import F64, MODELS, STAGES, meshes, same, tie, zero


@pytest.mark.parametrize(("ranks", "tensor"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
def test_numbers_are_those_of_one_process(ranks: int, tensor: int) -> None:
    run_world(ranks, meshes, tensor, list(MODELS), timeout=200.0)


class Attention(nn.Module):
    """Half as many heads of keys and values as of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 6)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        heads[1:] = [one.repeat_interleave(2, 1) for one in heads[1:]]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of three for each position, by a router that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Feed(WIDTH, 2 * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at, weight = (chosen == number).any(-1), (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out.index_put((at,), weight[at] * expert(x[at]), accumulate=True)
        return out


class Recomputed(torch.autograd.Function):
    """Runs a module without a graph, and once more in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), gradients)
        return x.grad, None


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention, self.kind = nn.LayerNorm(WIDTH), Attention(), kind
        self.feed = Experts() if kind == "experts" else Feed(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        run = partial(Recomputed.apply, module=self.attention) if self.kind == "function" else self.attention
        return self.feed(x + run(self.norm(x)))


class Shaped(nn.Module):
    """``shared``: blocks are called twice; ``classes``: the head gets the first token, which is a parameter."""

    unit = "Block"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(VOCABULARY, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH)) if kind == "classes" else None
        self.body = nn.Sequential(Block(kind), Block(kind))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x[:, 1:]], 1)
        x = self.norm(self.body(self.body(x) if self.kind == "shared" else x))
        return self.head(x) if self.token is None else self.head(x[:, :1]).expand(-1, tokens.shape[1], -1)


def shaped_plan(net: Shaped) -> dict[str, Any]:
    between = Shard(1) if net.kind == "classes" else Replicate()
    plan: dict[str, Any] = {f"body.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan["body.*.attention.out"] = RowwiseParallel(output_layouts=between)
    feed = "body.*.feed" if net.kind != "experts" else "body.*.feed.experts.*"
    plan |= {
        f"{feed}.up": ColwiseParallel(input_layouts=between),
        f"{feed}.down": RowwiseParallel(output_layouts=between),
    }
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    if net.kind != "classes":
        return {**plan, "embedding": RowwiseParallel(input_layouts=Replicate())}
    whole, split = (Replicate(),), (Shard(1),)
    plan |= {"body.*.norm": SequenceParallel(), "body.*.feed.norm": SequenceParallel(), "norm": SequenceParallel()}
    plan["body.*.attention"] = PrepareModuleInput(input_layouts=split, desired_input_layouts=whole)
    begin = PrepareModuleInput(input_layouts=whole, desired_input_layouts=split, use_local_output=True)
    return {**plan, "body": begin}


def compile_blocks(net: Shaped) -> None:
    for block in net.body:
        block.compile(backend="aot_eager", dynamic=False)


CHANGES: dict[str, Any] = {
    "tied": tie,
    "a compiled layer": lambda net: net.body[1].feed.compile(backend="aot_eager"),
    "compiled blocks": compile_blocks,
    "compiled": lambda net: net.compile(backend="aot_eager", dynamic=False),
}


def test_models_of_other_shapes() -> None:
    def run(rank: int) -> None:
        for kind in ("classes", "experts", "function", "shared", *CHANGES):
            build, change = partial(Shaped, kind), CHANGES.get(kind, lambda net: None)
            build.unit = Shaped.unit  # type: ignore[attr-defined]
            found: list[dict[str, Any]] = []
            with quiet():
                expected = alone(build, F64, steps=5, change=change)
            for stage in STAGES:
                module = Parallel(build, shaped_plan, F64, change=change)
                found.append(fit(zero(stage, 2, build), module, 5, precision="64-true"))
                assert (far := distance(expected, found[-1])) < 1e-12, f"{kind}, stage {stage}: {far}"
            assert same(*found), kind

    run_world(4, run, timeout=200.0)


def parts_of(parameters: Any) -> tuple[list[Any], list[Any]]:
    """Those of the last block, and the others."""
    named = list(parameters)
    return [p for name, p in named if "blocks.1" in name], [p for name, p in named if "blocks.1" not in name]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Alternating(Parallel):
    """Two optimizers, stepped on by hand: one in each step, after clipping, the other in each second one. In these the
    first block is left out."""

    def __init__(self) -> None:
        super().__init__(Mlp, gelu_plan, F64)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        own, others = parts_of(self.named_parameters())
        return adamw(own), momentum(others)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        tokens, targets = self.rows(int(batch))
        both: Any = self.optimizers()
        self.manual_backward(loss_of(partly(self.net, tokens, batch), targets))
        self.clip_gradients(both[0], 0.05, "norm")
        for optimizer in both[: 1 + batch % 2]:
            optimizer.step()
            optimizer.zero_grad()


def partly(net: Mlp, tokens: Tensor, step: int) -> Tensor:
    x = net.embedding(tokens)
    for block in net.blocks[step % 2 :]:  # type: ignore[union-attr]
        x = block(x)
    return net.head(net.norm(x))


class Thawing(BaseFinetuning):
    """Thaws the last block after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """It is frozen where it is made."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[1], optimizer, lr=0.01, initial_denom_lr=1.0)


def frozen(net: Mlp, frozen: bool = True) -> None:
    net.blocks[1].requires_grad_(not frozen)


def test_optimizers_by_hand_and_thawing() -> None:
    def step(net: Mlp, index: int, tokens: Tensor, targets: Tensor) -> None:
        half = len(tokens) // 2  # of a data-parallel group
        for rows in (slice(0, half), slice(half, None)):
            (loss_of(partly(net, tokens[rows], index), targets[rows]) / 2).backward()

    by_hand, thawed = made(Mlp, F64), made(Mlp, F64)
    own, others = parts_of(by_hand.named_parameters())
    both = adamw(own), momentum(others)
    for index in range(4):
        step(by_hand, index, *drawn(index))
        torch.nn.utils.clip_grad_norm_(own, 0.05)
        for optimizer in both[: 1 + index % 2]:
            optimizer.step()
            optimizer.zero_grad()
    frozen(thawed)
    optimizer = adamw([p for p in thawed.parameters() if p.requires_grad])
    for index in range(4):
        if index == 2:
            frozen(thawed, False)
            optimizer.add_param_group({"params": [*thawed.blocks[1].parameters()], "lr": 0.01})
        step(thawed, 0, *drawn(index % 2))
        optimizer.step()
        optimizer.zero_grad()

    def run(rank: int) -> None:
        for stage in STAGES:
            for module, net, options in (
                (Alternating(), by_hand, {"steps": 4}),
                (
                    Parallel(Mlp, gelu_plan, F64, change=frozen),
                    thawed,
                    {"steps": 2, "max_epochs": 2, "callbacks": [Thawing()]},
                ),
            ):
                found = fit(zero(stage, 2, Mlp), module, precision="64-true", **options)["weights"]  # type: ignore[arg-type]
                for name, value in net.named_parameters():
                    assert (found[f"net.{name}"] - value).abs().max() < 1e-12, (stage, name)

    run_world(4, run, timeout=200.0)


def adapted() -> Any:
    """``Llama`` with adapters on some of its layers."""
    peft = pytest.importorskip("peft")
    names = ["query", "value", "out", "up", "down"]
    return peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False, lora_dropout=0.0), Llama()
    )


def adapted_plan(net: Any, sequence: bool) -> dict[str, Any]:
    """As for ``Llama``, but what a layer's style says is said of its base, and of the adapter's half that is split."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {}
    for name, style in llama_plan(net, sequence).items():
        if not hasattr(net.get_submodule(name), "base_layer"):
            plan[name] = style
            continue
        plan[f"{name}.base_layer"] = style
        if isinstance(style, ColwiseParallel):
            plan[f"{name}.lora_B.default"] = ColwiseParallel()
            if sequence:  # it gets a DTensor
                plan[f"{name}.lora_A.default"] = ColwiseParallel(output_layouts=Replicate())
        else:
            plan[f"{name}.lora_A.default"] = RowwiseParallel(output_layouts=between)
            if sequence:
                plan[f"{name}.lora_B.default"] = SequenceParallel(use_local_output=True)
    return plan


def freeze(net: Any) -> None:
    """All but adapters: again, as ``SequenceParallel`` makes parameters anew."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora" in name)


@pytest.mark.filterwarnings("ignore")  # peft's and its imports'
def test_adapters_of_peft() -> None:
    pytest.importorskip("peft")
    expected = alone(adapted, F64)

    def run(rank: int) -> None:
        for sequence in (False, True):
            for stage in STAGES:
                module = Parallel(adapted, partial(adapted_plan, sequence=sequence), F64, change=freeze)
                found = fit(zero(stage, 2, Llama), module, precision="64-true")
                assert distance(expected, found) < 1e-12, (sequence, stage)

    run_world(4, run, timeout=200.0)
