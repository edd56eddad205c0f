"""Momentum teachers: ``ema_update`` against the loop that people write under DDP, and what that loop does here."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import HostOffload, NvmeOffload, ZeroStrategy, ema_update, full_parameters
from lightning_zero.engine import full
from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import WIDTH
from tests.helpers.runs import STAGES, Net, assert_same, fit, made, quiet, raised, zero
from tests.helpers.world import run_world


class Block(nn.Module):
    """A unit without a norm, which autocast has in float32, with buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv1d(3, 3, 3)  # unused

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale.to(x.dtype)


class Distils(Net):
    """Trains a student against its teacher. ``apart``: parts of the two are cut over the ranks at other places."""

    def __init__(self, update: Callable[[Any], None], hook: str, apart: bool, trainable: bool = False) -> None:
        super().__init__(nn.Identity)
        torch.manual_seed(5)
        self.head = nn.Linear(WIDTH, 5) if apart else nn.Identity()  # in one unit with the student's stem
        self.student = Encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(trainable)
        for parameter in self.teacher.parameters():
            parameter.data.mul_(0.7)
        self.update, self.hook = update, hook

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        found = self.student(x)
        return F.mse_loss(found, wanted) + self.head(found).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.student.blocks:
            block.mean.add_(1.0)  # type: ignore[operator]
            block.count.add_(1)  # type: ignore[operator]
        loss = self(self.data(batch_idx)[0])
        self.losses.append(loss.detach().clone())
        return loss

    def at(self, hook: str) -> None:
        if hook == self.hook:
            self.update(self)

    def on_train_batch_start(self, *args: Any) -> None:
        self.at("on_train_batch_start")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.at("on_before_zero_grad")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.student.parameters(), *self.head.parameters()], lr=0.02)


def by_hand(net: Distils) -> None:
    """As DINO, BYOL and MoCo write it."""
    momentum = 0.9 + 0.02 * net.global_step
    with torch.no_grad():
        for source, target in zip(net.student.parameters(), net.teacher.parameters(), strict=True):
            target.data.mul_(momentum).add_((1 - momentum) * source.detach().data)


def by_us(net: Distils) -> None:
    ema_update(net.teacher, net.student, 0.9 + 0.02 * net.global_step)


ROWS: dict[str, dict[str, Any]] = {
    "alike": {},
    "apart": {"apart": True},
    "apart, between a forward and its backward": {"apart": True, "hook": "on_before_zero_grad"},
    "before a step": {"hook": "on_train_batch_start"},
    "bf16-true": {"apart": True, "precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "bf16-mixed": {"apart": True, "precision": "bf16-mixed"},
    "a teacher that is trained": {"trainable": True},
}


def run(strategy: Strategy, *, apart: bool = False, hook: str = "on_train_batch_end", **options: Any) -> dict[str, Any]:
    update = by_hand if isinstance(strategy, DDPStrategy) else by_us
    trainable = options.pop("trainable", False)
    net = Distils(update, hook, apart, trainable)
    with mock.patch.object(full, "whole", wraps=full.whole) as gathers:
        trainer = fit(strategy, net, 3, **options)
    sharded = isinstance(strategy, ZeroStrategy) and strategy.placement.shards_parameters
    differ = apart or trainable  # a trained teacher's stem is in one buffer with the student's
    assert gathers.called == differ if sharded else differ or not gathers.called
    return made(net, trainer)


def test_ema_update_has_the_bits_of_the_loop_under_ddp(tmp_path: Path) -> None:
    """And sends nothing where the two are cut at the same places."""

    def play(rank: int) -> dict[str, dict[str, Any]]:
        offload = {"host": HostOffload(parameters=True), "files": NvmeOffload(path=str(tmp_path), parameters=True)}
        with quiet():
            found = {"ddp": {row: run(DDPStrategy(find_unused_parameters=True), **ROWS[row]) for row in ROWS}}
            for name, stage in STAGES.items():
                found[name] = {row: run(zero(stage), **ROWS[row]) for row in ROWS}
            for name, where in offload.items():
                found[name] = {**found["ddp"], "apart": run(zero(3, offload=where), **ROWS["apart"])}
                found[name]["alike"] = run(zero(3, offload=where))
        return found

    results = run_world(2, play, timeout=300)
    assert_same(results, [name for name in results[0] if name != "ddp"])


def _each(net: Distils) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(net.teacher.parameters(), net.student.parameters(), strict=True)


def _matrices(net: Distils) -> list[Tensor]:
    return [parameter for parameter in net.student.parameters() if parameter.ndim == 2]


def lerp(net: Distils) -> None:
    for target, source in _each(net):
        target.lerp_(source, 0.1)


def mul_add(net: Distils) -> None:
    for target, source in _each(net):
        target.data.mul_(0.9).add_(source.data, alpha=0.1)


def mul_add_detached(net: Distils) -> None:
    for target, source in _each(net):
        target.data.mul_(0.9).add_(0.1 * source.detach().data)


def assigned(net: Distils) -> None:
    for target, source in _each(net):
        target.data = target.data * 0.9 + source.data * 0.1


def copied(net: Distils) -> None:
    for target, source in _each(net):
        target.copy_(0.9 * target + 0.1 * source)


def copied_data(net: Distils) -> None:
    for target, source in _each(net):
        target.data.copy_(0.9 * target.data + 0.1 * source.data)


def foreach(net: Distils) -> None:
    torch._foreach_lerp_(list(net.teacher.parameters()), list(net.student.parameters()), 0.1)


def timm(net: Distils) -> None:
    """``ModelEmaV3.apply_update_``."""
    averages, values = [], []
    for target, source in zip(net.teacher.state_dict().values(), net.student.state_dict().values(), strict=True):
        if target.is_floating_point():
            averages.append(target)
            values.append(source)
        else:
            target.copy_(source)
    torch._foreach_lerp_(averages, values, 0.1)


def diffusers(net: Distils) -> None:
    """``EMAModel``, whose shadow parameters are made, moved and copied to a module."""
    shadows = [parameter.clone().detach() for parameter in net.teacher.parameters()]
    for shadow, source in zip(shadows, net.student.parameters(), strict=True):
        shadow.sub_(0.1 * (shadow - source))
    for shadow, target in zip(shadows, net.teacher.parameters(), strict=True):
        target.data.copy_(shadow.to(target.device).data)


def loaded(net: Distils) -> None:
    source, target = net.student.state_dict(), net.teacher.state_dict()
    net.teacher.load_state_dict({name: 0.9 * target[name] + 0.1 * source[name] for name in target})


def loaded_whole(net: Distils) -> None:
    with full_parameters(net):
        loaded(net)


def proximal(net: Distils) -> None:
    for parameter in net.student.parameters():
        parameter.copy_(parameter.sign() * (parameter.abs() - 1e-3).clamp(min=0))


def max_norm(net: Distils) -> None:
    for parameter in _matrices(net):
        parameter.data.renorm_(2, 0, 0.5)


def dead_rows(net: Distils) -> None:
    for parameter in _matrices(net):
        parameter[parameter.norm(dim=1) < 0.9] = 0.1


def of_init(name: str) -> Callable[[Distils], None]:
    def call(net: Distils) -> None:
        torch.manual_seed(1)
        for parameter in [net.student.conv.weight] if name == "dirac_" else _matrices(net):
            getattr(nn.init, name)(parameter, *[0.5] * (name == "sparse_"))

    return call


NAMES = ("eye_", "dirac_", "orthogonal_", "sparse_", "trunc_normal_", "kaiming_uniform_")
IN_SLICES = {f.__name__: f for f in (lerp, mul_add, mul_add_detached, assigned, copied_data, foreach)}
WHOLE = {f.__name__: f for f in (copied, timm, diffusers, loaded, proximal, max_norm, dead_rows)}
IDIOMS = {**IN_SLICES, **WHOLE, "loaded_whole": loaded_whole, **{name: of_init(name) for name in NAMES}}


class Tries(Distils):
    """One idiom after each step."""

    def __init__(self, apart: bool, without: Collection[str] = ()) -> None:
        super().__init__(self.try_one, "on_train_batch_end", apart)
        self.without, self.raised = without, {}  # type: ignore[var-annotated]

    def try_one(self, net: Distils) -> None:
        name = list(IDIOMS)[net.global_step - 1]
        if name not in self.without:
            try:
                with torch.no_grad():
                    IDIOMS[name](net)
            except ParameterAccessError as error:
                self.raised[name] = str(error)


def test_what_people_write_has_ddp_s_bits_or_an_error_that_says_what_to_write() -> None:
    refused = [name for name in IDIOMS if name != "loaded_whole"]

    def play(rank: int) -> dict[str, dict[str, Any]]:
        def tried(strategy: Strategy, without: Collection[str] = ()) -> dict[str, Any]:
            net = Tries(False, without)
            with quiet():
                trainer = fit(strategy, net, len(IDIOMS))
            return {**made(net, trainer), "raised": net.raised}

        ddp = partial(DDPStrategy, find_unused_parameters=True)
        return {
            "ddp": {"all": tried(ddp()), "some": tried(ddp(), without=refused)},
            "zero": {"all": tried(zero(1)), "some": tried(zero(3), without=refused)},
            "errors": tried(zero(3))["raised"],
        }

    results = run_world(2, play, timeout=200)
    for result in results:
        raised = result.pop("errors")
        assert list(raised) == refused
        for message in raised.values():
            assert re.match("The (values of |tensor made of the )?parameter '(student|teacher)", message), message
            assert "`with lightning_zero.full_parameters(module):`" in message
            assert "`lightning_zero.ema_update(teacher, student, momentum)`" in message.replace('" "', "")
            assert "local_slices" in message
    assert_same(results, ["zero"])


def test_what_cannot_be_averaged_is_an_error() -> None:
    """Inside of a step, of other names, and where the ranks differ."""

    class InStep(Distils):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            by_us(self)
            return super().training_step(batch, batch_idx)

    def differs(net: Distils) -> None:
        ema_update(net.teacher, net.student, 0.5 + 0.1 * net.global_rank)

    def other(net: Distils) -> None:
        ema_update(net.teacher, net.student.stem, 0.5)

    def play(rank: int) -> list[str]:
        errors: list[str] = []
        with quiet():
            for net in (InStep(by_us, "", False), *(Distils(f, "on_train_batch_end", False) for f in (differs, other))):
                with raised(errors):
                    fit(zero(3), net, 3)
        return errors

    for errors in run_world(2, play):
        assert "ema_update was called in a forward, a backward" in errors[0]
        assert "Call it in a hook between steps: `on_train_batch_start`" in errors[0]
        assert errors[1].startswith("DivergenceError")
        assert "the average of ema_update" in errors[1]
        assert "'scale' is () in the average and nothing in the module" in errors[2]


def test_ema_update_of_modules_that_nothing_has_sharded() -> None:
    source, target = Encoder(), Encoder()
    expected = {k: 0.9 * v + (1 - 0.9) * source.state_dict()[k] for k, v in target.state_dict().items()}
    ema_update(target, source, 0.9)
    for name, value in target.named_parameters():
        assert torch.equal(value, expected[name])
    with pytest.raises(ValueError, match="momentum between 0 and 1"):
        ema_update(target, source, 1.5)
