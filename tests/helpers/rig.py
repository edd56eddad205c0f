"""One rank's shards of some parameters, wherever they rest, and an optimizer on them: no engine, no Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm import LocalCollectives
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme import FileSteps
from lightning_zero.extensions.nvme.files import FileTensor, fill_from
from lightning_zero.extensions.nvme.store import NvmeStore
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.state import extent, is_like
from lightning_zero.optim.stepper import Steps
from lightning_zero.plan.layout import FlatLayout, ParameterSpec, Rest
from lightning_zero.shards.slice import FlatParameters, Slice

# Two layouts in unit 0, one in each of the others; sizes around windows (4096 elements), shards and alignment.
SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((70, 130), (130,), (), (0, 3)),
    ((41, 100),),
    ((5, 5), (12345,), (1,)),
)
KIBIBYTE = 1024
SMALLEST = 512 * KIBIBYTE
"""Bytes of buffers that make windows of 4096 elements for four tensors of float32."""


def parameters_of(dtype: torch.dtype = torch.float32) -> list[list[nn.Parameter]]:
    """Per unit; the same values at every call."""
    generator = torch.Generator().manual_seed(0)
    return [[nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in unit] for unit in SHAPES]


def gradient_of(parameter: nn.Parameter, index: int, step: int, always: bool) -> Tensor | None:
    """Of one step; sometimes there is none, unless there is ``always`` one."""
    if (index + step) % 5 == 4 and not always:
        return None
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def looking(patch: pytest.MonkeyPatch, optimizer: Optimizer, look: Callable[[dict[str, Any]], None]) -> Any:
    """The optimizer; ``look`` is called with each of its groups before it, and no copy of it, steps on them.

    Not by a class of its own: one that changes what torch steps on is given whole parameters.
    """
    original: Any = type(optimizer)._init_group  # type: ignore[attr-defined]

    def look_first(self: Any, group: dict[str, Any], *lists: Any) -> Any:
        if self is optimizer:
            look(group)
        return original(self, group, *lists)

    patch.setattr(type(optimizer), "_init_group", look_first)
    return optimizer


class Watched(FlatParameters):
    """Notes which windows are brought up to date."""

    windows: list[tuple[FlatParameters, int, int]]

    def refresh_part(self, start: int, values: Tensor) -> None:
        self.windows.append((self, start, values.numel()))
        super().refresh_part(start, values)


class Rig:
    """What ``ShardedOptimizer`` needs of a run, and a record of what it was told.

    Args:
        make: builds the optimizer from all parameters.
        tier: where masters and state rest.
        rank: this rank.
        world_size: of the shard group.
        store: files, for ``Tier.DISK``.
        dtype: of the parameters.
        threads: that steps are to compute with.
        always: whether every parameter has a gradient in every step.
        adapt: called with the optimizer before it is adapted.
    """

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], Optimizer],
        tier: Tier,
        rank: int = 0,
        world_size: int = 1,
        store: NvmeStore | None = None,
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        always: bool = False,
        adapt: Callable[[Optimizer], object] = lambda optimizer: None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.tier, self.store = tier, store
        self.stepped: list[int] = []
        self.agreed: list[BaseException | None] = []
        self.windows: list[tuple[FlatParameters, int, int]] = []
        self.broken: tuple[int, Exception] | None = None
        """The unit that cannot be published, and why."""
        self._always = always
        units = parameters_of(dtype)
        self.parameters = [parameter for unit in units for parameter in unit]
        self.owned: dict[nn.Parameter, Slice] = {}
        self.flats: list[FlatParameters] = []
        for index, unit in enumerate(units):
            halves = [unit[:2], unit[2:]] if index == 0 else [unit]
            for members in halves:
                self._add(index, members)
        self._threads = threads
        optimizer = make(self.parameters)
        adapt(optimizer)
        self.adapt(optimizer)

    def adapt(self, optimizer: Optimizer) -> None:
        """Step with this optimizer from now on."""
        self.optimizer = optimizer
        self.adapter = ShardedOptimizer(
            optimizer,
            "Adam",
            self.owned,
            LocalCollectives(),
            before_step=lambda label, values=(), differ=None, running=bool: None,
            after_step=lambda units: None,
            note=lambda what, value: None,
            steps=self._steps(),
        )

    def _steps(self) -> Steps:
        told: dict[str, Any] = {"publish": self._unit_stepped, "agree": self._agree}
        told |= {"threads": self._threads, "range_numel": 1024}
        if self.tier is not Tier.DISK or self.store is None:
            return Steps(**told)
        return FileSteps(check_room=self.store.check_space, store=self.store, **told)

    def _add(self, unit: int, members: Sequence[nn.Parameter]) -> None:
        specs = [
            ParameterSpec(f"unit{unit}.p{len(self.owned) + i}", (), tuple(p.shape), p.dtype, True)
            for i, p in enumerate(members)
        ]
        dtype = members[0].dtype
        layout = FlatLayout.build(specs, self.world_size, compute_dtype=dtype, reduce_dtype=dtype)
        whole = torch.zeros(layout.numel, dtype=dtype)
        for parameter, offset in zip(members, layout.offsets, strict=True):
            whole[offset : offset + parameter.numel()] = parameter.detach().reshape(-1)
        start, end = (rank * layout.shard_numel for rank in (self.rank, self.rank + 1))
        rest = Rest(master=self.tier, weights=Tier.DEVICE, gradients=Tier.HOST, state=self.tier)
        if self.tier is Tier.DISK:
            assert self.store is not None
            master: Tensor = self.store.allocate(layout.shard_numel, dtype, f"master of unit {unit}")
        else:
            master = torch.empty(layout.shard_numel, dtype=dtype)
        fill_from(master, whole[start:end])
        flat = Watched(
            layout, members, self.rank, master, [p.data for p in members], rest, whole[start:end].clone(), unit
        )
        flat.windows = self.windows
        self.flats.append(flat)
        self.owned.update(zip(members, flat.shards, strict=True))

    def set_gradients(self, step: int) -> None:
        """This rank's slices of the gradients of a step."""
        for index, (parameter, entry) in enumerate(self.owned.items()):
            gradient = gradient_of(parameter, index, step, self._always)
            shard = entry.parameter
            assert shard is not None
            piece = entry.place
            begin = piece.parameter_start if piece.numel else 0
            shard.grad = None if gradient is None else gradient.reshape(-1).narrow(0, begin, piece.numel).clone()

    def step(self, step: int) -> None:
        """One step of the optimizer, as everybody calls it."""
        self.set_gradients(step)
        self.optimizer.step()

    def masters(self) -> list[Tensor]:
        """This rank's slices of all parameters."""
        data = [entry.data for entry in self.owned.values()]
        return [tensor.read() if isinstance(tensor, FileTensor) else tensor.clone() for tensor in data]

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of all parameters, in memory."""
        found = []
        for entry in self.owned.values():
            assert entry.parameter is not None
            state = self.adapter.state.get(entry.parameter, {})
            found.append({k: v.read() if isinstance(v, FileTensor) else v for k, v in state.items()})
        return found

    def _unit_stepped(self, unit: int) -> None:
        self.stepped.append(unit)
        if self.broken is not None and self.broken[0] == unit:
            raise self.broken[1]

    def _agree(self, failure: BaseException | None) -> None:
        self.agreed.append(failure)
        if failure is not None:
            raise OffloadError(f"Rank {self.rank}: {failure}") from failure


class RowNormalised(Optimizer):
    """A third party's optimizer: not elementwise, state of the parameter's shape, of another shape and of none."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, average=torch.zeros_like(parameter), norms=parameter.new_zeros(7))
                state["steps"] += 1
                state["average"].mul_(0.9).add_(parameter.grad)
                state["norms"][state["steps"] % 7] = parameter.grad.norm()
                parameter.sub_(state["average"] / (state["norms"].sum() + 1) * group["lr"])


class Whole:
    """The same training on whole parameters: what every rig must be equal to."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], Optimizer],
        dtype: torch.dtype = torch.float32,
        always: bool = False,
    ) -> None:
        self._always = always
        self.parameters = [parameter for unit in parameters_of(dtype) for parameter in unit]
        self.optimizer = make(self.parameters)

    def step(self, step: int) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.grad = gradient_of(parameter, index, step, self._always)
        self.optimizer.step()

    def unlike(self, rig: Rig) -> list[str]:
        """What of the parameters and of the state differs from the rig's."""
        found = []
        slices = [(entry.place.parameter_start, entry.place.numel) for entry in rig.owned.values()]
        rows = zip(self.parameters, slices, rig.masters(), rig.state(), strict=True)
        for index, (parameter, (start, numel), master, state) in enumerate(rows):

            def cut(tensor: Tensor, key: str = "", start: int = start, numel: int = numel) -> Tensor:
                return tensor.detach().reshape(-1).narrow(0, extent(key, start) if numel else 0, extent(key, numel))

            if not torch.equal(cut(parameter), master):
                found.append(f"parameter {index}")
            expected = dict(self.optimizer.state.get(parameter, {}))
            if expected.keys() != state.keys():
                found.append(f"keys {sorted(state)} of parameter {index}, not {sorted(expected)}")
                continue
            for key, value in expected.items():
                if not isinstance(value, Tensor):
                    same = value == state[key]
                elif is_like(key, value, parameter.shape):
                    same = torch.equal(cut(value, key), state[key])
                else:
                    same = torch.equal(value, state[key])
                if not same:
                    found.append(f"'{key}' of parameter {index}")
        return found
