"""What user code meets in place of its parameters: the only file that rebinds one, and sees what is done to it.

[Note: a class that is seen through]
A parameter of the engine stays the user's object: same ``id``, name, shape, dtype and ``requires_grad``. Only its class
becomes a subclass of what it was (as torch itself turns an ``UninitializedParameter`` into a ``Parameter``), of the
same name, so that three things that torch never tells anybody about are seen:

* ``.grad``: between a backward and the step gradients are slices; what stands there is the owner's to say.
* ``.data``: a tensor that is assigned, and an alias that is handed out and may be written to unseen.
* any torch function on a parameter whose values are *absent*. Then it shows a placeholder and has a second subclass
  with a ``__torch_function__``: questions about shape, dtype and the like are answered, what needs values has them
  brought if that is possible without the other ranks, and raises otherwise. Where values are present torch finds its
  own disabled ``__torch_function__``, so that computing costs what it does on any parameter.

[Note: values that are assigned]
``parameter.data = tensor``, or a function that overwrites all of an absent parameter (``copy_``, ``nn.init``), lets the
parameter be an ordinary tensor, as under plain torch, until the engine next computes, steps or saves. Then the values
are taken over, and the tensor that was assigned is let go.

[Note: weights that are put aside by reference]
``kept = parameter.data``, another tensor for ``parameter.data``, and ``parameter.data = kept`` later: so averaged
weights are evaluated. Under plain torch ``kept`` has its memory for itself meanwhile. Here the other tensor is copied
to where the parameter is at home, so what was handed out gets memory of its own right before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol
from weakref import ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zero._torch import (
    SAVE_TO_STATE_DICT,
    ZERO_GRADS,
    describes_tensors,
    make_subclass,
    no_subclasses,
    storage_key,
    untracked,
    weights_to_move,
)
from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards.functions import CASTS, FREE, MODELS, OVERWRITES, SHAPES, STRIDES, changes_nothing, refusal
from lightning_zero.shards.handed_out import HandedOut
from lightning_zero.shards.reductions import REDUCTIONS

__all__ = [
    "Binding",
    "Bound",
    "absent_kind",
    "binding_of",
    "get_data",
    "hide",
    "is_absent",
    "original_kind",
    "placeholders_allowed",
    "set_data",
    "show",
    "shown_kind",
]


# The descriptors themselves, past the properties below.
get_data: Callable[[Tensor], Tensor] = getattr(Tensor.data, "__get__")  # noqa: B009
set_data: Callable[[Tensor, Tensor], None] = getattr(Tensor.data, "__set__")  # noqa: B009
get_gradient: Callable[[Tensor], Tensor | None] = getattr(Tensor.grad, "__get__")  # noqa: B009
set_gradient: Callable[[Tensor, Tensor | None], None] = getattr(Tensor.grad, "__set__")  # noqa: B009

Bound = tuple[nn.Parameter, Tensor, type[nn.Parameter]]
"""A parameter, what it is to show, and its class then."""


def show(bound: Iterable[Bound]) -> None:
    """Let parameters be tensors that hold their values."""
    for parameter, value, kind in bound:
        parameter.__class__ = kind
        set_data(parameter, value)


def hide(bound: Iterable[Bound]) -> None:
    """Let parameters stand for values that are not there. In this order: while absent they would ask about it."""
    for parameter, placeholder, kind in bound:
        set_data(parameter, placeholder)
        parameter.__class__ = kind


_BINDINGS: dict[int, ref[Binding]] = {}  # by id of the parameter, which its binding keeps alive
_allowed = 0  # how many ``placeholders_allowed`` are active


class Binding:
    """One of the user's parameters, of this first name, which shows ``placeholder`` while its values are absent."""

    def __init__(self, parameter: nn.Parameter, name: str, placeholder: Tensor, owner: Owner) -> None:
        self.parameter = parameter
        self.name = name
        self.placeholder = placeholder
        self.owner = ref(owner)  # the engine, as long as it lives
        self.base: type[nn.Parameter] = original_kind(parameter)
        self.external = False
        """Whether the parameter is an ordinary tensor at the moment, whose values are to be taken over."""
        self.held = False
        """Whether it shows full values in the user's hands (``full_parameters``): it may be pointed anywhere."""
        self.handed = HandedOut()
        self._unswappable = ref(parameter)  # `torch.utils.swap_tensors`, which would take our hooks away, refuses it
        self._warned_of_set = False
        self.place: Any = None
        self.let_go: Callable[[Any], None] | None = None  # where its gradient is collected, and what `zero_grad` calls
        self.last_hook: int | None = None
        """Id of the engine's post-accumulate hook, which runs after the user's."""
        key = id(parameter)
        _BINDINGS[key] = ref(self, lambda gone: _BINDINGS.pop(key) if _BINDINGS.get(key) is gone else None)
        shows_placeholder = storage_key(get_data(parameter)) == storage_key(placeholder)
        parameter.__class__ = (absent_kind if shows_placeholder else shown_kind)(self.base)

    def show(self, value: Tensor) -> None:
        """Let the parameter be ``value``."""
        show([(self.parameter, value, shown_kind(self.base))])

    def hide(self) -> None:
        """Let the parameter stand for values that are not there."""
        hide([(self.parameter, self.placeholder, absent_kind(self.base))])

    def release(self) -> None:
        """Make the parameter what it was before; it shows what it shows."""
        self.parameter.__class__ = self.base
        _BINDINGS.pop(id(self.parameter), None)

    def assign(self, value: Tensor) -> None:
        """``parameter.data = value``."""
        parameter, owner = self.parameter, self.owner()
        if owner is not None and owner.assigned_slice(self, value):
            return
        if owner is None or self.held or (self.external and not is_absent(parameter)):
            self.show(value)
            return
        if value is parameter or _same_memory(value, get_data(parameter)):
            return  # ``module.to(...)`` that changes nothing
        if owner.assigned(self, value):
            self.handed.part()
            with untracked():
                get_data(parameter).copy_(value)
            return
        self.external = True
        self.show(value)

    def make_room(self) -> None:
        """Let an absent parameter be a tensor that is about to be overwritten."""
        if (owner := self.owner()) is not None and owner.assigned(self, None):
            return  # there is room now
        self.external = True
        like = self.placeholder
        with untracked():  # not `empty_like`, which has no room in `ConstantState`
            self.show(torch.empty(like.shape, dtype=like.dtype, device=like.device))


def binding_of(parameter: Tensor) -> Binding | None:
    """The binding of a parameter, if an engine looks after it."""
    weak = _BINDINGS.get(id(parameter))
    binding = None if weak is None else weak()
    return binding if binding is not None and binding.parameter is parameter else None


def is_absent(parameter: Tensor) -> bool:
    """Whether a parameter's values are not in memory."""
    return isinstance(parameter, _Absent)


@contextmanager
def placeholders_allowed() -> Iterator[None]:
    """While active, absent parameters hand placeholders out: to code that only passes them on."""
    global _allowed
    _allowed += 1
    try:
        yield
    finally:
        _allowed -= 1


def original_kind(parameter: Tensor) -> type[nn.Parameter]:
    """The class of a parameter before an engine looked after it."""
    kind: Any = type(parameter)
    original: type[nn.Parameter] = kind._base if issubclass(kind, _Shown) else kind
    return original


class _Shown:
    """Sees ``.data`` and ``.grad``; copies of it are ordinary parameters."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)  # as of every tensor, without a torch function to answer it

    @property
    def data(self: Any) -> Tensor:
        binding = binding_of(self)
        if binding is None or _allowed:
            return get_data(self)
        if is_absent(self) and not _bring([binding]):
            if (sliced := _sliced(binding)) is not None:
                return binding.handed.note(sliced)
            if not _bring([binding], together=True):
                if (sliced := _readable(binding)) is not None:
                    return sliced
                raise _refused([binding], "data")
        if binding.held or (owner := binding.owner()) is None:
            return get_data(self)
        owner.handed_out(binding)
        return binding.handed.note(get_data(self))

    @data.setter
    def data(self: Any, value: Tensor) -> None:
        binding = binding_of(self)
        if binding is None:
            set_data(self, value)
        else:
            binding.assign(value)

    @property
    def grad(self: Any) -> Tensor | None:
        caller, weak = sys._getframe(1), _BINDINGS.get(id(self))
        binding = None if weak is None else weak()  # ``binding_of``, without a call: every `zero_grad` is here
        if binding is None or binding.parameter is not self:
            return get_gradient(self)
        if binding.let_go is not None and id(caller.f_code) in ZERO_GRADS and caller.f_locals["set_to_none"]:
            binding.let_go(binding)  # it only asks whether there is one: none is made to be shown
            return None
        owner, local = binding.owner(), get_gradient(self)
        return local if owner is None or describes_tensors(caller) else owner.read_gradient(binding, local)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        binding = binding_of(self)
        if binding is None or (owner := binding.owner()) is None:
            set_gradient(self, value)
        else:
            owner.write_gradient(binding, value)

    @grad.deleter
    def grad(self: Any) -> None:
        self.grad = None

    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As every parameter's, which torch tells no torch function of. An absent one is assigned the tensor.

        Autograd forgets DDP's hooks then, and not ours. (``torch.utils.swap_tensors`` would take ours as well.)
        """
        binding = binding_of(self)
        if binding is not None and self.requires_grad and not binding._warned_of_set:
            binding._warned_of_set = True
            rank_zero_warn(
                f"'{binding.name}' was changed by `set_()`, as `torch.nn.utils.parametrize` does. DDP stops averaging "
                "the gradient of such a parameter, and its ranks drift apart. Here it is still averaged. For the same "
                "numbers with both, register parametrizations before `trainer.fit`."
            )
        if not is_absent(self) or binding is None:
            return Tensor.set_(self, *args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise _refused([binding], "set_()")
        self.data = args[0]
        return self

    def register_post_accumulate_grad_hook(self: Any, hook: Any) -> Any:
        """As every parameter's; what the hook does to ``.grad`` counts, because the engine looks at it afterwards."""
        register: Any = Tensor.register_post_accumulate_grad_hook
        handle = register(self, hook)
        binding = binding_of(self)
        if binding is not None and binding.last_hook in self._post_accumulate_grad_hooks:
            hooks = self._post_accumulate_grad_hooks  # torch goes by the order of insertion: moving is not enough
            hooks[binding.last_hook] = hooks.pop(binding.last_hook)
        return handle

    def data_ptr(self: Any) -> int:
        """As every parameter's. Recurrent layers do not move weights if two have one address; we could not see it."""
        kind: Any = super()
        if (weights := weights_to_move(sys._getframe().f_back)) is None:
            return int(kind.data_ptr())
        return next((weight.data_ptr() for weight in weights if not isinstance(weight, _Shown)), 0)

    def detach(self: Any) -> Any:
        """As every parameter's. ``nn.Parameter(parameter)`` wants one of its own class, which it then makes its own."""
        detached, caller = Tensor.detach(self), sys._getframe(1).f_code
        if caller in (_NEW, _SAVE) and is_absent(self) and not _allowed:  # what they get has to be whole
            binding = binding_of(self)
            raise _refused([] if binding is None else [binding], "detach()")
        if caller is not _NEW:
            return detached
        with no_subclasses():
            return make_subclass(type(self), detached)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with _ordinary(self):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        binding = binding_of(self)
        owner = None if binding is None or get_spawning_popen() is None else binding.owner()
        if binding is not None and owner is not None and (is_absent(self) or not owner.shows_for_good(binding)):
            return owner.for_worker(binding)
        with _ordinary(self):
            return self.__reduce_ex__(protocol)


class _Absent(_Shown):
    """Answers questions, and raises where values are needed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _called(func, args, kwargs or {})

    def __repr__(self: Any) -> str:
        what = f"{self.__class__.__name__} of shape {tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"{what}: values are not in memory, see lightning_zero.full_parameters"

    def __format__(self: Any, spec: str) -> str:
        return format(repr(self), spec)


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


_LOOKS = frozenset(["detach", "isfinite", "isnan", "isinf"])  # what slices answer as well, beside norms and sums
_OURS = frozenset(["__set__"])  # what the engine does to parameters, whatever they show
_NEW: Any = nn.Parameter.__new__.__code__
_SAVE: Any = SAVE_TO_STATE_DICT.__code__


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A torch function got an absent parameter."""
    name = getattr(func, "__name__", "")
    if _allowed or name in _OURS or func in (get_data, get_gradient):  # user code meets properties instead
        with no_subclasses():
            return func(*args, **kwargs)
    bindings = [b for tensor in _absent([*args, *kwargs.values()]) if (b := binding_of(tensor)) is not None]
    if bindings and _bring(bindings):
        return func(*args, **kwargs)
    first: Any = args[0] if args else None
    if name in FREE or name in MODELS or (name in SHAPES and not isinstance(first, _Absent)):
        with no_subclasses():
            return func(*args, **kwargs)
    if name == "__get__":
        with no_subclasses():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
    elif name in STRIDES:  # those of the values, not those of the placeholder
        return func(torch.empty(first.shape, device="meta"), *args[1:], **kwargs)
    elif name == "type" and not args[1:] and not kwargs:
        with no_subclasses():
            return func(first)
    elif name in CASTS and isinstance(first, _Absent):
        with no_subclasses(), untracked():
            if changes_nothing(name, first, args[1:], kwargs):
                return first
    if len(bindings) == 1 and (
        (name in OVERWRITES and first is bindings[0].parameter)
        or kwargs.get("out") is bindings[0].parameter
        or getattr(func, "__module__", "") == "torch.nn.init"
    ):
        bindings[0].make_room()
        return func(*args, **kwargs)
    if name.endswith("_") and not name.startswith("__") and _edit(func, args, kwargs):
        return first
    if bindings and _bring(bindings, together=True):
        return func(*args, **kwargs)
    if name in REDUCTIONS or name in _LOOKS:
        slices = {id(binding.parameter): _readable(binding) for binding in bindings}
        if bindings and None not in slices.values():
            result = func(*_swapped(args, slices), **kwargs)
            wanted = torch.is_grad_enabled() and any(b.parameter.requires_grad for b in bindings)
            return _refusing_backward(result, bindings[0].name, name) if wanted and name in REDUCTIONS else result
    raise _refused(bindings, f"{name}()")


def _edit(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Let a function that writes in place do so to slices of absent parameters. Returns whether that was possible."""
    found = {id(p): _sliced(b) for p in _absent([*args, *kwargs.values()]) if (b := binding_of(p)) is not None}
    if None in found.values():
        return False
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in _absent(args[:1])):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    func(*_swapped(args, found), **dict(zip(kwargs, _swapped(list(kwargs.values()), found), strict=True)))
    return True


def _swapped(values: Sequence[Any], slices: Mapping[int, Any]) -> list[Any]:
    """Arguments with slices, by ids of parameters, in the place of these."""
    return [
        _swapped(value, slices) if isinstance(value, tuple | list) else slices.get(id(value), value) for value in values
    ]


class _RefusingBackward(torch.autograd.Function):
    """A number that was made of slices: it requires grad, as the parameter does, and a backward of it raises."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, anchor: Tensor, name: str, use: str) -> Tensor:
        ctx.named = name, use
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise refusal([ctx.named[0]], f"the backward of a {ctx.named[1]}() that was taken between steps")


def _refusing_backward(result: Any, name: str, use: str) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_refusing_backward(number, name, use) for number in result)
    if not (result.is_floating_point() or result.is_complex()):
        return result
    apply: Any = _RefusingBackward.apply
    return apply(result, torch.empty(0, requires_grad=True, device="cpu"), name, use)


def _readable(binding: Binding) -> Tensor | None:
    owner = binding.owner()
    sliced = None if owner is None or binding.held else owner.read_slice(binding)
    return None if sliced is None else binding.handed.note(sliced)


def _sliced(binding: Binding) -> Tensor | None:
    return None if (owner := binding.owner()) is None or binding.held else owner.sliced(binding)


def _absent(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, _Absent):
            yield value  # type: ignore[misc]
        elif isinstance(value, tuple | list):
            yield from _absent(value)


def _bring(bindings: Sequence[Binding], together: bool = False) -> bool:
    return all((owner := binding.owner()) is not None and owner.bring(binding, together) for binding in bindings)


def _refused(bindings: Sequence[Binding], use: str) -> ParameterAccessError:
    names, owner = [binding.name for binding in bindings], bindings[0].owner() if bindings else None
    return refusal(names, use) if owner is None else owner.refusal(names, use)


def _same_memory(value: Tensor, data: Tensor) -> bool:
    alike = value.shape == data.shape and value.dtype == data.dtype and storage_key(value) == storage_key(data)
    return alike and (value.storage_offset(), value.stride()) == (data.storage_offset(), data.stride())


class Owner(Protocol):
    """What a binding asks of the engine that looks after its parameter. All may raise ``ParameterAccessError``."""

    def bring(self, binding: Binding, together: bool) -> bool:
        """Let a parameter show its values, if this rank can do so alone, or with the others in the same phase."""

    def assigned(self, binding: Binding, value: Tensor | None) -> bool:
        """Note that it is about to be ``value``, or a tensor to be filled. Returns whether values have to be copied."""

    def assigned_slice(self, binding: Binding, value: Tensor) -> bool:
        """Take over a value of which this rank has a slice. Returns whether it is one."""

    def handed_out(self, binding: Binding) -> None:
        """Note that an alias of the parameter's memory left, through which it may be written to unseen."""

    def sliced(self, binding: Binding) -> Tensor | None:
        """What stands for the values of an absent parameter where elements are enough; ``None`` if nothing does."""

    def read_slice(self, binding: Binding) -> Tensor | None:
        """What stands for the values of an absent parameter where reading elements is enough."""

    def read_gradient(self, binding: Binding, local: Tensor | None) -> Tensor | None:
        """What ``.grad`` is. ``local``: what autograd holds there."""

    def write_gradient(self, binding: Binding, value: Tensor | None) -> None: ...

    def shows_for_good(self, binding: Binding) -> bool:
        """Whether what a parameter shows is its own until it is changed, and not only while a module runs."""

    def for_worker(self, binding: Binding) -> tuple[Any, ...]:
        """What a parameter without values is pickled as for a process that is being spawned."""

    def refusal(self, names: Sequence[str], use: str) -> ParameterAccessError:
        """What is raised where ``use`` needs the values of absent parameters."""
