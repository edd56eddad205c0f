"""Activation policies in real runs: bit for bit what the same run makes without one, and nothing left at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero._torch import top_saved_tensor_hooks
from lightning_zero.config import ActivationPolicy, HostOffload
from tests.helpers.cases import Block, Case, Stack, case
from tests.helpers.device_runs import needs_gpu
from tests.helpers.models import ZOO
from tests.helpers.models_autograd import CASES
from tests.helpers.probe import Probe
from tests.helpers.probe import fit as fit_probe
from tests.helpers.runs import Net, fit, made, quiet
from tests.helpers.training import Recipe, differences, train_zero
from tests.helpers.world import ROOT, run_world, subprocess_env

STAGES = (1, 2, 3)
POLICIES = {
    "checkpointing": ActivationPolicy(checkpointing="units"),
    "offload": ActivationPolicy(offload=True, min_kib=0),
    "both": ActivationPolicy(checkpointing="units", offload=True, min_kib=0.25),
}
BOTH = POLICIES["both"]


class Deep(Block):
    """Random numbers, a norm over the batch and an in-place change that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(5, track_running_stats=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(super().forward(self.batch(x)))
        y += x
        return y


DEEP = case("deep", lambda: Stack(*(Deep() for _ in range(3))), units=("Deep",))


def found_differences(chosen: Case, recipe: Recipe, stages: tuple[int, ...], policies: Any = POLICIES) -> list[str]:
    """What differs from the run without a policy. Collective: every rank."""
    lines = []
    for stage in stages:
        expected = train_zero(chosen, recipe, stage=stage)
        for name, policy in policies.items():
            actual = train_zero(chosen, recipe, stage=stage, activations=policy)
            lines += [f"stage {stage}, {name}: {line}" for line in differences(expected, actual)[:3]]
    return lines


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exact_in_every_stage(world_size: int) -> None:
    recipe = Recipe(steps=2, accumulate=2, clip="norm")
    policies = POLICIES if world_size == 2 else {"both": BOTH}
    found = run_world(world_size, lambda rank: found_differences(DEEP, recipe, STAGES, policies))
    assert found == [[]] * world_size


HARD: dict[str, Case] = {
    name: {**ZOO, **CASES}[name]
    for name in (
        "attention",
        "called_twice_interleaved",
        "checkpoint_non_reentrant_around_three_units",
        "compiled_blocks",
        "inner_gradient",
        "nested_units",
        "saved_tensors_hooks",
        "sometimes_unused_parameter",
        "ranks_use_other_units_at_times",
    )
}


def test_exact_where_it_is_hard() -> None:
    def run(rank: int) -> dict[str, list[str]]:
        return {name: found_differences(chosen, Recipe(steps=2), (3,), {"both": BOTH}) for name, chosen in HARD.items()}

    for result in run_world(2, run, timeout=120):
        assert {name: lines for name, lines in result.items() if lines} == {}


@pytest.mark.parametrize("parameters", [False, True])
def test_exact_where_weights_rest_on_the_host(parameters: bool) -> None:
    offload = HostOffload(parameters=parameters)

    def run(rank: int) -> list[str]:
        expected = train_zero(DEEP, Recipe(steps=3), stage=3)
        actual = train_zero(DEEP, Recipe(steps=3), stage=3, offload=offload, activations=BOTH)
        return differences(expected, actual)

    assert run_world(2, run) == [[], []]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_exact_in_every_precision(precision: Any) -> None:
    def run(rank: int) -> list[str]:
        wrong = []
        for stage in (1, 3):
            losses = []
            for policy in (None, BOTH):
                torch.manual_seed(5)
                probe = Probe(DEEP)
                fit_probe(
                    probe, stage=stage, micro_steps=4, options={"plugins": ZeroPrecision(precision)}, activations=policy
                )
                losses.append(torch.stack(probe.losses))
            if not torch.equal(*losses):
                wrong.append(f"stage {stage}: {losses}")
        return wrong

    assert run_world(2, run) == [[], []]


def strategy(stage: int, policy: ActivationPolicy | None) -> ZeroStrategy:
    return ZeroStrategy(stage=stage, units=["Block"], activations=policy)


class Watched(Net):
    """Notes whether its blocks are wrapped, and what is in memory at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped: list[tuple[str, bool]] = []
        self.counts: list[int] = []
        for layer in self.model.layers:
            layer.register_forward_hook(lambda *_: self.counts.append(1))

    def _note(self, name: str) -> None:
        self.wrapped.append((name, all("forward" in vars(layer) for layer in self.model.layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._note("train")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stage", [1, 3])
def test_runs_with_validation_and_a_second_fit_leave_nothing(stage: int) -> None:
    def run(rank: int) -> list[dict[str, Any]]:
        results = []
        with quiet():
            for policy in (None, BOTH):
                torch.manual_seed(3)
                module = Watched()
                trainer = fit(strategy(stage, policy), module, count=3, val=2)
                first = made(module, trainer)
                trainer = fit(strategy(stage, policy), module, count=2, val=1)
                results.append({**first, "again": made(module, trainer), "hooks": len(module.counts)})
                assert {wrapped for _, wrapped in module.wrapped} == {policy is not None}
                assert not any("forward" in vars(child) for child in module.modules())
                assert top_saved_tensor_hooks() is None
        return results

    for plain, policy in run_world(2, run):
        assert plain.keys() == policy.keys()
        assert torch.equal(torch.stack(plain["losses"]), torch.stack(policy["losses"]))
        assert plain["hooks"] == policy["hooks"]
        assert plain["metrics"] == policy["metrics"]
        assert torch.equal(torch.stack(plain["again"]["losses"]), torch.stack(policy["again"]["losses"]))
        assert all(
            torch.equal(value, policy["again"]["weights"][name]) for name, value in plain["again"]["weights"].items()
        )


class Breaking(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.where == "forward":
            raise KeyError("forward")
        if batch_idx == 1 and self.where == "backward":
            loss.register_hook(self._fail)
        return loss

    def _fail(self, gradient: Tensor) -> Tensor:
        raise KeyError("backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_and_the_next_fit_is_exact(where: str) -> None:
    def run(rank: int) -> list[Any]:
        threads = threading.active_count()
        losses = []
        with quiet():
            for policy in (None, BOTH):
                module = Breaking(where)
                with pytest.raises(KeyError, match=where):
                    fit(strategy(3, policy), module, count=3)
                assert top_saved_tensor_hooks() is None
                assert not any("forward" in vars(child) for child in module.modules())
                module.where = "nowhere"
                fit(strategy(3, policy), module, count=2)
                losses.append(torch.stack(module.losses))
        assert threading.active_count() <= threads + 1  # a worker of gloo may have come to life
        return losses

    for plain, policy in run_world(2, run):
        assert torch.equal(plain, policy)


class Manual(Net):
    """Two backwards through one graph, and a gradient of the inputs, inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = self.data(batch_idx)
        x.requires_grad_()
        output = self(x)
        (direction,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        self.manual_backward(F.mse_loss(output, y), retain_graph=True)
        self.manual_backward((output * direction.sum()).mean())
        optimizer.step()
        self.losses.append(direction.detach().sum() + output.detach().sum())


@pytest.mark.parametrize("stage", [1, 3])
def test_manual_optimization_with_several_backwards(stage: int) -> None:
    def run(rank: int) -> list[Any]:
        results = []
        with quiet():
            for policy in (None, *POLICIES.values()):
                module = Manual()
                results.append(made(module, fit(strategy(stage, policy), module, count=3)))
        return results

    for plain, *others in run_world(2, run):
        for other in others:
            assert torch.equal(torch.stack(plain["losses"]), torch.stack(other["losses"]))
            assert all(torch.equal(value, other["weights"][name]) for name, value in plain["weights"].items())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ActivationPolicy(checkpointing=["Blok"]), r"ActivationPolicy.checkpointing names \['Blok'\].*Block"),
        (ActivationPolicy(checkpointing=["ModuleList"]), "a ModuleList .* is never called"),
    ],
)
def test_a_policy_that_does_not_fit_the_model_is_named_before_training(policy: ActivationPolicy, message: str) -> None:
    def run(rank: int) -> int:
        module = Net()
        with quiet(), pytest.raises(ValueError, match=message):
            fit(strategy(3, policy), module, count=1)
        return len(module.losses)

    assert run_world(2, run) == [0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# CUDA, in a process of its own

SCRIPT = """
import json, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.config import ActivationPolicy

WIDTH, ROWS, LAYERS = 1024, 4096, 12

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))

class Net(BoringModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.losses = []
    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        x = torch.randn(ROWS, WIDTH, device=self.device)
        for layer in self.layers:
            x = layer(x)
        loss = self.layer(x).square().mean()
        self.losses.append(loss.detach())
        return loss
    def on_before_backward(self, loss):
        torch.cuda.synchronize()
        self.kept = torch.cuda.memory_allocated()
    def on_train_batch_start(self, *args):
        torch.cuda.synchronize()
        self.rest = torch.cuda.memory_allocated()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

found = {}
for stage in (1, 3):
    for name, policy in (
        ("none", None),
        ("checkpointing", ActivationPolicy(checkpointing="units")),
        ("offload", ActivationPolicy(offload=True)),
        ("both", ActivationPolicy(checkpointing="units", offload=True)),
    ):
        net = Net()
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        quiet["limit_val_batches"] = 0
        strategy = ZeroStrategy(stage, units=["Layer"], activations=policy)
        pl.Trainer(accelerator="gpu", devices=1, strategy=strategy, max_steps=4, **quiet).fit(net)
        found[f"{stage} {name}"] = [[float(loss) for loss in net.losses], net.kept - net.rest]
print("FOUND" + json.dumps(found))
"""


@needs_gpu
def test_on_one_gpu_losses_are_the_same_and_device_memory_is_less() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=subprocess_env(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.rpartition("FOUND")[2])
    for stage in STAGES[::2]:
        losses, plain = found[f"{stage} none"]
        for name in POLICIES:
            assert found[f"{stage} {name}"][0] == losses, (stage, name)
        # 16 MiB for each (4096, 1024) floats; a layer keeps its input and about 6 times that of its inside.
        assert plain > 12 * 6 * 2**24
        assert found[f"{stage} checkpointing"][1] < 12 * 2 * 2**24
        assert found[f"{stage} offload"][1] < 12 * 2**24
        assert found[f"{stage} both"][1] < 12 * 2**24
