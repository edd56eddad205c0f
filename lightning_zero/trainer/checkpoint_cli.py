"""``lightning-zero inspect`` and ``lightning-zero consolidate``: what to do with a checkpoint on disk."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lightning_zero.checkpoint import is_checkpoint_directory_at
from lightning_zero.checkpoint.consolidate import consolidate_checkpoint
from lightning_zero.checkpoint.inspection import (
    Inspection,
    describe_list,
    inspect_checkpoint,
    list_checkpoints,
    reason_of,
)
from lightning_zero.checkpoint.load import verify_checkpoint
from lightning_zero.checkpoint.verification import Verification
from lightning_zero.errors import CheckpointError, with_notes
from lightning_zero.trainer.cli_texts import UNVERIFIABLE, consolidate_parser, inspect_parser

__all__ = ["consolidate", "inspect"]


def inspect(args: Sequence[str]) -> int:
    """Run ``lightning-zero inspect`` with these options; the exit code is 1 if the checkpoint is damaged or none.

    It is 3 if the checkpoint cannot be verified, because not all that counts has checksums.

    Raises SystemExit for ``--help``, or with 2 for wrong options.
    """
    parser = inspect_parser()
    options = parser.parse_args(args)
    path, verify = options.checkpoint, options.verify
    with _for_the_terminal(parser.prog):
        if listed := list_checkpoints(path):
            return _print_list(path, listed, as_json=options.json)
        try:
            found = inspect_checkpoint(path)
        except CheckpointError as error:
            _complain(parser.prog, error)
            damages = list(_verified(path, None)) if verify and is_checkpoint_directory_at(path) else []
            if options.json:
                _print_json({"path": path, "error": reason_of(error), "damaged": damages})
            else:
                _print_damages([text for text in damages if text not in str(error)])
            return 1
        if not options.json:
            print(found.describe(tensors=options.tensors), flush=True)  # noqa: T201
        verified = _verified(path, found.nbytes) if verify else None
        if options.json:
            checked = None if verified is None else {"damaged": list(verified), "unverified": verified.unverified}
            _print_json({**found.numbers(tensors=options.tensors), "verified": checked})
        elif verified is not None:
            _print_damages(verified)
            if not verified:
                whole = f"{verified.doubt()}." if verified.unverified else "Verified: every file is whole."
                print(f"\n{whole}")  # noqa: T201
        if verified:
            return 1
        return 0 if verified is None or verified.is_whole else UNVERIFIABLE


def consolidate(args: Sequence[str]) -> int:
    """Run ``lightning-zero consolidate``; the exit code is 1 if the source is damaged or the output not written.

    Arguments and errors as for ``inspect``.
    """
    parser = consolidate_parser()
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


def _print_list(path: str, listed: Mapping[str, Inspection | str], *, as_json: bool) -> int:
    """Print the checkpoints in a folder. 1 if one cannot be read."""
    if as_json:
        rows = [{"name": name, **({"error": i} if isinstance(i, str) else i.numbers())} for name, i in listed.items()]
        _print_json({"path": path, "checkpoints": rows})
    else:
        print(describe_list(path, listed))  # noqa: T201
    return int(any(isinstance(one, str) for one in listed.values()))


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, indent=2, default=str))  # noqa: T201


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
    print(f"{program}: error: {with_notes(reason)}", file=sys.stderr)  # noqa: T201
