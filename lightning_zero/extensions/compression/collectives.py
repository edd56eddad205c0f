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

from collections.abc import Collection, Hashable
from functools import partial

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Content, Pending
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.native import GlooCollectives, NativeCollectives
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.comm.sums import PairwiseSum, divide
from lightning_zero.extensions.compression.codes import BLOCK, Format, compress, decompress, format_nbytes

__all__ = [
    "CompressedCollectives",
    "CompressedOverGloo",
    "Format",
    "compress",
    "decompress",
    "format_nbytes",
]


class CompressedCollectives(NativeCollectives):
    """Collectives in fewer bytes where these are weights to compute with, or gradients.

    Args:
        gathers: in how many what has a content is gathered; ``None``: as it is.
        reductions: likewise, what is reduced.
        fed: of what the errors are fed back: the ``"sum"`` that is reduced, the ``"average"`` that is gathered.
    """

    block = BLOCK

    def __init__(
        self, groups: Groups, streams: Streams, gathers: Format | None, reductions: Format | None, fed: Collection[str]
    ) -> None:
        super().__init__(groups, streams)
        self._sum = PairwiseSum()
        self._gathers, self._reductions, self._fed = gathers, reductions, fed
        self.rounds_weights = gathers is not None
        self.feeding = 1 if fed else None

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        kind = self._gathers if content is not None else None
        if kind is None or content is None or not self._fits(buffer, kind):
            return super()._all_gather(buffer, what, after, source, version, content)
        rows = buffer.view(self.world_size, -1)
        with untracked(), self.streams.gathering(after):
            if source is not None:
                rows[self.rank].copy_(source)
            codes = self._codes(kind, rows)
            compress(kind, rows[self.rank], codes[self.rank], self._residual_of("average", content[0], rows[self.rank]))
            gathered = super()._all_gather(codes.view(-1), what, None, None, None, content)
            return self._followed(gathered, partial(decompress, kind, codes, rows), (buffer,))

    def _reduce_scatter(self, bucket: Tensor, shard: Tensor, what: str, patience: float, key: Hashable) -> Pending:
        rounded = self._rounded(bucket, shard, what, key)
        return super()._reduce_scatter(bucket, shard, what, patience, key) if rounded is None else rounded

    def reduce_through(self, received: Tensor, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending:
        rounded = self._rounded(bucket, shard, what, key)
        return super().reduce_through(received, bucket, shard, what, key) if rounded is None else rounded

    def _rounded(self, bucket: Tensor, shard: Tensor, what: str, key: Hashable) -> Pending | None:
        """Send every rank its range in codes, and add up what comes, which takes the place of what was sent."""
        kind = self._reductions
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
                self._sum.into(shard, rows.unbind(0), divisor, spare=True)

            sent = self._all_to_all(others.view(-1), codes.view(-1), [], [], what)
            return self._followed(sent, add_up, (bucket, shard))

    def _codes(self, kind: Format, rows: Tensor) -> Tensor:
        size = format_nbytes(kind, rows.shape[1])
        return torch.empty(len(rows), size, dtype=torch.uint8, device=rows.device)

    def _residual_of(self, which: str, key: Hashable, rounded: Tensor) -> Tensor | None:
        """What was lost of such values before; ``None``: it is not fed back."""
        if which not in self._fed or key is None:
            return None
        if (name := f"{which} {key}") not in self.residuals:
            with torch.inference_mode(False):
                self.residuals[name] = torch.zeros(rounded.numel(), dtype=torch.float32, device=rounded.device)
        return self.residuals[name]

    def _fits(self, buffer: Tensor, kind: Format) -> bool:
        """Whether there are whole blocks of what a format makes smaller."""
        narrow = kind == "bfloat16" and buffer.itemsize == 2
        return buffer.dtype.is_floating_point and not narrow and buffer.numel() % (self.world_size * BLOCK) == 0


class CompressedOverGloo(CompressedCollectives, GlooCollectives):
    """The same for CPU tensors over gloo."""
