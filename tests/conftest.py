"""One thread per process, imports paid once, no network interface but loopback, nothing left behind by a test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: worlds are forked from this process, and an OpenMP team does not survive a fork.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Neither a test nor what it starts inherits what the parent of pytest ignored or blocked (a shell's `&` does so with
# SIGINT, and a service with more). SIGHUP stays as `nohup` left it, for the whole of the run.
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGINT, signal.default_int_handler)
for _signal in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_signal, signal.SIG_DFL)

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)  # `from tests.helpers.world import run_world`, however pytest was started

import lightning.pytorch  # noqa: E402, F401  (imported here once, inherited by every forked rank)
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

import lightning_zero  # noqa: E402, F401

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Fail the test that leaves environment variables or a default process group in the pytest process."""
    before = dict(os.environ)
    yield
    leaked_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if leaked_group:
        torch.distributed.destroy_process_group()
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed -= {"PYTEST_CURRENT_TEST"}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not leaked_group, "the test left a default process group behind"
    assert not changed, f"the test left changed environment variables behind: {sorted(changed)}"
