"""Small parameters are stepped on together: the same bits, and state that looks as if each had been alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.optim.bundles import BUNDLE_NUMEL, SMALL_NUMEL, Bundles

SIZES = (1, 3, 7, 16, 17, 31, 64, 100, 5, SMALL_NUMEL, SMALL_NUMEL + 1, 33, 12)
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class Pair:
    """The same parameters twice: stepped on one by one, and in bundles."""

    def __init__(self, kind: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.alone = [nn.Parameter(torch.randn(numel, dtype=dtype)) for numel in SIZES]
        self.bundled = [nn.Parameter(parameter.detach().clone()) for parameter in self.alone]
        self.optimizers = kind(self.alone, **options), kind(self.bundled, **options)
        self.bundles = Bundles(self.optimizers[1])
        self.groups: Any = [[SimpleNamespace(shard=SimpleNamespace(parameter=p)) for p in self.bundled]]

    def step(self, without: tuple[int, ...] = ()) -> int:
        """One step of both. Returns how many parameters were in bundles."""
        for index, (a, b) in enumerate(zip(self.alone, self.bundled, strict=True)):
            a.grad = None if index in without else torch.randn_like(a)
            b.grad = None if a.grad is None else a.grad.clone()
        self.optimizers[0].step()
        stepped = self.bundles.run(self.groups)
        for parameter, _ in stepped:
            parameter.grad = None
        self.optimizers[1].step()
        return len(stepped)

    def check(self) -> None:
        for numel, a, b in zip(SIZES, self.alone, self.bundled, strict=True):
            assert torch.equal(a, b), numel
            one, other = self.optimizers[0].state.get(a, {}), self.optimizers[1].state.get(b, {})
            assert list(one) == list(other)
            for key, value in one.items():
                found = other[key]
                assert torch.equal(value, found) if isinstance(value, Tensor) else value == found, (numel, key)
                assert not isinstance(value, Tensor) or value.shape == found.shape
        assert set(self.optimizers[1].state) <= set(self.bundled)


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_bits_and_state_are_those_of_parameters_alone(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, way: dict[str, Any]
) -> None:
    if "fused" in way and kind not in FUSED:
        pytest.skip("has no fused kernel")
    pair = Pair(kind, {**options, **way}, dtype)
    for _ in range(4):
        together = pair.step()
        pair.check()
        # all but the large one; fused only whole cache lines: 64, 100 (float64: 800 bytes are not), 16, SMALL_NUMEL
        expected = len(SIZES) - 1
        if "fused" in way:
            expected = sum(n * dtype.itemsize % 64 == 0 for n in SIZES if n <= SMALL_NUMEL)
        assert together == expected


def test_parameters_without_a_gradient_are_left_alone_and_the_others_stay_together() -> None:
    pair = Pair(torch.optim.AdamW, {})
    assert pair.step() == 12
    assert pair.step(without=(2, 4)) == 10
    pair.check()
    assert pair.step() == 12  # two bundles now: some are a step behind
    pair.check()
    assert pair.step(without=tuple(range(len(SIZES)))) == 0
    pair.check()


def test_what_the_user_does_to_state_counts() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.bundled), strict=True):
        optimizer.state[parameters[1]]["exp_avg"].zero_()
        optimizer.state[parameters[3]]["exp_avg_sq"] = torch.full((SIZES[3],), 0.5)
    pair.step()
    pair.check()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.bundled), strict=True):
        optimizer.state[parameters[2]]["step"].fill_(100.0)
    pair.step()
    pair.check()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.bundled), strict=True):
        del optimizer.state[parameters[5]]
    pair.step()
    pair.step()
    pair.check()
    assert pair.step() == 12 - 2  # one with another count of steps each: alone


def _move(state: dict[str, Any]) -> None:
    state["exp_avg"].data = torch.ones_like(state["exp_avg"])


def _write(state: dict[str, Any]) -> None:
    state["step"].data.fill_(7.0)


def _move_step(state: dict[str, Any]) -> None:
    state["step"].data = torch.tensor(9.0)


@pytest.mark.parametrize("edit", [_move, _write, _move_step])
def test_what_the_user_does_to_state_behind_every_counter_counts(edit: Any) -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.bundled), strict=True):
        for parameter in parameters[:3]:
            edit(optimizer.state[parameter])
    pair.step()
    pair.step()
    pair.check()


def test_who_leaves_a_bundle_keeps_no_more_than_its_own_state_alive() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    for count in range(8):  # one more is left out in each step
        pair.step(without=tuple(range(count)))
    pair.check()
    values = [value for state in pair.optimizers[1].state.values() for value in state.values()]
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    assert sum(held.values()) == sum(value.nbytes for value in values)


def test_an_optimizer_that_chooses_among_parameters_is_not_served() -> None:
    class Choosing(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any) -> Any:  # type: ignore[override]
            return super()._init_group({**group, "params": [p for p in group["params"] if p.numel() > 8]}, *args)

    parameters = [nn.Parameter(torch.zeros(4))]
    assert not Bundles.serves(Choosing(parameters))
    assert all(Bundles.serves(kind(parameters, **options)) for kind, options in OPTIMIZERS)


def test_options_of_the_group_that_change_count() -> None:
    pair = Pair(torch.optim.AdamW, {"lr": 0.1})
    for lr in (0.1, 0.01, 0.5):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        pair.step()
        pair.check()


def test_an_error_in_the_arithmetic_leaves_groups_as_they_were() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    pair.optimizers[1].param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        pair.step()
    assert all(a is b for a, b in zip(pair.optimizers[1].param_groups[0]["params"], pair.bundled, strict=True))
    assert set(pair.optimizers[1].state) == set(pair.bundled)


def test_what_is_put_together_is_bounded() -> None:
    parameters = [nn.Parameter(torch.zeros(SMALL_NUMEL)) for _ in range(40)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    groups: Any = [[SimpleNamespace(shard=SimpleNamespace(parameter=p)) for p in parameters]]
    bundles = Bundles(optimizer)
    assert len(bundles.run(groups)) == 40
    sizes = [sum(p.numel() for p in bundle.members) for bundle in bundles._bundles]
    assert max(sizes) <= BUNDLE_NUMEL
    assert len(sizes) == 3  # 40 * 4096 = 2.5 * 65536
    assert all(bundle.parameter.numel() == 0 for bundle in bundles._bundles), "something is kept beside the state"
