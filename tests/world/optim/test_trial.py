"""Optimizers that nobody knows are tried out in parts: those that relate parameters to one another are refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_parameters
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.rules import try_in_parts
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world


class Own(torch.optim.Optimizer):
    """A ``step`` as people write it; ``before`` sees all parameters of a group, ``each`` one with its gradient."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], before: Callable[..., Any], each: Callable[..., Tensor]
    ) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.before, self.each, self.steps = before, each, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.steps += 1
        for group in self.param_groups:
            found = self.before(group["params"])
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.each(parameter, self.state[parameter], found, place))
        return loss


def momentum(parameter: Tensor, state: dict[str, Tensor], found: Any = None, place: int = 0) -> Tensor:
    if "average" not in state:
        state["average"] = torch.zeros_like(parameter)
    assert parameter.grad is not None
    return state["average"].mul_(0.9).add_(parameter.grad)


def norm(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def alone(parameters: list[nn.Parameter]) -> None:
    """What treats every parameter on its own does not look at them together."""


FINE: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "momentum": (alone, momentum),
    "trust ratio": (alone, lambda p, s, f, i: momentum(p, s) * p.norm() / (p.grad.norm() + 1e-6)),
    "rows": (alone, lambda p, s, f, i: p.grad - p.grad.mean(-1, keepdim=True)),
    "a mark": (alone, lambda p, s, f, i: p.grad * getattr(p, "mark", 1.0)),
}
COUPLED: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], str]] = {
    "norm of all": (norm, lambda p, s, f, i: p.grad / f, "gives other numbers"),
    "clipping": (
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
        lambda p, s, f, i: p.grad,
        "gives other numbers",
    ),
    "number of elements": (lambda ps: sum(p.numel() for p in ps), lambda p, s, f, i: p.grad * f, "gives other numbers"),
    "place": (alone, lambda p, s, f, i: p.grad * 0.8**i, "gives other numbers"),
    "random numbers": (
        alone,
        lambda p, s, f, i: p.grad + torch.randn_like(p) * random.random(),
        "gives other numbers",
    ),
    "a small decay": (
        lambda ps: sum(p.numel() for p in ps if p.grad is not None),
        lambda p, s, f, i: p.grad + 2e-6 * f * p,
        "gives other numbers",
    ),
    "clipping before signs": (
        lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
        lambda p, s, f, i: momentum(p, s).sign(),
        "gives other numbers",
    ),
    "one that is not finite": (
        lambda ps: all(p.grad.isfinite().all() for p in ps if p.grad is not None),
        lambda p, s, f, i: p.grad if f else torch.zeros_like(p),
        "gives other numbers",
    ),
    "first element": (lambda ps: [p.flatten()[0] for p in ps], lambda p, s, f, i: p.grad, r"raises IndexError"),
    "no gradient": (lambda ps: [p.grad * 2 for p in ps], lambda p, s, f, i: p.grad, r"raises TypeError"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_parameters_that_are_related_are_refused(name: str) -> None:
    before, each, reason = COUPLED[name]
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    values = [p.detach().clone() for p in model.parameters()]
    optimizer = Own(model.parameters(), before, each)
    states = [torch.get_rng_state(), hash(random.getstate())]
    with pytest.raises(UnsupportedOptimizerError, match=f"Own cannot be sharded.*step\\(\\) {reason}"):
        try_in_parts(optimizer, "Own")
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert (optimizer.steps, len(optimizer.state)) == (0, 0)
    found = [torch.get_rng_state(), hash(random.getstate())]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(states, found, strict=True))


class Rated(torch.optim.Optimizer):
    """A norm of all gradients, which a rate of 1 hides, in one of two ways."""

    def __init__(self, parameters: Iterable[nn.Parameter], way: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if self.way == "asks":
            assert 0 <= group["lr"] < 1
        total = norm(group["params"])
        for parameter in group["params"]:
            if parameter.grad is not None:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad / total, group["lr"])
                parameter.sub_(group["lr"] * average.sign())


@pytest.mark.parametrize("way", ["forgets", "asks"])
def test_the_rate_it_has_is_tried_too(way: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    with pytest.raises(UnsupportedOptimizerError, match="gives other numbers"):
        try_in_parts(Rated(model.parameters(), way), "Rated")


class Assigns(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if not parameter.grad.isfinite().all():
                    raise ValueError("look at your data")
                parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


@pytest.mark.filterwarnings("error")
def test_values_that_are_assigned_and_gradients_that_are_refused_are_let_through() -> None:
    try_in_parts(Assigns(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).parameters(), 0.1), "Assigns")


def test_what_cannot_be_tried_is_let_through_with_a_warning() -> None:
    model = nn.Linear(6, 5)
    optimizer = Own(model.parameters(), lambda ps: [p.reshape(-1, 5) @ torch.ones(5, 6) for p in ps], momentum)
    with pytest.warns(UserWarning, match=r"Own could not be tried out on small tensors \(RuntimeError"):
        try_in_parts(optimizer, "Own")


def test_a_compiled_update_is_tried_too() -> None:
    """Inside of some modes nothing is compiled, and a step that insists on it raises."""
    half = torch.compile(lambda gradient: gradient * 0.5, fullgraph=True, backend="eager")
    optimizer = Own(nn.Linear(6, 5).parameters(), norm, lambda p, state, found, place: half(p.grad) / found)
    with pytest.raises(UnsupportedOptimizerError, match=r"its step.* gives other numbers"):
        try_in_parts(optimizer, "Own")


class Adapts(torch.optim.Optimizer):
    """Begins with tiny steps and finds the rate itself, from all gradients, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["sum"] += sum(float(gradient.abs().sum()) for gradient in gradients)
            group["d"] = max(group["d"], 1e-6 * group["sum"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * group["d"] * parameter.grad.sign())


def test_an_option_that_is_found_from_all_parameters_is_refused() -> None:
    """Its steps are too small at first to be seen."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    with pytest.raises(UnsupportedOptimizerError, match=r"step\(\) leaves other options in its param groups when"):
        try_in_parts(Adapts(model.parameters()), "Adapts")


def warming(parameters: Iterable[nn.Parameter]) -> Any:
    optimizer = Own(parameters, norm, COUPLED["norm of all"][1])
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    assert optimizer.param_groups[0]["lr"] == 0.0
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def test_a_warm_up_from_zero_hides_nothing() -> None:
    def run(rank: int) -> str:
        with pytest.raises(UnsupportedOptimizerError) as caught:
            trained(ZeroStrategy(stage=1), warming)
        return str(caught.value)

    assert all("Own cannot be sharded. Tried out on small tensors" in found for found in run_world(2, run))


class Beside(torch.optim.Optimizer):
    """Keeps momentum in an attribute: by place, by parameter, or together with the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], way: str) -> None:
        mine = list(parameters)
        super().__init__(mine, {"lr": 0.1})
        self.mine, self.way = mine, way
        self.momenta: Any = (
            {p: torch.zeros_like(p) for p in mine} if way == "parameter" else [*map(torch.zeros_like, mine)]
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.mine if self.way == "both" else self.param_groups[0]["params"]
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None:
                momentum = self.momenta[parameter if self.way == "parameter" else place]
                parameter.sub_(0.1 * momentum.mul_(0.9).add_(parameter.grad))


@pytest.mark.parametrize(
    ("way", "reason"),
    [("place", "raises RuntimeError"), ("parameter", "raises KeyError"), ("both", "gives other numbers")],
)
def test_what_is_kept_beside_groups_and_state_is_refused(way: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = Beside(model.parameters(), way)
    with pytest.raises(UnsupportedOptimizerError, match=rf"{reason}.*self.state\[parameter\]") as caught:
        try_in_parts(optimizer, "Beside")
    assert "\n" not in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m.any() for m in (optimizer.momenta.values() if way == "parameter" else optimizer.momenta))


class Net(pl.LightningModule):
    def __init__(self, make: Callable[[Iterable[nn.Parameter]], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.make = nn.Linear(6, 10), nn.Linear(10, 3), make
        self.a.weight.mark = 0.25  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(int(batch) + 7 * self.global_rank)
        return self.b(torch.tanh(self.a(torch.randn(4, 6)))).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def trained(strategy: Any, make: Callable[[Iterable[nn.Parameter]], Any]) -> list[Tensor]:
    net = Net(make)
    with quiet():
        make_trainer(strategy).fit(net, DataLoader(range(3), batch_size=None))
    with full_parameters(net):
        return [parameter.detach().clone() for parameter in net.parameters()]


def test_parameters_on_their_own_are_trained_as_under_ddp() -> None:
    def run(rank: int) -> None:
        for name, parts in FINE.items():
            expected = trained("ddp", lambda parameters, parts=parts: Own(parameters, *parts))
            for stage in (1, 3):
                strategy = ZeroStrategy(stage=stage, units=["Linear"])
                found = trained(strategy, lambda parameters, parts=parts: Own(parameters, *parts))
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{name}, stage {stage}"

    run_world(2, run, timeout=60)


def test_hooks_and_collectives_are_asked_for_and_a_state_dict_of_its_own_is_warned_of() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "steps": 7}

    class Averaging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                dist.all_reduce(parameter.data)
            return loss

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer, hooks: dict[str, Any]) -> None:
            self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
            vars(self).update(hooks)

    def run(rank: int) -> None:
        for hooks in ({}, {"_optimizer_step_pre_hooks": {}}):  # torch's are ordered
            with pytest.raises(UnsupportedOptimizerError, match="Wrapper cannot be sharded: it has no step hooks"):
                trained(
                    ZeroStrategy(stage=1),
                    lambda parameters, hooks=hooks: Wrapper(torch.optim.SGD(parameters), hooks),
                )
        warned = pytest.warns(
            UserWarning, match="`state` of Counting and .* nothing else that its own `state_dict` has"
        )
        with contextlib.nullcontext() if rank else warned:
            trained(ZeroStrategy(stage=1), Counting)
        with pytest.raises(
            UnsupportedOptimizerError, match=r"Averaging .* step\(\) calls the collective allreduce_, and"
        ):
            trained(ZeroStrategy(stage=1), Averaging)

    run_world(2, run)
