"""``lightning-zero tune``: the fastest settings of a run on this machine, by short runs of it.

Imported without torch, for the command's help; the runs are processes of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lightning_zero.errors import readable_size, table
from lightning_zero.extensions.tune.children import WARM_UP, Children
from lightning_zero.extensions.tune.edits import Place, batch_keys, configured, edited, lookup, settings_of
from lightning_zero.extensions.tune.search import MOST_RUNS, Row, Search, Settings

__all__ = ["run"]

_WHAT = f"""\
Find the settings with which a run of yours is fastest on this machine, by at most {MOST_RUNS} short runs of it, and
write a configuration with them.

First the run as it is, then the stages, then of the best: micro-batches (the global batch stays as large), buckets or
prefetch, offload if nothing fits without it, activation checkpointing if memory is short. What cannot fit by its plan
is not run. Of rates within 2 % the run that needs less memory is better.

COMMAND is what you start the run with, without the configuration. Runs read and write no checkpoint, validate nothing,
and log to a folder that is removed. OUT differs from FILE in trainer.strategy, trainer.accumulate_grad_batches and the
batch size only, and keeps comments.
"""
_EXAMPLES = """\
examples:
  lightning-zero tune --config run.yaml                 for `lightning-zero fit --config run.yaml`
  lightning-zero tune --config run.yaml -- python train.py fit
  lightning-zero tune --config run.yaml -- torchrun --nproc-per-node 8 train.py fit --model.layers 12
"""


def parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero tune``."""
    made = argparse.ArgumentParser(
        prog="lightning-zero tune",
        usage="lightning-zero tune --config FILE [options] [-- COMMAND ...]",
        description=_WHAT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    what = "the configuration of the run (LightningCLI, YAML), in one file"
    add("--config", metavar="FILE", required=True, action="append", help=what)
    add("--output", metavar="OUT", default="tuned.yaml", help="the configuration to write (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace OUT; never FILE")
    add("--plot", metavar="PICTURE", help="draw the runs to a .png or .svg. Needs matplotlib")
    size = "where the batch size stands (default: the only batch_size in the section data)"
    add("--batch-size-key", metavar="KEY", help=size)
    add("--offload", action="store_true", help="try offload to the host even if all fits without")
    add("--runs", metavar="N", type=int, default=MOST_RUNS, help=f"most runs, 1 to {MOST_RUNS} (default: %(default)s)")
    steps = f"optimizer steps that are measured, after {WARM_UP} others; the median counts (default: %(default)s)"
    add("--steps", metavar="N", type=int, default=10, help=steps)
    late = "end a run after so long: it has failed (default: %(default)g)"
    add("--timeout", metavar="SECONDS", type=float, default=600.0, help=late)
    return made


def run(args: Sequence[str]) -> int:
    """Run ``lightning-zero tune``: 0; 1 if nothing could be measured or written; 130 if it is interrupted. Raises
    SystemExit for ``--help``, and with 2 for wrong options."""
    program, at = parser(), [*args, "--"].index("--")
    options = program.parse_args(args[:at])
    command = list(args[at + 1 :]) or [sys.executable, "-m", "lightning_zero", "fit"]
    try:
        with _interrupted_once():
            return _Tuning(options, command).run()
    except ValueError as error:
        program.error(str(error))
    except (OSError, ImportError) as error:
        print(f"{program.prog}: error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print(f"\n{program.prog}: interrupted, nothing is written.", file=sys.stderr)  # noqa: T201
        return 128 + signal.SIGINT


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """SIGTERM is what Ctrl-C is, and another one does not interrupt the end of what runs."""
    kinds = (signal.SIGINT, signal.SIGTERM)

    def interrupt(*_: Any) -> None:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


class _Tuning:
    """One search, of a command. ValueError for what is wrong with options, configuration and command."""

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        if len(options.config) > 1:
            raise ValueError("--config is one file: write all of them as one, with `fit --config ... --print_config`.")
        (options.config,) = options.config
        self.options, self.output, file = options, Path(options.output), Path(options.config)
        if not 1 <= options.runs <= MOST_RUNS or options.steps < 1 or options.timeout <= 0:
            raise ValueError(f"--runs is 1 to {MOST_RUNS}, --steps 1 or more, and --timeout more than 0.")
        self.text = file.read_text(encoding="utf-8")
        if self.output.exists() and (not options.overwrite or self.output.samefile(file)):
            raise ValueError(f"{self.output} exists: give another --output, or --overwrite if it is not the --config.")
        if not self.output.absolute().parent.is_dir():
            raise ValueError(f"{self.output.absolute().parent}, for --output, is no folder.")
        try:
            self.config = yaml.safe_load(self.text)
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is no YAML: {error}") from error
        trainer = lookup(self.config, ("trainer",))
        if not isinstance(trainer, dict):
            raise ValueError(f"{file} has no section 'trainer' at its top: give the configuration of a run.")
        if (trainer.get("num_nodes") or 1) != 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("runs are started on this machine alone: tune with one node, and torchrun after `--`.")
        self.notes: list[str] = []
        self.batch_key = self._batch_key()
        self.given = settings_of(self.config, self.batch_key)
        self.command = self._split(command)
        self.figure: Any = self._matplotlib() if options.plot else None

    def _batch_key(self) -> Place | None:
        if asked := self.options.batch_size_key:
            found = [tuple(asked.split("."))]
            if not isinstance(lookup(self.config, found[0]), int):
                raise ValueError(f"--batch-size-key {asked} is no whole number in {self.options.config}.")
        elif len(found := list(batch_keys(lookup(self.config, ("data",))))) != 1:
            there = " and ".join(".".join(place) for place in found) or "no batch_size"
            self.notes.append(f"Micro-batches were not tried: data has {there}. Name one with --batch-size-key.")
            return None
        return found[0]

    def _split(self, command: list[str]) -> tuple[list[str], list[str]]:
        """The command up to its options, and these."""
        ends = [at for at, word in enumerate(command, 1) if word == "fit"]
        ends += [at for at, word in enumerate(command, 1) if word.endswith(".py")]
        at = (ends or [len(command)])[0]
        tuned = ["config", "c", "trainer.strategy", "trainer.accumulate_grad_batches", ".".join(self.batch_key or "-")]
        for word in command[at:]:
            option = word.lstrip("-").partition("=")[0]
            if word.startswith("-") and any(f"{option}.".startswith(f"{name}.") for name in tuned):
                raise ValueError(f"{word} of the command would override what is tried: put it into the --config.")
        return command[:at], command[at:]

    def run(self) -> int:
        """Search, print, write."""
        from tqdm import tqdm

        options = self.options
        with (
            TemporaryDirectory(prefix="lightning-zero-tune-") as folder,
            tqdm(total=options.runs, desc="tune", unit="run", leave=False, disable=None) as bar,
        ):
            children = Children(
                Path(folder), Path(options.config).parent, *self.command, self.config, options.steps, options.timeout
            )

            def one(settings: Settings) -> Row:
                bar.set_postfix_str(settings.beside(self.given) or "as given")
                row = children.run(settings, self._text(settings)[0])
                bar.update()
                return row

            search = Search(self.given, one, options.runs, options.offload)
            search.all()
        print("\n".join(self._report(search)))  # noqa: T201
        if (best := search.best) is None:
            last = ["The first one printed at last:", "", *children.logs[0].splitlines()[-20:]]
            print("\nNo run could be measured.", *last, sep="\n", file=sys.stderr)  # noqa: T201
            return 1
        if self.figure is not None:
            self._draw(search)
        text, alike = self._text(best.settings)
        self.output.write_text(text, encoding="utf-8")
        told = "" if alike else ", without comments"
        print(f"\nBest: {self._name(best, search)}. Written to {self.output}{told}.")  # noqa: T201
        return 0

    def _text(self, settings: Settings) -> tuple[str, bool]:
        if settings == self.given:
            return self.text, True
        return edited(self.text, configured(self.config, self.given, settings, self.batch_key))

    def _name(self, row: Row, search: Search) -> str:
        if row is not search.rows[0]:
            return row.settings.beside(search.given)
        return "as given" if row.settings.stage is None else f"as given ({row.settings.strategy})"

    def _report(self, search: Search) -> list[str]:
        """The table, why rows have no numbers, and what was not tried."""
        first, notes = search.rows[0], list[str]()
        rows: list[Sequence[str]] = [("run", _unit(search), "step", "peak", "to given")]
        for row in search.rows:
            name, numbers = self._name(row, search), ["failed" if row.started else "not run", "-", "-", "-"]
            if row.rate:
                times = f"{first.seconds / row.seconds:.2f}" if first.rate else "-"
                numbers = [f"{row.rate:,.1f}", f"{1000 * row.seconds:,.1f} ms", readable_size(row.peak), times]
            else:
                notes.append(f"{name}: {row.failure}")
            rows.append((name, *numbers))
        notes += self.notes
        notes += [f"Not tried, for want of runs: {'; '.join(search.untried)}."] if search.untried else []
        return [*table(rows), *([""] if notes else []), *notes]

    def _matplotlib(self) -> Any:
        if Path(self.options.plot).suffix not in (".png", ".svg"):
            raise ValueError(f"--plot: {self.options.plot} has to end in .png or .svg.")
        try:
            return import_module("matplotlib.figure").Figure
        except ImportError as error:
            raise ImportError(f"--plot needs matplotlib ({error}): pip install 'lightning-zero[plot]'.") from error

    def _draw(self, search: Search) -> None:
        """A bar for each run, and its memory beside it."""
        rows, path = search.rows, self.options.plot
        axes = (figure := self.figure((9, 1.5 + 0.4 * len(rows)), layout="constrained")).subplots()
        names = [self._name(row, search) for row in rows]
        colors = ["tab:green" if row is search.best else "tab:blue" for row in rows]
        axes.barh(names, [row.rate for row in rows], color=colors, height=0.7)
        for name, row in zip(names, rows, strict=True):
            said = f"peak {readable_size(row.peak)}" if row.rate else "failed" if row.started else "not run"
            axes.annotate(said, (row.rate, name), (4, 0), textcoords="offset points", va="center")
        axes.set(title=f"Runs of {self.options.config}", xlabel=_unit(search))
        axes.margins(x=0.2)
        axes.invert_yaxis()
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith("svg") else None)


def _unit(search: Search) -> str:
    return "samples/s" if all(row.samples for row in search.rows if row.rate) else "steps/s"
