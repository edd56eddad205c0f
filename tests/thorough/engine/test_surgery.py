"""Changes to the structure of a module in the middle of a fit: DDP's numbers, or an error by name.

DDP loses the hooks of a parameter whose memory was replaced by ``set_()``, as parametrizations do: its ranks drift
apart. Here its gradients are averaged by hand, which changes nothing about those that DDP has averaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_zero import HostOffload, full_parameters
from tests.helpers.cases import WIDTH, Block
from tests.helpers.runs import Net, assert_same, batches, made, quiet, raised, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

Change = Callable[["Parts"], object]


class Parts(Net):
    """Two units, and a layer in the root with a buffer; ``part`` is a linear layer in a unit, or that in the root."""

    def __init__(self, before: Change | None, in_root: bool) -> None:
        super().__init__(lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)))
        self.register_buffer("kept", torch.ones(1))  # DDP fails where the last buffer goes
        self.in_root = in_root
        if before is not None:
            before(self)

    @property
    def part(self) -> nn.Linear:
        return self.model[2] if self.in_root else self.model[0].up  # type: ignore[index, return-value]

    def put(self, layer: nn.Module) -> None:
        """In the place of ``part``."""
        if self.in_root:
            self.model[2] = layer  # type: ignore[index]
        else:
            self.model[0].up = layer  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-4)

    def on_after_backward(self) -> None:
        if isinstance(self.trainer.strategy, DDPStrategy):
            for parameter in self.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2


class Wrapper(nn.Module):
    """As an adapter, or a checkpoint wrapper, has its layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * self.layer(x)


class Added(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = [delta]

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta[0]


class Adapted(nn.Module):
    """Adds to a weight for the length of a forward, as peft does for fused experts."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.column = layer, nn.Parameter(torch.full((layer.out_features, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        required = self.layer.weight.requires_grad
        parametrize.register_parametrization(self.layer, "weight", Added(self.column.expand_as(self.layer.weight)))
        self.layer.parametrizations["weight"].original.requires_grad_(required)  # type: ignore[index, union-attr]
        try:
            return self.layer(x)
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


class Twin(nn.Linear):
    """Another layer with the same parameters, as quantisation makes it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias


def _tanh(m: Parts) -> None:
    parametrize.register_parametrization(m.part, "weight", nn.Tanh())


def _spectral(m: Parts) -> None:
    torch.manual_seed(3)
    parametrizations.spectral_norm(m.part)


def _no_spectral(m: Parts) -> None:
    parametrize.remove_parametrizations(m.part, "weight")


def _orthogonal(m: Parts) -> None:
    parametrizations.orthogonal(m.part)


def _pruned(m: Parts) -> None:
    prune.l1_unstructured(m.part, "weight", 0.3)


def _pruned_for_good(m: Parts) -> None:
    prune.remove(m.part, "weight")


def _adapted(m: Parts) -> None:
    m.put(Adapted(m.part))


def _nothing(_: Parts) -> None:
    pass


def _wrapped(m: Parts) -> None:
    m.put(Wrapper(m.part))


def _twin(m: Parts) -> None:
    m.put(Twin(m.part))


def _new_layer(m: Parts) -> None:
    """Trained by nobody, as under DDP: the optimizer does not know it."""
    torch.manual_seed(4)
    m.put(nn.Linear(m.part.in_features, m.part.out_features))


def _another_block(m: Parts) -> None:
    torch.manual_seed(5)
    m.model[1] = Block()  # type: ignore[index]


def _no_block(m: Parts) -> None:
    m.model[1] = nn.Identity()  # type: ignore[index]


def _data(m: Parts) -> None:
    m.part.weight.data = torch.full_like(m.part.weight, 0.1)


SAME: dict[str, tuple[Change | None, Change]] = {
    # What the module has from the start, and what is done at the second epoch.
    "register_parametrization": (None, _tanh),
    "spectral_norm": (None, _spectral),
    "orthogonal": (None, _orthogonal),
    "remove_parametrizations": (_spectral, _no_spectral),
    "a parametrization for each forward": (_adapted, _nothing),
    "prune": (None, _pruned),
    "prune.remove": (_pruned, _pruned_for_good),
    "a wrapper": (None, _wrapped),
    "a twin with the same parameters": (None, _twin),
    "a new layer": (None, _new_layer),
    "a new unit": (None, _another_block),
    "no unit": (None, _no_block),
    "other memory": (None, _data),
}


class Surgeon(pl.Callback):
    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            with full_parameters(pl_module):
                self.change(pl_module)  # type: ignore[arg-type]


def operated(strategy: Strategy, before: Change | None, change: Change, in_root: bool = False, **options: Any) -> Any:
    module = Parts(before, in_root)
    with quiet():
        warnings.filterwarnings("ignore", ".*used in a forward or backward while no module.*")  # a tie
        trainer = make_trainer(strategy, callbacks=[Surgeon(change)], **{"max_epochs": 3, **options})
        trainer.fit(module, batches(1))
    return module, trainer


def test_a_changed_module_trains_as_under_ddp() -> None:
    ways: dict[str, Any] = {"ddp": lambda: DDPStrategy(find_unused_parameters=True)}
    ways |= {f"stage {stage}": lambda stage=stage: zero(stage) for stage in (1, 3)}
    ways["host"] = lambda: zero(3, offload=HostOffload())

    def world(rank: int) -> dict[str, dict[str, Any]]:
        return {
            name: {
                f"{row}, {place}": made(*operated(make(), *changes, in_root=place == "in the root"))
                for row, changes in SAME.items()
                for place in ("in a unit", "in the root")
            }
            for name, make in ways.items()
        }

    assert_same(run_world(2, world), list(ways)[1:])


def _in_the_optimizer(m: Parts, layer: nn.Module) -> None:
    m.trainer.optimizers[0].add_param_group({"params": list(layer.parameters())})


def _trained_layer(m: Parts) -> None:
    _new_layer(m)
    _in_the_optimizer(m, m.part)


def _normed(m: Parts) -> None:
    parametrizations.weight_norm(m.part)
    _in_the_optimizer(m, m.part.parametrizations.weight)  # type: ignore[arg-type, union-attr]


def _replaced(m: Parts) -> None:
    m.part.weight = nn.Parameter(torch.ones_like(m.part.weight))


def _tied(m: Parts) -> None:
    m.model[1].up.weight = m.model[0].up.weight  # type: ignore[index, union-attr]


def _swapped(m: Parts) -> None:
    torch.utils.swap_tensors(m.part.weight, nn.Parameter(torch.ones_like(m.part.weight)))


REFUSED: dict[str, tuple[Change, str, tuple[int, ...]]] = {
    # DDP trains the first two on each rank's own gradients, in silence, and refuses the last.
    "a new layer in the optimizer": (_trained_layer, "param group 1, holds a parameter", (1, 2, 3)),
    "weight_norm in the optimizer": (_normed, "param group 1, holds a parameter", (1, 2, 3)),
    "a new parameter": (_replaced, "'model.0.up.weight' of unit 'model.0' was replaced by another object", (3,)),
    "a tie": (_tied, "'model.1.up.weight' of unit 'model.1' was replaced by another object", (3,)),
    "swap_tensors": (_swapped, "Cannot swap t1 because it has weakref associated with it", (1, 2, 3)),
}


def test_what_nobody_would_train_is_an_error() -> None:
    def world(rank: int) -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = {}
        for row, (change, _, stages) in REFUSED.items():
            for stage in stages:
                with raised(found.setdefault((row, stage), [])):
                    operated(zero(stage), None, change)
        return found

    for found in run_world(2, world):
        for (row, stage), errors in found.items():
            assert errors, f"{row}, stage {stage}: no error"
            assert REFUSED[row][1] in errors[0], (row, stage, errors)


def test_a_changed_module_resumes_under_its_new_names(tmp_path: Path) -> None:
    """A run that goes on from it ends where one does that was never interrupted. (DDP goes by the order of parameters,
    which a parametrization changes, and fails.)"""

    def world(rank: int) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {"never interrupted": {}, "resumed": {}}
        for stage in (1, 3):
            for row, change in {"tanh": _tanh, "prune": _pruned, "wrapper": _wrapped}.items():
                path = tmp_path / f"{row} {stage}"
                module, trainer = operated(zero(stage), None, change, max_epochs=4)
                results["never interrupted"][path.name] = made(module, trainer)["weights"]
                operated(zero(stage), None, change, max_epochs=2)[1].save_checkpoint(path)
                with quiet():
                    module = Parts(change, False)
                    trainer = make_trainer(zero(stage), max_epochs=4)
                    trainer.fit(module, batches(1), ckpt_path=str(path))
                results["resumed"][path.name] = made(module, trainer)["weights"]
        return results

    assert_same(run_world(2, world), ["resumed"], expected="never interrupted")


def test_conversions_by_swapping_leave_parameters_alone(tmp_path: Path) -> None:
    """``torch.__future__.set_swap_module_params_on_conversion``, set for the whole program. (DDP fails at the end.)"""

    def world(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        for name, make in {"ddp": DDPStrategy, "stage 1": lambda: zero(1), "stage 3": lambda: zero(3)}.items():
            torch.__future__.set_swap_module_params_on_conversion(name != "ddp")
            with quiet():
                trainer = make_trainer(make(), max_epochs=1)
                trainer.fit(Parts(None, False), batches(1))
                trainer.save_checkpoint(tmp_path / name)
                module = Parts(None, False)
                trainer = make_trainer(make(), max_epochs=2)
                trainer.fit(module, batches(1), ckpt_path=str(tmp_path / name))
            results[name] = made(module, trainer)
        return results

    assert_same(run_world(2, world), ["stage 1", "stage 3"])


def test_state_of_two_parameters_that_are_one_now_is_an_error(tmp_path: Path) -> None:
    def world(rank: int) -> list[list[str]]:
        found: list[list[str]] = [[], []]
        for stage, errors in zip((1, 3), found, strict=True):
            operated(zero(stage), None, _data, max_epochs=1)[1].save_checkpoint(tmp_path / f"{stage}")
            with raised(errors), quiet():
                trainer = make_trainer(zero(stage), max_epochs=2)
                trainer.fit(Parts(_tied, False), batches(1), ckpt_path=str(tmp_path / f"{stage}"))
        return found

    for found in run_world(2, world):
        for errors in found:
            assert "ValueError: The checkpoint holds optimizer state that does not fit Adam" in errors[0]
            assert "two parameters that are one now" in errors[0]
