"""One reduction's worth of gradients: from the user's parameters through a full buffer into this rank's shard.

[Note: copy mode]
Autograd hands each gradient over in a fresh tensor; the hook copies it into its place in the full buffer and drops it.
Preset ``.grad`` views would save nothing (they cost a zero pass and a read-modify-write) and lose the first gradients
whenever a parameter's gradient arrives before its unit was seen.

[Note: one backward may reduce a bucket more than once]
A parameter whose unit looked finished can still get a gradient (activation checkpointing runs a backward within the
backward). The bucket then starts another *round*; rounds of one backward add up.

[Note: averages between groups, of shards on the host]
What is averaged between shard groups is the sum of all micro-steps, which rests in the shard. A wire for CPU ranks
averages it there. That of an accelerator does not reach the host: so the sum is made on the device, of what the host
has and of what the group has just reduced, and leaves for the host when it is averaged. It has a part of the full
buffer that the reduction has read, if that is of its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_zero._torch import WeakStorage, bytes_of, foreach_zero, untracked
from lightning_zero.comm import Collectives, Pending
from lightning_zero.engine.gradients.parts import put_gradient
from lightning_zero.engine.units.unit import Unit
from lightning_zero.offload.transfers import Copy, Transfer, Transfers
from lightning_zero.shards.binding import set_data
from lightning_zero.shards.slice import FlatParameters, cut, views_of

__all__ = ["GradientBucket"]


class GradientBucket:
    """Gradients of one trainable layout.

    Args:
        index: place among all buckets of the engine, the same on every rank.
        unit: the unit the layout belongs to.
        flat: its parameters and shard parameters.
        shard: 1-D, of the master dtype; what the optimizer's ``.grad`` are views of. ``None``: memory that is there
            from a reduction on until nobody has a gradient in it any more.
        resident: the full buffer, where full gradients stay between micro-steps; ``None``: one is claimed per backward.
        apart: whether the buffer that is claimed is no other unit's for all of the backward.
        collectives: the wire.
        transfers: what brings reduced gradients to ``shard`` where that is on the host; ``None`` where it is not.

    A shard parameter's ``.grad`` is the truth about accumulation: ``None`` (after ``zero_grad``) means the next
    gradient replaces, anything else means it is added, exactly as on an ordinary parameter.
    """

    _parts: Sequence[Tensor] = ()  # of a shard that lasts, one for each parameter
    _sum: Tensor | None = None  # what leaves for the host, where it is averaged between groups on the device

    def __init__(
        self,
        index: int,
        unit: Unit,
        flat: FlatParameters,
        shard: Tensor | None,
        resident: Tensor | None,
        collectives: Collectives,
        transfers: Transfers | None = None,
        apart: bool = False,
    ) -> None:
        self.index = index
        self.unit = unit
        self.flat = flat
        self._shard = shard  # if it comes and goes, only in a backward
        self._lasts = shard is not None
        self._left: WeakStorage | None = None  # its memory, as long as anybody has it
        self.resident = resident
        self.layout = layout = flat.layout
        self.nbytes = layout.numel * layout.reduce_dtype.itemsize
        exact = transfers is None and layout.reduce_dtype == layout.dtype
        self._shares = resident is not None and exact  # the shard is this rank's range of the resident buffer,
        self._in_place = False  # and gradients are collected there now
        self._collectives = collectives
        self.transfers = transfers
        self._leaving: Transfer | None = None  # brings the reduced gradients to the host, out of the full buffer
        count = len(flat.parameters)
        self.numbers = [0] * count
        """How many gradients each parameter has had: of one that was cleared nobody may go on to use the memory."""
        self.merged: set[int] = set()  # what arrives next is the sum already
        self.grouped = False
        """Whether the averages in the shard are those of one shard group of several."""
        self.apart = apart
        self._held: dict[int, TensorWeakRef] = {}  # what autograd keeps of gradients whose other parts are to come
        self.arrived = [False] * count  # in the running round
        self.local = [False] * count  # holds unreduced gradients of earlier micro-steps
        self._further = False  # there was an earlier round in this backward: the shard holds gradients of some rank
        self.used = [False] * count  # had a gradient in it
        self.full: Tensor | None = None
        self.launched = False  # a reduction was started in the running backward
        self.dirty = False  # gradients arrived that no reduction has taken yet
        self.views: list[Tensor] | None = None
        self._gaps: list[Tensor] = []
        # The buffer that is given again, and views of it.
        self._known: tuple[Tensor, list[Tensor], list[Tensor]] | None = None
        self.plain = False  # in this round gradients only have to be copied: nothing is added to anything
        self.missing = count  # gradients of the running round, while it is plain
        self._shard_parameters = [shard.parameter for shard in flat.shards]
        self.pending: Pending | None = None  # the reduction under way
        self.averaging: Pending | None = None  # what makes the shard's averages those of all shard groups
        self._what = f"gradients of '{unit.name}'"
        self._direct = False  # what the reduction under way ends with is in the shard
        # Where nothing has to be added to the shard, a reduction's result can be the shard as it is: it lies elsewhere
        # than the full buffer, and no one has to convert it.
        self._is_apart = resident is None and exact
        self.is_alone = self._is_apart and collectives.world_size == 1
        # In place, new gradients overwrite the reduced ones of earlier backwards; those wait here to be added again.
        self._carry: Tensor | None = None
        self._carried = [False] * count
        self.give_buffer(resident)

    @property
    def shard(self) -> Tensor | None:
        """This rank's averages, if there are any."""
        if self._shard is not None or self._left is None:
            return self._shard
        storage = self._left.lock()
        return None if storage is None else bytes_of(storage).view(self.layout.dtype)

    def _memory(self, whole: bool = False) -> Tensor:
        """The shard, whose memory is taken if there is none. ``whole``: it is about to be overwritten as a whole."""
        if self._shard is None:
            self._shard = self.shard
        if self._shard is None:
            make = torch.empty if whole else torch.zeros
            self._shard = make(self.layout.shard_numel, dtype=self.layout.dtype, device=self.flat.master.device)
            self._left = WeakStorage(self._shard)
        return self._shard

    def replace(self, position: int, own: Tensor) -> None:
        """Let this rank's slice of a parameter's averaged gradient be ``own``: 1-D. Read once. Not in a backward."""
        view = cut(self._memory(), self.flat.slices)[position]
        view.copy_(own)
        self.numbers[position] += 1
        parameter = self._shard_parameters[position]
        if parameter is not None:
            parameter.grad = view
        if not self._lasts:
            self._shard = None

    @property
    def touched(self) -> bool:
        """Whether any gradient arrived in the running backward or is left from earlier micro-steps."""
        return True in self.arrived or True in self.used or True in self.local

    @property
    def holds(self) -> bool:
        """Whether there is a part of a gradient that other parts are to come to."""
        return bool(self._held)

    def drainable(self, seconds: float) -> bool:
        """Whether ``drain`` would return within ``seconds``."""
        return self.pending is None or self.pending.ready_within(seconds)

    def has_gradient(self, position: int) -> bool:
        """Whether this rank had a gradient for a parameter since the gradients were last cleared and published."""
        return self.arrived[position] or self.used[position] or self.still_local(position)

    def give_buffer(self, full: Tensor | None, lasting: bool = False) -> None:
        """Collect into ``full``, 1-D of the reduce dtype, from now on. ``lasting``: it will be given again."""
        if self._leaving is not None:
            self._leaving.order()
        self.full, self.plain = full, False
        self._in_place = self._shares and full is self.resident
        if full is None:
            self.views, self._gaps = None, []
        elif self._known is not None and self._known[0] is full:
            _, self.views, self._gaps = self._known
        else:
            with untracked():
                gaps = [full.narrow(0, start, end - start) for start, end in self.layout.gaps()]
            self.views, self._gaps = views_of(full, self.layout), gaps
            if lasting:
                self._known = (full, self.views, gaps)

    def known_views(self, buffers: Sequence[Tensor]) -> int:
        """How many tensors it keeps that are views of one of these."""
        if self._known is None or all(buffer is not self._known[0] for buffer in buffers):
            return 0
        return len(self._known[1]) + len(self._known[2])

    def collect_in_shard(self) -> bool:
        """Collect where the averages are to be, if no other rank adds to them and nothing is there. Returns whether."""
        if not self.is_alone or self.launched or True in self._keeps():
            return False
        self.give_buffer(self._shard, lasting=True)
        return True

    def add(self, position: int, gradient: Tensor) -> None:
        """Take over a parameter's gradient, of full shape and any floating dtype. Read once."""
        if self.views is None:
            raise RuntimeError(f"A gradient of unit '{self.unit.name}' arrived before memory for it was claimed.")
        if not self.dirty and self._in_place:
            self._save_reduced()
        again = self.arrived[position] or (self.local[position] and self._has_grad(position))
        if self._carry is not None and not (again or self._further or self._has_grad(position)):
            self._carried[position] = False
        with untracked():
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            view = self.views[position]
            if position in self._held:
                held = self._held.pop(position)()
                if held is not None and held.data_ptr() != gradient.data_ptr():  # a backward's around this one
                    set_data(held, held.clone())
            if again and position not in self.merged:
                view.add_(gradient)
            else:
                put_gradient(gradient, view)
        self.merged.discard(position)
        self.local[position] = self.local[position] and again
        self.arrived[position], self.dirty = True, True
        self.plain = not self._held and self._carry is None and True not in self.local and not torch.is_grad_enabled()
        self.missing = self.arrived.count(False)

    def hold(self, position: int, part: Tensor) -> Tensor:
        """Put the first part of a gradient where that is to be, full shape. Returns it: itself, if it cannot be there.

        What is returned may be added to until it arrives.
        """
        had = self.has_gradient(position) or self.launched
        if self.views is None or had or position in self._held:
            return part
        view = self.views[position].view(-1)
        if part.dtype != view.dtype and part.dtype.itemsize >= view.dtype.itemsize:
            return part
        with untracked():
            held = view.view(part.dtype)[-part.numel() or None :].view(part.shape)  # at its end, so that it can widen
            held.copy_(part)
        self._held[position], self.plain = TensorWeakRef(held), False
        return held

    def start_round(self) -> None:
        """Make room for gradients that arrive after this backward's reduction was launched."""
        self.drain()
        if self._leaving is not None:
            self._leaving.order()
        if self.averaging is not None and self._in_place and self.full is not None:
            # There, and some rank may join it only at the end of its backward.
            self.give_buffer(torch.empty_like(self.full))
        self.plain, self._further = False, True
        self.used = [a or b or c for a, b, c in zip(self.used, self.arrived, self.local, strict=True)]
        self.arrived = [False] * len(self.arrived)
        self.local = [False] * len(self.local)

    def launch(self, patience: float, last: bool = True) -> None:
        """Start averaging over the ranks. Everything that did not arrive here counts as zero.

        ``patience``: seconds to wait for memory of the wire. ``last``: over those of all shard groups, as a step
        follows. Collective: every rank, in the agreed order of buckets.
        """
        if self.averaging is not None:
            self.settle()
        full, views = self.full, self.views
        if full is None or views is None:
            raise RuntimeError(f"No gradient memory was claimed for unit '{self.unit.name}'.")
        if full is self._shard and self.plain and not self.missing:  # all is there, and nobody else's is to come
            self._direct, self.launched, self.dirty, self.plain = True, True, False, False
            return
        if not self.dirty and self._in_place and True not in self.local:
            self._save_reduced()
        # What was cleared by zero_grad since it was put aside does not come back.
        if self._carry is not None and not self._further:
            self._carried = [kept and self._has_grad(i) for i, kept in enumerate(self._carried)]
        with untracked():
            empty = self._gaps
            if False in self.arrived:
                missing = [i for i, a in enumerate(self.arrived) if not a and not self.still_local(i)]
                empty = [*(views[position] for position in missing), *empty]
            if empty:
                foreach_zero(empty)
            self._direct = full is self._shard or (self._is_apart and True not in self._keeps())
            target = self._memory(whole=True) if self._direct else self._collectives.own_range(full)
            self.pending = self._collectives.reduce_scatter(full, target, self._what, patience, self.index)
            self.grouped = self._collectives.grouped
            if self.grouped and last:
                self.average_across()
        self.launched, self.dirty, self.plain = True, False, False

    def drain(self) -> None:
        """Wait for the reduction and add its result to the shard.

        On the host it is added in the background, until ``publish``; the full buffer is in use as long.
        """
        if self.pending is None:
            return
        if self.transfers is not None and not self._direct:
            copies = self._additions() if self._sum is None else [Copy(self._sum, self._memory())]
            self._leaving = self.transfers.out(copies, self.pending)
            self.pending = None
            return
        self.pending.wait()
        self.pending = None
        if self._direct:
            return
        with untracked():
            self._bring(() if self._in_place else self._additions())

    def average_across(self) -> None:
        """Make averages of a shard group those of all ranks, behind the reduction under way, until ``settle``.

        Collective: every rank, in one order.
        """
        self.settle()  # an earlier round
        copies: list[Copy] = []
        if self.transfers is not None and self.transfers.beside:
            self._sum = self._room_beside()
            copies = [Copy(self._memory(), self._sum)] if self.pending is None or True in self._keeps() else []
        if self.pending is not None and not self._direct:
            # What is added to what is decided here, and not when some thread comes to it.
            copies += () if self._in_place else self._additions(self._sum)
            self.pending.then(partial(self._bring, copies))
        elif copies:
            with untracked():
                self._bring(copies)
        shard, on_host = self._sum, self._sum is not None
        shard = self._memory() if shard is None else shard
        reduced, averaging = self._collectives.average_across(shard, self._what, self.pending, self.index)
        self.pending, self.averaging = (averaging, None) if on_host else (reduced, averaging)
        self.grouped, self._direct = False, not on_host

    def settle(self) -> None:
        """Wait until the shard holds the averages of all ranks, if that has begun."""
        if self.averaging is not None:
            self.averaging.wait()
        self.averaging = None
        if self._leaving is not None:
            self._leaving.wait()

    def publish(self, used: Sequence[bool]) -> None:
        """Show the reduced gradients to the optimizer, and forget the backward.

        Parameters that no rank has ``used`` keep what ``.grad`` they had, so that the optimizer skips them.
        """
        self.settle()
        parts = self._parts or cut(self._memory(), self.flat.slices)
        self._parts = parts if self._lasts else ()
        for position, (parameter, view, had) in enumerate(zip(self._shard_parameters, parts, used, strict=True)):
            if not had or parameter is None:
                continue
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view
                self.numbers[position] += 1
        self.reset()

    def keep_local(self) -> None:
        """End a micro-step without a reduction: full gradients stay, the optimizer sees this rank's part."""
        if self.full is None:
            return
        self.plain = False
        with untracked():
            own = cut(self._collectives.own_range(self.full), self.flat.slices)
        views = cut(self._memory(), self.flat.slices)
        if self.transfers is not None:
            arrived = [Copy(part, view) for part, view, a in zip(own, views, self.arrived, strict=True) if a]
            self.transfers.out(arrived).wait()
        for position, (shard, view) in enumerate(zip(self.flat.shards, views, strict=True)):
            if self.arrived[position] and shard.parameter is not None:
                if not self._in_place and self.transfers is None:
                    with untracked():
                        view.copy_(own[position])
                shard.parameter.grad = view
                self.numbers[position] += 1
                self.local[position], self.arrived[position] = True, False

    def reset(self) -> None:
        """Forget the backward, not the gradients."""
        count = len(self.arrived)
        self.arrived, self.local, self.used = [False] * count, [False] * count, [False] * count
        self.launched, self.dirty, self.plain, self._further = False, False, False, False
        self.missing = count
        self.merged.clear()
        self._held.clear()
        self.pending, self.averaging, self._carry, self._leaving, self._sum = None, None, None, None, None
        if self.resident is not self.full and self.resident is not None:
            self.give_buffer(self.resident)
        if not self._lasts:  # it is left to those who have a gradient in it
            self._shard = None
        if self.resident is None:
            self.full, self.views, self._gaps = None, None, []

    def _has_grad(self, position: int) -> bool:
        parameter = self._shard_parameters[position]
        return parameter is not None and parameter.grad is not None

    def still_local(self, position: int) -> bool:
        """Whether unreduced gradients of earlier micro-steps are there and were not cleared by ``zero_grad``."""
        return self.local[position] and self._has_grad(position)

    def _save_reduced(self) -> None:
        if self._carry is not None or any(self.local) or self.full is None:
            return
        kept = [self._further or self._has_grad(i) for i in range(len(self.arrived))]
        if any(kept):
            with untracked():
                self._carry, self._carried = self._collectives.own_range(self.full).clone(), kept

    def _bring(self, copies: Sequence[Copy]) -> None:
        """Let the shard hold what was reduced, and what that is added to."""
        if self._in_place:
            self._restore_reduced()
        for source, target, add in copies:
            if add:
                target.add_(source)
            else:
                target.copy_(source, non_blocking=True)  # where one is on the host, nobody writes to it meanwhile

    def _room_beside(self) -> Tensor:
        """Memory of the device for the shard: of the full buffer, what the other ranks have reduced."""
        numel, dtype = self.layout.shard_numel, self.layout.dtype
        if self.full is None or self.full.dtype != dtype:
            return torch.empty(numel, dtype=dtype, device=self._collectives.device)
        return self.full.narrow(0, 0 if self._collectives.rank else numel, numel)

    def _restore_reduced(self) -> None:
        if self._carry is None:
            return
        saved = cut(self._carry, self.flat.slices)
        for view, before, kept in zip(cut(self._memory(), self.flat.slices), saved, self._carried, strict=True):
            if kept:
                view.add_(before)
        self._carry = None

    def _keeps(self) -> list[bool]:
        """For each parameter, whether the shard holds something that a reduction's result is added to."""
        return [
            self._further or (parameter is not None and not local and parameter.grad is not None)
            for local, parameter in zip(self.local, self._shard_parameters, strict=True)
        ]

    def _additions(self, shard: Tensor | None = None) -> list[Copy]:
        """How a reduction's result gets into the shard: added to what is there, or instead of it."""
        if self.full is None:
            raise RuntimeError(f"Unit '{self.unit.name}' has no memory with reduced gradients.")
        keeps, result = self._keeps(), self._collectives.own_range(self.full)
        if all(keeps) or not any(keeps):
            return [Copy(result, self._memory(whole=True) if shard is None else shard, all(keeps))]
        pieces, views = cut(result, self.flat.slices), cut(self._memory() if shard is None else shard, self.flat.slices)
        return [Copy(piece, view, kept) for kept, view, piece in zip(keeps, views, pieces, strict=True)]
