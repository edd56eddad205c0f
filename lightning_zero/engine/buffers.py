"""Rank 0's buffers for every rank, before the forwards before which ``DistributedDataParallel`` sends them.

[Note: which forwards]
It sends before a forward if the forward before it was to be followed by an averaged backward, and before the first one
of a fit: so once per step however many micro-steps it has, and in an evaluation at most before its first batch. With
manual optimisation Lightning tells it after every step method that no averaged backward follows; unless a backward runs
outside of one, it is only ever the first forward.

[Note: what is compared]
A collective of different sizes hangs, or fills memory with what was meant for other memory. Buffers are replaced and
resized wherever the user likes, on one rank only if something is wrong. So the hosts meet before buffers are sent, and
compare what they are about to send in one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from lightning_zero._torch import BroadcastVersions, foreach_copy, unflatten, untracked
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.events import Phase
from lightning_zero.plan.buckets import BufferPiece, BufferSpec, make_pieces, sent_buffers

__all__ = ["BufferBroadcast"]

_ADVICE = (
    "Rank 0's buffers are given to all ranks, so these must be of equal names, shapes and dtypes everywhere. Replace "
    "or resize a buffer on all ranks alike; or let each rank keep its own, with ZeroStrategy(broadcast_buffers=False) "
    "on all ranks."
)


class BufferBroadcast:
    """Sends buffers, and knows when. One for each run of a Trainer; begins by sending them all. Collective.

    Unless the module is about to be trained (``fitting``), they are sent now and never again. ``enabled``: the user's
    ``broadcast_buffers``. Raises ``DivergenceError`` on every rank if the ranks' buffers or settings differ.
    """

    def __init__(self, engine: ZeroEngine, *, fitting: bool, enabled: bool) -> None:
        self._engine = engine
        self._specs: tuple[BufferSpec, ...] | None = None
        self._lines: list[str] = []
        self._digest = ""
        self._pieces: tuple[BufferPiece, ...] = ()
        self._count = 0
        self._wanted = enabled or not fitting
        self._due = self._repeats = False
        if engine.collectives.world_size > 1:
            buffers = self._look()
            self._agree()
            self._send(buffers)
            # What has no buffer at set-up is never looked at again, as there.
            self._due = self._repeats = fitting and enabled and bool(buffers)

    def before_forward(self, name: str) -> None:
        """Send them if it is time to, as above. Collective, before the same step methods."""
        if not self._due:
            return
        self._count += 1
        buffers = self._look()
        number = int(self._digest[:15], 16)
        rows = self._engine.agree(f"sending buffers for the {self._count}. time, before {name}", [number])
        if any(row[0] != number for row in rows):
            self._agree()
        self._send(buffers)
        self._repeats = self._repeats and bool(buffers)

    def after_forward(self, averaged: bool) -> None:
        """Note whether the gradients of the forward that has ended will be averaged. See [Note: which forwards]."""
        self._due = self._repeats and averaged and torch.is_grad_enabled() and self._engine.reduce_gradients

    def go_on(self, engine: ZeroEngine) -> None:
        """The module has another engine now."""
        self._engine = engine

    def _look(self) -> list[Tensor]:
        """The buffers as they are now: any may have been replaced by assignment."""
        named = sent_buffers(self._engine.module) if self._wanted else []
        known = self._specs
        now = [(name, buffer.shape, buffer.dtype) for name, buffer in named]
        if known is None or now != [(spec.name, spec.shape, spec.dtype) for spec in known]:
            self._specs = tuple(BufferSpec.of(name, buffer) for name, buffer in named)
            self._pieces = make_pieces(self._specs)
            self._lines = [f"broadcast_buffers={self._wanted}", *(spec.line for spec in self._specs)]
            self._digest = hashlib.sha256("\n".join(self._lines).encode()).hexdigest()
        return [buffer for _, buffer in named]

    def _agree(self) -> None:
        self._engine.control.alike("set of buffers", self._lines, _ADVICE)

    def _send(self, buffers: Sequence[Tensor]) -> None:
        self._engine.collectives.settle()
        with BroadcastVersions(buffers):
            for number, piece in enumerate(self._pieces):
                what = f"rank 0's buffers, part {number}"
                with self._engine.means.spans.of(Phase.BUFFERS, nbytes=piece.nbytes):
                    self._send_piece(piece, [buffers[index] for index in piece.members], what)

    def _send_piece(self, piece: BufferPiece, buffers: Sequence[Tensor], what: str) -> None:
        collectives, device = self._engine.collectives, self._engine.device
        parts: list[tuple[list[Tensor], list[Tensor]]] = []  # of one dtype each: buffers and their memory
        with untracked():
            flat = torch.empty(piece.nbytes, dtype=torch.uint8, device=device)
            start = 0
            for dtype, group in groupby(buffers, lambda buffer: buffer.dtype):
                members = list(group)
                nbytes = sum(buffer.nbytes for buffer in members)
                parts.append((members, unflatten(flat.narrow(0, start, nbytes).view(dtype), members)))
                start += nbytes
            if collectives.rank == 0:
                for members, views in parts:
                    _copy(views, members)
            collectives.broadcast(flat, 0, what).wait()
        with torch.inference_mode():  # where also those may be written to that were made in it
            for members, views in parts:
                _copy(members, views)  # on rank 0 too: what cannot be written to fails on all alike


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Many small copies of one dtype: few kernels on a device."""
    if targets[0].is_complex():  # conjugates are views, which the call for many cannot write to
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        foreach_copy(targets, sources)
