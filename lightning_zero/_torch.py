"""Every private, renamed or version-dependent torch name this package touches, alike in torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import fake_tensor
from torch.autograd import profiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

# Contexts in which no function mode and no subclass, or just no subclass, sees what is done to tensors.
no_functions = torch._C.DisableTorchFunction
no_subclasses = torch._C.DisableTorchFunctionSubclass
no_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class of tensors that torch treats as its base."""

# Plain functions and classes.
ASKS_FOR_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
FakeTensorMode = fake_tensor.FakeTensorMode
check_and_unscale: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
foreach_copy: Callable[..., Any] = torch._foreach_copy_
foreach_mul: Callable[..., Any] = torch._foreach_mul_
foreach_norm: Callable[..., Any] = torch._foreach_norm
foreach_types: list[type[Tensor]] = torch.utils._foreach_utils._foreach_supported_types
"""The classes of tensors that torch's own functions give to ``_foreach_*`` where nobody says whether they should."""
foreach_zero: Callable[..., Any] = torch._foreach_zero_
make_subclass: Callable[..., Any] = Tensor._make_subclass
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
forbid_writes: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Make every write through a tensor's storage raise."""
prefix_store: Callable[..., Any] = getattr(dist, "PrefixStore")  # noqa: B009
tcp_store: Callable[..., Any] = getattr(dist, "TCPStore")  # noqa: B009
version_of: Callable[[Tensor], int] = getattr(Tensor._version, "__get__")  # noqa: B009


# The methods' names since 2.13, and those until 2.12.
_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce: Any = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
_options: Any = torch._C._distributed_c10d
_GATHERED, _SUMMED = _options.AllgatherOptions(), _options.ReduceScatterOptions()
_GATHERED.asyncOp = _SUMMED.asyncOp = False
_SUMMED.reduceOp = dist.ReduceOp.SUM


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """What torch's function of this name does, less its questions about the arguments, which take as long again."""
    if output.is_complex():
        output, input = torch.view_as_real(output), torch.view_as_real(input)
    work = _gather(group or dist.group.WORLD, output, input, _GATHERED)
    if work is not None:
        work.wait()


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """Likewise. Sums."""
    work = _reduce(group or dist.group.WORLD, output, input, _SUMMED)
    if work is not None:
        work.wait()


def _set_unless_same(dest: Tensor, src: Tensor, set_: Callable[[Tensor, Tensor], None]) -> None:
    if dest is not src:
        set_(dest, src)


# ``register_parametrization`` sets most parameters to themselves, which would count as a write to gathered values: peft
# registers one in each forward of fused experts.
setattr(parametrize, "_maybe_set", functools.partial(_set_unless_same, set_=parametrize._maybe_set))  # noqa: B010


def new_group(
    backend: str | None, timeout: timedelta | None, description: str, sets: Sequence[Any] = (), lazily: bool = False
) -> dist.ProcessGroup:
    """A group of that of ``sets`` which this rank is of; of all ranks if there are fewer than two.

    ``lazily``: over gloo, connect when connections are first used, unless the environment says otherwise. Until 2.13 a
    rank has to call for all sets: names of groups made by their members only may differ, or come again.

    Collective: every rank of the default group.
    """
    found, alone = None, len(sets) > 1 and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    with _connecting(lazily):
        for ranks in sets if len(sets) > 1 else [None]:
            if (mine := ranks is None or dist.get_rank() in ranks) or not alone:
                made = dist.new_group(ranks and [*ranks], timeout, backend, None, alone, description)
                found = made if mine else found
    group: Any = found
    return group  # type: ignore[no-any-return]


@contextmanager
def _connecting(lazily: bool) -> Iterator[None]:
    """How gloo connects groups made inside. Torch has no other way than the environment, which others must not see."""
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = (before or "1") if lazily else "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def groups_made() -> int:
    """How many process groups this process has made, or has begun to."""
    return int(dist.distributed_c10d._world.group_count)


def entered_collectives() -> dict[str, int]:
    """How many collectives, and messages to and from other ranks, this process has begun, by the name of the group."""
    found: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # its backend does not count
            found[group.group_name] = int(getattr(group, "_get_sequence_number_for_group")())  # noqa: B009
    return found


def group_called(name: str) -> Any:
    """The process group of a name; ``None`` if there is none."""
    return next((group for group in list(dist.distributed_c10d._world.pg_map) if group.group_name == name), None)


def abort_group(name: str) -> None:
    """End what waits in a group on an accelerator. What waits in one of gloo goes on waiting."""
    group = group_called(name)
    if group is not None and dist.get_backend(group) == "nccl":
        group.abort()


def forget_meshes() -> None:
    """Have DTensors and compiled code forget meshes that have ended: torch takes one of the same ranks for another."""
    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    torch.compiler.reset()


def profiler_runs() -> bool:
    """Whether a torch profiler (or ``emit_nvtx``) is recording in this process; 40 ns."""
    return profiler._is_profiler_enabled


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current backward has finished. Only from inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# Called some times for every unit and tensor, so they are torch's own functions and not wrapped.
_autograd: Any = torch._C._autograd
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward running on this thread, -1 outside of one."""
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""An autograd node's creation number on its thread."""
next_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
"""The creation number that the next autograd node of this thread will get."""
push_saved_tensor_hooks: Callable[[Pack, Unpack], None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
top_saved_tensor_hooks: Callable[[], tuple[Pack, Unpack] | None] = functools.partial(
    _autograd._top_saved_tensors_default_hooks, False
)
"""The innermost active saved-tensor hook pair of this thread, or ``None``."""
watched: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Whether a torch function mode sees what is done to tensors now."""


def will_accumulate(node: Any) -> bool:
    """Whether the running backward ends in a leaf's ``node``, and leaves its gradient there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is handed out: autograd.grad
        return False


def is_being_compiled() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` looks at code of this thread now."""
    exporting = getattr(sys.modules.get("torch.export._trace"), "_EXPORT_FLAGS", None) is not None
    return exporting or torch._guards.TracingContext.try_get() is not None


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind ``tensor``: equal for all its views.

    0 for what has no memory of its own: sparse tensors, and what ``torch.func`` wraps around others.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0


storage_address: Callable[[Tensor], int] = getattr(torch._C, "_storage_address")  # noqa: B009
"""The same of what has memory, past all that user code may see. Makes no object for it, which takes a microsecond."""

users_of: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors hold the memory of a ``storage_key``, which has to be there, and one more."""


def held_in_python(memory: Tensor) -> list[Tensor]:
    """The tensors in the memory of this one, other than itself, that something in Python has.

    Looks at all objects, which takes some 50 ms.
    """
    key = storage_key(memory)
    with no_subclasses():
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing is not memory]
        found = [tensor for tensor in found if type(tensor).untyped_storage is Tensor.untyped_storage]  # it has memory
        found = [tensor for tensor in found if storage_key(tensor) == key]
        return [tensor for tensor in found if any(by is not found for by in gc.get_referrers(tensor))]


class WeakStorage(StorageWeakRef):
    """The memory behind a tensor, without keeping it. While this exists, no other gets the same ``storage_key``."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def lock(self) -> torch.UntypedStorage | None:
        """The memory, or ``None`` if its last tensor has gone."""
        gone: bool = self.expired()  # type: ignore[no-untyped-call]
        return None if gone else torch.UntypedStorage._new_with_weak_ptr(self.cdata)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Memory as a 1-D tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def untyped(storage: Any) -> torch.UntypedStorage:
    """A storage of either kind as bytes."""
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


def storage_class(storage: Any) -> Any:
    """What ``torch.save`` calls the class of a storage."""
    if isinstance(storage, torch.UntypedStorage):
        return torch.UntypedStorage
    return getattr(torch, storage._pickle_storage_type())


def archive_writer(file: Any) -> Any:
    """``torch.save``'s writer of archives, onto what has ``write``, and ``seek`` to leave out a record's content."""
    return torch._C.PyTorchFileWriter(file, True, 64)


def version_probe(tensor: Tensor) -> Tensor:
    """A tensor without memory whose ``_version`` counts the changes of ``tensor`` and its views."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def forward_hooks(module: torch.nn.Module) -> tuple[OrderedDict[int, Any], ...]:
    """Where a module keeps its forward hooks, by the ids of their handles: those before, those after, and which of
    these run always."""
    before: Any = module._forward_pre_hooks  # ordered dictionaries, annotated as plain ones
    after: Any = module._forward_hooks
    always: Any = module._forward_hooks_always_called
    return before, after, always


def in_function_transform() -> bool:
    """Whether this runs inside of ``torch.func.grad``, ``vmap`` or another transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms() -> AbstractContextManager[Any]:
    """While active, tensors are made as outside of every transform of ``torch.func``. What is made inside of one is a
    wrapper: a parameter that shows it is memory that torch frees twice, once the transform is over."""
    return temporarily_clear_interpreter_stack() if in_function_transform() else nullcontext()


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` records this thread; 0.1 microseconds."""


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep ``torch.compile`` from tracing ``function``: the hooks of this package handle memory, not mathematics.

    torch's own wrapper takes 3 microseconds for each call. Where nothing is being compiled this one takes 0.1: it is
    marked as torch's is, so that Dynamo calls it and does not look inside, and only under a running Dynamo are calls
    from ``function`` kept from it as well.
    """
    disabled: Callable[..., Any] = torch._dynamo.disable(function)

    def call(*args: Any) -> Any:
        if compiler_of_frames() is None:
            return function(*args)
        return disabled(*args)

    return opaque_to_dynamo(call, function)


compiler_of_frames: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What compiles the frames of this thread, ``None`` where no ``torch.compile`` runs."""


_WHY_DISABLED = (
    "it brings the parameters of a sharded module. Export the module inside `with "
    "lightning_zero.full_parameters(module):`, on every rank, outside of a step"
)


def opaque_to_dynamo(call: Callable[..., Any], function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Have Dynamo call ``call``, which may stand for ``function``, without looking inside: see ``disable_dynamo``."""
    marked: Any = torch._dynamo.decorators.skip(call)
    if function is not None:
        functools.update_wrapper(marked, function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _WHY_DISABLED  # part of torch's message, which a strict export is an error with
    marked._torchdynamo_disable_recursive = True
    return call


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether calling ``module`` runs ``torch.compile``d code."""
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return True
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def take_gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, which it no longer has then; unseen by torch function modes."""
    with torch._C.DisableTorchFunction() if watched() else nullcontext():
        gradient = get_gradient(parameter)
        set_gradient(parameter, None)
    return gradient


# The descriptors themselves, past what a subclass of Parameter shows in their place.
get_data: Callable[[Tensor], Tensor] = getattr(Tensor.data, "__get__")  # noqa: B009
set_data: Callable[[Tensor, Tensor], None] = getattr(Tensor.data, "__set__")  # noqa: B009
get_gradient: Callable[[Tensor], Tensor | None] = getattr(Tensor.grad, "__get__")  # noqa: B009
set_gradient: Callable[[Tensor, Tensor | None], None] = getattr(Tensor.grad, "__set__")  # noqa: B009


def tensor_allocator(group: Any, device: torch.device) -> Any:
    """The backend of a process group, if it allocates tensors on ``device`` that it can send from where they are."""
    backend = group._get_backend(device)
    return backend if backend.supports_tensor_alloc(device) else None


def unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of a 1-D tensor, one after the other, in the shapes of ``tensors``, in one call."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, tensors))


def _recomputes_selectively() -> bool:
    stack = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in stack)


@contextmanager
def without_swaps() -> Iterator[None]:
    """While active, modules fill and move their parameters in place, whatever is set for their conversion."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class untracked:
    """No autograd, no inference mode, no selective recomputation: tensors made here are ordinary ones.

    Memory of the engine that came to life under ``inference_mode`` could never be used in training again, and selective
    recomputation would take the engine's operations for the model's. Entered some times for every unit and gradient, so
    it is a class and not a generator, and leaves a mode alone that is off.
    """

    __slots__ = ("_grad", "_inference", "_modes")

    def __enter__(self) -> None:
        self._inference: Any = None
        self._modes: Any = None
        if torch._C._len_torch_dispatch_stack() and _recomputes_selectively():
            self._modes = torch._C._DisableTorchDispatch()
            self._modes.__enter__()
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._grad:
            torch._C._set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)


_HIDDEN = "_unsafe_preserve_version_counter" in DistributedDataParallel._sync_buffers.__code__.co_names


class BroadcastVersions:
    """Leave the version counters of buffers that are sent inside as ``DistributedDataParallel`` does, on every rank.

    Since 2.13 it hides from autograd that it has written to them; before that, a graph that still needs their values
    raises in its backward. Buffers made under ``inference_mode`` have no counter.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = tuple(buffers)

    def __enter__(self) -> None:
        try:
            self._versions = tuple([buffer._version for buffer in self._buffers])
        except RuntimeError:
            self._buffers = tuple(buffer for buffer in self._buffers if not buffer.is_inference())
            self._versions = tuple([buffer._version for buffer in self._buffers])

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._unsafe_set_version_counter(self._buffers, self._versions)
        if not _HIDDEN:
            torch.autograd.graph.increment_version(self._buffers)


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> bool:
    """What ``register_hook`` does to a tensor with a graph, but for the handle: in half the time. Returns False, having
    done nothing, where the tensor has hooks already, or somebody looks at what is done to it."""
    if type(tensor) is not Tensor or watched() or tensor._backward_hooks is not None:
        return False
    node: Any = tensor.grad_fn
    hooks: OrderedDict[int, Any] = OrderedDict()
    hooks[-1] = hook  # handles of hooks that come later count from 0
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return True


_HOOKED_CODE = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """``step`` of the optimizer's class without the wrapper that runs step hooks, bound to it."""
    bound: Callable[..., Any] = without_hooks(type(optimizer).step).__get__(optimizer)
    return bound


def without_hooks(step: Any) -> Any:
    """A class's ``step`` without that wrapper."""
    while getattr(step, "__code__", None) is _HOOKED_CODE:
        step = step.__wrapped__
    return step


def runs_hooks(step: Any) -> bool:
    """Whether a function is, or calls, a class's ``step`` with that wrapper, which torch's constructor puts there."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED_CODE:
        step = getattr(step, "__wrapped__", None)
    return step is not None


def count_step_pre_hooks(optimizer: Optimizer) -> int:
    """How many hooks run before its step: of its own, and of all optimizers."""
    return len(optimizer._optimizer_step_pre_hooks) + len(_global_optimizer_pre_hooks)


def put_hooks_innermost(optimizer: Optimizer, before: int, after: int) -> None:
    """Make one pre-hook the last of an optimizer's own and one post-hook the first, by the ids of their handles. Not
    while it runs them."""
    earlier: Any = optimizer._optimizer_step_pre_hooks  # ordered dictionaries, annotated as plain ones
    later: Any = optimizer._optimizer_step_post_hooks
    if before in earlier and next(reversed(earlier)) != before:
        earlier.move_to_end(before)
    if after in later and next(iter(later)) != after:
        later.move_to_end(after, last=False)
