"""The number that stands for a tensor's bits."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.shards.slice import checksum, fingerprint

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 20
    return (values > 0) if dtype is torch.bool else values.abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_same_number_whatever_the_strides(dtype: torch.dtype) -> None:
    tensor = sample(dtype, 7, 5, 3)
    number = checksum(tensor)
    assert 0 <= number < 2**63
    assert number == checksum(tensor.clone()) == checksum(tensor.reshape(-1))
    scattered = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not scattered.is_contiguous()
    assert number == checksum(scattered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_element_and_two_exchanged_ones_are_seen(dtype: torch.dtype) -> None:
    tensor = sample(dtype, 64)
    seen = {checksum(tensor)}
    for index in range(64):
        other = tensor.view(torch.uint8).clone().view(64, -1)
        other[index, 0] ^= 1
        seen.add(checksum(other.view(dtype)))
    assert len(seen) == 65
    swapped = tensor.clone()
    first, second = next((i, j) for i in range(64) for j in range(i) if tensor[i] != tensor[j])
    swapped[first], swapped[second] = tensor[second], tensor[first]
    assert checksum(swapped) not in seen


def test_signs_of_zero_and_payloads_of_nan_count() -> None:
    signs = [[0.0, 0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]]
    for dtype in (torch.float16, torch.float32, torch.float64, torch.complex128):
        assert len({checksum(torch.tensor(pair, dtype=dtype)) for pair in signs}) == 4
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert checksum(nans[:1]) != checksum(nans[1:])


def test_length_counts_even_of_zeros() -> None:
    assert len({checksum(torch.zeros(numel)) for numel in range(100)}) == 100
    assert checksum(torch.zeros(3, 0)) == checksum(torch.zeros(0))


def test_fingerprints_tell_values_apart_and_are_the_same_in_every_process() -> None:
    parts = [
        0.5,
        1,
        1.0,
        "1",
        None,
        Ellipsis,
        slice(1, 2),
        slice(None, 1, 2),
        torch.float32,
        (1, 2),
        ((1,), 2),
        {"a": 1},
    ]
    parts += [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), float("nan"), True, 1j]
    assert len({fingerprint(part) for part in parts}) == len(parts)
    assert fingerprint([1, {"b": torch.ones(2), "a": 2}]) == fingerprint((1, {"a": 2, "b": torch.ones(2)}))
    assert fingerprint(object()) == fingerprint(object())
    assert fingerprint("add_", 0.5) == 7681112404147853238  # not of this process only, as Python's hash would be
