"""Norms, sums, finite checks and clipping by hand: what training loops write, with DDP's numbers to rounding."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_zero import HostOffload, ZeroPrecision, full_gradients, full_parameters
from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import WIDTH, Block
from tests.helpers.runs import Net, again, assert_same, each_strategy, fit, made, quiet, raised, zero
from tests.helpers.world import run_world

BOUND = 1e-5
Act = Callable[[nn.Module], Any]


class Parts(nn.Module):
    """A block, and what has no gradient, two names, or too few elements for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.tied, self.scale = self.stem, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stem(self.tied(x) * self.scale))


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def looks(module: nn.Module) -> dict[str, Any]:
    """Everything that people log of gradients."""
    found: dict[str, Any] = {}
    every = gradients_of(module)
    grads = [every[0], every[1], every[-1]]  # a scalar, a matrix, a vector
    for order in (1, 2, 3.5, math.inf, -math.inf, 0):
        found[f"of order {order}"] = [torch.linalg.vector_norm(g, order) for g in grads]
    found["norms"] = [g.norm() for g in grads] + [g.data.norm(2) for g in grads] + [torch.norm(g) for g in grads]
    found["detached"] = [p.grad.detach().norm() for p in module.parameters() if p.grad is not None]
    found["linalg"] = [torch.linalg.norm(g) for g in grads]
    found["sums"] = [x for g in grads for x in (g.abs().sum(), g.abs().mean(), g.sum() / g.abs().sum())]
    found["squares"] = [g.pow(2).sum() for g in grads] + [(g * g).sum() for g in grads] + [(g**2).sum() for g in grads]
    found["extremes"] = [x for g in grads for x in (g.abs().max(), g.min(), g.amax())]
    found["finite"] = [bool(x) for g in grads for x in (g.isfinite().all(), torch.isfinite(g).all())]
    found["not finite"] = [bool(x) for g in grads for x in (g.isnan().any(), torch.isinf(g).any(), g.isnan().sum())]
    found["zeros"] = [int(torch.count_nonzero(g)) for g in grads]
    found["total"] = [get_total_norm(every, order) for order in (1.0, 2.0, math.inf)]
    found["each"] = [get_total_norm(every, 2.0, foreach=foreach) for foreach in (True, False)]
    found["foreach"] = list(torch._foreach_norm(every, 1))
    found["stacked"] = torch.stack([g.norm() for g in grads]).norm()
    found["utility"] = {**lightning_grad_norm(module, 2), **lightning_grad_norm(module, "inf")}
    return found


def plain(found: Any) -> Any:
    """Without graphs."""
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list):
        return [plain(value) for value in found]
    return found.detach().clone() if isinstance(found, Tensor) else found


def by_hand(module: nn.Module) -> None:
    """A clip coefficient that is written out."""
    total = sum(g.norm() ** 2 for g in gradients_of(module)) ** 0.5
    for g in gradients_of(module):
        g.mul_(min(1.0, 0.05 / (float(total) + 1e-6)))


def per_parameter(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None and p.grad.norm() > 0.02:
            p.grad.mul_(0.02 / p.grad.norm())


def skip(module: nn.Module) -> None:
    """A step without what is not finite."""
    grads = gradients_of(module)
    grads[1].mul_(math.nan)
    if not all(g.isfinite().all() for g in grads):
        module.zero_grad()


def with_norm(module: nn.Module) -> None:
    norm = get_total_norm(gradients_of(module))
    clip_grads_with_norm_(module.parameters(), 0.05, norm)


EDITS: dict[str, Act] = {
    "norm 2": lambda m: clip_grad_norm_(m.parameters(), 0.05),
    "norm 1": lambda m: clip_grad_norm_(m.parameters(), 0.05, 1.0, foreach=True),
    "norm inf": lambda m: clip_grad_norm_(m.parameters(), 0.05, math.inf, foreach=False, error_if_nonfinite=True),
    "part": lambda m: clip_grad_norm_(m.stem.parameters(), 0.05),  # type: ignore[union-attr, operator]
    "each": lambda m: [clip_grad_norm_(p, 0.05) for p in m.parameters()],
    "with norm": with_norm,
    "value": lambda m: clip_grad_value_(m.parameters(), 0.01),
    "by hand": by_hand,
    "per parameter": per_parameter,
    "skip": skip,
    "foreach": lambda m: torch._foreach_mul_(gradients_of(m), 0.5),
}


class Acts(Net):
    """Does something to the model in one hook, and keeps what that gives."""

    def __init__(self, act: Act, hook: str, build: Callable[[], nn.Module] = Parts) -> None:
        super().__init__(build)
        self.act, self.hook = act, hook
        self.seen: list[Any] = []
        self.automatic_optimization = hook != "manual"

    def run(self, hook: str) -> None:
        if hook == self.hook:
            self.seen.append(plain(self.act(self.model)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.hook != "manual":
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.run("manual")
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        self.run("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.run("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.run("configure_gradient_clipping")


HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "manual")


@pytest.mark.filterwarnings("ignore:.*used in a forward or backward while no module")  # manual: gathers weights
@pytest.mark.parametrize("hook", HOOKS)
def test_what_people_log_and_clip(hook: str) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for name, act in {"looks": looks, **EDITS}.items():
            module = Acts(act, hook)
            found[name] = {**made(module, fit(again(strategy), module, count=2)), "seen": module.seen}
            if name != "looks":
                del found[name]["seen"]
        return found

    assert_same(each_strategy(play), bound=BOUND)


def both(act: Act) -> Act:
    """The same of slices and of whole tensors."""

    def look(model: nn.Module) -> list[Any]:
        with full_parameters(model), full_gradients(model):
            whole = plain(act(model))
        return [plain(act(model)), whole]

    return look


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"plugins": ZeroPrecision("16-mixed")},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "parameters offloaded": {"offload": HostOffload(parameters=True)},
    "offload, bf16-mixed": {"offload": HostOffload(), "precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
}


def compared(options: dict[str, Any], stage: int, **strategy: Any) -> list[Any]:
    """What was seen of slices and of whole tensors."""
    rest = {key: value for key, value in options.items() if key != "offload"}
    module = Acts(both(looks), "on_before_optimizer_step")
    with quiet():
        fit(zero(stage, offload=options.get("offload"), **strategy), module, count=2, **rest)
    assert all(float(slices["stacked"]) < 10 for slices, _ in module.seen)  # without a loss scale
    return module.seen


def test_slices_give_what_whole_tensors_give() -> None:
    rows = [(name, stage) for name in CONFIGURATIONS for stage in ((3,) if "parameters" in name else (1, 2, 3))]
    for found in run_world(2, lambda rank: [compared(CONFIGURATIONS[name], at) for name, at in rows], timeout=200):
        for (name, _), seen in zip(rows, found, strict=True):
            bound = 2e-2 if name == "bf16-true" else BOUND
            assert seen, name
            for slices, whole in seen:
                assert_same([{name: {"": slices}, "whole": {"": whole}}], [name], bound, "whole")


def test_shards_within_a_host_count_once() -> None:
    for found in run_world(4, lambda rank: [compared({}, stage, shard_within=2) for stage in (1, 2, 3)], timeout=120):
        for seen in found:
            assert seen
            for slices, whole in seen:
                assert_same([{"slices": {"": slices}, "whole": {"": whole}}], ["slices"], BOUND, "whole")


def only(rank: int, act: Act) -> Act:
    """On one rank."""
    return lambda model: act(model) if torch.distributed.get_rank() == rank else None


def own_factor(model: nn.Module) -> Any:
    return (model.stem.weight.grad * (1 + torch.distributed.get_rank())).sum()  # type: ignore[union-attr, operator]


def own_place(model: nn.Module) -> Any:
    parts = (model.stem, model.block.up)  # type: ignore[union-attr]
    return parts[torch.distributed.get_rank()].weight.grad.norm()  # type: ignore[union-attr]


def waits_at_a_barrier(model: nn.Module) -> Any:
    if torch.distributed.get_rank():
        return torch.distributed.barrier()
    return model.stem.weight.grad.norm()  # type: ignore[union-attr]


NORM = r"rank \d: (linalg_vector_)?norm\(\) of the averaged gradient of 'model\.stem\.weight'"
ALONE: dict[str, tuple[Act, str]] = {
    "norm": (only(0, lambda m: m.stem.weight.grad.norm()), NORM),  # type: ignore[union-attr]
    "finite": (
        only(1, lambda m: m.stem.weight.grad.isfinite().all()),
        r"rank 1: all\(\) of the .*averaged gradient of",
    ),  # type: ignore[union-attr]
    "clip": (
        only(1, lambda m: clip_grad_norm_(m.parameters(), 1.0)),
        r"rank 1: _foreach_norm\(\) of .* of \d+ more",
    ),
    "another": (own_place, r"rank 1: norm\(\) of the averaged gradient of 'model\.block\.up\.weight'"),
    "factor": (
        own_factor,
        r"Rank 1 called sum\(\) of the .*averaged gradient of 'model\.stem\.weight' with",
    ),
}


def alone(act: Act, stage: int, hook: str) -> str:
    errors: list[str] = []
    with quiet(), raised(errors):
        fit(zero(stage), Acts(act, hook), count=1)
    return errors[0]


def unseen(act: Act) -> Act:
    """Without what it gives, which is in slices."""

    def call(model: nn.Module) -> None:
        act(model)

    return call


COMMUTE: dict[str, Act] = {
    "factor": unseen(lambda m: [g.mul_(0.5) for g in gradients_of(m)]),
    "foreach": unseen(lambda m: torch._foreach_div_(gradients_of(m), 4.0)),
}
EARLY: dict[str, Act] = {
    "norm": lambda m: m.stem.weight.grad.norm(),  # type: ignore[union-attr]
    "clip by norm": lambda m: clip_grad_norm_(m.parameters(), 0.05),
    "clip by value": lambda m: clip_grad_value_(m.parameters(), 0.01),
    "square": unseen(lambda m: m.stem.weight.grad.square()),  # type: ignore[union-attr]
}


def test_between_micro_steps_what_commutes_with_the_average_works() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for name, act in COMMUTE.items():
            module = Acts(act, "on_after_backward")
            found[name] = made(module, fit(again(strategy), module, count=4, accumulate_grad_batches=2))
        return found

    assert_same(each_strategy(play), bound=BOUND)


def test_between_micro_steps_an_average_is_not_taken_for_the_sum_of_a_rank() -> None:
    """Which stage 1 has, as DDP does."""

    def play(strategy: Strategy) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, act in EARLY.items():
            errors, module = list[str](), Acts(act, "on_after_backward")
            with quiet(), raised(errors):
                trainer = fit(again(strategy), module, count=2, accumulate_grad_batches=2)
            found[name] = errors or {"seen": module.seen, **made(module, trainer)}
        return found

    results = each_strategy(play)
    assert_same(results, ["stage 1"], bound=BOUND)
    for stage in ("stage 2", "stage 3"):
        for name, text in ((name, found) for by_name in results for name, found in by_name[stage].items()):
            told = r"ParameterAccessError.* of the averaged gradient of '\S+' was called between micro-steps"
            assert re.search(told, str(text)), (name, text)


def test_one_rank_alone_is_told() -> None:
    def run(rank: int) -> dict[str, list[str]]:
        places = [(1, "on_after_backward"), (3, "manual")]
        return {name: [alone(act, *place) for place in places] for name, (act, _) in ALONE.items()}

    for found in run_world(2, run, timeout=120):
        for name, (_, told) in ALONE.items():
            assert all(re.search(told, text) for text in found[name]), found[name]
            assert all(text.startswith("DivergenceError") for text in found[name]), found[name]


def test_one_rank_alone_does_not_wait_for_ever() -> None:
    for text in run_world(2, lambda rank: alone(waits_at_a_barrier, 1, "on_after_backward"), timeout=60):
        assert "rank 0 has waited for" in text
        assert "norm() of the averaged gradient of 'model.stem.weight'" in text


class Reads(Acts):
    """What raises, by name."""

    def __init__(self, act: Act) -> None:
        super().__init__(act, "on_before_optimizer_step")
        self.told: list[str] = []

    def run(self, hook: str) -> None:
        if hook == self.hook:
            with raised(self.told):
                self.act(self.model)


def in_a_thread(model: nn.Module) -> None:
    grad, told = model.stem.weight.grad, list[BaseException]()  # type: ignore[union-attr]

    def run() -> None:
        try:
            grad.norm()  # type: ignore[operator, union-attr]
        except ParameterAccessError as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise told[0]


REFUSED: dict[str, tuple[Act, str]] = {
    "thread": (in_a_thread, r"norm\(\) .* 'model\.stem\.weight' was called in a thread of its own"),
    "norm of a weight": (
        lambda m: m.stem.weight.norm(),  # type: ignore[union-attr, operator]
        r"'model\.stem\.weight' are not in memory here, and norm\(\) needs them.*full_parameters.*local_slices",
    ),
    "finite weights": (
        lambda m: m.stem.weight.detach().isfinite(),  # type: ignore[union-attr, operator]
        r"parameter 'model\.stem\.weight' is sharded.*abs\(\) needs all of it.*full_parameters.*local_slices",
    ),
    "write through detach": (
        lambda m: m.stem.weight.detach().mul_(0.5),  # type: ignore[union-attr, operator]
        "parameter 'model.stem.weight' is sharded.*mul_.*full_parameters",
    ),
    "norms of all weights": (
        lambda m: get_total_norm(m.parameters()),
        r"are not in memory here, and linalg_vector_norm\(\)",
    ),
    "columns": (lambda m: m.stem.weight.grad.norm(dim=0), r"norm\(\) of some dimensions"),  # type: ignore[union-attr]
    "median": (lambda m: m.stem.weight.grad.median(), "full_gradients"),  # type: ignore[union-attr]
    "matrix norm": (lambda m: torch.linalg.norm(m.stem.weight.grad, 2), "full_gradients"),  # type: ignore[union-attr]
    "mask": (lambda m: m.stem.weight.grad.mul_(torch.ones(WIDTH)), "works with numbers only.*local_slices"),  # type: ignore[union-attr]
    "of another": (lambda m: torch.ones(WIDTH).add_(m.stem.bias.grad), "needs all of it.*full_gradients"),  # type: ignore[union-attr]
}


def in_the_next_backward(model: nn.Module) -> None:
    kept = model.stem.weight.grad  # type: ignore[union-attr]
    model.scale.register_hook(lambda grad: grad * kept.norm())  # type: ignore[union-attr, operator]


def twice(rank: int) -> list[str]:
    """What is told by the second micro-step, in whose backward a kept gradient is used."""
    errors: list[str] = []
    with quiet(), raised(errors):
        fit(zero(2), Acts(in_the_next_backward, "on_after_backward"), count=2, accumulate_grad_batches=2)
    return errors


def test_everything_else_raises_by_name() -> None:
    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for name, (act, _) in REFUSED.items():
            module = Reads(act)
            with quiet(), contextlib.suppress(RuntimeError):
                fit(zero(3), module, count=1)
            found[name] = module.told
        return {**found, "backward": twice(rank)}

    for found in run_world(2, run, timeout=60):
        told = {name: text for name, (_, text) in REFUSED.items()}
        for name, text in {**told, "backward": "called during a backward"}.items():
            assert len(found[name]) == 1, (name, found[name])
            assert found[name][0].startswith("ParameterAccessError"), found[name]
            assert re.search(text, found[name][0]), (name, found[name])
