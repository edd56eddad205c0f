"""Options of param groups: those of a checkpoint take the place of what is there."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_zero.optim.groups import restore_options


def test_options_are_restored_as_by_torch() -> None:
    model = nn.Linear(3, 2)
    saved = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5, "kept": 1}, {"params": [model.bias]}]).state_dict()
    ours = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    for group in ours.param_groups:
        group["initial_lr"] = 1e-8  # as a scheduler leaves it
    theirs = torch.optim.AdamW(copy.deepcopy(ours.param_groups))

    theirs.load_state_dict(saved)
    restore_options(ours, saved["param_groups"], ("params",))
    for own, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {**own, "params": None} == {**other, "params": None}
    assert [[id(p) for p in group["params"]] for group in ours.param_groups] == [[id(model.weight)], [id(model.bias)]]


def test_a_group_that_the_checkpoint_does_not_know_stays() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.25)
    optimizer.param_groups[0]["extra"] = 1
    before = dict(optimizer.param_groups[0])
    restore_options(optimizer, [{}], ())
    assert optimizer.param_groups[0] == before


def test_options_of_the_run_stay() -> None:
    optimizer = torch.optim.Adam(nn.Linear(3, 2).parameters(), lr=0.25)
    restore_options(optimizer, [{"lr": 0.5, "capturable": True}], ("capturable",))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["capturable"]) == (0.5, False)
