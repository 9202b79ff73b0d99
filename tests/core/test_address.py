"""Where bytes lie: of what can be written to and what can't, and nothing is kept."""

from __future__ import annotations

import ctypes

import numpy

from monarch_async._core.address import address_of


def test_of_any_buffer() -> None:
    """Of a slice its own, of other elements than bytes that of the first; none of what is empty."""
    memory = bytearray(b"abcdefgh" * 100)
    view = memoryview(memory)
    assert address_of(view) + 7 == address_of(view[7:]) == address_of(view.toreadonly()[7:])
    assert address_of(view) == address_of(view.cast("d")) == address_of(view.cast("d").toreadonly()) == address_of(view.cast("d", (10, 10)))
    assert 0 == address_of(view[:0]) == address_of(view[:0].toreadonly()) == address_of(b"")
    view.release()
    memory.append(1)  # nothing is kept that would forbid it
    array = numpy.arange(10)
    assert array.ctypes.data == address_of(array.data)


def test_of_bytes() -> None:
    """Themselves, and views of them."""
    content = bytes(range(100))
    assert b"\x05\x06" == ctypes.string_at(address_of(content) + 5, 2) == ctypes.string_at(address_of(memoryview(content)[5:7]), 2)
