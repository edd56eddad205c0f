"""Activations that are measured without memory, beside those of real steps."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_zero import ActivationPolicy, estimate_memory, measure_activations
from lightning_zero._torch import storage_key, tree_leaves
from lightning_zero.activations import Recomputed
from tests.helpers.counting import LiveTensors
from tests.helpers.script import run_script

WORDS, WIDTH, LENGTH, BATCH = 101, 32, 48, 4


class Block(nn.Module):
    def __init__(self, again: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.projection = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.out, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.again = again

    def inside(self, x: Tensor) -> Tensor:
        heads = self.projection(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.dropout(self.out(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) if self.again is None else checkpoint(self.inside, x, use_reentrant=self.again)


class GPT(LightningModule):
    """Logs, and counts what it saw. ``again``: with torch's own checkpoints, reentrant or not."""

    def __init__(self, again: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(again, dropout) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.accuracy = MulticlassAccuracy(WORDS)
        self.several = MetricCollection([MulticlassAccuracy(WORDS), MulticlassF1Score(WORDS)])
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.embedding(batch["text"][:, :-1])))
        target = batch["text"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        self.accuracy(logits.flatten(0, 1), target.flatten())
        self.several.update(logits.flatten(0, 1), target.flatten())
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"accuracy": self.accuracy})
        self.losses.append(loss.detach())
        return {"loss": loss}


class Conv(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.layers = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)


def text() -> dict[str, Tensor]:
    return {"text": torch.randint(WORDS, (BATCH, LENGTH + 1))}


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 20, 20), torch.randint(5, (BATCH,))


class Packed:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def real(model: Any, batch: Any, dtype: torch.dtype | None = None, again: tuple[str, ...] = ()) -> tuple[int, int]:
    """Bytes that a real step saves, and those of its tensors at the worst moment, gradients included."""
    model = copy.deepcopy(model)
    model.log = model.log_dict = lambda *args, **kwargs: None
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d):
                parameter.data = parameter.data.to(dtype)
    modules = dict(model.named_modules())
    repeated = [Recomputed(name, modules[name], nullcontext) for name in again]
    standing = {storage_key(leaf) for leaf in (*model.parameters(), *model.buffers(), *tree_leaves(batch))}
    packed: weakref.WeakSet[Packed] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Packed:
        packed.add(one := Packed(tensor))
        return one

    live = LiveTensors()
    with live:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor))
            if dtype is not None:
                stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=False))
            result = model.training_step(batch, 0)
        saved = {storage_key(one.tensor): one.tensor.untyped_storage().nbytes() for one in packed}
        loss = result["loss"] if isinstance(result, dict) else result
        loss.backward()
    for one in repeated:
        one.remove()
    return sum(nbytes for key, nbytes in saved.items() if key not in standing), live.most


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    "gpt": (GPT, text),
    "its own checkpoints": (lambda: GPT(again=False), text),
    "reentrant": (lambda: GPT(again=True), text),
    "dropout": (lambda: GPT(dropout=0.1), text),
    "conv": (Conv, images),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_a_real_step_saves(name: str, dtype: torch.dtype | None) -> None:
    """To the byte, but for what a machine's kernels choose: the dtype of batch norm's statistics, and scratch.

    And at the worst moment what is given out, up to the gradients of parameters, which a plan has.
    """
    build, make_batch = MODELS[name]
    model, batch = build(), make_batch()
    found = measure_activations(model, batch, param_dtype=dtype)
    gc.disable()  # what its own checkpoints leave in cycles is there until then, or not
    try:
        saved, most = real(model, batch, dtype)
    finally:
        gc.enable()
    gradients = sum(p.numel() * (dtype or p.dtype).itemsize for p in model.parameters())

    statistics = 2 * (8 + 16) * 2 if name == "conv" and dtype is not None else 0
    assert 0 <= saved - found.saved <= statistics
    assert found.saved > 0
    assert found.batch == sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(batch))
    scratch = 0.2 * most if name == "conv" else 0
    assert most - gradients - scratch <= found.saved + found.temporaries <= most + scratch


def test_checkpointing_of_the_strategy_is_measured_as_it_is_applied() -> None:
    model, batch = GPT(), text()
    found = measure_activations(model, batch, policy=ActivationPolicy(checkpointing=["Block"]))
    saved, most = real(model, batch, again=("blocks.0", "blocks.1", "blocks.2"))
    whole = measure_activations(model, batch)

    assert found.saved == saved < 0.5 * whole.saved
    assert found.temporaries > whole.temporaries, "a block is computed again"
    assert found.total < whole.total
    assert found.saved + found.temporaries <= 1.02 * most
    assert measure_activations(model, batch, policy=ActivationPolicy(checkpointing="units"), units=["Block"]) == found


def test_what_is_offloaded_is_not_on_the_device() -> None:
    model, batch = GPT(), text()
    here, there = (
        measure_activations(model, batch, accelerator=True, policy=ActivationPolicy(offload=on, min_kib=1))
        for on in (False, True)
    )
    assert there.saved < 0.1 * here.saved
    assert there.total < 0.5 * here.total
    # On CPUs both are host memory.
    policy = ActivationPolicy(offload=True, min_kib=1)
    assert measure_activations(model, batch, policy=policy) == measure_activations(model, batch)


def test_on_accelerators_dropout_keeps_a_byte() -> None:
    """Not a noise of the activation's dtype, in each of the three blocks; and attention drops nothing."""
    here, there = (measure_activations(GPT(dropout=0.1), text(), accelerator=on) for on in (False, True))
    assert here.saved - there.saved == 3 * (4 - 1) * BATCH * LENGTH * WIDTH


def test_norms_are_in_full_precision_on_accelerators() -> None:
    settings = {"param_dtype": torch.bfloat16}
    here, there = (measure_activations(GPT(), text(), accelerator=on, **settings) for on in (False, True))
    assert there.saved > 1.1 * here.saved
    without = measure_activations(GPT(), text(), accelerator=True, autocast=False, **settings)
    assert without.saved < here.saved


def test_nothing_is_left_in_the_module() -> None:
    model, batch = GPT(), text()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    names, state = set(vars(model)), torch.get_rng_state()
    measure_activations(model, batch)

    assert model.losses == []
    assert set(vars(model)) == names
    assert not model.accuracy.update_called
    assert all(p.grad is None and not p.is_meta for p in model.parameters())
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert value.equal(before[name][1])
    assert torch.get_rng_state().equal(state)


def test_a_model_larger_than_any_memory() -> None:
    """Meta weights, and a batch of 1 TB."""
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(2**20, 2**20), nn.ReLU()), torch.empty(2**18, 2**20)
    found = measure_activations(model, batch)
    assert (found.batch, found.saved) == (2**40, 2**40)


class Asking(GPT):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        result = super().training_step(batch, batch_idx)
        if result["loss"].item() > 3.0:
            result["loss"] = result["loss"] / 2
        return result


class Selecting(GPT):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.embedding(batch["text"][batch["text"] > 3]).sum()


class ByHand(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.optimizers().zero_grad()


class Recurrent(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.lstm(batch[0].flatten(2).transpose(1, 2))[0].sum()


@pytest.mark.parametrize(
    ("build", "batch", "message"),
    [
        (Asking, text, r"asks for values.*\(test_measure.py, line \d+: `if result\[\"loss\"\].item\(\) > 3.0:`\)"),
        (Selecting, text, r"asks for values.*\(test_measure.py, line \d+: `return self.embedding"),
        (ByHand, text, "Activations of ByHand are not known: it optimizes by hand"),
        (Recurrent, images, "recurrent layers keep is known only when they run"),
        (GPT, images, r"raises TypeError: .*\(test_measure.py, line \d+"),
    ],
)
def test_what_cannot_be_measured_is_said(build: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        measure_activations(build(), batch())
    assert "\n" not in str(raised.value)


FORKS_LATER = """
import os
import torch
from torch import nn
from lightning_zero import measure_activations

measure_activations(nn.Linear(4, 4), torch.empty(2, 4))
if not (child := os.fork()):
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there every backward starts threads, which forks do not have")
def test_forked_processes_have_a_backward_after_it(tmp_path: Path) -> None:
    """As ranks in notebooks are. In a new process: it is the first backward that counts."""
    run_script(["-c", FORKS_LATER], cwd=tmp_path)


def test_activations_are_in_every_peak_of_a_backward() -> None:
    """With fused steps that is the worst moment; with others the step may be, where activations have gone."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    for fused, activations in ((True, 1), (True, 10**9), (False, 1), (False, 10**9)):
        adamw = torch.optim.AdamW(model.parameters(), fused=fused)
        settings = {"world_size": 4, "optimizer": adamw, "accelerator": True}
        without, found = estimate_memory(model, **settings), estimate_memory(model, activations=activations, **settings)
        for name, stage in found.stages.items():
            peak = without.stages[name].peak
            assert stage.rest == without.stages[name].rest
            assert peak.total <= stage.peak.total <= peak.total + activations
            assert stage.peak.activations == (0 if stage.peak.temporaries else activations)
            assert stage.peak.total == peak.total + activations or not fused
        assert "+ activations" in found.describe() or activations == 1
        assert "at peak, without" not in found.describe()
        assert "for activations" not in found.recommend(10**12).reason
    with pytest.raises(ValueError, match="A number of parameters has no activations"):
        estimate_memory("1B", world_size=2, activations=1)
