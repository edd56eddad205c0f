"""Averaged gradients in the user's hands: whole in ``.grad`` for a while, as under DDP after its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero._torch import current_graph_task, untracked
from lightning_zero.engine.checksum import checksum, fingerprint
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.flat import FlatParameters
from lightning_zero.engine.full import left_with_error
from lightning_zero.errors import DivergenceError

__all__ = ["gathered_gradients"]


@contextmanager
def gathered_gradients(engine: ZeroEngine, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, ``.grad`` of ``parameters`` is the whole average; what is there at the end is what all ranks keep.

    A parameter that no rank has a gradient for has ``None``. What an enclosing block shows already is left to that one.
    Gradients that were not reduced yet (``no_sync``) are each rank's own, as under DDP, and left as they are.

    Raises:
        DivergenceError: on every rank, if they leave different gradients: nothing is kept then.
        RuntimeError: on every rank, if the block raised on another one: nothing is kept then. And in a backward.
        TypeError, ValueError: on every rank that has left what is no gradient of its parameter.

    Collective: every rank, at its beginning and at its end.
    """
    if current_graph_task() != -1:
        raise RuntimeError(
            "full_gradients was called in a backward, whose gradients are this rank's own. Call it after the backward, "
            "for example in on_after_backward."
        )
    whole = engine.access.gradients.whole
    places = _places(engine, set(parameters) - set(whole))  # what an enclosing block shows is left to that one
    if not places:
        yield
        return
    what = f"full_gradients('{places[0].name}'{f' and {len(places) - 1} more' if places[1:] else ''})"
    with engine.paused():
        local = engine._reducer is not None and engine._reducer.holds_local
        rows = engine.agree(f"the beginning of {what}", [int(local)])
        if any(row[0] for row in rows):
            hidden = any(place.gradient is not None and place.parameter.grad is None for place in places)
            if engine.control.agree_any(hidden):
                raise RuntimeError(f"{what}: the last backward did not reduce gradients, so there are no averages yet.")
            yield
            return
        failure: Exception | None = None
        try:
            whole.update(_shown(engine, places, what))
            try:
                yield
            except Exception as error:
                failure = error
            left = [whole[place.parameter] for place in places]
            failure = failure or _unfit(engine, places, left)
            _finish(engine, places, left, failure, what)
        finally:
            for place in places:
                whole.pop(place.parameter, None)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a trainable parameter's gradient lies.

    Args:
        name: the parameter's.
        parameter: the user's.
        flat: its layout.
        position: its place in it.
    """

    name: str
    parameter: nn.Parameter
    flat: FlatParameters
    position: int

    @property
    def shard(self) -> nn.Parameter:
        shard = self.flat.shards[self.position].parameter
        if shard is None:
            raise RuntimeError(f"'{self.name}' is frozen.")
        return shard

    @property
    def gradient(self) -> Tensor | None:
        """1-D, this rank's part."""
        return self.shard.grad


def _places(engine: ZeroEngine, wanted: set[nn.Parameter]) -> list[_Place]:
    return [
        _Place(name=spec.name, parameter=parameter, flat=flat, position=position)
        for unit in engine.units
        for flat in unit.flats
        if flat.layout.trainable
        for position, (spec, parameter) in enumerate(zip(flat.layout.parameters, flat.parameters, strict=True))
        if parameter in wanted
    ]


def _shown(engine: ZeroEngine, places: Sequence[_Place], what: str) -> dict[nn.Parameter, Tensor | None]:
    """Whole gradients, layout by layout; ``None`` where no rank has one."""
    flags = torch.tensor([place.gradient is not None for place in places], dtype=torch.uint8)
    there = engine.control.any_of(flags).tolist()
    by_flat: dict[int, list[_Place]] = {}
    for place, had in zip(places, there, strict=True):
        if had:
            by_flat.setdefault(id(place.flat), []).append(place)
    shown: dict[nn.Parameter, Tensor | None] = {place.parameter: None for place in places}
    for together in by_flat.values():
        shown.update(zip((p.parameter for p in together), _assemble(engine, together, what), strict=True))
    return shown


def _assemble(engine: ZeroEngine, places: Sequence[_Place], what: str) -> list[Tensor]:
    """The whole gradients of parameters of one layout. Only their parts are sent, all of a rank's in one piece."""
    collectives, layout = engine.collectives, places[0].flat.layout
    slices = [layout.slices(rank) for rank in range(collectives.world_size)]
    numels = [[row[place.position].numel for place in places] for row in slices]
    width = max(map(sum, numels))
    sizes = [[*row, width - sum(row)] for row in numels]
    with untracked():
        buffer = torch.zeros(len(sizes) * width, dtype=layout.dtype, device=engine.device)
        if width:
            own = collectives.own_range(buffer).split(sizes[collectives.rank])
            for target, place in zip(own[:-1], places, strict=True):
                if place.gradient is not None:
                    target.copy_(place.gradient)
            collectives.all_gather(buffer, what).wait()
        rows = [row.split(size) for row, size in zip(buffer.view(len(sizes), width), sizes, strict=True)]
        return [
            torch.cat([row[index] for row in rows]).view(layout.parameters[place.position].shape)
            for index, place in enumerate(places)
        ]


def _unfit(engine: ZeroEngine, places: Sequence[_Place], left: Sequence[Tensor | None]) -> Exception | None:
    """Why what the user left is no gradient."""
    for place, gradient in zip(places, left, strict=True):
        if gradient is None:
            continue
        layout = place.flat.layout
        shape, dtype = torch.Size(layout.parameters[place.position].shape), layout.dtype
        if not isinstance(gradient, Tensor) or gradient.layout is not torch.strided:
            return TypeError(f"full_gradients: .grad of '{place.name}' must be a dense tensor or None at the end.")
        if gradient.shape != shape or gradient.dtype != dtype:
            return ValueError(
                f"full_gradients: .grad of '{place.name}' has shape {list(gradient.shape)} and {gradient.dtype} at the "
                f"end, expected {list(shape)} and {dtype}."
            )
        if engine._reducer is None:
            return RuntimeError(f"full_gradients: '{place.name}' was given a gradient where nothing is trained.")
    return None


def _finish(
    engine: ZeroEngine,
    places: Sequence[_Place],
    left: Sequence[Tensor | None],
    failure: Exception | None,
    what: str,
) -> None:
    """Agree on what is left, and keep it; or raise, on every rank."""
    sums = [] if failure is not None else [None if gradient is None else checksum(gradient) for gradient in left]
    rows = engine.agree(f"the end of {what}", [int(failure is not None), fingerprint(sums)])
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise left_with_error(failed[0], what)
    if any(row[1] != rows[0][1] for row in rows):
        _name_difference(engine, places, sums)
    _keep(engine, places, left)


def _name_difference(engine: ZeroEngine, places: Sequence[_Place], sums: Sequence[int | None]) -> None:
    every = engine.control.gather_objects(list(sums))
    for index, place in enumerate(places):
        for rank, other in enumerate(every):
            if other[index] != every[0][index]:
                kinds = ["None" if row[index] is None else "a tensor" for row in (every[0], other)]
                values = f" ({kinds[0]} and {kinds[1]})" if kinds[0] != kinds[1] else ""
                raise DivergenceError(
                    f"Ranks 0 and {rank} left different gradients for '{place.name}'{values} in full_gradients, so no "
                    "rank keeps what was written there. Every rank has the same averages there and must do the same "
                    "to them; look for code that depends on the rank, its data or its random numbers."
                )


def _keep(engine: ZeroEngine, places: Sequence[_Place], left: Sequence[Tensor | None]) -> None:
    """Write this rank's part of what the user left to where the optimizer finds it."""
    for place, gradient in zip(places, left, strict=True):
        if gradient is None:
            place.shard.grad = None
        else:
            engine.access.gradients.keep(engine.access.bindings[place.parameter], gradient)
