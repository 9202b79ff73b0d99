"""Copies between address spaces: all of the bytes or an error, whatever the pieces are."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from monarch_async._channel.cma import MAX_PIECES, Piece, move, read, write

SIZE = 3 << 20


def address_of(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@contextmanager
def copy_of_this_process() -> Iterator[int]:
    """A fork, which does nothing: what it has lies where it lies here."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def random_pieces(here: int, there: int, count: int) -> list[Piece]:
    """Pieces of many sizes, some of them empty, that cover all."""
    cuts = sorted([0, SIZE, *(random.Random(count).randrange(SIZE) for _ in range(count - 1))])
    return [(here + start, there + start, end - start) for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("count", [1, 2, MAX_PIECES, MAX_PIECES + 1, 3000])
def test_read_and_write(count: int) -> None:
    """Any number of pieces arrives, both ways."""
    content = random.Random(1).randbytes(SIZE)
    source, target = bytearray(content), bytearray(SIZE)
    with copy_of_this_process() as pid:
        source[:] = bytes(SIZE)
        read(pid, random_pieces(address_of(target), address_of(source), count))
        assert content == target
        target.reverse()
        write(pid, random_pieces(address_of(target), address_of(source), count))
        back = bytearray(SIZE)
        read(pid, [(address_of(back), address_of(source), SIZE)])
        assert content[::-1] == back
    assert not any(source)


def test_move() -> None:
    """The same within a process, for memory that overlaps too."""
    memory = bytearray(b"0123456789")
    base = address_of(memory)
    move([(base + 2, base, 5), (base, base + 8, 1)])
    assert b"8101234789" == memory


def test_memory_that_is_not_there() -> None:
    """EFAULT, even behind pieces that are there; nothing is said of success."""
    target, source = bytearray(100), bytearray(b"x" * 100)
    with copy_of_this_process() as pid:
        for pieces in ([(address_of(target), 16, 1)], [(address_of(target), address_of(source), 50), (address_of(target) + 50, 16, 50)]):
            with pytest.raises(OSError, match="Bad address") as caught:
                read(pid, pieces)
            assert errno.EFAULT == caught.value.errno
        with pytest.raises(OSError, match="Bad address"):
            write(pid, [(address_of(source), 16, 1)])


def test_a_process_that_is_not_there() -> None:
    """ESRCH."""
    with copy_of_this_process() as pid:
        pass
    target = bytearray(1)
    with pytest.raises(ProcessLookupError):
        read(pid, [(address_of(target), address_of(target), 1)])
    read(pid, [])
