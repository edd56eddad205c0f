"""What was done to meta tensors, and what of it a given tensor's values depend on. See ``recorder.py``."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_zero._torch import neg_view, no_functions, storage_key, tree_leaves, tree_map_only, untracked
from lightning_zero.errors import MaterialiseError

__all__ = ["META", "ON_THE_CPU", "InitRecord", "map_leaves"]

META: Final = torch.device("meta")
ON_THE_CPU: Final = 'Build this module on the CPU, or drop `torch.device("meta")`.'

_aten = torch.ops.aten
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
        self._operations: list[_Operation] = []
        self._storages: list[_Storage] = []
        self._index: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the record holds."""
        held = (leaf for op in self._operations for leaf in tree_leaves((op.args, op.kwargs, op.generator_state)))
        return sum(leaf.untyped_storage().nbytes() for leaf in held if isinstance(leaf, Tensor))

    def check(self, tensors: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        """Raise the ``MaterialiseError`` that ``materialise`` would raise for want of a record; nothing is run."""
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
        memory: _Memory = {}
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
        inputs = tree_leaves((args, kwargs))
        has_meta_inputs = any(map(_is_meta, inputs))
        if not has_meta_inputs and not any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in inputs):
            return function(*args, **kwargs)
        if function.overloadpacket in _LITERAL:
            return function(*args, **kwargs)
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            kinds = ", ".join(sorted({t.__name__ for t in types}))
            raise MaterialiseError(f"{function} on meta tensors of {kinds} cannot be recorded. {ON_THE_CPU}")
        written = _written(function, args, kwargs)
        if has_meta_inputs and _needs_values(function, kwargs, written):
            return self._run_with_values(function, args, kwargs)
        try:
            return self._record(function, args, kwargs, written)
        except NotImplementedError:
            if written or not has_meta_inputs:
                raise
        # The shape of the result depends on values (`nonzero`, `w[w > 0]`): compute it now, keep it as a constant.
        result = self._run_with_values(function, args, kwargs)
        return map_leaves(lambda leaf: self.literal(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def composite(self, function: Callable[..., Any], tensor: Tensor, *args: Any) -> None:
        """Record a Python function that overwrites all of ``tensor`` with random values, as one operation."""
        described = map_leaves(self._describe, (tensor, *args))
        state = self._draw(function, (tensor, *args), {}, value_free=True)
        self._append(function, described, {}, [tensor], overwritten=[tensor], state=state)

    def literal(self, values: Tensor, result: Tensor | None = None) -> Tensor:
        """Record that ``result`` (by default a new meta tensor like ``values``) holds the real ``values``."""
        if result is None:
            result = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=META)
        args = (self._window(result, born=True), values.detach().clone())
        self._append(_aten.copy_.default, args, {}, [result], overwritten=[result])
        return result

    def tracks(self, tensor: Tensor) -> bool:
        """Whether the record has seen ``tensor``'s storage."""
        return storage_key(tensor) in self._index

    def _run_with_values(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation now, on the values that meta tensors have at this point."""

        def real(leaf: Any) -> Any:
            return self.materialise([leaf], names=[f"what {function} reads"])[0] if _is_meta(leaf) else leaf

        return _run_real(function, map_leaves(real, args), map_leaves(real, kwargs))

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        described = map_leaves(self._describe, args), map_leaves(self._describe, kwargs)
        sources = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        result = _run_meta(function, args, kwargs)
        packet, state = function.overloadpacket, None
        if torch.Tag.nondeterministic_seeded in function.tags:
            value_free = packet in _VALUE_FREE and sum(isinstance(leaf, Tensor) for leaf in tree_leaves(args)) == 1
            state = self._draw(function, args, kwargs, value_free)
        outputs: list[_Window | None] = []
        for leaf in tree_leaves(result):
            born = isinstance(leaf, Tensor) and storage_key(leaf) not in sources
            outputs.append(self._window(leaf, born=True) if born else None)
        if (not written and not any(outputs)) or packet in _ALLOCATE or packet in _REBIND:
            return result
        overwritten = [args[0]] if packet in _FILL and written else []
        given = (kwargs.get(argument.name) for argument in function._schema.arguments if argument.is_out)
        overwritten += [tensor for tensor in given if tensor is not None]
        self._append(function, *described, written, outputs, overwritten, state)
        return result

    def _append(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        outputs: Sequence[_Window | None] = (),
        overwritten: Sequence[Tensor] = (),
        state: Tensor | None = None,
    ) -> None:
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Window)]
        for window in map(self._window, overwritten):
            if window.covers(self._storages[window.storage].nbytes) and window in arguments:
                arguments.remove(window)  # once: the same tensor may also be read
        writes = {self._window(tensor).storage for tensor in written}
        operation = _Operation(
            function=function,
            args=args,
            kwargs=kwargs,
            outputs=tuple(outputs),
            reads=frozenset(window.storage for window in arguments),
            writes=frozenset(writes | {window.storage for window in outputs if window is not None}),
            generator_state=state,
            default_dtype=torch.get_default_dtype(),
        )
        for storage in operation.writes:
            self._storages[storage].writers.append(len(self._operations))
        self._operations.append(operation)

    def _draw(self, function: Any, args: Any, kwargs: dict[str, Any], value_free: bool) -> Tensor:
        """Advance the generator as the operation would have done, and return its state from before."""
        own = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
        generator = torch.default_generator if own is None else own
        if generator.device.type != "cpu":
            raise MaterialiseError(
                f"{function} on a meta tensor draws from a generator on {generator.device}, which a replay cannot "
                f"repeat. Pass a CPU generator or none. {ON_THE_CPU}"
            )
        state: Tensor = generator.get_state()

        def scratch(leaf: Any) -> Any:
            if not _is_meta(leaf):
                return leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")

        with untracked():
            if value_free:
                _run_real(function, map_leaves(scratch, args), map_leaves(scratch, kwargs))
            else:
                self._run_with_values(function, args, kwargs)
        return state

    def _describe(self, leaf: Any) -> Any:
        """An argument as the record keeps it."""
        if isinstance(leaf, Tensor):
            return self._window(leaf) if _is_meta(leaf) else leaf.detach().clone()
        if isinstance(leaf, torch.Generator):
            return None if leaf is torch.default_generator else _GENERATOR
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _window(self, tensor: Tensor, born: bool = False) -> _Window:
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
            self._storages.append(_Storage(memory, memory.nbytes(), foreign=not born))
        return _Window.of(tensor, self._index[key])

    def _select(self, windows: Sequence[_Window], names: Sequence[str]) -> list[int]:
        """Indices of the operations that the windows' values depend on, in program order."""
        selected: set[int] = set()
        queue: list[int] = []  # of indices, the last one first

        def want(storage: int, before: int, position: int) -> None:
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
                    f"The values of {name} depend on a meta tensor whose creation was not recorded: it was made before "
                    "the recording began, or by an operation that the recorder cannot see. Create the whole model "
                    f"inside `configure_model`. {ON_THE_CPU}"
                )

        for position, window in enumerate(windows):
            want(window.storage, len(self._operations), position)
            while queue:
                index = -heapq.heappop(queue)
                for storage in self._operations[index].reads:
                    want(storage, index, position)
        return sorted(selected)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


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
            changed.extend(tree_leaves(args[position] if positional else kwargs.get(argument.name)))
    return [leaf for leaf in changed if isinstance(leaf, Tensor)]


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


def _run_real(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on real tensors, on the CPU where it was to run on meta, whatever autocast says here."""

    def on_cpu(leaf: Any) -> Any:
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    with torch.autocast("cpu", enabled=False):
        return function(*map_leaves(on_cpu, args), **map_leaves(on_cpu, kwargs))


@contextmanager
def _restored_generator() -> Iterator[None]:
    state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to everything in nested lists, tuples and dicts."""
    return tree_map_only(object, function, value)


# -- replay -----------------------------------------------------------------------------------------------------------

_GENERATOR: Final = object()  # a generator that the user passed: replay makes one with the recorded state
_Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class _Storage:
    """The memory that a meta tensor does not have."""

    memory: torch.UntypedStorage  # the meta storage; held so that its identity is not given to another one
    nbytes: int  # when it was first seen
    foreign: bool  # it was not made by a recorded operation
    writers: list[int] = field(default_factory=list)  # indices of the operations that make or change it, ascending


@dataclass(frozen=True)
class _Window:
    """A tensor: how one storage of the record, given by its index, is looked at. ``offset`` is in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> _Window:
        """The window that ``tensor`` is."""
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return cls(storage, tensor.dtype, shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def covers(self, nbytes: int) -> bool:
        """Whether each element of a storage of ``nbytes`` lies in this window exactly once."""
        expected = 1
        dimensions = zip(self.strides, self.shape, strict=True)
        for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == nbytes

    def open(self, memory: _Memory, storages: list[_Storage]) -> Tensor:
        """A real tensor on ``memory``; what was never written is zero."""
        if self.storage not in memory:
            zeros = torch.zeros(storages[self.storage].nbytes, dtype=torch.uint8, device="cpu")
            memory[self.storage] = zeros.untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor = tensor.set_(memory[self.storage], self.offset, self.shape, self.strides)
        tensor = tensor.conj() if self.conj else tensor
        return neg_view(tensor) if self.neg else tensor


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One recorded call of an aten operation, or of a Python function of tensors."""

    function: Callable[..., Any]
    args: Any  # with windows for meta tensors and a mark for a generator of the user's
    kwargs: dict[str, Any]  # likewise
    outputs: tuple[_Window | None, ...]  # for each leaf of its result the window, if its storage was made by this call
    reads: frozenset[int]  # storages whose values from before the call matter to what ``writes`` holds afterwards
    writes: frozenset[int]  # storages it makes or changes
    generator_state: Tensor | None  # of the generator it draws from, before the call; ``None`` if it draws nothing
    default_dtype: torch.dtype  # torch's at the time of the call

    @property
    def touches(self) -> frozenset[int]:
        """Storages it needs in memory."""
        return self.reads | self.writes

    def replay(self, memory: _Memory, storages: list[_Storage]) -> None:
        """Run the call on ``memory``. Changes torch's CPU generator and default dtype, which the caller restores."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Window):
                return leaf.open(memory, storages)
            if leaf is _GENERATOR and self.generator_state is not None:
                return torch.Generator().set_state(self.generator_state)
            return leaf

        if self.generator_state is not None:
            torch.default_generator.set_state(self.generator_state)
        args, kwargs = map_leaves(real, self.args), map_leaves(real, self.kwargs)
        torch.set_default_dtype(self.default_dtype)
        result = _run_real(self.function, args, kwargs)
        borrowed = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf, window in zip(tree_leaves(result), self.outputs, strict=False):
            if window is None:
                continue
            own = leaf.untyped_storage()
            as_recorded = _Window.of(leaf, window.storage) == window and own.nbytes() == storages[window.storage].nbytes
            if as_recorded and window.storage not in memory and storage_key(leaf) not in borrowed:
                memory[window.storage] = own
            else:
                window.open(memory, storages).copy_(leaf)
