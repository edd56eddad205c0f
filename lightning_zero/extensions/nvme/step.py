"""The step on masters and state in files: window by window, and all ranks together or none.

[Note: windows]
Masters and state that rest in files are read ahead in windows, stepped on, and written behind. A window is a range of
one layout's shard that starts at a multiple of 4096 elements, so that it starts at a multiple of 4096 bytes in every
file. Parameters do not end where windows end:

    shard     |      a      |    b    |            c             | d | gap
    windows   [     0     )[     1     )[     2     )[     3     )
    stepped on  a0           a1 b1       b2 c2        c3           (d has no gradient: its end of the file is not read)

Of each window the optimizer gets ranges of parameters: see [Note: ranges]. Their state is taken over when the last
window of the unit is done.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import bare_step, untracked
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError
from lightning_zero.extensions.nvme.files import FileTensor, fill_from
from lightning_zero.extensions.nvme.pipeline import Request
from lightning_zero.extensions.nvme.store import WINDOW_ALIGNMENT, NvmeStore
from lightning_zero.offload.host import padded_nbytes
from lightning_zero.optim.state import Kind, StateHomes, covers, is_like
from lightning_zero.optim.stepper import Memory, Range, Stepper, Steps, ranges_of
from lightning_zero.plan.layout import ALIGNMENT
from lightning_zero.shards.slice import FlatParameters, Slice

__all__ = ["FileHomes", "FileStepper", "FileSteps", "probe_state"]

Regions = dict[tuple[FlatParameters, Kind], FileTensor]

# Regions that an optimizer of an earlier fit has left in files which are still there.
_FREE: weakref.WeakKeyDictionary[NvmeStore, list[FileTensor]] = weakref.WeakKeyDictionary()


class FileHomes(StateHomes):
    """Keeps the state of one optimizer in files of ``store``, in one region for each layout and kind of state.

    The optimizer is not held; its regions are free for others when nobody holds it any more.
    """

    def __init__(self, optimizer: Optimizer, label: str, store: NvmeStore) -> None:
        self.store = store
        self._label = label
        self._regions: Regions = {}
        self._expected: dict[tuple[int, torch.dtype], list[Kind]] = {}
        weakref.finalize(optimizer, _give_back, weakref.ref(store), self._regions).atexit = False

    def slice_for(self, entry: Slice, key: str, dtype: torch.dtype) -> Tensor:
        if _in_file(entry):
            return self.part(entry, Kind(key, dtype))
        return super().slice_for(entry, key, dtype)

    def put(self, entry: Slice, key: str, value: Tensor) -> Tensor:
        if not _in_file(entry):
            return super().put(entry, key, value)
        place = self.part(entry, Kind(key, value.dtype))
        fill_from(place, value)
        return place

    def expected(self, optimizer: Optimizer, flat: FlatParameters, group: int) -> list[Kind]:
        """What the optimizer will make for a parameter of a param group when it first steps on it."""
        place = (group, flat.layout.dtype)
        if place not in self._expected:
            found = probe_state(optimizer, group, flat.layout.dtype)
            self._expected[place] = [Kind(key, dtype) for key, dtype in found.items()]
        return self._expected[place]

    def reserve(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[Slice]],
        check_room: Callable[[int], None],
    ) -> None:
        """Allocate what the optimizer will need for the parameters of each group that are new, so that a full disk is
        noticed before training begins: ``check_room`` raises on every rank if so many bytes more have no room.
        Collective: every rank."""
        wanted = {
            (entry.flat, kind): entry.flat.layout.shard_numel
            for index, group in enumerate(groups)
            for entry in group
            if entry.parameter is not None and _in_file(entry)
            for kind in self.expected(optimizer, entry.flat, index)
        }
        missing = {place: numel for place, numel in wanted.items() if place not in self._regions}
        free = [(region.numel(), region.dtype) for region in _FREE.get(self.store, [])]
        nbytes = 0
        for (_, kind), numel in missing.items():
            if (numel, kind.dtype) in free:
                free.remove((numel, kind.dtype))
            else:
                nbytes += padded_nbytes(numel * kind.dtype.itemsize)
        check_room(nbytes)
        for flat, kind in missing:
            self.region(flat, kind)

    def release(self) -> None:
        _give_back(weakref.ref(self.store), self._regions)

    def region(self, flat: FlatParameters, kind: Kind) -> FileTensor:
        """1-D, as many elements as the shard; any content where nothing was written. Raises if there is no space for
        it."""
        if (flat, kind) not in self._regions:
            numel, free = flat.layout.shard_numel, _FREE.get(self.store, [])
            fitting = [place for place, r in enumerate(free) if r.numel() == numel and r.dtype == kind.dtype]
            what = f"'{kind.key}' of {self._label} for '{flat.layout.parameters[0].name}' and what lies with it"
            found = free.pop(fitting[0]) if fitting else self.store.allocate(numel, kind.dtype, what)
            self._regions[flat, kind] = found
        return self._regions[flat, kind]

    def part(self, entry: Slice, kind: Kind) -> FileTensor:
        """1-D: the elements of a region that belong to one parameter."""
        return self.region(entry.flat, kind).part(entry.place.shard_start, entry.place.numel)


def _in_file(entry: Slice) -> bool:
    """Whether state of a parameter belongs in a file: not that of a frozen one that stays on the device."""
    return entry.flat.rest.state is Tier.DISK and entry.place.numel > 0


def _give_back(weak_store: weakref.ref[NvmeStore], regions: Regions) -> None:
    store = weak_store()
    if store is not None and regions:
        _FREE.setdefault(store, []).extend(regions.values())
    regions.clear()


def probe_state(optimizer: Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The state, of which every element of a parameter has one, that an elementwise optimizer will make for masters of
    ``dtype`` in a param group: key to dtype.

    A constructor that makes state for its parameters has told already. Otherwise a twin of the optimizer steps once on
    a tiny parameter of zeros with a gradient of zeros. It shares all but state and groups, so that nothing is copied,
    and what torch notes in it (which checks of a first step were made) is gone with it.
    """
    options = optimizer.param_groups[group]
    for parameter in options["params"]:
        if parameter.dtype == dtype and optimizer.state.get(parameter):
            state = optimizer.state[parameter].items()
            return {k: v.dtype for k, v in state if isinstance(v, Tensor) and is_like(k, v, parameter.shape)}
    with untracked():
        tiny = nn.Parameter(torch.zeros(ALIGNMENT, dtype=dtype))
        tiny.grad = torch.zeros_like(tiny)
        on_host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
        twin: Optimizer = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[{**on_host, "params": [tiny]}])
        bare_step(twin)()
    return {key: value.dtype for key, value in twin.state.get(tiny, {}).items() if covers(key, value, ALIGNMENT)}


@dataclass(frozen=True, kw_only=True)
class FileSteps(Steps):
    """Steps on masters and state in files of ``store``.

    ``check_room`` is called with the bytes that are about to be added to the files, also if these are none. It raises
    ``OffloadError`` on every rank if a disk has no room for those of all ranks that share it. Collective: every rank.
    """

    check_room: Callable[[int], None]
    store: NvmeStore

    def homes(self, optimizer: Optimizer, label: str) -> StateHomes:
        return FileHomes(optimizer, label, self.store)

    def stepper(self, optimizer: Optimizer, homes: StateHomes) -> Stepper:
        return FileStepper(optimizer, self, cast(FileHomes, homes))


@dataclass(frozen=True, eq=False)
class _Window:
    flat: FlatParameters
    start: int
    numel: int
    ranges: Sequence[Range]
    kinds: Sequence[Kind]  # state, in the order of the buffers behind the master's


class _InWindow(Memory):
    """The memory of one window."""

    def __init__(
        self, optimizer: Optimizer, window: _Window, memory: Tensor, kinds: Mapping[Kind, Tensor], homes: FileHomes
    ) -> None:
        super().__init__(optimizer)
        self._window, self._memory = window, memory
        self._kinds, self._homes = kinds, homes

    def master(self, part: Range) -> Tensor:
        return self._memory.narrow(0, self._start(part), part.numel)

    def state(self, part: Range, kind: Kind) -> Tensor | None:
        found = self._kinds.get(kind)
        return None if found is None else found.narrow(0, self._start(part), part.numel)

    def keep(self, part: Range, kind: Kind, values: Tensor) -> None:
        """Nobody knew of it when the window was read."""
        region = self._homes.region(self._window.flat, kind)
        region.part(part.entry.place.shard_start + part.start, part.numel).write(values)

    def whole(self, entry: Slice, kind: Kind, former: Any) -> Tensor:
        if isinstance(former, FileTensor) and former.dtype == kind.dtype:
            return former
        return self._homes.part(entry, kind)

    def _start(self, part: Range) -> int:
        return part.entry.place.shard_start + part.start - self._window.start


def _span(entry: Slice) -> tuple[int, int]:
    """Where a parameter's elements begin in the shard, and where they end."""
    return entry.place.shard_start, entry.place.shard_start + entry.place.numel


def _cut(entries: Sequence[Slice], shard_numel: int, window_numel: int) -> list[tuple[int, int]]:
    """Ranges of the shard that hold all entries, in order: each from and to a multiple of the alignment, or the end."""
    runs: list[list[int]] = []
    for first, last in map(_span, entries):
        start = first // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
        end = min(-(-last // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT, shard_numel)
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    return [(s, min(s + window_numel, end)) for start, end in runs for s in range(start, end, window_numel)]


class FileStepper(Stepper):
    """Updates the parameters of one elementwise optimizer whose masters and state are in files.

    A unit's last window may not be in the file yet when it is published: all files are up to date when ``run`` returns.
    If something could not be read or written, masters and state are useless.
    """

    def __init__(self, optimizer: Optimizer, steps: FileSteps, homes: FileHomes) -> None:
        super().__init__(optimizer, steps)
        self._files, self._homes = steps, homes

    def take_over(self, groups: Sequence[Sequence[Slice]], take: Callable[[], None]) -> None:
        failure: OffloadError | None = None
        try:
            self._homes.reserve(self._optimizer, groups, self._files.check_room)
            take()
        except OffloadError as error:
            failure = error
        self._files.agree(failure)

    def _update(self) -> None:
        self._settle()
        entries = [entry for entry in self.members if entry.gradient is not None]
        # Parameters of which nothing lies on this rank, so that their counters go on as on every rank.
        nothing = Memory(self._optimizer)
        with untracked():
            self._ranges.run([Range(e, self.members[e], 0, 0) for e in entries if not e.place.numel], nothing)
        self._ranges.commit(nothing)
        windows = self._plan([entry for entry in entries if entry.place.numel])
        last = {window.flat.unit: window for window in windows}

        def work(request: Request, buffers: list[Tensor]) -> None:
            window: _Window = request.tag
            self._publish_before(window.flat.unit)
            memory = self._step(window, buffers)
            window.flat.refresh_part(window.start, buffers[0])
            if window is last[window.flat.unit]:
                self._ranges.commit(memory)
                self._publish_before(window.flat.unit + 1)

        if windows:
            self._files.store.pipeline().run(map(self._request, windows), work)
        self._publish_before(math.inf)

    def _publish_before(self, end: float) -> None:
        while self._left and self._left[0] < end:
            self._publish()

    def _settle(self) -> None:
        """Bring state that somebody has put into the optimizer, as its ``load_state_dict`` does, to the files.

        That may be the state of another parameter, also of one without a gradient now: everything that is elsewhere in
        files is read before anything is written. Two tensors of state that are one in the files are refused: they would
        part with the first step.
        """
        moved: list[tuple[nn.Parameter, str, FileTensor, Tensor]] = []
        seen: dict[tuple[Any, ...], str] = {}
        for entry in self.members:
            for key, value in self._optimizer.state.get(entry.target, {}).items():
                if not entry.place.numel or not covers(key, value, entry.place.numel):
                    continue
                part = self._homes.part(entry, Kind(key, value.dtype))
                if not isinstance(value, FileTensor):
                    moved.append((entry.target, key, part, value))
                    continue
                name = f"'{key}' of '{entry.name}'"
                if seen.setdefault(value.identity, name) != name:
                    raise ValueError(
                        f"{seen[value.identity]} and {name} are one tensor in the optimizer's state. State in files is "
                        "a tensor of its own for each: put a `.clone()` there."
                    )
                if value.identity != part.identity:
                    moved.append((entry.target, key, part, value.read()))
        for parameter, key, part, value in moved:
            part.write(value)
            self._optimizer.state[parameter][key] = part

    def _plan(self, entries: Sequence[Slice]) -> list[_Window]:
        """The windows of all units in order, none where no parameter takes part."""
        by_flat: dict[FlatParameters, list[Slice]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.unit, entry.place.shard_start)):
            by_flat.setdefault(entry.flat, []).append(entry)
        return [window for flat, found in by_flat.items() for window in self._plan_flat(flat, found)]

    def _plan_flat(self, flat: FlatParameters, entries: Sequence[Slice]) -> Iterator[_Window]:
        kinds = {entry: self._kinds(entry) for entry in entries}
        state = [kind.dtype for kind in dict.fromkeys(chain.from_iterable(kinds.values()))]
        most = self._files.store.window_numel([dtype.itemsize for dtype in (flat.layout.dtype, *state)])
        for start, end in _cut(entries, flat.layout.shard_numel, most):
            inside = [entry for entry in entries if _span(entry)[0] < end and start < _span(entry)[1]]
            ranges: list[Range] = []
            for entry in inside:
                first, last = _span(entry)
                own = max(start, first) - first, min(end, last) - first
                ranges += ranges_of(entry, self.members[entry], self._files.range_numel, *own)
            found = list(dict.fromkeys(kind for entry in inside for kind in kinds[entry]))
            yield _Window(flat, start, end - start, ranges, found)

    def _kinds(self, entry: Slice) -> list[Kind]:
        """What of a parameter's state is in files, or will be after its first step."""
        state = self._optimizer.state.get(entry.target, {})
        stored = {Kind(key, value.dtype) for key, value in state.items() if isinstance(value, FileTensor)}
        if stored:
            return sorted(stored, key=str)
        return self._homes.expected(self._optimizer, entry.flat, self.members[entry])

    def _request(self, window: _Window) -> Request:
        tensors = [(cast(FileTensor, window.flat.master), window.flat.shown is None)]
        tensors += [(self._homes.region(window.flat, kind), True) for kind in window.kinds]
        parts = [(tensor.part(window.start, window.numel), read, True) for tensor, read in tensors]
        return Request(window.numel, parts, window)

    def _step(self, window: _Window, buffers: Sequence[Tensor]) -> _InWindow:
        """Step on what takes part of one window, in the memory of the window."""
        master, *state = buffers
        place = _InWindow(self._optimizer, window, master, dict(zip(window.kinds, state, strict=True)), self._homes)
        # One at a time where each operation goes over all that it is given before the next one begins.
        foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        with untracked():
            if window.flat.shown is not None:
                master.copy_(window.flat.shown.narrow(0, window.start, window.numel))
            for ranges in [[part] for part in window.ranges] if foreach else [window.ranges]:
                self._ranges.run(ranges, place)
        return place
