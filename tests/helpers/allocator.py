"""What torch's allocator for the CPU gives out and takes back, and what that for CUDA would ask of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Allocations:
    """Bytes that are given out beyond those at the beginning, while it is active.

    Made before what may be given back then: of memory from before it was made, the allocator does not tell.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self.changes: list[int] = []
        self._profile: Any = None

    def __enter__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(None, None, None)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.changes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]

    @property
    def most(self) -> int:
        """At the worst moment; at least 0."""
        return max(0, *self.totals())

    def totals(self) -> Iterator[int]:
        """After each change."""
        total = 0
        for change in self.changes:
            total += change
            yield total


class Caching:
    """Torch's allocator for CUDA, by its rules without options: how often it asks the driver for memory."""

    def __init__(self) -> None:
        self.calls = 0  # of cudaMalloc
        self.reserved = 0
        self._free: dict[tuple[int, bool], list[_Block]] = {}  # by stream, and whether small
        self._used: dict[int, _Block] = {}

    def take(self, address: int, nbytes: int, stream: int) -> None:
        """Of work on a stream; ``address`` stands for the memory."""
        nbytes, small = -(-nbytes // 512) * 512, nbytes <= 2**20
        free = self._free.setdefault((stream, small), [])
        block = min((one for one in free if one.nbytes >= nbytes), key=lambda one: one.nbytes, default=None)
        if block is None:
            self.calls += 1
            whole = 2 * 2**20 if small else 20 * 2**20 if nbytes < 10 * 2**20 else -(-nbytes // 2**21) * 2**21
            self.reserved += whole
            block = _Block(whole, free)
        else:
            free.remove(block)
        rest = block.nbytes - nbytes
        if rest >= 512 if small else rest > 2**20:
            other = _Block(rest, free, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.nbytes, block.after = nbytes, other
            free.append(other)
        self._used[address] = block

    def give(self, address: int) -> None:
        """Give memory back. What was taken before this one was made is nobody's here."""
        block = self._used.pop(address, None)
        if block is None:
            return
        for other in (block.before, block.after):
            if other is not None and any(other is one for one in block.free):
                block.free.remove(other)
                if other is block.before:
                    block.before = other.before
                else:
                    block.after = other.after
                block.nbytes += other.nbytes
        for other, name in ((block.before, "after"), (block.after, "before")):
            if other is not None:
                setattr(other, name, block)
        block.free.append(block)


@dataclass(eq=False)
class _Block:
    nbytes: int
    free: list[_Block]  # where it is while nobody has it
    before: _Block | None = None
    after: _Block | None = None
