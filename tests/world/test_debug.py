"""Gradients, optimizer states and norms of a sharded run, as the user asks for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import full_gradient, full_gradients, full_optimizer_state, full_parameters, grad_norm
from lightning_zero.engine import engine_of
from tests.helpers.cases import Case, Stack, case
from tests.helpers.models import ZOO
from tests.helpers.runs import Net, batches, zero
from tests.helpers.training import build, make_trainer, quiet
from tests.helpers.world import run_world

STAGES = (1, 3)
PLAIN = case("plain", Stack)
NORMS = (1.0, 2.0, 3.0, float("inf"))


class Module(pl.LightningModule):
    def __init__(self, chosen: Case, look: Callable[[Module], Any], optimizer: Any = None) -> None:
        super().__init__()
        self.model = build(chosen)
        self.case, self.look, self.seen = chosen, look, []
        self.optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.case.loss(self.model, self.case.batch(0, int(batch)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.look(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


def fit(module: Module, stage: int, steps: int = 2) -> list[Any]:
    from lightning_zero import ZeroStrategy

    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=module.case.units))
        trainer.fit(module, DataLoader(range(steps), batch_size=None))
    return module.seen


def plainly(module: Module, steps: int = 2) -> list[Any]:
    optimizer = module.configure_optimizers()
    module.plain_optimizer = [optimizer]
    for step in range(steps):
        module.training_step(torch.tensor(step), step).backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return module.seen


def everywhere(chosen: Case, look: Callable[[Module], Any], **options: Any) -> list[list[Any]]:
    """What ``look`` saw in every stage on every rank."""
    results = run_world(2, lambda rank: [fit(Module(chosen, look, **options), stage) for stage in STAGES], timeout=90)
    return [seen for stages in results for seen in stages]


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if engine_of(module) is None:
        return {n: p.grad.clone() if p.grad is not None else None for n, p in module.named_parameters() if n in names}
    return {name: full_gradient(module, name) for name in names}


def test_full_gradient() -> None:
    names = ["odd_sizes", "unused_parameter", "mixed_dtypes", "shared_across_units"]

    def run(rank: int) -> list[Any]:
        return [[fit(Module(ZOO[name], gradients_of), stage) for stage in STAGES] for name in names]

    for found in run_world(2, run, timeout=90):
        for name, stages in zip(names, found, strict=True):
            expected = plainly(Module(ZOO[name], gradients_of))
            for ours, theirs in [pair for seen in stages for pair in zip(expected, seen, strict=True)]:
                assert ours.keys() == theirs.keys(), name
                for key, gradient in ours.items():
                    assert (gradient is None) == (theirs[key] is None), f"{name}: {key}"
                    if gradient is not None:
                        assert gradient.dtype == theirs[key].dtype, f"{name}: {key}"
                        assert torch.equal(gradient, theirs[key]), f"{name}: {key}"


def test_grad_norm() -> None:
    """Of the whole module and of one below, which may be a part of a unit; accumulated in float64."""

    def below(module: Module) -> list[nn.Module]:
        return [module, module.model.layers[1], module.model.layers[1].up, module.model.layers]

    def look(module: Module) -> list[float]:
        return [float(grad_norm(part, norm)) for part in below(module) for norm in NORMS]

    def reference(module: Module) -> list[float]:
        flat = [torch.cat([p.grad.double().flatten() for p in part.parameters()]) for part in below(module)]
        return [float(torch.linalg.vector_norm(f, norm)) for f in flat for norm in NORMS]

    expected = plainly(Module(PLAIN, reference))
    for seen in everywhere(PLAIN, look):
        for ours, theirs in zip(expected, seen, strict=True):
            assert theirs == pytest.approx(ours, rel=2e-6)


def test_the_norm_of_awkward_gradients_is_that_of_whole_ones() -> None:
    """In every stage, with every cut of them: a float64 norm over full gradients, to the bit of its result."""
    values = [1e-45, 3e38, -3e18, 1e-30, float("inf"), float("nan")]

    def look(module: Module) -> None:
        for place, value in enumerate(values):
            with full_gradients(module):
                gradients = [p.grad for p in module.parameters() if p.grad is not None and p.grad.numel()]
                gradients[4 * place % len(gradients)].view(-1)[-1] = value
                flat = torch.cat([g.double().flatten() for g in gradients])
                wide = any(g.dtype is torch.float64 for g in gradients)
            for kind in NORMS:
                norm, whole = grad_norm(module, kind), torch.linalg.vector_norm(flat, kind)
                assert norm.dtype == (torch.float64 if wide else torch.float32)
                expected = pytest.approx(float(whole.to(norm.dtype)), rel=1e-13 if wide else 0, abs=0, nan_ok=True)
                assert float(norm) == expected, f"norm {kind} with {value}"

    def run(rank: int) -> None:
        for chosen in (PLAIN, ZOO["mixed_dtypes"], ZOO["odd_sizes"]):
            for stage in STAGES:
                fit(Module(chosen, look), stage, 1)

    run_world(3, run, timeout=90)


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_full_optimizer_state(optimizer: str) -> None:
    keys = {"AdamW": ("exp_avg", "exp_avg_sq", "step"), "Muon": ("momentum_buffer",)}[optimizer]
    names = ["model.layers.0.up.weight", "model.head.weight"]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, optimizer)([p for p in parameters if p.ndim == 2], lr=0.01)

    def look(module: Module) -> Any:
        if not module.seen:
            return None  # no state before the first step
        if engine_of(module) is not None:
            return [full_optimizer_state(module, name, key) for name in names for key in keys]
        state, parameters = module.plain_optimizer[0].state, dict(module.named_parameters())
        return [state[parameters[name]][key].clone() for name in names for key in keys]

    (_, expected) = plainly(Module(PLAIN, look, make))
    for _, seen in everywhere(PLAIN, look, optimizer=make):
        for ours, theirs in zip(expected, seen, strict=True):
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs)


def test_full_optimizer_state_of_a_parameter_in_two_optimizers() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.found: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()
            self.found = [str(full_optimizer_state(self, "model.head.weight", key).shape) for key in KEYS]
            with pytest.raises(ValueError, match=r"there is: momentum_buffer, .*exp_avg"):
                full_optimizer_state(self, "model.head.weight", "nothing")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(self.parameters(), lr=0.1)

    def world(rank: int) -> list[str]:
        module = Two()
        with quiet():
            make_trainer(zero(3)).fit(module, batches(2), batches(1))
        return [*module.found, str(module.model.head.weight.shape)]

    KEYS = ("momentum_buffer", "exp_avg")
    for found in run_world(2, world):
        assert len(found) == 3
        assert len(set(found)) == 1


def test_full_parameters_are_all_whatever_a_method_of_the_module_s_shows() -> None:
    class Adapted(Net):
        """As for an optimizer of the adapters alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model.layers.requires_grad_(False)

        def parameters(self, recurse: bool = True) -> Any:
            return (p for p in super().parameters(recurse) if p.requires_grad)

    def world(rank: int) -> bool:
        module = Adapted()
        with quiet():
            make_trainer(zero(3)).fit(module, batches(2), batches(1))
        with full_parameters(module):
            return all(bool(p.isfinite().all()) for _, p in module.named_parameters())

    assert run_world(2, world) == [True, True]


def test_wrong_names_are_named() -> None:
    def look(module: Module) -> None:
        if module.seen:
            return
        with pytest.raises(ValueError, match=r"Module has no sharded parameter 'model\.nothing'"):
            full_gradient(module, "model.nothing")
        with pytest.raises(ValueError, match=r"Block has no sharded parameter 'model\.head\.weight'"):
            full_gradient(module.model.layers[0], "model.head.weight")
        with pytest.raises(ValueError, match=r"'model\.stem\.weight' is frozen"):
            full_gradient(module, "model.stem.weight")
        with pytest.raises(ValueError, match=r"no optimizer state 'exp_avg'; there is: nothing yet"):
            full_optimizer_state(module, "model.head.weight", "exp_avg")
        with pytest.raises(ValueError, match=r"'model\.stem\.weight' is in no optimizer"):
            full_optimizer_state(module, "model.stem.weight", "exp_avg")
        assert full_gradient(module.model, "head.weight").shape == module.model.head.weight.shape

    def build_frozen() -> nn.Module:
        model = Stack()
        model.stem.requires_grad_(False)
        return model

    everywhere(case("frozen", build_frozen), look)


def test_modules_that_are_not_sharded() -> None:
    linear = nn.Linear(3, 2)
    linear(torch.ones(1, 3)).sum().backward()
    assert float(grad_norm(linear)) == pytest.approx(8**0.5)  # six ones of the weight, two of the bias
    assert float(grad_norm(linear, float("inf"))) == 1.0
    assert float(grad_norm(nn.ReLU())) == 0.0
    with pytest.raises(ValueError, match="Linear is not part of a sharded run"):
        full_gradient(linear, "weight")
    with pytest.raises(ValueError, match="Linear is not part of a sharded run"):
        full_optimizer_state(linear, "weight", "exp_avg")


@pytest.mark.parametrize("prepare", ["fit", "validate"])
def test_nothing_outlives_the_trainer_and_the_module(prepare: str) -> None:
    """Hooks, parameters and the registry know the engine, but none of them keeps it in memory."""

    def run(rank: int) -> list[str]:
        left = []
        for stage in STAGES:
            module = Module(PLAIN, lambda module: float(grad_norm(module)))
            if prepare == "fit":
                fit(module, stage)
            else:
                from lightning_zero import ZeroStrategy

                module.validation_step = lambda batch, batch_idx: None
                with quiet():
                    make_trainer(ZeroStrategy(stage=stage)).validate(
                        module, DataLoader(range(1), batch_size=None), verbose=False
                    )
            with full_parameters(module):
                pass
            engine = engine_of(module)
            watched = {
                "module": weakref.ref(module),
                "engine": weakref.ref(engine),
                "shard": weakref.ref(next(iter(engine.shards.values())).data),
            }
            del module, engine
            gc.collect()
            left += [f"stage {stage}: {name}" for name, weak in watched.items() if weak() is not None]
        return left

    assert run_world(2, run) == [[], []]
