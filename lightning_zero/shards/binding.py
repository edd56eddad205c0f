"""What user code meets in place of its parameters: the only file that rebinds one, and sees what is done to it.

[Note: a class that is seen through]
A parameter of the engine stays the user's object: same ``id``, name, shape, dtype and ``requires_grad``. Only its class
becomes a subclass of what it was (as torch itself turns an ``UninitializedParameter`` into a ``Parameter``), of the
same name, so that three things that torch never tells anybody about are seen:

* ``.grad``: after a reduction gradients are slices; what stands there is the owner's to say.
* ``.data``: what is written to it has to count, or to raise.
* any torch function on a parameter whose values are *absent*. Then it shows a placeholder and has a second subclass
  with a ``__torch_function__``: questions about shape, dtype and the like are answered, what needs values has them
  gathered if a phase runs, and everything else raises. Where values are present torch finds its own disabled
  ``__torch_function__``, and computing costs what it does on any parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import get_spawning_popen
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import (
    get_data,
    get_gradient,
    is_being_compiled,
    make_subclass,
    no_subclasses,
    opaque_to_dynamo,
    set_data,
    set_gradient,
    storage_key,
    untracked,
)
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.sharded import ShardedTensor, words
from lightning_zero.shards.slice import Placeholders

__all__ = [
    "Binding",
    "Faces",
    "absent_in_rank",
    "binding_of",
    "get_data",
    "get_gradient",
    "is_absent",
    "original_kind",
    "set_data",
    "set_gradient",
]


class Faces:
    """Parameters, what each shows while its value is not there, and its class then and while it is."""

    def __init__(self, parameters: Sequence[nn.Parameter], placeholders: Sequence[Tensor]) -> None:
        kinds = [*map(original_kind, parameters)]
        self._parameters, self._placeholders = parameters, placeholders
        self._shown, self._absent = [*map(shown_kind, kinds)], [*map(absent_kind, kinds)]

    def show(self, values: Iterable[Tensor]) -> None:
        """Let the parameters be tensors that hold their values."""
        with no_subclasses():  # else torch looks at each class for a function of its own
            for parameter, value, kind in zip(self._parameters, values, self._shown, strict=True):
                parameter.__class__ = kind
                set_data(parameter, value)

    def hide(self) -> None:
        """Let them stand for values that are not there."""
        with no_subclasses():
            for parameter, placeholder, kind in zip(self._parameters, self._placeholders, self._absent, strict=True):
                set_data(parameter, placeholder)
                parameter.__class__ = kind


_BINDINGS: dict[int, ref[Binding]] = {}  # by id of the parameter, which its binding keeps alive


class Binding:
    """One of the user's parameters, of this first name, which shows ``placeholder`` while its values are ``absent``,
    and of which this rank has a ``slice`` (``Slice``), if it is one."""

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        placeholder: Tensor,
        owner: Any,
        slice: Any = None,
        absent: bool = True,
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.placeholder = placeholder
        self.owner: Callable[[], Any] = (lambda: None) if owner is None else ref(owner)
        """The engine's ``ParameterAccess``, as long as it lives; ``None`` in a process that is no rank."""
        self.base: type[nn.Parameter] = original_kind(parameter)
        self.held = False
        """Whether it shows full values in the user's hands (``full_parameters``): it may be pointed anywhere."""
        self.aliases: list[ref[Tensor]] = []
        """What was handed out as its ``.data``. Code that puts weights aside by reference has some of them."""
        self.slice = slice
        self.bucket: Any = None
        """Where the reducer collects its gradient; ``None`` where nothing is trained."""
        self.behind = False
        """Whether its rank had a gradient, averaged or on its way to be, when it forked this process."""
        self.last_hook: int | None = None
        """Id of the engine's post-accumulate hook, which runs after the user's."""
        self._unswappable = ref(parameter)  # `torch.utils.swap_tensors`, which would take our hooks away, refuses it
        key = id(parameter)
        _BINDINGS[key] = ref(self, lambda gone: _BINDINGS.pop(key) if _BINDINGS.get(key) is gone else None)
        parameter.__class__ = (absent_kind if absent else shown_kind)(self.base)

    def show(self, value: Tensor) -> None:
        """Let the parameter be ``value``."""
        Faces([self.parameter], [self.placeholder]).show([value])

    def hide(self) -> None:
        """Let the parameter stand for values that are not there."""
        Faces([self.parameter], [self.placeholder]).hide()

    def release(self) -> None:
        """Make the parameter what it was before; it shows what it shows."""
        self.parameter.__class__ = self.base
        _BINDINGS.pop(id(self.parameter), None)

    def alias(self, data: Tensor) -> Tensor:
        """Remember what is handed out as the parameter's ``.data``. Returns it."""
        self.aliases = [*(known for known in self.aliases if known() is not None), ref(data)]
        return data

    def part(self) -> None:
        """Let what was handed out keep its values: the memory is about to get those of another tensor.

        So averaged weights are evaluated: ``kept = p.data``, ``p.data = average``, and ``p.data = kept`` later.
        """
        known, self.aliases = self.aliases, []
        with untracked():
            for data in [found for weak in known if (found := weak()) is not None]:
                data.data = data.clone()


def binding_of(parameter: Tensor) -> Binding | None:
    """The binding of a parameter, if an engine looks after it."""
    weak = _BINDINGS.get(id(parameter))
    binding = None if weak is None else weak()
    return binding if binding is not None and binding.parameter is parameter else None


def original_kind(parameter: Tensor) -> type[nn.Parameter]:
    """The class of a parameter before an engine looked after it."""
    kind: Any = type(parameter)
    original: type[nn.Parameter] = kind._base if issubclass(kind, _Shown) else kind
    return original


def _new_parameter(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
    """``nn.Parameter(parameter)``, for which torch wants a class whose ``detach()`` gives one of its own."""
    made: nn.Parameter = _make_parameter(
        cls, Tensor.detach(data) if issubclass(type(data), _Shown) else data, requires_grad
    )
    return made


_make_parameter = nn.Parameter.__new__
nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[assignment,method-assign]


def _quick(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """A ``zero_grad`` in which parameters of ours clear a gradient where they are asked for it."""

    def quick(self: Any, set_to_none: bool = True) -> None:
        global _clearing
        before, _clearing = _clearing, get_ident() if set_to_none else 0
        try:
            zero_grad(self, set_to_none)
        finally:
            _clearing = before

    return opaque_to_dynamo(quick, zero_grad)


_clearing = 0  # the thread that is in a `zero_grad` which sets gradients to None
Optimizer.zero_grad = _quick(Optimizer.zero_grad)  # type: ignore[method-assign]
nn.Module.zero_grad = _quick(nn.Module.zero_grad)  # type: ignore[method-assign]


class _Shown:
    """Sees ``.data`` and ``.grad``; copies of it are ordinary parameters."""

    __slots__ = ()

    @property
    def data(self: Any) -> Tensor:
        binding = binding_of(self)
        if binding is None or binding.held:
            return get_data(self)
        if (owner := binding.owner()) is None and not is_absent(self):
            return get_data(self)
        if not is_absent(self) or _bring([binding]) or _bring([binding], True):
            return owner.data_of(binding)  # type: ignore[no-any-return]
        if owner is None:
            raise _refused([binding], "data")
        return owner.stand_in(binding)  # type: ignore[no-any-return]

    @data.setter
    def data(self: Any, value: Tensor) -> None:
        if value is self:  # ``module.to(...)`` that changes nothing
            return
        binding = binding_of(self)
        owner = None if binding is None else binding.owner()
        if binding is None:
            set_data(self, value)
        elif owner is None or binding.held:
            binding.show(value)
        elif getattr(value, "own", None) is not binding.slice.data and not _same_memory(value, get_data(self)):
            owner.assign(binding, value)

    @property
    def grad(self: Any) -> Tensor | None:
        weak = _BINDINGS.get(id(self))
        binding = None if weak is None else weak()  # ``binding_of``, without a call: every `zero_grad` is here
        if binding is None or binding.parameter is not self:
            return get_gradient(self)
        if _clearing and _clearing == get_ident():
            if (owner := binding.owner()) is None:
                self.grad = None
            else:
                owner.write_gradient(binding, None)  # it only asks whether there is one: none is made to be shown
            return None
        if binding.behind:
            raise ParameterAccessError(
                f"The gradient that '{binding.name}' has in its rank is not in this process, and what is computed here "
                "would be added to it: this is a worker that a rank has started (of a DataLoader, say). Call "
                "`module.zero_grad()` in the worker first, or let it have what it needs of the gradient before it "
                "starts: `lightning_zero.full_gradient(module, name)`, on every rank."
            )
        local, owner = get_gradient(self), binding.owner()
        # A gradient is no part of what is compiled, but of what is described to make a fake tensor of a parameter.
        unasked = owner is None or (binding.bucket is None and not owner.whole) or is_being_compiled()
        return local if unasked else owner.read_gradient(binding, local)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        binding = binding_of(self)
        if binding is None or (owner := binding.owner()) is None:
            set_gradient(self, value)
            if binding is not None:
                binding.behind = False
        else:
            owner.write_gradient(binding, value)

    @grad.deleter
    def grad(self: Any) -> None:
        self.grad = None

    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As every parameter's, which torch tells no torch function of."""
        if (binding := binding_of(self)) is not None and is_absent(self):
            raise _refused([binding], "set_()")
        return Tensor.set_(self, *args, **kwargs)

    def register_post_accumulate_grad_hook(self: Any, hook: Any) -> Any:
        """As every parameter's; what the hook does to ``.grad`` counts, because the engine looks at it afterwards."""
        register: Any = Tensor.register_post_accumulate_grad_hook
        handle = register(self, hook)
        binding = binding_of(self)
        if binding is not None and binding.last_hook in self._post_accumulate_grad_hooks:
            hooks = self._post_accumulate_grad_hooks  # torch goes by the order of insertion: moving is not enough
            hooks[binding.last_hook] = hooks.pop(binding.last_hook)
        return handle

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with _ordinary(self):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        binding = binding_of(self)
        owner = None if binding is None or get_spawning_popen() is None else binding.owner()
        if binding is not None and owner is not None and (is_absent(self) or not owner.shows_for_good(binding)):
            kept = tuple(self.shape), self.dtype, self.requires_grad, vars(self)
            return _without_values, (binding.base, binding.name, *kept)
        with _ordinary(self):
            return self.__reduce_ex__(protocol)


class _Absent(_Shown):
    """Answers questions, and raises where values are needed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALIKE:
            with no_subclasses():
                return func(*args, **(kwargs or {}))
        return _called(func, args, kwargs or {})

    def __repr__(self: Any) -> str:
        what = f"{self.__class__.__name__} of shape {tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"{what}: values are not in memory, see lightning_zero.full_parameters"

    def __format__(self: Any, spec: str) -> str:
        return format(repr(self), spec)


is_absent: Callable[[Any], bool] = _Absent.__instancecheck__
"""Whether a parameter's values are not in memory."""


@cache
def shown_kind(base: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of parameters that were of class ``base``, while their values are there."""
    return _subclass(base, _Shown)


@cache
def absent_kind(base: type[nn.Parameter]) -> type[nn.Parameter]:
    """The same while they are not."""
    return _subclass(base, _Absent)


def _subclass(base: type[nn.Parameter], own: type) -> type[nn.Parameter]:
    meta: Any = type(base)
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__slots__": (), "_base": base}
    kind: type[nn.Parameter] = meta(base.__name__, (own, base), namespace)
    return kind


@contextmanager
def _ordinary(parameter: Any) -> Iterator[None]:
    """For a moment the class that it had before, so that copies are made as of any parameter.

    Raises:
        ParameterAccessError: if there are no values to copy.
    """
    binding = binding_of(parameter)
    if isinstance(parameter, _Absent) and binding is not None and not _bring([binding]):
        raise _refused([binding], "a copy")
    kind = type(parameter)
    parameter.__class__ = original_kind(parameter)
    try:
        yield
    finally:
        parameter.__class__ = kind


# What is the same while values are there, and the engine's own: user code meets properties in the place of these.
_ALIKE = {get_data, get_gradient, *[getattr(Tensor, name).__get__ for name in ("is_leaf", "requires_grad", "shape")]}
_FREE = words("""
    __len__ size dim ndimension numel nelement element_size storage_offset get_device is_floating_point is_complex
    is_signed is_inference is_conj is_neg has_names _has_compatible_shallow_copy_type
    __hash__ __delete__ is_same_size is_pinned register_hook register_post_accumulate_grad_hook requires_grad_
    result_type can_cast promote_types is_tensor is_storage typename _use_count is_nested zeros_like ones_like
    empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full new_tensor
    new_empty_strided
""")
# The second argument says no more than of what shape, dtype or device something else is to be.
_SHAPES = words("view_as expand_as reshape_as type_as")
# What returns the tensor itself where nothing has to be changed.
_CASTS = words("to type cpu cuda xpu float double half bfloat16 int long bool short char byte contiguous _to_copy")
# What a placeholder would tell of itself, and not of the values.
_STRIDES = words("stride is_contiguous dim_order")


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A torch function got an absent parameter."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        with no_subclasses():
            return func(*args, **kwargs)
    bindings = _bindings_in([*args, *kwargs.values()])
    if bindings and _bring(bindings):
        return func(*args, **kwargs)
    first: Any = args[0] if args else None
    if name in _FREE or name == "__get__" or (name in _SHAPES and not isinstance(first, _Absent)):
        with no_subclasses():
            result = func(*args, **kwargs)
        if name != "__get__" or not isinstance(result, Tensor):
            return result
    elif name in _STRIDES:  # those of the values, not those of the placeholder
        return func(torch.empty(first.shape, device="meta"), *args[1:], **kwargs)
    elif name in _CASTS and isinstance(first, _Absent):
        with no_subclasses(), untracked():
            one = torch.empty((), dtype=first.dtype, device=first.device)  # type: ignore[attr-defined]
            cast = getattr(one, name)(*args[1:], **kwargs)
        if cast is one or isinstance(cast, str):
            return first if cast is one else cast
    if bindings and _bring(bindings, together=True):
        return func(*args, **kwargs)
    if name == "detach" and bindings and (owner := bindings[0].owner()) and not bindings[0].held:
        return owner.stand_in(bindings[0])  # for `state_dict()`
    if isinstance(first, ShardedTensor):
        first.source.refuse(f"{name}() with a parameter needs all of both")
    raise _refused(bindings, f"{name}()")


def _bindings_in(values: Sequence[Any]) -> list[Binding]:
    """Those of the absent parameters among these values."""
    found: list[Binding] = []
    for value in values:
        if isinstance(value, _Absent):
            if (binding := binding_of(value)) is not None:  # type: ignore[arg-type]
                found.append(binding)
        elif isinstance(value, tuple | list):
            found += _bindings_in(value)
    return found


def _bring(bindings: Sequence[Binding], together: bool = False) -> bool:
    """Let parameters show their values, if this rank can do so alone, or with the others in the same phase."""
    return all((owner := binding.owner()) is not None and owner.bring(binding, together) for binding in bindings)


def _refused(bindings: Sequence[Binding], use: str) -> ParameterAccessError:
    if bindings and bindings[0].owner() is not None:
        return absent_in_rank(f"'{bindings[0].name}'", use)
    return ParameterAccessError(
        f"The values of parameter '{bindings[0].name if bindings else '?'}' are not in this process, and {use} needs "
        "them: it is a worker that a rank has started (of a DataLoader, say), and only ranks put sharded parameters "
        "together. Compute with the module in the step method, or give the loader a copy that every rank makes before "
        "the workers start: `with lightning_zero.full_parameters(module): net = copy.deepcopy(module.net)`. With "
        "`num_workers=0` there is no worker."
    )


def absent_in_rank(name: str, use: str) -> ParameterAccessError:
    """What is raised in a rank where ``use`` needs values that are absent."""
    return ParameterAccessError(
        f"The values of parameter {name} are not in memory here, and {use} needs them: each rank holds a slice. Write "
        "`with lightning_zero.full_parameters(module):` around it, on every rank; or go through this rank's slices, "
        "`lightning_zero.local_slices(module)`; for a momentum teacher, `lightning_zero.ema_update(teacher, student, "
        "momentum)`. To save, `trainer.save_checkpoint` and `fabric.save` need none of this. Another strategy cannot "
        "run what is sharded: give it a `copy.deepcopy(module)` that was made there. In a forward or a backward values "
        "are gathered, unless code is compiled, traced or transformed, or runs in a thread of its own."
    )


def _same_memory(value: Tensor, data: Tensor) -> bool:
    if isinstance(value, ShardedTensor):
        return False
    alike = value.shape == data.shape and value.dtype == data.dtype and storage_key(value) == storage_key(data)
    return alike and (value.storage_offset(), value.stride()) == (data.storage_offset(), data.stride())


_brought: list[Binding] = []  # of parameters that came to this process, a spawned worker, without their values
_placeholders = Placeholders()


def _without_values(
    kind: type[nn.Parameter],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    marks: dict[str, Any],
) -> nn.Parameter:
    """What such a parameter is unpickled as."""
    placeholder = _placeholders.like(torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"))
    with untracked():
        parameter: nn.Parameter = make_subclass(kind, placeholder)
    parameter.requires_grad_(requires_grad)
    vars(parameter).update(marks)
    _brought.append(Binding(parameter, name, placeholder, None))
    return parameter
