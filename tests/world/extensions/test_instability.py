"""``InstabilityMonitor``: what it names, what it logs, and that it leaves everything else as it is."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import InstabilityMonitor, ZeroPrecision, ZeroStrategy, full_gradients, full_parameters
from lightning_zero.optim.gradients import LossScaler
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Memory, Net
from tests.helpers.training import make_trainer

WIDTH, STEPS = 64, 30


class Poison(torch.autograd.Function):
    """Multiplies what passes forward, or the gradient that passes back, by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factors = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + Poison.apply(torch.tanh(self.linear(x)), *self.factors)


@dataclass
class Returned:
    x: Tensor
    masks: tuple[Tensor, Tensor]
    bias: Tensor


class Masked(Block):
    """Also returns masks, of infinities and of numbers whose sum is one, and a parameter."""

    def forward(self, x: Tensor) -> Any:
        least = torch.full((2,), torch.finfo(x.dtype).min)
        return Returned(super().forward(x), (least, least - math.inf), self.linear.bias)


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            found = block(x)
            x = found.x if isinstance(found, Returned) else found
        return x


class Blocks(Net):
    """Four blocks; at optimizer step ``at`` one has ``factors`` on rank 1."""

    def __init__(
        self,
        at: int = -1,
        factors: tuple[float, float] = (1.0, 1.0),
        lacks: int = -1,
        which: int = 2,
        block: type[Block] = Block,
    ) -> None:
        super().__init__(lambda: Chain(*(block() for _ in range(4))))
        self.at, self.factors, self.lacks, self.which = at, factors, lacks, which

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        broken = self.global_step + 1 == self.at and dist.get_rank() == 1
        block: Any = self.model[self.which]
        block.factors = self.factors if broken else (1.0, 1.0)
        return (self.model(batch) - batch.flip(-1)).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step + 1 == self.lacks:
            optimizer.zero_grad(set_to_none=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(module: Blocks, stage: int | None, *callbacks: Any, **options: Any) -> tuple[list[str], dict[str, Tensor]]:
    """What the monitor warned of, and the weights. No stage: DDP."""
    torch.manual_seed(3 + dist.get_rank())
    data = DataLoader(torch.randn(STEPS * 4, WIDTH), batch_size=4)
    strategy: Any = "ddp" if stage is None else ZeroStrategy(stage, units=[type(module.model[0])])  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, callbacks=[*callbacks], **options).fit(module, data)
    with full_parameters(module):
        weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return [str(one.message) for one in caught if "InstabilityMonitor" in str(one.message)], weights


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def a_value_that_is_not_finite_is_named() -> Row:
    def act(rank: int) -> Any:
        def ids(batch: Tensor) -> str:
            return f"of {len(batch)}"

        told = {}
        for stage in (1, 2, 3):
            forward = fit(Blocks(5, (math.inf, 1.0)), stage, InstabilityMonitor(batch_ids=ids), max_steps=5)[0]
            backward = fit(
                Blocks(5, (1.0, math.nan)), stage, InstabilityMonitor(), max_steps=5, accumulate_grad_batches=2
            )[0]
            told[stage] = forward, backward
        return told

    first, second = yield act
    assert not any(messages for pair in second.values() for messages in pair)
    for forward, backward in first.values():
        assert len(forward) == len(backward) == 1
        parts = re.split(r"; rank 0: the gradient of model\.\d\.linear\.\w+ \(", forward[0])
        assert parts == [
            "InstabilityMonitor, step 5: gradients that are not finite",
            "batch 4 (samples of 4)), rank 1: not finite first: the output of 'model.2' (Block) in the forward of "
            "micro-step 0 (batch 4 (samples of 4)).",
        ]
        assert (
            "rank 1: not finite first: the gradient of the output of 'model.1' (Block) in the backward of micro-step 0"
            in backward[0]
        )
        assert "(batch 8, 9)" in backward[0]


def what_the_loss_scale_did_is_said() -> Row:
    def act(rank: int) -> Any:
        broken = Blocks(4, (math.inf, 1.0))
        plugin = ZeroPrecision("16-mixed", scaler=LossScaler(init_scale=256.0))
        return fit(broken, 2, InstabilityMonitor(), max_steps=5, plugins=plugin)[0]

    first, second = yield act
    assert not second
    assert "not finite first: the output of 'model.2' (Block) in the forward" in first[0]
    assert first[1].endswith("after step 4 the loss scale went from 256 to 128, and the step was left out.")
    assert len(first) == 2


def a_step_left_out_changes_nothing() -> Row:
    def act(rank: int) -> Any:
        found, without, plain = {}, fit(Blocks(lacks=25), None)[1], fit(Blocks(), None)[1]
        for stage in (1, 2, 3):
            told, skipped = fit(Blocks(25, (1.0, 1e6)), stage, InstabilityMonitor(skip=True))
            quiet, watched = fit(Blocks(), stage, InstabilityMonitor(every_n_steps=5, skip=True))
            found[stage] = told, same(skipped, without), quiet, same(plain, watched), same(plain, without)
        return found

    first, second = yield act
    for found in (first, second):
        for told, left_out, quiet, alike, differs in found.values():
            assert left_out
            assert alike
            assert not differs
            assert not quiet
            if found is first:
                assert [message.partition("norm")[0] for message in told] == [
                    "InstabilityMonitor, step 25: a spike of the gradients' "
                ]
                assert told[0].endswith("The step is left out.")


def a_mask_is_no_fault() -> Row:
    def act(rank: int) -> Any:
        found = {}
        without = fit(Blocks(lacks=5, block=Masked), None, max_steps=8)[1]
        for stage in (1, 2, 3):
            module = Blocks(5, (math.inf, 1.0), block=Masked)
            told, skipped = fit(module, stage, InstabilityMonitor(skip=True), max_steps=8)
            hooks = [len(block.linear.bias._backward_hooks or ()) for block in module.model]
            found[stage] = told, same(skipped, without), hooks
        return found

    for found in (results := (yield act)):
        for told, left_out, hooks in found.values():
            assert left_out
            assert hooks == [0] * 4
            assert len(told) == (found is results[0])
            assert all("rank 1: not finite first: the output of 'model.2' (Masked)" in message for message in told)


def thawed_parameters_are_looked_at() -> Row:
    class Thawing(Blocks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.model[0].requires_grad_(batch_idx >= 2)

    def act(rank: int) -> Any:
        found = []
        for stage in (1, 2, 3):
            module, logger = Thawing(5, (1.0, math.nan), which=0), Memory()
            module.model[0].requires_grad_(False)
            told, _ = fit(module, stage, InstabilityMonitor(every_n_steps=4), max_steps=5, logger=logger)
            found.append((told, logger.rows[-1][1]))
        return found

    for told, logged in (yield act)[0]:
        assert len(told) == 1
        assert "step 5: gradients that are not finite; " in told[0]
        assert "the gradient of model.0.linear." in told[0]
        assert logged["zero/norm/gradient/model.0"] > 0
        assert logged["zero/norm/update/model.0"] > 0


def each_optimizer_has_norms_and_faults_of_its_own() -> Row:
    class Two(Blocks):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for place, optimizer in enumerate(self.optimizers()):
                self.manual_backward(super().training_step(batch, batch_idx))
                with full_gradients(self):
                    gradients = [p.grad.double() for p in self.model[2 * place].parameters()]
                    self.norms[place] = torch.stack([g.norm() for g in gradients]).norm().item()
                optimizer.step()
            self.zero_grad()

        def configure_optimizers(self) -> Any:
            self.norms = [0.0, 0.0]
            return [torch.optim.SGD(self.model[2 * at : 2 * at + 2].parameters(), lr=10.0**-at) for at in (0, 1)]

    def act(rank: int) -> Any:
        found = []
        for stage in (1, 2, 3):
            module, logger = Two(), Memory()
            fit(module, stage, InstabilityMonitor(), max_steps=6, logger=logger)
            # The first blocks' backward alone is broken, at the second optimizer's step.
            told, weights = fit(Two(8, (1.0, math.nan), which=1), stage, InstabilityMonitor(skip=True), max_steps=10)
            found.append((module.norms, logger.rows[-1][1], told, all(w.isfinite().all() for w in weights.values())))
        return found

    for norms, logged, told, finite in (yield act)[0]:
        assert not told
        assert finite
        for place, norm in enumerate(norms):
            assert logged[f"zero/norm/gradient/model.{2 * place}"] == pytest.approx(norm, rel=1e-5)
            assert logged[f"zero/norm/update/model.{2 * place}"] == pytest.approx(norm * 10.0**-place, rel=1e-3)


def norms_are_those_of_whole_tensors() -> Row:
    class Whole(Blocks):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with full_gradients(self):
                self.gradients = {name: p.grad.double().norm() ** 2 for name, p in self.named_parameters()}
            with full_parameters(self):
                self.before = {name: p.detach().double().clone() for name, p in self.named_parameters()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with full_parameters(self):
                self.moved = {n: (p.detach().double() - self.before[n]).norm() ** 2 for n, p in self.named_parameters()}

    def act(rank: int) -> Any:
        found = []
        for stage in (1, 2, 3):
            logger, module = Memory(), Whole()
            fit(module, stage, InstabilityMonitor(), max_steps=3, logger=logger)
            expected = {}
            for what, squares in (("gradient", module.gradients), ("update", module.moved)):
                for unit in range(4):
                    parts = [value for name, value in squares.items() if name.startswith(f"model.{unit}.")]
                    expected[f"zero/norm/{what}/model.{unit}"] = math.sqrt(sum(parts))
            found.append((expected, {name: value for _, row in logger.rows for name, value in row.items()}))
        return found

    for expected, logged in (yield act)[0]:
        for name, value in expected.items():
            assert logged[name] == pytest.approx(value, rel=1e-5)


def test_what_goes_wrong_is_named() -> None:
    in_one_world(
        2,
        a_value_that_is_not_finite_is_named(),
        what_the_loss_scale_did_is_said(),
        a_step_left_out_changes_nothing(),
        a_mask_is_no_fault(),
        thawed_parameters_are_looked_at(),
        each_optimizer_has_norms_and_faults_of_its_own(),
        norms_are_those_of_whole_tensors(),
    )


@pytest.mark.parametrize("setting", [{"spike": 0}, {"spike": math.nan}, {"window": 5}, {"window": True}])
def test_settings_are_checked(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must be"):
        InstabilityMonitor(**setting)
