"""Optimizers whose step runs forward and backward themselves, by a closure: SAM and its kin, LBFGS.

Such an optimizer relates all parameters to one another, and looks at them before and after every closure. So every rank
steps on whole parameters, of which it finds the user's own in its groups, with whole averaged gradients; its state is
whole on every rank, as under plain data parallelism. While a closure runs, parameters are sharded, as in any other
forward and backward. What a step has made of the parameters is compared between the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import tree_leaves
from lightning_zero.config import Tier
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.full import gathered, gathered_gradients
from lightning_zero.errors import DivergenceError, UnsupportedOptimizerError
from lightning_zero.optim.groups import ParamGroups, restore_options
from lightning_zero.optim.whole import WholeState
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = ["ClosureOptimizer"]


class ClosureOptimizer:
    """One optimizer that steps on whole parameters on every rank, and is not changed. A session uses this in the place
    of a ``ShardedOptimizer``. ``UnsupportedOptimizerError`` with offload."""

    rule = "closure"

    def __init__(
        self, optimizer: Optimizer, label: str, owned: Mapping[nn.Parameter, Slice], engine: ZeroEngine
    ) -> None:
        self.optimizer, self.label = optimizer, label
        self._members = ParamGroups(optimizer, label, owned)
        self.adopt_new_groups = self._members.current  # raises if new parameters are not the model's
        self._engine = engine
        if any(entry.flat.rest.master is not Tier.DEVICE for entry in self.entries):
            raise UnsupportedOptimizerError(
                f"{label}: {type(optimizer).__name__} needs a closure in step(), so it steps on whole parameters on "
                "every rank, which offload would only carry to the device and back. Leave `offload` out, or use an "
                "optimizer that needs no closure."
            )
        if engine.collectives.rank == 0:
            mib = sum(entry.user.numel() * entry.data.element_size() for entry in self.entries) / 2**20
            warnings.warn(
                f"{label} needs a closure in step(), so every rank steps on whole parameters, as under DDP. While it "
                f"steps that takes {mib:.1f} MiB for values and as much for gradients, and its state is not sharded.",
                stacklevel=2,
            )

    def step(self, closure: Callable[[], Any], **options: Any) -> Any:
        """Have the optimizer take its step, with ``closure`` run on shards whenever it is called.

        Returns what the optimizer's step does. Raises ``DivergenceError`` on every rank, with all as it was at the last
        closure, if the ranks did different things. Collective: every rank.
        """
        parameters, calls = [entry.user for entry in self.entries], 0
        with ExitStack() as shown:

            def leave(place: str) -> None:
                rows = self._engine.agree(place, [fingerprint(*(parameter.data for parameter in parameters))])
                if any(row[0] != rows[0][0] for row in rows):
                    raise DivergenceError(
                        f"The ranks left different weights at {place}. Every rank steps on all of them and must do the "
                        "same: let training_step return a loss that is equal on every rank if the optimizer goes by it "
                        "(`self.all_gather(loss, sync_grads=True).mean()`, as a line search does), seed random numbers "
                        "alike, and give all ranks the same options."
                    )
                shown.close()

            def show() -> None:
                shown.enter_context(gathered_gradients(self._engine, parameters))
                shown.enter_context(gathered(self._engine, parameters))

            def run() -> Any:
                nonlocal calls
                calls += 1
                leave(f"closure {calls} of a step of {self.label}")
                result = closure()
                show()
                return result

            show()
            result = self.optimizer.step(closure=run, **options)
            leave(f"the end of a step of {self.label}, after {calls} closures")
        return result

    # What sessions, checkpoints and monitors ask of a ``ShardedOptimizer``, where it is said what each is for.

    state = property(lambda self: self.optimizer.state)
    groups = property(lambda self: self._members.current())
    entries = property(lambda self: [entry for group in self.groups for entry in group])

    def gradients(self) -> list[Tensor]:
        return [g for e in self.entries if e.parameter is not None and (g := e.parameter.grad) is not None]

    def nothing(self, *_: Any) -> None:
        """There is nothing to forget, and nothing to give back: the optimizer is as the user made it."""

    masters_changed = abandon = retire = make_room = nothing

    def named_state(self) -> dict[str, WholeState]:
        found = {entry.name: self.state.get(entry.user) for entry in self.entries}
        return {name: WholeState(values=dict(state)) for name, state in found.items() if state}

    def slices_state(self, entry: Slice, key: str, shape: Sequence[int]) -> bool:
        return False

    def steps_on_device(self, entry: Slice) -> bool:
        return any(g.get("fused") or g.get("capturable") for g in self.optimizer.param_groups)

    def load_named_state(self, state: Mapping[str, WholeState], groups: Sequence[Mapping[str, Any]]) -> None:
        restore_options(self.optimizer, groups, ("params",))
        self.state.clear()
        for entry in self.entries:
            if entry.name in state:
                self.state[entry.user] = dict(state[entry.name].values)

    def tensors(self) -> Iterator[Tensor]:
        yield from (value for value in tree_leaves(list(self.state.values())) if isinstance(value, Tensor))
