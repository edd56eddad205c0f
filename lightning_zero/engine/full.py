"""Parameters and averaged gradients in the user's hands: whole for a while, to read and to write."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero._torch import current_graph_task, untracked
from lightning_zero.comm import raising
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.hooks import unhooked
from lightning_zero.engine.unit import ReplicatedUnit, Unit
from lightning_zero.errors import OffloadError, ParameterAccessError
from lightning_zero.offload.host import OffloadedTensor, in_memory
from lightning_zero.registry import extension
from lightning_zero.shards.binding import Binding, get_data, is_absent, set_data
from lightning_zero.shards.slice import FlatParameters, Slice, checksum, fingerprint, views_of

__all__ = [
    "average_into",
    "check_between_steps",
    "gather_layout",
    "gathered",
    "gathered_gradients",
    "give_back",
    "joined",
    "whole",
    "whole_gradients",
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
def gathered(engine: ZeroEngine, parameters: Iterable[nn.Parameter], join: bool = False) -> Iterator[None]:
    """While active, the units of ``parameters`` show their full masters; what rank 0 leaves there is what all keep.

    ``join``: what tensor parallelism has split is whole, too. Otherwise it is this rank's part.

    Units that nothing was written to stay as they are, so that looking never voids a backward that is still to come.
    What an enclosing ``gathered`` shows already is left to that one. Raises ``DivergenceError`` on every rank if the
    ranks have written different things before, and ``RuntimeError`` or ``ValueError`` on every rank if the block raised
    on one or changed a shape: nothing is kept then. Collective, at its beginning and at its end.
    """
    wanted = set(parameters)
    units = [unit for unit in engine.units if not unit.held and not wanted.isdisjoint(unit.parameters)]
    if not units:
        yield
        return
    what = f"full_parameters('{units[0].name}'{f' and {len(units) - 1} more units' if units[1:] else ''})"
    with engine.paused() as running:
        engine.access.compare(f"the beginning of {what}")
        bindings = [engine.access.bindings[parameter] for unit in units for parameter in unit.parameters]
        before = [(b, get_data(b.parameter), is_absent(b.parameter)) for b in bindings]
        changed: list[int] = []
        try:
            shown = [part for unit in units for part in _show(engine, unit, join)]
            # In a running step what is called here may be part of a graph, whose backward needs the hooks.
            whole = set() if running else {p for unit in engine.units if unit.held for p in unit.parameters}
            with unhooked(engine.module, whole):
                failure = yield from _block()
            for binding in bindings if failure is None else ():
                whole_shape = binding.slice.spec.whole_shape if join else binding.placeholder.shape
                now, expected = list(binding.parameter.shape), list(whole_shape)
                if now != expected:
                    failure = ValueError(
                        f"'{binding.name}' has shape {now} at the end of full_parameters, expected {expected}. A "
                        "sharded parameter cannot change its shape."
                    )
            failed = [row[0] for row in engine.agree(f"the end of {what}", [int(failure is not None)])]
            if not any(failed):
                changed = _keep(engine, shown, join)
            for part in shown if any(failed) else ():
                if part.own is not part.flat.master:  # the memory that the module computes with
                    with untracked():
                        engine.collectives.own_range(part.full).copy_(part.own)
                        engine.collectives.all_gather(part.full, part.what).wait()
        finally:
            for binding, data, was_absent in before:
                binding.held = False
                binding.hide() if was_absent else binding.show(data)
            for unit in units:
                unit.held = False
                unit.forget_written()
        if changed:
            engine.masters_changed(changed)
    _raise_failure(failure, failed, what)


def _block() -> Generator[None, None, Exception | None]:
    """The user's block. Returns what it has raised."""
    try:
        yield
    except Exception as error:
        return error
    return None


def _raise_failure(failure: Exception | None, failed: Sequence[int], what: str) -> None:
    """Raise on every rank if the block raised on one: this rank's own error, or one that names the other."""
    if failure is not None:
        raise failure
    for rank, it_did in enumerate(failed):
        if it_did:
            raise RuntimeError(
                f"Rank {rank} left {what} with an error, so no rank keeps what was written there. Its own log says "
                "more."
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


class _Shown(NamedTuple):
    """One layout in the user's hands."""

    unit: Unit
    flat: FlatParameters
    full: Tensor  # 1-D, what its parameters are views of
    own: Tensor  # this rank's shard before the block
    what: str


def _show(engine: ZeroEngine, unit: Unit, join: bool) -> Iterator[_Shown]:
    what = f"full parameters of '{unit.name}'"
    for position, flat in enumerate(unit.flats):
        if isinstance(unit, ReplicatedUnit) and flat.layout.dtype == flat.layout.compute_dtype:
            full = unit.buffers[position]
            with untracked():
                own = engine.collectives.own_range(full).clone()
        else:
            own = flat.master
            full = gather_layout(engine, flat, own, what)
        for one, view in zip(flat.shards, views_of(full, flat.layout), strict=True):
            binding = engine.access.bindings[one.user]
            binding.held = True
            binding.show(joined(one, view) if join else view)
        yield _Shown(unit, flat, full, own, what)
    unit.held = True


def joined(one: Slice, tensor: Tensor) -> Tensor:
    """A tensor of the whole shape, of the parts that the ranks of a tensor group have; a whole one as it is.

    ``tensor`` has the shape of a parameter. Collective: every rank.
    """
    if not one.spec.is_split:
        return tensor
    found: Tensor = extension("tensor_parallel").join(one, tensor)
    return found


def _keep(engine: ZeroEngine, shown: Sequence[_Shown], join: bool) -> list[int]:
    """Make rank 0's values everyone's. Returns the units that were changed, the same list on every rank."""
    flags = torch.zeros(len(shown), dtype=torch.uint8, device="cpu")
    failure: OffloadError | None = None
    with untracked():
        if engine.collectives.rank == 0:  # the user may have pointed a parameter elsewhere (``parameter.data = ...``)
            pairs = [
                (view, get_data(one.user) if not join or one.spec.part is None else _first_part(one))
                for part in shown
                for one, view in zip(part.flat.shards, views_of(part.full, part.flat.layout), strict=True)
            ]
            moved = [
                (to, of.clone()) for to, of in pairs if (of.data_ptr(), of.stride()) != (to.data_ptr(), to.stride())
            ]
            for view, data in moved:  # which may be another's memory
                view.copy_(data)
        for index, part in enumerate(shown):
            engine.collectives.broadcast(part.full.view(torch.uint8), 0, part.what).wait()
            own, master = engine.collectives.own_range(part.full), part.flat.master
            try:
                before = in_memory(part.own)
                flags[index] = not torch.equal(own.view(torch.uint8), before.to(own.device).view(torch.uint8))
                if flags[index] and (part.flat.rest.offloaded or own.data_ptr() != master.data_ptr()):
                    master.copy_(own)
            except OffloadError as error:
                failure = failure or error
        if engine.tiers.can_fail:
            what = "keep what was written (the weights may be partly old now)"
            engine.control.together(what, raising(failure), OffloadError)
        changed = engine.control.any_of(flags).tolist()
    return sorted({part.unit.index for part, flag in zip(shown, changed, strict=True) if flag})


def _first_part(one: Slice) -> Tensor:
    """This rank's part of what the first rank of its tensor group shows. Collective: that group."""
    found: Tensor = extension("tensor_parallel").part_of_first(one, get_data(one.user))
    return found


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


def whole(
    engine: ZeroEngine, pieces: Mapping[Slice, Tensor | None], what: str, grain: int = 1
) -> dict[nn.Parameter, Tensor]:
    """Full shapes, by parameter, of what is cut as the masters are: a gradient, a state, an average, a master.

    ``pieces`` are 1-D, on any tier, of one dtype in each layout; ``None``: this rank has zeros. What has one element
    for each ``grain`` of the parameter's stays 1-D. Sends only these, a layout at a time. Raises ``OffloadError`` on
    every rank if one could not read its part. Collective: every rank.
    """
    layouts: dict[int, list[Slice]] = {}
    for one in pieces:
        layouts.setdefault(id(one.layout), []).append(one)
    collectives, found, failure = engine.collectives, dict[nn.Parameter, Tensor](), None
    for members in layouts.values():
        numels = [[-(-numel // grain) for _, numel in one.ranges(collectives.world_size)] for one in members]
        width = max(map(sum, zip(*numels, strict=True)))
        sizes = [[*row, width - sum(row)] for row in zip(*numels, strict=True)]
        mine = [piece for one in members if (piece := pieces[one]) is not None]
        with untracked():
            dtype = mine[0].dtype if mine else members[0].layout.dtype
            buffer = torch.zeros(len(sizes) * width, dtype=dtype, device=engine.device)
            if width:
                own = collectives.own_range(buffer).split(sizes[collectives.rank])
                for one, target in zip(members, own, strict=False):
                    piece = pieces[one]
                    try:
                        target.copy_(piece if piece is not None else target)
                    except OffloadError as error:  # this rank's part of the gather must come all the same
                        failure = error
                collectives.all_gather(buffer, what).wait()
            rows = [row.split(size) for row, size in zip(buffer.view(len(sizes), width), sizes, strict=True)]
            for index, one in enumerate(members):
                found[one.user] = torch.cat([row[index] for row in rows]).view(one.spec.shape if grain == 1 else -1)
    if engine.tiers.can_fail:
        engine.control.together(f"read its part of {what}", raising(failure), OffloadError)
    return found


def average_into(
    engines: Sequence[ZeroEngine], pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], momentum: float
) -> None:
    """Make each first parameter ``momentum`` times itself plus ``1 - momentum`` times the second: see ``ema_update``.

    ``engines`` are those of the parameters, which may have none. Each rank averages its slices where both are cut at
    the same places; else the units of the second are gathered, one after the other. Collective: every rank.
    """
    what = "ema_update"
    for engine in engines:
        check_between_steps(engine, what)
    homes = {one.user: (engine, one) for engine in engines for one in engine.shards.values()}
    slices = {parameter: one for parameter, (_, one) in homes.items() if is_absent(parameter)}
    apart: dict[nn.Parameter, list[nn.Parameter]] = {}  # by a source that is gathered: what is averaged with it

    def average(target: nn.Parameter, source: Tensor) -> None:
        mix(slices[target].data, slices[target].of(source)) if target in slices else mix(target, source)

    def mix(target: Tensor, source: Tensor) -> None:
        mixed = in_memory(target).mul_(momentum).add_(source.to(target.device) * (1 - momentum))
        if mixed is not target:  # a copy of what is in a file
            target.copy_(mixed)

    with untracked():
        for target, source in pairs:
            if source not in slices:
                average(target, get_data(source))
            elif target in slices and slices[target].cut == slices[source].cut:
                mix(slices[target].data, slices[source].data)
            else:
                apart.setdefault(source, []).append(target)
        for engine in engines if apart else ():
            engine.access.compare(f"the beginning of {what}")
            for flat in (flat for unit in engine.units for flat in unit.flats):
                wanted = {one: one.data for one in flat.shards if one.user in apart}
                for source, full in whole(engine, wanted, what).items():
                    for target in apart[source]:
                        average(target, full)
    for engine in engines:
        own = {target: slices[target] for target, _ in pairs if target in slices and homes[target][0] is engine}
        if own:
            engine.access.writes.note(
                f"the average of {what}", fingerprint(momentum, [one.name for one in own.values()])
            )
            engine.masters_changed(sorted({one.unit for one in own.values()}), dict.fromkeys(own))


@contextmanager
def gathered_gradients(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, ``.grad`` of ``parameters`` is the whole average; what is there at the end is what all ranks keep.

    A parameter that no rank has a gradient for has ``None``. What an enclosing block shows already is left to that one.
    Gradients that were not reduced yet (``no_sync``) are each rank's own, as under DDP, and left as they are. Raises
    ``DivergenceError`` if the ranks leave different gradients, ``ValueError`` or ``RuntimeError`` on every rank if one
    leaves what is no gradient or raises, and in a backward: nothing is kept then. Collective, at its two ends.
    """
    if current_graph_task() != -1:
        raise RuntimeError(
            "full_gradients was called in a backward, whose gradients are this rank's own. Call it after the backward, "
            "for example in on_after_backward."
        )
    access, shown = engine.access, engine.access.whole
    wanted = set(parameters) - set(shown)
    slices = [one for one in engine.shards.values() if one.user in wanted and one.parameter is not None]
    if not slices:
        yield
        return
    what = f"full_gradients('{slices[0].name}'{f' and {len(slices) - 1} more' if slices[1:] else ''})"
    with engine.paused():
        rows = engine.agree(f"the beginning of {what}", [int(engine.accumulates)])
        if any(row[0] for row in rows):
            hidden = any(one.gradient is not None and one.user.grad is None for one in slices)
            if engine.control.agree_any(hidden):
                raise RuntimeError(f"{what}: the last backward did not reduce gradients, so there are no averages yet.")
            yield
            return
        try:
            found = whole_gradients(engine, slices, what)
            shown.update({one.user: None if (g := found[one.user]) is None else joined(one, g) for one in slices})
            failure, writes = (yield from _block()), ExternalWrites()
            for one in slices:
                gradient = shown[one.user]
                failure = failure or _unfit(access.bindings[one.user], gradient)
                if failure is None:
                    number = 0 if gradient is None else checksum(gradient)
                    writes.note(f"{'no' if gradient is None else 'a'} gradient of '{one.name}', in {what},", number)
            rows = engine.agree(f"the end of {what}", [int(failure is not None), writes.digest])
            _raise_failure(failure, [row[0] for row in rows], what)
            writes.compare([row[1] for row in rows], engine.control)
            for one in slices:
                gradient = shown[one.user]
                access.keep_gradient(access.bindings[one.user], gradient if gradient is None else one.part_of(gradient))
        finally:
            for one in slices:
                shown.pop(one.user, None)


def whole_gradients(engine: ZeroEngine, slices: Sequence[Slice], what: str) -> dict[nn.Parameter, Tensor | None]:
    """A copy of the averaged gradients of trainable parameters, full shapes, by parameter; ``None`` where no rank has
    one. Collective: every rank."""
    flags = torch.tensor([one.gradient is not None for one in slices], dtype=torch.uint8, device="cpu")
    had = engine.control.any_of(flags).tolist() if slices else []
    found = whole(engine, {one: one.gradient for one, some in zip(slices, had, strict=True) if some}, what)
    return {one.user: found.get(one.user) for one in slices}


def _unfit(binding: Binding, gradient: Any) -> Exception | None:
    """Why what the user left is no gradient."""
    if gradient is None:
        return None
    expected = torch.Size(binding.slice.spec.whole_shape), binding.slice.layout.dtype, torch.strided
    if not isinstance(gradient, Tensor) or (gradient.shape, gradient.dtype, gradient.layout) != expected:
        return ValueError(
            f"full_gradients: .grad of '{binding.name}' has shape {list(getattr(gradient, 'shape', []))} and "
            f"{getattr(gradient, 'dtype', type(gradient).__name__)} at the end, expected a dense tensor of shape "
            f"{list(expected[0])} and {expected[1]}, or None."
        )
    if binding.bucket is None:
        return RuntimeError(f"full_gradients: '{binding.name}' was given a gradient where nothing is trained.")
    return None
