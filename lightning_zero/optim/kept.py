"""What an optimizer object has learned in one fit, kept until a later fit trains with the same object.

[Note: one optimizer, several fits]
A user may build the optimizer once and return it from ``configure_optimizers`` in every fit: under DDP it goes on with
its state. Here its groups hold shards, and its state slices, which a later fit may cut in another way. So before the
next set-up its groups get the user's own parameters back, and this rank's state waits here, as it was cut, until the
optimizer is adapted anew. Nothing here holds the optimizer: one that nobody needs goes at once, with what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives
from lightning_zero.errors import UnsupportedOptimizerError
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.optim.state import StateRegions
from lightning_zero.optim.whole import WholeState, whole_entries

__all__ = ["Kept", "holds", "kept_of", "resharded"]


class Holder(Protocol):
    """Who has the state of an optimizer."""

    def keep(self) -> Kept: ...


_HOLDERS: WeakKeyDictionary[Optimizer, ref[Holder]] = WeakKeyDictionary()


def holds(optimizer: Optimizer, holder: Holder) -> None:
    """Note who has an optimizer's state. The optimizer keeps the holder alive, by its hooks."""
    _HOLDERS[optimizer] = ref(holder)


def kept_of(optimizer: Optimizer) -> Kept | None:
    """What an earlier fit has left of an optimizer; ``None`` if there was none. Its groups hold the user's parameters
    from now on. Local."""
    holder = _HOLDERS[optimizer]() if optimizer in _HOLDERS else None
    return None if holder is None else holder.keep()


class Kept:
    """The state of one optimizer between two fits. A step meanwhile is an error, because it would train nothing.

    Args:
        optimizer: whose. Not held.
        label: how to name it.
        entries: its parameters, by the user's.
        state: gives the state by parameter name, each rank's slices of it; collective if the optimizer had whole
            parameters.
        regions: of state in files.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: str,
        entries: Mapping[nn.Parameter, OwnedParameter],
        state: Callable[[], dict[str, WholeState]],
        regions: StateRegions | None,
    ) -> None:
        self.regions = regions
        self._label = label
        self._entries = dict(entries)
        self._state: Callable[[], dict[str, WholeState]] | None = state
        self._handle = optimizer.register_step_pre_hook(self._refuse)
        holds(optimizer, self)

    def keep(self) -> Kept:
        """Itself."""
        return self

    def give_up_files(self) -> None:
        """Let other optimizers have the files. State that was in them is lost, and this optimizer cannot go on."""
        if self.regions is not None:
            self._state = None
            self.regions.release()

    def let_go(self) -> None:
        """Nothing is kept any more: the optimizer was adapted anew."""
        self._state = None
        self._entries.clear()
        self._handle.remove()

    def state_for(
        self, owned: Mapping[nn.Parameter, OwnedParameter], collectives: Collectives
    ) -> dict[str, WholeState]:
        """The state by parameter name, cut as the engine's shards are now. Tensors are handed over where they fit.

        Args:
            owned: the engine's parameters.
            collectives: the wire.

        Raises:
            UnsupportedOptimizerError: on every rank, if the state was in files that are gone.

        Collective: every rank.
        """
        pairs = [(entry, owned[parameter]) for parameter, entry in self._entries.items() if parameter in owned]
        moved = any(new.shard is not old.shard for old, new in pairs)
        if self._state is None or (self.regions is not None and moved):
            raise UnsupportedOptimizerError(
                f"{self._label} has trained in an earlier fit that kept its state in files, and these are gone. Build "
                "a new one in configure_optimizers, or resume from a checkpoint: `trainer.fit(..., ckpt_path=...)`."
            )
        found = self._state()
        state = [found.get(old.shard.spec.name, WholeState()) for old, _ in pairs]
        if moved:
            state = resharded(state, pairs, collectives, next(iter(owned)).device)
        return {new.shard.spec.name: one for (_, new), one in zip(pairs, state, strict=True)}

    def _refuse(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise RuntimeError(
            f"{self._label} is an optimizer of an earlier fit and is not part of the run that the model is in now, so "
            "its step would train nothing. Return it from configure_optimizers in a new fit: it goes on with its state."
        )


Ranges = Sequence[tuple[int, int]]


def resharded(
    state: Sequence[WholeState],
    pairs: Sequence[tuple[OwnedParameter, OwnedParameter]],
    collectives: Collectives,
    device: torch.device,
) -> list[WholeState]:
    """Cut state anew.

    Args:
        state: of each parameter, cut as its old entry is. Emptied, one kind of state after the other, so that only one
            kind is held twice.
        pairs: of each parameter the entry of the engine before, and that of the engine now.
        collectives: the wire.
        device: where the wire begins and ends, wherever state rests.

    Returns:
        The same, cut as the new entries are, and where state of these belongs.

    Collective: every rank, with the same parameters and kinds of state.
    """
    world_size = collectives.world_size
    old = [entry.ranges for entry in whole_entries([before for before, _ in pairs], world_size)]
    new = [entry.ranges for entry in whole_entries([now for _, now in pairs], world_size)]
    cut = []
    for (_, entry), one in zip(pairs, state, strict=True):
        offloaded = entry.flat.rest.offloaded
        cut.append(WholeState(values={k: _on(v, entry.device) if offloaded else v for k, v in one.values.items()}))
    kinds = {(key, value.dtype) for one in state for key, value in one.slices.items()}
    for key, dtype in sorted(kinds, key=str):
        chosen = [i for i, one in enumerate(state) if key in one.slices and one.slices[key].dtype is dtype]
        slices = [state[i].slices.pop(key).to(device) for i in chosen]
        exchanged = _exchanged(slices, [old[i] for i in chosen], [new[i] for i in chosen], collectives, key)
        for index, value in zip(chosen, exchanged, strict=True):
            cut[index].slices[key] = value.to(pairs[index][1].device)
    return cut


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _exchanged(
    slices: Sequence[Tensor], old: Sequence[Ranges], new: Sequence[Ranges], collectives: Collectives, key: str
) -> list[Tensor]:
    """Give every rank its new slices of some parameters, whose old slices all ranks have."""
    rank, ranks = collectives.rank, range(collectives.world_size)
    with untracked():
        sent: list[list[Tensor]] = [[] for _ in ranks]
        received: list[list[Tensor]] = [[] for _ in ranks]
        result = []
        for values, before, now in zip(slices, old, new, strict=True):
            target = torch.empty(now[rank][1], dtype=values.dtype, device=values.device)
            result.append(target)
            for other in ranks:
                sent[other].append(_overlap(values, before[rank], now[other]))
                received[other].append(_overlap(target, now[rank], before[other]))
        source = torch.cat(list(chain.from_iterable(sent)))
        received_numel, sent_numel = ([sum(map(torch.numel, parts)) for parts in side] for side in (received, sent))
        arrived = torch.empty(sum(received_numel), dtype=source.dtype, device=source.device)
        what = f"'{key}' of an optimizer of an earlier fit"
        collectives.all_to_all(arrived, source, received_numel, sent_numel, what).wait()
        places = list(chain.from_iterable(received))
        for place, values in zip(places, arrived.split([place.numel() for place in places]), strict=True):
            place.copy_(values)
    return result


def _overlap(values: Tensor, held: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """The elements of a slice that another range has too, as a view.

    Args:
        values: 1-D, the slice.
        held: first element of the parameter that it holds, and how many.
        wanted: the other range, likewise.
    """
    start, stop = max(held[0], wanted[0]), min(sum(held), sum(wanted))
    return values.narrow(0, start - held[0], stop - start) if start < stop else values.narrow(0, 0, 0)
