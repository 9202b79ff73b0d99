"""Blocks: pieces of shared memory that one process fills for others, taken from segments that are kept and used again.

A `Block` goes back to its pool when nothing refers to it any more: not the message that is being sent, not a receiver (`_runtime/lending`
holds it for as long as one has a view of it), not a tensor of `shared_empty`. So who uses a block just holds it.

Rules:

* Sizes are rounded up to one of four steps between two powers of two, in whole pages. A block of up to `SMALL` bytes is cut from a
  segment with others, since every segment costs a descriptor; a larger one has a segment of its own.
* The block given back last is taken first: its pages are warm. What has not been used for two rounds of `age` goes back to the system.
* The pool never has more than `limit` bytes of memory. `take` says why it gives none; to do without is the caller's part.
* Blocks may be taken and let go in any thread, also while garbage is collected: letting go is one append.
* A block that a forked child may still see (`shared`, and a fork while it lived) is not used again. In the child the pool, which is its
  parent's, gives nothing.
* Segments hold no more than a quarter of the descriptors that this process may have.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import resource
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from monarch_async._channel.segment import PAGE, SUPPORTED, Segment

__all__ = ["Block", "SegmentPool", "forks", "physical_memory"]

SMALL = 4 << 20
SLAB = 32 << 20
KEEP = 1 << 30
"""Bytes of unused blocks that are kept at most."""

_Range = tuple[Segment, int, int]
"""Segment, offset, size; of one that must not be used again the size is negative."""

_Unused = tuple[int, int, _Range]
"""When it was given back, in rounds of `age` and in order; and what."""

_forks = 0
_depth = 0  # forks between the first process and this one


def forks() -> int:
    """How often this process, or one it was forked from, has begun to fork."""
    return _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


def _count_depth() -> None:
    global _depth
    _depth += 1


os.register_at_fork(before=_count_fork, after_in_child=_count_depth)


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def _most_segments() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20 if limit == resource.RLIM_INFINITY else limit) // 4


def _rounded(size: int) -> int:
    step = max(PAGE, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


class _Returned(deque[_Range]):
    """Blocks that were let go; while the pool is `open`, for others to take."""

    open = True


class Block:
    """`size` bytes of a segment; held by whoever uses them."""

    __slots__ = ("__weakref__", "_born", "_fresh", "_returned", "_spoilt", "offset", "segment", "shared", "size")

    def __init__(self, segment: Segment, offset: int, size: int, fresh: bool, returned: _Returned) -> None:
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
        spoilt = self._spoilt or (self.shared and self._born != _forks)
        if self._returned.open:
            self._returned.append((self.segment, self.offset, -self.size if spoilt else self.size))


class SegmentPool:
    """See the module's docstring. `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.allocated = 0  # bytes of memory that its segments have; at most `_limit`
        self.kept = 0  # bytes of them that are in `_warm`
        self.retired: list[int] = []  # numbers of segments that are gone since somebody looked
        self._limit = limit
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._returned = _Returned()  # blocks that were let go and are not in `_warm` yet
        self._warm: dict[int, list[_Unused]] = {}  # by size, the one given back last at the end
        self._order = itertools.count()
        self._cold: dict[int, list[_Range]] = {}  # parts of slabs whose memory was given back
        self._slab: Segment | None = None  # that blocks are being cut from
        self._cut = 0  # how much of it is
        self._in_use: dict[int, int] = {}  # bytes of each slab, by number, that have memory
        self._round = 0
        self._shared: list[tuple[int, weakref.ref[Block]]] = []  # those of `shared` blocks by address, sorted; replaced, never changed
        self._segments = weakref.WeakSet[Segment]()  # all that are left
        self._depth = _depth

    def take(self, size: int, *, shared: bool = False) -> Block | str:
        """A block of at least `size` bytes, or why there is none."""
        if not SUPPORTED:
            return "this system has no memfd"
        if self._depth != _depth:  # before the lock, which the parent may have held
            return "this process was forked from the one whose memory it is: do it in the parent, or start this one with 'spawn'"
        size = _rounded(size)
        with self._lock:
            self._collect()
            found = self._find(size)
            if isinstance(found, str):
                return found
            block = Block(*found, self._returned)
        if shared:
            try:
                block.commit()  # without the lock, since this takes long
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
        """Give back to the system what was not used since the call before the last one."""
        if self._depth != _depth:
            return
        with self._lock:
            self._collect()
            self._round += 1
            self._trim(0, before=self._round - 1)

    def close(self) -> None:
        """Keep nothing any more; blocks in use stay as they are, also when they are let go."""
        if self._depth != _depth:
            return
        with self._lock:
            self._slab = None
            self._collect()
            self._trim(0, before=self._round + 1)
            self._cold.clear()
            self._returned.open = False

    def _find(self, size: int) -> tuple[Segment, int, int, bool] | str:
        warm = self._warm.get(size)
        if warm:
            *_, found = warm.pop()
            self.kept -= size
            return *found, False
        if self.allocated + size > self._limit:
            self._trim(max(0, self.kept - (self.allocated + size - self._limit)), before=self._round + 1)
            if self.allocated + size > self._limit:
                return f"{self.allocated} bytes are in use and {size} more would pass the option segment_bytes={self._limit}"
        if len(self._segments) >= _most_segments():
            self._trim(0, before=self._round + 1)
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

    def _allocate(self, size: int) -> _Range:
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
            found = segment, _, size = returned.popleft()
            if size > 0:
                self._warm.setdefault(size, []).append((self._round, next(self._order), found))
                self.kept += size
            elif -size > SMALL:  # its memory is gone with it, once no child has it any more
                self.allocated += size
                self.retired.append(segment.number)
        if self.kept > KEEP:
            self._trim(KEEP, before=self._round + 1)

    def _trim(self, keep: int, *, before: int) -> None:
        """Give unused blocks back to the system, the oldest first, until `keep` bytes are kept or all are from round `before` or later."""
        oldest = sorted((age, order, size) for size, entries in self._warm.items() for age, order, _ in entries)
        for age, _, size in oldest:
            if self.kept <= keep or age >= before:
                break
            *_, found = self._warm[size].pop(0)
            self.kept -= size
            self.allocated -= size
            self._free(*found)

    def _free(self, segment: Segment, offset: int, size: int) -> None:
        segment.discard(offset, size)
        if size > SMALL:
            self.retired.append(segment.number)
            return
        self._cold.setdefault(size, []).append((segment, offset, size))
        self._in_use[segment.number] -= size
        if segment is not self._slab:
            self._retire_empty(segment)

    def _retire_empty(self, segment: Segment) -> None:
        if not self._in_use.get(segment.number):
            self._in_use.pop(segment.number, None)
            self._cold = {size: [cold for cold in entries if cold[0] is not segment] for size, entries in self._cold.items()}
            self.retired.append(segment.number)
