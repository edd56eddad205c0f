"""``lightning-zero inspect`` and ``lightning-zero consolidate``: what to do with a checkpoint on disk."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lightning_zero.checkpoint import is_checkpoint_directory_at
from lightning_zero.checkpoint.consolidate import consolidate_checkpoint, parse_size
from lightning_zero.checkpoint.inspection import inspect_checkpoint
from lightning_zero.checkpoint.load import verify_checkpoint
from lightning_zero.checkpoint.verification import Verification
from lightning_zero.errors import CheckpointError

__all__ = ["consolidate", "inspect"]

_UNVERIFIABLE = 3
_INSPECT = (
    "Print what is inside a checkpoint and verify its files. Exits with 1 if it is damaged or no checkpoint, and with "
    f"{_UNVERIFIABLE} if nothing is wrong with it, but files without checksums may have changed."
)
_CONSOLIDATE = """\
Write a checkpoint of any kind as ordinary files, with the memory of one process and never of a model.

SOURCE is a sharded directory (of this package, of Lightning's strategies or of torch.distributed.checkpoint), a .ckpt
file, or safetensors. OUT decides what is written:

  OUT.ckpt          one file as Trainer.save_checkpoint writes it on one device: for load_from_checkpoint, and for
                    Trainer.fit(ckpt_path=...) without this package (also .pt, .pth, .bin)
  OUT.safetensors   one file of weights
  OUT               a directory of safetensors files as Hugging Face has it, with an index if there are several

With --format fsdp, OUT is a sharded directory for Lightning's FSDPStrategy. SOURCE must be one of this package or of
ModelParallelStrategy. Only names differ, so the data files of this package's directories are shared (hard links) where
the file system allows it, and either directory can be deleted.
"""
_EXAMPLES = """\
examples:
  lightning-zero consolidate runs/last.ckpt full.ckpt
  lightning-zero consolidate runs/last.ckpt my-model/ --dtype bfloat16 --max-shard-size 2GB --prefix model.
  lightning-zero consolidate runs/last.ckpt for-fsdp.ckpt --format fsdp
"""


def inspect(args: Sequence[str]) -> int:
    """Run ``lightning-zero inspect`` with these options; the exit code is 1 if the checkpoint is damaged or none.

    It is 3 if the checkpoint cannot be verified, because not all that counts has checksums.

    Raises SystemExit for ``--help``, or with 2 for wrong options.
    """
    parser = argparse.ArgumentParser(prog="lightning-zero inspect", description=_INSPECT)
    parser.add_argument("checkpoint", metavar="DIR", help="a checkpoint: directory, file or URL")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read all files and compare their checksums (default); sizes are compared always",
    )
    parser.add_argument("--tensors", action="store_true", help="list every weight with its dtype, shape and size")
    options = parser.parse_args(args)
    path, verify = options.checkpoint, options.verify
    with _for_the_terminal(parser.prog):
        try:
            found = inspect_checkpoint(path)
        except CheckpointError as error:
            _complain(parser.prog, error)
            if verify and is_checkpoint_directory_at(path):
                _print_damages([text for text in _verified(path, None) if text not in str(error)])
            return 1
        print(found.describe(tensors=options.tensors), flush=True)  # noqa: T201
        if not verify:
            return 0
        verified = _verified(path, found.nbytes)
        _print_damages(verified)
        if verified:
            return 1
        print(f"\n{verified.doubt()}." if verified.unverified else "\nVerified: every file is whole.")  # noqa: T201
        return 0 if verified.is_whole else _UNVERIFIABLE


def consolidate(args: Sequence[str]) -> int:
    """Run ``lightning-zero consolidate``; the exit code is 1 if the source is damaged or the output not written.

    Arguments and errors as for ``inspect``.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-zero consolidate",
        description=_CONSOLIDATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the checkpoint to read: directory, file or URL")
    add("out", metavar="OUT", help="the file or directory to write")
    add(
        "--format", choices=["ckpt", "safetensors", "fsdp"], help="what to write, where the name of OUT does not say it"
    )
    add("--dtype", metavar="DTYPE", help="cast floating-point weights, for example to bfloat16")
    add(
        "--max-shard-size",
        "--max_shard_size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="of a file in a directory of safetensors, for example 500MB or 2GiB (default: %(default)s)",
    )
    add(
        "--weights-only",
        "--weights_only",
        action="store_true",
        help="leave the state of optimizers, schedulers and callbacks out of a .ckpt; safetensors never hold it",
    )
    add("--prefix", metavar="PREFIX", help="cut this beginning off the weights' names, for example model.")
    add("--overwrite", action="store_true", help="replace what OUT has already; never the source")
    options = parser.parse_args(args)
    with _for_the_terminal(parser.prog):
        try:
            written = consolidate_checkpoint(**vars(options))
        except ValueError as error:
            parser.error(str(error))
        except CheckpointError as error:
            _complain(parser.prog, error)
            return 1
    for path in written:
        print(path)  # noqa: T201
    return 0


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _verified(path: str, nbytes: int | None) -> Verification:
    with tqdm(total=nbytes, desc="verifying", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        return verify_checkpoint(path, progress=bar.update)


def _print_damages(damages: Sequence[str]) -> None:
    if damages:
        print("\nDamaged:", *(f"  {damage}" for damage in damages), sep="\n", flush=True)  # noqa: T201


@contextmanager
def _for_the_terminal(program: str) -> Iterator[None]:
    """Warnings are for the person at the terminal: one line each, without the place in the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)

        def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
            if issubclass(category, UserWarning):
                print(f"{program}: warning: {message}", file=sys.stderr)  # noqa: T201

        warnings.showwarning = show
        yield


def _complain(program: str, error: CheckpointError) -> None:
    """One process is one rank, which needs no telling which of them failed."""
    reason = error.__cause__ if isinstance(error.__cause__, CheckpointError) else error
    print(f"{program}: error: {reason}", file=sys.stderr)  # noqa: T201
