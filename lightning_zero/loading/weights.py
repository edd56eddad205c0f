"""Opening a checkpoint in this process alone, and its weights as a dictionary in host memory."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint, pl_legacy_patch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import StoredTensor, open_checkpoint
from lightning_zero.checkpoint.pieces import stored_identity
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, some
from lightning_zero.session.module_state import left_out_of, weights_of

__all__ = ["load_full_state_dict", "open_here"]

AnyPath = str | os.PathLike[str]


def open_here(path: str | os.PathLike[str], *, verify: bool, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint, seen by this process alone, in today's layout."""
    with pl_legacy_patch():
        checkpoint = open_checkpoint(path, ControlGroup(None), verify=verify, weights_only=weights_only)
    if "pytorch-lightning_version" in checkpoint:
        migrate_checkpoint(checkpoint)
    return checkpoint


def load_full_state_dict(
    path: AnyPath, *, prefix: str | None = None, dtype: torch.dtype | None = None, verify: bool = False
) -> dict[str, Tensor]:
    """Read all weights and buffers of a checkpoint into host memory, in this process alone.

    Args:
        path: the checkpoint.
        prefix: take only the tensors whose names begin with it, and cut it off: ``"model."`` gives the state dict of
            ``self.model``.
        dtype: cast floating-point tensors to it, piece by piece while they are read.
        verify: check every checksum first.

    Returns:
        Ordinary tensors by name; names of a tied weight have the same tensor. Frozen parameters that were left out of
        the checkpoint are not in it, which is warned about, nor is what modules save that is not a tensor.

    Raises:
        CheckpointError: if the checkpoint cannot be read, naming the file, or no name begins with ``prefix``.
        ValueError: for a dtype that is not floating-point.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype like torch.bfloat16, got {dtype!r}.")
    checkpoint = open_here(path, verify=verify)
    named = {name: value for name, value in weights_of(checkpoint, path).items() if isinstance(value, Tensor)}
    chosen = {name[len(prefix or "") :]: value for name, value in named.items() if name.startswith(prefix or "")}
    if prefix and not chosen:
        raise CheckpointError(
            f"No tensor in '{os.fspath(path)}' has a name that begins with '{prefix}': it holds {some(named)}."
        )
    left_out = [name for name in left_out_of(checkpoint) if name not in named and name.startswith(prefix or "")]
    if left_out:
        rank_zero_warn(
            f"'{os.fspath(path)}' was saved without its frozen parameters: {len(left_out)} of them are not in the "
            f"result ({some(left_out)})."
        )
    read: dict[Hashable, Tensor] = {}
    for value in chosen.values():
        if stored_identity(value) not in read:
            read[stored_identity(value)] = _read(value, dtype)
    return {name: read[stored_identity(value)] for name, value in chosen.items()}


def _read(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An ordinary tensor of its own, on the host."""
    dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
    with untracked():
        whole = torch.empty(value.shape, dtype=dtype, device="cpu")
        if isinstance(value, StoredTensor):
            value.read_into(whole.view(-1), 0)
        else:
            whole.copy_(value)
    return whole
