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

[Note: where a meta tensor is]
Code that asks wants one of two things. It skips initialisation that would have no effect on meta, as ``torch.nn.init``
does since 2.13 and ``transformers`` since 5: here it has an effect, because it is recorded. Or it makes more tensors in
the same place: the answer is one object that is told apart from all other devices, and leads back to meta.

[Note: from_pretrained]
It builds on meta for itself: it fills every tensor from files, marks what it has loaded, and initialises the rest. Told
that meta tensors are on the CPU it would take everything for initialised; with recorded draws, a new head would begin
with other random numbers than without a recorder. So it is left alone.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import (
    DEVICE_CONTEXT_BEGINS,
    TorchDispatchMode,
    asks_for_default_device,
    device_of_mode,
    no_functions,
)
from lightning_zero.errors import MaterialiseError
from lightning_zero.init.record import META, ON_THE_CPU, InitRecord, map_leaves

__all__ = ["InitRecorder"]

# Python functions whose data never reaches the dispatcher when the result is on meta.
_LITERALS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_AS_CPU: Final = torch.device("cpu")
_QUESTIONS: Final = (Tensor.is_meta, Tensor.device, Tensor.is_cpu)


class InitRecorder:
    """``with InitRecorder() as record:`` records the initialisation of every meta tensor made inside.

    Inside, the build takes the way that an ordinary CPU build would take: code that asks a tensor whether it
    ``is_meta``, or for its device, is answered as there. A ``from_pretrained`` does what it does without a
    recorder. Operations after the ``with`` block are not seen, unless another recorder goes on with its ``record``.
    """

    def __init__(self, record: InitRecord | None = None) -> None:
        self.record = record or InitRecord()
        self._stack = ExitStack()

    def __enter__(self) -> InitRecord:
        loaders = _Loaders()
        self._stack.enter_context(_Calls(self.record, loaders))
        self._stack.enter_context(_Operations(self.record, loaders))
        return self.record

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Operations(TorchDispatchMode):
    """Sees every aten operation of this thread."""

    def __init__(self, record: InitRecord, loaders: _Loaders) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._loaders = loaders

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._loaders.run():
            return func(*args, **(kwargs or {}))
        with no_functions():
            return self._record.dispatch(func, types, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Sees the Python calls that never become aten operations when the tensor is on meta."""

    def __init__(self, record: InitRecord, loaders: _Loaders) -> None:
        super().__init__()
        self._record = record
        self._loaders = loaders

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._loaders.look_at(func, args, sys._getframe(1))
        if self._loaders.run():
            return func(*args, **kwargs)
        answered = _answer(self._record, func, args[0], sys._getframe(1)) if len(args) == 1 else NotImplemented
        if answered is not NotImplemented:
            return answered
        # The device that `_answer` gave leads back to meta.
        args = tuple(META if argument is _AS_CPU else argument for argument in args)
        if kwargs.get("device") is _AS_CPU:
            kwargs = {**kwargs, "device": META}
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
            data = map_leaves(self._read, data)
            self._record.literal(torch.as_tensor(data, dtype=result.dtype, device="cpu"), result)
        return result

    def _read(self, leaf: Any) -> Any:
        return self._record.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf


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


def _answer(record: InitRecord, func: Any, tensor: Tensor, caller: FrameType) -> Any:
    """What ``.is_meta``, ``.device`` or ``.is_cpu`` of a tensor is for the code in ``caller``; else ``NotImplemented``.

    ``torch.get_default_device()`` looks at the device of a tensor that it makes, and is answered with it.

    torch's own code is told the truth, but for ``torch.nn`` asking for ``is_meta``. So is, about the device, code that
    stands outside of ``torch.device("meta")``, and a ``from_pretrained``: what fills meta tensors has to find them.
    """
    question = getattr(func, "__self__", None)
    if not any(question is known for known in _QUESTIONS) or not tensor.is_meta:
        return NotImplemented
    default = torch.get_default_device()
    while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
        # Another mode, such as `torch.device("meta")`, that stands above the recorder: the outermost one decides.
        default = device_of_mode(caller.f_locals.get("self")) or default
        caller = caller.f_back
    caller = asks_for_default_device(caller) or caller
    module: str = caller.f_globals.get("__name__", "")
    if question is Tensor.is_meta:
        return _is_meta(record, tensor, caller, module)
    if module.split(".")[0] == "torch" or default.type != "meta" or _loader_above(caller) is not None:
        return NotImplemented
    return _AS_CPU if question is Tensor.device else True


def _is_meta(record: InitRecord, tensor: Tensor, caller: FrameType, module: str) -> bool:
    """``torch.nn.init`` skips meta tensors since 2.13: have it go on.

    ``trunc_normal_`` redraws until all values are in range and is recorded as a whole.
    """
    if module == "torch.nn.init":
        if caller.f_code.co_name != "_no_grad_trunc_normal_":
            return False
        values = [caller.f_locals[name] for name in ("mean", "std", "a", "b", "generator")]
        record.composite(caller.f_globals["_no_grad_trunc_normal_"], tensor, *values)
        return True
    return module.split(".")[0] == "torch" and not module.startswith("torch.nn.")


def _loader_above(frame: FrameType | None) -> FrameType | None:
    """The innermost ``from_pretrained`` that ``frame`` is or was called by."""
    while frame is not None and frame.f_code.co_name != "from_pretrained":
        frame = frame.f_back
    return frame


class _Loaders:
    """The calls of ``from_pretrained`` on the stack that have entered ``torch.device("meta")`` themselves.

    One that runs inside of the user's own ``torch.device("meta")`` is not among them: its tensors are recorded.
    """

    def __init__(self) -> None:
        self._frames: set[int] = set()

    def look_at(self, func: Any, args: tuple[Any, ...], caller: FrameType | None) -> None:
        """See whether a Python call, made in ``caller``, enters ``torch.device("meta")`` in a loader."""
        if func is not torch.device or torch.device(*args).type != "meta":
            return
        while caller is not None and caller.f_code.co_name == "__torch_function__":
            caller = caller.f_back
        if caller is not None and caller.f_code is DEVICE_CONTEXT_BEGINS:
            loader = _loader_above(caller)
            if loader is not None:
                self._frames.add(id(loader))

    def run(self) -> bool:
        """Whether the code that asks was called by one of them."""
        if not self._frames:
            return False
        frame = _loader_above(sys._getframe(1))
        while frame is not None:
            if id(frame) in self._frames:
                return True
            frame = _loader_above(frame.f_back)
        self._frames.clear()  # they have all returned
        return False
