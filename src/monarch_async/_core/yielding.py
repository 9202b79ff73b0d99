"""Letting others have the processor: for threads that copy or compute long without waiting for anything."""

from __future__ import annotations

import ctypes

__all__ = ["give_way"]

give_way = ctypes.CDLL(None).sched_yield
"""Let another thread that waits for this processor go first; where none waits it costs under a microsecond.

A loop that wakes where every processor copies has to wait for the end of a copier's time slice, some 3 to 4 ms, whenever the scheduler
finds that it has had its share. Between two parts of a copy that wait is over at once. Python's lock is free meanwhile, which it is not
in `os.sched_yield` of Python 3.11. A lower priority would be worse: who has Python's lock and no processor holds up all the others.
"""
