"""Weights and gradients in fewer bytes, on their way between hosts.

[Note: what is rounded, and where]
An integer stands for an element; 64 of them in a row share a scale, their largest magnitude by the largest integer. So
an element is off by half a scale at most. Every layout begins each parameter at a multiple of 64, and a rank rounds for
itself what it rounds for others: so numbers depend on which ranks share a host, and on nothing else of how a model is
cut. (Ranks of hosts with different numbers of them, which exchange directly, count as hosts each.) Where one element of
a block is not finite, none is. Masters, optimizer state, checkpoints and ``full_parameters`` are never rounded. What
user code reads of a weight in a step is what it computes with; writing there raises, as with weights in 16 bits.

[Note: error feedback]
What rounding takes from a gradient is kept by the rank that rounds it, and added to the next gradient of the same
elements before that is rounded: so the sum of all that was exchanged is the exact sum but for what is kept now. It is
kept by bucket, whose elements are always the same ones of the same parameters, and begins at zero with every layout.
Nothing is added to blocks in which a host has no gradient, as those of parameters that a step does not use, and nothing
that is not finite is kept: both keep what they had.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.comm.collectives import Content, Pending
from lightning_zero.comm.control import ControlGroup
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.native import GlooCollectives, NativeCollectives, average, divide
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Placement
from lightning_zero.config import RoundedFormat as Format
from lightning_zero.extensions.compression.codes import BLOCK, compress, decompress, format_nbytes

__all__ = ["CompressedCollectives", "CompressedOverGloo", "Rounded"]

_LAYOUT = "layout"  # what residuals of a checkpoint belong to


class Rounded(NamedTuple):
    """What is rounded."""

    gathers: Format | None  # to what, of what has a content; ``None``: nothing
    reductions: Format | None  # likewise, of what is reduced
    fed: Collection[str] = ()  # of what errors are fed back: the "sum" that is reduced, the "average" that is gathered


class Residuals:
    """What error feedback keeps from step to step. It belongs to the ranks of a host and to parts of a layout."""

    def __init__(self, control: ControlGroup, device: torch.device, fed: bool) -> None:
        self._control, self._device, self._fed = control, device, fed
        self.residuals: dict[str, Tensor] = {}
        """By reduction, 1-D in float32: what rounding has taken from it so far, of what this rank rounds."""

    def clear(self) -> None:
        """Forget an earlier training."""
        self.residuals.clear()

    def save(self, layout: str) -> dict[str, Any]:
        """For each reduction a row of each rank."""
        rank, ranks = self._control.rank, self._control.world_size
        found = self.residuals.items()
        rows = {name: FlatShard(row, (ranks, row.numel()), rank * row.numel()) for name, row in found}
        return {_LAYOUT: layout, **rows} if rows else {}

    def load(self, saved: Mapping[str, Any], layout: str) -> str:
        """Take over what ``save`` has given. Returns why nothing of it fits, if so. Collective: every rank."""
        self.residuals.clear()
        if not self._fed:
            return "nothing is fed back in this run" if saved else ""
        if not saved:
            return "it has nothing of that"
        if saved.get(_LAYOUT) != layout:
            return "it is of other ranks, or of another layout"

        def read() -> None:
            for name, rows in saved.items():
                if name != _LAYOUT:
                    row = torch.empty(rows.shape[1], dtype=torch.float32, device=self._device)
                    self.residuals[name] = row
                    read_slices([(rows, self._control.rank * row.numel(), row)])

        self._control.together("load what error feedback keeps", read)
        return ""


class CompressedCollectives(NativeCollectives):
    """Collectives in fewer bytes where these are weights to compute with, or gradients."""

    block = BLOCK

    def __init__(self, groups: Groups, streams: Streams, rounded: Rounded) -> None:
        super().__init__(groups, streams)
        self._rounded = rounded
        self.state: Residuals = Residuals(groups.control, self.device, bool(rounded.fed))
        self.alters = "rounded weights (compression)" if rounded.gathers is not None else ""

    def placed(self, placement: Placement) -> Placement:
        divided = self.groups.control.world_size // self.world_size  # by ranks that have summed up before
        return replace(placement, feedback=divided) if self._rounded.fed else placement

    @property
    def buffers(self) -> Sequence[Tensor]:
        return *super().buffers, *self.state.residuals.values()

    def _all_gather(
        self, buffer: Tensor, what: str, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        kind = self._rounded.gathers if content is not None else None
        if kind is None or content is None or not self._fits(buffer, kind):
            return super()._all_gather(buffer, what, source, version, content)
        rows = buffer.view(self.world_size, -1)
        with untracked(), self.streams.gathering():
            if source is not None:
                rows[self.rank].copy_(source)
            codes = self._codes(kind, rows)
            compress(kind, rows[self.rank], codes[self.rank], self._residual_of("average", content[0], rows[self.rank]))
            gathered = super()._all_gather(codes.view(-1), what, None, None, content)
            return self.followed(gathered, partial(decompress, kind, codes, rows), (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        sent = self._reduce_rounded(bucket, shard, what, key)
        return super()._reduce_scatter(bucket, shard, what, patience, key) if sent is None else sent

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        sent = self._reduce_rounded(bucket, shard, what, key)
        return super().reduce_through(received, bucket, shard, what, key) if sent is None else sent

    def _reduce_rounded(self, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending | None:
        """Send every rank its range in codes, and add up what comes, which takes the place of what was sent."""
        kind = self._rounded.reductions
        if kind is None or not self._fits(bucket, kind):
            return None
        rows, divisor = bucket.view(self.world_size, -1), self.groups.divisor
        with untracked(), self.streams.reducing():
            if bucket.dtype == torch.float16:  # as its sum may be infinite
                divide(bucket, divisor)
                divisor = 1
            codes = self._codes(kind, rows)
            others, residual = torch.empty_like(codes), self._residual_of("sum", key, bucket)
            compress(kind, rows, codes, residual)

            def add_up() -> None:
                decompress(kind, others, rows)
                average(shard, rows.unbind(0), divisor, spare=True)

            sent = self._all_to_all(others.view(-1), codes.view(-1), [], [], what)
            return self.followed(sent, add_up, (bucket, shard))

    def _codes(self, kind: Format, rows: Tensor) -> Tensor:
        size = format_nbytes(kind, rows.shape[1])
        return torch.empty(len(rows), size, dtype=torch.uint8, device=rows.device)

    def _residual_of(self, which: str, key: Hashable, rounded: Tensor) -> Tensor | None:
        """What was lost of such values before; ``None``: it is not fed back."""
        if which not in self._rounded.fed or key is None:
            return None
        residuals = self.state.residuals
        if (name := f"{which} {key}") not in residuals:
            with torch.inference_mode(False):
                residuals[name] = torch.zeros(rounded.numel(), dtype=torch.float32, device=rounded.device)
        return residuals[name]

    def _fits(self, buffer: Tensor, kind: Format) -> bool:
        """Whether there are whole blocks of what a format makes smaller."""
        narrow = kind == "bfloat16" and buffer.itemsize == 2
        return buffer.dtype.is_floating_point and not narrow and buffer.numel() % (self.world_size * BLOCK) == 0


class CompressedOverGloo(CompressedCollectives, GlooCollectives):
    """The same for CPU tensors over gloo."""
