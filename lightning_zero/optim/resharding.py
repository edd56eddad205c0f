"""Optimizer state from the shards of one engine to those of another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives
from lightning_zero.optim.owned import OwnedParameter
from lightning_zero.optim.whole import WholeState, whole_entries

__all__ = ["resharded"]

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
