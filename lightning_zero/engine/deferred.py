"""Meta-device modules: record how they are initialised, replay it later for one unit at a time.

[Note: recorded initialisation]
Under ``torch.device("meta")`` a constructor allocates nothing and its initialisation has no effect. The record keeps
the operations instead, in program order, and replays for the wanted tensors only those that their values depend on.
The random numbers have to be the ones that an ordinary build would have drawn, so every random operation is run
*while recording* on one scratch tensor of the same shape, strides and dtype: the generator advances as in an ordinary
build (also for draws on real tensors, forks and reseeding in between), and its state before each operation is known.
Cost: the draws of the whole build once on every rank, and the memory of its largest tensor.

Tensors are windows on storages: a storage stands for all of its views, ``.data``, ``nn.Parameter`` wrappings and
ties, and pure views are not recorded at all. What reads a value (``.item()``, ``if w.sum() > 0``, ``.tolist()``,
``.cpu()``) gets the real one, replayed on the spot.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.engine.answers import answer, lead_back
from lightning_zero.engine.loaders import Loaders
from lightning_zero.engine.record import ON_THE_CPU, InitRecord
from lightning_zero.engine.replay import map_leaves
from lightning_zero.errors import MaterialiseError

__all__ = ["InitRecord", "InitRecorder", "has_meta"]

# Python functions whose data never reaches the dispatcher when the result is on meta.
_LITERALS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


def has_meta(module: torch.nn.Module) -> list[str]:
    """Names of ``module``'s parameters and buffers on the meta device, aliases included."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [name for name, tensor in named if tensor.is_meta]


class InitRecorder:
    """``with InitRecorder() as record:`` records the initialisation of every meta tensor made inside.

    Inside, the build takes the way that an ordinary CPU build would take: code that asks a tensor whether it
    ``is_meta``, or for its device, is answered as there (``answers.py``). A ``from_pretrained`` does what it does
    without a recorder (``loaders.py``). Operations after the ``with`` block are not seen.
    """

    def __init__(self) -> None:
        self.record = InitRecord()
        self._stack = ExitStack()

    def __enter__(self) -> InitRecord:
        loaders = Loaders()
        self._stack.enter_context(_Calls(self.record, loaders))
        self._stack.enter_context(_Operations(self.record, loaders))
        return self.record

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Operations(TorchDispatchMode):
    """Sees every aten operation of this thread."""

    def __init__(self, record: InitRecord, loaders: Loaders) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._loaders = loaders

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._loaders.run():
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._record.dispatch(func, types, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Sees the Python calls that never become aten operations when the tensor is on meta."""

    def __init__(self, record: InitRecord, loaders: Loaders) -> None:
        super().__init__()
        self._record = record
        self._loaders = loaders

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._loaders.look_at(func, args, sys._getframe(1))
        if self._loaders.run():
            return func(*args, **kwargs)
        answered = answer(self._record, func, args[0], sys._getframe(1)) if len(args) == 1 else NotImplemented
        if answered is not NotImplemented:
            return answered
        args, kwargs = lead_back(args, kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            args = (args[0], _index_on_cpu(args[1]), *args[2:])
        elif func in (Tensor.numpy, Tensor.__array__) and args[0].is_meta:
            raise MaterialiseError(
                "A tensor that is built on the meta device cannot become a numpy array; `.tolist()` works. "
                + ON_THE_CPU
            )
        result = func(*args, **kwargs)
        if func in _LITERALS and result.is_meta and not self._record.tracks(result):
            position = 1 if func is Tensor.new_tensor else 0
            data = args[position] if position < len(args) else kwargs.get("data", kwargs.get("obj"))
            data = map_leaves(lambda leaf: self._record.read(leaf) if isinstance(leaf, Tensor) else leaf, data)
            self._record.literal(torch.as_tensor(data, dtype=result.dtype, device="cpu"), result)
        return result


def _index_on_cpu(index: Any) -> Any:
    """Lists and arrays in ``tensor[index]`` as CPU tensors: on meta their numbers would be lost."""
    if isinstance(index, tuple):
        return tuple(_index_on_cpu(part) for part in index)
    if isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor)):
        try:
            return torch.tensor(index, device="cpu")
        except (TypeError, ValueError):
            return index
    return index
