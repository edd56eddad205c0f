"""The command line: ``lightning-zero`` (= ``python -m lightning_zero``). Its help imports no torch: that takes long."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_zero.trainer.cli_texts import PLAN, consolidate_parser, did_you_mean, inspect_parser, short_help

__all__ = ["answer_for_help", "main"]

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


def _run_tool(tool: Callable[[Sequence[str]], int], args: Sequence[str]) -> None:
    try:
        with _while_somebody_reads():
            code = tool(args)
    except KeyboardInterrupt:
        print(f"lightning-zero {tool.__name__}: interrupted", file=sys.stderr)  # noqa: T201
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
    # What follows imports torch and Lightning.
    from lightning_zero.trainer import checkpoint_cli
    from lightning_zero.trainer.cli import ZeroCLI

    if command in ("inspect", "consolidate"):
        _run_tool(getattr(checkpoint_cli, command), given[1:])
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `--model my_module.MyModel`, as with `python -m lightning_zero`
    if command != "plan":
        ZeroCLI(args=None if args is None else given, parser_kwargs={"prog": "lightning-zero"})
        return
    _run_tool(plan, given[1:])


def plan(args: Sequence[str]) -> int:
    """Print what ``lightning-zero plan`` has to say; 0."""
    from lightning_zero.trainer.cli import plan_command

    print(plan_command(args))  # noqa: T201
    return 0


def answer_for_help() -> None:
    """Print the help that this process was started for, or that there is no such command, and exit; else do nothing.

    For the package to call before it imports anything heavy. What is not ``lightning-zero`` is let be.
    """
    argv = getattr(sys, "argv", None) or [""]
    program = sys.orig_argv[-len(argv)] if argv[0] == "-m" else Path(argv[0]).name
    if program in (("lightning_zero",) if argv[0] == "-m" else ("lightning-zero", "lightning-zero.exe")):
        with _while_somebody_reads():
            _command(argv[1:])


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
