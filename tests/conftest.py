"""One thread per process, imports paid once, no network interface but loopback, nothing left behind by a test.

Every test gets the marker of its rung (``tests/helpers/rungs.py``). Those that measure seconds come last, each alone.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib.util
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: worlds are forked from this process, and an OpenMP team does not survive a fork.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# To ask whether there is a GPU must not begin to use it: no process that did so can be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Neither a test nor what it starts inherits what the parent of pytest ignored or blocked (a shell's `&` does so with
# SIGINT, and a service with more). SIGHUP stays as `nohup` left it, for the whole of the run.
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGINT, signal.default_int_handler)
for _signal in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_signal, signal.SIG_DFL)

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)  # `from tests.helpers.world import run_world`, however pytest was started

_NEEDED = ("torch", "lightning", "torchmetrics", "jsonargparse", "fsspec", "tqdm", "rich", "safetensors", "tensorboard")
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    sys.exit(f"The tests need what is not installed: {', '.join(_missing)}. In a clone: pip install -e '.[dev]'")

import lightning.pytorch  # noqa: E402, F401  (imported here once, inherited by every forked rank)
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook  # noqa: E402  (by DDPStrategy)
from lightning.fabric.utilities import registry  # noqa: E402

import lightning_zero  # noqa: E402
from lightning_zero.comm.groups import RANKS_PER_HOST  # noqa: E402
from tests.helpers import forking, rungs  # noqa: E402

torch.set_num_threads(1)
for _module in pkgutil.walk_packages(lightning_zero.__path__, "lightning_zero."):  # also those that are imported late
    if not _module.name.endswith(("__main__", "compression.kernels")):  # Triton need not be there
        importlib.import_module(_module.name)

# Every Trainer asks what callbacks are installed, which reads the folders of all packages: a twentieth of a short fit.
registry.entry_points = functools.cache(registry.entry_points)
registry._load_external_callbacks("lightning.pytorch.callbacks_factory")

if not torch.accelerator.is_available():
    # Seeding notes a stack of the whole program for each kind of device that is not there: an eighth of a short fit.
    for _kind in (torch.cuda.random, torch.xpu.random, torch.mtia):
        if hasattr(_kind, "_lazy_call"):
            _kind._lazy_call = lambda *args, **kwargs: None  # type: ignore[attr-defined]


# What has failed most often comes first: what every change can break, then ranks that die, wait or differ.
_FIRST = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
    "tests/strategy/test_errors.py",
    "tests/strategy/test_waiting.py",
    "tests/strategy/test_launch.py",
    "tests/strategy/test_leaks.py",
    "tests/strategy/test_meta.py",
    "tests/extensions/planner/",
    "tests/extensions/monitors/",
    "tests/strategy/test_fuzz.py",
    "tests/chaos/",
)


def _place(file: str) -> int:
    """In the order of the run: those above in their order, then what is run together, then all others."""
    first = next((place for place, name in enumerate(_FIRST) if file.startswith(name)), None)
    return first if first is not None else len(_FIRST) + (file not in _TOGETHER)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rung = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        rung[item] = rungs.rung_of(item)
        item.add_marker(rung[item])
    items.sort(key=lambda item: (rung[item] == "timing", _place(item.nodeid.partition("::")[0])))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays: neither this process nor a rank that it forks looks through it for garbage again."""
    if not torch.accelerator.is_available():  # its backward would begin to use it
        forking.fit_once()
    gc.collect()
    gc.freeze()
    if len(session.items) > 500:  # a few forks take less than it does
        forking.use_large_pages()


# What the tests of these files share takes long to make: with `pytest -n`, one worker makes it.
_TOGETHER = (
    "tests/checkpoint/test_export.py",
    "tests/checkpoint/test_processes.py",
    "tests/examples/test_language_model.py",
    "tests/races/test_races.py",
    "tests/strategy/test_elastic.py",
    "tests/strategy/test_offload_limits.py",
    "tests/strategy/test_portable.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Single tests in their order to whoever is free, and the files above whole."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the order is that of the items

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in _TOGETHER else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With ``pytest -n``, a test that measures seconds waits until the other workers rest, and has them wait.

    The gate is held by who waits, so that the others do not begin one test after the other meanwhile.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    with open(folder / "gate", "w") as gate, open(folder / "machine", "w") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if item.get_closest_marker("timing") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def _guard_of_pure(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("pure") is None:
        yield
        return
    with rungs.forbid_processes():
        yield


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


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only ranks of one host do, and tests that play hosts of their own, are so wherever the suite runs."""
    monkeypatch.delenv(RANKS_PER_HOST, raising=False)
