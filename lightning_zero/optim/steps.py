"""The run's side of a step on masters that do not rest on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.optim.groups import Flat
from lightning_zero.storage.nvme import NvmeStore
from lightning_zero.storage.pipeline import Waitable

__all__ = ["PIECE_NUMEL", "OffloadedSteps"]

PIECE_NUMEL = 2**18
"""Elements. With masters, gradients, two tensors of state and a temporary in float32 they are 5 MiB."""


@dataclass(frozen=True, kw_only=True)
class OffloadedSteps:
    """What the optimizer side needs of a run that offloads.

    Attributes:
        unit_stepped: called with the index of every unit of the optimizer, ascending, as soon as its masters are new:
            the same sequence on every rank, also after a failure. What is in files may be up to date only when
            ``agree`` is called. Collective: every rank.
        window_stepped: for masters in files, called with the flat buffer, the first element and the new values of a
            part of its shard (1-D, master dtype). They stay valid until all that it returns was waited for.
        agree: called once a step, with what went wrong here or ``None``. Raises ``OffloadError`` on every rank if
            anything went wrong anywhere. Collective: every rank.
        check_room: for masters in files, called with the bytes that are about to be added to them, also if these are
            none. Raises ``OffloadError`` on every rank if a disk has no room for those of all ranks that share it.
            Collective: every rank.
        store: where files are; ``None`` without masters in files.
        threads: threads to compute with.
        piece_numel: elements that a step works on at a time, a multiple of 64.
    """

    unit_stepped: Callable[[int], None]
    window_stepped: Callable[[Flat, int, Tensor], Sequence[Waitable]]
    agree: Callable[[BaseException | None], None]
    check_room: Callable[[int], None]
    store: NvmeStore | None
    threads: int
    piece_numel: int = PIECE_NUMEL
