"""The command line: ``lightning-zero`` (= ``python -m lightning_zero``).

Help imports no torch, and what is done with checkpoints and plans no Lightning: that takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning_zero.trainer.cli_texts import PLAN, consolidate_parser, did_you_mean, inspect_parser, short_help

__all__ = ["answer_early", "main"]

_COMMANDS = {
    "plan": "print how a model would be split over processes, and what that takes; needs one process and no memory",
    "inspect": "print what is inside a checkpoint and verify its files",
    "consolidate": "write a checkpoint as one ordinary file, or as safetensors",
    "fit": "train",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "predictions for the predict data",
}


@contextmanager
def _while_somebody_reads() -> Iterator[None]:
    """Print all that a block has to say. SystemExit with 1 if the reader has seen enough, as ``head`` has."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # nothing more can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _run_tool(name: str, tool: Callable[[Sequence[str]], int], args: Sequence[str]) -> None:
    try:
        with _while_somebody_reads():
            code = tool(args)
    except KeyboardInterrupt:
        print(f"lightning-zero {name}: interrupted", file=sys.stderr)  # noqa: T201
        code = 130  # as shells have it
    if code:
        raise SystemExit(code)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-zero``.

    Args:
        args: The command line without the program's name; the process's own if not given.

    Raises:
        SystemExit: for wrong options, and with 1 if a command found something wrong.
    """
    given = sys.argv[1:] if args is None else list(args)
    command = _command(given)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `--model my_module.MyModel`, as with `python -m lightning_zero`
    if command in _TOOLS:
        _run_tool(command, _TOOLS[command], given[1:])
        return
    from lightning_zero.trainer.cli import ZeroCLI  # imports Lightning

    ZeroCLI(args=None if args is None else given, parser_kwargs={"prog": "lightning-zero"})


def inspect(args: Sequence[str]) -> int:
    """Run ``lightning-zero inspect``."""
    from lightning_zero.trainer import checkpoint_cli

    return checkpoint_cli.inspect(args)


def consolidate(args: Sequence[str]) -> int:
    """Run ``lightning-zero consolidate``."""
    from lightning_zero.trainer import checkpoint_cli

    return checkpoint_cli.consolidate(args)


def plan(args: Sequence[str], *, early: bool = False) -> int:
    """Print what ``lightning-zero plan`` has to say: 0. 2 if the settings are wrong, 1 if something else fails.

    Raises _NeedsLightning if that is needed and it is too ``early``: the package has not been imported.
    """
    from lightning_zero.trainer.planner import planner_without_lightning

    try:
        if planner := planner_without_lightning(args):
            text = planner.report()
        elif early:
            raise _NeedsLightning
        else:
            from lightning_zero.trainer.cli import plan_command

            text = plan_command(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"lightning-zero plan: error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ValueError) else 1
    print(text)  # noqa: T201
    return 0


class _NeedsLightning(Exception):
    """A command cannot run before Lightning is imported."""


_TOOLS: Mapping[str, Callable[[Sequence[str]], int]] = {"inspect": inspect, "consolidate": consolidate, "plan": plan}


def answer_early() -> None:
    """Run the command that this process was started for and exit, if that needs no Lightning; else do nothing.

    For the package to call before it imports anything heavy. What is not ``lightning-zero`` is let be.
    """
    argv = getattr(sys, "argv", None) or [""]
    program = sys.orig_argv[-len(argv)] if argv[0] == "-m" else Path(argv[0]).name
    if program in (("lightning_zero",) if argv[0] == "-m" else ("lightning-zero", "lightning-zero.exe")):
        with _while_somebody_reads():
            command = _command(argv[1:])
        if command in _TOOLS:
            with suppress(_NeedsLightning):
                _run_tool(command, partial(plan, early=True) if command == "plan" else _TOOLS[command], argv[2:])
                raise SystemExit(0)


def _command(given: Sequence[str]) -> str:
    """The command that is asked for. Raises SystemExit after its help, and for one that does not exist."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description="ZeRO for PyTorch Lightning. `lightning-zero COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<13}{text}" for name, text in _COMMANDS.items()),
    )
    names = ", ".join(_COMMANDS)
    parser.add_argument("command", metavar="COMMAND", help=f"one of {names}")
    parser.add_argument("--version", action="version", version=f"lightning-zero {sys.modules[__package__].__version__}")
    command: str = parser.parse_args(given[:1]).command
    if command not in _COMMANDS:
        parser.error(f"there is no command {command!r}.{did_you_mean(command.lower(), _COMMANDS)} There are {names}.")
    if list(given[1:]) in (["-h"], ["--help"]):
        tools = {"inspect": inspect_parser, "consolidate": consolidate_parser}
        text = PLAN if command == "plan" else f"{_COMMANDS[command]}."
        print(tools[command]().format_help() if command in tools else short_help(command, text), end="")  # noqa: T201
        raise SystemExit(0)
    return command
