"""The step on masters and state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optim.bare import BareStep
from lightning_zero.optim.groups import OwnedParameter
from lightning_zero.optim.pieces import Member, Piece, PieceByPiece
from lightning_zero.optim.runs import Runs
from lightning_zero.optim.state import Kind, covers

__all__ = ["MemoryStep"]

_PIECES_AT_ONCE = 16  # of the optimizers that take one parameter after the other


class MemoryStep:
    """Steps on parameters in memory, large ones in pieces. See [Note: pieces].

    Args:
        optimizer: the user's, elementwise.
        bare: its arithmetic.
        piece_numel: most elements of a piece.
    """

    def __init__(self, optimizer: Optimizer, bare: BareStep, piece_numel: int) -> None:
        self._optimizer = optimizer
        self._bare = bare
        self._pieces = PieceByPiece(optimizer, bare)
        self._runs = Runs(optimizer)
        self._piece_numel = piece_numel
        self._made: dict[tuple[nn.Parameter, Kind], Tensor] = {}

    def run(self, members: Sequence[Member], groups: int) -> None:
        """Step on some parameters.

        Args:
            members: which.
            groups: how many param groups there are.
        """
        self._pieces.start()
        self._made.clear()
        # With `foreach` each operation goes over all that it is given before the next one begins.
        foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        most = self._piece_numel * (1 if foreach else _PIECES_AT_ONCE)
        threaded = torch.get_num_threads() > 1
        pieces: list[Piece] = []
        whole: list[Member] = []
        numel = 0
        for member in self._step_runs(members, groups):
            # A fused kernel passes over everything once, and needs no memory for it.
            fused = self._optimizer.param_groups[member.group].get("fused")
            rounded = threaded and member.parameter.dtype.itemsize < 4  # see [Note: pieces]
            uncut = fused or rounded or member.numel <= self._piece_numel
            for piece in (None,) if uncut else member.pieces(self._piece_numel):
                size = member.numel if piece is None else piece.numel
                if numel and numel + size > most:
                    self._pieces.run(pieces, whole, groups, self)
                    pieces, whole, numel = [], [], 0
                if piece is None:
                    whole.append(member)
                else:
                    pieces.append(piece)
                numel += size
        self._pieces.run(pieces, whole, groups, self)
        self._pieces.commit(self._resting)
        self._made.clear()

    def _step_runs(self, members: Sequence[Member], groups: int) -> list[Member]:
        """Step on neighbours that a fused kernel may take for one parameter. Returns the others."""
        options = self._optimizer.param_groups
        fused = [m for m in members if options[m.group].get("fused") and m.parameter.dtype.itemsize >= 4]
        runs = self._runs.find(fused)
        if not runs:
            return list(members)
        stand_ins: list[list[nn.Parameter]] = [[] for _ in range(groups)]
        for run in runs:
            stand_ins[run.members[0].group].append(run.parameter)
        try:
            self._bare(stand_ins)
            for run in runs:
                self._runs.settle(run)
        finally:
            for run in runs:
                self._runs.drop(run)
        taken = {member.parameter for run in runs for member in run.members}
        return [member for member in members if member.parameter not in taken]

    def forget(self) -> None:
        """Hold no state any more."""
        self._runs.forget()

    def master(self, piece: Piece) -> Tensor:
        """Part of the shard parameter."""
        return piece.member.parameter.detach().narrow(0, piece.start, piece.numel)

    def state(self, piece: Piece, kind: Kind) -> Tensor | None:
        """Part of what is there already, or was made in this step."""
        member = piece.member
        found = self._made.get((member.parameter, kind))
        if found is None:
            held = self._optimizer.state.get(member.parameter, {}).get(kind.key)
            found = held if covers(held, member.numel) and held.dtype == kind.dtype else None
        return None if found is None else found.narrow(0, piece.start, piece.numel)

    def keep(self, piece: Piece, kind: Kind, values: Tensor) -> None:
        """Make memory for a whole parameter's state, and put the first of it there."""
        member = piece.member
        made = torch.empty(member.numel, dtype=kind.dtype, device=values.device)
        self._made[member.parameter, kind] = made
        made.narrow(0, piece.start, piece.numel).copy_(values)

    def _resting(self, entry: OwnedParameter, kind: Kind, held: Any) -> Tensor:
        parameter = entry.shard.parameter
        made: Tensor = held if parameter is None else self._made.get((parameter, kind), held)
        return made
