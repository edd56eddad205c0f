"""A snapshot is a faithful copy, in memory that is taken once."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_zero.checkpoint import FlatShard, save_checkpoint_directory
from lightning_zero.checkpoint.background import Snapshots
from tests.helpers.samples import checkpoint, control, end_to_end, load_and_verify, parameters


def test_memory_is_used_again_and_grows_only_with_the_checkpoint(tmp_path: Path) -> None:
    snapshots = Snapshots()
    first = snapshots.take(checkpoint(1, end_to_end, control()))
    held, place = snapshots.nbytes, first["state_dict"]["vector"].local.data_ptr()
    second = snapshots.take(checkpoint(2, end_to_end, control()))
    assert snapshots.nbytes == held
    assert second["state_dict"]["vector"].local.data_ptr() == place
    save_checkpoint_directory(second, tmp_path / "c", control(), plan_summary={})
    load_and_verify(tmp_path / "c", 2)
    snapshots.take({"state_dict": checkpoint(3, end_to_end, control())["state_dict"]})  # weights only
    assert snapshots.nbytes == held
    large = {"state_dict": {"w": torch.rand(held)}}
    assert torch.equal(snapshots.take(large)["state_dict"]["w"], large["state_dict"]["w"])
    grown = 4 * held  # what was there was too small, and was given back
    assert snapshots.nbytes == grown
    snapshots.take(large)
    snapshots.take(checkpoint(4, end_to_end, control()))
    assert snapshots.nbytes == grown
    snapshots.take({"state_dict": {"w": torch.rand(4 * held)}})
    assert snapshots.nbytes == 16 * held  # never more than the largest has needed


def test_a_snapshot_has_the_same_structure_kinds_and_ties(tmp_path: Path) -> None:
    value = torch.randn(1000)
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    content = {
        "tied": [FlatShard(value, (10, 100), 0), FlatShard(value, (10, 100), 0)],
        "state_dict": {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2, dtype=torch.int8),
            "transposed": torch.randn(5, 6).t(),
            "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
            "float8": torch.randn(7).to(torch.float8_e4m3fn),
            "sparse": torch.eye(3).to_sparse(),
            "parameter": parameter,
            "same": parameter,
        },
        "tuple": (1, [torch.ones(2)], {"x"}),
    }
    taken = Snapshots().take(content)
    assert list(taken) == list(content)
    first, second = taken["tied"]
    assert first.local.data_ptr() == second.local.data_ptr() != value.data_ptr()
    for name, expected in content["state_dict"].items():
        found = taken["state_dict"][name]
        assert type(found) is type(expected), name
        assert (found.dtype, found.shape, found.requires_grad) == (
            expected.dtype,
            expected.shape,
            expected.requires_grad,
        )
        exact = [x.to_dense() if x.is_sparse else x.detach() for x in (found, expected)]
        assert torch.equal(exact[0].to(torch.complex64), exact[1].to(torch.complex64)), name
    assert taken["state_dict"]["parameter"] is taken["state_dict"]["same"]
    assert taken["tuple"][1][0].data_ptr() != content["tuple"][1][0].data_ptr()
    torch.save(taken["state_dict"]["transposed"], tmp_path / "t.pt")
    assert (tmp_path / "t.pt").stat().st_size < 5000  # the tensor, and not the memory around it


def test_a_snapshot_taken_under_inference_mode_is_of_ordinary_tensors() -> None:
    snapshots = Snapshots()
    with torch.inference_mode():
        content = checkpoint(1, end_to_end, control())
        taken = snapshots.take(content)
    assert not taken["state_dict"]["vector"].local.is_inference()
    assert torch.equal(taken["state_dict"]["vector"].local, parameters(1)["vector"])
    snapshots.take(checkpoint(2, end_to_end, control()))
