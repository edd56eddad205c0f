"""What it costs to check a checkpoint while it is loaded, in one process, and print a table.

    python benchmarks/verification.py                # 600 MB
    python benchmarks/verification.py --mb 50 --repeat 1

A checkpoint of equal tensors is saved once, and then loaded into memory that is there, without a check, with the sample
that a resume takes, with everything checked before, and with everything checked meanwhile, by threads that read and
check one piece of a file while others are read (``zlib.crc32`` lets other threads run). Each is the best of
``--repeat`` rounds in which the ways take turns. "Cold" is after the kernel was asked to forget the files.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint import FlatShard, open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.load import Directory
from lightning_zero.checkpoint.storage.files import open_folder, read_bytes
from lightning_zero.comm import ControlGroup

ALONE = ControlGroup(None)
TENSORS = 120
PIECE = 1 << 20


def save(path: Path, nbytes: int) -> None:
    """Weights and two moments, of which each tensor has the same size."""
    numel = max(1, nbytes // TENSORS // 4)
    state = {f"w{number}": FlatShard(torch.rand(numel), (numel,), 0) for number in range(TENSORS)}
    save_checkpoint_directory({"state_dict": state}, path, ALONE, plan_summary={})


class Loads:
    """Loading one checkpoint in several ways."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: dict[str, Tensor] = {}

    def unchecked(self) -> None:
        """Read every tensor."""
        self._read(verify=False)

    def sample(self) -> None:
        """As a run that resumes does."""
        self._read(verify="sample")

    def before(self) -> None:
        """As with ``CheckpointPolicy(verify=True)``."""
        self._read(verify=True)

    def meanwhile(self) -> None:
        """Every tensor is read, and beside it everything by a thread for each processor."""
        record = Directory(open_folder(self._path)).record
        chunks = [(chunk, item.dtype.itemsize) for item in record.items.values() for chunk in item.chunks]
        folders = [open_folder(self._path) for _ in range(os.cpu_count() or 1)]  # each reads one piece at a time

        def check(number: int) -> None:
            for chunk, itemsize in chunks[number :: len(folders)]:
                crc32 = 0
                for begin in range(0, chunk.numel * itemsize, PIECE):
                    nbytes = min(PIECE, chunk.numel * itemsize - begin)
                    crc32 = zlib.crc32(read_bytes(folders[number], chunk.file, chunk.offset + begin, nbytes), crc32)
                if crc32 != chunk.crc32:
                    raise RuntimeError("damaged")

        with ThreadPoolExecutor(len(folders)) as threads:
            running = [threads.submit(check, number) for number in range(len(folders))]
            self._read(verify=False)
            for each in running:
                each.result()

    def _read(self, verify: object) -> None:
        for name, value in open_checkpoint(self._path, ALONE, verify=verify)["state_dict"].items():  # type: ignore[arg-type]
            memory = self._memory.setdefault(name, torch.zeros(value.numel()))
            value.read_into(memory, 0)

    def forget(self) -> None:
        """Ask the kernel to drop the files from its cache."""
        for file in self._path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measured(
    loads: Loads, ways: dict[str, Callable[[], None]], cold: bool, repeat: int
) -> dict[str, tuple[float, float]]:
    """Seconds, and seconds of processors, by way."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(repeat):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # whoever comes first pays most
            if cold:
                loads.forget()
            cpu, wall = time.process_time(), time.perf_counter()
            ways[name]()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: (min(wall for wall, _ in each), min(cpu for _, cpu in each)) for name, each in found.items()}


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=600, help="megabytes of the checkpoint (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=8, help="rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, {options.mb} MB\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "checkpoint"
        save(path, options.mb * 1_000_000)
        loads = Loads(path)
        ways = {
            "no check": loads.unchecked,
            "a sample": loads.sample,
            "all, before": loads.before,
            "all, meanwhile": loads.meanwhile,
        }
        loads.unchecked()  # memory that was never touched costs more
        for cold in (False, True):
            results = measured(loads, ways, cold, options.repeat)
            wall, cpu = results["no check"]
            print("cold" if cold else "warm")
            for name, (seconds, processors) in results.items():
                more = f"{100 * (seconds / wall - 1):+6.0f} % {100 * (processors / cpu - 1):+6.0f} %"
                print(f"  {name:15} {seconds:7.3f} s {processors:7.3f} s of processors {more}")


if __name__ == "__main__":
    main()
