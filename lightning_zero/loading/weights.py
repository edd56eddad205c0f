"""Weights as a dictionary in host memory, and as the first weights of a sharded run."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import Control, FlatShard, StoredTensor, open_checkpoint
from lightning_zero.checkpoint.flat_shard import memory_identity
from lightning_zero.checkpoint.pieces import stored_identity
from lightning_zero.errors import CheckpointError, ZeroError, some
from lightning_zero.loading.names import under_own_names
from lightning_zero.loading.opened import left_out_of, open_here, weights_of

if TYPE_CHECKING:  # which reads with what is here
    from lightning_zero.state import ModuleState

__all__ = ["load_full_state_dict", "load_initial_weights"]

AnyPath = str | os.PathLike[str]


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


def load_initial_weights(state: ModuleState, path: AnyPath, control: Control, *, strict: bool, verify: bool) -> None:
    """Read weights and buffers into a sharded module, each rank its own slices.

    Args:
        state: of the module. Written.
        path: the checkpoint. If none of its names is one of the module's, but all are once the same prefix is put
            before them or cut off (``transformer.h.0`` and ``model.transformer.h.0``), they are read under the
            module's names.
        control: the ranks.
        strict: whether missing, unexpected and differently shaped tensors are errors. If not, the first and the last
            keep the values that they have, and rank 0 warns of all three kinds.
        verify: check every checksum first.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read, naming the file.
        RuntimeError: on every rank, as ``nn.Module.load_state_dict`` does, for what does not fit; also without
            ``strict`` if nothing fits at all.

    Collective: every rank.
    """
    checkpoint = open_checkpoint(path, control, verify=verify)
    weights = weights_of(checkpoint, path)
    own = state.save()
    stored: OrderedDict[str, Any] = OrderedDict(under_own_names(weights, own, path, strict))
    if not strict:
        stored = OrderedDict(_what_fits(stored, own, path, control))
    if hasattr(weights, "_metadata"):
        stored._metadata = weights._metadata  # type: ignore[attr-defined]  # versions, for the modules' own loading
    try:
        state.load(stored, strict=strict)
    except RuntimeError as error:
        if isinstance(error, ZeroError):
            raise
        left_out = len(left_out_of(checkpoint))
        why = f" That checkpoint was saved without its {left_out} frozen parameters." if left_out else ""
        raise RuntimeError(
            f"The initial weights '{os.fspath(path)}' do not fit.{why} With "
            "CheckpointPolicy(strict_initial_weights=False) what does not fit keeps its initial values.\n"
            f"{error}"
        ) from None


def _what_fits(stored: Mapping[str, Any], own: Mapping[str, Any], path: AnyPath, control: Control) -> dict[str, Any]:
    """The stored tensors that have the name and shape of one of the module's; a warning names all others.

    Raises:
        RuntimeError: if there is none.
    """
    known = {name: value for name, value in stored.items() if name in own}
    fitting = {name: value for name, value in known.items() if _shape(value) == _shape(own[name])}
    reshaped = [name for name in known if name not in fitting]
    if not fitting and own:
        raise RuntimeError(
            f"Nothing in the initial weights '{os.fspath(path)}' fits the module: stored are {some(stored)}; the "
            f"module has {some(own)}. Compare the names, and save the weights under those of the module."
        )
    shapes = [f"{name} {_shape(stored[name])} instead of {_shape(own[name])}" for name in reshaped]
    lines = [
        f"{len(names)} {what}: {some(names)}."
        for names, what in (
            (shapes, "of another shape were skipped"),
            (_missing(stored, own), "are not there and keep their initial values"),
            ([name for name in stored if name not in own], "are not in the module and were ignored"),
        )
        if names
    ]
    if lines and control.rank == 0:
        warnings.warn(
            f"Initial weights from '{os.fspath(path)}': {len(fitting)} of {len(own)} tensors were read. "
            + " ".join(lines),
            stacklevel=3,
        )
    return fitting


def _missing(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The module's names that are not stored, but for other names of parameters that are: of a tied one, one will do.

    Which are tied shows in the memory of this rank's slices, so one without an element here may be listed too much.
    """
    memory = {name: memory_identity(value.local) for name, value in own.items() if isinstance(value, FlatShard)}
    there = {memory[name] for name in stored if name in memory and own[name].local.numel()}
    return [name for name in own if name not in stored and memory.get(name) not in there]


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
