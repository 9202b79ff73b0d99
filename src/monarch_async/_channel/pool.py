"""Warm memory for what is on its way out.

A large argument is copied when the call is made, so that the caller may change it at once. Fresh memory costs its page faults, many times
the copy itself; so buffers are kept and used again, up to a bound.
"""

from __future__ import annotations

__all__ = ["BufferPool"]


class BufferPool:
    """Byte buffers for reuse; at most `limit` bytes are kept while nobody uses them."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self._limit = limit
        self._free: list[bytearray] = []  # smallest first
        self._kept = 0  # bytes in `_free`

    def take(self, size: int) -> tuple[bytearray, memoryview]:
        """A buffer of at least `size` bytes and a view of just so many. Give the buffer back with `give` when no view is in use."""
        for index, buffer in enumerate(self._free):
            if size <= len(buffer) <= 4 * size:
                del self._free[index]
                self._kept -= len(buffer)
                return buffer, memoryview(buffer)[:size]
        buffer = bytearray(size)
        return buffer, memoryview(buffer)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back."""
        self._free.append(buffer)
        self._free.sort(key=len)
        self._kept += len(buffer)
        while self._kept > self._limit:
            self._kept -= len(self._free.pop(0))
