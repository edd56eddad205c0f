"""Tensor parallelism beside ZeRO: a mesh of four ranks, beside one process and Lightning's own strategy."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_zero import (
    ActivationPolicy,
    AdamW8bit,
    CommunicationMonitor,
    InstabilityMonitor,
    MemoryMonitor,
    NvmeOffload,
    ZeroFabricStrategy,
    ZeroPrecision,
    ZeroStrategy,
)
from lightning_zero.comm import GlooCollectives
from lightning_zero.comm.native import SWITCH
from lightning_zero.errors import DivergenceError, ZeroError
from lightning_zero.extensions.shared_memory.collectives import SharedMemoryCollectives
from tests.helpers.parallel import (
    LENGTH,
    Llama,
    Mlp,
    Parallel,
    adamw,
    alone,
    distance,
    drawn,
    fit,
    gelu_plan,
    llama_plan,
    loss_of,
    made,
    quiet,
)
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

STAGES = (1, 2, 3)
F64 = torch.float64
MODELS: dict[str, tuple[Any, Callable[..., Any]]] = {"mlp": (Mlp, gelu_plan), "llama": (Llama, llama_plan)}


def zero(stage: int, tensor: Any, build: Any = Llama, **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage=stage, tensor_parallel_size=tensor, units=[build.unit], **options)  # type: ignore[arg-type]


def llama(sequence: bool = False, dtype: torch.dtype = F64, **options: Any) -> Parallel:
    plan = partial(llama_plan, sequence=sequence, loss=options.get("loss", False))
    return Parallel(Llama, plan, dtype, **options)


def same(first: dict[str, Any], *others: dict[str, Any]) -> bool:
    """Whether these runs have the same weights, bit for bit."""
    weights = first["weights"]
    return all(torch.equal(value, other["weights"][name]) for other in others for name, value in weights.items())


def in_stages(expected: dict[str, Any], bound: float, run: Callable[[int], dict[str, Any]], alike: bool = True) -> None:
    """A run of each stage is as expected, and stages 2 and 3 are so bit for bit ``alike``."""
    found = [run(stage) for stage in STAGES]
    for stage, one in zip(STAGES, found, strict=True):
        assert (far := distance(expected, one)) < bound, f"stage {stage}: {far}"
    assert not alike or same(found[1], found[2])


def meshes(rank: int, tensor: int, models: Any = MODELS) -> None:
    """Every stage on one mesh, with and without sequence parallelism, is what one process computes."""
    for build, plan in (MODELS[name] for name in models):
        expected = alone(build, F64)
        for sequence in (False, True):
            found = []
            for stage in STAGES:
                module = Parallel(build, partial(plan, sequence=sequence), F64)
                found.append(fit(zero(stage, tensor, build), module, precision="64-true"))
                far = distance(expected, found[-1])
                assert far < 1e-12, f"{build.__name__}, stage {stage}, sequence {sequence}: {far}"
            assert same(*found)


def test_gloo_and_shared_memory_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a shard group are no neighbours, and read one another's memory all the same."""

    def run(rank: int) -> None:
        for stage in STAGES:
            found, kinds = [], []
            for switch in ("1", "0"):
                monkeypatch.setenv(SWITCH, switch)
                module = llama(sequence=True, dtype=torch.float32)
                module.on_train_end = lambda: kinds.append(type(module.trainer.strategy.engine.collectives))  # type: ignore[method-assign, attr-defined]  # noqa: B023
                options: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
                found.append(fit(zero(stage, 2), module, **options))
            assert same(*found), stage
            assert kinds == [SharedMemoryCollectives, GlooCollectives]

    run_world(4, run)


@pytest.mark.parametrize("tensor", [2, 4], ids=["2 x 2", "1 x 4"])
def test_numbers_are_those_of_one_process(tensor: int) -> None:
    run_world(4, meshes, tensor, ["llama"], timeout=100.0)


def test_a_tensor_group_of_one_is_no_other_path() -> None:
    """``tensor_parallel_size=1``: bit for bit what it is without."""

    def run(rank: int) -> None:
        for stage in STAGES:
            parallel = fit(zero(stage, 1), llama(dtype=torch.float32))
            expected = fit(ZeroStrategy(stage=stage, units=[Llama.unit]), Whole(Llama))  # type: ignore[arg-type]
            assert same(expected, parallel)

    run_world(4, run, timeout=100.0)


class Whole(Parallel):
    """Without a mesh: every rank has other data."""

    def rows(self, batch_idx: int) -> Any:
        return tuple(part.chunk(self.trainer.world_size)[self.global_rank] for part in drawn(batch_idx))


def test_numbers_are_those_of_lightnings_strategy() -> None:
    """At the same mesh, in float32; and after twenty steps as near to one process."""

    def run(rank: int) -> None:
        expected = alone(Llama, steps=20)
        stock = fit(ModelParallelStrategy(2, 2), llama(dtype=torch.float32), steps=20)
        in_stages(expected, 1e-5, lambda stage: fit(zero(stage, 2), llama(dtype=torch.float32), steps=20))
        assert distance(stock, fit(zero(3, 2), llama(dtype=torch.float32), steps=20)) < 1e-5

    run_world(4, run, timeout=100.0)


def tie(net: Llama) -> None:
    net.head.weight = net.embedding.weight


def freeze(net: Llama) -> None:
    for parameter in (net.embedding.weight, net.norm.weight, net.layers[0].attention.query.weight):
        parameter.requires_grad_(False)


SCALED = {"init_scale": 2.0**12, "growth_interval": 3}


def test_features_are_those_of_one_process(tmp_path: Path) -> None:
    """Accumulation, clipping, a loss of split logits, tied and frozen weights, offload, groups of shards, and more."""
    rows: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        # its name, what one process does, the module's, the strategy's and the Trainer's options
        ("accumulated", {"accumulate": 3}, {}, {}, {"accumulate_grad_batches": 3}),
        ("clipped by norm", {"clip": 0.1}, {"sequence": True}, {}, {"gradient_clip_val": 0.1}),
        (
            "clipped by value",
            {"value": 1e-3},
            {},
            {},
            {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        ),
        ("split logits", {}, {"loss": True, "sequence": True}, {}, {}),
        ("tied", {"change": tie}, {"change": tie}, {}, {}),
        ("frozen", {"change": freeze}, {"change": freeze}, {}, {}),
        ("offloaded", {}, {}, {"offload": "cpu"}, {}),
        ("recomputed", {}, {}, {"activations": ActivationPolicy(checkpointing="units")}, {}),
        ("in files", {}, {}, {"offload": NvmeOffload(str(tmp_path))}, {}),
        ("watched", {}, {}, {}, {"callbacks": [InstabilityMonitor(), MemoryMonitor(), CommunicationMonitor()]}),
    ]

    def run(rank: int) -> None:
        for name, alike, module, strategy, trainer in rows:
            try:
                expected = alone(Llama, F64, **alike)
                in_stages(
                    expected,
                    1e-12,
                    lambda stage, module=module, strategy=strategy, trainer=trainer: fit(  # type: ignore[misc]
                        zero(stage, 2, **strategy), llama(**module), precision="64-true", **trainer
                    ),
                    alike="clip" not in alike,  # a norm in float64 depends on how gradients are cut
                )
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    run_world(4, run, timeout=200.0)


def test_sixteen_bits() -> None:
    """Near to float32, and every stage bit for bit alike; the loss scale is that of all ranks."""

    def run(rank: int) -> float:
        expected = alone(Llama)
        kinds: list[Callable[[], Any]] = [
            lambda: ZeroPrecision("bf16-mixed"),
            lambda: ZeroPrecision("bf16-true"),
            lambda: ZeroPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", **SCALED)),  # type: ignore[arg-type]
        ]
        for make in kinds:
            found = []
            for stage in STAGES:
                module = llama(dtype=torch.float32)
                module.on_train_batch_end = lambda *args, m=module: scales.append(scale_of(m))  # type: ignore[misc]
                found.append(fit(zero(stage, 2, precision_plugin=make()), module))
            assert same(*found)
            assert distance(expected, found[0]) < 0.05
        return scales[-1]

    scales: list[float] = []
    assert set(run_world(4, run, timeout=100.0)) == {SCALED["init_scale"] * 2}


def scale_of(module: Parallel) -> float:
    scaler = module.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    return 0.0 if scaler is None else float(scaler.get_scale())


def raised(strategy: ZeroStrategy, module: Parallel, **options: Any) -> str:
    try:
        fit(strategy, module, **options)
    except (ValueError, ZeroError) as error:
        return str(error)
    return ""


def forgetful(net: Llama) -> dict[str, Any]:
    """A plan of sequence parallelism without one of the norms."""
    plan = llama_plan(net, sequence=True)
    del plan["layers.1.feed_norm"]
    return plan


def uses_parts(net: Mlp) -> dict[str, Any]:
    """A plan by which a layer gives every rank all of its output, of which each uses a part: values are right."""

    def own(layer: Any, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].chunk(2, -1)[torch.distributed.get_rank() % 2]

    net.blocks[1].down.register_forward_pre_hook(own)
    return {**gelu_plan(net), "blocks.1.up": ColwiseParallel(output_layouts=Replicate())}


class Pooled(Mlp):
    """Gives the head the mean over the positions: with ``pooled_plan``, over those of the rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1, keepdim=True)).expand(-1, LENGTH, -1)


def pooled_plan(net: Pooled) -> dict[str, Any]:
    """As if the head got all of the sequence: every gradient is the same on all ranks, and wrong."""
    head = ColwiseParallel(output_layouts=Replicate())
    return {**gelu_plan(net, sequence=True), "norm": SequenceParallel(use_local_output=True), "head": head}


class Short(Llama):
    """Leaves a position out, so that a number is left which two ranks cannot share."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, 1:])


class Penalised(Parallel):
    """Also keeps the gradient of the first block's input small."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs: list[Tensor] = []
        handle = self.net.blocks[0].register_forward_pre_hook(lambda _, found: inputs.append(found[0]))
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()


class Decayed(Parallel):
    """Adds norms of what are parts of parameters: their gradients would be those of norms of parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(parameter.norm() for parameter in self.parameters())


def test_gradients_that_differ_in_a_tensor_group_are_named() -> None:
    """Of a norm between sequence-parallel layers that the plan leaves out, and of an output that is used in parts; and
    an input that is not whole, a sequence that cannot be split evenly, second derivatives, which DTensors lack, and a
    loss of parts."""

    def run(rank: int) -> list[str]:
        precisions = ("32-true", "bf16-mixed")
        return (
            [
                raised(zero(stage, 2), Parallel(Llama, forgetful), precision=precision)
                for stage in STAGES
                for precision in precisions
            ]
            + [
                raised(zero(stage, 2, build), Parallel(build, plan))  # type: ignore[arg-type]
                for build, plan in (
                    (Mlp, uses_parts),
                    (Pooled, pooled_plan),
                    (Short, partial(llama_plan, sequence=True)),
                )
                for stage in STAGES
            ]
            + [raised(zero(stage, 2, Mlp), Penalised()) for stage in STAGES]
        )

    for messages in run_world(4, run):
        for message in messages[:6]:
            assert "The gradients of 'net.layers.1.feed_norm.weight' on ranks 0 and 1 differ" in message, message
        for message in messages[6:9]:
            assert "The gradients of the output of 'net.blocks.1.up' on ranks 0 and 1 differ" in message, message
        for message in messages[9:12]:
            assert "The inputs of 'net.head' on ranks 0 and 1 differ" in message, message
        for message in messages[18:]:
            assert "The losses of backward 1 on ranks 0 and 1 differ" in message, message
        for message in messages[15:18]:
            assert "create_graph=True in a backward through 'net.head'" in message, message
        for message in messages[12:15]:
            assert "The output of 'net.embedding' has 11 places in dimension 1, which 2 ranks" in message, message


@pytest.mark.parametrize("policy", ["error", "stop"])
def test_ranks_of_a_tensor_group_with_other_numbers_of_batches(policy: Any) -> None:
    """They would wait for one another in a layer: an error, whatever the policy. Whole groups may differ."""

    def run(rank: int) -> tuple[str, int]:
        module = llama()
        uneven: Any = DataLoader(range(3 + rank % 2), batch_size=None)  # type: ignore[arg-type]
        with quiet():
            trainer = make_trainer(zero(3, 2, loaders=policy))
            with pytest.raises(DivergenceError, match="Ranks 0 and 1 are of one tensor group") as caught:
                trainer.fit(module, uneven)
            if policy == "error":
                return str(caught.value), 0
            trainer = make_trainer(zero(3, 2, loaders=policy))
            trainer.fit(llama(), DataLoader(range(3 + rank // 2), batch_size=None))  # type: ignore[arg-type]
        return str(caught.value), trainer.global_step

    steps = {"error": 0, "stop": 3}[policy]
    for message, count in run_world(4, run):
        assert "length of the train_dataloader" in message
        assert count == steps


def test_averaged_weights() -> None:
    """``EMAWeightAveraging`` copies the module while it has DTensors; its average is that of one process."""

    def run(rank: int) -> None:
        net = made(Llama, F64)
        optimizer, average = adamw(net.parameters()), None
        for step in range(4):
            tokens, targets = drawn(step)
            loss_of(net(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            now = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
            average = now if average is None else 0.5 * average + 0.5 * now
        assert average is not None
        names = [f"net.{name}" for name, _ in net.named_parameters()]
        for stage in STAGES:
            found = fit(zero(stage, 2), llama(), precision="64-true", callbacks=[EMAWeightAveraging(decay=0.5)])
            ours = torch.cat([found["weights"][name].flatten() for name in names])
            assert (ours - average).abs().max() < 1e-12, stage

    run_world(4, run)


class OfEachRank(torch.utils.data.Dataset[Tensor]):
    """The same indices, and other values on every rank, as of augmentations that are seeded by the rank."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(torch.distributed.get_rank()))


def test_other_batches_in_a_tensor_group_are_refused() -> None:
    def run(rank: int) -> None:
        with quiet(), pytest.raises(DivergenceError, match="Ranks 0 and 1 are of one tensor group, and got different"):
            make_trainer(zero(3, 2)).fit(Parallel(Llama, llama_plan), DataLoader(OfEachRank(), batch_size=2))
        fabric = Fabric(strategy=ZeroFabricStrategy(stage=3, tensor_parallel_size=2), devices=4, accelerator="cpu")
        fabric.launch()
        net = made(Llama, F64)
        parallelize_module(net, fabric.strategy.device_mesh["tensor_parallel"], llama_plan(net))
        module, tokens = fabric.setup_module(net), drawn(0)[0]
        for training in (True, False):
            with torch.set_grad_enabled(training), pytest.raises(DivergenceError, match="Ranks 0 and 1 are of one"):
                module(tokens[rank : rank + 1])
            with torch.set_grad_enabled(training):
                module(tokens[rank // 2 : rank // 2 + 1])

    run_world(4, run)


class Failing(Parallel):
    """Rank 3 ends in its third step: before, between or after what the tensor group computes together."""

    where = ""
    end: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fails = self.global_rank == 3 and batch_idx == 2
        if fails and self.where == "between":
            self.net.layers[1].register_forward_pre_hook(self.end)
        if fails and self.where == "before":
            self.end()
        loss = super().training_step(batch, batch_idx)
        if fails and self.where == "after":
            self.end()
        return loss


def fail(*args: Any) -> None:
    raise KeyError("a rank's own mistake")


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [fail, die])
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_ranks_do_not_wait_for_one_that_failed(where: str, end: Any) -> None:
    def run(rank: int) -> None:
        module = Failing(Llama, llama_plan)
        module.where, module.end = where, end
        fit(zero(3, 2), module)

    failures = run_world(4, run, expect_failure=True)
    assert failures[3].type == {fail: "KeyError", die: "SIGKILL"}[end]
    for rank in range(3):
        assert failures[rank].type in ("CommunicationError", "DivergenceError", "RuntimeError")
        # They end at once: some find one that failed, and some one that is gone.
        assert re.search(r"(?i)rank \d (has failed|is gone|has ended)", failures[rank].message), failures[rank].message


@pytest.mark.parametrize("tensor", [2, 4])
def test_ranks_do_not_wait_for_one_that_failed_and_lives_on(tensor: int, tmp_path: Path) -> None:
    """As in a notebook. With 1 x 4 ranks torch would take the default group for the tensor group."""

    def run(rank: int) -> str:
        module = Failing(Llama, llama_plan)
        module.where, module.end = "between", fail
        with pytest.raises((KeyError, RuntimeError)) as caught:
            fit(zero(3, tensor), module)
        (tmp_path / str(rank)).touch()
        deadline = time.monotonic() + 60
        while len([*tmp_path.iterdir()]) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert time.monotonic() < deadline
        return str(caught.value)

    found = run_world(4, run, timeout=100)
    assert "own mistake" in found[3]
    for text in found[:3]:
        assert "rank 3 has failed with KeyError" in text or "Rank 3 has failed with KeyError" in text, text


def early() -> Llama:
    tie(net := Llama())
    return net


def test_weights_that_were_tied_before_they_were_split_are_named() -> None:
    def run(rank: int) -> list[int]:
        found = []
        for build, change in ((early, lambda net: None), (early, tie), (Llama, lambda net: None)):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                fitted = make_trainer(zero(3, 2))
                fitted.fit(Parallel(build, llama_plan, change=change), DataLoader(range(1), batch_size=None))  # type: ignore[arg-type]
            text = "'net.embedding.weight' and 'net.head.weight' have the same values"
            found.append(sum(text in str(one.message) for one in seen))
        return found

    assert run_world(4, run)[0] == [1, 0, 0]


class Early(Parallel):
    """Has its layers before callbacks set themselves up, and splits them in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__(Llama, llama_plan, F64)
        self.net, self.split = made(Llama, F64), False

    def configure_model(self) -> None:
        if not self.split:
            self.split = True
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], self.plan(self.net))


def test_what_is_refused_at_set_up() -> None:
    """A mesh that does not divide, a module that is not parallelised, whole-matrix optimizers; averages of layers that
    came later, and pruning."""

    def run(rank: int) -> list[str]:
        muon = llama(optimizer=lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]))
        eight = llama(optimizer=partial(AdamW8bit, lr=0.01, min_8bit_size=100))
        whole = Parallel(Llama, lambda net: {}, F64)
        averaged = {"callbacks": [StochasticWeightAveraging(swa_lrs=0.01)]}
        pruned = {"callbacks": [ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)]}
        return [
            raised(zero(3, 3), llama()),
            raised(zero(3, 2, data_parallel_size=3), llama()),
            raised(zero(3, 2), whole),
            raised(zero(3, 2), muon),
            raised(zero(3, 2), eight),
            *(raised(zero(stage, 2), llama(), **averaged) for stage in STAGES),
            raised(zero(3, 2), Early(), **pruned),
        ]

    found = run_world(4, run)
    assert all(row == found[0] for row in found)
    expected = ("make a mesh of 1 x 3 ranks, and 4 run", "3 x 2 ranks, and 4 run", "no parameter that is a DTensor")
    expected += ("Muon steps on whole parameters", "AdamW8bit cannot update 'net.embedding.weight'")
    expected += ("copied Parallel before `configure_model`",) * 3
    expected += ("A tensor cannot take the place of a parameter of this Embedding",)
    for message, text in zip(found[0], expected, strict=True):
        assert text in message, message
