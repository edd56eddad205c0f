"""Transfers that take several hops, each of which begins when the one before has ended.

[Note: two hops and one order]
The second hop begins when the first one has ended, while the rank computes, or waits for something else: if it had to
come back for that, ranks could wait for one another. So each hop of each kind has a thread, which carries transfers
one after the other, in the order in which the rank has issued them, which is the same on all ranks. One may be
in its second hop while the next one is in its first. After one that failed none is sent any more: another rank would
take it for the one that did not come. A transfer of one hop has a thread that waits for it, so that others can see when
it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch.distributed as dist

from lightning_zero._torch import untracked
from lightning_zero.comm.control import LOOK_SECONDS, Note, doing, passed_on, verdict
from lightning_zero.comm.groups import Resource, connections

__all__ = ["Passage", "Relay"]

_GRACE_SECONDS = 1.0  # for transfers under way, before their connections are shut
_CUT_OFF_SECONDS = 3.0  # then, before a thread is left behind: gloo tells nobody of a message that was cut off


class Relay(Resource):
    """Takes transfers of one kind through hops: see [Note: two hops and one order].

    Args:
        name: of all transfers of the kind, alike on all ranks.
        groups: which carry the hops. A transfer of one hop waits for the ranks of its group, any other one for all.
        stop: ends waits of hops that no group carries.
    """

    def __init__(
        self, name: str, groups: Sequence[dist.ProcessGroup | None], stop: Callable[[], object] = bool
    ) -> None:
        self.name, self._stop = name, stop
        alone = groups[0] if len(groups) == 1 else None
        self._members = tuple(range(dist.get_world_size()) if alone is None else dist.get_process_group_ranks(alone))
        connections[name] = [place for group in groups if group is not None for place in connections[group.group_name]]
        passed_on[name] = 0
        self._failure: BaseException | None = None
        self._lanes = [_Lane(f"lightning_zero: {name}, hop {hop}") for hop, _ in enumerate(groups, 1)]

    def carry(self, what: str, hops: Sequence[Callable[[], object]]) -> Passage:
        """Run one after the other, each in the thread of its hop, which keeps no reference to it when it has ended:
        who waits may count who else has the memory."""
        passed_on[self.name] += 1
        passage = Passage(what, self.name, passed_on[self.name], self._members)
        self._lanes[0].do(partial(self._take, passage, list(hops), 0))
        return passage

    def end(self) -> None:
        """End the threads, when transfers under way have ended, or have had some seconds for it."""
        for lane in self._lanes:
            if not lane.ends_within(_GRACE_SECONDS):
                connections.shut(self.name)
                self._stop()
                lane.ends_within(_CUT_OFF_SECONDS)
        connections.pop(self.name, None)
        passed_on.pop(self.name, None)

    def _take(self, passage: Passage, left: list[Callable[[], object]], hop: int) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            with untracked():
                left[0]()
            del left[0]
        except BaseException as error:
            self._failure = error.with_traceback(None)
            passage.end(self._failure)
        else:
            if left:
                self._lanes[hop + 1].do(partial(self._take, passage, left, hop + 1))
            else:
                passage.end()


class _Lane:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def ends_within(self, seconds: float) -> bool:
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and the tensors with it


class Passage:
    """A transfer on its way, as a ``Pending`` waits for it."""

    def __init__(self, what: str, kind: str, number: int, members: tuple[int, ...]) -> None:
        self.kind, self._note = kind, Note(what, kind, number, members)
        self._under_way = threading.Lock()  # and no event: the watch knows a wait by the innermost call, which is here
        self._under_way.acquire()
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> None:
        """It has ended, or has failed. Once."""
        self._failure = failure
        self._under_way.release()

    def is_completed(self) -> bool:
        return not self._under_way.locked()

    def wait(self) -> None:
        """Raises what made it fail, or why nobody can go on."""
        with doing(*self._note):
            while not self._under_way.acquire(timeout=LOOK_SECONDS):
                if reason := verdict():
                    raise RuntimeError(reason)
        self._under_way.release()
        if self._failure is not None:
            raise self._failure
