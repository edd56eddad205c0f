"""``lightning-zero inspect``, which looks into checkpoints, and ``verify_checkpoint``, which compares their checksums.

Imported without torch, for the command's help.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zero.cli import complain, for_the_terminal
from lightning_zero.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_zero.extensions.inspection.verification import Verification

__all__ = ["checkpoints_in", "describe_checkpoint", "run", "verify_checkpoint", "verify_together"]

UNVERIFIABLE = 3
_WHAT = (
    "Print what is inside a checkpoint and verify its files. Exits with 1 if it is damaged or no checkpoint, and with "
    f"{UNVERIFIABLE} if nothing is wrong with it, but files without checksums may have changed."
)
_LATER = dict.fromkeys(("checkpoints_in", "describe_checkpoint"), "contents")
_LATER |= dict.fromkeys(("verify_checkpoint", "verify_together"), "verification")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero inspect``."""
    made = argparse.ArgumentParser(prog="lightning-zero inspect", description=_WHAT)
    made.add_argument("checkpoint", metavar="DIR", help="a checkpoint: directory, file or URL")
    verify = "read all files and compare their checksums (default); sizes are compared always"
    made.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    made.add_argument("--tensors", action="store_true", help="list every weight with its dtype, shape and size")
    return made


def run(args: Sequence[str]) -> int:
    """Run ``lightning-zero inspect`` with these options; the exit code is 1 if the checkpoint is damaged or none, 3 if
    not all that counts has checksums. Raises SystemExit for ``--help``, or with 2 for wrong options."""
    program = parser()
    options = program.parse_args(args)  # ends here with --help, before what takes seconds to import
    from lightning_zero.checkpoint import is_checkpoint_directory_at
    from lightning_zero.extensions.inspection.contents import describe_checkpoint

    path, verify = options.checkpoint, options.verify
    with for_the_terminal(program.prog):
        try:
            print(describe_checkpoint(path, tensors=options.tensors), flush=True)  # noqa: T201
        except CheckpointError as error:
            complain(program.prog, error)
            damages = list(_verified(path)) if verify and is_checkpoint_directory_at(path) else []
            _print_damages([text for text in damages if text not in str(error)])
            return 1
        if not verify:
            return 0
        verified = _verified(path)
        _print_damages(verified)
        if verified:
            return 1
        whole = f"{verified.doubt()}." if verified.unverified else "Verified: every file is whole."
        print(f"\n{whole}")  # noqa: T201
        return 0 if verified.is_whole else UNVERIFIABLE


def _verified(path: str) -> Verification:
    from tqdm import tqdm

    from lightning_zero.extensions.inspection.verification import verify_checkpoint

    with tqdm(desc="verifying", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        return verify_checkpoint(path, progress=bar.update)


def _print_damages(damages: Sequence[str]) -> None:
    if damages:
        print("\nDamaged:", *(f"  {damage}" for damage in damages), sep="\n", flush=True)  # noqa: T201
