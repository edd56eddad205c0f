"""What the code of a recorded build is told when it asks where a meta tensor is: on the CPU, as in an ordinary build.

Code that asks wants one of two things. It skips initialisation that would have no effect on meta, as ``torch.nn.init``
does since 2.13 and ``transformers`` since 5: here it has an effect, because it is recorded. Or it makes more tensors in
the same place: the answer is one object that is told apart from all other devices, and leads back to meta.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from lightning_zero._torch import asks_for_default_device, device_of_mode
from lightning_zero.engine.loaders import loader_above
from lightning_zero.engine.record import InitRecord
from lightning_zero.engine.replay import META

__all__ = ["answer", "lead_back"]

_AS_CPU: Final = torch.device("cpu")
_QUESTIONS: Final = (Tensor.is_meta, Tensor.device, Tensor.is_cpu)


def answer(record: InitRecord, func: Any, tensor: Tensor, caller: FrameType) -> Any:
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
    if module.split(".")[0] == "torch" or default.type != "meta" or loader_above(caller) is not None:
        return NotImplemented
    return _AS_CPU if question is Tensor.device else True


def lead_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with meta where one of them is the device that ``answer`` gave."""
    if any(argument is _AS_CPU for argument in args):
        args = tuple(META if argument is _AS_CPU else argument for argument in args)
    if kwargs.get("device") is _AS_CPU:
        kwargs = {**kwargs, "device": META}
    return args, kwargs


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
