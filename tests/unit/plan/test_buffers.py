"""Which buffers are sent, which of them together, and what that costs."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from lightning_zero.extensions.planner.estimate import estimate_memory
from lightning_zero.plan.buckets import PIECE_NBYTES, BufferSpec, make_pieces, sent_buffers
from lightning_zero.plan.plan import CollectiveTraffic, build_plan


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.norm_again = self.norm
        self.register_buffer("mask", torch.zeros(7, dtype=torch.bool), persistent=False)
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("mine", torch.zeros(2))
        self.register_buffer("nothing", None)
        self._ddp_params_and_buffers_to_ignore = ["mine"]


def test_what_is_sent_is_what_ddp_would_send() -> None:
    names = [name for name, _ in sent_buffers(Kept())]
    assert names == ["mask", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_every_buffer_is_sent_once_and_each_begins_at_a_multiple_of_its_element() -> None:
    dtypes = [torch.bool, torch.float32, torch.int64, torch.complex128, torch.bfloat16]
    sizes = [0, 1, 3, 1000, PIECE_NBYTES // 16, PIECE_NBYTES]
    specs = [BufferSpec(f"{dtype} {size}", (size,), dtype) for size in sizes for dtype in dtypes]
    pieces = make_pieces(specs)
    members = [index for piece in pieces for index in piece.members]
    assert sorted(members) == [index for index, spec in enumerate(specs) if spec.nbytes]
    for piece in pieces:
        assert piece.nbytes == sum(specs[index].nbytes for index in piece.members)
        assert len(piece.members) == 1 or piece.nbytes <= PIECE_NBYTES
        start = 0
        for index in piece.members:
            assert start % specs[index].dtype.itemsize == 0
            start += specs[index].nbytes
        kinds = [specs[index].dtype for index in piece.members]
        assert len({*kinds}) == 1 + sum(a != b for a, b in pairwise(kinds))


def test_the_plan_counts_them_once_per_step() -> None:
    plan = build_plan(Kept(), world_size=2)
    nbytes = 7 + 2 * 5 * 4 + 8
    for micro_steps in (1, 4):
        assert plan.expected_traffic(micro_steps=micro_steps).broadcast == CollectiveTraffic(1, nbytes, nbytes)
    assert "broadcast of buffers" in plan.describe()
    without = build_plan(Kept(), world_size=2, broadcast_buffers=False)
    assert without.buffers == ()
    assert (
        without.expected_traffic().total == plan.expected_traffic().all_gather + plan.expected_traffic().reduce_scatter
    )
    assert "broadcast" not in without.describe()
    assert build_plan(Kept(), world_size=1).expected_traffic().broadcast == CollectiveTraffic()


def test_what_may_change_in_a_run_is_not_part_of_the_fingerprint() -> None:
    longer = Kept()
    longer.mask = torch.zeros(8, dtype=torch.bool)
    assert build_plan(longer, world_size=2).fingerprint() == build_plan(Kept(), world_size=2).fingerprint()


def test_an_estimate_counts_them_with_and_without_a_stage() -> None:
    sent = {}
    for on in (True, False):
        estimate = estimate_memory(Kept(), world_size=2, broadcast_buffers=on)
        sent[on] = {name: estimate.within_nbytes(name) for name in estimate.stages}
    assert sent[True].keys() == sent[False].keys()
    assert all(abs(sent[True][name] - sent[False][name] - 55 / 2) <= 1 for name in sent[True])
