"""What happens between two batches, on all ranks alike: where data end on some of them, and where signals arrived.

Under DDP a rank without a batch leaves, and the others wait for it in their next backward. Here what Lightning iterates
over, all loaders of a stage together, is iterated in step where ranks need one another. Where the lengths that are
known are the same on all ranks, nothing is different. Otherwise each batch is asked for in an agreement (40
microseconds on a host), in the order in which Lightning fetches, before the step.

[Note: a step without a batch]
In evaluation a rank that has no batch while another one has takes part in what the others gather. Lightning's loops do
not need one another there, so the rank takes part while it fetches, of which neither hooks nor metrics see anything.

[Note: signals]
Lightning's own handlers run wherever the rank is. The one of SIGTERM sends a message there, which shifts all messages
behind it by one, and the one with which Slurm has a run saved and queued again saves in the middle of a step, which
other ranks are not in. Ours only note what is asked: the next agreement tells the others, and all do it together.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.config import Uneven
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import DivergenceError, some
from lightning_zero.registry import extension
from lightning_zero.shards.slice import fingerprint
from lightning_zero.trainer.callbacks import Replaced

__all__ = ["Signals", "lock_loaders"]

Agree = Callable[[str, Sequence[int]], list[list[int]]]

_WAYS = (
    "Give every rank as many batches (`DistributedSampler`, `drop_last=True`, as many shards for each), or let all end "
    "with the first: ZeroStrategy(loaders=LoaderPolicy({}='stop'))."
)
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
_END, _SAVE = 1, 2  # what a signal asks
_log = logging.getLogger(__name__)
_OUT = 1 << 32  # in place of a loader's number: no batch of any


class Signals:
    """What signals ask of a run: see [Note: signals]. ``engine`` is asked for while a fit runs."""

    def __init__(self, trainer: Any, engine: Callable[[], ZeroEngine], replaced: Replaced) -> None:
        """Take the place of Lightning's handlers, before it installs them. Local."""
        self.connector = connector = trainer._signal_connector  # 2.6
        self._trainer, self._engine = trainer, engine
        self._asked = 0  # of this rank, in this run
        self._told = self._saved = False  # whether others are told; whether what Slurm wants is saved
        self._save: Callable[..., None] = connector._slurm_sigusr_handler_fn
        loop = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def heed_and_advance(*args: Any) -> None:
            self.heed(between=True)
            advance(*args)

        replaced.put(connector, "_sigterm_notifier_fn", lambda _: self._on_end)
        replaced.put(connector, "_slurm_sigusr_handler_fn", lambda _: self._on_save)
        replaced.put(loop, "advance", lambda _: heed_and_advance)

    def _on_end(self, signum: Any, frame: Any) -> None:
        strategy = self._trainer.strategy
        _log.info("[rank: %s] Received SIGTERM: all ranks end after this step.", strategy.global_rank)
        if strategy.launcher is not None and not self._asked & _END:
            strategy.launcher.kill(signum)
        if self._trainer.state.fn == TrainerFn.FITTING and strategy.world_size > 1:
            self._ask(_END)
        else:
            self.connector.received_sigterm = True

    def _on_save(self, signum: Any, frame: Any) -> None:
        self._ask(_SAVE) if self._trainer.state.fn == TrainerFn.FITTING else self._save(signum, frame)

    def _ask(self, what: int) -> None:
        self._asked |= what
        if self._told:
            self._engine().means.agreement.notice = self._asked

    def begin(self) -> None:
        """From here on others are told; also of what was asked before."""
        self._engine().means.agreement.noticed, self._told = 0, True
        self._ask(0)

    def end(self) -> None:
        """The last time that others are told, and that what they ask is done. Collective: every rank."""
        self._engine().means.agreement.round("the end of the training")
        self.heed(between=True)
        self._told = False

    def heed(self, *, between: bool) -> None:
        """Do what any rank was asked for and can be done here: ``between`` two batches or not. On all ranks alike.

        Not while gradients of a step that has not been made are held, which a checkpoint has no part of.
        """
        noticed = self._engine().means.agreement.noticed if self._told else 0
        if not noticed or self._trainer.fit_loop._should_accumulate():  # 2.6
            return
        if noticed & _SAVE and not self._saved:
            if not between:
                return  # and do not end before
            self._saved = True
            self._save(None, None)
        if noticed & _END:
            self.connector.received_sigterm = True  # Lightning ends the fit before the next batch


def lock_loaders(strategy: Any, trainer: Any, replaced: Replaced) -> None:
    """Have what the loops of a Trainer fetch from end on all ranks together, where ranks need one another. Local."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in (*loops, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        replaced.put(loop._data_source, "dataloader", partial(_in_step, strategy, trainer, loop))  # 2.6


def _in_step(strategy: Any, trainer: Any, loop: Any, request: Callable[[], Any]) -> Callable[[], Any]:
    name = loop._data_source.name
    step = _STEPS[name.removesuffix("_dataloader")]
    training = step == "training_step"

    def dataloader() -> Any:
        given, module = request(), trainer.lightning_module
        policy = strategy.loaders.training if training else strategy.loaders.evaluation
        listens = not training and not strategy.placement.shards_parameters  # to signals
        mesh, engine = strategy._device_mesh, strategy.engine
        agree = engine.agree if mesh is None else extension("tensor_parallel").in_step(engine, mesh.size(1))
        free = listens and policy == "join" and trainer.state.fn != TrainerFn.FITTING and mesh is None
        by_hand = is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)
        if strategy.world_size == 1 or free or by_hand:
            return given
        mode = "max_size_cycle" if training else "sequential"
        return _InLockStep.of(
            given if isinstance(given, CombinedLoader) else CombinedLoader(given, mode),  # type: ignore[arg-type]
            _name=name,
            _policy=policy,
            _agree=agree,
            _ways=_WAYS.format("training" if training else "evaluation"),
            _take_part=None if training else partial(strategy.take_part, step),
            _listens=listens,
            _progress=None if training else loop.batch_progress,
        )

    return dataloader


class _InLockStep(CombinedLoader):
    """A user's loaders, in a copy of what combines them, which end on all ranks together.

    ``_take_part``: in evaluation, where Lightning's loops do not need one another: take part in a step of the others.
    """

    _name: str  # alike on all ranks, for messages
    _policy: Uneven
    _ways: str  # out of it
    _agree: Agree
    _listens: bool  # whether signals are to be told of with each batch in any case
    _progress: Any
    _take_part: Any
    _length: int | None = None  # what Lightning is told. With none it fetches one batch ahead of the step

    @staticmethod
    def of(combined: CombinedLoader, **settings: Any) -> CombinedLoader:
        new, kind = copy.copy(combined), type(combined)
        new.__class__ = type(kind.__name__, (_InLockStep, kind), {})
        vars(new).update(settings)
        return new

    def __iter__(self) -> Any:
        """Begin a pass: compare the lengths of all loaders together, whether these are the numbers of batches to come,
        and what they consist of. Collective: every rank."""
        super().__iter__()
        parts: list[Any] = self.flattened
        certain = all(isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset) for part in parts)
        each = [sized_len(part) for part in parts] if self._mode == "sequential" else []
        length = sized_len(self._iterator)
        self._count, self._has = 0, True
        self._held: Any = None
        self._error: DivergenceError | None = None
        row = [-1 if length is None else length, int(certain), fingerprint(str(each))]
        rows = self._agree(f"the length of the {self._name}", row)
        lengths = [row[0] for row in rows]
        least, most = min(lengths), max(lengths)
        self._alike = certain and least >= 0 and all(row == rows[0] for row in rows)
        if self._take_part is None or self._alike:
            self._length = (least if self._policy == "stop" else most) if least >= 0 else None
        else:
            self._length = sys.maxsize  # not ahead: what is taken part in belongs before the next step
        return self

    def __len__(self) -> int:
        length = self._length if self._iterator is not None else super().__len__()
        if length is None:
            raise TypeError("These loaders have no length that all ranks agree on.")
        return length

    def __next__(self) -> Any:
        """The next batch with its numbers, once all ranks have said whether they have one. Collective: every rank."""
        if self._alike:
            found = super().__next__()
            if self._listens:
                self._agree(f"a batch of the {self._name}", [])
            return found
        while True:
            if self._error is not None:
                raise self._error
            if self._has and self._held is None:
                try:
                    self._held = super().__next__()
                except StopIteration:
                    self._has = False
            at = _OUT if self._held is None else self._held[2]  # the loader's number, if they follow one another
            rows = self._agree(f"the next batch of the {self._name}", [at, self._count])
            everyone = [row[0] for row in rows]
            if min(everyone) == _OUT or (self._policy == "stop" and _OUT in everyone):
                if self._take_part is not None:
                    self._progress.is_last_batch = True  # as Lightning sets it where it knows the length
                raise StopIteration
            late = [rank for rank, other in enumerate(everyone) if other > min(everyone)]
            if not late:
                return self._take()
            if self._policy == "stop":
                self._held = self._held if at == max(everyone) else None
            elif self._policy == "error":
                self._fail(late, rows)
                return self._take() if self._held is not None else (None, self._count, 0)
            elif at == min(everyone):
                return self._take()
            else:
                self._take_part()

    def _take(self) -> Any:
        found, self._held = self._held, None
        self._count += 1
        return found

    def _fail(self, late: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Raise, or do so when the next batch is fetched: one that was fetched ahead is perhaps never used."""
        ended = ", ".join(f"rank {rank} after {rows[rank][1]} batches" for rank in late[:4])
        left = some(rank for rank in range(len(rows)) if rank not in late)
        what = f"The {self._name} has ended on {ended}, and has one more on rank {left}."
        self._error = DivergenceError(f"{what} {self._ways}")
        if self._length is not None:
            raise self._error
