"""What is tried, one after the other, and which of it is best.

[Note: the order]
First the run as it is given, then the stages, then one setting after the other of the best so far: micro-batches,
bucket or prefetch, offload, activations. A run that cannot fit, by its plan and by what others needed, is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_zero.errors import readable_size

__all__ = ["MOST_RUNS", "Row", "Search", "Settings"]

MOST_RUNS = 8
EQUAL = 0.02
"""Rates that differ by less are noise: the run that needs less memory is better."""
ROOM = 0.9
"""What a run may be expected to take of the memory that there is."""
STAGES = (1, 2, 3)


class Settings(NamedTuple):
    """What is tuned. A ``stage`` of None: of another strategy, or chosen by the run. Others None: not given."""

    stage: int | None
    offload: bool = False
    prefetch: int | None = None
    bucket_mib: float | None = None
    activations: bool = False  # whether there is a policy; the one that is tried is "units"
    batch_size: int | None = None
    accumulate: int = 1

    @property
    def strategy(self) -> str:
        """As the strategies are called."""
        return f"zero{self.stage}" + "_offload" * self.offload

    def beside(self, other: Settings) -> str:
        """What differs from others."""
        differs = [name for name in self._fields[2:] if getattr(self, name) != getattr(other, name)]
        parts = [self.strategy] * (self[:2] != other[:2])
        parts += [f"{name} {'units' if name == 'activations' else getattr(self, name)}" for name in differs]
        return ", ".join(parts)


class Row(NamedTuple):
    """A run, and what it has told: why it was not measured, if it was not (``failure``)."""

    settings: Settings
    seconds: float = 0.0  # of a step, the median
    samples: int = 0  # of a step, all ranks together; 0: not known
    peak: int = 0  # bytes of a rank
    facts: Mapping[str, Any] = {}  # about its plan; none if it did not make one
    failure: str = ""
    of_memory: bool = False  # the failure
    own: bool = False  # the failure is an error of the program, and not of memory
    started: bool = True

    @property
    def rate(self) -> float:
        """Samples a second, or steps where samples are not known; 0 if it was not measured."""
        return 0.0 if self.failure else (self.samples or 1) / self.seconds


class Search:
    """At most so many runs. ``rows`` has them in their order; ``untried`` what there were not enough of them for."""

    def __init__(self, given: Settings, run: Callable[[Settings], Row], most: int, offload: bool) -> None:
        self.given, self._run, self._most, self._offload = given, run, most, offload
        self.rows: list[Row] = []
        self.untried: list[str] = []

    @property
    def best(self) -> Row | None:
        """The fastest, of equals the one that needs least memory, of these the first."""
        most = max((row.rate for row in self.rows), default=0.0)
        equal = [row for row in self.rows if row.rate and row.rate >= most * (1 - EQUAL)]
        return min(equal, key=lambda row: row.peak, default=None)

    def all(self) -> None:
        """See [Note: the order]."""
        self._attempt(self.given)
        first = self.rows[0]
        if first.failure and not first.of_memory and not first.facts:
            return  # it did not come so far that another setting could matter
        if "stage" in first.facts:
            self.given = self.given._replace(stage=first.facts["stage"], offload=first.facts["offload"])
            self.rows[0] = first._replace(settings=self.given)
        for stage in STAGES:
            self._attempt(self.given._replace(stage=stage, offload=False))
            if first.own and {row.failure for row in self.rows[1:]} == {first.failure}:
                return  # it is not about the stage
        if self.best is None:
            self._rescue()
        if self.best is not None:
            self._micro_batches()
            self._plan_settings()
            if self._offload:
                self._attempt(self._now._replace(offload=True))
            if any(row.of_memory or not row.started for row in self.rows):
                self._attempt(self._now._replace(activations=True))

    @property
    def _now(self) -> Settings:
        """Of the best so far."""
        return self.best.settings if self.best else self.given

    def _facts(self) -> Mapping[str, Any]:
        """About the plan of the best, or of the last that had one."""
        known = [row.facts for row in (*self.rows, self.best) if row and row.facts]
        return known[-1] if known else {}

    def _attempt(self, settings: Settings | None) -> bool:
        """Run a candidate, unless it was tried or cannot fit. Whether it is the best now."""
        if settings is None or any(row.settings == settings for row in self.rows):
            return False
        if reason := self._unfit(settings):
            self.rows.append(Row(settings, failure=reason, started=False))
        elif sum(row.started for row in self.rows) >= self._most:
            self.untried.append(settings.beside(self.given))
            return False
        else:
            row, measured = self._run(settings), [one.samples for one in self.rows if one.rate]
            if row.samples and measured and row.samples != measured[0]:
                why = f"takes {row.samples} samples a step, not {measured[0]}: that would be another training"
                row = row._replace(failure=why)
            self.rows.append(row)
        return self.best is self.rows[-1]

    def _unfit(self, settings: Settings) -> str:
        """Why a candidate cannot fit, by its plan and by what runs needed that differ from it in the plan alone."""
        planned, room = (self._facts().get(name, {}) for name in ("planned", "room"))
        own = planned.get(settings.strategy)
        for row in self.rows if own is not None else ():
            there = planned.get(row.settings.strategy)
            if there is None or row.settings._replace(stage=settings.stage, offload=settings.offload) != settings:
                continue
            needed = row.peak + own - there
            if row.rate and needed > ROOM * room:
                return f"would need {readable_size(needed)}, and there are {readable_size(room)}"
            if row.of_memory and own >= there:
                other = f"{row.settings.strategy}, which ran out of memory, {readable_size(there)}"
                return f"its plan takes {readable_size(own)}, and that of {other}"
        return ""

    def _rescue(self) -> None:
        """Nothing fits: what needs less, until something does."""
        last = self.given._replace(stage=STAGES[-1], offload=False)
        smaller, units = _halved(last), last._replace(activations=True)
        for settings in (smaller, units, last._replace(offload=True), units._replace(offload=True)):
            if self._attempt(settings):
                return

    def _micro_batches(self) -> None:
        """The same global batch in fewer micro-batches, as long as that is better; if it is not, in more."""
        while (now := self._now).batch_size and not now.accumulate % 2:
            if not self._attempt(now._replace(batch_size=2 * now.batch_size, accumulate=now.accumulate // 2)):
                break
        self._attempt(_halved(self._now))

    def _plan_settings(self) -> None:
        """Buckets of a quarter or four times the size, where the model has as much; a unit more or less of prefetch."""
        facts, now = self._facts(), self._now
        if "bucket_mib" in facts:
            size, larger = facts["bucket_mib"], min(4 * facts["bucket_mib"], facts["most_bucket_mib"])
            sizes = [size / 4] * (size >= 4) + [larger] * (larger > size)
            settings = [now._replace(bucket_mib=round(mib, 1)) for mib in sizes]
        else:
            ahead, units = facts.get("prefetch", 0), facts.get("units", 0)
            settings = [now._replace(prefetch=count) for count in (ahead + 1, ahead - 1) if 0 <= count < units]
        for one in settings:
            if self._attempt(one):
                return


def _halved(settings: Settings) -> Settings | None:
    size = settings.batch_size or 1
    return None if size % 2 else settings._replace(batch_size=size // 2, accumulate=2 * settings.accumulate)
