"""The command line: ``lightning-zero`` (= ``python -m lightning_zero``).

Help imports no torch, and what is done with checkpoints no Lightning: that takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_zero.config import parse_size
from lightning_zero.errors import CheckpointError, ExtensionError, with_notes
from lightning_zero.registry import extension

__all__ = ["answer_early", "complain", "for_the_terminal", "main", "short_help"]

_COMMANDS = {
    "plan": "print how a model would be sharded over ranks, and the memory that takes; allocates nothing",
    "inspect": "print what is inside a checkpoint and verify its files",
    "consolidate": "write a checkpoint as one ordinary file, or as safetensors",
    "tune": "find the fastest settings of a run on this machine, by short runs of it",
    "doctor": "check what of this machine, or of the ranks of a job, will hurt a training, and say what to do",
    "fit": "train",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "predictions for the predict data",
}
_OF_EXTENSIONS = {"plan": "planner", "doctor": "doctor", "inspect": "inspection", "tune": "tune"}
_TOOLS = {"consolidate", *_OF_EXTENSIONS}
_HELP = ["-h"], ["--help"]
# Beginnings of options of earlier versions, and what to do now.
_GONE = {
    "consolidate --overwrite": "write to another name, or delete what is there before",
    "fit --help-all": "--print_config lists every option",
    "inspect --json": "in Python, `verify_checkpoint` and `load_full_state_dict` say what is there",
    "plan --link": "divide what leaves a node, or what a rank sends, by the speed of your links",
    "plan --lora": "give --model a module that adds its adapters, as for training",
    "plan --plot": "draw what --json prints",
}
_RUN_OPTIONS = {
    "config FILE": "A configuration file. Options after it override it.",
    "model CLASS": "The LightningModule, as my_module.MyModel. --model.NAME gives it an argument.",
    "data CLASS": "The LightningDataModule, if the model has no data. --data.NAME gives it an argument.",
    "optimizer CLASS": "The optimizer, and --lr_scheduler its schedule, if the model configures none.",
    "trainer.strategy NAME": "zero (chooses), zero1, zero2, zero3 (default), zero1_offload, ..., or one of Lightning.",
    "trainer.strategy.NAME": "An argument of the strategy. --trainer.strategy.help zero3 lists them.",
    "trainer.NAME": "An argument of the Trainer, such as devices, precision, max_epochs.",
    "ckpt_path PATH": "The checkpoint to resume from or to evaluate: a directory or a file.",
    "print_config": "Print the configuration, with every option and its default, and exit.",
}


def _run_tool(command: str, args: Sequence[str]) -> None:
    """Run a command that trains nothing. SystemExit if it fails."""
    run = consolidate if command == "consolidate" else extension(_OF_EXTENSIONS[command]).run
    try:
        code: int = run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has: nothing more can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
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
        _run_tool(command, given[1:])
        return
    from lightning_zero.trainer.cli import ZeroCLI  # imports Lightning

    ZeroCLI(args=None if args is None else given, parser_kwargs={"prog": "lightning-zero"})


def consolidate(args: Sequence[str]) -> int:
    """Run ``lightning-zero consolidate``; the exit code is 1 if the source is damaged or the output not written.

    Raises SystemExit for ``--help``, or with 2 for wrong options.
    """
    parser = _consolidate_parser()
    options = parser.parse_args(args)  # ends here with --help, before what takes seconds to import
    from lightning_zero.checkpoint.consolidated import consolidate_checkpoint

    with for_the_terminal(parser.prog):
        try:
            written = consolidate_checkpoint(**vars(options))
        except ValueError as error:
            parser.error(str(error))
        except CheckpointError as error:
            complain(parser.prog, error)
            return 1
    print(*written, sep="\n")  # noqa: T201
    return 0


def answer_early() -> None:
    """Run the command that this process was started for and exit, if that needs no Lightning; else do nothing.

    For the package to call before it imports anything heavy. What is not ``lightning-zero`` is let be.
    """
    argv = getattr(sys, "argv", None) or [""]
    program = sys.orig_argv[-len(argv)] if argv[0] == "-m" else Path(argv[0]).name
    if program in (("lightning_zero",) if argv[0] == "-m" else ("lightning-zero", "lightning-zero.exe")):
        try:
            command = _command(argv[1:])
            if command in _TOOLS and (command != "plan" or argv[2:] in _HELP):
                _run_tool(command, argv[2:])
                raise SystemExit(0)
        except ExtensionError as error:
            raise SystemExit(f"lightning-zero: error: {error}") from None


def _command(given: Sequence[str]) -> str:
    """The command that is asked for. Raises SystemExit after its help, and for one that does not exist."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description="ZeRO for PyTorch Lightning. `lightning-zero COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<13}{text}" for name, text in _COMMANDS.items()),
    )
    parser.add_argument("command", metavar="COMMAND", choices=_COMMANDS, help="one of these:")
    parser.add_argument("--version", action="version", version=f"lightning-zero {sys.modules[__package__].__version__}")
    command: str = parser.parse_args(given[:1]).command
    for option in given[1:]:
        for gone, now in _GONE.items():
            if f"{command} {option}".startswith(gone):
                parser.error(f"{option.partition('=')[0]} does not exist any more: {now}.")
    if command not in _TOOLS and list(given[1:]) in _HELP:
        print(short_help(command, f"{_COMMANDS[command]}.", {}), end="")  # noqa: T201
        raise SystemExit(0)
    return command


# ------------------------------------------------------------------------------------------ what tools say and are told


def short_help(command: str, what: str, options: Mapping[str, str]) -> str:
    """The help of a command that takes the Trainer's options, which are hundreds, beside its own."""
    own = {name.replace("_", "-"): text for name, text in options.items()}
    lines = "\n".join(f"  --{name:<23}{text}" for name, text in {**own, **_RUN_OPTIONS}.items())
    return f"usage: lightning-zero {command} [options]\n\n{what.strip()}\n\noptions:\n{lines}\n"


@contextmanager
def for_the_terminal(program: str) -> Iterator[None]:
    """Warnings are for the person at the terminal: one line each, without the place in the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)

        def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
            if issubclass(category, UserWarning):
                print(f"{program}: warning: {message}", file=sys.stderr)  # noqa: T201

        warnings.showwarning = show
        yield


def complain(program: str, error: CheckpointError) -> None:
    """Say what is wrong. One process is one rank, which needs no telling which of them failed."""
    reason = error.__cause__ if isinstance(error.__cause__, CheckpointError) else error
    print(f"{program}: error: {with_notes(reason)}", file=sys.stderr)  # noqa: T201


_CONSOLIDATE = """\
Write a checkpoint of any kind as ordinary files, with the memory of one process and never of a model.

SOURCE is a sharded directory (of this package, Lightning's strategies, torch.distributed.checkpoint, or DeepSpeed's
ZeRO stages 1 to 3), a .ckpt file, or safetensors. OUT decides what is written:

  OUT.ckpt          one file as Trainer.save_checkpoint writes it on one device: for load_from_checkpoint, and for
                    Trainer.fit(ckpt_path=...) without this package (also .pt, .pth, .bin)
  OUT.safetensors   one file of weights
  OUT               a directory of safetensors files as Hugging Face has it, with an index if there are several
"""
_EXAMPLES = """\
examples:
  lightning-zero consolidate runs/last.ckpt full.ckpt
  lightning-zero consolidate runs/last.ckpt my-model/ --dtype bfloat16 --max-shard-size 2GB --prefix model.
"""


def _consolidate_parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero consolidate``."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero consolidate",
        description=_CONSOLIDATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the checkpoint to read: directory, file or URL")
    add("out", metavar="OUT", help="the file or directory to write")
    what = "what to write, where the name of OUT does not say it"
    add("--format", metavar="{ckpt,safetensors}", help=what)
    add("--dtype", metavar="DTYPE", help="cast floating-point weights, for example to bfloat16 (bf16)")
    size = "of a file in a directory of safetensors, for example 500M or 2GiB (default: %(default)s)"
    add("--max-shard-size", "--max_shard_size", type=_size, default="5GB", metavar="SIZE", help=size)
    state = "leave the state of optimizers, schedulers and callbacks out of a .ckpt; safetensors never hold it"
    add("--weights-only", "--weights_only", action="store_true", help=state)
    add("--prefix", metavar="PREFIX", help="cut the name of this module off the weights' names: model, or model.")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
