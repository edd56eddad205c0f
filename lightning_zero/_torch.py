"""Every private, renamed or version-dependent torch name this package touches, with the versions each covers.

Supported: torch 2.11, 2.12, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "all_gather_single",
    "current_graph_task",
    "default_store",
    "disable_dynamo",
    "forbid_writes",
    "is_compiled_module",
    "next_sequence_number",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "queue_backward_callback",
    "reduce_scatter_single",
    "sequence_number",
    "storage_key",
    "take_gradient",
    "top_saved_tensor_hooks",
    "untracked",
]

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def all_gather_single(output: Tensor, shard: Tensor, group: Any, async_op: bool) -> Any:
    """``all_gather_into_tensor`` (until 2.12) under its name since 2.13, where the old one warns at every call."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(shard: Tensor, bucket: Tensor, group: Any, async_op: bool) -> Any:
    """``reduce_scatter_tensor`` (until 2.12) under its name since 2.13, where the old one warns at every call."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(shard, bucket, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def default_store() -> Any:
    """The key-value store behind the default process group. 2.11 to 2.13."""
    return dist.distributed_c10d._get_default_store()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current backward has finished. Only from inside a backward. 2.11 to 2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_graph_task() -> int:
    """The id of the backward running on this thread, -1 outside of one. 2.11 to 2.13."""
    return int(torch._C._current_graph_task_id())


def sequence_number(node: Any) -> int:
    """The autograd node's creation number on its thread. 2.11 to 2.13."""
    return int(node._sequence_nr())


def push_saved_tensor_hooks(pack: Pack, unpack: Unpack) -> None:
    """Install a saved-tensor hook pair for this thread. 2.11 to 2.13."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Remove the innermost saved-tensor hook pair of this thread. 2.11 to 2.13."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """The innermost active saved-tensor hook pair, or ``None``. 2.11 to 2.13."""
    hooks: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind ``tensor``: equal for all its views. 2.11 to 2.13."""
    return int(tensor.untyped_storage()._cdata)


def forbid_writes(tensor: Tensor) -> bool:
    """Make every write through ``tensor``'s storage raise. Returns whether this torch can. 2.11 to 2.13."""
    forbid = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
    if forbid is None:
        return False
    forbid(tensor)
    return True


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep ``torch.compile`` from tracing ``function``: the hooks of this package handle memory, not mathematics."""
    disabled: Callable[..., Any] = torch._dynamo.disable(function)
    return disabled


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether calling ``module`` runs ``torch.compile``d code. 2.11 to 2.13."""
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return True
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def take_gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, which it no longer has then; unseen by torch function modes. 2.11 to 2.13."""
    with torch._C.DisableTorchFunction():
        gradient, parameter.grad = parameter.grad, None
    return gradient


@contextmanager
def untracked() -> Iterator[None]:
    """No autograd and no inference mode: tensors made here are ordinary ones, whatever the caller's context is.

    Memory of the engine that came to life under ``inference_mode`` could never be used in training again.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def next_sequence_number() -> int:
    """The creation number that the next autograd node of this thread will get. 2.11 to 2.13."""
    return int(torch._C._autograd._get_sequence_nr())
