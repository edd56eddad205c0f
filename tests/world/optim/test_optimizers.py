"""The user's optimizer on shards does, bit for bit, what it does on whole parameters.

The reference is a hand-written loop over whole parameters on every rank: gradients of all ranks are averaged in rank
order, which is how the package reduces at every world size, and the optimizer steps on the whole. At two ranks that is
DDP's result too (a sum of two numbers has one order), which ``test_parity.py`` shows with DDP itself.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
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

from lightning_zero import AdamW8bit, HostOffload, full_optimizer_state
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.extensions.planner.costs import OptimizerCost
from tests.helpers.cases import WIDTH, Block, Case, Stack, case
from tests.helpers.models import Gain, OddSizes
from tests.helpers.probe import Probe, fit, masters, pairwise_mean
from tests.helpers.rig import RowNormalised
from tests.helpers.training import build
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


def variants() -> dict[str, list[Callable[[nn.Module], Optimizer]]]:
    """Of each optimizer: one parameter after the other, all at once, and fused where torch can."""
    found = {}
    for name, (cls, options) in ELEMENTWISE.items():
        flags: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}]
        if name in FUSED:
            flags.append({"fused": True})
        found[name] = [lambda m, c=cls, o={**options, **flag}: c(two_groups(m), **o) for flag in flags]
    return found


def reference(
    model: Case,
    make: Callable[[nn.Module], Any],
    before: Callable[[Any, Optimizer, int], None] = lambda module, optimizer, step: None,
) -> dict[str, Tensor]:
    """Whole parameters on every rank; ``before`` each step something may be done to the optimizer. Collective."""
    module = Probe(model, make)
    optimizer = make(module)
    scheduler = None
    if isinstance(optimizer, tuple):
        (optimizer,), (scheduler,) = optimizer
    for step in range(STEPS):
        before(module, optimizer, step)
        module.zero_grad()
        model.loss(module.model, model.batch(dist.get_rank(), step)).backward()
        used: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(used, [parameter.grad is not None for parameter in module.parameters()])
        for parameter, *by_rank in zip(module.parameters(), *used, strict=True):
            if any(by_rank):  # a rank that did not use it counts zeros
                parameter.grad = pairwise_mean(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def sharded(model: Case, stage: int, make: Callable[[nn.Module], Any], **options: Any) -> dict[str, Tensor]:
    probe = Probe(model, make)
    fit(probe, stage=stage, micro_steps=STEPS, **options)
    return masters(probe)


def unlike(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == actual.keys()
    return [name for name, value in expected.items() if not torch.equal(value, actual[name])]


# Which stage it is decides which gradients and parameters a shard gets, not how it is stepped; worlds cut differently.
@pytest.mark.parametrize(
    ("world_size", "stage", "variant"),
    [(2, 3, -1), pytest.param(2, 1, 0, marks=pytest.mark.thorough), pytest.param(3, 3, 1, marks=pytest.mark.thorough)],
)
def test_elementwise_optimizers_of_torch(world_size: int, stage: int, variant: int) -> None:
    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        start = {f"model.{key}": value for key, value in build(ODD).named_parameters()}
        trainable = [key for key, value in start.items() if value.requires_grad and value.numel()]
        for name, makes in variants().items():
            expected = reference(ODD, makes[variant])
            # The reference itself trains: all but the gain that nobody uses.
            unchanged = [key for key in trainable if torch.equal(start[key], expected[key])]
            found[f"reference of {name}"] = [key for key in unchanged if not key.endswith("gain")]
            found[name] = unlike(expected, sharded(ODD, stage, makes[variant]))
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


class CentralisedAdam(torch.optim.Adam):
    """A subclass of an elementwise optimizer that is not elementwise: gradients are centred before the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


class Lookahead(Optimizer):
    """timm's: its own constructor is all it has, and its ``state_dict`` is that of what it wraps."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.param_groups, self.defaults, self.state = (
            base,
            base.param_groups,
            base.defaults,
            defaultdict(dict),
        )
        for group in self.param_groups:
            group["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"] if group["steps"] % 2 == 0 else ():
                if parameter.grad is not None:
                    slow = self.base.state[parameter].setdefault("slow", parameter.detach().clone())
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


MATRICES = case("matrices", lambda: Stack(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))), units=("Linear",))
WHOLE: dict[str, tuple[Case, Callable[[nn.Module], Optimizer]]] = {
    "muon": (MATRICES, lambda m: optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02)),
    "adafactor": (ODD, lambda m: optim.Adafactor(without_empty(two_groups(m)), lr=0.02)),
    "third party": (ODD, lambda m: RowNormalised(two_groups(m), lr=0.1)),
    "centralised adam": (ODD, lambda m: CentralisedAdam(two_groups(m), lr=0.01)),
    "lookahead": (ODD, lambda m: Lookahead(optim.AdamW(two_groups(m), lr=0.01))),
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


def test_whole_matrix_optimizers_train_like_ddp(tmp_path: Path) -> None:
    """With zero_grad, clipping and a checkpoint in the middle; stage 1 with accumulation, where DDP's order of
    additions is ours."""

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        for (name, (model, make)), stage in zip(WHOLE.items(), (3, 1, 3, 1, 2), strict=True):
            accumulate = 2 if stage == 1 else 1
            expected = train_ddp(model, make, 4, accumulate)
            options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
            path = str(tmp_path / f"{name} {stage}")
            batches = 4 * accumulate
            first, second = Probe(model, make), Probe(model, make)
            # After the second of four steps.
            save = SaveAfter(path, 2 * accumulate - 1)
            fit(first, stage=stage, micro_steps=batches, options=options, callbacks=[save])
            fit(second, stage=stage, micro_steps=batches, options=options, ckpt_path=path, first=2 * accumulate)
            where = f"{name}, stage {stage}, {accumulate} micro-steps"
            found[where] = unlike(expected, masters(first))
            found[f"{where}, resumed"] = unlike(expected, masters(second))
            assert len(second.losses) == 2 * accumulate
        return found

    for found in run_world(2, run, timeout=120):
        assert not any(found.values()), {name: bad for name, bad in found.items() if bad}


# ---------------------------------------------------------------------------------------------------------------------
# State in 8 bits


def eight_bit(module: nn.Module) -> Optimizer:
    """State in blocks of what has two of them or more, in full of the rest."""
    return AdamW8bit(two_groups(module), lr=0.01, min_8bit_size=65)


EIGHT_BIT: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)},
    "stage 2 offloaded": {"stage": 2, "offload": HostOffload()},
    "stage 3 offloaded": {"stage": 3, "offload": HostOffload(parameters=True)},
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_in_8_bits_is_that_of_whole_parameters(world_size: int) -> None:
    """Codes and scales are compared too: what a step has rounded is what the next one begins with."""

    def run(rank: int) -> dict[str, list[str]]:
        made: list[tuple[nn.Module, Optimizer]] = []

        def kept(module: nn.Module) -> Optimizer:
            made.append((module, eight_bit(module)))
            return made[-1][1]

        found, expected, cuts = {}, reference(ODD, kept), set[int]()
        module, optimizer = made[0]
        states = {
            f"{name} {key}": value
            for name, parameter in module.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        assert sum(name.endswith("exp_avg_codes") for name in states) == 6
        assert sum(name.endswith("exp_avg") for name in states) > 6
        for way, options in EIGHT_BIT.items():
            probe = Probe(ODD, eight_bit)
            trainer = fit(probe, micro_steps=STEPS, **options)
            shards = trainer.strategy.engine.shards.values()
            cuts |= {entry.start for entry in shards if 0 < entry.place.numel < entry.spec.numel}
            plan, cost = trainer.strategy.engine.plan, OptimizerCost.of(trainer.optimizers[0])
            planned = plan.expected_memory(rank=rank, optimizer=cost).optimizer
            planned += plan.expected_host_memory(rank=rank, optimizer=cost).optimizer
            adapter = trainer.strategy.adapter(trainer.optimizers[0])
            planned -= 2 * 4 * sum(entry.place.numel for entry in shards if entry.name.endswith("gain"))  # never used
            held = sum(tensor.nbytes for tensor in adapter.tensors())
            found[way] = [] if held == planned else [f"{held} bytes of state, {planned} by plan"]
            found[way] += unlike(expected, masters(probe))
            found[way] += unlike(states, {name: full_optimizer_state(probe, *name.split()) for name in states})
        assert rank == 0 or any(cuts), "state of what is not cut is easily right"
        return found

    for found in run_world(world_size, run, timeout=200):
        assert not any(found.values()), found


def test_state_in_8_bits_with_clipping_accumulation_and_precision() -> None:
    """As DDP does with the same class, where other optimizers are; else alike in all stages."""

    def run(rank: int) -> dict[str, list[str]]:
        expected = train_ddp(ODD, eight_bit, 4, 2)
        options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
        probe = Probe(ODD, eight_bit)
        fit(probe, stage=1, micro_steps=8, options=options)
        found = {"accumulated and clipped": unlike(expected, masters(probe))}
        for precision in ("bf16-mixed", "bf16-true"):
            ends = []
            for way in ({"stage": 1}, {"stage": 3}, {"stage": 3, "offload": HostOffload()}):
                probe = Probe(ODD, eight_bit)
                fit(probe, micro_steps=STEPS, options={"precision": precision}, **way)
                ends.append(masters(probe))
            found[precision] = unlike(ends[0], ends[1]) + unlike(ends[0], ends[2])
        return found

    for found in run_world(2, run):
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
    """The optimizer stays the user's object, and its groups have each parameter on every rank."""

    def add(module: Any, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(module.model.head.parameters()), "lr": 0.02})

    made: list[Optimizer] = []

    def adam(module: nn.Module) -> Optimizer:
        made.append(optim.Adam(two_groups(module), lr=0.01))
        return made[-1]

    def run(rank: int) -> dict[str, list[str]]:
        found = {}
        scheduled = reference(ODD, with_scheduler)
        changed = reference(ODD, adam, lambda module, optimizer, step: change(optimizer, step))
        added = reference(ODD, without_head, add)
        counts = [len(group["params"]) for group in made[0].param_groups]
        for stage in (1, 3):
            found[f"group, stage {stage}"] = unlike(added, sharded(ODD, stage, without_head, callbacks=[AddGroup()]))
        found["scheduler"] = unlike(scheduled, sharded(ODD, 3, step_scheduler))
        probe = Probe(ODD, adam)
        trainer = fit(probe, stage=3, micro_steps=STEPS, callbacks=[ChangeOptions()])
        found["options"] = unlike(changed, masters(probe))
        assert trainer.optimizers[0] is made[-1]
        assert [len(group["params"]) for group in made[-1].param_groups] == counts
        return found

    for found in run_world(2, run):
        assert not any(found.values()), found


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def foreign(module: nn.Module) -> Optimizer:
    return optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)


def sparse(module: nn.Module) -> Optimizer:
    return optim.SparseAdam(list(module.parameters()))


def whole_matrices(module: Any) -> Optimizer:
    return optim.Adafactor([p for p in module.model.layers.parameters() if p.numel()], lr=0.01)


def test_refused_on_every_rank() -> None:
    def run(rank: int) -> None:
        for stage in (1, 3):
            for make, error, message in (
                (sparse, UnsupportedOptimizerError, "sparse gradients"),
                (foreign, ValueError, "not one of the model's"),
            ):
                probe = Probe(MATRICES, make)
                with pytest.raises(error, match=message):
                    fit(probe, stage=stage, micro_steps=1)
                assert probe.losses == [], "not at set-up"
        with pytest.raises(UnsupportedOptimizerError, match="add_param_group"):
            fit(Probe(ODD, whole_matrices), stage=3, micro_steps=4, callbacks=[AddGroup()])

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
    def run(rank: int) -> None:
        model = case("routed", lambda: Routed((1,)))
        expected = reference(model, decaying)
        start = {f"model.{name}": value.detach() for name, value in build(model).named_parameters()}
        for stage in (1, 2, 3):
            probe = Probe(model, decaying)
            trainer = fit(probe, stage=stage, micro_steps=STEPS)
            final = masters(probe)
            assert unlike(expected, final) == [], f"stage {stage}"
            moved = [name for name in final if "layers.2" in name and not torch.equal(final[name], start[name])]
            assert moved == [], f"stage {stage}: weight decay of a parameter that nobody used"
            adapter = trainer.strategy.adapter(trainer.optimizers[0])
            with_state = {name.split(".")[2] for name in adapter.named_state() if "layers" in name}
            assert with_state == {"0", "1"}, f"stage {stage}"

    run_world(2, run)
