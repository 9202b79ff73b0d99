"""What the kernel says of the pages of this process."""

from __future__ import annotations

import ctypes
import mmap
import re
from functools import cache
from pathlib import Path

from monarch_async._channel.pages import HUGE, blocks, join

__all__ = ["can_join", "large_pages"]


def large_pages(address: int) -> int:
    """Bytes in large pages in the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no memory at {address:#x}")


@cache
def can_join() -> bool:
    """Whether this system makes large pages when it is asked to."""
    with mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view
        return all(join(block) for block in blocks(address, len(memory))) and large_pages(address) > 0
