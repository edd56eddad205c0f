"""What reaches weights behind the engine's back, or breaks off half way: exact, a clean error, or NaN. Never wrong.

Reference for the step-by-step tests is plain training in one process: all ranks see the same data there, and the mean
of two equal gradients is that gradient, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.binding import original_kind
from tests.helpers.cases import WIDTH, Case, Stack, case
from tests.helpers.hazards import HAZARDS, Hazard
from tests.helpers.models import ZOO
from tests.helpers.training import (
    LightningCase,
    Recipe,
    Record,
    build,
    differences,
    make_optimizer,
    make_trainer,
    order_changes,
    quiet,
    train_ddp,
    train_zero,
)
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
PLAIN = case("plain", Stack)


# ---------------------------------------------------------------------------------------------------------------------
# Whole trainings next to DDP


@pytest.mark.parametrize("hazard", HAZARDS.values(), ids=repr)
def test_hazard_is_never_silently_wrong(hazard: Hazard) -> None:
    """All stages one after the other in one world: none leaves anything behind that the next could stumble over."""

    def attempt(train: Callable[[], Record]) -> Any:
        # The error itself is a result: a rank that left would take the others' connections with it.
        try:
            return train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def play(rank: int) -> list[Any]:
        stages = [attempt(lambda stage=stage: train_zero(hazard.case, Recipe(), stage=stage)) for stage in STAGES]
        return [*stages, attempt(lambda: train_ddp(hazard.case, Recipe()))]

    *stages, reference = zip(*run_world(2, play, timeout=120), strict=True)
    for stage, results in zip(STAGES, stages, strict=True):
        allowed = hazard.sharded if stage == 3 else hazard.replicated
        outcome, details = _outcome(results, reference)
        assert outcome in allowed, f"stage {stage}: {outcome}, not {' or '.join(sorted(allowed))}: {details}"
        if outcome == "error" and hazard.error:
            assert hazard.error in details, f"stage {stage}"


def _outcome(results: tuple[Any, ...], reference: tuple[Any, ...]) -> tuple[str, str]:
    failed = [isinstance(result, str) for result in results]
    if all(failed):
        return "error", " | ".join(results)
    assert not any(failed), f"only some ranks failed: {results}"
    for expected, record in zip(reference, results, strict=True):
        if not _is_finite(record):
            return "nan", ""
        assert isinstance(expected, Record), expected
        if found := differences(expected, record):
            return "wrong", "\n".join(found[:10])
    return "exact", ""


def _is_finite(record: Record) -> bool:
    """Whether the first losses and gradients are numbers: the first step is where the engine looks closely."""
    gradients = [gradient for gradient in record.gradients[0].values() if gradient is not None]
    return all(bool(tensor.isfinite().all()) for tensor in (record.losses[0], *gradients))


# ---------------------------------------------------------------------------------------------------------------------
# Step by step, next to plain training


class Driver(Protocol):
    """What a manual training step may do, the same under plain torch and under Lightning."""

    model: nn.Module

    def loss(self, step: int) -> Tensor: ...
    def backward(self, loss: Tensor, **options: Any) -> None: ...
    def step(self) -> None: ...


Body = Callable[[Driver, int], None]


class Played(NamedTuple):
    losses: list[float]
    parameters: dict[str, Tensor]


class PlainDriver:
    def __init__(self, chosen: Case) -> None:
        self._case, self.model, self.losses = chosen, build(chosen), []
        self._optimizer = make_optimizer(chosen, self.model, Recipe())

    def loss(self, step: int) -> Tensor:
        torch.manual_seed(step)
        loss = self._case.loss(self.model, self._case.batch(0, step))
        self.losses.append(loss.item())
        return loss

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class LightningDriver(PlainDriver):
    def __init__(self, chosen: Case, module: pl.LightningModule) -> None:
        self._case, self.model, self.losses, self._module = chosen, module.model, [], module

    def backward(self, loss: Tensor, **options: Any) -> None:
        self._module.manual_backward(loss, **options)

    def afterwards(self, look: Callable[[nn.Module], None]) -> None:
        """When the training step is over, outside of any forward and backward."""
        self._module.on_train_batch_end = lambda *args: look(self.model)  # type: ignore[method-assign]

    def step(self) -> None:
        optimizer = self._module.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Module(pl.LightningModule):
    def __init__(self, chosen: Case, body: Body) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = build(chosen)
        self.case, self.body, self.parameters_at_end = chosen, body, {}
        self.driver = [LightningDriver(chosen, self)]  # in a list: it is no submodule, and knows us

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.body(self.driver[0], int(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case, self.model, Recipe())

    def on_train_end(self) -> None:
        with full_parameters(self):
            self.parameters_at_end = {name: p.detach().clone() for name, p in self.model.named_parameters()}


def play_plain(chosen: Case, body: Body, steps: int) -> Played:
    """Run ``body`` for each step on an ordinary model."""
    driver = PlainDriver(chosen)
    for step in range(steps):
        body(driver, step)
    return Played(driver.losses, {name: p.detach().clone() for name, p in driver.model.named_parameters()})


def play_zero(chosen: Case, body: Body, steps: int, stage: int) -> Played:
    """Run ``body`` for each step inside of a manual ``training_step``. Collective."""
    module = Module(chosen, body)
    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=chosen.units))
        trainer.fit(module, DataLoader(range(steps), batch_size=None))
    return Played(module.driver[0].losses, module.parameters_at_end)


def assert_plays_exactly(body: Body, *stages: int, steps: int = 4) -> None:
    """``body`` does in both ranks, under one stage after the other, what it does in plain torch."""

    def play(rank: int) -> list[Played]:
        plain = play_plain(PLAIN, body, steps)
        return [plain, *(play_zero(PLAIN, body, steps, stage) for stage in stages)]

    for expected, *played in run_world(2, play, timeout=120):
        for stage, actual in zip(stages, played, strict=True):
            assert actual.losses == expected.losses, f"stage {stage}"
            assert actual.parameters.keys() == expected.parameters.keys(), f"stage {stage}"
            unequal = [n for n, value in expected.parameters.items() if not torch.equal(value, actual.parameters[n])]
            assert not unequal, f"stage {stage}"


def failures_of(body: Body, stage: int, chosen: Case = PLAIN, steps: int = 4, world_size: int = 2) -> list[str]:
    """How each rank failed; every rank must, and none by hanging."""

    def play(rank: int) -> str:
        try:
            play_zero(chosen, body, steps, stage)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = run_world(world_size, play, timeout=40)
    assert all(found), f"only some ranks failed: {found}"
    return found


def test_two_backwards_through_one_graph() -> None:
    def body(driver: Driver, step: int) -> None:
        loss = driver.loss(step)
        driver.backward(loss, retain_graph=True)
        driver.backward(loss)
        driver.step()

    assert_plays_exactly(body, *STAGES)


def test_two_losses_with_a_backward_each() -> None:
    def body(driver: Driver, step: int) -> None:
        first, second = driver.loss(2 * step), driver.loss(2 * step + 1)
        driver.backward(second)
        driver.backward(first)
        driver.step()

    assert_plays_exactly(body, *STAGES)


def test_a_loss_that_is_never_differentiated() -> None:
    def body(driver: Driver, step: int) -> None:
        driver.loss(100 + step)
        driver.backward(driver.loss(step))
        driver.loss(200 + step)
        driver.step()

    assert_plays_exactly(body, *STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_forward_and_backward_is_refused(stage: int) -> None:
    """Plain torch refuses it by the version of the weights; weights in shared memory have to be watched otherwise."""

    def body(driver: Driver, step: int) -> None:
        stale, fresh = driver.loss(100 + step), driver.loss(step)
        driver.backward(fresh)
        driver.step()
        driver.backward(stale)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        play_plain(PLAIN, body, 1)
    for message in failures_of(body, stage):
        assert message.startswith("RuntimeError")
        assert "backward" in message or "modified by an inplace operation" in message


def test_hooks_of_the_user_still_see_every_activation() -> None:
    """Torch applies the innermost pair of saved-tensor hooks only: the engine's own has to pass on what is not its."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel() if tensor.shape[:2] in ((3, 5), (15, WIDTH), (15, 28)) else 0)
        return tensor.clone()

    def body(driver: Driver, step: int) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            driver.backward(driver.loss(step))
        driver.step()

    play_plain(PLAIN, body, 2)
    expected = [numel for numel in seen if numel]
    seen.clear()

    def count(rank: int) -> list[int]:
        play_zero(PLAIN, body, 2, 3)
        return [numel for numel in seen if numel]

    assert len(expected) > 20
    assert run_world(2, count) == [expected, expected]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_a_backward_that_raises_leaves_nothing_behind(at_step: int) -> None:
    """Torch runs no callbacks after a backward that raised: an engine that waits for them reduces nothing any more."""

    def interrupt(gradient: Tensor) -> None:
        raise Interrupted

    def body(driver: Driver, step: int) -> None:
        if step == at_step:
            handle = driver.model.layers[1].register_forward_hook(
                lambda module, args, output: output.register_hook(interrupt) and None
            )
            loss = driver.loss(100)
            handle.remove()
            with pytest.raises(Interrupted):
                driver.backward(loss)
            for parameter in driver.model.parameters():
                parameter.grad = None
        driver.backward(driver.loss(step))
        driver.step()

    assert_plays_exactly(body, *STAGES)


@pytest.mark.parametrize("at_step", [0, 2])
def test_a_forward_that_raises_leaves_nothing_behind(at_step: int) -> None:
    def body(driver: Driver, step: int) -> None:
        if step == at_step:
            with pytest.raises(RuntimeError, match=r"mat1 and mat2|linear\(\) needs them"):
                driver.model.layers[0].down(torch.zeros(2, WIDTH - 1))
            handle = driver.model.layers[1].down.register_forward_pre_hook(_interrupt)
            with pytest.raises(Interrupted):
                driver.loss(100)
            handle.remove()
        driver.backward(driver.loss(step))
        driver.step()

    assert_plays_exactly(body, *STAGES)


def _interrupt(module: nn.Module, args: Any) -> None:
    raise Interrupted


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that do not run the same program


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_with_one_backward_more_is_told_so(stage: int) -> None:
    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        if step == 1 and torch.distributed.get_rank() == 1:
            driver.backward(driver.loss(100))
        driver.step()

    messages = failures_of(body, stage)
    assert any(message.startswith("DivergenceError") for message in messages), messages


# ---------------------------------------------------------------------------------------------------------------------
# What stands where a partitioned parameter was


def _looks_inside(look: Callable[[nn.Module], None], stage: int = 3) -> None:
    """Run ``look(model)`` behind a training step, on both ranks, and see that training goes on."""

    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        if isinstance(driver, LightningDriver):
            driver.afterwards(look)

    assert_plays_exactly(body, stage, steps=3)


def test_a_placeholder_tells_the_truth_about_everything_but_values() -> None:
    def look(model: nn.Module) -> None:
        weight = model.layers[1].up.weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.ndim, weight.numel()) == ((28, WIDTH), 2, 28 * WIDTH)
        assert (weight.dtype, weight.requires_grad, weight.is_leaf) == (torch.float32, True, True)
        assert vars(weight) == {}

    _looks_inside(look)


READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "median": lambda block: block.up.weight.median(),
    "clone": lambda block: block.up.weight.detach().clone().flatten(),
    "linear": lambda block: nn.functional.linear(torch.ones(2, WIDTH), block.up.weight, block.up.bias),
    "data": lambda block: (block.up.weight.data * 2).sort(),
    "tolist": lambda block: torch.tensor(block.norm.weight.tolist()),
    "copy_": lambda block: torch.zeros(28, WIDTH).copy_(block.up.weight.detach()),
    "stack": lambda block: torch.stack([block.norm.weight, block.norm.bias]),
    "state_dict": lambda block: block.state_dict()["up.weight"].flatten(),
}


def test_reading_a_placeholder_raises() -> None:
    def look(model: nn.Module) -> None:
        plausible = []
        for name, read in READS.items():
            with contextlib.suppress(ParameterAccessError):
                read(model.layers[1])
                plausible.append(name)
        assert not plausible

    _looks_inside(look)


EDITS: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda weight: weight.zero_(),
    "ones_": lambda weight: nn.init.ones_(weight),
    "copy_": lambda weight: weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape)),
    "index": lambda weight: weight.__setitem__(0, 1.0),
    "mul_": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.zero_(),
    "clamp_": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "mask": lambda weight: weight.data.masked_fill_(torch.arange(weight.numel()).reshape(weight.shape) % 5 == 0, 0.0),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_is_written_between_a_step_and_a_forward_is_refused(edit: Callable[[Tensor], object]) -> None:
    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        with torch.no_grad():
            edit(driver.model.layers[1].up.weight)

    assert_plays_exactly(body, 1, 2, steps=3)
    for message in failures_of(body, 3):
        assert "layers.1.up.weight" in message
        assert "full_parameters" in message


def test_parameters_that_were_replaced_are_noticed() -> None:
    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        driver.model.load_state_dict({"layers.1.up.weight": torch.zeros(28, WIDTH)}, strict=False, assign=True)

    for message in failures_of(body, 3):
        assert "layers.1.up.weight" in message


def test_a_module_that_was_built_anew_is_noticed() -> None:
    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        layer = driver.model.layers[1].up
        layer.__init__(layer.in_features, layer.out_features)  # type: ignore[misc]

    for message in failures_of(body, 3):
        assert "layers.1.up.weight" in message


def test_a_cast_of_the_module_during_training_is_noticed() -> None:
    """The engine would bind the old memory again at the next forward, and the cast would be silently undone."""

    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        driver.model.to(torch.float64)

    for message in failures_of(body, 3):
        assert message.startswith("ParameterAccessError")


def test_a_copy_of_a_running_module_is_refused_or_whole() -> None:
    """``copy.deepcopy`` (EMA callbacks, early stopping) must not hand out NaN that looks like a model."""

    def look(model: nn.Module) -> None:
        try:
            twin = copy.deepcopy(model)
        except RuntimeError:
            return
        assert not any(parameter.isnan().any() for parameter in twin.parameters())

    _looks_inside(look)


# ---------------------------------------------------------------------------------------------------------------------
# The user's objects


def test_parameters_keep_their_identity() -> None:
    seen: dict[tuple[Driver, str], tuple[int, ...]] = {}

    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        driver.step()
        for name, parameter in driver.model.named_parameters():
            now = (id(parameter), *parameter.shape)
            assert seen.setdefault((driver, name), now) == now
            assert original_kind(parameter) is nn.Parameter
            assert vars(parameter) == {}

    assert_plays_exactly(body, *STAGES)


def test_another_order_of_units_is_in_the_log_and_no_warning() -> None:
    def train(rank: int) -> list[str]:
        changing = ZOO["order_changes"]
        with order_changes() as found, quiet():
            trainer = make_trainer(ZeroStrategy(stage=3, units=changing.units))
            trainer.fit(LightningCase(changing, Recipe()), DataLoader(range(changing.steps), batch_size=None))
        return found

    for messages in run_world(2, train):
        assert messages
        assert "model.layers." in messages[0]
