"""One steady training step in a trace: how many of the package's functions it calls, in how many files."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

PACKAGE = str(Path(lightning_zero.__file__).parent)
TRACED = 4  # the step that is traced: by then orders are recorded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)  # buffers that stay from step to step

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.phase = "forward"
        self.calls: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(torch.ones(2, 64)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.phase = "forward"
        if batch_idx == TRACED:
            gc.collect()
            gc.disable()  # what a finalizer calls is not of this step
            sys.setprofile(self._note)

    def on_before_backward(self, loss: Tensor) -> None:
        self.phase = "backward"

    def on_after_backward(self) -> None:
        self.phase = "step"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            place = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]} {frame.f_code.co_name}"
            self.calls[self.phase][place] += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def trace(rank: int, stage: Any) -> dict[str, Counter[str]]:
    torch.manual_seed(0)
    net = Net()
    with quiet():
        trainer = make_trainer(ZeroStrategy(stage=stage, units=["Block"]), gradient_clip_val=1.0)
        trainer.fit(net, DataLoader(range(TRACED + 1), batch_size=None))
    return dict(net.calls)


# Four units of four parameters. In stage 3 each is gathered, bound, guarded and let go twice, and autograd saves seven
# tensors in its forward; a gradient of every parameter arrives, and is cleared by zero_grad. Gathers and reductions are
# left to threads that wait for them, in six calls each.
LIMITS = {
    1: {"forward": (101, 20), "backward": (165, 22)},
    3: {"forward": (350, 29), "backward": (546, 29)},
}
# Whether transfers are over, until the other rank comes, and news of it where that takes long.
LOOKS = ("extensions/watch.py ",)


@pytest.mark.parametrize("stage", LIMITS)
def test_a_step_takes_few_calls_in_few_files(stage: int) -> None:
    found = run_world(2, trace, stage, environment={"LIGHTNING_ZERO_SHARED_MEMORY": "0"})[0]
    for phase, (calls, files) in LIMITS[stage].items():
        counted = Counter({place: calls for place, calls in found[phase].items() if not place.startswith(LOOKS)})
        assert sum(counted.values()) <= calls, f"{phase}: {sum(counted.values())} calls: {counted.most_common(20)}"
        names = sorted({place.split()[0] for place in counted})
        assert len(names) <= files, f"{phase}: {names}"


class Operations(TorchDispatchMode):
    """Counts what is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.global_step == TRACED:
            self.operations.__enter__()

    def on_after_backward(self) -> None:
        if self.trainer.global_step == TRACED:
            self.operations.__exit__(None, None, None)


def operations(rank: int) -> Counter[str]:
    net = Counted()
    with quiet():
        make_trainer(ZeroStrategy(stage=3, units=["Block"])).fit(net, DataLoader(range(TRACED + 1), batch_size=None))
    return net.operations.counts


def test_shards_of_gradients_are_cut_by_one_call() -> None:
    found = run_world(2, operations, environment={"LIGHTNING_ZERO_SHARED_MEMORY": "0"})[0]
    assert found["copy_"] <= 16 + 4 + 3  # each gradient, and a unit's own part, in a reduction and in a gather
    assert found["split_with_sizes"] == 4  # a shard, of which each parameter has a part
    assert found["slice"] <= 8  # the wire's
