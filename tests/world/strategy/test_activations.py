"""Activation policies in real runs: bit for bit what the same run makes without one, and nothing left at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_zero import ZeroPrecision, local_slices
from lightning_zero._torch import top_saved_tensor_hooks
from lightning_zero.config import ActivationPolicy, HostOffload
from lightning_zero.extensions import partitioned_activations
from lightning_zero.extensions.partitioned_activations import Partitioned
from tests.helpers.cases import Block, Case, Stack, case
from tests.helpers.device_runs import needs_gpu
from tests.helpers.models import ZOO
from tests.helpers.models_autograd import CASES
from tests.helpers.runs import Net, assert_same, fit, made, quiet, zero
from tests.helpers.split import Layout, Split
from tests.helpers.split import fit as fit_split
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


def found_differences(
    chosen: Case, recipe: Recipe, stages: tuple[int, ...], policies: Any, **options: Any
) -> list[str]:
    """What differs from the run without a policy. Collective: every rank."""
    lines = []
    for stage in stages:
        expected = train_zero(chosen, recipe, stage=stage)
        for name, policy in policies.items():
            actual = train_zero(chosen, recipe, stage=stage, activations=policy, **options)
            lines += [f"stage {stage}, {name}, {options}: {line}" for line in differences(expected, actual)[:3]]
    return lines


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 3])
def test_exact_in_every_stage(world_size: int) -> None:
    """Also where weights rest on the host."""
    recipe, both = Recipe(steps=2, accumulate=2, clip="norm"), {"both": BOTH}

    def run(rank: int) -> list[str]:
        found = found_differences(DEEP, recipe, STAGES, POLICIES if world_size == 2 else both)
        for parameters in (False, True):
            found += found_differences(DEEP, recipe, (3,), both, offload=HostOffload(parameters=parameters))
        return found

    assert run_world(world_size, run, timeout=120) == [[]] * world_size


@pytest.mark.thorough
def test_exact_where_it_is_hard() -> None:
    def run(rank: int) -> dict[str, list[str]]:
        return {name: found_differences(chosen, Recipe(steps=2), (3,), {"both": BOTH}) for name, chosen in HARD.items()}

    for result in run_world(2, run, timeout=120):
        assert {name: lines for name, lines in result.items() if lines} == {}


class Troubled(Net):
    """Counts the forwards of its blocks, and raises at ``where``, if that is somewhere, in the second step."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where, self.counts = where, 0
        for layer in self.model.layers:
            layer.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.counts += 1

    def fail(self, where: str) -> None:
        if self.where == where:
            raise KeyError(where)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.fail("forward")
            loss.register_hook(lambda gradient: self.fail("backward"))
        return loss


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_validation_an_error_and_a_second_fit_leave_nothing_and_are_exact(stage: int) -> None:
    def play(where: str, precision: str, policy: ActivationPolicy | None) -> dict[str, Any]:
        module, options = Troubled(where), {"plugins": ZeroPrecision(precision)}  # type: ignore[arg-type]
        if where:
            with pytest.raises(KeyError, match=where):
                fit(zero(stage, activations=policy), module, count=3, **options)
            module.where = ""
        else:
            fit(zero(stage, activations=policy), module, count=3, val=2, **options)
        assert top_saved_tensor_hooks() is None
        assert not any("forward" in vars(child) for child in module.modules())
        trainer = fit(zero(stage, activations=policy), module, count=2, val=1, **options)
        return {"counts": module.counts, **made(module, trainer)}

    def run(rank: int) -> dict[str, dict[str, Any]]:
        threads = threading.active_count()
        rows = [("", "32-true"), ("forward", "32-true"), ("backward", "32-true"), ("", "bf16-mixed"), ("", "16-mixed")]
        with quiet():
            found = {
                name: {str(row): play(*row, policy) for row in rows}
                for name, policy in (("none", None), ("both", BOTH))
            }
        assert threading.active_count() <= threads + 1  # a worker of gloo may have come to life
        return found

    assert_same(run_world(2, run, timeout=120), ["both"], expected="none")


# ---------------------------------------------------------------------------------------------------------------------
# CUDA, in a process of its own

SCRIPT = """
import json, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from lightning_zero import ZeroStrategy
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


class SequenceFeed(nn.Module):
    """A block whose inputs are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_partitioned_activations_keep_one_part_and_give_the_same_bits() -> None:
    """In every stage, on the device and on the host; what is not the same on all ranks of a group is refused."""
    numels: list[int] = []

    class Counted(Partitioned):
        def _pack(self, name: str, tensor: Tensor) -> Any:
            kept = super()._pack(name, tensor)
            if kept is not tensor:
                part = kept.part[0] if isinstance(kept.part, tuple) else kept.part
                assert part.untyped_storage().nbytes() == part.nbytes
                numels.append(part.numel() * 2 - kept.shape.numel())
            return kept

    def trained(stage: int, policy: ActivationPolicy | None) -> dict[str, Tensor]:
        module = Split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partitioned_activations, "Partitioned", Counted)
            fit_split(Layout(stage, 1, 2).strategy(activations=policy), module, 3)
        return {part.name: part.value.clone() for part in local_slices(module)}

    def rank(_: int) -> None:
        for stage in STAGES:
            expected = trained(stage, None)
            for offload in (False, True):
                policy = ActivationPolicy(["Feed"], offload=offload, partition=True, min_kib=0)
                found = trained(stage, policy)
                assert expected.keys() == found.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert numels == [0] * len(numels)
        assert len(numels) == len(STAGES) * 2 * 3 * 3  # stages, on device and host, steps, blocks
        device, seen = torch.device("cpu"), {"tensor_spec": (init_device_mesh("cpu", (2,)),)}
        block = SequenceFeed()
        vars(block.linear.weight).update(seen)
        keeping = Partitioned(block, 0, None)
        x = torch.full((3, 8), float(dist.get_rank()), device=device, requires_grad=True)
        with keeping.keeping("a block")():
            y = x * x
        with pytest.raises(RuntimeError, match="An input of 'a block' is not the same on all ranks of its tensor gr"):
            y.sum().backward()

    run_world(2, rank, timeout=120)


def test_partitioned_activations_need_a_tensor_group() -> None:
    with pytest.raises(ValueError, match="nothing in SequenceFeed is parallelised"):
        Partitioned(SequenceFeed(), 0, None)
    with pytest.raises(ValueError, match="is about what checkpointed modules keep"):
        ActivationPolicy(partition=True)
