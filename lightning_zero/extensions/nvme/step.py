"""The step of an optimizer whose masters do not rest on the device: unit by unit, and all ranks together or none.

[Note: a step before the step]
``optimizer.step()`` stays what schedulers, step hooks and the user call. Its last pre-hook updates the units one after
the other, so that each one's weights are on their way to the device while the next one is stepped on. The groups hold
none of them then: the call that torch makes of the optimizer's own ``step`` finds nothing left to do.

[Note: a failure on one rank]
Publishing a unit may be a collective. A rank that cannot step on a unit (a full disk, an optimizer that raises)
publishes what it has for that one and all after it, and only then do the ranks tell each other: every rank raises, none
waits for a rank that is gone.

[Note: windows]
Masters and state that rest in files are read ahead in windows, stepped on, and written behind. A window is a range of
one layout's shard that starts at a multiple of 4096 elements, so that it starts at a multiple of 4096 bytes in every
file. Parameters do not end where windows end:

    shard     |      a      |    b    |            c             | d | gap
    windows   [     0     )[     1     )[     2     )[     3     )
    stepped on  a0           a1 b1       b2 c2        c3           (d has no gradient: its end of the file is not read)

Of each window the optimizer gets ranges of parameters: see [Note: segments]. Their state is taken over when the last
window of the unit is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.config import Tier
from lightning_zero.optim.groups import OffloadedSteps
from lightning_zero.optim.segments import Member, Range
from lightning_zero.optim.state import Kind, StateHomes, covers
from lightning_zero.optim.stepper import Memory, SegmentStep, SegmentStepper, threads
from lightning_zero.shards.slice import FlatParameters
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.pipeline import Request
from lightning_zero.storage.tiers import WINDOW_ALIGNMENT, NvmeStore

__all__ = ["OffloadedUpdate"]


@dataclass(frozen=True, eq=False)
class _Window:
    flat: FlatParameters
    unit: int
    start: int
    numel: int
    ranges: Sequence[Range]
    kinds: Mapping[Kind, bool]
    """State in the order of the buffers behind the master's, and whether it is read."""


class _InWindow(Memory):
    """The memory of one window."""

    def __init__(
        self, optimizer: Optimizer, window: _Window, memory: Tensor, kinds: Mapping[Kind, Tensor], homes: StateHomes
    ) -> None:
        super().__init__(optimizer)
        self._window = window
        self._memory = memory
        self._kinds = kinds
        self._homes = homes

    def master(self, part: Range) -> Tensor:
        return self._memory.narrow(0, self._start(part), part.numel)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        found = self._kinds.get(kind)
        return None if found is None else found.narrow(0, self._start(part), part.numel)

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        """Nobody knew of it when the window was read."""
        region = self._homes.region(self._window.flat, kind)
        region.part(part.member.start + part.start, part.numel).write(values)

    def whole(self, member: Member, kind: Kind, held: Any) -> Tensor:
        if isinstance(held, FileTensor) and held.dtype == kind.dtype:
            return held
        return self._homes.part(member.entry, kind)

    def _start(self, part: Range) -> int:
        return part.member.start + part.start - self._window.start


def _cut(members: Sequence[Member], shard_numel: int, window_numel: int) -> list[tuple[int, int]]:
    """Ranges of the shard that hold all members, in order: each from and to a multiple of the alignment, or the end."""
    runs: list[list[int]] = []
    for member in members:
        start = member.start // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
        end = min(-(-member.end // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT, shard_numel)
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    return [(s, min(s + window_numel, end)) for start, end in runs for s in range(start, end, window_numel)]


class OffloadedUpdate:
    """Updates all parameters of one optimizer, elementwise and adapted to shards, that have a gradient."""

    def __init__(self, optimizer: Optimizer, steps: OffloadedSteps, homes: StateHomes) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._homes = homes
        self._memory = SegmentStepper(optimizer, steps.range_numel)
        self._segments = SegmentStep(optimizer)  # in files
        self._members: Sequence[Member] = []
        self._parameters: list[nn.Parameter] = []  # of them
        self._units: list[tuple[int, list[Member]]] = []  # what is in memory of each unit with trainable parameters
        self._left: deque[tuple[int, list[Member]]] = deque()  # of one step
        self._publishing = False

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._memory.forget()

    def run(self, members: Sequence[Member]) -> list[nn.Parameter]:
        """One step on those of ``members`` with a gradient. Returns all of them: nothing is left to do. The same object
        means the same parameters. Raises ``OffloadError`` on every rank, if one could not make it: see [Note: a failure
        on one rank]. Collective: every rank."""
        if members is not self._members:
            units: dict[int, list[Member]] = {}
            for member in members:
                found = units.setdefault(member.entry.unit, [])
                if member.entry.flat.rest.master is not Tier.DISK:
                    found.append(member)
            self._members, self._units = members, sorted(units.items())
            self._parameters = [member.parameter for member in members]
        self._left, self._publishing = deque(self._units), False
        failure: Exception | None = None
        try:
            with threads(self._steps.threads):
                if self._homes.store is not None:
                    on_disk = [member for member in members if member.entry.flat.rest.master is Tier.DISK]
                    self._step_on_files(self._homes.store, on_disk)
                self._finish(math.inf)
        except Exception as error:
            if self._publishing:  # then the other ranks cannot be reached
                raise
            failure = error
            while self._left:
                self._publish()
        self._steps.agree(failure)
        return self._parameters

    def _finish(self, end: float) -> None:
        """Step on what is in memory of all units before ``end``, and publish these units."""
        while self._left and self._left[0][0] < end:
            unit, members = self._left[0]
            self._memory.run(members, unit)
            self._publish()

    def _publish(self) -> None:
        unit, _ = self._left.popleft()
        self._publishing = True
        self._steps.unit_stepped(unit)
        self._publishing = False

    # ------------------------------------------------------------------- files

    def _step_on_files(self, store: NvmeStore, everything: Sequence[Member]) -> None:
        """Step on all parameters that rest in files and have a gradient, and finish units in between. A unit's last
        window may not be in the file yet when it is finished: all files are up to date when this returns. If something
        could not be read or written, masters and state are useless."""
        self._segments.begin()
        self._settle(everything)
        members = [member for member in everything if member.parameter.grad is not None]
        # Parameters of which nothing lies on this rank, so that their counters go on as on every rank.
        nothing = Memory(self._optimizer)
        self._segments.run([Range(member, 0, 0) for member in members if not member.numel], nothing)
        self._segments.commit(nothing)
        windows = self._plan([member for member in members if member.numel], everything, store)
        last = {window.unit: window for window in windows}

        def work(request: Request, buffers: list[Tensor]) -> None:
            window: _Window = request.tag
            self._finish(window.unit)
            memory = self._step(window, buffers)
            window.flat.refresh_part(window.start, buffers[0])
            if window is last[window.unit]:
                self._segments.commit(memory)
                self._finish(window.unit + 1)

        if windows:
            store.pipeline().run(map(self._request, windows), work)

    def _settle(self, members: Sequence[Member]) -> None:
        """Bring state that somebody has put into the optimizer, as its ``load_state_dict`` does, to the files.

        That may be the state of another parameter, also of one without a gradient now: everything that is elsewhere in
        files is read before anything is written. Two tensors of state that are one in the files are refused: they would
        part with the first step.
        """
        moved: list[tuple[nn.Parameter, str, FileTensor, Tensor]] = []
        seen: dict[tuple[Any, ...], str] = {}
        for member in members:
            for key, value in self._optimizer.state.get(member.parameter, {}).items():
                if not member.numel or not covers(value, member.numel):
                    continue
                part = self._homes.part(member.entry, Kind(key, value.dtype))
                if not isinstance(value, FileTensor):
                    moved.append((member.parameter, key, part, value))
                    continue
                name = f"'{key}' of '{member.entry.name}'"
                if seen.setdefault(value.identity, name) != name:
                    raise ValueError(
                        f"{seen[value.identity]} and {name} are one tensor in the optimizer's state. State in files is "
                        "a tensor of its own for each: put a `.clone()` there."
                    )
                if value.identity != part.identity:
                    moved.append((member.parameter, key, part, value.read()))
        for parameter, key, part, value in moved:
            part.write(value)
            self._optimizer.state[parameter][key] = part

    def _plan(self, members: Sequence[Member], everything: Sequence[Member], store: NvmeStore) -> list[_Window]:
        """The windows of all units in order, none where no parameter takes part."""
        by_flat: dict[FlatParameters, list[Member]] = {}
        for member in sorted(members, key=lambda member: (member.entry.unit, member.start)):
            by_flat.setdefault(member.entry.flat, []).append(member)
        holders: dict[FlatParameters, list[Member]] = {}
        for member in everything:
            holders.setdefault(member.entry.flat, []).append(member)
        grouped = set(self._parameters)  # what was taken out of the groups, for a while, may have state in any window
        unseen = any(parameter not in grouped for parameter in self._optimizer.state)
        windows: list[_Window] = []
        for flat, found in by_flat.items():
            windows += self._plan_flat(flat, found, holders[flat], store, unseen)
        return windows

    def _plan_flat(
        self,
        flat: FlatParameters,
        members: Sequence[Member],
        holders: Sequence[Member],
        store: NvmeStore,
        unseen: bool,
    ) -> Iterator[_Window]:
        kinds = {member: self._kinds(member) for member in members}
        needed = list(dict.fromkeys(chain.from_iterable(kinds.values())))
        stored = {kind: [member for member in holders if kind in self._stored(member)] for kind in needed}
        most = store.window_numel([dtype.itemsize for dtype in (flat.layout.dtype, *(k.dtype for k in needed))])
        for start, end in _cut(members, flat.layout.shard_numel, most):
            inside = [member for member in members if member.start < end and start < member.end]
            ranges = [
                part
                for member in inside
                for part in member.ranges(
                    self._steps.range_numel,
                    max(start, member.start) - member.start,
                    min(end, member.end) - member.start,
                )
            ]
            reads = {
                kind: unseen or any(member.start < end and start < member.end for member in stored[kind])
                for kind in dict.fromkeys(kind for member in inside for kind in kinds[member])
            }
            yield _Window(flat, members[0].entry.unit, start, end - start, ranges, reads)

    def _stored(self, member: Member) -> set[Kind]:
        """What of a parameter's state is in files."""
        state = self._optimizer.state.get(member.parameter, {})
        return {Kind(key, value.dtype) for key, value in state.items() if isinstance(value, FileTensor)}

    def _kinds(self, member: Member) -> list[Kind]:
        """What of a parameter's state is in files, or will be after its first step."""
        stored = self._stored(member)
        if stored:
            return sorted(stored, key=str)
        return self._homes.expected(self._optimizer, member.entry.flat, member.group)

    def _request(self, window: _Window) -> Request:
        master = cast(FileTensor, window.flat.master)
        tensors = [(master, window.flat.shown is None)]
        tensors += [(self._homes.region(window.flat, kind), read) for kind, read in window.kinds.items()]
        parts = [(tensor.part(window.start, window.numel), read, True) for tensor, read in tensors]
        return Request(window.numel, parts, window)

    def _step(self, window: _Window, buffers: Sequence[Tensor]) -> _InWindow:
        """Step on what takes part of one window, in the memory of the window."""
        master, *state = buffers
        with untracked():
            if window.flat.shown is not None:
                master.copy_(window.flat.shown.narrow(0, window.start, window.numel))
            for read, memory in zip(window.kinds.values(), state, strict=True):
                if not read:
                    memory.zero_()
        place = _InWindow(self._optimizer, window, master, dict(zip(window.kinds, state, strict=True)), self._homes)
        # One at a time where each operation goes over all that it is given before the next one begins.
        foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        for ranges in [[part] for part in window.ranges] if foreach else [window.ranges]:
            self._segments.run(ranges, place)
        return place
