"""Loaders whose data end on some ranks earlier than on others: all ranks ask, batch by batch, whether anybody has one.

Under DDP a rank without a batch leaves, and the others wait for it in their next backward. A loader over a dataset of
known length that is the same on all ranks is left as it is: the ranks compare lengths once. Of any other one each batch
is asked for in an agreement (40 microseconds on a host), in the order in which Lightning fetches, before the step.

[Note: a step without a batch]
A rank that has no batch while another one has gets a ``NoBatch``, so that Lightning's loops go on there in step. In
place of the module's step method the strategy runs nothing, in the same scope: the rank takes part in what the others
gather and reduce, gives no gradient, and its loss is zero. Averages go on being those over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero._torch import tree_leaves
from lightning_zero.config import LoaderPolicy, Placement
from lightning_zero.errors import DivergenceError, some
from lightning_zero.trainer.signals import Signals

__all__ = ["Loading", "NoBatch", "in_lock_step"]

Policy = Literal["error", "join", "stop"]
Agree = Callable[[str, Sequence[int]], list[list[int]]]


class Loading(Signals):
    """What Lightning asks a strategy about data."""

    loaders: LoaderPolicy
    placement: Placement
    may_lack = False
    """Whether a loader of this run may give no batch."""
    _without = 0  # steps of this rank without a batch

    def process_dataloader(self, dataloader: object) -> object:
        """A loader that ends on all ranks together, where the ranks need one another. Collective: every rank."""
        module: Any = self.lightning_module
        trainer = module.trainer
        training = trainer.training
        policy = self.loaders.training if training else self.loaders.evaluation
        free = not training and policy == "join" and not self.placement.shards_parameters  # nobody waits
        by_hand = training and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        if self.world_size == 1 or free or by_hand:
            return dataloader
        if training and policy == "join" and not module.automatic_optimization:
            raise ValueError(
                "LoaderPolicy(training='join') leaves training_step out on ranks without a batch, and with it, in "
                "manual optimization, the backward that the others wait for. Use 'error' or 'stop'."
            )
        name = f"{trainer.state.stage.dataloader_prefix}_dataloader"
        loader = in_lock_step(dataloader, name, policy, self.engine.agree)
        self.may_lack = self.may_lack or (policy == "join" and loader is not dataloader)
        return loader

    def lacks_batch(self, *called: Any) -> bool:
        """Whether what a step is called with has no batch in it, or not that of each of several loaders."""
        without = any(isinstance(leaf, NoBatch) for leaf in tree_leaves(called))
        self._without += without
        return without

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The user's way to bring a batch to the device, if there is one."""
        if self.may_lack and any(isinstance(leaf, NoBatch) for leaf in tree_leaves(batch)):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_predict_end(self) -> None:
        """Take off what was predicted of no batch."""
        loop: Any = self.lightning_module.trainer.predict_loop  # type: ignore[union-attr]
        for predictions in loop._predictions if self._without else ():  # 2.6
            while predictions and predictions[-1] is None:
                predictions.pop()
        self._without = 0


class NoBatch:
    """What a rank without a batch has in place of one, while others have theirs. Hooks of batches get it."""

    def to(self, *args: Any, **kwargs: Any) -> NoBatch:
        """Itself, on any device."""
        return self

    def __repr__(self) -> str:
        return "NoBatch()"


def in_lock_step(loader: Any, name: str, policy: Policy, agree: Agree) -> Any:
    """The loader, or one that ends on all ranks together.

    Args:
        loader: of this rank; anything that can be iterated.
        name: for messages, alike on all ranks.
        policy: what to do where data end on some ranks only.
        agree: exchanges numbers with all ranks, given what for.

    Collective: every rank.
    """
    length = sized_len(loader)
    certain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    rows = agree(f"the length of the {name}", [-1 if length is None else length, int(certain)])
    lengths = [row[0] for row in rows]
    if len(set(lengths)) == 1 and all(row[1] for row in rows):
        return loader
    known = min(lengths) >= 0
    if known and policy == "error" and max(lengths) > min(lengths):
        short = lengths.index(min(lengths))
        rank_zero_warn(
            f"The {name} has {min(lengths)} batches on rank {short} and {max(lengths)} on rank "
            f"{lengths.index(max(lengths))}. A run that comes to the end of the shorter one ends with an error. "
            f"{_WAYS}"
        )
    end = (min if policy == "stop" else max)(lengths) if known else None
    return _LockStep(loader, name, policy, agree, end)


_WAYS = (
    "Give every rank as many batches (`DistributedSampler`, `drop_last=True`, as many shards for each), or say what is "
    "to be done: ZeroStrategy(loaders=LoaderPolicy(training='join')), where who has none takes part without one, or "
    "'stop', where all end with the first."
)


class _LockStep:
    """A loader that ends on all ranks together. In everything else it is the loader that it wraps."""

    def __init__(self, loader: Any, name: str, policy: Policy, agree: Agree, length: int | None) -> None:
        vars(self).update(_loader=loader, _name=name, _policy=policy, _agree=agree, _length=length)

    def __iter__(self) -> Iterator[Any]:
        batches, has, count = iter(self._loader), True, 0
        while True:
            batch: Any = NoBatch()
            if has:
                try:
                    batch = next(batches)
                except StopIteration:
                    has = False
            rows = self._agree(f"the next batch of the {self._name}", [int(has), count])
            out = [rank for rank, row in enumerate(rows) if not row[0]]
            if len(out) == len(rows) or (out and self._policy == "stop"):
                return
            if out and self._policy == "error":
                left = [rank for rank in range(len(rows)) if rank not in out]
                ended = ", ".join(f"rank {rank} after {rows[rank][1]} batches" for rank in out[:4])
                raise DivergenceError(
                    f"The {self._name} has ended on {ended}, and has one more on rank {some(left)}. {_WAYS}"
                )
            count += has
            yield batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"The {self._name} has no length on some ranks.")
        return int(self._length)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For who asks what kind of a loader it is."""
        return type(self._loader)
