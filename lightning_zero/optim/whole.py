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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.plan.buckets import ROUND_NBYTES, Piece, deal_out, plan_rounds

__all__ = ["WholeEntry", "WholeParameters", "WholeState", "whole_entries"]


@dataclass(frozen=True)
class WholeEntry:
    """One parameter, as all ranks together hold it.

    Args:
        name: for messages.
        shape: full shape.
        dtype: of the master, hence of the whole parameter and of its gradient.
        shard: 1-D, this rank's slice of the master. Read by ``load`` and written by ``publish``.
        ranges: for every rank the first element of the flattened parameter it holds, and how many; the same on all
            ranks.

    Raises:
        ValueError: if the ranges do not tile the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Tensor
    ranges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        end = 0
        for start, numel in sorted(part for part in self.ranges if part[1]):
            if start != end:
                break
            end += numel
        if end != self.numel:
            raise ValueError(
                f"The ranks' ranges of '{self.name}' do not tile its {self.numel} elements: {self.ranges}."
            )

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


def whole_entries(entries: Sequence[OwnedParameter], world_size: int) -> list[WholeEntry]:
    """What ``WholeParameters`` has to know of each of these parameters."""
    slices = {id(entry.layout): [entry.layout.slices(rank) for rank in range(world_size)] for entry in entries}
    return [
        WholeEntry(
            name=entry.shard.spec.name,
            shape=tuple(entry.shard.spec.shape),
            dtype=entry.shard.spec.dtype,
            shard=entry.shard.data,
            ranges=[
                (ranks[entry.position].parameter_start, ranks[entry.position].numel)
                for ranks in slices[id(entry.layout)]
            ],
        )
        for entry in entries
    ]


@dataclass(frozen=True)
class WholeState:
    """The optimizer's state for one parameter, as every rank gets it for a checkpoint.

    Args:
        slices: state of the parameter's own shape: 1-D, this rank's slice of it.
        values: everything else (step counters, factored statistics): the whole value, the same on every rank.
    """

    slices: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class WholeParameters:
    """Hands each parameter to an owner rank and back.

    Args:
        entries: in the same order on every rank, equal but for ``shard``.
        collectives: the wire. Only ``rank``, ``world_size`` and ``all_to_all`` are used.
        round_nbytes: bytes of parameters that one all-to-all takes from, or gives to, one rank at most.

    Raises:
        ValueError: if an entry does not fit the world or this rank's shard.

    Collective: every rank, in construction (which loads the whole parameters) and as stated.
    """

    def __init__(
        self, entries: Sequence[WholeEntry], collectives: Collectives, *, round_nbytes: int = ROUND_NBYTES
    ) -> None:
        self._entries = tuple(entries)
        self._collectives = collectives
        self._check()
        self._owners = deal_out([entry.numel for entry in self._entries], collectives.world_size)
        self._device = entries[0].shard.device if entries else torch.device("cpu")
        self._starts = [entry.ranges[collectives.rank][0] for entry in self._entries]
        self._zeros = [0] * len(self._entries)
        self._rounds = plan_rounds(self._entries, self._owners, collectives.rank, round_nbytes)
        self._whole: list[nn.Parameter | None] = []
        with untracked():
            for index, entry in enumerate(self._entries):
                mine = self._owners[index] == collectives.rank
                empty = torch.empty(entry.shape if mine else 0, dtype=entry.dtype, device=entry.shard.device)
                self._whole.append(nn.Parameter(empty) if mine else None)
        self.load()

    def owner(self, index: int) -> int:
        """The rank that owns entry ``index``; the same answer on every rank."""
        return self._owners[index]

    def whole(self, index: int) -> nn.Parameter | None:
        """The full-shape parameter at its owner, ``None`` on every other rank. The object stays the same."""
        return self._whole[index]

    def load(self) -> None:
        """Masters to whole parameters, after the masters were written from outside. Collective: every rank."""
        shards = [entry.shard for entry in self._entries]
        self._to_owners(shards, [_flat(whole) for whole in self._whole], self._dtypes, "masters")

    def publish(self) -> None:
        """Whole parameters to all ranks' masters, after an optimizer step. Collective: every rank."""
        shards = [entry.shard for entry in self._entries]
        self._to_holders([_flat(whole) for whole in self._whole], shards, self._dtypes, "updated parameters")

    def collect_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Set ``.grad`` of the whole parameters from this rank's 1-D slices; ``None`` where no rank has a gradient: the
        same entries on every rank, also on ranks that hold nothing of them. Collective: every rank.
        """
        dtypes = [None if g is None else entry.dtype for g, entry in zip(gradients, self._entries, strict=True)]
        received = self._collect(gradients, dtypes, "gradients")
        for whole, gradient in zip(self._whole, received, strict=True):
            if whole is not None:
                whole.grad = gradient

    def release_gradients(self) -> None:
        """Free the whole gradients. Local."""
        for whole in self._whole:
            if whole is not None:
                whole.grad = None

    # ------------------------------------------------------------------- state

    def to_slices(self, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Give every rank its slices, 1-D, of tensors that live at the owners. Collective: every rank.

        Args:
            tensors: per entry, of the entry's shape, at its owner; ignored elsewhere.
            dtypes: theirs, the same on every rank; ``None`` leaves an entry out.
        """
        with untracked():
            slices = [
                None if dtype is None else torch.empty(entry.shard.numel(), dtype=dtype, device=entry.shard.device)
                for entry, dtype in zip(self._entries, dtypes, strict=True)
            ]
        self._to_holders([_flat(tensor) for tensor in tensors], slices, dtypes, "optimizer state")
        return slices

    def from_slices(self, slices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The way back: per entry a tensor of its shape at the owner, ``None`` elsewhere and where ``slices`` has none.

        That has to be the same entries on every rank, with equal dtypes. Collective: every rank.
        """
        return self._collect(slices, [None if part is None else part.dtype for part in slices], "optimizer state")

    def share(self, values: Sequence[Any]) -> list[Any]:
        """Give every rank the owner's value of each entry: small things, tensors (which arrive on the CPU) included.

        Collective: every rank.
        """
        if not self._entries:
            return []
        rank, world_size = self._collectives.rank, self._collectives.world_size
        mine = {index: values[index] for index, owner in enumerate(self._owners) if owner == rank}
        buffer = io.BytesIO()
        torch.save(_on_cpu(mine), buffer)
        with untracked():
            blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(self._device)
            size = torch.full((world_size,), blob.numel(), device=self._device)
            sizes = self._exchange(size, [1] * world_size, [1] * world_size)
            lengths = [int(size) for size in sizes.tolist()]
            blobs = self._exchange(blob.repeat(world_size), lengths, [blob.numel()] * world_size)
        shared: dict[int, Any] = {}
        for part in blobs.split_with_sizes(lengths):
            shared |= torch.load(io.BytesIO(part.cpu().numpy().tobytes()), weights_only=False)
        return [shared[index] for index in range(len(self._entries))]

    def state_to_slices(self, states: Sequence[Mapping[str, Any] | None]) -> list[WholeState]:
        """The optimizer's state as every rank saves it, of ``optimizer.state[whole(i)]`` at each entry's owner.

        Collective: every rank.
        """
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
        """The way back, for ``optimizer.state[whole(i)]``: ``None`` where this rank does not own the entry.

        The keys and dtypes of each entry are the same on every rank. Collective: every rank.
        """
        result: list[dict[str, Any] | None] = []
        for whole, state in zip(self._whole, states, strict=True):
            values = None if whole is None else _on_device(state.values, whole.device)
            result.append(values)
        for key in sorted({key for state in states for key in state.slices}):
            found = self.from_slices([state.slices.get(key) for state in states])
            for values, tensor in zip(result, found, strict=True):
                if values is not None and tensor is not None:
                    values[key] = tensor
        return result

    # ---------------------------------------------------------------- transfer

    @property
    def _dtypes(self) -> list[torch.dtype | None]:
        return [entry.dtype for entry in self._entries]

    def _collect(
        self, slices: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], what: str
    ) -> list[Tensor | None]:
        whole: list[Tensor | None] = []
        with untracked():
            for index, (entry, dtype) in enumerate(zip(self._entries, dtypes, strict=True)):
                mine = dtype is not None and self._owners[index] == self._collectives.rank
                whole.append(torch.empty(entry.shape, dtype=dtype, device=entry.shard.device) if mine else None)
        self._to_owners(slices, [_flat(tensor) for tensor in whole], dtypes, what)
        return whole

    def _to_owners(
        self,
        slices: Sequence[Tensor | None],
        whole: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
        what: str,
    ) -> None:
        source, target = _Side(slices, self._starts), _Side(whole, self._zeros)
        for turn in self._rounds:
            self._transfer(turn.entries, (source, turn.held), (target, turn.owned), dtypes, what)

    def _to_holders(
        self,
        whole: Sequence[Tensor | None],
        slices: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
        what: str,
    ) -> None:
        source, target = _Side(whole, self._zeros), _Side(slices, self._starts)
        for turn in self._rounds:
            self._transfer(turn.entries, (source, turn.owned), (target, turn.held), dtypes, what)

    def _transfer(
        self,
        entries: set[int],
        sending: tuple[_Side, Sequence[Sequence[Piece]]],
        receiving: tuple[_Side, Sequence[Sequence[Piece]]],
        dtypes: Sequence[torch.dtype | None],
        what: str,
    ) -> None:
        """One all-to-all per dtype of the entries that take part; every rank decides alike which those are."""
        for dtype in sorted({dtype for i in entries if (dtype := dtypes[i]) is not None}, key=str):
            source, target = (
                [(side, [part for part in parts if dtypes[part.entry] == dtype]) for parts in by_rank]
                for side, by_rank in (sending, receiving)
            )
            with untracked():
                views = [side.view(part).to(dtype) for side, parts in source for part in parts]
                output = self._exchange(
                    torch.cat(views) if views else torch.empty(0, dtype=dtype, device=self._device),
                    [sum(part.numel for part in parts) for _, parts in target],
                    [sum(part.numel for part in parts) for _, parts in source],
                    what,
                )
                arrived = [(side, part) for side, parts in target for part in parts]
                lengths = [part.numel for _, part in arrived]
                for (side, part), values in zip(arrived, output.split_with_sizes(lengths), strict=True):
                    side.view(part).copy_(values)

    def _exchange(self, values: Tensor, receive: list[int], send: list[int], what: str = "optimizer state") -> Tensor:
        output = torch.empty(sum(receive), dtype=values.dtype, device=values.device)
        self._collectives.all_to_all(output, values, receive, send, f"{what} of whole-matrix optimizers").wait()
        return output

    def _check(self) -> None:
        rank, world_size = self._collectives.rank, self._collectives.world_size
        for entry in self._entries:
            if len(entry.ranges) != world_size:
                raise ValueError(
                    f"'{entry.name}' has ranges for {len(entry.ranges)} ranks, the world has {world_size}."
                )
            if (
                entry.shard.dim() != 1
                or entry.shard.numel() != entry.ranges[rank][1]
                or entry.shard.dtype != entry.dtype
            ):
                raise ValueError(
                    f"Rank {rank}'s slice of '{entry.name}' must be 1-D with {entry.ranges[rank][1]} elements of "
                    f"{entry.dtype}, got shape {tuple(entry.shard.shape)} of {entry.shard.dtype}."
                )


@dataclass(frozen=True)
class _Side:
    """One end of a transfer: per entry a 1-D tensor that begins at element ``starts`` of the flattened parameter."""

    tensors: Sequence[Tensor | None]
    starts: Sequence[int]

    def view(self, piece: Piece) -> Tensor:
        tensor = self.tensors[piece.entry]
        if tensor is None:
            raise RuntimeError(
                f"This rank has no tensor for entry {piece.entry} of a transfer that every rank agreed to make. Which "
                "parameters have gradients or state must not depend on the rank."
            )
        return tensor.detach().narrow(0, piece.start - self.starts[piece.entry], piece.numel)


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().reshape(-1)


def _is_like(value: Any, entry: WholeEntry) -> bool:
    """Whether a state value covers the parameter's elements. Not of a scalar: that may be a step counter."""
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == entry.shape


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _on_cpu(value: Any) -> Any:
    return _map_tensors(lambda tensor: tensor.detach().cpu().clone(), value)


def _on_device(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on ``device``; single numbers stay where they are, as torch's optimizers want their step counters."""
    return {
        key: _map_tensors(lambda tensor: tensor.detach().clone().to(device if tensor.dim() else tensor.device), value)
        for key, value in values.items()
    }
