"""A wire of one's own is one small class and one argument that chooses it, in a real training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm import Collectives, Groups, Pending, choose_collectives
from lightning_zero.config import Placement, SessionSettings
from lightning_zero.session.session import ZeroSession
from tests.helpers.models import ZOO
from tests.helpers.probe import masters
from tests.helpers.training import build
from tests.helpers.wires import WrappedCollectives
from tests.helpers.world import run_world

STEPS = 4


class Rounding(WrappedCollectives):
    """Sends weights in half the bytes: bf16, whatever they are."""

    def _all_gather(self, buffer: Tensor, what: str, source: Tensor | None, *others: Any) -> Pending:
        rounded = torch.empty_like(buffer, dtype=torch.bfloat16)
        self.own_range(rounded).copy_(self.own_range(buffer) if source is None else source)
        sent = self.inner.all_gather(rounded, what)
        sent.then(lambda: buffer.copy_(rounded))
        return sent


def train(wrap: Callable[[Collectives], Collectives]) -> tuple[ZeroSession, list[float]]:
    """A training through a wire: the session, and its losses."""
    case, losses = ZOO["gpt_tied"], []
    module = build(case)
    session = ZeroSession(
        SessionSettings(placement=Placement.from_stage(3), units=case.units),
        Groups.create("gloo"),
        torch.device("cpu"),
        wire=lambda *where: wrap(choose_collectives(*where)),
    )
    session.checkpoints.begin(training=True)
    session.shard(module)
    session.begin(training=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    session.shard_optimizers([optimizer])
    wire = session.engine.collectives
    for step in range(STEPS):
        optimizer.zero_grad()
        with session.step("training_step", training=True):
            loss = case.loss(module, case.batch(wire.rank, step))
        with session.backward():
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.rest()
    return session, losses


def test_a_wire_that_rounds_trains_almost_the_same() -> None:
    def run(rank: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
        session, rounded = train(Rounding)
        return train(lambda wire: wire)[1], rounded, masters(session.engine.module)

    (exact, rounded, weights), (_, _, others) = run_world(2, run)
    difference = max(abs(a - b) for a, b in zip(exact, rounded, strict=True))
    assert 0 < difference < 2**-6 * max(exact)  # bf16 has 8 bits
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
