"""Large pages: which there are in a memory, and that they change nothing but speed."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._channel.pages import HUGE, blocks, join
from tests.channel.large_pages import can_join, large_pages


@given(st.integers(0, 3 * HUGE), st.integers(0, 5 * HUGE))
def test_blocks(address: int, size: int) -> None:
    """All that begin at a multiple of their size and lie inside, and no byte beside."""
    found = list(blocks(address, size))
    expected = [block for block in range(0, 9 * HUGE, HUGE) if address <= block and block + HUGE <= address + size]
    assert expected == found


def test_join_keeps_what_is_there() -> None:
    """Four large pages are made of memory with contents, while it keeps its address."""
    if not can_join():
        pytest.skip("this system joins no pages when it is asked to")
    with mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        content = os.urandom(5 * HUGE)
        memory[:] = content
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view
        for block in blocks(address, len(memory)):
            assert join(block)
        assert large_pages(address) > 0
        assert content == memory[:]


def test_join_of_no_memory() -> None:
    """Memory that is gone is passed over."""
    with mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        block = -(-ctypes.addressof(view) // HUGE) * HUGE
        del view
    assert join(block)


def test_memory_that_was_never_touched_is_passed_over() -> None:
    """It takes none, and what lies behind it is joined all the same."""
    with mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view
        first, second = blocks(address, len(memory))[:2]
        memory[second - address] = 1
        before = large_pages(address)
        assert join(first)
        assert before == large_pages(address)
        assert join(second) == can_join()
        assert large_pages(address) > 0 or not can_join()
