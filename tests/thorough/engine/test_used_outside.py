"""A parameter of a unit that is used while nothing of the unit runs: DDP's numbers, whatever the ranks do then."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, NvmeOffload, ZeroStrategy, full_parameters
from lightning_zero.errors import ParameterAccessError
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Four units and a root. ``use`` computes something from them in a step."""

    def __init__(self, use: Callable[[Net, Tensor], Tensor], call: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.use, self.call = use, call
        self.number = 0
        self.found: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.number = batch_idx
        torch.manual_seed(31 * int(batch) + self.global_rank)
        x = torch.randn(5, 6)
        loss = self(x).square().mean() + self.use(self, x)
        self.found.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.found.append((self(torch.ones(2, 6)).mean() + self.use(self, torch.ones(2, 6))).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def nothing(net: Net, x: Tensor) -> Tensor:
    return torch.zeros(())


def weight(net: Net, number: int) -> Tensor:
    return net.blocks[number].up.weight


def penalty(net: Net, x: Tensor) -> Tensor:
    return sum((weight(net, n).T @ weight(net, n) - torch.eye(WIDTH)).norm() for n in (1, 3)) * 0.1


def views(net: Net, x: Tensor) -> Tensor:
    """What autograd saves of it are views and the parameter itself, in several graphs."""
    hidden = net.first(x) @ weight(net, 2)[2:4].t() * weight(net, 2)[0, 0]
    return (hidden.sum() * torch.stack([weight(net, 2), weight(net, 0)]).unbind()[1][1]).square().mean()


def in_backward(net: Net, x: Tensor) -> Tensor:
    hidden = net.first(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * weight(net, 3).detach().norm())
    return hidden.square().mean()


def recomputed(net: Net, x: Tensor) -> Tensor:
    compute = lambda hidden: torch.tanh(F.linear(hidden, weight(net, 1)))  # noqa: E731
    return checkpoint(compute, net.first(x), use_reentrant=False).square().mean()


def of_one_rank(net: Net, x: Tensor) -> Tensor:
    if net.global_rank == 1:
        net.seen = weight(net, 2).detach().norm().item()
    return torch.zeros(())


def from_the_third_step_on(net: Net, x: Tensor) -> Tensor:
    return weight(net, 1).square().sum() * 0.01 if net.number >= 2 else torch.zeros(())


def seen_by_no_graph(net: Net, x: Tensor) -> Tensor:
    return (weight(net, 0).data * weight(net, 3)).sum() + weight(net, 1).detach().cpu().max()


def amid(net: Net, x: Tensor) -> Tensor:
    """Whole parameters for a while, between the use and the rest of the graph."""
    seen = weight(net, 1).t()
    if any(True for _ in net.parameters()) and type(net.trainer.strategy).__name__ == "ZeroStrategy":
        with full_parameters(net.blocks[2]):
            norm = weight(net, 2).detach().norm()
    else:
        norm = weight(net, 2).detach().norm()
    return (net.first(x) @ seen).mean() * norm


def submodule(net: Net, x: Tensor) -> Tensor:
    return net.blocks[2].norm(net.first(x)).square().mean()


SOMETIMES = (from_the_third_step_on,)
USES = {
    use.__name__: use
    for use in (
        penalty,
        views,
        in_backward,
        recomputed,
        of_one_rank,
        from_the_third_step_on,
        seen_by_no_graph,
        amid,
        submodule,
    )
}


@dataclass(frozen=True)
class Setting:
    strategy: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    wire: str = "1"
    trainer: dict[str, Any] = field(default_factory=dict)
    reference: Any = "ddp"


SETTINGS = {
    "plain": Setting(),
    "one slot": Setting({"prefetch": 0}),
    "far ahead": Setting({"prefetch": 3}),
    "gloo": Setting(wire="0"),
    "alone": Setting(ranks=1),
    # Averages of three, and sums over micro-steps, are rounded in another way than DDP's: the stages are the same.
    "three": Setting(ranks=3, reference=2),
    "micro-steps": Setting(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, reference=2),
    "mixed": Setting(trainer={"precision": "bf16-mixed"}, reference=2),
    "on the host": Setting({"offload": HostOffload(parameters=True)}),
    "in files": Setting({"offload": NvmeOffload(path="files", parameters=True)}),
}


def play(strategy: Any, use: Any, call: Any = Block.__call__, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    net = Net(use, call)
    with quiet():
        trainer = make_trainer(strategy, limit_val_batches=1, val_check_interval=2, **options)
        data = DataLoader(range(4), batch_size=None)
        trainer.fit(net, data, data)
    with full_parameters(net):
        return net.found, {name: value.detach().clone() for name, value in net.named_parameters()}


def zero(stage: int, **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage=stage, **({"units": ["Block"]} if stage == 3 else {}), **options)  # type: ignore[arg-type]


def assert_alike(found: Any, expected: Any, use: str = "") -> None:
    assert found[0] == expected[0], use
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), (use, name)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_it_counts_as_under_ddp(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()

    def run(rank: int) -> list[tuple[str, Any, Any]]:
        reference = lambda: "ddp" if setting.reference == "ddp" else zero(setting.reference)  # noqa: E731
        # In 16 bit the gradients of what is shown twice are added in 32 bit: see docs/optimizers.md.
        uses = {name: use for name, use in USES.items() if not (setting.trainer.get("precision") and use in SOMETIMES)}
        return [
            (name, play(zero(3, **setting.strategy), use, **setting.trainer), play(reference(), use, **setting.trainer))
            for name, use in uses.items()
        ]

    environment = {"LIGHTNING_ZERO_SHARED_MEMORY": setting.wire}
    for found in run_world(setting.ranks, run, timeout=120, environment=environment):
        for name, result, expected in found:
            assert_alike(result, expected, name)


def told_of(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "while no module of its unit ran" in text]


def test_blocks_that_are_not_called_but_forwarded_stay_by_one() -> None:
    """From the first use on units are gathered around the modules inside of them, so that the others need not stay."""

    def run(rank: int) -> tuple[Any, Any, list[str]]:
        net = Net(nothing, Block.forward)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(zero(3), limit_val_batches=0).fit(net, DataLoader(range(3), batch_size=None))
        return net.found, play("ddp", nothing, Block.forward)[0], told_of(caught)

    for found, expected, told in run_world(2, run):
        assert found == [expected[place] for place in (1, 2, 4)]  # between evaluations
        assert len(told) == 1
        assert told[0].startswith("'blocks.0.norm.weight' of 'blocks.0': used in")


def test_a_thread_of_the_user_s_own_is_refused() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        errors: list[Exception] = []

        def read() -> None:
            try:
                weight(net, 1).norm()
            except ParameterAccessError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert len(errors) == 1
        assert "'blocks.1.up.weight' are not in memory here, and norm() needs them" in str(errors[0])
        assert "runs in a thread of its own" in str(errors[0])
        return torch.zeros(())

    for found, reference in run_world(2, lambda rank: (play(zero(3), use), play("ddp", nothing)), timeout=120):
        assert_alike(found, reference)


def test_an_error_behind_it_leaves_nothing_behind() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        if net.number == 1:
            norm = weight(net, 2).norm()
            try:
                net.blocks[0](torch.ones(2, 3))
            except RuntimeError:
                return norm
        return torch.zeros(())

    for found, reference in run_world(2, lambda rank: (play(zero(3), use), play("ddp", use)), timeout=120):
        assert_alike(found, reference)


def test_in_a_call_of_the_model_outside_of_steps() -> None:
    """Its backward may come at any time, and nothing tells of it."""

    class Bare(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.found: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(self.a(x), self.b.weight) * self.b.bias[0])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.b(self.a(torch.ones(2, 4))).square().sum()

        def on_train_batch_end(self, *_: Any) -> None:
            x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
            first, second = self(x), self(2 * x)  # two graphs at once
            self.found.append(torch.autograd.grad((first * second).sum(), x)[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(rank: int) -> list[list[Tensor]]:
        found = []
        for strategy in ("ddp", ZeroStrategy(stage=3, units=["Linear"])):
            net = Bare()
            with quiet():
                make_trainer(strategy).fit(net, DataLoader(range(3), batch_size=None))
            found.append(net.found)
        return found

    for expected, found in run_world(2, run):
        assert len(found) == 3
        assert all(map(torch.equal, found, expected))


def test_a_checkpoint_of_a_method_of_a_unit_is_refused_by_torch() -> None:
    """Its first use inside of one: torch sees other tensors saved the second time."""

    def method(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block.forward, x, use_reentrant=False)

    def run(rank: int) -> None:
        with quiet():
            trainer = make_trainer(ZeroStrategy(units=["Block"]), num_sanity_val_steps=0)
            loaders = [DataLoader(range(2), batch_size=None) for _ in range(2)]
            with pytest.raises(CheckpointError):
                trainer.fit(Net(nothing, method), *loaders)

    run_world(2, run)
