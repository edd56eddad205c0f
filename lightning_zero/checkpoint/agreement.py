"""Doing one step on every rank so that it fails on every rank or on none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from lightning_zero.errors import CheckpointError

__all__ = ["Control", "collect", "failure_text"]

T = TypeVar("T")
_NAMED_RANKS = 4  # how many failing ranks a message spells out


class Control(Protocol):
    """What checkpoints need of the ranks' agreement: ``comm.ControlGroup``, or a stand-in of a test."""

    @property
    def rank(self) -> int:
        """This process in the group."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""

    @property
    def process_group(self) -> Any:
        """A gloo group, or ``None`` for a single process."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object, in rank order. Collective: every rank."""


class _Outcome(NamedTuple):
    value: Any
    failure: str | None


def collect(control: Control, what: str, action: Callable[[], T]) -> list[T]:
    """Run ``action`` here and give every rank's result to every rank.

    Args:
        control: the ranks.
        what: the step, to follow "could not": "write the data of /runs/last.ckpt".
        action: returns something small that can be pickled.

    Returns:
        The results in rank order.

    Raises:
        CheckpointError: on every rank if ``action`` raised on any, naming the ranks and their reasons.

    Collective: every rank.
    """
    value: Any = None
    error: BaseException | None = None
    try:
        value = action()
    except BaseException as raised:
        error = raised
    failure = None if error is None else f"{type(error).__name__} on host {socket.gethostname()}: {error}"
    outcomes: list[_Outcome] = control.gather_objects(_Outcome(value, failure))
    if error is not None and not isinstance(error, Exception):
        raise error  # an interrupt stays one on the rank that received it
    failures = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure is not None}
    if failures:
        raise CheckpointError(failure_text(what, failures)) from error
    return [outcome.value for outcome in outcomes]


def failure_text(what: str, failures: Mapping[int, str]) -> str:
    """The message of a step that failed on some ranks."""
    named = [f"  rank {rank}: {text}" for rank, text in sorted(failures.items())[:_NAMED_RANKS]]
    if len(failures) > _NAMED_RANKS:
        named.append(f"  ... and {len(failures) - _NAMED_RANKS} more ranks.")
    ranks = "rank" if len(failures) == 1 else "ranks"
    numbers = ", ".join(map(str, sorted(failures)[:_NAMED_RANKS]))
    return "\n".join([f"Could not {what}: failed on {ranks} {numbers}.", *named])
