"""Updated weights in stages 1 and 2: gathered at the end of a step, waited for where they are used next."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from lightning_zero.engine.events import Phase, Span
from lightning_zero.engine.weights import PublishedWeights
from lightning_zero.errors import ParameterAccessError
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world


class Net(pl.LightningModule):
    """Three blocks and a tied head; ``functional`` uses the head's weight, first of all, without calling its module."""

    def __init__(self, functional: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.head.weight
        self.functional, self.optimizer_count = functional, optimizers
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.told: list[tuple[str, Phase, str]] = []

    def loss(self, number: int) -> Tensor:
        torch.manual_seed(17 * number + self.global_rank)
        x = torch.randn(4, 32)
        x = F.linear(x, self.head.weight) if self.functional else self.head(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.tied(x).float().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(int(batch))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.loss(1000 + int(batch)).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    # An observer of the engine's spans

    def begin(self, span: Span) -> None:
        self.told.append(("begin", span.phase, span.unit))

    def end(self, span: Span) -> None:
        self.told.append(("end", span.phase, span.unit))


class Listening(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.strategy.engine.means.spans.observers.append(module)  # type: ignore[attr-defined]


def fit(net: Net, stage: Any, precision: Any, steps: int = 4, **options: Any) -> Net:
    with quiet():
        trainer = make_trainer(
            ZeroStrategy(stage=stage, bucket_mib=0.004, units=["Linear"], prefetch=1),
            precision=precision,
            callbacks=[Listening()],
            num_sanity_val_steps=0,
            **{"limit_val_batches": 0, **options},
        )
        loader = DataLoader(range(steps), batch_size=None)
        trainer.fit(net, loader, DataLoader(range(2), batch_size=None))
    return net


def steps_of(told: list[tuple[str, Phase, str]]) -> list[list[tuple[str, Phase, str]]]:
    """What was told between the beginnings of one optimizer step and the next."""
    steps: list[list[tuple[str, Phase, str]]] = []
    for event in told:
        if event[:2] == ("begin", Phase.STEP):
            steps.append([])
        if steps:
            steps[-1].append(event)
    return steps


@pytest.mark.parametrize("stage", [1, 2])
def test_mixed_precision_waits_for_each_unit_where_its_first_module_is_called(stage: int) -> None:
    told = run_world(2, lambda rank: fit(Net(), stage, "bf16-mixed").told)[0]
    steps = steps_of(told)
    assert len(steps) == 4
    forward = ("begin", Phase.FORWARD, "training_step")
    for step in steps[1:3]:  # the first forward of all looks at what is used; the last step has none behind it
        waits = [index for index, event in enumerate(step) if event[:2] == ("begin", Phase.WAIT_PUBLISH)]
        published = [event[2] for event in step if event[:2] == ("begin", Phase.PUBLISH)]
        assert len(published) == 7  # weight and bias of each block, and the head's weight
        assert min(waits) > step.index(forward), "something was waited for before the forward"
        order = [step[index][2] for index in waits]
        assert sorted(order) == sorted(published)
        assert published[0] == order[0], "what a forward uses first, the head, has to be on its way first"
        assert published[-1] in order[-2:], "and what it uses last, the last block, behind all others"


@pytest.mark.parametrize("stage", [1, 2])
def test_one_dtype_waits_at_the_end_of_the_step(stage: int) -> None:
    """Parameters may be read and written from then on, and nothing would notice."""
    told = run_world(2, lambda rank: fit(Net(), stage, "32-true").told)[0]
    for step in steps_of(told)[:-1]:
        waits = [index for index, event in enumerate(step) if event[:2] == ("begin", Phase.WAIT_PUBLISH)]
        assert waits
        assert max(waits) < step.index(("begin", Phase.FORWARD, "training_step"))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "validation between": {"val_check_interval": 2, "limit_val_batches": 2},
}


def test_weights_that_are_used_without_their_module_are_whole_and_waited_for_there() -> None:
    """In stages 1 and 2, beside stage 3 without such a use."""

    def run(rank: int) -> dict[str, list[Any]]:
        ways = {}
        for name, options in WAYS.items():
            nets = [fit(Net(functional=True), stage, "bf16-mixed", steps=6, **options) for stage in (1, 2)]
            nets.append(fit(Net(), 3, "bf16-mixed", steps=6, **options))
            ways[name] = [(net.losses, net.validated, net.told) for net in nets]
        return ways

    for ways in run_world(2, run, timeout=60):
        for name, (*odd, plain) in ways.items():
            assert [found[:2] for found in odd] == [plain[:2]] * 2, name
            assert (len(plain[0]), bool(plain[1])) == (6, "validation" in name)
        step = steps_of(ways["plain"][1][2])[1]
        start = step.index(("begin", Phase.FORWARD, "training_step"))
        assert not [e[2] for e in step[:start] if e[:2] == ("begin", Phase.WAIT_PUBLISH)]
        late = [e[2] for e in step[start:] if e[:2] == ("begin", Phase.WAIT_PUBLISH)]
        assert len(late) == len(set(late)) == 7


class Branching(Net):
    """Uses in later steps what the first has not used: a weight of its own, and that of a module it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(32, 32))
        self.spare = nn.Linear(32, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if int(batch) < 2:
            return loss
        added = torch.ones(1, 32).to(self.scale) @ F.linear(self.scale, self.spare.weight) + self.spare.bias
        self.losses.append(added.sum().item())
        return loss + added.float().square().mean()

    def loss(self, number: int) -> Tensor:
        if number >= 2:
            self.losses.append(self.scale.float().sum().item() + self.spare.weight.float().sum().item())
        return super().loss(number)


class Noisy(Net):
    """Writes to the 16-bit copies of weights."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.blocks[1].weight.mul_(1.5)
        return super().training_step(batch, batch_idx)


class NoisyData(Net):
    """Writes through ``.data``."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.blocks[1].weight.data.mul_(1.5)
        return super().training_step(batch, batch_idx)


def test_writing_to_copies_of_another_dtype_is_refused() -> None:
    """The masters would not get it, or get it rounded."""

    def run(rank: int) -> None:
        for net in (Noisy, NoisyData):
            for stage in (1, 2, 3):
                with pytest.raises(ParameterAccessError, match=r"'blocks.1.weight' was written to while its values"):
                    fit(net(), stage, "bf16-mixed")

    run_world(2, run)


class Scaling(Net):
    """Changes weights in the middle of a step, and goes on with one that is used without its module."""

    def __init__(self) -> None:
        super().__init__(functional=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.03 * self.global_rank)
        with full_parameters(self), torch.no_grad():
            self.head.weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Late(Net):
    """Steps on the head at the beginning of the next batch, and on the rest after the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        head = self.optimizers()[1]  # type: ignore[index]
        if batch_idx:
            head.step()  # type: ignore[union-attr]
        head.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))

    def on_train_batch_end(self, *_: Any) -> None:
        blocks = self.optimizers()[0]  # type: ignore[index]
        blocks.step()  # type: ignore[union-attr]
        blocks.zero_grad()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        parts = self.blocks, self.head
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]


def test_waiting_late_changes_no_number() -> None:
    """Against steps that wait for everything themselves."""
    nets: tuple[type[Net], ...] = Branching, Scaling, Late

    def run(rank: int) -> dict[str, tuple[list[float], list[float]]]:
        late = [fit(net(), 1, "bf16-mixed").losses for net in nets]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PublishedWeights, "after_step", lambda self, inside: self.settle())
            at_once = [fit(net(), 1, "bf16-mixed").losses for net in nets]
        return {net.__name__: pair for net, *pair in zip(nets, late, at_once, strict=True)}  # type: ignore[misc]

    for found in run_world(2, run):
        for name, (late, at_once) in found.items():
            assert late == at_once, name


class Broken(Net):
    """Raises in the forward of its second step, after some units were brought and others not."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if int(batch) == 1:
            self.head(torch.randn(4, 32))
            raise ValueError("user error")
        return super().training_step(batch, batch_idx)


def test_training_goes_on_after_an_error_with_weights_on_their_way() -> None:
    def run(rank: int, stage: int) -> tuple[bool, list[float], list[float]]:
        broken = Broken()
        with pytest.raises(ValueError, match="user error"):
            fit(broken, stage, "bf16-mixed")
        with full_parameters(broken):
            after = torch.cat([p.detach().flatten() for p in broken.parameters()])
        whole = Net()
        fit(whole, stage, "bf16-mixed", steps=1)
        with full_parameters(whole):
            expected = torch.cat([p.detach().flatten() for p in whole.parameters()])
        return torch.equal(after, expected), broken.losses, whole.losses

    for same, losses, expected in [*run_world(2, run, 1), *run_world(2, run, 2)]:
        assert same
        assert losses == expected
