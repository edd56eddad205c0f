"""What autograd saves of a slot is a note, not memory; everything else is handed on, and checked as torch checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_zero import HostOffload, build_plan
from lightning_zero.comm import LocalCollectives, Streams
from lightning_zero.engine.build import UnitBuilder
from lightning_zero.engine.guard import SavedTensorGuard
from lightning_zero.engine.unit import ShardedUnit
from lightning_zero.meta import MetaValues
from tests.helpers.wires import make_means

CPU = torch.device("cpu")
SIZE = 6


class World:
    """Two units that share one slot, and a guard."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        self.values = [linear.weight.detach().clone() for linear in self.module]
        offload = HostOffload(optimizer=False, parameters=True)  # without it one rank would keep whole parameters
        plan = build_plan(self.module, stage=3, world_size=1, units=["Linear"], prefetch=0, offload=offload)
        self.wire = LocalCollectives()
        self.means = make_means(plan, self.wire)
        built = UnitBuilder(self.module, plan, self.means, MetaValues.by_unit(self.module, plan)).build()
        self.units = [unit for unit in built if isinstance(unit, ShardedUnit) and unit.plan.module]
        assert self.units[0].place == self.units[1].place, "the test wants one buffer for both"
        self.restored: list[str] = []
        self.stays = True
        self.guard = SavedTensorGuard(self.means.pool, self.restore, Streams(CPU))

    def gather(self, unit: ShardedUnit) -> None:
        if unit.storage is None or unit.storage.version != unit.version:
            for other in self.units:
                other.release()
            unit.launch(self.means, None)
            unit.wait()

    def restore(self, unit: ShardedUnit) -> bool:
        self.restored.append(unit.name)
        self.gather(unit)
        return self.stays

    @contextmanager
    def forward(self, index: int) -> Iterator[nn.Linear]:
        unit = self.units[index]
        self.gather(unit)
        unit.bind()
        self.guard.push()
        yield self.module[index]
        self.guard.pop()
        unit.unbind(Streams(CPU))


def test_weights_that_were_overwritten_are_gathered_for_the_backward() -> None:
    world = World()
    x = torch.randn(3, SIZE, requires_grad=True)
    with world.forward(0) as linear:
        y = linear(x)
    with world.forward(1) as linear:
        z = linear(y)
    z.sum().backward()
    expected = torch.ones(3, SIZE) @ world.values[1] @ world.values[0]
    assert torch.equal(x.grad, expected)
    assert world.restored[0] == "1"
    assert "0" in world.restored


def test_memory_that_does_not_stay_is_copied() -> None:
    world = World()
    world.stays = False
    x = torch.randn(3, SIZE, requires_grad=True)
    with world.forward(0) as linear:
        y = linear(x)
    saved = y.grad_fn._saved_mat2
    world.gather(world.units[1])
    assert torch.equal(saved.t() if not torch.equal(saved, world.values[0]) else saved, world.values[0])


def test_changed_weights_are_refused_by_name() -> None:
    world = World()
    with world.forward(0) as linear:
        y = linear(torch.randn(3, SIZE, requires_grad=True))
    world.units[0].parameters_changed(world.units[0].parameters)
    with pytest.raises(RuntimeError, match="weights of unit '0' were changed"):
        y.sum().backward()


def test_changed_activations_are_refused_as_torch_does() -> None:
    """Saved-tensor hooks switch torch's own check off."""
    world = World()
    x = torch.randn(3, SIZE, requires_grad=True)
    with world.forward(0) as linear:
        hidden = linear(x).exp()
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*shape \[3, 6\].*version 0.*version 1"):
        hidden.sum().backward()


def test_activations_that_had_been_changed_before_they_were_saved_are_checked_as_well() -> None:
    world = World()
    x = torch.randn(3, SIZE, requires_grad=True)
    with world.forward(0) as linear:
        hidden = linear(x).mul_(2).exp_()
        saved = hidden * hidden
    torch.autograd.grad(saved.sum(), x, retain_graph=True)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 2.*version 3"):
        saved.sum().backward()


def test_unchanged_activations_are_the_very_tensor() -> None:
    world = World()
    x = torch.randn(3, SIZE, requires_grad=True)
    with world.forward(0):
        y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("nested", [False, True])
def test_hooks_of_the_user_get_what_is_not_a_slot(nested: bool) -> None:
    world = World()
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    x = torch.randn(3, SIZE, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor * 1), world.forward(0) as linear:
        if nested:
            world.guard.push()
        y = linear(x).exp()
        if nested:
            world.guard.pop()
        z = y.sin()
    assert packed == [(3, SIZE), (3, SIZE), (3, SIZE)], "x, exp's result and sin's input; never the weight"
    z.sum().backward()
    first = torch.exp(x.detach() @ world.values[0].t() + world.module[0].bias.new_zeros(()))
    assert x.grad is not None
    assert first.shape == x.grad.shape


def test_save_on_cpu_goes_on_working() -> None:
    gradients = []
    for context in (save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)):
        world = World()
        torch.manual_seed(1)
        x = torch.randn(3, SIZE, requires_grad=True)
        with context(), world.forward(0) as linear:
            y = linear(x).tanh()
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


KINDS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "part": lambda linear, x: (x[:, :2] @ linear.weight[:2]).exp(),
    "strided": lambda linear, x: x @ linear.weight[::2].t(),
    "leaf": lambda linear, x: x * linear.weight.sum(),
    "square": lambda linear, x: x * linear.weight.square().mean(),
    "sparse": lambda linear, x: torch.sparse.mm(torch.eye(3).to_sparse(), x) @ linear.weight,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_view_comes_back(name: str) -> None:
    world = World()
    torch.manual_seed(2)
    data = torch.randn(3, SIZE)
    plain = nn.Linear(SIZE, SIZE)
    plain.weight.data.copy_(world.values[0])
    expected = data.clone().requires_grad_()
    KINDS[name](plain, expected).sum().backward()
    x = data.clone().requires_grad_()
    with world.forward(0) as linear:
        y = KINDS[name](linear, x)
    with world.forward(1) as linear:
        linear(data)
    world.gather(world.units[0])  # what the engine does before a unit's backward: leaves are read where they are
    world.units[0].bind()
    y.sum().backward()
    assert torch.equal(x.grad, expected.grad)
