"""Comparing optimizers: what is the same, what is not, and how it is said."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_zero.comm import ControlGroup
from lightning_zero.errors import DivergenceError
from lightning_zero.optim.agreement import Fingerprint, agree_on_set_up
from tests.helpers.world import ROOT, run_world

NAMES = [["a", "b"], ["c"]]


def adamw(**options: Any) -> torch.optim.AdamW:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    return torch.optim.AdamW([{"params": [a, b]}, {"params": [c], "weight_decay": 0.0}], **options)


def number(optimizer: torch.optim.Optimizer, names: list[list[str]] = NAMES) -> int:
    return Fingerprint(optimizer, "AdamW", whole=False).take(names)


# ---------------------------------------------------------------------------------------------------- fingerprints


def test_a_number_fits_into_a_message() -> None:
    assert -(2**63) <= number(adamw()) < 2**63


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"lr": 1}, {"lr": 1.0}),
        ({"lr": torch.tensor(0.5)}, {"lr": 0.5}),
        ({"lr": torch.tensor([0.5])}, {"lr": torch.tensor(0.5, dtype=torch.float64)}),
        ({"amsgrad": True}, {"amsgrad": 1}),
        ({"betas": (0.5, 0.75)}, {"betas": [torch.tensor(0.5), 0.75]}),
        ({"lr": 0.1}, {"lr": 0.1 + 1e-17}),
        ({"lr": float("nan")}, {"lr": float("nan")}),
    ],
)
def test_what_means_the_same_has_the_same_number(left: dict[str, Any], right: dict[str, Any]) -> None:
    one, other = adamw(), adamw()
    one.param_groups[0].update(left)
    other.param_groups[0].update(right)
    assert number(one) == number(other)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.1},
        {"lr": 0.001 * (1 + 1e-8)},
        {"weight_decay": 0.01 + 1e-6},
        {"betas": (0.9, 0.99)},
        {"maximize": True},
        {"foreach": False},
        {"name": "head"},
        {"extra": 0},
        {"lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_every_option_counts(change: dict[str, Any]) -> None:
    optimizer = adamw()
    before = number(optimizer)
    optimizer.param_groups[1].update(change)
    assert number(optimizer) != before


@pytest.mark.parametrize(
    "names", [[["b", "a"], ["c"]], [["a"], ["b", "c"]], [["a", "b", "c"], []], [["a", "b"], ["d"]]]
)
def test_members_and_their_order_count(names: list[list[str]]) -> None:
    optimizer = adamw()
    assert number(optimizer, names) != number(optimizer)


@pytest.mark.parametrize(
    "cache", [[[None] * 3] * 10, {"a": 1}, nn.Linear(1, 1), torch.zeros(2), lambda: None], ids=type
)
def test_what_is_no_number_does_not_count(cache: Any) -> None:
    """RAdam of old kept step sizes in its groups, which a rank without parameters in the group never fills."""
    one, other = adamw(), adamw()
    one.param_groups[0]["cache"] = cache
    other.param_groups[0]["cache"] = [[1.0, 2.0]]
    assert number(one) == number(other)


def test_every_change_between_steps_is_seen() -> None:
    optimizer = adamw(lr=torch.tensor(0.1), foreach=False)
    optimizer.param_groups[1]["betas"] = [0.9, 0.99]
    fingerprint = Fingerprint(optimizer, "AdamW", whole=False)
    acts: list[Callable[[], Any]] = [
        lambda: optimizer.param_groups[0].update(lr=0.2),
        lambda: optimizer.param_groups[1]["lr"].fill_(0.3),
        lambda: optimizer.param_groups[1]["lr"].data.fill_(0.4),
        lambda: optimizer.param_groups[1]["betas"].__setitem__(0, 0.8),
        lambda: optimizer.param_groups[0].update(betas=(torch.tensor(0.5), 0.9)),
        lambda: optimizer.param_groups[0]["betas"][0].fill_(0.6),
        lambda: optimizer.param_groups[0].pop("eps"),
        lambda: optimizer.param_groups.reverse(),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda: optimizer.param_groups.pop(),
    ]
    seen = [fingerprint.take(NAMES)]
    for act in acts:
        assert fingerprint.take(NAMES) == seen[-1]
        act()
        seen.append(fingerprint.take(NAMES))
        assert seen[-1] == number(optimizer)
    assert all(left != right for left, right in itertools.pairwise(seen))


def test_the_number_does_not_depend_on_the_process() -> None:
    script = "from tests.thorough.engine.test_comparison import *; "
    script += "print(number(adamw(lr=0.3)), number(adamw(), [['x'], ['y']]))"
    another = 1 + int(os.environ.get("PYTHONHASHSEED", "random").replace("random", "0"))
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": str(another), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        timeout=100,
        text=True,
    ).stdout
    assert found.split() == [str(number(adamw(lr=0.3))), str(number(adamw(), [["x"], ["y"]]))]


# ---------------------------------------------------------------------------------------------------------- set-up


def told(make: Callable[[int], Any], schedulers: Callable[[int, Any], Any] = lambda rank, optimizer: []) -> list[str]:
    """What three ranks say of what each has made."""

    def play(rank: int) -> str:
        optimizer = make(rank)
        try:
            agree_on_set_up([optimizer], schedulers(rank, optimizer), {}, ControlGroup(dist.group.WORLD, rank, 3))
        except DivergenceError as error:
            return str(error)
        return ""

    said = run_world(3, play)
    assert said[1:] == said[:-1]
    return [line.strip() for line in said[0].splitlines()]


def test_the_first_difference_names_rank_group_option_and_values() -> None:
    lines = told(lambda rank: adamw(lr=0.5 if rank == 1 else 0.25))
    assert lines[0] == "Rank 1 has another result of configure_optimizers than rank 0. First differences:"
    assert lines[1:3] == [
        "rank 0: AdamW, param group 0, option 'lr': 0.25",
        "rank 1: AdamW, param group 0, option 'lr': 0.5",
    ]


def test_members_and_classes_are_compared() -> None:
    def make(rank: int) -> Any:
        optimizer = adamw()
        if rank:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        return optimizer

    assert any("param group 0, parameter 1" in line for line in told(make))
    lines = told(lambda rank: (torch.optim.Adam if rank == 2 else torch.optim.AdamW)([nn.Parameter(torch.zeros(2))]))
    assert "rank 2: optimizers: torch.optim.adam.Adam" in lines


def test_what_differs_only_in_addresses_devices_or_last_bits_is_the_same() -> None:
    class Thing:
        pass

    def make(rank: int) -> Any:
        optimizer = adamw(lr=torch.tensor(0.5) if rank else 0.5, foreach=False)
        optimizer.param_groups[0] |= {
            "hook": lambda: rank,
            "thing": Thing(),
            "mask": torch.rand(100),
            "eps": 1e-8 * (1 + rank * 1e-15),
            "nothing": float("nan"),
        }
        if rank == 1:
            optimizer.param_groups[0] = dict(reversed(optimizer.param_groups[0].items()))
        return optimizer

    assert told(make) == []


def test_settings_of_schedulers_count_and_their_state_does_not() -> None:
    def schedulers(rank: int, optimizer: Any, **settings: Any) -> Any:
        plateau = ReduceLROnPlateau(optimizer, **settings)
        plateau.step(float(rank))
        return [{"scheduler": plateau, "interval": "epoch", "monitor": "loss"}]

    assert told(lambda rank: adamw(), schedulers) == []
    lines = told(lambda rank: adamw(), lambda rank, optimizer: schedulers(rank, optimizer, patience=3 + (rank == 2)))
    assert "rank 2: scheduler 0 (ReduceLROnPlateau), setting 'patience': 4" in lines
