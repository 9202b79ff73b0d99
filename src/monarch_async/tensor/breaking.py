"""Works of gloo whose connections are broken, and that gloo may not end even so.

Theory: when a connection breaks gloo fails what waits for it, but for the buffer that it is receiving into just then: a work that waits for
nothing else waits for ever. It can't touch its tensors any more, since nothing comes. So it counts as ended some time after the
connections were broken; its group, whose threads would be waited for, is never let go of.

Rules:

* Each work is told of once, by gloo or by giving it up.
* `hung` is looked at when all have been told of.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from monarch_async.tensor.running import Running, Told

__all__ = ["UnderWay", "keep_for_ever"]

PATIENCE = 2.0
"""Seconds; a work whose connections are broken ends within milliseconds, if it does."""


class UnderWay:
    """The works of one backend."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: set[_Followed] = set()
        self._watched = False
        self.hung = False
        """Whether a work was given up."""

    def follow(self, running: Running) -> Running:
        return _Followed(self, running)

    def broken(self) -> None:
        """The connections are: give up what has not ended in a while. Returns at once; from any thread."""
        with self._changed:
            if not self._left or self._watched:
                return
            self._watched = True
        threading.Thread(target=self._watch, name="monarch_async breaking gloo off", daemon=True).start()

    def _watch(self) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._left, PATIENCE)
            left = [*self._left]
            self._watched = False
            self.hung = self.hung or not ended
        for followed in left:
            followed.end(RuntimeError("gloo does not end it, though its connections are broken"))

    def _add(self, followed: _Followed) -> None:
        with self._changed:
            self._left.add(followed)

    def _remove(self, followed: _Followed) -> bool:
        with self._changed:
            there = followed in self._left
            self._left.discard(followed)
            self._changed.notify_all()
        return there


class _Followed:
    """A work that is told of once."""

    __slots__ = ("_running", "_told", "_under_way")

    def __init__(self, under_way: UnderWay, running: Running) -> None:
        self._under_way = under_way
        self._running = running
        self._told: Told

    def when_done(self, told: Told) -> None:
        self._told = told
        self._under_way._add(self)
        self._running.when_done(self.end)

    def end(self, error: BaseException | None) -> None:
        if self._under_way._remove(self):
            self._told(error)


def keep_for_ever(group: Any) -> None:
    """Never let go of a group one of whose threads hangs: that would wait for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
