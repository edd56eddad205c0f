"""What code does, counted: as many calls, and as many bytes of tensors, on every processor and however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of functions, of Python and of C, until it returns."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


class LiveTensors(TorchDispatchMode):
    """Bytes of what operators have made and what still lives, while it is active; of a ``DTensor`` the local one.

    An allocator also counts what kernels take for themselves, which depends on the processor.

    Args:
        there: what counts from the beginning on, as long as it lives.
    """

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        storages = [tensor.untyped_storage() for tensor in there]
        self._made = {one._cdata: (StorageWeakRef(one), one.nbytes()) for one in storages}
        self.most = self.total()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensor comes here again
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (key := leaf.untyped_storage()._cdata) not in before:
                self._made[key] = StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
        self.most = max(self.most, self.total())
        return result

    def total(self) -> int:
        """Of what lived when the last operator returned."""
        return sum(nbytes for _, nbytes in self._made.values())

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory counts."""
        return tensor.untyped_storage()._cdata in self._made
