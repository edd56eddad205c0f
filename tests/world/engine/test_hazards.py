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
from tests.helpers.cases import WIDTH, Stack, case
from tests.helpers.hazards import HAZARDS
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

STAGES = (1, 3)
PLAIN = case("plain", Stack)


# ---------------------------------------------------------------------------------------------------------------------
# Whole trainings next to DDP


def test_no_hazard_is_silently_wrong() -> None:
    """All in one world: none leaves anything behind that the next could stumble over."""

    def attempt(train: Callable[[], Record]) -> Any:
        # The error itself is a result: a rank that left would take the others' connections with it.
        try:
            return train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def play(rank: int) -> list[list[Any]]:
        found = []
        for hazard in HAZARDS.values():
            recipe = Recipe(steps=3)
            stages = [
                attempt(lambda stage=stage: train_zero(hazard.case, recipe, stage=stage))  # noqa: B023
                for stage in STAGES
            ]
            found.append([attempt(lambda: train_ddp(hazard.case, recipe)), *stages])  # noqa: B023
        return found

    for hazard, *ranks in zip(HAZARDS.values(), *run_world(2, play, timeout=120), strict=True):
        reference, *stages = zip(*ranks, strict=True)
        for stage, results in zip(STAGES, stages, strict=True):
            allowed = hazard.sharded if stage == 3 else hazard.replicated
            outcome, details = _outcome(results, reference)
            assert outcome in allowed, f"{hazard}, stage {stage}: {outcome}, not {sorted(allowed)}: {details}"
            if outcome == "error":
                assert hazard.error in details, f"{hazard}, stage {stage}"


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
    def __init__(self) -> None:
        self.model, self.losses = build(PLAIN), list[float]()
        self._optimizer = make_optimizer(PLAIN, self.model, Recipe())

    def loss(self, step: int) -> Tensor:
        loss = PLAIN.loss(self.model, PLAIN.batch(0, step))
        self.losses.append(loss.item())
        return loss

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class LightningDriver(PlainDriver):
    def __init__(self, module: pl.LightningModule) -> None:
        self.model, self.losses, self.module = module.model, [], module

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.module.manual_backward(loss, **options)

    def step(self) -> None:
        optimizer = self.module.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Module(pl.LightningModule):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = build(PLAIN)
        self.body, self.parameters_at_end = body, {}
        self.driver = [LightningDriver(self)]  # in a list: it is no submodule, and knows us

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.body(self.driver[0], int(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(PLAIN, self.model, Recipe())

    def on_train_end(self) -> None:
        with full_parameters(self):
            self.parameters_at_end = {name: p.detach().clone() for name, p in self.model.named_parameters()}


def play_plain(body: Body, steps: int) -> Played:
    """Run ``body`` for each step on an ordinary model."""
    driver = PlainDriver()
    for step in range(steps):
        body(driver, step)
    return Played(driver.losses, {name: p.detach().clone() for name, p in driver.model.named_parameters()})


def play_zero(body: Body, steps: int, stage: int) -> Played:
    """Run ``body`` for each step inside of a manual ``training_step``. Collective."""
    module = Module(body)
    with quiet():
        make_trainer(ZeroStrategy(stage=stage, units=PLAIN.units)).fit(
            module, DataLoader(range(steps), batch_size=None)
        )
    return Played(module.driver[0].losses, module.parameters_at_end)


def assert_play_exactly(bodies: dict[str, Body], *stages: int, steps: int = 4) -> None:
    """Each body does in both ranks, under one stage after the other, what it does in plain torch."""

    def play(rank: int) -> dict[str, list[Played]]:
        return {
            name: [play_plain(body, steps), *(play_zero(body, steps, stage) for stage in stages)]
            for name, body in bodies.items()
        }

    for found in run_world(2, play, timeout=120):
        for name, (expected, *played) in found.items():
            for stage, actual in zip(stages, played, strict=True):
                assert actual.losses == expected.losses, f"{name}, stage {stage}"
                assert actual.parameters.keys() == expected.parameters.keys(), f"{name}, stage {stage}"
                unequal = [n for n, p in expected.parameters.items() if not torch.equal(p, actual.parameters[n])]
                assert not unequal, f"{name}, stage {stage}"


def failures_of(bodies: dict[str, Body], stage: int) -> dict[str, list[str]]:
    """How each rank failed with each body; every rank must, and none by hanging."""

    def play(rank: int) -> dict[str, str]:
        found = dict.fromkeys(bodies, "")
        for name, body in bodies.items():
            try:
                play_zero(body, 4, stage)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    ranks = run_world(2, play, timeout=40)
    found = {name: [rank[name] for rank in ranks] for name in bodies}
    assert all(map(all, found.values())), f"only some ranks failed: {found}"
    return found


def train(driver: Driver, step: int) -> None:
    driver.backward(driver.loss(step))
    driver.step()


def two_backwards_through_one_graph(driver: Driver, step: int) -> None:
    loss = driver.loss(step)
    driver.backward(loss, retain_graph=True)
    driver.backward(loss)
    driver.step()


def two_losses_with_a_backward_each(driver: Driver, step: int) -> None:
    first, second = driver.loss(2 * step), driver.loss(2 * step + 1)
    driver.backward(second)
    driver.backward(first)
    driver.step()


def losses_that_are_never_differentiated(driver: Driver, step: int) -> None:
    driver.loss(100 + step)
    driver.backward(driver.loss(step))
    driver.loss(200 + step)
    driver.step()


class Interrupted(Exception):
    pass


def _interrupt(*args: Any) -> None:
    raise Interrupted


def a_backward_that_raises(driver: Driver, step: int) -> None:
    """Torch runs no callbacks after it: an engine that waits for them reduces nothing any more."""
    if step != 1:
        handle = driver.model.layers[1].register_forward_hook(
            lambda module, args, output: output.register_hook(_interrupt) and None
        )
        loss = driver.loss(100)
        handle.remove()
        with pytest.raises(Interrupted):
            driver.backward(loss)
        for parameter in driver.model.parameters():
            parameter.grad = None
    train(driver, step)


def a_forward_that_raises(driver: Driver, step: int) -> None:
    if step != 1:
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|linear\(\) needs them"):
            driver.model.layers[0].down(torch.zeros(2, WIDTH - 1))
        handle = driver.model.layers[1].down.register_forward_pre_hook(_interrupt)
        with pytest.raises(Interrupted):
            driver.loss(100)
        handle.remove()
    train(driver, step)


def parameters_that_keep_their_identity(driver: Any, step: int) -> None:
    train(driver, step)
    for name, parameter in driver.model.named_parameters():
        now = (id(parameter), *parameter.shape)
        assert vars(driver).setdefault(name, now) == now
        assert original_kind(parameter) is nn.Parameter
        assert vars(parameter) == {}


EXACT = (
    two_backwards_through_one_graph,
    two_losses_with_a_backward_each,
    losses_that_are_never_differentiated,
    a_backward_that_raises,
    a_forward_that_raises,
    parameters_that_keep_their_identity,
)


def test_what_does_as_in_plain_torch() -> None:
    assert_play_exactly({body.__name__: body for body in EXACT}, *STAGES)


def a_step_between_forward_and_backward(driver: Driver, step: int) -> None:
    """Plain torch refuses it by the version of the weights; weights in shared memory have to be watched otherwise."""
    stale, fresh = driver.loss(100 + step), driver.loss(step)
    driver.backward(fresh)
    driver.step()
    driver.backward(stale)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_forward_and_backward_is_refused(stage: int) -> None:
    body = a_step_between_forward_and_backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        play_plain(body, 1)
    for message in failures_of({"": body}, stage)[""]:
        assert message.startswith("RuntimeError")
        assert "backward" in message or "modified by an inplace operation" in message


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_with_one_backward_more_is_told_so(stage: int) -> None:
    def body(driver: Driver, step: int) -> None:
        driver.backward(driver.loss(step))
        if step == 1 and torch.distributed.get_rank() == 1:
            driver.backward(driver.loss(100))
        driver.step()

    messages = failures_of({"": body}, stage)[""]
    assert any(message.startswith("DivergenceError") for message in messages), messages


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

    play_plain(body, 2)
    expected = [numel for numel in seen if numel]
    seen.clear()

    def count(rank: int) -> list[int]:
        play_zero(body, 2, 3)
        return [numel for numel in seen if numel]

    assert len(expected) > 20
    assert run_world(2, count) == [expected, expected]


# ---------------------------------------------------------------------------------------------------------------------
# What stands where a partitioned parameter was

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


def test_a_placeholder_tells_the_truth_about_everything_but_values() -> None:
    """Reading raises, and a copy is refused or whole: never NaN that looks like a model."""

    def look(model: nn.Module) -> None:
        weight = model.layers[1].up.weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.ndim, weight.numel()) == ((28, WIDTH), 2, 28 * WIDTH)
        assert (weight.dtype, weight.requires_grad, weight.is_leaf) == (torch.float32, True, True)
        assert vars(weight) == {}
        for name, read in READS.items():
            with pytest.raises(ParameterAccessError):
                pytest.fail(f"{name} gave {read(model.layers[1])}")
        with contextlib.suppress(RuntimeError):
            assert not any(parameter.isnan().any() for parameter in copy.deepcopy(model).parameters())

    def body(driver: Driver, step: int) -> None:
        train(driver, step)
        if isinstance(driver, LightningDriver):  # behind the training step, outside of any forward and backward
            driver.module.on_train_batch_end = lambda *args: look(driver.model)  # type: ignore[method-assign]

    assert_play_exactly({"": body}, 3, steps=3)


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


def _behind_a_step(change: Callable[[nn.Module], object]) -> Body:
    def body(driver: Driver, step: int) -> None:
        train(driver, step)
        with torch.no_grad():
            change(driver.model)

    return body


def _built_anew(model: nn.Module) -> None:
    layer = model.layers[1].up
    layer.__init__(layer.in_features, layer.out_features)  # type: ignore[misc]


def _replaced(model: nn.Module) -> None:
    model.load_state_dict({"layers.1.up.weight": torch.zeros(28, WIDTH)}, strict=False, assign=True)


def test_what_is_written_between_a_step_and_a_forward_is_kept_or_refused() -> None:
    edits = {
        name: _behind_a_step(lambda model, edit=edit: edit(model.layers[1].up.weight)) for name, edit in EDITS.items()
    }
    assert_play_exactly(edits, 1, steps=3)
    others = {"replaced": _behind_a_step(_replaced), "built anew": _behind_a_step(_built_anew)}
    # The engine would bind the old memory again at the next forward, and the cast would be silently undone.
    others["cast"] = _behind_a_step(lambda model: model.to(torch.float64))
    for name, messages in failures_of({**edits, **others}, 3).items():
        for message in messages:
            assert message.startswith("ParameterAccessError") if name == "cast" else "layers.1.up.weight" in message
            assert "full_parameters" in message or name in others, f"{name}: {message}"


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
