"""A program: a small model, how it is trained, and what the user does at which hook. Drawn from a seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.thorough.fuzz.models import MODELS
from tests.thorough.fuzz.vocabulary import CALLBACK_HOOKS, HOOKS, Action, load_vocabulary

__all__ = ["OPTIMIZERS", "Placed", "Program", "draw", "matrix", "simpler"]

OPTIMIZERS = ("sgd", "adamw", "adagrad", "rmsprop", "adam_amsgrad", "nadam", "sgd_plain", "adafactor")
EPOCHS = 2
BATCHES = 2
# How often a hook comes in a fit.
OFTEN = {"on_fit_start": 1, "on_train_start": 1, "on_train_end": 1, "configure_optimizers": 1}
OFTEN |= {hook: EPOCHS for hook in HOOKS if "validation" in hook or hook.startswith("on_train_epoch")}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An action at a place.

    Args:
        action: its name.
        hook: where.
        callback: in a ``Callback`` instead of the LightningModule.
        times: at which occurrences of the hook, counted from 0.
        pick: chooses the parameter, layer, group, ... that it is about.
    """

    action: str
    hook: str
    callback: bool = False
    times: tuple[int, ...] = (0,)
    pick: int = 0

    def __str__(self) -> str:
        where = f"{'callback' if self.callback else 'module'}.{self.hook}"
        return f"{self.action} @ {where} {list(self.times)} pick={self.pick}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """All that a run depends on."""

    seed: int = 0
    model: str = "perceptron"
    optimizer: str = "sgd"
    scheduler: str | None = None
    accumulate: int = 1
    clip: str | None = None
    precision: str = "32-true"
    manual: bool = False
    leave_out: bool = False
    units: bool = True
    bucket_mib: float = 25.0
    prefetch: int = 1
    actions: tuple[Placed, ...] = ()
    stages: tuple[int, ...] = (1, 2, 3)

    def __str__(self) -> str:
        settings = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name not in ("actions", "stages") and getattr(self, f.name) != f.default
        ]
        return "\n".join([f"program({', '.join(settings)}), stages {self.stages}", *(f"  {a}" for a in self.actions)])

    def to_json(self) -> str:
        """One line, to run it again."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        placed = [Placed(**{**p, "times": tuple(p["times"])}) for p in fields["actions"]]
        return cls(**{**fields, "actions": tuple(placed), "stages": tuple(fields["stages"])})


def draw(seed: int) -> Program:
    """The program of a seed, in one stage."""
    rng = random.Random(seed)
    vocabulary = list(load_vocabulary().values())
    manual = rng.random() < 0.15
    chosen: list[Action] = rng.choices(vocabulary, k=rng.choice((1, 1, 2, 2, 3, 4)))
    chosen = [a for a in chosen if a.manual in (None, manual)]
    wanted = [a.models for a in chosen if a.models]
    model = rng.choice(wanted[0] if wanted else tuple(MODELS))
    chosen = [a for a in chosen if not a.models or model in a.models]
    accumulate = 1 if manual or rng.random() < 0.8 else 2
    actions = [_place(rng, a, manual, accumulate) for a in chosen]
    optimizer = rng.choices(OPTIMIZERS, weights=(4, 6, 2, 2, 1, 1, 2, 1))[0]
    if optimizer == "adafactor":
        accumulate = 1  # sums are rounded otherwise, and it makes steps of gradients that are nothing but rounding
    return Program(
        seed=seed,
        model=model,
        optimizer=optimizer,
        scheduler=None if manual else rng.choice((None, None, "step", "cosine")),
        accumulate=accumulate,
        clip=None if manual else rng.choice((None, None, None, "value", "norm")),
        precision=rng.choices(("32-true", "64-true"), weights=(9, 1))[0],
        manual=manual,
        leave_out=rng.random() < 0.3 or any(a.name == "add_group" for a in chosen),
        units=rng.random() < 0.6,
        bucket_mib=rng.choice((25.0, 0.0003)),
        prefetch=rng.choice((0, 1, 2)),
        actions=tuple(a for a in actions if a is not None),
        stages=(rng.choice((1, 2, 3, 3)),),
    )


def _place(rng: random.Random, action: Action, manual: bool, accumulate: int) -> Placed | None:
    hooks = [hook for hook in action.hooks if _comes(hook, manual)]
    if action.gradients and accumulate > 1:  # sharded gradients are averaged at each micro-step
        hooks = [hook for hook in hooks if hook != "on_after_backward"]
    if not hooks:
        return None
    hook = rng.choice(hooks)
    callback = hook in CALLBACK_HOOKS and rng.random() < 0.5
    often = OFTEN.get(hook, EPOCHS * BATCHES)
    times = rng.choice([(0,), (min(1, often - 1),), tuple(range(often)), (0, often - 1) if often > 1 else (0,)])
    return Placed(action=action.name, hook=hook, callback=callback, times=times, pick=rng.randrange(100))


def _comes(hook: str, manual: bool) -> bool:
    if hook == "manual_gradients":
        return manual
    return not manual or hook not in ("on_before_zero_grad", "configure_gradient_clipping", "on_before_backward")


def matrix(names: Sequence[str] = (), hooks: Sequence[str] = (), pick: int = 2) -> Iterator[Program]:
    """Each action alone at each of its hooks, on the first model that it is for, in every stage."""
    for action in load_vocabulary().values():
        if names and action.name not in names:
            continue
        model = action.models[0] if action.models else "perceptron"
        for hook in action.hooks:
            if hooks and hook not in hooks:
                continue
            manual = hook == "manual_gradients" or bool(action.manual)
            if not _comes(hook, manual):
                continue
            often = OFTEN.get(hook, EPOCHS * BATCHES)
            # Twice, and not in the last step, so that what it does has consequences.
            times = tuple(sorted({0 if often <= 2 else 1, min(3, often - 1)}))
            placed = Placed(action=action.name, hook=hook, times=times, pick=pick)
            yield Program(
                model=model,
                optimizer="adamw",
                manual=manual,
                leave_out=action.name == "add_group",
                actions=(placed,),
            )


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest steps first."""
    for i in range(len(program.actions)):
        yield dataclasses.replace(program, actions=program.actions[:i] + program.actions[i + 1 :])
    plain = Program()
    names = ("model", "optimizer", "scheduler", "accumulate", "clip", "precision", "leave_out", "bucket_mib", "units")
    for name in (*names, "prefetch", "manual", "seed"):
        if getattr(program, name) != getattr(plain, name):
            yield dataclasses.replace(program, **{name: getattr(plain, name)})
    for i, placed in enumerate(program.actions):
        less = [dataclasses.replace(placed, callback=False)] if placed.callback else []
        if len(placed.times) > 1:
            less += [dataclasses.replace(placed, times=(t,)) for t in (placed.times[0], placed.times[-1])]
        for one in less:
            yield dataclasses.replace(program, actions=(*program.actions[:i], one, *program.actions[i + 1 :]))
