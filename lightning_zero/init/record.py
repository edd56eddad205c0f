"""What was done to meta tensors, and what of it a given tensor's values depend on. See ``recorder.py``."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_zero._torch import no_functions, storage_key, untracked
from lightning_zero.errors import MaterialiseError
from lightning_zero.init.replay import GENERATOR, META, Operation, Storage, Window, leaves, map_leaves, run_real

__all__ = ["ON_THE_CPU", "InitRecord"]

_aten = torch.ops.aten
ON_THE_CPU: Final = 'Build this module on the CPU, or drop `torch.device("meta")`.'

# Operations that only allocate: nothing to replay, values are undefined (zeros here, so that all ranks agree).
_ALLOCATE = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_ALLOCATE |= {_aten.empty_permuted}
# A literal on its way into Python, which torch 2.15 dispatches on meta: `literal` records its numbers once it is there.
_LITERAL = {_aten.lift_fresh, _aten.lift}
# Operations that make a tensor another window on a storage and change no value.
_REBIND = {_aten.set_}
# In-place operations that do not read their first argument.
_FILL = {_aten.zero_, _aten.fill_, _aten.copy_, _aten.uniform_, _aten.normal_, _aten.exponential_, _aten.cauchy_}
_FILL |= {_aten.log_normal_, _aten.geometric_, _aten.random_, _aten.bernoulli_}
# Random operations whose draws depend on the shape, strides and dtype of their only tensor argument, not on its values.
_VALUE_FREE = _FILL | {_aten.rand_like, _aten.randn_like, _aten.randint_like}


class InitRecord:
    """What was done to meta tensors while a model was built.

    Holds operations, generator states (5 KB per random operation) and the real tensors that went into meta ones (as
    copies, because they may change later); never the values of a meta tensor.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._storages: list[Storage] = []
        self._index: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the record holds."""
        held = (leaf for op in self._operations for leaf in leaves((op.args, op.kwargs, op.generator_state)))
        return sum(leaf.untyped_storage().nbytes() for leaf in held if isinstance(leaf, Tensor))

    def check(self, tensors: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        """Raise what ``materialise`` would raise for want of a record, without running anything.

        Raises:
            MaterialiseError: see ``materialise``.
        """
        self._select([self._window(tensor) for tensor in tensors], names)

    def materialise(
        self, tensors: Sequence[Tensor], device: torch.device | str = "cpu", names: Sequence[str] = ()
    ) -> list[Tensor]:
        """The values that an ordinary CPU build with the same seed would have given.

        Args:
            tensors: on the meta device; not changed. Asking twice for the same tensor replays twice.
            device: where the results go; the replay itself runs on the CPU, one call's tensors and what they depend on
                in memory at a time.
            names: of ``tensors``, for error messages.

        Returns:
            New tensors without gradient, of the same shapes, strides and dtypes. Tensors of one storage (ties, views)
            share memory on the CPU; on another ``device`` each is a copy, so ties are the caller's to keep.

        Raises:
            MaterialiseError: if a value depends on a meta tensor from before the recording.
        """
        windows = [self._window(tensor) for tensor in tensors]
        selected = self._select(windows, names)
        wanted = {window.storage for window in windows}
        last = {storage: index for index in selected for storage in self._operations[index].touches}
        memory: dict[int, torch.UntypedStorage] = {}
        with untracked(), _restored_generator(), no_functions():
            for index in selected:
                operation = self._operations[index]
                operation.replay(memory, self._storages)
                for storage in operation.touches:
                    if last[storage] == index and storage not in wanted:
                        memory.pop(storage, None)
            return [window.open(memory, self._storages).to(device) for window in windows]

    # -- recording ----------------------------------------------------------------------------------------------------

    def dispatch(self, function: Any, types: Sequence[Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one aten operation of the build, recording it if it touches the meta device."""
        inputs = list(leaves((args, kwargs)))
        meta_inputs = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.device.type == "meta"]
        if not meta_inputs and not any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in inputs):
            return function(*args, **kwargs)
        if function.overloadpacket in _LITERAL:
            return function(*args, **kwargs)
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            kinds = ", ".join(sorted({t.__name__ for t in types}))
            raise MaterialiseError(f"{function} on meta tensors of {kinds} cannot be recorded. {ON_THE_CPU}")
        written = _written(function, args, kwargs)
        if meta_inputs and _needs_values(function, kwargs, written):
            return run_real(function, self._read_all(args, function), self._read_all(kwargs, function))
        try:
            return self._record(function, args, kwargs, written)
        except NotImplementedError:
            if written or not meta_inputs:
                raise
        # The shape of the result depends on values (`nonzero`, `w[w > 0]`): compute it now, keep it as a constant.
        result = run_real(function, self._read_all(args, function), self._read_all(kwargs, function))
        return map_leaves(lambda leaf: self.literal(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def composite(self, function: Callable[..., Any], tensor: Tensor, *args: Any) -> None:
        """Record a Python function that overwrites all of ``tensor`` with random values, as one operation."""
        template = map_leaves(self._describe, (tensor, *args))
        state = self._draw(function, (tensor, *args), {}, value_free=True)
        self._append(function, template, {}, [tensor], [], overwritten=[tensor], state=state)

    def literal(self, values: Tensor, result: Tensor | None = None) -> Tensor:
        """Record that ``result`` (by default a new meta tensor like ``values``) holds the real ``values``."""
        if result is None:
            result = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=META)
        self._window(result, born=True)
        self._append(_aten.copy_.default, (self._describe(result), values.detach().clone()), {}, [result], [], [result])
        return result

    def tracks(self, tensor: Tensor) -> bool:
        """Whether the record has seen ``tensor``'s storage."""
        return storage_key(tensor) in self._index

    def read(self, tensor: Tensor) -> Tensor:
        """The real values of a meta tensor as of now, on the CPU."""
        return self.materialise([tensor])[0]

    def _read_all(self, values: Any, function: Any) -> Any:
        def read(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
                return leaf
            return self.materialise([leaf], names=[f"what {function} reads"])[0]

        return map_leaves(read, values)

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        described = map_leaves(self._describe, args), map_leaves(self._describe, kwargs)
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.device.type == "meta"]
        sources = {storage_key(tensor) for tensor in inputs}
        result = _run_meta(function, args, kwargs)
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            value_free = (
                function.overloadpacket in _VALUE_FREE and sum(isinstance(a, Tensor) for a in leaves(args)) == 1
            )
            state = self._draw(function, args, kwargs, value_free)
        outputs: list[Window | None] = []
        for leaf in leaves(result):
            born = isinstance(leaf, Tensor) and storage_key(leaf) not in sources
            outputs.append(self._window(leaf, born=True) if born else None)
        packet = function.overloadpacket
        if (not written and not any(outputs)) or packet in _ALLOCATE or packet in _REBIND:
            return result
        overwritten = [args[0]] if packet in _FILL and written else []
        overwritten += [tensor for tensor in _out_arguments(function, kwargs) if tensor is not None]
        self._append(function, described[0], described[1], written, outputs, overwritten, state)
        return result

    def _append(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        outputs: Sequence[Window | None],
        overwritten: Sequence[Tensor],
        state: Tensor | None = None,
    ) -> None:
        covered = [self._window(tensor) for tensor in overwritten]
        covered = [window for window in covered if window.covers(self._storages[window.storage].nbytes)]
        arguments = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Window)]
        for window in covered:
            if window in arguments:
                arguments.remove(window)  # once: the same tensor may also be read
        operation = Operation(
            function=function,
            args=args,
            kwargs=kwargs,
            outputs=tuple(outputs),
            reads=frozenset(window.storage for window in arguments),
            writes=frozenset(
                [self._window(tensor).storage for tensor in written] + [w.storage for w in outputs if w is not None]
            ),
            generator_state=state,
            default_dtype=torch.get_default_dtype(),
        )
        for storage in operation.writes:
            self._storages[storage].writers.append(len(self._operations))
        self._operations.append(operation)

    def _draw(self, function: Any, args: Any, kwargs: dict[str, Any], value_free: bool) -> Tensor:
        """Advance the generator as the operation would have done, and return its state from before."""
        own = next((leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
        generator = torch.default_generator if own is None else own
        if generator.device.type != "cpu":
            raise MaterialiseError(
                f"{function} on a meta tensor draws from a generator on {generator.device}, which a replay cannot "
                f"repeat. Pass a CPU generator or none. {ON_THE_CPU}"
            )
        state: Tensor = generator.get_state()

        def scratch(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
                return leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")

        with untracked():
            if value_free:
                run_real(function, map_leaves(scratch, args), map_leaves(scratch, kwargs))
            else:
                run_real(function, self._read_all(args, function), self._read_all(kwargs, function))
        return state

    def _describe(self, leaf: Any) -> Any:
        """An argument as the record keeps it."""
        if isinstance(leaf, Tensor):
            return self._window(leaf) if leaf.device.type == "meta" else leaf.detach().clone()
        if isinstance(leaf, torch.Generator):
            return None if leaf is torch.default_generator else GENERATOR
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _window(self, tensor: Tensor, born: bool = False) -> Window:
        if tensor.device.type != "meta":
            raise ValueError(f"A tensor on the meta device is needed, got one on {tensor.device}.")
        if is_lazy(tensor):
            raise MaterialiseError("A lazy module has no parameters to initialise yet: give its layers their sizes.")
        if tensor.layout is not torch.strided:
            raise MaterialiseError(f"A meta tensor of layout {tensor.layout} cannot be recorded. {ON_THE_CPU}")
        key = storage_key(tensor)
        if key not in self._index:
            memory = tensor.untyped_storage()
            self._index[key] = len(self._storages)
            self._storages.append(Storage(memory, memory.nbytes(), foreign=not born))
        return Window.of(tensor, self._index[key])

    # -- replay -------------------------------------------------------------------------------------------------------

    def _select(self, windows: Sequence[Window], names: Sequence[str]) -> list[int]:
        """Indices of the operations that the windows' values depend on, in program order."""
        selected: set[int] = set()
        for position, window in enumerate(windows):
            queue: list[int] = []
            self._want(window.storage, len(self._operations), selected, queue, names, position)
            while queue:
                index = -heapq.heappop(queue)
                for storage in self._operations[index].reads:
                    self._want(storage, index, selected, queue, names, position)
        return sorted(selected)

    def _want(
        self, storage: int, before: int, selected: set[int], queue: list[int], names: Sequence[str], position: int
    ) -> None:
        """Select the last write to ``storage`` before an operation."""
        writers = self._storages[storage].writers
        place = bisect.bisect_left(writers, before)
        if place:
            index = writers[place - 1]
            if index not in selected:
                selected.add(index)
                heapq.heappush(queue, -index)
        elif self._storages[storage].foreign:
            name = names[position] if position < len(names) else f"tensor {position}"
            raise MaterialiseError(
                f"The values of {name} depend on a meta tensor whose creation was not recorded: it was made before the "
                "recording began, or by an operation that the recorder cannot see. Create the whole model inside "
                f"`configure_model`. {ON_THE_CPU}"
            )


def _needs_values(function: Any, kwargs: dict[str, Any], written: list[Tensor]) -> bool:
    """Whether an operation on meta tensors has a result that is not on meta."""
    if any(tensor.device.type != "meta" for tensor in written):
        return True
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta":
        return True
    returns = function._schema.returns
    return any("Tensor" not in str(value.type) for value in returns) or not (returns or written)


def _written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    changed: list[Any] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional = not argument.kwarg_only and position < len(args)
            changed.extend(leaves(args[position] if positional else kwargs.get(argument.name)))
    return [leaf for leaf in changed if isinstance(leaf, Tensor)]


def _out_arguments(function: Any, kwargs: dict[str, Any]) -> Iterator[Tensor | None]:
    return (kwargs.get(argument.name) for argument in function._schema.arguments if argument.is_out)


def _run_meta(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Shapes only. Real tensors among meta ones are accepted by some meta kernels: give the others meta copies."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "not on the expected device" not in str(error):
            raise

    def on_meta(leaf: Any) -> Any:
        return leaf.to(META) if isinstance(leaf, Tensor) and leaf.device.type != "meta" else leaf

    return function(*map_leaves(on_meta, args), **map_leaves(on_meta, kwargs))


@contextmanager
def _restored_generator() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
