"""Where an engine's shards rest, and what moves them: one object for all tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero._torch import untracked
from lightning_zero.comm.streams import Streams
from lightning_zero.config import Tier
from lightning_zero.storage.fetch import Fetcher
from lightning_zero.storage.host import HostMemory
from lightning_zero.storage.transfers import Transfers

if TYPE_CHECKING:
    from lightning_zero.storage.nvme import NvmeStore

__all__ = ["MemoryTiers"]


class MemoryTiers:
    """Memory by tier.

    Args:
        device: where the engine computes.
        streams: its streams.
        pin_nbytes: most host memory to page-lock; ``None``: all.
        store: files, where the plan puts something on disk.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None = None,
        pin_nbytes: int | None = None,
        store: NvmeStore | None = None,
    ) -> None:
        self.device = device
        self.streams = streams = streams or Streams(device)
        self.memory = HostMemory(device, pin_nbytes)
        self.store = store
        self.transfers = Transfers(device, streams, self.memory)
        self.fetcher = Fetcher(device, streams, self.memory)

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Memory for one shard, all zeros.

        Args:
            tier: where it is to rest.
            numel: its elements.
            dtype: theirs.
            what: what it will hold, for messages.

        Returns:
            1-D; a ``FileTensor`` on disk.

        Raises:
            OffloadError: if a disk has no room for it.
        """
        if tier is Tier.DISK:
            if self.store is None:
                raise RuntimeError(f"There are no files for {what}. This is an error in lightning_zero itself.")
            return self.store.allocate(numel, dtype, what)
        if tier is Tier.HOST:
            return self.memory.allocate(numel, dtype)
        with untracked():
            return torch.zeros(numel, dtype=dtype, device=self.device)

    def settle(self) -> None:
        """Wait on the host until nothing reads or writes what rests there any more."""
        self.transfers.settle()
        self.fetcher.settle()

    def abandon(self) -> None:
        """Settle everything under way after an error in the middle of a step."""
        self.transfers.settle()
        self.fetcher.forget()

    def rest(self) -> None:
        """End threads, buffers, page-locking and names of files between runs; what rests, rests on.

        A later use starts threads and takes buffers again.
        """
        self.transfers.close()
        self.fetcher.close()
        self.fetcher.active = False
        if self.store is not None:
            self.store.rest()
        self.memory.unlock()

    def wake(self) -> None:
        """Page-lock again what ``rest`` has unlocked, and fetch ahead: a run begins."""
        self.memory.lock()
        self.fetcher.active = True

    def close(self) -> None:
        """Give everything up. May be called again."""
        self.rest()
        if self.store is not None:
            self.store.close()
        self.memory.release()
