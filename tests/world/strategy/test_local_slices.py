"""``local_slices``: elementwise edits of values, gradients and optimizer state are those of whole tensors under DDP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import HostOffload, ZeroStrategy, local_slices
from tests.helpers.runs import (
    STAGES,
    Net,
    assert_same,
    fit,
    made,
    quiet,
    raised,
    under_ddp_and_stages,
    values_of,
    zero,
)
from tests.helpers.world import run_world


def mask(numel: int, start: int) -> Tensor:
    """A factor for each element, by its place in the whole tensor."""
    return torch.linspace(0.5, 1.5, 7).repeat(-(-(start + numel) // 7))[start : start + numel]


class Edits(Net):
    """Edits values behind each batch, and gradients and state before each step, element by element."""

    def adam(self) -> torch.optim.Optimizer:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def parts(self, write: bool) -> Iterator[tuple[Tensor, Tensor | None, dict[str, Any], int]]:
        """The value, gradient and state of each parameter: whole, or this rank's slice."""
        if not isinstance(self.trainer.strategy, ZeroStrategy):
            for parameter in self.parameters():
                state = self.adam().state.get(parameter, {})
                yield parameter.data.view(-1), parameter.grad, state, 0
            return
        for part in local_slices(self, write=write):
            yield part.value, part.gradient, part.state, part.start

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for value, gradient, state, start in self.parts(False):
            if gradient is not None and value.numel():
                gradient.view(-1).mul_(mask(value.numel(), start))
            if "exp_avg" in state and value.numel():
                state["exp_avg"].view(-1).mul_(mask(value.numel(), start))

    def on_train_batch_end(self, *args: Any) -> None:
        for value, _, _, start in self.parts(True):
            if value.numel():
                value.mul_(mask(value.numel(), start)).clamp_(-0.2, 0.2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_elementwise_edits_are_those_of_whole_tensors(precision: Any) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        module = Edits()
        return made(module, fit(strategy, module, 4, val=1, precision=precision))

    def world(rank: int) -> dict[str, dict[str, Any]]:
        results = under_ddp_and_stages(play)
        for stage in STAGES.values():
            torch.manual_seed(1234)
            with quiet():
                results[f"host, stage {stage}"] = play(zero(stage, offload=HostOffload()))
        return results

    results = run_world(2, world)
    names = [name for name in results[0] if name != "ddp"]
    assert_same(results, names, bound=0.02 if precision == "bf16-mixed" else 0.0)


def test_slices_of_all_ranks_are_the_whole() -> None:
    def world(rank: int) -> list[dict[str, tuple[int, Tensor, Tensor]]]:
        found = []
        for stage in STAGES.values():
            module = Net()
            with quiet():
                fit(zero(stage), module, 2)
            whole = values_of(module)
            found.append({p.name: (p.start, p.value.clone(), whole[p.name]) for p in local_slices(module)})
        return found

    for ranks in zip(*run_world(2, world), strict=True):
        for name, (_, _, whole) in ranks[0].items():
            pieces = sorted((by_name[name] for by_name in ranks), key=lambda piece: piece[0])
            assert torch.equal(torch.cat([value for _, value, _ in pieces]), whole.view(-1)), name


def test_wrong_use_is_an_error_by_name() -> None:
    class InStep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            list(local_slices(self))
            return super().training_step(batch, batch_idx)

    class Leaves(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            for part in local_slices(self, write=True):
                part.value.add_(1.0)
                break

    class Unsaid(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            for part in local_slices(self):
                part.value.add_(1.0)
                break

    def world(rank: int) -> list[str]:
        errors: list[str] = []
        with quiet():
            for stage in (1, 3):
                module = Net()
                fit(zero(stage), module, 2)
                with raised(errors):
                    next(iter(list(local_slices(module, write=True)))).value.add_(1.0)
                with raised(errors):
                    for part in local_slices(module):
                        part.value.add_(1.0)
                with raised(errors):
                    fit(zero(stage), InStep(), 2)
                with raised(errors):
                    fit(zero(stage), Unsaid(), 2)
                with raised(errors):
                    fit(zero(stage), Leaves(), 2)
            with raised(errors):
                list(local_slices(nn.Linear(2, 2)))
        return errors

    for errors in run_world(2, world):
        expected = [
            "ParameterAccessError: The slice of '.*' was kept beyond its turn",
            "ParameterAccessError: The value of '.*' was written to in local_slices: pass `write=True`",
            "ParameterAccessError: .*local_slices",
            "ParameterAccessError: A loop over local_slices that wrote to '.*' without `write=True` was left",
            "ParameterAccessError: A loop over local_slices that may have written to '.*' was left before its end",
        ]
        for error, pattern in zip(errors, [*expected, *expected, "ValueError: Linear is not part"], strict=True):
            assert re.match(pattern, error), error


def test_ranks_with_the_same_slices_write_to_the_same_ones() -> None:
    class Uneven(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            for part in local_slices(self, write=True):
                if self.global_rank == 1:
                    part.value.mul_(2.0)

    def world(rank: int) -> list[str]:
        errors: list[str] = []
        with quiet(), raised(errors):
            fit(zero(3, shard_within=2), Uneven(), 2)
        return errors

    for errors in run_world(4, world):
        assert re.match("DivergenceError: Ranks 1 and 3 have the same slices, and wrote to different ones", errors[0])
