"""The planner: ``lightning-zero plan``, ``estimate_memory`` and ``measure_activations``.

What a plan costs is in ``plan/costs.py``; here stages are compared, links are timed, and reports are written. Imported
without torch, for the command's help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_zero.cli import short_help
from lightning_zero.extensions.planner.options import OPTIONS, WHAT

__all__ = ["describe_plan", "estimate_memory", "help_text", "measure_activations", "run"]

_LATER = {"describe_plan": "report", "estimate_memory": "estimate", "measure_activations": "measure"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def help_text() -> str:
    """What ``lightning-zero plan --help`` prints."""
    return short_help("plan", WHAT, OPTIONS)


def run(args: Sequence[str], *, early: bool = False) -> int | None:
    """Print what ``lightning-zero plan`` has to say: 0. 2 if the settings are wrong, 1 if something else fails.

    ``None``, and nothing is printed, if that needs Lightning and it is too ``early`` to import it.
    """
    from lightning_zero.extensions.planner.command import planner_without_lightning

    try:
        planner = planner_without_lightning(args)
        if planner is None:
            if early:
                return None
            from lightning_zero.extensions.planner.lightning_cli import planner_of

            planner = planner_of(args)
        text = planner.report()
    except (ValueError, OSError, ImportError) as error:
        print(f"lightning-zero plan: error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ValueError) else 1
    print(text)  # noqa: T201
    return 0
