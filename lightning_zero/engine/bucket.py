"""One reduction's worth of gradients: from the user's parameters through a full buffer into this rank's shard.

[Note: copy mode]
Autograd hands each gradient over in a fresh tensor; the hook copies it into its place in the full buffer and drops it.
Preset ``.grad`` views would save nothing (they cost a zero pass and a read-modify-write) and lose the first gradients
whenever a parameter's gradient arrives before its unit was seen.

[Note: one backward may reduce a bucket more than once]
A parameter whose unit looked finished can still get a gradient (activation checkpointing runs a backward within the
backward). The bucket then starts another *round*; rounds of one backward add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.flat import FlatParameters, cut, views_of
from lightning_zero.engine.unit import Unit
from lightning_zero.offload.transfers import Copy, Transfer, Transfers
from lightning_zero.plan import FlatLayout

__all__ = ["GradientBucket"]


class GradientBucket:
    """Gradients of one trainable layout.

    Args:
        index: place among all buckets of the engine, the same on every rank.
        unit: the unit the layout belongs to.
        flat: its parameters and shard parameters.
        shard: 1-D, ``layout.shard_numel`` elements of the master dtype; what the optimizer's ``.grad`` are views of.
        resident: the full buffer, where full gradients stay between micro-steps; ``None`` where one is claimed per
            backward.
        collectives: the wire.
        transfers: what brings reduced gradients to ``shard`` where that is on the host; ``None`` where it is not.

    A shard parameter's ``.grad`` is the truth about accumulation: ``None`` (after ``zero_grad``) means the next
    gradient replaces, anything else means it is added, exactly as on an ordinary parameter.
    """

    def __init__(
        self,
        index: int,
        unit: Unit,
        flat: FlatParameters,
        shard: Tensor,
        resident: Tensor | None,
        collectives: Collectives,
        transfers: Transfers | None = None,
    ) -> None:
        self.index = index
        self.unit = unit
        self.flat = flat
        self.shard = shard
        self.resident = resident
        self.shard_views = cut(shard, flat.slices)
        self._collectives = collectives
        self._transfers = transfers
        self._leaving: Transfer | None = None  # brings the reduced gradients to the host, out of the full buffer
        count = len(flat.parameters)
        self.arrived = [False] * count  # in the running round
        self.local = [False] * count  # holds unreduced gradients of earlier micro-steps
        self.used = [False] * count  # had a gradient in an earlier round of the running backward
        self.full: Tensor | None = resident
        self.launched = False  # a reduction was started in the running backward
        self.dirty = False  # gradients arrived that no reduction has taken yet
        self._views = views_of(resident, flat.layout) if resident is not None else None
        self._pending: Pending | None = None
        # In place, new gradients overwrite the reduced ones of earlier backwards; those wait here to be added again.
        self._carry: Tensor | None = None
        self._carried = [False] * count

    @property
    def layout(self) -> FlatLayout:
        return self.flat.layout

    @property
    def in_place(self) -> bool:
        """Whether the shard is this rank's range of the resident buffer."""
        return self.resident is not None and self.layout.reduce_dtype == self.layout.dtype and self._transfers is None

    @property
    def touched(self) -> bool:
        """Whether any gradient arrived in the running backward or is left from earlier micro-steps."""
        return any(self.arrived) or any(self.used) or any(self.local)

    @property
    def complete(self) -> bool:
        """Whether every gradient arrived in the running round; those of earlier micro-steps do not count."""
        return all(self.arrived)

    def drainable(self, seconds: float) -> bool:
        """Whether ``drain`` would return within ``seconds``."""
        return self._pending is None or self._pending.ready_within(seconds)

    @property
    def pending(self) -> Pending | None:
        """The reduction under way, if there is one."""
        return self._pending

    def has_gradient(self, position: int) -> bool:
        """Whether this rank had a gradient for a parameter since the gradients were last cleared and published."""
        return self.arrived[position] or self.used[position] or self._still_local(position)

    def give_buffer(self, full: Tensor | None) -> None:
        """Collect into ``full`` from now on: 1-D, ``layout.numel`` elements of the reduce dtype, any content."""
        self._empty_buffer()
        self.full = full
        self._views = views_of(full, self.layout) if full is not None else None

    def add(self, position: int, gradient: Tensor) -> None:
        """Take over one parameter's gradient.

        Args:
            position: which parameter of the layout.
            gradient: full shape, any floating dtype. Read once.
        """
        if self._views is None:
            raise RuntimeError(f"A gradient of unit '{self.unit.name}' arrived before memory for it was claimed.")
        if not self.dirty and self.in_place:
            self._save_reduced()
        again = self.arrived[position] or self._still_local(position)
        if not again and not self._has_grad(position) and not self.used[position]:
            self._carried[position] = False
        with untracked():
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if again:
                self._views[position].add_(gradient)
            else:
                self._views[position].copy_(gradient)
        self.local[position] = self.local[position] and again
        self.arrived[position], self.dirty = True, True

    def start_round(self) -> None:
        """Make room for gradients that arrive after this backward's reduction was launched."""
        self.drain()
        self._empty_buffer()
        self.used = [a or b or c for a, b, c in zip(self.used, self.arrived, self.local, strict=True)]
        self.arrived = [False] * len(self.arrived)
        self.local = [False] * len(self.local)

    def launch(self) -> None:
        """Start averaging over the ranks. Everything that did not arrive here counts as zero.

        Collective: every rank, in the agreed order of buckets.
        """
        full, views = self.full, self._views
        if full is None or views is None:
            raise RuntimeError(f"No gradient memory was claimed for unit '{self.unit.name}'.")
        if not self.dirty and self.in_place and not any(self.local):
            self._save_reduced()
        # What was cleared by zero_grad since it was put aside does not come back.
        self._carried = [kept and (self._has_grad(i) or self.used[i]) for i, kept in enumerate(self._carried)]
        with untracked():
            for position, view in enumerate(views):
                if not (self.arrived[position] or self._still_local(position)):
                    view.zero_()
            for start, end in self.layout.gaps():
                full.narrow(0, start, end - start).zero_()
            own = self._collectives.own_range(full)
            self._pending = self._collectives.reduce_scatter(full, own, f"gradients of '{self.unit.name}'")
        self.launched, self.dirty = True, False

    def drain(self) -> None:
        """Wait for the reduction and add its result to the shard.

        On the host it is added in the background, until ``settle``; the full buffer is in use as long.
        """
        if self._pending is None or self.full is None:
            return
        if self._transfers is not None:
            copies = self._additions(self._collectives.own_range(self.full))
            self._leaving = self._transfers.out(copies, self._pending)
            self._pending = None
            return
        self._pending.wait()
        self._pending = None
        with untracked():
            if self.in_place:
                self._restore_reduced()
            else:
                for source, target, add in self._additions(self._collectives.own_range(self.full)):
                    if add:
                        target.add_(source)
                    else:
                        target.copy_(source)

    @property
    def leaves(self) -> bool:
        """Whether reduced gradients go to the host."""
        return self._transfers is not None

    def drain_if_ready(self) -> bool:
        """``drain`` if that would not wait. Returns whether nothing is left to be drained."""
        if not self.drainable(0.0):
            return False
        self.drain()
        return True

    def settle(self) -> None:
        """Wait on the host until the shard holds what was reduced."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def publish(self, used: Sequence[bool]) -> None:
        """Show the reduced gradients to the optimizer, and forget the backward.

        Args:
            used: for each parameter, whether any rank had a gradient for it. The others keep what ``.grad`` they had,
                so that the optimizer skips a parameter that nobody used.
        """
        self.settle()
        for position, (shard, view) in enumerate(zip(self.flat.shards, self.shard_views, strict=True)):
            if used[position] and shard.parameter is not None:
                shard.parameter.grad = view
        self.reset()

    def keep_local(self) -> None:
        """End a micro-step without a reduction: full gradients stay, the optimizer sees this rank's part."""
        if self.full is None:
            return
        with untracked():
            own = cut(self._collectives.own_range(self.full), self.flat.slices)
        if self._transfers is not None:
            arrived = [Copy(part, view) for part, view, a in zip(own, self.shard_views, self.arrived, strict=True) if a]
            self._leaving = self._transfers.out(arrived)
            self.settle()
        for position, (shard, view) in enumerate(zip(self.flat.shards, self.shard_views, strict=True)):
            if self.arrived[position] and shard.parameter is not None:
                if not self.in_place and self._transfers is None:
                    with untracked():
                        view.copy_(own[position])
                shard.parameter.grad = view
                self.local[position], self.arrived[position] = True, False

    def reset(self) -> None:
        """Forget the backward, not the gradients."""
        count = len(self.arrived)
        self.arrived, self.local, self.used = [False] * count, [False] * count, [False] * count
        self.launched, self.dirty = False, False
        self._pending, self._carry, self._leaving = None, None, None
        if self.resident is None:
            self.give_buffer(None)

    def _has_grad(self, position: int) -> bool:
        parameter = self.flat.shards[position].parameter
        return parameter is not None and parameter.grad is not None

    def _still_local(self, position: int) -> bool:
        """Whether unreduced gradients of earlier micro-steps are there and were not cleared by ``zero_grad``."""
        return self.local[position] and self._has_grad(position)

    def _save_reduced(self) -> None:
        if self._carry is not None or any(self.local) or self.full is None:
            return
        kept = [self._has_grad(i) or self.used[i] for i in range(len(self.arrived))]
        if any(kept):
            with untracked():
                self._carry, self._carried = self._collectives.own_range(self.full).clone(), kept

    def _restore_reduced(self) -> None:
        if self._carry is None:
            return
        for view, saved, kept in zip(self.shard_views, cut(self._carry, self.flat.slices), self._carried, strict=True):
            if kept:
                view.add_(saved)
        self._carry = None

    def _empty_buffer(self) -> None:
        """Order everything from now on behind what still reads the full buffer."""
        if self._leaving is not None:
            self._leaving.order()

    def _additions(self, result: Tensor) -> list[Copy]:
        """How a reduction's result gets into the shard: added to what is there, or instead of it."""
        keeps = [self.used[i] or (self._has_grad(i) and not self.local[i]) for i in range(len(self.shard_views))]
        if all(keeps) or not any(keeps):
            return [Copy(result, self.shard, all(keeps))]
        pieces = cut(result, self.flat.slices)
        return [Copy(piece, view, kept) for kept, view, piece in zip(keeps, self.shard_views, pieces, strict=True)]
