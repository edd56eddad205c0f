"""Whatever users do at whichever hook: the result is that of DDP, or an error names the object; never anything else.

A fixed selection of random programs. More: ``python -m tests.thorough.fuzz --programs 500``, or ``FUZZ_PROGRAMS=500``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.thorough.fuzz import worlds
from tests.thorough.fuzz.oracle import judge
from tests.thorough.fuzz.play import Error, Record
from tests.thorough.fuzz.programs import Placed, Program, draw, matrix
from tests.thorough.fuzz.vocabulary import ACTIONS, HOOKS, Action, Context, action, load_vocabulary
from tests.thorough.fuzz.worlds import judged

PROGRAMS = int(os.environ.get("FUZZ_PROGRAMS", "64"))
SEEDS = 500  # of which they are chosen


def chosen(count: int) -> list[Program]:
    """The programs that show most for what they take, one after the other: actions at hooks, models and settings."""
    left = [(program, set(shown(program))) for program in map(draw, range(max(SEEDS, count)))]
    found: list[Program] = []
    seen: set[Any] = set()
    while len(found) < count:
        best = max(left, key=lambda entry: len(entry[1] - seen) / (1 + len(entry[0].actions)))
        left.remove(best)
        found.append(best[0])
        seen |= best[1]
    return found


def shown(program: Program) -> Iterator[Any]:
    yield from ((name, value) for name, value in vars(program).items() if name not in ("actions", "seed"))
    for placed in program.actions:
        yield from (placed.action, placed.hook, (placed.action, placed.hook), (placed.hook, placed.callback))


def failures(programs: list[Program]) -> tuple[list[str], Counter[str]]:
    failed, kinds = [], Counter[str]()
    for program, verdicts in zip(programs, judged(programs), strict=True):
        for stage, verdict in verdicts.items():
            kinds[verdict.kind] += 1
            if verdict.failed:
                again = f"python -m tests.thorough.fuzz --program '{program.to_json()}'"
                failed.append(f"stage {stage}: {verdict.kind}\n{program}\n{verdict.detail}\n{again}")
    return failed, kinds


@pytest.mark.timeout(120 + 3 * PROGRAMS)
def test_programs_are_equal_to_ddp_or_an_error_says_why_not() -> None:
    failed, kinds = failures(chosen(PROGRAMS))
    assert not failed, f"{len(failed)} programs failed, {dict(kinds)}:\n\n" + "\n\n".join(failed[:20])
    assert kinds["equal"] > PROGRAMS // 4, f"hardly a program ran through, so that little was compared: {dict(kinds)}"


OF_OPTIMIZERS = [
    "names_of_groups",
    "shapes_of_groups",
    "scale_gradients_of_groups",
    "clear_state",
    "keys_of_state",
    "forget_state_of_weight",
]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_optimizer_step"])
def test_groups_and_states_of_optimizers_are_those_of_ddp(hook: str) -> None:
    names = [name for name in OF_OPTIMIZERS if hook in load_vocabulary()[name].hooks]
    failed, kinds = failures(list(matrix(names, [hook])))
    assert not failed, "\n\n".join(failed)
    assert kinds["equal"] > 0.8 * kinds.total(), kinds


# ------------------------------------------------------------------------------------------------------- the machine


def test_the_vocabulary_is_large_and_says_where_it_applies() -> None:
    actions = load_vocabulary()
    assert len(actions) >= 40
    for name, one in actions.items():
        assert one.hooks, name
        assert set(one.hooks) <= set(HOOKS), name
        assert not one.reads or one.run.__doc__, name


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Action]]:
    """Room for actions of a test's own."""
    load_vocabulary()
    before = dict(ACTIONS)
    monkeypatch.setattr(worlds, "DEADLINE", 8.0)
    yield ACTIONS
    ACTIONS.clear()
    ACTIONS.update(before)


def test_a_rank_that_waits_or_dies_is_noticed_and_the_next_program_runs(made_up: dict[str, Action]) -> None:
    @action(("on_train_batch_end",), works="123")
    def waits(c: Context) -> Any:
        """One rank waits for the others, but not under DDP."""
        if c.rank == 0 and c.module.trainer.strategy.launcher is not None and is_zero(c):
            dist.barrier()

    @action(("on_train_batch_end",), works="123")
    def dies(c: Context) -> Any:
        """One rank is gone."""
        if c.rank == 1 and is_zero(c):
            os._exit(7)

    programs = [one(name, stages=(2,)) for name in ("waits", "dies", "clamp_weight")]
    first, second, third = (verdicts[2] for verdicts in judged(programs))
    assert first.kind == "hang", first
    assert "barrier" in first.detail
    assert second.kind == "hang", second
    assert "exit code 7" in second.detail
    assert third.kind in ("equal", "different")


def test_a_silent_difference_and_an_error_of_one_rank_are_noticed(made_up: dict[str, Action]) -> None:
    @action(("on_train_batch_end",), works="123")
    def differs(c: Context) -> Any:
        """Another learning rate than under DDP."""
        if is_zero(c):
            for group in c.optimizer.param_groups:
                group["lr"] *= 1 + 1e-7

    @action(("on_train_end",), works="")
    def raises_alone(c: Context) -> Any:
        """An error that only one rank gets."""
        if is_zero(c) and c.rank == 1:
            raise RuntimeError("'model.head.weight' is not what it was")

    @action(("on_train_end",), works="")
    def raises_without_a_name(c: Context) -> Any:
        """An error that says nothing."""
        if is_zero(c):
            raise RuntimeError("out of range")

    @action(("on_train_end",), works="1")
    def raises(c: Context) -> Any:
        """An error that is fine in stage 2."""
        if is_zero(c):
            raise RuntimeError("'model.head.weight' is not what it was")

    names = ("differs", "raises_alone", "raises_without_a_name", "raises")
    kinds = [
        {stage: verdict.kind for stage, verdict in verdicts.items()}
        for verdicts in judged([one(name, stages=(1, 2)) for name in names])
    ]
    assert kinds == [
        {1: "different", 2: "different"},
        {1: "one rank only", 2: "one rank only"},
        {1: "unnamed error", 2: "unnamed error"},
        {1: "has to work", 2: "error"},
    ]


def is_zero(c: Context) -> bool:
    return type(c.trainer.strategy).__name__ == "ZeroStrategy"


def one(name: str, stages: tuple[int, ...]) -> Program:
    """A program with one action, at the first hook that it is for."""
    placed = Placed(action=name, hook=load_vocabulary()[name].hooks[0], times=(0, 1))
    return Program(actions=(placed,), stages=stages)


def test_the_judge_counts_every_bit_and_every_nan() -> None:
    program = next(iter(matrix(["clone_weight"], ["on_train_start"])))
    nan = float("nan")

    def seen(value: float, **fields: Any) -> list[Record]:
        return [Record(parameters={"a": torch.tensor([value, 2.0])}, **fields) for _ in range(2)]

    assert judge(program, 1, seen(1.0), seen(1.0)).kind == "equal"
    assert judge(program, 1, seen(nan), seen(nan)).kind == "equal"
    assert judge(program, 1, seen(1.0), seen(1.0 + 2**-23)).kind == "different"
    assert judge(program, 1, seen(1.0), seen(nan)).kind == "different"
    assert judge(program, 1, seen(nan), seen(1.0)).kind == "different"
    assert judge(program, 1, seen(1.0, steps=3), seen(1.0, steps=4)).kind == "different"
    assert judge(program, 1, None, seen(1.0)).kind == "ddp fails"
    assert judge(program, 1, None, "rank 0 stood still").kind == "hang"
    late = Error("ParameterAccessError", "it is gone", -1, True, "")
    assert judge(program, 1, seen(1.0), seen(1.0, error=late)).kind == "late error"
    assert judge(program, 1, seen(1.0), [Record(), *seen(1.0, error=late)[:1]]).kind == "one rank only"
    refused = {(0, 0): "ParameterAccessError: 'a' is not here"}
    value = {(0, 0): torch.ones(2)}
    assert judge(program, 3, seen(1.0, returned=value), seen(1.0, refused=refused)).kind == "refused"
    assert judge(program, 1, seen(1.0, returned=value), seen(1.0, refused=refused)).kind == "has to work"
    assert judge(program, 3, seen(1.0, returned=value), seen(1.0)).kind == "different"
