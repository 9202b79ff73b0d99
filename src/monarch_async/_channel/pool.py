"""Memory for large messages: warm buffers for what is on its way out, and room for what comes in.

A large argument is copied when the call is made, so that the caller may change it at once. Fresh memory costs its page faults, many times
the copy itself; so buffers are kept and used again, up to a bound. What comes in belongs to whoever gets it and does not come back; there
the cost of page faults is kept down by asking for huge pages, and memory is committed only as bytes arrive.
"""

from __future__ import annotations

import mmap

__all__ = ["BufferPool", "allocate"]

HUGE = 4 << 20
"""From this size on (bytes), memory comes from huge pages where the system has them."""

Buffer = bytearray | mmap.mmap


def allocate(size: int) -> memoryview:
    """Writable memory of `size` bytes; from `HUGE` on it is committed as it is filled. Raises `MemoryError`."""
    return memoryview(_new(size))


def _new(size: int) -> Buffer:
    if size < HUGE:
        return bytearray(size)
    try:
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a message of {size} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them: ordinary pages do
    return buffer


class BufferPool:
    """Byte buffers for reuse; at most `limit` bytes are kept while nobody uses them. A larger buffer is never kept."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self.kept = 0  # bytes in `_free`
        self._limit = limit
        # By the number of bits of their size: any buffer of the next class is large enough. The last given is taken first, as it is warm.
        self._free: dict[int, list[Buffer]] = {}

    def take(self, size: int) -> tuple[Buffer, memoryview]:
        """A buffer of at least `size` bytes and a view of just so many. Give the buffer back with `give` when no view is in use."""
        bits = size.bit_length()
        for free in (self._free.get(bits), self._free.get(bits + 1)):
            if free and len(free[-1]) >= size:
                buffer = free.pop()
                self.kept -= len(buffer)
                return buffer, memoryview(buffer)[:size]
        buffer = _new(size)
        return buffer, memoryview(buffer)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. When that is too much, those of the sizes that have been idle longest go first."""
        size = len(buffer)
        if not 0 < size <= self._limit:
            return
        bits = size.bit_length()
        free = self._free.pop(bits, [])
        free.append(buffer)
        self._free[bits] = free  # the class used last stands last
        self.kept += size
        while self.kept > self._limit:
            oldest, buffers = next(iter(self._free.items()))
            if not buffers:
                del self._free[oldest]
                continue
            self.kept -= len(buffers.pop(0))
