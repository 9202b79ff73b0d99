"""Copies in threads: cut and gathered, stopped, and never left running."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from monarch_async._channel.cma import Piece
from monarch_async._runtime.copying import INLINE_COPY, TWO_FROM, Copier, slices


def test_slices() -> None:
    """Every byte is in one part, in order; no part has more than it may of bytes, or of pieces."""
    pieces = [(1000, 2000, 25), (5000, 6000, 0), (5000, 6000, 3), (7000, 8000, 2), (9000, 9500, 10)]
    parts = list(slices(pieces, 10, 2))
    assert [
        [(1000, 2000, 10)],
        [(1010, 2010, 10)],
        [(1020, 2020, 5), (5000, 6000, 3)],
        [(7000, 8000, 2), (9000, 9500, 8)],
        [(9008, 9508, 2)],
    ] == parts
    assert [] == list(slices([], 10, 2))


BIG: list[list[Piece]] = [[(0, 0, TWO_FROM)] for _ in range(100)]


@pytest.fixture
def copier() -> Copier:
    return Copier()


async def test_a_little_is_copied_at_once(copier: Copier) -> None:
    """No thread takes part."""
    threads: list[int] = []
    await copier.run(lambda part: threads.append(threading.get_ident()), [[(0, 0, INLINE_COPY - 1)], [(0, 0, 1)]], 2)
    assert [threading.get_ident()] * 2 == threads
    assert copier._threads is None


async def test_two_threads_share_the_parts(copier: Copier) -> None:
    """Each part is copied once, by two at a time, and none of them is this thread."""
    both = threading.Barrier(2)
    seen: list[tuple[Piece, int]] = []

    def copy(part: list[Piece]) -> None:
        if part[0][0] < 2:
            both.wait(5.0)
        seen.append((part[0], threading.get_ident()))

    parts: list[list[Piece]] = [[(number, 0, TWO_FROM)] for number in range(20)]
    await copier.run(copy, parts, 2)
    copier.close()
    assert sorted(part[0] for part in parts) == sorted(piece for piece, _ in seen)
    assert 2 == len({thread for _, thread in seen} - {threading.get_ident()})


async def test_an_error_stops_the_others(copier: Copier) -> None:
    """The first error is raised when both threads have come to rest, long before the end."""
    running = 0
    copied = 0
    lock = threading.Lock()

    def copy(part: list[Piece]) -> None:
        nonlocal running, copied
        with lock:
            running += 1
            copied += 1
            fails = copied == 5
        time.sleep(0.001)  # as a copy would take
        with lock:
            running -= 1
        if fails:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await copier.run(copy, BIG, 2)
    assert 0 == running
    assert copied < len(BIG)
    copier.close()


async def test_cancelled_it_waits_for_its_threads(copier: Copier) -> None:
    """However often it is cancelled, it ends when the part that is being copied is done; and no other is begun."""
    go_on = threading.Event()
    begun: list[int] = []
    done: list[int] = []
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def copy(part: list[Piece]) -> None:
        begun.append(1)
        loop.call_soon_threadsafe(inside.set)
        go_on.wait(5.0)
        done.append(1)

    task = asyncio.create_task(copier.run(copy, BIG, 1))
    await inside.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (1, 1) == (len(begun), len(done))
    copier.close()
