"""Parameters are stepped on together, side by side or apart, with the bits and the state of each on its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.optim.segments import Member
from lightning_zero.optim.stepper import Stepper, Steps
from lightning_zero.plan.costs import SEGMENT_NUMEL, SMALL_NUMEL
from tests.optim.rig import looking

SIZES = (1, 3, 7, 16, 17, 31, 64, 100, 5, SMALL_NUMEL, SMALL_NUMEL + 1, 33, 12)
LARGE = (64, 4096, 128, 100, 7, 64, 640, 65536, 192)
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


def members_of(parameters: list[nn.Parameter]) -> list[Member]:
    """As of entries that nobody asks for anything."""
    entries: list[Any] = [SimpleNamespace() for _ in parameters]
    return [Member(entry, 0, parameter) for entry, parameter in zip(entries, parameters, strict=True)]


class Pair:
    """The same parameters twice: stepped on one by one, and together.

    Args:
        kind: the optimizer.
        options: its.
        sizes: of the parameters.
        apart: whether each has memory of its own, or they lie in one shard, at multiples of 64 elements.
    """

    def __init__(
        self,
        kind: Any,
        options: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, ...] = SIZES,
        apart: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.sizes, self.apart = sizes, apart
        self.alone = [nn.Parameter(torch.randn(numel, dtype=dtype)) for numel in sizes]
        values, self.gradients = self._memory(), self._memory()
        for value, parameter in zip(values, self.alone, strict=True):
            value.copy_(parameter.detach())
        self.together = [nn.Parameter(value) for value in values]
        self.optimizers = kind(self.alone, **options), kind(self.together, **options)
        self.stepper = Stepper(self.optimizers[1], Steps())
        self.stepper.members = members_of(self.together)

    def _memory(self) -> list[Tensor]:
        dtype = self.alone[0].dtype
        if self.apart:
            return [torch.zeros(numel, dtype=dtype) for numel in self.sizes]
        shard = torch.zeros(sum(-(-numel // 64) * 64 for numel in self.sizes), dtype=dtype)
        found, start = [], 0
        for numel in self.sizes:
            found.append(shard[start : start + numel])
            start += -(-numel // 64) * 64
        return found

    def step(self, without: tuple[int, ...] = ()) -> int:
        """One step of both. Returns how many parameters were stepped on together."""
        for index, (a, b, gradient) in enumerate(zip(self.alone, self.together, self.gradients, strict=True)):
            a.grad = None if index in without else torch.randn_like(a)
            b.grad = None if a.grad is None else gradient.copy_(a.grad)
        self.optimizers[0].step()
        stepped = self.stepper.run()
        for parameter in stepped:
            parameter.grad = None
        self.optimizers[1].step()
        return len(stepped)

    def check(self) -> None:
        for numel, a, b in zip(self.sizes, self.alone, self.together, strict=True):
            assert torch.equal(a, b), numel
            one, other = self.optimizers[0].state.get(a, {}), self.optimizers[1].state.get(b, {})
            assert list(one) == list(other)
            for key, value in one.items():
                found = other[key]
                assert torch.equal(value, found) if isinstance(value, Tensor) else value == found, (numel, key)
                assert not isinstance(value, Tensor) or value.shape == found.shape
        assert set(self.optimizers[1].state) <= set(self.together)

    def change(self, what: Callable[[dict[str, Any]], Any], index: int) -> None:
        """Do the same to the state of one parameter under both."""
        for optimizer, parameters in zip(self.optimizers, (self.alone, self.together), strict=True):
            what(optimizer.state[parameters[index]])


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in a shard"])
def test_bits_and_state_are_those_of_parameters_alone(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, way: dict[str, Any], apart: bool
) -> None:
    if "fused" in way and kind not in FUSED:
        pytest.skip("has no fused kernel")
    pair = Pair(kind, {**options, **way}, dtype, apart=apart)
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
    assert pair.step() == 12  # two segments now: some are a step behind
    pair.check()
    assert pair.step(without=tuple(range(len(SIZES)))) == 0
    pair.check()


def test_what_the_user_does_to_state_counts() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.together), strict=True):
        optimizer.state[parameters[1]]["exp_avg"].zero_()
        optimizer.state[parameters[3]]["exp_avg_sq"] = torch.full((SIZES[3],), 0.5)
    pair.step()
    pair.check()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.together), strict=True):
        optimizer.state[parameters[2]]["step"].fill_(100.0)
    pair.step()
    pair.check()
    for optimizer, parameters in zip(pair.optimizers, (pair.alone, pair.together), strict=True):
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
    for index in range(3):
        pair.change(edit, index)
    pair.step()
    pair.step()
    pair.check()


def test_who_leaves_a_segment_keeps_no_more_than_its_own_state_alive() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.step()
    for count in range(8):  # one more is left out in each step
        pair.step(without=tuple(range(count)))
    pair.check()
    values = [value for state in pair.optimizers[1].state.values() for value in state.values()]
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    assert sum(held.values()) == sum(value.nbytes for value in values)


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
    assert all(a is b for a, b in zip(pair.optimizers[1].param_groups[0]["params"], pair.together, strict=True))
    assert set(pair.optimizers[1].state) == set(pair.together)


@pytest.mark.parametrize("apart", [True, False])
def test_what_is_put_together_is_bounded(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step of the optimizer; nothing of it is kept beside the state."""
    seen: list[int] = []

    pair = Pair(torch.optim.SGD, {"lr": 0.1}, sizes=(SMALL_NUMEL,) * 40, apart=apart)
    looking(monkeypatch, pair.optimizers[1], lambda group: seen.extend(p.numel() for p in group["params"]))
    assert pair.step() == 40
    pair.check()
    assert sorted(seen)[-3:] == [SEGMENT_NUMEL // 2, SEGMENT_NUMEL, SEGMENT_NUMEL]  # 40 * 4096 = 2.5 * 65536


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours of any size, which a fused kernel takes without a copy


@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind, options in OPTIMIZERS if kind in FUSED])
def test_neighbours_in_one_go_have_the_bits_of_each_alone(kind: Any, options: dict[str, Any]) -> None:
    pair = Pair(kind, {**options, "fused": True}, sizes=LARGE, apart=False)
    for _ in range(4):
        assert pair.step() == 7, "64, 4096 and 128; 64, 640, 65536 and 192"
        pair.check()


def test_a_parameter_without_a_gradient_falls_behind_and_out_of_the_segment() -> None:
    pair = Pair(torch.optim.AdamW, {"fused": True}, sizes=LARGE, apart=False)
    pair.step()
    assert pair.step(without=(6,)) == 6  # 64, 4096, 128 and 64; 65536, 192
    pair.check()
    assert pair.step() == 6  # 640 has made one step less
    pair.check()


def test_state_from_elsewhere_is_brought_together() -> None:
    pair = Pair(torch.optim.AdamW, {"fused": True}, sizes=LARGE, apart=False)
    pair.step()
    for state in pair.optimizers[1].state.values():
        for key, value in state.items():
            state[key] = value.clone()
    assert pair.step() == 7
    pair.check()
    first, second = (pair.optimizers[1].state[pair.together[index]]["exp_avg"] for index in (0, 1))
    assert first.data_ptr() + first.nbytes == second.data_ptr()


def test_state_that_the_user_changes_between_steps_counts() -> None:
    """In place, in one parameter's counter and in one parameter's average; and by another tensor."""
    pair = Pair(torch.optim.AdamW, {"fused": True}, sizes=LARGE, apart=False)
    for _ in range(3):
        pair.step()
    pair.change(lambda state: state["exp_avg"].mul_(0.5), 1)
    assert pair.step() == 7
    pair.check()
    pair.change(lambda state: state["step"].fill_(1.0), 0)
    assert pair.step() == 6  # its counter is another one now
    pair.check()
    pair.change(lambda state: state.update(exp_avg=torch.ones_like(state["exp_avg"])), 6)
    pair.step()
    pair.check()
    pair.change(lambda state: state.clear(), 7)
    pair.step()
    pair.check()


def test_gradients_that_lie_elsewhere_are_taken_where_they_are() -> None:
    """Small ones are copied together; large ones are stepped on alone."""
    pair = Pair(torch.optim.AdamW, {"fused": True}, sizes=LARGE, apart=False)
    pair.step()
    pair.gradients = [gradient.clone() for gradient in pair.gradients]
    assert pair.step() == 5  # 64, 4096, 128, 64 and 640
    pair.check()
