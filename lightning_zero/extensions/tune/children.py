"""Candidates as short runs of the user's program: started, and ended with all that they have started."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lightning_zero.extensions.tune.search import Row, Settings

__all__ = ["WARM_UP", "Children"]

WARM_UP = 2
"""Steps before those that are measured: the first ones make buffers and the optimizer's state."""
_MARK = "LIGHTNING_ZERO_TUNE"
_GRACE = 5.0  # seconds from a polite signal to the other
_ERROR = re.compile(r"(?:\[rank\d+\]:? *)?((?:[\w.]+(?:Error|Exception)|\S+: error)\b.*)")
_OF_MEMORY = re.compile(r"MemoryError|out of memory|cannot allocate memory|SIGKILL|signal 9\b", re.IGNORECASE)
_SHORT: dict[str, Any] = {
    "max_steps": 1_000_000,  # schedules ask for them; what measures ends the run
    "max_epochs": -1,
    "max_time": None,
    "fast_dev_run": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
}


class Children:
    """Runs a program with one configuration after the other; ``logs`` are what it printed.

    Args:
        folder: for all that a run writes.
        beside: where candidates are, as paths in a configuration may start from its folder.
        before, after: the command, with options of the user's in ``after``, which override a configuration.
        config: what was given.
        steps: to measure.
        timeout: of a run, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        beside: Path,
        before: Sequence[str],
        after: Sequence[str],
        config: Any,
        steps: int,
        timeout: float,
    ) -> None:
        self._folder, self._beside, self._before, self._after = folder, beside, before, after
        self._config, self._steps, self._timeout = config, steps, timeout
        self.logs: list[str] = []

    def run(self, settings: Settings, text: str) -> Row:
        """Run with a configuration of this text. OSError if the program cannot be started."""
        folder, mark, failure = self._folder / str(len(self.logs)), secrets.token_hex(8), ""
        folder.mkdir()
        candidate, short, log = self._beside / f".tune-{mark}.yaml", folder / "short.yaml", folder / "log"
        short.write_text(yaml.safe_dump(self._short(folder)), encoding="utf-8")
        command = [*self._before, f"--config={candidate}", *self._after, f"--config={short}"]
        with log.open("wb") as file:
            output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            try:
                candidate.write_text(text, encoding="utf-8")
                child = subprocess.Popen(command, env={**os.environ, _MARK: mark}, start_new_session=True, **output)
                try:
                    child.wait(self._timeout)
                except subprocess.TimeoutExpired:
                    failure = f"no end after {self._timeout:g} s"
                finally:
                    _end(child, mark)
            finally:
                candidate.unlink(missing_ok=True)
        self.logs.append(log.read_text(encoding="utf-8", errors="replace"))
        facts, first = _read(folder / "facts.json"), _read(folder / "0.json")
        ranks = [_read(folder / f"{rank}.json") for rank in range(first.get("ranks", 0))]
        if ranks and all(ranks):
            seconds, peak = (max(one[name] for one in ranks) for name in ("seconds", "peak"))
            return Row(settings, seconds, first["samples"], peak, facts)
        killed = child.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) and not failure
        said = "it was killed, as where memory runs out" if killed else _reason(self.logs[-1])
        of_memory = killed or bool(_OF_MEMORY.search(said))
        own = not failure and not of_memory
        failure = failure or f"ended with exit code {child.returncode}: {said}"
        return Row(settings, facts=facts, failure=failure, of_memory=of_memory, own=own)

    def _short(self, folder: Path) -> dict[str, Any]:
        """What makes a run short, and keeps it from writing where it would write. Stands last in the command."""
        callbacks = self._config["trainer"].get("callbacks") or []
        arguments = {"folder": str(folder), "warm_up": WARM_UP, "steps": self._steps}
        ours = {"class_path": "lightning_zero.extensions.tune.measurement.Measurement", "init_args": arguments}
        # Some callbacks need a logger.
        logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}}
        settings = {**_SHORT, "logger": logger, "default_root_dir": str(folder)}
        settings["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), ours]
        resumes = any("ckpt_path" in str(word) for word in (*self._config, *self._after))
        return {"trainer": settings, **({"ckpt_path": None} if resumes else {})}


def _read(file: Path) -> Mapping[str, Any]:
    """What the callback wrote; nothing if it did not come so far."""
    with suppress(FileNotFoundError):
        found: Mapping[str, Any] = json.loads(file.read_text())
        return found
    return {}


def _reason(log: str) -> str:
    """Why a program failed: of ranks the one that failed first knows, others that it has gone."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [matched[1] for line in lines if (matched := _ERROR.match(line))]
    first = [text for text in errors if "CommunicationError" not in text]
    return (first or errors or lines[-1:] or ["it printed nothing"])[0][:300]


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """End a program with all that it has started, in other sessions too, as torchrun starts ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline, told = time.monotonic() + _GRACE, set[int]()
        while (running := _running(child, mark)) and time.monotonic() < deadline:
            for pid in running - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
            told |= running
            time.sleep(0.05)
    child.wait()


def _running(child: subprocess.Popen[bytes], mark: str) -> set[int]:
    """The program, and on Linux what else has its mark."""
    found, marked = {child.pid} if child.poll() is None else set(), f"{_MARK}={mark}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone
            if marked in file.read_bytes():
                found.add(int(file.parent.name))
    return found
