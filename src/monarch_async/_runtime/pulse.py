"""The page on which the processes of a host show that they are alive, and what they are doing, without anybody asking.

Theory: the agent maps anonymous shared memory before it forks the first zygote, so that every process below has it, with no name and no
descriptor. Each process has a *slot* of its own there, which its watchdog writes a few times a second and the agent reads. So the agent
needs no answer from a process to judge it, and has what was known of it last when it can't say anything any more.

Rules:

* One writer per slot, apart from `Slot.clear`, which the agent calls before the process exists, and one byte by which it asks for
  something.
* Numbers may be read while they are being written: whoever reads looks again soon. Texts carry a checksum, and one that is torn reads as
  empty.
* Times are those of `time.monotonic()`, which all processes of a host share.
* Memory is taken as it is touched: one page of 4 KiB for a process, a second for one that was stuck.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import deque
from typing import NamedTuple

__all__ = ["HANDLERS", "NOW", "NO_SLOT", "STACK", "Page", "Pulse", "Slot", "inherited_page", "make_page"]

NO_SLOT = -1
"""For a process that is not watched: its agent has no page, or no slot was left."""
SLOTS = 2048
_SIZE = 8192
_NUMBERS = struct.Struct("=5d5q")
_BEAT = struct.Struct("=d")
_HEADER = struct.Struct("=II")
_ASKED = 80  # where the agent asks for where handlers stand
_HEADERS = 96  # where the headers of the texts are

NOW, HANDLERS, STACK = 0, 1, 2
"""Texts of a slot: what runs now; which functions are endpoints of which actors; the stack of a loop that is stuck."""
_AREAS = ((128, 384), (512, 3584), (4096, 4096))


class Pulse(NamedTuple):
    """The numbers of a slot. Times are 0 where there is nothing to tell."""

    beat: float = 0.0  # when the watchdog last looked
    held: float = 0.0  # since when the loop has been in one step; 0 while it answers
    changed: float = 0.0  # when `busy` became what it is
    began: float = 0.0  # since when that which runs now has
    stacked: float = 0.0  # when the text `STACK` was written
    busy: int = 0
    ending: int = 0  # the loop has ended, on the way out
    main: int = 0  # `threading.get_ident()` of the loop's thread
    watchdog: int = 0  # the kernel's number of the watchdog's thread
    file: int = -1  # descriptor to which the stacks of all threads are written at the signal for that


class Slot:
    """One process's part of the page."""

    __slots__ = ("_memory",)

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def clear(self) -> None:
        """For a process that is about to be made."""
        self._memory[:128] = bytes(128)

    def write(self, pulse: Pulse) -> None:
        self._memory[: _NUMBERS.size] = _NUMBERS.pack(*pulse)  # `pack_into` would write zeros first

    def beat(self, now: float) -> None:
        """Change only when the watchdog has looked."""
        self._memory[: _BEAT.size] = _BEAT.pack(now)

    def ask(self, wanted: bool) -> None:
        """For the agent: have the watchdog write down, at its next look, where handlers stand that wait."""
        self._memory[_ASKED] = wanted

    @property
    def asked(self) -> bool:
        return bool(self._memory[_ASKED])

    def read(self) -> Pulse:
        return Pulse._make(_NUMBERS.unpack_from(self._memory))

    def write_text(self, area: int, text: bytes) -> None:
        """Replace a text. Of what is too long the end is kept."""
        start, size = _AREAS[area]
        text = text[-size:]
        self._memory[start : start + len(text)] = text
        _HEADER.pack_into(self._memory, _HEADERS + area * _HEADER.size, len(text), zlib.crc32(text))

    def read_text(self, area: int) -> bytes:
        """A text; empty where there is none, or it is just being written."""
        start, size = _AREAS[area]
        length, checksum = _HEADER.unpack_from(self._memory, _HEADERS + area * _HEADER.size)
        text = bytes(self._memory[start : start + min(length, size)])
        return text if zlib.crc32(text) == checksum else b""


def room(area: int) -> int:
    """How many bytes a text may have."""
    return _AREAS[area][1]


class Page:
    """All slots, and for the agent which of them are free."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, SLOTS * _SIZE))
        # The one that was freed longest ago is taken first, in case a process that could not be watched to its end still writes.
        self._free = deque(range(SLOTS))

    def slot(self, number: int) -> Slot:
        return Slot(self._memory[number * _SIZE : (number + 1) * _SIZE])

    def take(self) -> int:
        """The number of a free slot, cleared, or `NO_SLOT`."""
        if not self._free:
            return NO_SLOT
        number = self._free.popleft()
        self.slot(number).clear()
        return number

    def give_back(self, number: int) -> None:
        if number != NO_SLOT:
            self._free.append(number)


_pages: list[Page] = []


def make_page() -> Page:
    """The page of this agent and of all that it forks from now on."""
    _pages[:] = [Page()]
    return _pages[0]


def inherited_page() -> Page | None:
    """The page that the agent above this process has made, or this agent itself."""
    return _pages[0] if _pages else None
