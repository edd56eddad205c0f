"""TorchScript modules: their methods, with around them what hooks are to other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from lightning_zero._torch import script_methods

__all__ = ["ScriptMethod", "wrap_methods"]

_SAVES = ("save", "save_to_buffer", "__deepcopy__")  # what copies such a module


def wrap_methods(
    module: torch.jit.ScriptModule,
    before: Callable[..., None],
    after: Callable[..., None],
    check_shown: Callable[[str], None],
) -> list[ScriptMethod]:
    """Put hooks around all methods that Python can call, and a check before those that make copies."""

    def check(*called: Any) -> None:
        check_shown("A copy")

    around = [ScriptMethod(module, name, before, after) for name in script_methods(module)]
    return around + [ScriptMethod(module, name, check, lambda *called: None) for name in _SAVES]


class ScriptMethod:
    """A method of a TorchScript module with hooks around it: such a module takes none.

    Compiled code reads parameters past everything else that could bring them. Calls between compiled modules need
    nothing: a module around them was called from Python.
    """

    def __init__(
        self, module: torch.jit.ScriptModule, name: str, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        self._module, self._name, self._before, self._after = ref(module), name, before, after
        self._method: Callable[..., Any] = getattr(module, name)
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        self._before(self._module(), args)
        try:
            output = self._method(*args, **kwargs)
        finally:
            self._after(self._module(), args, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)  # its graph, its code

    def remove(self) -> None:
        """Take it off the module, which finds its method anew."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            del vars(module)[self._name]
