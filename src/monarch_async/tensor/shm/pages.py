"""The segments of the members: a page of words, the ring for collectives, and a small ring for each other member.

Words are eight bytes, aligned, written by one process and read by others. They are read and written in one access each, which the
processors do in one piece.

Order of memory: who posts data writes it, then a counter; who reads sees the counter, then reads the data. x86 keeps the order of writes
and that of reads. Processors that do not (ARM) are covered by `fence`, which is called between the two on both sides: releasing and taking
a lock of the interpreter is a full barrier there, as on x86. That is also what keeps a member that lies down to sleep, and another one
that posts something, from missing each other: each writes its word, then `fence`, then reads the other's.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence

import torch

from monarch_async.peering import Segment, Window
from monarch_async.tensor.shm.schedule import DEPTH

__all__ = ["ANNOUNCED", "ANY", "ASLEEP", "LINE", "OUTSIDE", "SIGNATURE", "Layout", "Member", "Own", "fence", "move", "tensor_at", "until"]

LINE = 8  # words in a line of the cache
ANNOUNCED = 3 * LINE
"""The number of the last operation that this member has said it is in. Before it are the counters of the phases, each in a line of its
own."""
ASLEEP = 4 * LINE
"""0 while the member is awake; else what it waits for, as `until` makes it, or `ANY`. In one word, so that nobody sees half of it."""
ANY = -1
OUTSIDE = ANNOUNCED + 1
"""A word that nobody sets in a segment: in place of one, for what is waited for that is in none. Who has it rings the bell himself."""
_WORD_BITS = 20
_WORD_MASK = (1 << _WORD_BITS) - 1
VIEWS = 64
"""Tensors over a segment that are kept: to make one takes longer than to add a few kilobytes."""
_FIXED = 5 * LINE
SIGNATURE = 8
_PAGE = 4096

_lock = threading.Lock()
_lock.acquire()


def fence() -> None:
    """Order what was written and read before against what is afterwards."""
    _lock.release()
    _lock.acquire()


def until(word: int, value: int) -> int:
    """What a member waits for: that a word of others has at least this value."""
    return value << _WORD_BITS | word + 1


class Layout:
    """Where what is in a segment of a group of `size`, given the bytes of a block. Words are counted in words, the rest in bytes."""

    def __init__(self, size: int, block: int, small: int) -> None:
        self.size = size
        self.block = block
        self.small = small  # bytes of a slot in the ring for one other member
        self.result = block  # in a slot, where the result of this member's part is
        part = -(-block // size) + _PAGE
        self.slot = -(-(block + part) // _PAGE) * _PAGE
        self.sent = _FIXED  # per member: blocks put into its ring
        self.received = _FIXED + size * LINE  # per member: blocks taken out of its ring for this one
        self.to = _FIXED + 2 * size * LINE  # per member: the number, and twice the signature, of what is sent to it
        self.wanted = self.to + size * LINE  # the same, of what is wanted from it
        self.signatures = self.wanted + size * LINE  # two, each with the sizes for and from each member
        self.signature_words = -(-(SIGNATURE + 2 * size) // LINE) * LINE
        words = self.signatures + 2 * self.signature_words
        self.words = words
        self.data = -(-words * 8 // _PAGE) * _PAGE
        self.small_data = self.data + DEPTH * self.slot
        self.bytes = self.small_data + size * 2 * small

    def slot_at(self, count: int) -> int:
        """Where the block is that is the `count`-th since the group has met."""
        return self.data + count % DEPTH * self.slot

    def small_at(self, member: int, count: int) -> int:
        """Where the `count`-th block for one other member is."""
        return self.small_data + (2 * member + count % 2) * self.small

    def signature_at(self, number: int) -> int:
        return self.signatures + number % 2 * self.signature_words


class Member:
    """A member's segment, as this process sees it."""

    def __init__(self, memory: Segment | Window, layout: Layout, bell: int) -> None:
        self.memory = memory
        self.address: int = memory.address
        self.bell = bell  # an eventfd, closed with this
        self.words = memoryview((ctypes.c_longlong * layout.words).from_address(self.address)).cast("B").cast("q")
        self._size = layout.bytes
        if memory.size < layout.bytes:
            raise ValueError(f"a segment of {memory.size} bytes is no group's; one has {layout.bytes}")
        self._views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def view(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """Elements of the segment. `offset` in bytes, a multiple of the size of an element."""
        key = dtype, offset, count
        view = self._views.get(key)
        if view is None:
            memory = (ctypes.c_ubyte * self._size).from_address(self.address)
            if len(self._views) >= VIEWS:
                self._views.clear()
            view = self._views[key] = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return view

    def commit(self, offset: int, size: int) -> None:
        """See to it that a range of an own segment has its memory. Raises `OSError`."""
        assert isinstance(self.memory, Segment)
        self.memory.commit(offset, size)

    def open_reader(self) -> int:
        """A new descriptor of an own segment, for others. Raises `OSError`."""
        assert isinstance(self.memory, Segment)
        return self.memory.open_reader()

    def ring(self) -> None:
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """Look at it no more."""
        os.close(self.bell)
        self.words = memoryview(b"").cast("q")
        self._views.clear()
        del self.memory


class Own:
    """The segment of this process, and the others to be told of what changes in it."""

    def __init__(self, members: Sequence[Member], me: int) -> None:
        self.members = members
        self.me = me
        self.mine = members[me]
        self.words = self.mine.words
        self.others = [member for index, member in enumerate(members) if index != me]

    def post(self, word: int, value: int) -> None:
        """Set a word, after all that was written before, and wake those who sleep until it has that value."""
        _lock.release()
        _lock.acquire()
        self.words[word] = value
        _lock.release()
        _lock.acquire()
        for member in self.others:
            asleep = member.words[ASLEEP]
            if asleep and (asleep == ANY or (asleep & _WORD_MASK == word + 1 and value >= asleep >> _WORD_BITS)):
                os.eventfd_write(member.bell, 1)


def tensor_at(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as one that no mode of torch's knows: threads other than the caller's may write to it."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


Mover = Callable[[int, int, int], object]
move: Mover = ctypes.memmove
"""Copy: to where, from where, bytes. Lets other threads run meanwhile."""
