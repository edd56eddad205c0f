"""All of some parameters at once, for reading and writing: whole outside a unit's forward, for once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.engine.binding import Binding, get_data, is_absent
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.flat import FlatParameters, views_of
from lightning_zero.engine.hooks import unhooked
from lightning_zero.engine.replicated import ReplicatedUnit
from lightning_zero.engine.unit import Unit
from lightning_zero.errors import OffloadError
from lightning_zero.storage.file_tensor import FileTensor, fill_from

__all__ = ["gather_layout", "gathered", "give_back", "left_with_error"]


def gather_layout(engine: ZeroEngine, flat: FlatParameters, shard: Tensor, what: str) -> Tensor:
    """The flat buffer that all ranks' shards make together.

    Args:
        engine: whose ranks.
        flat: the layout.
        shard: 1-D, this rank's ``layout.shard_numel`` elements of anything that is laid out like the parameters.
        what: what it carries, for people.

    Returns:
        1-D, ``layout.numel`` elements, freshly allocated.

    Raises:
        OffloadError: on every rank, if one could not read its part from a disk.

    Collective: every rank.
    """
    failure: OffloadError | None = None
    with untracked():
        full = torch.zeros(flat.layout.numel, dtype=shard.dtype, device=engine.device)
        try:
            fill_from(engine.collectives.own_range(full), shard)
        except OffloadError as error:  # this rank's part of the gather must come all the same
            failure = error
        engine.collectives.all_gather(full, what).wait()
    if isinstance(shard, FileTensor):  # on all ranks or on none
        engine.control.raise_together(failure, f"read its part of {what}")
    return full


@contextmanager
def gathered(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, the units of ``parameters`` show their full masters; what rank 0 leaves there is what all keep.

    Units that nothing was written to stay as they are, so that looking never voids a backward that is still to come.
    What an enclosing ``gathered`` shows already is left to that one.

    Raises:
        DivergenceError: on every rank, if the ranks have written different things before.
        RuntimeError: on every rank, if the block raised on another one: nothing is kept then.
        ValueError: on every rank that has changed a parameter's shape.

    Collective: every rank, at its beginning and at its end.
    """
    wanted = set(parameters)
    units = [u for u in engine.units if not u.held and any(p in wanted for f in u.flats for p in f.parameters)]
    if not units:
        yield
        return
    what = f"full_parameters('{units[0].name}'{f' and {len(units) - 1} more units' if units[1:] else ''})"
    failure: Exception | None = None
    with engine.paused() as running:
        engine.access.compare(f"the beginning of {what}")
        bindings = [engine.access.bindings[p] for u in units for f in u.flats for p in f.parameters]
        before = [(b, get_data(b.parameter), is_absent(b.parameter)) for b in bindings]
        changed: list[int] = []
        try:
            shown = [part for unit in units for part in _show(engine, unit)]
            # In a running step what is called here may be part of a graph, whose backward needs the hooks.
            whole = set() if running else {p for u in engine.units if u.held for f in u.flats for p in f.parameters}
            try:
                with unhooked(engine.module, whole):
                    yield
            except Exception as error:
                failure = error
            failure = failure or _wrong_shape(engine, shown)
            rows = engine.agree(f"the end of {what}", [int(failure is not None)])
            failed = [rank for rank, row in enumerate(rows) if row[0]]
            if failed:
                _undo(engine, shown)
            else:
                changed = _keep(engine, shown)
        finally:
            _let_go(units, before)
        if changed:
            engine.masters_changed(changed)
    if failure is not None:
        raise failure
    if failed:
        raise left_with_error(failed[0], what)


def left_with_error(rank: int, what: str) -> RuntimeError:
    """What the other ranks are told when one has raised in a block whose writes all keep, or none."""
    return RuntimeError(
        f"Rank {rank} left {what} with an error, so no rank keeps what was written there. Its own log says more."
    )


def give_back(engine: ZeroEngine) -> None:
    """End an engine: the module's parameters hold their full values in ordinary memory again, and no hook is left.

    Takes the memory of the whole module on every rank.

    Collective: every rank.
    """
    with gathered(engine, engine.names):
        full = [(parameter, get_data(parameter).clone()) for parameter in engine.names]
    engine.detach()
    for parameter, data in full:
        parameter.data = data
        parameter.grad = None
    engine.tiers.close()


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """One layout in the user's hands.

    Args:
        unit: whose.
        flat: its parameters.
        full: 1-D, what they are views of.
        own: this rank's shard before the block.
        shared: whether ``full`` is the memory that the module computes with.
    """

    unit: Unit
    flat: FlatParameters
    full: Tensor
    own: Tensor
    shared: bool

    @property
    def what(self) -> str:
        return f"full parameters of '{self.unit.name}'"


def _show(engine: ZeroEngine, unit: Unit) -> list[_Shown]:
    shown = []
    for position, flat in enumerate(unit.flats):
        shared = isinstance(unit, ReplicatedUnit) and flat.layout.dtype == flat.layout.compute_dtype
        if isinstance(unit, ReplicatedUnit) and shared:
            full = unit.buffers[position]
            with untracked():
                own = engine.collectives.own_range(full).clone()
        else:
            own = flat.master
            full = gather_layout(engine, flat, own, f"full parameters of '{unit.name}'")
        for parameter, view in zip(flat.parameters, views_of(full, flat.layout), strict=True):
            binding = engine.access.bindings[parameter]
            binding.held = True
            binding.show(view)
        shown.append(_Shown(unit=unit, flat=flat, full=full, own=own, shared=shared))
    unit.held = True
    return shown


def _let_go(units: Sequence[Unit], before: Sequence[tuple[Binding, Tensor, bool]]) -> None:
    """Let parameters be what they were: their memory, and whether that was a placeholder."""
    for binding, data, was_absent in before:
        binding.held = False
        if was_absent:
            binding.hide()
        else:
            binding.show(data)
    for unit in units:
        unit.held = False
        unit.note_written()


def _wrong_shape(engine: ZeroEngine, shown: Sequence[_Shown]) -> ValueError | None:
    for part in shown:
        for parameter, spec in zip(part.flat.parameters, part.flat.layout.parameters, strict=True):
            if parameter.shape != torch.Size(spec.shape):
                return ValueError(
                    f"'{engine.names[parameter]}' has shape {list(parameter.shape)} at the end of full_parameters, "
                    f"expected {list(spec.shape)}. A sharded parameter cannot change its shape."
                )
    return None


def _keep(engine: ZeroEngine, shown: Sequence[_Shown]) -> list[int]:
    """Make rank 0's values everyone's. Returns the units that were changed, the same list on every rank."""
    flags = torch.zeros(len(shown), dtype=torch.uint8)
    failure: OffloadError | None = None
    with untracked():
        if engine.collectives.rank == 0:
            _collect(shown)
        for index, part in enumerate(shown):
            engine.collectives.broadcast(part.full.view(torch.uint8), 0, part.what).wait()
            try:
                flags[index] = _keep_own(part, engine.collectives.own_range(part.full))
            except OffloadError as error:
                failure = failure or error
        if engine.plan.offload is not None:
            engine.control.raise_together(failure, "keep what was written", "The weights may be partly old now.")
        changed = engine.control.any_of(flags).tolist()
    return sorted({part.unit.index for part, flag in zip(shown, changed, strict=True) if flag})


def _keep_own(part: _Shown, own: Tensor) -> bool:
    """Take this rank's shard over into the master. Returns whether anything is new in it."""
    before = part.own.read() if isinstance(part.own, FileTensor) else part.own
    if torch.equal(own.view(torch.uint8), before.to(own.device).view(torch.uint8)):
        return False
    if part.flat.rest.offloaded or own.data_ptr() != part.flat.master.data_ptr():
        fill_from(part.flat.master, own)
    return True


def _collect(shown: Sequence[_Shown]) -> None:
    """Bring values home that the user pointed a parameter to (``parameter.data = ...``), even another's memory."""
    moved = []
    for part in shown:
        for parameter, view in zip(part.flat.parameters, views_of(part.full, part.flat.layout), strict=True):
            data = get_data(parameter)
            if data.numel() and (data.data_ptr() != view.data_ptr() or data.stride() != view.stride()):
                moved.append((view, data.clone()))
    for view, data in moved:
        view.copy_(data)


def _undo(engine: ZeroEngine, shown: Sequence[_Shown]) -> None:
    """Take back what was written to memory that the module computes with."""
    with untracked():
        for part in shown:
            if part.shared:
                engine.collectives.own_range(part.full).copy_(part.own)
                engine.collectives.all_gather(part.full, part.what).wait()
