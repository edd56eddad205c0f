"""The backward of an embedding gathers no weights, on no rank, unless somebody has arranged to read them there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.unit import ShardedUnit
from tests.helpers.cases import VOCABULARY, WIDTH, Block, case, cross_entropy, tokens
from tests.helpers.probe import Probe, fit
from tests.helpers.training import Recipe, differences, train_ddp, train_zero
from tests.helpers.world import run_world

STEPS = 4


class Plain(nn.Module):
    """Two tables, blocks and a head. What a rank has of its own are branches and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.others = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.others(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.look_up(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Plain):
    def look_up(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.tokens(ids.flip(-1)) + self.others(ids)


class Recomputed(Plain):
    def look_up(self, ids: Tensor) -> Tensor:
        return self.blocks[0](self.tokens(ids) + self.others(ids))

    def forward(self, ids: Tensor) -> Tensor:
        x = checkpoint(self.look_up, ids, use_reentrant=False)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Branching(Plain):
    """Each rank looks up in a table of its own, and in the third step in the other one."""

    steps = 0

    def look_up(self, ids: Tensor) -> Tensor:
        self.steps += 1
        return (self.tokens, self.others)[(dist.get_rank() + self.steps // 3) % 2](ids)


class Scaled(Plain):
    """A hook of the user's computes with the weights, and autograd saves them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.register_forward_hook(lambda module, ids, x: x * module.weight.square().mean())


class Decayed(Plain):
    """A hook on the weight reads it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.tokens.weight
        weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())


class DecayedLater(Plain):
    """One rank alone does so, from the third step on."""

    steps = 0

    def look_up(self, ids: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 1:
            weight = self.tokens.weight
            weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
        return super().look_up(ids)


class Projected(Plain):
    """The table is used in place of the head too, past its module: it stays for all of a phase."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.look_up(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.tokens.weight)


class Own(nn.Embedding):
    """Nobody knows what a class of the user's does."""


class Derived(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Own(VOCABULARY, WIDTH)


FORWARD, BOTH = STEPS, 2 * STEPS
# Of each, how often ``tokens`` may be gathered in all steps.
MODELS: dict[type[Plain], range] = {
    Plain: range(FORWARD, FORWARD + 1),
    Twice: range(FORWARD, FORWARD + 1),
    Recomputed: range(BOTH, BOTH + 1),  # in the forward that runs again
    Branching: range(1, FORWARD + 1),
    Scaled: range(BOTH, BOTH + 1),
    Decayed: range(BOTH, BOTH + 1),
    DecayedLater: range(FORWARD + 2, FORWARD + 3),
    Projected: range(FORWARD, BOTH + 2),
    Derived: range(BOTH, BOTH + 1),
}


def test_an_embedding_is_gathered_in_forward_alone() -> None:
    def play(rank: int) -> list[Any]:
        launch, counts = ShardedUnit.launch, Counter[str]()

        def counted(unit: ShardedUnit, *arguments: Any) -> Any:
            counts[unit.name] += 1
            return launch(unit, *arguments)

        ShardedUnit.launch = counted  # type: ignore[method-assign]  # in this process alone
        found = []
        for model in MODELS:
            counts.clear()
            units = ("Block", "Embedding", *(["Own"] if model is Derived else []))
            one = case(model.__name__, model, batch=tokens, loss=cross_entropy, units=units)
            recipe = Recipe(steps=STEPS)
            zero = train_zero(one, recipe, stage=3)
            found.append((differences(train_ddp(one, recipe), zero), dict(counts)))
        mixed = case("mixed", Plain, batch=tokens, loss=cross_entropy, units=("Block", "Embedding"))
        fit(Probe(mixed), stage=3, micro_steps=3, options={"precision": "bf16-mixed"})  # gradients of 16 bits
        return found

    for (model, expected), *ranks in zip(MODELS.items(), *run_world(2, play), strict=True):
        for differ, counts in ranks:
            assert differ == [], model.__name__
            assert counts["model.tokens"] in expected, (model.__name__, counts)
        assert ranks[0][1] == ranks[1][1], model.__name__
