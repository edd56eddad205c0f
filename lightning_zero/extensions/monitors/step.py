"""Callbacks that show what a sharded run holds and sends, next to what its plan says. Here is what both share.

[Note: which steps are measured]
The third step of a fit, and then every n-th. In the first step the engine records the order of units, and every unit
is gathered on demand; in the second, frozen units may be gathered that stay from then on. From the third on all steps
are alike, so that a prediction can be held against any of them.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zero.analysis import table
from lightning_zero.engine import ZeroEngine
from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["STEADY", "StepMonitor"]

STEADY = 3
"""The first step of a fit that is like all that follow."""


class StepMonitor(pl.Callback):
    """Calls ``begin`` and ``end`` around every optimizer step with all its micro-steps."""

    def __init__(self, every_n_steps: int | None = None, summary: bool | None = None) -> None:
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or every_n_steps < 1):
            raise ValueError(f"every_n_steps must be 1 or more, or None for the Trainer's, got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self.summary = summary
        self._strategy: ZeroStrategy | None = None
        self._forget()

    def _forget(self) -> None:
        """What an earlier fit has left."""
        self._every = 0
        self._step = 0  # optimizer steps of this fit that have ended
        self._micro_steps = 0  # of the running step
        self._global_step = 0  # the Trainer's, before the running step
        self._measured = False  # the running step

    def attach(self, strategy: ZeroStrategy) -> None:
        """A fit begins."""

    def detach(self, engine: ZeroEngine) -> None:
        """It is over, or an error stopped it: leave no trace in the engine. May be called again."""

    def begin(self, engine: ZeroEngine) -> None:
        """A step begins."""

    def end(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        """It has ended."""

    def tables(self) -> list[list[tuple[str, ...]]]:
        """The summary: of each table a header, and rows as long as it is. Nothing if no step was measured."""
        return []

    def log_numbers(self, trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
        """Give numbers to every logger of the Trainer; each writes on rank 0 only."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise ValueError for a Trainer whose strategy has nothing to monitor."""
        if not isinstance(trainer.strategy, ZeroStrategy):
            raise ValueError(
                f"{type(self).__name__} shows what ZeroStrategy holds and sends, but the Trainer runs "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy='zero1'), 'zero2' or 'zero3', or leave the "
                "callback out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        self._every = int(self.every_n_steps or trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if isinstance(trainer.strategy, ZeroStrategy):
            self._strategy = trainer.strategy
            self.attach(self._strategy)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-step begins, and perhaps a step."""
        if self._strategy is not None and not self._micro_steps:
            step = self._step + 1
            self._measured = step == STEADY or (step > STEADY and self._every > 0 and step % self._every == 0)
            self._global_step = trainer.global_step
            self.begin(self._strategy.engine)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-step has ended, and perhaps a step."""
        if self._strategy is None:
            return
        self._micro_steps += 1
        if trainer.global_step != self._global_step:
            self._step += 1
            self.end(trainer, self._strategy)
            self._micro_steps = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the summary."""
        if self._strategy is None:
            return
        self.on_exception()
        if self.summary if self.summary is not None else not trainer.loggers:
            lines = [f"{type(self).__name__}, rank 0 of {trainer.world_size}"]
            for rows in self.tables():
                lines += ["", *table(rows)]
            if len(lines) == 1:
                lines[0] += f": no step was measured; the first one that is would have been step {STEADY}."
            rank_zero_info("\n".join(lines))

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Let go of the engine."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            self.detach(strategy.engine)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Let go of the engine."""
        self.on_exception()


def let_go(observers: list[Any], observer: Any) -> None:
    """Take an observer out of a list, if it is there."""
    if observer in observers:
        observers.remove(observer)


def logging_step(trainer: pl.Trainer) -> int:
    """Where Lightning puts its own metrics of this step on a logger's axis."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
