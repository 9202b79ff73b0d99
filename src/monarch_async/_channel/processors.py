"""What threads that copy or compute for long, without waiting for anything, do for others and for themselves."""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["give_way", "keep_apart"]

give_way = ctypes.CDLL(None).sched_yield
"""Let another thread that waits for this processor go first; where none waits it costs under a microsecond.

A loop that wakes where every processor copies has to wait for the end of a copier's time slice, some 3 to 4 ms, whenever the scheduler
finds that it has had its share. Between two parts of a copy that wait is over at once. Python's lock is free meanwhile, which it is not
in `os.sched_yield` of Python 3.11. A lower priority would be worse: who has Python's lock and no processor holds up all the others.
"""


def keep_apart(index: int, count: int, least: int = 1) -> None:
    """Give this thread, number `index` of `count`, processors of its own among those of its process, if each gets `least`; else all.

    Left to itself the kernel has threads that wake each other, or were woken at once, share one processor for much of the time.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(os.getpid()))
        with contextlib.suppress(OSError):  # the process has lost some of them in this moment
            os.sched_setaffinity(0, allowed[index::count] if len(allowed) // count >= least else allowed)
