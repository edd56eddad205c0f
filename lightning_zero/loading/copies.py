"""What a module's own loading code copies into parameters of which this rank holds a slice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.engine import ParameterShard, ZeroEngine
from lightning_zero.shards.binding import placeholders_allowed

__all__ = ["NotedCopies"]

_DETACHING = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


class NotedCopies(TorchFunctionMode):
    """While active, a copy into a sharded parameter is noted instead of made: only a placeholder stands there.

    So is one into ``parameter.data`` or ``parameter.detach()``, but not into a part of it.

    Args:
        engine: who holds the parameters.

    Attributes:
        copies: the slices to fill and, of the parameter's shape, the values.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        super().__init__()
        self._engine = engine
        self.copies: list[tuple[ParameterShard, Any]] = []
        self._allowed = ExitStack()
        self._detached: dict[int, tuple[Tensor, Tensor]] = {}  # by id, which is a tensor's while the tensor is kept

    def __enter__(self) -> NotedCopies:
        self._allowed.enter_context(placeholders_allowed())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._allowed.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note ``parameter.copy_(value)``; let everything else through."""
        if func is Tensor.copy_:
            _, target = self._detached.get(id(args[0]), (None, args[0]))
            if isinstance(target, nn.Parameter) and target in self._engine.names:
                shard, value = self._engine.shards[self._engine.names[target]], args[1]
                same = tuple(value.shape) == tuple(shard.spec.shape)
                self.copies.append((shard, value if same else value.expand(shard.spec.shape)))
                return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _DETACHING and isinstance(args[0], nn.Parameter):
            self._detached[id(result)] = (result, args[0])
        return result
