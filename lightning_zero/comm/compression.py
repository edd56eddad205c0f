"""Weights and gradients in fewer bytes, on their way between hosts.

[Note: what is rounded, and where]
An integer stands for an element; 64 of them in a row share a scale, their largest magnitude by the largest integer. So
an element is off by half a scale at most. Every layout begins each parameter at a multiple of 64, and a rank rounds for
itself what it rounds for others: so numbers depend on which ranks share a host, and on nothing else of how a model is
cut. (Ranks of hosts with different numbers of them, which exchange directly, count as hosts each.) Where one element of
a block is not finite, none is. Masters, optimizer state, checkpoints and ``full_parameters`` are never rounded. What
user code reads of a weight in a step is what it computes with; writing there raises, as with weights in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.collectives import Content, Pending
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.native import GlooCollectives
from lightning_zero.comm.streams import Event, Streams
from lightning_zero.config import ShardWithin

__all__ = ["CompressedCollectives", "Compression", "Format", "compress", "decompress", "format_nbytes"]

Format = Literal["bfloat16", "int8", "int4"]
_LARGEST = {"int8": 127, "int4": 7}
_BLOCK = 64
_CHUNK = 2**15  # elements at a time: what is in between stays in a core's cache
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is rounded on its way between hosts; see [Note: what is rounded, and where].

    It is for thin networks, and it changes numbers: losses are close to those of an exact exchange, not the same. What
    goes between ranks of one host is not touched. CPU ranks only, so far.

    Args:
        weights: what weights are gathered in, for forward and backward; ``None``: as they are. In stage 3, and with
            mixed precision in stages 1 and 2: where they are gathered from masters that stay exact.
        gradients: what gradients go between hosts in; ``None``: as they are.

    Raises:
        ValueError: if a setting is not usable.

    Source: ZeRO++ (arXiv:2306.10209), sections 3.1 and 3.3.
    """

    weights: Literal["bfloat16", "int8"] | None = None
    gradients: Format | None = None

    def __post_init__(self) -> None:
        for name, known in (("weights", ("bfloat16", "int8")), ("gradients", get_args(Format))):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"Compression.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        if self.weights is None and self.gradients is None:
            raise ValueError("Compression of nothing: give weights, gradients or both, for example gradients='int8'.")

    def check(self, within: ShardWithin) -> None:
        """Raise ValueError where it does not go with other settings."""
        if within is not None and self.weights is not None:
            raise ValueError(
                f"Compression.weights={self.weights!r} does not go with shard_within, whose groups gather weights as "
                "they are: leave weights out, and compress gradients, which is what goes between groups."
            )


class CompressedCollectives(GlooCollectives):
    """Collectives for CPU tensors over gloo, in fewer bytes where these are weights to compute with, or gradients.

    Args:
        gathers: in how many what has a content is gathered; ``None``: as it is.
        reductions: likewise, what is reduced.
    """

    block = _BLOCK

    def __init__(self, groups: Groups, streams: Streams, gathers: Format | None, reductions: Format | None) -> None:
        super().__init__(groups, streams)
        self._gathers, self._reductions = gathers, reductions
        self.rounds_weights = gathers is not None

    def _all_gather(
        self, buffer: Tensor, what: str, after: Event, source: Tensor | None, version: int | None, content: Content
    ) -> Pending:
        kind = self._gathers if content is not None else None
        if kind is None or not self._fits(buffer, kind):
            return super()._all_gather(buffer, what, after, source, version, content)
        rows = buffer.view(self.world_size, -1)
        with untracked():
            if source is not None:
                rows[self.rank].copy_(source)
            codes = torch.empty(self.world_size, format_nbytes(kind, rows.shape[1]), dtype=torch.uint8)
            compress(kind, rows[self.rank], codes[self.rank])
        gathered = super()._all_gather(codes.view(-1), what, after, None, None, content)
        finish = partial(_decompress_rows, kind, codes, rows)
        return Pending(what, self._told, works=[gathered], keep=(buffer,), finish=finish)

    def _swap(
        self, taken: Tensor, sent: Tensor, what: str, finish: Callable[[], None], keep: Sequence[Tensor]
    ) -> Pending:
        kind = self._reductions
        if kind is None or not self._fits(sent, kind):
            return super()._swap(taken, sent, what, finish, keep)
        rows, arrived = sent.view(self.world_size, -1), taken.view(self.world_size, -1)
        codes = torch.empty(self.world_size, format_nbytes(kind, rows.shape[1]), dtype=torch.uint8)
        others = torch.empty_like(codes)
        for row, code in zip(rows, codes, strict=True):
            compress(kind, row, code)

        def unpack() -> None:
            _decompress_rows(kind, others, arrived)
            finish()

        return super()._swap(others, codes, what, unpack, (*keep, codes))

    def _fits(self, buffer: Tensor, kind: Format) -> bool:
        """Whether there are whole blocks of what a format makes smaller."""
        narrow = kind == "bfloat16" and buffer.itemsize == 2
        return buffer.dtype.is_floating_point and not narrow and buffer.numel() % (self.world_size * _BLOCK) == 0


# -------------------------------------------------------------------------------------------------------------- formats


def format_nbytes(kind: Format, numel: int) -> int:
    """Bytes of so many elements, a multiple of 64, with their scales."""
    if kind == "bfloat16":
        return 2 * numel
    return numel // (2 if kind == "int4" else 1) + numel // _BLOCK * 4


def compress(kind: Format, values: Tensor, codes: Tensor) -> None:
    """Write a 1-D tensor, of a multiple of 64 elements, to bytes: 1-D, uint8, ``format_nbytes`` of them."""
    if kind == "bfloat16":
        codes.view(torch.bfloat16).copy_(values)
        return
    for blocks, integers, scales in _chunks(kind, values, codes):
        exact = blocks.float()
        scale = torch.amax(exact.abs(), 1, keepdim=True).div_(_LARGEST[kind]).clamp_min_(_SMALLEST)
        scales.copy_(scale)
        whole = exact.div(scale).round_()
        if kind == "int8":
            integers.copy_(whole.to(torch.int8).view(torch.uint8))
        else:  # halves of a block side by side, each integer above zero
            low, high = whole.add_(8).to(torch.uint8).chunk(2, 1)
            integers.copy_(high << 4 | low)


def decompress(kind: Format, codes: Tensor, values: Tensor) -> None:
    """Write what was compressed to a 1-D tensor of as many elements as it was of, of any dtype."""
    if kind == "bfloat16":
        values.copy_(codes.view(torch.bfloat16))
        return
    for blocks, integers, scales in _chunks(kind, values, codes):
        if kind == "int8":
            blocks.copy_(integers.view(torch.int8) * scales)
        else:
            halves = torch.cat([integers & 15, integers >> 4], 1).view(torch.int8)
            blocks.copy_((halves - 8) * scales)


def _decompress_rows(kind: Format, codes: Tensor, rows: Tensor) -> None:
    for code, row in zip(codes, rows, strict=True):
        decompress(kind, code, row)


def _chunks(kind: Format, values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some blocks, their integers and their scales at a time, each with a row for a block."""
    blocks = values.view(-1, _BLOCK)
    scales = codes[-len(blocks) * 4 :].view(torch.float32).view(-1, 1)
    integers = codes[: codes.numel() - len(blocks) * 4].view(len(blocks), -1)
    size = _CHUNK // _BLOCK
    return zip(blocks.split(size), integers.split(size), scales.split(size), strict=True)
