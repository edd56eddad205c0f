"""What happens to the tensors that autograd keeps for the backward: computed again, or kept on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_zero._torch import current_graph_task, storage_key
from lightning_zero.activations import Checkpointing, SavedOnHost
from lightning_zero.activations.checkpointing import Gathered
from lightning_zero.config import ActivationPolicy
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.sharded import ShardedUnit
from lightning_zero.engine.units.unit import ReplicatedUnit
from lightning_zero.plan import find_recomputed
from lightning_zero.shards.binding import get_data

__all__ = ["Activations"]


class Activations:
    """An ``ActivationPolicy`` at work on the module of an engine.

    Losses, gradients and buffers have the same bits with any policy, but for forwards that depend on state out of sight
    (``activations.states``) or write past versions (``activations.offload``).

    Args:
        engine: runs the module.
        policy: what to do.
        units: class names of the units (the strategy's setting), ``None``: found automatically.

    Raises:
        ValueError: if the policy names classes that the module does not have, or nothing is there to recompute.
    """

    def __init__(self, engine: ZeroEngine, policy: ActivationPolicy, units: Sequence[str] | None = None) -> None:
        self._engine = engine
        self._checkpointing: Checkpointing | None = None
        self._saved: SavedOnHost | None = None
        self._standing: frozenset[int] = frozenset()
        if policy.checkpointing is not None:
            names = find_recomputed(engine.module, policy.checkpointing, units)
            modules = dict(engine.module.named_modules())
            self._checkpointing = Checkpointing({name: modules[name] for name in names}, self._gathered)
        if policy.offload:
            self._saved = SavedOnHost(engine.device, policy.min_kib * 1024, lambda key: key in self._standing)

    @property
    def host_nbytes(self) -> int:
        """Host memory held for saved tensors, in use or ready for use again."""
        return 0 if self._saved is None else self._saved.buffers.nbytes

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a training step, outside of ``engine.step``: what the forwards inside save goes to the host."""
        if self._saved is None:
            yield
            return
        self._standing = self._find_standing()
        with self._saved.saving():
            yield

    def abandon(self) -> None:
        """Let go of device memory after an error in the middle of a step."""
        if self._saved is not None:
            self._saved.abandon()

    def detach(self) -> None:
        """Give modules their own forwards back, and free the host memory. Once is enough, twice does no harm."""
        if self._checkpointing is not None:
            self._checkpointing.detach()
        if self._saved is not None:
            self._saved.release()

    def _find_standing(self) -> frozenset[int]:
        """Memory that stays whatever autograd saves of it: weights where they are computed with, and buffers."""
        tensors = [buffer for unit in self._engine.units if isinstance(unit, ReplicatedUnit) for buffer in unit.buffers]
        tensors += [unit.home.buffer for unit in self._engine.units if isinstance(unit, ShardedUnit)]
        module = self._engine.module
        tensors += [get_data(tensor) for tensor in (*module.parameters(), *module.buffers())]
        return frozenset(storage_key(tensor) for tensor in tensors if type(tensor) is Tensor)

    def _gathered(self, module: nn.Module) -> Gathered:
        """What makes the weights whole that a module's forward finds, but those that its own submodules bring."""
        engine = self._engine
        modules = dict(engine.module.named_modules())
        inside = set(module.modules()) - {module}
        needed = set(module.parameters())
        sharded = [unit for unit in engine.units if isinstance(unit, ShardedUnit)]
        units = [unit for unit in sharded if not needed.isdisjoint(unit.parameters)]
        outside = [unit for unit in units if modules[unit.plan.module] not in inside]

        @contextmanager
        def gathered(again: bool) -> Iterator[None]:
            if again and units and current_graph_task() != -1:
                engine.begin_backward()
            with ExitStack() as stack:
                for unit in outside:
                    engine.before_unit_forward(unit)
                    stack.push(functools.partial(_leave, engine, unit))
                yield

        return gathered


def _leave(engine: ZeroEngine, unit: ShardedUnit, kind: Any, error: Any, trace: Any) -> None:
    engine.after_unit_forward(unit, failed=error is not None)
