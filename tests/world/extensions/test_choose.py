"""``strategy="zero"``: the first stage that fits is taken, and trains as if it had been asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_zero import NvmeOffload, ZeroStrategy, estimate_memory, full_parameters
from lightning_zero.extensions.planner import choose
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Net, quiet
from tests.helpers.training import make_trainer

WIDTH, ROWS = 512, 8
ENOUGH = 10**12


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))


class Regression(Net):
    """On whatever the loader gives; ``asks`` for the value of its loss, which a measurement does not have."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__(build)
        self.asks = asks

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.model(batch) - batch).square().mean()
        if self.asks:
            self.losses.append(torch.tensor(loss.item()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stream(IterableDataset[Tensor]):
    """Gives each sample once, whoever asks."""

    def __init__(self) -> None:
        self.left = iter(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3 + dist.get_rank())))

    def __iter__(self) -> Iterator[Tensor]:
        return self.left


class Drawn(Dataset[Tensor]):
    """Draws what it gives, as augmentations do, some from a generator of their own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH) + torch.randn(WIDTH, generator=self.generator)


class Batches(list[Tensor]):
    """What a Trainer takes for a loader, as it takes anything that can be iterated over."""


def fit(strategy: Any, free: int = ENOUGH, data: Any = None, asks: bool = False) -> dict[str, Any]:
    """Train with so much memory free for this rank beside the module: the stage that it took, and the weights."""
    module = Regression(asks)
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(choose, "free_host_memory", lambda ranks: free)
        said: list[str] = []
        patch.setattr(choose, "rank_zero_info", said.append)
        trainer = make_trainer(strategy, max_steps=3)
        trainer.fit(module, DataLoader(Drawn(), batch_size=ROWS, shuffle=True) if data is None else data)
        zero: Any = trainer.strategy
        with full_parameters(module):
            weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return {"placement": zero.placement, "offload": zero.offload, "weights": weights, "said": said}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


def peaks() -> dict[str, int]:
    """Of each stage, without activations, which are small here."""
    stages = estimate_memory(build(), world_size=2).stages
    return {name: stage.peak.total + stage.host.total for name, stage in stages.items()}


def free_for(fits: str, fails: str) -> int:
    """What must be free beside the module for the one stage and not for the other."""
    return beside_module((peaks()[fits] + peaks()[fails]) / 2)


def beside_module(nbytes: float) -> int:
    """What must be free for a plan to take so much: the module counts as free, too."""
    return int(nbytes / choose.ROOM) - sum(p.nbytes for p in build().parameters())


def each_stage_is_taken_where_the_one_before_does_not_fit() -> Row:
    def act(rank: int) -> dict[str, Any]:
        frees = {"zero1": ENOUGH, "zero2": free_for("zero2", "zero1"), "zero3": free_for("zero3", "zero2")}
        return {name: (fit("zero", free), fit(name)) for name, free in frees.items()}

    for found in (yield act):
        for name, (chosen, expected) in found.items():
            assert chosen["placement"] == expected["placement"], (name, chosen["said"])
            assert chosen["offload"] is None
            assert same(chosen, expected)
        (said,) = found["zero2"][0]["said"]
        assert said.startswith('strategy="zero" takes zero2: a rank needs ')
        assert "activations: " in said
        assert "; zero1 would need " in said


def the_rank_with_least_memory_counts() -> Row:
    def act(rank: int) -> dict[str, Any]:
        return fit("zero", ENOUGH if rank == 0 else free_for("zero3", "zero2"))

    for found in (yield act):
        assert found["placement"].shards_parameters


def without_known_activations_it_is_stage_3_and_no_sample_is_lost() -> Row:
    def act(rank: int) -> dict[str, Any]:
        def loader() -> Any:
            return DataLoader(Stream(), batch_size=ROWS)

        batches = Batches([torch.ones(ROWS, WIDTH)] * 3)
        return {
            "stream": (fit("zero", data=loader()), fit("zero3", data=loader())),
            "value": (fit("zero", asks=True), fit("zero3")),
            "list": (fit("zero", data=batches), fit("zero3", data=batches)),
        }

    reasons = {
        "stream": "Stream may give each sample once, as it is read without workers.",
        "value": "it asks for values",
        "list": "Batches is no DataLoader",
    }
    for found in (yield act):
        for name, (chosen, expected) in found.items():
            assert chosen["placement"].shards_parameters
            assert same(chosen, expected), name
            assert reasons[name] in chosen["said"][0]


def what_does_not_fit_is_an_error_on_every_rank(directory: Path) -> Row:
    def act(rank: int) -> Any:
        free = beside_module(0.85 * peaks()["zero3"])
        with pytest.raises(ValueError, match='strategy="zero" finds no stage that fits') as error:
            fit("zero", free)
        evaluated: Any = ZeroStrategy("auto")
        with pytest.MonkeyPatch.context() as patch, quiet():
            patch.setattr(choose, "free_host_memory", lambda ranks: free)
            make_trainer(evaluated).validate(module := Regression(), DataLoader(Drawn(), batch_size=ROWS))
        assert evaluated.engine.plan.placement.shards_parameters
        assert evaluated.engine.plan.offload is None, "there are no gradients, and no states"
        assert all(parameter.requires_grad for parameter in module.parameters())
        in_files = fit(ZeroStrategy("auto", offload=NvmeOffload(directory.as_posix(), buffer_mib=1)), free)
        return str(error.value), in_files, fit("zero3")

    for said, chosen, expected in (yield act):
        assert [line.split()[0] for line in said.splitlines()[3:10]] == [
            *(f"zero{stage}{way}" for way in ("", "_offload") for stage in (1, 2, 3)),
            "may",
        ]
        assert "accumulate_grad_batches" in said
        assert isinstance(chosen["offload"], NvmeOffload)
        assert same(chosen, expected)


def a_choice_is_kept_from_the_first_fit_on() -> Row:
    def act(rank: int) -> list[Any]:
        module, strategy, frees = Regression(), ZeroStrategy("auto"), [free_for("zero2", "zero1"), ENOUGH]
        data = DataLoader(torch.ones(32, WIDTH), batch_size=ROWS)
        found = []
        with pytest.MonkeyPatch.context() as patch, quiet():
            patch.setattr(choose, "free_host_memory", lambda ranks: frees[0])
            trainer = make_trainer(strategy, max_steps=1)
            trainer.validate(module, data)
            found.append(strategy.engine.plan.placement)
            trainer.fit(module, data)
            found.append(strategy.engine.plan.placement)
            patch.setattr(choose, "free_host_memory", lambda ranks: frees[1])
            trainer.fit_loop.epoch_loop.max_steps = 2
            trainer.fit(module, data)
            found.append(strategy.engine.plan.placement)
        return found

    for evaluated, *fitted in (yield act):
        assert evaluated.shards_parameters
        assert [one.shards_gradients and not one.shards_parameters for one in fitted] == [True, True]


def fabric_takes_stage_3() -> Row:
    def act(rank: int) -> Any:
        fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="zero")
        fabric.launch()
        module = build()
        fabric.setup(module, torch.optim.AdamW(module.parameters()))
        return fabric.strategy.settings.placement

    for placement in (yield act):
        assert placement.shards_parameters


def test_the_first_stage_that_fits_is_taken(tmp_path: Path) -> None:
    in_one_world(
        2,
        each_stage_is_taken_where_the_one_before_does_not_fit(),
        the_rank_with_least_memory_counts(),
        without_known_activations_it_is_stage_3_and_no_sample_is_lost(),
        what_does_not_fit_is_an_error_on_every_rank(tmp_path),
        a_choice_is_kept_from_the_first_fit_on(),
        fabric_takes_stage_3(),
    )
