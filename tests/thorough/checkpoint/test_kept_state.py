"""What callbacks, modules and hyperparameters save is there after a resume, or it is named when it is saved."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_zero import CheckpointPolicy, ZeroStrategy
from tests.helpers.runs import Net, again, assert_same, batches, each_strategy, name_of, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

SAVED_AT = 2  # steps
COUNT = 4


@dataclasses.dataclass
class Best:
    """What cannot be loaded without importing this module."""

    score: float


class Historian(pl.Callback):
    """Keeps what it sees in containers of all kinds."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.last: deque[int] = deque(maxlen=3)
        self.by_parity: defaultdict[int, list[int]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict()
        self.given = ""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.update(["batch", f"batch {batch_idx}"])
        self.last.append(trainer.global_step)
        self.by_parity[batch_idx % 2].append(trainer.global_step)
        self.order[f"step {trainer.global_step}"] = batch_idx
        self.order.move_to_end(f"step {trainer.global_step}", last=False)

    def state_dict(self) -> dict[str, Any]:
        nested = {"deep": [deque(self.last, maxlen=2), (Counter(self.seen),)], "empty": defaultdict(dict)}
        return {"seen": self.seen, "last": self.last, "by": self.by_parity, "order": self.order, "nested": nested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = repr(state)  # which tells the classes, where a queue ends, and what a missing key becomes
        self.seen, self.last, self.by_parity, self.order = (state[key] for key in ("seen", "last", "by", "order"))


class Counting(Net):
    """Counts in its extra state, and saves an entry of its own."""

    def __init__(self, sizes: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.counts: Counter[str] = Counter()
        self.entries: defaultdict[str, list[float]] = defaultdict(list)
        self.given: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.counts["steps"] += 1
        self.entries["all"].append(1.0)
        return loss

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.given.append(repr(state))
        self.counts = state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["entries"] = self.entries

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.given += [repr(checkpoint["entries"]), repr(checkpoint["hyper_parameters"])]
        self.entries = checkpoint["entries"]


class Saver(pl.Callback):
    """Saves after some steps."""

    def __init__(self, path: Path, *steps: int) -> None:
        self.path, self.steps = path, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path)


def test_containers_come_back_as_from_a_ckpt_of_ddp(tmp_path: Path) -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        path = tmp_path / name_of(strategy)
        sizes = {"sizes": deque([1, 2], maxlen=4), "by": defaultdict(int, {"a": 1})}
        make_trainer(strategy, callbacks=[Historian(), Saver(path, SAVED_AT)]).fit(Counting(sizes), batches(COUNT))
        historian, module = Historian(), Counting(sizes)
        trainer = make_trainer(again(strategy), callbacks=[historian])
        trainer.fit(module, batches(COUNT), ckpt_path=path, weights_only=False)  # else DDP refuses a deque
        assert len(module.losses) == COUNT - SAVED_AT
        return {
            "given to the callback": historian.given,
            "given to the module": module.given,
            "at the end": repr(historian.state_dict()),
            "counts": repr((module.counts, module.entries)),
        }

    results = each_strategy(play)
    assert "deque([1, 2], maxlen=3)" in results[0]["ddp"]["given to the callback"]
    assert results[0]["ddp"]["counts"].startswith("(Counter({'steps': 4}), defaultdict(<class 'list'>")
    assert_same(results)


class Careless(Historian):
    """Also keeps what is of a class."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": Best(0.5), "history": {"all": [Best(0.1)]}}


class Sloppy(Counting):
    """Has extra state that is of a class."""

    def get_extra_state(self) -> Any:
        return UserDict(self.counts)


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The warnings about what is not kept; others are errors as ever."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught, quiet():
        warnings.simplefilter("always")
        yield texts
    for warning in caught:
        text = str(warning.message)
        if "will not have all that was saved" in text or text.startswith("Left out of"):
            texts.append(text)


def test_what_cannot_be_kept_is_named_once_when_it_is_saved(tmp_path: Path) -> None:
    def rank(_: int) -> tuple[list[str], list[str], str]:
        with told() as saving:
            trainer = make_trainer(zero(3), callbacks=[Careless(), Saver(tmp_path / "c", 1, SAVED_AT)])
            trainer.fit(Sloppy(), batches(COUNT))
        historian = Careless()
        with told() as loading:
            make_trainer(zero(1), callbacks=[historian]).fit(Counting(), batches(COUNT), ckpt_path=tmp_path / "c")
        return saving, loading, historian.given

    (saving, loading, given), (*others, _) = run_world(2, rank, timeout=200)
    (text,) = saving
    best, extra = "tests.thorough.checkpoint.test_kept_state.Best", "collections.UserDict, which comes back as a dict"
    assert f"'callbacks.Careless.best' ({best})" in text
    assert f"'callbacks.Careless.history.all' ({best})" in text
    assert f"'state_dict._extra_state' ({extra})" in text
    assert "deque" not in text
    assert "callbacks.Careless.best" in loading[0]
    assert "deque([1, 2], maxlen=3)" in given
    assert "Best" not in given
    assert others == [[], []]


def test_it_is_named_for_a_save_in_the_background(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        strategy: ZeroStrategy = zero(2, checkpoint=CheckpointPolicy(async_save=True))
        with told() as texts:
            make_trainer(strategy, callbacks=[Careless(), Saver(tmp_path / "refused", SAVED_AT)]).fit(
                Net(), batches(COUNT)
            )
        return texts

    with quiet():
        refused, none = run_world(2, rank, timeout=200)
    assert ["callbacks.Careless.best" in text for text in refused] == [True]
    assert none == []
