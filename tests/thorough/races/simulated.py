"""A device that is none: operators of the CPU, on streams that the real ``lightning_zero.comm.streams`` makes.

Inside of ``simulated_device`` the package takes the way that it takes on CUDA: ``torch.cuda``'s streams and events are
ones that write down who waits for whom, a dispatch mode writes down which bytes every operator reads and writes, and
its two worker threads are actors too, although they run at once. Nothing here is asynchronous: what a GPU might do at
another time is found in the trace, see ``trace.py``.

[Note: how slow the device is]
Nothing is over before somebody has waited for it: no event, and no job of a thread. That is the case in which most can
go wrong. A ``quick`` device has done everything at once, for the ways that are taken then only.

[Note: what lies on the host]
Both sides are memory of the CPU. On the host lies what the package takes there (``HostMemory``, ``host_memory``), what
is computed from nothing else, scalars that ``torch.tensor`` made, and what an optimizer makes beside such memory. All
else lies on the device. Copies between both, which are asynchronous if they are ``non_blocking``, are the device's.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_zero
from lightning_zero._torch import WeakStorage, storage_key
from lightning_zero.comm import streams
from lightning_zero.extensions.nvme import files, store
from lightning_zero.extensions.nvme.files import FileTensor, fill_from
from lightning_zero.offload import host, transfers
from tests.thorough.races.trace import Free, Item, Mark, Use, Wait, Work

__all__ = ["Recorder", "simulated_device"]

HOST, COMPUTE = "host", "compute"
_PACKAGE = str(Path(lightning_zero.__file__).parent) + "/"
_STREAMS = "comm/streams.py"
# Functions that wait for whoever calls them: which of their callers it was is a part of the site.
_ON_BEHALF = {"wait", "receive", "order", "settle", "drain", "mark", "result"}
_WIRE = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_", "c10d::broadcast_"}
# What makes memory that may lie on either side.
_EITHER = ("optim/", "comm/control.py", "trainer/loaders.py", "extensions/nvme/file")
_ANSWERS = {"aten::_local_scalar_dense", "aten::equal"}  # the host waits for what they say
_NO_DATA = {"aten::set_", "aten::resize_"}  # change what a tensor shows, not what is there
_SWEEP = 256  # works between two looks for memory that only its owner has used


class _Memory:
    """One storage that was seen. ``on_host`` is ``None`` until what it is used with tells."""

    def __init__(self, number: int, tensor: Tensor, owner: str, on_host: bool | None) -> None:
        self.number, self.owner, self.on_host = number, owner, on_host
        self.storage = WeakStorage(tensor)  # no other memory has its key as long as this is here

    @property
    def gone(self) -> bool:
        return self.storage.lock() is None


class _Touched(NamedTuple):
    memory: _Memory
    tensor: Tensor
    writes: bool

    @property
    def is_argument(self) -> bool:
        """Whether an operator of the device takes it along: a scalar, which the host reads as it issues that."""
        return self.memory.on_host is True and not self.tensor.dim() and not self.writes


class Recorder(TorchDispatchMode):
    """Writes a trace of everything that this thread computes.

    Args:
        quick: whether everything is over at once; see [Note: how slow the device is].

    Attributes:
        trace: what was done.
        mixed: operators that took memory of both sides and are no copies: on CUDA they would fail.
    """

    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.quick = quick
        self.trace: list[Item] = []
        self.mixed: list[str] = []
        self.thread = HOST
        self.stream = SimulatedStream(self, COMPUTE)
        self._streams = [self.stream]
        self._events = 0
        self._memories = 0
        self._known: dict[int, _Memory] = {}
        self._travelled: set[int] = set()  # keys of what somebody else than its owner has used
        self._works = 0

    # ---------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        name, views, arguments = _schema(func)
        if views:
            if name == "aten::lift_fresh" and storage_key(args[0]) not in self._known:
                self._memory(args[0], on_host=True)
            return
        if name.startswith("c10d::"):
            if name in _WIRE:  # they write to the first argument, and read the second; the others are the host's
                self._work(name, _tensors(args[1]), _tensors(args[0]))
            elif name == "c10d::allreduce_" and False in args[4:5]:  # else of a few numbers, for which somebody waits
                self._work(name, (), _tensors(args[0]))
            return
        if name in _NO_DATA:
            return
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for index, (argument, written) in enumerate(arguments):
            value = args[index] if index < len(args) else kwargs.get(argument)
            (writes if written else reads).extend(_tensors(value))
        inputs = [memory for tensor in (*reads, *writes) if (memory := self._memory(tensor)) is not None]
        fresh = [tensor for tensor in _tensors(result) if storage_key(tensor) not in self._known]
        for tensor in fresh:
            self._memory(tensor, inputs)
        writes += fresh  # also if nothing is written: the memory may have been another tensor's, on this stream
        copies = name in ("aten::copy_", "aten::_to_copy")
        waits = name in _ANSWERS or (copies and not kwargs.get("non_blocking", len(args) > 2 and args[2]))
        self._work(name, reads, writes, copies, waits)

    def _side(self, inputs: Sequence[_Memory]) -> bool | None:
        """Where something lies that is computed from others, or from nothing."""
        if inputs:
            sides = {memory.on_host for memory in inputs}
            return None if sides == {None} else False not in sides
        return None if _places(sys._getframe(1), most=1).startswith(_EITHER) else False

    def _work(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], copies: bool = False, waits: bool = False
    ) -> None:
        touched = [_Touched(memory, tensor, False) for tensor in reads if (memory := self._memory(tensor))]
        touched += [_Touched(memory, tensor, True) for tensor in writes if (memory := self._memory(tensor))]
        sides = {memory.on_host for memory, _, _ in touched} - {None}
        if not sides:
            return
        if len(sides) == 1:
            for memory, _, _ in touched:
                memory.on_host = next(iter(sides))
        where = _places(sys._getframe(1), most=1) or "outside of the package"
        if len(sides) == 2 and not copies:
            self._append(self.thread, what, where, [t for t in touched if t.is_argument])
            touched = [t for t in touched if not t.is_argument]
            self.mixed += [f"{what} ({where})" for memory, _, _ in touched if memory.on_host]
        on_device = False in sides
        self._append(self.stream.name if on_device else self.thread, what, where, touched)
        if on_device and waits and (len(sides) == 2 or what in _ANSWERS):
            self.wait(self.thread, self.mark(self.stream.name))

    def _append(self, actor: str, what: str, where: str, touched: Sequence[_Touched]) -> None:
        self._sweep()
        self._travelled.update(storage_key(tensor) for memory, tensor, _ in touched if memory.owner != actor)
        uses = [Use(memory.number, *_bytes(tensor), writes) for memory, tensor, writes in touched]
        self.trace.append(Work(actor, self.thread, what, where, uses))

    # ------------------------------------------------------------------- memory

    def take(self, tensor: Tensor) -> int | None:
        """Note that memory is the host's. Returns its number."""
        memory = self._memory(tensor, on_host=True)
        return None if memory is None else memory.number

    def unlock(self, number: int, nbytes: int) -> None:
        """Note that host memory is page-locked no more: nothing of the device may still use it."""
        self.trace.append(Work(self.thread, self.thread, "page-unlock", "", [Use(number, 0, nbytes, True)]))

    def fill_from(self, target: Tensor, source: Tensor) -> None:
        """What fetches a file does, noted."""
        fill_from(target, source)
        if (memory := self._memory(target)) is not None:
            self._append(self.thread, "read", _places(sys._getframe(1), most=1), [_Touched(memory, target, True)])

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        memory = self._known.get(storage_key(tensor))
        return memory is not None and memory.on_host is True

    def _memory(self, tensor: Tensor, inputs: Sequence[_Memory] = (), on_host: bool = False) -> _Memory | None:
        if tensor.device.type != "cpu" or not tensor.numel() or not (key := storage_key(tensor)):
            return None
        memory = self._known.get(key)
        if memory is None:
            side = on_host or self._side(inputs)
            owner = self.thread if side else self.stream.name
            self._memories += 1
            memory = self._known[key] = _Memory(self._memories, tensor, owner, side)
        return memory

    def _sweep(self, whole: bool = False) -> None:
        """Note what memory has been given up since the last work."""
        self._works += 1
        whole = whole or self._works % _SWEEP == 0
        for key in [key for key in (self._known if whole else self._travelled) if self._known[key].gone]:
            memory = self._known.pop(key)
            self._travelled.discard(key)
            self.trace.append(Free(memory.number, self.thread if memory.on_host else memory.owner, self.thread))

    # ------------------------------------------------------------------- events

    def new_stream(self) -> SimulatedStream:
        """Another stream of the device."""
        self._streams.append(SimulatedStream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        for stream in self._streams:
            self.wait(self.thread, self.mark(stream.name), site("synchronize"))

    def mark(self, actor: str, site: str = "") -> int:
        """An event behind all of an actor so far."""
        self._events += 1
        self.trace.append(Mark(actor, self.thread, self._events, site))
        return self._events

    def wait(self, actor: str, event: int | None, site: str = "") -> None:
        """Let an actor go on behind an event; ``None``: behind nothing."""
        if event is not None:
            self.trace.append(Wait(actor, event, site))

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Issue the work inside on a stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def in_thread(self, name: str, compute: SimulatedStream) -> Iterator[None]:
        """Be another thread, which begins behind this one."""
        begun, before = self.mark(self.thread), self.thread
        self.thread = name
        self.wait(name, begun)
        try:
            with self.on(compute):
                yield
        finally:
            self.thread = before


class SimulatedStream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def wait_event(self, event: SimulatedEvent) -> None:
        self._recorder.wait(self.name, event.number, site("wait"))

    def wait_stream(self, stream: SimulatedStream) -> None:
        self._recorder.wait(self.name, self._recorder.mark(stream.name), site("wait"))


class SimulatedEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.number: int | None = None
        self._over = False

    def record(self, stream: SimulatedStream) -> None:
        self.number = self._recorder.mark(stream.name, site("mark"))

    def synchronize(self) -> None:
        self._recorder.wait(self._recorder.thread, self.number, site("synchronize"))
        self._over = True

    def query(self) -> bool:
        if self._recorder.quick and not self._over:
            self._recorder.wait(self._recorder.thread, self.number, site("query"))
            self._over = True
        return self._over


class SimulatedFuture(Future[Any]):
    """The result of a job that is over, of which nobody knows before asking for it."""

    def __init__(self, recorder: Recorder, event: int) -> None:
        super().__init__()
        self._recorder, self._event = recorder, event
        self._asked = False

    def done(self) -> bool:
        if self._recorder.quick and not self._asked:
            self._ask()
        return self._asked

    def result(self, timeout: float | None = None) -> Any:
        self._ask()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ask()
        return super().exception(timeout)

    def _ask(self) -> None:
        self._recorder.wait(self._recorder.thread, self._event, site("result"))
        self._asked = True


class SimulatedThread:
    """Stands in for ``ThreadPoolExecutor(1)``: another actor, which does its jobs at once."""

    def __init__(
        self, recorder: Recorder, count: int, thread_name_prefix: str, initializer: Callable[[], None] = lambda: None
    ) -> None:
        self._recorder, self._name = recorder, thread_name_prefix
        self._compute = SimulatedStream(recorder, COMPUTE)
        initializer()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        value, error = None, None
        with self._recorder.in_thread(self._name, self._compute):
            try:
                value = job()
            except Exception as caught:
                error = caught
        future = SimulatedFuture(self._recorder, self._recorder.mark(self._name))
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True) -> None:
        """There is no thread to end."""


# ---------------------------------------------------------------------------------------------------------------------
# Taking the place of CUDA


@contextmanager
def simulated_device(quick: bool = False, traced: bool = True) -> Iterator[Recorder]:
    """Let the package take the memory that it computes with for a CUDA device's, in this process and thread.

    ``traced``: whether operators are looked at, which takes as long as the rest. Else only what the package takes lies
    on the host, and nothing that is computed from that: not for what offloads.
    """
    recorder = Recorder(quick)
    allocate = host._allocate
    numbers: dict[int, int] = {}  # of host memory, by address

    def allocated(*args: Any, **named: Any) -> Any:
        memory, owner = allocate(*args, **named)
        if (number := recorder.take(memory)) is not None:
            numbers[memory.data_ptr()] = number
        return memory, owner

    def lock(owner: Any) -> weakref.finalize[Any, Any]:
        address, nbytes = ctypes.addressof(owner), len(owner)
        return weakref.finalize(owner, lambda: recorder.unlock(numbers[address], nbytes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_KINDS", ("cpu",))
        patch.setattr(torch.cuda, "Stream", lambda device, priority=0: recorder.new_stream())
        patch.setattr(torch.cuda, "Event", lambda **options: SimulatedEvent(recorder))
        patch.setattr(torch.cuda, "current_stream", lambda device: recorder.stream)
        patch.setattr(torch.cuda, "stream", recorder.on)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: recorder.synchronize())
        patch.setattr(host, "_allocate", allocated)
        patch.setattr(host, "_lock", lock)
        for module in (transfers, store):
            patch.setattr(module, "ThreadPoolExecutor", partial(SimulatedThread, recorder))
        for module in (transfers, files):
            patch.setattr(module, "is_on_host", recorder.is_on_host)
        patch.setattr(store, "fill_from", recorder.fill_from)
        with recorder if traced else nullcontext():
            yield recorder
        gc.collect()
        recorder._sweep(whole=True)


def site(kind: str) -> str:
    """What the package waits for, or marks, and where: stable as long as the line is."""
    return f"{kind} in {_places(sys._getframe(2), most=8, exact=True)}"


def _places(frame: FrameType | None, most: int, exact: bool = False) -> str:
    """Where in the package a frame is; in what waits for its caller, also where that is, at ``most`` so many."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        name = code.co_filename.removeprefix(_PACKAGE)
        if name != code.co_filename and name != _STREAMS:
            found.append(f"{name} {code.co_name}" + (f": {_line(frame)}" if exact and not found else ""))
            if code.co_name not in _ON_BEHALF:
                break
        frame = frame.f_back
    return " < ".join(found)


def _line(frame: FrameType) -> str:
    """What a frame is at; and the how many-th such line it is, if it is not the first of its function."""
    file, first, now = frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno
    text = getline(file, now).strip()
    before = sum(getline(file, number).strip() == text for number in range(first, now))
    return f"{text} ({before + 1})" if before else text


class _Schema(NamedTuple):
    name: str
    views: bool  # all that it gives back shows the memory of an argument
    arguments: Sequence[tuple[str, bool]]  # names, and whether it writes to them


@functools.cache
def _schema(func: Any) -> _Schema:
    schema = func._schema
    views = schema.returns and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    names = (argument.name for argument in schema.arguments)
    return _Schema(schema.name, bool(views), list(zip(names, written, strict=True)))


def _tensors(value: Any) -> Sequence[Tensor]:
    if type(value) is Tensor or type(value) is Parameter:  # the usual ones
        return (value,)
    if value is None or isinstance(value, (bool, int, float)):
        return ()
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not isinstance(leaf, FileTensor)]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage."""
    steps = sum((length - 1) * abs(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + (steps + 1) * tensor.itemsize
