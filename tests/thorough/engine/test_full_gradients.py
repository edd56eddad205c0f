"""``full_gradients``: whole averages in ``.grad``, as DDP leaves them, and what is left there is what is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_zero import HostOffload, full_gradient, full_gradients, full_parameters
from lightning_zero.engine import engine_of
from lightning_zero.shards.sharded import ShardedTensor
from tests.helpers.cases import Stack
from tests.helpers.models import ZOO
from tests.helpers.runs import STAGES, Net, again, assert_same, each_strategy, fit, made, quiet, values_of, zero
from tests.helpers.world import run_world

HOOKS = ("on_after_backward", "on_before_optimizer_step")


def in_slices(parameter: nn.Parameter) -> bool:
    """Whether ``.grad`` is what it is outside of ``full_gradients``."""
    return parameter.grad is None or isinstance(parameter.grad, ShardedTensor)


class Acts(Net):
    """Calls ``act`` in one hook of every step, on whole gradients, and keeps what it gives."""

    def __init__(
        self,
        act: Callable[[Acts], Any],
        hook: str = "on_before_optimizer_step",
        build: Callable[[], nn.Module] = Stack,
        whole: bool = True,
    ) -> None:
        super().__init__(build)
        self.act, self.hook, self.whole = act, hook, whole
        self.seen: list[Any] = []

    def run(self, hook: str) -> None:
        if hook != self.hook:
            return
        if not self.whole:
            self.seen.append(self.act(self))
            return
        with full_gradients(self):
            self.seen.append(self.act(self))

    def on_after_backward(self) -> None:
        self.run("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.run("on_before_optimizer_step")


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def norms(module: nn.Module) -> dict[str, Tensor]:
    return {**grad_norm(module, 2), **grad_norm(module, 1), **grad_norm(module, "inf")}


def clip(module: nn.Module) -> Tensor:
    return clip_grad_norm_(module.parameters(), 0.05)


def edit(module: nn.Module) -> dict[str, Tensor | None]:
    """What users write: freezing rows, masks, noise, replacing and dropping a gradient."""
    for index, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.grad is None:
            continue
        torch.manual_seed(index)
        parameter.grad[:1] = 0
        parameter.grad.mul_(torch.rand_like(parameter.grad) > 0.3)
        parameter.grad.data.add_(torch.randn_like(parameter), alpha=0.01)
        if name.endswith("up.weight"):
            parameter.grad = parameter.grad.t().contiguous().t() * 2
        if name.endswith("layers.0.down.bias"):
            parameter.grad = None
    return gradients(module)


class Frozen(Acts):
    """With parameters that have no gradient: frozen, and never used."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model.stem.requires_grad_(False)
        self.unused = nn.Linear(3, 3)


class Manual(Acts):
    """In the middle of a step, in manual optimization."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        with full_gradients(self):
            self.seen.append(self.act(self))
        optimizer.step()

    def run(self, hook: str) -> None:
        pass


def test_it_is_what_ddp_does_bit_for_bit() -> None:
    rows = {f"{act.__name__} {hook}": (Acts, act, hook) for act in (gradients, norms, clip, edit) for hook in HOOKS}
    rows |= {kind.__name__: (kind, edit, HOOKS[1]) for kind in (Frozen, Manual)}

    def play(strategy: Strategy) -> dict[str, Any]:
        found = {}
        for name, (kind, act, hook) in rows.items():
            module = kind(act, hook)
            found[name] = {**made(module, fit(again(strategy), module, count=3)), "seen": module.seen}
        return found

    assert_same(each_strategy(play))


def test_gradients_that_accumulate() -> None:
    """In stages 2 and 3 every batch's gradients are reduced, and added in another order than DDP's."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Acts(edit)
        trainer = fit(strategy, module, count=4, accumulate_grad_batches=2)
        return {"seen": module.seen, **made(module, trainer)}

    results = each_strategy(play)
    assert_same(results, ["stage 1"])
    assert_same(results, bound=1e-4)


def test_gradients_where_the_optimizer_is_offloaded_or_autocast_computes() -> None:
    """They have the dtype of the parameters then, as DDP's."""

    def dtypes(module: Acts) -> set[torch.dtype]:
        edit(module)
        return {p.grad.dtype for p in module.parameters() if p.grad is not None}

    def play(rank: int) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        offloads = {"plain": None, "host": HostOffload(), "host, parameters": HostOffload(parameters=True)}
        with quiet():
            for name, offload in offloads.items():
                for stage in STAGES.values() if "parameters" not in name else (3,):
                    module = Acts(edit)
                    seen = made(module, fit(zero(stage, offload=offload), module, count=3))
                    found.setdefault(name, {})[str(stage)] = {**seen, "seen": module.seen}
            found["host, parameters"] = {**found["plain"], **found["host, parameters"]}
            for stage in STAGES.values():
                for kind in (Acts, Manual):
                    narrow = kind(dtypes)
                    fit(zero(stage), narrow, count=2, precision="bf16-mixed")
                    assert narrow.seen == [{torch.float32}] * 2
        return found

    assert_same(run_world(2, play, timeout=200), ["host", "host, parameters"], expected="plain")


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_or_some_in_worlds_of_any_size(world_size: int) -> None:
    """The same as ``full_gradient``, one by one; of some, the others' ``.grad`` stays as it was."""
    from tests.world.test_debug import Module
    from tests.world.test_debug import fit as fit_case

    def look(module: Module) -> None:
        engine = engine_of(module)
        single = {n: full_gradient(module, n) for n, p in module.named_parameters() if p.requires_grad}
        signs = dict.fromkeys(single, 1)
        for part in (module, *module.model.children(), module.model):
            own = set(part.parameters())
            with full_gradients(part):
                for key, parameter in module.named_parameters():
                    expected = single.get(key) if parameter in own else None
                    expected = expected if expected is None else expected * signs[key]
                    assert in_slices(parameter) == (expected is None), key
                    assert expected is None or torch.equal(parameter.grad, expected), key
                    if expected is not None:
                        parameter.grad.neg_()
                        signs[key] = -signs[key]
        assert all(map(in_slices, module.parameters()))
        for key, before in single.items():
            after = full_gradient(module, key)
            assert (before is None) == (after is None)
            assert before is None or torch.equal(after, before * signs[key]), key
        assert engine is engine_of(module)

    def play(rank: int) -> None:
        for name in ("odd_sizes", "unused_parameter", "mixed_dtypes", "shared_across_units"):
            for stage in STAGES.values():
                fit_case(Module(ZOO[name], look), stage, steps=2)

    run_world(world_size, play, timeout=100)


def test_only_what_is_asked_for_is_sent() -> None:
    """And as much of it as it has: a rank's parts in one piece, for each layout."""

    def play(rank: int) -> list[int]:
        sent: list[int] = []

        def look(module: Acts) -> None:
            engine = engine_of(module)
            calls: list[tuple[str, int]] = []

            def observe(call: Any) -> None:
                calls.append((call.kind, call.numel))

            engine.collectives.observers.append(observe)
            with full_gradients(module.model.head):
                pass
            with full_gradients(module):
                pass
            engine.collectives.observers.remove(observe)
            sent.extend(numel for _, numel in calls)

        module = Acts(look, whole=False)
        with quiet():
            fit(zero(2), module, count=1)
        everything = sum(p.numel() for p in module.parameters())
        head = sum(p.numel() for p in module.model.head.parameters())
        assert head <= sent[0] <= 2 * head
        assert everything <= sum(sent[1:]) <= 1.1 * everything
        return sent

    run_world(2, play)


# ---------------------------------------------------------------------------------------------------------------------
# Nesting, and what is left behind


def test_it_nests_with_itself_and_with_full_parameters() -> None:
    def act(module: Acts) -> Any:
        with full_parameters(module):
            with full_gradients(module.model.head):
                module.model.head.weight.grad.mul_(2)
                with full_gradients(module):
                    module.model.head.weight.grad.mul_(2)
                    module.model.stem.bias.grad.mul_(module.model.stem.bias.detach())
                assert engine_of(module) is None or in_slices(module.model.stem.bias)
                module.model.head.weight.grad.mul_(2)
            assert engine_of(module) is None or in_slices(module.model.head.weight)
        with full_gradients(module), full_parameters(module):
            for parameter in module.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.1)  # weight decay by hand
        return None

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Acts(act, whole=False)
        return made(module, fit(strategy, module, count=3))

    assert_same(each_strategy(play))


def test_accumulation_goes_on_after_an_edit() -> None:
    """What was edited, dropped or set anew after one backward is what the next one adds to."""

    def act(module: Acts) -> None:
        parameters = dict(module.named_parameters())
        if len(module.seen) % 2 == 0:
            with full_gradients(module):
                parameters["model.head.weight"].grad = None
                parameters["model.head.bias"].grad = torch.ones_like(parameters["model.head.bias"])
                parameters["model.layers.0.up.weight"].grad.zero_()

    def play(rank: int) -> list[dict[str, Tensor]]:
        results = []
        for stage in (2, 3):
            module = Acts(act, "on_after_backward", whole=False)
            with quiet():
                fit(zero(stage), module, count=4, accumulate_grad_batches=2)
            results.append(values_of(module))
        return results

    first, second = run_world(2, play)
    for results in (first, second):
        assert_same([{"2": results[0], "3": results[1]}], ["3"], expected="2")  # type: ignore[list-item]


def test_it_is_refused_in_a_backward() -> None:
    def play(rank: int) -> None:
        def act(module: Acts) -> None:
            with full_gradients(module):
                pass

        class Hooked(Net):
            def configure_model(self) -> None:
                self.model.head.weight.register_hook(lambda gradient: act(self))

        with quiet(), pytest.raises(RuntimeError, match="called in a backward"):
            fit(zero(2), Hooked(), count=1)

    run_world(2, play)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class Stop(Exception):
    pass


def stop(module: Any) -> None:
    raise Stop("it")


def scale(module: Any) -> None:
    module.model.layers[1].up.weight.grad[0, 0] += 1e-3


def drop(module: Any) -> None:
    module.model.head.bias.grad = None


def reshape(module: Any) -> None:
    module.model.head.weight.grad.data = torch.zeros(3, 3)


LEFT = "RuntimeError: Rank {} left full_gradients('"
LIST = "DivergenceError: Rank 1 has another list of writes than rank 0."
SHAPE = "ValueError: full_gradients: .grad of 'model.head.weight' has shape [3, 3]"
# What is done, on which ranks, and what ranks 0 and 1 are told: the beginning, and a part.
FAILING: list[tuple[Callable[[Any], None], tuple[int, ...], tuple[str, str], str]] = [
    (stop, (0, 1), ("Stop: it", "Stop: it"), ""),
    (stop, (0,), ("Stop: it", LEFT.format(0)), ""),
    (stop, (1,), (LEFT.format(1), "Stop: it"), ""),
    (scale, (1,), (LIST, LIST), "rank 1: a gradient of 'model.layers.1.up.weight', in full_gradients("),
    (drop, (1,), (LIST, LIST), "rank 1: no gradient of 'model.head.bias', in full_gradients("),
    (reshape, (0,), (SHAPE, LEFT.format(0)), ""),
]


def test_an_error_or_another_change_on_one_rank_ends_the_block_on_all_and_changes_nothing() -> None:
    def play(rank: int) -> None:
        for stage in STAGES.values():
            for change, ranks, told, part in FAILING:

                def act(module: Acts, change: Any = change, ranks: Any = ranks, told: Any = told) -> None:
                    before = {name: full_gradient(module, name) for name, _ in module.named_parameters()}
                    with pytest.raises((Stop, RuntimeError, ValueError)) as caught, full_gradients(module):  # noqa: PT012
                        for parameter in module.parameters():
                            parameter.grad.data.mul_(2)
                        if rank in ranks:
                            change(module)
                    module.told = f"{type(caught.value).__name__}: {caught.value}"
                    assert module.told.startswith(told[rank]), module.told
                    for name, parameter in module.named_parameters():
                        assert in_slices(parameter)
                        assert torch.equal(before[name], full_gradient(module, name))

                with quiet():
                    module = Acts(act, whole=False)
                    fit(zero(stage), module, count=2)
                assert part in module.told, (change, stage, module.told)

    run_world(2, play, timeout=100)


def test_modules_that_are_not_sharded_are_left_alone() -> None:
    linear = nn.Linear(3, 2)
    linear(torch.ones(1, 3)).sum().backward()
    gradient = linear.weight.grad
    with full_gradients(linear):
        assert linear.weight.grad is gradient
    assert linear.weight.grad is gradient
