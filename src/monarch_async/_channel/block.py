"""A block: a piece of shared memory, for as long as somebody uses it. See `blocks`, whose pool they come from and go back to."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable

from monarch_async._channel.segment import PAGE, Segment

__all__ = ["EMPTY", "SEEN", "USABLE", "Block", "Range", "Returned", "depth", "forks"]

Range = tuple[Segment, int, int]
"""Segment, offset, size."""

USABLE, EMPTY, SEEN = range(3)
"""What becomes of a block that was let go: it is used again; its memory goes back to the system; it stays as it is."""

_forks = 0
_depth = 0  # forks between the first process and this one


def forks() -> int:
    """How often this process, or one it was forked from, has begun to fork."""
    return _forks


def depth() -> int:
    """How many forks are between the first process and this one."""
    return _depth


def _count_fork() -> None:
    global _forks
    _forks += 1


def _count_depth() -> None:
    global _depth
    _depth += 1


os.register_at_fork(before=_count_fork, after_in_child=_count_depth)


class Returned(deque[tuple[Range, int]]):
    """Blocks that were let go, and what may become of them; while the pool is `open`, for others to take."""

    open = True


class Block:
    """`size` bytes of a segment; held by whoever uses them."""

    __slots__ = ("__weakref__", "_born", "_fresh", "_returned", "_spoilt", "offset", "segment", "shared", "size")

    def __init__(self, segment: Segment, offset: int, size: int, fresh: bool, returned: Returned) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.shared = False  # between this process and its children, and whoever it is sent to
        self._fresh = fresh  # its pages have no memory yet
        self._spoilt = False  # nor will they get any
        self._born = _forks
        self._returned = returned

    @property
    def address(self) -> int:
        """Where it is in this process."""
        return self.segment.address + self.offset

    def view(self) -> memoryview:
        """Its bytes, writable; holds the block."""
        memory = (ctypes.c_ubyte * self.size).from_address(self.address)
        memory.block = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def commit(self) -> None:
        """See to it that all of it has memory. Raises `OSError` when the system has none left; the block then is of no use."""
        if self._fresh:
            self._spoilt = True
            self.segment.commit(self.offset, self.size)
            self._fresh = self._spoilt = False

    def fill(self, parts: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Copy bytes to where they shall be, in order of their offsets. Raises `OSError` as `commit` does."""
        if not self._fresh:
            for offset, data in parts:
                self.segment.write(self.offset + offset, data)
            return
        self._spoilt = True
        end = 0
        for offset, data in parts:
            self.segment.write_fresh(self.offset + offset, data)
            end = offset + len(data)
        end -= end % PAGE
        if end < self.size:
            self.segment.commit(self.offset + end, self.size - end)
        self._fresh = self._spoilt = False

    def __del__(self) -> None:
        seen = self.shared and self._born != _forks
        if self._returned.open:
            self._returned.append(((self.segment, self.offset, self.size), SEEN if seen else EMPTY if self._spoilt else USABLE))
