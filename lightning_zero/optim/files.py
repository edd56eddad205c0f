"""The step of an optimizer whose masters do not rest on the device: unit by unit, and all ranks together or none.

[Note: a step before the step]
``optimizer.step()`` stays what schedulers, step hooks and the user call. Its last pre-hook updates the units one after
the other, so that each one's weights are on their way to the device while the next one is stepped on. The groups are
empty then: the call that torch makes of the optimizer's own ``step`` finds nothing left to do.

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

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import untracked
from lightning_zero.config import Tier
from lightning_zero.optim.groups import OffloadedSteps, OwnedParameter
from lightning_zero.optim.segments import Member, Range, members_of
from lightning_zero.optim.state import Kind, StateRegions, covers
from lightning_zero.optim.stepper import SegmentStep, SegmentStepper, threads
from lightning_zero.shards.flat import FlatParameters
from lightning_zero.storage.file_tensor import FileTensor
from lightning_zero.storage.pipeline import Request, Waitable
from lightning_zero.storage.tiers import WINDOW_ALIGNMENT

__all__ = ["OffloadedUpdate", "WindowedStep"]


@dataclass(frozen=True)
class _Window:
    flat: FlatParameters
    unit: int
    start: int
    numel: int
    ranges: Sequence[Range]
    kinds: Mapping[Kind, bool]
    """State in the order of the buffers behind the master's, and whether it is read."""
    last: bool
    """Whether no other window of the unit follows."""


class WindowedStep:
    """Steps on everything of one optimizer that rests in files.

    Args:
        optimizer: the user's, adapted to shards.
        steps: the run's side of it.
        regions: where its state rests.
    """

    def __init__(self, optimizer: Optimizer, steps: OffloadedSteps, regions: StateRegions) -> None:
        self._optimizer = optimizer
        self._segments = SegmentStep(optimizer)
        self._steps = steps
        self._regions = regions

    def run(
        self,
        groups: Sequence[Sequence[OwnedParameter]],
        finish_before: Callable[[int], None],
        finish_through: Callable[[int], None],
    ) -> None:
        """One step.

        Args:
            groups: the parameters of each param group.
            finish_before: called before anything of a unit is stepped on.
            finish_through: called when all of a unit is stepped on. Its last window may not be in the file yet then:
                all files are up to date when ``run`` returns.

        Raises:
            OffloadError: if something could not be read or written. Masters and state are useless then.
        """
        self._segments.begin()
        found = [m for m in members_of(groups) if m.entry.flat.rest.master is Tier.DISK]
        members = [member for member in found if member.parameter.grad is not None]
        self._settle([entry for group in groups for entry in group])
        self._step_empty([member for member in members if not member.numel])
        windows = self._plan([member for member in members if member.numel], groups)

        def work(request: Request, buffers: list[Tensor]) -> Sequence[Waitable]:
            window: _Window = request.tag
            finish_before(window.unit)
            memory = self._step(window, buffers)
            waits = self._steps.window_stepped(window.flat, window.start, buffers[0])
            if window.last:
                self._segments.commit(memory)
                finish_through(window.unit)
            return waits

        if windows and self._steps.store is not None:
            self._steps.store.pipeline().run(map(self._request, windows), work)

    def _settle(self, entries: Sequence[OwnedParameter]) -> None:
        """Bring state that somebody has put into the optimizer, as its ``load_state_dict`` does, to the files.

        That may be the state of another parameter, also of one without a gradient now: everything that is elsewhere in
        files is read before anything is written.

        Raises:
            ValueError: if two tensors of state are one in the files: they would part with the first step.
        """
        moved: list[tuple[nn.Parameter, str, FileTensor, Tensor]] = []
        seen: dict[tuple[Any, ...], str] = {}
        for entry in entries:
            parameter = entry.shard.parameter
            if parameter is None or entry.flat.rest.master is not Tier.DISK or not entry.slice.numel:
                continue
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not covers(value, entry.slice.numel):
                    continue
                part = self._regions.part(entry, Kind(key, value.dtype))
                name = f"'{key}' of '{entry.shard.spec.name}'"
                identity = value.identity if isinstance(value, FileTensor) else None
                if identity is not None and seen.setdefault(identity, name) != name:
                    raise ValueError(
                        f"{seen[identity]} and {name} are one tensor in the optimizer's state. State in files is a "
                        "tensor of its own for each: put a `.clone()` there."
                    )
                if identity is None:
                    moved.append((parameter, key, part, value))
                elif identity != part.identity:
                    moved.append((parameter, key, part, value.read()))
        for parameter, key, part, value in moved:
            part.write(value)
            self._optimizer.state[parameter][key] = part

    # -------------------------------------------------------------------- plan

    def _plan(self, members: Sequence[Member], groups: Sequence[Sequence[OwnedParameter]]) -> list[_Window]:
        """The windows of all units in order, none where no parameter takes part."""
        by_flat: dict[int, list[Member]] = {}
        for member in members:
            by_flat.setdefault(id(member.entry.flat), []).append(member)
        holders: dict[int, list[OwnedParameter]] = {key: [] for key in by_flat}
        for entry in (entry for group in groups for entry in group):
            if id(entry.flat) in holders and entry.slice.numel:
                holders[id(entry.flat)].append(entry)
        flats = sorted(by_flat, key=lambda key: by_flat[key][0].entry.unit)
        windows: list[_Window] = []
        for position, key in enumerate(flats):
            found = sorted(by_flat[key], key=lambda member: member.start)
            unit = found[0].entry.unit
            following = flats[position + 1] if position + 1 < len(flats) else None
            ends_unit = following is None or by_flat[following][0].entry.unit != unit
            windows += self._plan_flat(found, holders[key], ends_unit)
        return windows

    def _plan_flat(
        self, members: Sequence[Member], holders: Sequence[OwnedParameter], ends_unit: bool
    ) -> Iterator[_Window]:
        flat, unit = members[0].entry.flat, members[0].entry.unit
        kinds = {member.parameter: self._kinds(member) for member in members}
        needed = list(dict.fromkeys(kind for found in kinds.values() for kind in found))
        ranges = _cut(members, flat.layout.shard_numel, self._window_numel(flat, needed))
        stored = {kind: [entry for entry in holders if kind in self._stored(entry)] for kind in needed}
        for position, (start, end) in enumerate(ranges):
            inside = [member for member in members if member.start < end and start < member.end]
            ranges_inside = [
                part
                for member in inside
                for part in member.ranges(
                    self._steps.range_numel,
                    max(start, member.start) - member.start,
                    min(end, member.end) - member.start,
                )
            ]
            wanted = dict.fromkeys(kind for member in inside for kind in kinds[member.parameter])
            reads = {
                kind: any(
                    entry.slice.shard_start < end and start < entry.slice.shard_start + entry.slice.numel
                    for entry in stored[kind]
                )
                for kind in wanted
            }
            last = ends_unit and position == len(ranges) - 1
            yield _Window(flat, unit, start, end - start, ranges_inside, reads, last)

    def _stored(self, entry: OwnedParameter) -> set[Kind]:
        """What of a parameter's state is in files."""
        parameter = entry.shard.parameter
        state = {} if parameter is None else self._optimizer.state.get(parameter, {})
        return {Kind(key, value.dtype) for key, value in state.items() if isinstance(value, FileTensor)}

    def _kinds(self, member: Member) -> list[Kind]:
        """What of a parameter's state is in files, or will be after its first step."""
        stored = self._stored(member.entry)
        return sorted(stored, key=str) if stored else self._regions.expected(member.entry.flat, member.group)

    def _window_numel(self, flat: FlatParameters, kinds: Sequence[Kind]) -> int:
        store = self._steps.store
        if store is None:
            raise RuntimeError("There are no files to step on. This is an error in lightning_zero itself.")
        return store.window_numel([dtype.itemsize for dtype in (flat.layout.dtype, *(kind.dtype for kind in kinds))])

    def _request(self, window: _Window) -> Request:
        master = window.flat.master
        if not isinstance(master, FileTensor):
            raise RuntimeError("A master that rests in a file is in memory. This is an error in lightning_zero itself.")
        state = [
            (self._regions.of(window.flat, kind).part(window.start, window.numel), read, True)
            for kind, read in window.kinds.items()
        ]
        read = window.flat.shown is None
        return Request(window.numel, [(master.part(window.start, window.numel), read, True), *state], window)

    # -------------------------------------------------------------------- work

    def _step(self, window: _Window, buffers: Sequence[Tensor]) -> _InWindow:
        """Step on what takes part of one window, in the memory of the window."""
        master, *state = buffers
        with untracked():
            if window.flat.shown is not None:
                master.copy_(window.flat.shown.narrow(0, window.start, window.numel))
            for read, memory in zip(window.kinds.values(), state, strict=True):
                if not read:
                    memory.zero_()
        place = _InWindow(window, master, dict(zip(window.kinds, state, strict=True)), self._regions)
        # One at a time where each operation goes over all that it is given before the next one begins.
        foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        for ranges in [[part] for part in window.ranges] if foreach else [window.ranges]:
            self._segments.run(ranges, place)
        return place

    def _step_empty(self, members: Sequence[Member]) -> None:
        """Step on parameters of which nothing lies on this rank, so that their counters go on as on every rank."""
        self._segments.run([Range(member, 0, 0) for member in members], _Empty())
        self._segments.commit(_Empty())


@dataclass(frozen=True)
class _InWindow:
    """The memory of one window."""

    window: _Window
    memory: Tensor
    kinds: Mapping[Kind, Tensor]
    regions: StateRegions

    def master(self, part: Range) -> Tensor:
        return self.memory.narrow(0, self._start(part), part.numel)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        found = self.kinds.get(kind)
        return None if found is None else found.narrow(0, self._start(part), part.numel)

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        """Nobody knew of it when the window was read."""
        region = self.regions.of(self.window.flat, kind)
        region.part(part.member.start + part.start, part.numel).write(values)

    def whole(self, member: Member, kind: Kind, held: Any) -> Tensor:
        if isinstance(held, FileTensor) and held.dtype == kind.dtype:
            return held
        return self.regions.part(member.entry, kind)

    def _start(self, part: Range) -> int:
        return part.member.start + part.start - self.window.start


class _Empty:
    """The memory of nothing."""

    def master(self, part: Range) -> Tensor:
        return torch.empty(0, dtype=part.member.entry.layout.dtype)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        return torch.empty(0, dtype=kind.dtype)

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        pass

    def whole(self, member: Member, kind: Kind, held: Any) -> Tensor:
        return torch.empty(0, dtype=kind.dtype) if held is None else held


def _cut(members: Sequence[Member], shard_numel: int, window_numel: int) -> list[tuple[int, int]]:
    """Ranges of the shard that hold all members, in order: each from and to a multiple of the alignment, or the end."""
    runs: list[list[int]] = []
    for member in members:
        start, end = (
            member.start // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT,
            min(-(-member.end // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT, shard_numel),
        )
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    return [(s, min(s + window_numel, end)) for start, end in runs for s in range(start, end, window_numel)]


class OffloadedUpdate:
    """Updates all parameters of one optimizer that have a gradient.

    Args:
        optimizer: the user's, elementwise, adapted to shards.
        steps: the run's side of it.
        regions: where state rests in files; ``None`` without a store.
    """

    def __init__(self, optimizer: Optimizer, steps: OffloadedSteps, regions: StateRegions | None) -> None:
        self._steps = steps
        self._memory = SegmentStepper(optimizer, steps.range_numel)
        self._windows = None if regions is None else WindowedStep(optimizer, steps, regions)
        self._groups: Sequence[Sequence[OwnedParameter]] | None = None
        self._units: list[tuple[int, list[Member]]] = []  # what is in memory of each unit with trainable parameters

    def forget(self) -> None:
        """Hold no state any more: it is about to be loaded anew, or given up."""
        self._memory.forget()

    def run(self, groups: Sequence[Sequence[OwnedParameter]]) -> None:
        """One step. See [Note: a failure on one rank].

        Args:
            groups: the parameters of each param group. The same object means the same parameters.

        Raises:
            OffloadError: on every rank, if one could not make the step.

        Collective: every rank.
        """
        if groups is not self._groups:
            units: dict[int, list[Member]] = {}
            for member in members_of(groups):
                found = units.setdefault(member.entry.unit, [])
                if member.entry.flat.rest.master is not Tier.DISK:
                    found.append(member)
            self._groups, self._units = groups, sorted(units.items())
        turns = _Turns(self._units, self._memory, self._steps)
        failure: Exception | None = None
        try:
            with threads(self._steps.threads):
                if self._windows is not None:
                    self._windows.run(groups, turns.finish_before, turns.finish_through)
                turns.finish_all()
        except Exception as error:
            if turns.broken:
                raise
            failure = error
            turns.skip_all()
        self._steps.agree(failure)


class _Turns:
    """The units of one step in their order: steps on what is in memory of each, and says that it is finished."""

    def __init__(
        self, units: Sequence[tuple[int, list[Member]]], memory: SegmentStepper, steps: OffloadedSteps
    ) -> None:
        self._memory = memory
        self._steps = steps
        # Whether publishing itself failed: then the other ranks cannot be reached.
        self.broken = False
        self._left = deque(units)

    def finish_before(self, unit: int) -> None:
        while self._left and self._left[0][0] < unit:
            self._finish()

    def finish_through(self, unit: int) -> None:
        self.finish_before(unit + 1)

    def finish_all(self) -> None:
        while self._left:
            self._finish()

    def skip_all(self) -> None:
        while self._left:
            self._publish()

    def _finish(self) -> None:
        unit, members = self._left[0]
        self._memory.run(members, unit)
        self._publish()

    def _publish(self) -> None:
        unit, _ = self._left.popleft()
        self.broken = True
        self._steps.unit_stepped(unit)
        self.broken = False
