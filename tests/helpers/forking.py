"""What makes forks of this process cheap."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

__all__ = ["fit_once", "use_large_pages"]

_LARGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25  # of Linux 6.1 and newer; others refuse it, and nothing is changed


def use_large_pages() -> None:
    """Put the memory of this process into pages of 2 MiB, where Linux can: a fork copies an entry for each page.

    Takes a second for half a gigabyte, and saves a fork of it three quarters of its time.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, access, _, _, _, *path = line.split()
            if access == "rw-p" and path in ([], ["[heap]"]):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                for page in range(-(-begin // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
                    advise(page, _LARGE_PAGE, _MADV_COLLAPSE)


class _Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(torch.ones(2)).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(torch.ones(2)).sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit_once() -> None:
    """Have this process find out what a first fit does: which classes are of which kind, what versions there are.

    Each fork would find it out for itself, which is a quarter of what a world with a short fit takes.
    """
    logging.disable()  # what Lightning advises
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy=SingleDeviceStrategy(torch.device("cpu")), accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data: Any = DataLoader(range(2))  # type: ignore[arg-type]
        trainer.fit(_Net(), data, data)
    logging.disable(logging.NOTSET)
