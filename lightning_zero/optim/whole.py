"""Whole parameters at one owner rank, for optimizers that are not elementwise (Muon, Adafactor, ones we do not know).

[Note: owners]
The layout stays as it is: every rank keeps a 1-D slice of every master. Each parameter has one owner, where a
full-shape ``nn.Parameter`` and the optimizer's state for it live. A step moves gradient slices to the owners, runs the
user's optimizer there, and moves the updated values back, each way by uneven all-to-alls. A rank sends and receives
about ``2 N / W`` elements per step, next to the ``3 N (W - 1) / W`` of the step itself. Parameters are dealt out over
the whole model, largest first to the least loaded rank, so that owners differ by at most one parameter's elements; with
fewer parameters than ranks some ranks own none.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import tree_map_only, untracked
from lightning_zero.comm import Collectives
from lightning_zero.plan.buckets import ROUND_NBYTES, Piece, deal_out, plan_rounds
from lightning_zero.shards.slice import Slice

__all__ = ["OwnedWhole", "WholeEntry", "WholeParameters", "WholeState", "resharded", "whole_entries"]


@dataclass(frozen=True, eq=False)
class WholeEntry:
    """One parameter of a full ``shape``, as all ranks together hold it. ``shard``, 1-D, is this rank's slice of the
    master; ``ranges`` say for every rank which element of the flattened parameter it holds first, and how many it
    holds."""

    shape: tuple[int, ...]
    shard: Tensor
    ranges: Sequence[tuple[int, int]]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the master, hence of the whole parameter and of its gradient."""
        return self.shard.dtype


def whole_entries(entries: Sequence[Slice], world_size: int) -> list[WholeEntry]:
    """What ``WholeParameters`` has to know of each of these parameters."""
    return [WholeEntry(tuple(e.spec.shape), e.data, e.ranges(world_size)) for e in entries]


@dataclass(frozen=True)
class WholeState:
    """The optimizer's state for one parameter, as every rank gets it for a checkpoint: ``slices`` of state of the
    parameter's own shape, 1-D, and ``values`` of everything else (step counters, factored statistics), the same on
    every rank."""

    slices: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class WholeParameters:
    """Hands each parameter to an owner rank and back; one all-to-all takes at most ``round_nbytes`` bytes from, or
    gives them to, one rank. Entries are in the same order on every rank, and equal but for ``shard``.

    Collective: every rank, in construction (which loads the whole parameters) and as stated.
    """

    def __init__(
        self, entries: Sequence[WholeEntry], collectives: Collectives, *, round_nbytes: int = ROUND_NBYTES
    ) -> None:
        self._entries = tuple(entries)
        self._collectives = collectives
        self._owners = deal_out([entry.numel for entry in self._entries], collectives.world_size)
        self._device = entries[0].shard.device if entries else torch.device("cpu")
        self._rounds = plan_rounds(self._entries, self._owners, collectives.rank, round_nbytes)
        self._dtypes: list[torch.dtype | None] = [entry.dtype for entry in self._entries]
        with untracked():
            self._whole = [None if empty is None else nn.Parameter(empty) for empty in self._empty(self._dtypes)]
        self.load()

    def whole(self, index: int) -> nn.Parameter | None:
        """The full-shape parameter at its owner, ``None`` on every other rank. The object stays the same."""
        return self._whole[index]

    def load(self) -> None:
        """Masters to whole parameters, after the masters were written from outside. Collective: every rank."""
        self._move([entry.shard for entry in self._entries], self._whole, self._dtypes, "masters", to_owners=True)

    def publish(self) -> None:
        """Whole parameters to all ranks' masters, after an optimizer step that used up the gradients. Collective: every
        rank."""
        shards = [entry.shard for entry in self._entries]
        self._move(shards, self._whole, self._dtypes, "updated parameters", to_owners=False)
        for whole in self._whole:
            if whole is not None:
                whole.grad = None

    def collect_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Set ``.grad`` of the whole parameters from this rank's 1-D slices; ``None`` where no rank has a gradient: the
        same entries on every rank, also on ranks that hold nothing of them. Collective: every rank.
        """
        dtypes = [None if g is None else entry.dtype for g, entry in zip(gradients, self._entries, strict=True)]
        received = self._empty(dtypes)
        self._move(gradients, received, dtypes, "gradients", to_owners=True)
        for whole, gradient in zip(self._whole, received, strict=True):
            if whole is not None:
                whole.grad = gradient

    # ------------------------------------------------------------------- state

    def to_slices(self, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Give every rank its slices, 1-D, of one tensor for each entry, of its shape, at its owner. Where a dtype is
        ``None`` the entry is left out; dtypes are the same on every rank. Collective: every rank."""
        with untracked():
            slices = [
                None if dtype is None else torch.empty(entry.shard.numel(), dtype=dtype, device=entry.shard.device)
                for entry, dtype in zip(self._entries, dtypes, strict=True)
            ]
        self._move(slices, tensors, dtypes, "optimizer state", to_owners=False)
        return slices

    def share(self, values: Sequence[Any]) -> list[Any]:
        """Give every rank the owner's value of each entry: small things, tensors (which arrive on the CPU) included.
        Collective: every rank."""
        if not self._entries:
            return []
        rank, world_size = self._collectives.rank, self._collectives.world_size
        mine = {index: values[index] for index, owner in enumerate(self._owners) if owner == rank}
        buffer = io.BytesIO()
        torch.save(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), mine), buffer)
        with untracked():
            blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(self._device)
            size = torch.tensor([blob.numel()], device=self._device)
            sizes = torch.empty(world_size, dtype=size.dtype, device=self._device)
            self._exchange([[size]] * world_size, [[one] for one in sizes.split(1)], size.dtype, "optimizer state")
            blobs = torch.empty(int(sizes.sum()), dtype=blob.dtype, device=self._device).split(sizes.tolist())
            self._exchange([[blob]] * world_size, [[one] for one in blobs], blob.dtype, "optimizer state")
        shared: dict[int, Any] = {}
        for part in blobs:
            shared |= torch.load(io.BytesIO(part.cpu().numpy().tobytes()), weights_only=False)
        return [shared[index] for index in range(len(self._entries))]

    def state_to_slices(self, states: Sequence[Mapping[str, Any] | None]) -> list[WholeState]:
        """The optimizer's state as every rank saves it, of ``optimizer.state[whole(i)]`` at each entry's owner.
        Collective: every rank."""
        sliced: list[dict[str, Tensor]] = []
        described = []
        for entry, state in zip(self._entries, states, strict=True):
            parts = {key: value for key, value in (state or {}).items() if _is_like(value, entry)}
            values = {key: value for key, value in (state or {}).items() if key not in parts}
            sliced.append(parts)
            described.append(({key: part.dtype for key, part in parts.items()}, values))
        shared = self.share(described)
        result = [WholeState(values=values) for _, values in shared]
        for key in sorted({key for dtypes, _ in shared for key in dtypes}):
            found = self.to_slices([parts.get(key) for parts in sliced], [dtypes.get(key) for dtypes, _ in shared])
            for state_of, part in zip(result, found, strict=True):
                if part is not None:
                    state_of.slices[key] = part
        return result

    def state_from_slices(self, states: Sequence[WholeState]) -> list[dict[str, Any] | None]:
        """The way back, for ``optimizer.state[whole(i)]``: ``None`` where this rank does not own the entry. The keys
        and dtypes of each entry are the same on every rank. Collective: every rank."""
        result: list[dict[str, Any] | None] = []
        for whole, state in zip(self._whole, states, strict=True):
            result.append(None if whole is None else _on_device(state.values, whole.device))
        for key in sorted({key for state in states for key in state.slices}):
            slices = [state.slices.get(key) for state in states]
            dtypes = [None if part is None else part.dtype for part in slices]
            found = self._empty(dtypes)
            self._move(slices, found, dtypes, "optimizer state", to_owners=True)
            for values, tensor in zip(result, found, strict=True):
                if values is not None and tensor is not None:
                    values[key] = tensor
        return result

    # ---------------------------------------------------------------- transfer

    def _empty(self, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Memory for whole tensors at their owners, ``None`` where there is no dtype."""
        with untracked():
            return [
                torch.empty(entry.shape, dtype=dtype, device=entry.shard.device)
                if dtype is not None and owner == self._collectives.rank
                else None
                for entry, dtype, owner in zip(self._entries, dtypes, self._owners, strict=True)
            ]

    def _move(
        self,
        slices: Sequence[Tensor | None],
        whole: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
        what: str,
        to_owners: bool,
    ) -> None:
        """From all ranks' slices to whole tensors at their owners, or back: in each round one all-to-all per dtype of
        the entries that take part. Every rank decides alike which those are."""
        starts = [entry.ranges[self._collectives.rank][0] for entry in self._entries]
        flat = [None if tensor is None else tensor.detach().reshape(-1) for tensor in whole]
        for turn in self._rounds:
            for dtype in sorted({dtype for i in turn.entries if (dtype := dtypes[i]) is not None}, key=str):
                held, owned = (
                    [[part for part in parts if dtypes[part.entry] == dtype] for parts in by_rank]
                    for by_rank in (turn.held, turn.owned)
                )
                here = [[_view(slices, part, starts[part.entry]) for part in parts] for parts in held]
                there = [[_view(flat, part, 0) for part in parts] for parts in owned]
                self._exchange(*((here, there) if to_owners else (there, here)), dtype, what)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], dtype: torch.dtype, what: str
    ) -> None:
        what = f"{what} of whole-matrix optimizers"
        _exchange(sent, received, dtype, self._device, self._collectives, what)


def _view(tensors: Sequence[Tensor | None], piece: Piece, start: int) -> Tensor:
    """A piece of a parameter, of a 1-D tensor that begins at its element ``start``."""
    tensor = tensors[piece.entry]
    if tensor is None:
        raise RuntimeError(
            f"This rank has no tensor for entry {piece.entry} of a transfer that every rank agreed to make. Which "
            "parameters have gradients or state must not depend on the rank."
        )
    return tensor.detach().narrow(0, piece.start - start, piece.numel)


def _exchange(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives,
    what: str,
) -> None:
    """One all-to-all: what is ``sent`` to each rank, 1-D, is written to what that rank has for it in ``received``."""
    with untracked():
        source = torch.cat(
            [torch.empty(0, dtype=dtype, device=device), *(v.to(dtype) for views in sent for v in views)]
        )
        sent_numel, received_numel = ([sum(map(torch.numel, views)) for views in side] for side in (sent, received))
        output = torch.empty(sum(received_numel), dtype=dtype, device=device)
        collectives.all_to_all(output, source, received_numel, sent_numel, what).wait()
        places = [place for views in received for place in views]
        for place, values in zip(places, output.split_with_sizes(list(map(torch.numel, places))), strict=True):
            place.copy_(values)


def _is_like(value: Any, entry: WholeEntry) -> bool:
    """Whether a state value covers the parameter's elements. Not of a scalar: that may be a step counter."""
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == entry.shape


def _on_device(values: Any, device: torch.device) -> Any:
    """Copies on ``device``; single numbers stay where they are, as torch's optimizers want their step counters."""
    return tree_map_only(Tensor, lambda t: t.detach().clone().to(device if t.dim() else t.device), values)


class OwnedWhole:
    """Around the steps of one optimizer: parameters whole at their owners, and its shard parameters without gradients.

    With ``writable`` the masters may be written to at any time, so the whole parameters are loaded before every step.
    """

    def __init__(self, entries: Sequence[Slice], collectives: Collectives, writable: bool) -> None:
        self.dealt = {entry: place for place, entry in enumerate(entries)}
        """What is whole at owners, and its place there."""
        self.parameters = WholeParameters(whole_entries(entries, collectives.world_size), collectives)
        self.stale = False
        """Whether something other than the step has written to the masters."""
        self._writable = writable
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []

    def owned(self, entry: Slice) -> nn.Parameter | None:
        """The whole parameter, if this rank owns it."""
        return self.parameters.whole(self.dealt[entry])

    def load(self) -> None:
        """Masters to whole parameters. Collective: every rank."""
        self.parameters.load()
        self.stale = False

    def begin(self, members: Sequence[Slice]) -> None:
        """Give owners what their step needs, and hide the gradients of ``members``. Collective: every rank."""
        if self.stale or self._writable:
            self.load()
        shards = [entry.parameter for entry in self.dealt]
        self.parameters.collect_gradients([None if shard is None else shard.grad for shard in shards])
        for entry in self.dealt:
            if (whole := self.owned(entry)) is not None:
                vars(whole).update(vars(entry.user))  # marks that user code has left, as a factor
        self._hidden = [(shard, shard.grad) for entry in members if (shard := entry.parameter) is not None]
        for shard, _ in self._hidden:
            shard.grad = None

    def leave(self) -> None:
        """Show the gradients again. May be called again."""
        for shard, gradient in self._hidden:
            shard.grad = gradient
        self._hidden = []


# ---------------------------------------------------------------------------------------------------------------------
# State that was cut for one engine, for another


def resharded(
    state: Sequence[WholeState],
    pairs: Sequence[tuple[Slice, Slice]],
    collectives: Collectives,
    device: torch.device,
) -> list[WholeState]:
    """State of each parameter, cut as its old entry is, cut anew as its new entry is; ``pairs`` are old and new.

    ``state`` is emptied, one kind after the other, so that only one kind is held twice. The wire begins and ends on
    ``device``, wherever state rests. Collective: every rank, with the same parameters and kinds of state.
    """
    rank, world_size = collectives.rank, collectives.world_size
    old = [entry.ranges for entry in whole_entries([before for before, _ in pairs], world_size)]
    new = [entry.ranges for entry in whole_entries([now for _, now in pairs], world_size)]
    cut = []
    for (_, entry), one in zip(pairs, state, strict=True):
        values = {
            key: value.to(entry.device) if isinstance(value, Tensor) and entry.flat.rest.offloaded else value
            for key, value in one.values.items()
        }
        cut.append(WholeState(values=values))
    kinds = {(key, value.dtype) for one in state for key, value in one.slices.items()}
    for key, dtype in sorted(kinds, key=str):
        chosen = [i for i, one in enumerate(state) if key in one.slices and one.slices[key].dtype is dtype]
        before = [state[i].slices.pop(key).to(device) for i in chosen]
        with untracked():
            now = [torch.empty(new[i][rank][1], dtype=dtype, device=device) for i in chosen]
        sent, received = (
            [
                [_overlap(values, mine[i][rank], theirs[i][other]) for i, values in zip(chosen, tensors, strict=True)]
                for other in range(world_size)
            ]
            for tensors, mine, theirs in ((before, old, new), (now, new, old))
        )
        _exchange(sent, received, dtype, device, collectives, f"'{key}' of an optimizer of an earlier fit")
        for i, target in zip(chosen, now, strict=True):
            cut[i].slices[key] = target.to(pairs[i][1].device)
    return cut


def _overlap(values: Tensor, held: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """The elements of a slice that another range has too, as a view. Ranges are a first element and how many."""
    start, stop = max(held[0], wanted[0]), min(sum(held), sum(wanted))
    return values.narrow(0, start - held[0], stop - start) if start < stop else values.narrow(0, 0, 0)
