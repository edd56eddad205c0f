"""``full_parameters``: whole values on every rank, and what rank 0 leaves there is what all keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import full_gradient, full_gradients, full_optimizer_state, full_parameters, grad_norm
from lightning_zero.errors import DivergenceError, ZeroError
from lightning_zero.shards.binding import is_absent
from tests.helpers import split
from tests.helpers.cases import WIDTH, Case, Stack, case
from tests.helpers.models import ZOO
from tests.helpers.training import build, make_trainer, quiet
from tests.helpers.world import run_world

STAGES = (1, 3)
PLAIN = case("plain", Stack)


class Module(pl.LightningModule):
    """Calls ``actions[hook]`` where Lightning calls the hook."""

    def __init__(self, chosen: Case = PLAIN, optimizer: Callable[..., Any] | None = None, **actions: Any) -> None:
        super().__init__()
        self.model = build(chosen)
        self.case, self.actions = chosen, actions
        self.optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.losses: list[float] = []

    def act(self, hook: str) -> None:
        if hook in self.actions:
            self.actions[hook](self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.act("before_forward")
        loss = self.case.loss(self.model, self.case.batch(0, int(batch)))
        self.act("after_forward")
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.case.loss(self.model, self.case.batch(0, int(batch)))

    def on_train_start(self) -> None:
        self.act("on_train_start")

    def on_before_backward(self, loss: Tensor) -> None:
        self.act("on_before_backward")

    def on_after_backward(self) -> None:
        self.act("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act("on_before_optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.act("on_train_batch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def whole(module: nn.Module) -> dict[str, Tensor]:
    with full_parameters(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def fit(module: Module, stage: int, steps: int = 2, **options: Any) -> pl.Trainer:
    from lightning_zero import ZeroStrategy

    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=module.case.units), **options)
        data = DataLoader(range(steps), batch_size=None)
        trainer.fit(module, data, data)
    return trainer


def plainly(
    steps: int = 2, chosen: Case = PLAIN, optimizer: Callable[..., Any] | None = None, **actions: Any
) -> dict[str, Tensor]:
    """The same training with ordinary torch, where ``full_parameters`` does nothing."""
    module = Module(chosen, optimizer, **actions)
    stepper = module.configure_optimizers()
    module.act("on_train_start")
    for step in range(steps):
        loss = module.training_step(torch.tensor(step), step)
        module.act("on_before_backward")
        loss.backward()
        module.act("on_after_backward")
        module.act("on_before_optimizer_step")
        stepper.step()
        stepper.zero_grad()
        module.act("on_train_batch_end")
    return whole(module)


def in_stages(world_size: int, function: Callable[[int, int], Any]) -> list[tuple[int, int, Any]]:
    """``(rank, stage, function(rank, stage))`` of all ranks and stages, in one world."""
    results = run_world(world_size, lambda rank: [function(rank, stage) for stage in STAGES], timeout=120)
    return [(rank, stage, found) for rank, row in enumerate(results) for stage, found in zip(STAGES, row, strict=True)]


def unequal(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert list(expected) == list(actual)
    return [name for name, value in expected.items() if not torch.equal(value, actual[name])]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("world_size", [1, 3])
def test_reading_gives_whole_values_and_leaves_nothing_behind(world_size: int) -> None:
    def read(rank: int, stage: int) -> dict[str, Tensor]:
        seen: list[dict[str, Tensor]] = []

        def look(module: Module) -> None:
            seen.append(whole(module))
            for name, parameter in module.named_parameters():
                assert parameter.shape == seen[0][name].shape
                assert is_absent(parameter) == (stage == 3 and world_size > 1)
                assert vars(parameter) == {}

        fit(Module(on_train_start=look), stage, 1)
        return seen[0]

    expected = {f"model.{name}": p.detach().clone() for name, p in build(PLAIN).named_parameters()}
    for _, _, seen in in_stages(world_size, read):
        assert unequal(expected, seen) == []


def test_mixed_precision_shows_the_masters() -> None:
    def read(rank: int, stage: int) -> dict[str, Tensor]:
        module = Module()
        fit(module, stage, precision="bf16-mixed")
        return whole(module)

    for _, _, ours in in_stages(2, read):
        assert {value.dtype for value in ours.values()} == {torch.float32}
        assert any(not torch.equal(value, value.bfloat16().float()) for value in ours.values())


def test_a_module_below_shows_its_units_only() -> None:
    def read(rank: int) -> tuple[bool, bool]:
        seen = []

        def look(module: Module) -> None:
            with full_parameters(module.model.layers[1]):
                seen.append(
                    (
                        bool(module.model.layers[1].up.weight.isnan().any()),
                        is_absent(module.model.layers[0].up.weight),
                    )
                )

        fit(Module(on_train_start=look), 3, 1)
        return seen[0]

    assert run_world(2, read) == [(False, True)] * 2


def test_modules_that_are_not_sharded_are_left_alone() -> None:
    linear = nn.Linear(3, 3)
    before = linear.weight.data_ptr()
    with full_parameters(linear):
        assert linear.weight.data_ptr() == before
        linear.weight.data.zero_()
    assert not linear.weight.any()


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _in_place(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def _no_grad(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(parameter * 0.5)


def _pointing_elsewhere(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5


def _initialiser(parameter: nn.Parameter) -> None:
    nn.init.constant_(parameter, 0.5)


WAYS = {f.__name__: f for f in (_in_place, _no_grad, _pointing_elsewhere, _initialiser)}


def _writes(way: Callable[[nn.Parameter], None]) -> Callable[[Module], None]:
    """Rank 0 (or the only one) writes what counts, other ranks something else."""

    def write(module: Module) -> None:
        with full_parameters(module):
            for parameter in module.parameters():
                if module.global_rank == 0:
                    way(parameter)
                else:
                    parameter.data.fill_(float("nan"))

    return write


def _turn(module: Module) -> None:
    """``.data`` of two parameters exchanged, and a square matrix turned: the same memory, looked at in another way."""
    with full_parameters(module):
        first, second = module.model.layers[0].up.weight, module.model.layers[1].up.weight
        first.data, second.data = second.data, first.data
        module.model.stem.weight.data = module.model.stem.weight.data.t()


def _nested(module: Module) -> None:
    """The inner block sees what the outer one wrote, and what it writes itself is not lost."""
    with full_parameters(module):
        module.model.layers[0].up.weight.data.fill_(0.25)
        with full_parameters(module.model.layers):
            assert bool((module.model.layers[0].up.weight == 0.25).all())
            module.model.layers[1].up.weight.data.fill_(0.5)
        assert bool((module.model.layers[1].up.weight == 0.5).all())


def _muon(parameters: Any) -> torch.optim.Optimizer:
    """Works on whole matrices of its own, which have to be told."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


HOOKS = ("on_train_start", "before_forward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
LOOKS = (*HOOKS, "after_forward", "on_before_backward")
WRITES: dict[str, dict[str, Any]] = {
    # Between a forward and its backward too, which a change of the weights would void.
    "looking anywhere": dict.fromkeys(LOOKS, whole),
    **{hook: {hook: _writes(_in_place)} for hook in HOOKS},
    **{way: {"on_train_batch_end": _writes(act)} for way, act in WAYS.items()},
    "Muon": {"on_train_batch_end": _writes(_initialiser), "optimizer": _muon},
    "moved between parameters": {"on_train_start": _turn},
    "nested use is one use": {"before_forward": _nested},
}


def test_what_rank_zero_wrote_is_what_all_keep() -> None:
    """Training goes on from there: the optimizer's moments stay, its parameters are the new ones."""

    def train(rank: int, stage: int) -> dict[str, dict[str, Tensor]]:
        found = {}
        for name, actions in WRITES.items():
            module = Module(**actions)
            fit(module, stage)
            found[name] = whole(module)
        return found

    expected = {name: plainly(**actions) for name, actions in WRITES.items()}
    assert [name for name, values in expected.items() if not unequal(plainly(), values)] == ["looking anywhere"]
    for _, stage, found in in_stages(2, train):
        for name, values in found.items():
            assert unequal(expected[name], values) == [], f"{name}, stage {stage}"


def test_writing_between_forward_and_backward_is_refused_as_in_torch() -> None:
    def change(module: Module) -> None:
        with full_parameters(module), torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plainly(after_forward=change)

    def train(rank: int, stage: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            fit(Module(after_forward=change), stage)
        return str(caught.value)

    for _, _, message in in_stages(2, train):
        assert "modified by an inplace operation" in message or "were changed" in message


def test_writing_before_and_after_a_fit() -> None:
    def train(rank: int, stage: int) -> list[dict[str, Tensor]]:
        module = Module()
        trainer = fit(module, stage, 1)
        _writes(_in_place)(module)
        between = whole(module)
        with quiet():
            trainer.validate(module, DataLoader(range(1), batch_size=None), verbose=False)
        trainer.fit_loop.max_epochs = 2
        with quiet():
            trainer.fit(module, DataLoader(range(1), batch_size=None), DataLoader(range(1), batch_size=None))
        return [between, whole(module)]

    module = Module()
    results = []
    for again in range(2):
        optimizer = module.configure_optimizers()
        module.training_step(torch.tensor(0), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if again == 0:
            _writes(_in_place)(module)
        results.append(whole(module))
    for _, _, values in in_stages(2, train):
        assert [unequal(left, right) for left, right in zip(results, values, strict=True)] == [[], []]


def test_the_model_can_be_called_inside() -> None:
    """It computes with what is shown there, changed or not; and the parameters stay whole until the block ends."""

    def call(rank: int, stage: int) -> tuple[list[float], list[float]]:
        module = Module()
        fit(module, stage, 1, precision="bf16-mixed")
        with full_parameters(module):
            module.model.head.weight.data.fill_(0.5)
            twin = build(PLAIN)
            twin.load_state_dict({n: p.detach().clone() for n, p in module.model.named_parameters()})
            x = torch.ones(2, 3, WIDTH)
            with torch.no_grad():
                ours, theirs = module.model(x), twin(x)
                ours_again = module.model.layers[1](x)
            assert torch.equal(ours_again, twin.layers[1](x))
            assert bool((module.model.head.weight == 0.5).all())
        values = whole(module)
        assert bool((values["model.head.weight"] == 0.5).all())
        assert not any(value.isnan().any() for value in values.values())
        return ours.flatten().tolist(), theirs.flatten().tolist()

    for _, _, (ours, theirs) in in_stages(2, call):
        assert ours == theirs


def test_odd_models() -> None:
    def train(rank: int) -> None:
        for name in ("odd_sizes", "mixed_dtypes", "shared_across_units", "frozen_mix", "nested_units"):
            module = Module(ZOO[name], on_train_start=_writes(_in_place))
            fit(module, 3, 1)
            values = whole(module)
            assert not any(value.isnan().any() for value in values.values()), name
            for key, p in build(ZOO[name]).named_parameters():
                assert p.requires_grad or torch.equal(values[f"model.{key}"], p.detach() * 0.5), f"{name}: {key}"

    run_world(3, train)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class Stop(Exception):
    pass


def _scribble(module: Module) -> None:
    for parameter in module.parameters():
        parameter.data.zero_()


@pytest.mark.parametrize(("failing", "precision"), [((0, 1), "32-true"), ((1,), "32-true"), ((0,), "bf16-mixed")])
def test_an_exception_inside_leaves_everything_as_it_was(failing: tuple[int, ...], precision: str) -> None:
    """On some ranks or all: nobody waits for anybody, nobody keeps anything, and training can go on."""

    def train(rank: int, stage: int) -> None:
        errors: list[str] = []

        def change(module: Module) -> None:
            try:
                with full_parameters(module):
                    _scribble(module)
                    if rank in failing:
                        raise Stop("it")
            except (Stop, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")

        undisturbed, module = Module(), Module(**dict.fromkeys(("on_train_start", "before_forward"), change))
        for each in (undisturbed, module):
            fit(each, stage, precision=precision)
        assert unequal(whole(undisturbed), whole(module)) == []
        if rank in failing:
            assert set(errors) == {"Stop: it"}
        else:
            assert all(error.startswith(f"RuntimeError: Rank {failing[0]} left full_parameters") for error in errors)
        assert len(errors) == 3

    in_stages(2, train)


def test_another_shape_is_refused_on_every_rank() -> None:
    def train(rank: int, stage: int) -> dict[str, Tensor]:
        module = Module()
        fit(module, stage, 1)
        for ranks in ((0, 1), (0,), (1,)):
            error, words = (
                (ValueError, r"'model.head.weight' has shape \[3, 3\]") if rank in ranks else (RuntimeError, "Rank")
            )
            with pytest.raises(error, match=words), full_parameters(module):  # noqa: PT012
                _scribble(module)
                if rank in ranks:
                    module.model.head.weight.data = torch.zeros(3, 3)
            assert module.model.head.weight.shape == (WIDTH, WIDTH)
        return whole(module)

    expected = plainly(1)
    for _, _, values in in_stages(2, train):
        assert unequal(expected, values) == []


def test_ranks_in_different_places_are_told_so() -> None:
    """The usual mistake is ``if rank == 0``. Ranks that meet in another place raise instead of reading each other."""

    def train(rank: int) -> str:
        module = Module()
        fit(module, 3, 1)
        with pytest.raises(ZeroError) as caught, full_parameters(module.model.layers[rank]):
            pass
        assert isinstance(caught.value, DivergenceError)
        return str(caught.value)

    for message in run_world(2, train):
        assert "full_parameters('model.layers.0')" in message
        assert "full_parameters('model.layers.1')" in message


class Whole(split.Split):
    """Notes what every rank sees whole in each step, halves gradients, and scales weights on rank 0."""

    def on_fit_start(self) -> None:
        self.noted: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self):
            for name, parameter in self.named_parameters():
                if parameter.grad is not None:
                    self.noted[f"gradient of {name}"] = parameter.grad.clone()
                    parameter.grad.mul_(0.5)
        halved = full_gradient(self, "net.blocks.1.down.weight")
        assert halved is not None
        self.noted["halved"] = halved

    def on_train_batch_end(self, *args: Any) -> None:
        with full_parameters(self):
            state = self.state_dict()
            copied = copy.deepcopy(self.net)
            for name, parameter in self.named_parameters():
                assert state[name].shape == parameter.shape
                self.noted[name] = parameter.detach().clone()
            self.noted["copied"] = copied.blocks[0].up.weight.detach().clone()
            with torch.no_grad():
                for parameter in self.parameters() if self.global_rank == 0 else ():
                    parameter.mul_(1.25)
        self.noted["state"] = full_optimizer_state(self, "net.blocks.1.down.weight", "exp_avg")
        self.noted["norm"] = grad_norm(self).double()


def test_tensors_are_whole_over_both_dimensions_of_a_mesh() -> None:
    """What tensor parallelism has split is whole in the user's hands, on every rank, and cut again afterwards."""

    def noted(layout: split.Layout) -> dict[str, Tensor]:
        module = Whole()
        split.fit(layout, module, 3)
        return module.noted

    def rank(_: int) -> None:
        expected = noted(split.Layout(3, 4))
        for layout in (split.Layout(1, 2, 2), split.Layout(2, 1, 4), split.Layout(3, 2, 2)):
            assert split.distance(expected, noted(layout)) < 1e-12

    run_world(4, rank, timeout=120)
