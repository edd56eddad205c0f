"""What many real ranks on one host take: open files, messages to the store, seconds.

python benchmarks/many_ranks.py 16 32 64
python benchmarks/many_ranks.py 2

Each rank is forked from this process and trains a tiny model by ``zero3`` in a Trainer: some 50 MB, and the store, the
groups and the checkpoint are real.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import struct
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from offload_training import free_port, launched, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.comm.groups import sockets

SEGMENTS_OUT = 156  # where ``struct tcp_info`` of Linux counts segments with data that were sent
PARTS = ("set-up", "3 steps", "a save")


def requests(port: int) -> int:
    """Messages that this process has sent to the server of the store, as the system counts them."""
    sent = 0
    for file in sockets():
        # Some only listen, and some are closed by now.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent += struct.unpack_from("I", info, SEGMENTS_OUT)[0]
    return sent


class Tiny(pl.LightningModule):
    """Two layers; notes what a rank has taken when training begins, and at its end.

    Args:
        note: is called then.
    """

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.layers, self.note = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), note

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The user's own optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        """The ranks are connected."""
        self.note()


def train(rank: int, size: int, port: int, folder: str, answers: Any) -> None:
    """One rank: a fit and a save."""
    quiet()
    os.environ.update({**launched(rank, size, port), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    rows: list[tuple[float, ...]] = []
    begin, used, inherited = time.perf_counter(), time.process_time(), len(os.listdir("/proc/self/fd"))

    def note() -> None:
        files = len(os.listdir("/proc/self/fd")) - inherited
        rows.append((files, requests(port), time.process_time() - used, time.perf_counter() - begin))

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ZeroStrategy(3)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=size, max_steps=3, enable_model_summary=False, **options
    )
    trainer.fit(Tiny(note), DataLoader(torch.randn(12 * size, 64), 4))
    note()
    trainer.save_checkpoint(Path(folder) / "last.ckpt")
    note()
    answers.put((rank, rows))


def measured(size: int, timeout: float) -> dict[int, list[tuple[float, ...]]]:
    """What each rank had taken after each part."""
    context, port, found, deadline = mp.get_context("fork"), free_port(), {}, time.monotonic() + timeout
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        start = partial(context.Process, target=train, daemon=True)
        ranks: list[Any] = [start(args=(rank, size, port, folder, answers)) for rank in range(size)]
        try:
            for process in ranks:
                process.start()
            for _ in ranks:
                rank, rows = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                found[rank] = rows
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
    return found


def main() -> None:
    """Measure, and print a line for each part: the most of all ranks but rank 0, and rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+", help="how many, one number after the other")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for each (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is forked must not have started more
    print("ranks  after      open files  store requests   CPU seconds       seconds  (most, and rank 0)")
    for size in options.ranks:
        found = measured(size, options.timeout)
        for place, part in enumerate(PARTS):
            first = found[0][place]
            others = [rows[place] for rank, rows in found.items() if rank > 0] or [first]
            most = [max(column) for column in zip(*others, strict=True)]
            widths = ("5.0f", "8.0f", "5.2f", "5.1f")
            cells = (f"{a:{w}} {b:{w}}" for a, b, w in zip(most, first, widths, strict=True))
            print(f"{size:5}  {part:8}  {'   '.join(cells)}")


if __name__ == "__main__":
    main()
