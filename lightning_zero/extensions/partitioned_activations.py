"""What checkpointed blocks keep, split over the ranks of a tensor-parallel group: Pa of ZeRO-R, with the host Pa+cpu.

Between layers all ranks of a tensor group have the same activations, and each would keep them all until the backward.
Here each keeps one part of the inputs that ``torch.utils.checkpoint`` saves, and they are gathered before the block
runs again: the same bits, and 1/ranks of the memory. Source: ZeRO (arXiv:1910.02054), section 6.1.

[Note: inputs that differ]
With ``SequenceParallel`` each rank has other activations, of which parts would make a tensor that nobody has had. A
DTensor says so itself. Of an ordinary tensor each rank makes a sum of its bits before it lets parts of it go, and
another of what it gathers. A device is not waited for: it counts what differs, and the host looks one step later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero._torch import all_gather_single, disable_dynamo, untracked, version_probe
from lightning_zero.comm.control import naming_failures
from lightning_zero.engine.guard import WRAPPERS, check_version

__all__ = ["Partitioned"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Kept(NamedTuple):
    """A tensor of which this rank keeps a part."""

    part: Any  # 1-D, padded to as many elements on every rank; or what the host has of it
    total: Tensor  # of the bits of the whole
    shape: torch.Size
    stride: tuple[int, ...]
    module: str
    probe: Tensor
    version: int
    wrap: Callable[[Tensor], Tensor]


class Partitioned:
    """Splits what checkpointed blocks keep over the tensor group of a module's parameters.

    Args:
        module: parallelised.
        min_nbytes: smaller tensors are kept whole.
        to_host: takes a part to the host, and brings it back; ``None``: parts stay on the device.

    Raises:
        ValueError: if nothing of the module is parallelised.
    """

    def __init__(self, module: nn.Module, min_nbytes: float, to_host: tuple[Any, Any] | None) -> None:
        specs = (getattr(parameter, "tensor_spec", None) for parameter in module.parameters())
        mesh = next((spec[0] for spec in specs if spec is not None), None)
        if mesh is None:
            raise ValueError(
                "ActivationPolicy(partition=True) splits activations over a tensor-parallel group, and nothing in "
                f"{type(module).__name__} is parallelised: leave it out, or see ZeroStrategy(tensor_parallel_size=...)."
            )
        self._group, self._rank, self._ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._min_nbytes, self._to_host = max(min_nbytes, 1), to_host
        self._differing: Tensor | None = None  # on the device: how often a gathered tensor was another
        self._seen: Tensor | None = None  # the same on the host, a step later
        self._latest = ""  # the module that was computed again last

    def keeping(self, name: str) -> Callable[[], saved_tensors_hooks]:
        """Makes contexts in which this thread saves the inputs of the module of this name."""
        # Permanent objects that Dynamo does not trace.
        return partial(saved_tensors_hooks, disable_dynamo(partial(self._pack, name)), disable_dynamo(self._unpack))

    def check(self) -> None:
        """Raise ``RuntimeError`` if a gathered tensor of an earlier step was not what this rank had. Local."""
        if self._seen is not None and int(self._seen):
            self._refuse(self._latest)
        if self._differing is not None:
            self._seen = torch.empty_like(self._differing, device="cpu", pin_memory=True)
            self._seen.copy_(self._differing, non_blocking=True)

    def _pack(self, name: str, tensor: Tensor) -> Any:
        inner = tensor
        wrap: Callable[[Tensor], Tensor] = _as_it_is
        if (inside := WRAPPERS.get(type(tensor))) is not None:
            inner, wrap = inside(tensor)
            if not all(placement.is_replicate() for placement in tensor.placements):  # type: ignore[attr-defined]
                return tensor
        split = tensor.requires_grad and inner.is_floating_point() and inner.nbytes >= self._min_nbytes
        if not split or not inner.permute(sorted(range(inner.dim()), key=inner.stride, reverse=True)).is_contiguous():
            return tensor  # what is passed to many blocks, such as a mask, they keep together
        with untracked():
            flat = inner.detach().as_strided((inner.numel(),), (1,))
            size = -(-flat.numel() // self._ranks)
            mine = flat[self._rank * size : (self._rank + 1) * size]
            part = flat.new_zeros(size)
            part[: mine.numel()] = mine
            kept: Any = part if self._to_host is None else self._to_host[0](part)
            return _Kept(
                kept, _total(flat), inner.shape, inner.stride(), name, version_probe(inner), inner._version, wrap
            )

    def _unpack(self, kept: Any) -> Tensor:
        if type(kept) is not _Kept:
            return kept  # type: ignore[no-any-return]
        with untracked():
            part: Tensor = kept.part if self._to_host is None else self._to_host[1](kept.part)
            check_version(kept.probe, kept.version, part.dtype, kept.shape)
            every = part.new_empty(self._ranks * part.numel())
            with naming_failures(f"gathering the inputs of '{kept.module}'", dist.get_rank(), self._group):
                all_gather_single(every, part, group=self._group)
            flat = every[: kept.shape.numel()]
            differs = (_total(flat) != kept.total).to(torch.int64)
            if flat.device.type == "cpu" or self._differing is None:
                if int(differs):
                    self._refuse(kept.module)
                self._differing = None if flat.device.type == "cpu" else differs
            else:
                self._differing += differs
                self._latest = kept.module
            return kept.wrap(flat.as_strided(kept.shape, kept.stride))

    def _refuse(self, name: str) -> None:
        raise RuntimeError(
            f"An input of '{name}' is not the same on all ranks of its tensor group, so no rank could keep a part for "
            "the others. With SequenceParallel each rank has its own part already: leave out "
            "ActivationPolicy(partition=True). Otherwise look for dropout or noise that differs between these ranks."
        )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _total(flat: Tensor) -> Tensor:
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
