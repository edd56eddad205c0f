"""What torch's allocator for the CPU gives out and takes back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
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
