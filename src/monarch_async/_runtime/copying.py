"""Copies of memory that don't block the event loop: in threads, in slices, which can be stopped.

Little is copied at once. More goes to a thread, and much of it to two, in slices: a copy that is cancelled ends with the slice it is at,
and between two of them others that wait for the processor go first. Where others compute, a thread waits itself each time, for the
processor or for Python's lock (5 ms, if somebody computes in Python); so it takes more at once from then on, until it has not had to wait.
Whoever awaits one goes on only when no thread touches the memory any more, cancelled or not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from monarch_async._channel.cma import Piece
from monarch_async._channel.processors import give_way, keep_apart

__all__ = ["INLINE_COPY", "SLICE", "Copier", "joined", "run_all", "settle", "slices"]

T = TypeVar("T")

INLINE_COPY = 256 << 10
"""Up to so many bytes are copied on the loop: to wake a thread takes longer."""
SLICE = 3 << 20
"""Bytes between two looks whether to stop, or whether others wait: up to 0.6 ms."""
WAITED, MORE = 0.0045, 5
"""Who has waited for so many seconds in all for one slice takes so many at the next time."""
TWO_FROM = 16 << 20
"""From so many bytes on, two threads copy: one alone can't have all that the memory gives."""


def joined(parts: Iterable[Sequence[Piece]]) -> list[Piece]:
    """The pieces of several parts, those that follow one upon the other in both memories as one."""
    found: list[Piece] = []
    for part in parts:
        for here, there, size in part:
            if found and (here, there) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
                found[-1] = (*found[-1][:2], found[-1][2] + size)
            else:
                found.append((here, there, size))
    return found


def slices(pieces: Iterable[Piece], limit: int, count: int) -> Iterator[list[Piece]]:
    """The pieces cut and gathered: at most `limit` bytes and `count` pieces in each part."""
    part: list[Piece] = []
    room = limit
    for here, there, size in pieces:
        while size:
            taken = min(size, room)
            part.append((here, there, taken))
            here, there, size, room = here + taken, there + taken, size - taken, room - taken
            if not room or len(part) == count:
                yield part
                part, room = [], limit
    if part:
        yield part


class Copier:
    """The threads that copy for one runtime, started when first needed."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, copy: Callable[[list[Piece]], None], parts: Sequence[list[Piece]], threads: int) -> None:
        """Call `copy` for every part, or several together, in any order. Its first error is raised, once no other part is being copied."""
        total = sum(size for part in parts for _, _, size in part)
        if total <= INLINE_COPY:
            for part in parts:
                copy(part)
            return
        stop = threading.Event()
        rest = iter(parts)
        lock = threading.Lock()

        def work(index: int) -> None:
            keep_apart(index, count)
            many = 1
            while not stop.is_set():
                with lock:
                    taken = list(islice(rest, many))
                if not taken:
                    return
                began, computed = time.monotonic(), time.thread_time()
                try:
                    copy(taken[0] if many == 1 else joined(taken))
                except BaseException:
                    stop.set()
                    raise
                if many == 1:
                    give_way()
                waited = time.monotonic() - began - (time.thread_time() - computed)
                many = MORE if waited > WAITED else 1

        count = threads if total >= TWO_FROM and len(parts) > 1 else 1
        running = [self._start(partial(work, index)) for index in range(count)]
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            stop.set()
            await settle(running)
            raise
        for error in [future.exception() for future in running]:
            if error is not None:
                raise error

    async def do(self, work: Callable[[], T]) -> T:
        """Have a thread do anything else that is short; returns, or is cancelled, when it is done."""
        running = self._start(work)
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            await settle([running])
            raise
        return running.result()

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, "monarch_async copy")
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)


async def settle(running: Sequence[asyncio.Future[Any]]) -> None:
    """Until they have ended, however often that is cancelled: they end by themselves, soon."""
    while not all(future.done() for future in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            continue
    for future in running:
        if not future.cancelled():
            future.exception()


async def run_all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All at once. At the first error the others are cancelled, and awaited."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
