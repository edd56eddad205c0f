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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import tree_map_only, untracked
from lightning_zero.comm import Collectives
from lightning_zero.optim.state import is_like
from lightning_zero.plan.buckets import ROUND_NBYTES, deal_out, plan_rounds
from lightning_zero.shards.slice import Slice

__all__ = ["WholeParameters", "WholeState"]


@dataclass(frozen=True)
class WholeState:
    """The optimizer's state for one parameter, as every rank gets it for a checkpoint: ``slices`` of state of the
    parameter's own shape, 1-D, and ``values`` of everything else (step counters, factored statistics), the same on
    every rank."""

    slices: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class WholeParameters:
    """Hands each parameter of one optimizer to an owner rank and back, around its steps.

    Args:
        entries: the parameters, in the same order on every rank.
        writable: whether the masters may be written to at any time, so that the whole parameters are loaded before
            every step.
        round_nbytes: how many bytes one all-to-all gives to one rank, but for a parameter that is larger.

    Collective: every rank, in construction (which loads the whole parameters) and as stated.
    """

    def __init__(
        self,
        entries: Sequence[Slice],
        collectives: Collectives,
        writable: bool = False,
        *,
        round_nbytes: int = ROUND_NBYTES,
    ) -> None:
        self.places = {entry: place for place, entry in enumerate(entries)}
        self.stale = False
        """Whether something other than the step has written to the masters."""
        self._writable = writable
        self._collectives = collectives
        self._owners = deal_out([entry.spec.numel for entry in entries], collectives.world_size)
        self._device = entries[0].data.device if entries else torch.device("cpu")
        self._ranges = [entry.ranges(collectives.world_size) for entry in entries]
        sizes = [entry.spec.numel * entry.data.dtype.itemsize for entry in entries]
        self._rounds = plan_rounds(sizes, self._owners, round_nbytes)
        self._dtypes: list[torch.dtype | None] = [entry.data.dtype for entry in entries]
        with untracked():
            self._whole = [None if empty is None else nn.Parameter(empty) for empty in self._empty(self._dtypes)]
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []
        self.load()

    def owned(self, entry: Slice) -> nn.Parameter | None:
        """The whole parameter, if this rank owns it. The object stays the same."""
        return self._whole[self.places[entry]]

    def load(self) -> None:
        """Masters to whole parameters, after the masters were written from outside. Collective: every rank."""
        self._move([entry.data for entry in self.places], self._whole, self._dtypes, "masters", to_owners=True)
        self.stale = False

    def begin(self, members: Sequence[Slice]) -> None:
        """Give owners what their step needs, and hide the gradients of ``members``. Which parameters have gradients is
        the same on every rank. Collective: every rank."""
        if self.stale or self._writable:
            self.load()
        gradients = [entry.gradient for entry in self.places]
        dtypes = [None if g is None else dtype for g, dtype in zip(gradients, self._dtypes, strict=True)]
        received = self._empty(dtypes)
        self._move(gradients, received, dtypes, "gradients", to_owners=True)
        for entry, whole, gradient in zip(self.places, self._whole, received, strict=True):
            if whole is not None:
                whole.grad = gradient
                vars(whole).update(vars(entry.user))  # marks that user code has left, as a factor
        self._hidden = [(shard, shard.grad) for entry in members if (shard := entry.parameter) is not None]
        for shard, _ in self._hidden:
            shard.grad = None

    def publish(self) -> None:
        """Whole parameters to all ranks' masters, after an optimizer step that used up the gradients. Collective: every
        rank."""
        shards = [entry.data for entry in self.places]
        self._move(shards, self._whole, self._dtypes, "updated parameters", to_owners=False)
        for whole in self._whole:
            if whole is not None:
                whole.grad = None

    def leave(self) -> None:
        """Show the gradients again. May be called again."""
        for shard, gradient in self._hidden:
            shard.grad = gradient
        self._hidden = []

    # ------------------------------------------------------------------- state

    def to_slices(self, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Give every rank its slices, 1-D, of one tensor for each entry, of its shape, at its owner. Where a dtype is
        ``None`` the entry is left out; dtypes are the same on every rank. Collective: every rank."""
        with untracked():
            slices = [
                None if dtype is None else torch.empty(entry.data.numel(), dtype=dtype, device=self._device)
                for entry, dtype in zip(self.places, dtypes, strict=True)
            ]
        self._move(slices, tensors, dtypes, "optimizer state", to_owners=False)
        return slices

    def share(self, values: Sequence[Any]) -> list[Any]:
        """Give every rank the owner's value of each entry: small things, tensors (which arrive on the CPU) included.
        Collective: every rank."""
        if not self.places:
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
        return [shared[index] for index in range(len(self.places))]

    def state_to_slices(self, states: Sequence[Mapping[str, Any] | None]) -> list[WholeState]:
        """The optimizer's state as every rank saves it, of ``optimizer.state[whole(i)]`` at each entry's owner.
        Collective: every rank."""
        sliced: list[dict[str, Tensor]] = []
        described = []
        for entry, state in zip(self.places, states, strict=True):
            # Not of a scalar: that may be a step counter.
            like = {key for key, value in (state or {}).items() if is_like("step", value, entry.spec.shape)}
            parts = {key: value for key, value in (state or {}).items() if key in like}
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
                torch.empty(entry.spec.shape, dtype=dtype, device=self._device)
                if dtype is not None and owner == self._collectives.rank
                else None
                for entry, dtype, owner in zip(self.places, dtypes, self._owners, strict=True)
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
        rank, ranks = self._collectives.rank, range(self._collectives.world_size)
        for turn in self._rounds:
            for dtype in sorted({dtype for i in turn if (dtype := dtypes[i]) is not None}, key=str):
                here: list[list[Tensor]] = [[] for _ in ranks]  # per owner what this rank holds for it
                there: list[list[Tensor]] = [[] for _ in ranks]  # per holder its part of what this rank owns
                for index in [index for index in turn if dtypes[index] == dtype]:
                    here[self._owners[index]].append(_flat(slices, index))
                    if self._owners[index] == rank:
                        full = _flat(whole, index)
                        for parts, (start, numel) in zip(there, self._ranges[index], strict=True):
                            parts.append(full.narrow(0, start, numel))
                self._exchange(*((here, there) if to_owners else (there, here)), dtype, what)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], dtype: torch.dtype, what: str
    ) -> None:
        """One all-to-all: what is ``sent`` to each rank, 1-D, goes where that rank has room for it in ``received``."""
        with untracked():
            none = torch.empty(0, dtype=dtype, device=self._device)
            source = torch.cat([none, *(view.to(dtype) for views in sent for view in views)])
            sent_numel, received_numel = ([sum(map(torch.numel, views)) for views in side] for side in (sent, received))
            output = torch.empty(sum(received_numel), dtype=dtype, device=self._device)
            what = f"{what} of whole-matrix optimizers"
            self._collectives.all_to_all(output, source, received_numel, sent_numel, what).wait()
            places = [place for views in received for place in views]
            for place, values in zip(places, output.split_with_sizes(list(map(torch.numel, places))), strict=True):
                place.copy_(values)


def _flat(tensors: Sequence[Tensor | None], index: int) -> Tensor:
    tensor = tensors[index]
    if tensor is None:
        raise RuntimeError(
            f"This rank has no tensor for entry {index} of a transfer that every rank agreed to make. Which "
            "parameters have gradients or state must not depend on the rank."
        )
    return tensor.detach().reshape(-1)


def _on_device(values: Any, device: torch.device) -> Any:
    """Copies on ``device``; single numbers stay where they are, as torch's optimizers want their step counters."""
    return tree_map_only(Tensor, lambda t: t.detach().clone().to(device if t.dim() else t.device), values)
