"""Misuse of partitioned parameters, told by name: replaced objects, thawed parameters, weights used outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero._torch import is_compiled_module
from lightning_zero.engine.placeholder import Placeholders
from lightning_zero.engine.unit import ShardedUnit
from lightning_zero.errors import ParameterAccessError, ZeroError

__all__ = ["ParameterWatch"]


class ParameterWatch:
    """Checks that the user's parameters are used as the plan says.

    Args:
        module: the user's module.
        names: name of each parameter of the engine.
        frozen: parameters that were frozen at set-up.
        placeholders: what sharded parameters show.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        frozen: Sequence[nn.Parameter],
        placeholders: Placeholders,
    ) -> None:
        self._module = module
        self._names = names
        self._frozen = tuple(frozen)
        self._placeholders = placeholders
        self._owners: dict[int, list[tuple[Mapping[str, Any], str, nn.Parameter]]] = {}
        self._watched: set[str] = set()

    def check_identity(self, unit: ShardedUnit) -> None:
        """Raise if a parameter object of a unit was replaced since set-up.

        Raises:
            ParameterAccessError: naming the parameter.
        """
        owners = self._owners.get(unit.index)
        if owners is None:
            owners = self._owners[unit.index] = self._find_owners(unit)
        for owner, key, parameter in owners:
            if owner["_parameters"].get(key) is not parameter:
                raise ParameterAccessError(
                    f"Parameter '{self._names.get(parameter, key)}' of unit '{unit.name}' was replaced by another "
                    "object after set-up (load_state_dict(assign=True), a re-assigned attribute, or a re-tied "
                    "weight). Change its values inside `with lightning_zero.full_parameters(module):` instead."
                )

    def check_trainable(self) -> None:
        """Raise if a parameter was thawed since set-up: its gradients would stay local and never be used.

        Raises:
            ParameterAccessError: naming the parameter.
        """
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise ParameterAccessError(
                    f"Parameter '{self._names[parameter]}' was frozen at set-up and is trainable now. Gradient memory "
                    "is laid out at set-up: leave it trainable from the start (keep it out of the optimizer, or set "
                    "its learning rate to 0 until it is to move), or start a new fit after unfreezing."
                )

    def would_watch(self, name: str) -> bool:
        """Whether ``first_time`` of this name looks at torch calls."""
        return name not in self._watched and not any(is_compiled_module(module) for module in self._module.modules())

    @contextmanager
    def first_time(
        self, name: str, reduced: Callable[[], bool], used: Callable[[nn.Parameter, bool], None] | None = None
    ) -> Iterator[None]:
        """During the first run of a step method, name every parameter that is used where only a placeholder stands.

        Later runs are not watched (looking at every torch call costs time); there such a read gives NaN, and a write
        raises. Modules with compiled parts are not watched: Dynamo would have to trace the watching.

        Args:
            name: the step method.
            reduced: whether gradients of a backward have been taken over by now, so that a parameter's ``.grad`` is
                ``None`` and clipping it would do nothing.
            used: told of every parameter that a torch function computes with, and whether it may write to it.

        Raises:
            ParameterAccessError: at the call that does it.
        """
        if name in self._watched:
            yield
            return
        if not self.would_watch(name):
            self._watched.add(name)
            yield
            return
        with _PlaceholderUse(self._describe, self._placeholders, lambda p: p in self._names and reduced(), used):
            yield
        self._watched.add(name)

    def _describe(self, tensor: Tensor) -> str:
        if isinstance(tensor, nn.Parameter) and tensor in self._names:
            return f"Parameter '{self._names[tensor]}'"
        fitting = [n for p, n in self._names.items() if p.shape == tensor.shape and self._placeholders.holds(p.data)]
        return f"A parameter of shape {list(tensor.shape)}" + (f" ('{fitting[0]}'?)" if fitting else "")

    def _find_owners(self, unit: ShardedUnit) -> list[tuple[Mapping[str, Any], str, nn.Parameter]]:
        owners: list[tuple[Mapping[str, Any], str, nn.Parameter]] = []
        for flat in unit.flats:
            for spec, parameter in zip(flat.layout.parameters, flat.parameters, strict=True):
                for name in (spec.name, *spec.aliases):
                    prefix, _, key = name.rpartition(".")
                    owners.append((vars(self._module.get_submodule(prefix)), key, parameter))
        return owners


class _PlaceholderUse(TorchFunctionMode):
    """Raises where a torch function computes with, or writes to, a placeholder."""

    # Questions about a tensor, answered truthfully by a placeholder, and what the engine itself does to parameters.
    _HARMLESS = frozenset(
        ["requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "detach", "view_as", "expand"]
    )

    def __init__(
        self,
        describe: Callable[[Tensor], str],
        placeholders: Placeholders,
        gradient_is_gone: Callable[[nn.Parameter], bool],
        used: Callable[[nn.Parameter, bool], None] | None = None,
    ) -> None:
        super().__init__()
        self._used = used
        self._gradient_is_gone = gradient_is_gone
        self._describe = describe
        self._placeholders = placeholders

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == _READ_GRADIENT and isinstance(args[0], nn.Parameter) and args[0].requires_grad:
            self._check_gradient(args[0])
        try:
            result = func(*args, **(kwargs or {}))
        except ZeroError:
            raise
        except RuntimeError as error:  # torch refuses to write to a placeholder, without saying which
            for tensor in _tensors([*args, *(kwargs or {}).values()]):
                if tensor.numel() and self._placeholders.holds(tensor):
                    self._refuse(tensor, name, error)
            raise
        if self._used is not None and _reads(name, result):
            writes = func == _READ_DATA or _writes(name) or "out" in (kwargs or {})
            for tensor in _tensors([*args, *(kwargs or {}).values()]):
                if isinstance(tensor, nn.Parameter):
                    self._used(tensor, writes)
        if (name.startswith("__") and name not in _OPERATORS) or name in self._HARMLESS:
            return result
        if isinstance(result, (Tensor, tuple | list)):
            for tensor in _tensors([*args, *(kwargs or {}).values()]):
                if tensor.numel() and self._placeholders.holds(tensor):
                    self._refuse(tensor, name)
        return result

    def _check_gradient(self, parameter: nn.Parameter) -> None:
        if self._gradient_is_gone(parameter):
            raise ParameterAccessError(
                f"{self._describe(parameter)} was asked for .grad, which is None on every parameter of the "
                "module: gradients "
                "are averaged over the ranks and kept where the optimizer finds them. To clip, use "
                "gradient_clip_val or "
                "self.clip_gradients(optimizer, ...); to look, lightning_zero.grad_norm or full_gradient; to clear, "
                "optimizer.zero_grad()."
            )

    def _refuse(self, tensor: Tensor, name: str, cause: Exception | None = None) -> None:
        raise ParameterAccessError(
            f"{self._describe(tensor)} was used by {name}() outside the forward of the unit it belongs to, where its "
            "values are not in memory. Call the module that owns it instead of reading its weight; or make a module "
            "around both the unit (ZeroStrategy(units=[...])); or, to look at values, use `with "
            "lightning_zero.full_parameters(module):`."
        ) from cause


_READ_GRADIENT: Any = getattr(Tensor.grad, "__get__")  # noqa: B009 - a descriptor, whatever its type says
_READ_DATA: Any = getattr(Tensor.data, "__get__")  # noqa: B009
_QUESTIONS = frozenset(
    [
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__len__",
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
    ]
)
_OPERATORS = frozenset(
    f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "matmul", "pow")
) | {"__getitem__", "__setitem__", "__neg__"}


def _reads(name: str, result: Any) -> bool:
    """Whether a torch function may look at values, or hands out something that shows them."""
    if name in ("__get__", "__set__", "__delete__"):
        return name == "__get__" and isinstance(result, Tensor)
    return name not in _QUESTIONS


def _writes(name: str) -> bool:
    """Whether a torch function may write to what it gets, or hands out something through which that is done."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _OPERATORS)
    return name.endswith("_") or name == "detach"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
