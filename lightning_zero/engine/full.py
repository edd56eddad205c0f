"""Parameters and averaged gradients in the user's hands: whole for a while, to read and to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero._torch import current_graph_task, untracked
from lightning_zero.comm import raising
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.hooks import unhooked
from lightning_zero.engine.unit import ReplicatedUnit, Unit
from lightning_zero.errors import DivergenceError, OffloadError, ParameterAccessError
from lightning_zero.offload.host import OffloadedTensor, in_memory
from lightning_zero.shards.binding import Binding, get_data, is_absent, set_data
from lightning_zero.shards.slice import FlatParameters, Slice, checksum, cut, fingerprint, views_of

__all__ = [
    "average_into",
    "check_between_steps",
    "gather_layout",
    "gathered",
    "gathered_gradients",
    "gathered_whole",
    "give_back",
    "left_with_error",
    "whole_gradients",
    "whole_slices",
]


def gather_layout(engine: ZeroEngine, flat: FlatParameters, shard: Tensor, what: str) -> Tensor:
    """The flat buffer, in fresh memory, that all ranks' shards make: of anything laid out like the parameters.

    Collective. Raises ``OffloadError`` on every rank if one could not read its part from a disk.
    """
    failure: OffloadError | None = None
    with untracked():
        full = torch.zeros(flat.layout.numel, dtype=shard.dtype, device=engine.device)
        try:
            engine.collectives.own_range(full).copy_(shard)
        except OffloadError as error:  # this rank's part of the gather must come all the same
            failure = error
        engine.collectives.all_gather(full, what).wait()
    if isinstance(shard, OffloadedTensor):  # on all ranks or on none
        engine.control.together(f"read its part of {what}", raising(failure), OffloadError)
    return full


@contextmanager
def gathered(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, the units of ``parameters`` show their full masters; what rank 0 leaves there is what all keep.

    Units that nothing was written to stay as they are, so that looking never voids a backward that is still to come.
    What an enclosing ``gathered`` shows already is left to that one. Collective, at its beginning and at its end.

    Raises:
        DivergenceError: on every rank, if the ranks have written different things before.
        RuntimeError: on every rank, if the block raised on another one: nothing is kept then.
        ValueError: on every rank that has changed a parameter's shape.
    """
    wanted = set(parameters)
    units = [unit for unit in engine.units if not unit.held and not wanted.isdisjoint(unit.parameters)]
    if not units:
        yield
        return
    what = f"full_parameters('{units[0].name}'{f' and {len(units) - 1} more units' if units[1:] else ''})"
    failure: Exception | None = None
    with engine.paused() as running:
        engine.access.compare(f"the beginning of {what}")
        bindings = [engine.access.bindings[parameter] for unit in units for parameter in unit.parameters]
        before = [(b, get_data(b.parameter), is_absent(b.parameter)) for b in bindings]
        changed: list[int] = []
        try:
            shown = [part for unit in units for part in _show(engine, unit)]
            # In a running step what is called here may be part of a graph, whose backward needs the hooks.
            whole = set() if running else {p for unit in engine.units if unit.held for p in unit.parameters}
            try:
                with unhooked(engine.module, whole):
                    yield
            except Exception as error:
                failure = error
            failure = failure or _wrong_shape(bindings)
            failed = _who_failed(engine, failure, what)
            if failed is None:
                changed = _keep(engine, shown)
            else:
                _undo(engine, shown)
        finally:
            _let_go(units, before)
        if changed:
            engine.masters_changed(changed)
    _raise_failure(failure, failed, what)


def _who_failed(engine: ZeroEngine, failure: Exception | None, what: str) -> int | None:
    """The first rank whose block raised. Collective."""
    rows = engine.agree(f"the end of {what}", [int(failure is not None)])
    return next((rank for rank, row in enumerate(rows) if row[0]), None)


def _raise_failure(failure: Exception | None, failed: int | None, what: str) -> None:
    if failure is not None:
        raise failure
    if failed is not None:
        raise left_with_error(failed, what)


def left_with_error(rank: int, what: str) -> RuntimeError:
    """What the other ranks are told when one has raised in a block whose writes all keep, or none."""
    return RuntimeError(
        f"Rank {rank} left {what} with an error, so no rank keeps what was written there. Its own log says more."
    )


def give_back(engine: ZeroEngine) -> None:
    """End an engine: the module's parameters hold their full values in ordinary memory again, and no hook is left.

    Takes the memory of the whole module on every rank. Collective.
    """
    with gathered(engine, engine.names):
        full = [(parameter, get_data(parameter).clone()) for parameter in engine.names]
    engine.detach()
    for parameter, data in full:
        set_data(parameter, data)
        parameter.grad = None
    engine.tiers.close()


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """One layout in the user's hands."""

    unit: Unit
    flat: FlatParameters
    full: Tensor  # 1-D, what its parameters are views of
    own: Tensor  # this rank's shard before the block
    shared: bool  # whether ``full`` is the memory that the module computes with

    @property
    def what(self) -> str:
        return f"full parameters of '{self.unit.name}'"

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What the user pointed a parameter to (``parameter.data = ...``): where its values belong, and these."""
        for parameter, view in zip(self.flat.parameters, views_of(self.full, self.flat.layout), strict=True):
            data = get_data(parameter)
            if data.numel() and (data.data_ptr() != view.data_ptr() or data.stride() != view.stride()):
                yield view, data.clone()  # it may be another's memory


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
        unit.forget_written()


def _wrong_shape(bindings: Sequence[Binding]) -> ValueError | None:
    for parameter, name, placeholder in ((b.parameter, b.name, b.placeholder) for b in bindings):
        if parameter.shape != placeholder.shape:
            return ValueError(
                f"'{name}' has shape {list(parameter.shape)} at the end of full_parameters, expected "
                f"{list(placeholder.shape)}. A sharded parameter cannot change its shape."
            )
    return None


def _keep(engine: ZeroEngine, shown: Sequence[_Shown]) -> list[int]:
    """Make rank 0's values everyone's. Returns the units that were changed, the same list on every rank."""
    flags = torch.zeros(len(shown), dtype=torch.uint8, device="cpu")
    failure: OffloadError | None = None
    with untracked():
        if engine.collectives.rank == 0:
            for view, data in [pair for part in shown for pair in part.moved()]:
                view.copy_(data)
        for index, part in enumerate(shown):
            engine.collectives.broadcast(part.full.view(torch.uint8), 0, part.what).wait()
            try:
                flags[index] = _keep_own(part, engine.collectives.own_range(part.full))
            except OffloadError as error:
                failure = failure or error
        if engine.tiers.can_fail:
            what = "keep what was written (the weights may be partly old now)"
            engine.control.together(what, raising(failure), OffloadError)
        changed = engine.control.any_of(flags).tolist()
    return sorted({part.unit.index for part, flag in zip(shown, changed, strict=True) if flag})


def _keep_own(part: _Shown, own: Tensor) -> bool:
    """Take this rank's shard over into the master. Returns whether anything is new in it."""
    before = in_memory(part.own)
    if torch.equal(own.view(torch.uint8), before.to(own.device).view(torch.uint8)):
        return False
    if part.flat.rest.offloaded or own.data_ptr() != part.flat.master.data_ptr():
        part.flat.master.copy_(own)
    return True


def _undo(engine: ZeroEngine, shown: Sequence[_Shown]) -> None:
    """Take back what was written to memory that the module computes with."""
    with untracked():
        for part in shown:
            if part.shared:
                engine.collectives.own_range(part.full).copy_(part.own)
                engine.collectives.all_gather(part.full, part.what).wait()


def check_between_steps(engine: ZeroEngine, what: str) -> None:
    """Raise ParameterAccessError in a forward or backward; else have masters be what user code wrote. Local."""
    if engine.computes or engine.updating:
        raise ParameterAccessError(
            f"{what} was called in a forward, a backward or an optimizer step, where weights are in use. Call it in a "
            "hook between steps: `on_train_batch_start` in place of the beginning of `training_step`, or "
            "`on_train_batch_end`."
        )
    engine.take_over_shown()
    engine.tiers.settle()


def whole_slices(engine: ZeroEngine, slices: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Full shapes of what is cut as the masters are: 1-D slices by parameter, of one dtype in each unit. On the host.

    Collective: every rank, with the same parameters.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for flat in (flat for unit in engine.units for flat in unit.flats if not slices.keys().isdisjoint(flat.parameters)):
        with untracked():
            dtype = next(slices[parameter].dtype for parameter in flat.parameters if parameter in slices)
            shard = torch.zeros(flat.layout.shard_numel, dtype=dtype, device=engine.device)
            for parameter, part in zip(flat.parameters, cut(shard, flat.slices), strict=True):
                if parameter in slices:
                    part.copy_(slices[parameter])
            views = views_of(gather_layout(engine, flat, shard, "slices of the whole module"), flat.layout)
        found.update((p, view.cpu()) for p, view in zip(flat.parameters, views, strict=True) if p in slices)
    return found


def average_into(
    engines: Sequence[ZeroEngine], pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], momentum: float
) -> None:
    """Make each first parameter ``momentum`` times itself plus ``1 - momentum`` times the second. Between steps.

    Where both have their values here that is all. Where they are cut at the same places, each rank averages its slices.
    Where they are not, the units of the second are gathered, one after the other.

    Args:
        engines: those of the parameters, which may have none.
        pairs: of one shape each. The same on every rank.
        momentum: the same on every rank, which compare it at their next agreement.

    Raises:
        ParameterAccessError: in a forward or backward.

    Collective: every rank.
    """
    what = "ema_update"
    for engine in engines:
        check_between_steps(engine, what)
    owner = {parameter: engine for engine in engines for parameter in engine.access.bindings}
    absent = [pair for pair in pairs if is_absent(pair[0]) or is_absent(pair[1])]
    with torch.no_grad():
        for target, source in pairs:
            if not (is_absent(target) or is_absent(source)):
                _mix(target, source, momentum)
    with untracked():
        masters = {p: owner[p].shards[owner[p].names[p]] for pair in absent for p in pair if is_absent(p)}
        apart: dict[nn.Parameter, list[nn.Parameter]] = {}  # by the second of them: what is made of its whole values
        for target, source in absent:
            if is_absent(target) and is_absent(source) and masters[target].cut == masters[source].cut:
                _mix(masters[target].data, masters[source].data, momentum)
            elif is_absent(source):
                apart.setdefault(source, []).append(target)
            else:
                _mix(masters[target].data, masters[target].of(get_data(source)), momentum)
        for engine in engines if apart else ():
            engine.access.compare(f"the beginning of {what}")
            for flat in (flat for unit in engine.units for flat in unit.flats):
                if apart.keys().isdisjoint(flat.parameters):
                    continue
                views = views_of(gather_layout(engine, flat, flat.master, what), flat.layout)
                for source, view in zip(flat.parameters, views, strict=True):
                    for target in apart.get(source, ()):
                        if target in masters:
                            _mix(masters[target].data, masters[target].of(view), momentum)
                        else:
                            _mix(target, view, momentum)
    changed = [target for target, _ in absent if is_absent(target)]
    for engine in engines:
        own = {target: None for target in changed if owner[target] is engine}  # in an order that all ranks have
        if own:
            engine.access.writes.note(f"the average of {what}", fingerprint(momentum, [engine.names[p] for p in own]))
            engine.masters_changed(
                [unit.index for unit in engine.units if not own.keys().isdisjoint(unit.parameters)], own
            )


def _mix(target: Tensor, source: Tensor, momentum: float) -> None:
    target.mul_(momentum).add_(source.to(target.device) * (1 - momentum))


@contextmanager
def gathered_gradients(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, ``.grad`` of ``parameters`` is the whole average; what is there at the end is what all ranks keep.

    A parameter that no rank has a gradient for has ``None``. What an enclosing block shows already is left to that one.
    Gradients that were not reduced yet (``no_sync``) are each rank's own, as under DDP, and left as they are.
    Collective, at its beginning and at its end.

    Raises:
        DivergenceError: on every rank, if they leave different gradients: nothing is kept then.
        RuntimeError: on every rank, if the block raised on another one: nothing is kept then. And in a backward.
        TypeError, ValueError: on every rank that has left what is no gradient of its parameter.
    """
    if current_graph_task() != -1:
        raise RuntimeError(
            "full_gradients was called in a backward, whose gradients are this rank's own. Call it after the backward, "
            "for example in on_after_backward."
        )
    whole = engine.access.whole
    slices = _trained(engine, set(parameters) - set(whole))
    if not slices:
        yield
        return
    what = f"full_gradients('{slices[0].spec.name}'{f' and {len(slices) - 1} more' if slices[1:] else ''})"
    with engine.paused():
        rows = engine.agree(f"the beginning of {what}", [int(engine.accumulates)])
        if any(row[0] for row in rows):
            hidden = any(_gradient(one) is not None and one.user.grad is None for one in slices)
            if engine.control.agree_any(hidden):
                raise RuntimeError(f"{what}: the last backward did not reduce gradients, so there are no averages yet.")
            yield
            return
        failure: Exception | None = None
        try:
            whole.update(_whole_gradients(engine, slices, what))
            try:
                yield
            except Exception as error:
                failure = error
            left = [whole[one.user] for one in slices]
            failure = failure or _unfit(engine, slices, left)
            _finish(engine, slices, left, failure, what)
        finally:
            for one in slices:
                whole.pop(one.user, None)


@contextmanager
def gathered_whole(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters and their gradients, whole. Collective, at its beginning and at its end."""
    chosen = list(parameters)
    with gathered_gradients(engine, chosen), gathered(engine, chosen):
        yield


def whole_gradients(engine: ZeroEngine) -> dict[nn.Parameter, Tensor]:
    """A copy of all averaged gradients that there are, by parameter, full shapes. Collective: every rank."""
    slices = _trained(engine, set(engine.names))
    found = _whole_gradients(engine, slices, "gradients of the whole module") if slices else {}
    return {parameter: gradient for parameter, gradient in found.items() if gradient is not None}


def _trained(engine: ZeroEngine, wanted: set[nn.Parameter]) -> list[Slice]:
    return [one for one in engine.shards.values() if one.user in wanted and one.parameter is not None]


def _gradient(one: Slice) -> Tensor | None:
    return None if one.parameter is None else one.parameter.grad


def _whole_gradients(engine: ZeroEngine, slices: Sequence[Slice], what: str) -> dict[nn.Parameter, Tensor | None]:
    """Whole gradients, layout by layout; ``None`` where no rank has one."""
    flags = torch.tensor([_gradient(one) is not None for one in slices], dtype=torch.uint8, device="cpu")
    layouts: dict[int, list[Slice]] = {}
    for one, had in zip(slices, engine.control.any_of(flags).tolist(), strict=True):
        if had:
            layouts.setdefault(id(one.layout), []).append(one)
    shown: dict[nn.Parameter, Tensor | None] = {one.user: None for one in slices}
    for together in layouts.values():
        shown.update(zip((one.user for one in together), _assemble(engine, together, what), strict=True))
    return shown


def _assemble(engine: ZeroEngine, slices: Sequence[Slice], what: str) -> list[Tensor]:
    """The whole gradients of parameters of one layout. Only their parts are sent, all of a rank's in one piece."""
    collectives, layout = engine.collectives, slices[0].layout
    every = [layout.slices(rank) for rank in range(collectives.world_size)]
    numels = [[row[one.position].numel for one in slices] for row in every]
    width = max(map(sum, numels))
    sizes = [[*row, width - sum(row)] for row in numels]
    with untracked():
        buffer = torch.zeros(len(sizes) * width, dtype=layout.dtype, device=engine.device)
        if width:
            own = collectives.own_range(buffer).split(sizes[collectives.rank])
            for target, gradient in zip(own[:-1], map(_gradient, slices), strict=True):
                if gradient is not None:
                    target.copy_(gradient)
            collectives.all_gather(buffer, what).wait()
        rows = [row.split(size) for row, size in zip(buffer.view(len(sizes), width), sizes, strict=True)]
        return [torch.cat([row[index] for row in rows]).view(one.spec.shape) for index, one in enumerate(slices)]


def _unfit(engine: ZeroEngine, slices: Sequence[Slice], left: Sequence[Tensor | None]) -> Exception | None:
    """Why what the user left is no gradient."""
    for one, gradient in zip(slices, left, strict=True):
        if gradient is None:
            continue
        name, shape, dtype = one.spec.name, torch.Size(one.spec.shape), one.layout.dtype
        if not isinstance(gradient, Tensor) or gradient.layout is not torch.strided:
            return TypeError(f"full_gradients: .grad of '{name}' must be a dense tensor or None at the end.")
        if gradient.shape != shape or gradient.dtype != dtype:
            return ValueError(
                f"full_gradients: .grad of '{name}' has shape {list(gradient.shape)} and {gradient.dtype} at the end, "
                f"expected {list(shape)} and {dtype}."
            )
        if engine.access.bindings[one.user].place is None:
            return RuntimeError(f"full_gradients: '{name}' was given a gradient where nothing is trained.")
    return None


def _finish(
    engine: ZeroEngine, slices: Sequence[Slice], left: Sequence[Tensor | None], failure: Exception | None, what: str
) -> None:
    """Agree on what is left, and keep it; or raise, on every rank."""
    sums = [] if failure is not None else [None if gradient is None else checksum(gradient) for gradient in left]
    rows = engine.agree(f"the end of {what}", [int(failure is not None), fingerprint(sums)])
    _raise_failure(failure, next((rank for rank, row in enumerate(rows) if row[0]), None), what)
    if any(row[1] != rows[0][1] for row in rows):
        _name_difference(engine, slices, sums)
    for one, gradient in zip(slices, left, strict=True):
        if gradient is not None:
            engine.access.keep_gradient(engine.access.bindings[one.user], gradient)
        elif one.parameter is not None:
            one.parameter.grad = None


def _name_difference(engine: ZeroEngine, slices: Sequence[Slice], sums: Sequence[int | None]) -> None:
    every = engine.control.gather_objects(list(sums))
    for index, one in enumerate(slices):
        for rank, other in enumerate(every):
            if other[index] != every[0][index]:
                values = " (None and a tensor)" if None in (other[index], every[0][index]) else ""
                raise DivergenceError(
                    f"Ranks 0 and {rank} left different gradients for '{one.spec.name}'{values} in full_gradients, so "
                    "no rank keeps what was written there. Every rank has the same averages there and must do the same "
                    "to them; look for code that depends on the rank, its data or its random numbers."
                )
