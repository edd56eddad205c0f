"""Views of weights that outlive the forward they were made in, as users keep them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import HostOffload
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Net, assert_same, fit, made, quiet, zero
from tests.helpers.world import run_world


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH) / 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return x + F.gelu(self.linear(x))


class Prompts(Block):
    """Gives a view of a weight away, which others compute with."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.prompt.expand(3, -1)


class Inside(Block):
    """The same, in an object that nobody looks into."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), type("Output", (), {"prompt": self.prompt[:, : WIDTH // 2]})


class Keeps(Block):
    """Keeps its weight in an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.kept = self.linear.weight.detach()
        return super().forward(x)


class Data(Block):
    def forward(self, x: Tensor) -> Any:
        self.kept = self.linear.weight.data.t()
        return super().forward(x)


class Model(nn.Module):
    """Uses what its blocks have left behind when all of them are through; in the first two steps, or later only."""

    def __init__(self, block: Callable[[], Block], late: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.last, self.late, self.calls = nn.Linear(WIDTH, WIDTH), late, 0

    def forward(self, x: Tensor) -> Tensor:
        views: list[Tensor] = []
        for block in self.blocks:
            out = block(x)
            x, view = out if isinstance(out, tuple) else (out, block.kept)
            views.append(getattr(view, "prompt", view))
        self.calls += 1
        if not self.late or self.calls > 3:
            for number, view in enumerate(views):
                x = x + (number + 1) * view.sum(dim=0, keepdim=True).mean(dim=1, keepdim=True) / 10
        return self.last(x)


BLOCKS: dict[str, type[Block]] = {
    "a part of the output": Prompts, "in an object": Inside, "an attribute": Keeps, "of .data": Data
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "ahead": {"prefetch": 3},
    "one slot": {"prefetch": 0},
    "offload": {"offload": HostOffload(parameters=True)},
}


@pytest.mark.filterwarnings("ignore:A tensor that shares memory with")
@pytest.mark.parametrize("late", [False, True])
def test_they_show_their_own_weight(late: bool) -> None:
    def play(kind: Callable[[], Block], strategy: Strategy) -> dict[str, Any]:
        module = Net(lambda: Model(kind, late))
        return made(module, fit(strategy, module, count=6, val=2))

    def world(rank: int) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        with quiet():
            for name, kind in BLOCKS.items():
                units = [kind.__name__]
                strategies: dict[str, Strategy] = {
                    "ddp": DDPStrategy(find_unused_parameters=True),
                    "stage 1": zero(1, units=units),
                }
                strategies |= {label: zero(3, units=units, **options) for label, options in OPTIONS.items()}
                for label, strategy in strategies.items():
                    results.setdefault(label, {})[name] = play(kind, strategy)
        return results

    assert_same(run_world(2, world, timeout=200), ["stage 1", *OPTIONS])


class Looks(Net):
    """Reads, behind the step, what a block kept in it."""

    def __init__(self) -> None:
        super().__init__(lambda: Model(Keeps, late=True))
        self.read: list[bool] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.read.append(torch.equal(self.model.blocks[1].kept, self.shown))

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.shown = self.model.blocks[1].kept.clone()


def test_behind_the_step_they_show_the_old_values_and_a_warning_says_so() -> None:
    """Under DDP they show the new weight, which this rank does not have. They never show another one."""

    def world(rank: int) -> tuple[list[bool], list[str]]:
        module = Looks()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(zero(3, units=["Keeps"]), module, count=3)
        return module.read, [str(w.message) for w in caught if "shares memory with" in str(w.message)]

    for read, told in run_world(2, world):
        assert read == [True] * 3
        assert told
        assert "'model.blocks.0.linear.weight'" in told[0]
        assert "keeps the old values. Clone it where it is created" in told[0]


def test_nobody_is_warned_of_what_is_let_go() -> None:
    """Memory is fresh for as long as somebody has a part of the old, and none is left when nobody has."""

    def world(rank: int) -> tuple[int, list[str]]:
        module = Net(lambda: Model(Prompts))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit(zero(3, units=["Prompts"]), module, count=4)
        pool = trainer.strategy.engine.means.pool  # type: ignore[attr-defined]
        alive = sum(weak.lock() is not None for _, weak in pool._left)
        return alive, [str(w.message) for w in caught if "shares memory with" in str(w.message)]

    assert run_world(2, world) == [(0, [])] * 2
