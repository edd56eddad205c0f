"""What the engine costs for each unit, counted in calls of Python functions, which no busy machine changes.

``benchmarks/scaling.py`` measures the time.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

PACKAGE = str(Path(lightning_zero.__file__).parent)
WIRES = ("comm/", "extensions/")  # call as often as they have to wait
# What waits for a reduction, as often as the other rank is late.
WAITS = ("reducer.py: drainable", "reducer.py: <genexpr>", "reducer.py: nbytes", "events.py: of", "unit.py: name")
WAITS += ("_torch.py: profiler_runs", "registry.py: extension")
MEASURED = range(3, 9)  # the steps that are counted: by then orders are recorded; the one in which least was awaited


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Net(pl.LightningModule):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(units)))
        self.calls, self.counted = Counter[str](), Counter[str]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(torch.ones(2, 16)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in MEASURED:
            self.counted = Counter[str]()
            gc.collect()  # what an engine before this one leaves calls back when it is collected, whenever that is
            gc.disable()
            sys.setprofile(self._note)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(None)
        gc.enable()
        if batch_idx in MEASURED and (not self.calls or self.counted.total() < self.calls.total()):
            self.calls = self.counted

    def _note(self, frame: Any, event: str, _: Any) -> None:
        place = frame.f_code.co_filename[len(PACKAGE) + 1 :]
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and not place.startswith(WIRES):
            self.counted[f"{place}: {frame.f_code.co_name}"] += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def calls(stage: Any, units: int) -> Counter[str]:
    net = Net(units)
    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=["Block"]))
        trainer.fit(net, DataLoader(range(MEASURED.stop), batch_size=None))
    return net.calls


# A unit has four parameters: of each a gradient arrives, and is cleared by zero_grad. In stage 3 it is gathered and
# bound twice, guarded, pinned, released and reduced; autograd saves seven tensors in its forward: 115 calls, and ten
# more where a unit has to wait for the other rank.
@pytest.mark.parametrize(("stage", "bound"), [(1, 36), (2, 36), (3, 130)])
def test_calls_for_each_unit_are_few_and_do_not_grow_with_their_number(stage: int, bound: int) -> None:
    def count(rank: int) -> list[Counter[str]]:
        return [calls(stage, units) for units in (20, 40, 80)]

    few, more, many = map(Counter, run_world(2 if stage == 3 else 1, count)[0])  # one rank alone has nothing to gather
    steady = [sum(n for name, n in found.items() if not name.endswith(WAITS)) for found in (few, more, many)]
    first, second = steady[1] - steady[0], steady[2] - steady[1]
    assert second == pytest.approx(2 * first, rel=0.05), "not linear in the number of units"
    second = many.total() - more.total()
    grown = Counter({name: round((many[name] - more[name]) / 40, 1) for name in many})
    assert second / 40 <= bound, f"{second / 40} calls for each unit: {grown.most_common(15)}"
