"""Blocks: pieces of shared memory that one process fills for others, taken from segments that are kept and used again.

A `Block` goes back to its pool when nothing refers to it any more: not the message that is being sent, not a receiver (`_runtime/lending`
holds it for as long as one has a view of it), not a tensor of `shared_empty`. So who uses a block just holds it.

Rules:

* Sizes are rounded up to one of four steps between two powers of two, in whole pages. A block of up to `SMALL` bytes is cut from a
  segment with others, since every segment costs a descriptor; a larger one has a segment of its own.
* The block given back last is taken first: its pages are warm. What has not been used for two rounds of `age` goes back to the system.
* The pool never has more than `limit` bytes of memory. `take` says why it gives none; to do without is the caller's part.
* Blocks may be taken and let go in any thread, also while garbage is collected: letting go is one append.
* A block that a forked child may still see (`shared`, and a fork while it lived) is not used again: its memory goes with its segment.
  In the child the pool, which is its parent's, gives nothing.
* What a block has that could not be filled goes back to the system. Where the system does not take memory back it goes with its segment.
* To give memory back takes as long as to copy some. So it is done in slices, without the pool's lock, when it is asked for (`release`); at
  once only to make room for what is taken.
* Segments hold no more than a quarter of the descriptors that this process may have.
"""

from __future__ import annotations

import errno
import itertools
import resource
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque

from monarch_async._channel.block import EMPTY, USABLE, Block, Range, Returned, depth
from monarch_async._channel.segment import PAGE, SUPPORTED, Segment

__all__ = ["SegmentPool"]

SMALL = 4 << 20
SLAB = 32 << 20
KEEP = 1 << 30
"""Bytes of unused blocks that are kept at most."""
SLICE = 8 << 20
"""Bytes that are given back to the system in one go: 1 to 2 ms."""

_Unused = tuple[int, int, Range]
"""When it was given back, in rounds of `age` and in order; and what."""


def _most_segments() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20 if limit == resource.RLIM_INFINITY else limit) // 4


def _rounded(size: int) -> int:
    step = max(PAGE, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


class SegmentPool:
    """See the module's docstring. `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.allocated = 0  # bytes of memory that its segments have; at most `_limit`
        self.kept = 0  # bytes of them that are in `_warm`
        self._limit = limit
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._returned = Returned()  # blocks that were let go and are not in `_warm` yet
        self._warm: dict[int, list[_Unused]] = {}  # by size, the one given back last at the end
        self._order = itertools.count()
        self._doomed: deque[Range] = deque()  # unused blocks, or what is left of them, whose memory is to be given back
        self._doomed_bytes = 0  # in them, and in what is being given back
        self._releasing = threading.Lock()  # held by who gives memory back; taken before `_lock`
        self._retired: list[int] = []  # numbers of segments that are gone since somebody asked
        self._cold: dict[int, list[Range]] = {}  # parts of slabs whose memory was given back
        self._slab: Segment | None = None  # that blocks are being cut from
        self._cut = 0  # how much of it is
        self._in_use: dict[int, int] = {}  # bytes of each slab, by number, that have memory and are not lost
        self._lost: dict[int, int] = {}  # bytes of each slab whose memory stays until it is gone
        self._round = 0
        self._shared: list[tuple[int, weakref.ref[Block]]] = []  # those of `shared` blocks by address, sorted; replaced, never changed
        self._segments = weakref.WeakSet[Segment]()  # all that are left
        self._depth = depth()

    def take(self, size: int, *, shared: bool = False) -> Block | str:
        """A block of at least `size` bytes, or why there is none."""
        if not SUPPORTED:
            return "this system has no memfd"
        if self._depth != depth():  # before the lock, which the parent may have held
            return "this process was forked from the one whose memory it is: do it in the parent, or start this one with 'spawn'"
        size = _rounded(size)
        while (found := self._find(size)) is None:
            self.release()
        if isinstance(found, str):
            return found
        block = Block(*found, self._returned)
        if shared:
            try:
                block.commit()
            except OSError as error:
                return f"the system gives no memory for {size} bytes: {error.strerror}"
            block.shared = True
            with self._lock:
                entries = [entry for entry in self._shared if entry[1]() is not None]
                insort(entries, (block.address, weakref.ref(block)), key=lambda entry: entry[0])
                self._shared = entries
        return block

    @property
    def shares(self) -> bool:
        """Whether it has given any `shared` blocks that may be in use."""
        return bool(self._shared)

    def find(self, address: int, size: int) -> Block | None:
        """The `shared` block that these bytes are in."""
        entries = self._shared
        index = bisect_right(entries, address, key=lambda entry: entry[0])
        block = entries[index - 1][1]() if index else None
        return block if block is not None and address + size <= block.address + block.size else None

    def age(self) -> None:
        """What was not used since the call before the last one is to be given back."""
        if self._depth != depth():
            return
        with self._lock:
            self._collect()
            self._round += 1
            self._doom(0, before=self._round - 1)

    @property
    def doomed(self) -> bool:
        """Whether something is to be given back."""
        return bool(self._doomed)

    def release(self) -> bool:
        """Give a slice of what is to be given back to the system. Whether there is more."""
        if self._depth != depth():
            return False
        with self._releasing:
            with self._lock:
                if not self._doomed:
                    return False
                segment, offset, size = self._doomed.popleft()
                rest = (size - 1) // SLICE * SLICE  # from the end on, and along the bounds of huge pages
                if rest:
                    self._doomed.appendleft((segment, offset, rest))
            try:
                segment.discard(offset + rest, size - rest)
            except OSError:
                given_back = False
            else:
                given_back = True
            with self._lock:
                self._doomed_bytes -= size - rest
                self._released(segment, offset, size, rest, given_back)
                return bool(self._doomed)

    def take_retired(self) -> list[int]:
        """Numbers of the segments that are gone since the last call."""
        with self._lock:
            retired, self._retired = self._retired, []
        return retired

    def close(self) -> None:
        """Keep nothing any more; blocks in use stay as they are, also when they are let go."""
        if self._depth != depth():
            return
        with self._lock:
            self._returned.open = False
            self._slab = None
            self._collect()
            self._doom(0, before=self._round + 1)
        while self.release():
            pass
        with self._lock:
            self._cold.clear()

    def _find(self, size: int) -> tuple[Segment, int, int, bool] | str | None:
        """A range, and whether it is fresh; or why there is none. `None` if there may be one when something has been released."""
        with self._lock:
            self._collect()
            warm = self._warm.get(size)
            if warm:
                *_, found = warm.pop()
                self.kept -= size
                return *found, False
            missing = self.allocated + size - self._limit
            if missing > 0:
                self._doom(max(0, self.kept - max(0, missing - self._doomed_bytes)), before=self._round + 1)
                if not self._doomed_bytes:
                    return f"{self.allocated} bytes are in use and {size} more would pass the option segment_bytes={self._limit}"
                return None
            if len(self._segments) >= _most_segments():
                self._doom(0, before=self._round + 1)
                if self._doomed_bytes:
                    return None
            try:
                return *self._allocate(size), True
            except OSError as error:
                return f"no segment can be had: {error.strerror}"

    def _new_segment(self, size: int) -> Segment:
        if len(self._segments) >= _most_segments():
            raise OSError(errno.EMFILE, "segments hold a quarter of the descriptors that this process may have (ulimit -n) already")
        segment = Segment(next(self._numbers), size)
        self._segments.add(segment)
        return segment

    def _allocate(self, size: int) -> Range:
        if size > SMALL:
            segment = self._new_segment(size)
            self.allocated += size
            return segment, 0, size
        cold = self._cold.get(size)
        if cold:
            segment, offset, _ = cold.pop()
        else:
            if self._slab is None or self._cut + size > SLAB:
                full, self._slab, self._cut = self._slab, self._new_segment(SLAB), 0
                if full is not None:
                    self._retire_empty(full)
            segment, offset = self._slab, self._cut
            self._cut += size
        self._in_use[segment.number] = self._in_use.get(segment.number, 0) + size
        self.allocated += size
        return segment, offset, size

    def _collect(self) -> None:
        """Take in what was let go."""
        returned = self._returned
        while returned:
            found, future = returned.popleft()
            segment, _, size = found
            if future == USABLE:
                self._warm.setdefault(size, []).append((self._round, next(self._order), found))
                self.kept += size
            elif future == EMPTY:
                self._doomed.append(found)
                self._doomed_bytes += size
            elif segment.number in self._in_use:
                self._lose(segment, size)
            else:  # its memory is gone with it, once no child has it any more
                self.allocated -= size
                self._retired.append(segment.number)
        if self.kept > KEEP:
            self._doom(KEEP, before=self._round + 1)

    def _doom(self, keep: int, *, before: int) -> None:
        """Unused blocks are to be given back, the oldest first, until `keep` bytes are kept or all are from round `before` or later."""
        if self.kept <= keep:
            return
        oldest = sorted((age, order, size) for size, entries in self._warm.items() for age, order, _ in entries)
        for age, _, size in oldest:
            if self.kept <= keep or age >= before:
                break
            *_, found = self._warm[size].pop(0)
            self.kept -= size
            self._doomed.append(found)
            self._doomed_bytes += size

    def _released(self, segment: Segment, offset: int, size: int, rest: int, given_back: bool) -> None:
        """The end of a block was given back, or could not be; the rest of it is to be."""
        if segment.number not in self._in_use:  # what could not be is gone with the segment, when nobody has that any more
            self.allocated -= size - rest
            if not rest:
                self._retired.append(segment.number)
        elif given_back:
            self.allocated -= size
            self._cold.setdefault(size, []).append((segment, offset, size))
            self._in_use[segment.number] -= size
            self._retire_empty(segment)
        else:
            self._lose(segment, size)

    def _lose(self, segment: Segment, size: int) -> None:
        """A part of a slab can't be used again, nor its memory be given back before all of the slab is."""
        self._in_use[segment.number] -= size
        self._lost[segment.number] = self._lost.get(segment.number, 0) + size
        self._retire_empty(segment)

    def _retire_empty(self, slab: Segment) -> None:
        """Let a slab go in which nothing is in use, if no more is to be cut from it or something of it is lost."""
        number = slab.number
        if self._in_use.get(number) or (slab is self._slab and number not in self._lost):
            return
        if slab is self._slab:
            self._slab = None
        self._in_use.pop(number, None)
        self.allocated -= self._lost.pop(number, 0)
        self._cold = {size: [cold for cold in entries if cold[0] is not slab] for size, entries in self._cold.items()}
        self._retired.append(number)
