"""What a run under a stage is worth, measured by the same program under DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.thorough.fuzz.play import Error, Record, Sharded
from tests.thorough.fuzz.programs import Program
from tests.thorough.fuzz.vocabulary import load_vocabulary

__all__ = ["FAILURES", "Verdict", "judge"]

# What is allowed: the same; the same, but a value was refused by name; an error by name; DDP does not run it either.
ALLOWED = ("equal", "refused", "error", "ddp fails")
# What is not: another result; an error that names nothing; an error of one rank only; one that comes when all is over;
# an error where the action has to work; a rank that waits for ever, or dies.
FAILURES = ("different", "unnamed error", "one rank only", "late error", "has to work", "hang")

# Gradients of two micro-steps are added in another order, and a norm is summed in another precision.
ROUNDING = 2e-3


class Verdict(NamedTuple):
    """One of ``ALLOWED`` or ``FAILURES``, and why."""

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


def judge(program: Program, stage: int, expected: Sequence[Record] | None, found: Sequence[Record] | str) -> Verdict:
    """Compare two runs.

    Args:
        program: what ran.
        stage: where.
        expected: the records of all ranks under DDP; ``None``: it hung or died.
        found: those of the stage; a text: how it hung or died.
    """
    if isinstance(found, str):
        return Verdict("hang", found)
    if expected is None or any(record.error for record in expected):
        first = next((r.error for r in expected or [] if r.error), None)
        return Verdict("ddp fails", f"{first.type}: {first.message[:200]}" if first else "it hangs")
    errors = [record.error for record in found]
    if any(errors):
        apart = _drift(expected) and all(error is None or error.type == "DivergenceError" for error in errors)
        return _judge_errors(program, stage, errors, apart)
    if any(load_vocabulary()[placed.action].parts for placed in program.actions) and _drift(expected):
        return Verdict("ddp fails", "its ranks go on with models of their own")
    differences = _differences(program, stage, expected, found)
    if differences:
        return Verdict("different", "\n".join(differences[:5]))
    refused = [key for record in found for key in record.refused]
    for index, _ in refused:
        placed = program.actions[index]
        if load_vocabulary()[placed.action].must_work(stage, placed.hook):
            return Verdict("has to work", f"{placed}: {next(iter(found[0].refused.values()), 'on one rank')}")
    if found[0].refused.keys() != found[1].refused.keys():
        return Verdict("one rank only", f"refused {found[0].refused} and {found[1].refused}")
    return Verdict("refused", next(iter(found[0].refused.values()))) if refused else Verdict("equal")


def _drift(records: Sequence[Record]) -> bool:
    return any(_compare(records[0].parameters, record.parameters, 0.0, "") for record in records[1:])


def _judge_errors(program: Program, stage: int, errors: Sequence[Error | None], apart: bool) -> Verdict:
    found = [error for error in errors if error is not None]
    causes = [error for error in found if not _follows(error)] or found
    error = causes[0]
    blamed = program.actions if error.during in (None, -1) else (program.actions[error.during],)
    text = f"{error.type}: {error.message[:600]}"
    if blamed != program.actions or len(blamed) == 1:
        text = f"{blamed[0].action}: {text}"
    actions = [load_vocabulary()[placed.action] for placed in blamed]
    told = error.during is not None and error.during >= 0 and actions[0].alone
    # What one rank wrote is found where its values are let go, after the action.
    told = told or (error.during is None and error.type == "ParameterAccessError" and any(a.alone for a in actions))
    if len(causes) < len(errors) and not told:
        return Verdict("one rank only", text)
    last = any(placed.hook == "on_train_end" for placed in program.actions)  # then nothing follows that could notice
    if error.during == -1 and not (last and error.type == "DivergenceError"):
        return Verdict("late error", text)
    if not all(cause.named for cause in causes):
        return Verdict("unnamed error", f"{text}\n{error.stack}")
    free = apart or any(load_vocabulary()[placed.action].ends for placed in program.actions)
    if actions and not free and all(a.must_work(stage, placed.hook) for a, placed in zip(actions, blamed, strict=True)):
        return Verdict("has to work", text)
    return Verdict("error", text)


def _follows(error: Error) -> bool:
    """It only says that the other rank has left."""
    return error.type == "CommunicationError" or "by peer" in error.message or "has failed with" in error.message


def _differences(program: Program, stage: int, expected: Sequence[Record], found: Sequence[Record]) -> list[str]:
    rounds = program.clip == "norm" or (program.accumulate > 1 and stage > 1)
    rounds = rounds or any(load_vocabulary()[placed.action].rounds for placed in program.actions)
    bound = ROUNDING if rounds else 0.0
    lines = []
    for rank, (left, right) in enumerate(zip(expected, found, strict=True)):
        for key, value in left.returned.items():
            if key in right.refused:
                continue
            action = load_vocabulary()[program.actions[key[0]].action]
            at = f"rank {rank}: what {action.name} returned, call {key[1]}"
            # What is in no optimizer is never cleared, so that its gradients are sums of averages.
            uncleared = ROUNDING if program.leave_out and action.gradients else 0.0
            lines += _compare(value, right.returned.get(key, "nothing"), max(bound, action.bound, uncleared), at)
        for name in (f.name for f in dataclasses.fields(Record)):
            if name not in ("returned", "refused", "error"):
                lines += _compare(getattr(left, name), getattr(right, name), bound, f"rank {rank}: {name}")
    return lines


def _compare(left: Any, right: Any, bound: float, at: str) -> list[str]:
    if isinstance(left, Tensor) and isinstance(right, Sharded):
        left, bound = Sharded(tuple(left.shape), left.norm().item()), max(bound, 1e-5)
    if isinstance(left, Sharded) and isinstance(right, Sharded):
        left, right = [*left.shape, left.norm], [*right.shape, right.norm]
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _compare_tensors(left, right, bound, at)
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{at}: {sorted(map(str, left.keys() ^ right.keys()))} on one side only"]
        return [line for key in left for line in _compare(left[key], right[key], bound, f"{at} {key}")]
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return [f"{at}: {len(left)} and {len(right)} entries: {str(left)[:150]} and {str(right)[:150]}"]
        pairs = enumerate(zip(left, right, strict=True))
        return [line for i, (a, b) in pairs for line in _compare(a, b, bound, f"{at} {i}")]
    if isinstance(left, float) and isinstance(right, float):
        double = torch.float64
        return _compare_tensors(torch.tensor(left, dtype=double), torch.tensor(right, dtype=double), bound, at)
    return [] if type(left) is type(right) and left == right else [f"{at}: {str(left)[:150]} and {str(right)[:150]}"]


def _compare_tensors(left: Tensor, right: Tensor, bound: float, at: str) -> list[str]:
    if left.shape != right.shape or left.dtype != right.dtype:
        return [f"{at}: {left.dtype} {(*left.shape,)} and {right.dtype} {(*right.shape,)}"]
    if torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num()):
        return []
    if left.isnan().sum() != right.isnan().sum():
        return [f"{at}: {int(left.isnan().sum())} and {int(right.isnan().sum())} NaN of {left.numel()}"]
    difference = (left.double() - right.double()).nan_to_num().abs().max().item()
    error = difference / max(left.double().nan_to_num().abs().max().item(), 1e-2)
    return [] if error <= bound else [f"{at}: relative difference {error:.3g}"]
