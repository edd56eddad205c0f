"""What a signal asks of a run: all ranks do it in the same place, if one of them was asked.

Lightning's own handlers run wherever the rank is. The one of SIGTERM sends a message there, which shifts all messages
behind it by one, and the one with which Slurm has a run saved and queued again saves in the middle of a step, which
other ranks are not in. Ours only note what is asked: the next agreement tells the others, and all do it together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.trainer.processes import Processes
from lightning_zero.trainer.replaced import ReplacedMethods

if TYPE_CHECKING:
    from lightning_zero.engine import ZeroEngine

__all__ = ["Signals"]

_END, _SAVE = 1, 2
_log = logging.getLogger(__name__)


class Signals(Processes, ParallelStrategy):
    """The signals that a Trainer handles."""

    _connector: Any
    _asked = 0  # of this rank, in this run
    _fitting = False
    _save: Callable[..., None]
    _saved = False

    if TYPE_CHECKING:

        @property
        def engine(self) -> ZeroEngine: ...

    def listen(self, trainer: Any, replaced: ReplacedMethods) -> None:
        """Take the place of Lightning's handlers, before it installs them. Local."""
        self._connector = connector = trainer._signal_connector  # 2.6
        self._asked, self._fitting, self._saved = 0, False, False
        self._save = connector._slurm_sigusr_handler_fn

        advance = trainer.fit_loop.epoch_loop.advance

        def end(signum: Any, frame: Any) -> None:
            _log.info("[rank: %s] Received SIGTERM: all ranks end after this step.", self.global_rank)
            if self._launcher is not None and not self._asked & _END:
                self._launcher.kill(signum)
            if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
                self._ask(_END)
            else:
                connector.received_sigterm = True

        def save(signum: Any, frame: Any) -> None:
            self._ask(_SAVE) if trainer.state.fn == TrainerFn.FITTING else self._save(signum, frame)

        def heed_and_advance(*args: Any) -> None:
            self.heed(between=True)
            advance(*args)

        replaced.put(connector, "_sigterm_notifier_fn", lambda _: end)
        replaced.put(connector, "_slurm_sigusr_handler_fn", lambda _: save)
        replaced.put(trainer.fit_loop.epoch_loop, "advance", lambda _: heed_and_advance)

    def _ask(self, what: int) -> None:
        self._asked |= what
        if self._fitting:
            self.engine.agreement.notice = self._asked

    def on_train_start(self) -> None:
        """From here on others are told; also of what was asked before."""
        super().on_train_start()
        self.engine.agreement.noticed, self._fitting = 0, True
        self._ask(0)

    def on_train_end(self) -> None:
        """The last time that others are told, and that what they ask is done. Collective: every rank."""
        self.engine.agreement.round("the end of the training")
        self.heed(between=True)
        self._fitting = False
        super().on_train_end()

    def heed(self, *, between: bool) -> None:
        """Do what any rank was asked for and can be done here: ``between`` two batches or not. On all ranks alike.

        Not while gradients of a step that has not been made are held, which a checkpoint has no part of.
        """
        noticed = self.engine.agreement.noticed if self._fitting else 0
        if not noticed or self._connector.trainer.fit_loop._should_accumulate():  # 2.6
            return
        if noticed & _SAVE and not self._saved:
            if not between:
                return  # and do not end before
            self._saved = True
            self._save(None, None)
        if noticed & _END:
            self._connector.received_sigterm = True  # Lightning ends the fit before the next batch

    def end_if_asked(self) -> None:
        """As Lightning's loops end between two batches of a validation."""
        if self._connector.received_sigterm:
            raise SIGTERMException
