"""The norm of gradients in shards: accumulated in float64, the same number for every cut and on every rank.

There is no accelerator where these tests run. What is done on one is done with tensors on the meta device, where nobody
can read a number: what would make the host wait is counted, or raises.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero import ZeroPrecision
from lightning_zero.comm import ControlGroup, GlooCollectives, Groups, LocalCollectives, Streams
from lightning_zero.config import HostOffload
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.gradients import _CHUNK, LossScaler, clip_by_norm, clip_by_value, gradient_norm
from tests.helpers.world import run_world

ALONE = ControlGroup(None)
CPU, META = torch.device("cpu"), torch.device("meta")
NORMS = (1.0, 2.0, 3.0, float("inf"))
NAN, INF = float("nan"), float("inf")


def whole(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, generator=generator) * 10.0**power).to(dtype) for size, power in ((67, 0), (1, 2), (130, -3))
    ]


def exact(gradients: list[Tensor], norm_type: float) -> float:
    wide = [g.to(torch.promote_types(g.dtype, torch.float64)).abs() for g in gradients]
    return float(torch.linalg.vector_norm(torch.cat([torch.zeros(1), *wide]), norm_type))


def bits(*tensors: Tensor) -> list[list[int]]:
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return [t.contiguous().flatten().view(torch.uint8).tolist() for t in real]


def awkward() -> dict[str, list[Tensor]]:
    """Slices by what is special about them; most are one tensor in pieces."""
    generator = torch.Generator().manual_seed(5)

    def randn(*sizes: int) -> list[Tensor]:
        return list(torch.randn(sum(sizes), generator=generator).split(sizes))

    small, large = randn(3, 64, 0, 1, 4096, 7), randn(1, 2 * _CHUNK + 3, _CHUNK, _CHUNK - 1, 2)
    return {
        "smaller than a chunk": small,
        "about a chunk": large,
        "small ones that fill a chunk": randn(*[500] * 140),
        "denormals": [torch.full((5,), 1e-45), torch.full((3,), -1e-40), torch.zeros(2)],
        "huge": [torch.full((9,), 3e38), torch.ones(4)],  # above float32: inf, as in a float64 norm rounded once
        "large": [torch.full((9,), 3e37), torch.ones(4)],
        "negative zeros": [torch.full((3,), -0.0)],
        "nothing": [torch.zeros(0), torch.zeros(0)],
        "16 bits": [*(s.bfloat16() for s in small), *(s.half() for s in small), *small],
        "largest of 16 bits": [torch.full((9,), 65504.0).half(), torch.full((2,), 3.3e38).bfloat16()],
        "float64": [*(s.double() / 3 for s in large), *small],
        "float64 at its ends": [torch.tensor([1e-200, 1e150], dtype=torch.float64), torch.full((3,), 1e-160).double()],
        "NaN": [torch.ones(3), torch.tensor([1.0, NAN, 1.0]), torch.ones(1)],
        "infinity": [torch.ones(3), torch.tensor([-INF, 1.0]), torch.ones(1)],
        "NaN behind infinity": [torch.tensor([INF]), torch.tensor([0.0, NAN]), torch.tensor([-INF])],
        "complex": [torch.complex(*torch.randn(2, 90, generator=generator)), small[1].bfloat16(), *large],
        "infinity with NaN": [torch.complex(torch.tensor([INF]), torch.tensor([NAN])), torch.ones(1)],
        "NaN in 16 bits": [torch.tensor([NAN]).bfloat16(), torch.tensor([INF])],
    }


def check(found: Tensor, name: str, norm_type: float) -> None:
    """That it is the float64 norm of all, rounded once."""
    wide = "float64" in name
    expected = torch.tensor(exact(awkward()[name], norm_type), dtype=torch.float64 if wide else torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-12 if wide else 0.0, atol=0.0, equal_nan=True, msg=name)


@pytest.mark.parametrize("norm_type", NORMS)
def test_awkward_values(norm_type: float) -> None:
    for name, gradients in awkward().items():
        check(gradient_norm(gradients, ALONE, norm_type), name, norm_type)


def test_awkward_values_over_ranks() -> None:
    """Rank 0 has every other slice, rank 1 the rest, rank 2 nothing; through the hosts, and as on an accelerator."""

    def run(rank: int) -> list[Tensor]:
        groups = Groups.create("gloo")
        ways = groups.control, GlooCollectives(groups, Streams(CPU))
        return [
            gradient_norm([g if place % 2 == rank else g[:0] for place, g in enumerate(gradients)], way, norm_type)
            for gradients in awkward().values()
            for norm_type in NORMS
            for way in ways
        ]

    asked = [(name, norm_type) for name in awkward() for norm_type in NORMS for _ in range(2)]
    for norms in run_world(3, run):
        for norm, (name, norm_type) in zip(norms, asked, strict=True):
            check(norm, name, norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients(dtype: torch.dtype, norm_type: float) -> None:
    gradients = [torch.view_as_complex(torch.arange(2.0 * n).view(n, 2)).to(dtype) for n in (3, 5)]
    expected = torch.linalg.vector_norm(torch.cat(gradients).to(torch.complex128), norm_type)
    norm = gradient_norm(gradients, ALONE, norm_type)
    assert norm.dtype is (torch.float64 if dtype is torch.complex128 else torch.float32)
    assert float(norm) == pytest.approx(float(expected), rel=1e-15 if dtype is torch.complex128 else 1e-7)
    clip_by_norm(gradients, 0.5, norm)
    assert float(gradient_norm(gradients, ALONE, norm_type)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -INF, NAN])
def test_norms_that_there_are_not(norm_type: float) -> None:
    with pytest.raises(ValueError, match="must be 1, 2, another positive number, or inf"):
        gradient_norm([torch.ones(3)], ALONE, norm_type)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_by_norm_is_torch_s_formula(max_norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in whole()]
    for parameter, gradient in zip(parameters, whole(), strict=True):
        parameter.grad = gradient
    gradients = whole()
    norm = gradient_norm(gradients, ALONE)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)
    clip_by_norm(gradients, max_norm, norm)
    for parameter, clipped, original in zip(parameters, gradients, whole(), strict=True):
        assert torch.equal(parameter.grad, clipped)
        assert torch.equal(clipped, original) == (max_norm == 1e6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("max_norm", [1.0, 0.3, 1e-30, 1e6])
def test_clipping_has_the_bits_of_a_multiplication(max_norm: float, dtype: torch.dtype) -> None:
    """Also of negative zeros and denormals; where the coefficient is 1 nothing is written."""
    values = torch.tensor([-0.0, 0.0, 1e-45, -1e-40, 1.5, -3.25, 6e-8, 1e-3] * 5).to(dtype)
    values = values * 1j + values.flip(0) if dtype.is_complex else values
    gradients, norm = list(values.clone().split([3, 0, 20, 17])), torch.tensor(2.7)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    versions = [g._version for g in gradients]
    clip_by_norm(gradients, max_norm, norm)
    assert bits(*gradients) == bits(*(g.mul_(coefficient.to(dtype)) for g in values.clone().split([3, 0, 20, 17])))
    assert ([g._version for g in gradients] == versions) == (max_norm > 2.7 and not dtype.is_complex)


@pytest.mark.parametrize("norm", [NAN, INF, 0.0])
def test_clipping_by_what_is_no_norm(norm: float) -> None:
    """What is not finite makes everything NaN or zero, as in torch; a norm of zero clips nothing."""
    gradients = [torch.tensor([1.0, -2.0]), torch.tensor([3.0]).bfloat16()]
    clip_by_norm(gradients, 1.0, torch.tensor(norm))
    factor = min(1.0, 1.0 / (norm + 1e-6)) if norm == norm else NAN
    for gradient, value in zip(gradients, ([1.0, -2.0], [3.0]), strict=True):
        torch.testing.assert_close(gradient.float(), torch.tensor(value) * factor, rtol=0, atol=0, equal_nan=True)


def test_clipping_by_value() -> None:
    gradients = [torch.tensor([-3.0, -0.5, 0.5, 3.0]), torch.zeros(0)]
    clip_by_value(gradients, 1.0)
    assert gradients[0].tolist() == [-1.0, -0.5, 0.5, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# On an accelerator


class HostWaits(TorchDispatchMode):
    """Counts what asks a device for a number, which is 0 here, and what is started; reading tensors on meta raises."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.started: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.started.append(str(func.overloadpacket))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
            return 0.0
        return func(*args, **(kwargs or {}))


def accelerator() -> LocalCollectives:
    return LocalCollectives(Streams(META))


def on_device(count: int = 30) -> list[Tensor]:
    """Slices of two dtypes, some without elements."""
    dtypes = torch.float32, torch.bfloat16
    return [torch.empty(place % 5, dtype=dtypes[place % 2], device=META) for place in range(count)]


def test_what_is_counted_as_a_wait() -> None:
    """What a careless change would do to a norm."""
    for ask in (float, bool, Tensor.item, lambda norm: math.sqrt(norm), lambda norm: max(norm, 1.0)):
        with HostWaits() as host:
            ask(torch.empty((), device=META))
        assert host.waits == 1
    for ask in (Tensor.cpu, Tensor.tolist, Tensor.nonzero, lambda norm: torch.equal(norm, norm + 1)):
        with HostWaits(), pytest.raises((NotImplementedError, RuntimeError)):
            ask(torch.empty((), device=META))


@pytest.mark.parametrize("norm_type", NORMS)
def test_no_host_waits_for_a_norm(norm_type: float) -> None:
    """Nor for clipping; and a kernel takes many slices, so that ten times as many start no more of them."""
    started = []
    for count in (30, 300):
        gradients = on_device(count)
        with HostWaits() as host:
            norm = gradient_norm(gradients, accelerator(), norm_type)
            clip_by_norm(gradients, 1.0, norm)
        assert host.waits == 0
        assert (norm.device, norm.dtype, norm.shape) == (META, torch.float32, ())
        started.append([name for name in host.started if name != "aten.detach"])
    assert len(started[0]) == len(started[1]) < 30


def test_a_norm_of_nothing_and_a_wide_one_are_on_the_device() -> None:
    nothing = gradient_norm([], accelerator())
    assert (nothing.device, nothing.dtype, nothing.shape) == (META, torch.float32, ())
    elsewhere = torch.empty(0, dtype=torch.float64, device=META)  # another rank has its elements
    assert gradient_norm([*on_device(), elsewhere], accelerator()).dtype is torch.float64


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_no_host_waits_in_the_precision_plugin(algorithm: str) -> None:
    gradients, precision = on_device(), ZeroPrecision()
    adapter: Any = lambda optimizer: SimpleNamespace(gradients=lambda counted=False: gradients)  # noqa: E731
    precision.attach(META, accelerator(), adapter)
    with HostWaits() as host:
        precision.clip_gradients(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0.5, algorithm)
    assert host.waits == 0
    assert "aten._foreach_mul_" in host.started or algorithm == "value"


@pytest.mark.parametrize("scale", [65536.0, 0.5])
def test_one_wait_tells_of_an_overflow(scale: float) -> None:
    """Of all gradients on all ranks: the numbers of the others are there before."""

    class Wire(LocalCollectives):
        def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
            assert host.waits == 0
            host.started.append("total")
            return numbers

    gradients = [*on_device(), torch.empty(3, dtype=torch.complex64, device=META)]
    scaler = LossScaler(init_scale=scale)
    with HostWaits() as host:
        assert scaler.unscale(gradients, Wire(Streams(META))) is False
    assert host.waits == 1
    assert host.started[-2:] == ["total", "aten._local_scalar_dense"]
    assert len([name for name in host.started if name not in ("aten.detach", "aten.view_as_real")]) < 30


OFFLOADS = [(None, "cuda"), (HostOffload(), "cpu"), (HostOffload(optimizer=False, parameters=True), "cuda")]


@pytest.mark.parametrize(("offload", "where"), OFFLOADS)
def test_numbers_are_put_together_where_gradients_rest(offload: HostOffload | None, where: str) -> None:
    for device, expected in (("cuda", where), ("cpu", "cpu")):
        engine: Any = SimpleNamespace(
            device=torch.device(device),
            plan=SimpleNamespace(offload=offload),
            means=SimpleNamespace(control=ALONE, collectives=SimpleNamespace(device=torch.device(device))),
        )
        totals = ZeroEngine.totals.fget(engine)  # type: ignore[attr-defined]
        assert totals.device.type == expected
        assert (totals is ALONE) == (expected == "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm_type", NORMS)
def test_an_accelerator_gives_the_host_s_norm(norm_type: float) -> None:
    way = LocalCollectives(Streams(torch.device("cuda")))
    for name, gradients in awkward().items():
        check(gradient_norm([g.cuda() for g in gradients], way, norm_type).cpu(), name, norm_type)
