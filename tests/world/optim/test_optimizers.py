"""The user's optimizer on shards does, bit for bit, what it does on whole parameters.

The reference is a hand-written loop over whole parameters on every rank: gradients of all ranks are averaged in rank
order, which is how the package reduces at every world size, and the optimizer steps on the whole. At two ranks that is
DDP's result too (a sum of two numbers has one order), which ``test_parity.py`` shows with DDP itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero.errors import UnsupportedOptimizerError
from tests.helpers.cases import WIDTH, Block, Case, Stack, case
from tests.helpers.models import Gain, OddSizes
from tests.helpers.probe import Probe, fit, masters, pairwise_mean
from tests.helpers.training import build, make_trainer, quiet
from tests.helpers.world import run_world

Make = Callable[[list[Any]], Optimizer]
STEPS = 5


class Odd(Stack):
    """0-d, empty and tiny parameters (no slice of them on some ranks), frozen ones, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__(Block(), OddSizes(), Gain(sometimes=False))
        self.layers[0].down.requires_grad_(False)


ODD = case("odd", Odd, units=("Block", "OddSizes", "Gain"))


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, frozen parameters included."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.003},
    ]


optim = torch.optim
ELEMENTWISE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
    "sgd momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov maximize": (optim.SGD, {"lr": 0.001, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adamw maximize": (optim.AdamW, {"lr": 0.001, "maximize": True}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "nadam": (optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adagrad": (optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01}),
    "rmsprop centered momentum": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.01, "t0": 2, "weight_decay": 0.01}),
}
FUSED = ("sgd momentum", "adam", "adamw amsgrad", "adagrad")


def without_empty(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Torch's Adafactor divides by the number of elements."""
    return [{**group, "params": [p for p in group["params"] if p.numel()]} for group in groups]


def variants() -> dict[str, Callable[[nn.Module], Optimizer]]:
    found: dict[str, Callable[[nn.Module], Optimizer]] = {}
    for name, (cls, options) in ELEMENTWISE.items():
        flags: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}]
        if name in FUSED:
            flags.append({"fused": True})
        for flag in flags:
            found[f"{name} {next(iter(flag))}={next(iter(flag.values()))}"] = lambda m, c=cls, o={**options, **flag}: c(
                two_groups(m), **o
            )
    return found


def reference(model: Case, make: Callable[[nn.Module], Any], steps: int = STEPS) -> dict[str, Tensor]:
    """Whole parameters on every rank. Collective."""
    module = Probe(model, make)
    optimizer = make(module)
    scheduler = None
    if isinstance(optimizer, tuple):
        (optimizer,), (scheduler,) = optimizer
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(module.model, model.batch(dist.get_rank(), step)).backward()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = pairwise_mean(parameter.grad)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def sharded(model: Case, stage: int, make: Callable[[nn.Module], Any], steps: int = STEPS) -> dict[str, Tensor]:
    probe = Probe(model, make)
    fit(probe, stage=stage, micro_steps=steps)
    return masters(probe)


def unlike(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == actual.keys()
    return [name for name, value in expected.items() if not torch.equal(value, actual[name])]


@pytest.mark.parametrize(("part", "world_size"), [(0, 2), (1, 2), (0, 3)])
def test_elementwise_optimizers_of_torch(world_size: int, part: int) -> None:
    makes = dict(list(variants().items())[part::2])
    if world_size == 3:  # other cuts: of every optimizer its last variant, fused or foreach
        makes = {name.rpartition(" ")[0]: make for name, make in variants().items()}
        assert makes.keys() == ELEMENTWISE.keys()
    # Which stage it is decides which gradients and parameters a shard gets, not how it is stepped: of each two variants
    # of an optimizer one is taken in stage 1 and the other in stage 3, where cuts fall alike.
    first = [[3], [1]][part] if world_size == 2 else [3]

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for name, make in makes.items():
            expected = reference(ODD, make)
            start = {f"model.{key}": value for key, value in build(ODD).named_parameters()}
            trainable = [key for key, value in start.items() if value.requires_grad and value.numel()]
            unchanged = [key for key in trainable if torch.equal(start[key], expected[key])]
            # The reference itself trains: all but the gain that nobody uses.
            found[f"reference of {name}"] = [key for key in unchanged if not key.endswith("gain")]
            for stage in first:
                found[f"{name}, stage {stage}"] = unlike(expected, sharded(ODD, stage, make))
        return found

    for found in run_world(world_size, run, timeout=200):
        assert not any(found.values()), {name: bad for name, bad in found.items() if bad}


def test_every_optimizer_of_torch_is_decided_on() -> None:
    """A new one in a new torch must be looked at: whole parameters are safe for it, and slow."""
    known = {cls for cls, _ in ELEMENTWISE.values()} | {optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon}
    found = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, Optimizer) and v is not Optimizer}
    assert found == known


# ---------------------------------------------------------------------------------------------------------------------
# Whole-matrix optimizers


class RowNormalised(Optimizer):
    """A third party's: its update of an element depends on the whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, average=torch.zeros_like(parameter), norms=torch.zeros(7))
                state["steps"] += 1
                state["average"].mul_(0.9).add_(parameter.grad)
                state["norms"][state["steps"] % 7] = parameter.grad.norm()
                parameter.sub_(state["average"] / (state["norms"].sum() + 1) * group["lr"])


class CentralisedAdam(torch.optim.Adam):
    """A subclass of an elementwise optimizer that is not elementwise: gradients are centred before the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


MATRICES = case("matrices", lambda: Stack(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))), units=("Linear",))
WHOLE: dict[str, tuple[Case, Callable[[nn.Module], Optimizer]]] = {
    "muon": (MATRICES, lambda m: optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02)),
    "adafactor": (ODD, lambda m: optim.Adafactor(without_empty(two_groups(m)), lr=0.02)),
    "third party": (ODD, lambda m: RowNormalised(two_groups(m), lr=0.1)),
    "centralised adam": (ODD, lambda m: CentralisedAdam(two_groups(m), lr=0.01)),
}


def train_ddp(model: Case, make: Callable[[nn.Module], Optimizer], steps: int, accumulate: int) -> dict[str, Tensor]:
    """DDP, with the norm for clipping taken in float64 as the package does. Collective."""
    module = Probe(model, make)
    ddp = DistributedDataParallel(module.model, find_unused_parameters=True)
    optimizer = make(module)
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = model.loss(ddp, model.batch(dist.get_rank(), step * accumulate + micro))
                (loss / accumulate).backward()
        # What Lightning clips: the optimizer's own (Muon's are the matrices only).
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in owned if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(owned, 0.05, norm)
        optimizer.step()
        module.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class SaveAfter(pl.Callback):
    def __init__(self, path: str, batch_idx: int) -> None:
        self.path, self.batch_idx = path, batch_idx

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_matrix_optimizers_train_like_ddp(name: str, tmp_path: Path) -> None:
    """With zero_grad, clipping and a checkpoint in the middle; stage 1 with accumulation too, where DDP's order of
    additions is ours."""
    model, make = WHOLE[name]

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        expected = {accumulate: train_ddp(model, make, 4, accumulate) for accumulate in (1, 2)}
        for stage, accumulate in ((1, 1), (1, 2), (2, 1), (3, 1)):
            options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
            path = str(tmp_path / f"{stage} {accumulate}")
            batches = 4 * accumulate
            first, second = Probe(model, make), Probe(model, make)
            # After the second of four steps.
            save = SaveAfter(path, 2 * accumulate - 1)
            fit(first, stage=stage, micro_steps=batches, options=options, callbacks=[save])
            fit(second, stage=stage, micro_steps=batches, options=options, ckpt_path=path, first=2 * accumulate)
            where = f"stage {stage}, {accumulate} micro-steps"
            found[where] = unlike(expected[accumulate], masters(first))
            found[f"{where}, resumed"] = unlike(expected[accumulate], masters(second))
            assert len(second.losses) == 2 * accumulate
        return found

    for found in run_world(2, run, timeout=120):
        assert not any(found.values()), {name: bad for name, bad in found.items() if bad}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_matrix_optimizers_on_three_ranks(name: str) -> None:
    model, make = WHOLE[name]

    def run(rank: int) -> dict[int, list[str]]:
        expected = reference(model, make)
        return {stage: unlike(expected, sharded(model, stage, make)) for stage in (1, 3)}

    for found in run_world(3, run):
        assert not any(found.values()), found


# ---------------------------------------------------------------------------------------------------------------------
# Options, schedulers, groups


def with_scheduler(module: nn.Module) -> Any:
    optimizer = optim.SGD(two_groups(module), lr=0.05, momentum=0.9)
    return [optimizer], [optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


def step_scheduler(module: nn.Module) -> Any:
    (optimizer,), (scheduler,) = with_scheduler(module)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ChangeOptions(pl.Callback):
    """A user who changes options of a group while training, as a warm-up written by hand does."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        change(trainer.optimizers[0], batch_idx)


def change(optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
    optimizer.param_groups[1]["weight_decay"] = 0.1 * step


class AddGroup(pl.Callback):
    """Gradual unfreezing as ``BaseFinetuning`` does it: the head joins the optimizer at the third step."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.optimizers[0].add_param_group({"params": list(module.model.head.parameters()), "lr": 0.02})


def without_head(module: Any) -> Optimizer:
    head = set(module.model.head.parameters())
    return optim.Adam([p for p in module.parameters() if p not in head], lr=0.01)


def test_schedulers_options_and_added_groups() -> None:
    def by_hand(make: Callable[[Any], Optimizer], before: Callable[[Any, Optimizer, int], None]) -> dict[str, Tensor]:
        module = Probe(ODD, make)
        optimizer = make(module)
        for step in range(STEPS):
            before(module, optimizer, step)
            module.zero_grad()
            ODD.loss(module.model, ODD.batch(dist.get_rank(), step)).backward()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad = pairwise_mean(parameter.grad)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def add(module: Any, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(module.model.head.parameters()), "lr": 0.02})

    def adam(module: nn.Module) -> Optimizer:
        return optim.Adam(two_groups(module), lr=0.01)

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        scheduled = reference(ODD, with_scheduler)
        changed = by_hand(adam, lambda module, optimizer, step: change(optimizer, step))
        added = by_hand(without_head, add)
        for stage in (1, 3):
            found[f"scheduler, stage {stage}"] = unlike(scheduled, sharded(ODD, stage, step_scheduler))
            for name, expected, make, callback in (
                ("options", changed, adam, ChangeOptions()),
                ("group", added, without_head, AddGroup()),
            ):
                probe = Probe(ODD, make)
                trainer = fit(probe, stage=stage, micro_steps=STEPS, callbacks=[callback])
                found[f"{name}, stage {stage}"] = unlike(expected, masters(probe))
                assert len(trainer.optimizers[0].param_groups) == 2
        return found

    for found in run_world(2, run):
        assert not any(found.values()), found


def test_the_optimizer_object_stays_the_user_s() -> None:
    """Same object, same groups and options; each parameter has its place on all ranks, also with no element there."""

    def run(rank: int) -> list[tuple[bool, list[int], list[float]]]:
        found = []
        for stage in (1, 3):
            made: list[Optimizer] = []

            def make(module: nn.Module, made: list[Optimizer] = made) -> Optimizer:
                made.append(optim.SGD(two_groups(module), lr=0.05))
                return made[0]

            probe = Probe(ODD, make)
            trainer = fit(probe, stage=stage, micro_steps=1)
            groups = trainer.optimizers[0].param_groups
            found.append(
                (trainer.optimizers[0] is made[0], [len(g["params"]) for g in groups], [g["lr"] for g in groups])
            )
        return found

    counts = [len(group["params"]) for group in two_groups(build(ODD))]
    for found in run_world(3, run):
        assert found == [(True, counts, [0.05, 0.003])] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


REFUSED: list[tuple[str, Callable[[nn.Module], Any], str, str]] = [
    ("sparse adam", lambda m: optim.SparseAdam(list(m.parameters())), "UnsupportedOptimizerError", "sparse gradients"),
    ("foreign", lambda m: optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1), "ValueError", "not one of the model's"),
]


@pytest.mark.parametrize(("name", "make", "error", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_at_set_up_on_every_rank(name: str, make: Callable[[nn.Module], Any], error: str, message: str) -> None:
    def run(rank: int) -> list[tuple[str, str, int]]:
        found = []
        for stage in (1, 3):
            probe = Probe(MATRICES, make)
            with pytest.raises(Exception) as caught:
                fit(probe, stage=stage, micro_steps=1)
            found.append((type(caught.value).__name__, str(caught.value), len(probe.losses)))
        return found

    for found in run_world(2, run):
        for kind, text, losses in found:
            assert kind == error
            assert message in text
            assert losses == 0


def test_add_param_group_is_refused_for_whole_matrices() -> None:
    def run(rank: int) -> None:
        def make(module: Any) -> Optimizer:
            return optim.Adafactor([p for p in module.model.layers.parameters() if p.numel()], lr=0.01)

        with pytest.raises(UnsupportedOptimizerError, match="add_param_group"):
            fit(Probe(ODD, make), stage=3, micro_steps=4, callbacks=[AddGroup()])

    run_world(2, run)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters without a gradient


class Routed(Stack):
    """``layers[1]`` is used by the ranks of ``used``, ``layers[2]`` by nobody."""

    def __init__(self, used: tuple[int, ...]) -> None:
        super().__init__()
        self.used = used

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if dist.get_rank() in self.used else x


def decaying(module: nn.Module) -> Optimizer:
    return optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5)


def test_unused_parameters_are_skipped_and_half_used_ones_count_zeros() -> None:
    def by_hand(model: Case) -> dict[str, Tensor]:
        module = Probe(model, decaying)
        optimizer = decaying(module)
        for step in range(STEPS):
            module.zero_grad()
            model.loss(module.model, model.batch(dist.get_rank(), step)).backward()
            for name, parameter in module.named_parameters():
                if "layers.2" not in name:
                    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                    parameter.grad = pairwise_mean(gradient)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def run(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        model = case("routed", lambda: Routed((1,)))
        expected = by_hand(model)
        start = {f"model.{name}": value.detach() for name, value in build(model).named_parameters()}
        for stage in (1, 2, 3):
            probe = Probe(model, decaying)
            trainer = fit(probe, stage=stage, micro_steps=STEPS)
            final = masters(probe)
            adapter = trainer.strategy.adapter(trainer.optimizers[0])
            found[f"stage {stage}"] = (
                unlike(expected, final),
                [name for name in final if "layers.2" in name and not torch.equal(final[name], start[name])],
                sorted({name.split(".")[2] for name in adapter.named_state() if "layers" in name}),
            )
        return found

    for found in run_world(2, run):
        for where, (different, moved, with_state) in found.items():
            assert different == [], where
            assert moved == [], f"{where}: weight decay of a parameter that nobody used"
            assert with_state == ["0", "1"], where


def test_manual_zero_grad_and_a_loader_of_one_s_own() -> None:
    """Manual optimization: two backwards add up, ``zero_grad`` starts afresh."""

    class Manual(Probe):
        def __init__(self) -> None:
            super().__init__(ODD, lambda m: optim.SGD(m.parameters(), lr=0.05))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.case.loss(self.model, batch))
            if batch_idx % 3 == 1:
                optimizer.step()
                optimizer.zero_grad()
            if batch_idx % 3 == 2:
                optimizer.zero_grad()

    def by_hand() -> dict[str, Tensor]:
        module = Manual()
        optimizer = optim.SGD(module.parameters(), lr=0.05)
        total: dict[str, Tensor] = {}
        for step in range(6):
            module.model.zero_grad()
            ODD.loss(module.model, ODD.batch(dist.get_rank(), step)).backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    mean = pairwise_mean(parameter.grad)
                    total[name] = total[name] + mean if name in total else mean
            if step % 3 == 1:
                for name, parameter in module.named_parameters():
                    parameter.grad = total.get(name)
                optimizer.step()
            if step % 3:
                total.clear()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def run(rank: int) -> dict[int, list[str]]:
        expected = by_hand()
        found = {}
        for stage in (1, 2, 3):
            module = Manual()
            batches = [ODD.batch(rank, step) for step in range(6)]
            with quiet():
                from lightning_zero import ZeroStrategy

                trainer = make_trainer(ZeroStrategy(stage=stage, units=ODD.units))
                trainer.fit(module, DataLoader(batches, batch_size=None))
            found[stage] = unlike(expected, masters(module))
        return found

    for found in run_world(2, run):
        assert not any(found.values()), found
