from __future__ import annotations

import random

import pytest
import torch

from lightning_zero.plan.buckets import make_buckets
from lightning_zero.plan.layout import DtypeRules, ParameterSpec


def spec(name: str, numel: int, dtype: torch.dtype = torch.float32, *, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, (), (numel,), dtype, trainable)


def names(buckets: tuple[tuple[ParameterSpec, ...], ...]) -> list[list[str]]:
    return [[parameter.name for parameter in bucket] for bucket in buckets]


def test_backward_order_under_the_limit() -> None:
    parameters = [spec(name, 64) for name in "abcde"]
    # 64 elements of float32 are 256 bytes: two fit into 600.
    assert names(make_buckets(parameters, 600, DtypeRules())) == [["e", "d"], ["c", "b"], ["a"]]


def test_a_larger_parameter_is_a_bucket_of_its_own() -> None:
    parameters = [spec("a", 64), spec("large", 10_000), spec("b", 64)]
    assert names(make_buckets(parameters, 1024, DtypeRules())) == [["b"], ["large"], ["a"]]


def test_sizes_count_in_reduce_dtype_and_with_alignment() -> None:
    parameters = [spec("a", 1), spec("b", 1)]
    assert names(make_buckets(parameters, 511, DtypeRules())) == [["b"], ["a"]]
    assert names(make_buckets(parameters, 512, DtypeRules())) == [["b", "a"]]
    half = DtypeRules(reduce_dtype=torch.bfloat16)
    assert names(make_buckets(parameters, 256, half)) == [["b", "a"]]


def test_another_dtype_in_between_does_not_cut_a_bucket() -> None:
    parameters = [spec("conv1", 64), spec("norm1", 64), spec("conv2", 64), spec("norm2", 64)]
    rules = DtypeRules(param_dtype=torch.bfloat16, keep=frozenset({"norm1", "norm2"}))
    # The norms' bucket is ready before the convolutions', whose last gradient is conv1's.
    assert names(make_buckets(parameters, 10**6, rules)) == [["norm2", "norm1"], ["conv2", "conv1"]]


def test_frozen_parameters_come_last() -> None:
    parameters = [spec("a", 64), spec("frozen", 64, trainable=False), spec("b", 64)]
    assert names(make_buckets(parameters, 10**6, DtypeRules())) == [["b", "a"], ["frozen"]]


@pytest.mark.parametrize("seed", range(20))
def test_random_parameters(seed: int) -> None:
    choose = random.Random(seed)
    parameters = [
        spec(
            f"p{i}",
            choose.choice([0, 1, 67, 5_000]),
            choose.choice([torch.float32, torch.bfloat16]),
            trainable=choose.random() < 0.8,
        )
        for i in range(40)
    ]
    limit = choose.choice([1, 1_000, 30_000])
    buckets = make_buckets(parameters, limit, DtypeRules())
    flat = [parameter for bucket in buckets for parameter in bucket]
    assert sorted(p.name for p in flat) == sorted(p.name for p in parameters)
    for bucket in buckets:
        assert len({(p.dtype, p.trainable) for p in bucket}) == 1
        positions = [parameters.index(p) for p in bucket]
        assert positions == sorted(positions, reverse=True)
        assert len(bucket) == 1 or sum(-(-p.numel // 64) * 64 * p.dtype.itemsize for p in bucket) <= limit
    trainable = [bucket[0].trainable for bucket in buckets]
    assert trainable == sorted(trainable, reverse=True)
    for kind in (True, False):
        ready = [parameters.index(bucket[-1]) for bucket in buckets if bucket[0].trainable is kind]
        assert ready == sorted(ready, reverse=True)
