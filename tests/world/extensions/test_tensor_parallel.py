"""Tensor parallelism beside ZeRO: a mesh of four ranks, beside one process and Lightning's own strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_zero import ActivationPolicy, ZeroPrecision, ZeroStrategy
from tests.helpers.parallel import Llama, Mlp, Parallel, alone, distance, drawn, fit, gelu_plan, llama_plan
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


def test_features_are_those_of_one_process() -> None:
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


def raised(strategy: ZeroStrategy, module: Parallel) -> str:
    try:
        fit(strategy, module)
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_refused_at_set_up() -> None:
    """A mesh that does not divide, a module that is not parallelised, whole-matrix optimizers."""

    def run(rank: int) -> list[str]:
        muon = llama(optimizer=lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]))
        whole = Parallel(Llama, lambda net: {}, F64)
        return [
            raised(zero(3, 3), llama()),
            raised(zero(3, 2, data_parallel_size=3), llama()),
            raised(zero(3, 2), whole),
            raised(zero(3, 2), muon),
        ]

    found = run_world(4, run)
    assert all(row == found[0] for row in found)
    expected = ("make a mesh of 1 x 3 ranks, and 4 run", "3 x 2 ranks, and 4 run", "no parameter that is a DTensor")
    for message, text in zip(found[0], (*expected, "Muon steps on whole parameters"), strict=True):
        assert text in message, message
