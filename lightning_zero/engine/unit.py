"""One unit at run time: its master shards, and what user code wrote to its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked, version_of
from lightning_zero.config import Tier
from lightning_zero.engine.agreement import ExternalWrites
from lightning_zero.errors import ParameterAccessError
from lightning_zero.plan import UnitPlan
from lightning_zero.shards.binding import Bound, absent_kind, get_data, hide, original_kind, shown_kind
from lightning_zero.shards.elements import checksum
from lightning_zero.shards.flat import FlatParameters, views_of
from lightning_zero.storage.transfers import Copy, Transfer, Transfers

__all__ = ["Unit"]


class Unit:
    """What both kinds of units share: a plan, its flat parameters, and a version that counts changes of the weights."""

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.index = plan.index
        self.name = plan.name or "(root)"
        self.flats = tuple(flats)
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        placeholders = [placeholder for flat in flats for placeholder in flat.placeholders]
        self._absent: list[Bound] = [
            (parameter, placeholder, absent_kind(original_kind(parameter)))
            for parameter, placeholder in zip(self.parameters, placeholders, strict=True)
        ]
        self._positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        self._versions = [parameter._version for parameter in self.parameters]
        # Parameters of whose memory an alias is out, through which it may be written to unseen: what was there before.
        self._handed: dict[int, int] = {}
        self.version = 0
        # Forward calls of the running step whose backward has not started: their gradients are still to come.
        self.outstanding = 0
        # The user's parameters show full values of their own (``full_parameters``) and must go on doing so.
        self.held = False
        self._returning: Transfer | None = None

    def show_placeholders(self) -> None:
        """Let the user's parameters stand for values that are not there."""
        hide(self._absent)

    def _bindings(self, buffers: Sequence[Tensor]) -> list[Bound]:
        """Each of the user's parameters, the view of ``buffers`` that holds its full value, and its class then."""
        return [
            (parameter, view, shown_kind(original_kind(parameter)))
            for buffer, flat in zip(buffers, self.flats, strict=True)
            for parameter, view in zip(flat.parameters, views_of(buffer, flat.layout), strict=True)
        ]

    def overwrite(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Make all that was made of a parameter's master, part of which has just been written, the whole ``value``."""
        with untracked():
            for flat in self.flats:
                if any(known is parameter for known in flat.parameters):
                    flat.refresh()
            for known, view in self.held_views():
                if known is parameter:
                    view.copy_(value)
        self.void(parameter)

    def void(self, parameter: nn.Parameter) -> None:
        """Let a graph that has saved the parameter notice that it was changed."""
        torch.autograd.graph.increment_version(parameter)
        self._versions[self._positions[id(parameter)]] += 1

    @property
    def memory(self) -> Sequence[Tensor]:
        """What the full values that are in memory now lie in."""
        return ()

    def held_views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The full values that are in memory now, even if parameters do not show them."""
        return iter(())

    @property
    def written(self) -> bool:
        """Whether user code may have written to parameters since ``note_written``. Only while they show values."""
        return bool(self._handed) or list(map(version_of, self.parameters)) != self._versions

    def note_handed_out(self, parameter: nn.Parameter) -> None:
        """Note that an alias of the memory of a parameter that shows its values is out."""
        self._handed.setdefault(self._positions[id(parameter)], checksum(get_data(parameter)))

    def note_assigned(self, parameter: nn.Parameter) -> None:
        """Note that the values of a parameter are about to be replaced while they are shown, unseen by its version."""
        self._versions[self._positions[id(parameter)]] -= 1

    def note_written(self, writes: ExternalWrites | None = None) -> bool:
        """Tell ``writes`` (``None``: nobody has to know) what was written, and begin anew. Returns whether they were.

        Raises ``ParameterAccessError`` if masters are of another dtype than what was written to.
        """
        before, handed = self._versions, self._handed
        self._versions, self._handed = [parameter._version for parameter in self.parameters], {}
        found = False
        if writes is None:
            return found
        specs = [(spec, flat.layout) for flat in self.flats for spec in flat.layout.parameters]
        for position, ((spec, layout), parameter) in enumerate(zip(specs, self.parameters, strict=True)):
            changed = self._versions[position] != before[position]
            if not changed and (position not in handed or handed[position] == checksum(get_data(parameter))):
                continue
            found = True
            if layout.compute_dtype != layout.dtype:
                raise ParameterAccessError(
                    f"'{spec.name}' was written to while it computes in {layout.compute_dtype}; its values are kept in "
                    f"{layout.dtype}, so what was written would be lost or rounded. Write to it inside `with "
                    "lightning_zero.full_parameters(module):`, on every rank."
                )
            writes.note(f"'{spec.name}'", get_data(parameter))
        return found

    def send_back(self, transfers: Transfers) -> None:
        """Start to bring updated masters from the host to the weights; those on disk went there piece by piece."""
        copies = [
            Copy(flat.master, flat.weights)
            for flat in self.flats
            if flat.layout.trainable and flat.rest.master is Tier.HOST and flat.weights is not None
        ]
        if copies:
            self._returning = transfers.back(copies)

    def settle_weights(self) -> None:
        """Order everything from now on behind ``send_back``. The host may still be reading the masters."""
        if self._returning is not None:
            self._returning.order()
            self._returning = None

    def forget_written(self) -> None:
        """Forget, after an error, what was written, and what ``send_back`` started, which is over by now."""
        self._returning = None
        self.note_written()

    def parameters_changed(self) -> None:
        """Note that weights changed, so that a graph of the old weights is refused as plain torch refuses it."""
        self.version += 1
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [version + 1 for version in self._versions]
