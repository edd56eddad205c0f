"""A training loop of one's own on a session, without Lightning, against ``DistributedDataParallel``."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import Groups
from lightning_zero.config import Placement, SessionSettings
from lightning_zero.extensions.shared_memory.heap import Heap
from lightning_zero.session.session import ZeroSession
from tests.helpers.world import run_world


def made() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7 * step + rank))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def under_ddp(rank: int, steps: int) -> dict[str, Tensor]:
    module = made()
    parallel, optimizer = DistributedDataParallel(module), adamw(module)
    torch.manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        with parallel.no_sync():
            parallel(batch(step, rank)).square().mean().backward()
        parallel(batch(step + 10, rank)).square().mean().backward()
        optimizer.step()
    return module.state_dict()


def opened(stage: int) -> tuple[nn.Module, ZeroSession, torch.optim.Optimizer]:
    module = made()
    settings = SessionSettings(placement=Placement.from_stage(stage), units=["Sequential"])
    session = ZeroSession(settings, Groups.create("gloo", None), torch.device("cpu"))
    session.checkpoints.begin(training=True)
    session.shard(module)
    session.begin(training=True)
    optimizer = adamw(module)
    session.shard_optimizers([optimizer])
    return module, session, optimizer


def train(
    module: nn.Module, session: ZeroSession, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> dict[str, Tensor]:
    """A plain loop: two micro-steps, a step of the optimizer. Returns the whole state."""
    for step in steps:
        optimizer.zero_grad()
        for last in (False, True):
            with nullcontext() if last else session.accumulating():
                with session.step("training_step", training=True, averaged=last):
                    loss = module(batch(step + 10 * last, rank)).square().mean()
                with session.backward():
                    loss.backward()
        optimizer.step()
    with lightning_zero.full_parameters(module):
        return copy.deepcopy(module.state_dict())


def test_three_steps_without_lightning_are_those_of_ddp() -> None:
    def run(rank: int) -> None:
        expected = under_ddp(rank, 3)
        # Stages 2 and 3 average every micro-step at once, and add in another order than DDP.
        for stage, tolerance in ((1, {"rtol": 0, "atol": 0}), (3, {"rtol": 1e-4, "atol": 1e-6})):
            module, session, optimizer = opened(stage)
            torch.manual_seed(rank)
            found = train(module, session, optimizer, rank, range(3))
            session.rest()
            torch.testing.assert_close(found, expected, **tolerance)

    run_world(2, run)


def test_a_session_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[Any, Any]:
        module, session, optimizer = opened(3)
        torch.manual_seed(rank)
        train(module, session, optimizer, rank, range(2))
        content = {
            "global_step": 2,
            "state_dict": session.module_state().save(),
            "optimizer_states": [session.optimizer_state(optimizer).save()],
        }
        session.checkpoints.save(content, tmp_path / "two", session.engine, precision="32-true")
        expected = train(module, session, optimizer, rank, range(2, 4))
        session.rest()

        module, session, optimizer = opened(3)
        checkpoint = open_checkpoint(tmp_path / "two", session.groups.control)
        session.module_state().load(checkpoint["state_dict"], strict=True)
        session.optimizer_state(optimizer).load(checkpoint["optimizer_states"][0])
        session.checkpoints.load_random_state(checkpoint, session.device)
        session.checkpoints.restore_random_state()
        found = train(module, session, optimizer, rank, range(2, 4))
        session.rest()
        return found, expected

    for found, expected in run_world(2, run):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_first_values_are_rank_0s_who_makes_no_copies_of_them() -> None:
    """The others read them where they stay. In stage 3 rank 0 lends memory for one unit at a time."""

    def run(rank: int) -> tuple[list[int], list[Any]]:
        taken, found, allocate = [], [], Heap.allocate
        for stage in (1, 2, 3):
            module, sizes = made(), list[int]()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(rank)
            settings = SessionSettings(placement=Placement.from_stage(stage), units=["Sequential"])
            session = ZeroSession(settings, Groups.create("gloo", None), torch.device("cpu"))
            session.checkpoints.begin(training=True)
            with patch.object(Heap, "allocate", lambda heap, n, d, s=sizes: s.append(n) or allocate(heap, n, d)):
                session.shard(module)
            with lightning_zero.full_parameters(module):
                found.append({name: value.detach().clone() for name, value in module.named_parameters()})
            session.rest()
            taken.append(len(sizes))
        return taken, found

    first, *others = run_world(3, run)
    for taken, _ in others:
        assert [mine - theirs for mine, theirs in zip(first[0], taken, strict=True)] in ([0, 0, 4], [0, 0, 0])
    expected = {name: value.detach() for name, value in made().named_parameters()}
    for _, found in (first, *others):
        torch.testing.assert_close(found, [expected] * 3, rtol=0, atol=0)


def test_a_run_that_has_not_begun_says_so() -> None:
    settings = SessionSettings(placement=Placement.from_stage(2))
    session = ZeroSession(settings, Groups.create("gloo", None), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"ZeroSession\.shard"):
        _ = session.engine
    with pytest.raises(RuntimeError, match="not begun"), session.step("training_step", training=True):
        pass
