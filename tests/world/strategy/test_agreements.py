"""How often the ranks of a step tell each other where they are: once where a phase begins or ends, and no more."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import HostOffload, ZeroStrategy
from lightning_zero.comm.control import ControlGroup
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world


class Net(pl.LightningModule):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks, nn.BatchNorm1d(8) if buffers else nn.Identity())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(torch.ones(4, 8) * batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Between(pl.Callback):
    """Does nothing in a hook, which is seen by nobody."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *args: None)


class Counts(pl.Callback):
    """Exchanges of numbers between the hosts, by batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self._count = 0
        rows = ControlGroup._rows

        def counted(control: ControlGroup, *arguments: Any) -> Any:
            self._count += 1
            return rows(control, *arguments)

        monkeypatch.setattr(ControlGroup, "_rows", counted)

    def on_train_batch_start(self, *args: Any) -> None:
        self._count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches.append(self._count)


EXPECTED: list[tuple[int, dict[str, Any], list[int]]] = [
    (1, {}, [2, 2]),  # the beginning of a backward, and its end with the step
    (2, {}, [2, 2]),
    (3, {}, [2, 2]),  # the end of a forward with the beginning of the backward
    (1, {"between": "on_before_backward"}, [2, 2]),
    (3, {"between": "on_before_backward"}, [3, 3]),  # code of the user's that may come between keeps them apart
    (3, {"between": "on_before_zero_grad"}, [3, 3]),
    (1, {"between": "on_after_backward"}, [3, 3]),
    (3, {"between": "on_before_optimizer_step"}, [3, 3]),
    (3, {"between": "on_before_backward", "ranks": [1]}, [3, 3]),  # on one rank too
    (2, {"between": "on_after_backward", "ranks": [1]}, [3, 3]),
    (1, {"buffers": True}, [2, 2]),  # rank 0's buffers are presumed to be of the same sizes as ever
    (3, {"buffers": True}, [2, 2]),
    (2, {"gradient_clip_val": 0.1}, [3, 3]),  # and the norm
    (1, {"accumulate_grad_batches": 2}, [0, 2]),  # nothing is averaged in the first micro-step
    (2, {"accumulate_grad_batches": 2}, [2, 2]),
    (3, {"accumulate_grad_batches": 2}, [2, 2]),
    (2, {"offload": HostOffload(optimizer=True)}, [4, 4]),  # and whether all could take the step
]


def test_a_step_agrees_once_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> None:
        for stage, options, expected in EXPECTED:
            chosen = dict(options)
            net, between = Net(chosen.pop("buffers", False)), chosen.pop("between", None)
            disturbed = rank in chosen.pop("ranks", [0, 1]) and between is not None
            strategy = ZeroStrategy(stage, units=["Sequential"], offload=chosen.pop("offload", None))  # type: ignore[arg-type]
            with monkeypatch.context() as patch, quiet():
                counts = Counts(patch)
                callbacks = [counts, *([Between(between)] if disturbed else ())]
                make_trainer(strategy, callbacks=callbacks, **chosen).fit(net, DataLoader(range(6), batch_size=None))  # type: ignore[arg-type]
            assert counts.batches[2:4] == counts.batches[4:] == expected, (stage, options)

    run_world(2, run)


@pytest.mark.parametrize("world_size", [2, 5])
def test_an_agreement_takes_as_many_messages_as_their_number_has_digits(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> int:
        control, sent = ControlGroup(dist.group.WORLD, rank, world_size), []
        send = dist.isend
        monkeypatch.setattr(dist, "isend", lambda *args, **named: sent.append(1) or send(*args, **named))
        assert control.exchange([rank, -rank]) == [[other, -other] for other in range(world_size)]
        return len(sent)

    assert set(run_world(world_size, run)) == {math.ceil(math.log2(world_size))}
