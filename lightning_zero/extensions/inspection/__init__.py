"""``lightning-zero inspect``, which looks into checkpoints, and ``verify_checkpoint``, which compares their checksums.

Imported without torch, for the command's help.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zero.cli import complain, for_the_terminal
from lightning_zero.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_zero.extensions.inspection.contents import Inspection
    from lightning_zero.extensions.inspection.verification import Verification

__all__ = ["checkpoints_in", "help_text", "inspect_checkpoint", "run", "verify_checkpoint", "verify_together"]

UNVERIFIABLE = 3
_WHAT = (
    "Print what is inside a checkpoint and verify its files, or list the checkpoints in a folder. Exits with 1 if "
    f"it is damaged or no checkpoint, and with {UNVERIFIABLE} if nothing is wrong with it, but files without checksums "
    "may have changed."
)
_LATER = dict.fromkeys(("checkpoints_in", "inspect_checkpoint"), "contents")
_LATER |= dict.fromkeys(("verify_checkpoint", "verify_together"), "verification")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def help_text() -> str:
    """What ``lightning-zero inspect --help`` prints."""
    return parser().format_help()


def parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero inspect``."""
    made = argparse.ArgumentParser(prog="lightning-zero inspect", description=_WHAT)
    made.add_argument("checkpoint", metavar="DIR", help="a checkpoint (directory, file or URL), or a folder of them")
    verify = "read all files and compare their checksums (default); sizes are compared always"
    made.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    made.add_argument("--tensors", action="store_true", help="list every weight with its dtype, shape and size")
    made.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return made


def run(args: Sequence[str]) -> int:
    """Run ``lightning-zero inspect`` with these options; the exit code is 1 if the checkpoint is damaged or none, 3 if
    not all that counts has checksums. Raises SystemExit for ``--help``, or with 2 for wrong options."""
    from lightning_zero.checkpoint import is_checkpoint_directory_at
    from lightning_zero.extensions.inspection.contents import inspect_checkpoint, list_checkpoints, reason_of

    program = parser()
    options = program.parse_args(args)
    path, verify = options.checkpoint, options.verify
    with for_the_terminal(program.prog):
        if listed := list_checkpoints(path):
            return _print_list(path, listed, as_json=options.json)
        try:
            found = inspect_checkpoint(path)
        except CheckpointError as error:
            complain(program.prog, error)
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


def _print_list(path: str, listed: Mapping[str, Inspection | str], *, as_json: bool) -> int:
    """Print the checkpoints in a folder. 1 if one cannot be read."""
    from lightning_zero.extensions.inspection.contents import describe_list

    if as_json:
        rows = [{"name": name, **({"error": i} if isinstance(i, str) else i.numbers())} for name, i in listed.items()]
        _print_json({"path": path, "checkpoints": rows})
    else:
        print(describe_list(path, listed))  # noqa: T201
    return int(any(isinstance(one, str) for one in listed.values()))


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, indent=2, default=str))  # noqa: T201


def _verified(path: str, nbytes: int | None) -> Verification:
    from tqdm import tqdm

    from lightning_zero.extensions.inspection.verification import verify_checkpoint

    with tqdm(total=nbytes, desc="verifying", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        return verify_checkpoint(path, progress=bar.update)


def _print_damages(damages: Sequence[str]) -> None:
    if damages:
        print("\nDamaged:", *(f"  {damage}" for damage in damages), sep="\n", flush=True)  # noqa: T201
