"""Optimizers whose step runs forward and backward themselves, by a closure: SAM and its kin, LBFGS.

Such an optimizer relates all parameters to one another, and looks at them before and after every closure. So every rank
steps on whole parameters, of which it finds the user's own in its groups, with whole averaged gradients; its state is
whole on every rank, as under plain data parallelism. While a closure runs, parameters are in shards, as in any other
forward and backward. What a step has made of the parameters is compared between the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import tree_leaves
from lightning_zero.comm import Collectives
from lightning_zero.errors import DivergenceError
from lightning_zero.optim.groups import OwnedParameter, ParamGroups, restore_options
from lightning_zero.optim.rules import check_offloadable
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.optim.whole import WholeState
from lightning_zero.shards.slice import fingerprint

__all__ = ["ReplicatedOptimizer"]


class ReplicatedOptimizer(ShardedOptimizer):
    """One optimizer that steps on whole parameters on every rank. It is never changed, and neither is its state.

    Args:
        agree: meets the other ranks at a place of the program, and exchanges numbers.
        whole: lets parameters and their gradients be whole for a while; collective.

    Raises:
        UnsupportedOptimizerError: where masters do not rest on the device.
        ValueError: if it holds parameters that are not the model's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        owned: Mapping[nn.Parameter, OwnedParameter],
        collectives: Collectives,
        agree: Callable[[str, Sequence[int]], list[list[int]]],
        whole: Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]],
    ) -> None:
        self.optimizer, self.label, self.rule = optimizer, label, "replicated"
        self._members = ParamGroups(optimizer, label, owned)
        self._agree, self._show = agree, whole
        for entry in self.entries:
            check_offloadable(optimizer, label, self.rule, entry.flat.rest.master, entry.user.device)
        if collectives.rank == 0:
            mib = sum(entry.user.numel() * entry.shard.data.element_size() for entry in self.entries) / 2**20
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
        parameters = [entry.user for entry in self.entries]
        calls = 0
        with ExitStack() as shown:

            def leave(place: str) -> None:
                rows = self._agree(place, [fingerprint(*(parameter.data for parameter in parameters))])
                if any(row[0] != rows[0][0] for row in rows):
                    raise DivergenceError(
                        f"The ranks left different weights at {place}. Every rank steps on all of them and must do the "
                        "same: let training_step return a loss that is equal on every rank if the optimizer goes by it "
                        "(`self.all_gather(loss, sync_grads=True).mean()`, as a line search does), seed random numbers "
                        "alike, and give all ranks the same options."
                    )
                shown.close()

            def run() -> Any:
                nonlocal calls
                calls += 1
                leave(f"closure {calls} of a step of {self.label}")
                result = closure()
                shown.enter_context(self._show(parameters))
                return result

            shown.enter_context(self._show(parameters))
            result = self.optimizer.step(closure=run, **options)
            leave(f"the end of a step of {self.label}, after {calls} closures")
        return result

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def groups(self) -> list[list[OwnedParameter]]:
        return self._members.current()

    def masters_changed(self) -> None:
        """Nothing is held that could be old."""

    def abandon(self) -> None:
        """A step that raised has put everything back."""

    def retire(self) -> None:
        """The optimizer keeps its state itself."""

    def adopt_new_groups(self) -> None:
        self._members.current()  # raises if new parameters are not the model's

    def named_state(self) -> dict[str, WholeState]:
        found = {entry.name: self.state.get(entry.user) for entry in self.entries}
        return {name: WholeState(values=dict(state)) for name, state in found.items() if state}

    def slices_state(self, entry: OwnedParameter, key: str, shape: Sequence[int]) -> bool:
        return False

    def make_room(self) -> None:
        self.state.clear()

    def load_named_state(self, state: Mapping[str, WholeState], groups: Sequence[Mapping[str, Any]]) -> None:
        restore_options(self.optimizer, groups, ("params",))
        self.state.clear()
        for entry in self.entries:
            if entry.name in state:
                self.state[entry.user] = dict(state[entry.name].values)

    def tensors(self) -> Iterator[Tensor]:
        yield from (value for value in tree_leaves(list(self.state.values())) if isinstance(value, Tensor))
