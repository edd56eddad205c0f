"""``torch.cuda`` over the simulated device: its streams, events, memory statistics, and nccl."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.nccl
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["install"]

_GIBIBYTE = 2**30
_SYNC_MODES = {"default": 0, "warn": 1, "error": 2}

_device: Any = None  # the library


def _library(folder: Path) -> Any:
    library = ctypes.CDLL(str(folder / "device.so"), mode=ctypes.RTLD_GLOBAL)
    for name in ("gpu_stream", "gpu_pending", "gpu_allocated", "gpu_peak"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("gpu_counter", "gpu_initial_seed"):
        getattr(library, name).restype = ctypes.c_uint64
    library.gpu_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.gpu_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.gpu_unregister.argtypes = [ctypes.c_void_p]
    library.gpu_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.gpu_pending.argtypes = library.gpu_flush_to.argtypes = [ctypes.c_uint64]
    return library


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    asked = None if device is None else torch.device(device).index
    return int(_device.gpu_device()) if asked is None else asked


class Stream:
    """An order of work, which here is that of the host."""

    _made = 1000
    _priorities: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **where: Any) -> None:
        if stream_id is None:
            Stream._made += 1
            Stream._priorities[Stream._made] = priority
        self.stream_id = Stream._made if stream_id is None else stream_id
        self.priority = Stream._priorities.get(self.stream_id, 0)
        self.device_index = where.get("device_index", None if device is None else _index(device))
        self.device_index = _index() if self.device_index is None else self.device_index
        self.device = torch.device("cuda", self.device_index)
        self.cuda_stream = self.stream_id
        self.device_type = 1

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least one, and the greatest."""
        return 0, -5

    def wait_event(self, event: Event) -> None:
        """Nothing: work is in order."""
        if not isinstance(event, Event):
            raise TypeError(f"a stream waits for events, not for {type(event).__name__}")

    def wait_stream(self, stream: Stream) -> None:
        """Nothing: work is in order."""
        if not isinstance(stream, Stream):
            raise TypeError(f"a stream waits for streams, not for {type(stream).__name__}")

    def record_event(self, event: Event | None = None) -> Event:
        """A mark behind what was issued."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have all copies to the host arrive."""
        _device.gpu_flush()

    def query(self) -> bool:
        """Likewise."""
        _device.gpu_flush()
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))


class Event:
    """A mark among the copies to the host: those before it have arrived for who has waited for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **options: Any) -> None:
        self._timing = enable_timing
        self._number: int | None = None
        self._asked = False
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark this moment."""
        self._number, self._time, self._asked = _device.gpu_counter(), time.perf_counter(), False

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing: work is in order."""

    def query(self) -> bool:
        """Whether it has come: not the first time that somebody asks, if a copy is on its way."""
        if self._number is not None and _device.gpu_pending(self._number) and not self._asked:
            self._asked = True
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Have the copies before it arrive."""
        if self._number is not None:
            _device.gpu_flush_to(self._number)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds of the host between two of them."""
        if not (self._timing and other._timing):
            raise RuntimeError("both events need enable_timing=True")
        return (other._time - self._time) * 1e3


def _current_stream(device: Any = None) -> Stream:
    return Stream(stream_id=_device.gpu_stream(_index(device)), device_index=_index(device))


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _device.gpu_set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """Work inside is on a stream, and so on its device."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._device, self._before = _index(), _current_stream(self._stream.device_index)
            _device.gpu_set_device(self._stream.device_index)
            _set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            _set_stream(self._before)
            _device.gpu_set_device(self._device)


def _set_device(device: Any) -> None:
    if not 0 <= _index(device) < _device.gpu_count():
        raise RuntimeError("invalid device ordinal")
    _device.gpu_set_device(_index(device))


def _exchange_device(device: int) -> int:
    before = _index()
    if device >= 0:
        _device.gpu_set_device(device)
    return before


class _Runtime:
    """Of CUDA's runtime what locks pages."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return int(_device.gpu_register(address, nbytes))

    def cudaHostUnregister(self, address: int) -> int:
        return int(_device.gpu_unregister(address))


class _Properties:
    name = "simulated"
    major, minor = 9, 0
    total_memory = 80 * _GIBIBYTE
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    L2_cache_size = 50 * 2**20
    gcnArchName = uuid = ""


def _call(name: str) -> Callable[..., Any]:
    """A function of the library, as Python has them: torch keeps sets of them."""
    function = getattr(_device, name)
    return lambda *arguments: function(*arguments)


def install() -> None:
    """Put all of it in the place of torch's, for good. Once, before anything asks whether there is a GPU."""
    global _device
    folder = Path(os.environ["SIMULATED_GPU"])
    _device = _library(folder)
    _replace_functions()
    _replace_storages()
    _replace_nccl(folder)
    torch.zeros(1, pin_memory=True)  # once, while nobody looks


def _replace_functions() -> None:
    cuda: Any = torch.cuda
    nothing = lambda *arguments: None  # noqa: E731
    for name, function in {
        "getDeviceCount": _call("gpu_count"),
        "init": nothing,
        "getDevice": _call("gpu_device"),
        "setDevice": _call("gpu_set_device"),
        "synchronize": _call("gpu_flush"),
        "isInBadFork": lambda: False,
        "isCurrentStreamCapturing": lambda: False,
        "emptyCache": nothing,
        "getCompiledVersion": lambda: 12080,
        "getArchFlags": lambda: "sm_90",
        "resetPeakMemoryStats": _call("gpu_reset_peak"),
        "set_sync_debug_mode": _call("gpu_sync_mode"),
        "getCurrentRawStream": _call("gpu_stream"),
    }.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda._initialized = True
    for name, function in {
        "_lazy_init": nothing,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "device_count": _call("gpu_count"),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "current_device": _call("gpu_device"),
        "set_device": _set_device,
        "synchronize": lambda device=None: _device.gpu_flush(),
        "set_sync_debug_mode": lambda mode: _device.gpu_sync_mode(_SYNC_MODES.get(mode, mode)),
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=_index(device)),
        "set_stream": _set_stream,
        "cudart": _Runtime,
        "get_device_properties": lambda device=None: _Properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: _Properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "ipc_collect": nothing,
        "mem_get_info": lambda device=None: (60 * _GIBIBYTE, 80 * _GIBIBYTE),
        "is_current_stream_capturing": lambda: False,
    }.items():
        setattr(cuda, name, function)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.graphs.is_current_stream_capturing = lambda: False
    for name, function in {
        "empty_cache": nothing,
        "memory_allocated": lambda device=None: _device.gpu_allocated(_index(device)),
        "memory_reserved": lambda device=None: _device.gpu_peak(_index(device)),
        "max_memory_reserved": lambda device=None: _device.gpu_peak(_index(device)),
        "max_memory_allocated": lambda device=None: _device.gpu_peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: _device.gpu_reset_peak(_index(device)),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": _device.gpu_allocated(_index(device)),
            "allocated_bytes.all.peak": _device.gpu_peak(_index(device)),
        },
    }.items():
        setattr(cuda, name, function)
        setattr(cuda.memory, name, function)
    _device.gpu_give_default(1)
    cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in range(_device.gpu_count()))
    _device.gpu_give_default(0)


def _replace_storages() -> None:
    """Methods of storages that torch has in C++ for each device."""
    kind: Any = torch.UntypedStorage
    to, resize, clone = kind.to, kind.resize_, kind.clone

    def as_tensor(storage: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def moved(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if "cuda" not in (device.type, storage.device.type):
            return to(storage, device=device, non_blocking=non_blocking)
        if device.type == storage.device.type:
            return storage
        return as_tensor(storage).to(device, copy=True).untyped_storage()

    def resized(storage: Any, nbytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, nbytes)
        with torch._C._DisableTorchDispatch():
            torch.ops.simulated_gpu.storage_resize(as_tensor(storage), nbytes)
        return storage

    def cloned(storage: Any) -> Any:
        return as_tensor(storage).clone().untyped_storage() if storage.device.type == "cuda" else clone(storage)

    kind.to, kind.resize_, kind.clone = moved, resized, cloned
    kind.cpu = lambda storage: moved(storage, device="cpu")
    kind.cuda = lambda storage, device=None, non_blocking=False: moved(storage, device=f"cuda:{_index(device)}")


def _replace_nccl(folder: Path) -> None:
    with _found_in(folder):
        import simulated_nccl

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = datetime.timedelta(minutes=10)
            self.is_high_priority_stream = is_high_priority_stream

    group, where = simulated_nccl.ProcessGroupNCCL, [dist, distributed_c10d]
    group.Options, group.options = Options, property(lambda self: Options())
    for module in where:
        vars(module).update(ProcessGroupNCCL=group, is_nccl_available=lambda: True)
    vars(distributed_c10d).update(_NCCL_AVAILABLE=True, default_pg_nccl_timeout=datetime.timedelta(minutes=10))
    vars(torch.cuda.nccl).update(version=lambda: (2, 27, 3))


@contextlib.contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
