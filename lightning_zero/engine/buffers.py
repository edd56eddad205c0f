"""Rank 0's buffers for every rank, before the forwards before which ``DistributedDataParallel`` sends them.

[Note: which forwards]
It sends before a forward if the forward before it was to be followed by an averaged backward, and before the first one
of a fit: so once per step however many micro-steps it has, and in an evaluation at most before its first batch. With
manual optimisation Lightning tells it after every step method that no averaged backward follows; unless a backward runs
outside of one, it is only ever the first forward.

[Note: what is compared]
A collective of different sizes hangs, or fills memory with what was meant for other memory. Buffers are replaced and
resized wherever the user likes, on one rank only if something is wrong. So the ranks compare what they are about to
send. In training they presume that a set which stayed the same the last time has stayed so again, and compare nothing.
A rank that finds another set nevertheless takes part in that broadcast, as many bytes as the others expect, and then
compares. The others have found another set too; or they are in their forward, and learn of it at their next agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from lightning_zero._torch import BroadcastVersions, foreach_copy, unflatten, untracked
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.events import Phase
from lightning_zero.plan.buckets import BufferPiece, BufferSpec, make_pieces, sent_buffers

__all__ = ["BufferBroadcast"]

_SET = "set of buffers"
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
        self.engine = engine
        """Who runs the module; another one once parameters have thawed."""
        self._specs: list[BufferSpec] | None = None
        self._set: tuple[str, list[str], str] = (_SET, [], _ADVICE)
        self._pieces: tuple[BufferPiece, ...] = ()
        self._wanted = enabled or not fitting
        self._due = self._repeats = False
        self._presumed = False  # to be the same set on all ranks: it was so, and stayed so, the last time
        if engine.collectives.world_size > 1:
            buffers = self._look()
            engine.control.alike(*self._set)
            self._send(self._pieces, buffers)
            # What has no buffer at set-up is never looked at again, as there.
            self._due = self._repeats = fitting and enabled and bool(buffers)

    def before_forward(self, name: str, training: bool) -> None:
        """Send them if it is time to, as above. Collective, before the same step methods."""
        if not self._due:
            return
        engine, specs, pieces = self.engine, self._specs, self._pieces
        engine.control.settle()
        buffers = self._look()
        engine.control.presumed, changed = self._set, self._specs is not specs
        if self._presumed:
            self._send(pieces, () if changed else buffers)
            if changed and training:
                engine.pass_forward(name, _SET)
        if changed or not (self._presumed and training):
            engine.control.alike(*self._set)
        if changed or not self._presumed:
            self._send(self._pieces, buffers)
        self._presumed = not changed
        self._repeats = self._repeats and bool(buffers)

    def after_forward(self, averaged: bool) -> None:
        """Note whether the gradients of the forward that has ended will be averaged. See [Note: which forwards]."""
        self._due = self._repeats and averaged and torch.is_grad_enabled() and self.engine.reduce_gradients

    def _look(self) -> list[Tensor]:
        """The buffers as they are now: any may have been replaced by assignment."""
        named = sent_buffers(self.engine.module) if self._wanted else []
        specs = [BufferSpec(name, buffer.shape, buffer.dtype) for name, buffer in named]
        if specs != self._specs:
            self._specs, self._pieces = specs, make_pieces(specs)
            self._set = (_SET, [f"broadcast_buffers={self._wanted}", *(spec.line for spec in specs)], _ADVICE)
        return [buffer for _, buffer in named]

    def _send(self, pieces: Sequence[BufferPiece], buffers: Sequence[Tensor]) -> None:
        """No buffers: nobody needs what is sent."""
        self.engine.collectives.settle()
        with BroadcastVersions(buffers):
            for number, piece in enumerate(pieces):
                what = f"rank 0's buffers, part {number}"
                with self.engine.means.spans.of(Phase.BUFFERS, nbytes=piece.nbytes):
                    self._send_piece(piece, [buffers[index] for index in piece.members if buffers], what)

    def _send_piece(self, piece: BufferPiece, buffers: Sequence[Tensor], what: str) -> None:
        collectives, device = self.engine.collectives, self.engine.device
        parts: list[tuple[list[Tensor], list[Tensor]]] = []  # of one dtype each: buffers and their memory
        with untracked():
            flat = (torch.empty if buffers else torch.zeros)(piece.nbytes, dtype=torch.uint8, device=device)
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
