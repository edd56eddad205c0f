"""Telling the outermost of nested calls of an optimizer's ``step``."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["OutermostStep"]


class OutermostStep:
    """Notices steps inside of a step.

    torch runs step hooks in a wrapper that it puts around ``step`` of every class of which an optimizer was made. A
    class whose ``step`` calls that of its base therefore runs them twice, one pair inside of the other, as soon as
    somebody in the process has made an optimizer of the base. Only the outer pair may exchange gradients: the inner
    one would find none and step on zeros.

    A step that raised never runs its post-hooks, so that a counter alone would take the next step for a nested one.
    What tells is whether the wrapper of the outer step is still running.
    """

    def __init__(self) -> None:
        self._wrapper: FrameType | None = None
        self._inside = 0

    def begins(self, wrapper: FrameType | None) -> bool:
        """Whether the step whose pre-hooks run is an outermost one.

        Args:
            wrapper: the frame that runs the hooks.
        """
        if self._is_around(wrapper):
            self._inside += 1
            return False
        self._wrapper, self._inside = wrapper, 0
        return True

    def ends(self) -> bool:
        """Whether the step whose post-hooks run is an outermost one."""
        if self._inside:
            self._inside -= 1
            return False
        self._wrapper = None
        return True

    def running(self) -> bool:
        """Whether the caller was called by an outermost step."""
        return self._is_around(sys._getframe(1))

    def forget(self) -> None:
        """Let go of a step that raised, and of all that its frames hold."""
        self._wrapper, self._inside = None, 0

    def _is_around(self, frame: FrameType | None) -> bool:
        while self._wrapper is not None and frame is not None:
            frame = frame.f_back
            if frame is self._wrapper:
                return True
        return False
