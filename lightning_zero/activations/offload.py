"""What autograd saves, kept in host memory until its backward.

A pair of saved-tensor hooks around the training step. What is saved is copied to the host as bytes of its storage, so
that everything that shows the same memory (the three parts of a fused projection, a tensor and its transpose, an input
of several layers) is copied once and comes back with the same strides and alignment: kernels, and so bits, are the same
as without.

[Note: in-place changes]
Saved-tensor hooks switch autograd's own check off. Here every saved tensor leaves a probe behind, a tensor without
memory that shares its version counter. A change between forward and backward raises, exactly where plain torch raises,
although the copy may be intact; so it does not matter either when an asynchronous copy has really read the memory.

What versions do not count cannot be seen: a write through ``.data`` or by a kernel of one's own. Copies are shared by
storage and version, so that what is saved again after such a write comes back as it was at the first save, while plain
torch, which keeps the memory itself, would show both as they are now: each is wrong for one of the two. Change a copy.

[Note: device memory of copies under way]
The memory that a copy reads is held until the copy is done, not given back with ``record_stream``. At most a few copies
hold memory this way: for an older one the computing stream waits, on the device, before its memory is given up.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import (
    WeakStorage,
    disable_dynamo,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    storage_key,
    untracked,
    version_probe,
)
from lightning_zero.comm import Streams
from lightning_zero.comm.streams import Event, runs_beside
from lightning_zero.storage.host import HostBuffer, HostBuffers

__all__ = ["SavedOnHost", "check_version"]

_ALIGNMENT = 512  # bytes; a piece of a storage starts at a multiple, as fresh memory on every device does
_WHOLE = 4  # a storage up to this many times as large as what is saved of it is copied whole
_SPARSE = 8  # what shows less than 1 / this of the bytes it spans stays on the device
_FLYING = 4  # copies to the host that may hold device memory
_FLYING_NBYTES = 64 << 20  # ... and however many there are, if they hold no more than this
_AHEAD = 2  # copies that are brought back ahead of their use
_RECENT = 4  # copies already used whose device memory is kept for others that show it


def check_version(probe: Tensor, version: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Refuse, as torch itself does, a saved tensor of this dtype and shape whose ``probe``, which counts its changes,
    does not count what it did when the tensor was saved."""
    if probe._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{dtype} tensor of shape {list(shape)} was saved at version {version} and is now at version "
            f"{probe._version}. Change a copy of it instead (y = y + x, not y += x)."
        )


class SavedOnHost:
    """Saved tensors of one device on the host. On the CPU both sides are host memory, every copy is real, and none is
    asynchronous.

    Tensors that span less than ``min_nbytes`` of memory stay, and memory, by its storage key, that ``stays`` during
    backward anyway (weights, buffers). So many copies are brought back ``ahead`` of their use; ``None``: 2 on CUDA,
    none elsewhere.
    """

    def __init__(
        self, device: torch.device, min_nbytes: float, stays: Callable[[int], bool], ahead: int | None = None
    ) -> None:
        self.buffers = HostBuffers(device)
        self.copied, self.restored = 0, 0  # copies made, in each direction
        self._device = device
        self._min_nbytes = min_nbytes
        self._stays = stays
        self._ahead = (_AHEAD if runs_beside(device) else 0) if ahead is None else ahead
        # Of their own: what rests on the host is needed on the device without waiting for these copies, and back.
        self._out, self._back = Streams(device), Streams(device)
        self._copies: weakref.WeakValueDictionary[tuple[int, int, int], _Copy] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_Copy]] = []  # of one step, in the order of the forward
        self._flying: deque[tuple[torch.UntypedStorage, int, Event]] = deque()
        self._flying_nbytes = 0
        self._recent: deque[weakref.ref[_Copy]] = deque()
        # Permanent objects that Dynamo does not trace.
        self._pack_hook = disable_dynamo(self._pack)
        self._unpack_hook = disable_dynamo(self._unpack)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Keep on the host what autograd saves inside, on this thread."""
        self._copies.clear()
        self._order = []
        push_saved_tensor_hooks(self._pack_hook, self._unpack_hook)
        try:
            yield
        finally:
            pop_saved_tensor_hooks()

    def abandon(self) -> None:
        """Let go of device memory after an error in the middle of a step. Graphs that are left stay usable."""
        self._land(0, 0)
        for reference in self._recent:
            if (copy := reference()) is not None:
                copy.let_go()
        self._recent.clear()
        self._copies.clear()
        self._order = []

    def release(self) -> None:
        """Give the host memory back; that of graphs that are left goes with them."""
        self.abandon()
        self.buffers.release()

    # ----------------------------------------------------------------- forward

    def _pack(self, tensor: Tensor) -> Any:
        span = self._span(tensor)
        if span is None:
            return tensor, tensor._version
        start, nbytes = span
        version = tensor._version
        key = (storage_key(tensor), start, nbytes)
        copy = self._copies.get(key)
        # The storage is not another one of the same key: a copy's weak reference keeps the key from being used again.
        if copy is None or copy.version != version:
            with untracked():
                copy = self._copy(tensor.untyped_storage(), WeakStorage(tensor), start, nbytes, version)
            self._copies[key] = copy
        probe, offset = version_probe(tensor), int(tensor.storage_offset())
        return _Packed(copy, probe, version, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _span(self, tensor: Tensor) -> tuple[int, int] | None:
        """First byte and number of bytes of its storage to copy, or ``None`` if the tensor is to stay as it is."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return None  # parameters are a type of their own
        if isinstance(tensor._base, nn.Parameter) or tensor.is_quantized or not tensor.numel():
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or self._stays(storage_key(tensor)):
            return None
        size = tensor.dtype.itemsize
        steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * size
        end = first + (1 + sum(steps)) * size
        if end - first < self._min_nbytes or end - first > _SPARSE * tensor.numel() * size:
            return None
        total = tensor.untyped_storage().nbytes()
        if total <= _WHOLE * (end - first):
            return 0, total
        start = first // _ALIGNMENT * _ALIGNMENT
        return start, end - start

    def _copy(self, storage: torch.UntypedStorage, weak: WeakStorage, start: int, nbytes: int, version: int) -> _Copy:
        buffer = self.buffers.take(nbytes)
        source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, start, (nbytes,), (1,))
        with self._out.transferring():
            self._out.wait(buffer.busy)
            buffer.memory[:nbytes].copy_(source, non_blocking=self._out.beside)
            buffer.busy = self._out.mark()
        self.copied += 1
        if buffer.busy is not None:
            self._flying.append((storage, nbytes, buffer.busy))
            self._flying_nbytes += nbytes
            self._land(_FLYING, _FLYING_NBYTES)
        order = self._order
        copy = _Copy(self.buffers, self._back, weak, buffer, start, nbytes, version, order, len(order))
        order.append(weakref.ref(copy))
        return copy

    def _land(self, most: int, most_nbytes: int) -> None:
        """Give up the device memory of copies that are done, and of all but the latest; the device waits, not we."""
        while self._flying:
            _, nbytes, event = self._flying[0]
            if not event.query():
                if len(self._flying) <= most or self._flying_nbytes <= most_nbytes:
                    return
                self._out.wait(event)
            self._flying.popleft()
            self._flying_nbytes -= nbytes

    # ---------------------------------------------------------------- backward

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:
            tensor: Tensor
            tensor, version = packed
            check_version(tensor, version, tensor.dtype, tensor.shape)
            return tensor
        check_version(packed.probe, packed.version, packed.dtype, packed.shape)
        copy = packed.copy
        most = _FLYING if copy.index else 0  # no memory stays held at the end of a backward that the host runs ahead of
        self._land(most, most and _FLYING_NBYTES)
        with untracked():
            storage = copy.source.lock()
            start = 0
            if storage is None or storage.nbytes() < copy.start + copy.nbytes:
                storage, start = self._restore(copy), copy.start
                copy.streams.wait(copy.filled)  # everything from now on is behind the copy to the device
                self._look_ahead(copy)
            offset = packed.offset - start // packed.dtype.itemsize
            tensor = torch.empty(0, dtype=packed.dtype, device=self._device)
            return tensor.set_(storage, offset, packed.shape, packed.stride)

    def _restore(self, copy: _Copy) -> torch.UntypedStorage:
        if copy.again is not None and (storage := copy.again.lock()) is not None:
            return storage
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device)
        with self._back.transferring():
            self._back.wait(copy.buffer.busy)
            target.copy_(copy.buffer.memory[: copy.nbytes], non_blocking=self._back.beside)
            copy.buffer.busy = self._back.mark()
        self.restored += 1
        copy.kept, copy.again, copy.filled = target, WeakStorage(target), copy.buffer.busy
        self._recent.append(weakref.ref(copy))
        while len(self._recent) > _RECENT + self._ahead:
            if (oldest := self._recent.popleft()()) is not None:
                oldest.let_go()
        return target.untyped_storage()

    def _look_ahead(self, copy: _Copy) -> None:
        """Bring back what was saved just before: backward needs it next."""
        found = 0
        for index in range(copy.index - 1, -1, -1):
            if found == self._ahead:
                return
            before = copy.order[index]()
            if before is not None and before.source.lock() is None:
                self._restore(before)
                found += 1


@dataclass(frozen=True)
class _Packed:
    """A saved tensor on the host: the bytes, and how the tensor shows its storage (in elements)."""

    copy: _Copy
    probe: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class _Copy:
    """A stretch of a storage's bytes on the host, from ``start`` on, and on the device again while it is needed there.

    Lives as long as a graph needs it. Then its buffer goes back. ``version`` is that of the tensor that was copied,
    ``order`` are all copies of the step, of which it has an ``index``.
    """

    buffers: HostBuffers
    streams: Streams
    source: WeakStorage
    buffer: HostBuffer
    start: int
    nbytes: int
    version: int
    order: list[weakref.ref[_Copy]]
    index: int
    kept: Tensor | None = None  # the device memory that it is brought back to, while that is held here
    again: WeakStorage | None = None  # the same, whoever holds it
    filled: Event = None  # behind the copy to there

    def __del__(self) -> None:
        self.let_go()
        self.buffers.give(self.buffer)

    def let_go(self) -> None:
        """Hold on to it no more; the copy that still writes there is waited for, on the device."""
        if self.kept is not None:
            self.streams.wait(self.filled)
            self.kept = None
