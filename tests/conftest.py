"""One thread per process, imports paid once, no network interface but loopback, nothing left behind by a test.

What a test takes to run is its folder: ``unit`` this process alone, ``world`` forked ranks, ``script`` programs.
Together they take six minutes with ``pytest -n 2``. ``thorough`` has the rest, see ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib.util
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

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
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector  # noqa: E402

import lightning_zero  # noqa: E402
from lightning_zero.comm.groups import RANKS_PER_HOST  # noqa: E402
from tests.helpers import forking  # noqa: E402

torch.set_num_threads(1)
for _module in pkgutil.walk_packages(lightning_zero.__path__, "lightning_zero."):  # also those that are imported late
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)

# Every Trainer asks what callbacks are installed, which reads the folders of all packages: a twentieth of a short fit.
registry.entry_points = functools.cache(registry.entry_points)
registry._load_external_callbacks("lightning.pytorch.callbacks_factory")

# A Trainer's teardown sets every signal back, and nothing would say any more where a process or a fork of it crashed.
_FATAL = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_SignalConnector._valid_signals = staticmethod(lambda: signal.valid_signals() - _FATAL)

if not torch.accelerator.is_available():
    # Seeding notes a stack of the whole program for each kind of device that is not there: an eighth of a short fit.
    for _kind in (torch.cuda.random, torch.xpu.random, torch.mtia):
        if hasattr(_kind, "_lazy_call"):
            _kind._lazy_call = lambda *args, **kwargs: None  # type: ignore[attr-defined]


_TESTS = Path(__file__).resolve().parent


def _asked_for(config: pytest.Config) -> bool:
    """Whether the command names the thorough tests: with a marker, or with a path among them."""
    return bool(config.option.markexpr) or any("thorough" in argument for argument in config.args)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what only ``-m thorough`` runs."""
    return True if collection_path == _TESTS / "thorough" and not _asked_for(config) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is thorough, leave out what was not asked for, and put tests that measure seconds last."""
    ahead: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        rung = item.path.relative_to(_TESTS).parts[0]
        if (rung == "thorough" or item.get_closest_marker("timing")) and not item.get_closest_marker("chaos"):
            item.add_marker("thorough")
        if item.get_closest_marker("chaos"):
            asked = "chaos" in config.option.markexpr
        else:
            asked = rung == "thorough" or item.get_closest_marker("thorough") is None or bool(config.option.markexpr)
        (ahead if asked else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(ahead, key=lambda item: item.get_closest_marker("timing") is not None)


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
    "tests/world/checkpoint/test_export.py",
    "tests/thorough/checkpoint/test_processes.py",
    "tests/script/examples/test_language_model.py",
    "tests/thorough/races/test_races.py",
    "tests/world/strategy/test_elastic.py",
    "tests/world/strategy/test_portable.py",
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
def _guard_of_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in ``tests/unit`` can neither fork, nor start a program, nor open a process group."""
    if _TESTS / "unit" not in request.path.parents:
        return

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a test in tests/unit starts a process or opens a process group: move it")

    for module, name in (
        (os, "fork"),
        (os, "posix_spawn"),
        (subprocess, "Popen"),
        (torch.distributed, "init_process_group"),
    ):
        monkeypatch.setattr(module, name, refuse, raising=False)


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
