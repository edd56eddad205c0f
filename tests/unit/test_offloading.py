"""What a policy leaves open."""

from __future__ import annotations

import os

import torch

from lightning_zero import HostOffload
from lightning_zero.session.session import step_threads

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_ranks_share_the_cores_and_a_cpu_keeps_what_torch_is_set_to() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert step_threads(HostOffload(), 1, CPU) == 1
        assert step_threads(HostOffload(), 1, CUDA) == cores
        assert step_threads(HostOffload(), 10 * cores, CUDA) == 1
        assert step_threads(HostOffload(threads=3), 10 * cores, CPU) == 3
    finally:
        torch.set_num_threads(before)
