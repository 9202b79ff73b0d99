"""Copies in threads: cut and gathered, stopped, and never left running."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from monarch_async._channel.cma import Piece
from monarch_async._runtime import copying
from monarch_async._runtime.copying import INLINE_COPY, MORE, TWO_FROM, WAITED, Copier, joined, slices


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


def test_joined() -> None:
    """What lies side by side in both memories is one piece, and nothing else is."""
    parts = [[(100, 500, 10)], [(110, 510, 5), (115, 600, 5)], [(120, 605, 1), (90, 606, 10)]]
    assert [(100, 500, 15), (115, 600, 6), (90, 606, 10)] == joined(parts)
    assert [] == joined([])


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
        seen.extend((piece, threading.get_ident()) for piece in part)

    parts: list[list[Piece]] = [[(number, 0, TWO_FROM)] for number in range(20)]
    await copier.run(copy, parts, 2)
    copier.close()
    assert sorted(part[0] for part in parts) == sorted(piece for piece, _ in seen)
    assert 2 == len({thread for _, thread in seen} - {threading.get_ident()})


class _Clocks:
    """A thread that computes all the time, but for what it is told that it has waited."""

    def __init__(self) -> None:
        self.computed = self.waited = 0.0

    def monotonic(self) -> float:
        return self.computed + self.waited

    def thread_time(self) -> float:
        return self.computed


async def test_who_had_to_wait_takes_more_at_once(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one part again, once it has not had to, however long the copy took."""
    clocks = _Clocks()
    monkeypatch.setattr(copying, "time", clocks)
    taken: list[int] = []

    def copy(part: list[Piece]) -> None:
        taken.append(len(part))
        clocks.computed += 10 * WAITED
        clocks.waited += 2 * WAITED if len(taken) in (2, 3) else WAITED / 2

    await copier.run(copy, [[(number * 2 * TWO_FROM, 0, TWO_FROM)] for number in range(3 + 2 * MORE)], 1)
    copier.close()
    assert [1, 1, MORE, MORE, 1] == taken


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
